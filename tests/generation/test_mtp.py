"""Drafts by the checkpoint's own head for multi-token prediction (MTP)."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import save_file
from torch.nn import functional

import rabbitllm
from rabbitllm.auto_model import LoadRequest
from rabbitllm.auto_model import load as load_request
from rabbitllm.base.options import RunOptions
from rabbitllm.batch_jobs.items import JobLimits
from rabbitllm.batch_jobs.job import BatchModel
from rabbitllm.engine.heads import IN_MEMORY
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import Tier
from rabbitllm.errors import OptionError
from rabbitllm.generation._proposals import FromHead
from rabbitllm.generation._scheduler import batch_draft
from rabbitllm.generation._width import Width
from rabbitllm.generation.batch import Batch, Limits
from rabbitllm.generation.draft import chosen_draft, prepare_draft, use_draft
from rabbitllm.generation.request import Request, Result, Sampling
from rabbitllm.generation.session import Session, answer
from rabbitllm.server._service import Service
from rabbitllm.server.settings import Settings
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.telemetry.passes import FURTHER
from tests.chat.talkers import characters, talker_folder
from tests.generation.submitting import answered_together
from tests.generation.test_rewind import assert_a_chat_keeps_its_cache, assert_the_models_distribution
from tests.support.always_drafts import always_drafts  # noqa: F401  a fixture that applies by itself
from tests.support.builders import SINGLE_NAME, build_checkpoint, make_tokenizer, read_tensors
from tests.support.commands import invoke
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.gguf_files import write_converted
from tests.support.hybrid_families import HYBRIDS
from tests.support.mtp_heads import (
    CONVOLVED,
    LIKE_QWEN,
    NUMBERED,
    OF_BLOCKS,
    QWEN,
    SLIDING,
    add_head,
    build_with_head,
    family_of,
    make_predictable,
    next_token,
)
from tests.support.quantized import fp8_blocks
from tests.support.tiny_models import ALL, load, one_thread, plain_model, split, tiers  # noqa: F401

IDS = torch.randint(3, 270, (1, 40), generator=torch.Generator().manual_seed(1))
PROMPT, TOKENS = 12, 24


def asked(model: Any, draft: Any = None, **request: Any) -> Result:
    return answer(model, Request(tuple(IDS[0, :PROMPT].tolist()), TOKENS, **request), lambda piece: None, draft=draft)


# the published definition --------------------------------------------------------------------------------------------


def qwen_head(
    tensors: dict[str, torch.Tensor], config: Any, ids: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of Qwen3-Next and Qwen3.5, as vLLM's `qwen3_next_mtp.py` and `qwen3_5_mtp.py` define it, in float32.

    Args:
        tensors: of the checkpoint.
        config: of the model.
        ids: the tokens t[1:], (tokens,).
        hidden: the model's states of the tokens t[:-1], after its last norm, (tokens, width).

    Returns:
        The head's own states, which are fed to it for the tokens after the next, and logits, for each token.
    """

    def weight(name: str) -> torch.Tensor:
        return tensors[f"mtp.layers.0.{name}.weight"]

    def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * (1 + scale)

    def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def rotated(x: torch.Tensor) -> torch.Tensor:
        """Of (tokens, heads, width): the first values of each head, in pairs of their two halves."""
        rope = config.rope_parameters
        width = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        frequencies = 1 / rope["rope_theta"] ** (torch.arange(0, width, 2) / width)
        angles = (torch.arange(1, len(x) + 1)[:, None] * frequencies)[:, None].repeat(1, 1, 2)
        first, second = x[..., :width].chunk(2, dim=-1)
        turned = x[..., :width] * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
        return torch.cat((turned, x[..., width:]), dim=-1)

    embedded = norm(tensors["model.embed_tokens.weight"][ids], tensors["mtp.pre_fc_norm_embedding.weight"])
    both = torch.cat((embedded, norm(hidden, tensors["mtp.pre_fc_norm_hidden.weight"])), dim=-1)
    x = both @ tensors["mtp.fc.weight"].T
    # attention, with a gate for each value of its output
    y, count = norm(x, weight("input_layernorm")), len(ids)
    heads, width = config.num_attention_heads, config.head_dim
    query, gate = (y @ weight("self_attn.q_proj").T).view(count, heads, 2 * width).chunk(2, dim=-1)
    key, value = ((y @ weight(f"self_attn.{name}").T).view(count, -1, width) for name in ("k_proj", "v_proj"))
    query = rotated(norm(query, weight("self_attn.q_norm")))
    key = rotated(norm(key, weight("self_attn.k_norm")))
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = torch.einsum("qhw,khw->hqk", query, key) * width**-0.5
    scores = scores + torch.full((count, count), -torch.inf).triu(1)
    mixed = torch.einsum("hqk,khw->qhw", scores.softmax(-1), value)
    x = x + (mixed * gate.sigmoid()).reshape(count, -1) @ weight("self_attn.o_proj").T
    # feed-forward, dense or of experts
    y = norm(x, weight("post_attention_layernorm"))
    kinds = ("gate_proj", "up_proj", "down_proj")
    if "mtp.layers.0.mlp.gate.weight" not in tensors:
        x = x + gated(y, *(weight(f"mlp.{kind}") for kind in kinds))
    else:
        shared = gated(y, *(weight(f"mlp.shared_expert.{kind}") for kind in kinds))
        shares, chosen = (y @ weight("mlp.gate").T).softmax(-1).topk(config.num_experts_per_tok)
        shares = shares / shares.sum(-1, keepdim=True)
        rows = [
            sum(s * gated(row, *expert_of(tensors, int(e))) for s, e in zip(ss, es, strict=True))
            for row, ss, es in zip(y, shares, chosen, strict=True)
        ]
        x = x + torch.stack(rows) + (y @ weight("mlp.shared_expert_gate").T).sigmoid() * shared
    x = norm(x, tensors["mtp.norm.weight"])
    return x, x @ tensors["lm_head.weight"].T


