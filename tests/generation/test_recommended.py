"""Options of a checkpoint's generation config: each has its effect in transformers, or none, which is said."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from rabbitllm.errors import OptionError
from rabbitllm.generation import _sequence
from rabbitllm.generation._recommended import DROPPED, REFUSED
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.request import Request, Sampling, end_tokens, recommended_sampling
from rabbitllm.generation.session import Session, answer
from tests.generation.submitting import Open, alone, answered, answered_together, prompt
from tests.generation.test_preemption import limits
from tests.support.tiny_models import load

PROMPTS = ((7,), prompt(20, 3), tuple(range(3, 180)))
"""A single token, after which a first token can be forced; and one that has most tokens of its answer."""
NEW_TOKENS = 12
SAMPLED = Sampling(temperature=1.5, seed=5)


class Use(Enum):
    """What becomes of an option."""

    HONOURED = 1
    """It has the effect that it has in transformers."""
    REPLACED = 2
    """The request, the tokenizer or the executor sets it."""
    IDLE = 3
    """It has no effect without one that is dropped, or without an assistant."""
    DROPPED = 4
    """It has no effect here, which a warning says."""
    REFUSED = 5
    """Answers without it would not be what the checkpoint demands, so that the model is refused."""


OPTIONS: Mapping[str, Use] = {
    **dict.fromkeys(
        (
            *("min_length", "min_new_tokens", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
            *("top_k", "top_p"),
            *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"),
            *("encoder_no_repeat_ngram_size", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id"),
            *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "sequence_bias"),
            *("begin_suppress_tokens", "watermarking_config", "stop_strings", "bos_token_id", "eos_token_id"),
            "decoder_start_token_id",
        ),
        Use.HONOURED,
    ),
    **dict.fromkeys(
        (
            *("max_length", "max_new_tokens", "do_sample", "temperature", "num_return_sequences"),
            *("use_cache", "cache_implementation", "prefill_chunk_size", "pad_token_id", "return_dict_in_generate"),
            *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        ),
        Use.REPLACED,
    ),
    **dict.fromkeys(
        (
            *("early_stopping", "length_penalty", "diversity_penalty", "low_memory", "max_matching_ngram_size"),
            *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
            *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
            *("cache_config", "max_cache_len", "compile_config", "disable_compile", "continuous_batching_config"),
            "transformers_version",
        ),
        Use.IDLE,
    ),
    **dict.fromkeys(DROPPED, Use.DROPPED),
    **dict.fromkeys(REFUSED, Use.REFUSED),
}
"""Option -> what becomes of it (transformers 5.23 and 5.24)."""


def read(folder: Path, **settings: Any) -> GenerationConfig:
    """As from a checkpoint's file."""
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": 0, **settings}))
    return GenerationConfig.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(split_folder: Path) -> Any:
    return load(split_folder, dtype="float32", exact=False)


@pytest.fixture(autouse=True)
def options_of_the_others(plain: Any) -> Iterator[None]:
    """Other files' tests of this process use the same model."""
    before = plain.generation_config
    yield
    plain.generation_config = before


