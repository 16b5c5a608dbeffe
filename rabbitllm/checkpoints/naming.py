r"""Tensor name -> layer, by the numbered blocks in the names.

A *layer* is the unit that is streamed. Its id is the short name (`layers.0`, `embed_tokens`), its stem is RabbitLLM
1.1's file name (`model.layers.0`, `model.embed_tokens`): everything up to and including the id. The rules are the same
for all model types: the first number in a tensor's name is the number of its block, and the words before it name the
list of blocks. Tensors outside of blocks belong to the layer of their module.

`register_layer_naming` sets other rules for a model type: patterns, tried in order, each with a group named `id`; the
first that matches at the start of the name counts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rabbitllm.base.grouping import grouped
from rabbitllm.checkpoints.index import natural_key
from rabbitllm.errors import OptionError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerName:
    """The layer of a tensor: its id for people and its stem for file names."""

    id: str
    stem: str


@dataclass(frozen=True, slots=True)
class LayerNaming:
    """Patterns in the order of matching."""

    patterns: tuple[re.Pattern[str], ...]

    def find(self, tensor: str) -> LayerName | None:
        """The layer of a tensor, or None where no pattern matches."""
        for pattern in self.patterns:
            if match := pattern.match(tensor):
                return LayerName(match["id"], tensor[: match.end("id")])
        return None


def naming(patterns: Iterable[str]) -> LayerNaming:
    r"""A `LayerNaming` from regular expressions.

    Args:
        patterns: each with a group named `id`, e.g. `r"model\.(?P<id>layers\.\d+)\."`.

    Raises:
        OptionError: a pattern does not compile, or has no group named `id`.
    """
    compiled = []
    for text in patterns:
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise OptionError(f"the layer pattern {text!r} is not a regular expression: {error}") from None
        if "id" not in pattern.groupindex:
            raise OptionError(
                f"the layer pattern {text!r} has no group named 'id', as in r'model\\.(?P<id>layers\\.\\d+)\\.'"
            )
        compiled.append(pattern)
    return LayerNaming(tuple(compiled))


# Quantization state that bitsandbytes stores with a weight that was published quantized: `lm_head.weight.absmax`.
_STATE = r"(?:\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+))?"
# The body of a model with a head, which transformers calls `base_model_prefix`; not part of an id.
_BODY = r"(?:(?:model|transformer|backbone|gpt_neox)\.)?"
_NAME = r"\d*[^.\d][^.]*"
WRAPPER = r"(?:_orig_mod\.|module\.)*"
"""Modules of torch.compile and of (Distributed)DataParallel around a model that was saved with them."""
_RULES = (
    # the first number in a name that follows at least one word: the block of the outermost list
    rf"{WRAPPER}{_BODY}(?P<id>[^.]+(?:\.{_NAME})*?\.\d+)\.",
    r"(?:model\.)?(?P<id>mtp)\.",  # multi-token prediction: split, listed, not streamed
    rf"{WRAPPER}{_BODY}(?P<id>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*?)\.[^.]+{_STATE}$",
    rf"(?P<id>[^.]+(?:\.[^.]+)*?)\.[^.]+{_STATE}$",
)
_FURTHER = re.compile(r"(?:model\.)?mtp(?:\..*)?|(?:[\w.]+\.)?layers\.(?P<index>\d+)")
"""Layers that may be for multi-token prediction: with an index only those behind the model's last layer."""
_registered: dict[str, LayerNaming] = {}


def register_layer_naming(family: str, patterns: Sequence[str]) -> None:
    """Set or replace the patterns of a model type for this process.

    Args:
        family: the `model_type` in the checkpoint's config.json.
        patterns: see `naming`.

    Raises:
        OptionError: a pattern is not usable.
    """
    _registered[family] = naming(patterns)


def predicts_further(layer: str, layers: int | None) -> bool:
    """Whether a layer is for multi-token prediction, by its id: named so, or behind the last of the model's layers.

    Args:
        layer: its id.
        layers: `config.layers_before_heads`.
    """
    match = _FURTHER.fullmatch(layer)
    return match is not None and (match["index"] is None or (layers is not None and int(match["index"]) >= layers))