def expert_of(tensors: dict[str, torch.Tensor], expert: int) -> tuple[torch.Tensor, ...]:
    """The matrices of an expert: published together, or each by itself."""
    path = "mtp.layers.0.mlp.experts"
    if f"{path}.down_proj" in tensors:
        return (*tensors[f"{path}.gate_up_proj"][expert].chunk(2), tensors[f"{path}.down_proj"][expert])
    return tuple(tensors[f"{path}.{expert}.{kind}.weight"] for kind in ("gate_proj", "up_proj", "down_proj"))


def near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert float((actual - expected).abs().max()) < tolerance * float(expected.std())


@pytest.mark.parametrize("name", [*QWEN, OF_BLOCKS])
@torch.no_grad()
def test_a_head_computes_its_published_definition(tmp_path: Path, name: str) -> None:
    """At once, in pieces with a cache, and from its own states for the tokens after the next."""
    published = nemotron_head if name == OF_BLOCKS else qwen_head
    folder = build_with_head(tmp_path / "model", name)
    tensors = {key: tensor.double() for key, tensor in read_tensors(folder).items()}
    model = load(split(folder), heads=True)
    states = plain_model(folder).model(IDS).last_hidden_state
    length = IDS.shape[1] - 1

    own, expected = published(tensors, model.config, IDS[0, 1:], states[0, :length].double())
    positions = torch.arange(1, length + 1)[None]
    hidden, logits = model.heads(IDS[:, 1:], states[:, :length], positions, model.heads.empty_cache())
    near(hidden[0], own)
    near(logits[0], expected[-1])

    cache, begin = model.heads.empty_cache(), 0
    for end in (7, 8, 20, length):
        rows = slice(begin, end)
        hidden, logits = model.heads(IDS[:, begin + 1 : end + 1], states[:, rows], positions[:, rows], cache)
        near(logits[0], expected[end - 1])
        begin = end
    # its own states, as published for several tokens
    ids, inputs = IDS[0, 1:], states[0, :length].double()
    for token in (30, 31):
        ids, inputs = torch.cat((ids, torch.tensor([token]))), torch.cat((inputs, own[-1:]))
        own, expected = published(tensors, model.config, ids, inputs)
        hidden, logits = model.heads(ids[None, -1:], hidden[:, -1:], torch.tensor([[len(ids)]]), cache)
        near(logits[0], expected[-1])


