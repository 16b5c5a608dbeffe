"""The memory of a pass and what weights leave to it: estimates, compared with what a process really takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations import sdpa_attention

from rabbitllm.base.options import RunOptions
from rabbitllm.base.terminal import size
from rabbitllm.engine import forwards
from rabbitllm.engine.devices import default_budget
from rabbitllm.engine.free_memory import available_ram, trimming
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import Tier
from rabbitllm.errors import OptionError
from rabbitllm.generation import memory
from rabbitllm.generation.batch import Batch, Limits
from rabbitllm.generation.kv_cache import bytes_of, cost_by_config
from rabbitllm.generation.memory import (
    MIN_TOKENS,
    CacheMemory,
    PassCost,
    cost_of_a_pass,
    left_to_requests,
    repeated_bytes,
    weight_limits,
)
from rabbitllm.generation.request import Delta, Request
from rabbitllm.generation.scoring._tasks import Room
from rabbitllm.generation.scoring.score import limits_of
from rabbitllm.quant._vectors import lanes, multiplies_pairs
from tests.engine.test_siblings import checkpoint as compressed
from tests.generation.submitting import Submitted, alone, answered, prompt
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.tiny_models import bytes_when_made, load, split

LLAMA = SimpleNamespace(hidden_size=2048, intermediate_size=5632, num_attention_heads=16, vocab_size=32000)
SHAPES = ("16:16:1:apart", "2048:256:64:apart", "2048:2048:16:apart", "2048:1024:2:apart")
"""The first one warms up; many that are short in parts, all at once, few that are long."""


def measured(folder: Path, *cases: str) -> list[dict[str, int]]:
    command = [sys.executable, "-m", "tests.generation.pass_peak_child", str(folder), *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    peaks: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return peaks


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer as wide as those of a small model in use."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4}
    folder = tmp_path_factory.mktemp("wide") / "model"
    more = {"num_hidden_layers": 1, "head_dim": 64, "max_position_embeddings": 4096, "eos_token_id": None}
    return split(build_checkpoint(folder, "llama", dtype=torch.bfloat16, **sizes, **more))


@pytest.mark.long
@pytest.mark.skipif(trimming() is None, reason="no glibc here")
def test_a_pass_takes_the_estimated_memory(wide: Path) -> None:
    """Never more; and not much less: widened inputs and sums of products count everywhere, and a processor that
    multiplies bfloat16 itself makes none."""
    limit = 4 if multiplies_pairs() else 3
    _, *peaks = measured(wide, *SHAPES)
    for peak in peaks:
        assert peak["measured"] < peak["reckoned"] < limit * peak["measured"], peaks


@pytest.mark.long
@pytest.mark.skipif(trimming() is None, reason="no glibc here")
def test_keeping_large_blocks_apart_saves_memory(wide: Path) -> None:
    """What keeping them apart is for."""
    case = "2048:1024:2"
    apart, usual = (measured(wide, f"16:16:1:{how}", f"{case}:{how}")[1] for how in ("apart", "as-usual"))
    assert usual["measured"] > 1.25 * apart["measured"]


def test_groups_of_a_pass_fit_in_memory() -> None:
    for itemsize in (2, 4):
        cost = cost_of_a_pass(LLAMA, itemsize)
        for nbytes in (150 << 20, 1 << 30, 16 << 30):
            tokens, part = cost.parts_in(nbytes, 64)
            assert 0.9 * nbytes < cost.of(tokens, part, 64) <= nbytes
            assert cost.is_tight(part, nbytes // 2)
        assert not cost.is_tight(cost.max_tokens, 8 << 30)
        assert cost.parts_in(0, 64) == (MIN_TOKENS, MIN_TOKENS)
        assert cost.least() < cost.worthwhile(1) < cost.worthwhile(64)


def test_experts_of_all_tokens_of_a_pass_fit_in_memory() -> None:
    """All tokens go through them at once, whatever the parts: then each expert is read once."""
    mixture = SimpleNamespace(**vars(LLAMA), moe_intermediate_size=512, num_experts_per_tok=10)
    for itemsize in (2, 4):
        cost = cost_of_a_pass(mixture, itemsize)
        assert cost.experts > 10 * 4 * 2048 * itemsize  # its rows before and after, and two times weighted
        for nbytes in (150 << 20, 1 << 30, 16 << 30):
            tokens, part = cost.parts_in(nbytes, 64)
            assert 0.9 * nbytes < cost.of(tokens, part, 64) <= nbytes
            assert tokens * cost.experts > 0.6 * (nbytes - cost.fixed - 64 * cost.sampled)


@pytest.mark.long
@pytest.mark.skipif(trimming() is None, reason="no glibc here")
def test_a_pass_of_a_mixture_takes_the_estimated_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 8}
    more = {"num_hidden_layers": 2, "max_position_embeddings": 16384, "eos_token_id": None}
    folder = split(build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **sizes, **more))
    _, *peaks = measured(folder, "512:512:1:apart", "8192:512:16:apart", "4096:4096:16:apart")
    for peak in peaks:
        assert peak["measured"] < peak["reckoned"] < 3 * peak["measured"], peaks


def test_eager_attention_makes_groups_smaller() -> None:
    eager = SimpleNamespace(**vars(LLAMA), _attn_implementation="eager")
    cost, without = cost_of_a_pass(eager, 2), cost_of_a_pass(LLAMA, 2)
    for nbytes in (10 << 20, 1 << 30):
        tokens = cost.tokens_in(nbytes)
        assert 0.9 * nbytes < tokens * (cost.each + tokens * cost.pair) <= nbytes
        assert tokens < without.tokens_in(nbytes)


def test_costs_follow_from_the_sizes() -> None:
    """A gigabyte is some thousand tokens of a model of this width."""
    tokens = cost_of_a_pass(LLAMA, 2).tokens_in(1 << 30)
    assert 8_000 < tokens < 20_000
    assert 0.5 * tokens < cost_of_a_pass(LLAMA, 4).tokens_in(1 << 30) < 1.5 * tokens  # sums of 16 bit have 32
    by_layer = SimpleNamespace(**{**vars(LLAMA), "intermediate_size": [1024, 5632]})
    assert cost_of_a_pass(by_layer, 2) == cost_of_a_pass(LLAMA, 2)
    assert cost_of_a_pass(SimpleNamespace(hidden_size=768), 2).tokens_in(1 << 30) > tokens
    assert PassCost(1, 0, 1, 0, 1, 1).tokens_in(-5) == MIN_TOKENS


def test_layers_of_different_sizes() -> None:
    """A pass takes what its widest layer takes; a cache takes the sum of its layers."""
    sizes = (SimpleNamespace(**vars(LLAMA), head_dim=64), SimpleNamespace(**vars(LLAMA), head_dim=256))
    mixed = SimpleNamespace(is_heterogeneous=True, per_layer_config=sizes, num_hidden_layers=2)
    assert cost_of_a_pass(mixed, 2) == cost_of_a_pass(sizes[1], 2)
    assert cost_of_a_pass(mixed, 2).each > cost_of_a_pass(sizes[0], 2).each
    assert cost_by_config(mixed, torch.bfloat16).every_token == 2 * 2 * 16 * (64 + 256)


def test_memory_left_to_requests() -> None:
    assert left_to_requests(1000, None) == 200
    assert left_to_requests(1000, 300) == 400
    assert left_to_requests(1000, 5000) == 1000
    assert left_to_requests(1000, 300, 50) == 400
    assert left_to_requests(1000, 300, 250) == 550


def test_weights_leave_room_for_requests() -> None:
    run = RunOptions(device="cpu")
    for cache_bytes in (None, 1 << 20):
        limits = weight_limits(run, cache_bytes)
        assert limits is not None
        nbytes = limits["cpu"]
        assert isinstance(nbytes, int)
        least = 1 / 5 if cache_bytes is None else 1 / 10
        free = available_ram()
        assert 0 < nbytes < free * (1.05 - least)  # other processes come and go meanwhile
    everything = weight_limits(run, 1 << 60)
    assert everything == {"cpu": 0}


def test_a_given_limit_holds() -> None:
    assert weight_limits(RunOptions(device="cpu", max_memory={"cpu": 1 << 30}), None) == {"cpu": 1 << 30}


def test_gpus_leave_their_share_of_a_given_cache_size(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [FakeGpu(0, memory=8 << 30), FakeGpu(1, memory=8 << 30)]
    monkeypatch.setattr(memory, "resolve_devices", lambda device, limits: gpus)
    run = RunOptions(device="auto")
    assert weight_limits(run, None) is None
    weights = default_budget(gpus[0])
    assert weight_limits(run, 1 << 30) == {gpu.name: weights - (1 << 29) for gpu in gpus}


def test_prompts_are_chunked_by_free_memory(split_folder: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to nothing free a pass has `MIN_TOKENS` of prompts, and the answers are the same."""
    model = load(split_folder, dtype="float32")
    (lane,) = model.streamer.executors.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 400_000)
    model.profiler.clear()
    requests = [Request(tuple(range(3 + first, 63 + first)), 4) for first in (0, 70)]
    with Batch(model) as batch:
        answers = answered(batch, requests)
        passes = batch.stats.passes
    assert [answer.tokens for answer in answers] == [alone(plain, request) for request in requests]
    assert passes >= 2 * 60 // MIN_TOKENS


