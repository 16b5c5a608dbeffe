"""Lines answered by one model: each as plain transformers answers it alone, and never more ahead than a few; the
numbers of likelihoods are computed here once more."""

from __future__ import annotations

import json
import logging
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


def alone(plain: Any, tokenizer: Any, prompt: tuple[int, ...], most: int) -> str:
    given = torch.tensor([prompt])
    made = plain.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=most, do_sample=False)
    said: str = tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True)
    return said


def test_every_line_gets_the_text_that_it_gets_alone(model: Any, plain: Any) -> None:
    prompts = {number: ids(4 + 9 * (number % 5), number) for number in range(12)}
    items = [Item(n, f"k{n}", Generate(prompt, 3 + n)) for n, prompt in prompts.items()]
    found = {one.index: one for one in answers(model, items)}
    assert sorted(found) == sorted(prompts)
    for n, prompt in prompts.items():
        line = found[n].line
        assert (line["id"], line["text"]) == (f"k{n}", alone(plain, model.tokenizer, prompt, 3 + n))
        assert line["prompt_tokens"] == len(prompt)
        assert line["finish"] == "stop" or line["new_tokens"] == 3 + n


def test_texts_messages_and_several_answers(model: Any, plain: Any) -> None:
    said = ({"role": "user", "content": "the rabbit"},)
    items = [
        Item(0, 0, Generate("the hare", 6)),
        Item(1, 1, Generate(said, 6)),
        Item(2, 2, Generate("the hare", 6, Sampling(1.0, seed=5), n=3)),
        Item(3, 3, Generate("the hare", 6, Sampling(1.0, seed=6))),
    ]
    found = {one.index: one.line for one in answers(model, items)}
    tokenizer = model.tokenizer
    assert found[0]["text"] == alone(plain, tokenizer, tuple(tokenizer("the hare")["input_ids"]), 6)
    chat = tokenizer("user: the rabbit\nassistant:", add_special_tokens=False)["input_ids"]
    assert found[1]["text"] == alone(plain, tokenizer, tuple(chat), 6)
    several = found[2]["answers"]
    assert len(several) == 3
    assert several[1]["text"] == found[3]["text"]  # its seed is that of the line and its number
    assert found[2]["new_tokens"] == sum(one["new_tokens"] for one in several)


def test_what_cannot_be_answered_is_an_error_in_place_and_touches_nothing_else(model: Any, plain: Any) -> None:
    items = [
        Item(0, 0, Generate(ids(300, 0), 5)),
        Item(1, 1, Generate((VOCABULARY_SIZE + 5,), 5)),
        Item(2, 2, Refused("Line 3 is bad.", "invalid_line")),
        Item(3, 3, Refused("url is bad.", "invalid_line", as_call=True)),
        Item(4, 4, Generate(ids(9, 4), 5)),
        Item(5, 5, Generate(ids(250, 5), 50)),
    ]
    found = {one.index: one for one in answers(model, items)}
    assert "the model's context has 256" in found[0].line["error"]["message"]
    assert found[0].line["error"]["code"] == "context_length_exceeded"
    assert "the model's vocabulary has" in found[1].line["error"]["message"]
    assert found[2].line == {"id": 2, "error": {"code": "invalid_line", "message": "Line 3 is bad."}}
    assert found[3].line["response"] is None
    assert found[3].line["error"]["message"] == "url is bad."
    assert [one.is_error for _, one in sorted(found.items())] == [True, True, True, True, False, False]
    assert found[4].line["text"] == alone(plain, model.tokenizer, ids(9, 4), 5)
    assert found[5].new_tokens == 6 or found[5].line["finish"] == "stop"  # what the context leaves


def test_lines_are_taken_as_there_is_room(model: Any) -> None:
    taken = over = most = 0

    def items() -> Iterator[Item]:
        nonlocal taken
        for n in range(60):
            taken += 1
            yield Item(n, n, Generate(ids(5, n), 2 + n % 3))

    for group in answered(model, "m", items(), LIMITS):
        most = max(most, taken - over)
        over += len(group)
    assert over == 60
    assert most <= 2 * LIMITS.sequences + 2


def test_the_first_pass_is_for_as_many_as_there_may_be(model: Any) -> None:
    stats: list[Any] = []
    items = iter([Item(n, n, Generate(ids(20, n), 4)) for n in range(4)])
    for _ in answered(model, "m", items, LIMITS, stats.append):
        pass
    found = stats[0]()
    assert found.new_tokens <= 16
    assert found.passes <= 5  # of the prompts, and one for each token after the first


