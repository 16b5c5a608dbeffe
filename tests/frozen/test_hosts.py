"""One model over several processes on this machine: the logits and tokens of one alone."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm import AutoModel, Hosts, RabbitLLMError
from tests.frozen.support.command_line import rabbitllm as call
from tests.frozen.support.commands import PATIENCE, begin
from tests.frozen.support.commands import started as started
from tests.frozen.support.families import INPUT, build, plain_model
from tests.frozen.support.talking import Reference, talker
from tests.frozen.test_generate import WAYS, generated
from tests.support.one_thread import one_thread as one_thread

pytestmark = pytest.mark.long
CPU = ("--device", "cpu")


@pytest.mark.parametrize("family", ["llama", "mixtral", "falcon_h1"])
def test_a_worker_computes_its_layers(tmp_path: Path, family: str, started: list[subprocess.Popen[str]]) -> None:
    folder = build(tmp_path / "model", family)
    plain = plain_model(folder, family)
    assert call("pull", folder).code == 0

    def announce(address: str) -> None:
        started.append(begin("worker", folder, "--join", address, *CPU))

    hosts = Hosts("127.0.0.1:0", 1, announce=announce)
    model: Any = AutoModel.from_pretrained(folder, device="cpu", show_layer_progress=False, hosts=hosts)
    assert "on another host" in {placed.tier.value for placed in model.placement.units}
    with torch.inference_mode():
        assert torch.equal(model(INPUT).logits, plain(INPUT).logits)
    for way in ("greedy", "drawn", "beams", "prompt-lookup"):
        if (family, way) != ("falcon_h1", "prompt-lookup"):
            assert torch.equal(generated(model, INPUT, **WAYS[way]), generated(plain, INPUT, **WAYS[way])), way
    how = {"do_sample": False, "tokenizer": model.tokenizer, "stop_strings": ["+"]}
    assert torch.equal(generated(model, INPUT, **how), generated(plain, INPUT, **how))
    model.hosts.close()
    assert started[0].wait(PATIENCE) == 0


def test_a_worker_that_is_killed_is_an_error(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    folder = build(tmp_path / "model", "llama")
    assert call("pull", folder).code == 0

    def announce(address: str) -> None:
        started.append(begin("worker", folder, "--join", address, *CPU))

    hosts = Hosts("127.0.0.1:0", 1, announce=announce)
    model: Any = AutoModel.from_pretrained(folder, device="cpu", show_layer_progress=False, hosts=hosts)
    started[0].kill()
    started[0].wait()
    with pytest.raises(RabbitLLMError):
        model(INPUT)


def test_run_with_a_worker(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    folder = talker(tmp_path / "model")
    reference = Reference(folder)
    assert call("pull", folder).code == 0
    drawn = ("--temperature", "0.9", "--seed", "4", "--max-new-tokens", "12", "--raw", "--json")
    first = begin("run", folder, "the rabbit", *drawn, *CPU, "--workers", 1, "--address", "127.0.0.1:0")
    started.append(first)
    assert first.stderr is not None
    asked = re.search(r"rabbitllm worker (\S+) --join (\S+)", first.stderr.readline())
    assert asked is not None
    started.append(begin("worker", asked[1], "--join", asked[2], *CPU))
    said, notes = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, notes
    found = json.loads(said)
    assert found["tokens"] == reference.tokens(reference.ids("the rabbit"), 12, seed=4, temperature=0.9)
    assert started[1].wait(PATIENCE) == 0
