r"""Tensor name -> layer, by the naming of the model's family.

A *layer* is the unit that is streamed. Its id is the short name (`layers.0`, `embed_tokens`), its stem is RabbitLLM
1.1's file name (`model.layers.0`, `model.embed_tokens`): everything up to and including the id. A family is a list
of patterns, tried in order, each with a group named `id`; the first that matches at the start of the name counts.
Tensors that no pattern matches are grouped by their numbered block.

To add a family, add its `model_type` to `_TYPES`; to try one without editing, call `register_layer_naming`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    """The patterns of one family, in the order of matching."""

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
# The module that owns a tensor, where that is not a decoder layer: `model.embed_tokens.weight` -> `embed_tokens`.
_OWNER = rf"(?:model\.)?(?P<id>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*?)\.[^.]+{_STATE}$"
_STACK = r"(?:[A-Za-z_]\w*\.)*?"

_LLAMA = (
    r"model\.(?P<id>layers\.\d+)\.",
    r"(?:model\.)?(?P<id>mtp(?:\.layers\.\d+)?)\.",  # multi-token prediction: split, listed, not streamed
    _OWNER,
)
_DECODER = (r"(?:model\.)?(?P<id>decoder\.layers\.\d+)\.", _OWNER)
_GPT2 = (r"(?:transformer\.)?(?P<id>h\.\d+)\.", r"(?:transformer\.)?(?P<id>\w+)\.[^.]+$", _OWNER)
_BACKBONE = (r"(?:backbone\.|model\.)?(?P<id>layers\.\d+)\.", _OWNER)
_ENCODER_DECODER = (r"(?P<id>(?:encoder|decoder)\.block\.\d+)\.", _OWNER)
_TOWERS = (
    # several stacks in one checkpoint: language model, vision or audio tower; the id keeps the stack's name
    rf"(?:model\.)?(?P<id>{_STACK}(?:layers|blocks|block|h|layer)\.\d+)\.",
    _OWNER,
)

_GPT_NEOX = (r"gpt_neox\.(?P<id>layers\.\d+)\.", rf"(?:gpt_neox\.)?(?P<id>\w+)\.[^.]+{_STATE}$")
_TYPES = (
    (
        _LLAMA,
        """
        llama mistral mixtral ministral qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text
        gemma gemma2 gemma3_text phi phi3 phimoe gpt_oss deepseek_v2 deepseek_v3 glm glm4 glm4_moe cohere cohere2
        olmo olmo2 olmo3 olmoe starcoder2 stablelm granite granitemoe exaone4 smollm3 ernie4_5 seed_oss internlm2
        baichuan minimax hunyuan_v1_dense lfm2 lfm2_moe jamba apertus
        """,
    ),
    (_DECODER, "opt"),
    (_GPT2, "gpt2 gpt_bigcode gptj gpt_neo bloom falcon mpt chatglm qwen"),
    (_GPT_NEOX, "gpt_neox"),
    (_BACKBONE, "mamba mamba2 falcon_mamba zamba2"),
    (_ENCODER_DECODER, "t5 mt5 umt5"),
    (
        _TOWERS,
        """
        gemma3 gemma3n gemma4 llava llava_next mistral3 qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5
        qwen3_5_moe internvl llama4 mllama paligemma idefics3 glm4v
        """,
    ),
)
FAMILIES: Mapping[str, tuple[str, ...]] = {family: patterns for patterns, names in _TYPES for family in names.split()}
"""`model_type` of transformers -> patterns."""

_NAME = r"\d*[^.\d][^.]*"
_BLOCKS = (
    # the first number in a name that follows at least one word: the block of the outermost list
    rf"(?:model\.)?(?P<id>[^.]+(?:\.{_NAME})*?\.\d+)\.",
    _OWNER,
    rf"(?P<id>[^.]+(?:\.[^.]+)*?)\.[^.]+{_STATE}$",
)
_registered: dict[str, LayerNaming] = {}


def register_layer_naming(family: str, patterns: Sequence[str]) -> None:
    """Set or replace the patterns of a family for this process.

    Args:
        family: the `model_type` in the checkpoint's config.json.
        patterns: see `naming`.

    Raises:
        OptionError: a pattern is not usable.
    """
    _registered[family] = naming(patterns)


def naming_for(family: str | None) -> LayerNaming | None:
    """The patterns of a family, the user's own first; None for an unknown family."""
    if family is None:
        return None
    if family in _registered:
        return _registered[family]
    return naming(FAMILIES[family]) if family in FAMILIES else None


def guessed_naming() -> LayerNaming:
    """The grouping of tensors that match no family's pattern: by the block of the outermost list, else by module.

    `backbone.layers.3.mixer.A_log` is in `backbone.layers.3`, `vision.stages.1.blocks.0.conv.weight` in
    `vision.stages.1`; `model.projector.weight`, which is in no list, is in `projector`.
    """
    return naming(_BLOCKS)


def assign_layers(
    tensors: Sequence[str], family: str | None, chosen: LayerNaming | None = None
) -> dict[str, LayerName]:
    """The layer of every tensor.

    Tensors of an unknown family are grouped by `guessed_naming`. If most of them are in no numbered block, the guess
    may be poor, and a warning is logged. Unmatched tensors of a known family are grouped in the same way, unless that
    would add to a layer that the patterns name.

    Args:
        tensors: all tensor names of the checkpoint.
        family: `model_type` of its config, if any.
        chosen: the caller's own patterns, used instead of the family's.
    """
    rules = chosen or naming_for(family)
    guess = guessed_naming()
    if rules is None:
        _warn_of_few_blocks(tensors, family)
        rules = guess
    named = {tensor: rules.find(tensor) for tensor in tensors}
    taken = {word for layer in named.values() if layer is not None for word in (layer.id, layer.stem)}
    return _distinct_ids({tensor: layer or _unnamed(tensor, guess, taken) for tensor, layer in named.items()})


def _unnamed(tensor: str, guess: LayerNaming, taken: set[str]) -> LayerName:
    """The layer of an unmatched tensor; a layer of its own if its block shares the name of another layer."""
    found = guess.find(tensor)
    alone = found is None or found.stem in taken
    stem = tensor if alone or found is None else found.stem
    return LayerName(stem, stem)


def _warn_of_few_blocks(tensors: Sequence[str], family: str | None) -> None:
    in_a_block = re.compile(_BLOCKS[0])
    outside = sum(in_a_block.match(tensor) is None for tensor in tensors)
    if 2 * outside > len(tensors):
        logger.warning(
            "The naming of model type %r is not known, and %d of its %d tensors are in no numbered block such as "
            "'model.layers.0.'; each module of theirs gets a layer file. "
            "To set it: rabbitllm.register_layer_naming(%r, [...]).",
            family,
            outside,
            len(tensors),
            family,
        )


def _distinct_ids(assigned: dict[str, LayerName]) -> dict[str, LayerName]:
    """Use the stem as id where two stems share an id (`model.norm` and `norm`), until no two do."""
    while True:
        stems: dict[str, set[str]] = {}
        for layer in assigned.values():
            stems.setdefault(layer.id, set()).add(layer.stem)
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
