"""Threads of compiled code that read runs of files into memory, for what is read while Python and the processor work.

Where a token waits for reads, a thread of Python that reads is slow: it needs the interpreter before and after each
read, and takes it from the thread that computes. These threads get their requests through memory, and never the
interpreter. What they cannot read, for whatever reason, is left to the caller, who knows what to tell of it.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from rabbitllm.base.forks import DaemonThread, before_fork, in_child, without_forks
from rabbitllm.storage.files import page_aligned


class ReadRequest:
    """A read of spans into one memory. The threads keep it, but it does not keep them."""

    def __init__(self, readers: Readers) -> None:
        from rabbitllm.storage import _read_kernels as kernels  # numba comes with it

        self._await_change, self._kept = readers.await_change, None
        self._words = (ctypes.c_int64 * kernels.REQUEST_WORDS)()
        self._words[kernels.STATE] = self._unsent = kernels.UNSENT
        self._state, self._waits = kernels.STATE, kernels.WAITS
        self.address = ctypes.addressof(self._words)
        readers.requests.append(self)

    def prepare(
        self, memory: int, spans: int, count: int, block: int, kept: Any = None, *, waits: bool = False
    ) -> None:
        """Set what is read next: the address of memory, and that of spans (int64s: descriptor, offset, bytes, offset in
        the memory), their number, and what offsets and addresses of reads are multiples of, at most 4,096; what is kept
        until it is over: the spans, and open files; and whether it `waits` until nothing is being read, so that it
        takes no rate from other reads."""
        self._kept, self._words[self._waits] = kept, waits
        self._words[: self._state + 1] = [memory, spans, count, block, self._unsent]

    def hurry(self) -> None:
        """Let it begin while others are read."""
        self._words[self._waits] = False

    @property
    def is_over(self) -> bool:
        """Whether it was read, or could not be, or was not sent."""
        return self._words[self._state] != 0

    @property
    def is_unsent(self) -> bool:
        """Whether it was not sent, or was taken back."""
        return bool(self._words[self._state] == self._unsent)

    @property
    def times(self) -> tuple[float, float, int]:
        """Once it was read, how many seconds it took, when it ended (`time.perf_counter`), and its thread's number."""
        seconds, ended, thread = self._words[self._state + 1 : self._waits]
        return seconds / 1e9, ended / 1e9, thread

    def wait(self) -> bool:
        """Wait until it is over; whether it was read."""
        while not self.is_over:
            self._await_change(self.address + 8 * self._state, 0)
        self._kept = None
        return bool(self._words[self._state] == 1)


class Readers:
    """So many threads; see `of`. They end with this object, once they have read what they have begun to read.

    Args:
        count: of threads.
        name: of the threads.
        kept: what is kept until they have ended: memory that they read into. It must not keep this object.

    Attributes:
        requests: all that were made for them, which are kept as long.
        is_usable: whether there are threads in this process.
    """

    def __init__(self, count: int, name: str, kept: Any) -> None:
        from rabbitllm.base.compiling import address_of  # numba comes with it
        from rabbitllm.base.openmp import c_address, unfreed_words
        from rabbitllm.base.parts import SPINS
        from rabbitllm.storage import _read_kernels as kernels

        scratches = [page_aligned(kernels.SCRATCH) for _ in range(count)]  # here, where there may be no room for it
        library, (address, self._words) = ctypes.CDLL(None), unfreed_words(kernels.WORDS)
        self._address, self._count, self._kernels = address, count, kernels
        self._words[kernels.OWN] = address
        functions = library.pread, library.syscall, library.clock_gettime
        for index, function in zip((kernels.READ, kernels.SYSCALL, kernels.CLOCK), functions, strict=True):
            self._words[index] = c_address(function)
        numbers = [ctypes.c_int64] * 4
        self._send = ctypes.PYFUNCTYPE(None, *numbers)(address_of(kernels.send))  # it takes microseconds
        self._withdraw = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(address_of(kernels.withdraw))
        wait = ctypes.CFUNCTYPE(None, *numbers)(address_of(kernels.await_change))
        self.await_change: Callable[[int, int], object] = lambda place, value: wait(address, place, value, SPINS)
        """Wait until a word at an address has probably another value."""
        self.requests, self.is_usable = list[ReadRequest](), True
        in_child(self._reset)
        before_fork(self._settle)
        self.close = weakref.finalize(self, _end, self._words, self._send, kernels, count)
        serve = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address_of(kernels.serve))
        for scratch in scratches:
            first = (ctypes.c_int64 * 2).from_buffer(scratch)
            first[:] = [address, (place := ctypes.addressof(first)) + kernels.PAGE]
            DaemonThread(_serve, name, serve, place, (scratch, kept, self.requests)).start()

    @classmethod
    def of(cls, count: int, name: str, kept: Any) -> Readers | None:
        """The threads; None where there are none, or no room for them."""
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return None
        try:
            return cls(count, name, kept)
        except (MemoryError, OSError, RuntimeError):
            return None

    def send(self, requests: Sequence[ReadRequest]) -> None:
        """Send prepared requests; those for which there is no room stay unsent."""
        if not (requests and self.is_usable):
            return
        addresses = array("q", [request.address for request in requests])
        with without_forks:
            self._send(self._address, addresses.buffer_info()[0], len(addresses), self._count)

    def withdraw(self) -> None:
        """Take back what no thread has begun to read, which is unsent again."""
        if self.is_usable:
            self._withdraw(self._address)

    def _settle(self) -> None:
        """Before a fork: wait for all reads."""
        words, kernels = self._words, self._kernels
        while words[kernels.SENT] != (finished := words[kernels.FINISHED]):
            self.await_change(self._address + 8 * kernels.FINISHED, finished)

    def _reset(self) -> None:
        """In a forked child there are no threads."""
        self.is_usable = False


def _serve(serve: Callable[[int], None], address: int, kept: Any) -> None:
    """Read until the threads are to end, and keep that until then."""
    serve(address)


def _end(words: Any, send: Callable[..., None], kernels: Any, threads: int) -> None:
    words[kernels.STOPPED] = 1
    send(words[kernels.OWN], 0, 0, threads)
