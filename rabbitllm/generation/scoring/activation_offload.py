"""Activation offload: bounds the device memory of waiting micro-batches by offloading to host memory and a file.

The bytes of a tensor are copied out and its storage is emptied. Before its micro-batch continues, the same storage is
filled again, so that all references to it remain valid. Micro-batches take turns in a fixed order, so that the one used
last is needed last. The first ones remain in memory; the others are offloaded after every turn and read back one turn
ahead.

    on the device   |#######|        up to `near` bytes
    host memory     |####|           only for a device with memory of its own
    file            |###########     nameless, so that it ends with the process

A waiting greenlet holds the tensors in the arguments of its call, and those in the frames of its functions (`held`). A
frame keeps a variable until its function returns, even if it is not read again: transformers' models keep their input
embeddings in this way for the whole pass, as large as the hidden states. A variable counts as read again if it is
loaded by an instruction that may still run, or by one in the expression that is being evaluated (its value may be on
the frame's stack). If line numbers do not suffice to decide this, all variables count.
"""

from __future__ import annotations

import ctypes
import dis
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from rabbitllm.generation.cache_file import FileSlots
from rabbitllm.storage.durable import NamelessFile

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
    read, left = [waits_with], list[Any]()
    while frame is not None:
        # functions of this package hold long lists and no large tensors
        if frame.f_code.co_flags & CO_OPTIMIZED and not frame.f_globals.get("__name__", "").startswith(OUR_OWN):
            names = read_again(frame.f_code, frame.f_lasti)
            found = frame.f_locals
            for name, value in found.items():
                (read if name in names else left).append(value)
            if type(found) is dict:  # before Python 3.13 a copy, which the frame would keep together with its values
                found.clear()
        frame = frame.f_back
    needed, idle = _storages(read, least_bytes), _storages(left, least_bytes)
    return HeldTensors(tuple(needed.values()), tuple(one for key, one in idle.items() if key not in needed))


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


def _storages(values: list[Any], least_bytes: int) -> dict[int, torch.UntypedStorage]:
    """Storages of tensors, also of those in containers; each container is searched once."""
    found: dict[int, torch.UntypedStorage] = {}
    seen: set[int] = set()
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.nbytes() >= least_bytes and storage.resizable():
                found[storage._cdata] = storage
        elif isinstance(value, tuple | list | dict) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return found


BLOCK = 1 << 12
"""Offsets in the file are multiples of this."""


class NoRoom(Exception):
    """The tensors of an owner fit neither into memory nor into the file."""


@dataclass(slots=True)
class _Offloaded:
    """An offloaded storage, which is empty, with its bytes in host memory or their offset in the file."""

    storage: torch.UntypedStorage
    nbytes: int
    memory: torch.Tensor | None = None
    offset: int | None = None
    coming: Future[torch.Tensor] | None = None


@dataclass(slots=True)
class _Owner:
    """The storages of one owner.

    Attributes:
        near: resident storages: key -> bytes.
        offloaded: offloaded storages, by key.
        idle: keys of storages that its next turn does not need.
        spare: storages that are idle and resident, by key.
    """

    near: dict[int, int] = field(default_factory=dict)
    offloaded: dict[int, _Offloaded] = field(default_factory=dict)
    idle: frozenset[int] = frozenset()
    spare: dict[int, torch.UntypedStorage] = field(default_factory=dict)


