"""How many tokens a draft proposes for each pass: as many as bring most tokens a second here, by what was measured."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rabbitllm.engine.streamed_model import StreamedModel

MOST = 64
"""The most tokens of a draft."""
SHARE = 0.01
"""Drafts that do not pay may take this share of the time."""
ALLOWANCE = 0.5
"""And at first as long as so many tokens without a draft."""
MOST_CREDIT = 16.0
"""Drafts may lose what they have gained, up to so many tokens."""
_DEBT = 1.0
"""And no pass that took long ends them for more than this."""
_KEPT = 7
"""Measurements of a kind, of which the median counts."""
_OLD = 64
"""Passes after which a measurement of several rows is forgotten, so that an outlier does not stay; and after which a
pass without a draft measures again what drafts are compared with."""
_ENOUGH = 3
"""Passes without a draft that are measured before a draft that may not pay is tried."""
_FEW = 8
"""A source that lacks no more tokens than this computes them with the first one that it proposes."""
_HORIZON = 128
"""A source that must catch up with a text has to pay for that within so many tokens."""
_LEVELS = (0.2, 0.4, 0.6, 0.8, 0.95)
"""Bounds of the probabilities that count as equally sure."""
_DISK = 8
"""Times that moving a weight to its device takes as long as computing a row with it; before measurements."""
_ROW = 0.5
"""The cost of a further row on a CPU, of that of a pass of one without moving weights; before measurements."""


class _Often:
    """How often something holds, of late."""

    __slots__ = ("_all", "_yes")

    def __init__(self, share: float = 0.0, count: float = 0.0) -> None:
        self._yes, self._all = share * count, count

    def add(self, holds: bool) -> None:
        self._yes, self._all = 0.92 * self._yes + holds, 0.92 * self._all + 1

    def share(self, otherwise: float) -> float:
        """The share; near `otherwise` after few observations."""
        return (self._yes + otherwise) / (self._all + 1)


class Costs:
    """What passes of a model and tokens of its draft take here: learnt in use, and the same for all answers.

    Args:
        row_cost: cost of a further row in a pass, of that of one row, until it is measured.
        step_cost: cost of a drafted token, of that of a pass of one row, until it is measured.

    Attributes:
        plain: number of measured passes without a draft.
        since_plain: passes since the last one without a draft.
    """

    def __init__(self, row_cost: float = _ROW, step_cost: float = 0.0) -> None:
        self.plain = self.since_plain = 0
        self._row_cost, self._step_cost = row_cost, step_cost
        # bucket of rows -> number of the pass, rows, seconds
        self._passes: dict[int, deque[tuple[int, int, float]]] = {}
        self._count = 0
        self._points: Sequence[tuple[float, float]] = ()  # what follows from them; () if it is to be computed
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._catching_up: deque[float] = deque(maxlen=_KEPT)

    def learn_pass(self, rows: int, seconds: float | None, has_draft: bool) -> None:
        """Take in a pass: its rows, its time or None if it computed prompts, and whether it checked a draft."""
        self._count += 1
        self.since_plain = self.since_plain + 1 if has_draft else 0
        if seconds is not None:
            self.plain += not has_draft
            bucket = (rows - 1).bit_length()  # 1, 2, 3 and 4, 5 to 8, ... rows
            self._passes.setdefault(bucket, deque(maxlen=_KEPT)).append((self._count, rows, seconds))
            self._points = ()

    def learn_draft(self, drafted: int, seconds: float, lacks: int) -> None:
        """Take in a draft: its tokens, its time, and the tokens of the text that the source had not seen."""
        if lacks <= _FEW:
            self._steps.append(seconds / max(drafted, 1))
        elif self._steps:
            self._catching_up.append(max(seconds - self.step() * drafted, 0.0) / lacks)
        else:
            self._catching_up.append(seconds / (lacks + drafted))

    @property
    def widest(self) -> int:
        """The most tokens: what takes half a pass, or twice what was measured, each step of which can be taken back."""
        return min(max(2 * round(self._measured()[-1][0]), int(0.5 / self._row_cost)), MOST)

    @property
    def has_caught_up(self) -> bool:
        """Whether it was measured, more than once, how a source catches up with a text."""
        return len(self._catching_up) > 1

    def step(self) -> float:
        """Seconds of a drafted token."""
        return median_low(self._steps) if self._steps else self._step_cost * self.of(1)

    def behind(self, lacks: int) -> float:
        """Seconds until the source has read the tokens that it lacks; each takes no longer than one that it drafts."""
        known = lacks > _FEW and bool(self._catching_up)
        return lacks * min(median_low(self._catching_up), self.step()) if known else 0.0

    def of(self, rows: float) -> float:
        """Seconds of a pass; before any was measured, its time relative to one of one row."""
        points = self._measured()
        first, seconds = points[0]
        if rows <= first or len(points) == 1:
            return seconds * (1 + self._row_cost * (rows - 1)) / (1 + self._row_cost * (first - 1))
        at = next((index for index, (count, _) in enumerate(points) if count >= rows), len(points))
        (low, cheap), (high, dear) = points[min(at, len(points) - 1) - 1 :][:2]
        slope = (dear - cheap) / (high - low)
        # beyond what was measured it is worth a try
        return cheap + slope * (rows - low) if at < len(points) else dear + slope / 2 * (rows - high)

    def _measured(self) -> Sequence[tuple[float, float]]:
        """Rows and seconds of a pass, both rising."""
        if self._points:
            return self._points
        points: list[tuple[float, float]] = []
        for bucket in sorted(self._passes, reverse=True):
            kept = self._passes[bucket]
            while bucket and kept and kept[0][0] < self._count - _OLD:
                kept.popleft()
            if kept:
                rows = sum(count for _, count, _ in kept) / len(kept)
                seconds = median_low([time for *_, time in kept])
                # fewer rows never take longer
                points.append((rows, min(seconds, points[-1][1]) if points else seconds))
        self._points = points[::-1] or ((1.0, 1.0),)
        return self._points


class Width:
    """Chooses the number of tokens to draft for each pass of a model, by costs and correct drafts so far.

    A draft is chosen if it promises more tokens a second than none; a source that says how sure it is may go further
    than what promises most on average. If none is chosen, a short one is tried now and then. Whatever the promises,
    drafts that bring fewer tokens than the same time without them brings use up `credit`, which only tokens add to;
    without any there is no draft. So always wrong drafts cost little more than `SHARE` of the time.

    Args:
        costs: of the model and its draft; all sequences share them.

    Attributes:
        credit: what drafts may lose from now on, in tokens without a draft.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.credit = ALLOWANCE
        self._proposed: list[_Often] = []  # by depth
        self._right: list[_Often] = []
        bounds = (0.0, *_LEVELS, 1.0)
        self._right_if_sure = [_Often((low + high) / 2, 4) for low, high in pairwise(bounds)]
        self._needs = 0.0
        self._tries = False
        self._rate, self._path, self._rows, self._sure = 0.0, 1.0, 1, list[float]()
        self._breadth = 1.0  # tokens of each depth; of a chain 1
        self._stops_itself = False  # the source, by how sure it is
        self._sequences = 1

    def choose(self, most: int, lacks: int = 0, rows: int = 1, sequences: int = 1) -> int:
        """Return how many tokens to draft for the next pass, or how deep a tree may be; 0 for none.

        Args:
            most: the most that can be used.
            lacks: tokens of the text that the source has not seen yet.
            rows: rows of the pass without a draft.
            sequences: number of sequences that share the pass, each of which bears a part of it and all of its draft.
        """
        self._path, self._rows, self._sure, self._tries = 1.0, rows, [], False
        self._sequences = sequences
        if most < 1 or self.credit <= min(self._needs, 0.9 * ALLOWANCE):
            return 0
        costs = self.costs
        one, step = self._one(), costs.step()
        behind, shared = costs.behind(lacks), self._shared(rows)
        nothing = 1 / (costs.of(rows) - shared)
        best, best_rate, tried, tried_rate, affordable = 0, nothing, 0, 0.0, 0
        tokens = path = reach = 1.0
        drafted, is_right, is_there = 0.0, 0.5, 1.0
        for count in range(1, min(most, max(int(costs.widest / self._breadth), 1)) + 1):
            if count <= len(self._right):
                is_right = self._right[count - 1].share(is_right)
                is_there = self._proposed[count - 1].share(is_there)
            reach *= is_there
            path *= is_there * is_right
            tokens, drafted = tokens + path, drafted + reach
            rate = tokens / (costs.of(rows + self._breadth * drafted) - shared + step * drafted)
            loss = (costs.of(rows + self._breadth * count) - costs.of(rows) + step * count) / one
            if count == 1:
                self._needs = min(loss + behind / one, ALLOWANCE)
            if loss > self.credit and count > 1:
                break
            affordable = count
            if rate > best_rate:
                best, best_rate = count, rate
            if rate > tried_rate:
                tried, tried_rate = count, rate
        if best and behind > min(most, _HORIZON) * (1 / nothing - 1 / best_rate):
            best = 0
        if best:
            self._needs = 0.0
            if costs.since_plain >= (_OLD if costs.plain else 2):
                return 0
        elif costs.plain >= _ENOUGH and self.credit >= self._needs and behind <= self.credit * one:
            best, best_rate, self._tries = tried, tried_rate, True
        self._rate = best_rate
        # twice as many at most, since the costs of more rows than were measured are a guess
        return min(affordable, 2 * best) if self._stops_itself and not self._tries else best

    def goes_on(self, sure: float) -> bool:
        """Whether a source that is so sure of its last token should propose another one; called for each token."""
        self._sure.append(sure)
        self._stops_itself = True
        depth = len(self._sure)
        self._path *= self._right_if_sure[_level(sure)].share(sure)
        is_right = self._right[depth].share(0.5) if depth < len(self._right) else 0.5
        rows = self._rows + depth
        return self._path * is_right > self._rate * (self.costs.of(rows + 1) - self.costs.of(rows) + self.costs.step())

    def worth(self, probabilities: Sequence[float]) -> int:
        """How many tokens of a tree are worth a row of the pass; at least one.

        Args:
            probabilities: that of each token with those before it, in descending order.
        """
        count, cost = 1, self.costs.of(self._rows + 1)
        for probability in probabilities[1 : self.costs.widest]:
            wider = self.costs.of(self._rows + count + 1)
            if probability < self._rate * (wider - cost):
                break
            count, cost = count + 1, wider
        return count

    def deepens(self, right: float, depth: int) -> bool:
        """Whether a tree should get another level: `right` tokens are expected to be right at this depth, from 1."""
        self._stops_itself = True
        is_right = self._right[depth].share(0.5) if depth < len(self._right) else 0.5
        return right * is_right > self._rate * self.costs.step()

    def learn(
        self,
        wanted: int,
        drafted: int,
        right: int,
        *,
        tokens: int | None = None,
        rows: int,
        draft_seconds: float = 0.0,
        lacks: int = 0,
    ) -> None:
        """Take in what a pass, which `costs` has learnt, says of its draft.

        Args:
            wanted, drafted: tokens that were wanted from the source, and that it proposed; of a tree the depths.
            right: proposed tokens that were correct.
            tokens: all tokens of a tree.
            rows: rows of the pass, those of the draft included.
            draft_seconds: time of the draft.
            lacks: tokens that the source had not seen.
        """
        if wanted:
            self.costs.learn_draft(drafted, draft_seconds, lacks)
        elif rows == 1 or self._sequences > 1:  # the usual case without drafts must take no time
            self.credit = max(self.credit, min(self.credit + SHARE, ALLOWANCE))
            return
        for depth in range(min(wanted, drafted + 1)):
            if depth == len(self._right):
                self._right.append(_Often())
                self._proposed.append(_Often())
            self._proposed[depth].add(depth < drafted)
            if depth < drafted and depth <= right:
                self._right[depth].add(depth < right)
        for sure, is_right in zip(self._sure, [True] * right + [False] * (drafted > right), strict=False):
            self._right_if_sure[_level(sure)].add(is_right)
        if drafted and rows > drafted:
            self._breadth += 0.3 * ((tokens or drafted) / drafted - self._breadth)
        plain = rows - (drafted if tokens is None else tokens)
        spent = self.costs.of(rows) - self._shared(plain) + self.costs.step() * (drafted or (wanted > 0))
        if self._tries and self.costs.has_caught_up:
            spent += self.costs.behind(lacks)
        # an outlier may have been measured, which must not end drafts for long
        credit = self.credit + right + 1 - spent / self._one()
        self.credit = max(min(credit, MOST_CREDIT), -_DEBT)

    def _one(self) -> float:
        """Seconds of a token without a draft."""
        return self.costs.of(self._sequences) / self._sequences

    def _shared(self, rows: int) -> float:
        """Seconds of a pass of so many rows that the other sequences bear."""
        return self.costs.of(rows) - self._one() if self._sequences > 1 else 0.0


def costs_of(model: StreamedModel, draft: StreamedModel | str) -> Costs:
    """The costs of a model and its draft: until they are measured, from the weights that a pass moves and uses."""
    placement = model.placement
    used = sum(placed.stored for placed in placement.units) or 1
    moved = placement.moved_bytes
    own = 0 if isinstance(draft, str) else sum(placed.stored for placed in draft.placement.units)
    row = _ROW if model.device.type == "cpu" else _ROW / 8
    return Costs(row * used / (used + _DISK * moved), own / (used + _DISK * moved))


def _level(sure: float) -> int:
    return sum(sure >= bound for bound in _LEVELS)
