"""Pickles read by an allow-list: globals are looked up in a table, never imported, and only functions of that table are
called.

Format: the opcodes as CPython's `pickletools` documents them (https://github.com/python/cpython/blob/main/Lib/pickletools.py),
protocols 2 to 5. Supported are those that build numbers, text, bytes, tuples, lists, sets and dicts, refer to the
memo, name a global, call it (REDUCE), set attributes (BUILD) and refer to a storage (BINPERSID). No checkpoint needs
the others, so they are refused: instances (INST, OBJ, NEWOBJ, NEWOBJ_EX), the extension registry (EXT1 to EXT4),
out-of-band buffers, frozen sets, the text forms of protocol 0, and opcodes that only recursive tuples need (POP,
POP_MARK, DUP).

Values are plain Python ones; a set becomes a list, since hashing values from a file can take for ever. Keys of
dicts are text or integers, without repetition. Bytes, stack, marks and memo each have a limit. Building never recurses,
so nesting costs nothing here; code that traverses the result must limit it. Independent of torch.
"""

from __future__ import annotations

import itertools
import pickletools
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rabbitllm.errors import CorruptShardError, UnsafePickleError

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


class CutOffError(Exception):
    """The pickle is truncated: the bytes or the stack ran out."""


@dataclass(frozen=True, slots=True)
class Known:
    """A known global: its name, and the function that stands for calling it, if it may be called."""

    name: str
    call: Callable[[tuple[Any, ...]], object] | None = None


class Attributed(dict[Any, object]):
    """A dict with attributes (`collections.OrderedDict`), which are read and dropped."""


@dataclass(slots=True)
class PickleMachine:
    """The state of reading one pickle."""

    data: bytes
    known: Mapping[tuple[str, str], Known]
    persistent: Callable[[object], object]
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def take(self, length: int) -> bytes:
        """The next `length` bytes."""
        taken = self.data[self.at : self.at + length]
        if len(taken) != length:
            raise CutOffError(f"wants {length:,} bytes, and {len(taken):,} are left")
        self.at += length
        return taken

    def number(self, layout: struct.Struct) -> int:
        begin = self.at
        self.at += layout.size
        if self.at > len(self.data):
            raise CutOffError(f"wants {layout.size} bytes, and {len(self.data) - begin} are left")
        value: int = layout.unpack_from(self.data, begin)[0]
        return value

    def line(self) -> str:
        """Text up to a newline."""
        end = self.data.find(b"\n", self.at, self.at + MAX_NAME + 1)
        if end < 0:
            if len(self.data) - self.at <= MAX_NAME:
                raise CutOffError("wants the rest of a name, and nothing is left")
            raise RefusedValueError(f"has a name that does not end within {MAX_NAME} bytes")
        text = self.take(end - self.at + 1)[:-1]
        return text.decode("utf-8")

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise CutOffError("finds nothing on the stack")
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            raise CutOffError("finds no mark on the stack")
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def top(self, kind: type, what: str) -> Any:
        value = self.pop()
        self.stack.append(value)
        if type(value) is not kind and not (kind is dict and type(value) is Attributed):
            raise RefusedValueError(f"works on {describe(value)}; expected {what}")
        return value


def describe(value: object) -> str:
    """A short description of any value; never traverses it."""
    if isinstance(value, Known):
        return f"the global {value.name}"
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        return f"the number {value}"  # of at most 32 bytes
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    if isinstance(value, tuple | list | dict | bytes):
        kind = "dict" if isinstance(value, dict) else type(value).__name__
        return f"a {kind} of {len(value):,}"
    return f"a {type(value).__name__}"


_U8, _U16, _U32, _U64, _I32 = (struct.Struct("<" + code) for code in "BHIQi")
_DOUBLE = struct.Struct(">d")


def _mark(machine: PickleMachine) -> None:
    if len(machine.marks) >= MAX_MARKS:
        raise RefusedValueError(f"opens more than {MAX_MARKS:,} structures in one another")
    machine.marks.append(len(machine.stack))


def _constant(value: object) -> Callable[[PickleMachine], None]:
    return lambda machine: _bounded_push(machine, value)


