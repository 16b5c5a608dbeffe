"""What OpenAI's own client gets, compared with what plain transformers makes of the same prompt."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from rabbitllm.generation.request import Sampling
from tests.server.serving import NAME, Running, running
from tests.support.tiny_models import split

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is in the rain?"}]
PROMPT = "the rain and the"


def chat_ids(served: Running, messages: list[Any] = MESSAGES) -> torch.Tensor:
    inputs = served.model.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return inputs["input_ids"]


def alone(plain: Any, ids: torch.Tensor, count: int) -> list[int]:
    """New tokens, greedily, of a model that nothing is shared with."""
    with torch.inference_mode():
        tokens = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tokens[0, ids.shape[-1] :].tolist()


def text_of(served: Running, tokens: list[int]) -> str:
    return served.model.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_model_is_listed(served: Running) -> None:
    client = served.openai()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("org/other")
    assert refused.value.code == "model_not_found"


def test_chat_equals_generate(served: Running, plain: Any) -> None:
    ids = chat_ids(served)
    tokens = alone(plain, ids, 12)
    answer = served.openai().chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content == text_of(served, tokens)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == ("stop" if tokens[-1] == 2 else "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (ids.shape[-1], len(tokens))
    assert answer.object == "chat.completion"
    assert answer.model == NAME


def test_streamed_chat_equals_generate(served: Running, plain: Any) -> None:
    tokens = alone(plain, chat_ids(served), 12)
    chunks = list(
        served.openai().chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text_of(served, tokens)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_completions_of_text_and_of_ids(served: Running, plain: Any) -> None:
    client = served.openai()
    ids = served.model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = text_of(served, alone(plain, ids, 9))
    prompts: list[Any] = [PROMPT, [PROMPT], ids[0].tolist(), [ids[0].tolist()]]
    for prompt in prompts:
        answer = client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=9)
        assert [choice.text for choice in answer.choices] == [expected]
    echoed = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, max_tokens=9, echo=True)
    assert echoed.choices[0].text == PROMPT + expected


def test_answers_keep_the_order_of_prompts(served: Running, plain: Any) -> None:
    prompts = ["and then", "in the rain", "one"]
    expected = [
        text_of(served, alone(plain, served.model.tokenizer(prompt, return_tensors="pt")["input_ids"], 7))
        for prompt in prompts
    ]
    client = served.openai()
    answer = client.completions.create(model=NAME, prompt=prompts, temperature=0, max_tokens=7, n=2)
    assert [choice.index for choice in answer.choices] == [*range(6)]
    assert [choice.text for choice in answer.choices] == [text for text in expected for _ in range(2)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * 7
    streamed = [""] * 3
    for chunk in client.completions.create(model=NAME, prompt=prompts, temperature=0, max_tokens=7, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected


def test_a_stop_text_is_cut_exactly(served: Running, plain: Any) -> None:
    ids = served.model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    text = text_of(served, alone(plain, ids, 24))
    stop = text[9:12]
    client = served.openai()
    for stops in (stop, ["never there", stop]):
        answer = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, max_tokens=24, stop=stops)
        assert answer.choices[0].text == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
    streamed = client.completions.create(
        model=NAME, prompt=PROMPT, temperature=0, max_tokens=24, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == text[: text.index(stop)]


def test_same_seed_gives_the_same_samples(served: Running) -> None:
    client = served.openai()

    def drawn(seed: int, n: int) -> list[str]:
        answer = client.completions.create(
            model=NAME, prompt=PROMPT, temperature=1.5, top_p=0.95, seed=seed, n=n, max_tokens=16
        )
        return [choice.text for choice in answer.choices]

    first = drawn(7, 3)
    assert first == drawn(7, 3)
    assert len(set(first)) == 3
    assert drawn(8, 1) == first[1:2]


def test_what_a_request_does_not_say_is_the_models(checkpoint: Path, tmp_path: Path, plain: Any) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("splitted_model*"))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 1.5, "top_k": 20}))
    with running(split(folder), sampling=Sampling(top_p=0.95), context=40) as served:
        ids = served.model.tokenizer(PROMPT, return_tensors="pt")
        client = served.openai()

        def asked(seed: int = 3, **options: Any) -> str:
            options = {"max_tokens": 16, **options}
            return client.completions.create(model=NAME, prompt=PROMPT, seed=seed, **options).choices[0].text

        def sampled(**options: Any) -> str:
            torch.manual_seed(3)
            options = {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.95, **options}
            tokens = plain.generate(**ids, max_new_tokens=16, **options)
            return text_of(served, tokens[0, ids["input_ids"].shape[1] :].tolist())

        assert asked() == sampled()
        assert asked(temperature=2) == sampled(temperature=2.0)
        assert asked(extra_body={"top_k": 0, "min_p": 0.01}) == sampled(top_k=0, min_p=0.01)
        assert asked(temperature=0) == sampled(do_sample=False)
        status = served.http.get("/status").json()
        words = "temperature 1.5, top_p 0.95, top_k 20"
        assert status["sampling"] == {"temperature": 1.5, "top_p": 0.95, "top_k": 20, "words": words}
        (entry,) = served.http.get("/v1/models").json()["data"]
        assert (entry["max_model_len"], entry["input_modalities"]) == (40, ["text"])
        with pytest.raises(openai.BadRequestError, match="the context is limited to 40"):
            client.completions.create(model=NAME, prompt=PROMPT * 20)


def test_a_model_that_recommends_nothing_is_greedy(served: Running, plain: Any) -> None:
    ids = served.model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    answer = served.openai().completions.create(model=NAME, prompt=PROMPT, max_tokens=16)
    assert answer.choices[0].text == text_of(served, alone(plain, ids, 16))
    assert served.http.get("/status").json()["sampling"] == {"words": "greedy: the model recommends no sampling"}


def test_default_top_k_is_50(served: Running, plain: Any) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1, "temperature": 2, "n": 30, "seed": 1, "logprobs": 0}

    def least(**options: Any) -> float:
        """The least likely of the tokens that were drawn."""
        choices = served.openai().completions.create(model=NAME, **body, extra_body=options).choices
        return min(choice.logprobs.token_logprobs[0] for choice in choices)

    with torch.inference_mode():
        logits = plain(torch.tensor([served.model.tokenizer(PROMPT)["input_ids"]])).logits[0, -1]
    likely = torch.log_softmax(logits, dim=-1).sort(descending=True).values.tolist()
    for options, limit in (({}, 50), ({"top_k": 3}, 3), ({"top_k": 1}, 1)):
        assert least(**options) > likely[limit - 1] - 1e-4
    for top_k in (0, -1):
        assert least(top_k=top_k) < likely[49] - 1e-4


def test_a_penalty_has_two_names_and_a_min_p_of_1_is_greedy(served: Running, plain: Any) -> None:
    def text(**options: Any) -> str:
        client = served.openai()
        return client.completions.create(model=NAME, prompt=PROMPT, max_tokens=16, extra_body=options).choices[0].text

    ids = served.model.tokenizer(PROMPT, return_tensors="pt")
    expected = plain.generate(**ids, max_new_tokens=16, do_sample=False, repetition_penalty=1.8)
    penalised = text_of(served, expected[0, ids["input_ids"].shape[1] :].tolist())
    assert text(repetition_penalty=1.8) == text(repeat_penalty=1.8) == penalised
    assert text() == text(temperature=1.5, min_p=1) == text(temperature=0) != penalised


def test_probabilities_are_those_of_plain_logits(served: Running, plain: Any) -> None:
    ids = chat_ids(served)
    tokens = alone(plain, ids, 6)
    with torch.inference_mode():
        logits = plain(torch.cat([ids, torch.tensor([tokens])], dim=-1)).logits[0, ids.shape[-1] - 1 : -1]
    expected = torch.log_softmax(logits.float(), dim=-1)
    client = served.openai()
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=4
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == len(tokens)
    for entry, row, token in zip(content, expected, tokens, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(4).values.tolist()
        assert [candidate.logprob for candidate in entry.top_logprobs] == pytest.approx(best, abs=1e-4)
    text = b"".join(bytes(entry.bytes or []) for entry in content)
    assert text.decode("utf-8", "replace") == answer.choices[0].message.content

    prompt = ids[0].tolist()
    older = client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=6, logprobs=2)
    logprobs = older.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([entry.logprob for entry in content], abs=1e-5)
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert len(logprobs.text_offset) == 6

    streamed = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, stream=True
    )
    entries = [e for chunk in streamed if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content or []]
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in content], abs=1e-5)


def test_concurrent_requests_equal_single_ones(served: Running, plain: Any) -> None:
    """More than may run; streamed and not, side by side."""
    prompts = [f"{word} the rain {index}" for index, word in enumerate(["in", "and", "on", "one"] * 5)]
    expected = [
        text_of(served, alone(plain, served.model.tokenizer(prompt, return_tensors="pt")["input_ids"], 5 + index % 4))
        for index, prompt in enumerate(prompts)
    ]

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        settings: dict[str, Any] = {"model": NAME, "prompt": prompts[i], "temperature": 0, "max_tokens": 5 + i % 4}
        if i % 2:
            return (await client.completions.create(**settings)).choices[0].text
        return "".join([c.choices[0].text async for c in await client.completions.create(**settings, stream=True)])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(len(prompts))))

    assert asyncio.run(ask_all()) == expected
