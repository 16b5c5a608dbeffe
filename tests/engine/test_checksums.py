"""A flipped bit of a layer file is an error of ours before an answer leaves, wherever the weights are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.engine.load import load_model
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.layers import checksums
from rabbitllm.layers.layer_store import LayerStore
from rabbitllm.options import StreamOptions
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import ALL, INPUT, budget_that_keeps, load, split

BLOCK = 4096
FLIPS = 12
"""In each case."""
MANY = {"num_experts": 24, "num_experts_per_tok": 3}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tiny layer file has many of them."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(checksums, "OWN_BLOCK_BYTES", BLOCK)


def on_gpu(folder: Path, budget: int, host: int, **options: Any) -> Any:
    gpu = FakeGpu(0)
    limits = {gpu.name: budget, "cpu": host}
    return load_model(folder, StreamOptions(max_memory=limits, show_progress=False, **options), None, [gpu])


def half_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 2


Load = Callable[..., Any]
"""Options -> a model."""
PLACES: dict[str, Callable[[Path], Load]] = {
    "resident": lambda folder: partial(load, folder, ALL),
    "half": lambda folder: partial(load, folder, half_of(folder)),
    "streamed": lambda folder: partial(load, folder, 0),
    "routed": lambda folder: partial(load, folder, budget_that_keeps(folder, 0.25)),
    "by codes": lambda folder: partial(load, folder, ALL, exact=False),
    "gpu": lambda folder: partial(on_gpu, folder, ALL, 0),
    "gpu, page-locked": lambda folder: partial(on_gpu, folder, 0, ALL),
    "gpu, streamed": lambda folder: partial(on_gpu, folder, 0, 0),
}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "tied": ("llama", {"tied": True}),
    "experts": ("qwen3_moe", MANY),
    "fused experts": ("gpt_oss", {}),
}


@dataclass(frozen=True)
class Flip:
    """A bit of a layer file."""

    path: Path
    at: int
    what: str

    def __enter__(self) -> Flip:
        self._turn()
        return self

    def __exit__(self, *exception: object) -> None:
        self._turn()

    def _turn(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.at)
            byte = file.read(1)[0]
            file.seek(self.at)
            file.write(bytes([byte ^ 0x40]))


def flips(folder: Path, count: int, case: str) -> list[Flip]:
    """So many, of different kinds of bytes: headers, and parts of tensors by their names without numbers."""
    chance = random.Random(case)
    kinds: dict[str, list[Flip]] = {}
    store = LayerStore(folder)
    for path in sorted(folder.glob("*.safetensors")):
        header = store.mapped(path.name).header
        kinds.setdefault("header", []).append(Flip(path, chance.randrange(header.data_start), "header"))
        for part in header.tensors:
            kind = ".".join(word for word in part.name.split(".") if not word.isdigit())
            at = part.offset + chance.choice([0, part.nbytes - 1, chance.randrange(part.nbytes)])
            kinds.setdefault(kind, []).append(Flip(path, at, part.name))
    return [chance.choice(kinds[kind]) for kind in chance.sample(sorted(kinds), min(count, len(kinds)))]


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(INPUT.to(model.device)).logits.cpu()


def outcome(make: Callable[[], Any]) -> Any:
    """The logits, or the error that came instead."""
    try:
        return logits(make())
    except Exception as error:
        return error


CASES = [
    *((kind, compression, "resident") for kind in KINDS for compression in (None, "4bit")),
    *((kind, None, place) for kind in ("dense", "tied") for place in ("half", "streamed")),
    *(("dense", compression, place) for compression in ("8bit", "4bit-double") for place in ("by codes", "streamed")),
    *(("experts", compression, "routed") for compression in (None, "4bit", "8bit", "4bit-double")),
    *(("experts", compression, "by codes") for compression in ("4bit", "4bit-double")),
    *(("fused experts", compression, "routed") for compression in (None, "4bit")),
    *(("dense", compression, place) for compression in (None, "4bit") for place in PLACES if place.startswith("gpu")),
    *(("experts", None, place) for place in PLACES if place.startswith("gpu")),
]


@pytest.mark.parametrize(("kind", "compression", "place"), CASES)
def test_no_answer_comes_of_a_flipped_bit(tmp_path: Path, kind: str, compression: str | None, place: str) -> None:
    family, settings = KINDS[kind]
    checkpoint = build_checkpoint(tmp_path / "model", family, shards=2, dtype=torch.bfloat16, **settings)
    folder = split(checkpoint, compression)
    load_so = PLACES[place](folder)
    sound = logits(load_so())
    for flip in flips(folder, FLIPS, f"{kind} {compression} {place}"):
        with flip:
            without = outcome(partial(load_so, verify_checksums=False))
            found = outcome(load_so)
        if isinstance(found, IncompleteSplitError):
            assert flip.path.name in found.problem, flip
            assert f"rabbitllm verify {folder} --repair" in found.remedy
            continue
        assert not isinstance(found, Exception), flip
        assert torch.equal(found, sound), flip  # it was in a row, or an expert, that nothing asked for
        assert torch.equal(without, sound), flip
        assert kind != "dense" or flip.what.startswith("model.embed_tokens.weight"), flip
    assert torch.equal(logits(load_so()), sound)
