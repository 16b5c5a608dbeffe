"""Outlines of well-known models, from a file of this package: names and shapes of tensors, each kind of layer once.

A model of 80 equal layers takes what one of them takes, 80 times, and a mixture of 48 layers with 512 experts each has
74,000 tensors, of which 3,000 cover all kinds of layers. So an outline is a small model with each kind of layer once,
and a map from every layer of the real model to its kind. Imports no torch; reads no file of a model.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.config import model_type_of, quantized_as
from rabbitllm.checkpoints.naming import assign_layers
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.schemes import COMPRESSIONS
from rabbitllm.splitter.disk_budget import on_disk
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, make_plan, recompressed

SHARD = "outline.safetensors"
"""Name of the nonexistent file that the tensors are assumed to be in."""
_LAYER = re.compile(r"(?:language_model\.)?(?:model\.)?layers\.(\d+)")
"""Ids of decoder layers; a sample has as many layers of encoders for pictures, and of extra heads, as the model."""
_MANY = re.compile(r"\{(\d+)\}")


@dataclass(frozen=True)
class Outline:
    """A model and a smaller sample of it.

    Attributes:
        config: of the model, as published.
        sample: config of a model with each kind of its decoder layers once.
        stored: the tensors of the sample; those outside of decoder layers are the model's own.
        layers: for each decoder layer of the model, the number of the sample's layer of the same kind.
    """

    config: Mapping[str, Any]
    sample: Mapping[str, Any]
    stored: tuple[TensorToWrite, ...]
    layers: tuple[int, ...]

    @property
    def compressions(self) -> tuple[str | None, ...]:
        """The compressions at which it can be split: only None if it is published quantized."""
        return (None,) if quantized_as(self.config) else COMPRESSIONS

    def times(self, layer: str) -> int:
        """Return how often the model has a layer of the sample, by the layer's id."""
        numbered = _LAYER.fullmatch(layer)
        return (self.layers.count(int(numbered[1])) or 1) if numbered else 1

    @cached_property
    def plans(self) -> dict[str | None, SplitPlan]:
        """The sample's split at each compression, as if all of it were in one shard."""
        specs, offset = [], 0
        for tensor in self.stored:
            specs.append(TensorSpec(*tensor, SHARD, offset, tensor.nbytes))
            offset += tensor.nbytes
        shard = PlannedShard(SHARD, offset, "", tuple(specs), staged=False)
        assigned = assign_layers([spec.name for spec in specs], model_type_of(self.config))
        base = make_plan(SourceIdentity("local", "outline", None, {}), (shard,), assigned, None)
        return {c: recompressed(base, c) if c else base for c in self.compressions}

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors as published."""
        return sum(
            self.times(layer) * sum(form.source.nbytes for form in layout.forms)
            for layer, layout in self.plans[None].layouts.items()
        )

    def output_bytes(self, compression: str | None) -> int:
        """Return the bytes of all layer files, as they occupy a disk."""
        return sum(
            self.times(layer) * on_disk(layout.size) for layer, layout in self.plans[compression].layouts.items()
        )


# The short list of well-known models, from figures in the package; uses no network.


@dataclass(frozen=True)
class Published:
    """A model on the hub.

    Attributes:
        repository: organisation/name.
        parameters: number of parameters.
        largest_shard_bytes: of its files.
        outline: its config, as far as it determines shapes, and its tensors.
    """

    repository: str
    parameters: int
    largest_shard_bytes: int
    outline: Outline

    @property
    def quantized(self) -> str | None:
        """The quantization of its published weights; None for plain ones."""
        return quantized_as(self.outline.config)


@functools.cache
def published() -> tuple[Published, ...]:
    """Return all models of the list, from the smallest to the largest."""
    content = json.loads(resources.files("rabbitllm.estimate").joinpath("models.json").read_text(encoding="utf-8"))
    return tuple(
        Published(entry["repository"], entry["parameters"], int(entry["largest_shard_gb"] * 1000**3), outline_of(entry))
        for entry in content["models"]
    )


def outline_of(entry: Mapping[str, Any]) -> Outline:
    """Return the outline of an entry of models.json, which says what is in one."""
    stored = []
    for name, form in entry["tensors"].items():
        dtype, *shape = form if isinstance(form[0], str) else ("BF16", *form)
        many = _MANY.search(name)
        indices: Sequence[object] = range(int(many[1])) if many else [""]
        stored += [TensorToWrite(_MANY.sub(str(index), name), dtype, tuple(shape)) for index in indices]
    layers = tuple(map(int, entry["layers"]))
    config, sample = entry["config"], {**entry["config"], **entry["sample"]}
    if "text_config" in entry["sample"]:
        sample["text_config"] = {**config["text_config"], **entry["sample"]["text_config"]}
    return Outline(config, sample, tuple(stored), layers)
