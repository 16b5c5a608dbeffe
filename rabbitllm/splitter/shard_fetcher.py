"""Brings the shards of a split to local paths, in order; the arrived part of each can be read meanwhile.

A thread fetches missing shards, the next one as soon as there is room for it; the disk use of that was decided before
(`disk_budget.choose_shard_transfer`). Independent of layers and journal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from rabbitllm.base.progress import BytesFetched, tell
from rabbitllm.checkpoints.checkpoint import Checkpoint
from rabbitllm.splitter.plan import PlannedShard

LAST_CHUNK_SECONDS = 0.5
"""Time for a fetch that is being stopped to write data it has just received, seconds."""


class StartedOverError(Exception):
    """The arrived part of a shard was damaged, and all of it is fetched again; data read from it must not be used."""


class IncomingShard(Protocol):
    """A shard that is local or is being fetched."""

    def until(self, end: int) -> Path:
        """Wait until a shard's first `end` bytes are in the file, and return its path; they are not verified yet.

        Raises:
            StartedOverError: see there.
            HubError, MissingShardError, CorruptShardError: it cannot be fetched or found.
        """
        ...

    def whole(self) -> Path:
        """Wait until all of it is there and verified; raises the same errors."""
        ...


class _Here:
    """A shard that needs no fetching."""

    def __init__(self, checkpoint: Checkpoint, shard: str) -> None:
        self._checkpoint = checkpoint
        self._shard = shard
        self._path: Path | None = None

    def until(self, end: int) -> Path:  # called every few MB, and each `acquire` checks the path again
        if self._path is None:
            self._path = self.whole()
        return self._path

    def whole(self) -> Path:
        return self._checkpoint.acquire(self._shard)


class _Fetched:
    """A shard that a thread fetches."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._path: Path | None = None
        self._have = 0
        self._whole = self._started_over = False
        self._error: BaseException | None = None

    def until(self, end: int) -> Path:
        return self._wait(lambda: self._have >= end)

    def whole(self) -> Path:
        return self._wait(lambda: self._whole)

    def _wait(self, ready: Callable[[], bool]) -> Path:
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._started_over or self._error is not None)
            if self._error is not None:
                raise self._error
            if self._started_over:
                self._started_over = False
                raise StartedOverError
            assert self._path is not None
            return self._path

    def come(self, path: Path, have: int) -> int:
        """Record that `path` has the first `have` bytes; return how many are new (negative: it started over)."""
        with self._changed:
            new = have - self._have
            self._path, self._have = path, have
            self._started_over |= new < 0
            self._changed.notify_all()
            return new

    def end(self, path: Path) -> None:
        """Record that all of it is there and verified."""
        with self._changed:
            self._path, self._whole = path, True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record that fetching failed."""
        with self._changed:
            self._error = error
            self._changed.notify_all()


class _Stopped(Exception):
    """The shard that is being fetched is no longer needed."""


class ShardFetcher:
    """Yields the shards in order, fetched where needed.

    Args:
        checkpoint: source of the shards.
        room: fetched shards that may be on the disk at a time; 0 if the caller streams them itself.
        watch: called as bytes arrive; may raise to stop.
    """

    def __init__(self, checkpoint: Checkpoint, room: int, watch: Callable[[], None]) -> None:
        self._checkpoint = checkpoint
        self._watch = watch
        self._stop = threading.Event()
        self._fetches = room > 0
        self._room = threading.Semaphore(room)
        self._thread: threading.Thread | None = None

    def shards(self, wanted: Sequence[PlannedShard]) -> Iterator[tuple[PlannedShard, IncomingShard]]:
        """Yield each shard; a fetched one must be released before the next one is requested."""
        coming = {shard.name: _Fetched() for shard in wanted if shard.staged and self._fetches}
        if coming:
            # a daemon, so that a hub that has stopped answering does not keep an interrupted process alive
            self._thread = threading.Thread(target=self._fetch_all, args=(coming,), name="fetch", daemon=True)
            self._thread.start()
        for shard in wanted:
            yield shard, coming.get(shard.name) or _Here(self._checkpoint, shard.name)
            if shard.name in coming:
                self._room.release()

    def close(self) -> None:
        """Stop a fetch that is in progress; its arrived bytes are kept."""
        self._stop.set()
        self._room.release()
        if self._thread is not None:  # it may wait for the hub for longer, but then writes nothing
            self._thread.join(LAST_CHUNK_SECONDS)

    def _fetch_all(self, coming: dict[str, _Fetched]) -> None:
        for shard, fetched in coming.items():
            self._room.acquire()
            try:
                fetched.end(self._fetch(shard, fetched))
            except BaseException as error:
                fetched.fail(error)
                return

    def _fetch(self, shard: str, fetched: _Fetched) -> Path:
        earlier = True  # the first report is of bytes from before this fetch

        def come(path: Path, have: int) -> None:
            nonlocal earlier
            if self._stop.is_set():
                raise _Stopped
            self._watch()
            tell(BytesFetched(shard, fetched.come(path, have), earlier))
            earlier = False

        if self._stop.is_set():
            raise _Stopped
        return self._checkpoint.acquire(shard, come)
