"""Splits of the first format version, ordered by size and name alone, are finished, read and repaired."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rabbitllm import prepare
from rabbitllm.checkpoints import naming
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.splitter import split as splitter
from rabbitllm.store.layer_file import BY_NAME, EXPERTS_TOGETHER
from rabbitllm.store.layer_store import LayerStore, verify
from rabbitllm.store.manifest import read_manifest
from tests.support.builders import build_checkpoint, reference_logits
from tests.support.splitting import Call, contents, interrupted, layer_files, split
from tests.support.tiny_models import INPUT, assert_same, load, run

LAYER = "model.layers.1.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "qwen3_moe", shards=4)


@pytest.fixture
def first_version(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Path:
    """A checkpoint whose splits are planned as by the first version."""
    monkeypatch.setattr(splitter, "plan_split", functools.partial(splitter.plan_split, format_version=BY_NAME))
    return checkpoint


def as_first_version_wrote(journal: Path) -> None:
    head, entries = journal.read_text().split("\n", 1)
    content = json.loads(head)
    assert content.pop("format_version") == BY_NAME
    content["journal_version"] = 1
    journal.write_text(json.dumps(content, separators=(",", ":")) + "\n" + entries)


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_unfinished_split_keeps_its_format(
    first_version: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compression: str | None
) -> None:
    copy = shutil.copytree(first_version, tmp_path / "copy" / "model")
    whole = split(first_version, compression=compression)
    call = Call(str(copy), compression=compression)
    half = interrupted(call, 2)
    as_first_version_wrote(half / "split.journal")
    monkeypatch.undo()
    assert call.make() == half
    assert layer_files(half) == layer_files(whole)
    manifest = read_manifest(half)
    assert manifest is not None
    assert manifest.format_version == BY_NAME
    assert not verify(half).damaged


def test_the_same_weights_in_another_order(
    first_version: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier = split(first_version, tmp_path / "earlier", sequential=False)
    monkeypatch.undo()
    now = split(first_version, tmp_path / "now", sequential=False)
    assert (earlier / LAYER).read_bytes() != (now / LAYER).read_bytes()
    for file in layer_files(now):
        if file.endswith(".safetensors"):
            before, after = load_file(earlier / file), load_file(now / file)
            assert before.keys() == after.keys()
            assert all(before[name].equal(after[name]) for name in after)
    assert_same(run(load(earlier)), run(load(now)))
    assert [LayerStore(folder).manifest.format_version for folder in (earlier, now)] == [BY_NAME, EXPERTS_TOGETHER]  # type: ignore[union-attr]


def test_repair_keeps_the_format(first_version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = split(first_version, sequential=False)
    monkeypatch.undo()
    whole = contents(folder)
    raw = bytearray((folder / LAYER).read_bytes())
    raw[-1] ^= 1
    (folder / LAYER).write_bytes(raw)
    manifest = read_manifest(folder)
    assert manifest is not None
    prepare.repair_split(folder, manifest, {"layers.1"}, first_version)
    assert contents(folder) == whole


def test_unknown_version_is_refused(first_version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(str(first_version))
    half = interrupted(call, 1)
    journal = half / "split.journal"
    journal.write_text(journal.read_text().replace('"format_version":1', '"format_version":3', 1))
    before = contents(half)
    with pytest.raises(IncompleteSplitError, match="layer files of format version 3, expected at most 2"):
        call.make()
    assert contents(half) == before


@pytest.fixture
def grouped_otherwise(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Path:
    """A checkpoint of which each tensor becomes a layer, as in earlier versions with unknown families."""
    one_each = naming.naming([r"(?P<id>.+)"])
    monkeypatch.setitem(naming._registered, "qwen3_moe", one_each)
    return checkpoint


def test_split_with_another_grouping_is_read_resumed_and_repaired(
    grouped_otherwise: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = reference_logits(grouped_otherwise, INPUT, torch.float32)
    copy = shutil.copytree(grouped_otherwise, tmp_path / "copy" / "model")
    whole = split(grouped_otherwise, sequential=False)
    call = Call(str(copy))
    half = interrupted(call, 2)
    monkeypatch.undo()
    written = contents(whole)
    assert len(layer_files(whole)) == 2 * 66
    assert call.make() == half
    assert layer_files(half) == layer_files(whole)
    assert_same(run(load(whole)), expected)
    damaged = whole / "model.layers.1.self_attn.q_proj.weight.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    manifest = read_manifest(whole)
    assert manifest is not None
    prepare.repair_split(whole, manifest, {damage.layer for damage in verify(whole).damaged}, grouped_otherwise)
    assert contents(whole) == written
