"""Lines answered by one model: each as plain transformers answers it alone, and never more ahead than a few; the
numbers of likelihoods are computed here once more."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rabbitllm.batch_jobs.answers import answered
from rabbitllm.batch_jobs.items import BatchCall, Choose, Defaults, Embed, Generate, Item, JobLimits, Refused, ScoreItem
from rabbitllm.generation.request import Sampling
from rabbitllm.generation.swap import default_folder
from tests.batch_jobs.answering import LIMITS, answers
from tests.support.builders import VOCABULARY_SIZE


def ids(length: int, seed: int) -> tuple[int, ...]:
    drawn = torch.randint(3, VOCABULARY_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def alone(plain: Any, tokenizer: Any, prompt: tuple[int, ...], count: int) -> str:
    inputs = torch.tensor([prompt])
    tokens = plain.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False)
    text: str = tokenizer.decode(tokens[0, len(prompt) :], skip_special_tokens=True)
    return text


def test_texts_equal_those_of_single_prompts(model: Any, plain: Any) -> None:
    prompts = {n: ids(4 + 9 * (n % 5), n) for n in range(12)}
    items = [Item(n, f"k{n}", Generate(prompt, 3 + n)) for n, prompt in prompts.items()]
    by_index = {answer.index: answer for answer in answers(model, items)}
    assert sorted(by_index) == sorted(prompts)
    for n, prompt in prompts.items():
        line = by_index[n].line
        assert (line["id"], line["text"]) == (f"k{n}", alone(plain, model.tokenizer, prompt, 3 + n))
        assert line["prompt_tokens"] == len(prompt)
        assert line["finish"] == "stop" or line["new_tokens"] == 3 + n


def test_texts_messages_and_n_answers(model: Any, plain: Any) -> None:
    messages = ({"role": "user", "content": "the rabbit"},)
    items = [
        Item(0, 0, Generate("the hare", 6)),
        Item(1, 1, Generate(messages, 6)),
        Item(2, 2, Generate("the hare", 6, Sampling(1.0, seed=5), n=3)),
        Item(3, 3, Generate("the hare", 6, Sampling(1.0, seed=6))),
    ]
    lines = {answer.index: answer.line for answer in answers(model, items)}
    tokenizer = model.tokenizer
    assert lines[0]["text"] == alone(plain, tokenizer, tuple(tokenizer("the hare")["input_ids"]), 6)
    chat = tokenizer("user: the rabbit\nassistant:", add_special_tokens=False)["input_ids"]
    assert lines[1]["text"] == alone(plain, tokenizer, tuple(chat), 6)
    several = lines[2]["answers"]
    assert len(several) == 3
    assert several[1]["text"] == lines[3]["text"]  # its seed is that of the line and its number
    assert lines[2]["new_tokens"] == sum(text["new_tokens"] for text in several)


def test_invalid_prompts_are_errors_in_place(model: Any, plain: Any) -> None:
    items = [
        Item(0, 0, Generate(ids(300, 0), 5)),
        Item(1, 1, Generate((VOCABULARY_SIZE + 5,), 5)),
        Item(2, 2, Refused("Line 3 is bad.", "invalid_line")),
        Item(3, 3, Refused("url is bad.", "invalid_line", as_call=True)),
        Item(4, 4, Generate(ids(9, 4), 5)),
        Item(5, 5, Generate(ids(250, 5), 50, may_cut=True)),
        Item(6, 6, Generate(ids(250, 6), 50)),
        Item(7, 7, Generate(ids(9, 4), 0)),
    ]
    by_index = {answer.index: answer for answer in answers(model, items)}
    assert "the model's context has 256" in by_index[0].line["error"]["message"]
    assert by_index[0].line["error"]["code"] == "context_length_exceeded"
    assert "the model's vocabulary has" in by_index[1].line["error"]["message"]
    assert by_index[2].line == {"id": 2, "error": {"code": "invalid_line", "message": "Line 3 is bad."}}
    assert by_index[3].line["response"] is None
    assert by_index[3].line["error"]["message"] == "url is bad."
    assert [answer.is_error for _, answer in sorted(by_index.items())] == [*[True] * 4, False, False, True, False]
    assert by_index[4].line["text"] == alone(plain, model.tokenizer, ids(9, 4), 5)
    assert by_index[5].new_tokens == 6 or by_index[5].line["finish"] == "stop"  # what the context leaves
    assert (
        "250 tokens and 50 new tokens were requested; the model's context has 256"
        in by_index[6].line["error"]["message"]
    )
    assert by_index[7].line == {"id": 7, "text": "", "finish": "length", "prompt_tokens": 9, "new_tokens": 0}


def test_open_items_are_limited(model: Any) -> None:
    started = ended = max_open = 0

    def items() -> Iterator[Item]:
        nonlocal started
        for n in range(60):
            started += 1
            yield Item(n, n, Generate(ids(5, n), 2 + n % 3))

    for group in answered(model, "m", items(), LIMITS):
        max_open = max(max_open, started - ended)
        ended += len(group)
    assert ended == 60
    assert max_open <= 2 * LIMITS.sequences + 2


def test_first_pass_is_full(model: Any) -> None:
    stats: list[Any] = []
    items = iter([Item(n, n, Generate(ids(20, n), 4)) for n in range(4)])
    for _ in answered(model, "m", items, LIMITS, stats.append):
        pass
    last_stats = stats[0]()
    assert last_stats.new_tokens <= 16
    assert last_stats.passes <= 5  # of the prompts, and one for each token after the first


def test_out_of_memory_halves_the_pass(
    model: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line that does not fit alone is an error in place; all others are answered."""
    max_rows, refused = 90, list[int]()  # rows of a pass that memory is enough for
    mlp = type(model.model.layers[0].mlp)
    ordinary = mlp.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[:-1].numel() > max_rows:
            refused.append(x.shape[:-1].numel())
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return ordinary(self, x)

    monkeypatch.setattr(mlp, "forward", forward)
    prompts = {n: ids(20, n) for n in range(8)}
    items = [Item(n, n, Generate(prompt, 4)) for n, prompt in prompts.items()]
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        by_index = {answer.index: answer for answer in answers(model, items, JobLimits(sequences=8))}
        assert [record.getMessage() for record in caplog.records] == [
            "A pass with 8 sequences ran out of memory; the limit is now 4."
        ]
    assert refused == [8 * 20]
    refused.clear()
    items = [*items[:4], Item(9, 9, Generate(ids(120, 9), 4)), *items[4:]]
    with_a_long_one = {answer.index: answer for answer in answers(model, items, JobLimits(sequences=8))}
    assert with_a_long_one[9].is_error
    assert refused[-1] == 120
    for n, prompt in prompts.items():
        assert by_index[n].line["text"] == alone(plain, model.tokenizer, prompt, 4)
        assert with_a_long_one[n].line["text"] == by_index[n].line["text"]


