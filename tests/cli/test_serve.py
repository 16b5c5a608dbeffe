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
from tests.support.demo_models import endless_model

PATIENCE = 120


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

    def until(self, wanted: str) -> re.Match[str]:
        limit = time.monotonic() + PATIENCE
        while (found := re.search(wanted, self.said)) is None:
            assert time.monotonic() < limit, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.05)
        return found

    def ended(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code


def command(folder: Path, *options: str) -> list[str]:
    start = [sys.executable, "-m", "rabbitllm", "serve", str(folder)]
    return [*start, "--device", "cpu", "--max-memory", "cpu=0", *options]


@contextlib.contextmanager
def serving(folder: Path, *options: str, **variables: str) -> Iterator[tuple[Process, str]]:
    process = subprocess.Popen(
        command(folder, "--port", "0", *options),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **variables},
    )
    said = Process(process)
    try:
        yield said, said.until(r"demo-model at (http://127\.0\.0\.1:\d+)")[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def ask(address: str, most: int, answers: list[Any]) -> threading.Thread:
    """Ask in a thread, which has an answer or an error in the end."""

    def go() -> None:
        try:
            body = {"prompt": "Q: 1", "max_tokens": most, "temperature": 0}
            with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
                answers.append(client.post(f"{address}/v1/completions", json=body).json())
        except httpx.HTTPError as error:
            answers.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    return thread


def runs(address: str) -> None:
    """Wait until a request takes part in passes."""
    with httpx.Client(trust_env=False) as client:
        limit = time.monotonic() + PATIENCE
        while not client.get(f"{address}/health").json()["running"]:
            assert time.monotonic() < limit
            time.sleep(0.02)


@pytest.mark.long
def test_it_says_where_it_is_and_ends_when_all_is_answered(endless: Path) -> None:
    with serving(endless) as (process, address):
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
        assert "shutting down: finishing running requests, within 30 s" in process.said
        assert "Traceback" not in process.said


@pytest.mark.long
def test_a_terminal_that_closes_lets_running_answers_finish(endless: Path) -> None:
    """The kernel and the shell both send SIGHUP."""
    with serving(endless) as (process, address):
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
def test_a_second_start_splits_nothing(endless: Path) -> None:
    with serving(endless):
        pass
    layers = {path: path.stat().st_mtime_ns for path in (endless / "splitted_model").iterdir()}
    with serving(endless, RABBITLLM_API_KEY="k") as (process, address):
        assert "split         existed, in " in process.said
        process.until(r"API key +required")
        assert httpx.get(f"{address}/v1/models", trust_env=False).status_code == 401
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
        assert all(isinstance(one, Exception) or one["error"]["code"] == "shutting_down" for one in answers)


def test_a_port_that_is_taken_is_found_out_before_the_model(endless: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = subprocess.run(command(endless, "--port", port), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (exit_codes.USAGE, "")
    assert done.stderr.startswith(f"error: Nothing can listen at 127.0.0.1, port {port}")
    assert "--port" in done.stderr


def test_a_folder_of_pictures_that_is_not_there(endless: Path, tmp_path: Path) -> None:
    wrong = command(endless, "--port", "0", "--media-dir", str(tmp_path / "nowhere"))
    done = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (exit_codes.USAGE, "")
    assert "nowhere is not a folder" in done.stderr


def test_what_is_missing_is_named(endless: Path) -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv = ['rabbitllm', 'serve', 'x']\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'uvicorn' else find(name, *a)\n"
        "from rabbitllm.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == exit_codes.ERROR
    assert "needs the package uvicorn" in done.stderr
    assert 'pip install ".[serve]" in a copy of the repository' in done.stderr


@pytest.mark.long
def test_other_machines_are_let_in_with_a_key_or_on_purpose_only(endless: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RABBITLLM_API_KEY"}
    done = subprocess.run(
        command(endless, "--port", "0", "--host", "0.0.0.0"),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == exit_codes.USAGE
    assert "Other machines reach the server at 0.0.0.0, port" in done.stderr
    assert "--insecure" in done.stderr
    assert "Traceback" not in done.stderr
    options = ("--host", "0.0.0.0", "--insecure", "--allow-host", "LLM.example")
    with serving(endless, *options, RABBITLLM_API_KEY="") as (said, address), httpx.Client(trust_env=False) as client:
        said.until("Every machine that reaches this address")
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
