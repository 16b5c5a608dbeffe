"""A split directory whose bytes, headers or names have changed is told apart from a sound one."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import pytest

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.store.layer_store import LayerStore, verify
from rabbitllm.store.manifest import read_manifest
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.splitting import Call, interrupted, names_in, split

GOLDEN = Path(__file__).parent.parent / "golden"
LAYER = "model.layers.1.safetensors"


@pytest.fixture(params=[None, "4bit", "8bit"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return split(write_shards(tmp_path / "model", cut(llama_tensors(), 3)), compression=request.param)


def problems(folder: Path) -> dict[str, str]:
    return {damage.file: damage.problem for damage in verify(folder).damaged}


def test_sound_directory(made: Path) -> None:
    seen: dict[str, int] = {}
    found = verify(made, lambda name, nbytes: seen.update({name: nbytes}))
    assert found.damaged == ()
    assert seen == {path.name: path.stat().st_size for path in made.glob("*.safetensors")}
    assert (found.files, found.nbytes) == (len(seen), sum(seen.values()))


def test_checksum_is_that_of_the_file(made: Path) -> None:
    manifest = read_manifest(made)
    assert manifest is not None
    assert {record.file: record.crc32 for record in manifest.layers} == {
        path.name: zlib.crc32(path.read_bytes()) for path in made.glob("*.safetensors")
    }
    shards = {record.id: record.shards for record in manifest.layers}
    assert {shard for held in shards.values() for shard in held} == set(manifest.source.fingerprints)
    assert any(len(held) > 1 for held in shards.values())  # a layer over two shards was summed in two runs


def test_checksum_of_a_split_that_went_on(tmp_path: Path) -> None:
    """The sums of the shards that an earlier run used up come from its journal."""
    call = Call(str(write_shards(tmp_path / "model", cut(llama_tensors(), 3))), compression="4bit")
    interrupted(call, shards=2)
    assert verify(call.make()).damaged == ()


def test_every_byte_counts(made: Path) -> None:
    path = made / LAYER
    whole = path.read_bytes()
    for at in (0, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert list(problems(made)) == [LAYER], at
    path.write_bytes(whole)
    assert problems(made) == {}


def test_flipped_weight_is_told_by_its_checksum(made: Path) -> None:
    path = made / LAYER
    raw = bytearray(path.read_bytes())
    written = zlib.crc32(raw)
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert LayerStore(made).tensors  # nothing else would have noticed
    assert problems(made) == {LAYER: f"its checksum is {zlib.crc32(raw):08x}; {written:08x} was written"}


def test_missing_and_short_files(made: Path) -> None:
    (made / "model.norm.safetensors").unlink()
    size = (made / LAYER).stat().st_size
    os.truncate(made / LAYER, size - 1)
    assert problems(made) == {
        "model.norm.safetensors": "it is missing",
        LAYER: f"it has {size - 1:,} bytes; {size:,} were written",
    }


def test_tensors_of_another_layer(made: Path) -> None:
    shutil.copy(made / "model.layers.0.safetensors", made / LAYER)
    (problem,) = problems(made).values()
    assert "its tensors are not those of its layer: 'model.layers.0.input_layernorm.weight'" in problem


def test_directory_of_1_1_has_no_checksums() -> None:
    folder = next(path for path in sorted(GOLDEN.rglob("splitted_model*")) if path.is_dir())
    found = verify(folder)
    assert found.manifest is None
    assert found.files == len(names_in(folder, "*.safetensors")) > 0
    assert found.damaged == ()


def test_directory_of_1_1_that_is_cut_short(tmp_path: Path) -> None:
    folder = next(path for path in sorted(GOLDEN.rglob("splitted_model*")) if path.is_dir())
    copy = Path(shutil.copytree(folder, tmp_path / folder.name))
    first, second = names_in(copy, "*.safetensors")[:2]
    os.truncate(copy / first, (copy / first).stat().st_size - 1)
    (copy / f"{second}.done").unlink()
    found = problems(copy)
    assert set(found) == {first, second}
    assert "truncated" in found[first]
    assert found[second] == "it has no .done marker"


def test_what_is_no_finished_split(tmp_path: Path) -> None:
    with pytest.raises(IncompleteSplitError, match="is no split directory"):
        verify(tmp_path)
    call = Call(str(write_shards(tmp_path / "model", cut(llama_tensors(), 3))))
    with pytest.raises(IncompleteSplitError, match="is an unfinished split"):
        verify(interrupted(call))


def test_manifest_without_checksums_is_damaged(made: Path) -> None:
    content = json.loads((made / "split.json").read_text())
    del content["layers"][0]["crc32"]
    (made / "split.json").write_text(json.dumps(content))
    with pytest.raises(IncompleteSplitError, match="crc32"):
        verify(made)
