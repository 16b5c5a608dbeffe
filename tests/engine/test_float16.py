"""Models that compute in float16, as most checkpoints of AWQ and GPTQ say: layers are one call, with torch's bits."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from rabbitllm.base.compiling import in_float16, wide
from rabbitllm.base.programs import HALVES, Program
from rabbitllm.engine import _layer_kernels, _rotary
from rabbitllm.engine._attention import is_whole_layer
from rabbitllm.engine._gates import every_half, fuse_gates
from rabbitllm.engine._norms import fuse_norms
from rabbitllm.engine.placement import Tier
from rabbitllm.quant import _vectors
from tests.engine.test_recurrences import Operations
from tests.support import fresh_process, quantized
from tests.support.builders import build_checkpoint
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import INPUT, assert_same, budget_that_keeps, dequantized, load, run, split, tiers

pytestmark = [
    pytest.mark.bits,
    pytest.mark.skipif(not _vectors.lanes(), reason="codes are dequantized for each use"),
]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FAST: dict[str, Any] = {"exact": False, "fast_bfloat16": True}
"""As commands load."""
EXPERTS = {**SIZES, "moe_intermediate_size": 64, "num_experts": 24}


def awq(family: str, **sizes: int) -> Callable[[Path], tuple[Path, Path]]:
    def build(folder: Path) -> tuple[Path, Path]:
        plain = folder.parent / "plain"
        return quantized.build_awq(folder, family, plain, shards=2, group=32, **sizes), plain

    return build


def gptq(folder: Path) -> tuple[Path, Path]:
    """With inputs in any order, and biases of queries, keys and values."""
    plain = folder.parent / "plain"
    sizes = {"form": "gptq", "group": 32, "bits": 4, "ordered": False, **SIZES}
    return quantized.build_gptq(folder, "qwen2", plain, shards=2, **sizes), plain  # type: ignore[arg-type]


def compressed(compression: str, family: str = "qwen3") -> Callable[[Path], tuple[Path, Path]]:
    """Of this package's schemes, with norms of queries and keys."""

    def build(folder: Path) -> tuple[Path, Path]:
        build_checkpoint(folder, family, dtype=torch.float16, **SIZES)
        return folder, dequantized(folder, folder.parent / "plain", compression, torch.float16)

    return build


def uncompressed(family: str, **sizes: int) -> Callable[[Path], tuple[Path, Path]]:
    def build(folder: Path) -> tuple[Path, Path]:
        return build_checkpoint(folder, family, dtype=torch.float16, **sizes), folder

    return build


BUILDS: dict[str, tuple[Callable[[Path], tuple[Path, Path]], str | None, int]] = {
    "awq": (awq("llama", **SIZES), None, 20),
    "awq-experts": (awq("qwen3_moe", **EXPERTS), None, 20),
    "gptq": (gptq, None, 20),
    "8bit": (compressed("8bit"), "8bit", 20),
    "q8_0": (compressed("q8_0"), "q8_0", 20),
    "plain": (uncompressed("qwen2", **SIZES), None, 20),
    "plain-experts": (uncompressed("qwen3_moe", **EXPERTS), None, 20),
}
"""Name -> what writes a checkpoint and the plain model of its matrices, its compression, and operations of a layer."""


def stepped(model: Any, ids: torch.Tensor = INPUT) -> torch.Tensor:
    """The logits of tokens that come one after the other."""
    cache, logits = None, []
    with torch.inference_mode():
        for index in range(ids.shape[1]):
            output = model(ids[:, index : index + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", BUILDS)
def test_steps_are_as_near_as_transformers_in_every_tier(tmp_path: Path, name: str) -> None:
    build, compression, _ = BUILDS[name]
    folder, plain = build(tmp_path / "model")
    directory = split(folder, compression)
    resident, exact = load(directory, **FAST), load(directory)
    layers = resident.model.layers
    assert all(map(is_whole_layer, layers)) or resident.placement.experts
    results = stepped(resident)
    assert results.dtype is torch.float16
    routed = bool(resident.placement.experts)
    scheme = compression if compression == "8bit" else None
    assert_as_near(results, stepped(exact), exact_logits(plain, INPUT), routed=routed, scheme=scheme)
    assert_same(run(load(directory, 0, **FAST)), run(resident))
    half = budget_that_keeps(directory, 0.25, **FAST) if routed else sum(p.nbytes for p in exact.parameters()) // 3
    kept = load(directory, half, **FAST)
    assert {Tier.STREAMED, Tier.ROUTED} & set(tiers(kept).values())
    for _ in range(2):
        assert torch.equal(stepped(kept), results)


@pytest.mark.parametrize("name", BUILDS)
@torch.no_grad()
def test_a_layer_takes_few_operations_and_has_the_bits_of_its_parts(tmp_path: Path, name: str) -> None:
    build, compression, most = BUILDS[name]
    directory = split(build(tmp_path / "model")[0], compression)
    model, watched = (load(directory, **FAST) for _ in range(2))
    for part in watched.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda *given: None)
    caches, fewest = [each(INPUT).past_key_values for each in (model, watched)], float(most)
    for _ in range(6):
        counts, logits = [], []
        for each, cache in zip((model, watched), caches, strict=True):
            with Operations() as operations:
                logits.append(each(INPUT[:, :1], past_key_values=cache).logits)
            counts.append(operations.count / model.config.num_hidden_layers)
        fewest = min(fewest, counts[0])  # some tokens of experts are left to their class
    assert fewest < most < counts[1]
    error = (logits[0] - logits[1]).float().norm() / logits[1].float().norm()
    assert error < 2**-8  # what is attended to is rounded more often there


@torch.no_grad()
def test_norms_gates_and_rotation_have_the_bits_of_their_classes() -> None:
    """What exceeds float16 is infinite in both."""
    config = LlamaConfig(hidden_size=128, intermediate_size=256)
    norm, mlp = LlamaRMSNorm(128).half(), LlamaMLP(config).half()
    norm.weight.copy_(torch.rand(128) * 4)
    fused, fused_mlp = copy.deepcopy(norm), copy.deepcopy(mlp)
    assert fuse_norms(fused) == 1
    assert fuse_gates(fused_mlp) == 1
    for scale in (1e-6, 1e-3, 1, 300, 2e4):
        x = (torch.randn(1, 3, 128) * scale).half()
        assert torch.equal(fused(x).nan_to_num(7), norm(x).nan_to_num(7))
        assert torch.equal(fused_mlp(x).nan_to_num(7), mlp(x).nan_to_num(7))
        q, k = (torch.randn(1, heads, 1, 32).half() * scale for heads in (4, 2))
        angles = [torch.randn(1, 1, 32).half() for _ in range(2)]
        for result, expected in zip(
            _rotary._rotated(apply_rotary_pos_emb, q, k, *angles), apply_rotary_pos_emb(q, k, *angles), strict=True
        ):
            assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))