def _made(make: Callable[[], object]) -> Callable[[PickleMachine], None]:
    return lambda machine: _bounded_push(machine, make())


def _bounded_push(machine: PickleMachine, value: object) -> None:
    if len(machine.stack) >= MAX_STACK:
        raise RefusedValueError(f"puts more than {MAX_STACK:,} values on the stack")
    machine.stack.append(value)


def _integer(layout: struct.Struct) -> Callable[[PickleMachine], None]:
    return lambda machine: _bounded_push(machine, machine.number(layout))


def _long(layout: struct.Struct) -> Callable[[PickleMachine], None]:
    def step(machine: PickleMachine) -> None:
        length = machine.number(layout)
        if not 0 <= length <= MAX_NUMBER_BYTES:
            raise RefusedValueError(f"has a number of {length:,} bytes; at most {MAX_NUMBER_BYTES} are read")
        _bounded_push(machine, int.from_bytes(machine.take(length), "little", signed=True))

    return step


def _float(machine: PickleMachine) -> None:
    _bounded_push(machine, _DOUBLE.unpack(machine.take(8))[0])


def _text(layout: struct.Struct) -> Callable[[PickleMachine], None]:
    return lambda machine: _bounded_push(machine, _sized(machine, layout).decode("utf-8"))


def _bytes(layout: struct.Struct) -> Callable[[PickleMachine], None]:
    return lambda machine: _bounded_push(machine, _sized(machine, layout))


def _sized(machine: PickleMachine, layout: struct.Struct) -> bytes:
    return machine.take(machine.number(layout))


def _tuple(length: int) -> Callable[[PickleMachine], None]:
    def step(machine: PickleMachine) -> None:
        items = [machine.pop() for _ in range(length)]
        machine.push(tuple(reversed(items)))

    return step


def _tuple_of_marked(machine: PickleMachine) -> None:
    machine.push(tuple(machine.pop_mark()))


def _append(machine: PickleMachine) -> None:
    item = machine.pop()
    machine.top(list, "a list").append(item)


def _extend(machine: PickleMachine) -> None:
    items = machine.pop_mark()
    machine.top(list, "a list or a set").extend(items)


def _set_item(machine: PickleMachine) -> None:
    value, key = machine.pop(), machine.pop()
    _store(machine.top(dict, "a dict"), key, value)


