"""A nameless file of slots: bytes are written into free slots, prefetched, read and released.

Other users of the machine cannot read it, and it disappears with this process. It is created by the first write.
"""

from __future__ import annotations

from bisect import insort
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.storage.durable import NamelessFile
from rabbitllm.storage.files import DIRECT_ALIGNMENT


class FileSlots:
    """The slots of a file. The first free one that is large enough is used, and adjacent free ones are merged.

    Args:
        limit: maximum size of the file in bytes.

    Attributes:
        taken: bytes of the slots in use.
    """

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self._free = [(0, limit)]  # (begin, bytes), sorted; not adjacent to each other

    def take(self, nbytes: int) -> int | None:
        """Reserve a slot and return its offset; None if there is no room.

        Args:
            nbytes: size of the slot, at least one.
        """
        for index, (begin, room) in enumerate(self._free):
            if room >= nbytes:
                self._free[index : index + 1] = [(begin + nbytes, room - nbytes)] if room > nbytes else []
                self.taken += nbytes
                return begin
        return None

    def give_back(self, begin: int, nbytes: int) -> None:
        """Free a slot.

        Args:
            begin: as `take` returned it.
            nbytes: as passed to `take`.
        """
        self.taken -= nbytes
        insort(self._free, (begin, nbytes))
        joined = self._free[:1]
        for begin, nbytes in self._free[1:]:
            last, room = joined[-1]
            if last + room == begin:
                joined[-1] = last, room + nbytes
            else:
                joined.append((begin, nbytes))
        self._free = joined


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A slot in use; another one that gets its offset later is not equal to it.

    Attributes:
        offset: its offset in the file.
        nbytes: its size.
    """

    offset: int
    nbytes: int


class SlotFile:
    """The file.

    Args:
        folder: folder of the file; None for the system's.
        limit: maximum size of the file in bytes.
        threads: number of threads that prefetch.
    """

    def __init__(self, folder: Path | None, limit: int, threads: int) -> None:
        self._folder = folder
        self._threads = threads
        self._slots = FileSlots(limit)
        self._file: NamelessFile | None = None
        self._readers: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        return self._slots.taken

    def write(self, data: memoryview, nbytes: int, *, aligned: bool = False) -> Slot | None:
        """Write bytes into a slot; None if there is no room.

        Args:
            data: the bytes.
            nbytes: size of the slot, at least that of the bytes.
            aligned: whether memory and sizes are multiples of blocks, so that the page cache may be bypassed.

        Raises:
            OSError: the disk is full.
        """
        offset = self._slots.take(nbytes)
        if offset is None:
            return None
        slot = Slot(offset, nbytes)
        try:
            if self._file is None:
                self._file = NamelessFile(self._folder)
            self._file.write_at(data, offset, aligned=aligned and offset % DIRECT_ALIGNMENT == 0)
        except OSError:
            self.release(slot)
            raise
        return slot

    def fill(self, slot: Slot, data: memoryview, *, aligned: bool = False) -> None:
        """Fill memory with the bytes of a slot; callable from several threads.

        Raises:
            OSError: they cannot be read.
        """
        assert self._file is not None
        self._file.read_at(data, slot.offset, aligned=aligned and slot.offset % DIRECT_ALIGNMENT == 0)

    def prefetch(self, slot: Slot, data: memoryview, *, aligned: bool = False) -> Future[None]:
        """Begin to fill memory with the bytes of a slot; if it is released first, other bytes may come."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(self._threads, "rabbitllm-slot-file")
        return self._readers.submit(self.fill, slot, data, aligned=aligned)

    def release(self, slot: Slot) -> None:
        """Free a slot."""
        self._slots.give_back(slot.offset, slot.nbytes)

    def close(self) -> None:
        """Close the file, which deletes it, and end the threads."""
        if self._readers is not None:
            self._readers.shutdown(wait=True, cancel_futures=True)
            self._readers = None
        if self._file is not None:
            self._file.close()
            self._file = None