@pytest.fixture(scope="module")
def first(plain: Any, model: Any) -> list[int]:
    """The most likely tokens after the longer prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "generation_config", GenerationConfig(pad_token_id=0))
        tokens = alone(plain, Request(PROMPTS[1], NEW_TOKENS))
    assert len(set(tokens[:6])) == 6
    return tokens


def stop_in(tokens: list[int], tokenizer: Any) -> str:
    """A character of their text that is a token."""
    texts: list[str] = [tokenizer.decode([token]) for token in tokens[1:8]]
    return next(text for text in texts if text.isascii() and text.isalnum())


def values(first: list[int], tokenizer: Any) -> Mapping[str, dict[str, Any]]:
    """Settings for each option; its own is not the neutral one."""
    sampling = {
        "min_p": 0.9,
        "top_h": 0.3,
        "typical_p": 0.3,
        "epsilon_cutoff": 0.02,
        "eta_cutoff": 0.9,
        "top_k": 3,
        "top_p": 0.3,
        "temperature": 0.1,
        "do_sample": True,
        "num_return_sequences": 2,
    }
    greedy: dict[str, Any] = {
        "min_length": 31,
        "min_new_tokens": 11,
        "repetition_penalty": 1.8,
        "encoder_repetition_penalty": 3.0,
        "no_repeat_ngram_size": 1,
        "encoder_no_repeat_ngram_size": 1,
        "bad_words_ids": [[first[1]]],
        "renormalize_logits": True,
        "forced_bos_token_id": 9,
        "forced_eos_token_id": 11,
        "remove_invalid_values": True,
        "exponential_decay_length_penalty": [1, 3.0],
        "suppress_tokens": [first[2]],
        "begin_suppress_tokens": [first[0]],
        "sequence_bias": [[[first[0]], -50.0]],
        "watermarking_config": {"bias": 4.0, "seeding_scheme": "selfhash"},
        "stop_strings": [stop_in(first, tokenizer)],
        "bos_token_id": 1,
        "eos_token_id": first[3],
        "decoder_start_token_id": 1,
        "max_length": 23,
        "max_new_tokens": 2,
        "use_cache": False,
        "cache_implementation": "static",
        "prefill_chunk_size": 4,
        "pad_token_id": 3,
        **dict.fromkeys(("return_dict_in_generate", "output_attentions", "output_hidden_states"), True),
        **dict.fromkeys(("output_scores", "output_logits", "early_stopping", "low_memory", "disable_compile"), True),
        "length_penalty": 2.0,
        "diversity_penalty": 0.5,
        "max_matching_ngram_size": 3,
        "num_assistant_tokens": 4,
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.9,
        "assistant_lookbehind": 3,
        "target_lookbehind": 3,
        "assistant_ensemble_weight": 0.5,
        "speculation_type": "dflash",
        "cache_config": {"backend": "quanto"},
        "max_cache_len": 64,
        "compile_config": None,
        "continuous_batching_config": None,
        "transformers_version": "5.0.0",
        "num_beams": 3,
        "num_beam_groups": 2,
        "penalty_alpha": 0.6,
        "dola_layers": "high",
        "guidance_scale": 3.0,
        "token_healing": True,
        "prompt_lookup_num_tokens": 3,
        "assistant_early_exit": 1,
        "use_mtp": True,
        "is_assistant": True,
        "max_time": 1e-9,
        "constraints": [1],
        "force_words_ids": [[5]],
    }
    return {name: {name: value, "do_sample": True} for name, value in sampling.items()} | {
        name: {name: value} for name, value in greedy.items()
    }


FROM_A_FILE = ("compile_config", "continuous_batching_config")
"""No file can set them: transformers takes an object of its own, or warns that the option is gone."""
WITHOUT_EFFECT = {"renormalize_logits", "remove_invalid_values", "bos_token_id", "decoder_start_token_id"}
"""Honoured, but nothing comes of them for a decoder with finite logits."""


@torch.no_grad()
def generated(plain: Any, request: Request, **options: Any) -> list[int]:
    """The tokens of transformers."""
    ids = torch.tensor([request.prompt])
    if request.sampling.samples:
        torch.manual_seed(request.sampling.seed or 0)
    arguments = {"max_new_tokens": request.max_new_tokens, **request.sampling.arguments(), **options}
    tokens: list[int] = plain.generate(ids, attention_mask=torch.ones_like(ids), **arguments)[
        0, ids.shape[1] :
    ].tolist()
    return tokens


def test_every_option_of_transformers_is_named() -> None:
    """A new version of transformers may have more: decide what becomes of each."""
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert names == OPTIONS.keys()


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_each_option(
    tmp_path: Path, plain: Any, model: Any, first: list[int], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """In both executors."""
    settings, use = values(first, model.tokenizer)[name], OPTIONS[name]
    base = {"eos_token_id": first[8]} if "eos_token_id" not in settings else {}
    model.generation_config = read(tmp_path / "model", **base, **({} if name in FROM_A_FILE else settings))
    sampling = SAMPLED if settings.get("do_sample") else Sampling()
    requests = [Request(ids, NEW_TOKENS, sampling) for ids in PROMPTS]
    # what a request or the tokenizer sets: the end tokens of both count
    options = {"eos_token_id": end_tokens(model), "pad_token_id": 0}
    plain.generation_config = read(tmp_path / "plain", **base, **({"do_sample": True} if sampling.samples else {}))
    without = [generated(plain, request, **options) for request in requests]
    expected = without
    if use is Use.HONOURED:
        plain.generation_config = model.generation_config
        more = {"tokenizer": model.tokenizer} if name == "stop_strings" else {}
        expected = [generated(plain, request, **options, **more) for request in requests]
        if name == "eos_token_id":
            without = [generated(plain, request, eos_token_id=None) for request in requests]
        assert (expected == without) is (name in WITHOUT_EFFECT)
    if use is Use.REFUSED:
        for refuse in (Batch, Session, lambda model: answer(model, requests[0], print)):
            with pytest.raises(OptionError, match=rf"sets {name}: words that each answer must have"):
                refuse(model)
        return
    with caplog.at_level(logging.WARNING, "rabbitllm"), Batch(model) as batch:
        assert [result.tokens for result in answered(batch, requests)] == expected
    alone = [list(answer(model, request, lambda text: None).tokens) for request in requests]
    if name == "stop_strings":  # it is looked for after the token that completes it: there is one more
        alone = [tokens[: len(reference)] for tokens, reference in zip(alone, expected, strict=True)]
    assert alone == expected
    assert (f"sets {name}=" in caplog.text) is (use is Use.DROPPED)
    assert caplog.text.count("has no effect here") == (1 + len(requests) if use is Use.DROPPED else 0)


def test_options_without_effect_are_logged_in_one_line(
    tmp_path: Path, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model.generation_config = read(tmp_path, num_beams=3, prompt_lookup_num_tokens=2, num_beam_groups=1, min_length=0)
    with Batch(model):
        assert "sets num_beams=3 and prompt_lookup_num_tokens=2, which has no effect here" in caplog.text


def test_an_answer_ends_before_a_stop_string(tmp_path: Path, plain: Any, model: Any, first: list[int]) -> None:
    text = model.tokenizer.decode(first)
    stop = stop_in(first, model.tokenizer)
    model.generation_config = read(tmp_path, stop_strings=stop, eos_token_id=first[8])
    with Batch(model) as batch:
        (in_batch,) = answered(batch, [Request(PROMPTS[1], NEW_TOKENS)])
    alone = answer(model, Request(PROMPTS[1], NEW_TOKENS), lambda text: None)
    assert in_batch.text == alone.text == text[: text.index(stop)]
    assert in_batch.finished.stop == alone.stop == stop


def test_a_hidden_stop_string_is_an_end_token(tmp_path: Path, model: Any) -> None:
    model.generation_config = read(tmp_path, stop_strings=["<pad>", "ab"], eos_token_id=9)
    assert end_tokens(model) == [9, model.tokenizer.eos_token_id, model.tokenizer.pad_token_id]


def test_probabilities_are_those_before_a_penalty(tmp_path: Path, plain: Any, model: Any) -> None:
    model.generation_config = read(tmp_path, repetition_penalty=1.8)
    with Batch(model) as batch:
        (answer,) = answered(batch, [Request(prompt(9), 6, top_logprobs=2)])
    expected = torch.log_softmax(plain(torch.tensor([[*prompt(9), *answer.tokens]])).logits[0].detach(), -1)
    for length, chosen in enumerate(answer.chosen, start=8):
        assert chosen.logprob == pytest.approx(float(expected[length, chosen.token]), abs=1e-4)
        best = expected[length].topk(2)
        assert [like.token for like in chosen.top_logprobs] == best.indices.tolist()


RECOMMENDED: Mapping[str, Any] = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.mark.parametrize(
    ("settings", "given", "expected", "words"),
    [
        ({}, Sampling(), Sampling(), "greedy: the model recommends no sampling"),
        ({"temperature": 0.6}, Sampling(), Sampling(), "greedy: the model recommends no sampling"),
        ({"repetition_penalty": 1.1}, Sampling(), None, "greedy, repetition_penalty 1.1, from the model"),
        ({"do_sample": True}, Sampling(), Sampling(1.0), "temperature 1, from the model"),
        ({"do_sample": True, "top_p": 1.0, "min_p": 0.0}, Sampling(), Sampling(1.0), "temperature 1, from the model"),
        (RECOMMENDED, Sampling(), None, "temperature 0.6, top_p 0.95, top_k 20, from the model"),
        (RECOMMENDED, Sampling(seed=3), None, "temperature 0.6, top_p 0.95, top_k 20, from the model"),
        (RECOMMENDED, Sampling(0.5), Sampling(0.5, 0.95, None, 20), "temperature 0.5, top_p 0.95, top_k 20"),
        (RECOMMENDED, Sampling(top_k=0), Sampling(0.6, 0.95, None, 0), "temperature 0.6, top_p 0.95, top_k 0"),
        (RECOMMENDED, Sampling(0), Sampling(0, 0.95, None, 20), "greedy"),
        (RECOMMENDED, Sampling(0, min_p=0.1), Sampling(0, 0.95, None, 20, 0.1), "greedy"),
        ({}, Sampling(min_p=0.1), Sampling(min_p=0.1), "min_p 0.1"),
        ({**RECOMMENDED, "top_k": -1}, Sampling(), Sampling(0.6, 0.95, None, 0), None),
    ],
)
def test_recommended_sampling(
    tmp_path: Path, model: Any, settings: dict[str, Any], given: Sampling, expected: Sampling | None, words: str | None
) -> None:
    """An option of a call takes the place of the same one in the checkpoint, and of no other."""
    model.generation_config = read(tmp_path, **settings)
    recommended = recommended_sampling(model)
    sampling = given.over(recommended)
    assert sampling == expected or expected is None
    assert sampling.samples is (given.temperature != 0 and (bool(settings.get("do_sample")) or given.min_p is not None))
    assert sampling.words(recommended) == words or words is None


@pytest.mark.parametrize(
    "sampling",
    [Sampling(repetition_penalty=1.8), Sampling(1.5, 0.9, 5, 12, 0.02, 1.4), Sampling(1.5, None, 5, min_p=1)],
)
def test_sampling_of_a_request_is_that_of_transformers(
    tmp_path: Path, plain: Any, model: Any, sampling: Sampling
) -> None:
    """In both executors, and over another penalty and `min_p` in the checkpoint."""
    model.generation_config = read(tmp_path, min_p=0.9 if sampling.min_p else None, repetition_penalty=2.5)
    plain.generation_config = GenerationConfig(pad_token_id=0)
    requests = [Request(ids, NEW_TOKENS, sampling) for ids in PROMPTS]
    if sampling.repetition_penalty is None:
        requests = [Request(ids, NEW_TOKENS, Sampling(1.5, None, 5, min_p=1, repetition_penalty=1)) for ids in PROMPTS]
    options = {"eos_token_id": end_tokens(model)}
    expected = [generated(plain, request, **options) for request in requests]
    with Batch(model) as batch:
        assert [result.tokens for result in answered(batch, requests)] == expected
    assert [list(answer(model, request, lambda text: None).tokens) for request in requests] == expected
    if sampling.min_p == 1:  # the most likely token alone is left
        assert expected == [generated(plain, Request(ids, NEW_TOKENS), **options) for ids in PROMPTS]


COUNTING: Mapping[str, Any] = {
    "min_new_tokens": 20,
    "exponential_decay_length_penalty": [14, 1.4],
    "encoder_repetition_penalty": 0.5,
    "encoder_no_repeat_ngram_size": 1,
}
"""Options that count from the end of the prompt, or look at the prompt alone."""


@pytest.mark.parametrize("name", [*COUNTING, "begin_suppress_tokens"])
def test_options_hold_after_a_preemption(
    tmp_path: Path, open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The tokens are those without one."""
    monkeypatch.setattr(_sequence, "RESERVED_TOKENS", 4)
    requests = [Request(prompt(length, length), 24) for length in (12, 17, 9)]
    plain.generation_config = GenerationConfig(pad_token_id=0)
    ends = generated(plain, requests[0])[6]
    batch, model = open_batch(limits(plain, swap_bytes=0))
    often = max(range(270), key=[token for request in requests for token in generated(plain, request)].count)
    value = COUNTING.get(name, [often])
    model.generation_config = plain.generation_config = read(tmp_path, eos_token_id=ends, **{name: value})
    texts = [answer.tokens for answer in answered_together(batch, requests)]
    assert batch.stats.preempted > 0
    assert batch.stats.resumed == 0
    assert texts == [generated(plain, request, eos_token_id=end_tokens(model)) for request in requests]
