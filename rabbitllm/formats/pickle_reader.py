"""Pickles read by an allow-list: globals are looked up in a table, never imported, and only functions of that table are
called.

Format: the opcodes as CPython's `pickletools` documents them (https://github.com/python/cpython/blob/main/Lib/pickletools.py),
protocols 2 to 5. Supported are those that build numbers, text, bytes, tuples, lists, sets and dicts, refer to the
memo, name a global, call it (REDUCE), set attributes (BUILD) and refer to a storage (BINPERSID). No checkpoint needs
the others, so they are refused unread: instances (INST, OBJ, NEWOBJ, NEWOBJ_EX), the extension registry (EXT1 to EXT4),
out-of-band buffers, frozen sets, the text forms of protocol 0, and opcodes that only recursive tuples need (POP,
POP_MARK, DUP).

Values are plain Python ones; a set becomes a list, since hashing values from a file can take forever. Keys of
dicts are text or integers, without repetition. Bytes, stack, marks and memo each have a limit; arguments of opcodes are
read by `pickletools`, from a stream that holds no more than the file. Building never recurses,
so nesting costs nothing here; code that traverses the result must limit it. Independent of torch.
"""

from __future__ import annotations

import io
import itertools
import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rabbitllm.errors import CorruptShardError, UnsafePickleError
from rabbitllm.formats.bounded import COPY_AGAIN, short

MAX_MEMO = 500_000
"""Limit of memo entries. A tensor takes about 12."""
MAX_STACK = 200_000
MAX_MARKS = 1_000
"""Limit of open marks, which is the recursion limit of a pickler."""
MAX_NUMBER_BYTES = 32
MAX_NAME = 200
"""Limit of the characters of a global's module or name."""


class RefusedValueError(ValueError):
    """Raised by a table's function for an argument that it does not accept; the message does not name the file."""


@dataclass(frozen=True, slots=True)
class Global:
    """A known global: its name, and the function that stands for calling it, if it may be called."""

    name: str
    call: Callable[[tuple[Any, ...]], object] | None = None


class Attributed(dict[Any, object]):
    """A dict with attributes (`collections.OrderedDict`), which are read and dropped."""


@dataclass(slots=True)
class PickleMachine:
    """The state of reading one pickle."""

    stream: io.BytesIO
    size: int
    known: Mapping[tuple[str, str], Global]
    persistent: Callable[[object], object]
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def left(self) -> int:
        """Bytes after the current position."""
        return self.size - self.stream.tell()

    def push(self, value: object) -> None:
        if len(self.stack) >= MAX_STACK:
            raise RefusedValueError(f"puts more than {MAX_STACK:,} values on the stack")
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError("finds nothing on the stack")
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("finds no mark on the stack")
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def top(self, expected_type: type, expected: str) -> Any:
        value = self.pop()
        self.stack.append(value)
        if type(value) is not expected_type and not (expected_type is dict and type(value) is Attributed):
            raise RefusedValueError(f"works on {describe(value)}; expected {expected}")
        return value


def describe(value: object) -> str:
    """A short description of any value; never traverses it."""
    if isinstance(value, Global):
        return f"the global {value.name}"
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        return f"the number {value}"  # of at most 32 bytes
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    if isinstance(value, tuple | list | dict | bytes):
        type_name = "dict" if isinstance(value, dict) else type(value).__name__
        return f"a {type_name} of {len(value):,}"
    return f"a {type(value).__name__}"


Step = Callable[[PickleMachine, Any], None]
"""The effect of an opcode, given its argument; None if it has none."""


def _mark(machine: PickleMachine, _: None) -> None:
    if len(machine.marks) >= MAX_MARKS:
        raise RefusedValueError(f"opens more than {MAX_MARKS:,} structures in one another")
    machine.marks.append(len(machine.stack))