@pytest.mark.skipif(default_folder() is None, reason="temporary files lie in memory here")
def test_swapped_lines_share_the_pass(model: Any, plain: Any) -> None:
    stats: list[Any] = []
    limits = JobLimits(sequences=8, cache_bytes=model.placement.streamed_bytes // 2)
    prompts = [ids(150 + n, n) for n in range(8)]
    items = iter([Item(n, n, Generate(prompt, 6)) for n, prompt in enumerate(prompts)])
    lines = {a.index: a.line for group in answered(model, "m", items, limits, stats.append) for a in group}
    for n, prompt in enumerate(prompts):
        assert lines[n]["text"] == alone(plain, model.tokenizer, prompt, 6)
    last_stats = stats[0]()
    assert last_stats.file_read_bytes > 0
    assert last_stats.preempted == 0
    assert last_stats.passes < 2 * 6


def test_answers_in_openais_form(model: Any, plain: Any) -> None:
    chat = {"model": "x", "messages": [{"role": "user", "content": "the rabbit"}], "max_tokens": 5, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["hare", 7]}}}
    defaults = Defaults(max_new_tokens=4)
    items = [
        Item(0, "a", BatchCall("/v1/chat/completions", chat)),
        Item(1, "b", BatchCall("/v1/completions", {"prompt": [[8, 9, 10], [5, 6, 7]], "logprobs": 1}, defaults)),
        Item(2, "c", BatchCall("/v1/completions", {"prompt": "x", "max_tokens": "many"})),
        Item(3, "d", BatchCall("/v1/chat/completions", {**chat, "n": 2, "temperature": 1, "seed": 3})),
        Item(4, "e", BatchCall("/v1/chat/completions", {**chat, "max_tokens": 40, "response_format": form})),
    ]
    by_key = {answer.key: answer for answer in answers(model, items, name="name")}
    json.dumps([answer.line for answer in by_key.values()])
    body = by_key["a"].line["response"]["body"]
    ids_of_chat = tuple(model.tokenizer("user: the rabbit\nassistant:", add_special_tokens=False)["input_ids"])
    assert body["choices"][0]["message"]["content"] == alone(plain, model.tokenizer, ids_of_chat, 5)
    assert (body["object"], body["model"], by_key["a"].line["error"]) == ("chat.completion", "name", None)
    completion = by_key["b"].line["response"]["body"]
    assert completion["choices"][1]["text"] == alone(plain, model.tokenizer, (5, 6, 7), 4)
    assert len(completion["choices"][0]["logprobs"]["tokens"]) <= 4
    assert by_key["b"].new_tokens == completion["usage"]["completion_tokens"]
    assert by_key["c"].line["response"]["status_code"] == 400
    assert "max_tokens" in by_key["c"].line["response"]["body"]["error"]["message"]
    assert by_key["c"].is_error
    assert len(by_key["d"].line["response"]["body"]["choices"]) == 2
    assert by_key["e"].line["response"]["body"]["choices"][0]["message"]["content"] in ('"hare"', "7")
    for key, answer in by_key.items():
        assert answer.line["custom_id"] == key
        assert answer.line["id"].startswith("batch_req_")