def nemotron_head(
    tensors: dict[str, torch.Tensor], config: Any, ids: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of Nemotron 3, as vLLM's `nemotron_h_mtp.py` and `nemotron_h.py` define it; see `qwen_head`."""

    def weight(name: str) -> torch.Tensor:
        return tensors[f"mtp.layers.{name}.weight"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.layer_norm_epsilon) * weight(name)

    def squared(x: torch.Tensor, path: str) -> torch.Tensor:
        return functional.relu(x @ weight(f"{path}.up_proj").T) ** 2 @ weight(f"{path}.down_proj").T

    embedded = norm(tensors["backbone.embeddings.weight"][ids], "0.enorm")
    x = torch.cat((embedded, norm(hidden, "0.hnorm")), dim=-1) @ weight("0.eh_proj").T
    # attention, without positions
    y, count, width = norm(x, "0.norm"), len(ids), config.head_dim
    query, key, value = ((y @ weight(f"0.mixer.{name}_proj").T).view(count, -1, width) for name in "qkv")
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = torch.einsum("qhw,khw->hqk", query, key) * width**-0.5
    scores = scores + torch.full((count, count), -torch.inf).triu(1)
    mixed = torch.einsum("hqk,khw->qhw", scores.softmax(-1), value)
    x = x + mixed.reshape(count, -1) @ weight("0.mixer.o_proj").T
    # experts, chosen by a sigmoid and a bias
    y = norm(x, "1.norm")
    shares = (y @ weight("1.mixer.gate").T).sigmoid()
    chosen = (shares + tensors["mtp.layers.1.mixer.gate.e_score_correction_bias"]).topk(config.num_experts_per_tok)[1]
    rows = []
    for row, share, experts in zip(y, shares, chosen, strict=True):
        shared = squared(row, "1.mixer.shared_experts")
        total = share[experts].sum() if config.norm_topk_prob else 1.0
        for expert in experts.tolist():
            by = share[expert] / total * config.routed_scaling_factor
            shared = shared + by * squared(row, f"1.mixer.experts.{expert}")
        rows.append(shared)
    x = norm(x + torch.stack(rows), "1.final_layernorm")
    return x, x @ tensors["lm_head.weight"].T


@pytest.mark.parametrize("name", [*NUMBERED, *SLIDING, *CONVOLVED])
@torch.no_grad()
def test_heads_that_transformers_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = build_with_head(tmp_path / "model", name)
    model, plain = load(split(folder), heads=True), plain_model(folder)
    layers = plain.config.num_hidden_layers
    monkeypatch.setattr(plain, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{layers}.*", r"mtp\."])
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    theirs = MtpModel.from_pretrained(plain, device_map={"": "cpu"})
    states = plain(IDS, output_hidden_states=-1).hidden_states[-1][:, :-1]
    assert torch.equal(states, plain.model(IDS).last_hidden_state[:, :-1])  # after the last norm
    positions = torch.arange(1, IDS.shape[1])[None]
    cache = MtpCache(config=plain.config.get_mtp_config())
    _, expected, _ = theirs(IDS[:, 1:], states, None, positions, cache)
    _, logits = model.heads(IDS[:, 1:], states, positions, model.heads.empty_cache())
    near(logits, expected[:, 0], 1e-5)


# answers -------------------------------------------------------------------------------------------------------------


def streamed_with_head(folder: Path, **options: Any) -> Any:
    """The model with the least memory for its head and output layer, so that decoder layers are streamed."""
    sizes = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    layout = (folder / "config.json").read_text(), repr(options), *sizes
    budget = LEAST_BUDGETS.get(layout) or load(folder, heads=True, **options).heads.nbytes
    while True:
        try:
            model = load(folder, budget, heads=True, **options)
        except OptionError:
            budget += 1 << 14
        else:
            LEAST_BUDGETS[layout] = budget
            assert {Tier.STREAMED, Tier.ROUTED} & {*tiers(model).values()}
            return model


LEAST_BUDGETS: dict[tuple[Any, ...], int] = {}
"""Those that were found, by config and sizes of files: to find one takes several loads."""


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("deepseek_v32", "qwen3_5_moe", "qwen3_next")),
        *(pytest.param(name, marks=pytest.mark.long) for name in (*NUMBERED, *SLIDING)),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("glm_moe_dsa", OF_BLOCKS, *LIKE_QWEN)),
    ],
)
def test_greedy_answers_are_the_models_own(tmp_path: Path, name: str) -> None:
    """Streamed and in memory, with heads that are always right, sometimes, or never; and of random weights."""
    passes = {}
    for how in ("right", "noisy", "wrong", "random"):
        folder = build_with_head(tmp_path / how, name)
        directory = split(folder if how == "random" else make_predictable(folder, how))
        resident = load(directory, heads=True)
        streamed = streamed_with_head(directory, profiling=True)
        assert tiers(streamed)["lm_head"] in IN_MEMORY
        for model in (resident, streamed):
            prepare_draft(model, "mtp")
            model.generation_config.eos_token_id = None
            if how == "random":  # it is never sure
                model.generation_config.assistant_confidence_threshold = 0
            expected = asked(model)
            streamed.profiler.clear()
            assert asked(model, "mtp").tokens == expected.tokens
        passes[how] = streamed.profiler.sums[FURTHER].passes
        if how == "right":
            assert expected.tokens[:2] == (next_token(int(IDS[0, PROMPT - 1])), next_token(expected.tokens[0]))
    assert passes["right"] <= 3
    assert passes["right"] < passes["noisy"] < passes["wrong"]
    assert passes["wrong"] == TOKENS - 1 >= passes["random"]


