"""Ollama's routes with its own client; what the model says is scripted (see `test_interfaces`)."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rabbitllm.server import _ollama
from rabbitllm.server.embeddings import PoolingRecipe
from rabbitllm.version import __version__
from tests.server.serving import NAME, Running, running
from tests.server.test_embeddings import base_model
from tests.server.test_interfaces import LINES, SCHEMA, scripted_split
from tests.support.scripted import scripted_checkpoint
from tests.support.thinking_models import EFFORT, THOUGHT, thinker
from tests.support.tiny_models import split

__all__ = ["scripted_split"]

ollama = pytest.importorskip("ollama")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
GO = [{"role": "user", "content": "<go>"}]


@pytest.fixture(scope="module")
def scripted(scripted_split: Path) -> Iterator[Running]:
    with running(scripted_split, api_key="secret-key") as server:
        yield server


@pytest.fixture(scope="module")
def client(scripted: Running) -> Any:
    return ollama.Client(scripted.address, headers={"authorization": "Bearer secret-key"}, trust_env=False)


def test_a_chat_thinks_and_calls(client: Any) -> None:
    answer = client.chat(NAME, GO, tools=[TOOL], options={"num_predict": 12, "num_ctx": 4096})
    message = answer.message
    assert (message.thinking, message.content) == ("Why? Because.", "I add.")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("add", {"a": 1})]
    assert (answer.model, answer.done, answer.done_reason, answer.eval_count) == (NAME, True, "stop", 10)
    assert answer.prompt_eval_count > 0
    assert answer.total_duration >= answer.eval_duration > 0
    said = client.chat(f"{NAME}:latest", [{"role": "user", "content": "<talk>"}])
    assert said.message.content == "It is three."
    assert client.chat(NAME, GO, think=False).message.content == "It is three."
    assert client.chat(NAME, GO, options={"num_predict": 1}).done_reason == "length"
    cut = client.chat(NAME, GO, tools=[TOOL], options={"num_predict": 7})
    assert (cut.done_reason, cut.message.tool_calls[0].function.arguments) == ("length", {"arguments": '{"a": '})


def test_a_streamed_chat_is_the_same(client: Any) -> None:
    parts = list(client.chat(NAME, GO, tools=[TOOL], stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Why? Because."
    assert "".join(part.message.content or "" for part in parts).rstrip() == "I add."
    calls = [call.function for part in parts for call in part.message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1})]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", 10)


def test_thinking_is_a_switch_or_an_effort(client: Any, tmp_path: Path) -> None:
    with pytest.raises(ollama.ResponseError, match="reasoning_effort is not supported"):
        client.chat(NAME, GO, think="low")
    assert client.chat(NAME, GO, think=True).message.thinking == "Why? Because."
    with running(split(thinker(tmp_path / "effort", EFFORT))) as server:
        asks = ollama.Client(server.address, trust_env=False)
        assert [asks.chat(NAME, GO, think=think).message.thinking for think in ("high", "low")] == [THOUGHT, None]
        assert asks.show(NAME).capabilities == ["completion", "thinking"]
    with running(split(scripted_checkpoint(tmp_path / "talks", LINES[1:2], "{{ messages[-1].content }}"))) as server:
        asks = ollama.Client(server.address, trust_env=False)
        assert asks.show(NAME).capabilities == ["completion"]
        assert asks.generate(NAME, "<talk>", think=False).response == "It is three."
        for think in (True, "low"):
            with pytest.raises(ollama.ResponseError, match="think is not supported: this model does not think"):
                asks.generate(NAME, "<talk>", think=think)


def test_a_limit_that_the_context_cuts_is_said(scripted: Running) -> None:
    body = {"model": NAME, "messages": GO, "options": {"num_predict": 100_000}}
    for stream in (False, True):
        answer = scripted.post("/api/chat", {**body, "stream": stream}).text.splitlines()[-1]
        last = json.loads(answer)
        assert last["num_predict"] == scripted.service.limits.context - last["prompt_eval_count"]
    assert "num_predict" not in scripted.post("/api/chat", {**body, "options": {}, "stream": False}).json()


def test_a_conversation_goes_to_the_template(scripted: Running, client: Any) -> None:
    called: dict[str, Any] = {"role": "assistant", "content": "b", "thinking": "hm", "tool_calls": []}
    called["tool_calls"] = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    conversation = [GO[0], called, {"role": "tool", "tool_name": "add", "content": "2"}]
    answer = client.chat(NAME, conversation, options={"num_predict": 1})
    prompt = 'user:<go>assistant:hmNoneadd{"a": 1}btool:2'
    assert answer.prompt_eval_count == len(scripted.model.tokenizer(prompt, add_special_tokens=False)["input_ids"])


def test_generate(client: Any) -> None:
    whole = client.generate(NAME, "<talk>", logprobs=True, top_logprobs=1)
    assert (whole.response, whole.done_reason) == ("It is three.", "stop")
    assert [entry.token for entry in whole.logprobs] == ["It is ", "three."]
    parts = list(client.generate(NAME, "<go>", stream=True))
    assert "".join(part.thinking or "" for part in parts) == "Why? Because."
    assert parts[-1].done
    assert client.generate(NAME).done_reason == "load"
    assert client.generate(NAME, "<talk>", options={"stop": ["thr"]}).response == "It is "
    assert type(json.loads(client.generate(NAME, "<talk>", format="json", options={"temperature": 1}).response)) is dict
    nothing: Any = {"suffix": "", "system": "", "template": "", "context": [], "raw": False}
    assert client.generate(NAME, "<talk>", **nothing).response == "It is three."
    form = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}, "required": ["a"]}
    assert client.generate(NAME, "<talk>", format={**form, "additionalProperties": False}).response.startswith('{"a"')


def test_models_are_shown(client: Any, scripted: Running) -> None:
    (listed,) = client.list().models
    assert (listed.model, listed.details.family) == (NAME, "llama")
    shown = client.show(NAME)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["llama.context_length"] == scripted.service.limits.context
    assert shown.template == scripted.service.template.sources[0]
    with scripted.http as http:
        assert http.get("/api/version").json() == {"version": __version__}


def test_a_request_says_how_long_the_model_stays(
    client: Any, scripted: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kept, seconds in (("1h30m", 5400), (600, 600), ("250ms", 0.25), (-1, math.inf), ("-1m", math.inf)):
        client.generate(NAME, "<talk>", keep_alive=kept)
        assert scripted.models.entries[0].keep_alive == seconds
    (running,) = client.ps().models
    assert (running.model, running.details.family) == (NAME, "llama")
    assert running.expires_at.year > 2300
    assert running.size == sum(scripted.model.placement.bytes_on(name) for name in scripted.model.placement.limits)
    assert running.context_length == scripted.service.limits.context
    client.chat(NAME, GO, keep_alive="10h")
    monkeypatch.setattr(_ollama, "time", SimpleNamespace(**{**vars(time), "time": lambda: 1_800_000_000.0}))
    assert 0 < client.ps().models[0].expires_at.timestamp() - 1_800_000_000 <= 36_000
    for wrong in ("soon", "5 minutes", "", "5x"):
        with pytest.raises(ollama.ResponseError, match="expected seconds"):
            client.generate(NAME, keep_alive=wrong)


def test_embeddings(tmp_path: Path) -> None:
    folder = split(base_model(tmp_path / "qwen3", tied=False))
    with running(folder, recipe=PoolingRecipe("mean", False)) as server:
        asks = ollama.Client(server.address, trust_env=False)
        texts = ["a rabbit", "another one"]
        answer = asks.embed(NAME, texts, truncate=True, options={"num_ctx": 64})
        with server.http as http:
            data = http.post("/v1/embeddings", json={"input": texts}).json()
        for unit, entry in zip(answer.embeddings, data["data"], strict=True):
            vector = torch.tensor(entry["embedding"])
            assert torch.allclose(torch.tensor(unit), vector / vector.norm(), atol=1e-6)
        assert answer.prompt_eval_count == data["usage"]["prompt_tokens"]
        assert asks.embeddings(NAME, texts[0]).embedding == answer.embeddings[0]
        (short,) = asks.embed(NAME, texts[0], dimensions=8).embeddings
        assert len(short) == 8
        assert math.hypot(*short) == pytest.approx(1)
        assert asks.ps().models[0].model == NAME
        with pytest.raises(ollama.ResponseError, match="temperature is not supported"):
            asks.embed(NAME, "a", options={"temperature": 1})


def test_refusals_are_texts(client: Any) -> None:
    for ask, status, problem in (
        (lambda: client.chat("fox", GO), 404, "'fox' does not exist"),
        (lambda: client.show("fox"), 404, "'fox' does not exist"),
        (lambda: client.generate(NAME, "a", raw=True), 400, "raw is not supported"),
        (lambda: client.generate(NAME, "a", options={"mirostat": 2}), 400, "mirostat is not supported"),
        (lambda: client.generate(NAME, "a", options={"n": 2}), 400, "n is not supported"),
        (lambda: client.chat(NAME, GO, options={"stream_options": {"include_usage": True}}), 400, "stream_options is"),
        (
            lambda: client.chat(NAME, [{"role": "user", "content": "a", "images": [io.BytesIO(b"x").getvalue()]}]),
            400,
            "picture",
        ),
    ):
        with pytest.raises(ollama.ResponseError, match=problem) as refused:
            ask()
        assert refused.value.status_code == status