def _set_items(machine: PickleMachine) -> None:
    items = machine.pop_mark()
    table = machine.top(dict, "a dict")
    if len(items) % 2:
        raise RefusedValueError("has a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        _store(table, key, value)


def _store(table: dict[Any, object], key: object, value: object) -> None:
    # hashing traverses a tuple, for ever if a file wants it; wide numbers can be made to collide
    if type(key) is not str and not (type(key) is int and -(1 << 63) <= key < 1 << 63):
        raise RefusedValueError(f"has {describe(key)} as a key; expected text or a number of 64 bits")
    if key in table:
        raise RefusedValueError(f"has the key {key[:80] if isinstance(key, str) else key!r} twice")
    table[key] = value


def _put(layout: struct.Struct | None) -> Callable[[PickleMachine], None]:
    def step(machine: PickleMachine) -> None:
        number = len(machine.memo) if layout is None else machine.number(layout)
        if len(machine.memo) >= MAX_MEMO:
            raise RefusedValueError(f"keeps more than {MAX_MEMO:,} values in the memo")
        value = machine.pop()
        machine.push(value)
        machine.memo[number] = value

    return step


def _get(layout: struct.Struct) -> Callable[[PickleMachine], None]:
    def step(machine: PickleMachine) -> None:
        number = machine.number(layout)
        if number not in machine.memo:
            raise CutOffError(f"asks for value {number:,} of the memo, which is not there")
        _bounded_push(machine, machine.memo[number])

    return step


def _global(machine: PickleMachine) -> None:
    _look_up(machine, machine.line(), machine.line())


def _stack_global(machine: PickleMachine) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        raise RefusedValueError(f"names a global by {describe(module)} and {describe(name)}")
    _look_up(machine, module, name)


def _look_up(machine: PickleMachine, module: str, name: str) -> None:
    found = machine.known.get((module, name))
    if found is None:
        raise RefusedValueError(f"names the global {module[:MAX_NAME]!r} {name[:MAX_NAME]!r}, which is not on the list")
    _bounded_push(machine, found)


def _reduce(machine: PickleMachine) -> None:
    arguments, function = machine.pop(), machine.pop()
    if not isinstance(function, Known) or function.call is None:
        raise RefusedValueError(f"calls {describe(function)}, which cannot be called")
    if type(arguments) is not tuple:
        raise RefusedValueError(f"calls {function.name} with {describe(arguments)}; expected a tuple")
    try:
        machine.push(function.call(arguments))
    except RefusedValueError as refusal:
        raise RefusedValueError(f"calls {function.name}, which {refusal}") from None


def _build(machine: PickleMachine) -> None:
    state = machine.pop()
    machine.top(Attributed, "an OrderedDict")
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise RefusedValueError(f"sets {describe(state)} as attributes; expected a dict of text")


def _persistent(machine: PickleMachine) -> None:
    machine.push(machine.persistent(machine.pop()))


def _frame(machine: PickleMachine) -> None:
    length = machine.number(_U64)
    if length > len(machine.data) - machine.at:
        raise CutOffError(f"announces {length:,} bytes, and {len(machine.data) - machine.at:,} are left")


_BY_NAME: dict[str, Callable[[PickleMachine], None]] = {
    "MARK": _mark,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": _made(list),
    "EMPTY_SET": _made(list),
    "EMPTY_DICT": _made(dict),
    "BININT": _integer(_I32),
    "BININT1": _integer(_U8),
    "BININT2": _integer(_U16),
    "LONG1": _long(_U8),
    "LONG4": _long(_I32),
    "BINFLOAT": _float,
    "SHORT_BINUNICODE": _text(_U8),
    "BINUNICODE": _text(_U32),
    "BINUNICODE8": _text(_U64),
    "SHORT_BINSTRING": _text(_U8),
    "SHORT_BINBYTES": _bytes(_U8),
    "BINBYTES": _bytes(_U32),
    "BINBYTES8": _bytes(_U64),
    "BYTEARRAY8": _bytes(_U64),
    "TUPLE": _tuple_of_marked,
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "APPEND": _append,
    "APPENDS": _extend,
    "ADDITEMS": _extend,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "BINPUT": _put(_U8),
    "LONG_BINPUT": _put(_U32),
    "MEMOIZE": _put(None),
    "BINGET": _get(_U8),
    "LONG_BINGET": _get(_U32),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
    "BINPERSID": _persistent,
    "FRAME": _frame,
}
STEPS: dict[int, Callable[[PickleMachine], None]] = {
    ord(op.code): _BY_NAME[op.name] for op in pickletools.opcodes if op.name in _BY_NAME
}
"""Steps by opcode; PROTO and STOP, which begin and end every pickle, are handled by the reader."""


MAX_PICKLE_BYTES = 32 << 20
MAX_OPCODES = 1_000_000
"""Limit of opcodes. A tensor takes about 35."""
MAX_LISTED = 1_000_000
MAX_ARGUMENT = 80
"""Limit of the characters of an opcode's argument in a listing."""
_PROTO, _STOP = 0x80, ord(".")

_REMEDY = (
    "Nothing of it was run. If you trust the file's author, load it with torch where it can do no harm and save "
    "its tensors as safetensors; if you do not, delete it."
)


def read_pickle(
    data: bytes, known: Mapping[tuple[str, str], Known], persistent: Callable[[object], object], file: str
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
    value, _ = _read(data, 0, known, persistent, file, alone=True)
    return value


def read_leading_pickle(
    data: bytes,
    begin: int,
    known: Mapping[tuple[str, str], Known],
    persistent: Callable[[object], object],
    file: str,
) -> tuple[object, int]:
    """The value of a pickle that begins at byte `begin`, and the offset of the bytes after it.

    Args and errors: see `read_pickle`. A pickle that continues beyond the end of `data` is a CorruptShardError.
    """
    return _read(data, begin, known, persistent, file, alone=False)


def _read(
    data: bytes,
    at: int,
    known: Mapping[tuple[str, str], Known],
    persistent: Callable[[object], object],
    file: str,
    *,
    alone: bool,
) -> tuple[object, int]:
    _check_size(data, file)
    machine = PickleMachine(data, known, persistent, at)
    begin, opcode = at, -1
    try:
        _start(machine)
        for _ in range(MAX_OPCODES):
            begin = machine.at
            opcode = machine.take(1)[0]
            if opcode == _STOP:
                return _finish(machine, alone=alone), machine.at
            step = STEPS.get(opcode)
            if step is None:
                raise RefusedValueError("is not among the opcodes that are read")
            step(machine)
        raise RefusedValueError(f"is one more than the {MAX_OPCODES:,} opcodes that are read")
    except RefusedValueError as refusal:
        raise UnsafePickleError(
            f"The pickle of {file} is refused at byte {begin:,}: {_opcode_name(opcode)} {refusal}.", _REMEDY
        ) from None
    except (CutOffError, UnicodeDecodeError) as error:
        raise CorruptShardError(
            f"The pickle of {file} is not sound at byte {begin:,}: {_opcode_name(opcode)} {error}.",
            "Fetch or copy the file again.",
        ) from None


@dataclass(frozen=True, slots=True)
class ListedOpcode:
    """One opcode of a listing: its byte offset, its name, and its argument as shortened text."""

    position: int
    name: str
    argument: str


def list_opcodes(data: bytes, file: str, most: int = MAX_LISTED) -> Iterator[ListedOpcode]:
    """The opcodes of any pickle up to its STOP, including refused ones, for people to look at. Runs nothing.

    Args:
        data: the whole pickle; at most `MAX_PICKLE_BYTES`.
        file: name for messages.
        most: limit of opcodes.

    Raises:
        UnsafePickleError: the pickle is too large.
        CorruptShardError: the bytes stop being a pickle; the opcodes before have been yielded.
    """
    _check_size(data, file)
    listing = pickletools.genops(data)
    position = 0
    try:
        for opcode, argument, at in itertools.islice(listing, most):
            position = at or 0
            yield ListedOpcode(position, opcode.name, _shortened(argument))
    except (ValueError, OverflowError) as error:
        raise CorruptShardError(
            f"The pickle of {file} cannot be listed beyond byte {position:,}: {str(error)[:200]}.",
            "Fetch or copy the file again.",
        ) from None


def _shortened(argument: object) -> str:
    if argument is None:
        return ""
    if isinstance(argument, int) and argument.bit_length() > 8 * MAX_NUMBER_BYTES:
        return f"a number of {argument.bit_length():,} bits"
    text = repr(argument[: MAX_ARGUMENT + 1] if isinstance(argument, str | bytes | bytearray) else argument)
    return text if len(text) <= MAX_ARGUMENT else text[: MAX_ARGUMENT - 3] + "..."


def _check_size(data: bytes, file: str) -> None:
    if len(data) > MAX_PICKLE_BYTES:
        raise UnsafePickleError(
            f"The pickle of {file} has {len(data):,} bytes; at most {MAX_PICKLE_BYTES:,} are read.", _REMEDY
        )


def _opcode_name(code: int) -> str:
    """The name of an opcode in `pickletools`, or its number."""
    known = next((op.name for op in pickletools.opcodes if op.code == chr(code)), None) if code >= 0 else None
    return known if known else (f"opcode {code:#04x}" if code >= 0 else "its beginning")


def _start(machine: PickleMachine) -> None:
    head = machine.take(2)
    if head[0] != _PROTO or not 2 <= head[1] <= 5:
        raise RefusedValueError(f"is {head!r}; expected protocol 2, 3, 4 or 5")


def _finish(machine: PickleMachine, *, alone: bool) -> object:
    value = machine.pop()
    if machine.stack or machine.marks:
        raise RefusedValueError(f"leaves {len(machine.stack):,} values on the stack")
    if alone and machine.at != len(machine.data):
        raise RefusedValueError(f"is followed by {len(machine.data) - machine.at:,} bytes")
    return value