def _push(make: Callable[[Any], object]) -> Step:
    """A step that converts its argument and pushes it."""
    return lambda machine, argument: machine.push(make(argument))


def _narrow(number: int) -> int:
    if number.bit_length() > 8 * MAX_NUMBER_BYTES:
        raise RefusedValueError(
            f"has a number of {number.bit_length():,} bits; at most {MAX_NUMBER_BYTES} bytes are read"
        )
    return number


def _text(text: str) -> str:
    text.encode()  # raises an error for unpaired surrogates
    return text


def _tuple(length: int) -> Step:
    return lambda machine, _: machine.push(tuple(reversed([machine.pop() for _ in range(length)])))


def _append(machine: PickleMachine, _: None) -> None:
    item = machine.pop()
    machine.top(list, "a list").append(item)


def _extend(machine: PickleMachine, _: None) -> None:
    items = machine.pop_mark()
    machine.top(list, "a list or a set").extend(items)


def _set_item(machine: PickleMachine, _: None) -> None:
    value, key = machine.pop(), machine.pop()
    _store(machine.top(dict, "a dict"), key, value)


def _set_items(machine: PickleMachine, _: None) -> None:
    items = machine.pop_mark()
    table = machine.top(dict, "a dict")
    if len(items) % 2:
        raise RefusedValueError("has a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        _store(table, key, value)


def _store(table: dict[Any, object], key: object, value: object) -> None:
    # hashing traverses a tuple, which may never end; wide numbers can be made to collide
    if type(key) is not str and not (type(key) is int and -(1 << 63) <= key < 1 << 63):
        raise RefusedValueError(f"has {describe(key)} as a key; expected text or a number of 64 bits")
    if key in table:
        raise RefusedValueError(f"has the key {key[:80] if isinstance(key, str) else key!r} twice")
    table[key] = value


def _put(machine: PickleMachine, index: int | None) -> None:
    if len(machine.memo) >= MAX_MEMO:
        raise RefusedValueError(f"stores more than {MAX_MEMO:,} values in the memo")
    value = machine.pop()
    machine.push(value)
    machine.memo[len(machine.memo) if index is None else index] = value


def _get(machine: PickleMachine, index: int) -> None:
    if index not in machine.memo:
        raise ValueError(f"asks for value {index:,} of the memo, which does not exist")
    machine.push(machine.memo[index])


def _global(machine: PickleMachine, _: None) -> None:
    lines = [machine.stream.readline(MAX_NAME + 1) for _ in range(2)]
    if not all(line.endswith(b"\n") for line in lines):
        if not machine.left():
            raise ValueError("ends inside a name")
        raise RefusedValueError(f"has a name that does not end within {MAX_NAME} bytes")
    _look_up(machine, *(line[:-1].decode() for line in lines))


def _stack_global(machine: PickleMachine, _: None) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        raise RefusedValueError(f"names a global by {describe(module)} and {describe(name)}")
    _look_up(machine, module, name)


def _look_up(machine: PickleMachine, module: str, name: str) -> None:
    entry = machine.known.get((module, name))
    if entry is None:
        raise RefusedValueError(f"names the global {module[:MAX_NAME]!r} {name[:MAX_NAME]!r}, which is not on the list")
    machine.push(entry)


def _reduce(machine: PickleMachine, _: None) -> None:
    arguments, function = machine.pop(), machine.pop()
    if not isinstance(function, Global) or function.call is None:
        raise RefusedValueError(f"calls {describe(function)}, which cannot be called")
    if type(arguments) is not tuple:
        raise RefusedValueError(f"calls {function.name} with {describe(arguments)}; expected a tuple")
    try:
        machine.push(function.call(arguments))
    except RefusedValueError as refusal:
        raise RefusedValueError(f"calls {function.name}, which {refusal}") from None


def _build(machine: PickleMachine, _: None) -> None:
    state = machine.pop()
    machine.top(Attributed, "an OrderedDict")
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise RefusedValueError(f"sets {describe(state)} as attributes; expected a dict of text")


def _frame(machine: PickleMachine, length: int) -> None:
    if length > machine.left():
        raise ValueError(f"needs {length:,} bytes; {machine.left():,} remain")


_UNCHANGED = _push(lambda argument: argument)
_BY_NAME: dict[str, Step] = {
    "MARK": _mark,
    "NONE": _push(lambda _: None),
    "NEWTRUE": _push(lambda _: True),
    "NEWFALSE": _push(lambda _: False),
    "EMPTY_TUPLE": _push(lambda _: ()),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), _push(lambda _: [])),
    "EMPTY_DICT": _push(lambda _: {}),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT"), _UNCHANGED),
    **dict.fromkeys(("LONG1", "LONG4"), _push(_narrow)),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _push(_text)),
    "SHORT_BINSTRING": _push(lambda text: text.encode("latin-1").decode()),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _UNCHANGED),
    "BYTEARRAY8": _push(bytes),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_mark())),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "APPEND": _append,
    **dict.fromkeys(("APPENDS", "ADDITEMS"), _extend),
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _get),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
    "BINPERSID": lambda machine, _: machine.push(machine.persistent(machine.pop())),
    "FRAME": _frame,
}


