"""Rotary frequencies of GGUF files, in both directions: metadata and tensors, and transformers' `rope_parameters`.

transformers 5.23 reads their base alone, but for gpt-oss. llama.cpp also reads `rope.scaling.*`, the number of rotated
elements, and tensors with a divisor for each frequency: `rope_freqs` (Llama 3), `rope_factors_short` and
`rope_factors_long` (Phi 3). Sources: gguf's constants (`Keys.Rope`), llama.cpp's `convert_hf_to_gguf.py` (the divisors
of Llama 3) and `ggml_rope_ext`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FACTORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
FACTOR_TENSORS = frozenset({FACTORS, _SHORT, _LONG})
"""Tensors of divisors of rotary frequencies, float32 (rotated elements of a head / 2,)."""
_FULL = "full_attention"
"""The layers that scaling is for, if a model has others."""
_NEAR = 1e-4
"""Relative difference of divisors that converters computed with other roundings."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Values of every Llama; llama.cpp's converter uses them if a config lacks them."""


def of_full_attention(config: Any) -> Mapping[str, Any]:
    """The rotary parameters of layers with full attention, of a config of transformers."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    full = parameters.get(_FULL)
    return full if isinstance(full, Mapping) else parameters


def rope_parameters(
    config: Any, metadata: Mapping[str, object], factors: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, Any] | None:
    """The `rope_parameters` that a file describes.

    Args:
        config: as transformers made it of the metadata, without scaling.
        metadata: the entries of the architecture, without its prefix: "rope.scaling.type".
        factors: the tensors of `FACTOR_TENSORS` that the file has.

    Returns:
        Those of the config, completed; None if neither the model nor the file has rotary frequencies.

    Raises:
        ValueError: an entry is malformed, or no config of transformers can express it.
    """
    parameters: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    rope = dict(of_full_attention(config))
    scaling = _scaling(metadata)
    if not parameters:
        if scaling or factors:
            raise ValueError("the metadata scale rotary frequencies, which transformers' model does not have")
        return parameters
    if rope.get("rope_type", "default") != "default":  # transformers has read them
        if factors:
            raise ValueError(f"the file has {', '.join(sorted(factors))} and frequencies of {rope['rope_type']}")
        return parameters
    flat = of_full_attention(config) is parameters
    if not flat and not isinstance(parameters.get(_FULL), Mapping):
        raise ValueError("layers have different rotary frequencies")
    head = _head_dim(config)
    rotated = _number(metadata, "rope.dimension_count", default=0.0)
    if flat and 0 < rotated <= head and int(rotated) != int(head * rope.get("partial_rotary_factor", 1.0)):
        rope["partial_rotary_factor"] = rotated / head
    count = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    rope |= scaling
    if factors:
        if scaling.get("rope_type", "longrope") != "longrope":
            raise ValueError(f"the file has {', '.join(sorted(factors))} and scaling of type {scaling['rope_type']}")
        rope |= _divided(config, metadata, {name: _checked(name, values, count) for name, values in factors.items()})
    elif scaling.get("rope_type") == "longrope":
        raise ValueError(f"scaling of type longrope needs the tensors {_SHORT} and {_LONG}")
    return rope if flat else {**parameters, _FULL: rope}


def _scaling(metadata: Mapping[str, object]) -> dict[str, Any]:
    """The scaling that the metadata describe; as llama.cpp, one without a type is linear."""
    rope_type = metadata.get("rope.scaling.type", "linear")
    factor = _number(metadata, "rope.scaling.factor", default=_number(metadata, "rope.scale_linear", default=0.0))
    if rope_type == "none" or (rope_type == "linear" and factor in (0.0, 1.0)):
        return {}
    if rope_type == "longrope":
        return {"rope_type": rope_type}
    if rope_type not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type is {rope_type!r}; linear, yarn, longrope and none are read")
    if not factor:
        raise ValueError(f"scaling of type {rope_type} has no rope.scaling.factor")
    if rope_type == "linear":
        return {"rope_type": "linear", "factor": factor}
    for name in ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
        if f"rope.scaling.{name}" in metadata:
            raise ValueError(f"transformers does not support rope.scaling.{name}")
    original = _number(metadata, "rope.scaling.original_context_length", "context_length")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(original)}
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in metadata:
            scaling[name] = _number(metadata, f"rope.scaling.yarn_{name}")
    if (attention := _number(metadata, "rope.scaling.attn_factor", default=1.0)) != 1.0:
        scaling["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
    return scaling


def _number(metadata: Mapping[str, object], *keys: str, default: float | None = None) -> float:
    """The first entry that is there; it must be positive, or zero where that is the default."""
    for key in keys:
        if (value := metadata.get(key)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{key} is not a number")
        if value < 0 or (value == 0 and default != 0):
            raise ValueError(f"{key} is {value}; it must be above 0")
        return float(value)
    if default is None:
        raise ValueError(f"the metadata lack {' or '.join(keys)}")
    return default


def _checked(name: str, factors: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.float64]:
    import numpy as np

    if factors.shape != (count,):
        raise ValueError(f"{name} has shape {factors.shape}, expected ({count},)")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ValueError(f"{name} has values that are not positive")
    return factors.astype(np.float64)


def _divided(
    config: Any, metadata: Mapping[str, object], factors: Mapping[str, npt.NDArray[np.float64]]
) -> dict[str, Any]:
    """The parameters of frequencies with a divisor each."""
    if factors.keys() == {FACTORS}:
        divisors = factors[FACTORS]
        if not (abs(divisors - 1.0) > _NEAR).any():
            return {}
        if (parameters := _llama3_parameters(divisors, of_full_attention(config)["rope_theta"])) is not None:
            return parameters
        length = int(_number(metadata, "context_length"))
        short, long, attention = divisors.tolist(), divisors.tolist(), 1.0
    elif factors.keys() == {_SHORT, _LONG}:
        length = int(_number(metadata, "rope.scaling.original_context_length"))
        short, long = factors[_SHORT].tolist(), factors[_LONG].tolist()
        attention = _number(metadata, "rope.scaling.attn_factor", default=1.0)
    else:
        raise ValueError(f"the file has only {', '.join(sorted(factors))}; longrope requires {_SHORT} and {_LONG}")
    scaling = {"short_factor": short, "long_factor": long, "attention_factor": attention}
    return {"rope_type": "longrope", **scaling, "original_max_position_embeddings": length}


def _llama3_parameters(factors: npt.NDArray[np.float64], base: float) -> dict[str, Any] | None:
    """The parameters of Llama 3 that have these divisors; None if there are none."""
    import numpy as np

    factor = float(np.round(factors.max(), 3))
    lengths = 2 * np.pi * base ** (np.arange(len(factors)) / len(factors))  # of a wave, in tokens
    between = np.flatnonzero((factors > 1.01) & (factors < 0.99 * factor))
    if not between.size:
        return None
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    middle = between[between.size // 2]
    smooth = (1 / factors[middle] - 1 / factor) / (1 - 1 / factor)
    original = round(float((smooth * (high - low) + low) * lengths[middle]))
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=_NEAR, atol=0):
        return None
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3, "original_max_position_embeddings": original}


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def scaling_metadata(config: Any) -> dict[str, float | int | str | None]:
    """The metadata of a config's rotary frequencies, without the prefix of an architecture.

    Raises:
        ValueError: a file cannot express them.
    """
    rope = of_full_attention(config)
    rope_type = rope.get("rope_type", "default")
    if rope_type in ("default", "llama3"):  # the divisors of Llama 3 are a tensor, see `rotary_factors`
        return {}
    scaling = {"rope.scaling.type": rope_type, "rope.scaling.factor": rope.get("factor")}
    if rope_type == "linear":
        return scaling
    if rope_type == "yarn" and not {"mscale", "mscale_all_dim", "truncate"} & rope.keys():
        original = rope.get("original_max_position_embeddings")
        scaling |= {
            "rope.scaling.original_context_length": original,
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
        if rope.get("attention_factor") is None and original is not None:
            return scaling
    raise ValueError(f"frequencies of type {rope_type}")


def rotary_factors(config: Any) -> npt.NDArray[np.float32] | None:
    """The divisors of Llama 3's rotary frequencies, float32 (head dimension / 2,); None for other models."""
    rope = of_full_attention(config)
    if rope.get("rope_type") != "llama3":
        return None
    import torch
    from transformers import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head = _head_dim(config)
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.int64).float() / head))
    factors: npt.NDArray[np.float32] = (plain / scaled).numpy()
    return factors
