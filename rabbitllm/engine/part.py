"""A model of which this process computes a part, and other processes compute the rest.

The units of the others have a name and a size here, are never bound, and take no memory. `rabbitllm.pipeline` connects
the processes.
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
    """The part of a model that a process computes.

    Attributes:
        units: names of its units; at least one.
        budgets: device -> bytes that their weights may take.
    """

    units: frozenset[str]
    budgets: Mapping[str, int]


class PartChooser(Protocol):
    """Chooses the part that this process computes, before any weight is read."""

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
            costs: the memory cost of each, in the same order.
            store: the weights.
            budgets: device -> bytes for weights if this process computed the whole model.

        Raises:
            RabbitLLMError: the model cannot be divided, or the other processes are missing or differ.
        """
        ...


def with_others(placement: Placement, sources: Mapping[str, UnitSource]) -> Placement:
    """A placement of this process's units and, in the order of a pass, those of other processes.

    Args:
        placement: of this process's units.
        sources: all units, in the order of a pass.
    """
    here = {placed.unit: placed for placed in placement.units}
    away = placement.home  # the device of their placeholders
    units = (
        here.get(name) or PlacedUnit(name, away, Tier.ELSEWHERE, source.stored_bytes)
        for name, source in sources.items()
    )
    return replace(placement, units=tuple(units))