def _no_argument(_: io.BytesIO) -> None:
    """GLOBAL reads its own: `pickletools` reads lines of any length, and escapes that no pickler writes."""


_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
STEPS: dict[int, tuple[Callable[[io.BytesIO], Any], Step]] = {
    code: (_no_argument if opcode.arg is None or opcode.name == "GLOBAL" else opcode.arg.reader, _BY_NAME[opcode.name])
    for code, opcode in _OPCODES.items()
    if opcode.name in _BY_NAME
}
"""Readers of the argument and steps by opcode; PROTO and STOP, which begin and end every pickle, are handled by the
reader."""


MAX_PICKLE_BYTES = 32 << 20
MAX_OPCODES = 1_000_000
"""Limit of opcodes. A tensor takes about 35."""
MAX_LISTED = 1_000_000
"""Limit of opcodes in a listing."""
MAX_ARGUMENT = 80
"""Limit of the characters of an opcode's argument in a listing."""
_PROTO, _STOP = 0x80, b"."

_REMEDY = (
    "Nothing of it was run. If you trust the file's author, load it with torch where it can do no harm and save "
    "its tensors as safetensors; if you do not, delete it."
)


def read_pickle(
    data: bytes, known: Mapping[tuple[str, str], Global], persistent: Callable[[object], object], file: str
) -> object:
    """The value that a pickle describes.

    Args:
        data: the whole pickle; at most `MAX_PICKLE_BYTES`.
        known: the globals that it may name, by module and name.
        persistent: converts a persistent id; raises RefusedValueError for an unknown one.
        file: name for messages.

    Raises:
        UnsafePickleError: an opcode, a global or a value that is not allowed, or a limit exceeded; with its name and
            byte position.
        CorruptShardError: the bytes are truncated, or not a pickle.
    """
    value, end = read_leading_pickle(data, 0, known, persistent, file)
    if end != len(data):
        raise _refused(file, end - 1, f"STOP is followed by {len(data) - end:,} bytes")
    return value


