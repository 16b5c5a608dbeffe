"""A checkpoint is written whole or not at all, wherever the writing ends."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rabbitllm.checkpoints.index import read_index
from rabbitllm.errors import NotEnoughSpaceException, OptionError
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.storage import durable
from rabbitllm.store.checkpoint_folder import WORK_NAME, plan_shards, write_checkpoint
from tests.support.dying import dying_at
from tests.support.small_disk import small_disk

TENSORS = {f"layer.{number}.weight": torch.arange(64.0).view(8, 8) * number for number in range(1, 6)}
PLACED = [TensorToWrite(name, "F32", (8, 8)) for name in TENSORS]
BESIDE = {"config.json": b'{"model_type": "llama"}', "extra/template.jinja": b"{{ x }}"}
SHARDS = plan_shards(PLACED, 512)


def chunks(name: str) -> Iterator[memoryview]:
    data = memoryview(TENSORS[name].numpy().tobytes())
    yield from (data[begin : begin + 100] for begin in range(0, len(data), 100))


def save(folder: Path, source: str = "a model") -> None:
    write_checkpoint(folder, SHARDS, BESIDE, chunks, source=source)


def assert_whole(folder: Path) -> None:
    index = read_index(folder / "model.safetensors.index.json")
    assert len(index.shards) == 3
    found = {name: tensor for shard in index.shards for name, tensor in load_file(folder / shard).items()}
    assert found.keys() == TENSORS.keys() == index.weight_map.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert {name: (folder / name).read_bytes() for name in BESIDE} == BESIDE
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*index.shards, "config.json", "extra", "model.safetensors.index.json"]
    )


def test_shards_are_filled_in_order() -> None:
    assert [len(shard.tensors) for shard in SHARDS] == [2, 2, 1]
    assert [shard.name for shard in plan_shards(PLACED, 10_000)] == ["model.safetensors"]
    assert [len(shard.tensors) for shard in plan_shards(PLACED, 100)] == [1] * 5  # each is larger than allowed
    odd = [TensorToWrite("odd", "U8", (3,)), TensorToWrite("even", "U8", (64,))]
    assert [tensor.name for tensor in plan_shards(odd, 100)[0].tensors] == ["even", "odd"]


def test_an_index_says_how_large_it_all_is(tmp_path: Path) -> None:
    save(tmp_path)
    assert_whole(tmp_path)
    metadata = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]
    assert metadata == {"total_parameters": 320, "total_size": 1280}


def test_wherever_it_is_killed_the_same_call_makes_it_whole(tmp_path: Path) -> None:
    """And until the index is there, nothing in the folder is named like a checkpoint's entry."""
    cleared, moved = 0, 0
    for at in itertools.count():
        folder = tmp_path / str(at)
        with dying_at(at) as death:
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
        if index.exists() and not (work / "all.is.there").exists():
            durable.remove_folder(work)
        else:
            save(folder)
        assert_whole(folder)
    assert_whole(folder)
    assert cleared > 20
    assert moved > 5


def test_another_model_is_not_mistaken_for_the_interrupted_one(tmp_path: Path) -> None:
    for at in itertools.count():
        with dying_at(at, kinds=("rename",)):
            save(tmp_path)
        if (tmp_path / WORK_NAME / "all.is.there").exists():
            break
    assert (tmp_path / WORK_NAME / "all.is.there").exists()
    with pytest.raises(OptionError, match="holds a model already"):
        save(tmp_path, "another model of these shapes")
    assert_whole(tmp_path)  # the interrupted one, finished


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
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
    with pytest.raises(OptionError, match=f"holds a model already: '{name}'"):
        save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_another_models_config_is_refused_and_a_tokenizer_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    with pytest.raises(OptionError, match=r"config\.json"):
        save(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
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
