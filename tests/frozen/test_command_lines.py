"""Commands, options, exit codes, and the structure of JSON on stdout, in files and over HTTP.

Values are not compared, keys and types are; something may be added. Prose is free.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.lib.server_process import free_port
from tests.frozen.support import checkpoints, golden
from tests.frozen.support.command_line import rabbitllm, tree
from tests.support.one_thread import one_thread as one_thread

TREE, JSON = "command_tree.json", "command_json.json"
PATIENCE = 600
ON_CPU = ("--device", "cpu")
STREAMED = (*ON_CPU, "--max-memory", "cpu=0")

Records = dict[str, Any]
"""name -> JSON value"""


def records_of_splits(folder: Path) -> Records:
    """What commands say that load no model."""
    model = checkpoints.write(folder / "model")
    found = {
        "pull --dry-run": rabbitllm("pull", model, "--compression", "4bit", "--dry-run", "--json").json,
        "pull": rabbitllm("pull", model, "--compression", "4bit", "--json").json,
        "pull of what is there": rabbitllm("pull", model, "--compression", "4bit", "--json").json,
    }
    split = model / "splitted_model.4bit"
    found |= {
        "split.json": json.loads((split / "split.json").read_text()),
        "ls": rabbitllm("ls", folder, "--json").json,
        "show of a split": rabbitllm("show", split, "--json").json,
        "show of a checkpoint": rabbitllm("show", model, "--json").json,
        "verify": rabbitllm("verify", model, "--json").json,
        "inspect of a checkpoint": rabbitllm("inspect", model, "--json").json,
        "inspect of a file": rabbitllm("inspect", model / checkpoints.SHARD.format(1, 3), "--json").json,
        "inspect of a split": rabbitllm("inspect", split, "--json").json,
        "convert": rabbitllm("convert", model, "--output", folder / "converted", "--json").json,
    }
    _flip_last_bit(split / "model.layers.0.safetensors")
    damaged = rabbitllm("verify", split, "--json")
    found["verify of a damaged split"] = json.loads(damaged.out)
    found["verify --repair"] = rabbitllm("verify", split, "--repair", "--json").json
    return found | {"rm": rabbitllm("rm", split, "--yes", "--json").json}


LINES: list[dict[str, Any]] = [
    {"id": "text", "prompt": "a rabbit"},
    {"id": "tokens", "tokens": [1, 40, 81]},
    {"id": "chat", "messages": [{"role": "user", "content": "a hare"}]},
    {"id": "two", "prompt": "a rabbit", "n": 2, "temperature": 1.0},
    {"id": "likelihood", "context": "a rabbit", "continuation": " eats"},
    {"id": "likelihoods", "context": "a rabbit", "continuation": [" eats", " sleeps"]},
    {"id": "choices", "context": "a rabbit", "choices": ["eats", "sleeps"]},
    {"id": "embedding", "input": "a rabbit"},
    {"id": "embeddings", "input": ["a rabbit", "a hare"]},
    {"id": "refused", "prompt": 7},
    *(
        {"custom_id": url, "method": "POST", "url": url, "body": {"model": "m", **body}}
        for url, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a hare"}], "max_tokens": 2}),
            ("/v1/completions", {"prompt": "a hare", "max_tokens": 2}),
            ("/v1/embeddings", {"input": "a hare"}),
        )
    ),
    {"custom_id": "wrong", "method": "POST", "url": "/v1/nothing", "body": {}},
]


def records_of_models(folder: Path) -> Records:
    """What commands say that load one."""
    model = checkpoints.write(folder / "model")
    text = folder / "text.txt"
    text.write_text("the rabbit and the hare and the rabbit\n" * 20)
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    answers = folder / "out.jsonl"
    few = ("--max-new-tokens", "2")
    found = {
        "plan": rabbitllm("plan", model, *STREAMED, "--bandwidth", "1GB", "--json").json,
        "run": rabbitllm("run", model, "a rabbit", *STREAMED, *few, "--json").json,
        "bench": rabbitllm(
            "bench", model, *STREAMED, "--tokens", "2", "--prompt-tokens", "4", "--turns", "1", "--json"
        ).json,
        "quality": rabbitllm(
            "quality", model, "--compression", "8bit", *ON_CPU, "--text", text, "--tokens", "32", "--json"
        ).json,
        "batch": rabbitllm("batch", model, folder / "in.jsonl", "-o", answers, *STREAMED, *few, "--json").json,
        "doctor": rabbitllm("doctor", "--quick", "--json").json,
        "demo": rabbitllm("demo", "--problems", "4", "--json").json,
    }
    for line in map(json.loads, answers.read_text().splitlines()):
        found[f"batch line: {line.get('custom_id') or line['id']}"] = line
    return found


def structures(records: Records) -> dict[str, Any]:
    """Of each record; of the doctor's the keys alone, since much of it is null on other machines."""
    found = {name: golden.structure_of(record) for name, record in records.items()}
    if "doctor" in found:
        found["doctor"] = golden.keys_of(found["doctor"])
    return found


