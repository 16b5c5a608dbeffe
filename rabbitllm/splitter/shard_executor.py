"""The interface between the loop over shards and workers in other processes or on other machines that fill layer files.

The loop keeps what must have one owner: the journal, the layers' final names, and the release of shards. Workers only
fill (`filler.py`), which can be repeated, also after a partial attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.splitter.sums import ShardChecksums
from rabbitllm.splitter.work import SplitWork

Filled = tuple[PlannedShard, ShardChecksums]
"""A shard whose bytes are durable in unfinished layer files, and its checksums."""


class ShardExecutor(Protocol):
    """Runs the jobs that fill layer files.

    Attributes:
        at_once: the most shards that may be in work at the same time.
    """

    at_once: int

    def sharing(self, folder: Path, seen: Sequence[Path]) -> AbstractContextManager[None]:
        """Check that all workers see the split directory and the source; they keep access while the context is open.

        Args:
            folder: the split directory, which exists and is locked by the caller.
            seen: files and folders of the source; none if it is on the hub.

        Raises:
            ClusterError: a worker does not see them, or has another version of this package; nothing was touched.
        """
        ...

    def filled(
        self,
        parts: Sequence[tuple[PlannedShard, SplitWork]],
        began: Callable[[PlannedShard], None],
        watch: Callable[[], None],
    ) -> Generator[Filled]:
        """Fill layer files from each shard; yield each one when its data is synced, in any order.

        At most `SplitWork.at_once` shards are in work; one that was yielded counts until the next is requested.

        Args:
            parts: each shard with the work for it, in the order to begin with them.
            began: called with each shard as it is begun.
            watch: called often; may raise to stop.
        """
        ...