def read_leading_pickle(
    data: bytes, start: int, known: Mapping[tuple[str, str], Global], persistent: Callable[[object], object], file: str
) -> tuple[object, int]:
    """The value of a pickle that begins at byte `start`, and the offset of the bytes after it; see `read_pickle`.

    Raises:
        CorruptShardError: also if the pickle continues beyond the end of `data`.
    """
    _check_size(data, file)
    stream = io.BytesIO(data)
    stream.seek(start)
    machine = PickleMachine(stream, len(data), known, persistent)
    begin, name = start, "its beginning"
    try:
        head = stream.read(2)
        if len(head) < 2:
            raise ValueError(f"needs 2 bytes; {len(head)} remain")
        if head[0] != _PROTO or not 2 <= head[1] <= 5:
            raise RefusedValueError(f"is {head!r}; expected protocol 2, 3, 4 or 5")
        for _ in range(MAX_OPCODES):
            begin = stream.tell()
            code = stream.read(1)
            name = _opcode_name(code)
            if code == _STOP:
                return _finish(machine), stream.tell()
            if not code:
                raise ValueError("comes before a STOP")
            if code[0] not in STEPS:
                raise RefusedValueError("is not an opcode that is read")
            read_argument, step = STEPS[code[0]]
            step(machine, read_argument(stream))
        raise RefusedValueError(f"exceeds the limit of {MAX_OPCODES:,} opcodes")
    except RefusedValueError as refusal:
        raise _refused(file, begin, f"{name} {refusal}") from None
    except ValueError as error:
        problem = f"The pickle of {file} is invalid at byte {begin:,}: {name} {error}."
        raise CorruptShardError(problem, COPY_AGAIN) from None


@dataclass(frozen=True, slots=True)
class ListedOpcode:
    """One opcode of a listing: its byte offset, the number of open marks, its name, and its argument, shortened."""

    position: int
    depth: int
    name: str
    argument: str


_CLOSES = {*("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS", "ADDITEMS", "FROZENSET", "INST", "OBJ", "POP_MARK")}
"""Opcodes that take everything since the last mark."""


def list_opcodes(data: bytes, file: str, begin: int = 0) -> Iterator[ListedOpcode]:
    """The opcodes of any pickle up to its STOP, including refused ones, for people to look at. Runs nothing.

    Args:
        data: the whole pickle; at most `MAX_PICKLE_BYTES`.
        file: name for messages.
        begin: offset of the pickle in the file.

    Raises:
        UnsafePickleError: the pickle is too large.
        CorruptShardError: the bytes stop being a pickle; the opcodes before have been yielded.
    """
    _check_size(data, file)
    listing = pickletools.genops(data)
    position = depth = 0
    try:
        for opcode, argument, offset in itertools.islice(listing, MAX_LISTED):
            position = offset or 0
            depth -= depth > 0 and opcode.name in _CLOSES
            yield ListedOpcode(begin + position, depth, opcode.name, _shortened(argument))
            depth += opcode.name == "MARK"
    except (ValueError, OverflowError) as error:
        raise CorruptShardError(
            f"The pickle of {file} cannot be listed beyond byte {position:,}: {str(error)[:200]}.", COPY_AGAIN
        ) from None


def _shortened(argument: object) -> str:
    if argument is None:
        return ""
    if isinstance(argument, int) and argument.bit_length() > 8 * MAX_NUMBER_BYTES:
        return f"a number of {argument.bit_length():,} bits"
    return short(
        argument[: MAX_ARGUMENT + 1] if isinstance(argument, str | bytes | bytearray) else argument, MAX_ARGUMENT
    )


def _refused(file: str, position: int, why: str) -> UnsafePickleError:
    return UnsafePickleError(f"The pickle of {file} is refused at byte {position:,}: {why}.", _REMEDY)


def _check_size(data: bytes, file: str) -> None:
    if len(data) > MAX_PICKLE_BYTES:
        raise UnsafePickleError(
            f"The pickle of {file} has {len(data):,} bytes; at most {MAX_PICKLE_BYTES:,} are read.", _REMEDY
        )


def _opcode_name(code: bytes) -> str:
    """The name of an opcode in messages."""
    return _OPCODES[code[0]].name if code and code[0] in _OPCODES else f"opcode 0x{code.hex()}" if code else "its end"


def _finish(machine: PickleMachine) -> object:
    value = machine.pop()
    if machine.stack or machine.marks:
        raise RefusedValueError(f"leaves {len(machine.stack):,} values on the stack")
    return value