@pytest.mark.parametrize("is_streamed", [True, False])
def test_layers_that_a_pass_dequantizes_are_not_free_memory(tmp_path: Path, is_streamed: bool) -> None:
    """KV caches, prompts and scoring get only what the largest dequantized layer leaves."""
    sizes = {"hidden_size": 128, "intermediate_size": 512}
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **sizes), "8bit")
    gpu = FakeGpu(0, memory=64 << 20)
    budget = 0 if is_streamed else bytes_when_made(load(directory)) - 1
    options = RunOptions(max_memory={gpu.name: budget, "cpu": 0}, show_progress=False)
    model = load_model(directory, options, None, [gpu])
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    norms = sum(parameter.nbytes for parameter in model.model.layers[0].parameters() if parameter.dim() == 1)
    assert {placed.tier for placed in model.placement.units if ".layers." in placed.unit} == {
        Tier.STREAMED if is_streamed else Tier.PACKED
    }
    assert memory.free_memory(model) == gpu.memory - (layer - norms)
    limits = limits_of(model, Room()).device_bytes, CacheMemory(model, None).limit
    (executor,) = model.streamer.executors.values()
    executor.scratch = 0
    gpu.memory -= layer - norms
    assert limits == (limits_of(model, Room()).device_bytes, CacheMemory(model, None).limit)
    executor.scratch = gpu.memory + 1
    assert memory.free_memory(model) == 0


