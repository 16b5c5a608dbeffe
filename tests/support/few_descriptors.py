"""A process that may have few open files, and a checkpoint of more: one act with it, named on the command line.

    python -m tests.support.few_descriptors ACT FOLDER

FOLDER is made by `tests.test_few_descriptors`. Every tensor becomes a layer file, so that there are many.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import rabbitllm
from rabbitllm import prepare
from rabbitllm.checkpoints.naming import register_layer_naming
from rabbitllm.models.convert import convert
from rabbitllm.storage import durable
from rabbitllm.storage.durable import Step
from rabbitllm.store.layer_store import verify
from rabbitllm.store.manifest import read_manifest
from tests.support.builders import read_tensors, reference_logits
from tests.support.splitting import Call, Counter
from tests.support.tiny_models import ALL, INPUT, assert_same, load, run

DESCRIPTORS = 64
LAYER_FILES = 550
"""At least."""


def split_until_killed(folder: Path) -> None:
    """Dies in the middle of the second of three shards."""

    def kill(number: int, step: Step) -> None:
        if number == LAYER_FILES // 3:
            signal.raise_signal(signal.SIGKILL)

    def begun(step: Step) -> None:
        if (folder / "model" / "splitted_model" / "split.journal").exists() and len(names(folder / "model")) == 2:
            killing(step)

    killing = Counter(kill, ("write",))
    with durable.observe_steps(begun):
        Call(str(folder / "model")).make()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def split_and_load(folder: Path) -> None:
    """Goes on with the split, loads it resident and streamed, and opens it lazily."""
    split = Call(str(folder / "model")).make()
    assert not names(folder / "model")
    assert len(names(split)) >= LAYER_FILES
    _assert_computes(folder, lambda budget: load(split, budget))
    _assert_has_all(folder, rabbitllm.lazy_load(split))


def compress(folder: Path) -> None:
    """Splits the copy at 4bit, and at 4bit-double, where a layer has two files until it is whole."""
    for compression in ("4bit", "4bit-double"):
        split = Call(str(folder / "copy"), compression=compression, sequential=False).make()
        assert len(names(split)) >= LAYER_FILES
        resident, streamed = run(load(split, ALL)), run(load(split, 0))
        assert_same(resident, streamed)


def verify_and_repair(folder: Path) -> None:
    """Damages every second layer file of a split, so that all shards are needed again."""
    split = folder / "model" / "splitted_model"
    before = {name: (split / name).read_bytes() for name in names(split)}
    assert not verify(split).damaged
    for name in names(split)[::2]:
        raw = bytearray(before[name])
        raw[-1] ^= 1
        (split / name).write_bytes(raw)
    damaged = {damage.layer for damage in verify(split).damaged}
    assert len(damaged) >= LAYER_FILES // 2
    manifest = read_manifest(split)
    assert manifest is not None
    prepare.repair_split(split, manifest, damaged, folder / "copy")
    assert {name: (split / name).read_bytes() for name in names(split)} == before


def convert_it(folder: Path) -> None:
    """Makes a checkpoint of as many shards, which is used as it is, opened lazily, and converted back."""
    convert(folder / "copy", folder / "converted")
    assert len(names(folder / "converted")) >= LAYER_FILES
    _assert_computes(folder, lambda budget: _unsplit(folder / "converted", budget))
    lazy = rabbitllm.lazy_load(folder / "converted")
    _assert_has_all(folder, lazy)
    read = [tensor + 0 for tensor in lazy.values()]
    assert len(read) >= LAYER_FILES
    _assert_has_all(folder, rabbitllm.lazy_load(folder / "converted", mapped=False))


def _unsplit(folder: Path, budget: int) -> Any:
    return rabbitllm.AutoModel.from_pretrained(folder, device="cpu", max_memory={"cpu": budget}, split=False)


def _assert_computes(folder: Path, loaded: Callable[[int], Any]) -> None:
    expected = reference_logits(folder / "copy", INPUT, torch.float32)
    for budget in (ALL, 0):
        assert_same(run(loaded(budget)), expected)


def _assert_has_all(folder: Path, lazy: Mapping[str, torch.Tensor]) -> None:
    weights = read_tensors(folder / "copy")
    assert lazy.keys() == weights.keys()
    assert all(torch.equal(lazy[name] + 0, weights[name]) for name in weights)


ACTS = {act.__name__: act for act in (split_until_killed, split_and_load, compress, verify_and_repair, convert_it)}

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    register_layer_naming("llama", [r"(?P<id>.+)"])
    ACTS[sys.argv[1]](Path(sys.argv[2]))
