"""Properties of a model by its config.json: experts per token, and the quantization of its published weights.

transformers writes the latter under `quantization_config`, in the config itself or in that of its language model.
NVIDIA's ModelOpt writes them into a file of their own, hf_quant_config.json, and in some versions nowhere else
(https://github.com/NVIDIA/TensorRT-Model-Optimizer, modelopt/torch/export/convert_hf_config.py).
Independent of torch and tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from rabbitllm.base.transformers_version import installed_version
from rabbitllm.errors import CheckpointError, UnknownArchitectureError
from rabbitllm.formats.bounded import read_json

NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk", "moe_k")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the text model in the content of a config.json; empty if all of it is about that."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else {}


def model_type_of(config: Mapping[str, Any]) -> str | None:
    """The family that a config names; None if it names none."""
    family = config.get("model_type")
    return family if isinstance(family, str) else None


def experts_a_token(config: Mapping[str, Any]) -> int | None:
    """Experts per token by the content of a config.json; None for models without experts, and if absent."""
    return _first(text_config(config).get) or _first(config.get)


def picked_by(config: object) -> int | None:
    """The same for a transformers config, by its text model; also by aliases that it maps to its own names."""
    return _first(lambda name: getattr(config, name, None))


def _first(value_of: Callable[[str], object]) -> int | None:
    return next((experts for name in NAMES if type(experts := value_of(name)) is int and experts > 0), None)


def predicts_more(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has layers for multi-token prediction behind those of the model."""
    settings = {**config, **text_config(config)}
    return any(("nextn" in name or "mtp" in name) and bool(value) for name, value in settings.items())


UNBUILT_HEADS = {
    "hy_v4": "they are layers without hyper-connections, of which transformers has no class",
    "qwen4_exp_text": "they take the several streams of hidden states that the model's class returns mixed into one",
}
"""Type of a text model -> why its heads for multi-token prediction, whose definition is published, are not built."""


def why_no_heads(config: Mapping[str, Any]) -> str:
    """Why the heads of a checkpoint are not built, by the content of its config.json; empty if nothing is known."""
    return UNBUILT_HEADS.get(model_type_of(text_config(config) or config) or "", "")


def layers_before_heads(config: Mapping[str, Any]) -> int | None:
    """The number of layers of the model, if layers for multi-token prediction have the numbers behind them."""
    text = config.get("text_config", config)
    count = text.get("num_hidden_layers") if predicts_more(config) and isinstance(text, Mapping) else None
    return count if isinstance(count, int) else None


BITSANDBYTES = "bitsandbytes"
MODELOPT = "modelopt"
TORCHAO = "torchao"
MODELOPT_NAME = "hf_quant_config.json"
"""ModelOpt's own file of quantization settings."""
LEFTOVER = "gguf"
"""The method that transformers leaves in the config of a model that it dequantized: its weights are plain."""


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json, with the settings of hf_quant_config.json if it has none of its own.

    Returns:
        The config; empty if there is none.

    Raises:
        InvalidIndexError: a file is too large or not a JSON object.
        UnknownArchitectureError: hf_quant_config.json has another structure than ModelOpt's.
    """
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    if config and settings_of(config) is None and (settings := separate_settings(folder)) is not None:
        config["quantization_config"] = dict(settings)
    return config


_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})[\w.]{0,20}")


def newer_transformers(folder: Path) -> str | None:
    """The version of transformers that wrote the config.json in a folder, if it is newer than the installed one."""
    try:
        written = _VERSION.fullmatch(str(read_json(folder / "config.json").get("transformers_version")))
    except (CheckpointError, OSError):
        return None
    installed = Version(installed_version()).release
    return written[0] if written is not None and (int(written[1]), int(written[2])) > installed[:2] else None


_NOTES = (
    "_name_or_path",
    "_commit_hash",
    "_attn_implementation",
    "_experts_implementation",
    "_flash_attn",
    "use_cache",
)
"""Beginnings of the names of programs' notes, which change no result. `_remove_final_layer_norm` of OPT does."""


def changed_settings(before: Path, now: Path) -> list[str]:
    """The names of the settings of which two config files have other values; the first file may not exist. One of an
    inner config has both names, as "text_config.hidden_act".

    What means the same is no change: transformers saves a config with its defaults, and under the names of its version.

    Raises:
        InvalidIndexError: a file is too large or not a JSON object.
    """
    first, second = (
        {"dtype" if name == "torch_dtype" else name: value for name, value in read_json(path).items()}
        if path.is_file()
        else {}
        for path in (before, now)
    )
    if not (changed := _changed(first, second, ...)) or "auto_map" in first.keys() | second.keys():
        return changed
    from transformers import CONFIG_MAPPING

    try:
        classes = (CONFIG_MAPPING[config["model_type"]] for config in (first, second))
        first, second = (of.from_json_file(path).to_dict() for of, path in zip(classes, (before, now), strict=True))
    except Exception:  # not a class of transformers, or values that it refuses, by errors of any type
        return changed
    return _changed(first, second, None)


def _changed(first: Mapping[Any, Any], second: Mapping[Any, Any], absent: Any) -> list[str]:
    changed = list[str]()
    for key in sorted(first.keys() | second.keys(), key=str):  # labels have numbers
        name, before, now = str(key), first.get(key, absent), second.get(key, absent)
        if name.startswith(_NOTES) or name.endswith("_version"):
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            changed += (f"{name}.{inner}" for inner in _changed(before, now, absent))
        elif before != now and repr(before) != repr(now):  # NaN is not equal to NaN
            changed.append(name)
    return changed


def separate_settings(folder: Path) -> Mapping[str, Any] | None:
    """The quantization settings in a folder's hf_quant_config.json; None without that file.

    Raises:
        InvalidIndexError: the file is too large or not a JSON object.
        UnknownArchitectureError: it has another structure than ModelOpt's.
    """
    path = folder / MODELOPT_NAME
    if not path.is_file():
        return None
    settings = read_json(path).get("quantization")
    if not isinstance(settings, Mapping) or not isinstance(settings.get("quant_algo"), str | None):
        raise UnknownArchitectureError(
            f"{path} has no object with the name quantization and a text quant_algo, so it is not known how the "
            "weights are quantized.",
            "Download the file again. If the weights are not quantized, remove it.",
        )
    if settings.get("quant_algo") is None:
        return None  # only the KV cache is quantized, or nothing
    return {**settings, "quant_method": MODELOPT}


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization settings in a config; None for plain weights."""
    for part in (config, text_config(config)):
        settings = part.get("quantization_config")
        if isinstance(settings, Mapping) and settings and method_of(settings) != LEFTOVER:
            return settings
    return None


def quantized_as(config: Mapping[str, Any]) -> str | None:
    """The quantization of the weights, such as "fp8", "mxfp4", "bitsandbytes 4bit"; None for plain weights."""
    settings = settings_of(config)
    return method_of(settings) if settings is not None else None


def method_of(settings: Mapping[str, Any]) -> str:
    """The quantization method of settings; old configs only have `load_in_4bit` for bitsandbytes."""
    for bits in ("4bit", "8bit"):
        if settings.get(f"load_in_{bits}"):
            return f"{BITSANDBYTES} {bits}"
    value = settings.get("quant_method") or (MODELOPT if "quant_algo" in settings else "by an unnamed method")
    method = str(getattr(value, "value", value))  # in transformers' own settings it is a member of an enumeration
    return MODELOPT if method.startswith(f"{MODELOPT}_") else method