def test_sums_of_every_number() -> None:
    """Each with others of all sizes: subnormal ones, and infinite sums."""
    for dtype in HALVES:
        every = every_half(dtype)
        program = Program.of(
            lambda to, *at: to.add(_layer_kernels.add, [*at, len(every)]),  # noqa: B023
            3,
            dtype=dtype,
        )
        for turned in range(0, len(every), 4099):
            other, out = every.roll(turned), torch.empty_like(every)
            program(every.data_ptr(), other.data_ptr(), out.data_ptr())
            expected = every + other
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))


def test_functions_without_halves_are_the_same_for_both() -> None:
    assert in_float16(_layer_kernels.keep) is _layer_kernels.keep
    assert in_float16(_layer_kernels.add) is in_float16(_layer_kernels.add) is not _layer_kernels.add
    assert in_float16(in_float16(_layer_kernels.add)).__globals__["wide"] is not wide


def test_a_processor_without_instructions_for_halves(tmp_path: Path) -> None:
    """Their conversions have torch's bits; LLVM would end the process for those that it has no instructions for."""
    directory = split(build_checkpoint(tmp_path / "model", "llama"), "4bit")
    code = """
import sys, numba, torch
from pathlib import Path
from rabbitllm.base import compiling
from rabbitllm.engine._gates import every_half
from tests.support.tiny_models import INPUT, load

@numba.njit
def convert(words, floats, back):
    for i in range(len(words)):
        floats[i] = widen(words[i])
        back[i] = shorten(floats[i])

@numba.njit
def shortened(floats, out):
    for i in range(len(floats)):
        out[i] = shorten(floats[i])

assert not compiling._converts_halves()
widen, shorten = compiling._IN_FLOAT16[compiling.wide], compiling._IN_FLOAT16[compiling.shortened]
every = every_half(torch.float16)
floats, back = torch.empty(1 << 16), torch.empty(1 << 16, dtype=torch.float16)
convert(every.view(torch.uint16).numpy(), floats.numpy(), back.view(torch.uint16).numpy())
assert torch.equal(floats.nan_to_num(5), every.float().nan_to_num(5)), "widened"
assert torch.equal(back.nan_to_num(5).view(torch.int16), every.nan_to_num(5).view(torch.int16)), "there and back"
bits = torch.cat([torch.arange(0, 1 << 31, 4099), torch.arange(0x33000000, 0x39000000, 1025)])
bits = torch.cat([bits, bits | 1 << 31, (every.float().view(torch.int32) + 0x1000).long()]).to(torch.int32)
floats = bits.view(torch.float32)
back = torch.empty(len(bits), dtype=torch.float16)
shortened(floats.numpy(), back.view(torch.uint16).numpy())
assert torch.equal(back.isnan(), floats.isnan()), "no number"
same = back.view(torch.int16) == floats.half().view(torch.int16)
assert bool((same | floats.isnan()).all()), "shortened"
for dtype in ("bfloat16", "float16"):
    with torch.inference_mode():
        model = load(Path(sys.argv[1]), exact=False, dtype=dtype)
        cache = model(INPUT).past_key_values
        assert model(INPUT[:, :1], past_key_values=cache).logits.isfinite().all()
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    environment.pop("NUMBA_CPU_FEATURES", None)  # of another processor
    fresh_process.python(code, directory, env=environment)
