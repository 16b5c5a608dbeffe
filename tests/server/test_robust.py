"""What the server holds out: bodies of all kinds, clients that go, wait, stall or speak no HTTP, and its own end."""

from __future__ import annotations

import json
import math
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from rabbitllm.base.forks import DaemonThread
from rabbitllm.generation.request import Limits
from rabbitllm.server._app import routes
from rabbitllm.server.api_error import APIError
from rabbitllm.server.embeddings import checked_embedding
from rabbitllm.server.requests import checked_completion
from rabbitllm.server.schemas import ChatBody, CompletionBody, Embedding
from rabbitllm.server.server import Connection
from tests.server.serving import LIMITS, NAME, PATIENCE, Running, running, until
from tests.support.builders import build_checkpoint
from tests.support.call_counts import counted_calls
from tests.support.draws import draws
from tests.support.tiny_models import split

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"prompt": "the rain", "max_tokens": 200, "temperature": 0}


def refused(answer: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> str:
    """The message of a refusal in OpenAI's form, which tells nothing of this machine."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code if code else error["code"], param if param else error["param"])
    harmless(answer.text)
    return str(error["message"])


def harmless(text: str) -> None:
    assert "Traceback" not in text
    assert str(Path(__file__).parents[2]) not in text
    assert "/tmp" not in text
    assert ".py" not in text


def posted(path: str, body: Any) -> bytes:
    """A request as it goes over the wire."""
    raw = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(raw), raw)


def metrics(served: Running) -> str:
    with served.http as client:
        return client.get("/metrics").text


def idle(served: Running) -> None:
    """Nothing runs or waits any more."""
    until(lambda: served.batch.stats.running + served.batch.stats.waiting == 0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        (CHAT, {"messages": HELLO, "temperature": 3}, "temperature"),
        (CHAT, {"messages": HELLO, "min_p": 1.1}, "min_p"),
        (CHAT, {"messages": HELLO, "repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {"messages": HELLO, "repeat_penalty": 0}, "repeat_penalty"),
        (CHAT, {"messages": HELLO, "temperature": 1, "repetition_penalty": 1e-308}, "repetition_penalty"),
        (CHAT, {"messages": HELLO, "temperature": "1"}, "temperature"),
        (CHAT, {"messages": HELLO, "n": 129}, "n"),
        (CHAT, {"messages": HELLO, "stop": ["a"] * 65}, "stop"),
        (CHAT, {"messages": HELLO, "stop": "a" * 1001}, "stop"),
        (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "presence_penalty": 2.5}, "presence_penalty"),
        (CHAT, {"messages": HELLO, "logit_bias": {"7": 300}}, "logit_bias"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"messages": HELLO, "reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        (CHAT, {"messages": [{"role": "user", "content": "the " * 400}], "max_tokens": 1}, "messages"),
        (CHAT, {"messages": HELLO, "thinking_token_budget": 5}, "thinking_token_budget"),
        (COMPLETION, {"prompt": []}, "prompt"),
        (COMPLETION, {"prompt": [[]]}, "prompt"),
        (COMPLETION, {"prompt": [4, "a"]}, "prompt"),
        (COMPLETION, {"prompt": [100_000]}, "prompt"),
        (COMPLETION, {"prompt": [-1]}, "prompt"),
        (COMPLETION, {"prompt": ["a"] * 65, "n": 2}, "prompt"),
        (COMPLETION, {"prompt": "the " * 400}, "prompt"),
        (COMPLETION, {"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        (COMPLETION, {"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_unsupported_fields_are_refused(served: Running, path: str, body: Any, param: str) -> None:
    refused(served.post(path, body), 400, param=param)


@pytest.mark.parametrize("prompt", [[1.5] * 1000, [[5]] * 1000 + ["x"], ["a"] * 1000 + [1], [[1.5] * 1000] * 1000])
@pytest.mark.parametrize(("schema", "field"), [(CompletionBody, "prompt"), (Embedding, "input")])
def test_list_fails_at_its_first_wrong_item(schema: type[BaseModel], field: str, prompt: Any) -> None:
    """Half a million errors kept the event loop busy for a minute."""
    with pytest.raises(ValidationError) as refusal:
        schema.model_validate({field: prompt, "model": NAME})
    assert refusal.value.error_count() <= 8


def test_too_long_text_is_not_tokenized(served: Running) -> None:
    """A tokenizer would take half a minute for it, and all others would wait."""
    tokenizer, limits = served.service.tokenizer, served.service.limits
    text = "a" * (limits.letters + 1)
    with counted_calls("PreTrainedTokenizerBase.__call__") as counts:
        with pytest.raises(APIError, match="letters"):
            checked_completion(CompletionBody(prompt=text), tokenizer, limits, served.service.settings)
        with pytest.raises(APIError, match="letters"):
            checked_embedding(Embedding(input=[text], model=NAME), tokenizer, limits, 8)
        assert counts["PreTrainedTokenizerBase.__call__"] == 0
        checked_completion(CompletionBody(prompt="a"), tokenizer, limits, served.service.settings)
    assert counts["PreTrainedTokenizerBase.__call__"] == 1


def test_fields_without_effect_are_accepted(served: Running) -> None:
    fields = {
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "frequency_penalty": 0,
        "logit_bias": {},
        "unheard": None,
    }
    answer = served.post(CHAT, {"messages": HELLO, "max_tokens": 1, "model": "", "tool_choice": "none", **fields})
    assert answer.status_code == 200, answer.text
    answer = served.post(CHAT, {"messages": HELLO, "max_tokens": 1, "response_format": {"type": "text"}})
    assert answer.status_code == 200, answer.text


OF_OTHER_SERVERS: dict[str, Any] = {
    "no_repeat_ngram_size": 3,
    "repeat_last_n": 64,
    "bad_words_ids": [[4]],
    "regex": "a+",
    "format": "json",
    "chat_template": "{{ 1 }}",
    "enable_thinking": False,
    "thinking": {"type": "disabled"},
    "allowed_token_ids": [4],
    "suppress_tokens": [4],
    "min_length": 5,
    "min_new_tokens": 5,
    "max_new_tokens": 5,
    "n_predict": 5,
    "num_predict": 5,
    "ebnf": "a",
    "guided_decoding": {},
    "guided_json": {},
    "documents": [],
    "reasoning": {"effort": "high"},
    "stop_sequences": ["a"],
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "mirostat": 2,
    "tfs_z": 0.5,
    "typical_p": 0.5,
    "top_a": 0.5,
    "num_beams": 4,
    "do_sample": False,
    "penalty_alpha": 0.6,
    "num_return_sequences": 2,
    "options": {"temperature": 0},
    "system": "a",
    "raw": True,
    "add_bos_token": False,
    "logits_processors": ["a"],
    "lora_request": "a",
    "cache_salt": "a",
    "images": ["a"],
    "continue_final_message": True,
    "return_token_ids": True,
    "unheard": 1,
    "extra_body": {},
}
"""Field -> a value that would change an answer there."""


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_field_of_another_server_is_refused_by_name(served: Running, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 1} | ({"messages": HELLO} if path == CHAT else {"prompt": "a"})
    for name, value in OF_OTHER_SERVERS.items():
        message = refused(served.post(path, {**body, name: value}), 400, "unsupported_parameter", name)
        assert message.startswith(f"{name} is not supported; omit it"), message
    assert served.post(path, body | dict.fromkeys(OF_OTHER_SERVERS)).status_code == 200  # null is no value


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("max_new_tokens", " Did you mean max_tokens?"),
        ("n_predict", " Did you mean max_tokens?"),
        ("temprature", " Did you mean temperature?"),
        ("stop_sequences", " Did you mean stop?"),
        ("enable_thinking", " Did you mean chat_template_kwargs?"),
        ("keep_thoughts", " Variables of the chat template are set in chat_template_kwargs."),
    ],
)
def test_refusal_suggests_a_near_field(served: Running, field: str, hint: str) -> None:
    message = refused(served.post(CHAT, {"messages": HELLO, field: 1}), 400, param=field)
    assert message == f"{field} is not supported; omit it.{hint}"


FUNCTION = {"name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("where", "inner"),
    [
        ("messages.0", {"messages": [{"role": "user", "content": "a", "unheard": 1}]}),
        ("messages.0", {"messages": [{"role": "assistant", "content": "a", "unheard": True}]}),
        (
            "messages.0.content.0",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "unheard": 1}]}]},
        ),
        (
            "messages.0.content.0.image_url",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a", "unheard": 1}}]}
                ]
            },
        ),
        (
            "messages.0.tool_calls.0",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "unheard": 1}]}]},
        ),
        (
            "messages.0.tool_calls.0.function",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "unheard": 1}}]}]},
        ),
        ("tools.0", {"tools": [{"type": "function", "function": FUNCTION, "unheard": 1}]}),
        ("tools.0.function", {"tools": [{"type": "function", "function": {**FUNCTION, "unheard": 1}}]}),
        ("stream_options", {"stream": True, "stream_options": {"include_usage": True, "unheard": 1}}),
        ("response_format", {"response_format": {"type": "text", "unheard": 1}}),
    ],
)
def test_an_unknown_field_of_an_inner_object_is_refused_by_name(served: Running, where: str, inner: Any) -> None:
    message = refused(served.post(CHAT, {"messages": HELLO, **inner}), 400, "unsupported_parameter", f"{where}.unheard")
    assert message.startswith(f"{where}.unheard is not supported; omit it.")


def test_a_part_has_the_field_of_its_type_only(served: Running) -> None:
    part = {"type": "text", "text": "a", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
    answer = served.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert refused(answer, 400) == "messages.0.content.0 is of type text and has image_url; omit it."


def test_requests_of_real_clients_are_answered(served: Running) -> None:
    """What these send besides, and numbers and texts in their form."""
    harmless_fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "parallel_tool_calls": None,
        "modalities": ["text"],
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "usage": {"include": True},
        "cache_prompt": True,
        "keep_alive": "5m",
        "verbosity": "medium",
    }
    for fields in (
        harmless_fields,
        {"max_tokens": 2.0, "n": 1.0, "top_k": 20.0, "seed": 3.0},
        {"max_tokens": -1},
        {"max_completion_tokens": -1},
        {"stop": list("vwxyz")},
        {"messages": [{**HELLO[0], "cache_control": {"type": "ephemeral"}}]},
        {
            "messages": [  # the first answer's message, sent back as it came
                *HELLO,
                {
                    "role": "assistant",
                    "content": "hi",
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "tool_calls": None,
                },
                *HELLO,
            ]
        },
    ):
        answer = served.post(CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text
    for wrong in (-2, 2.5, True):
        refused(served.post(CHAT, {"messages": HELLO, "max_tokens": wrong}), 400, param="max_tokens")
    unbounded = served.post(COMPLETION, {"prompt": "the rain", "max_tokens": -1, "temperature": 0})
    assert unbounded.json()["usage"]["completion_tokens"] > 16


def test_neutral_penalty_is_refused_if_the_model_sets_one(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    (folder / "generation_config.json").write_text(json.dumps({"no_repeat_ngram_size": 3}))
    with running(split(folder)) as served:
        for name in ({}, {"no_repeat_ngram_size": 3}, {"min_length": 0}):
            assert served.post(COMPLETION, {"prompt": "a", "max_tokens": 1, **name}).status_code == 200
        refused(served.post(COMPLETION, {"prompt": "a", "no_repeat_ngram_size": 0}), 400, param="no_repeat_ngram_size")


def test_another_model_is_not_found(served: Running) -> None:
    refused(served.post(CHAT, {"messages": HELLO, "model": "gpt-4"}), 404, "model_not_found", "model")
    none = served.post("/v1/embeddings", {"input": "a"})
    refused(none, 404, "no_embeddings")
    assert "no modules.json with a supported pooling" in none.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "missing"), [(COMPLETION, {"messages": HELLO}, "prompt"), (CHAT, {"prompt": "a"}, "messages")]
)
def test_a_body_for_another_path_is_told_its_path(served: Running, path: str, body: Any, missing: str) -> None:
    other = {COMPLETION: CHAT, CHAT: COMPLETION}[path]
    message = served.post(path, body).json()["error"]["message"]
    assert message == f"{missing}: is missing. {next(iter(body))}: a field of {other}."


def test_invalid_json_is_refused(served: Running) -> None:
    nested = b"[" * 100_000
    for body in (
        b"",
        b"{",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"messages": "\\ud800"}',
        nested,
        b"9" * 5000,
        b"[]",
        b"null",
    ):
        with served.http as client:
            refused(client.post(CHAT, content=body), 400)


def test_unknown_paths_and_methods(served: Running) -> None:
    with served.http as client:
        refused(client.get("/nowhere"), 404)
        assert refused(client.get(CHAT), 405) == "This path answers POST only."
        assert refused(client.delete("/v1/models"), 405) == "This path answers GET and HEAD only."


def test_body_size_is_limited_with_and_without_content_length(split_folder: Path) -> None:
    with running(split_folder, body_bytes=1000) as served, served.http as client:
        refused(client.post(CHAT, content=b" " * 1001), 413, "body_too_large")

        def parts() -> Any:
            for _ in range(200):
                yield b" " * 100

        refused(client.post(CHAT, content=parts()), 413, "body_too_large")
        assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


def test_a_slow_body_and_a_slow_head_are_cut_off(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(split_folder, body_seconds=0.3) as served:
        with served.socket() as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
            assert b" 408 " in slow.recv(4096)
        monkeypatch.setattr(Connection, "head_seconds", 0.4)
        for begun in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: loc"):
            with served.socket() as silent:
                silent.sendall(begun)
                assert silent.recv(4096) == b""
        monkeypatch.setattr(Connection, "head_seconds", PATIENCE)
        with served.socket() as quick:
            quick.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in quick.recv(4096)


def test_garbage_and_pipelines(served: Running) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"\r\n\r\n\r\n", b"GET\r\n\r\n", b"X" * 100_000):
        with served.socket() as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            harmless(everything(connection).decode("latin-1"))
    request = posted(COMPLETION, {"prompt": "the rain", "max_tokens": 2, "temperature": 0})
    last = request.replace(b"Host", b"Connection: close\r\nHost")
    with served.socket() as connection:
        connection.sendall(request + request + last)
        answers = everything(connection)
    assert answers.count(b"HTTP/1.1 200") == 3
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200")[1:]]
    texts = [json.loads(body)["choices"][0]["text"] for body in bodies]
    assert len(texts) == 3
    assert len(set(texts)) == 1


def everything(connection: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            part = connection.recv(1 << 16)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_client_frees_its_requests(served: Running, stream: bool) -> None:
    idle(served)
    before = served.batch.stats.ended.get("cancelled", 0)
    body = json.dumps({**LONG, "n": 3, "stream": stream}).encode()
    connection = served.socket()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    until(lambda: served.batch.stats.running == 3)
    connection.close()
    idle(served)
    assert served.batch.stats.ended["cancelled"] == before + 3


def test_more_choices_than_the_queue_holds_are_a_bad_request(served: Running) -> None:
    capacity = LIMITS.running + LIMITS.waiting
    assert served.post(COMPLETION, {"prompt": "a", "max_tokens": 1, "n": capacity}).status_code == 200
    refused(served.post(COMPLETION, {"prompt": "a", "max_tokens": 1, "n": capacity + 1}), 400, param="n")


@pytest.mark.long
def test_full_queue_answers_429_with_retry_after(split_folder: Path) -> None:
    with running(split_folder, limits=Limits(running=1, waiting=1)) as served:
        started = [
            threading.Thread(target=served.post, args=(COMPLETION, {**LONG, "max_tokens": 60}), daemon=True)
            for _ in range(2)
        ]
        started[0].start()
        until(lambda: served.batch.stats.running == 1)
        started[1].start()
        until(lambda: served.batch.stats.waiting == 1)
        answer = served.post(COMPLETION, LONG)
        refused(answer, 429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            served.openai().completions.create(model=NAME, prompt="a")
        for thread in started:
            thread.join()


def test_timeout_of_a_request(split_folder: Path) -> None:
    with running(split_folder, seconds=0.05) as served:
        answer = served.post(COMPLETION, LONG)
        refused(answer, 504, "timeout")
        assert answer.headers["x-should-retry"] == "false"
        client = served.openai()
        with pytest.raises(openai.APIError, match="not complete"):
            list(client.completions.create(model=NAME, prompt="the rain", max_tokens=200, temperature=0, stream=True))
        idle(served)


def test_keys_and_hosts_and_origins(split_folder: Path) -> None:
    with running(split_folder, api_key="secret-ä", origins=("https://page.example",)) as served:
        key = served.key
        served.key = None
        with served.http as client:
            refused(client.get("/v1/models"), 401, "invalid_api_key")
            refused(client.get("/metrics"), 401, "invalid_api_key")
            assert client.get("/health").status_code == 200
            for wrong in ("Bearer secret", "Basic secret-ä", "Bearer", "secret-ä", "Bearer " + "x" * 4000):
                refused(client.get("/v1/models", headers={"authorization": wrong.encode()}), 401)
            right = {"authorization": f"Bearer {key}".encode()}
            assert client.get("/v1/models", headers=right).status_code == 200
            refused(client.get("/v1/models", headers={**right, "host": "evil.example"}), 403, "wrong_host")
            assert client.get("/v1/models", headers={**right, "host": "localhost:1"}).status_code == 200
            body = {"messages": HELLO, "max_tokens": 1}
            for origin, status in (
                ("https://evil.example", 403),
                ("null", 403),
                ("https://page.example", 200),
                (served.address, 200),
                (served.address.replace("http:", "HTTP:"), 200),
                (served.address.replace("http:", "https:"), 403),
                (served.address.replace("http:", "x:"), 403),
                (served.address.removeprefix("http://"), 403),
            ):
                answer = client.post(CHAT, json=body, headers={**right, "origin": origin})
                assert answer.status_code == status, answer.text
                allowed = answer.headers.get("access-control-allow-origin")
                assert allowed == ("https://page.example" if origin == "https://page.example" else None)


def test_all_routes_but_health_and_page_need_the_key(split_folder: Path) -> None:
    """Also a route that somebody adds later, a path that is none, and odd spellings of those that need it."""
    with running(split_folder, api_key="secret") as served:
        served.key = None
        paths = [route.path.replace("{name:path}", NAME) for route in routes(served.models)]  # type: ignore[attr-defined]
        assert {"/v1/chat/completions", "/status", "/metrics", "/health", "/"} <= set(paths)
        pages = {"/", *(path for path in paths if path.startswith("/static/"))}
        odd = (
            "/nowhere",
            "/status/",
            "/v1",
            "/static/../status",
            "/static/nothing.js",
            "/health/",
            "/%73tatus",
        )
        with served.http as client:
            for path in [*paths, *odd]:
                for method in ("GET", "POST", "HEAD", "OPTIONS"):
                    answer = client.request(method, path)
                    if path in pages or path == "/health":
                        assert answer.status_code in (200, 405), (method, path)
                    else:
                        assert answer.status_code == 401, (method, path)
            assert client.get("/health").json() == {"status": "ok"}
            with_key = client.get("/health", headers={"authorization": "Bearer secret"}).json()
            assert with_key["model"] == NAME
            assert with_key["status"] == "ok"


def test_usage_counts_the_prompt_once(served: Running) -> None:
    usage_of_1, usage_of_3 = (
        served.post(CHAT, {"messages": HELLO, "max_tokens": 2, "n": n, "temperature": 0}).json()["usage"]
        for n in (1, 3)
    )
    assert usage_of_3["prompt_tokens"] == usage_of_1["prompt_tokens"]
    assert usage_of_3["completion_tokens"] == 3 * usage_of_1["completion_tokens"]
    assert usage_of_3["total_tokens"] == usage_of_3["prompt_tokens"] + usage_of_3["completion_tokens"]
    prompts = served.post(COMPLETION, {"prompt": ["the rain", "the"], "max_tokens": 1, "n": 2}).json()["usage"]
    usages = [
        served.post(COMPLETION, {"prompt": prompt, "max_tokens": 1}).json()["usage"] for prompt in ("the rain", "the")
    ]
    assert prompts["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    streamed = served.openai().chat.completions.create(
        model=NAME,
        messages=HELLO,
        max_tokens=2,
        n=3,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    )
    usage = [*streamed][-1].usage
    assert usage is not None
    assert usage.prompt_tokens == usage_of_1["prompt_tokens"]


def test_a_request_with_two_lengths_is_refused(served: Running) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with served.socket() as connection:
        connection.sendall(head + b"2\r\n{}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"both Content-Length and Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1") == 1  # the connection is closed


@pytest.mark.parametrize("path", ["/v1/message", "/v2/chat", "/v1/chat/completion"])
def test_unknown_path_lists_the_endpoints(served: Running, path: str) -> None:
    message = refused(served.post(path, {}), 404, "not_found")
    assert message == (
        f"There is no {path} here. "
        "This server has /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, "
        "/v1/messages/count_tokens, /v1/embeddings, /v1/rerank and /v1/models."
    )


@pytest.mark.parametrize("path", ["/api/pull", "/api"])
def test_unknown_path_of_ollama_lists_its_endpoints(served: Running, path: str) -> None:
    with served.http as client:
        response = client.post(path, json={})
    assert response.status_code == 404
    assert (
        "This server has /api/chat, /api/generate, /api/embed, /api/embeddings, /api/tags, /api/ps, /api/show and "
        "/api/version." in response.text
    )


def test_request_ids_are_returned(served: Running) -> None:
    with served.http as client:
        assert client.get("/health", headers={"x-request-id": "a-1"}).headers["x-request-id"] == "a-1"
        request_id = client.get("/health", headers={"x-request-id": "a b\t<script>"}).headers["x-request-id"]
        assert request_id.isalnum()
        assert request_id != client.get("/health").headers["x-request-id"]


def test_stalled_client_is_disconnected(split_folder: Path) -> None:
    """Its answer does not fit what the kernel holds back for it, and the server waits no longer than it says."""
    with running(split_folder, stall_seconds=0.3, send_buffer=4096) as served:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", served.port))
        connection.sendall(posted(COMPLETION, {**LONG, "n": 4, "stream": True, "logprobs": 20}))
        until(lambda: served.batch.stats.running > 0)
        until(lambda: "rabbitllm_clients_left_total 1" in metrics(served))
        idle(served)
        assert served.post(COMPLETION, {"prompt": "a", "max_tokens": 1}).status_code == 200
        connection.close()


def test_shutdown_finishes_running_requests(split_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rabbitllm.server")
    with running(split_folder, grace=None) as served:
        goes_on, answers = threading.Event(), list[Any]()
        served.model.model.norm.register_forward_pre_hook(lambda *_: goes_on.wait(PATIENCE) and None)
        asking = threading.Thread(target=lambda: answers.append(served.post(COMPLETION, {**LONG, "max_tokens": 120})))
        asking.start()
        until(lambda: served.batch.stats.running == 1)
        served.server.handle_exit(signal.SIGTERM, None)
        with served.http as client:
            assert client.get("/health").json()["status"] == "shutting down"
            answer = client.post(COMPLETION, json=LONG)
            refused(answer, 503, "shutting_down")
            assert "retry-after" in answer.headers
        goes_on.set()
        asking.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 120
    assert "finishing running requests; another Ctrl-C or SIGTERM stops now" in caplog.text


def test_shutdown_cancels_requests_after_the_grace_period(split_folder: Path) -> None:
    with running(split_folder, grace=0.2) as served:
        answers: list[Any] = []
        served.model.model.norm.register_forward_pre_hook(lambda *_: time.sleep(0.01))  # it takes seconds at least
        asking = threading.Thread(target=lambda: answers.append(served.post(COMPLETION, {**LONG, "max_tokens": 240})))
        asking.start()
        until(lambda: served.batch.stats.new_tokens > 2)
        served.server.end()
        asking.join()
        choice = answers[0].json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert 0 < answers[0].json()["usage"]["completion_tokens"] < 240
        assert choice["text"]


def test_a_server_that_cannot_start_a_thread_ends(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: DaemonThread) -> None:
        raise MemoryError("can't start new thread")

    with running(split_folder) as served:
        with monkeypatch.context() as patch:
            patch.setattr(DaemonThread, "start", refuse)
            with pytest.raises(MemoryError):
                served.server._close(None)  # in the thread of `end`
        assert served.server.should_exit


@pytest.mark.parametrize("stream", [False, True])
def test_scores_that_are_no_numbers_end_the_request(served: Running, stream: bool) -> None:
    hook = served.model.get_output_embeddings().register_forward_hook(lambda *given: given[-1] * math.nan)
    answer = served.post(COMPLETION, {"prompt": "the rain", "max_tokens": 3, "stream": stream})
    hook.remove()
    if stream:
        assert '"code":"not_a_number"' in answer.text
    else:
        assert "(the highest is nan)" in refused(answer, 500, "not_a_number")
    assert served.post(COMPLETION, {"prompt": "the rain", "max_tokens": 3}).status_code == 200


def test_a_failed_batch_ends_the_server_and_says_so(split_folder: Path) -> None:
    with running(split_folder) as served:
        served.models.entries[0].users += 1  # it ends after this request
        served.batch._scheduler.step = lambda: 1 / 0  # type: ignore
        refused(served.post(COMPLETION, LONG), 500, "internal_error")
        for _ in range(2):  # before the server notices it, and while it ends
            with served.http as client:
                answer = client.get("/health")
                assert (answer.status_code, answer.json()["status"]) == (503, "failed")
            assert "has failed; its log" in refused(served.post(COMPLETION, LONG), 503, "failed")
            until(lambda: served.models.is_closing)
        served.models.entries[0].users -= 1
        until(lambda: served.server.should_exit)
        assert served.server.exit_code == 1


PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(
    {*ChatBody.model_fields, *CompletionBody.model_fields, *Embedding.model_fields} - {"messages", "prompt"}
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool"]) | PLAIN,
            "content": st.text(max_size=8) | ANYTHING,
        }
    ),
    max_size=3,
)


@settings(max_examples=draws(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from([CHAT, COMPLETION, "/v1/embeddings"]),
    body=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=3) | ANYTHING,
    messages=MESSAGES | ANYTHING,
    prompt=st.text(max_size=8) | ANYTHING,
)
def test_no_body_causes_a_server_error(served: Running, path: str, body: Any, messages: Any, prompt: Any) -> None:
    if isinstance(body, dict):
        right = {CHAT: {"messages": messages}, COMPLETION: {"prompt": prompt}}.get(path, {"input": prompt})
        body = {**({} if path.endswith("embeddings") else {"max_tokens": 1}), **right, **body}
    try:
        raw = json.dumps(body).encode()
    except ValueError:
        return
    with served.http as client:
        answer = client.post(path, content=raw)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "Traceback" not in answer.text
