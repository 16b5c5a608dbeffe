"""A draft model: the answer stays the model's own, in fewer passes; other vocabularies and models are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.errors import OptionError
from rabbitllm.generation.draft import prepare_draft
from rabbitllm.generation.request import FinishReason, Request, Result, Sampling
from rabbitllm.generation.session import Session, answer
from rabbitllm.telemetry.passes import FURTHER
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
    with pytest.raises(OptionError, match="cannot be used with a draft"):
        prepare_draft(encoder, draft)
    for name in ("rwkv", "deepseek_v32"):  # states in a cache of their own, chosen tokens
        model = load(split(build_checkpoint(tmp_path / name, HYBRIDS[name], tied=HYBRIDS[name].ties[0])))
        for pair in ((model, draft), (draft, model), (model, "ngram")):
            with pytest.raises(OptionError, match="cannot be used with a draft"):
                prepare_draft(*pair)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_sliding_windows_drop_rejected_tokens(folder: Path, tmp_path: Path, name: str) -> None:
    model = load(split(build_checkpoint(tmp_path / name, HYBRIDS[name], tied=HYBRIDS[name].ties[0])))
    draft = load(split(folder))
    prepare_draft(model, draft)
    draft.generation_config.assistant_confidence_threshold = 0
    assert asked(model, draft).tokens == asked(model).tokens
