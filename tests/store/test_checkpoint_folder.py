"""A checkpoint is written whole or not at all, at whatever step the call ends.

Stored tensors come out as a checkpoint has them, however they are cut into chunks.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from safetensors.torch import load_file

from rabbitllm.checkpoints.index import read_index
from rabbitllm.errors import IncompleteSplitError, NotEnoughSpaceException, OptionError
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.tensor_spec import dtype_name
from rabbitllm.storage import durable
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store import checkpoint_folder
from rabbitllm.store.checkpoint_folder import WORK_NAME, PlainReader, in_memory, plain, plan_shards, write_checkpoint
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import build_checkpoint, read_tensors
from tests.support.dying import dying_at
from tests.support.small_disk import small_disk
from tests.support.tiny_models import dequantized, split

TENSORS = {f"layer.{number}.weight": torch.arange(64.0).view(8, 8) * number for number in range(1, 6)}
PLACED = [TensorToWrite(name, "F32", (8, 8)) for name in TENSORS]
OTHER_FILES = {"config.json": b'{"model_type": "llama"}', "extra/template.jinja": b"{{ x }}"}
SHARDS = plan_shards(PLACED, 512)


def chunks(name: str) -> Iterator[memoryview]:
    data = memoryview(TENSORS[name].numpy().tobytes())
    yield from (data[begin : begin + 100] for begin in range(0, len(data), 100))


def save(folder: Path, source: str = "a model") -> None:
    write_checkpoint(folder, SHARDS, OTHER_FILES, chunks, source=source)


def save_another(folder: Path, last: str = list(TENSORS)[-1]) -> None:
    """Save another model with the same names and shapes."""
    other = memoryview(bytes(256))
    write_checkpoint(folder, SHARDS, OTHER_FILES, lambda name: iter([other]) if name == last else chunks(name), "other")


def assert_whole(folder: Path) -> None:
    index = read_index(folder / "model.safetensors.index.json")
    assert len(index.shards) == 3
    stored = {name: tensor for shard in index.shards for name, tensor in load_file(folder / shard).items()}
    assert stored.keys() == TENSORS.keys() == index.weight_map.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in TENSORS.items())
    assert {name: (folder / name).read_bytes() for name in OTHER_FILES} == OTHER_FILES
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*index.shards, "config.json", "extra", "model.safetensors.index.json"]
    )


def test_shards_are_filled_in_order() -> None:
    assert [len(shard.tensors) for shard in SHARDS] == [2, 2, 1]
    assert [shard.name for shard in plan_shards(PLACED, 10_000)] == ["model.safetensors"]
    assert [len(shard.tensors) for shard in plan_shards(PLACED, 100)] == [1] * 5  # each is larger than allowed
    odd = [TensorToWrite("odd", "U8", (3,)), TensorToWrite("even", "U8", (64,))]
    assert [tensor.name for tensor in plan_shards(odd, 100)[0].tensors] == ["even", "odd"]


def test_index_has_the_total_size(tmp_path: Path) -> None:
    save(tmp_path)
    assert_whole(tmp_path)
    metadata = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]
    assert metadata == {"total_parameters": 320, "total_size": 1280}


def test_same_call_completes_a_killed_one(tmp_path: Path) -> None:
    """Before the index exists, no file has the name of a checkpoint's entry."""
    cleared, moved = 0, 0
    for step in itertools.count():
        folder = tmp_path / str(step)
        with dying_at(step) as death:
            save(folder)
        if death.step is None:
            break
        work = folder / WORK_NAME
        index = folder / "model.safetensors.index.json"
        if (work / "all.is.there").exists():
            moved += 1
        elif not index.exists():
            assert {path.name for path in folder.glob("*")} <= {WORK_NAME}
            cleared += 1
        if index.exists():
            assert len(list(folder.glob("model-*.safetensors"))) == 3
        save(folder)
        assert_whole(folder)
    save(folder)  # it may have been killed behind its last step
    assert_whole(folder)
    assert cleared > 20
    assert moved > 5


def test_damage_before_the_files_are_moved_is_found(tmp_path: Path) -> None:
    """A checkpoint has no checksums: nothing would tell of it later."""

    def stop(step: Step) -> None:
        if step.kind == "rename" and step.path.name == "model-00003-of-00003.safetensors":
            raise KeyboardInterrupt

    with observe_steps(stop), pytest.raises(KeyboardInterrupt):
        save(tmp_path)
    file = tmp_path / WORK_NAME / "model-00003-of-00003.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(OptionError, match="already holds a model"):
        save(tmp_path)


