"""The expected cost of quantizing a tensor in answer quality, from its name and shape alone. Pure.

A matrix whose elements have a relative squared error e adds noise of about e, relative too, to its output. How far that
moves the distribution of the next token depends on the role of the matrix, and hardly on its size. So the expected loss
of a tensor is a weight times e of the scheme, and the whole model's is the sum of those: small noise of many matrices
is additive. A decoder layer adds one of many contributions to the hidden states, so its noise counts for less the more
layers there are; the first layers' contributions are inputs of all others, so their noise counts for more. Weights and
errors are from trained models, with one tensor quantized at a time (docs/PERFORMANCE.md, "Bits by budget"). The actual
error of a tensor is not known before its bytes are read.

An expert counts for the share of the tokens that use it, and for its share of their computation. In a layer with E
experts, of which a token uses k, and shared experts that all tokens use, all experts together have the weight w of the
matrix of a dense layer: with n elements in an expert and s in the shared ones, each expert has w * (k / E) * n / (k *
n + s), and the shared ones w * s / (k * n + s). Outputs of different experts are assumed to be independent, and as
large as they are wide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rabbitllm.checkpoints.index import natural_key
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.schemes import DOUBLE, is_compressible, scheme_of, stored_form

ERRORS: Mapping[str | None, float] = {None: 0.0, "8bit": 1.8e-4, "4bit": 8.55e-3, "4bit-double": 8.57e-3}
"""Squared error of the weights stored with a scheme, relative to the squared weights."""
FITTED_ERRORS: Mapping[str | None, float] = {**ERRORS, "4bit": 0.84 * ERRORS["4bit"], DOUBLE: 0.89 * ERRORS[DOUBLE]}
"""The same with scales that are fitted to their blocks (`fit_scales`). Over the bundled model's 42 tensors of at least
32,768 elements, the median ratio of the errors is 0.838 (0.82 to 0.85), at 4bit-double 0.886 (0.87 to 0.90).
"""
WEIGHTS: Mapping[str, float] = {
    "head": 1.0,
    "embedding": 0.5,
    "query": 0.02,
    "key": 0.008,
    "value": 0.008,
    "query, key and value": 0.036,
    "attention output": 0.01,
    "gate and up": 0.004,
    "down": 0.006,
    "other": 0.008,
}
"""Nats of divergence per token for each unit of relative squared error, for one matrix of a model of eight layers."""
MEASURED_LAYERS = 8
FIRST_LAYERS = ((1 / 8, 8.0), (1 / 4, 3.0))
"""Pairs of a fraction of the decoder layers, from the first, and the factor for the layers up to there."""

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
_LAYER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"(?P<block>.*?experts\.(?:expert_)?)(?P<number>\d+)\.(?P<rest>.+)")
_ALL_EXPERTS = re.compile(r"(?:^|\.)experts\.")
_GATE_AND_UP = re.compile(r"(?:^|[._])(?:gate_up_proj|input_linear)(?:[._]|$)")
"""Names of tensors that hold both in one matrix."""
_UP = re.compile(r"(?<=[._])(?:gate_proj|up_proj|w1|w3|fc1|fc3)(?=[._]|$)")


@dataclass(frozen=True, slots=True)
class SchemeGroup:
    """Tensors that get the same scheme, since the engine joins them into one matrix or requires them to be alike.

    Attributes:
        role: their role, a key of `WEIGHTS`.
        tensors: in the checkpoint's order.
        weight: of all together; the factor of their relative squared error.
    """

    role: str
    tensors: tuple[TensorSpec, ...]
    weight: float

    def loss(self, compression: str | None, *, fitted: bool = False) -> float:
        """Return the expected loss at a compression, in no unit; it adds up over groups.

        Args:
            compression: one that `scheme_of` accepts.
            fitted: whether scales are fitted to their blocks.
        """
        return self.weight * (FITTED_ERRORS if fitted else ERRORS)[scheme_of(self.tensors[0], compression)]

    def nbytes(self, compression: str | None) -> int:
        """Return the bytes stored at a compression."""
        one = {(spec.dtype, spec.shape): spec for spec in self.tensors}
        each = {key: stored_form(spec, compression).nbytes for key, spec in one.items()}
        return sum([each[spec.dtype, spec.shape] for spec in self.tensors])


def groups(tensors: Iterable[TensorSpec], experts_a_token: int | None = None) -> list[SchemeGroup]:
    """Group the compressible tensors of a model, in numerical order of their names.

    Gate and up projections of all experts of a layer are one group, and down projections another: experts that differ
    in form could not be streamed individually.

    Args:
        tensors: of the model.
        experts_a_token: number of experts the router picks, without shared ones; None if unknown: then routed experts
            and shared ones each have the weight of a dense layer's matrix.
    """
    found: dict[str, list[TensorSpec]] = {}
    every = [spec for spec in tensors if is_compressible(spec)]
    for spec in sorted(every, key=lambda spec: natural_key(spec.name)):
        found.setdefault(_group_name(spec.name), []).append(spec)
    roles = {name: role_of(members[0].name) for name, members in found.items()}
    has_head = "head" in roles.values()
    layers = {layer for spec in every if (layer := _layer(spec.name)) is not None}
    depth = max(layers) + 1 if layers else 1
    computed = {name: _elements_a_token(members, experts_a_token) for name, members in found.items()}
    of_layer: dict[tuple[int | None, str], list[str]] = {}
    for name in found:
        of_layer.setdefault((_layer(name), roles[name]), []).append(name)
    made = []
    for name, members in found.items():
        role = roles[name]
        weight = WEIGHTS[role] * _matrices(members)
        of_role = of_layer[_layer(name), role]
        if len(of_role) > 1 and any(_is_routed(found[other]) for other in of_role):
            known = [elements for other in of_role if (elements := computed[other]) is not None]
            if len(known) == len(of_role):
                weight *= known[of_role.index(name)] / sum(known)
        if role == "embedding" and not has_head:  # it is the head too
            weight += WEIGHTS["head"]
        if (layer := _layer(members[0].name)) is not None:
            weight *= MEASURED_LAYERS / depth * next((f for part, f in FIRST_LAYERS if layer < part * depth), 1.0)
        made.append(SchemeGroup(role, tuple(members), weight))
    return made


def role_of(name: str) -> str:
    """Return the role of a tensor, by its name."""
    if name.startswith("output."):  # Meta's own name for the head
        return "head"
    return next((role for role, pattern in _ROLES if pattern.search(name)), "other")


def _group_name(name: str) -> str:
    expert = _EXPERT.fullmatch(name)
    return _UP.sub("gate_up", f"{expert['block']}*.{expert['rest']}" if expert else name)


def _matrices(members: Sequence[TensorSpec]) -> int:
    """Return the number of matrices of a dense layer that a group counts for."""
    names = {found["rest"] if (found := _EXPERT.fullmatch(spec.name)) else spec.name for spec in members}
    return sum([2 if _GATE_AND_UP.search(name) else 1 for name in names])


def _is_routed(members: Sequence[TensorSpec]) -> bool:
    """Whether a group is of routed experts: each a tensor of its own, or all in one."""
    name = members[0].name
    return _EXPERT.fullmatch(name) is not None or _ALL_EXPERTS.search(name) is not None


def _elements_a_token(members: Sequence[TensorSpec], experts_a_token: int | None) -> float | None:
    """Return the number of a group's elements that a token is multiplied with; None if unknown."""
    elements = sum(spec.elements for spec in members)
    if not _is_routed(members):
        return elements
    if experts_a_token is None:
        return None
    numbers = {found["number"] for spec in members if (found := _EXPERT.fullmatch(spec.name)) is not None}
    experts = len(numbers) or members[0].shape[0]
    return elements * min(experts_a_token, experts) / experts


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found else None
