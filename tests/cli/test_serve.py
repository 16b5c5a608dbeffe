"""`rabbitllm serve` as a process: what it says, signals, and a second start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rabbitllm.cli import exit_codes
from rabbitllm.errors import OptionError, RabbitLLMError
from tests.support.commands import invoke
from tests.support.demo_models import demo_model, endless_model
from tests.support.mtp_heads import build_with_head, make_predictable

PATIENCE = 600
ALL_THE_TIME = ("--grace", "600")
"""An answer that is to be finished is cut short on no machine, however busy."""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model without an end: it goes on until it is stopped."""
    return endless_model(tmp_path_factory.mktemp("serve") / "demo-model")


class Process:
    """A server, and what it has said on stderr so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def until(self, pattern: str) -> re.Match[str]:
        limit = time.monotonic() + PATIENCE
        while (match := re.search(pattern, self.said)) is None:
            assert time.monotonic() < limit, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.05)
        return match

    def ended(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code


def words(folder: Path, *options: str) -> list[str]:
    return ["serve", str(folder), "--device", "cpu", "--max-memory", "cpu=0", *options]


def command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "rabbitllm", *words(folder, *options)]


@contextlib.contextmanager
def serving(folder: Path, *options: str, **variables: str) -> Iterator[tuple[Process, str]]:
    process = subprocess.Popen(
        command(folder, "--port", "0", *options),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **variables},
    )
    watched = Process(process)
    try:
        yield watched, watched.until(r"demo-model at (http://127\.0\.0\.1:\d+)")[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def ask(address: str, max_tokens: int, answers: list[Any]) -> threading.Thread:
    """Ask in a thread, which has an answer or an error in the end."""

    def go() -> None:
        try:
            body = {"prompt": "Q: 1", "max_tokens": max_tokens, "temperature": 0}
            with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
                answers.append(client.post(f"{address}/v1/completions", json=body).json())
        except httpx.HTTPError as error:
            answers.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    return thread


def runs(address: str) -> None:
    """Wait until a request takes part in passes."""
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
        limit = time.monotonic() + PATIENCE
        while not client.get(f"{address}/health").json()["running"]:
            assert time.monotonic() < limit
            time.sleep(0.02)


@pytest.mark.long
def test_server_prints_its_address_and_shuts_down(endless: Path) -> None:
    with serving(endless, *ALL_THE_TIME) as (process, address):
        process.until("split         made, in ")
        line = process.until(r"try +(curl .+)")[1]
        tried = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=PATIENCE, check=False)
        if tried.returncode != 127:  # there is no curl everywhere
            assert json.loads(tried.stdout)["usage"]["completion_tokens"] == 64
            process.until(
                r"POST /v1/chat/completions 200, \d+ \+ 64 tokens, first after [\d.]+ s, then [\d.]+ tokens/s"
            )
        answers: list[Any] = []
        thread = ask(address, 100, answers)
        runs(address)
        process.process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0]["usage"]["completion_tokens"] == 100
        assert process.ended() == exit_codes.SUCCESS
        assert "shutting down: finishing running requests, within 600 s" in process.said
        assert "Traceback" not in process.said


@pytest.mark.long
def test_closed_terminal_lets_running_answers_finish(endless: Path) -> None:
    """The kernel and the shell both send SIGHUP."""
    with serving(endless, *ALL_THE_TIME) as (process, address):
        answers: list[Any] = []
        thread = ask(address, 100, answers)
        runs(address)
        process.process.send_signal(signal.SIGHUP)
        process.until("shutting down")
        process.process.send_signal(signal.SIGHUP)
        thread.join()
        assert answers[0]["usage"]["completion_tokens"] == 100
        assert process.ended() == exit_codes.SUCCESS
        assert "Traceback" not in process.said


@pytest.mark.long
def test_second_start_uses_the_split(endless: Path) -> None:
    with serving(endless):
        pass
    layers = {path: path.stat().st_mtime_ns for path in (endless / "splitted_model").iterdir()}
    with serving(endless, RABBITLLM_API_KEY="k") as (process, address):
        assert "split         existed, in " in process.said
        process.until(r"API key +required")
        assert httpx.get(f"{address}/v1/models", timeout=PATIENCE, trust_env=False).status_code == 401
    assert {path: path.stat().st_mtime_ns for path in layers} == layers


@pytest.mark.long
def test_a_second_signal_ends_it_at_once(endless: Path) -> None:
    with serving(endless, "--max-running", "1") as (process, address):
        answers: list[Any] = []
        threads = [ask(address, 490, answers) for _ in range(4)]
        runs(address)
        process.process.send_signal(signal.SIGINT)
        process.until("shutting down")
        process.process.send_signal(signal.SIGINT)
        assert process.ended() == exit_codes.INTERRUPTED
        assert "Traceback" not in process.said
        for thread in threads:
            thread.join()
        assert len(answers) == 4
        assert all(isinstance(answer, Exception) or answer["error"]["code"] == "shutting_down" for answer in answers)


def test_used_port_is_refused_before_loading(endless: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        process = subprocess.run(command(endless, "--port", port), capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (exit_codes.USAGE, "")
    assert process.stderr.startswith(f"error: Nothing can listen at 127.0.0.1, port {port}")
    assert "--port" in process.stderr


def test_a_model_as_its_own_draft_without_room_for_copies_is_refused(endless: Path) -> None:
    with pytest.raises(OptionError, match="are lacking for the smallest ones"):
        invoke(*words(endless, "--port", "0", "--draft", "self"))


@pytest.mark.long
def test_drafts_of_models_that_are_loaded_again(tmp_path: Path) -> None:
    """Heads of one model and of two, and a draft model: each load has them, answers are those without a draft."""
    folders = [make_predictable(build_with_head(tmp_path / name, "qwen3_5"), "right") for name in ("demo-model", "b")]
    alone, two = [str(folders[0])], [f"{name}={folder}" for name, folder in zip("ab", folders, strict=True)]
    expected = dict[str, str]()
    for models, draft, brings in (
        (alone, "none", None),
        (alone, "mtp", "mtp"),
        (alone, str(folders[1]), "a draft model"),
        (two, "mtp", "mtp"),
    ):
        start = [sys.executable, "-m", "rabbitllm", "serve", *models, "--draft", draft, "--port", "0"]
        with subprocess.Popen(
            [*start, "--device", "cpu"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        ) as process:
            try:
                watched = Process(process)
                address = watched.until(r" at (http://127\.0\.0\.1:\d+)")[1]
                for name in ["demo-model"] * 2 if models is alone else ["a", "b", "a"]:
                    text = answer_of_one_loaded(address, name, brings)
                    assert text == expected.setdefault(name.replace("a", "demo-model"), text)
            finally:
                process.kill()


def answer_of_one_loaded(address: str, name: str, brings: str | None) -> str:
    """The answer of a model, which is loaded before it and unloaded afterwards."""
    body = {"model": name, "prompt": "Q: 1", "max_tokens": 64, "temperature": 0}
    with httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False, params={"model": name}) as client:
        client.post("/api/generate", json={"model": name, "prompt": "", "keep_alive": -1})
        text: str = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        status = client.get("/status").json()
        assert (status["accepted_tokens"] > 0) == (brings is not None)
        assert brings in (None, status["drafts"]["name"])
        client.post("/api/generate", json={"model": name, "prompt": "", "keep_alive": 0})
        states, limit = {name: "loaded"}, time.monotonic() + PATIENCE
        while states[name] != "not loaded":
            assert time.monotonic() < limit
            states = {model["id"]: model["state"] for model in client.get("/status").json()["models"]}
    return text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["model"], "Two models have one name (model)."),
        (["other=model", "--served-name", "a"], "--served-name is for one model, and 2 are to be served."),
        (["other=model", "--dir", "a"], "--dir is for one model"),
        (["other=model", "--draft", "model"], "--draft model is for one model"),
    ],
)
def test_options_of_one_model_are_refused_for_several(
    options: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(demo_model(tmp_path / "model").parent)
    with pytest.raises(OptionError) as refused:
        invoke("serve", "model", *options, "--port", "0")
    assert problem in refused.value.problem


def damaged(folder: Path, what: str) -> Path:
    """The bundled model, which lacks something."""
    demo_model(folder)
    if what == "shard":
        max(folder.glob("*.safetensors")).unlink()
    elif what == "tokenizer":
        (folder / "tokenizer.json").unlink()
    elif what == "config":
        (folder / "config.json").write_text("{")
    return folder


@pytest.mark.parametrize("options", [[], ["--no-split"], ["--compression", "8bit"]])
@pytest.mark.parametrize(
    ("what", "option", "problem"),
    [
        ("shard", [], "model-00012-of-00012.safetensors"),
        ("tokenizer", [], "has no tokenizer"),
        ("config", [], "not a valid JSON file"),
        ("", ["--thinking"], "does not read enable_thinking"),
        ("", ["--draft", "mtp"], "has no usable heads"),
        ("", ["--draft", "self", "--max-memory", "cpu=0"], "lacking for the smallest ones"),
    ],
)
def test_each_of_several_models_is_checked_at_the_start(
    what: str, option: list[str], problem: str, options: list[str], tmp_path: Path
) -> None:
    """From headers and small files: nothing is split."""
    folders = {"a": demo_model(tmp_path / "sound"), "b": damaged(tmp_path / "folder", what)}
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    models = [f"{name}={folder}" for name, folder in folders.items()]
    with pytest.raises(RabbitLLMError, match=problem) as refused:
        invoke("serve", *models, "--port", "0", "--device", "cpu", *option, *options)
    assert refused.value.problem.startswith("b: " if what else "a: ")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.long
def test_limits_caches_and_options_of_answers(endless: Path, tmp_path: Path) -> None:
    """What the flags say is what the server does."""
    flags = ("--max-running", "2", "--max-queue", "3", "--key-running", "1", "--key-waiting", "1")
    caches = ("--prompt-cache", "64MB", "--keep-alive", "1.5")
    answers = ("--temperature", "0.5", "--min-p", "0.1", "--repeat-penalty", "1.2", "--presence-penalty", "0.5")
    home = {"RABBITLLM_API_KEY": "a,b", "RABBITLLM_HOME": str(tmp_path)}
    with serving(endless, *flags, *caches, *answers, **home) as (process, address):
        process.until(r"at most 2 running, 3 waiting;.*prompts on disk: 0 bytes of 64\.00 MB")
        with httpx.Client(timeout=PATIENCE, trust_env=False, headers={"authorization": "Bearer a"}) as client:
            sampling = client.get(f"{address}/status").json()["sampling"]
            expected = {"temperature": 0.5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5}
            assert {name: sampling[name] for name in expected} == expected
            body = {"prompt": "Q: 1", "max_tokens": 400, "n": 2, "temperature": 0}
            running = threading.Thread(target=lambda: client.post(f"{address}/v1/completions", json=body))
            running.start()
            while client.get(f"{address}/health").json()["waiting"] < 1:  # the key may run one at a time
                assert running.is_alive()
            assert client.get(f"{address}/health").json()["running"] == 1
            refused = client.post(f"{address}/v1/completions", json={**body, "n": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            running.join()
            limit = time.monotonic() + PATIENCE
            while client.get(f"{address}/status").json()["models"][0]["state"] != "not loaded":
                assert time.monotonic() < limit
                time.sleep(0.1)
    assert list(tmp_path.glob("prompts/**/*"))


@pytest.mark.long
def test_several_models(endless: Path) -> None:
    """They are loaded on request; a signal ends the server while one is being loaded, too."""
    models = {"a": endless, "b": endless}
    start = [sys.executable, "-m", "rabbitllm", "serve", *(f"{name}={folder}" for name, folder in models.items())]
    process = subprocess.Popen(
        [*start, "--port", "0", "--device", "cpu", "--max-memory", "cpu=0"], stderr=subprocess.PIPE, text=True
    )
    watched = Process(process)
    try:
        address = watched.until(r"a, b at (http://127\.0\.0\.1:\d+)")[1]
        with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
            for name in ("b", "a", "b"):
                body = {"model": name, "prompt": "Q: 1", "max_tokens": 4, "temperature": 0}
                answer = client.post(f"{address}/v1/completions", json=body).json()
                assert (answer["model"], answer["usage"]["completion_tokens"]) == (name, 4)
            answers: list[Any] = []
            thread = ask(address, 400, answers)  # of the first model, which has to be loaded again
            while client.get(f"{address}/status").json()["models"][0]["state"] == "not loaded":
                assert thread.is_alive()
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert watched.ended() == exit_codes.SUCCESS
        assert "choices" in answers[0] or answers[0]["error"]["code"] == "shutting_down"
        assert "Traceback" not in watched.said
    finally:
        process.kill()


def test_missing_media_folder_is_refused(endless: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nowhere is not a folder"):
        invoke(*words(endless, "--port", "0", "--media-dir", str(tmp_path / "nowhere")))


def test_a_server_that_takes_no_body_is_refused(endless: Path) -> None:
    with pytest.raises(OptionError, match="--max-body=0MB; expected at least 1"):
        invoke(*words(endless, "--port", "0", "--max-body", "0MB"))


@pytest.mark.long
def test_public_address_needs_a_key_or_insecure(endless: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RABBITLLM_API_KEY"}
    process = subprocess.run(
        command(endless, "--port", "0", "--host", "0.0.0.0"),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert process.returncode == exit_codes.USAGE
    assert "Other machines reach the server at 0.0.0.0, port" in process.stderr
    assert "--insecure" in process.stderr
    assert "Traceback" not in process.stderr
    options = ("--host", "0.0.0.0", "--insecure", "--allow-host", "LLM.example")
    client = httpx.Client(timeout=PATIENCE, trust_env=False)
    with serving(endless, *options, RABBITLLM_API_KEY="") as (log, address), client:
        log.until("Every machine that reaches this address")
        for host, status in (
            ("llm.example:8000", 200),
            ("localhost", 200),
            ("192.168.1.5:8000", 200),
            ("[fe80::1]", 200),
            (socket.gethostname(), 200),
            ("rebound.example", 403),
            ("127.0.0.1.rebound.example", 403),
        ):
            answer = client.get(f"{address}/v1/models", headers={"host": host})
            assert answer.status_code == status, (host, answer.text)
            assert status == 200 or answer.json()["error"]["code"] == "wrong_host"
