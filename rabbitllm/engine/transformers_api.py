"""The private parts of transformers that the engine uses, and the rooms above it: what a new version may change.

Four more files use private parts: `checkpoints/transformers_gguf.py`, `generation/transformers_api.py`,
`_published_conversions.py`, and `streamed_model.py`, which overrides two methods. All others import from these, or
public names from `transformers` itself; `tests/test_transformers_parts.py` checks that. The imports here fail with a
clear error if a part is missing or is called otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, WeightConverter

from rabbitllm.base.transformers_version import check_call, checked_parts

with checked_parts():
    from transformers import cache_utils
    from transformers.activations import ACT2FN as ACT2FN
    from transformers.cache_utils import DummyLayer as DummyLayer
    from transformers.cache_utils import DynamicIndexedLayer as DynamicIndexedLayer
    from transformers.cache_utils import DynamicSlidingWindowLayer as DynamicSlidingWindowLayer
    from transformers.cache_utils import LinearAttentionCacheLayerMixin as LinearAttentionCacheLayerMixin
    from transformers.cache_utils import LinearAttentionLayer as LinearAttentionLayer
    from transformers.conversion_mapping import get_model_conversion_mapping as get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming as WeightRenaming
    from transformers.core_model_loading import WeightTransform as WeightTransform
    from transformers.core_model_loading import build_glob_alternation
    from transformers.core_model_loading import dot_natural_key as dot_natural_key
    from transformers.core_model_loading import rename_source_key as rename_source_key
    from transformers.integrations import sdpa_attention
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto import modeling_auto
    from transformers.quantizers.auto import AutoHfQuantizer as AutoHfQuantizer
    from transformers.quantizers.base import HfQuantizer as HfQuantizer
    from transformers.utils import is_flash_attn_2_available, output_capturing

    check_call(PreTrainedModel._from_config, "config", dtype="", attn_implementation="")
    check_call(PreTrainedModel._get_dtype_plan, "self", "dtype")
    check_call(PreTrainedModel.initialize_weights, "self")
    check_call(GenerationMixin._valid_auto_compile_criteria, "self", "model_kwargs", "generation_config")
    check_call(build_glob_alternation, "globs")
    check_call(rename_source_key, "source", "renamings", "converters", "prefix", "state_dict")
    check_call(get_model_conversion_mapping, "model", hf_quantizer="")
    check_call(WeightTransform.add_tensor, "self", "target", "source", "pattern", "read")
    check_call(WeightConverter.convert, "self", "target", model="", config="")
    if hasattr(cache_utils, "MtpCache"):  # since 5.24
        from transformers.cache_utils import MtpCache
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.masking_utils import create_causal_mask
        from transformers.modeling_layers import MtpModel

        check_call(MtpModel.forward_layer, "self", "index", "hidden", "positions", "cache", inputs_embeds="")
        check_call(MtpModel._project_to_logits, "self", "hidden")


# outputs of layers ---------------------------------------------------------------------------------------------------


def is_for_outputs(hook: Any) -> bool:
    """Whether a hook is one of those that keep what layers return; a model has them once it was asked for that."""
    return bool(getattr(hook, "__module__", None) == output_capturing.__name__)


def keeps_outputs() -> bool:
    """Whether these keep something in the present pass."""
    return bool(output_capturing._active_collector.get())


# the skeleton --------------------------------------------------------------------------------------------------------


def build_model(class_: Any, config: PretrainedConfig, trust_remote_code: bool, **options: Any) -> Any:
    """The model of a config, on the device of the context.

    Args:
        class_: class of the model, or an Auto class.
        config: of the model.
        trust_remote_code: run code of the checkpoint.
        **options: `dtype` and `attn_implementation`.
    """
    if hasattr(class_, "_from_config"):
        return class_._from_config(config, **options)
    return class_.from_config(config, trust_remote_code=trust_remote_code, **options)


def is_class_of_type(name: str, model_type: str) -> bool:
    """Whether a table of transformers names the class for a model type."""
    tables = [table for key, table in vars(modeling_auto).items() if key.endswith("_MAPPING_NAMES")]
    entries = [table.get(model_type, ()) for table in tables]
    return any(name in ((names,) if isinstance(names, str) else names) for names in entries)


def kept_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes of parameters and buffers that a model keeps in another dtype than they have now, by their names.

    Args:
        model: of `build_model`.
        dtype: of the other parameters.
    """
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return {}
    pattern, by_group, _ = build_glob_alternation(list(plan))
    matches = {name: (tensor, pattern.search(name)) for name, tensor in model.state_dict().items()}
    kept = {name: (tensor, plan[by_group[match.lastgroup]]) for name, (tensor, match) in matches.items() if match}
    return {name: planned for name, (tensor, planned) in kept.items() if tensor.dtype != planned}


