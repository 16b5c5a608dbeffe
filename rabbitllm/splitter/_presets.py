"""The roles of tensors, by their names, and the presets of llama.cpp, which give some roles more bits. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.schemes import BLOCKS, PRESETS, SCHEMES, is_compressible

_ROLES: Sequence[tuple[str, re.Pattern[str]]] = [
    (role, re.compile(rf"(?:^|[._])(?:{names})(?:[._]|$)"))
    for role, names in (
        ("head", "lm_head|embed_out|output_layer"),
        ("embedding", "embed_tokens|tok_embeddings|word_embeddings|wte|embed_in|embeddings?"),
        ("query, key and value", "qkv_proj|qkv|query_key_value|c_attn|Wqkv|W_pack|wqkv"),
        ("query", "q_proj|wq|query|q_[ab]_proj"),
        ("key", "k_proj|wk|key"),
        ("value", "v_proj|wv|value|kv_[ab]_proj(?:_with_mqa)?"),
        ("attention output", "o_proj|wo|attn_out|out_proj|attention[._]dense|attn[._]c_proj|attn[._]dense"),
        ("gate and up", "gate_up_proj|gate_proj|up_proj|w1|w3|fc1|fc3|c_fc|dense_h_to_4h|input_linear|fc_in"),
        ("down", "down_proj|w2|fc2|c_proj|dense_4h_to_h|output_linear|fc_out"),
    )
]
LAYER = re.compile(r"\.(\d+)\.")
"""The number of a tensor's layer."""


def role_of(name: str) -> str:
    """Return the role of a tensor, by its name."""
    if name.startswith("output."):  # Meta's own name for the head
        return "head"
    return next((role for role, pattern in _ROLES if pattern.search(name)), "other")


_OF_HEADS = {**dict.fromkeys(SCHEMES, "8bit"), **dict.fromkeys([*BLOCKS, *PRESETS], "q8_0")}
"""Compression -> that of heads for multi-token prediction: with fewer bits their drafts are refused more often."""


def bits_by_tensor(compression: str, tensors: Sequence[TensorSpec], heads: Collection[str]) -> Mapping[str, str]:
    """Return the compression of each tensor that compression touches; nothing if all have the same.

    Args:
        compression: any but "auto".
        tensors: of the model.
        heads: the tensors for multi-token prediction, which have 8 bits.
    """
    other = [spec for spec in tensors if spec.name not in heads]
    few = [spec.name for spec in tensors if spec.name in heads and is_compressible(spec)]
    if compression in PRESETS:
        schemes = of_preset(compression, other)
    elif not few or compression == _OF_HEADS[compression]:
        return {}
    else:
        schemes = {spec.name: compression for spec in other if is_compressible(spec)}
    return {**schemes, **dict.fromkeys(few, _OF_HEADS[compression])}


def of_preset(preset: str, tensors: Iterable[TensorSpec]) -> Mapping[str, str]:
    """Return the compression of each tensor that compression touches.

    As llama.cpp does it, more bits are for the head (for the embedding, if there is no other head), and in the first
    eighth of the layers, the last eighth, and each third one between for values and down projections.

    Args:
        preset: of `PRESETS`.
        tensors: of the model.
    """
    base, more = PRESETS[preset]
    roles = {spec.name: role_of(spec.name) for spec in tensors if is_compressible(spec)}
    head = "head" if "head" in roles.values() else "embedding"
    layers: dict[tuple[str, str], set[int]] = {}
    places = {name: _place(name) for name, role in roles.items() if role in ("value", "down")}
    for name, (stack, layer) in places.items():
        layers.setdefault((roles[name], stack), set()).add(layer)
    important = {key: {sorted(of)[index] for index in _important(len(of))} for key, of in layers.items()}
    return {
        name: more if role == head or (name in places and places[name][1] in important[role, places[name][0]]) else base
        for name, role in roles.items()
    }


def _place(name: str) -> tuple[str, int]:
    """Return the stack of layers that a tensor is in, and the number of its layer."""
    match = LAYER.search(name)
    return (name[: match.start()], int(match[1])) if match else ("", 0)


def _important(count: int) -> Iterable[int]:
    eighth = count // 8
    return (i for i in range(count) if i < eighth or i >= 7 * count // 8 or (i - eighth) % 3 == 2)
