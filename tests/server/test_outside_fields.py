"""Requests whose fields name addresses, files of the machine and huge sizes: none is opened, none is taken.

The server runs in this process, whose audit hook (PEP 578) sees every file and every address that any thread opens.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import random
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rabbitllm import AutoModel, batch
from rabbitllm.server import schemas
from rabbitllm.server.schemas import NEUTRAL
from tests.server.serving import Running, running
from tests.server.test_tool_calls import ADD
from tests.support.builders import build_checkpoint
from tests.support.picture_models import build, encoded, picture
from tests.support.tiny_models import one_thread, split

__all__ = ["one_thread"]

READ = (
    "images",
    "size",
    "videos",
    "audio",
    "return_tensors",
    "tokenize",
    "continue_final_message",
    "processor_kwargs",
)
"""Arguments of processors and tokenizers that the template of the text model reads as variables."""
TEMPLATE_END = "{% if enable_thinking %}think{% endif %}" + "".join(
    f"{{% if {name} %}}{name}{{% endif %}}" for name in READ
)
TOOLS_TEMPLATE = (
    "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{{ m.reasoning_content }}"
    "{% endfor %}{{ response_format }}{{ reasoning_effort }}"
)
EXTRAS = (
    *READ,
    *(
        "image",
        "path",
        "url",
        "video",
        "file",
        "text",
        "image_url",
        "base64",
        "documents",
        "chat_template",
        "conversation",
    ),
    *("crop_size", "do_resize", "max_pixels", "min_pixels", "images_kwargs", "text_kwargs", "sampling_rate", "fps"),
    *("padding", "max_length", "truncation", "return_dict", "tokenizer_kwargs", "load_audio_from_video", "device"),
    *("bos_token", "lora_path", "grammar_file", "cache_dir", "trust_remote_code", "callback_url", "num_frames"),
)
"""Names of fields beside those of the schemas."""


def names_of_fields() -> list[str]:
    """Of all schemas, and more."""
    kinds = [schema for schema in vars(schemas).values() if isinstance(schema, type) and issubclass(schema, BaseModel)]
    return sorted({*EXTRAS, *NEUTRAL, *(name for schema in kinds for name in schema.model_fields)} - {"model"})


WATCHED = (
    *("open", "os.listdir", "os.scandir", "glob.glob", "subprocess.Popen", "os.system"),
    *("socket.getaddrinfo", "socket.connect", "urllib.Request"),
)


class Watch:
    """What this process opens while it watches, but for its own server, its modules and the kernel's files."""

    def __init__(self) -> None:
        self.own: tuple[str, int] | None = None
        self.seen: list[str] = []
        self.is_on = False
        self._code = tuple(
            {
                os.path.realpath(sys.prefix),
                os.path.realpath(sys.base_prefix),
                str(Path(__file__).parents[2] / "rabbitllm"),
            }
        )
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event not in WATCHED:
            return
        if event == "open":
            path = str(arguments[0])
            is_module = path.startswith(self._code) and path.endswith((".py", ".pyc", ".so"))
            if isinstance(arguments[0], int) or is_module or path.startswith(("/proc/", "/sys/")):
                return
        if event == "os.listdir" and str(arguments[0]).startswith("/proc/"):
            return
        if event == "socket.connect" and tuple(arguments[1][:2]) == self.own:
            return
        if event == "socket.getaddrinfo" and tuple(arguments[:2]) == self.own:
            return
        self.seen.append(f"{event} {arguments}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outside")
    (path / "secret.png").write_bytes(encoded(picture(3)))
    (path / "secret.txt").write_text("secret")
    return path


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = build_checkpoint(tmp_path_factory.mktemp("text") / "llama", "llama", max_position_embeddings=4096)
    (checkpoint / "chat_template.jinja").write_text(TOOLS_TEMPLATE + TEMPLATE_END)
    return split(checkpoint)


@pytest.fixture(scope="module")
def picture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = build(tmp_path_factory.mktemp("pictures") / "gemma3", "gemma3")
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 256  # a client may ask for as many tokens
    (checkpoint / "config.json").write_text(json.dumps(config))
    return split(checkpoint)


@contextlib.contextmanager
def served(model: str, request: pytest.FixtureRequest) -> Iterator[Running]:
    # in memory, so that no weight is read later; short answers, since -1 asks for as many tokens as there may be
    with running(request.getfixturevalue(model), budget=1 << 30, max_new_tokens=4) as server:
        yield server


def body_of(model: str) -> dict[str, Any]:
    """A request with an object of every kind that the model takes."""
    url = f"data:image/png;base64,{base64.b64encode(encoded(picture())).decode()}"
    parts: list[Any] = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    body: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "chat_template_kwargs": {}}
    if model == "picture_model":
        parts.append({"type": "image_url", "image_url": {"url": url, "detail": "auto"}})
        return body | {"messages": [{"role": "user", "content": parts}]}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    answered = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"}
    messages = [{"role": "user", "content": parts}, answered, {"role": "tool", "tool_call_id": "1", "content": "2"}]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return body | stream | {"messages": messages, "tools": [ADD], "response_format": form, "reasoning_effort": "low"}