@pytest.mark.parametrize("name", ["mine.txt", "all.is.there", "mine.safetensors", "mine.json.part"])
def test_a_work_folder_with_files_of_others_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / WORK_NAME).mkdir()
    (tmp_path / WORK_NAME / name).write_text("mine")
    with pytest.raises(OptionError, match=rf"\.saving holds files that RabbitLLM did not write: {name}\."):
        save(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == [WORK_NAME, name]
    assert (tmp_path / WORK_NAME / name).read_text() == "mine"


@pytest.mark.parametrize("path", ["../mine.txt", "a/../../mine.txt", "{outside}/mine.txt"])
def test_nothing_is_moved_out_of_the_folder(tmp_path: Path, path: str) -> None:
    """The work folder says that it is complete, and came with a folder that a stranger made."""
    work, name = tmp_path / "folder" / WORK_NAME, quote(path.format(outside=tmp_path), safe="")
    work.mkdir(parents=True)
    (work / "all.is.there").write_text(64 * "a")
    (work / name).write_text("mine")
    with pytest.raises(OptionError, match=r"\.saving holds files that RabbitLLM did not write"):
        save(tmp_path / "folder")
    assert {path.name for path in tmp_path.rglob("*")} == {"folder", WORK_NAME, "all.is.there", name}


def test_another_model_is_not_taken_for_the_interrupted_one(tmp_path: Path) -> None:
    for index in itertools.count():
        with dying_at(index, kinds=("rename",)):
            save(tmp_path)
        if (tmp_path / WORK_NAME / "all.is.there").exists():
            break
    assert (tmp_path / WORK_NAME / "all.is.there").exists()
    with pytest.raises(OptionError, match="already holds a model"):
        save_another(tmp_path)
    assert_whole(tmp_path)  # the interrupted one, finished
    with pytest.raises(OptionError, match="already holds a model"):
        save_another(tmp_path)
    assert_whole(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_newer_transformers_finds_the_same_checkpoint(tmp_path: Path, name: str) -> None:
    """Its version is in the configs, and an update may come between a kill and the call that finishes."""

    def save_with(version: str, other: str) -> None:
        content = json.dumps({"x": other, "transformers_version": version, "y": 1}, indent=2).encode()
        write_checkpoint(tmp_path, SHARDS, {**OTHER_FILES, name: content}, chunks, source="a model")

    save_with("5.23.0", "a")
    save_with("5.24.0", "a")
    assert json.loads((tmp_path / name).read_text())["transformers_version"] == "5.23.0"  # nothing was written
    with pytest.raises(OptionError, match="already holds a model"):
        save_with("5.23.0", "b")


def test_failed_call_leaves_no_files(tmp_path: Path) -> None:
    def fail(step: durable.Step) -> None:
        if step.kind == "sync" and step.path.name.startswith("model-00002"):
            raise OSError(28, "No space left on device")

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "tokenizer.json").write_text("{}")
    for folder in (tmp_path / "new", tmp_path / "there"):
        with durable.observe_steps(fail), pytest.raises(OSError, match="No space"):
            save(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "tokenizer.json"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "split.json", "consolidated.00.pth", "model.gguf", "params.json"]
)
def test_a_folder_with_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(OptionError, match=f"already holds a model: it has '{name}'"):
        save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_config_of_another_model_is_refused_but_not_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    with pytest.raises(OptionError, match=r"config\.json"):
        save(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


def test_file_with_the_name_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OptionError, match="is a file"):
        save(tmp_path / "file")


def test_a_disk_without_room_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        disk.leave(1 << 19)
        seen: list[durable.Step] = []
        with durable.observe_steps(seen.append), pytest.raises(NotEnoughSpaceException, match="are free on the disk"):
            save(disk.path / "a" / "copy")
        assert seen == []
        disk.give_back()
        save(disk.path / "a" / "copy")
        assert_whole(disk.path / "a" / "copy")


@pytest.mark.parametrize("chunk", [4096, 6144, 8 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_chunks_make_the_whole_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None, dtype: torch.dtype, chunk: int
) -> None:
    monkeypatch.setattr(checkpoint_folder, "CHUNK_BYTES", max(chunk, 2048 * dtype.itemsize))
    # rows of 80 elements: no whole blocks; 17,408 elements of the embedding: no whole chunks
    source = build_checkpoint(tmp_path / "source", "llama", dtype=dtype, intermediate_size=80)
    reference = source if compression is None else dequantized(source, tmp_path / "meant", compression, dtype)
    store, expected = LayerStore(split(source, compression)), read_tensors(reference)
    assert store.tensors.keys() == expected.keys()
    several = 0
    with PlainReader(store) as reader:
        for name, stored in store.tensors.items():
            tensor = plain(stored, dtype_name(dtype))
            assert (tensor.placed.dtype, tensor.placed.shape) == (dtype_name(dtype), tuple(expected[name].shape))
            chunks = [bytes(part) for part in reader.chunks(tensor)]
            assert b"".join(chunks) == expected[name].view(-1).view(torch.uint8).numpy().tobytes(), name
            assert max(map(len, chunks)) <= checkpoint_folder.CHUNK_BYTES
            several += len(chunks) > 1
            assert torch.equal(reader.read(stored, dtype), expected[name])
    assert several > 5 or chunk > 6144


def test_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "CHUNK_BYTES", 100)
    store = LayerStore(split(build_checkpoint(tmp_path, "llama")))
    stored = store.tensors["model.norm.weight"]
    changed = torch.arange(64.0)
    tensor = in_memory(stored, changed)
    assert tensor.placed == ("model.norm.weight", "F32", (64,))
    with PlainReader(store) as reader:
        parts = [bytes(part) for part in reader.chunks(tensor)]
    assert len(parts) == math.ceil(256 / 100)
    assert b"".join(parts) == changed.numpy().tobytes()


def test_file_truncated_after_loading(tmp_path: Path) -> None:
    store = LayerStore(split(build_checkpoint(tmp_path, "llama")))
    stored = store.tensors["model.norm.weight"]
    path = store.path(stored.parts[0].file)
    path.write_bytes(path.read_bytes()[:-1])
    with PlainReader(store) as reader, pytest.raises(IncompleteSplitError, match="was truncated after"):
        list(reader.chunks(plain(stored, "F32")))
