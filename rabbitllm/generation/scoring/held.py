"""Which tensors a waiting greenlet holds: those in the arguments of its call, and those in the frames of its functions.

A frame keeps a variable until its function returns, even if it is not read again: transformers' models keep their input
embeddings in this way for the whole pass, as large as the hidden states. A variable counts as read again if it is
loaded by an instruction that may still run, or by one in the expression that is being evaluated (its value may be on
the frame's stack). If line numbers do not suffice to decide this, all variables count.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any

import torch

OUR_OWN = "rabbitllm."
"""Prefix of the modules whose frames are skipped."""


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """The storages that a greenlet holds.

    Attributes:
        needed: storages that it may read when it continues.
        idle: storages that are held only by variables that are not read again.
    """

    needed: tuple[torch.UntypedStorage, ...]
    idle: tuple[torch.UntypedStorage, ...]


def held(frame: FrameType | None, waits_with: object, least_bytes: int) -> HeldTensors:
    """The storages held by a waiting function and its callers.

    Args:
        frame: the innermost frame.
        waits_with: arguments of its call, which it needs when it continues.
        least_bytes: minimum size of a storage that counts.
    """
    needed, idle = _Found(least_bytes), _Found(least_bytes)
    needed.look_at([waits_with])
    while frame is not None:
        # functions of this package hold long lists and no large tensors
        if frame.f_code.co_flags & CO_OPTIMIZED and not frame.f_globals.get("__name__", "").startswith(OUR_OWN):
            names = read_again(frame.f_code, frame.f_lasti)
            found = frame.f_locals
            needed.look_at([value for name, value in found.items() if name in names])
            idle.look_at([value for name, value in found.items() if name not in names])
            if type(found) is dict:  # before Python 3.13 a copy, which the frame would keep together with its values
                found.clear()
        frame = frame.f_back
    unneeded = (one for key, one in idle.storages.items() if key not in needed.storages)
    return HeldTensors(tuple(needed.storages.values()), tuple(unneeded))


@lru_cache(maxsize=1024)
def read_again(code: CodeType, last: int) -> frozenset[str]:
    """Variables that a function may read after an instruction.

    Args:
        code: code of the function.
        last: offset of the instruction or of one of its cache entries.
    """
    names = frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))
    instructions = list(dis.get_instructions(code))
    lines = [one.positions for one in instructions]
    current = max((one for one in instructions if one.offset <= last), key=lambda one: one.offset)
    last, now = current.offset, current.positions
    if "locals" in code.co_names or now is None or now.lineno is None or not all(map(_is_known, lines)):
        return names
    begin = last
    for one in instructions:
        if one.offset > last and one.opcode in dis.hasjrel and isinstance(one.argval, int):
            begin = min(begin, one.argval)  # back to the beginning of a loop, or out of a handler
    around = [
        p.lineno
        for one, p in zip(instructions, lines, strict=True)
        if one.offset >= last and p and p.lineno and p.end_lineno and p.lineno <= now.lineno <= p.end_lineno
    ]
    line = min(around, default=now.lineno)
    loaded = {
        name
        for one, p in zip(instructions, lines, strict=True)
        if one.offset >= begin or (p and p.lineno and p.lineno >= line)
        for name in _loaded(one)
    }
    return frozenset(loaded) | frozenset((*code.co_cellvars, *code.co_freevars))


def _is_known(positions: dis.Positions | None) -> bool:
    """Whether the end of an instruction in the source is known, if it has a line at all."""
    return positions is None or positions.lineno is None or positions.end_lineno is not None


def _loaded(instruction: dis.Instruction) -> Iterator[str]:
    if "LOAD_FAST" in instruction.opname:
        names = instruction.argval
        yield from names if isinstance(names, tuple) else (names,)


class _Found:
    """Storages of tensors, also of those in containers; each container is searched once.

    Args:
        least_bytes: minimum size of a storage that counts.
    """

    def __init__(self, least_bytes: int) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._least_bytes = least_bytes
        self._seen: set[int] = set()

    def look_at(self, values: list[Any]) -> None:
        """Add the storages in values, which must not change while this object is used."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage.nbytes() >= self._least_bytes and storage.resizable():
                    self.storages[storage._cdata] = storage
            elif isinstance(value, tuple | list | dict) and id(value) not in self._seen:
                self._seen.add(id(value))
                waiting += value.values() if isinstance(value, dict) else value