def values(folder: Path, port: int) -> list[Any]:
    """What a hostile client writes into a field."""
    address = f"http://127.0.0.1:{port}/latest/meta-data"
    paths = [str(folder / "secret.png"), f"file://{folder}/secret.png", str(folder / "none.png"), "../../../etc/passwd"]
    plain: list[Any] = [address, *paths, 10**9, -1, 1e308, True, {"height": 30_000, "width": 30_000}]
    return [
        *plain,
        [address],
        [paths[0]],
        [[address]],
        {"url": address},
        {"path": paths[0]},
        [{"type": "image", "url": address}],
    ]


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every object in a body."""
    if isinstance(value, dict):
        yield where
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*where, key))


def changed(body: dict[str, Any], where: tuple[Any, ...], name: str, value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(body)
    inner: Any = copied
    for key in where:
        inner = inner[key]
    inner[name] = value
    return copied


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    """An address that nothing may connect to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def cases_of(body: dict[str, Any], bad: list[Any]) -> list[tuple[tuple[Any, ...], str, Any]]:
    """Each field in each object, with three of the values; a field gets other ones in the next object."""
    pairs = [(where, name) for where in places(body) for name in names_of_fields()]
    return [(*pair, bad[(3 * index + step) % len(bad)]) for index, pair in enumerate(pairs) for step in range(3)]


@pytest.mark.parametrize("share", [0.004, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("model", ["text_model", "picture_model"])
def test_no_field_opens_a_file_or_an_address(
    model: str, share: float, folder: Path, watch: Watch, listener: socket.socket, request: pytest.FixtureRequest
) -> None:
    body = body_of(model)
    bad = values(folder, listener.getsockname()[1])
    cases = cases_of(body, bad)
    chosen = random.Random(0).sample(cases, int(len(cases) * share))
    chosen += [(("chat_template_kwargs",), name, value) for name in ("images", "size") for value in bad]
    with served(model, request) as running_server, running_server.http as client:
        first = client.post("/v1/chat/completions", json=body)
        assert first.status_code == 200, first.text
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        watch.own, watch.is_on = ("127.0.0.1", running_server.port), True
        try:
            for where, name, value in chosen:
                answer = client.post("/v1/chat/completions", json=changed(body, where, name, value))
                assert answer.status_code in (200, 400, 404), (where, name, value, answer.text)
                assert "No such file" not in answer.text
                assert not watch.seen, (where, name, value, watch.seen)
        finally:
            watch.is_on = False
            watch.seen.clear()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("model", ["text_model", "picture_model"])
def test_processor_arguments_are_refused(
    model: str, folder: Path, listener: socket.socket, request: pytest.FixtureRequest
) -> None:
    """Even those that the template reads; and each is refused by name."""
    bad = [
        f"http://127.0.0.1:{listener.getsockname()[1]}/",
        str(folder / "secret.png"),
        {"height": 30_000, "width": 30_000},
    ]
    with served(model, request) as server:
        for name in EXTRAS:
            for value in bad:
                body = body_of(model) | {"chat_template_kwargs": {name: value}}
                answer = server.post("/v1/chat/completions", body)
                assert answer.status_code == 400, (name, answer.text)
                error = answer.json()["error"]
                assert error["message"].startswith(f"chat_template_kwargs: {name} is no variable"), error
                assert error["param"] == "chat_template_kwargs"
        assert server.post("/v1/chat/completions", body_of(model)).status_code == 200


@pytest.mark.parametrize("model", ["text_model", "picture_model"])
def test_content_parts_with_paths_or_urls_are_refused(
    model: str, folder: Path, watch: Watch, listener: socket.socket, request: pytest.FixtureRequest
) -> None:
    types = (
        "image",
        "video",
        "audio",
        "image_url",
        "video_url",
        "audio_url",
        "input_image",
        "input_audio",
        "file",
        "path",
    )
    bad = values(folder, listener.getsockname()[1])
    with served(model, request) as server, server.http as client:
        assert client.post("/v1/chat/completions", json=body_of(model)).status_code == 200
        watch.own, watch.is_on = ("127.0.0.1", server.port), True
        try:
            for word in types:
                for name in (word, "url", "path", "image", "video", "audio", "base64", "data"):
                    for value in (bad[0], bad[1], bad[2], {"url": bad[0]}, {"data": bad[1], "format": "wav"}):
                        parts = [{"type": word, name: value}, *body_of(model)["messages"][0]["content"]]
                        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
                        answer = client.post("/v1/chat/completions", json=body)
                        assert answer.status_code == 400, (parts[0], answer.text)
                        assert not watch.seen, (parts[0], watch.seen)
        finally:
            watch.is_on = False
            watch.seen.clear()
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_batch_lines_are_checked_the_same(
    picture_model: Path, folder: Path, watch: Watch, listener: socket.socket
) -> None:
    model = AutoModel.from_pretrained(str(picture_model), device="cpu", dtype="float32")
    body = body_of("picture_model")
    bad = values(folder, listener.getsockname()[1])
    chosen = random.Random(1).sample(cases_of(body, bad), 60)
    lines = [{"custom_id": "right", "url": "/v1/chat/completions", "body": body}]
    for index, (where, name, value) in enumerate(chosen):
        lines.append(
            {"custom_id": str(index), "url": "/v1/chat/completions", "body": changed(body, where, name, value)}
        )
    for name in ("no_repeat_ngram_size", "enable_thinking"):
        lines.append({"custom_id": name, "url": "/v1/chat/completions", "body": {**body, name: 3}})
    batch(model, lines[:1])
    watch.is_on = True
    try:
        answers = {line["custom_id"]: line for line in batch(model, lines)}
        assert not [event for event in watch.seen if str(folder) in event or "socket" in event or "urllib" in event]
    finally:
        watch.is_on = False
        watch.seen.clear()
    assert answers["right"]["response"]["status_code"] == 200
    for name in ("no_repeat_ngram_size", "enable_thinking"):
        refusal = answers[name]["response"]
        assert refusal["status_code"] == 400
        assert refusal["body"]["error"]["message"].startswith(f"{name} is not supported; omit it")
    with pytest.raises(BlockingIOError):
        listener.accept()