def test_unreadable_weights_end_the_run(model: Any, monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    items = [Item(n, n, Generate(ids(5, n), 4)) for n in range(6)]
    layer = model.model.layers[1]

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", broken)
        with pytest.raises(OSError, match="Input/output error"):
            answers(model, items)
    lines = {answer.index: answer.line for answer in answers(model, items)}  # the model is as it was
    assert lines[3]["text"] == alone(plain, model.tokenizer, ids(5, 3), 4)


CLOSE = 1e-4


def logprobs(plain: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Sum of the logarithms, and whether each token is the likeliest."""
    with torch.no_grad():
        logits = plain(torch.tensor([context + continuation])).logits[0].float()
    log_softmax = torch.log_softmax(logits[len(context) - 1 : -1], -1)
    chosen = log_softmax.gather(1, torch.tensor(continuation)[:, None])
    return float(chosen.sum()), log_softmax.argmax(-1).tolist() == continuation


def parted(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    context_ids = tokenizer(context)["input_ids"]
    return context_ids, tokenizer(context + continuation)["input_ids"][len(context_ids) :]


def line(model: Any, *items: Item) -> list[Any]:
    return [answer.line for answer in sorted(answers(model, items, JobLimits()), key=lambda answer: answer.index)]


def test_scores_of_single_and_listed_continuations(model: Any, plain: Any) -> None:
    first, second = line(
        model,
        Item(0, "a", ScoreItem("the rabbit", (" and the hare",))),
        Item(1, "b", ScoreItem("the rabbit ", ("and", "or", "ing"), True)),
    )
    context_ids, continuation = parted(model.tokenizer, "the rabbit", " and the hare")
    total, greedy = logprobs(plain, context_ids, continuation)
    assert (first["id"], first["tokens"], first["greedy"]) == ("a", len(continuation), greedy)
    assert first["logprob"] == pytest.approx(total, abs=CLOSE)
    assert len(second["scores"]) == 3
    for word, score in zip(("and", "or", "ing"), second["scores"], strict=True):
        pair = parted(model.tokenizer, "the rabbit", " " + word)  # the space is the continuation's
        assert score["logprob"] == pytest.approx(logprobs(plain, *pair)[0], abs=CLOSE)


def test_empty_context_becomes_the_first_token(model: Any, plain: Any) -> None:
    (score,) = line(model, Item(0, 0, ScoreItem("", ("the hare",))))
    text = model.tokenizer("the hare", add_special_tokens=False)["input_ids"]
    assert score["logprob"] == pytest.approx(logprobs(plain, [model.tokenizer.bos_token_id], text)[0], abs=CLOSE)


def test_choices_by_likelihood_and_by_length(model: Any, plain: Any) -> None:
    choices = (" in", " the rabbit and the hare in the hole", " or")
    (result,) = line(model, Item(0, 0, Choose("the rabbit", choices)))
    scores = [logprobs(plain, *parted(model.tokenizer, "the rabbit", choice))[0] for choice in choices]
    assert result["logprobs"] == pytest.approx(scores, abs=CLOSE)
    assert result["choice"] == scores.index(max(scores))
    by_length = [value / len(text) for value, text in zip(scores, choices, strict=True)]
    assert result["choice_by_length"] == by_length.index(max(by_length)) != result["choice"]


def test_embeddings(model: Any, plain: Any) -> None:
    ids = tuple(model.tokenizer("the rabbit")["input_ids"])
    last, mean, several = line(
        model,
        Item(0, 0, Embed(("the rabbit",))),
        Item(1, 1, Embed((ids,), pooling="mean", normalise=True)),
        Item(2, 2, Embed(("the rabbit", "the hare"), True)),
    )
    with torch.no_grad():
        states = plain.model(torch.tensor([ids])).last_hidden_state[0].float()
    assert last["embedding"] == pytest.approx(states[-1].tolist(), abs=CLOSE)
    expected = torch.nn.functional.normalize(states.mean(0), dim=0)
    assert mean["embedding"] == pytest.approx(expected.tolist(), abs=CLOSE)
    assert several["embeddings"][0] == pytest.approx(last["embedding"], abs=CLOSE)
    assert len(several["embeddings"]) == 2


def test_embeddings_in_openais_form(model: Any) -> None:
    listed, refused, plain_one = line(
        model,
        Item(
            0,
            "a",
            BatchCall("/v1/embeddings", {"input": ["the rabbit", "x"], "dimensions": 8}, Defaults(normalise=True)),
        ),
        Item(1, "b", BatchCall("/v1/embeddings", {"input": "x", "dimensions": 10**6})),
        Item(2, "c", Embed(("the rabbit",), normalise=True)),
    )
    body = listed["response"]["body"]
    assert [len(entry["embedding"]) for entry in body["data"]] == [8, 8]
    vector = torch.tensor(plain_one["embedding"])
    cut = torch.nn.functional.normalize(vector[:8], dim=0)
    assert body["data"][0]["embedding"] == pytest.approx(cut.tolist(), abs=CLOSE)
    assert "dimensions is 1,000,000" in refused["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_texts_whose_values_are_no_numbers_fail_alone(model: Any, number: float) -> None:
    (odd,) = model.tokenizer("rabbit", add_special_tokens=False)["input_ids"][:1]
    both = "the rabbit", "the hare"
    tasks = [
        *(Embed((text,), pooling=pooling) for text in both for pooling in ("last", "mean")),
        *(ScoreItem(text, (" and",)) for text in both),
        *(Choose("the", (word, " or")) for word in (" rabbit", " hare")),
        *(BatchCall("/v1/embeddings", {"input": [text, "x"]}) for text in both),
    ]
    items = [Item(index, index, task) for index, task in enumerate(tasks)]
    expected = line(model, *items)

    def overflow(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((inputs[0] == odd)[..., None], number)

    hook = model.get_input_embeddings().register_forward_hook(overflow)
    try:
        lines = line(model, *items)
    finally:
        hook.remove()
    failed = [0, 1, 4, 6, 8]
    for index in set(range(8)).difference(failed):
        assert lines[index].keys() == expected[index].keys()
    for index in failed[:-1]:
        assert lines[index]["error"]["code"] == "not_a_number"
        assert "contain inf or nan" in lines[index]["error"]["message"]
    assert [lines[index]["response"]["status_code"] for index in (8, 9)] == [500, 200]


def test_a_continuation_of_probability_0_fails_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    never = parted(model.tokenizer, "the", " hare")[1][-1]
    assert never not in parted(model.tokenizer, "the", " rabbit")[1]
    head = model.get_output_embeddings()
    ordinary = head.forward
    monkeypatch.setattr(head, "forward", lambda x: ordinary(x).index_fill(-1, torch.tensor([never]), -math.inf))
    lines = line(model, *(Item(n, n, ScoreItem("the", (word,))) for n, word in enumerate((" hare", " rabbit"))))
    assert lines[0]["error"]["code"] == "not_a_number"
    assert math.isfinite(lines[1]["logprob"])


def test_invalid_scores_are_errors_in_place(model: Any) -> None:
    long = " the rabbit" * 200
    lines = line(
        model,
        Item(0, 0, ScoreItem("the", (long,))),
        Item(1, 1, ScoreItem("the", (" hare",))),
        Item(2, 2, Embed(((10**6,),))),
        Item(3, 3, Choose("the", (" hare", long))),
    )
    assert ["error" in answer_line for answer_line in lines] == [True, False, True, True]
    assert "context" in lines[0]["error"]["message"]