def test_a_pass_without_enough_memory_is_made_again_with_half_the_lines(
    model: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line that does not fit alone is an error in place; all others are answered."""
    most, refused = 90, list[int]()  # rows of a pass that memory is enough for
    mlp = type(model.model.layers[0].mlp)
    ordinary = mlp.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[:-1].numel() > most:
            refused.append(x.shape[:-1].numel())
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return ordinary(self, x)

    monkeypatch.setattr(mlp, "forward", forward)
    prompts = {n: ids(20, n) for n in range(8)}
    items = [Item(n, n, Generate(prompt, 4)) for n, prompt in prompts.items()]
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        found = {one.index: one for one in answers(model, items, JobLimits(sequences=8))}
        assert [record.getMessage() for record in caplog.records] == [
            "A pass with 8 sequences ran out of memory; the limit is now 4."
        ]
    assert refused == [8 * 20]
    refused.clear()
    items = [*items[:4], Item(9, 9, Generate(ids(120, 9), 4)), *items[4:]]
    with_a_long_one = {one.index: one for one in answers(model, items, JobLimits(sequences=8))}
    assert with_a_long_one[9].is_error
    assert refused[-1] == 120
    for n, prompt in prompts.items():
        assert found[n].line["text"] == alone(plain, model.tokenizer, prompt, 4)
        assert with_a_long_one[n].line["text"] == found[n].line["text"]


@pytest.mark.skipif(default_folder() is None, reason="temporary files lie in memory here")
def test_lines_for_which_memory_has_no_room_share_the_pass_all_the_same(model: Any, plain: Any) -> None:
    stats: list[Any] = []
    limits = JobLimits(sequences=8, cache_bytes=model.placement.streamed_bytes // 2)
    prompts = [ids(150 + n, n) for n in range(8)]
    items = iter([Item(n, n, Generate(prompt, 6)) for n, prompt in enumerate(prompts)])
    found = {one.index: one.line for group in answered(model, "m", items, limits, stats.append) for one in group}
    for n, prompt in enumerate(prompts):
        assert found[n]["text"] == alone(plain, model.tokenizer, prompt, 6)
    told = stats[0]()
    assert told.file_read_bytes > 0
    assert told.preempted == 0
    assert told.passes < 2 * 6


def test_answers_in_openais_form(model: Any, plain: Any) -> None:
    pytest.importorskip("pydantic", reason="needs pydantic")
    chat = {"model": "x", "messages": [{"role": "user", "content": "the rabbit"}], "max_tokens": 5, "temperature": 0}
    defaults = Defaults(max_new_tokens=4)
    items = [
        Item(0, "a", BatchCall("/v1/chat/completions", chat)),
        Item(1, "b", BatchCall("/v1/completions", {"prompt": [[8, 9, 10], [5, 6, 7]], "logprobs": 1}, defaults)),
        Item(2, "c", BatchCall("/v1/completions", {"prompt": "x", "max_tokens": "many"})),
        Item(3, "d", BatchCall("/v1/chat/completions", {**chat, "n": 2, "temperature": 1, "seed": 3})),
    ]
    found = {one.key: one for one in answers(model, items, name="name")}
    json.dumps([one.line for one in found.values()])
    body = found["a"].line["response"]["body"]
    ids_of_chat = tuple(model.tokenizer("user: the rabbit\nassistant:", add_special_tokens=False)["input_ids"])
    assert body["choices"][0]["message"]["content"] == alone(plain, model.tokenizer, ids_of_chat, 5)
    assert (body["object"], body["model"], found["a"].line["error"]) == ("chat.completion", "name", None)
    completion = found["b"].line["response"]["body"]
    assert completion["choices"][1]["text"] == alone(plain, model.tokenizer, (5, 6, 7), 4)
    assert len(completion["choices"][0]["logprobs"]["tokens"]) <= 4
    assert found["b"].new_tokens == completion["usage"]["completion_tokens"]
    assert found["c"].line["response"]["status_code"] == 400
    assert "max_tokens" in found["c"].line["response"]["body"]["error"]["message"]
    assert found["c"].is_error
    assert len(found["d"].line["response"]["body"]["choices"]) == 2
    for key, one in found.items():
        assert one.line["custom_id"] == key
        assert one.line["id"].startswith("batch_req_")


def test_weights_that_cannot_be_read_end_all_and_answer_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch, plain: Any
) -> None:
    items = [Item(n, n, Generate(ids(5, n), 4)) for n in range(6)]
    layer = model.model.layers[1]

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", broken)
        with pytest.raises(OSError, match="Input/output error"):
            answers(model, items)
    found = {one.index: one.line for one in answers(model, items)}  # the model is as it was
    assert found[3]["text"] == alone(plain, model.tokenizer, ids(5, 3), 4)


CLOSE = 1e-4


def logprobs(plain: Any, context: list[int], behind: list[int]) -> tuple[float, bool]:
    """Sum of the logarithms, and whether each token is the likeliest."""
    with torch.no_grad():
        logits = plain(torch.tensor([context + behind])).logits[0].float()
    said = torch.log_softmax(logits[len(context) - 1 : -1], -1)
    chosen = said.gather(1, torch.tensor(behind)[:, None])
    return float(chosen.sum()), said.argmax(-1).tolist() == behind


def parted(tokenizer: Any, context: str, behind: str) -> tuple[list[int], list[int]]:
    before = tokenizer(context)["input_ids"]
    return before, tokenizer(context + behind)["input_ids"][len(before) :]


def line(model: Any, *items: Item) -> list[Any]:
    return [one.line for one in sorted(answers(model, items, JobLimits()), key=lambda one: one.index)]


def test_continuations_by_themselves_and_in_lists(model: Any, plain: Any) -> None:
    first, second = line(
        model,
        Item(0, "a", ScoreItem("the rabbit", (" and the hare",))),
        Item(1, "b", ScoreItem("the rabbit ", ("and", "or", "ing"), True)),
    )
    before, behind = parted(model.tokenizer, "the rabbit", " and the hare")
    total, greedy = logprobs(plain, before, behind)
    assert (first["id"], first["tokens"], first["greedy"]) == ("a", len(behind), greedy)
    assert first["logprob"] == pytest.approx(total, abs=CLOSE)
    assert len(second["scores"]) == 3
    for word, found in zip(("and", "or", "ing"), second["scores"], strict=True):
        pair = parted(model.tokenizer, "the rabbit", " " + word)  # the space is the continuation's
        assert found["logprob"] == pytest.approx(logprobs(plain, *pair)[0], abs=CLOSE)


def test_without_a_context_the_first_token_stands_before_it(model: Any, plain: Any) -> None:
    (found,) = line(model, Item(0, 0, ScoreItem("", ("the hare",))))
    behind = model.tokenizer("the hare", add_special_tokens=False)["input_ids"]
    assert found["logprob"] == pytest.approx(logprobs(plain, [model.tokenizer.bos_token_id], behind)[0], abs=CLOSE)


def test_choices_by_their_likelihood_and_by_that_and_their_length(model: Any, plain: Any) -> None:
    choices = (" in", " the rabbit and the hare in the hole", " or")
    (found,) = line(model, Item(0, 0, Choose("the rabbit", choices)))
    said = [logprobs(plain, *parted(model.tokenizer, "the rabbit", one))[0] for one in choices]
    assert found["logprobs"] == pytest.approx(said, abs=CLOSE)
    assert found["choice"] == said.index(max(said))
    by_length = [value / len(text) for value, text in zip(said, choices, strict=True)]
    assert found["choice_by_length"] == by_length.index(max(by_length)) != found["choice"]


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
    wanted = torch.nn.functional.normalize(states.mean(0), dim=0)
    assert mean["embedding"] == pytest.approx(wanted.tolist(), abs=CLOSE)
    assert several["embeddings"][0] == pytest.approx(last["embedding"], abs=CLOSE)
    assert len(several["embeddings"]) == 2


def test_embeddings_in_openais_form(model: Any) -> None:
    pytest.importorskip("pydantic", reason="needs pydantic")
    found, refused, plain_one = line(
        model,
        Item(
            0,
            "a",
            BatchCall("/v1/embeddings", {"input": ["the rabbit", "x"], "dimensions": 8}, Defaults(normalise=True)),
        ),
        Item(1, "b", BatchCall("/v1/embeddings", {"input": "x", "dimensions": 10**6})),
        Item(2, "c", Embed(("the rabbit",), normalise=True)),
    )
    body = found["response"]["body"]
    assert [len(one["embedding"]) for one in body["data"]] == [8, 8]
    whole = torch.tensor(plain_one["embedding"])
    cut = torch.nn.functional.normalize(whole[:8], dim=0)
    assert body["data"][0]["embedding"] == pytest.approx(cut.tolist(), abs=CLOSE)
    assert "dimensions is 1,000,000" in refused["response"]["body"]["error"]["message"]


def test_what_cannot_be_scored_is_an_error_in_place(model: Any) -> None:
    long = " the rabbit" * 200
    found = line(
        model,
        Item(0, 0, ScoreItem("the", (long,))),
        Item(1, 1, ScoreItem("the", (" hare",))),
        Item(2, 2, Embed(((10**6,),))),
        Item(3, 3, Choose("the", (" hare", long))),
    )
    assert ["error" in one for one in found] == [True, False, True, True]
    assert "context" in found[0]["error"]["message"]
