"""The generation estimate for a model of which only an outline is known, by the code for complete plans.

The load plan of the outline's sample model is made; then each of its decoder layers is repeated for all layers of its
kind, and the whole is placed, listed and timed like any other model. Reads no weights; rates come from the machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.engine.load_plan import LoadPlan, make_load_plan, place_units
from rabbitllm.engine.units import UnitSource
from rabbitllm.estimate.generation import GenerationEstimate
from rabbitllm.estimate.machine import Machine
from rabbitllm.estimate.outline import Outline
from rabbitllm.estimate.predict import foretell
from rabbitllm.splitter.plan import PlannedFiles


def predict_outline(
    outline: Outline,
    compression: str | None,
    folder: Path,
    machine: Machine,
    readable: Sequence[Path],
    work: Path,
) -> tuple[LoadPlan, GenerationEstimate]:
    """Return the load plan of a model and its generation estimate.

    Args:
        outline: the model.
        compression: one of its `compressions`.
        folder: the folder that its layer files would be in.
        machine: the machine to run it on.
        readable: files that may be on the disk of `folder`.
        work: an empty folder, for the sample's config.

    Raises:
        RabbitLLMError: `load_model` would refuse the model.
    """
    (work / "config.json").write_text(json.dumps(outline.sample))
    store = PlannedFiles(outline.plans[compression], folder)
    drawn = stretched(make_load_plan(store, machine.options, work, machine.devices), outline.layers, machine)
    return drawn, foretell(compression, drawn, folder, machine, readable)


def stretched(sample: LoadPlan, layers: Sequence[int], machine: Machine) -> LoadPlan:
    """Return a load plan with the decoder layers of a larger model, placed again.

    Args:
        sample: of the small model.
        layers: for each decoder layer of the large one, the number of the small one's of the same kind.
        machine: the machine to place it on.
    """
    own = [name for name, source in sample.sources.items() if source.unit.is_layer]
    names = {f"{own[like].rpartition('.')[0]}.{at}": own[like] for at, like in enumerate(layers)}
    sources: dict[str, UnitSource] = {}
    for name, source in sample.sources.items():
        if name not in own:
            sources[name] = source
        elif name == own[0]:
            sources |= {long: sample.sources[short] for long, short in names.items()}
    by_unit: dict[str, list[ExpertSource]] = {}
    for found in sample.experts:
        by_unit.setdefault(found.unit, []).append(found)
    experts = tuple(
        dataclasses.replace(found, name=long + found.name.removeprefix(short), unit=long)
        for long, short in names.items()
        for found in by_unit.get(short, ())
    )
    placement = place_units(sample.model, sources, experts, machine.devices, machine.options)
    return dataclasses.replace(sample, sources=sources, experts=experts, placement=placement)
