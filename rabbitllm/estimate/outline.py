"""Outlines of published models from their configs alone: names and shapes of tensors, each kind of layer once.

A model of 80 equal layers takes what one of them takes, 80 times, and a mixture of 48 layers with 512 experts each has
74,000 tensors, of which 3,000 cover all kinds of layers. So an outline is a small model with each kind of layer once,
and a map from every layer of the real model to its kind. Imports no torch; reads no file of a model.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any

from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.config import quantized_as
from rabbitllm.checkpoints.naming import assign_layers
from rabbitllm.errors import UnknownArchitectureError
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size
from rabbitllm.quant.schemes import COMPRESSIONS
from rabbitllm.splitter.disk_budget import on_disk
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, make_plan, recompressed

SHARD = "outline.safetensors"
"""Name of the nonexistent file that the tensors are assumed to be in."""
_LAYER = re.compile(r"layers\.(\d+)$")


@dataclass(frozen=True, slots=True)
class OutlinedTensor:
    """A tensor of a checkpoint: its name, shape and dtype, as named by safetensors."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"


@dataclass(frozen=True)
class Outline:
    """A model and a smaller sample of it.

    Attributes:
        config: of the model, as published.
        sample: config of a model with each kind of its decoder layers once.
        stored: the tensors of the sample; those outside of decoder layers are the model's own.
        layers: for each decoder layer of the model, the number of the sample's layer of the same kind.
    """

    config: Mapping[str, Any]
    sample: Mapping[str, Any]
    stored: tuple[OutlinedTensor, ...]
    layers: tuple[int, ...]

    @property
    def compressions(self) -> tuple[str | None, ...]:
        """The compressions at which it can be split: only None if it is published quantized."""
        return (None,) if self.config.get("quantization_config") else COMPRESSIONS

    def times(self, layer: str) -> int:
        """Return how often the model has a layer of the sample, by the layer's id."""
        found = _LAYER.search(layer)
        return self._counts.get(int(found[1]), 1) if found else 1

    @cached_property
    def _counts(self) -> Counter[int]:
        return Counter(self.layers)

    @cached_property
    def plans(self) -> dict[str | None, SplitPlan]:
        """The sample's split at each compression, as if all of it were in one shard."""
        specs, at = [], 0
        for one in self.stored:
            nbytes = byte_size(one.dtype, one.shape)
            specs.append(TensorSpec(one.name, one.dtype, one.shape, SHARD, at, nbytes))
            at += nbytes
        shard = PlannedShard(SHARD, at, "", tuple(specs), staged=False)
        family = self.config.get("model_type")
        assigned = assign_layers([spec.name for spec in specs], family if isinstance(family, str) else None)
        base = make_plan(SourceIdentity("local", "outline", None, {}), (shard,), assigned, None)
        return {c: recompressed(base, c) if c else base for c in self.compressions}

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors as published."""
        return sum(
            self.times(layer) * sum(form.source.nbytes for form in layout.forms)
            for layer, layout in self.plans[None].layouts.items()
        )

    def output_bytes(self, compression: str | None) -> int:
        """Return the bytes of all layer files, as they occupy a disk."""
        return sum(
            self.times(layer) * on_disk(layout.size) for layer, layout in self.plans[compression].layouts.items()
        )


# Families: tensors as functions of configs; names and shapes as published.
#
# Sources: the models' own repositories (model.safetensors.index.json) and the classes of transformers that read them;
# the tests compare every family with these classes, and also the published quantized forms of GPT-OSS and DeepSeek-V3.


Config = Mapping[str, Any]
_FP8_BLOCK = 128
"""Rows and columns that share a scale (DeepSeek-V3's `weight_block_size`)."""
_MXFP4_BLOCK = 32
"""Elements of a row that share a scale, two per byte (the OCP's MX formats)."""


def outline_of(config: Config) -> Outline:
    """Return the outline of a published model.

    Args:
        config: its config.json.

    Raises:
        UnknownArchitectureError: the family is not known here.
    """
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        raise UnknownArchitectureError(
            f"No tensors of {family!r} can be told from its config; expected one of {', '.join(_FAMILIES)}.",
            "Run `rabbitllm plan` on the model's own folder or repository.",
        )
    return _FAMILIES[family](config)


def _outline(
    config: Config,
    kinds: Iterable[Iterable[OutlinedTensor]],
    layers: Iterable[int],
    changed: Config | None = None,
    further: Iterable[OutlinedTensor] = (),
) -> Outline:
    numbered = [[replace(one, name=f"model.layers.{at}.{one.name}") for one in kind] for at, kind in enumerate(kinds)]
    sample = {**config, "num_hidden_layers": len(numbered), **(changed or {})}
    stored = (*_around(config), *(one for kind in numbered for one in kind), *further)
    return Outline(config, sample, tuple(stored), tuple(layers))


def _around(config: Config) -> Iterator[OutlinedTensor]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield OutlinedTensor("model.embed_tokens.weight", (vocabulary, hidden))
    yield OutlinedTensor("model.norm.weight", (hidden,))
    if not config.get("tie_word_embeddings", False):
        yield OutlinedTensor("lm_head.weight", (vocabulary, hidden))


# Parts of decoder layers


def _norms(config: Config) -> Iterator[OutlinedTensor]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield OutlinedTensor(f"{name}.weight", (config["hidden_size"],))


def _attention(
    config: Config, *, biased: str = "", normed: bool = False, gated: bool = False
) -> Iterator[OutlinedTensor]:
    """Grouped-query attention. `biased`: of q, k, v, o; `gated`: `q_proj` also makes a gate of the output."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    keys = config["num_key_value_heads"] * head
    shapes = {"q": (heads * head * (2 if gated else 1), hidden), "k": (keys, hidden), "v": (keys, hidden)}
    for which, shape in {**shapes, "o": (hidden, heads * head)}.items():
        yield OutlinedTensor(f"self_attn.{which}_proj.weight", shape)
        if which in biased:
            yield OutlinedTensor(f"self_attn.{which}_proj.bias", shape[:1])
    for which in "qk" if normed else "":
        yield OutlinedTensor(f"self_attn.{which}_norm.weight", (head,))


def _mlp(name: str, hidden: int, inner: int) -> Iterator[OutlinedTensor]:
    for which, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        yield OutlinedTensor(f"{name}.{which}_proj.weight", shape)


def _experts(config: Config, count: int) -> Iterator[OutlinedTensor]:
    for expert in range(count):
        yield from _mlp(f"mlp.experts.{expert}", config["hidden_size"], config["moe_intermediate_size"])


# Families


def _dense(config: Config, biased: str = "", normed: bool = False) -> Outline:
    def layer() -> Iterator[OutlinedTensor]:
        yield from _norms(config)
        yield from _attention(config, biased=biased, normed=normed)
        yield from _mlp("mlp", config["hidden_size"], config["intermediate_size"])

    count = config["num_hidden_layers"]
    return _outline(config, [layer()], [0] * count, _types(config, 1))


def _types(config: Config, count: int) -> Config:
    """Return the entry of a config that names a type for each layer, for the first few."""
    return {"layer_types": config["layer_types"][:count]} if config.get("layer_types") else {}


def _qwen3_moe(config: Config) -> Outline:
    experts = config.get("num_experts") or config["num_local_experts"]  # transformers saves it with the latter name

    def layer() -> Iterator[OutlinedTensor]:
        yield from _norms(config)
        yield from _attention(config, normed=True)
        yield OutlinedTensor("mlp.gate.weight", (experts, config["hidden_size"]))
        yield from _experts(config, experts)

    return _outline(config, [layer()], [0] * config["num_hidden_layers"])


def _qwen3_next(config: Config) -> Outline:
    """Of four layers, three have linear attention (a gated delta net) and the fourth has full attention."""
    hidden, number = config["hidden_size"], config["num_hidden_layers"]
    every = config.get("full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    named = config.get("layer_types") or [kinds[(at + 1) % every == 0] for at in range(number)]

    def layer(kind: str) -> Iterator[OutlinedTensor]:
        yield from _norms(config)
        if kind == "full_attention":
            yield from _attention(config, normed=True, gated=True)
        else:
            yield from _delta_net(config)
        yield OutlinedTensor("mlp.gate.weight", (config["num_experts"], hidden))
        yield OutlinedTensor("mlp.shared_expert_gate.weight", (1, hidden))
        yield from _mlp("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
        yield from _experts(config, config["num_experts"])

    there = [kind for kind in kinds if kind in named]
    return _outline(config, map(layer, there), map(there.index, named), {"layer_types": there})


def _delta_net(config: Config) -> Iterator[OutlinedTensor]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    mixed = 2 * keys + values
    for name, shape in {
        "dt_bias": (heads,),
        "A_log": (heads,),
        "conv1d.weight": (mixed, 1, config["linear_conv_kernel_dim"]),
        "in_proj_qkvz.weight": (mixed + values, hidden),
        "in_proj_ba.weight": (2 * heads, hidden),
        "norm.weight": (config["linear_value_head_dim"],),
        "out_proj.weight": (hidden, values),
    }.items():
        yield OutlinedTensor(f"linear_attn.{name}", shape)


def _gpt_oss(config: Config) -> Outline:
    """All experts of a layer are one tensor. Published as MXFP4: blocks of codes, each with a scale of one byte."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    packed = bool(config.get("quantization_config"))

    def layer() -> Iterator[OutlinedTensor]:
        yield from _norms(config)
        yield from _attention(config, biased="qkvo")
        yield OutlinedTensor("self_attn.sinks", (config["num_attention_heads"],))
        yield OutlinedTensor("mlp.router.weight", (experts, hidden))
        yield OutlinedTensor("mlp.router.bias", (experts,))
        for name, columns, rows in (("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)):
            yield OutlinedTensor(f"mlp.experts.{name}_bias", (experts, rows))
            if packed:
                blocks = (experts, rows, columns // _MXFP4_BLOCK)
                yield OutlinedTensor(f"mlp.experts.{name}_blocks", (*blocks, _MXFP4_BLOCK // 2), "U8")
                yield OutlinedTensor(f"mlp.experts.{name}_scales", blocks, "U8")
            else:
                yield OutlinedTensor(f"mlp.experts.{name}", (experts, columns, rows))

    return _outline(config, [layer()], [0] * config["num_hidden_layers"], _types(config, 1))


def _deepseek_v3(config: Config) -> Outline:
    """The first layers are dense; after the last there is one for multi-token prediction, which is not used."""
    hidden, number, dense = config["hidden_size"], config["num_hidden_layers"], config["first_k_dense_replace"]
    few = min(dense, 1)
    fp8 = bool(config.get("quantization_config"))

    def layer(is_dense: bool) -> Iterator[OutlinedTensor]:
        yield from _norms(config)
        parts = [*_latent_attention(config)]
        if is_dense:
            parts += _mlp("mlp", hidden, config["intermediate_size"])
        else:
            experts = config["n_routed_experts"]
            yield OutlinedTensor("mlp.gate.weight", (experts, hidden))
            yield OutlinedTensor("mlp.gate.e_score_correction_bias", (experts,), "F32")
            shared = config["moe_intermediate_size"] * config["n_shared_experts"]
            parts += [*_mlp("mlp.shared_experts", hidden, shared), *_experts(config, experts)]
        yield from _in_fp8(parts) if fp8 else parts

    kinds = [layer(True)] * few + [layer(False)] * (number > dense)
    layers = [0 if at < dense else few for at in range(number)]
    ahead = config.get("num_nextn_predict_layers", 0) if fp8 else 0  # transformers saves none of it
    further = [replace(one, name=f"model.layers.{number}.{one.name}") for one in _ahead(config, layer)] if ahead else []
    return _outline(config, kinds, layers, {"first_k_dense_replace": few}, further)


def _latent_attention(config: Config) -> Iterator[OutlinedTensor]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, latent, turned = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, values = config["qk_nope_head_dim"], config["v_head_dim"]
    for name, shape in {
        "q_a_proj": (queries, hidden),
        "q_a_layernorm": (queries,),
        "q_b_proj": (heads * (plain + turned), queries),
        "kv_a_proj_with_mqa": (latent + turned, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (plain + values), latent),
        "o_proj": (hidden, heads * values),
    }.items():
        yield OutlinedTensor(f"self_attn.{name}.weight", shape)


def _ahead(config: Config, layer: Callable[[bool], Iterable[OutlinedTensor]]) -> Iterator[OutlinedTensor]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield from layer(False)
    yield OutlinedTensor("eh_proj.weight", (hidden, 2 * hidden))
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield OutlinedTensor(f"{name}.weight", (hidden,))
    yield OutlinedTensor("embed_tokens.weight", (vocabulary, hidden))
    yield OutlinedTensor("shared_head.head.weight", (vocabulary, hidden))


def _in_fp8(parts: Iterable[OutlinedTensor]) -> Iterator[OutlinedTensor]:
    """Yield matrices in FP8, each with a tensor of scales, one float32 per block; other tensors unchanged."""
    for one in parts:
        if len(one.shape) < 2:
            yield one
            continue
        blocks = tuple(-(-size // _FP8_BLOCK) for size in one.shape)
        yield replace(one, dtype="F8_E4M3")
        yield OutlinedTensor(f"{one.name}_scale_inv", blocks, "F32")


_FAMILIES: Mapping[str, Callable[[Config], Outline]] = {
    "llama": _dense,
    "qwen2": lambda config: _dense(config, biased="qkv"),
    "qwen3": lambda config: _dense(config, normed=True),
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
}


# The short list of well-known models, from figures in the package; uses no network.


@dataclass(frozen=True)
class Published:
    """A model on the hub.

    Attributes:
        repository: organisation/name.
        parameters: number of parameters.
        largest_shard_bytes: of its files.
        config: the entries of its config.json that determine shapes.
    """

    repository: str
    parameters: int
    largest_shard_bytes: int
    config: Mapping[str, Any]

    @functools.cached_property
    def outline(self) -> Outline:
        """The outline of its tensors."""
        return outline_of(self.config)

    @property
    def quantized(self) -> str | None:
        """The quantization of its published weights; None for plain ones."""
        return quantized_as(self.config)


@functools.cache
def published() -> tuple[Published, ...]:
    """Return all models of the list, from the smallest to the largest."""
    content = json.loads(resources.files("rabbitllm.estimate").joinpath("models.json").read_text(encoding="utf-8"))
    return tuple(
        Published(one["repository"], one["parameters"], int(one["largest_shard_gb"] * 1000**3), one["config"])
        for one in content["models"]
    )
