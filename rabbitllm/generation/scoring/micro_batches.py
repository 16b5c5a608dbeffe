"""Groups tasks into micro-batches, which go through a layer at a time, and micro-batches into passes.

The layout depends on the model: packed rows with shared prefixes; sequences of nearly the same length, padded at the
end, to which no token of a causal model attends; or sequences of exactly the same length, if a longer neighbour would
change results (angles that depend on the longest position).

Packed texts are cut into segments where they diverge, so that each shared prefix is computed once:

    a b c d e f        segment 0   a b c d           rows 0-3, read by all three
    a b c d g      ->  segment 1   e f      after 0  rows 4-5
    a b c d h i        segment 2   g        after 0  row  6
                       segment 3   h i      after 0  rows 7-8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from rabbitllm.generation.kv_cache import common_prefix
from rabbitllm.generation.scoring._tasks import Task

MIN_SHARED_TOKENS = 16
"""Minimum extra tokens of a shared prefix over the next shorter one: each segment costs an attention call."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of one or several texts.

    Attributes:
        ids: ids of its tokens.
        after: indices of the segments before it in its texts, in their order.
        begins: number of tokens in those segments.
        row: index of its first token among the computed tokens; -1 if it is known.
        is_known: whether its KV cache comes from the micro-batch before, so that it is not computed.
    """

    ids: tuple[int, ...]
    after: tuple[int, ...]
    begins: int
    row: int
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of several texts.

    Attributes:
        parts: the segments, each after those that precede it in a text.
        ends: for each text, the index of its last segment.
    """

    parts: tuple[Segment, ...]
    ends: tuple[int, ...]

    @property
    def computed(self) -> list[Segment]:
        """The segments that are computed."""
        return [part for part in self.parts if not part.is_known]

    @property
    def tokens(self) -> int:
        """Number of computed tokens."""
        return sum(len(part.ids) for part in self.computed)

    def path(self, text: int) -> list[Segment]:
        """The segments of a text."""
        end = self.parts[self.ends[text]]
        return [*(self.parts[index] for index in end.after), end]

    def rows(self, text: int) -> list[int]:
        """Indices of the tokens of a text among the computed tokens; -1 for those that are not computed."""
        return [-1 if part.is_known else part.row + i for part in self.path(text) for i in range(len(part.ids))]

    def knowing(self, tokens: int) -> Segments:
        """A copy in which a prefix of the first text is known.

        Args:
            tokens: maximum tokens of that prefix; only whole segments are known.
        """
        known_parts = {
            index
            for index in (*self.parts[self.ends[0]].after, self.ends[0])
            if self.parts[index].begins + len(self.parts[index].ids) <= tokens
        }
        row, parts = 0, []
        for index, part in enumerate(self.parts):
            parts.append(replace(part, row=-1 if index in known_parts else row, is_known=index in known_parts))
            row += 0 if index in known_parts else len(part.ids)
        return Segments(tuple(parts), self.ends)


def cut(texts: Sequence[tuple[int, ...]], min_shared: int = MIN_SHARED_TOKENS) -> Segments:
    """Cut texts into segments.

    Args:
        texts: distinct texts, sorted as tuples.
        min_shared: see `MIN_SHARED_TOKENS`.
    """
    shared = [0, *(common_prefix(text, next_text) for text, next_text in pairwise(texts))]
    parts: list[Segment] = []
    ends = [-1] * len(texts)
    rows = 0
    # begin and end of a run of texts, the number of tokens that they share, and the segments of those tokens
    waiting: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(texts), 0, ())] if texts else []
    while waiting:
        begin, end, depth, after = waiting.pop()
        # texts that share fewer tokens than `depth + min_shared` do not share a further segment
        edges = [begin, *(text for text in range(begin + 1, end) if shared[text] < depth + min_shared), end]
        for first, last in pairwise(edges):
            until = min(shared[first + 1 : last]) if last - first > 1 else len(texts[first])
            index = len(parts)
            parts.append(Segment(texts[first][depth:until], after, depth, rows))
            rows += until - depth
            if len(texts[first]) == until:
                ends[first] = index
                first += 1
            if first < last:
                waiting.append((first, last, until, (*after, index)))
    return Segments(tuple(parts), tuple(ends))


PADDING_SHARE = 8
"""At most 1 / `PADDING_SHARE` of a micro-batch's tokens is padding."""


class TextLayout(Enum):
    """The layout of the sequences in a micro-batch."""

    PACKED = "rows side by side"
    FILLED = "filled up to one length"
    EQUAL = "of one length"
    ALONE = "each by itself"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tasks that go through a layer at the same time.

    Attributes:
        tasks: the tasks.
        segments: their segments if they are packed; None if each has a row of the batch.
        shared_prefix: number of prefix tokens of its last text whose KV cache the next micro-batch needs.
    """

    tasks: tuple[Task, ...]
    segments: Segments | None = None
    shared_prefix: int = 0

    @property
    def length(self) -> int:
        """Number of tokens in the longest task."""
        return max(len(task.ids) for task in self.tasks)

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed, including padding."""
        return self.segments.tokens if self.segments is not None else len(self.tasks) * self.length

    def rows(self, task: int) -> list[int]:
        """Indices of the tokens of a task in the flattened batch."""
        if self.segments is not None:
            return self.segments.rows(task)
        begin = task * self.length
        return list(range(begin, begin + len(self.tasks[task].ids)))


