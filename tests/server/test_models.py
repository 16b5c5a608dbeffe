"""Several models in one server, over HTTP: loaded on request, in turns where memory is short, unloaded when idle."""

from __future__ import annotations

import contextlib
import gc
import http.client
import io
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from rich.console import Console

from rabbitllm.auto_model import LoadRequest
from rabbitllm.engine.free_memory import PROMISES
from rabbitllm.generation.request import Limits
from rabbitllm.server._metrics import Metrics
from rabbitllm.server._models import Models
from rabbitllm.server._service import Service
from rabbitllm.server.settings import LOCAL, Settings, address_of, bound
from rabbitllm.storage import durable
from tests.server.serving import LIMITS, PATIENCE, in_a_thread
from tests.support.builders import FAMILIES, build_checkpoint
from tests.support.scripted import scripted_checkpoint
from tests.support.tiny_models import plain_model, split

PROMPT = [1, 40, 81, 7, 200, 33]
NAMES = ("rabbit", "hare")


@dataclass
class Served:
    """A server of several models, and its loads in their order."""

    models: Models
    address: str
    loads: list[str]

    def post(self, model: str | None, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "model": model, **fields}
        with httpx.Client(base_url=self.address, timeout=PATIENCE, trust_env=False) as client:
            return client.post(path, json={name: value for name, value in body.items() if value is not None})

    def text(self, model: str | None, **fields: Any) -> str:
        answer = self.post(model, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def leaves(self, model: str) -> None:
        """Ask, and leave while the request waits."""
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"))
        connection.request("POST", "/v1/completions", json.dumps({"model": model, "prompt": "a"}))
        self.until(lambda states: states[model]["waiting"] == 1)
        connection.close()

    def get(self, path: str) -> Any:
        return httpx.get(self.address + path, trust_env=False, timeout=PATIENCE).json()

    def states(self) -> dict[str, Any]:
        return {state["id"]: state for state in self.get("/status")["models"]}

    def until(self, state: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        limit = time.monotonic() + PATIENCE
        while not state(states := self.states()):
            assert time.monotonic() < limit, states
            time.sleep(0.005)
        return states


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of other families, and so with other answers."""
    home = tmp_path_factory.mktemp("models")
    families = dict(zip(NAMES, ("llama", "qwen3"), strict=True))
    for name, family in families.items():
        split(build_checkpoint(home / name, FAMILIES[family], dtype=torch.float32))
    return {name: home / name for name in families}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, str]:
    """What transformers says after the prompt."""
    return {name: plain_text(folder, 8) for name, folder in folders.items()}


def plain_text(folder: Path, tokens: int) -> str:
    import transformers

    model = plain_model(folder, dtype=torch.float32).eval()
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.decode(ids[0, len(PROMPT) :], skip_special_tokens=True))


@contextlib.contextmanager
def serving(
    folders: dict[str, Path],
    memory: int | None = None,
    keep_alive: float | None = None,
    before: Callable[[str], object] = lambda name: None,
    limits: Limits = LIMITS,
    console: Console | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Serve models within so many bytes for the weights of all; `before` is called where one is loaded."""
    metrics, loads = Metrics(), list[str]()

    def load(name: str, folder: Path, own: Settings, beside: Sequence[Service]) -> Service | None:
        before(name)
        request = LoadRequest.of(folder, device="cpu", max_memory=None if memory is None else {"cpu": memory})
        shown = console or Console(quiet=True)
        service = Service.load(request, "auto", limits, own, shown, metrics, len(folders), beside)
        if service is not None:
            loads.append(name)
        return service

    owns = {name: Settings(**{"name": name, "hosts": LOCAL, **settings}) for name in folders}
    loaders = [(owns[name], partial(load, name, folder, owns[name])) for name, folder in folders.items()]
    models = Models(loaders, metrics, keep_alive)
    listening = bound("127.0.0.1", 0)
    try:
        with in_a_thread(models, listening, 5.0):
            yield Served(models, address_of(listening), loads)
    finally:
        for service in models.services:
            service.close()
        listening.close()
    assert not PROMISES


@contextlib.contextmanager
def held(served: Served) -> Iterator[threading.Event]:
    """A loaded model whose passes are slow until they are let go; another is built between two of them."""
    goes_on = threading.Event()

    def wait(*_: Any) -> None:
        goes_on.wait(0.1)

    hook = served.models.services[0].model.model.norm.register_forward_pre_hook(wait)
    yield goes_on
    hook.remove()


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("splitted_model/*.safetensors"))


def test_models_are_loaded_on_request(folders: dict[str, Path], expected: dict[str, str]) -> None:
    with serving(folders) as served:
        limits = ("running", "most_running", "cache_limit_bytes")
        assert [served.get("/health")[name] for name in limits] == [0, None, None]
        listed = served.get("/v1/models")["data"]
        assert [(model["id"], model["loaded"], model["max_model_len"]) for model in listed] == [
            (name, False, None) for name in NAMES
        ]
        assert served.text("hare") == expected["hare"]
        assert [model["loaded"] for model in served.get("/v1/models")["data"]] == [False, True]
        assert served.get("/status")["model"] == "hare"
        unloaded = served.get("/status?model=rabbit")
        assert [unloaded[name] for name in ("passes", "most_running", "cache_limit_bytes")] == [0, None, None]
        assert served.text(None) == expected["rabbit"]  # the first one
        assert served.loads == ["hare", "rabbit"]
        asked = [NAMES[index % 2] for index in range(8)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(served.text, asked)) == [expected[name] for name in asked]
        assert served.loads == ["hare", "rabbit"]  # both fit in memory
        metrics = httpx.get(f"{served.address}/metrics", trust_env=False, timeout=PATIENCE).text
        for name in NAMES:
            assert f'rabbitllm_running{{model="{name}"}} 0' in metrics
        assert metrics.count("# TYPE rabbitllm_running gauge") == 1
        unknown = served.post("fox")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "'rabbit', 'hare'" in unknown.json()["error"]["message"]


def test_every_interface_names_a_model(folders: dict[str, Path]) -> None:
    import anthropic  # a second of each process that only collects these tests

    with serving(folders) as served:
        chat: list[Any] = [{"role": "user", "content": "a b"}]
        client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0)
        claude = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0)
        for name in NAMES:
            answer = client.chat.completions.create(model=name, messages=chat, max_tokens=4, temperature=0)
            text = answer.choices[0].message.content
            assert answer.model == name
            assert (
                client.responses.create(model=name, input="a b", max_output_tokens=4, temperature=0).output_text == text
            )
            message = claude.messages.create(model=name, messages=chat, max_tokens=4)
            assert (message.content[0].text, message.model) == (text, name)  # type: ignore[union-attr]
            assert served.post(name, "/tokenize", prompt="a", max_tokens=None, temperature=None).status_code == 200
            no_embeddings = served.post(
                name, "/v1/embeddings", input="a", prompt=None, max_tokens=None, temperature=None
            )
            assert no_embeddings.json()["error"]["code"] == "no_embeddings"
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize"):
            body = {"model": "fox", "messages": chat, "input": "a", "content": "a"}
            kept = {"/v1/embeddings": ("model", "input"), "/tokenize": ("model", "content")}
            names = kept.get(path, ("model", "messages"))
            with httpx.Client(base_url=served.address, trust_env=False, timeout=PATIENCE) as client:
                refused = client.post(path, json={name: body[name] for name in names})
            assert refused.status_code == 404, refused.text
        with pytest.raises(anthropic.NotFoundError, match="fox"):
            claude.messages.create(model="fox", messages=chat, max_tokens=4)


