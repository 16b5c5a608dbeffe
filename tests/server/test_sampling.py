"""Sampling options as other servers have them, compared with transformers' processors and with plain logits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from rabbitllm import batch
from tests.server.serving import NAME, STREAMED, Running
from tests.server.test_openai_client import PROMPT, alone, text_of
from tests.support.tiny_models import load

SAMPLES = 32


def ids_of(served: Running) -> torch.Tensor:
    return served.model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]


def ask(served: Running, count: int = 12, *, n: int | None = None, **options: Any) -> Any:
    names = ("logprobs", "echo", "best_of", "stream", "stop", "prompt")
    known = {name: options.pop(name) for name in names if name in options}
    body: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": count, "n": n, "seed": 5, **known}
    return served.openai().completions.create(**body, extra_body=options)


def plain_logits(plain: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return plain(ids).logits[0].float()


def drawn(served: Running, **options: Any) -> Counter[int]:
    """The second token of many answers, of which all have the same first one."""
    first = int(ids_of(served)[0, -1])
    once = {"prompt": [*ids_of(served)[0].tolist(), first]}
    counts: Counter[int] = Counter()
    for seed in range(8):
        answer = ask(served, 1, n=SAMPLES, logprobs=0, seed=seed * SAMPLES, ignore_eos=True, **once, **options)
        counts.update(choice.logprobs.tokens[0] for choice in answer.choices)
    return counts


def penalised(logits: torch.Tensor, answer: list[int], presence: float, frequency: float) -> torch.Tensor:
    """As OpenAI documents the two penalties."""
    counts = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=logits.shape[-1]).float()
    return logits - frequency * counts - presence * (counts > 0)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.8), (-1.0, -0.5)])
def test_penalties_count_tokens_of_the_answer(served: Running, plain: Any, presence: float, frequency: float) -> None:
    ids, answer = ids_of(served), []
    for _ in range(16):
        logits = plain_logits(plain, torch.cat((ids, torch.tensor([answer], dtype=torch.long)), 1))[-1]
        answer.append(int(penalised(logits, answer, presence, frequency).argmax()))
    got = ask(served, 16, presence_penalty=presence, frequency_penalty=frequency)
    assert got.choices[0].text == text_of(served, answer)
    assert got.choices[0].text != ask(served, 16).choices[0].text


@pytest.mark.parametrize(
    ("options", "processors"),
    [
        ({"min_p": 0.2}, [transformers.MinPLogitsWarper(0.2)]),
        ({"repetition_penalty": 1.7}, [transformers.RepetitionPenaltyLogitsProcessor(1.7)]),
        ({"logit_bias": {"5": 3, "7": -100}}, [transformers.SequenceBiasLogitsProcessor([[[5], 3.0], [[7], -100.0]])]),
    ],
)
def test_distribution_is_that_of_transformers_processors(
    served: Running, plain: Any, options: dict[str, Any], processors: list[Any]
) -> None:
    """Total variation distance of 256 samples; without the option it is above the limit."""
    ids = ids_of(served)
    ids = torch.cat((ids, ids[:, -1:]), 1)
    scores = plain_logits(plain, ids)[-1:]
    for processor in processors:
        scores = processor(ids, scores)
    chances = torch.softmax(scores[0], -1)
    counts = drawn(served, temperature=1.0, top_k=0, **options)
    total = sum(counts.values())
    by_text: Counter[str] = Counter()
    for token, chance in enumerate(chances.tolist()):
        by_text[served.service.texts.of(token)[0]] += chance  # type: ignore[assignment]
    distance = sum(abs(by_text[name] - counts[name] / total) for name in by_text) / 2
    expected = sum((chance * (1 - chance) / total) ** 0.5 for chance in by_text.values()) / 2 * 0.8
    assert distance < 1.5 * expected, (distance, expected)
    assert not set(counts) - {name for name, chance in by_text.items() if chance}


def test_log_probabilities_are_before_penalties(served: Running, plain: Any) -> None:
    options = {"presence_penalty": 2, "repetition_penalty": 1.5, "logit_bias": {"9": 50}, "temperature": 0}
    choice = ask(served, 3, logprobs=1, **options).choices[0]
    token = served.service.texts.of(9)[0]
    assert choice.logprobs.tokens == [token] * 3
    expected = torch.log_softmax(plain_logits(plain, ids_of(served))[-1], -1)
    assert choice.logprobs.token_logprobs[0] == pytest.approx(float(expected[9]), abs=1e-4)
    assert [*choice.logprobs.top_logprobs[0].values()] == pytest.approx([float(expected.max())], abs=1e-4)


def test_end_tokens_can_be_ignored_or_put_off(served: Running, plain: Any) -> None:
    end = {"logit_bias": {"2": 100}}
    assert ask(served, 5, **end).usage.completion_tokens == 1
    ignoring = ask(served, 5, ignore_eos=True, logprobs=0, **end)
    assert (ignoring.usage.completion_tokens, ignoring.choices[0].finish_reason) == (5, "length")
    assert len(ignoring.choices[0].logprobs.tokens) == 5
    later = ask(served, 9, min_tokens=4, **end)
    assert (later.usage.completion_tokens, later.choices[0].finish_reason) == (5, "stop")
    assert later.choices[0].text == text_of(served, alone(plain, ids_of(served), 4))
    with pytest.raises(openai.BadRequestError, match="min_tokens is 6, and the limit of new tokens 5"):
        ask(served, 5, min_tokens=6)


@pytest.mark.parametrize("count", [0, 3])
def test_echo_with_log_probabilities(served: Running, plain: Any, count: int) -> None:
    ids = ids_of(served)
    answer = alone(plain, ids, count) if count else []
    rows = torch.cat((ids, torch.tensor([answer], dtype=torch.long)), 1)
    expected = torch.log_softmax(plain_logits(plain, rows), -1)[:-1]
    got = ask(served, count, echo=True, logprobs=3, temperature=0)
    logprobs = got.choices[0].logprobs
    assert got.choices[0].text == PROMPT + text_of(served, answer)
    assert (got.choices[0].finish_reason, got.usage.completion_tokens) == ("length", count)
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    following = [float(row[token]) for row, token in zip(expected, rows[0, 1:], strict=True)]
    assert logprobs.token_logprobs[1:] == pytest.approx(following, abs=1e-4)
    for top, row in zip(logprobs.top_logprobs[1:], expected, strict=True):
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
    assert [served.service.texts.of(int(token))[0] for token in rows[0]] == logprobs.tokens

    chunks = [chunk.choices[0] for chunk in ask(served, count, echo=True, logprobs=3, temperature=0, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == got.choices[0].text
    streamed = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs]
    assert streamed[1:] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-5)


def test_no_new_tokens_in_a_chat(served: Running) -> None:
    messages: Any = [{"role": "user", "content": "a"}]
    answer = served.openai().chat.completions.create(model=NAME, messages=messages, max_tokens=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0 < answer.usage.prompt_tokens


def test_best_of_returns_the_likeliest(served: Running) -> None:
    every = ask(served, 6, n=5, temperature=1.5, logprobs=0).choices
    ranked = sorted(every, key=lambda choice: -sum(choice.logprobs.token_logprobs) / 6)
    best = ask(served, 6, n=2, best_of=5, temperature=1.5)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert (best.usage.completion_tokens, best.usage.prompt_tokens) == (5 * 6, ids_of(served).shape[1])
    for options, message in (
        ({"n": 3, "best_of": 2}, "best_of is 2, less than n, which is 3"),
        ({"best_of": 2, "stream": True}, "best_of needs whole answers"),
        ({"best_of": 200}, "best_of"),
        ({"logit_bias": {"100000": 1}}, "logit_bias has the token 100000; the vocabulary has"),
        ({"logit_bias": {"a": 1}}, "logit_bias: expected ids of tokens as keys, found 'a'"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            ask(served, **options)


def test_max_tokens_is_cut_to_the_context_and_the_usage_says_so(served: Running) -> None:
    context = served.service.limits.context
    length = ids_of(served).shape[1]
    prompt = (ids_of(served)[0].tolist() * context)[: context - 3]
    usage = ask(served, 50, prompt=prompt).usage
    assert (usage.completion_tokens, usage.max_tokens) == (3, 3)
    assert not hasattr(ask(served, 2).usage, "max_tokens")
    assert length < context


def test_batch_lines_take_them(served: Running, split_folder: Path) -> None:
    options = {"presence_penalty": 1.5, "logit_bias": {"5": 3.0}, "min_tokens": 2, "ignore_eos": True}
    expected = ask(served, 8, **options).choices[0].text
    body = {"prompt": PROMPT, "max_tokens": 8, **options}
    lines = [
        {"custom_id": "a", "url": "/v1/completions", "body": body},
        {"custom_id": "b", "url": "/v1/completions", "body": {**body, "n": 1, "best_of": 2, "temperature": 1}},
        {"custom_id": "c", "url": "/v1/completions", "body": {**body, "max_tokens": 0, "min_tokens": 0}},
        {"custom_id": "d", "url": "/v1/completions", "body": {**body, "echo": True, "logprobs": 1}},
        {"id": "e", "prompt": PROMPT, "max_tokens": 8, "presence_penalty": 1.5, "min_tokens": 2},
        {"id": "f", "prompt": PROMPT, "max_tokens": 8, **options},
        {"id": "g", "prompt": PROMPT, "logit_bias": {"100000": 3.0}},
    ]
    by_id = {line.get("custom_id", line["id"]): line for line in batch(load(split_folder, STREAMED), lines)}
    texts = {key: [choice["text"] for choice in by_id[key]["response"]["body"]["choices"]] for key in "abc"}
    assert (texts["a"], len(texts["b"]), texts["c"]) == ([expected], 1, [""])
    assert "use context and continuation" in by_id["d"]["response"]["body"]["error"]["message"]
    assert by_id["e"]["text"] == ask(served, 8, presence_penalty=1.5, min_tokens=2).choices[0].text
    assert by_id["f"]["text"] == expected
    assert "logit_bias has the token 100000; the vocabulary has" in by_id["g"]["error"]["message"]
