"""Brings the shards of a split to local paths, one at a time and in order, the next one meanwhile where there is room.

Knows no layers and no journal; what a shard's arrival means for the disk was decided before (`space.choose_arrival`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from rabbitllm.checkpoints.checkpoint import Checkpoint
from rabbitllm.progress import BytesFetched, tell
from rabbitllm.splitter.plan import PlannedShard


class _Stopped(Exception):
    """Nobody wants the shard that is being fetched any more."""


class Arrivals:
    """Hands out each shard's path when it is asked for.

    Args:
        checkpoint: where the shards come from.
        ahead: fetch the next shard while the caller works on the last one handed out.
        watch: called as bytes arrive; may raise to stop.
    """

    def __init__(self, checkpoint: Checkpoint, *, ahead: bool, watch: Callable[[], None]) -> None:
        self._checkpoint = checkpoint
        self._ahead = ahead
        self._watch = watch
        self._stop = threading.Event()
        self._coming: Future[Path] | None = None

    def paths(self, shards: Sequence[PlannedShard]) -> Iterator[tuple[PlannedShard, Callable[[], Path]]]:
        """Each shard with a function that waits for its path; the next fetch begins when that has returned."""
        for number, shard in enumerate(shards):
            following = shards[number + 1] if number + 1 < len(shards) else None

            def wait(shard: PlannedShard = shard, following: PlannedShard | None = following) -> Path:
                path = self._coming.result() if self._coming is not None else self._fetch(shard)
                self._coming = self._begin(following) if following is not None else None
                return path

            yield shard, wait

    def close(self) -> None:
        """Stop a fetch that is under way; what it has brought stays where it is."""
        self._stop.set()

    def _begin(self, shard: PlannedShard) -> Future[Path] | None:
        if not (self._ahead and shard.staged):
            return None
        coming: Future[Path] = Future()

        def fetch() -> None:
            try:
                coming.set_result(self._fetch(shard))
            except BaseException as error:
                coming.set_exception(error)

        # a daemon, so that a hub that has stopped answering does not keep an interrupted process alive
        threading.Thread(target=fetch, name="fetch", daemon=True).start()
        return coming

    def _fetch(self, shard: PlannedShard) -> Path:
        def arrived(nbytes: int) -> None:
            if self._stop.is_set():
                raise _Stopped
            self._watch()
            tell(BytesFetched(shard.name, nbytes))

        return self._checkpoint.acquire(shard.name, arrived)
