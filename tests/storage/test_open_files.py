"""The pool of open files: its limit, the order in which files are closed, and that they are settled before."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rabbitllm.storage import files
from rabbitllm.storage.files import MAX_FILES, OpenFiles


class Noted:
    """A file that logs its calls to a shared list."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self.is_open = False
        self.is_settled = True
        self.error: OSError | None = None
        self._done = done

    def reopen(self) -> None:
        assert not self.is_open
        if self.error is not None:
            raise self.error
        self.is_open = True
        self._done.append(f"open {self.name}")

    def settle(self) -> None:
        assert self.is_open
        if self.is_settled:
            return
        self._done.append(f"settle {self.name}")
        if self.error is not None:
            raise self.error
        self.is_settled = True

    def release(self) -> None:
        assert self.is_open
        self.is_open = False
        self._done.append(f"close {self.name}")


@pytest.fixture
def done() -> list[str]:
    return []


def use(pool: OpenFiles, *files: Noted) -> None:
    for file in files:
        with pool.using(file):
            assert file.is_open


def test_the_file_used_least_recently_is_closed(done: list[str]) -> None:
    a, b, c = (Noted(name, done) for name in "abc")
    pool = OpenFiles(2)
    use(pool, a, b, a, c, a, b)
    assert done == ["open a", "open b", "close b", "open c", "close c", "open b"]


def test_a_file_is_settled_before_it_is_closed(done: list[str]) -> None:
    a, b = Noted("a", done), Noted("b", done)
    pool = OpenFiles(1)
    use(pool, a)
    a.is_settled = False
    use(pool, b)
    assert done == ["open a", "settle a", "close a", "open b"]


def test_a_file_that_cannot_be_settled_stays_open_and_the_error_is_raised(done: list[str]) -> None:
    a, b = Noted("a", done), Noted("b", done)
    pool = OpenFiles(1)
    use(pool, a)
    a.is_settled, a.error = False, OSError("the disk is gone")
    with pytest.raises(OSError, match="the disk is gone"):
        use(pool, b)
    assert a.is_open
    assert not b.is_open
    a.error = None
    use(pool, b)
    assert done[-3:] == ["settle a", "close a", "open b"]


def test_what_is_written_while_it_is_settled_is_settled_too(done: list[str]) -> None:
    a, b = Noted("a", done), Noted("b", done)
    pool = OpenFiles(1)
    use(pool, a)
    a.is_settled = False
    plain = a.settle

    def settle() -> None:
        plain()
        if done.count("settle a") == 1:  # another thread writes, and is through before the file is closed
            use(pool, a)
            a.is_settled = False

    a.settle = settle  # type: ignore[method-assign]
    use(pool, b)
    assert done == ["open a", "settle a", "settle a", "close a", "open b"]


def test_a_file_that_cannot_be_opened_takes_no_place(done: list[str]) -> None:
    a, b = Noted("a", done), Noted("b", done)
    a.error = OSError("no such file")
    pool = OpenFiles(1)
    with pytest.raises(OSError, match="no such file"):
        use(pool, a)
    use(pool, b)
    assert done == ["open b"]


def test_a_dropped_file_is_closed_as_it_is(done: list[str]) -> None:
    a = Noted("a", done)
    pool = OpenFiles(1)
    pool.drop(a)
    use(pool, a)
    a.is_settled = False
    pool.drop(a)
    assert done == ["open a", "close a"]


def test_a_file_that_is_dropped_while_in_use_is_closed_afterwards(done: list[str]) -> None:
    a = Noted("a", done)
    pool = OpenFiles(1)
    with pool.using(a):
        with pool.using(a):
            pool.drop(a)
        assert a.is_open
    assert not a.is_open


def test_a_file_that_is_dropped_by_a_garbage_collection_within_the_pool(done: list[str]) -> None:
    """It runs wherever memory is taken, so also in a thread that has the pool's lock."""
    a, b, c = (Noted(name, done) for name in "abc")
    pool = OpenFiles(2)
    use(pool, a)
    plain = b.reopen

    def reopen() -> None:
        pool.drop(a)
        plain()

    b.reopen = reopen  # type: ignore[method-assign]
    with pool.using(b):
        pass
    assert done == ["open a", "open b", "close a"]
    c.error = OSError("no such file")
    failing = c.reopen

    def fail() -> None:
        pool.drop(b)
        failing()

    c.reopen = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no such file"):
        use(pool, c)
    assert done[-1] == "close b"


def test_threads_wait_while_all_open_files_are_in_use(done: list[str]) -> None:
    a, b = Noted("a", done), Noted("b", done)
    pool = OpenFiles(1)
    begun = threading.Event()

    def other() -> None:
        begun.set()
        use(pool, b)

    thread = threading.Thread(target=other)
    with pool.using(a):
        thread.start()
        assert begun.wait(60)
        thread.join(0.1)
        assert done == ["open a"]
    thread.join(60)
    assert done == ["open a", "close a", "open b"]


def test_never_more_than_the_limit_is_open_and_nothing_is_closed_unsettled(done: list[str]) -> None:
    """Notes check for themselves that no file is opened twice, or closed while it is closed."""
    files = [Noted(str(number), done) for number in range(9)]
    pool = OpenFiles(3)
    most = 0

    def work(start: int) -> None:
        nonlocal most
        for step in range(2000):
            file = files[(start + step * (start + 1)) % len(files)]
            with pool.using(file):
                assert file.is_open
                most = max(most, sum(other.is_open for other in files))
                file.is_settled = False

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert most <= 3
    for file in files:
        of_it = [step.removesuffix(f" {file.name}") for step in done if step.endswith(f" {file.name}")]
        assert "close" in of_it
        assert all(before == "settle" for before, step in itertools.pairwise(of_it) if step == "close")


@pytest.mark.parametrize(("soft", "expected"), [(16, 4), (64, 8), (256, 32), (1024, 128), (1 << 20, 256), (-1, 256)])
def test_the_limit_follows_that_of_the_process(monkeypatch: pytest.MonkeyPatch, soft: int, expected: int) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, -1))
    assert files._files_allowed() == expected <= MAX_FILES