def test_repeated_keys_are_no_memory_for_prompts(tmp_path: Path) -> None:
    """On GPUs, for the longest sequence that a model and its KV caches allow; activations are on one of them."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **sizes))
    max_tokens = []
    for count in (1, 2):
        gpus = [FakeGpu(index, memory=(8 << 20) // count) for index in range(count)]
        limits = {**{gpu.name: 0 for gpu in gpus}, "cpu": 0}
        model = load_model(directory, RunOptions(max_memory=limits, show_progress=False), None, gpus)
        assert repeated_bytes(model.config, 2, 512) == 2 * 2 * 8 * 16 * 512
        cost = cost_of_a_pass(model.config, 2)
        for limit, longest in ((4 << 20, 512), (100 * 2 * 2 * 2 * 16 * model.config.num_hidden_layers, 100)):
            room = CacheMemory(model, limit)
            free = ((8 << 20) - limit) // count - 2 * 2 * 8 * 16 * longest
            assert room.max_tokens == cost.tokens_in(free - cost.of(0, 0, 1))
            max_tokens.append(room.max_tokens)
    assert len(set(max_tokens)) == 4
    own_keys = SimpleNamespace(**{**vars(LLAMA), "num_key_value_heads": 16})
    assert repeated_bytes(own_keys, 2, 512) == repeated_bytes(LLAMA, 2, 512) == 0


def test_on_a_t4_a_chunk_repeats_the_keys_of_earlier_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "_repeating", set())
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **sizes))
    gpu = FakeGpu(0, capacity=1 << 30, has_bf16=False)
    options = RunOptions(max_memory={gpu.name: 1 << 30, "cpu": 0}, show_progress=False)
    before, part = 800, 16
    with watched(), torch.inference_mode():
        model = load_model(directory, options, None, [gpu])
        cache = transformers.DynamicCache(config=model.config)
        ids = torch.arange(before + part)[None].to(model.device) % 200
        model(ids[:, :before], past_key_values=cache, logits_to_keep=1)
        used = gpu.peak = gpu.used
        model(ids[:, before:], past_key_values=cache, logits_to_keep=1)
    nbytes = cost_of_a_pass(model.config, 2).of(part, part, 1)
    assert nbytes < gpu.peak - used < nbytes + repeated_bytes(model.config, 2, before + part)


def test_no_free_memory_is_refused_at_once(split_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(split_folder, dtype="float32")
    (lane,) = model.streamer.executors.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 1000)
    with pytest.raises(OptionError, match="leave 1,000 bytes free"):
        Batch(model)


def test_throughput_mode_leaves_room_for_the_smallest_pass(
    split_folder: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(split_folder, dtype="float32")
    least = cost_of_a_pass(model.config, 4).least()
    (lane,) = model.streamer.executors.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 300_000 + least)
    message = (
        f"A pass needs {size(least)} in addition to the KV cache ({size(300_001)}); {size(300_000 + least)} are free"
    )
    with pytest.raises(OptionError, match=re.escape(message)):
        Batch(model, Limits(cache_bytes=300_001, throughput=True))
    with Batch(model, Limits(cache_bytes=300_000, throughput=True)) as batch:
        request = Request(tuple(range(3, 40)), 3)
        (answer,) = answered(batch, [request])
    assert answer.tokens == alone(plain, request)


def test_memory_for_logits_limits_the_sequences_of_a_pass(
    split_folder: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(split_folder, dtype="float32")
    cost = cost_of_a_pass(model.config, 4)
    (lane,) = model.streamer.executors.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 300_000 + max(12 * cost.sampled, cost.least()))
    requests = [Request(tuple(range(3 + index, 9 + index)), 4) for index in range(7)]
    with Batch(model, Limits(cache_bytes=300_000, throughput=True)) as batch:
        limit = cost.sequences_in(lane.device.free_bytes() - 300_000)
        answers = answered(batch, requests)
        stats = batch.stats
    assert [answer.tokens for answer in answers] == [alone(plain, request) for request in requests]
    assert stats.passes >= -(-len(requests) // limit) * 4


@pytest.mark.skipif(not lanes(), reason="no vectors of a kind that is used here")
def test_room_of_short_sequences_counts(tmp_path: Path) -> None:
    """A step of all layers by one call makes room for some tokens, however few there are."""
    model, sizes = load(compressed(tmp_path, "llama", "4bit"), exact=False), list[tuple[int, int]]()
    with Batch(model) as batch:
        text = Submitted(Request(prompt(5), 6))

        def receive(event: Any) -> None:
            if isinstance(event, Delta) and text.handle is not None and text.handle.cache is not None:
                sizes.append((bytes_of(text.handle.cache), batch.stats.cache_bytes))
            text.receive(event)

        with batch.paused():
            text.handle = batch.submit(text.request, receive)
        text.wait()
    assert len(sizes) > 3
    assert all(0 < nbytes <= counted for nbytes, counted in sizes[2:])
