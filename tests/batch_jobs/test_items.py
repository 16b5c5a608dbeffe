"""What the object of a line asks for, and what is said of one that asks for nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rabbitllm.batch_jobs.items import (
    BatchCall,
    Choose,
    Defaults,
    Embed,
    Generate,
    LineError,
    Refused,
    ScoreItem,
    key_of,
    parse_task,
    pooling_of,
)
from rabbitllm.errors import OptionError
from rabbitllm.generation.request import Sampling

DEFAULTS = Defaults(max_new_tokens=9, sampling=Sampling(0.5, seed=100), stop=("END",))


def usual(prompt: Any, sampling: Sampling = Sampling(0.5, None, 103), **options: Any) -> Generate:  # noqa: B008
    """What a line asks for that names no limit of tokens."""
    return Generate(prompt, 9, sampling, **{"stop": ("END",), "may_cut": True, **options})


@pytest.mark.parametrize(
    ("value", "task"),
    [
        ({"prompt": "a"}, usual("a")),
        ({"prompt": [4, 5], "max_tokens": 2, "seed": 7}, Generate((4, 5), 2, Sampling(0.5, None, 7), ("END",))),
        ({"tokens": [4, 5], "stop": "x", "n": 2}, usual((4, 5), stop=("x",), n=2)),
        ({"prompt": "a", "stop": ["x", "", "x"], "top_p": 1}, usual("a", Sampling(0.5, 1.0, 103), stop=("x",))),
        ({"prompt": "a", "temperature": 0, "label": object()}, usual("a", Sampling(0.0, None, 103))),
        ({"prompt": "a", "tools": []}, usual("a")),
        (
            {"prompt": "a", "repetition_penalty": 1, "min_p": 0.1, "top_k": 3},
            usual("a", Sampling(0.5, None, 103, 3, 0.1, 1.0)),
        ),
        (
            {
                "prompt": "a",
                "repeat_penalty": 2,
                "top_k": -1,
                "schema": "CREATE TABLE a",
                "logprobs": [-1],
                "echo": False,
            },
            usual("a", Sampling(0.5, None, 103, 0, repetition_penalty=2.0)),
        ),
        ({"prompt": "a", "max_tokens": 0}, Generate("a", 0, Sampling(0.5, None, 103), ("END",))),
        ({"prompt": "a", "max_tokens": -1}, usual("a")),
        (
            {"prompt": "a", "logit_bias": {"7": -2}, "ignore_eos": True, "seed": 1},
            usual("a", Sampling(0.5, seed=1, logit_bias=((7, -2.0),), ignore_eos=True)),
        ),
        ({"prompt": "a", "max_new_tokens": 3, "messages": None}, Generate("a", 3, Sampling(0.5, None, 103), ("END",))),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            usual(({"role": "user", "content": "a"},)),
        ),
        ({"context": "a", "continuation": " b"}, ScoreItem("a", (" b",))),
        ({"context": "a", "continuation": [" b", " c"]}, ScoreItem("a", (" b", " c"), True)),
        ({"continuation": "b"}, ScoreItem("", ("b",))),
        ({"context": "a", "choices": ["b", "c"]}, Choose("a", ("b", "c"))),
        ({"input": "a"}, Embed(("a",))),
        ({"input": [1, 2]}, Embed(((1, 2),))),
        ({"input": ["a", [1]], "pooling": "mean", "normalise": True}, Embed(("a", (1,)), True, "mean", True)),
        (
            {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}},
            BatchCall("/v1/completions", {"prompt": "a"}, DEFAULTS),
        ),
    ],
)
def test_parsed_lines(value: dict[str, Any], task: object) -> None:
    assert parse_task(value, 3, DEFAULTS) == task


def test_a_line_keeps_the_options_that_it_does_not_set() -> None:
    own = Sampling(0.5, seed=100, presence_penalty=1.0, logit_bias=((3, 4.0),), ignore_eos=True)
    task = parse_task({"prompt": "a", "min_p": 0.1}, 3, replace(DEFAULTS, sampling=own))
    assert isinstance(task, Generate)
    assert task.sampling == replace(own, min_p=0.1, seed=103)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"prompt": "a", "max_completion_tokens": 2}, "max_completion_tokens is not supported here; omit it, or write"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias: expected an object"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias: expected ids of tokens as keys, found 'a'"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias: expected biases from -100 to 100, found 101"),
        ({"prompt": "a", "logit_bias": {"1": True}}, "logit_bias: expected biases from -100 to 100, found True"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos: expected true or false, not 1"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty: expected at least 0.01, not 0"),
        ({"prompt": "a", "min_p": 1.2}, "min_p: expected at most 1, not 1.2"),
        ({"prompt": "a", "tools": [{}]}, "tools is not supported here"),
        (
            {"prompt": "a", "structured_outputs": {"regex": "a"}},
            "structured_outputs is not supported here; omit it, or",
        ),
        ({"prompt": "a", "schema": {"type": "object"}}, "schema is not supported here"),
        ({"prompt": "a", "thinking_token_budget": 0}, "thinking_token_budget is not supported here"),
        ({"prompt": "a", "enable_thinking": False}, "enable_thinking is not supported here"),
        ({"prompt": "a", "best_of": 2}, "best_of is not supported here"),
        ({"prompt": "a", "echo": True}, "echo is not supported here"),
        ({"prompt": "a", "logprobs": 3}, "logprobs is not supported here"),
        ({"prompt": "a", "repeat_penalty": 0}, "repeat_penalty: expected at least 0.01, not 0"),
        ({"prompt": "a", "top_k": -2}, "top_k: expected at least -1, not -2"),
        ([], "The line is a list; expected an object"),
        (None, "The line is null; expected an object"),
        ({}, "the line has none of them"),
        ({"prompt": "a", "messages": []}, "the line has prompt and messages"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": 5}, "prompt is a number; expected a text"),
        ({"prompt": ["a"]}, "prompt is a list; expected a text"),
        ({"tokens": [1, -1]}, "tokens is a list; expected a list of token ids"),
        ({"tokens": [True]}, "expected a list of token ids"),
        ({"messages": "a"}, "messages is a text; expected a list"),
        ({"messages": [{"content": "a"}]}, "messages.0 is not a message"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens: expected at least 0, or -1 for no limit"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens: expected a whole number, not 1.5"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens: expected a whole number, not True"),
        ({"prompt": "a", "temperature": -1}, "temperature: expected at least 0, not -1"),
        ({"prompt": "a", "temperature": 9}, "temperature: expected at most 2, not 9"),
        (
            {"prompt": "a", "max_tokens": 1, "max_new_tokens": 2},
            "max_new_tokens is not supported; omit it.",
        ),
        ({"prompt": "a", "max_new_tokens": -2}, "max_new_tokens: expected at least 0"),
        ({"prompt": "a", "max_tokens": 1, "min_tokens": 2}, "min_tokens is 2, and the limit of new tokens 1"),
        ({"prompt": "a", "stop": ["a"] * 65}, "stop has 65 texts; expected at most 64"),
        ({"prompt": "a", "stop": "a" * 1001}, "A text of stop has more than 1,000 characters"),
        ({"prompt": "a", "temperature": "hot"}, 'temperature: expected a number, not "hot"'),
        ({"prompt": "a", "top_p": 0}, "top_p: expected more than 0, not 0"),
        ({"prompt": "a", "seed": 1 << 70}, "seed: expected at most"),
        ({"prompt": "a", "n": 1000}, "n: expected at most 128, not 1000"),
        ({"prompt": "a", "stop": 5}, "stop: expected text or a list, not 5"),
        ({"context": 5, "continuation": "a"}, "context is a number"),
        ({"context": "a", "continuation": ""}, "none of them empty"),
        ({"context": "a", "choices": "b"}, "choices is a text; expected a list of texts"),
        ({"context": "a", "choices": []}, "choices is an empty list; expected a list of texts"),
        ({"input": []}, "input is empty"),
        ({"input": {}}, "input is an object"),
        ({"input": "a", "pooling": "max"}, "pooling is 'max'; expected last or mean"),
        ({"input": "a", "normalise": 1}, "normalise is a number"),
    ],
)
def test_messages_of_invalid_lines(value: object, message: str) -> None:
    refused = parse_task(value, 0, DEFAULTS)
    assert isinstance(refused, Refused)
    assert message in refused.message
    assert not refused.message.endswith("?.")
    assert not refused.as_call


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "GET"}, "method is 'GET'; expected POST"),
        ({"url": "/v1/images"}, "url is '/v1/images'"),
        ({"body": "x"}, "body is a text; expected an object"),
        ({"body": {"stream": True}}, "stream is not supported in batches"),
    ],
)
def test_messages_of_invalid_openai_lines(changed: dict[str, Any], message: str) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}
    refused = parse_task({**line, **changed}, 0, DEFAULTS)
    assert isinstance(refused, Refused)
    assert message in refused.message
    assert refused.as_call


def test_keys() -> None:
    assert key_of({"id": "a", "custom_id": "b"}, 3) == "a"
    assert key_of({"custom_id": 0}, 3) == 0
    assert key_of({"prompt": "x"}, 3) == key_of([], 3) == key_of({"id": None}, 3) == 3
    for wrong in (True, 1.5, "", "x" * 2000, []):
        with pytest.raises(LineError, match="id "):
            key_of({"id": wrong}, 3)


def test_parsed_pooling() -> None:
    assert pooling_of("mean") == "mean"
    with pytest.raises(OptionError, match="'max' does not exist"):
        pooling_of("max")