def make(folder: Path) -> None:
    """Write the golden files; for `tests.frozen.make`."""
    golden.write(TREE, tree())
    (folder / "models").mkdir()
    with served(folder / "served") as (client, _):
        http = asked(client)
    records = {"splits": records_of_splits(folder), "models": records_of_models(folder / "models"), "http": http}
    golden.write(JSON, {kind: structures(found) for kind, found in records.items()})


def test_commands_and_options() -> None:
    assert golden.unexcused(golden.read(TREE), tree()) == []


@pytest.mark.long
def test_json_of_splits(tmp_path: Path) -> None:
    assert golden.unexcused(golden.read(JSON)["splits"], structures(records_of_splits(tmp_path))) == []


@pytest.mark.long
def test_json_of_models(tmp_path: Path) -> None:
    assert golden.unexcused(golden.read(JSON)["models"], structures(records_of_models(tmp_path))) == []


def _flip_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.long
def test_exit_codes(tmp_path: Path) -> None:
    model = checkpoints.write(tmp_path / "model")
    other = checkpoints.write(tmp_path / "other", seed=9)
    no_tensor = checkpoints.write(tmp_path / "no_tensor")
    (no_tensor / checkpoints.SHARD.format(2, 3)).unlink()
    (tmp_path / "note.txt").write_text("no weights")
    (tmp_path / "empty").mkdir()
    table: list[tuple[int, tuple[object, ...]]] = [
        (0, ("--version",)),
        (0, ("--help",)),
        (0, ("pull", "--help")),
        (2, ()),
        (2, ("nothing",)),
        (2, ("pull",)),
        (2, ("pull", model, "--nothing")),
        (2, ("pull", model, "--compression", "3bit")),
        (2, ("pull", model, "--max-disk", "much")),
        (2, ("pull", model, "--sequential", "--keep-shards")),
        (2, ("pull", model, "--shard-transfer", "pigeon")),
        (2, ("run", model, "x", "--max-new-tokens", "some")),
        (2, ("run", model, "x", "--max-memory", "24GiB")),
        (2, ("run", model, "x", "--device", "abacus")),
        (2, ("batch", model, tmp_path / "in.jsonl")),
        (2, ("convert", model)),
        (2, ("worker", model)),
        (1, ("pull", tmp_path / "nowhere")),
        (1, ("pull", tmp_path / "empty")),
        (1, ("pull", no_tensor)),
        (1, ("pull", model, "--max-disk", "1kB")),
        (1, ("pull", model, "--max-disk", "1kB", "--dry-run")),
        (1, ("inspect", tmp_path / "note.txt")),
        (1, ("show", tmp_path / "nowhere")),
        (1, ("verify", model)),
        (1, ("rm", model, "--yes")),
        (0, ("pull", model)),
        (0, ("pull", model)),
        (1, ("pull", other, "--dir", model)),
        (0, ("verify", model)),
        (0, ("ls", tmp_path)),
        (2, ("rm", model)),  # without a terminal to agree at
    ]
    found = [(rabbitllm(*arguments).code, arguments) for _, arguments in table]
    split = model / "splitted_model"
    _flip_last_bit(split / "model.layers.1.safetensors")
    further: list[tuple[int, tuple[object, ...]]] = [
        (1, ("verify", split)),
        (1, ("run", split, "x", *ON_CPU, "--max-new-tokens", "1")),
        (0, ("verify", split, "--repair")),
        (0, ("verify", split)),
        (1, ("rm", tmp_path / "empty", "--yes")),
        (0, ("rm", split, "--yes")),
    ]
    found += [(rabbitllm(*arguments).code, arguments) for _, arguments in further]
    assert found == [*table, *further]


