"""Which tensors a greenlet holds while it waits: those it waits with, and those in the frames of its functions.

A frame keeps a variable until its function returns, whether or not it is read again: transformers' models keep their
input embeddings so for the whole pass, as large as the hidden states. A variable is taken to be read again if an
instruction loads it that may still come, or that stands in the expression whose value is just being computed (its
value may lie on the frame's stack). Where the line numbers say too little to know, all variables are.
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
"""Modules whose frames are not looked into."""


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """What a greenlet holds.

    Attributes:
        needed: storages that it reads when it goes on, or may.
        idle: those that only variables hold that are not read again.
    """

    needed: tuple[torch.UntypedStorage, ...]
    idle: tuple[torch.UntypedStorage, ...]


def held(frame: FrameType | None, waits_with: object, least_bytes: int) -> HeldTensors:
    """What is held by a function that waits, and by those that called it.

    Args:
        frame: the innermost one.
        waits_with: what it was given, and gets back when it goes on.
        least_bytes: of a storage that counts.
    """
    needed, idle = _Found(least_bytes), _Found(least_bytes)
    needed.look_at([waits_with])
    while frame is not None:
        # our own functions hold long lists and no large tensors
        if frame.f_code.co_flags & CO_OPTIMIZED and not frame.f_globals.get("__name__", "").startswith(OUR_OWN):
            names = read_again(frame.f_code, frame.f_lasti)
            found = frame.f_locals
            needed.look_at([value for name, value in found.items() if name in names])
            idle.look_at([value for name, value in found.items() if name not in names])
            if type(found) is dict:  # before Python 3.13 a copy, which the frame would keep with all that is in it
                found.clear()
        frame = frame.f_back
    unneeded = (one for key, one in idle.storages.items() if key not in needed.storages)
    return HeldTensors(tuple(needed.storages.values()), tuple(unneeded))


@lru_cache(maxsize=1024)
def read_again(code: CodeType, last: int) -> frozenset[str]:
    """Variables that a function may read after it has come to an instruction.

    Args:
        code: of the function.
        last: the offset of the instruction, or of what belongs to it.
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
    """Whether it is said where an instruction ends that stands somewhere in the source."""
    return positions is None or positions.lineno is None or positions.end_lineno is not None


def _loaded(instruction: dis.Instruction) -> Iterator[str]:
    if "LOAD_FAST" in instruction.opname:
        names = instruction.argval
        yield from names if isinstance(names, tuple) else (names,)


class _Found:
    """Storages of tensors, which may be in lists and the like; each of these is looked into once.

    Args:
        least_bytes: of a storage that counts.
    """

    def __init__(self, least_bytes: int) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._least_bytes = least_bytes
        self._seen: set[int] = set()

    def look_at(self, values: list[Any]) -> None:
        """Find what is in values, which stay as they are as long as this is used."""
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