def mark_initialized(model: PreTrainedModel, absent: Container[str]) -> None:
    """Let `initialize_rest` leave the present parameters and buffers unchanged, except those with these names."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor._is_hf_initialized = name not in absent


def initialize_rest(model: PreTrainedModel) -> None:
    """Initialise every parameter and buffer that is not marked, in all modules."""
    for module in model.modules():
        module._is_hf_initialized = False  # set when the module was made, on the meta device
    model.initialize_weights()


GENERATION_SETTINGS_OF_CONFIG = {"config_file_name": "config.json", "_from_model_config": True}
"""Options of `GenerationConfig.from_pretrained` for models whose config.json has the settings."""


def layer_class_names(model: PreTrainedModel) -> set[str]:
    """Names of the classes of a model's layers, as far as it declares them."""
    return set(model._no_split_modules or ())


def may_be_absent(model: PreTrainedModel) -> Iterable[str]:
    """Patterns of parameters that a checkpoint may lack."""
    return model._keys_to_ignore_on_load_missing or ()


def may_be_unused(model: PreTrainedModel) -> Iterable[str]:
    """Patterns of stored tensors that the model ignores."""
    return model._keys_to_ignore_on_load_unexpected or ()


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether `load_adapter` was called."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


# heads for multi-token prediction ------------------------------------------------------------------------------------


def build_heads(model: PreTrainedModel, config: PretrainedConfig) -> Any:
    """transformers' `MtpModel` with as many heads as the config has layers, without the parts that the model shares.

    Args:
        model: whose layers and norms have the classes of those of the heads.
        config: of the heads, by `heads_config`.
    """
    decoder = model.get_decoder()
    if getattr(config, "mtp_layers_block_type", None) is not None:
        layer: Any = type("Blocks", (_Blocks,), {"block": type(decoder.layers[0])})(config, 0)
        config.rms_norm_eps = config.layer_norm_epsilon
    else:
        # `MtpModel` takes the first norm in the layer for that of the heads; in linear attention it may have a gate
        layer = next(
            layer
            for layer in reversed(decoder.layers)
            if type(next(module for name, module in layer.named_modules() if "norm" in name)) is type(decoder.norm)
        )
    nothing = torch.nn.Identity()
    stand_in = SimpleNamespace(
        config=SimpleNamespace(get_mtp_config=lambda: config),
        get_decoder=lambda: SimpleNamespace(
            layers=[layer], rotary_emb=nothing if getattr(decoder, "rotary_emb", None) is not None else None
        ),
        get_input_embeddings=lambda: nothing,
        lm_head=nothing,
    )
    heads = MtpModel(stand_in, config.num_hidden_layers)
    for name in _SHARED:
        heads._modules.pop(name, None)
    for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        setattr(heads, name, getattr(model, name))
    heads.first = model.config.get_text_config(decoder=True).num_hidden_layers
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := layer_types - _TYPES:
        raise ValueError(f"layers of type {min(unknown)}; expected {', '.join(sorted(_TYPES))}")
    if _INDEXED in layer_types:  # transformers has no argument of a layer for its mask
        heads.create_masks_for_mtp_layer = partial(_mask_of_indexed, config)
        for layer in heads.layers:
            layer.mtp_block.register_forward_hook(_states_alone)
    return heads


def blocks_of_head(config: PretrainedConfig) -> list[str]:
    """The types of the blocks that are a head's layer, one after the other (Nemotron 3); none if it is one layer."""
    return list(getattr(config, "mtp_layers_block_type", None) or ())


class _Blocks(torch.nn.ModuleList):
    """The layer of a head of `blocks_of_head`; `block` is the class of each."""

    block: Any

    def __init__(self, config: Any, index: int) -> None:
        types = blocks_of_head(config)
        if types.count("full_attention") != 1 or not {*types} <= {"full_attention", "moe", "mlp"}:
            raise ValueError(
                f"a head of {', '.join(types) or 'no blocks'}; expected one full_attention, and moe or mlp"
            )
        own = copy.deepcopy(config)
        own.layer_types = types
        super().__init__(self.block(own, place) for place in range(len(types)))
        attention: Any = self[types.index("full_attention")]
        attention.mixer.layer_idx = index

    def forward(self, hidden: torch.Tensor, *, position_embeddings: None, **named: Any) -> torch.Tensor:
        """Compute the blocks; `position_embeddings` is what the model has none of."""
        for block in self:
            hidden = block(hidden, **named)
        return hidden


_INDEXED = "indexed_attention"
_TYPES = {"full_attention", "sliding_attention", "hybrid", "hybrid_sliding", _INDEXED}
"""Types of layers that heads can have."""


def _mask_of_indexed(config: Any, index: int, embedded: Any, cache: Any, positions: Any) -> dict[str, torch.Tensor]:
    """The mask of a head whose layer chooses tokens by an index."""
    places = {"position_ids": positions, "layer_idx": index}
    return {"attention_mask": create_causal_mask(config, embedded, None, cache, allow_is_causal_skip=False, **places)}


def _states_alone(module: Any, inputs: Any, output: Any) -> Any:
    """A forward hook of a layer that returns the tokens that it chose, too."""
    return output[0] if isinstance(output, tuple) else output


_SHARED = ("embed_tokens", "shared_head", "rotary_emb")
"""Modules that `MtpModel` takes from the model."""