def micro_batches(
    tasks: Sequence[Task], layout: TextLayout, tokens: int, min_shared: int = MIN_SHARED_TOKENS
) -> list[MicroBatch]:
    """All tasks, each in one micro-batch.

    Args:
        tasks: tasks, with distinct inputs unless `layout` is `ALONE`.
        layout: their layout.
        tokens: maximum tokens of a micro-batch, unless a single task has more.
        min_shared: minimum tokens of a shared prefix.
    """
    if layout is TextLayout.PACKED:
        return _packed(tasks, tokens, min_shared)
    groups: list[list[Task]] = []
    for task in sorted(tasks, key=lambda task: len(task.ids), reverse=True):
        if groups and layout is not TextLayout.ALONE and _joins(groups[-1], task, layout, tokens):
            groups[-1].append(task)
        else:
            groups.append([task])
    return [MicroBatch(tuple(group)) for group in groups]


def _joins(group: Sequence[Task], task: Task, layout: TextLayout, tokens: int) -> bool:
    longest, length = len(group[0].ids), len(task.ids)
    total = longest * (len(group) + 1)
    if total > tokens or (layout is TextLayout.EQUAL and length != longest):
        return False
    padding = total - length - sum(len(other.ids) for other in group)
    return padding * PADDING_SHARE <= total


def _packed(tasks: Sequence[Task], tokens: int, min_shared: int) -> list[MicroBatch]:
    """Pack tasks sorted by their ids, so that those with the same prefix are neighbours."""
    groups: list[list[Task]] = []
    total = 0
    for task in sorted(tasks, key=lambda task: task.ids):
        shared = common_prefix(groups[-1][-1].ids, task.ids) if groups else 0
        more = len(task.ids) - (shared if shared >= min_shared else 0)
        if groups and total + more <= tokens:
            groups[-1].append(task)
            total += more
        else:
            groups.append([task])
            total = len(task.ids)
    return [batch for group in groups for batch in _cut(group, tokens, min_shared)]


def _cut(group: Sequence[Task], tokens: int, min_shared: int) -> list[MicroBatch]:
    """One micro-batch, or its halves if it has too many tokens.

    That is rare; it happens because a prefix shared by two neighbours does not always become a segment.
    """
    segments = cut([task.ids for task in group], min_shared)
    if segments.tokens <= tokens or len(group) == 1:
        return [MicroBatch(tuple(group), segments)]
    half = len(group) // 2
    return [*_cut(group[:half], tokens, min_shared), *_cut(group[half:], tokens, min_shared)]


def linked(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of a pass, each without the prefix that the one before it computes.

    They take turns at a layer. Each passes the KV cache of a prefix to the next one: of the prefix that its last text
    shares with the first text of the next one. Rows that a task asks for are computed in the task's own micro-batch.

    Args:
        batches: micro-batches in the order of their turns.
    """
    linked_batches = [*batches[:1]]
    for batch in batches[1:]:
        linked_batches[-1:] = _passing_prefix(linked_batches[-1], batch)
    return linked_batches


def chains(batches: Sequence[MicroBatch], limit: int) -> list[list[MicroBatch]]:
    """Split a pass into smaller ones, each of linked micro-batches; each passes its prefix's KV cache to the next.

    Args:
        batches: micro-batches in the order of their turns, not linked yet.
        limit: maximum micro-batches of a pass.
    """
    passes: list[list[MicroBatch]] = []
    for batch in batches:
        if passes and len(passes[-1]) < limit:
            before, after = _passing_prefix(passes[-1][-1], batch)
            if before.shared_prefix:
                passes[-1][-1:] = [before, after]
                continue
        passes.append([batch])
    return passes


def _passing_prefix(before: MicroBatch, after: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """Both, the second without the prefix that the first passes to it; unchanged if there is none."""
    if before.segments is None or after.segments is None:
        return before, after
    needed = [  # the first row that each task asks for
        0 if request.pooling == "mean" else request.first if request.targets else len(task.ids) - 1
        for task in after.tasks
        for request in task.asked
    ]
    shared = min([common_prefix(before.tasks[-1].ids, after.tasks[0].ids), *needed])
    segments = after.segments.knowing(shared)
    tokens = sum(len(part.ids) for part in segments.path(0) if part.is_known)
    return (replace(before, shared_prefix=tokens), replace(after, segments=segments)) if tokens else (before, after)