def test_auto_uses_a_head_where_layers_are_streamed(tmp_path: Path) -> None:
    """With memory for the head and the output layer; without such memory, or where nothing is streamed, it does not."""
    folder = make_predictable(build_with_head(tmp_path / "model", "qwen3_5"), "right")
    directory = split(folder)
    expected = asked(load(directory)).tokens
    nbytes = streamed_with_head(directory)._internals.options.max_memory["cpu"]
    for limit, draft in ((nbytes, "mtp"), (0, "ngram"), (None, None)):
        model = load(directory, limit, heads=None)
        assert chosen_draft(model, "auto") == draft
        assert (model.heads is not None) == (draft == "mtp")
        assert asked(model, draft).tokens == expected
        requests = [Request(tuple(IDS[0, begin : begin + PROMPT].tolist()), TOKENS) for begin in (0, 3)]
        with Batch(model) as batch:
            assert [*answered_together(batch, requests)[0].tokens] == [*expected]
            accepted = batch.stats.accepted_tokens
        assert accepted > TOKENS if draft == "mtp" else accepted == 0
    # as `serve` and `batch` load them
    request = LoadRequest.of(str(directory), device="cpu", max_memory={"cpu": nbytes}, show_progress=False)
    service = Service.load(request, "auto", Limits(), Settings("model"), Console(quiet=True))
    assert service is not None
    batched = BatchModel.load(request, [PROMPT + TOKENS], JobLimits())
    for model in (service.model, batched.model):
        assert batch_draft(model, "auto", exact=False) == "mtp"
    assert batched.draft == "auto"
    service.close()


@pytest.mark.parametrize(
    ("name", "count"), [("qwen3_5", 1), ("deepseek_v3", 1), ("deepseek_v3", 3), ("deepseek_v32", 1), ("inkling", 1)]
)
@torch.no_grad()
def test_the_heads_cache_goes_back_after_wrong_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    """In each pass heads predict what they do without a cache, from the model's states of all tokens so far.

    Some passes have no draft, as when one does not pay.
    """
    turns, propose = itertools.cycle((TOKENS, TOKENS, 0, 0, TOKENS)), FromHead.propose
    monkeypatch.setattr(FromHead, "propose", lambda self, ids, most: propose(self, ids, min(most, next(turns))))
    folder = make_predictable(build_with_head(tmp_path / "model", name, count=count), "noisy")
    model, plain = load(split(folder), heads=True), plain_model(folder)
    assert model.heads.count == count
    model.generation_config.eos_token_id = None
    if name in CONVOLVED:  # a random head is never sure
        model.generation_config.assistant_confidence_threshold = 0
    seen: list[tuple[int, torch.Tensor, int]] = []
    real = model.heads

    class Spy:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(real, attribute)

        def __call__(
            self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any, head: int
        ) -> Any:
            result = real(ids, hidden, positions, cache, head)
            seen.append((int(positions[0, -1]), result[1], head))
            return result

    model.heads = Spy()
    prepare_draft(model, "mtp")
    tokens = asked(model, "mtp").tokens
    ids = torch.cat((IDS[:, :PROMPT], torch.tensor([tokens])), dim=1)
    states = plain.model(ids).last_hidden_state
    is_first = [True, *(end <= before for (end, *_), (before, *_) in zip(seen[1:], seen, strict=False))]
    firsts = [index for index, first in enumerate(is_first) if first]
    assert len(firsts) > 3
    assert len(seen) > len(firsts)
    assert {head for *_, head in seen} == set(range(count))
    for index in firsts:
        end, cache = seen[index][0], real.empty_cache()
        rows, hidden, positions = ids[:, 1 : end + 1], states[:, :end], torch.arange(1, end + 1)[None]
        for head, (_, logits, used) in enumerate(seen[index : index + count]):
            if used != head:  # it went no further
                break
            hidden, expected = real(rows, hidden, positions, cache, head)
            near(logits, expected)
            rows = torch.cat((rows[:, 1:], expected.argmax(dim=-1, keepdim=True)), dim=1)
            positions = positions + 1


