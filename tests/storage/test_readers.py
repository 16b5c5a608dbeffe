"""Reads by threads of compiled code: the bytes of files, nothing else, and a way back for what cannot be read."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rabbitllm.base.compiling import STEP
from rabbitllm.storage import _read_kernels as kernels
from rabbitllm.storage.files import PositionalFile, page_aligned
from rabbitllm.storage.readers import Readers, ReadRequest
from tests.support.draws import draws
from tests.support.fresh_process import python

pytestmark = pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="as on Linux")
SIZE, THREADS = 3_000_001, 3


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[bytes, int]]:
    path = tmp_path_factory.mktemp("readers") / "x"
    path.write_bytes(os.urandom(SIZE))
    with PositionalFile(path) as file:
        yield path.read_bytes(), file.descriptor


@pytest.fixture(scope="module")
def readers() -> Readers:
    readers = Readers.of(THREADS, "test", ())
    assert readers is not None
    return readers


def request_of(readers: Readers, memory: memoryview, spans: np.ndarray, block: int) -> ReadRequest:
    request = ReadRequest(readers)
    request.prepare(np.frombuffer(memory, np.uint8).ctypes.data, spans.ctypes.data, len(spans), block)
    return request


def words(*spans: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(spans, np.int64)


@settings(max_examples=draws(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 1_300_000), st.integers(0, 9000)), min_size=1),
    st.sampled_from([512, 4096]),
    st.booleans(),
)
def test_spans_anywhere(
    readers: Readers, content: tuple[bytes, int], places: list[tuple[int, int, int]], block: int, is_alike: bool
) -> None:
    data, descriptor = content
    spans, end = list[tuple[int, int, int, int]](), 0
    for offset, nbytes, gap in places[:5]:
        at = end + gap + (offset - end - gap) % block if is_alike else end + gap
        spans.append((descriptor, offset, min(nbytes, SIZE - offset), at))
        end = at + spans[-1][2]
    memory = page_aligned(end + 4096)
    memory[:] = b"\x55" * len(memory)
    request = request_of(readers, memory, words(*spans), block)
    readers.send([request])
    assert request.wait()
    expected = bytearray(b"\x55" * len(memory))
    for _, offset, nbytes, at in spans:
        expected[at : at + nbytes] = data[offset : offset + nbytes]
    assert bytes(memory) == bytes(expected)
    seconds, ended, thread = request.times
    assert 0 < seconds < 60
    assert abs(time.perf_counter() - ended) < 60
    assert thread


def test_many_requests_at_once(readers: Readers, content: tuple[bytes, int]) -> None:
    """More than there is room for are left, as are those that were never sent."""
    data, descriptor = content
    memories = [page_aligned(8192) for _ in range(2 * kernels.RING)]
    spans = [words((descriptor, 7001 * n, 8000, 100)) for n in range(len(memories))]
    requests = [request_of(readers, *both, 4096) for both in zip(memories, spans, strict=True)]
    readers.send(requests)
    done = [request.wait() for request in requests]
    assert sum(done) >= kernels.RING
    for n, (memory, is_read) in enumerate(zip(memories, done, strict=True)):
        assert bytes(memory[100:8100]) == (data[7001 * n : 7001 * n + 8000] if is_read else bytes(8000))
    request = request_of(readers, memories[0], spans[0], 4096)
    assert request.is_over
    assert not request.wait()


def test_what_waits_is_read_alone_and_may_be_taken_back(content: tuple[bytes, int]) -> None:
    data, descriptor = content
    readers = Readers.of(THREADS, "waiting", ())
    assert readers is not None
    begun, pread = list[int](), ctypes.CDLL(None, use_errno=True).pread
    goes_on = {name: threading.Event() for name in range(5)}

    @ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
    def read(descriptor: int, address: int, nbytes: int, offset: int) -> int:
        begun.append(name := offset // 4096)
        goes_on[name].wait()
        arguments = ctypes.c_int(descriptor), ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int64(offset)
        return int(pread(*arguments))

    readers._words[kernels.READ] = ctypes.cast(read, ctypes.c_void_p).value or 0
    memories = [page_aligned(4096) for _ in goes_on]
    spans = [words((descriptor, 4096 * name, 4096, 0)) for name in goes_on]
    requests = [ReadRequest(readers) for _ in goes_on]
    for name, (memory, span, request) in enumerate(zip(memories, spans, requests, strict=True)):
        request.prepare(np.frombuffer(memory, np.uint8).ctypes.data, span.ctypes.data, 1, 512, waits=name >= 2)

    def begins(*names: int) -> bool:
        """Whether these are the next ones, and no thread looks for others."""
        while len(begun) < len(names) or readers._words[kernels.ASLEEP] < THREADS - len(names):
            time.sleep(0.001)
        is_so = {*begun} == {*names}
        begun.clear()
        return is_so

    try:
        readers.send(requests[:4])
        assert begins(0, 1)  # one thread is left
        goes_on[0].set()
        assert requests[0].wait()
        while readers._words[kernels.ASLEEP] < THREADS - 1:
            time.sleep(0.001)
        assert not begun
        goes_on[1].set()
        assert begins(2)
        readers.withdraw()
        assert [request.is_unsent for request in requests] == [False, False, False, True, True]
        requests[3].hurry()
        readers.send([requests[4], requests[3]])  # as one behind those of a pass
        goes_on[2].set()
        while 4 not in begun:
            time.sleep(0.001)
        assert begun[0] == 4
        readers.withdraw()
        if requests[3].is_unsent:  # no thread that woke late has begun it
            readers.send([requests[3]])
        while 3 not in begun:  # while the other is read
            time.sleep(0.001)
    finally:
        for event in goes_on.values():
            event.set()
    assert all(request.wait() for request in requests)
    assert all(bytes(memory) == data[4096 * name :][:4096] for name, memory in enumerate(memories))


def test_a_fork_does_not_wait_for_what_was_taken_back(content: tuple[bytes, int]) -> None:
    """Here no thread has begun to read, as on a busy machine."""
    readers, memory, spans = Readers(0, "none", ()), page_aligned(4096), words((content[1], 0, 4096, 0))
    request = request_of(readers, memory, spans, 512)
    readers.send([request])
    waiting, call = threading.Thread(target=readers._settle, daemon=True), ""
    waiting.start()
    while hex(readers._address + 8 * kernels.FINISHED) not in call:  # asleep
        call = Path(f"/proc/self/task/{waiting.native_id}/syscall").read_text()
        time.sleep(0.001)
    readers.withdraw()
    waiting.join(60)
    assert not waiting.is_alive()


def test_what_cannot_be_read(readers: Readers, content: tuple[bytes, int]) -> None:
    """A file that ends early, a descriptor of nothing, and the same request afterwards."""
    data, descriptor = content
    memory = page_aligned(16384)
    bad = words((descriptor, SIZE - 10, 11, 0)), words((descriptor, 0, 4096, 0), (1 << 20, 0, 1, 4096))
    for spans in bad:
        request = request_of(readers, memory, spans, 512)
        readers.send([request])
        assert not request.wait()
    good = words((descriptor, 5, 10, 0))
    request.prepare(np.frombuffer(memory, np.uint8).ctypes.data, good.ctypes.data, 1, 512)
    readers.send([request])
    assert request.wait()
    assert bytes(memory[:10]) == data[5:15]


def test_a_block_of_nothing(readers: Readers, content: tuple[bytes, int]) -> None:
    """No request is left pending."""
    memory, spans = page_aligned(8192), words((content[1], 7, 5000, 3))
    request = request_of(readers, memory, spans, 0)
    readers.send([request])
    end = time.monotonic() + 60
    while not request.is_over and time.monotonic() < end:
        time.sleep(0.001)
    assert request.is_over
    assert request.wait() == (bytes(memory[3:5003]) == content[0][7:5007])


def test_compiled_code_allocates_nothing() -> None:
    """A thread that has no room for its memory would end, and leave requests pending."""
    code = numba.cfunc(STEP)(kernels.serve).inspect_llvm()  # a cached one has none
    assert "cmpxchg" in code
    assert not re.findall(r"@NRT_\w*[Aa]lloc\w*", code)


def test_nothing_keeps_readers_but_their_owner(content: tuple[bytes, int]) -> None:
    """Their requests do not, which the threads keep, nor does what a request keeps until it is over."""
    readers = Readers.of(THREADS, "owned", ())
    assert readers is not None
    memory, spans, kept = page_aligned(8192), words((content[1], 0, 4096, 0)), threading.Event()
    request, freed, reference = request_of(readers, memory, spans, 4096), weakref.ref(readers), weakref.ref(kept)
    request.prepare(np.frombuffer(memory, np.uint8).ctypes.data, spans.ctypes.data, 1, 4096, kept)
    readers.send([request])
    del readers, kept
    assert freed() is None
    assert request.wait()
    assert reference() is None
    for thread in [thread for thread in threading.enumerate() if thread.name == "owned"]:
        thread.join()


def test_threads_end_after_what_they_were_sent(content: tuple[bytes, int]) -> None:
    """And what they keep stays until then."""
    before, kept = threading.active_count(), [page_aligned(SIZE + 4096)]
    readers = Readers.of(THREADS, "ending", kept)
    assert readers is not None
    assert threading.active_count() == before + THREADS
    spans = words((content[1], 0, SIZE, 0))
    requests = [request_of(readers, kept[0], spans, 4096) for _ in range(20)]
    readers.send(requests)
    readers.close()
    assert all(request.wait() for request in requests)
    late = request_of(readers, kept[0], spans, 4096)
    readers.send([late])
    assert not late.wait()
    ending = [thread for thread in threading.enumerate() if thread.name == "ending"]
    for thread in ending:
        thread.join()


def test_a_signal_ends_the_wait(readers: Readers) -> None:
    """Python sees it while it waits for what does not come."""
    request = ReadRequest(readers)
    address = request.address + 8 * kernels.STATE

    def wait() -> None:
        while True:
            readers.await_change(address, kernels.UNSENT)

    def handle(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # no other one comes behind the test
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_forks(tmp_path: Path) -> None:
    """A fork waits for reads; a child reads nothing by these threads, and the parent goes on."""
    (tmp_path / "x").write_bytes(os.urandom(1 << 22))
    result = python(
        f"""
import os, sys
import numpy as np
from rabbitllm.storage.files import PositionalFile, page_aligned
from rabbitllm.storage.readers import Readers, ReadRequest
file, readers, memory = PositionalFile({str(tmp_path / "x")!r}), Readers.of(2, "x", ()), page_aligned(1 << 22)
spans, address = np.array([[file.descriptor, 0, 1 << 22, 0]]), np.frombuffer(memory, np.uint8).ctypes.data
data = open({str(tmp_path / "x")!r}, "rb").read()
for turn in range(20):
    requests = [ReadRequest(readers) for _ in range(4)]
    for request in requests:
        request.prepare(address, spans.ctypes.data, 1, 4096)
    readers.send(requests)
    child = os.fork()
    assert all(request.is_over and request.wait() for request in requests) or child, "not over in the child"
    assert all(request.wait() for request in requests) and bytes(memory) == data
    if not child:
        request = ReadRequest(readers)
        request.prepare(address, spans.ctypes.data, 1, 4096)
        readers.send([request])
        os._exit(request.wait())
    assert os.waitpid(child, 0)[1] == 0
print("read")
"""
    )
    assert result.stdout.strip() == "read", result.stderr
