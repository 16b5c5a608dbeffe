"""Experts in layer files: compressed like any matrix, fused ones slice by slice, and adjacent where they are fused.

Quantizers that replace modules pass over parameters of three dimensions and say nothing; so bytes are counted here.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import bitsandbytes.functional as functional
import pytest
import torch

from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import build_checkpoint, read_tensors
from tests.support.splitting import split
from tests.support.tiny_models import is_compressed

BLOCKS = {"4bit": 64, "8bit": 2048}
FUSED = {"gpt_oss": ("gate_up_proj", "down_proj")}
"""Families whose checkpoints hold all experts of a layer in one tensor."""
GATE_UP_DOWN = {
    "qwen3_moe": "model.layers.1.mlp.experts.{}.{}_proj.weight",
    "qwen3_next": "model.layers.1.mlp.experts.{}.{}_proj.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.{}.{}_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.{}.{}.weight",
}
PER_EXPERT = [
    *("qwen3_moe", "mixtral"),
    *(pytest.param(family, marks=pytest.mark.long) for family in ("qwen3_next", "deepseek_v3")),
]
NAMES = {"mixtral": ("w1", "w3", "w2")}


def checkpoint_of(family: str, folder: Path) -> Path:
    """Experts are whole blocks at every compression, and their scales fill cache lines."""
    inner = {"intermediate_size": 512} if family in ("gpt_oss", "mixtral") else {"moe_intermediate_size": 512}
    return build_checkpoint(folder, family, dtype=torch.bfloat16, shards=3, **inner)  # type: ignore[arg-type]


def quantized(tensor: torch.Tensor, compression: str) -> tuple[bytes, bytes]:
    """Codes and scales by bitsandbytes itself."""
    if compression == "4bit":
        codes, state = functional.quantize_4bit(tensor.contiguous(), blocksize=64, quant_type="nf4")
    else:
        codes, state = functional.quantize_blockwise(tensor.contiguous(), blocksize=2048)
    return codes.numpy().tobytes(), state.absmax.numpy().tobytes()


def stored_bytes(name: str, tensor: torch.Tensor, compression: str | None) -> int:
    """Return the expected bytes of a tensor in a layer file."""
    n = tensor.numel()
    if compression is None or not is_compressed(name, tensor):
        return tensor.nbytes
    scales = 4 * math.ceil(n / BLOCKS[compression])
    if compression == "8bit":
        return n + scales + 4 * 256
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(tensor.shape)}
    return math.ceil(n / 2) + scales + 4 * 16 + len(json.dumps(state))


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
@pytest.mark.parametrize("family", [*FUSED, *PER_EXPERT])
def test_layer_files_have_all_bytes_of_a_model(tmp_path: Path, family: str, compression: str | None) -> None:
    checkpoint = checkpoint_of(family, tmp_path / "model")
    tensors = read_tensors(checkpoint)
    large = {name: tensor for name, tensor in tensors.items() if ".experts." in name and tensor.numel() >= 4096}
    experts = {name: tensor for name, tensor in large.items() if not name.endswith("bias")}
    assert sum(tensor.numel() for tensor in experts.values()) > sum(t.numel() for t in tensors.values()) / 4
    folder = split(checkpoint, compression=compression, sequential=False)
    data_bytes = {
        path.name: path.stat().st_size - read_header(path).data_start for path in folder.glob("*.safetensors")
    }
    assert sum(data_bytes.values()) == sum(stored_bytes(name, tensor, compression) for name, tensor in tensors.items())
    store = LayerStore(folder)
    assert {store.tensors[name].quantized is not None for name in experts} == {compression is not None}
    assert not any(store.tensors[name].quantized for name in large.keys() - experts.keys())


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_each_slice_of_fused_experts_is_quantized_as_a_separate_tensor(tmp_path: Path, compression: str) -> None:
    checkpoint = checkpoint_of("gpt_oss", tmp_path / "model")
    tensors = read_tensors(checkpoint)
    store = LayerStore(split(checkpoint, compression=compression, sequential=False))
    for layer in range(3):
        for leaf in FUSED["gpt_oss"]:
            name = f"model.layers.{layer}.mlp.experts.{leaf}"
            experts, stored = tensors[name], store.tensors[name]
            assert experts.dim() == 3
            assert experts[0].numel() % BLOCKS[compression] == 0
            codes, scales = (bytes(store.mapped(part.file).bytes_of(part)) for part in stored.parts[:2])
            alone = [quantized(expert, compression) for expert in experts]
            step, scale_step = len(codes) // len(experts), len(scales) // len(experts)
            assert len(alone) * step == len(codes)
            for expert, (own_codes, own_scales) in enumerate(alone):
                assert codes[expert * step : (expert + 1) * step] == own_codes
                assert scales[expert * scale_step : (expert + 1) * scale_step] == own_scales


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_fused_experts_of_odd_sizes_are_quantized_as_a_whole(tmp_path: Path, compression: str) -> None:
    """A block has elements of two experts."""
    checkpoint = build_checkpoint(tmp_path / "model", "gpt_oss", dtype=torch.bfloat16, intermediate_size=33)
    tensors = read_tensors(checkpoint)
    store = LayerStore(split(checkpoint, compression=compression, sequential=False))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert tensors[name][0].numel() % BLOCKS["8bit"]
    parts = store.tensors[name].parts[:2]
    stored = tuple(bytes(store.mapped(part.file).bytes_of(part)) for part in parts)
    assert stored == quantized(tensors[name], compression)


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
@pytest.mark.parametrize("family", PER_EXPERT)
def test_gate_and_up_are_contiguous(tmp_path: Path, family: str, compression: str | None) -> None:
    """The file has the fused matrix, its codes, or its scales from gate's first byte on."""
    checkpoint = checkpoint_of(family, tmp_path / "model")
    tensors = read_tensors(checkpoint)
    folder = split(checkpoint, compression=compression, sequential=False)
    store, raw = LayerStore(folder), (folder / "model.layers.1.safetensors").read_bytes()
    begins = []
    for expert in range(4):
        leaves = NAMES.get(family, ("gate", "up", "down"))
        gate, up, down = (GATE_UP_DOWN[family].format(expert, leaf) for leaf in leaves)
        fused = torch.cat([tensors[gate], tensors[up]])
        expected: tuple[bytes, ...] = (fused.view(torch.uint8).numpy().tobytes(),)
        if compression is not None:
            expected = quantized(fused, compression)
        for part, content in zip(store.tensors[gate].parts, expected, strict=False):
            assert raw[part.offset : part.offset + len(content)] == content
        data = [part for name in (gate, up, down) for part in store.tensors[name].parts[: len(expected)]]
        begins.append(min(part.offset for part in data))
        assert max(part.offset + part.nbytes for part in data) - begins[-1] == sum(part.nbytes for part in data)
    assert len({later - earlier for earlier, later in itertools.pairwise(begins)}) == 1
