"""Models with blocks of GGUF files for matrices: transformers' bits when dequantized, near them by codes."""

from __future__ import annotations

import contextlib
import itertools
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine.expert_finding import is_routed
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant import _vectors
from rabbitllm.quant._block_formats import FORMATS
from rabbitllm.quant.gguf_blocks import sample
from rabbitllm.store.checkpoint_folder import PlainReader
from rabbitllm.store.layer_file import DONE_SUFFIX
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.store.manifest import MANIFEST_NAME
from tests.support.builders import SINGLE_NAME, build_checkpoint, read_tensors
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import ALL, INPUT, assert_same, budget_that_keeps, load, plain_model, run, split, tiers

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 320}
EXPERTS: dict[str, Any] = {**SIZES, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
TYPES = ("Q4_K", "Q6_K", "Q8_0", "IQ3_S")
"""In turn, for the matrices of a model; the last has no kernel."""


def split_and_numbers(folder: Path, family: str, types: tuple[str, ...] = TYPES, **settings: Any) -> tuple[Path, Path]:
    """A split with blocks for matrices, without a manifest, and a checkpoint of the numbers that they stand for."""
    numbers = build_checkpoint(folder / "numbers", family, **settings)
    directory = split(numbers)
    (directory / MANIFEST_NAME).unlink()
    plain, random, turn = {}, RandomTensors(1), itertools.cycle(types)
    kinds: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored = {}
        for name, tensor in load_file(path).items():
            if tensor.dim() != 2 or tensor.shape[1] % 256 or ".gate." in name:
                stored[name] = plain[name] = tensor
                continue
            group = re.sub(r"experts\.\d+|gate_proj|up_proj", "", name)  # those that become one parameter
            block_type = kinds.get(group) or kinds.setdefault(group, next(turn))
            blocks = random_blocks(block_type, *tensor.shape, random)
            stored[name], stored[f"{name}.gguf.{block_type.lower()}"] = blocks, torch.zeros(1, dtype=torch.uint8)
            values = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[block_type])
            plain[name] = torch.from_numpy(values).to(tensor.dtype)
        save_file(stored, path)
        path.with_name(path.name + DONE_SUFFIX).touch()
    for path in numbers.glob("*.safetensors*"):
        path.unlink()
    save_file(plain, numbers / SINGLE_NAME, metadata={"format": "pt"})
    return directory, numbers


def random_blocks(block_type: str, rows: int, columns: int, random: RandomTensors) -> torch.Tensor:
    if block_type in FORMATS:
        return sample(block_type, rows * columns, random).view(rows, -1)
    blocks = random.integers(0, 256, rows * columns // 256, 110)
    blocks[:, :2] = torch.tensor([1 / 8192]).half().view(torch.uint8)  # the scale of IQ3_S
    return blocks.view(rows, -1)


FAMILIES = {"llama": SIZES, "qwen3_moe": EXPERTS}


@pytest.mark.parametrize(
    ("family", "budget", "dtype"),
    [
        ("llama", ALL, torch.float32),
        ("llama", 0, torch.bfloat16),
        ("qwen3_moe", ALL, torch.bfloat16),
        ("qwen3_moe", 0, torch.float32),
    ],
)
def test_dequantized_blocks_have_the_bits_of_transformers(
    family: str, budget: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    directory, numbers = split_and_numbers(tmp_path, family, dtype=dtype, **FAMILIES[family])
    model = load(directory, budget)
    assert_same(run(model), run(plain_model(numbers)))


@pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used here")
@pytest.mark.parametrize(("family", "share"), [("llama", 0.0), ("llama", 1.0), ("qwen3_moe", 0.25), ("qwen3_moe", 1.0)])
def test_products_from_blocks_are_as_close_as_transformers(family: str, share: float, tmp_path: Path) -> None:
    directory, numbers = split_and_numbers(tmp_path, family, ("Q4_K", "Q8_0"), dtype=torch.bfloat16, **FAMILIES[family])
    is_pooled = 0 < share < 1
    budget = budget_that_keeps(directory, share, exact=False) if is_pooled else int(share) * ALL
    model = load(directory, budget, exact=False)
    actual, plain = (run(m).logits for m in (model, plain_model(numbers)))
    assert_as_near(actual, plain, exact_logits(numbers, INPUT), routed=family == "qwen3_moe")
    if family == "qwen3_moe":
        experts = next(module for module in model.modules() if is_routed(module))
        assert isinstance(next(experts.gate_up_proj.each([0])), QuantizedWeight)
        assert bool(model.placement.pools) == (share < 1)
    if share == 1.0:
        kinds = {type(tensor) for tensor in model.model.layers[0].self_attn.parameters()}
        assert QuantizedWeight in kinds
        assert Tier.STREAMED not in tiers(model).values()


def test_stored_tensors_have_the_shapes_of_their_numbers(tmp_path: Path) -> None:
    directory, numbers = split_and_numbers(tmp_path, "llama", **SIZES)
    store, plain = LayerStore(directory), read_tensors(numbers)
    assert {name: stored.shape for name, stored in store.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in plain.items()
    }
    assert {t.quantized.scheme for t in store.tensors.values() if t.quantized} == set(TYPES)
    assert sum(t.nbytes for t in store.tensors.values()) < 0.3 * sum(t.nbytes for t in plain.values())
    reader = PlainReader(store)
    with contextlib.closing(reader):
        for name, tensor in plain.items():
            assert torch.equal(reader.read(store.tensors[name], torch.float32), tensor.float())
