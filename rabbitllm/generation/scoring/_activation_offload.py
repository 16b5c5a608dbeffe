"""Activation offload: bounds the device memory of waiting micro-batches by offloading to host memory and a file.

The bytes of a tensor are copied out and its storage is emptied. Before its micro-batch continues, the same storage is
filled again, so that all references to it remain valid. Micro-batches take turns in a fixed order, so that the one used
last is needed last. The first ones remain in memory; the others are offloaded after every turn and read back one turn
ahead.

    on the device   |#######|        up to `device_bytes`
    host memory     |####|           only for a device that does not share host memory
    file            |###########     nameless, so that it ends with the process

A waiting micro-batch holds the tensors in the arguments of its call, and its input embeddings, which the functions of
transformers' models keep for the whole pass. Other tensors that only such a function holds remain on the device, for
example the learned position embeddings of GPT-2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rabbitllm.base.rounding import round_up
from rabbitllm.generation._slot_file import Slot, SlotFile

BLOCK = 1 << 12
"""Offsets in the file are multiples of this."""


class NoRoom(Exception):
    """The tensors of an owner fit neither into memory nor into the file."""


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors among values and in their tuples, lists and dicts, which may contain themselves."""
    tensors: list[torch.Tensor] = []
    visited: set[int] = set()
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list | dict) and id(value) not in visited:
            visited.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return tensors


@dataclass(slots=True)
class _Offloaded:
    """An offloaded storage, which is empty.

    Attributes:
        storage: the storage.
        nbytes: its size when it is filled.
        memory: its bytes in host memory; those of a file once they are prefetched.
        slot: the slot with its bytes in the file.
        prefetched: done when `memory` has the bytes of the file.
    """

    storage: torch.UntypedStorage
    nbytes: int
    memory: torch.Tensor | None = None
    slot: Slot | None = None
    prefetched: Future[None] | None = None


class ActivationOffload:
    """Bounds the memory of owners that take turns.

    Args:
        device_bytes: bytes that may be resident.
        host_bytes: bytes that may be offloaded to host memory; 0 if the storages themselves are in host memory.
        disk_bytes: bytes that may be offloaded to a file.
        folder: existing folder of the file; None for the system's.
        fixed: keys (`_cdata`) of storages that are never offloaded: weights and buffers.

    Attributes:
        written, read: bytes written to and read from the file.
        max_resident: maximum of the resident bytes at the end of a turn.
    """

    def __init__(
        self,
        device_bytes: int,
        host_bytes: int = 0,
        disk_bytes: int = 0,
        folder: Path | None = None,
        *,
        fixed: frozenset[int] = frozenset(),
    ) -> None:
        self._device_bytes, self._host_bytes, self._disk_bytes = device_bytes, host_bytes, disk_bytes
        self._fixed = fixed
        self._by_owner: dict[Hashable, dict[int, torch.UntypedStorage]] = {}
        self._owners: dict[int, set[Hashable]] = {}
        self._resident: dict[int, int] = {}
        self._offloaded: dict[int, _Offloaded] = {}
        self._file = SlotFile(folder, disk_bytes, 1)
        self._used_host_bytes = 0
        self.written = self.read = self.max_resident = 0

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *error: object) -> None:
        """Release everything; offloaded storages are lost."""
        self._file.close()
        for of_all in (self._by_owner, self._owners, self._resident, self._offloaded):
            of_all.clear()

    def leave(self, owner: Hashable, tensors: Iterable[torch.Tensor]) -> None:
        """End the turn of an owner, and offload its storages if the limit is exceeded.

        Args:
            owner: key of the owner.
            tensors: tensors that it holds now.

        Raises:
            NoRoom: they fit neither into memory nor into the file.
        """
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        movable = {
            key: storage
            for key, storage in storages.items()
            if key in self._offloaded or (key not in self._fixed and storage.nbytes() >= BLOCK and storage.resizable())
        }
        for key in self._by_owner.get(owner, {}).keys() - movable.keys():
            self._release(key, owner)
        self._by_owner[owner] = movable
        for key, storage in movable.items():
            self._owners.setdefault(key, set()).add(owner)
            if key not in self._offloaded:
                self._resident[key] = storage.nbytes()
        resident = sum(self._resident.values())
        for key in sorted(movable.keys() & self._resident.keys(), key=lambda key: -self._resident[key]):
            if resident <= self._device_bytes:
                break
            if len(self._owners[key]) == 1:  # a shared one is in use while any of its owners computes
                self._offloaded[key] = self._offload(movable[key])
                resident -= self._resident.pop(key)
        self.max_resident = max(self.max_resident, resident)

    def prefetch(self, owner: Hashable) -> None:
        """Begin to read back the storages of an owner."""
        for key in self._by_owner.get(owner, {}).keys() & self._offloaded.keys():
            offloaded = self._offloaded[key]
            if offloaded.slot is not None and offloaded.prefetched is None:
                offloaded.memory = torch.empty(offloaded.nbytes, dtype=torch.uint8)
                offloaded.prefetched = self._file.prefetch(offloaded.slot, offloaded.memory.numpy().data)

    def take(self, owner: Hashable) -> None:
        """Fill the storages of an owner, and read those that were not prefetched."""
        self.prefetch(owner)
        for key in self._by_owner.get(owner, {}).keys() & self._offloaded.keys():
            offloaded = self._offloaded.pop(key)
            if offloaded.prefetched is not None:
                offloaded.prefetched.result()
                self.read += offloaded.nbytes
            assert offloaded.memory is not None
            offloaded.storage.resize_(offloaded.nbytes)
            _bytes_of(offloaded.storage).copy_(offloaded.memory)
            self._free_copy(offloaded)
            self._resident[key] = offloaded.nbytes

    def drop(self, owner: Hashable) -> None:
        """Drop an owner that takes no more turns."""
        for key in self._by_owner.pop(owner, {}):
            self._release(key, owner)

    def _release(self, key: int, owner: Hashable) -> None:
        """Drop an owner of a storage, and the storage with its last owner."""
        owners = self._owners[key]
        owners.discard(owner)
        if not owners:
            del self._owners[key]
            self._resident.pop(key, None)
            if key in self._offloaded:
                self._free_copy(self._offloaded.pop(key))

    def _offload(self, storage: torch.UntypedStorage) -> _Offloaded:
        nbytes = storage.nbytes()
        offloaded = _Offloaded(storage, nbytes)
        whole = _bytes_of(storage)
        if self._used_host_bytes + nbytes <= self._host_bytes:
            offloaded.memory = torch.empty(nbytes, dtype=torch.uint8).copy_(whole)
            self._used_host_bytes += nbytes
        else:
            offloaded.slot = self._write(whole.cpu())
        storage.resize_(0)
        return offloaded

    def _free_copy(self, offloaded: _Offloaded) -> None:
        if offloaded.prefetched is not None:
            offloaded.prefetched.cancel()
        if offloaded.slot is not None:
            self._file.release(offloaded.slot)
        else:
            self._used_host_bytes -= offloaded.nbytes

    def _write(self, whole: torch.Tensor) -> Slot:
        # not by numpy(), after which torch would no longer resize the storage
        data = memoryview((ctypes.c_ubyte * len(whole)).from_address(whole.data_ptr()))
        size = round_up(len(whole), BLOCK)
        slot = self._file.write(data, size)
        if slot is None:
            raise NoRoom(f"{size:,} bytes more than the {self._disk_bytes:,} in a file")
        self.written += len(whole)
        return slot


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A view of a storage, (nbytes,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
