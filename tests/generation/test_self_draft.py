"""A streamed model is its own draft: copies of its streamed layers at few bits propose, its answers stay its own."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.auto_model import LoadRequest, prepare_model
from rabbitllm.base.options import Hosts, parse_size
from rabbitllm.engine._copies import HEAD
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import Tier
from rabbitllm.errors import OptionError
from rabbitllm.generation.draft import prepare_draft
from rabbitllm.generation.session import Session
from rabbitllm.quant import block_encoders, gguf_blocks, products
from rabbitllm.quant.schemes import ROW_ELEMENTS, type_for_rows
from rabbitllm.telemetry.passes import FURTHER, READ
from tests.chat.talkers import characters, talker_folder
from tests.generation.test_rewind import (
    IDS,
    TOKENS,
    asked,
    assert_the_models_distribution,
    checkpoint,
)
from tests.support.always_drafts import always_drafts  # noqa: F401  a fixture that applies by itself
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import load, one_thread, options_for, plain_model, split, tiers  # noqa: F401

SHORT = ("llama", "gemma3", "qwen3_next", "mixtral", "gpt_oss")
LONG = ("qwen3", "qwen3_5", "qwen3_moe", "mamba", "falcon_h1", "lfm3", "gemma3n")
"""Dense, with windows, with states, and mixtures, of which one has its experts transposed."""


def load_with_copies(directory: Path, **options: Any) -> Any:
    """The model with as little memory as copies of its layers take, within a tenth of all weights."""
    whole = load(directory, **options).get_memory_footprint()
    for tenth in range(4, 10):
        try:
            model = load(directory, whole * tenth // 10, self_draft=True, **options)
        except OptionError:
            continue
        assert {Tier.STREAMED, Tier.ROUTED}.intersection(tiers(model).values())
        prepare_draft(model, "self")
        model.generation_config.assistant_confidence_threshold = 0  # a random model is never sure
        return model
    pytest.fail("No limit of memory leaves room for copies, and streams something.")


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_greedy_answers_are_the_models_own(tmp_path: Path, name: str) -> None:
    directory = split(checkpoint(tmp_path / "model", name))
    model = load_with_copies(directory, profiling=True)
    assert "are copies at" in str(model.placement)
    expected = asked(model).tokens
    assert asked(load(directory)).tokens == expected
    plain = model.profiler.sums[FURTHER]
    model.profiler.clear()
    assert asked(model, "self").tokens == expected
    drafted = model.profiler.sums[FURTHER]
    assert drafted.passes < plain.passes == TOKENS - 1  # drafts count as no passes,
    if not model.placement.pools:
        read = drafted.disk_bytes / model.placement.streamed_bytes
        # and read nothing, but rows of tables; a pass may find what the one before read ahead
        assert abs(read - drafted.passes) < 1
    assert asked(model).tokens == expected


@pytest.mark.parametrize("compression", ["8bit", "q8_0"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_compressed_model_is_its_own_draft(tmp_path: Path, compression: str, *, exact: bool) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    model = load_with_copies(split(checkpoint(tmp_path / "model", "llama", **wide), compression), exact=exact)
    assert not exact or Tier.PACKED in tiers(model).values()  # these are dequantized for drafts, too
    assert asked(model, "self").tokens == asked(model).tokens


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen3", True), ("gemma2", True)])
def test_a_quarter_of_the_memory(tmp_path: Path, name: str, tied: bool) -> None:
    """With a head of many layers' size, as real ones have: neither it nor two of it are in memory."""
    sizes = {"vocab_size": 7168, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 14}
    folder = build_checkpoint(tmp_path / "model", name, tied=tied, **sizes)
    directory = split(folder)
    room = sum(file.stat().st_size for file in directory.glob("*.safetensors")) // 4
    model = load(directory, room, self_draft=True, exact=False, profiling=True)
    assert tiers(model)["lm_head"] is Tier.STREAMED
    mapped = model.placement.of("model.embed_tokens").stored  # takes no memory
    assert model._internals.held_bytes - mapped <= room
    with pytest.raises(OptionError, match="lacking for the smallest"):
        load(directory, room, self_draft=True)  # which multiplies the head as a whole
    prepare_draft(model, "self")
    model.generation_config.assistant_confidence_threshold = 0
    expected = asked(model).tokens
    plain = model.profiler.sums[FURTHER]
    model.profiler.clear()
    assert asked(model, "self").tokens == expected
    drafted = model.profiler.sums[FURTHER]
    assert drafted.passes < plain.passes == TOKENS - 1
    # a pass may find what the one before read ahead
    assert abs(drafted.disk_bytes / model.placement.streamed_bytes - drafted.passes) < 1


