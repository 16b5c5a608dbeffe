"""Reads `params.json`, which Meta publishes with the weights of Llama, and refuses those of other models.

The fields are those of `ModelArgs` in https://github.com/meta-llama/llama (1 and 2), and of
https://github.com/meta-llama/llama-models, models/llama3/args.py (3). Their relation to tensor shapes is in
`meta_llama.py`. An unknown field might change the computation, so it is refused, not ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rabbitllm.errors import InvalidIndexError, UnreadableFormatError

_INTEGERS = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of")
_NUMBERS = ("norm_eps", "rope_theta", "ffn_dim_multiplier", "rope_scaling_factor", "rope_high_freq_factor")
_WITHOUT_EFFECT = {"max_batch_size", "max_seq_len", "model_parallel_size"}
_REQUIRED = ("dim", "n_layers", "n_heads", "norm_eps")
_MOST = 1 << 31
MAX_LAYERS = 4096
_OTHERS = (
    (re.compile("moe|expert"), "a mixture of experts"),
    (re.compile("vision|image"), "a model that sees images"),
    (re.compile("quant|lora|spin"), "quantized weights"),
)
"""Fields of other models, and the names of those."""
_OWN = "Put the params.json that was published with the weights into their folder."


@dataclass(frozen=True, slots=True)
class MetaParams:
    """The content of params.json; None for absent values.

    Attributes:
        dim, n_layers, n_heads, n_kv_heads: sizes of the model.
        norm_eps: epsilon of the norms.
        vocab_size: None where the tokenizer determines it (Llama 1 and 2 have -1).
        intermediate: rows of a feed-forward matrix.
        rope_theta: base of the rotary frequencies.
        scaled_rope: whether they are scaled, as from Llama 3.1 on.
        rope_factor, rope_high_freq: parameters of the scaling, where the file has them.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    norm_eps: float
    vocab_size: int | None = None
    intermediate: int | None = None
    rope_theta: float | None = None
    scaled_rope: bool = False
    rope_factor: float | None = None
    rope_high_freq: float | None = None

    @property
    def head_dim(self) -> int:
        """Rows of an attention head."""
        return self.dim // self.n_heads


def parse_params(content: Mapping[str, Any], where: str) -> MetaParams:
    """Parse the fields and check them against each other.

    Args:
        content: content of the file, or its object under "model".
        where: the file's name in messages.

    Raises:
        InvalidIndexError: a field is missing, or has an impossible value.
        UnreadableFormatError: it belongs to another kind of model.
    """
    inner = content.get("model")
    fields = {key: value for key, value in (inner if isinstance(inner, dict) else content).items() if value is not None}
    _refuse_others(fields, where)
    for key in _REQUIRED:
        if key not in fields:
            raise InvalidIndexError(f"{where} has no {key!r}; expected the parameters of a Llama.", _OWN)
    sizes = {key: _integer(fields[key], key, where) for key in _INTEGERS if key in fields and fields[key] != -1}
    numbers = {key: _number(fields[key], key, where) for key in _NUMBERS if key in fields}
    dim, heads = sizes.get("dim", 0), sizes.get("n_heads", 0)
    kv_heads = sizes.get("n_kv_heads", heads)
    layers = sizes.get("n_layers", 0)
    for what, wrong in (
        (f"dim {dim} is no whole, even number of rows for each of {heads} heads", not heads or dim % (2 * heads)),
        (f"n_heads {heads} is no multiple of n_kv_heads {kv_heads}", not kv_heads or heads % kv_heads),
        (f"n_layers is {layers}, expected 1 to {MAX_LAYERS:,}", not 0 < layers <= MAX_LAYERS),
    ):
        if wrong:
            raise InvalidIndexError(f"{where} contradicts itself: {what}.", _OWN)
    scaled = fields.get("use_scaled_rope", False)
    if not isinstance(scaled, bool):
        raise InvalidIndexError(f"{where} has use_scaled_rope {scaled!r}; expected true or false.", _OWN)
    return MetaParams(
        dim,
        layers,
        heads,
        kv_heads,
        numbers["norm_eps"],
        sizes.get("vocab_size"),
        _intermediate(dim, sizes.get("multiple_of"), numbers.get("ffn_dim_multiplier", 1.0)),
        numbers.get("rope_theta"),
        scaled,
        numbers.get("rope_scaling_factor"),
        numbers.get("rope_high_freq_factor"),
    )


def _refuse_others(fields: Mapping[str, Any], where: str) -> None:
    known = {*_INTEGERS, *_NUMBERS, *_WITHOUT_EFFECT, "use_scaled_rope"}
    other = sorted(key for key in fields if key not in known)
    if not other:
        return
    kinds = [kind for pattern, kind in _OTHERS for key in other if pattern.search(key)]
    what = kinds[0] if kinds else "another model"
    raise UnreadableFormatError(
        f"{where} has {', '.join(map(repr, other[:5]))}, which belongs to {what}; in Meta's own format the dense text "
        "models Llama 1 to 3 are read.",
        "Give the same model in transformers' format, from the hub.",
    )


def _integer(value: object, key: str, where: str) -> int:
    if type(value) is not int or not 0 < value < _MOST:
        raise InvalidIndexError(f"{where} has {key} {value!r}; expected a positive number.", _OWN)
    return value


def _number(value: object, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidIndexError(f"{where} has {key} {value!r}; expected a positive number.", _OWN)
    return float(value)


def _intermediate(dim: int, multiple_of: int | None, multiplier: float) -> int | None:
    """Two thirds of four times the width, times the multiplier, up to a multiple (model.py, `FeedForward`)."""
    if multiple_of is None:
        return None
    rows = int(multiplier * int(2 * 4 * dim / 3))
    return -(-rows // multiple_of) * multiple_of