def naming_for(family: str | None) -> LayerNaming:
    """The registered patterns of a model type, else `naming_by_block`."""
    return _registered.get(family or "") or naming_by_block()


def naming_by_block() -> LayerNaming:
    """The rules for all model types: the block of the outermost list, else the module.

    `backbone.layers.3.mixer.A_log` is in `layers.3`, `vision.stages.1.blocks.0.conv.weight` in `vision.stages.1`;
    `model.projector.weight`, which is in no list, is in `projector`.
    """
    return naming(_RULES)


def assign_layers(
    tensors: Sequence[str], family: str | None, custom: LayerNaming | None = None
) -> dict[str, LayerName]:
    """The layer of every tensor.

    Tensors are grouped by the patterns of the caller, else by registered ones, else by `naming_by_block`; without
    patterns a warning is logged if most tensors are in no numbered block. Tensors that no pattern matches are grouped
    by `naming_by_block`, unless that would add to a layer that the patterns name.

    Args:
        tensors: all tensor names of the checkpoint.
        family: `model_type` of its config, if any.
        custom: the caller's own patterns.
    """
    if custom is None and family not in _registered:
        _warn_of_few_blocks(tensors, family)
    rules, by_block = custom or naming_for(family), naming_by_block()
    layers = {tensor: rules.find(tensor) for tensor in tensors}
    taken = {word for layer in layers.values() if layer is not None for word in (layer.id, layer.stem)}
    return _distinct_ids({tensor: layer or _unmatched(tensor, by_block, taken) for tensor, layer in layers.items()})


def _unmatched(tensor: str, by_block: LayerNaming, taken: set[str]) -> LayerName:
    """The layer of an unmatched tensor; a layer of its own if its block shares the name of another layer."""
    layer = by_block.find(tensor)
    stem = tensor if layer is None or layer.stem in taken else layer.stem
    return LayerName(stem, stem)


def _warn_of_few_blocks(tensors: Sequence[str], family: str | None) -> None:
    in_a_block = re.compile(_RULES[0])
    outside = sum(in_a_block.match(tensor) is None for tensor in tensors)
    if 2 * outside > len(tensors):
        logger.warning(
            "Of the %d tensors of model type %r, %d do not belong to a numbered block such as 'model.layers.0.'; each "
            "of their modules gets a layer file. To set other layers: rabbitllm.register_layer_naming(%r, [...]).",
            len(tensors),
            family,
            outside,
            family,
        )


def _distinct_ids(assigned: dict[str, LayerName]) -> dict[str, LayerName]:
    """Use the stem as id where two stems share an id (`model.norm` and `norm`), until no two do."""
    while True:
        stems = grouped((layer.id, layer.stem) for layer in {*assigned.values()})
        if all(len(sharing) == 1 for sharing in stems.values()):
            return assigned
        assigned = {
            tensor: layer if len(stems[layer.id]) == 1 else LayerName(layer.stem, layer.stem)
            for tensor, layer in assigned.items()
        }


def layer_order(stem: str) -> tuple[object, ...]:
    """A sort key for layers in the order of a pass, as far as names tell: embeddings, stacks, norm, head."""
    last = stem.rsplit(".", 1)[-1]
    if any(word in last for word in ("head", "embed_out", "output")):
        rank = 3
    elif any(word in last for word in ("norm", "ln_f")):
        rank = 2
    elif any(char.isdigit() for char in stem):
        rank = 1
    else:
        rank = 0
    return (rank, natural_key(stem))


_TENSOR_OF_HEADS = re.compile(
    rf"{WRAPPER}(?:(?:model|language_model)\.)*(?:mtp\.(?:layers\.(?P<head>\d+)\.)?|layers\.(?P<index>\d+)\.)"
)


def head_of(tensor: str, layers: int) -> int | None:
    """The head for multi-token prediction, counted from 0, that a tensor belongs to; None if it belongs to none.

    Args:
        tensor: its name.
        layers: number of the model's layers, behind which the heads may be numbered.
    """
    match = _TENSOR_OF_HEADS.match(tensor)
    if match is None or match["index"] is None:
        return None if match is None else int(match["head"] or 0)
    return int(match["index"]) - layers if int(match["index"]) >= layers else None
