"""Which experts were routed to: a record of passes, as small as it can be. Pure.

Ids are of a layer's experts, from 0. A pass has one token or many (a prompt, a batch); an expert that several tokens of
a pass are routed to is used once by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
