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
    made = FAMILIES[family]
    config = getattr(transformers, made.config_class)(
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        **made.config,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(family, TensorProcessor)(config=config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    state = model.state_dict()
    found = {}
    for name, target in names.items():
        if name == "output.weight" and family.startswith("gemma"):
            continue
        shape = tuple(state[target].shape)
        if half := re.search(r"ffn_(?:gate|up)_exps", name):
            assert half
            shape = (shape[0], shape[1] // 2, shape[2])
        if name.endswith("_exps"):
            name += ".weight"
        found[name] = shape
    return found


def _stored(
    name: str, shape: tuple[int, ...], types: str, generator: np.random.Generator
) -> tuple[npt.NDArray[Any], gguf.GGMLQuantizationType]:
    """The data of a tensor, and its type."""
    values = (generator.standard_normal(shape) * 0.05).astype(np.float32)
    if len(shape) < 2 or "ffn_gate_inp" in name:
        return values + np.float32("norm" in name), gguf.GGMLQuantizationType.F32
    choice = ["Q4_K", "Q6_K", "Q8_0", "Q4_1", "F16", "F32"][sum(map(ord, name)) % 6] if types == "mixed" else types
    kind = gguf.GGMLQuantizationType[choice]
    if choice in ("Q4_K", "Q6_K"):  # the package has no encoder for them
        return _random_blocks(choice, shape, generator), kind
    if choice == "F32":
        return values, kind
    return gguf.quants.quantize(values, kind), kind


def _random_blocks(choice: str, shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[choice]]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    at = 0 if choice == "Q4_K" else nbytes - 2
    blocks[..., at : at + 2] = scale
    if choice == "Q4_K":
        blocks[..., 2:4] = scale
    return blocks.reshape(*shape[:-1], -1)


def _writer(path: Path, family: str, types: str, *, sentencepiece: bool) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, family)
    writer.add_name("tiny")
    writer.add_file_type({"F32": 0, "F16": 1, "BF16": 32}.get(types, 15))
    for key, value in {**_BASE, **FAMILIES[family].keys}.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
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
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