def test_models_that_do_not_fit_take_turns(folders: dict[str, Path], expected: dict[str, str]) -> None:
    """Concurrent requests to both: each answer is right, each model is alone in memory, which is free afterwards."""
    gone: list[weakref.ref[Any]] = []
    with serving(folders, max(map(weight_bytes, folders.values())) + 200_000) as served:
        with ThreadPoolExecutor(12) as pool:
            asked = [NAMES[index % 2] for index in range(16)]
            texts = list(pool.map(served.text, asked))
            gone += [weakref.ref(service.model) for service in served.models.services]
        assert texts == [expected[name] for name in asked]
        assert 2 <= len(served.loads) <= 16
        assert all(first != second for first, second in zip(served.loads, served.loads[1:], strict=False))
        last = served.loads[-1]
        other = NAMES[last == NAMES[0]]
        assert served.text(other) == expected[other]
        assert [state["state"] for state in served.states().values()].count("loaded") == 1
        gc.collect()
        assert all(reference() is None for reference in gone)


def test_a_running_answer_is_finished_before_its_model_leaves(
    folders: dict[str, Path], expected: dict[str, str]
) -> None:
    with serving(folders, 60_000) as served, ThreadPoolExecutor(3) as pool:
        first = served.text("rabbit")
        with held(served) as goes_on:
            long = pool.submit(served.text, "rabbit", max_tokens=150, ignore_eos=True)
            served.until(lambda states: states["rabbit"]["running"])
            other = pool.submit(served.text, "hare")
            served.until(lambda states: states["hare"]["waiting"] == 1 and states["rabbit"]["state"] == "leaving")
            late = pool.submit(served.text, "rabbit")  # comes after the turn of the other
            waiting = served.until(lambda states: states["rabbit"]["waiting"] == 1)
            goes_on.set()
        assert waiting["hare"]["waiting"] == 1
        assert long.result().startswith(first.rstrip("\ufffd"))
        assert other.result() == expected["hare"]
        assert late.result() == expected["rabbit"]
        assert served.loads == ["rabbit", "hare", "rabbit"]


