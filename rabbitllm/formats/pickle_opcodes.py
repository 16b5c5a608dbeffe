"""The supported opcodes of a pickle, each as a step of the machine. All others are refused.

Left out on purpose: instances (INST, OBJ, NEWOBJ, NEWOBJ_EX), the extension registry (EXT1 to EXT4), out-of-band
buffers, frozen sets, the text forms of protocol 0, and opcodes that only recursive tuples need (POP, POP_MARK, DUP).
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any

from rabbitllm.formats.pickle_machine import (
    MAX_MARKS,
    MAX_MEMO,
    MAX_NAME,
    MAX_NUMBER_BYTES,
    MAX_STACK,
    Attributed,
    CutOffError,
    Known,
    PickleMachine,
    RefusedValueError,
    describe,
)

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