@torch.no_grad()
def test_several_heads_propose_a_token_each(tmp_path: Path) -> None:
    """A pass gives a token for each of them and one more."""
    folder = make_predictable(build_with_head(tmp_path / "model", "deepseek_v3", count=3), "right")
    model = load(split(folder), heads=True, profiling=True)
    model.generation_config.eos_token_id = None
    prepare_draft(model, "mtp")
    expected = asked(model).tokens
    model.profiler.clear()
    assert asked(model, "mtp").tokens == expected
    assert model.profiler.sums[FURTHER].passes == 6  # 24 tokens: one by the prompt, then four a pass


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3"])
def test_a_chat_keeps_its_cache(tmp_path: Path, name: str) -> None:
    folder = add_head(talker_folder(tmp_path / "model", name), family_of(name))
    model = load(split(folder), heads=True, profiling=True)
    model.tokenizer = characters()
    model.generation_config.suppress_tokens = [0, 1, 2]
    model.generation_config.assistant_confidence_threshold = 0
    prepare_draft(model, "mtp")
    assert_a_chat_keeps_its_cache(model, "mtp")
    assert not model.get_decoder()._forward_hooks
    session, messages = Session(model, 12, draft="mtp"), list[dict[str, Any]]()
    for turn, question in enumerate(("hi", "and then?", "why?", "so?")):
        messages.append({"role": "user", "content": question})
        result = session.answer(list(messages), lambda piece: None)
        messages.append({"role": "assistant", "content": result.text})
        assert session.cache is not None
        head = session.cache.cache.beside
        assert head.tokens == session.cached_tokens
        # of all tokens but the first, and one for each turn, whose state the last one has used
        assert head.cache.get_seq_length() >= head.tokens - 2 - turn
        assert session.cache_bytes > head.nbytes > 0
        if turn == 2:  # an earlier question is changed
            messages = messages[:2]
            messages[0] = {"role": "user", "content": "hi there"}


@pytest.mark.parametrize("draws", [150, pytest.param(5000, marks=pytest.mark.long)])
@torch.no_grad()
def test_sampled_answers_have_the_models_distribution(tmp_path: Path, draws: int) -> None:
    folder = build_with_head(tmp_path / "model", "deepseek_v3")
    model = load(split(folder), heads=True, profiling=True)
    model.generation_config.eos_token_id = model.tokenizer.eos_token_id = None
    model.generation_config.assistant_confidence_threshold = 0
    prepare_draft(model, "mtp")
    assert_the_models_distribution(model, "mtp", draws, Sampling(1.0, top_k=3))


def test_a_seed_gives_the_same_answer_with_any_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without one: the head draws with the random numbers of the model, so that most of its tokens are right."""
    folder = make_predictable(build_with_head(tmp_path / "model", "deepseek_v3"), "right")
    tensors = read_tensors(folder)
    tensors["lm_head.weight"] *= 0.05  # so that other tokens are probable, too
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / SINGLE_NAME, {"format": "pt"})
    model = load(split(folder), heads=True, profiling=True)
    model.generation_config.eos_token_id = None
    model.generation_config.assistant_confidence_threshold = 0
    prepare_draft(model, "mtp")
    for seed in range(3):
        sampling = Sampling(1.0, seed=seed)
        expected = asked(model, sampling=sampling).tokens
        assert len(set(expected)) > TOKENS // 2
        for width in (2, 8):
            monkeypatch.setattr(Width, "choose", lambda self, most, *costs, width=width: max(min(most, width), 0))
            result = asked(model, "mtp", sampling=sampling)
            assert result.tokens == expected
            assert result.work.drafts is not None
            assert result.work.drafts.right[0] > result.work.drafts.checked[0] / 2


def test_a_callers_own_processor(tmp_path: Path) -> None:
    """It changes the scores of the head as those of the model."""
    folder = make_predictable(build_with_head(tmp_path / "model", "deepseek_v3"), "right")
    model = load(split(folder), heads=True, profiling=True)
    model.generation_config.eos_token_id = None

    def without_the_next(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([next_token(int(ids[0, -1]))]), -torch.inf)

    options = {"max_new_tokens": TOKENS, "do_sample": False, "logits_processor": [without_the_next]}
    expected = model.generate(IDS, **options)
    assert int(expected[0, IDS.shape[1]]) != next_token(int(IDS[0, -1]))
    model.generation_config.assistant_confidence_threshold = 0
    prepare_draft(model, "mtp")
    use_draft(model, "mtp")
    assert torch.equal(model.generate(IDS, **options), expected)
    assert sum(model.profiler.drafts.right) > 0


# folders -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["8bit", "4bit", "q4_k_m"])
@pytest.mark.parametrize("exact", [True, False])
@torch.no_grad()
def test_heads_of_compressed_folders_have_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, exact: bool
) -> None:
    """Their logits are near those of plain weights; answers are those of the compressed model."""
    if not exact:  # above 16 rows, of which those that are computed again count, inputs have 8 bits: other answers

        def choose(width: Any, most: int, lacks: int = 0, rows: int = 1, sequences: int = 1) -> int:
            return max(min(most, 16 - rows), 0)

        monkeypatch.setattr(Width, "choose", choose)
    folder = build_with_head(tmp_path / "model", "qwen3_5", tied=True, hidden_size=256)
    tensors, config = read_tensors(folder), plain_model(folder).config
    directory = split(folder, compression)
    model = streamed_with_head(directory, exact=exact)
    schemes = {name: form.quantized for name, form in LayerStore(directory).tensors.items()}
    assert re.search("8", str(schemes["mtp.fc.weight"]))
    states = torch.randn(1, 9, 256, generator=torch.Generator().manual_seed(0))
    cache = model.heads.empty_cache()
    hidden, _ = model.heads(IDS[:, 1:10], states, torch.arange(1, 10)[None], cache)
    embedding = model(IDS[:, :1]).logits  # a pass of the model between those of the head changes nothing
    assert embedding.shape[1] == 1
    tensors["model.embed_tokens.weight"] = torch.stack([row_of(model, token) for token in range(config.vocab_size)])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    expected, _ = qwen_head(tensors, config, IDS[0, 1:10], states[0])
    assert 1e-5 < float((hidden[0] - expected).norm() / expected.norm()) < 0.05
    model.generation_config.eos_token_id = None
    model.generation_config.assistant_confidence_threshold = 0
    prepare_draft(model, "mtp")
    assert asked(model, "mtp").tokens == asked(model).tokens


def row_of(model: Any, token: int) -> torch.Tensor:
    with model.streamer.passing():
        row: torch.Tensor = model.get_input_embeddings()(torch.tensor([token]))[0]
    return row


def test_unsplit_folders(tmp_path: Path) -> None:
    folder = make_predictable(build_with_head(tmp_path / "model", "qwen3_5"), "noisy")
    request = LoadRequest.of(str(folder), device="cpu", exact=True, heads=True)
    model = load_request(replace(request, split=None), Console(quiet=True))
    assert model.heads is not None
    assert [*folder.glob("splitted*")] == []
    prepare_draft(model, "mtp")
    assert asked(model, "mtp").tokens == asked(load(split(folder))).tokens


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_transformers_own_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`use_mtp=True` reads the heads from the checkpoint, if transformers knows them."""
    folder = make_predictable(build_with_head(tmp_path / "model", name), "noisy")
    request = LoadRequest.of(str(folder), device="cpu", exact=True)
    model = load_request(replace(request, split=None), Console(quiet=True))
    expected = model.generate(IDS, max_new_tokens=12, do_sample=False)
    if name == "qwen3_5":
        with pytest.raises(OptionError, match="transformers knows no heads of qwen3_5_text"):
            model.generate(IDS, max_new_tokens=12, do_sample=False, use_mtp=True)
        return
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{len(model.model.layers)}.*"])
    assert torch.equal(model.generate(IDS, max_new_tokens=12, do_sample=False, use_mtp=True), expected)


