"""Results do not depend on torch's default dtype, which any thread may change, such as one that builds a model, nor on
its default device."""

from __future__ import annotations

from pathlib import Path

import torch

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.quant import products
from tests.support.builders import build_checkpoint
from tests.support.forked import in_a_fork
from tests.support.fresh_process import in_a_fresh_process
from tests.support.tiny_models import load, split

SCHEMES = (None, "4bit", "8bit", "q4_k", "q8_0")


def compare(folder: Path) -> None:
    ids = torch.arange(40)[None] % 97 + 3
    for scheme in SCHEMES:
        model = load(split(folder, compression=scheme), 1 << 30, dtype="bfloat16", exact=False)
        results = []
        for dtype, device in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, "meta")):
            torch.set_default_dtype(dtype)
            torch.set_default_device(device)
            results.append([model(input_ids=ids[:, :count]).logits for count in (1, 5, 40)])
            torch.set_default_device(None)
        for expected, *others in zip(*results, strict=True):
            assert all(torch.equal(expected, logits) for logits in others), scheme


def compare_products() -> None:
    random = RandomTensors()
    for scheme in ("4bit", "8bit", "Q4_K", "Q8_0"):
        matrix, x = products.sample(scheme, (64, 512), random), random.normal(40, 512, dtype=torch.float32)
        expected = [matrix.linear(x[:rows], None) for rows in (1, 40)]
        torch.set_default_device("meta")
        results = [matrix.linear(x[:rows], None) for rows in (1, 40)]
        torch.set_default_device(None)
        assert all(map(torch.equal, results, expected)), scheme


def test_products_have_the_same_bits() -> None:
    """As of experts, which are multiplied without a call of torch that leaves the default device aside."""
    in_a_fork(compare_products)


def test_passes_have_the_same_bits(tmp_path: Path) -> None:
    """In a process of its own: kernels that wrote behind a buffer's end would take this one along."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **sizes)
    in_a_fresh_process(compare, folder)