def process(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """The command as a process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-m", "rabbitllm", *map(str, arguments)], text=True, **pipes)


@pytest.mark.long
def test_interrupted_is_130(tmp_path: Path) -> None:
    model = checkpoints.write(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100_000, "eos_token_id": 319}))
    running = process("run", model, "a rabbit", *STREAMED, "--max-new-tokens", "90000", "--raw")
    assert running.stdout is not None
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130, said


@pytest.mark.long
def test_reader_that_is_gone_is_141() -> None:
    read, write = os.pipe()
    os.close(read)
    running = process("ls", "--json", stdout=write)
    os.close(write)
    assert (running.wait(PATIENCE), running.stderr.read() if running.stderr else "") == (141, "")


@contextlib.contextmanager
def served(folder: Path, *options: object) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """A server of a tiny model of its own that makes embeddings, and a client."""
    folder.mkdir(exist_ok=True)
    model = checkpoints.write(folder / "model")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (model / "modules.json").write_text(
        json.dumps(
            [
                {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for number, (path, kind) in enumerate(modules)
            ]
        )
    )
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False})
    )
    port = free_port()
    running = process("serve", model, "--port", port, *STREAMED, *options, stdout=None, stderr=subprocess.DEVNULL)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False)
    try:
        limit = time.monotonic() + PATIENCE
        while True:
            assert running.poll() is None, "the server has ended"
            with contextlib.suppress(httpx.TransportError):
                if client.get("/health").status_code == 200:
                    break
            assert time.monotonic() < limit
            time.sleep(0.1)
        yield client, running
    finally:
        client.close()
        running.send_signal(signal.SIGINT)
        try:
            assert running.wait(PATIENCE) == 0
        finally:
            running.kill()


CHAT = {"messages": [{"role": "user", "content": "a rabbit"}], "max_tokens": 3}
TEXT = {"prompt": "a rabbit", "max_tokens": 3}


def asked(client: httpx.Client) -> Records:
    """What a server answers, by what it was asked."""

    def post(path: str, body: Any) -> Any:
        return client.post(f"/v1/{path}", json=body)

    answers: dict[str, Callable[[], Any]] = {
        "models": lambda: client.get("/v1/models"),
        "model": lambda: client.get("/v1/models/model"),
        "health": lambda: client.get("/health"),
        "status": lambda: client.get("/status"),
        "chat": lambda: post("chat/completions", CHAT),
        "chat with logprobs": lambda: post("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
        "completion": lambda: post("completions", TEXT),
        "completion with logprobs": lambda: post("completions", {**TEXT, "logprobs": 2}),
        "logprobs of what was given": lambda: post("completions", {**TEXT, "logprobs": 2, "echo": True}),
        "embeddings": lambda: post("embeddings", {"input": ["a", "b"]}),
        "embeddings in base64": lambda: post("embeddings", {"input": "a", "encoding_format": "base64"}),
        "no JSON": lambda: client.post("/v1/completions", content=b"{"),
        "another model": lambda: post("completions", {**TEXT, "model": "other"}),
        "a field that cannot be honoured": lambda: post("completions", {**TEXT, "suffix": "b"}),
        "more than the context": lambda: post("completions", {**TEXT, "max_tokens": 5000}),
        "no such path": lambda: client.get("/v1/nothing"),
        "a wrong method": lambda: client.get("/v1/completions"),
        "another host": lambda: client.get("/v1/models", headers={"Host": "elsewhere.example"}),
    }
    found: Records = {}
    for name, answer in answers.items():
        got = answer()
        found[name] = {"status": {str(got.status_code): True}, "body": got.json()}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    found["chat chunks"] = {"chunks": _chunks(client, "chat/completions", {**CHAT, **usage})}
    found["completion chunks"] = {"chunks": _chunks(client, "completions", {**TEXT, **usage})}
    found["metrics"] = _metrics(client.get("/metrics").text)
    return found


def _chunks(client: httpx.Client, path: str, body: Any) -> dict[str, Any]:
    """The chunks of a stream, what their deltas have, and the line that ends it; how many tokens are in one is free."""
    with client.stream("POST", f"/v1/{path}", json=body) as response:
        kind = response.headers["content-type"].partition(";")[0]
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    *chunks, end = data
    parsed = list(map(json.loads, chunks))
    deltas = [choice["delta"] for chunk in parsed for choice in chunk["choices"] if "delta" in choice]
    return {"all": parsed, "deltas": {k: v for one in deltas for k, v in one.items()}, kind: True, end: True}


def _metrics(text: str) -> dict[str, dict[str, Any]]:
    """Name -> kind, and the names of its labels."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    found: dict[str, dict[str, Any]] = {name: {kind: True} for name, kind in kinds.items()}
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE):
        family = re.sub(r"_(bucket|sum|count)$", "", name) if name not in kinds else name
        found[family] |= dict.fromkeys(re.findall(r'(\w+)="', labels), True)
    return found


@pytest.mark.long
def test_http(tmp_path: Path) -> None:
    with served(tmp_path / "served") as (client, _):
        found = structures(asked(client))
    assert golden.unexcused(golden.read(JSON)["http"], found) == []


@pytest.mark.long
def test_a_server_with_a_key_wants_it(tmp_path: Path) -> None:
    with served(tmp_path / "served", "--api-key", "secret") as (client, _):
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert client.get("/metrics").status_code == 401