@torch.no_grad()
def test_the_head_of_a_model_for_pictures(tmp_path: Path) -> None:
    """Published Qwen3.5: the text model is a part of another one, and the head beside it keeps its names.

    Also for several requests at once.
    """
    folder = make_predictable(build_with_head(tmp_path / "text", "qwen3_5"), "noisy")
    text = transformers.AutoConfig.from_pretrained(folder)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    whole.model.language_model.load_state_dict(plain_model(folder).model.state_dict())
    whole.lm_head.load_state_dict(plain_model(folder).lm_head.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    heads = {name: tensor for name, tensor in read_tensors(folder).items() if name.startswith("mtp.")}
    tensors = {name: tensor.clone() for name, tensor in (read_tensors(tmp_path / "whole") | heads).items()}
    assert any(name.startswith("model.language_model.layers.") for name in tensors)
    save_file(tensors, tmp_path / "whole" / SINGLE_NAME, {"format": "pt"})
    make_tokenizer().save_pretrained(tmp_path / "whole")
    model = streamed_with_head(split(tmp_path / "whole"), profiling=True)
    model.generation_config.eos_token_id = None
    prepare_draft(model, "mtp")
    text_model = load(split(folder))
    assert asked(model, "mtp").tokens == asked(text_model).tokens
    assert model.profiler.sums[FURTHER].passes < TOKENS - 6
    requests = [Request(tuple(IDS[0, index : index + PROMPT].tolist()), TOKENS) for index in (0, 7)]
    alone = model.profiler.drafts
    with Batch(model, Limits(draft="mtp")) as batch:
        answers = [answer.tokens for answer in answered_together(batch, requests)]
        assert 0 < batch.stats.accepted_tokens < batch.stats.drafted_tokens
        assert sum(batch.stats.drafts.right) == batch.stats.accepted_tokens
        assert sum(model.profiler.drafts.right) == sum(alone.right) + batch.stats.accepted_tokens
    assert answers == [list(answer(text_model, request, lambda piece: None).tokens) for request in requests]


@pytest.mark.parametrize("is_split", [True, False])
@torch.no_grad()
def test_published_codes_and_a_plain_projection(tmp_path: Path, is_split: bool) -> None:
    """FP8 of Qwen keeps `mtp.fc` plain; some tools leave it out of the list of plain modules."""
    plain = build_with_head(tmp_path / "plain", "qwen3_5")
    folder = shutil.copytree(plain, tmp_path / "model")
    tensors, config = read_tensors(plain), plain_model(plain).config
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not re.search(r"mlp\.\w+_proj\.weight$", name):
            stored[name] = tensor
            continue
        stored |= fp8_blocks(name, tensor, 16)
        scales = stored[f"{name}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
        tensors[name] = stored[name].float() * scales[: tensor.shape[0], : tensor.shape[1]]
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / SINGLE_NAME, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    kept = ["lm_head", *(f"model.layers.{index}.{part}" for index in range(4) for part in ("self_attn", "linear_attn"))]
    settings["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": kept,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    request = LoadRequest.of(str(folder), device="cpu", heads=True, show_progress=False)
    model = load_request(request if is_split else replace(request, split=None), Console(quiet=True))
    assert model.heads is not None
    states = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    _, logits = model.heads(IDS[:, 1:10], states, torch.arange(1, 10)[None], model.heads.empty_cache())
    _, expected = qwen_head(tensors, config, IDS[0, 1:10], states[0])
    assert float((logits[0] - expected[-1]).norm() / expected[-1].norm()) < 0.05  # inputs are rounded to FP8, too


@pytest.mark.parametrize("streams", [True, False])
def test_heads_on_gpus(tmp_path: Path, streams: bool) -> None:
    """The head is on the device of the first layers; the output layer may be on another one."""
    directory = split(make_predictable(build_with_head(tmp_path / "model", "qwen3_5"), "noisy"))
    expected = asked(load(directory)).tokens
    with watched():
        gpus = [FakeGpu(0), FakeGpu(1)]
        limits = {gpu.name: 450_000 if streams else ALL for gpu in gpus} | {"cpu": 0}
        options = RunOptions(max_memory=limits, show_progress=False, exact=True, heads=True, profiling=True)
        model = load_model(directory, options, None, gpus)
        assert (Tier.STREAMED in tiers(model).values()) == streams
        prepare_draft(model, "mtp")
        assert asked(model, "mtp").tokens == expected
    assert model.profiler.sums[FURTHER].passes < TOKENS - 1


# refusals ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_drafted_with_is_refused(tmp_path: Path) -> None:
    plain = split(build_checkpoint(tmp_path / "plain", "llama"))
    with pytest.raises(OptionError, match="has no usable heads for multi-token prediction: no tensors"):
        load(plain, heads=True)
    with pytest.raises(OptionError, match="loaded without its heads"):
        prepare_draft(load(plain), "mtp")
    directory = split(build_with_head(tmp_path / "model", "qwen3_5"))
    with pytest.raises(OptionError, match=r"take 0\.20 MB of memory; 1,000 bytes may be used on cpu"):
        load(directory, 1000, heads=True)
    with pytest.raises(OptionError, match=r"need the output layer \(69,632 bytes\) in memory, which is streamed"):
        load(directory, 210_000, heads=True)
    model = load(directory)
    for options in ({"use_mtp": True}, {"generation_config": transformers.GenerationConfig(use_mtp=True)}):
        with pytest.raises(OptionError, match=r"use_mtp=True needs the shards") as refused:
            model.generate(IDS, max_new_tokens=3, **options)
        assert "--draft mtp" in (refused.value.remedy or "")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"mtp.fc.weight": None}, r"eh_proj\.weight"),
        ({"mtp.fc.weight": torch.ones(64, 64)}, r"shape \(64, 64\); the config needs \(64, 128\)"),
        ({"mtp.mixer.weight": torch.ones(64)}, r"mtp\.mixer\.weight are not part of it"),
    ],
)
def test_heads_of_another_form_are_refused(tmp_path: Path, change: dict[str, Any], found: str) -> None:
    folder = build_with_head(tmp_path / "model", "qwen3_5")
    tensors = {name: tensor for name, tensor in (read_tensors(folder) | change).items() if tensor is not None}
    save_file(tensors, folder / SINGLE_NAME, {"format": "pt"})
    directory = split(folder)
    load(directory)
    with pytest.raises(OptionError, match=f"have a form that is not supported: .*{found}"):
        load(directory, heads=True)


