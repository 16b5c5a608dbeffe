"""Small GGUF files with random weights, of several architectures and types, written by the package gguf."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

WIDTH = 256
"""Columns of most matrices: one block of the types with 256 elements."""
VOCABULARY = 320
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
_BASE = {
    "context_length": 128,
    "embedding_length": WIDTH,
    "block_count": 2,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
_WIDE = {"attention.key_length": 128, "attention.value_length": 128}
"""transformers reads no head width for Qwen 3, so it has to be its default."""
_LENGTHS = {"attention.key_length": 64, "attention.value_length": 64}


@dataclass(frozen=True)
class Family:
    """An architecture of GGUF.

    Attributes:
        keys: its metadata, in addition to, or instead of, those of all.
        config: the same for transformers, which says the shapes.
        config_class: of transformers.
    """

    config_class: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


_MOE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}
_MOE_CONFIG = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
FAMILIES = {
    "llama": Family("LlamaConfig", {"vocab_size": VOCABULARY, "rope.dimension_count": 64}),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config", _WIDE, {"head_dim": 128}),
    "gemma3": Family("Gemma3TextConfig", {**_LENGTHS, "attention.sliding_window": 32}, {"head_dim": 64}),
    "gemma2": Family("Gemma2Config", {**_LENGTHS, "attention.sliding_window": 32}, {"head_dim": 64}),
    "qwen3moe": Family("Qwen3MoeConfig", {**_WIDE, **_MOE}, {"head_dim": 128, **_MOE_CONFIG}),
}


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    types: str = "mixed",
    seed: int = 0,
    files: int = 1,
    sentencepiece: bool = False,
    changed: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Write a file, or a set of files as llama.cpp splits them; return the first.

    Args:
        path: the file; of a set the name without its numbers.
        family: a key of `FAMILIES`.
        types: "mixed" for blocks of several types, or a type for all matrices.
        seed: of the weights.
        files: how many.
        sentencepiece: whether its vocabulary is one of pieces with scores, not of bytes with merges.
        changed: called with the writer of the first file before it is written; may add metadata.
    """
    generator = np.random.default_rng(seed)
    tensors = [(name, *_stored(name, shape, types, generator)) for name, shape in shapes_of(family).items()]
    if files == 1:
        writer = _writer(path, family, types, sentencepiece=sentencepiece)
        changed(writer)
        _write(writer, tensors)
        return path
    paths = [path.with_name(f"{path.stem}-{number:05}-of-{files:05}.gguf") for number in range(1, files + 1)]
    share = math.ceil(len(tensors) / files)
    for number, part in enumerate(paths):
        writer = (
            _writer(part, family, types, sentencepiece=sentencepiece) if number == 0 else gguf.GGUFWriter(part, family)
        )
        if number == 0:
            changed(writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", files)
        writer.add_int32("split.tensors.count", len(tensors))
        _write(writer, tensors[number * share : (number + 1) * share])
    return paths[0]


def shapes_of(family: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a file of this architecture, with shapes in torch's order."""
    entry = FAMILIES[family]
    config = getattr(transformers, entry.config_class)(
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        **entry.config,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(family, TensorProcessor)(config=config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    state = model.state_dict()
    shapes = {}
    for name, target in names.items():
        if name == "output.weight" and family.startswith("gemma"):
            continue
        shape = tuple(state[target].shape)
        if half := re.search(r"ffn_(?:gate|up)_exps", name):
            assert half
            shape = (shape[0], shape[1] // 2, shape[2])
        if name.endswith("_exps"):
            name += ".weight"
        shapes[name] = shape
    return shapes


def _stored(
    name: str, shape: tuple[int, ...], types: str, generator: np.random.Generator
) -> tuple[npt.NDArray[Any], gguf.GGMLQuantizationType]:
    """The data of a tensor, and its type."""
    values = (generator.standard_normal(shape) * 0.05).astype(np.float32)
    if len(shape) < 2 or "ffn_gate_inp" in name:
        return values + np.float32("norm" in name), gguf.GGMLQuantizationType.F32
    choice = ["Q4_K", "Q6_K", "Q8_0", "Q4_1", "F16", "F32"][sum(map(ord, name)) % 6] if types == "mixed" else types
    ggml_type = gguf.GGMLQuantizationType[choice]
    if choice in ("Q4_K", "Q6_K"):  # the package has no encoder for them
        return _random_blocks(choice, shape, generator), ggml_type
    if choice == "F32":
        return values, ggml_type
    return gguf.quants.quantize(values, ggml_type), ggml_type


def _random_blocks(choice: str, shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[choice]]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    offset = 0 if choice == "Q4_K" else nbytes - 2
    blocks[..., offset : offset + 2] = scale
    if choice == "Q4_K":
        blocks[..., 2:4] = scale
    return blocks.reshape(*shape[:-1], -1)


def _writer(
    path: Path, family: str, types: str, *, sentencepiece: bool, keys: Mapping[str, Any] | None = None
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, family)
    writer.add_name("tiny")
    writer.add_file_type({"F32": 0, "F16": 1, "BF16": 32}.get(types, 15))
    for key, value in (keys or {**_BASE, **FAMILIES[family].keys}).items():
        add = {float: writer.add_float32, list: writer.add_array}.get(type(value), writer.add_uint32)
        add(f"{family}.{key}", value)
    _add_pieces(writer) if sentencepiece else _add_merges(writer)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    return writer


def _add_merges(writer: gguf.GGUFWriter) -> None:
    letters = [*(chr(code) for code in range(33, 127)), "\u0120", "\u010a"]
    pairs = [a + b for a in "aeioubcdfghlmnrst" for b in "aeioubcdfghlmnrst"][: VOCABULARY - 3 - len(letters)]
    tokens = ["<unk>", "<s>", "</s>", *letters, *pairs]
    tokens += [f"<unused{number}>" for number in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges([f"{pair[0]} {pair[1]}" for pair in pairs])


def _add_pieces(writer: gguf.GGUFWriter) -> None:
    written = ["th", "the", "\u2581the", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *written]
    tokens += [f"<unused{number}>" for number in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(number) for number in range(VOCABULARY - 259)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (VOCABULARY - 259)])
    writer.add_unk_token_id(0)


def _write(writer: gguf.GGUFWriter, tensors: list[tuple[str, npt.NDArray[Any], gguf.GGMLQuantizationType]]) -> None:
    for name, data, ggml_type in tensors:
        writer.add_tensor(name, data, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Files that llama.cpp's convert_hf_to_gguf.py makes of a model (conversion/qwen.py, conversion/lfm2.py).

_HYBRID = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LFM2 = {
    **{key: _HYBRID[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")},
    "max_position_embeddings": 128,
    "intermediate_size": 512,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "tie_word_embeddings": True,
}
CONVERTED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen35": ("Qwen3_5TextConfig", {**_HYBRID, "intermediate_size": 512}),
    "qwen35moe": ("Qwen3_5MoeTextConfig", {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 64}),
    "lfm2": ("Lfm2Config", _LFM2),
}
"""Architecture of GGUF -> class of the config in transformers, and its content."""


NEXTN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
"""Qwen's name of a tensor of a head -> llama.cpp's."""


def write_converted(
    path: Path, family: str, types: str = "F32", *, grouped: bool = True, head: Mapping[str, torch.Tensor] | None = None
) -> Any:
    """Write a model with random weights as llama.cpp converts it; return the model, float32.

    Args:
        path: the file.
        family: a key of `CONVERTED`.
        types: type of matrices; without a quantized type the file has the model's own values.
        grouped: whether a key head of linear attention has several value heads; llama.cpp puts them into another order.
        head: for multi-token prediction, by Qwen's names.
    """
    config_class, content = CONVERTED[family]
    more = {} if grouped or family == "lfm2" else {"linear_num_value_heads": 2}
    config = getattr(transformers, config_class)(**{**content, **more})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    count, keys, state = config.num_hidden_layers, _keys(config), dict(model.state_dict())
    tensors = []
    if head is not None:
        keys |= {"block_count": count + 1, "nextn_predict_layers": 1}
        for name, value in head.items():
            if name.startswith("mtp.layers.0."):
                state[name.replace("mtp.layers.0", f"model.layers.{count}")] = value
            else:
                written = f"blk.{count}.nextn.{NEXTN[name.split('.')[1]]}.weight"
                tensors.append((written, (value + (value.dim() == 1)).numpy(), gguf.GGMLQuantizationType.F32))
    writer = _writer(path, family, types, sentencepiece=False, keys=keys)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], count + 1)
    for name, value in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for own, values in _as_converted(name, value.numpy(), config):
            written = names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert written is not None, own
            plain = values.ndim < 2 or any(
                part in own for part in ("conv1d", "conv.conv", ".mlp.gate.", "shared_expert_gate")
            )
            ggml_type = gguf.GGMLQuantizationType["F32" if plain else types]
            tensors.append((written, gguf.quants.quantize(values, ggml_type), ggml_type))
    _write(writer, tensors)
    return model.eval()


def _keys(config: Any) -> dict[str, Any]:
    """The metadata of a config."""
    rope = config.rope_parameters
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.model_type == "lfm2":
        kinds = config.layer_types
        heads = [config.num_key_value_heads if layer_type == "full_attention" else 0 for layer_type in kinds]
        return keys | {
            "feed_forward_length": config.intermediate_size,
            "attention.head_count_kv": heads,
            "attention.layer_norm_rms_epsilon": float(config.norm_eps),
            "shortconv.l_cache": config.conv_L_cache,
        }
    keys |= {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "full_attention_interval": 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
    }
    if getattr(config, "num_experts", None):
        return keys | {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return keys | {"feed_forward_length": config.intermediate_size}


def _as_converted(name: str, values: npt.NDArray[Any], config: Any) -> list[tuple[str, npt.NDArray[Any]]]:
    """The tensors that llama.cpp writes for a parameter: its own names of them, and their values."""
    if config.model_type == "lfm2":
        return [(name, values[:, 0] if "conv.conv" in name else values)]
    keys, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads

    def tiled(rows: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
        """Rows of value heads, of which those of one key head follow each other, in turns of the key heads."""
        return np.ascontiguousarray(rows.reshape(keys, each, width, -1).swapaxes(0, 1)).reshape(rows.shape)

    width, before = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim
    if "conv1d" in name:
        values = values[:, 0]
    if "in_proj_qkv" in name or "conv1d" in name:
        values = np.concatenate([values[:before], tiled(values[before:], width)])
    elif "in_proj_z" in name:
        values = tiled(values, width)
    elif "out_proj" in name:
        values = np.ascontiguousarray(tiled(values.T.copy(), width).T)
    elif any(part in name for part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias")):
        values = tiled(values, 1)
    elif name.endswith("norm.weight") and "linear_attn.norm" not in name:
        values = values + np.float32(1)
    if name.endswith("A_log"):
        values = -np.exp(values)
    if name.endswith("experts.gate_up_proj"):
        halves = np.split(values, 2, axis=1)
        return [
            (name.replace("gate_up_proj", f"{part}_proj.weight"), half)
            for part, half in zip(("gate", "up"), halves, strict=True)
        ]
    name = name.replace("dt_bias", "dt_proj.bias").replace("experts.down_proj", "experts.down_proj.weight")
    return [(name, values[0] if "shared_expert_gate" in name else values)]