class ActivationOffload:
    """Bounds the memory of owners that take turns.

    Args:
        near: bytes that may be resident.
        host: bytes that may be offloaded to host memory; 0 if the storages themselves are in host memory.
        disk: bytes that may be offloaded to a file.
        folder: existing folder of the file; None for the system's.
        fixed: keys of storages without an owner, which are never offloaded: weights and buffers.

    Attributes:
        written, read: bytes written to and read from the file.
        max_near: maximum of the resident bytes at the end of a turn.
    """

    def __init__(
        self, near: int, host: int = 0, disk: int = 0, folder: Path | None = None, fixed: frozenset[int] = frozenset()
    ) -> None:
        self._limits = near, host
        self._disk, self._folder = disk, folder
        self._fixed = fixed
        self._owners: dict[Hashable, _Owner] = {}
        self._holders: dict[int, set[Hashable]] = {}
        self._slots = FileSlots(disk)
        self._near = self._host = 0
        self._file: NamelessFile | None = None
        self._thread = ThreadPoolExecutor(1, "rabbitllm-scoring")
        self.written = self.read = self.max_near = 0

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *error: object) -> None:
        """Release everything; offloaded storages are lost."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._owners.clear()
        self._holders.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def leave(self, owner: Hashable, held: HeldTensors) -> None:
        """End the turn of an owner, and offload storages if the limit is exceeded.

        Args:
            owner: key of the owner.
            held: tensors that it holds now.

        Raises:
            NoRoom: they fit neither into memory nor into the file.
        """
        known = self._owners.setdefault(owner, _Owner())
        found = {one._cdata: one for one in (*held.needed, *held.idle) if one._cdata not in self._fixed}
        for key in known.near.keys() - found.keys():
            self._near -= known.near.pop(key)
            self._release(key, owner)
        for key in known.offloaded.keys() - found.keys():
            self._free_copy(known.offloaded.pop(key))
            self._release(key, owner)
        idle = {one._cdata for one in held.idle}
        known.idle = frozenset(idle)
        for key, storage in found.items():
            self._holders.setdefault(key, set()).add(owner)
            if key not in known.offloaded:
                self._near += storage.nbytes() - known.near.get(key, 0)
                known.near[key] = storage.nbytes()
        known.spare = {key: found[key] for key in idle & known.near.keys()}
        for other in list(self._owners.values()) if self._near > self._limits[0] else ():
            self._offload_some(other, other.spare)  # idle storages of any owner, which its next turn does not need
        self._offload_some(known, found)
        known.spare = {key: storage for key, storage in known.spare.items() if key in known.near}
        self.max_near = max(self.max_near, self._near)

    def _offload_some(self, owner: _Owner, found: Mapping[int, torch.UntypedStorage]) -> None:
        for key in sorted(found.keys() & owner.near.keys(), key=lambda key: -owner.near[key]):
            if self._near <= self._limits[0]:
                return
            if len(self._holders[key]) == 1:  # a shared one is in use while any of its owners computes
                owner.offloaded[key] = self._offload(found[key])
                self._near -= owner.near.pop(key)
                owner.spare.pop(key, None)

    def expect(self, owner: Hashable) -> None:
        """Begin to read back the storages that the next turn of an owner needs."""
        known = self._owners.get(owner)
        if known is None:
            return
        for key, offloaded in known.offloaded.items():
            if key not in known.idle and offloaded.offset is not None and offloaded.coming is None:
                offloaded.coming = self._thread.submit(self._read, offloaded.offset, offloaded.nbytes)

    def take(self, owner: Hashable) -> None:
        """Fill the storages that the turn of an owner needs, and read those that were not prefetched."""
        self.expect(owner)
        known = self._owners.get(owner)
        if known is None:
            return
        known.spare = {}
        for key in [key for key in known.offloaded if key not in known.idle]:
            offloaded = known.offloaded.pop(key)
            bytes_there = offloaded.memory if offloaded.coming is None else offloaded.coming.result()
            assert bytes_there is not None
            offloaded.storage.resize_(offloaded.nbytes)
            _bytes_of(offloaded.storage).copy_(bytes_there)
            self._free_copy(offloaded)
            known.near[key] = offloaded.nbytes
            self._near += offloaded.nbytes

    def over(self, owner: Hashable) -> None:
        """Drop an owner that takes no more turns."""
        known = self._owners.pop(owner, _Owner())
        self._near -= sum(known.near.values())
        for offloaded in known.offloaded.values():
            self._free_copy(offloaded)
        for key in (*known.near, *known.offloaded):
            self._release(key, owner)

    def _release(self, key: int, owner: Hashable) -> None:
        holders = self._holders.get(key, set())
        holders.discard(owner)
        if not holders:
            self._holders.pop(key, None)

    def _offload(self, storage: torch.UntypedStorage) -> _Offloaded:
        nbytes = storage.nbytes()
        offloaded = _Offloaded(storage, nbytes)
        whole = _bytes_of(storage)
        if self._host + nbytes <= self._limits[1]:
            offloaded.memory = torch.empty(nbytes, dtype=torch.uint8).copy_(whole)
            self._host += nbytes
        else:
            offloaded.offset = self._write(whole.cpu())
        storage.resize_(0)
        return offloaded

    def _free_copy(self, offloaded: _Offloaded) -> None:
        if offloaded.coming is not None:
            offloaded.coming.cancel()
        if offloaded.memory is not None:
            self._host -= offloaded.nbytes
        if offloaded.offset is not None:
            self._slots.give_back(offloaded.offset, _whole_blocks(offloaded.nbytes))

    def _write(self, whole: torch.Tensor) -> int:
        size = _whole_blocks(len(whole))
        offset = self._slots.take(size)
        if offset is None:
            raise NoRoom(f"{size:,} bytes more than the {self._disk:,} in a file")
        if self._file is None:
            self._file = NamelessFile(self._folder)
        # not by numpy(), after which torch would no longer resize the storage
        self._file.write_at(memoryview((ctypes.c_ubyte * len(whole)).from_address(whole.data_ptr())), offset)
        self.written += len(whole)
        return offset

    def _read(self, offset: int, nbytes: int) -> torch.Tensor:
        assert self._file is not None
        whole = torch.empty(nbytes, dtype=torch.uint8)
        self._file.read_at(whole.numpy().data, offset)
        self.read += nbytes
        return whole


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A view of a storage, (nbytes,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _whole_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
