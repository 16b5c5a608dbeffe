"""A split directory as it is read: its manifest, missing files, and folders of earlier versions.

A split directory whose bytes, headers or names have changed is told apart from a sound one.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.errors import CorruptShardError, IncompleteSplitError, SplitError, SplitMismatchError
from rabbitllm.store.layer_store import LayerStore, verify
from rabbitllm.store.manifest import LayerRecord, Manifest, directory_name, is_legacy, read_manifest, write_manifest
from tests.support.builders import cut, llama_tensors, read_tensors, write_shards
from tests.support.leftovers import none_left, open_files
from tests.support.splitting import Call, interrupted, names_in, split

GOLDEN = Path(__file__).parent.parent / "golden"
UNSOUND = "rabbitllm-1.1.0-none-UNSOUND-3-tensors-missing"
LAYER_0 = "model.layers.0.safetensors"


@pytest.fixture(params=[None, "4bit", "8bit"])
def compression(request: pytest.FixtureRequest) -> str | None:
    scheme: str | None = request.param
    return scheme


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return split(write_shards(tmp_path / "model", cut(llama_tensors(layers=2), 2)))


def rewrite(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "split.json").read_text())
    (folder / "split.json").write_text(json.dumps(content | changes))


# Files that are mapped when they are used


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at what the process has open")
@pytest.mark.parametrize("scheme", [None, "4bit"])
def test_opening_maps_no_file_and_using_keeps_none_open(tmp_path: Path, scheme: str | None) -> None:
    split_folder = split(write_shards(tmp_path / "model", cut(llama_tensors(layers=2), 2)), compression=scheme)
    with none_left(split_folder):
        store = LayerStore(split_folder)
    first, second = (store.mapped(LAYER_0) for _ in range(2))
    assert first is second
    assert not list(open_files(split_folder))


def test_files_are_found_after_a_change_of_the_working_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    store = LayerStore(Path(folder.name))
    monkeypatch.chdir(tmp_path)
    spec = store.tensors["model.layers.0.mlp.up_proj.weight"].parts[0]
    assert store.mapped(spec.file).tensor(spec).numel() > 0
    assert store.path(spec.file).is_file()


def test_file_truncated_after_opening(folder: Path) -> None:
    store = LayerStore(folder)
    spec = max((t.parts[0] for t in store.tensors.values() if t.parts[0].file == LAYER_0), key=lambda s: s.offset)
    os.truncate(folder / LAYER_0, spec.offset)
    with pytest.raises(CorruptShardError, match=f"ends within {spec.name!r}"):
        store.mapped(LAYER_0).tensor(spec)


# The manifest


@pytest.mark.parametrize("commit", [None, "c" * 40])
def test_manifest_round_trip(tmp_path: Path, commit: str | None) -> None:
    manifest = Manifest(
        SourceIdentity("hub" if commit else "local", "acme/tiny", commit, {"a.safetensors": "sha256:12"}),
        "4bit",
        "bitsandbytes 0.50.2 on cpu",
        (
            LayerRecord(
                "layers.0", "model.layers.0", LAYER_0, 4096, ("model.layers.0.w", "model.layers.0.猫"), 0xFF, ("a", "b")
            ),
            LayerRecord("norm", "model.norm", "model.norm.safetensors", 0, (), 0, ()),
        ),
    )
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert names_in(tmp_path) == ["split.json"]
    content = json.loads((tmp_path / "split.json").read_text())
    assert (content["format"], content["format_version"]) == ("rabbitllm split directory", 2)
    assert content["written_by"].startswith("rabbitllm 2.")


def test_manifest_of_a_later_version(folder: Path) -> None:
    rewrite(folder, format_version=3)
    with pytest.raises(SplitMismatchError, match="has format version 3; this rabbitllm reads up to 2") as refused:
        LayerStore(folder)
    assert "Update rabbitllm" in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format_version": "1"}',
        '{"format_version": 1}',
        '{"format_version": 1, "format_version": 1}',
        "\xff",
    ],
)
def test_file_that_is_not_a_manifest(folder: Path, content: str) -> None:
    (folder / "split.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(IncompleteSplitError) as refused:
        read_manifest(folder)
    assert str(folder / "split.json") in str(refused.value)
    assert "Keep this one until then" in str(refused.value)


RECORD = {
    "id": "norm",
    "stem": "model.norm",
    "file": "model.norm.safetensors",
    "size": 1,
    "crc32": "0000000a",
    "blocks": "AAAAAA==",
    "shards": ["model.safetensors"],
    "tensors": ["model.norm.weight"],
}
SOURCE = {"kind": "local", "name": "m", "commit": None, "fingerprints": {}}
NO_NAME = "is not the name of a layer file"


def test_record_is_sound_before_it_is_damaged(folder: Path) -> None:
    rewrite(folder, source=SOURCE, layers=[RECORD])
    manifest = read_manifest(folder)
    assert manifest is not None
    assert [layer.file for layer in manifest.layers] == ["model.norm.safetensors"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"source": None}, "'NoneType' object"),
        ({"source": []}, "list indices"),
        ({"source": {"kind": "local"}}, "KeyError 'fingerprints'"),
        ({"source": {**SOURCE, "fingerprints": "abc"}}, "'str' object has no attribute 'items'"),
        ({"source": {**SOURCE, "fingerprints": [["a"]]}}, "'list' object has no attribute 'items'"),
        ({"source": {**SOURCE, "fingerprints": {"a": 5}}}, "5 is not"),
        ({"source": {**SOURCE, "kind": 5}}, "5 is not"),
        ({"source": {**SOURCE, "crc32": {"a": "x"}}}, "invalid literal"),
        ({"layers": None}, "'NoneType' object is not iterable"),
        ({"layers": 5}, "'int' object is not iterable"),
        ({"layers": ["norm"]}, "string indices"),
        *(
            ({"layers": [{name: value for name, value in RECORD.items() if name != key}]}, f"KeyError '{key}'")
            for key in RECORD
            if key != "blocks"
        ),
        ({"layers": [{**RECORD, "size": "1"}]}, "'1' is not a size"),
        ({"layers": [{**RECORD, "size": -1}]}, "-1 is not a size"),
        ({"layers": [{**RECORD, "size": True}]}, "True is not a size"),
        ({"layers": [{**RECORD, "file": 5}]}, "5 is not"),
        ({"layers": [{**RECORD, "file": "../../other.safetensors"}]}, f"'../../other.safetensors' {NO_NAME}"),
        ({"layers": [{**RECORD, "file": "inner/other.safetensors"}]}, f"'inner/other.safetensors' {NO_NAME}"),
        ({"layers": [{**RECORD, "file": "/tmp/other.safetensors"}]}, f"'/tmp/other.safetensors' {NO_NAME}"),
        ({"layers": [{**RECORD, "file": "/etc/passwd"}]}, f"'/etc/passwd' {NO_NAME}"),
        ({"layers": [{**RECORD, "file": "passwd"}]}, f"'passwd' {NO_NAME}"),
        ({"layers": [{**RECORD, "file": ""}]}, f"'' {NO_NAME}"),
        ({"layers": [{**RECORD, "file": ".."}]}, f"'..' {NO_NAME}"),
        ({"layers": [{**RECORD, "tensors": 5}]}, "'int' object is not iterable"),
        ({"layers": [{**RECORD, "tensors": [5]}]}, "5 is not"),
        ({"layers": [{**RECORD, "shards": [5]}]}, "5 is not"),
        ({"layers": [{**RECORD, "crc32": 5}]}, "5 is not"),
        ({"layers": [{**RECORD, "blocks": "AAAA"}]}, "3 bytes are not checksums"),
        ({"layers": [{**RECORD, "blocks": "*"}]}, "Error"),
        ({"compression": 4}, "4 is not a compression"),
        ({"compression": "3bit"}, "'3bit' is not a compression"),
        ({"dtype": "load"}, "'load' is not a dtype of a model"),
    ],
)
def test_damaged_manifest(folder: Path, changes: dict[str, Any], problem: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(IncompleteSplitError, match=r"split.json is damaged") as refused:
        LayerStore(folder)
    assert problem in refused.value.problem
    assert "Keep this one until then" in str(refused.value)


def test_names_of_directories() -> None:
    assert [directory_name(c) for c in (None, "4bit", "8bit")] == [
        "splitted_model",
        "splitted_model.4bit",
        "splitted_model.8bit",
    ]
    assert directory_name("4bit", "mine") == "mine.4bit"


# What the manifest promises


def test_store_knows_every_tensor(tmp_path: Path, compression: str | None) -> None:
    tensors = llama_tensors(layers=2)
    folder = split(write_shards(tmp_path / "model", cut(tensors, 2)), compression=compression)
    store = LayerStore(folder)
    assert store.compression == compression
    assert store.tensors.keys() == tensors.keys()
    compressed = {name for name, tensor in tensors.items() if tensor.ndim > 1 and tensor.numel() >= 4096}
    for name, tensor in tensors.items():
        stored = store.tensors[name]
        assert stored.shape == tensor.shape
        assert (stored.quantized.scheme if stored.quantized else None) == (compression if name in compressed else None)
        if stored.quantized is None:
            (spec,) = stored.parts
            assert torch.equal(store.mapped(spec.file).tensor(spec), tensor)
            assert stored.nbytes == tensor.nbytes
        assert {part.file for part in stored.parts} == {stored.parts[0].file}
        assert store.path(stored.parts[0].file).parent == folder


@pytest.mark.parametrize("file", [LAYER_0, "lm_head.safetensors"])
def test_missing_layer_file(folder: Path, file: str) -> None:
    size = (folder / file).stat().st_size
    (folder / file).unlink()
    with pytest.raises(IncompleteSplitError, match=rf"{file} is missing; by split.json it has {size:,} bytes") as bad:
        LayerStore(folder)
    assert f"`rabbitllm verify {folder} --repair` writes damaged layer files again" in str(bad.value)
    assert isinstance(bad.value, SplitError)


@pytest.mark.parametrize("change", [-1, 1, -5000])
def test_layer_file_of_another_length(folder: Path, change: int) -> None:
    path = folder / LAYER_0
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:change] if change < 0 else path.read_bytes() + b"x")
    with pytest.raises(
        IncompleteSplitError, match=rf"has {size + change:,} bytes; by split.json it has {size:,} bytes"
    ):
        LayerStore(folder)


def test_layer_file_with_a_damaged_header(folder: Path) -> None:
    raw = bytearray((folder / LAYER_0).read_bytes())
    raw[8] = ord("x")
    (folder / LAYER_0).write_bytes(raw)
    with pytest.raises(IncompleteSplitError, match=rf"In {folder}: {LAYER_0} is not a valid safetensors file"):
        LayerStore(folder)


def test_layer_file_with_a_damaged_quantization_state(tmp_path: Path) -> None:
    folder = split(write_shards(tmp_path / "model", cut(llama_tensors(layers=1), 1)), compression="4bit")
    path = folder / LAYER_0
    raw = path.read_bytes().replace(b'"nf4"', b'"fp4"', 1)
    path.write_bytes(raw)
    with pytest.raises(IncompleteSplitError, match=rf"In {path}: the quantization state of 'model.layers.0"):
        LayerStore(folder, verify_checksums=False)
    with pytest.raises(IncompleteSplitError, match=rf"{path} is damaged: the checksum of its bytes"):
        LayerStore(folder)


def test_other_files_in_a_folder_with_a_manifest_are_ignored(folder: Path) -> None:
    (folder / "extra.safetensors").write_bytes(b"not a layer")
    assert LayerStore(folder).tensors.keys() == llama_tensors(layers=2).keys()


# Folders that RabbitLLM 1.1.0 made


def legacy(tmp_path: Path, name: str) -> Path:
    """A copy of the golden folder of that name."""
    (split_folder,) = (GOLDEN / name).glob("splitted_model*")
    return Path(shutil.copytree(split_folder, tmp_path / split_folder.name))


def test_legacy_folder(tmp_path: Path, compression: str | None) -> None:
    folder = legacy(tmp_path, f"rabbitllm-1.1.0-{compression or 'none'}")
    assert is_legacy(folder)
    store = LayerStore(folder)
    assert store.manifest is None
    assert store.compression == compression
    expected = read_tensors(GOLDEN / "model-2-shards")
    assert {name: tuple(tensor.shape) for name, tensor in expected.items()} == {
        name: stored.shape for name, stored in store.tensors.items()
    }
    assert all((stored.quantized is not None) == (compression is not None) for stored in store.tensors.values())


def test_store_lacks_missing_tensors_of_a_legacy_folder(tmp_path: Path) -> None:
    store = LayerStore(legacy(tmp_path, UNSOUND))
    missing = read_tensors(GOLDEN / "model-4-shards").keys() - store.tensors.keys()
    assert len(missing) == 3
    assert all(name.startswith("model.layers.1.") for name in missing)


def test_legacy_folder_with_an_unfinished_layer(tmp_path: Path) -> None:
    folder = legacy(tmp_path, "rabbitllm-1.1.0-none")
    (folder / f"{LAYER_0}.done").unlink()
    with pytest.raises(IncompleteSplitError, match=f"is not a finished split: {LAYER_0} has no .done marker"):
        LayerStore(folder)


def test_legacy_folder_with_a_torn_layer(tmp_path: Path) -> None:
    folder = legacy(tmp_path, "rabbitllm-1.1.0-4bit")
    (folder / LAYER_0).write_bytes((folder / LAYER_0).read_bytes()[:-100])
    with pytest.raises(IncompleteSplitError, match=f"{LAYER_0} is not a valid safetensors file: it is truncated"):
        LayerStore(folder)


def test_legacy_folder_with_scales_for_too_few_blocks(tmp_path: Path) -> None:
    folder = legacy(tmp_path, "rabbitllm-1.1.0-8bit")
    tensors = load_file(folder / LAYER_0)
    name = "model.layers.0.mlp.up_proj.weight.8bit.absmax"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / LAYER_0)
    with pytest.raises(IncompleteSplitError, match=rf"In .*{LAYER_0}: the part '{name}' has 3 elements of F32"):
        LayerStore(folder)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(IncompleteSplitError, match="is not a finished split: it has no layer files"):
        LayerStore(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], False),
        (["lm_head.safetensors"], False),
        (["lm_head.safetensors.done"], True),
        (["lm_head.safetensors.done", "split.json"], False),
        (["lm_head.safetensors.done", "split.journal"], False),
        (["lm_head.safetensors.done", "split.json.removed"], False),
        (["lm_head.safetensors.done", "split.journal.removed"], False),
    ],
)
def test_legacy_folders_are_recognized(tmp_path: Path, files: list[str], expected: bool) -> None:
    for file in files:
        (tmp_path / file).touch()
    assert is_legacy(tmp_path) is expected
    assert not is_legacy(tmp_path / "nowhere")


LAYER = "model.layers.1.safetensors"


@pytest.fixture(params=[None, "4bit", "8bit"])
def split_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return split(write_shards(tmp_path / "model", cut(llama_tensors(), 3)), compression=request.param)


def problems(folder: Path) -> dict[str, str]:
    return {damage.file: damage.problem for damage in verify(folder).damaged}


def test_sound_directory(split_folder: Path) -> None:
    seen: dict[str, int] = {}
    verification = verify(split_folder, lambda name, nbytes: seen.update({name: nbytes}))
    assert verification.damaged == ()
    assert seen == {path.name: path.stat().st_size for path in split_folder.glob("*.safetensors")}
    assert (verification.files, verification.nbytes) == (len(seen), sum(seen.values()))


def test_checksum_is_that_of_the_file(split_folder: Path) -> None:
    manifest = read_manifest(split_folder)
    assert manifest is not None
    assert {record.file: record.crc32 for record in manifest.layers} == {
        path.name: zlib.crc32(path.read_bytes()) for path in split_folder.glob("*.safetensors")
    }
    shards = {record.id: record.shards for record in manifest.layers}
    assert {shard for held in shards.values() for shard in held} == set(manifest.source.fingerprints)
    assert any(len(held) > 1 for held in shards.values())  # a layer over two shards was summed in two runs


def test_checksum_of_a_resumed_split(tmp_path: Path) -> None:
    """The sums of the shards that an earlier run used up come from its journal."""
    call = Call(str(write_shards(tmp_path / "model", cut(llama_tensors(), 3))), compression="4bit")
    interrupted(call, shards=2)
    assert verify(call.make()).damaged == ()


def test_any_changed_byte_is_detected(split_folder: Path) -> None:
    path = split_folder / LAYER
    whole = path.read_bytes()
    for offset in (0, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        assert list(problems(split_folder)) == [LAYER], offset
    path.write_bytes(whole)
    assert problems(split_folder) == {}


def test_flipped_weight_is_detected_by_the_checksum(split_folder: Path) -> None:
    path = split_folder / LAYER
    raw = bytearray(path.read_bytes())
    written = zlib.crc32(raw)
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert LayerStore(split_folder, verify_checksums=False).tensors  # nothing else would have noticed
    assert problems(split_folder) == {LAYER: f"its checksum is {zlib.crc32(raw):08x}; {written:08x} was written"}


def test_missing_and_short_files(split_folder: Path) -> None:
    (split_folder / "model.norm.safetensors").unlink()
    size = (split_folder / LAYER).stat().st_size
    os.truncate(split_folder / LAYER, size - 1)
    assert problems(split_folder) == {
        "model.norm.safetensors": "it is missing",
        LAYER: f"it has {size - 1:,} bytes; {size:,} were written",
    }


def test_tensors_of_another_layer(split_folder: Path) -> None:
    shutil.copy(split_folder / "model.layers.0.safetensors", split_folder / LAYER)
    (problem,) = problems(split_folder).values()
    assert "its tensors are not those of its layer: 'model.layers.0.input_layernorm.weight'" in problem


def test_directory_of_1_1_has_no_checksums() -> None:
    folder = next(path for path in sorted(GOLDEN.rglob("splitted_model*")) if path.is_dir())
    verification = verify(folder)
    assert verification.manifest is None
    assert verification.files == len(names_in(folder, "*.safetensors")) > 0
    assert verification.damaged == ()


def test_truncated_directory_of_1_1(tmp_path: Path) -> None:
    folder = next(path for path in sorted(GOLDEN.rglob("splitted_model*")) if path.is_dir())
    copy = Path(shutil.copytree(folder, tmp_path / folder.name))
    first, second = names_in(copy, "*.safetensors")[:2]
    os.truncate(copy / first, (copy / first).stat().st_size - 1)
    (copy / f"{second}.done").unlink()
    damage = problems(copy)
    assert set(damage) == {first, second}
    assert "truncated" in damage[first]
    assert damage[second] == "it has no .done marker"


def test_folders_without_a_finished_split(tmp_path: Path) -> None:
    with pytest.raises(IncompleteSplitError, match="is not a split directory"):
        verify(tmp_path)
    call = Call(str(write_shards(tmp_path / "model", cut(llama_tensors(), 3))))
    with pytest.raises(IncompleteSplitError, match="is an unfinished split"):
        verify(interrupted(call))


def test_manifest_without_checksums_is_damaged(split_folder: Path) -> None:
    content = json.loads((split_folder / "split.json").read_text())
    del content["layers"][0]["crc32"]
    (split_folder / "split.json").write_text(json.dumps(content))
    with pytest.raises(IncompleteSplitError, match="crc32"):
        verify(split_folder)