def test_heads_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    types = ["heavily_compressed_attention", "sliding_attention", "compressed_sparse_attention"]
    folder = build_checkpoint(tmp_path / "model", HYBRIDS["deepseek_v4"], layer_types=types)
    tensors = read_tensors(folder) | {"model.layers.3.enorm.weight": torch.ones(64)}
    save_file(tensors, folder / SINGLE_NAME, {"format": "pt"})
    with pytest.raises(OptionError, match="layers of type compressed_sparse_attention; expected full_attention, "):
        load(split(folder), heads=True)
    folder = build_with_head(tmp_path / "blocks", OF_BLOCKS)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "mtp_layers_block_type": []}))
    with pytest.raises(OptionError, match="a head of no blocks; expected one full_attention"):
        load(split(folder), heads=True)


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [("hy_v4", "model.mtp_layers.0.enorm.weight", "no class"), ("qwen4_exp", "mtp.fc.weight", "several streams")],
)
def test_heads_that_cannot_be_built_are_refused(tmp_path: Path, name: str, tensor: str, why: str) -> None:
    folder = build_checkpoint(tmp_path / "model", HYBRIDS[name])
    tensors = read_tensors(folder) | {tensor: torch.ones(64)}
    save_file(tensors, folder / SINGLE_NAME, {"format": "pt"})
    directory = split(folder)
    load(directory)
    with pytest.raises(OptionError, match=f"cannot be built: they .*{why}"):
        load(directory, heads=True)
    for words in (("inspect", str(folder)), ("inspect", str(directory)), ("plan", str(folder), "--bandwidth", "1GB")):
        said = command(*words)
        assert "--draft mtp" not in said
        assert ("multi-token" in said) == bool(re.search(f"not used: they .*{why}", said)) == (name == "qwen4_exp")


