"""A call that splits and loads decides each thing once: skeleton, load plan, tokenizer, config, headers, split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.auto_model import AutoModel
from tests.frozen.support import checkpoints
from tests.frozen.support.command_line import rabbitllm as command_line
from tests.support.call_counts import CallCounts, counted_calls

TOKENIZER = "AutoTokenizer.from_pretrained"
CONFIG = "rabbitllm/engine/skeleton.py:read_config"
SKELETON = "rabbitllm/engine/skeleton.py:build_skeleton"
RECIPES = "rabbitllm/engine/_weights.py:map_weights"
HEADER = "rabbitllm/store/layer_store.py:LayerStore._open"
ONCE_A_CALL = ("finding.py:find", "load_plan.py:LoadPlanner.__init__", "make.py:ensure_split")
LOAD: dict[str, Any] = {"device": "cpu", "show_layer_progress": False}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "model", shards=2)


def counts_of_loading(folder: Path, **options: Any) -> CallCounts:
    with counted_calls(TOKENIZER) as counts:
        AutoModel.from_pretrained(folder, **LOAD, **options)
    return counts


def layer_files(folder: Path) -> int:
    return len(list(folder.glob("splitted_model*/*.safetensors")))


@pytest.mark.parametrize("compression", [None, "4bit", "4bit-double", "8bit"])
def test_call_that_splits_and_loads(checkpoint: Path, compression: str | None) -> None:
    counts = counts_of_loading(checkpoint, sequential_shard_processing=True, compression=compression)
    assert (counts[SKELETON], counts[RECIPES], counts[CONFIG], counts[TOKENIZER]) == (1, 1, 1, 1)
    assert counts[HEADER] == layer_files(checkpoint) > 0


def test_a_config_without_a_dtype_needs_a_second_skeleton(tmp_path: Path) -> None:
    """The first skeleton is built before any header is read, and the dtype is that of the weights."""
    folder = checkpoints.write(tmp_path / "model", shards=2)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"dtype": "bfloat16",', ""))
    counts = counts_of_loading(folder, sequential_shard_processing=True)
    assert (counts[SKELETON], counts[RECIPES], counts[TOKENIZER]) == (2, 1, 1)


def test_a_finished_split(checkpoint: Path) -> None:
    AutoModel.from_pretrained(checkpoint, **LOAD)
    counts = counts_of_loading(checkpoint, max_memory={"cpu": 50_000})
    assert (counts[SKELETON], counts[RECIPES], counts[CONFIG], counts[TOKENIZER]) == (1, 1, 1, 1)
    assert counts[HEADER] == layer_files(checkpoint)


@pytest.mark.parametrize("command", ["run", "chat"])
def test_commands(checkpoint: Path, command: str) -> None:
    AutoModel.from_pretrained(checkpoint, **LOAD)
    words = [command, str(checkpoint), "--device", "cpu", "--max-new-tokens", "2", *(["a rabbit"] * (command == "run"))]
    with counted_calls(TOKENIZER) as counts:
        assert command_line(*words, stdin="a rabbit\n").code == 0
    for name in ONCE_A_CALL:
        assert sum(n for function, n in counts.items() if function.endswith(name)) == 1, name
    assert (counts[SKELETON], counts[RECIPES], counts[TOKENIZER]) == (1, 1, 1)


def test_the_plan_follows_what_the_split_made(checkpoint: Path) -> None:
    """The model of a call that also splits has the bits of one that finds the split finished."""
    ids = torch.tensor([[1, 40, 81, 7]])
    for compression in (None, "4bit-double"):
        options = {**LOAD, "compression": compression, "max_memory": {"cpu": 50_000}}
        models = [AutoModel.from_pretrained(checkpoint, **options) for _ in range(2)]
        assert models[0].placement == models[1].placement
        assert models[0].name_or_path == models[1].name_or_path
        with torch.inference_mode():
            first, second = (model(ids).logits for model in models)
        assert torch.equal(first, second)
