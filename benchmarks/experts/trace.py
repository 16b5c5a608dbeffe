"""Which experts were routed to: a record of passes, as small as it can be, and what it says about their use. Pure.

Ids are of a layer's experts, from 0. A pass has one token or many (a prompt, a batch); an expert that several tokens of
a pass are routed to is used once by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Trace:
    """Passes, one after another.

    Attributes:
        ids: [tokens, layers, experts a token], tokens in the order of passes.
        ends: of each pass, how many tokens there were up to its end.
        experts: in a layer.
    """

    ids: Ids
    ends: npt.NDArray[np.int64]
    experts: int

    @property
    def layers(self) -> int:
        return int(self.ids.shape[1])

    @property
    def slots(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts

    def passes(self) -> Iterator[Ids]:
        """[tokens, layers, experts a token] of each."""
        for begin, end in itertools.pairwise((0, *self.ends.tolist())):
            yield self.ids[begin:end]

    def save(self, path: Path) -> None:
        """As a compressed .npz."""
        np.savez_compressed(path, ids=self.ids, ends=self.ends, experts=self.experts)

    @staticmethod
    def load(path: Path) -> Trace:
        """What `save` wrote."""
        with np.load(path) as held:
            return Trace(held["ids"], held["ends"], int(held["experts"]))


def of_tokens(ids: Ids, experts: int) -> Trace:
    """A trace of passes of one token each, from [tokens, layers, experts a token]."""
    return Trace(ids, np.arange(1, len(ids) + 1, dtype=np.int64), experts)


def joined(traces: Sequence[Trace]) -> Trace:
    """One after another."""
    offsets = np.cumsum([0, *(len(trace.ids) for trace in traces)])
    ends = [trace.ends + offset for trace, offset in zip(traces, offsets, strict=False)]
    return Trace(np.concatenate([trace.ids for trace in traces]), np.concatenate(ends), traces[0].experts)


def batched(traces: Sequence[Trace]) -> Trace:
    """Traces of equally many passes of one token each, decoded side by side: a pass has a token of each."""
    ids = np.stack([trace.ids for trace in traces], axis=1)
    ids = ids.reshape(-1, *ids.shape[2:])
    count = len(traces)
    return Trace(ids, np.arange(count, len(ids) + 1, count, dtype=np.int64), traces[0].experts)


@dataclass(frozen=True)
class Use:
    """How experts were used in passes of one token; means over the layers.

    Attributes:
        hottest_share: of all uses, by the most used eighth of a layer's experts.
        touched: share of the experts that were used at all.
        overlap: share of a token's experts that the token before had, too.
        reuse: by cache size as a share of a layer's experts, the share of uses that a cache of the layer's most
            recently used experts has; at 1.0, of those that are not the expert's first.
    """

    hottest_share: float
    touched: float
    overlap: float
    reuse: dict[float, float]


def use_of(trace: Trace, shares: Sequence[float]) -> Use:
    """Measure a trace whose passes have one token."""
    hottest, touched, overlap = [], [], []
    reuse = np.zeros(len(shares))
    for layer in range(trace.layers):
        ids = trace.ids[:, layer]
        uses = np.sort(np.bincount(ids.ravel(), minlength=trace.experts))[::-1]
        hottest.append(uses[: trace.experts // 8].sum() / uses.sum())
        touched.append(np.count_nonzero(uses) / trace.experts)
        same = (ids[1:, :, None] == ids[:-1, None, :]).any(-1)
        overlap.append(same.mean())
        depths = _recency(ids.tolist())
        reuse += [np.mean(depths < round(share * trace.experts)) for share in shares]
    found = dict(zip(shares, (reuse / trace.layers).tolist(), strict=True))
    return Use(float(np.mean(hottest)), float(np.mean(touched)), float(np.mean(overlap)), found)


def _recency(tokens: list[list[int]]) -> npt.NDArray[np.float64]:
    """For each use, how many other experts were used since the last one of the same; infinite for a first one."""
    order: list[int] = []
    depths = []
    for ids in tokens:
        for expert in ids:
            if expert in order:
                at = order.index(expert)
                depths.append(float(at))
                del order[at]
            else:
                depths.append(float("inf"))
            order.insert(0, expert)
    return np.array(depths)