def test_what_would_fit_is_said(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    directory = split(checkpoint(tmp_path / "model", "llama", **wide))
    with pytest.raises(OptionError, match="smallest") as error:
        load(directory, 100_000, self_draft=True)
    found = re.search(r"to ([\d.]+ MB), with which they fit", error.value.remedy)
    assert found is not None
    enough = parse_size(found[1], "max_memory")
    load(directory, enough, self_draft=True)
    with pytest.raises(OptionError, match="smallest"):
        load(directory, enough - 20_000, self_draft=True)
    coded = split(checkpoint(tmp_path / "coded", "llama", **wide), "q2_k")
    with pytest.raises(OptionError, match="save no memory"):
        load(coded, 0, self_draft=True, exact=False)


@torch.no_grad()
def test_drafts_compute_with_the_encoded_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain model with the decoded blocks in its streamed layers has the logits of a draft, and others than the model
    itself, whose own are the same before and after, also if the draft was interrupted."""
    monkeypatch.setattr(products, "max_panel_inputs", lambda width, dtype: 0)  # they round inputs to 8 bits
    folder = checkpoint(tmp_path / "model", "llama", hidden_size=256, intermediate_size=512)
    model, plain = load_with_copies(split(folder)), plain_model(folder)
    before, kind = model(IDS).logits, model.placement.copies.kind
    assert torch.equal(before, plain(IDS).logits)
    for unit in (placed.unit for placed in model.placement.units if placed.tier is Tier.STREAMED):
        for linear in (m for m in plain.get_submodule(unit).modules() if isinstance(m, nn.Linear)):
            matrix = linear.weight.data
            blocks = type_for_rows(HEAD if linear is plain.lm_head else kind, linear.in_features)
            if matrix.shape[1] % ROW_ELEMENTS == 0 and blocks is not None:
                codes = block_encoders.encode(blocks, matrix)
                linear.weight.data = gguf_blocks.dequantize(blocks, codes, tuple(matrix.shape), torch.float32)
    expected = plain(IDS).logits
    with model.streamer.drafting():
        drafted = model(IDS).logits
    assert (drafted - expected).norm() < 0.02 * (before - expected).norm()
    hook = model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), model.streamer.drafting():
        model(IDS)
    hook.remove()
    assert torch.equal(model(IDS).logits, before)


@torch.no_grad()
def test_drafts_of_a_mixture_read_no_experts(tmp_path: Path) -> None:
    model = load_with_copies(split(checkpoint(tmp_path / "model", "mixtral")), profiling=True)

    def read() -> int:
        names = [placed.unit for placed in model.placement.experts if placed.tier is Tier.ROUTED]
        return sum(model.profiler.layers[name][READ].nbytes for name in names)

    expected = model(IDS).logits
    before, uses = read(), model.streamer.pools["cpu"].uses()
    assert before > 0
    with model.streamer.drafting():
        assert not torch.equal(model(IDS).logits, expected)
    assert read() == before
    for name, values in model.streamer.pools["cpu"].uses().items():
        assert (values == uses[name]).all()
    assert torch.equal(model(IDS).logits, expected)


def interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_other_threads_wait_for_a_draft(tmp_path: Path) -> None:
    model = load_with_copies(split(checkpoint(tmp_path / "model", "llama")))
    expected, logits = model(IDS).logits, list[torch.Tensor]()
    other = threading.Thread(target=lambda: logits.append(model(IDS).logits))
    with model.streamer.drafting():
        other.start()
        other.join(0.3)
        assert not logits
        assert not torch.equal(model(IDS).logits, expected)
    other.join()
    assert torch.equal(logits[0], expected)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_chat_keeps_its_cache(tmp_path: Path, name: str) -> None:
    model = load_with_copies(split(talker_folder(tmp_path / "model", name)))
    model.tokenizer = characters()
    sessions = Session(model, 12), Session(model, 12, draft="self")
    messages: list[dict[str, Any]] = []
    for question in ("hi", "and then?", "why?"):
        messages.append({"role": "user", "content": question})
        plain, drafted = (session.answer(list(messages), lambda piece: None) for session in sessions)
        assert drafted.tokens == plain.tokens
        assert (drafted.kept_tokens > 0) == (plain.kept_tokens > 0)
        messages.append({"role": "assistant", "content": plain.text})
    assert drafted.kept_tokens > 0


@pytest.mark.parametrize("draws", [150, pytest.param(5000, marks=pytest.mark.long)])
@torch.no_grad()
def test_sampled_answers_have_the_models_distribution(tmp_path: Path, draws: int) -> None:
    model = load_with_copies(split(checkpoint(tmp_path / "model", "llama")))
    model.generation_config.eos_token_id = model.tokenizer.eos_token_id = None
    assert_the_models_distribution(model, "self", draws)


def test_more_memory_is_for_more_bits(tmp_path: Path) -> None:
    """From the least memory on: copies at few bits, then at more, then resident layers too; within the limit."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    directory = split(checkpoint(tmp_path / "model", "llama", **wide))
    whole = load(directory).get_memory_footprint()
    kinds, read = [], []
    for budget in range(whole * 4 // 10, whole * 9 // 10, whole // 50):
        try:
            model = load(directory, budget, self_draft=True)
        except OptionError:
            assert not kinds
            continue
        mapped = model.placement.of("model.embed_tokens").stored  # takes no memory; the rest is rounding of buffers
        assert model.get_memory_footprint() - mapped <= budget + (1 << 15)
        kinds.append(model.placement.copies.kind)
        read.append(model.placement.streamed_bytes)
    order = ["Q2_K", "Q3_K", "IQ4_XS"]
    assert [kind for kind, after in zip(kinds, [*kinds[1:], ""], strict=True) if kind != after] == order
    assert read[-1] < read[0]


def test_what_cannot_be_its_own_draft_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "llama")
    directory = split(folder)
    with pytest.raises(OptionError, match="loaded without copies"):
        prepare_draft(load(directory, 0), "self")
    with pytest.raises(OptionError, match="all weights of this model fit in memory"):
        load(directory, self_draft=True)
    with pytest.raises(OptionError, match="are lacking for the smallest"):
        load(directory, 0, self_draft=True)
    options = options_for(0, self_draft=True, max_memory={"cuda:0": 0})
    with pytest.raises(OptionError, match="works on the CPU alone"):
        load_model(directory, options, devices=[FakeGpu(0)])
    hosts = Hosts("127.0.0.1:29555", 1)
    with pytest.raises(OptionError, match="needs all layers in one process"):
        prepare_model(LoadRequest.of(folder, hosts=hosts, self_draft=True))
    # before the first shard is touched
    fresh = checkpoint(tmp_path / "fresh", "llama")
    files = sorted(fresh.rglob("*"))
    with pytest.raises(OptionError, match="are lacking for the smallest"):
        prepare_model(LoadRequest.of(fresh, max_memory={"cpu": 0}, device="cpu", self_draft=True))
    assert sorted(fresh.rglob("*")) == files
