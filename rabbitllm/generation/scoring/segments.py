"""Cuts texts where they diverge, so that each shared prefix is computed once.

a b c d e f        segment 0   a b c d           rows 0-3, read by all three
a b c d g      ->  segment 1   e f      after 0  rows 4-5
a b c d h i        segment 2   g        after 0  row  6
                   segment 3   h i      after 0  rows 7-8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

WORTH_TOKENS = 16
"""A shared prefix must have so many tokens more than the next shorter one: each segment costs an attention call."""


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
        return [*(self.parts[number] for number in end.after), end]

    def rows(self, text: int) -> list[int]:
        """Indices of the tokens of a text among the computed tokens; -1 for those that are not computed."""
        return [-1 if part.is_known else part.row + at for part in self.path(text) for at in range(len(part.ids))]

    def knowing(self, tokens: int) -> Segments:
        """A copy in which a prefix of the first text is known.

        Args:
            tokens: maximum tokens of that prefix; only whole segments are known.
        """
        known = {
            number
            for number in (*self.parts[self.ends[0]].after, self.ends[0])
            if self.parts[number].begins + len(self.parts[number].ids) <= tokens
        }
        row, parts = 0, []
        for number, part in enumerate(self.parts):
            parts.append(replace(part, row=-1 if number in known else row, is_known=number in known))
            row += 0 if number in known else len(part.ids)
        return Segments(tuple(parts), self.ends)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # one[:low] == other[:low], and one[:high] != other[:high]
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def cut(texts: Sequence[tuple[int, ...]], worth: int = WORTH_TOKENS) -> Segments:
    """Cut texts into segments.

    Args:
        texts: distinct texts, sorted as tuples.
        worth: see `WORTH_TOKENS`.
    """
    shared = [0, *(common(one, other) for one, other in pairwise(texts))]
    parts: list[Segment] = []
    ends = [-1] * len(texts)
    rows = 0
    # begin and end of a run of texts, the number of tokens that they share, and the segments of those tokens
    waiting: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(texts), 0, ())] if texts else []
    while waiting:
        begin, end, depth, after = waiting.pop()
        for first, last in _runs(shared, begin, end, depth + worth):
            until = min(shared[first + 1 : last]) if last - first > 1 else len(texts[first])
            number = len(parts)
            parts.append(Segment(texts[first][depth:until], after, depth, rows))
            rows += until - depth
            if len(texts[first]) == until:
                ends[first] = number
                first += 1
            if first < last:
                waiting.append((first, last, until, (*after, number)))
    return Segments(tuple(parts), tuple(ends))


def _runs(shared: Sequence[int], begin: int, end: int, least: int) -> list[tuple[int, int]]:
    """Split the texts from begin to end wherever neighbours share fewer than `least` tokens."""
    edges = [begin, *(at for at in range(begin + 1, end) if shared[at] < least), end]
    return list(pairwise(edges))
