"""The transformers model without its weights: the real class on the meta device, with real buffers.

Follows what transformers' own `from_pretrained` does around the loading of weights (modeling_utils.py: the dtype
plan, the placeholders of non-persistent buffers and their initialisation by the owning module), so that what is
computed from configs, such as rotary frequencies, is bit-equal to its result. Knows nothing of layer files.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbitllm.engine.published import change_modules, check_method
from rabbitllm.errors import OptionError, UnknownArchitectureError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


def read_config(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config, from a folder that has a config.json.

    Raises:
        UnknownArchitectureError: transformers does not know the model type, its code is not trusted, or the weights
            are quantised by a method that is not supported.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UnknownArchitectureError(
            f"{folder} has no config.json, so the model's architecture is not known.",
            "Give the model's own folder; for layers split elsewhere name that place with layer_shards_saving_path.",
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model_class(config)
    except (ValueError, KeyError, ImportError, OSError) as error:  # OSError: config.json is not JSON
        raise _unknown(folder, error) from error
    check_method(folder, config)
    return config


def _unknown(folder: Path, error: Exception) -> UnknownArchitectureError:
    import transformers

    return UnknownArchitectureError(
        f"transformers {transformers.__version__} cannot build the model in {folder}: {error}",
        "Update transformers. If the model brings its own code and you trust it, pass trust_remote_code=True.",
    )


def model_class(config: PretrainedConfig) -> Any:
    """The class that the checkpoint names, if transformers has it and it generates; else the causal LM of its type.

    Raises:
        ValueError: neither exists, and the config names no code of its own.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None and issubclass(found, transformers.GenerationMixin):
            return found
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        raise ValueError(f"it has no text-generating model of type {config.model_type!r}")
    return transformers.AutoModelForCausalLM


def build_skeleton(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None,
    trust_remote_code: bool = False,
    quantiser: Any = None,
) -> PreTrainedModel:
    """The model of a config, in eval mode, all parameters and buffers on the meta device.

    Args:
        folder: where generation_config.json and the model's own code may be.
        config: as `read_config` gave it.
        dtype: of the parameters, except those that the model keeps in float32.
        attn_implementation: as transformers takes it; None for its own choice.
        quantiser: of weights that are published quantised, see `engine.published`.

    Raises:
        UnknownArchitectureError: transformers has no model for this config.
        OptionError: it has no such attention, or not for this model.
    """
    import torch

    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    chosen = model_class(config)
    try:
        with torch.device("meta"):
            if hasattr(chosen, "_from_config"):
                model = chosen._from_config(config, **options)
            else:
                model = chosen.from_config(config, trust_remote_code=trust_remote_code, **options)
    except (ValueError, ImportError) as error:
        if attn_implementation is not None:
            raise OptionError(
                f"The model in {folder} cannot be built with attn_implementation={attn_implementation!r}: {error}",
                "Leave attn_implementation out: transformers then chooses one that works.",
            ) from error
        raise _unknown(folder, error) from error
    if quantiser is not None:
        change_modules(model, quantiser, dtype)
    model.eval()
    _apply_dtype_plan(model, dtype)
    _read_generation_config(model, folder)
    model.config.name_or_path = str(folder)
    return model


def _apply_dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give what the model keeps in float32 that dtype; `from_config` leaves it at `dtype`.

    Buffers too: the routing bias of DeepSeek-V3 is one.
    """
    import torch
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, by_group, _ = build_glob_alternation(list(plan))
    for name, tensor in list(model.state_dict().items()):
        match = pattern.search(name)
        if match is None or tensor.dtype == (wanted := plan[by_group[match.lastgroup]]):
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        empty = torch.empty_like(tensor, dtype=wanted)
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(empty)
        else:
            module._buffers[leaf] = empty


def _read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    from transformers import GenerationConfig

    if not model.can_generate():
        return
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    else:  # older models have such settings (beams, forced tokens) in config.json, and a config object drops them
        model.generation_config = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )


def materialise_buffers(model: PreTrainedModel, device_of: Any, absent: frozenset[str] = frozenset()) -> None:
    """Give every non-persistent buffer its real value, and every parameter in `absent` its initial one.

    Each gets an empty placeholder on its device, which transformers' own `initialize_weights` fills, as it does after
    loading. It asks every module: Falcon-H1's model computes the buffers of its layers. It would initialise weights
    too (Gemma 3's scaled embedding owns both kinds), so those are marked as initialised first.

    Args:
        device_of: module path -> torch device, a callable.
        absent: full names that the checkpoint lacks and the model class allows it to lack.
    """
    import torch

    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor._is_hf_initialized = name not in absent
    for name in (*(name for name, _ in model.named_non_persistent_buffers()), *absent):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._parameters:
            empty = torch.empty_like(module._parameters[leaf], device=device_of(path))
            module._parameters[leaf] = torch.nn.Parameter(empty)
        else:
            module._buffers[leaf] = torch.empty_like(module._buffers[leaf], device=device_of(path))
    for module in model.modules():
        module._is_hf_initialized = False  # set when the module was made, on the meta device
    model.initialize_weights()


def read_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder, or None where there is none (said in a warning)."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        logger.warning("No tokenizer could be read from %s (%s); model.tokenizer is None.", folder, error)
        return None