def share_with_heads(heads: Any, model: PreTrainedModel) -> None:
    """Let heads use the model's output layer and rotary embedding, which stay modules of the model alone."""
    shared = (None, model.get_output_embeddings(), getattr(model.get_decoder(), "rotary_emb", None))
    vars(heads).update(zip(_SHARED, shared, strict=True))


def logits_of_heads(heads: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Apply the output layer as the model does, to hidden states of shape (1, tokens, width)."""
    logits: torch.Tensor = heads._project_to_logits(hidden)
    return logits


def heads_cache(heads: Any) -> Any:
    """An empty KV cache of heads, whose windows can go back."""
    cache = MtpCache(config=heads.config)
    cache.activate_past_recording()
    return cache


def has_heads() -> bool:
    """Whether this version of transformers has classes for heads."""
    return hasattr(cache_utils, "MtpCache")


def conversions_of(model: PreTrainedModel, quantizer: HfQuantizer | None) -> list[WeightTransform]:
    """The conversions from a checkpoint's tensors to a model, or to its heads as `MtpModel.from_pretrained` does it."""
    if not has_heads() or not isinstance(model, MtpModel):
        conversions: list[WeightTransform] = get_model_conversion_mapping(model, hf_quantizer=quantizer)
        return conversions
    conversions = [
        WeightRenaming(f"layers.{model.first + index}.", f"layers.{index}.mtp_block.")
        for index in range(model.config.num_hidden_layers)
    ]
    count = len(blocks_of_head(model.config))
    for index in range(count * model.config.num_hidden_layers):
        path, (head, place) = rf"mtp\.layers\.{index}\.", divmod(index, count)
        conversions += [
            WeightRenaming(rf"{path}final_layernorm\.", f"layers.{head}.post_norm."),
            WeightRenaming(rf"{path}(enorm|hnorm|eh_proj)\.", rf"layers.{head}.\1."),
            WeightRenaming(path, f"layers.{head}.mtp_block.{place}."),
        ]
    conversions += get_model_conversion_mapping(model, add_legacy=False)
    conversions += get_checkpoint_conversion_mapping(model.config.model_type) or []
    return conversions if quantizer is None else quantizer.update_weight_conversions(conversions, model)


# attention -----------------------------------------------------------------------------------------------------------


def attention_of(config: PretrainedConfig) -> str | None:
    """Name of the attention implementation of a config; None if it has none."""
    return getattr(config, "_attn_implementation", None)


def attends_by(config: PretrainedConfig, name: str) -> bool:
    """Whether a config names transformers' own `sdpa`, or the file's own `eager`, and that is not replaced."""
    own = sdpa_attention_forward if name == "sdpa" else None
    return attention_of(config) == name and ALL_ATTENTION_FUNCTIONS.get(name) is own


def groups_experts(config: PretrainedConfig) -> bool:
    """Whether a config names transformers' own `grouped_mm` for experts, and that is not replaced."""
    is_named = getattr(config, "_experts_implementation", None) == "grouped_mm"
    return is_named and ALL_EXPERTS_FUNCTIONS.get("grouped_mm") is grouped_mm_experts_forward


def function_tables() -> list[dict[str, Any]]:
    """The dicts that say what `sdpa` and `grouped_mm` are."""
    interfaces = ALL_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS
    return [table for each in interfaces for table in (each._global_mapping, each._local_mapping)]


def supports_flash_attention_2(model_class: Any) -> bool:
    """Whether FlashAttention 2 is installed, and a model's class supports it."""
    implementations = getattr(model_class, "_compatible_flash_implementations", None) or ["flash_attention_2"]
    supported = getattr(model_class, "_supports_flash_attn", False) and "flash_attention_2" in implementations
    return bool(supported and is_flash_attn_2_available())


def group_keys_if(condition: Callable[[torch.Tensor], bool]) -> None:
    """Make transformers' `sdpa` use `enable_gqa` only for keys that satisfy a condition, and where it did before."""
    if not hasattr(sdpa_attention, "use_gqa_in_sdpa"):
        return
    ordinary = sdpa_attention.use_gqa_in_sdpa

    def use_gqa(attention_mask: torch.Tensor | None, key: torch.Tensor, *options: Any) -> bool:
        return condition(key) and bool(ordinary(attention_mask, key, *options))

    sdpa_attention.use_gqa_in_sdpa = use_gqa


# caches and quantizers -----------------------------------------------------------------------------------------------


def cache_layer_class(name: str) -> type:
    """A class of layers of a KV cache."""
    layer_class: type = getattr(cache_utils, name)
    return layer_class


def expert_bits(settings: Any) -> int:
    """Bits of the codes of experts, by settings of compressed-tensors."""
    from transformers.integrations.compressed_tensors import get_experts_scheme

    return int(get_experts_scheme(settings).weights.num_bits)


def kept_in_float32(model: Any) -> tuple[str, ...]:
    """Parts of the names of modules that a model's class keeps in float32 at float16."""
    return tuple(model._keep_in_fp32_modules or ())
