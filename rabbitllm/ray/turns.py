"""Which shard may be begun next, while others are in work. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.splitter.work import SplitWork

Part = tuple[PlannedShard, SplitWork]


def next_part(waiting: Sequence[Part], in_work: Iterable[Part], *, apart: bool) -> Part | None:
    """The first part that may be begun; None if all have to wait for one that is in work.

    Args:
        waiting: in the order to begin with them.
        in_work: those that have been begun and not been taken up.
        apart: no two parts that fill the same layer file. Network file systems promise one machine to see what another
            wrote only once it opens the file after the other has closed it (close-to-open, nfs(5)); until then each
            may write back its own state of a page in which both have bytes.
    """
    if not apart:
        return waiting[0] if waiting else None
    taken: set[str] = set()
    for _, work in in_work:
        taken |= work.plan.layouts.keys()
    return next((part for part in waiting if _is_free(part, taken)), None)


def _is_free(part: Part, taken: Collection[str]) -> bool:
    return not any(layer in taken for layer in part[1].plan.layouts)
