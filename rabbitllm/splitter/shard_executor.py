"""What the loop over shards asks of those who fill layer files elsewhere: in other processes, on other machines.

The loop keeps what must have one owner: the journal, the layers' final names, and the giving up of shards. Hands only
fill (`filler.py`), which can be done twice, or again after half of it.
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
    """Who fills layer files.

    Attributes:
        at_once: shards that may be in work at the same time, at most.
    """

    at_once: int

    def sharing(self, folder: Path, seen: Sequence[Path]) -> AbstractContextManager[None]:
        """Make sure that all workers see the split directory and the source, and keep it so while the context is open.

        Args:
            folder: the split directory, there and locked by the caller.
            seen: files and folders of the source; none where it is on the hub.

        Raises:
            ClusterError: a worker does not, or has another version of this package; nothing was touched.
        """
        ...

    def filled(
        self,
        parts: Sequence[tuple[PlannedShard, SplitWork]],
        began: Callable[[PlannedShard], None],
        watch: Callable[[], None],
    ) -> Generator[Filled]:
        """Fill layer files from each shard; each is handed out when what it gave is synced, in any order.

        At most as many as `SplitWork` says are in work; one that was handed out counts until the next is asked for.

        Args:
            parts: each shard with what is to be done with it, in the order to begin with them.
            began: told of each shard.
            watch: called often; may raise to stop.
        """
        ...
