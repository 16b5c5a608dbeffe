"""`rabbitllm worker` in a process of its own, asked by this one and by `rabbitllm run`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rabbitllm import AutoModel, Hosts
from rabbitllm.cli.arguments import ModelOptions
from rabbitllm.errors import HostGoneError, OptionError
from rabbitllm.run import hosts_for, local_device
from tests.frozen.support.commands import begin, command
from tests.frozen.support.commands import started as started
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import INPUT, one_thread, plain_model, split  # noqa: F401  a fixture that applies by itself

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_checkpoint(tmp_path_factory.mktemp("worker") / "model", "llama", tied=True)
    split(folder)
    return folder


@pytest.mark.long
def test_worker_serves_a_model_until_killed(checkpoint: Path, started: list[subprocess.Popen[str]]) -> None:
    def call(address: str) -> None:
        started.append(begin("worker", checkpoint, "--join", address, "--device", "cpu"))

    hosts = Hosts("127.0.0.1:0", 1, announce=call)
    model = AutoModel.from_pretrained(checkpoint, device="cpu", show_layer_progress=False, hosts=hosts)
    plain = plain_model(checkpoint)
    assert str(model.placement).count("on another host") == 1
    with torch.inference_mode():
        assert torch.equal(model(INPUT).logits, plain(INPUT).logits)
    started[0].send_signal(signal.SIGKILL)
    started[0].wait()
    with pytest.raises(HostGoneError, match=r"process 1 .*has ended"):
        model(INPUT)
    with pytest.raises(HostGoneError, match="start all processes again"):
        model.generate(INPUT, max_new_tokens=2)


@pytest.mark.long
@pytest.mark.parametrize("ends", ["done", "driver killed"])
def test_run_with_workers(checkpoint: Path, started: list[subprocess.Popen[str]], ends: str) -> None:
    how = ["the rabbit", "--raw", "--device", "cpu", "--max-new-tokens"]
    much = ["8", "--json", "--dtype", "float32", "--no-fast-bfloat16"] if ends == "done" else ["240"]
    first = begin("run", checkpoint, *how, *much, "--workers", 2, "--address", "127.0.0.1:0")
    started.append(first)
    assert first.stderr is not None
    assert first.stdout is not None
    match = re.search(r"waiting for 2 workers: rabbitllm (worker .*)", first.stderr.readline())
    assert match is not None
    workers = [begin(*match[1].split(), "--device", "cpu") for _ in range(2)]
    started += workers
    if ends == "done":
        record: dict[str, Any] = json.loads(first.communicate()[0])
        alone = subprocess.run(command("run", checkpoint, *how, *much), capture_output=True, text=True)
        assert record["tokens"] == json.loads(alone.stdout)["tokens"]
    else:
        assert first.stdout.read(1)
        first.kill()
    for worker in workers:
        errors = worker.communicate()[1]
        assert worker.returncode == (0 if ends == "done" else 1), errors
        assert re.search(r"ready: layers \d to \d, of 3 hosts", errors)
        assert ("the first process has ended" if ends == "done" else "error: process 0") in errors


@pytest.mark.long
def test_under_torchrun_the_first_one_answers(checkpoint: Path) -> None:
    how = ["run", str(checkpoint), "the rabbit", "--raw", "--device", "cpu", "--max-new-tokens", "8", "--json"]
    alone = subprocess.run(command(*how), capture_output=True, text=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.run([*torchrun, "-m", "rabbitllm", *how], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["tokens"] == json.loads(alone.stdout)["tokens"]


def test_options_that_workers_need_are_in_their_command() -> None:
    console = Console(record=True, width=200)
    options = ModelOptions(compression="4bit", dtype="float32", revision="v1", no_split=True, device="cpu")
    hosts = hosts_for(1, "10.0.0.1:1", options.for_workers("a model"), console, {})
    assert hosts is not None
    assert hosts.announce is not None
    hosts.announce("10.0.0.1:1")
    said = "rabbitllm worker 'a model' --compression 4bit --dtype float32 --revision v1 --no-split --join 10.0.0.1:1"
    assert console.export_text() == f"waiting for 1 worker: {said}\n"


def test_hosts_of_options_and_environment() -> None:
    console = Console(quiet=True)
    assert hosts_for(0, None, "m", console, {}) is None
    assert hosts_for(0, None, "m", console, {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert hosts_for(0, None, "m", console, {**TORCHRUN, "RANK": ""}) is None
    assert hosts_for(0, None, "m", console, TORCHRUN) == Hosts("127.0.0.1:29500", 0, 1)
    assert hosts_for(0, None, "m", console, {**TORCHRUN, "RANK": "0"}) == Hosts("127.0.0.1:29500", 2, 0)
    hosts = hosts_for(2, "10.0.0.1:29500", "m", console, TORCHRUN)
    assert hosts is not None
    assert (hosts.address, hosts.workers, hosts.rank, hosts.is_first) == ("10.0.0.1:29500", 2, None, True)
    for workers, address in ((1, None), (0, "10.0.0.1:29500")):
        with pytest.raises(OptionError, match="used together"):
            hosts_for(workers, address, "m", console, {})
    with pytest.raises(OptionError, match="contradict each other"):
        hosts_for(0, None, "m", console, {**TORCHRUN, "RANK": "3"})
    with pytest.raises(OptionError, match="is not an address"):
        hosts_for(1, "10.0.0.1", "m", console, {})
    with pytest.raises(OptionError, match="workers >= 0"):
        Hosts("10.0.0.1:29500", -1)


def test_devices_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts.of_torchrun(TORCHRUN)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device(None, hosts, TORCHRUN) == "cuda:1"
    assert local_device("cpu", hosts, TORCHRUN) == "cpu"
    assert local_device(None, None, TORCHRUN) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert local_device(None, hosts, TORCHRUN) is None
