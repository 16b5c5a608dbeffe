"""22 architectures: the same bytes in layer files on both routes, and the logits and tokens of plain transformers.

`golden/families.json` has SHA-256 digests of checkpoints and layer files, written by `make` below. Logits are
compared with transformers in the same process; no number of them is golden.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rabbitllm import AutoModel, uncompress_layer_state_dict
from tests.frozen.support.families import (
    FAMILIES,
    INPUT,
    arguments,
    build,
    dequantized,
    is_compressed,
    plain_model,
    weights_digest,
)
from tests.support.builders import read_tensors
from tests.support.one_thread import one_thread as one_thread

GOLDEN = Path(__file__).parent / "golden" / "families.json"
NEW_TOKENS = 5
SHORT = {"llama": ("none", "4bit"), "mixtral": ("8bit",), "qwen3_next": ("none",), "t5": ("4bit",)}
"""What the short run has; the long run has everything."""


def compressions(family: str) -> tuple[str, ...]:
    """What a family is split at."""
    if FAMILIES[family].quantized is not None:
        return ("none",)
    return ("none", "4bit", "8bit", *(("4bit-double",) if family == "llama" else ()))


def layer_digests(directory: Path) -> dict[str, str]:
    """Layer file -> SHA-256 of its bytes."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.safetensors"))
    }


def load(folder: Path, compression: str, **options: Any) -> Any:
    """A model on the CPU that computes exactly."""
    wanted = None if compression == "none" else compression
    return AutoModel.from_pretrained(
        folder, device="cpu", compression=wanted, exact=True, show_layer_progress=False, **options
    )


def split_folder(folder: Path, compression: str) -> Path:
    """Of a model whose splits are in a folder."""
    return folder / ("splitted_model" if compression == "none" else f"splitted_model.{compression}")


@dataclass(frozen=True)
class Outcome:
    """What a model computes: logits of a forward call, and tokens of a greedy generation if it generates."""

    logits: torch.Tensor
    tokens: torch.Tensor | None

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        assert self.logits.dtype == other.logits.dtype
        same = torch.equal(self.logits, other.logits) and (self.tokens is None) == (other.tokens is None)
        return same and (self.tokens is None or other.tokens is None or torch.equal(self.tokens, other.tokens))


def outcome(model: Any, family: str) -> Outcome:
    given = arguments(family)
    with torch.inference_mode():
        logits = model(**given).logits
        if not model.can_generate():
            return Outcome(logits, None)
        given.pop("decoder_input_ids", None)
        return Outcome(logits, model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False))


def tiers(model: Any) -> set[str]:
    """Where units of a model are."""
    return {placed.tier.value for placed in (*model.placement.units, *model.placement.experts)}


def cases() -> list[Any]:
    found = []
    for family in FAMILIES:
        for compression in compressions(family):
            marks = () if compression in SHORT.get(family, ()) else pytest.mark.long
            found.append(pytest.param(family, compression, id=f"{family}-{compression}", marks=marks))
    return found


@pytest.mark.parametrize(("family", "compression"), cases())
def test_bytes_and_logits(tmp_path: Path, family: str, compression: str) -> None:
    golden = json.loads(GOLDEN.read_text())[family]
    folder = build(tmp_path / "model", family)
    assert weights_digest(folder) == golden["weights"], "the builder makes another checkpoint than it did"
    kept = set(read_tensors(folder))
    plain = folder if compression == "none" else dequantized(folder, tmp_path / "plain", compression)
    expected = outcome(plain_model(plain, family), family)
    assert expected.logits.isfinite().all()

    resident = load(folder, compression, layer_shards_saving_path=tmp_path / "ordinary")
    ordinary = split_folder(tmp_path / "ordinary", compression)
    assert layer_digests(ordinary) == golden[compression]
    assert not tiers(resident) & {"streamed", "by routing"}
    assert outcome(resident, family) == expected
    assert set(read_tensors(folder)) == kept, "the ordinary route keeps the shards"

    streamed = load(folder, compression, sequential_shard_processing=True, max_memory={"cpu": 0})
    sequential = split_folder(folder, compression)
    assert layer_digests(sequential) == golden[compression]
    assert not list(folder.glob("model*.safetensors")), "the sequential route deletes the shards"
    assert tiers(streamed) & {"streamed", "by routing"}
    assert outcome(streamed, family) == expected

    size = sum(path.stat().st_size for path in sequential.glob("*.safetensors"))
    half = load(sequential, compression, max_memory={"cpu": size // 2})
    assert tiers(half) & {"streamed", "by routing"}
    assert outcome(half, family) == expected


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_oss-mxfp4", marks=pytest.mark.long)])
def test_without_a_split(tmp_path: Path, family: str) -> None:
    folder = build(tmp_path / "model", family)
    before = sorted(folder.rglob("*"))
    model = load(folder, "none", split=False, max_memory={"cpu": 0})
    assert outcome(model, family) == outcome(plain_model(folder, family), family)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.long
@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_layer_files_uncompressed_one_by_one(tmp_path: Path, compression: str) -> None:
    """`uncompress_layer_state_dict` gives the weights that a layer file stands for; at 8bit in float16."""
    folder = build(tmp_path / "model", "llama-tied-float32")
    reference = read_tensors(dequantized(folder, tmp_path / "plain", compression))
    load(folder, compression)
    found: dict[str, torch.Tensor] = {}
    for path in split_folder(folder, compression).glob("*.safetensors"):
        found |= uncompress_layer_state_dict(load_file(path))
    assert found.keys() == reference.keys()
    for name, tensor in reference.items():
        wanted = tensor.half() if compression == "8bit" and is_compressed(name, tensor) else tensor
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name], wanted), name


@pytest.mark.long
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_another_dtype_than_the_stored_one(tmp_path: Path, stored: torch.dtype) -> None:
    family = "llama-tied-float32" if stored == torch.float32 else "llama"
    wanted = torch.bfloat16 if stored == torch.float32 else torch.float32
    folder = build(tmp_path / "model", family)
    expected = outcome(plain_model(folder, family, dtype=wanted), family)
    for memory in ({}, {"max_memory": {"cpu": 0}}):
        model = load(folder, "none", dtype=wanted, **memory)
        assert model.dtype == wanted
        assert outcome(model, family) == expected


@pytest.mark.long
@pytest.mark.parametrize("threads", [2])
def test_with_more_threads(tmp_path: Path, threads: int) -> None:
    folder = build(tmp_path / "model", "llama")
    torch.set_num_threads(threads)
    ids = INPUT.repeat(3, 5)
    with torch.inference_mode():
        expected = plain_model(folder)(ids).logits
        assert torch.equal(load(folder, "none", max_memory={"cpu": 0})(ids).logits, expected)


def test_every_family_has_golden_digests() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert {name: set(entry) - {"weights"} for name, entry in golden.items()} == {
        name: set(compressions(name)) for name in FAMILIES
    }


def make(work: Path) -> None:
    """Write the golden digests; `python -m tests.frozen.make test_families` calls it."""
    golden = {}
    for family in FAMILIES:
        folder = build(work / family, family)
        golden[family] = {"weights": weights_digest(folder)}
        for compression in compressions(family):
            load(folder, compression)
            golden[family][compression] = layer_digests(split_folder(folder, compression))
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
