"""A tensor that two shards have, which the index takes from the other one by now, or which is edited in one of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from rabbitllm.checkpoints.checkpoint import WHOLE_BYTES
from rabbitllm.errors import SplitMismatchError
from rabbitllm.formats.safetensors_file import read_header
from tests.support.builders import INDEX_NAME, cut, llama_tensors, write_shards
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.splitting import Call, interrupted, layer_files

REPO = "acme/twice"
NORM = "model.norm.weight"


def with_two_norms(folder: Path, *, same: bool = False) -> Path:
    """Both shards have the norm, and the index takes it from the last."""
    first, second = shards = cut(llama_tensors(), 2)
    norm = shards[second][NORM] if same else torch.ones(64)
    write_shards(folder, {first: {**shards[first], NORM: norm}, second: shards[second]})
    return folder


def move(folder: Path, tensor: str = NORM) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"][tensor] = "model-00001-of-00002.safetensors"
    (folder / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize("on_hub", [False, True])
@pytest.mark.parametrize("is_finished", [False, True])
def test_moved_tensor(
    is_finished: bool, on_hub: bool, tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    """No layer file may have the values of the shard that the index names no more."""
    model = with_two_norms(tmp_path / "hub" / REPO if on_hub else tmp_path / "model")
    call = Call(REPO if on_hub else str(model), sequential=on_hub)
    folder = call.make() if is_finished else interrupted(call)
    moved = shutil.copytree(model, tmp_path / "moved") if on_hub else model
    move(moved)
    if on_hub:
        local_hub.add_revision(REPO, "main", moved)
    before = layer_files(folder)
    with pytest.raises(SplitMismatchError, match=r"index takes .* from model-00001-of-00002"):
        call.make()
    assert layer_files(folder) == before


@pytest.mark.parametrize("sequential", [False, True])
def test_tensor_moved_within_a_finished_layer(tmp_path: Path, sequential: bool) -> None:
    """Its layer is made of both shards, before and after."""
    first, second = shards = cut(llama_tensors(layers=1), 2)
    doubled = next(iter(shards[second]))
    assert "layers.0" in doubled
    others = {**shards[first], doubled: shards[second][doubled] + 1}
    model = write_shards(tmp_path / "model", {first: others, second: shards[second]})
    call = Call(str(model), sequential=sequential)
    folder = call.make()
    assert call.make() == folder
    move(model, doubled)
    with pytest.raises(SplitMismatchError, match=rf"index takes {doubled} from {first}, not {second}"):
        call.make()


def test_edited_copy_in_a_used_shard_is_kept(tmp_path: Path) -> None:
    """The split has none of its bytes: they were those of the other shard when it was begun."""
    first, second = shards = cut(llama_tensors(layers=2, hidden=512, vocabulary=8192), 2)
    tensors = {first: {**shards[first], NORM: shards[second][NORM].repeat(4096)}}
    tensors[second] = {**shards[second], NORM: tensors[first][NORM]}
    model = write_shards(tmp_path / "model", tensors)
    folder = interrupted(Call(str(model), sequential=False))
    path = model / first
    assert path.stat().st_size > WHOLE_BYTES
    norm = next(spec for spec in read_header(path).tensors if spec.name == NORM)
    with path.open("r+b") as file:  # not at its middle, which is sampled
        file.seek(norm.offset + 1000)
        file.write(b"edited")
    edited = path.read_bytes()
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))
    assert Call(str(model)).make() == folder
    assert path.read_bytes() == edited
    assert not (model / second).exists()
