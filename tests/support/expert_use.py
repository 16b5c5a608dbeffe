"""How a trained model uses its experts, as others measured it, and the same of texts and routers that are drawn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.experts import routing

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


class Routed:
    """What the routers of a model of Qwen3-Next's kind choose, noted pass by pass (a router's third output)."""

    def __init__(self, model: Any) -> None:
        self.routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
        self.chosen: list[Any] = []
        for router in self.routers:
            router.register_forward_hook(self._note)

    def _note(self, router: Any, inputs: Any, outputs: Any) -> None:
        self.chosen.append(outputs[2].cpu().numpy().astype("uint16"))

    def trace(self) -> Trace:
        """Of all passes so far."""
        layers = len(self.routers)
        passes = [np.stack(self.chosen[first : first + layers], axis=1) for first in range(0, len(self.chosen), layers)]
        return Trace(np.concatenate(passes), np.cumsum([len(part) for part in passes]), self.routers[0].num_experts)


@dataclass(frozen=True)
class Published:
    """Expert use that others measured of a trained model, and where it says so.

    Attributes:
        tokens: generated, of one text.
        reuse: see `Use`.
        hottest_share: of the hottest eighth; of layer 0 alone.
    """

    model: str
    source: str
    tokens: int
    reuse: Mapping[float, float]
    hottest_share: float


PUBLISHED = Published(
    "Qwen3.8-Flash-Next (512 experts, 10 a token)",
    "https://github.com/kekzl/imp/pull/2061",
    300,
    {93 / 512: 0.435, 186 / 512: 0.620, 279 / 512: 0.720, 372 / 512: 0.789, 1.0: 0.850},
    0.41,
)
PUBLISHED_OVERLAP = 0.256
"""Of a token's experts with the last one's, 4 of 512 used: https://github.com/danveloper/flash-moe."""


def trace(habits: routing.Habits, texts: list[routing.Floats], layers: int, experts: int, count: int) -> list[Trace]:
    """What such routers choose for each text, without a model: traces of passes of one token.

    Args:
        habits: only `noise` counts here.
        texts: meanings.
        layers, experts, count: how many layers, experts in each, experts a token.
    """
    chosen: list[list[npt.NDArray[np.uint16]]] = [[] for _ in texts]
    for layer in range(layers):
        weights = routing.router(layer, experts)
        random = np.random.default_rng((3, layer))
        for text, choices in zip(texts, chosen, strict=True):
            logits = text @ weights.T
            logits += habits.noise * random.standard_normal(logits.shape, np.float32)
            choices.append(np.argpartition(-logits, count, axis=1)[:, :count].astype(np.uint16))
    return [of_tokens(np.stack(choices, axis=1), experts) for choices in chosen]


def of_tokens(ids: Ids, experts: int) -> Trace:
    """A trace of passes of one token each, from [tokens, layers, experts a token]."""
    return Trace(ids, np.arange(1, len(ids) + 1, dtype=np.int64), experts)


def joined(traces: Sequence[Trace]) -> Trace:
    """One after another."""
    offsets = np.cumsum([0, *(len(trace.ids) for trace in traces)])
    ends = [trace.ends + offset for trace, offset in zip(traces, offsets, strict=False)]
    return Trace(np.concatenate([trace.ids for trace in traces]), np.concatenate(ends), traces[0].experts)


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
    by_share = dict(zip(shares, (reuse / trace.layers).tolist(), strict=True))
    return Use(float(np.mean(hottest)), float(np.mean(touched)), float(np.mean(overlap)), by_share)


def _recency(tokens: list[list[int]]) -> npt.NDArray[np.float64]:
    """For each use, how many other experts were used since the last one of the same; infinite for a first one."""
    order: list[int] = []
    depths = []
    for ids in tokens:
        for expert in ids:
            if expert in order:
                depth = order.index(expert)
                depths.append(float(depth))
                del order[depth]
            else:
                depths.append(float("inf"))
            order.insert(0, expert)
    return np.array(depths)
