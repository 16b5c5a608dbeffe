"""The composition of a checkpoint, from its plan: sizes, and tensors that are treated differently. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rabbitllm.base.options import BIG_LAYER_BYTES
from rabbitllm.checkpoints.config import quantized_as
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec
from rabbitllm.quant.compression import MAX_ROUTER_ROWS, MIN_ELEMENTS, is_compressible
from rabbitllm.splitter.plan import SplitPlan

_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer)\.|^output\.")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors with a common trait: its description, their number, and their bytes in the checkpoint."""

    what: str
    count: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The composition of a checkpoint.

    Attributes:
        total_bytes: size of all shards.
        shards, largest_shard_bytes: number of shards, and size of the largest.
        layers, largest_layer, largest_layer_bytes: number of layers, the id of the largest, and the size of its
            uncompressed layer file.
        tensors: number of tensors.
        parameters: number of elements of floating tensors.
        tied_embeddings: True if the config says so and there is no output head; False if there is one; None where
            there is none and the config does not say so.
        never_compressed: floating tensors of two or more dimensions that compression leaves alone, by reason.
        not_floating: tensors that are not floating, by dtype.
        empty, scalars: number of tensors without elements, and of those without dimensions.
        layers_over_shards, most_shards_of_a_layer: number of layers whose tensors lie in several shards, and the
            largest number of shards of one layer.
        quantized: quantization of the published weights; None for plain ones.
    """

    total_bytes: int
    shards: int
    largest_shard_bytes: int
    layers: int
    largest_layer: str
    largest_layer_bytes: int
    tensors: int
    parameters: int
    tied_embeddings: bool | None
    never_compressed: tuple[TensorGroup, ...]
    not_floating: tuple[TensorGroup, ...]
    empty: int
    scalars: int
    layers_over_shards: int
    most_shards_of_a_layer: int
    quantized: str | None = None


def anatomy_of(plan: SplitPlan, config: Mapping[str, Any]) -> Anatomy:
    """Return the composition of a checkpoint, from its uncompressed plan and its config."""
    specs = plan.tensors
    sizes = {layer: layout.size for layer, layout in plan.layouts.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    spread = [len(shards) for shards in plan.layer_map.layer_to_shards.values()]
    return Anatomy(
        total_bytes=plan.source_bytes,
        shards=len(plan.shards),
        largest_shard_bytes=max((shard.size for shard in plan.shards), default=0),
        layers=len(sizes),
        largest_layer=largest,
        largest_layer_bytes=sizes.get(largest, 0),
        tensors=len(specs),
        parameters=sum(spec.elements for spec in specs if is_floating(spec)),
        tied_embeddings=_is_tied(specs, config),
        never_compressed=_grouped((why, spec) for spec in specs if (why := why_never_compressed(spec)) is not None),
        not_floating=_grouped((spec.dtype, spec) for spec in specs if not is_floating(spec)),
        empty=sum(not spec.elements for spec in specs),
        scalars=sum(spec.shape == () for spec in specs),
        layers_over_shards=sum(shards > 1 for shards in spread),
        most_shards_of_a_layer=max(spread, default=0),
        quantized=quantized_as(config),
    )


def is_floating(spec: TensorSpec) -> bool:
    """Whether a tensor has a floating dtype."""
    return "float" in DTYPES[spec.dtype].torch_name


def why_never_compressed(spec: TensorSpec) -> str | None:
    """Return why compression leaves a floating tensor of two or more dimensions alone; None for every other tensor."""
    if not is_floating(spec) or len(spec.shape) < 2 or not spec.elements or is_compressible(spec):
        return None
    if not DTYPES[spec.dtype].quantizable:
        return f"{spec.dtype} already"
    if spec.elements < MIN_ELEMENTS:
        return f"under {MIN_ELEMENTS:,} elements"
    if len(spec.shape) > 3:
        return "more than 3 dimensions"
    if is_compressible(spec._replace(shape=(MAX_ROUTER_ROWS + 1, MIN_ELEMENTS))):
        return "expert router"  # the only rule that exempts a tensor of that name because it has few rows
    if spec.name.endswith("bias"):
        return "biases of experts"
    return "convolution" if "conv" in spec.name.lower() else "state-space decay"


def _grouped(found: Iterable[tuple[str, TensorSpec]]) -> tuple[TensorGroup, ...]:
    groups: dict[str, list[int]] = {}
    for what, spec in found:
        groups.setdefault(what, []).append(spec.nbytes)
    made = (TensorGroup(what, len(sizes), sum(sizes)) for what, sizes in groups.items())
    return tuple(sorted(made, key=lambda group: (-group.total_bytes, group.what)))


def _is_tied(specs: Iterable[TensorSpec], config: Mapping[str, Any]) -> bool | None:
    if any(_HEAD.search(spec.name) for spec in specs):
        return False
    text = config.get("text_config")
    said = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    return True if said is True else None


def big_layers(plan: SplitPlan) -> tuple[str, ...]:
    """Return the layers whose files are so large that the split warns of them."""
    return tuple(layer for layer, layout in plan.layouts.items() if layout.size > BIG_LAYER_BYTES)


def commonest_dtype(plan: SplitPlan) -> str | None:
    """Return the dtype of most of the bytes that compression quantizes; None if it would touch nothing."""
    sums: dict[str, int] = {}
    for spec in filter(is_compressible, plan.tensors):
        sums[spec.dtype] = sums.get(spec.dtype, 0) + spec.nbytes
    return max(sums, key=sums.__getitem__, default=None)
