"""Lines that ask how likely texts are: the numbers are those of plain transformers, computed here once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rabbitllm.batch_jobs.answers import answers
from rabbitllm.batch_jobs.items import BatchCall, Choose, Defaults, Embed, Item, JobLimits, ScoreItem

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
