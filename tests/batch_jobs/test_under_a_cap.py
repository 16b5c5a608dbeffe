"""With less memory than the model has, and none to spare: every line is answered, and nothing is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.lib.process import ControlGroup, control_group
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import split

SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "head_dim": 64}
MORE = {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 1024, "eos_token_id": None}
PROMPTS, NEW_TOKENS = 24, 3


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    try:
        with control_group(f"rabbitllm-test-{os.getpid()}") as control:
            if not (control.folder / control.limit_file).exists():
                pytest.skip("control groups do not limit memory here")
            yield control
    except SystemExit as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "model"
    return split(build_checkpoint(path, "llama", dtype=torch.bfloat16, **SIZES, **MORE))


@pytest.mark.long
@pytest.mark.parametrize("cache_memory", ["8MB", "any"])
def test_prompts_that_do_not_fit(group: ControlGroup, folder: Path, tmp_path: Path, cache_memory: str) -> None:
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    arguments = (str(folder), str(tmp_path / "out.jsonl"), cache_memory, str(PROMPTS), "256", str(NEW_TOKENS))
    command = [*group.entering(), sys.executable, "-m", "tests.batch_jobs.capped_child", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "idle\n"
    group.limit_to_idle_and(weights)
    output, errors = process.communicate("go\n", timeout=600)
    assert process.returncode == 0, errors[-2000:]
    assert json.loads(output.splitlines()[-1]) == [PROMPTS * NEW_TOKENS, 0]
