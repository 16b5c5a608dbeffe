"""Every split records the checksum of each block of its layer files, on every route."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from rabbitllm import prepare
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.splitter import _written
from rabbitllm.store import checksums
from rabbitllm.store.checksums import block_starts, sums_of_file
from rabbitllm.store.layer_store import verify
from rabbitllm.store.manifest import read_manifest, write_manifest
from tests.support.builders import build_checkpoint, cut, llama_tensors, torch_files, write_shards, write_torch
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.splitting import Call, interrupted, split

REPO = "acme/tiny"
COMPRESSIONS = [None, "4bit", "8bit", "4bit-double"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(checksums, "OWN_BLOCK_BYTES", 2048)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading layer files again for their sums is an error."""
    monkeypatch.setattr(_written, "sums_of_file", lambda *_: pytest.fail("a layer file was read again"))


def assert_sums_are_those_of_the_files(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    several = 0
    for record in manifest.layers:
        path = folder / record.file
        header = read_header(path)
        starts = block_starts(record.size, header.data_start, ((t.offset, t.nbytes) for t in header.tensors))
        assert (record.crc32, record.blocks) == sums_of_file(path, starts), record.file
        several += len(starts) > 2
    assert several
    assert not verify(folder).damaged


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_safetensors(tmp_path: Path, family: str, compression: str | None) -> None:
    source = build_checkpoint(tmp_path / "model", family, shards=3, dtype=torch.bfloat16)
    assert_sums_are_those_of_the_files(split(source, compression=compression))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("embedding_dim", [0, 1])
def test_meta_ranks(tmp_path: Path, embedding_dim: int, compression: str | None) -> None:
    """Pieces that are written directly into the layer file begin anywhere in a block; others wait in a scratch file."""
    source = write_meta(tmp_path, tiny_llama(intermediate=256), 4, embedding_dim)
    assert_sums_are_those_of_the_files(split(source, compression=compression))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_torch_files_with_strided_tensors(tmp_path: Path, compression: str | None) -> None:
    source = write_torch(tmp_path / "model", torch_files(cut(llama_tensors(), 3)), index=True)
    assert_sums_are_those_of_the_files(split(source, compression=compression))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("transfer", ["file", "stream"])
@pytest.mark.parametrize("compression", [None, "4bit-double"])
def test_fetched_shards(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, transfer: str, compression: str | None
) -> None:
    write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(), 3))
    assert_sums_are_those_of_the_files(split(REPO, compression=compression, shard_transfer=transfer))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shards", [1, 2])
def test_resumed_split(tmp_path: Path, shards: int, compression: str | None) -> None:
    """The sums of an earlier run's data come from its journal."""
    call = Call(str(write_shards(tmp_path / "model", cut(llama_tensors(), 3))), compression=compression)
    interrupted(call, shards)
    assert_sums_are_those_of_the_files(call.make())


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_split_begun_by_a_version_without_blocks(tmp_path: Path, compression: str | None) -> None:
    call = Call(str(write_shards(tmp_path / "model", cut(llama_tensors(), 3))), compression=compression)
    without_blocks(interrupted(call, 2))
    assert_sums_are_those_of_the_files(call.make())


def test_damage_of_a_split_begun_by_an_earlier_version(tmp_path: Path) -> None:
    """Its checksum is that of the written bytes; a file that differs gets none for its blocks."""
    call = Call(str(write_shards(tmp_path / "model", cut(llama_tensors(), 3))))
    half = interrupted(call, 2)
    without_blocks(half)
    done = next(path for path in sorted(half.glob("*.safetensors")) if "layers" in path.name)
    raw = bytearray(done.read_bytes())
    raw[-1] ^= 1
    done.write_bytes(raw)
    manifest = read_manifest(call.make())
    assert manifest is not None
    assert [record.file for record in manifest.layers if record.blocks is None] == [done.name]
    assert [damage.file for damage in verify(half).damaged] == [done.name]


def without_blocks(folder: Path) -> None:
    """Change a journal to what an earlier version would have written."""
    path = folder / "split.journal"
    head, *lines = path.read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert any(any(any(part) for part in parts) for entry in entries for parts in entry["runs"])
    kept = [json.dumps({key: value for key, value in entry.items() if key != "runs"}) for entry in entries]
    path.write_text("\n".join([head, *kept, ""]))


def test_repair_adds_block_sums_to_an_earlier_split(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    folder = split(source, compression="4bit", sequential=False)
    manifest = read_manifest(folder)
    assert manifest is not None
    bare = dataclasses.replace(
        manifest, layers=tuple(dataclasses.replace(record, blocks=None) for record in manifest.layers)
    )
    write_manifest(folder, bare)
    assert read_manifest(folder) == bare
    prepare.repair_split(folder, bare, {"model.layers.1"}, source)
    assert_sums_are_those_of_the_files(folder)
    assert read_manifest(folder) == manifest


def test_contradicting_block_sums_are_damage(tmp_path: Path) -> None:
    folder = split(write_shards(tmp_path / "model", cut(llama_tensors(), 3)), compression="4bit")
    content = json.loads((folder / "split.json").read_text())
    blocks = content["layers"][1]["blocks"]
    content["layers"][1]["blocks"] = blocks[:-8] + ("A" if blocks[-8] != "A" else "B") + blocks[-7:]
    (folder / "split.json").write_text(json.dumps(content))
    (damage,) = verify(folder).damaged
    assert damage.file == content["layers"][1]["file"]
    assert damage.problem == "the checksums of its blocks are not those of the file"


@pytest.mark.parametrize("blocks", ["no base64", 5, "AAA="])
def test_malformed_block_sums(tmp_path: Path, blocks: object) -> None:
    folder = split(write_shards(tmp_path / "model", cut(llama_tensors(), 3)))
    content = json.loads((folder / "split.json").read_text())
    content["layers"][1]["blocks"] = blocks
    (folder / "split.json").write_text(json.dumps(content))
    with pytest.raises(IncompleteSplitError, match=r"split.json is damaged"):
        read_manifest(folder)
