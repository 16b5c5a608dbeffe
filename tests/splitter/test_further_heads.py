"""Heads for multi-token prediction keep 8 bits; splits that were begun or made before keep what they have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import rabbitllm
from rabbitllm import prepare
from rabbitllm.splitter.journal import SplitJournal
from rabbitllm.store.layer_store import LayerStore, verify
from rabbitllm.store.manifest import read_manifest
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.quick_measuring import quick_measuring as quick_measuring
from tests.support.splitting import Call, layer_files, split

HEADS = ("mtp.layers.0.eh_proj.weight", "model.layers.2.eh_proj.weight", "model.layers.2.mlp.down_proj.weight")
NORM = "mtp.norm.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = llama_tensors(layers=2, hidden=256, vocabulary=300)
    tensors |= {name: torch.randn(256, 512, generator=generator).to(torch.bfloat16) for name in HEADS}
    tensors[NORM] = torch.ones(256, dtype=torch.bfloat16)
    folder = write_shards(tmp_path / "model", cut(tensors, 3))
    config = json.loads((folder / "config.json").read_text())
    further = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | further))
    return folder


def schemes_in(folder: Path) -> Mapping[str, str | None]:
    tensors = LayerStore(folder).tensors
    return {name: tensor.quantized.scheme if tensor.quantized else None for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("compression", "of_heads", "of_others"),
    [
        (None, None, None),
        ("8bit", "8bit", "8bit"),
        ("4bit", "8bit", "4bit"),
        ("4bit-double", "8bit", "4bit-double"),
        ("q8_0", "Q8_0", "Q8_0"),
        ("q6_k", "Q8_0", "Q6_K"),
        ("q4_k_m", "Q8_0", "Q4_K"),
    ],
)
def test_heads_have_8_bits(source: Path, compression: str | None, of_heads: str | None, of_others: str | None) -> None:
    planned = rabbitllm.plan(source, compression=compression, device="cpu").at(compression)
    folder = split(source, compression=compression)
    found = schemes_in(folder)
    assert {found[name] for name in HEADS} == {of_heads}
    assert found[NORM] is None
    assert found["model.layers.1.self_attn.q_proj.weight"] == of_others
    assert verify(folder).damaged == ()
    assert planned is not None
    assert planned.output_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_heads_have_8_bits_at_auto(source: Path) -> None:
    least = sum(
        path.stat().st_size for path in split(source, compression="q4_k", sequential=False).glob("*.safetensors")
    )
    folder = split(source, compression="auto", max_disk=least, sequential=False)
    found = schemes_in(folder)
    assert {found[name] for name in HEADS} == {"Q8_0"}
    assert {*found.values()} > {"Q8_0", None}


@pytest.mark.parametrize("begun_before", [True, False])
@pytest.mark.parametrize("compression", ["4bit", "q4_k_m"])
def test_an_interrupted_and_a_damaged_split_keep_their_bits(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, compression: str, begun_before: bool
) -> None:
    call = Call(str(source), str(tmp_path / "split"), compression=compression, sequential=False)
    with monkeypatch.context() as before:
        if begun_before:
            before.setattr("rabbitllm.splitter.request.predicts_further", lambda *_: False)
        expected = layer_files(split(source, tmp_path / "whole", compression=compression, sequential=False))
        with pytest.raises(KeyboardInterrupt):
            interrupted(call)
    folder = call.make()
    assert layer_files(folder) == expected
    assert (schemes_in(folder)[HEADS[0]] in ("4bit", "Q4_K")) == begun_before
    path = folder / "mtp.layers.0.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    manifest = read_manifest(folder)
    assert manifest is not None
    prepare.repair_split(folder, manifest, {damage.layer for damage in verify(folder).damaged}, original=source)
    assert layer_files(folder) == expected


def interrupted(call: Call) -> None:
    """Interrupt a call after it has used its first shard."""
    used = SplitJournal.mark_used

    def once(self: SplitJournal, *arguments: object) -> None:
        used(self, *arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SplitJournal, "mark_used", once)
        call.make()
