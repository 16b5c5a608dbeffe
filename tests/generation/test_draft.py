"""A draft model: the answer stays the model's own, in fewer passes; other vocabularies and models are refused."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rabbitllm import AutoModel
from rabbitllm.errors import CheckpointError, OptionError
from rabbitllm.generation._proposals import FromModel
from rabbitllm.generation._width import Width
from rabbitllm.generation.draft import Drafting, chosen_draft, prepare_draft
from rabbitllm.generation.request import FinishReason, Request, Result, Sampling
from rabbitllm.generation.session import Session, answer
from rabbitllm.generation.transformers_api import CheckedProcessors
from rabbitllm.telemetry.passes import FURTHER, Drafts
from tests.chat.talkers import characters, parrot_folder, talker, talker_folder
from tests.support.always_drafts import always_drafts  # noqa: F401  a fixture that applies by itself
from tests.support.builders import VOCABULARY_SIZE, build_checkpoint
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import load, one_thread, split  # noqa: F401  a fixture that applies by itself

PROMPT = (1, 40, 81, 7, 200)
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("drafts") / "model", "llama")


def asked(model: Any, draft: Any = None, **request: Any) -> Result:
    return answer(model, Request(PROMPT, TOKENS, **request), lambda piece: None, draft=draft)


@pytest.mark.parametrize("vocabulary", [VOCABULARY_SIZE, VOCABULARY_SIZE + 64, VOCABULARY_SIZE - 8, 201])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.9, seed=4)], ids=["greedy", "sampled"])
def test_any_draft_gives_the_models_answer(folder: Path, tmp_path: Path, vocabulary: int, sampling: Sampling) -> None:
    """A draft of other weights, with embeddings of another length, that is mostly wrong, or lacks tokens of answers."""
    small = build_checkpoint(tmp_path / "small", "llama", num_hidden_layers=1, seed=3, vocab_size=vocabulary)
    model, draft = load(split(folder), 0), load(split(small))
    prepare_draft(model, draft)
    result = asked(model, draft, sampling=sampling)
    assert len(result.tokens) == TOKENS or result.finish is FinishReason.STOP
    assert max(result.tokens) < VOCABULARY_SIZE
    if sampling.samples:
        assert result.tokens == asked(model, draft, sampling=sampling).tokens
    else:
        assert result.tokens == asked(model).tokens
    logits = draft(torch.tensor([PROMPT])).logits
    assert logits.shape[-1] == VOCABULARY_SIZE
    if vocabulary < VOCABULARY_SIZE:  # it never proposes a token that it does not have
        assert logits[..., vocabulary:].max() < 2 * logits[..., :vocabulary].min() < 0


@pytest.mark.parametrize(("sampling", "temperature"), [(Sampling(), 0.7), (Sampling(1.0, seed=4), 1.0)])
def test_a_tree_is_surer_where_the_most_probable_token_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, temperature: float
) -> None:
    model, draft = load(split(folder), 0), load(split(folder))
    prepare_draft(model, draft)
    trees, tree, worth = list[tuple[torch.Tensor, list[Any]]](), FromModel._tree, Width.worth

    def growing(self: FromModel, ids: torch.Tensor, logits: torch.Tensor, most: int) -> Any:
        trees.append((logits, []))
        return tree(self, ids, logits, most)

    def counting(self: Width, probabilities: Any) -> int:
        trees[-1][1].append(probabilities)
        return worth(self, probabilities)

    monkeypatch.setattr(FromModel, "_tree", growing)
    monkeypatch.setattr(Width, "worth", counting)
    asked(model, draft, sampling=sampling)
    assert trees
    for logits, (first, *_) in trees:
        best = (logits[0] / temperature).softmax(dim=-1).topk(8).values
        ratios = [probability / first[0] for probability in first]  # only the most probable tokens can be drawn
        assert ratios == pytest.approx((best / best[0]).tolist(), rel=1e-4)


@pytest.mark.parametrize("draft_type", ["model", "ngram"])
def test_a_draft_keeps_the_options_of_a_request(folder: Path, tmp_path: Path, draft_type: str) -> None:
    small = build_checkpoint(tmp_path / "small", "llama", num_hidden_layers=1, seed=3)
    model = load(split(folder), 0)
    draft = load(split(small)) if draft_type == "model" else "ngram"
    prepare_draft(model, draft)
    penalised = Sampling(repetition_penalty=1.8)
    assert asked(model, draft, sampling=penalised).tokens == asked(model, sampling=penalised).tokens
    assert asked(model, sampling=penalised).tokens != asked(model).tokens
    # one token is left to choose from
    only = Sampling(0.8, min_p=1, seed=4)
    assert asked(model, draft, sampling=only).tokens == asked(model).tokens


def test_a_good_draft_saves_passes(folder: Path) -> None:
    model, draft = load(split(folder), 0, profiling=True), load(split(folder))
    prepare_draft(model, draft)
    draft.generation_config.assistant_confidence_threshold = 0  # a random model is never sure
    result = asked(model, draft)
    passes = model.profiler.sums[FURTHER].passes
    assert passes <= TOKENS / 3
    model.profiler.clear()
    assert result.tokens == asked(model).tokens
    assert model.profiler.sums[FURTHER].passes == TOKENS - 1


def test_signatures_of_processors_are_read_once_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, read = inspect.signature, list[object]()

    def signature(function: Any) -> inspect.Signature:
        if isinstance(getattr(function, "__self__", None), LogitsProcessor):
            read.append(function)
        return real(function)

    monkeypatch.setattr(inspect, "signature", signature)
    counts = set()
    for tokens in (4, 20):
        read.clear()
        request = Request(PROMPT, tokens, Sampling(0.8, 0.9, seed=4, repetition_penalty=1.1))
        assert len(answer(load(split(folder)), request, print, draft=load(split(folder))).tokens) == tokens
        counts.add(len(read))
    assert len(counts) == 1
    assert counts != {0}


def test_a_processor_with_further_arguments_is_called_as_by_transformers() -> None:
    class Adds(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, bias: float) -> torch.Tensor:
            return scores + bias

    ids, scores = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 3)
    for processors in (CheckedProcessors([Adds()]), LogitsProcessorList([Adds()])):
        assert processors(ids, scores, bias=2.0).tolist() == [[3.0] * 3]
        with pytest.raises(ValueError, match="required parameters"):
            processors(ids, scores)


def test_ngram_drafts_of_repetitive_text_save_passes(tmp_path: Path) -> None:
    model = talker(parrot_folder(tmp_path / "model", {"a": "b", "b": "c", "c": "a", " ": "a"}))
    prepare_draft(model, "ngram")
    sessions, messages = (Session(model, 60), Session(model, 60, draft="ngram")), [{"role": "user", "content": "hi"}]
    plain, drafted = (session.answer(list(messages), lambda piece: None) for session in sessions)
    assert drafted.text == plain.text == "abc" * 20
    assert (plain.work.passes, drafted.work.passes <= 12) == (60, True)
    messages += [{"role": "assistant", "content": plain.text}, {"role": "user", "content": "on"}]
    again = [session.answer(list(messages), lambda piece: None) for session in sessions]
    assert again[0].text == again[1].text
    assert again[1].kept_tokens == again[0].kept_tokens > 0


def test_an_answer_ends_at_the_same_token_with_a_draft(folder: Path) -> None:
    model, draft = load(split(folder)), load(split(folder))
    prepare_draft(model, draft)
    whole = asked(model)
    last = next(index for index, token in enumerate(whole.tokens) if index > 3 and token not in whole.tokens[:index])
    text = model.tokenizer.decode(whole.tokens[last : last + 2])
    stopped = asked(model, stop=(text,))
    assert (stopped.stop, stopped.finish) == (text, FinishReason.STOP)
    result = asked(model, draft, stop=(text,))
    assert (result.text, result.stop, result.finish) == (stopped.text, text, FinishReason.STOP)
    for stop_strings in ([text], text):
        model.generation_config.stop_strings = stop_strings
        assert asked(model, draft).text == stopped.text
    model.generation_config.stop_strings = None
    model.generation_config.eos_token_id = [whole.tokens[last]]
    assert asked(model, draft).tokens == asked(model).tokens == whole.tokens[: last + 1]


def test_a_chat_with_a_draft(tmp_path: Path) -> None:
    folder = parrot_folder(tmp_path / "model", {"a": "b", "b": "c", "c": "a", " ": "a"})
    small = parrot_folder(tmp_path / "small", {"a": "b", "b": "c", "c": "a", " ": "b"})
    model, draft = talker(folder), load(split(small))
    draft.tokenizer = characters()
    prepare_draft(model, draft)
    sessions = Session(model, 12), Session(model, 12, draft=draft)
    messages: list[dict[str, Any]] = []
    for question in ("hi", "and then?"):
        messages.append({"role": "user", "content": question})
        plain, drafted = (session.answer(list(messages), lambda piece: None) for session in sessions)
        assert drafted.text == plain.text == "abcabcabcabc"
        assert drafted.work.passes < plain.work.passes
        assert drafted.kept_tokens == plain.kept_tokens
        assert (drafted.kept_tokens > 0) == (len(messages) > 1)
        messages.append({"role": "assistant", "content": plain.text})


def test_a_chat_reuses_its_cache_with_any_draft(tmp_path: Path) -> None:
    """Random weights, drafts that are mostly wrong, and an answer that is stopped in the middle of a pass."""
    model, small = (
        talker(talker_folder(tmp_path / "model", "llama")),
        talker_folder(tmp_path / "small", "llama", seed=3),
    )
    draft = load(split(small))
    draft.tokenizer = characters()
    prepare_draft(model, draft)
    draft.generation_config.assistant_confidence_threshold = 0
    sessions = Session(model, 12), Session(model, 12, draft=draft)
    messages: list[dict[str, Any]] = []
    for index, question in enumerate(("hi", "and then?", "why?", "so?")):
        messages.append({"role": "user", "content": question})
        plain = sessions[0].answer(list(messages), lambda piece: None)
        if index == 2:
            units = iter(range(60))
            stopped = sessions[1].answer(
                list(messages), lambda piece: None, stopped=lambda u=units: next(u, None) is None
            )
            assert stopped.finish is FinishReason.CANCELLED
            assert plain.text.startswith(stopped.text)
        drafted = sessions[1].answer(list(messages), lambda piece: None)
        assert drafted.tokens == plain.tokens
        assert drafted.kept_tokens >= plain.kept_tokens
        messages.append({"role": "assistant", "content": plain.text})


def test_other_vocabularies_are_refused(folder: Path, tmp_path: Path) -> None:
    other = talker_folder(tmp_path / "other", "llama")
    model, draft = load(split(folder)), load(split(other))
    draft.tokenizer = characters()
    with pytest.raises(OptionError, match=r"another vocabulary: \d+% of its tokens have the model's ids"):
        prepare_draft(model, draft)


def test_a_draft_that_would_stream_is_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="does not fit in memory"):
        prepare_draft(load(split(folder)), load(split(folder), 0))


def test_models_without_draft_support_are_refused(folder: Path, tmp_path: Path) -> None:
    draft = load(split(folder))
    encoder = load(split(build_checkpoint(tmp_path / "t5", "t5", tied=True)))
    for pair in ((encoder, draft), (draft, encoder), (encoder, "ngram")):
        with pytest.raises(OptionError, match="cannot be used with a draft: it is an encoder or has one"):
            prepare_draft(*pair)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_sliding_windows_drop_rejected_tokens(folder: Path, tmp_path: Path, name: str) -> None:
    model = load(split(build_checkpoint(tmp_path / name, HYBRIDS[name], tied=HYBRIDS[name].ties[0])))
    draft = load(split(folder))
    prepare_draft(model, draft)
    draft.generation_config.assistant_confidence_threshold = 0
    assert asked(model, draft).tokens == asked(model).tokens


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModel.from_pretrained(
        folder, **{"device": "cpu", "show_layer_progress": False, "exact": True, **options}
    )


STREAMED = {"max_memory": {"cpu": 0}}
REPETITIVE = torch.tensor([[1, 40, 81, 7, 200] * 3])


def passes_of(model: Any, ids: torch.Tensor = REPETITIVE, **options: Any) -> tuple[Any, int]:
    """What `generate` returns, and the number of its passes."""
    count = 0

    def hook(*args: Any) -> None:
        nonlocal count
        count += 1

    handle = model.get_decoder().register_forward_hook(hook)
    try:
        return model.generate(ids, **{"max_new_tokens": 12, "do_sample": False, **options}), count
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["ngram", "NGRAM", "auto", "path", "model"])
def test_plain_generate_uses_the_draft_that_the_model_was_loaded_with(folder: Path, kind: str) -> None:
    draft = {"path": folder, "model": loaded(folder) if kind == "model" else None}.get(kind, kind)
    plain, model = loaded(folder, **STREAMED), loaded(folder, draft=draft, **STREAMED)
    if kind in ("path", "model"):  # a random model is never sure
        (draft if kind == "model" else model.drafting._draft).generation_config.assistant_confidence_threshold = 0
    assert type(model).__name__ == "LlamaForCausalLM"
    assert isinstance(model, type(plain).__mro__[2])
    pieces = Pieces()
    expected, (tokens, passes) = passes_of(plain)[0], passes_of(model, streamer=pieces)
    assert torch.equal(tokens, expected)
    assert pieces.tokens == expected[0].tolist()
    assert passes < 12
    # one token is left to choose from
    assert torch.equal(passes_of(model, do_sample=True, min_p=1.0)[0], expected)


def test_plain_generate_with_a_draft_ends_at_stop_strings(folder: Path) -> None:
    plain, model = loaded(folder, **STREAMED), loaded(folder, draft="ngram", **STREAMED)
    whole = passes_of(plain)[0][0, REPETITIVE.shape[1] :]
    text = plain.tokenizer.decode(whole[10:11])
    config = GenerationConfig(stop_strings=[text])
    for options in ({"stop_strings": [text]}, {"generation_config": config}):
        (expected, without), (tokens, passes) = (
            passes_of(each, tokenizer=plain.tokenizer, **options) for each in (plain, model)
        )
        assert torch.equal(tokens, expected)
        assert passes < without < len(whole)
    assert config.stop_strings == [text]
    other = plain.tokenizer.decode(whole[5:6])
    for each in (plain, model):
        each.generation_config.stop_strings = [other]
    assert other not in text
    for calls in ({}, {"stop_strings": text}, {"generation_config": config, "stop_strings": None}):
        named: dict[str, Any] = {"tokenizer": plain.tokenizer, **calls}
        (expected, without), (tokens, passes) = (passes_of(each, **named) for each in (plain, model))
        assert torch.equal(tokens, expected)
        assert passes < without


class Pieces:
    """A streamer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing is left."""


def test_calls_that_a_draft_cannot_serve_do_without(folder: Path) -> None:
    plain, model = loaded(folder, **STREAMED), loaded(folder, draft="ngram", **STREAMED)
    several = {
        "beams": {"num_beams": 2},
        "several answers": {"num_return_sequences": 2, "do_sample": True},
        "a dict": {"return_dict_in_generate": True},
        "no cache": {"use_cache": False},
        "a static cache": {"cache_implementation": "static"},
        "parts": {"prefill_chunk_size": 4},
        "embeddings": {"inputs_embeds": plain.get_input_embeddings()(REPETITIVE)},
    }
    for name, options in several.items():
        results = []
        for each in (plain, model):
            torch.manual_seed(3)
            ids = None if name == "embeddings" else REPETITIVE
            results.append(passes_of(each, ids, **options))  # type: ignore[arg-type]
        ours, theirs = (getattr(result[0], "sequences", result[0]) for result in results)
        assert torch.equal(ours, theirs), name
        assert results[0][1] == results[1][1], name
    assert torch.equal(passes_of(model, REPETITIVE.repeat(2, 1))[0], passes_of(plain, REPETITIVE.repeat(2, 1))[0])
    with pytest.raises(OptionError, match="Drafts need one sequence"):  # named by the user
        model.generate(REPETITIVE, num_beams=2, custom_generate=Drafting("ngram"))


def test_auto_is_for_models_that_move_weights_and_can_go_back(folder: Path, tmp_path: Path) -> None:
    assert chosen_draft(load(split(folder), 0), "auto") == "ngram"
    assert chosen_draft(load(split(folder)), "auto") is None
    encoder = split(build_checkpoint(tmp_path / "t5", "t5", tied=True))
    assert chosen_draft(load(encoder, 0), "auto") is None
    for resident in (loaded(folder, draft="auto"), loaded(folder, draft="none", **STREAMED)):
        assert not hasattr(resident, "drafting")


def test_what_is_no_draft_is_refused(folder: Path, tmp_path: Path) -> None:
    for draft in (5, True, folder.stat(), object):
        with pytest.raises(OptionError, match=f"draft is of type {type(draft).__name__}; expected a name, a folder"):
            loaded(folder, draft=draft)
    with pytest.raises(CheckpointError, match="no-such-model"):
        loaded(folder, draft=tmp_path / "no-such-model")


def test_another_vocabulary_is_refused_before_anything_is_split(tmp_path: Path) -> None:
    model, other = (build_checkpoint(tmp_path / name, "llama") for name in ("model", "other"))
    characters().save_pretrained(other)
    with pytest.raises(OptionError, match="another vocabulary"):
        loaded(model, draft=other)
    assert not [*tmp_path.glob("*/splitted*")]


def test_the_figures_of_drafts(folder: Path) -> None:
    model, draft = load(split(folder), 0, profiling=True), load(split(folder))
    prepare_draft(model, draft)
    draft.generation_config.assistant_confidence_threshold = 0
    drafts = asked(model, draft).work.drafts
    assert drafts is not None
    assert drafts.tokens == TOKENS
    assert drafts.passes == sum(total.passes for total in model.profiler.sums.values())
    assert drafts.checked[0] == drafts.right[0] > 1
    assert sum(drafts.right) + drafts.passes == TOKENS
    assert model.profiler.drafts == drafts
    assert replace(drafts, whole=2 * drafts.seconds).words() == (
        f"{TOKENS / drafts.passes:.1f} tokens a pass by a draft model, "
        "right 100% 100% 100% 100% … by depth, 50% of the time"
    )
    assert asked(model).work.drafts is None
    idle = answer(model, Request(PROMPT, 1), lambda piece: None, draft="ngram").work.drafts
    assert idle is not None
    assert idle.words() == f"1.0 tokens a pass: ngram proposed no token, in {idle.share:.0%} of the time"
    other = load(split(build_checkpoint(folder.parent / "other", "llama", num_hidden_layers=1, seed=3)))
    other.generation_config.assistant_confidence_threshold = 0
    prepare_draft(model, other)
    wrong = asked(model, other).work.drafts
    assert wrong is not None
    assert len(wrong.checked) == len(wrong.right)
    assert sum(wrong.right) + wrong.passes == TOKENS
    assert "right 0%" in wrong.words()
    assert Drafts(2, 5, (2, 1), (2, 1), 1.0, 3.0).plus(Drafts(1, 1, (1,), (0,), 0.5, 1.0)) == Drafts(
        3, 6, (3, 1), (2, 1), 1.5, 4.0
    )
