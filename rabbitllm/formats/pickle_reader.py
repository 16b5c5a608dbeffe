"""Pickles read by an allow-list: globals are looked up in a table, never imported, and only functions of that table are
called.

Format: the opcodes as CPython's `pickletools` documents them (https://github.com/python/cpython/blob/main/Lib/pickletools.py),
protocols 2 to 5. Supported are those that build numbers, text, bytes, tuples, lists, sets and dicts, refer to the
memo, name a global, call it (REDUCE), set attributes (BUILD) and refer to a storage (BINPERSID). No checkpoint needs
the others (instances, the extension registry, out-of-band buffers, protocol 0's text forms), so they are refused.

Values are plain Python ones; a set becomes a list, since hashing values from a file can take for ever. Keys of
dicts are text or integers, without repetition. Building never recurses, so nesting costs nothing here; code that
traverses the result must limit it. Independent of torch.
"""

from __future__ import annotations

import itertools
import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rabbitllm.errors import CorruptShardError, UnsafePickleError
from rabbitllm.formats.pickle_machine import MAX_NUMBER_BYTES, CutOffError, Known, PickleMachine, RefusedValueError
from rabbitllm.formats.pickle_opcodes import STEPS

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