def test_a_client_that_leaves_makes_no_model_leave(folders: dict[str, Path]) -> None:
    with serving(folders, 60_000) as served, ThreadPoolExecutor(2) as pool:
        assert served.text("rabbit")
        with held(served) as goes_on:
            long = pool.submit(served.text, "rabbit", max_tokens=300, ignore_eos=True)
            served.until(lambda states: states["rabbit"]["running"])
            served.leaves("hare")
            served.until(lambda states: states["hare"]["waiting"] == 0)
            goes_on.set()
            served.until(lambda states: states["rabbit"]["state"] == "loaded")
            assert served.text("rabbit")
        assert long.result()
        assert served.loads == ["rabbit"]


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_an_idle_model_is_unloaded(folders: dict[str, Path], expected: dict[str, str], seconds: float) -> None:
    with serving(folders, keep_alive=seconds) as served:
        assert served.text("rabbit") == expected["rabbit"]
        model = weakref.ref(served.models.services[0].model) if served.models.services else lambda: None
        if seconds:
            (promise,), (service,) = PROMISES, served.models.services
            assert 0 < promise.mapped <= weight_bytes(folders["rabbit"])
            stats = service.batch.stats
            assert promise.unspent() == {"cpu": stats.cache_limit_bytes - stats.cache_bytes}
            del promise, service
            assert served.states()["rabbit"]["state"] == "loaded"
            served.post("rabbit", "/api/generate", prompt="", keep_alive=0.1)
        served.until(lambda states: states["rabbit"]["state"] == "not loaded")
        assert model() is None
        assert not PROMISES
        assert served.text("rabbit") == expected["rabbit"]
        assert served.loads == ["rabbit", "rabbit"]


def test_the_time_without_a_request_begins_at_the_start(folders: dict[str, Path]) -> None:
    settings = Settings(name="rabbit", hosts=LOCAL)
    request = LoadRequest.of(folders["rabbit"], device="cpu")
    load = partial(Service.load, request, "auto", LIMITS, settings, Console(quiet=True))
    service = load()
    assert service is not None
    models = Models.of(service, lambda beside: load(beside=beside), 0.2)
    model, listening = weakref.ref(service.model), bound("127.0.0.1", 0)
    del service
    with in_a_thread(models, listening, 5.0):
        served = Served(models, address_of(listening), [])
        served.until(lambda states: states["rabbit"]["state"] == "not loaded")
        assert model() is None
        assert served.text("rabbit")
    models.services[0].close()
    listening.close()


def test_a_load_beside_others_names_a_form_of_calls_that_is_not_read(tmp_path: Path) -> None:
    """Of several models the start knows only the names."""
    template = "{% for tool in tools %}[{{ tool }}]{% endfor %}{{ messages[-1].content }}"
    folder = split(scripted_checkpoint(tmp_path / "model", [("<go>", "Yes.")], template))
    settings, request = Settings(name="odd", hosts=LOCAL), LoadRequest.of(folder, device="cpu")
    for models in 1, 2:
        console = Console(file=io.StringIO(), width=200)
        service = Service.load(request, "auto", LIMITS, settings, console, None, models)
        assert service is not None
        service.close()
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("calls of odd stay text: the chat template shows" in said) == (models == 2)


def test_ollamas_requests_say_how_long_a_model_stays(folders: dict[str, Path], expected: dict[str, str]) -> None:
    with serving(folders, keep_alive=0.0) as served:

        def says(kept: Any) -> Any:
            return served.post("rabbit", "/api/generate", prompt="", keep_alive=kept).json()["done_reason"]

        assert says(0) == "unload"
        assert served.loads == []
        assert says("1h") == "load"
        assert served.text("rabbit") == expected["rabbit"]
        (running,) = served.get("/api/ps")["models"]
        assert running["model"] == "rabbit"
        assert says(0) == "unload"
        served.until(lambda states: states["rabbit"]["state"] == "not loaded")
        assert served.get("/api/ps") == {"models": []}
        assert served.loads == ["rabbit"]


def test_what_is_refused_does_not_say_how_long_a_model_stays(folders: dict[str, Path]) -> None:
    with serving(folders, keep_alive=5.0) as served:
        for path, fields in (
            ("/api/generate", {"prompt": "a", "options": {"temperature": "hot"}}),
            ("/api/embed", {"input": {}}),
        ):
            assert served.post("rabbit", path, keep_alive=0, **fields).status_code == 400
        for kept, what in ((True, "true"), ({}, "{}"), ("5 minutes", '"5 minutes"'), ("\u0663s", '"\\u0663s"')):
            refused = served.post("rabbit", "/api/generate", prompt="a", keep_alive=kept)
            assert refused.status_code == 400
            assert f"keep_alive is {what}; expected seconds" in refused.json()["error"]
        assert served.models.entries[0].keep_alive == 5.0
        options = {"num_predict": 1}
        fields = {"prompt": "a", "options": options, "max_tokens": None, "temperature": None, "stream": False}
        answer = served.post("rabbit", "/api/generate", keep_alive=1e-9, **fields)
        assert answer.status_code == 200, answer.text
        assert served.models.entries[0].keep_alive == 1e-9


