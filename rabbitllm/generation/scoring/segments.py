"""Texts cut where they diverge, so that each shared prefix is computed once. Pure.

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
"""A shared prefix has to have so many more tokens than the next shorter one, since each segment attends by itself."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of one or several texts.

    Attributes:
        ids: its tokens.
        after: numbers of the segments that come before it in its texts, the first one first.
        begins: how many tokens these have.
        row: of its first token, among those that are computed.
        is_known: it is not computed here: the micro-batch before has its KV cache.
    """

    ids: tuple[int, ...]
    after: tuple[int, ...]
    begins: int
    row: int
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class Segments:
    """Parts of several texts.

    Attributes:
        parts: each after those that come before it.
        ends: for each text, the number of the segment that it ends with.
    """

    parts: tuple[Segment, ...]
    ends: tuple[int, ...]

    @property
    def computed(self) -> list[Segment]:
        """Those that are computed."""
        return [part for part in self.parts if not part.is_known]

    @property
    def tokens(self) -> int:
        """That are computed."""
        return sum(len(part.ids) for part in self.computed)

    def path(self, text: int) -> list[Segment]:
        """The segments of a text."""
        end = self.parts[self.ends[text]]
        return [*(self.parts[number] for number in end.after), end]

    def rows(self, text: int) -> list[int]:
        """Where the tokens of a text are; -1 for those that are not computed here."""
        return [-1 if part.is_known else part.row + at for part in self.path(text) for at in range(len(part.ids))]

    def knowing(self, tokens: int) -> Segments:
        """The same, without computing a prefix of the first text.

        Args:
            tokens: of that prefix, at most; a segment is known whole or not at all.
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
    """With how many tokens two texts both begin."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # one[:low] == other[:low], and not so for high
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def cut(texts: Sequence[tuple[int, ...]], worth: int = WORTH_TOKENS) -> Segments:
    """Segments of texts.

    Args:
        texts: distinct, and sorted as tuples are.
        worth: see `WORTH_TOKENS`.
    """
    shared = [0, *(common(one, other) for one, other in pairwise(texts))]
    parts: list[Segment] = []
    ends = [-1] * len(texts)
    rows = 0
    # texts from, to, that share so many tokens, by these segments
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
    """Texts from begin to end, parted where neighbours share less."""
    edges = [begin, *(at for at in range(begin + 1, end) if shared[at] < least), end]
    return list(pairwise(edges))