def command(*words: str) -> str:
    return invoke(*words, columns=300).stdout


@pytest.mark.parametrize(
    ("name", "layer"), [("qwen3_5", "mtp"), pytest.param("deepseek_v3", "layers.3", marks=pytest.mark.long)]
)
def test_commands_name_and_use_the_head(tmp_path: Path, name: str, layer: str) -> None:
    folder = make_predictable(build_with_head(tmp_path / "model", name), "right")
    assert re.search(rf"heads +{layer}\b.*, multi-token prediction\), for --draft mtp", command("inspect", str(folder)))
    warned = rf"warning: {layer}\b.*, multi-token prediction\) is used by --draft mtp only"
    assert re.search(warned, planned := command("plan", str(folder), "--bandwidth", "1GB", "--draft", "mtp"))
    assert "with the draft mtp, if half" in planned
    options = ("--raw", "--max-new-tokens", "20", "--device", "cpu")
    drafted = command("run", str(folder), "Hello", *options, "--draft", "mtp")
    assert drafted == command("run", str(folder), "Hello", *options)
    lines = [json.dumps({"id": text, "prompt": text, "max_tokens": 20}) for text in ("Hello", "the rain in the rain")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    answers = []
    for draft in ("none", "mtp", "ngram"):
        out = tmp_path / f"{draft}.jsonl"
        command("batch", str(folder), str(tmp_path / "in.jsonl"), "-o", str(out), *options[3:], "--draft", draft)
        answers.append([json.loads(line)["text"] for line in out.read_text().splitlines()])
    assert answers == [answers[0]] * 3
    assert len(answers[0]) == 2


@pytest.mark.parametrize("family", ["qwen35", "qwen35moe"])
@torch.no_grad()
def test_heads_of_gguf_files(tmp_path: Path, family: str) -> None:
    """A head in llama.cpp's form, `blk.N.nextn.*`, computes what the same head does beside the original weights."""
    generator = torch.Generator().manual_seed(1)
    model = write_converted(tmp_path / "headless.gguf", family)
    layer = {f"mtp.layers.0.{name}": value for name, value in model.model.layers[3].state_dict().items()}
    width = model.config.hidden_size
    layer |= {
        f"mtp.{name}.weight": torch.ones(width) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    layer["mtp.fc.weight"] = torch.ones(width, 2 * width)
    head = {name: 0.05 * torch.randn(value.shape, generator=generator) for name, value in layer.items()}
    (tmp_path / "gguf").mkdir()
    write_converted(tmp_path / "gguf" / "model.gguf", family, head=head)
    model.save_pretrained(tmp_path / "plain")
    save_file(read_tensors(tmp_path / "plain") | head, tmp_path / "plain" / SINGLE_NAME, {"format": "pt"})
    hidden, ids = torch.randn(1, 5, width, generator=generator), IDS[:, :5]
    results = []
    for source in (tmp_path / "gguf" / "model.gguf", tmp_path / "plain"):
        loaded = rabbitllm.AutoModel.from_pretrained(
            source, device="cpu", dtype=torch.float32, exact=True, draft="mtp", show_layer_progress=False
        )
        results.append(loaded.heads(ids, hidden, torch.arange(5)[None], loaded.heads.empty_cache()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