def test_a_model_that_nobody_waits_for_any_more_is_unloaded(folders: dict[str, Path]) -> None:
    go = threading.Event()
    with serving(folders, keep_alive=0.0, before=lambda name: go.wait(PATIENCE)) as served:
        served.leaves("rabbit")
        served.until(lambda states: not states["rabbit"]["waiting"])
        go.set()
        served.until(lambda states: served.loads and states["rabbit"]["state"] == "not loaded")


def test_a_model_that_leaves_writes_its_prompts(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = durable.write_private

    def write_slowly(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
        time.sleep(0.2)
        written(path, pieces)

    monkeypatch.setattr(durable, "write_private", write_slowly)
    limits = replace(LIMITS, prompt_bytes=1 << 30, prompt_folder=tmp_path)
    with serving(folders, keep_alive=0.0, limits=limits) as served:
        served.text("rabbit", prompt=PROMPT * 22)
        served.until(lambda states: states["rabbit"]["state"] == "not loaded")
        assert len(list(tmp_path.rglob("*.kv"))) == 2


def test_a_model_whose_prompts_cannot_be_kept_is_served_without(folders: dict[str, Path], tmp_path: Path) -> None:
    split(build_checkpoint(tmp_path / "mamba", FAMILIES["mamba2"], dtype=torch.float32))
    limits = replace(LIMITS, prompt_bytes=1 << 30, prompt_folder=tmp_path / "prompts")
    text = io.StringIO()
    console = Console(file=text, width=200)
    with serving({"rabbit": folders["rabbit"], "mamba": tmp_path / "mamba"}, limits=limits, console=console) as served:
        assert served.text("mamba") == plain_text(tmp_path / "mamba", 8)
        assert served.text("rabbit")
        kept = {service.settings.name: service.batch.stats.prompt_limit_bytes for service in served.models.services}
        assert kept == {"mamba": 0, "rabbit": 1 << 30}
    said = " ".join(text.getvalue().split())
    assert "prompts of mamba are not kept on disk: its KV caches do not go on with further tokens" in said
    assert "of rabbit" not in said


def test_a_model_that_cannot_be_loaded(folders: dict[str, Path], expected: dict[str, str], tmp_path: Path) -> None:
    with serving({**folders, "nobody": tmp_path / "nobody"}) as served:
        assert served.text("rabbit") == expected["rabbit"]
        refused = served.post("nobody")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (500, "model_not_loaded")
        assert error["message"].startswith("The model 'nobody' cannot be loaded: ")
        assert str(tmp_path) not in refused.text
        assert served.states()["nobody"]["error"]
        assert served.text("rabbit") == expected["rabbit"]
        assert served.text("hare") == expected["hare"]
        assert served.loads == ["rabbit", "hare"]
        assert served.get("/health")["status"] == "ok"


def test_requests_that_wait_for_a_load(folders: dict[str, Path], expected: dict[str, str]) -> None:
    go = threading.Event()
    with (
        serving(folders, before=lambda name: go.wait(PATIENCE), seconds=PATIENCE) as served,
        ThreadPoolExecutor(3) as pool,
    ):
        answers = [pool.submit(served.text, "rabbit") for _ in range(3)]
        states = served.until(lambda states: states["rabbit"]["waiting"] == 3)
        assert served.get("/health")["waiting"] == 3
        assert states["rabbit"]["state"] == "loading"
        served.models._most_waiting = 3
        busy = served.post("rabbit")
        assert (busy.status_code, busy.json()["error"]["code"]) == (429, "queue_full")
        entry = served.models.entry("rabbit")
        entry.settings = replace(entry.settings, seconds=0.05)
        served.models._most_waiting = 4
        late = served.post("rabbit")
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        go.set()
        assert [answer.result() for answer in answers] == [expected["rabbit"]] * 3


def test_the_end_during_a_load(folders: dict[str, Path]) -> None:
    """Whoever waits is refused; the server ends although the load goes on."""
    go = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with serving(folders, before=lambda name: go.wait(PATIENCE)) as served:
            answer = pool.submit(served.post, "rabbit")
            served.until(lambda states: states["rabbit"]["state"] == "loading")
        refused = answer.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert served.models.is_moving
        go.set()
        served.models._thread.join(PATIENCE)  # type: ignore[union-attr]
        PROMISES.clear()  # the model came too late to be closed
