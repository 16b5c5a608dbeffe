"""A model of which this process has a part, and others have the rest.

What the others have is known here by name and size, is never bound, and takes no memory. Who they are, and how they are
reached, is `rabbitllm.pipeline`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rabbitllm.engine.placement import PlacedUnit, Placement, Tier, UnitCost
from rabbitllm.engine.unit_source import UnitSource
from rabbitllm.store.layer_store import WeightFiles


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What a process has of a model.

    Attributes:
        units: that it computes; at least one.
        budgets: device -> bytes that their weights may take.
    """

    units: frozenset[str]
    budgets: Mapping[str, int]


class PartChooser(Protocol):
    """Decides which part this process has, before any weight is read."""

    def __call__(
        self,
        model: Any,
        sources: Mapping[str, UnitSource],
        costs: Sequence[UnitCost],
        store: WeightFiles,
        budgets: Mapping[str, int],
    ) -> ModelPart:
        """
        Args:
            model: the skeleton, on the meta device.
            sources: its units, in the order of a pass.
            costs: what each takes, in the same order.
            store: the weights.
            budgets: device -> bytes that this process would give to weights, if it were alone.

        Raises:
            RabbitLLMError: the model cannot be parted, or the others are not there or not alike.
        """
        ...


def with_others(placement: Placement, sources: Mapping[str, UnitSource]) -> Placement:
    """A placement of this process's units, and between them those that are elsewhere.

    Args:
        placement: of the units that are here.
        sources: all units, in the order of a pass.
    """
    here = {placed.unit: placed for placed in placement.units}
    away = placement.home  # what stands in for them is there
    units = (
        here.get(name) or PlacedUnit(name, away, Tier.ELSEWHERE, source.stored_bytes)
        for name, source in sources.items()
    )
    return replace(placement, units=tuple(units))
