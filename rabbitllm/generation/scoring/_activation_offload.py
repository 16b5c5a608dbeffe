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
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rabbitllm.base.rounding import round_up
from rabbitllm.generation._slot_file import Slot, SlotFile

BLOCK = 1 << 12
"""Offsets in the file are multiples of this."""


class NoRoom(Exception):
    """The tensors of an owner fit neither into memory nor into the file."""


@dataclass(slots=True)
class _HeldStorage:
    """A storage of one or several owners.

    Attributes:
        storage: the storage, which is empty while it is offloaded.
        nbytes: its size when it is filled.
        owners: the owners that hold it.
        memory: while it is offloaded, its bytes in host memory; those of a file once they are prefetched.
        slot: while it is offloaded to the file, the slot with its bytes.
        prefetched: done when `memory` has the bytes of the file.
    """

    storage: torch.UntypedStorage
    nbytes: int
    owners: set[Hashable] = field(default_factory=set)
    memory: torch.Tensor | None = None
    slot: Slot | None = None
    prefetched: Future[None] | None = None

    @property
    def is_resident(self) -> bool:
        """Whether it is filled."""
        return self.memory is None and self.slot is None


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
        self._storages: dict[int, _HeldStorage] = {}
        self._by_owner: dict[Hashable, dict[int, _HeldStorage]] = {}
        self._file = SlotFile(folder, disk_bytes, 1)
        self._resident_bytes = self._used_host_bytes = 0
        self.written = self.read = self.max_resident = 0

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *error: object) -> None:
        """Release everything; offloaded storages are lost."""
        self._file.close()
        self._storages.clear()
        self._by_owner.clear()

    def leave(self, owner: Hashable, tensors: Iterable[torch.Tensor]) -> None:
        """End the turn of an owner, and offload its storages if the limit is exceeded.

        Args:
            owner: key of the owner.
            tensors: tensors that it holds now.

        Raises:
            NoRoom: they fit neither into memory nor into the file.
        """
        held: dict[int, _HeldStorage] = {}
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in self._storages and key not in self._fixed and nbytes >= BLOCK and storage.resizable():
                self._storages[key] = _HeldStorage(storage, nbytes)
                self._resident_bytes += nbytes
            if key in self._storages:
                held[key] = self._storages[key]
                held[key].owners.add(owner)
        for key in self._by_owner.get(owner, {}).keys() - held.keys():
            self._release(key, owner)
        self._by_owner[owner] = held
        for stored in sorted(held.values(), key=lambda stored: -stored.nbytes):
            if self._resident_bytes <= self._device_bytes:
                break
            # a shared one is in use while any of its owners computes
            if stored.is_resident and len(stored.owners) == 1:
                self._offload(stored)
        self.max_resident = max(self.max_resident, self._resident_bytes)

    def prefetch(self, owner: Hashable) -> None:
        """Begin to read back the storages of an owner."""
        for stored in self._by_owner.get(owner, {}).values():
            if stored.slot is not None and stored.prefetched is None:
                stored.memory = torch.empty(stored.nbytes, dtype=torch.uint8)
                stored.prefetched = self._file.prefetch(stored.slot, stored.memory.numpy().data)

    def take(self, owner: Hashable) -> None:
        """Fill the storages of an owner, and read those that were not prefetched."""
        self.prefetch(owner)
        for stored in self._by_owner.get(owner, {}).values():
            if stored.is_resident:
                continue
            if stored.prefetched is not None:
                stored.prefetched.result()
                self.read += stored.nbytes
            assert stored.memory is not None
            stored.storage.resize_(stored.nbytes)
            _bytes_of(stored.storage).copy_(stored.memory)
            self._free_copy(stored)
            self._resident_bytes += stored.nbytes

    def drop(self, owner: Hashable) -> None:
        """Drop an owner that takes no more turns."""
        for key in self._by_owner.pop(owner, {}):
            self._release(key, owner)

    def _release(self, key: int, owner: Hashable) -> None:
        """Drop an owner of a storage, and the storage with its last owner."""
        stored = self._storages[key]
        stored.owners.discard(owner)
        if not stored.owners:
            self._resident_bytes -= stored.nbytes if stored.is_resident else 0
            self._free_copy(self._storages.pop(key))

    def _offload(self, stored: _HeldStorage) -> None:
        whole = _bytes_of(stored.storage)
        if self._used_host_bytes + stored.nbytes <= self._host_bytes:
            stored.memory = torch.empty(stored.nbytes, dtype=torch.uint8).copy_(whole)
            self._used_host_bytes += stored.nbytes
        else:
            stored.slot = self._write(whole.cpu())
        stored.storage.resize_(0)
        self._resident_bytes -= stored.nbytes

    def _free_copy(self, stored: _HeldStorage) -> None:
        """Free the bytes of a storage that is offloaded; does nothing for a resident one."""
        if stored.prefetched is not None:
            stored.prefetched.cancel()
        if stored.slot is not None:
            self._file.release(stored.slot)
        elif stored.memory is not None:
            self._used_host_bytes -= stored.nbytes
        stored.memory = stored.slot = stored.prefetched = None

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
