"""Lazy loading: every tensor equals that of torch or safetensors; invalid files are refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import rabbitllm
from rabbitllm.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ClosedCheckpointError,
    CorruptShardError,
    InvalidIndexError,
    MissingShardError,
    UnreadableFormatError,
    UnsafePathError,
)
from rabbitllm.lazy._tensor import LazyTensor
from tests.attacks import pickles, torch_zips
from tests.support.builders import INDEX_NAME, cut, llama_tensors, torch_files, write_shards, write_torch
from tests.support.leftovers import open_files
from tests.support.meta_files import tiny_llama, weights_of, write_meta
from tests.support.splitting import split
from tests.support.torch_files import archive, bits, every_dtype, pack, views

MAPPED = pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])


def assert_same(loaded: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(loaded) == set(expected)
    assert len(loaded) == len(expected)
    for name, tensor in expected.items():
        lazy = loaded[name]
        assert isinstance(lazy, LazyTensor)
        assert (lazy.shape, lazy.dtype, lazy.device) == (tensor.shape, tensor.dtype, tensor.device)
        assert lazy.nbytes == tensor.nbytes
        assert bits(lazy) == bits(tensor)
        assert lazy.read().stride() == lazy.stride() == loaded[name].stride()
        assert type(lazy.read()) is torch.Tensor


@MAPPED
def test_safetensors_file(tmp_path: Path, mapped: bool) -> None:
    tensors = every_dtype() | {"empty": torch.empty(0, 3)}
    save_file({name: t for name, t in tensors.items() if "F4" not in name}, tmp_path / "x.safetensors")
    with rabbitllm.lazy_load(tmp_path / "x.safetensors", mapped=mapped) as lazy:
        assert_same(lazy, load_file(tmp_path / "x.safetensors"))


@MAPPED
@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".anything"])
def test_torch_file_of_any_name(tmp_path: Path, suffix: str, mapped: bool) -> None:
    torch.save(every_dtype() | {"empty": torch.empty(0, 3)}, tmp_path / f"x{suffix}")
    with rabbitllm.lazy_load(str(tmp_path / f"x{suffix}"), mapped=mapped) as lazy:
        assert_same(lazy, torch.load(tmp_path / f"x{suffix}", weights_only=True))


@MAPPED
def test_views_parameters_and_shared_storages(tmp_path: Path, mapped: bool) -> None:
    more = {"none of none": torch.empty(5, 0)[4:], "parameter": torch.nn.Parameter(torch.ones(2, 3))}
    torch.save(views() | more, tmp_path / "x.bin")
    expected = torch.load(tmp_path / "x.bin", weights_only=True)
    lazy = rabbitllm.lazy_load(tmp_path / "x.bin", mapped=mapped)
    assert_same(lazy, expected)
    strides = {name: lazy[name].stride() for name in lazy if lazy[name].numel()}
    if mapped:
        assert strides == {name: expected[name].stride() for name in strides}
    else:
        assert all(lazy[name].is_contiguous() for name in strides)
    assert not any(isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad for tensor in lazy.values())


def test_tensors_of_one_storage_share_memory(tmp_path: Path) -> None:
    torch.save(views(), tmp_path / "x.bin")
    before = (tmp_path / "x.bin").read_bytes()
    lazy = rabbitllm.lazy_load(tmp_path / "x.bin")
    whole, tied, part = lazy["whole"], lazy["again"], lazy["slice"]
    assert whole.data_ptr() == tied.data_ptr() == part.data_ptr() - whole[1].storage_offset() * 4
    whole.zero_()
    assert not tied.any()
    assert not part.any()
    assert not lazy["scalar"]  # looked up afterwards
    del whole, tied, part
    assert not lazy["whole"].any()  # as long as it is open, with or without references to the tensors
    assert (tmp_path / "x.bin").read_bytes() == before
    assert rabbitllm.lazy_load(tmp_path / "x.bin")["whole"].any()


@MAPPED
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_folder(tmp_path: Path, form: str, shards: int, mapped: bool) -> None:
    tensors = llama_tensors()
    files = cut(tensors, shards)
    if shards == 1:
        files = {"model.safetensors": next(iter(files.values()))}
    if form == "safetensors":
        write_shards(tmp_path / "m", files, index=shards > 1)
    else:
        write_torch(tmp_path / "m", torch_files(files), index=shards > 1)
    lazy = rabbitllm.lazy_load(tmp_path / "m", mapped=mapped)
    assert_same(lazy, tensors)
    assert lazy.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert {tensor.path.parent for tensor in lazy.values()} == {tmp_path / "m"}


def test_uncompressed_split(tmp_path: Path) -> None:
    tensors = llama_tensors()
    write_shards(tmp_path / "m", cut(tensors, 3))
    assert_same(rabbitllm.lazy_load(split(tmp_path / "m", tmp_path / "plain")), tensors)
    write_shards(tmp_path / "m", cut(tensors, 3))
    with pytest.raises(UnreadableFormatError, match="is a compressed split"):
        rabbitllm.lazy_load(split(tmp_path / "m", tmp_path / "packed", compression="4bit"))


def test_opening_and_describing_read_no_weights(tmp_path: Path) -> None:
    """The weights are a hole of 64 GB: reading or reserving them would fail."""
    header = {"w": {"dtype": "F32", "shape": [1 << 20, 1 << 14], "data_offsets": [0, 1 << 36]}}
    raw = json.dumps(header).encode().ljust(4096 - 8)
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(4096 + (1 << 36))
        file.seek(4096 + (5 << 16))
        file.write(torch.arange(4.0).numpy().tobytes())
    lazy = rabbitllm.lazy_load(path)
    assert (list(lazy), len(lazy), "w" in lazy, "v" in lazy, lazy.nbytes) == (["w"], 1, True, False, 1 << 36)
    tensor = lazy["w"]
    assert (tensor.shape, tensor.numel(), tensor.stride()) == ((1 << 20, 1 << 14), 1 << 34, (1 << 14, 1))
    assert (tensor.spec.offset, tensor.spec.file, tensor.path) == (4096, "x.safetensors", path)
    assert "not read" in repr(tensor)
    assert "68,719,476,736 bytes in 1 files" in repr(lazy)
    assert tensor[5, :4].tolist() == [0, 1, 2, 3]
    unmapped = rabbitllm.lazy_load(path, mapped=False)["w"]
    assert unmapped[4:6][1, :4].tolist() == unmapped[5][:4].tolist() == [0, 1, 2, 3]
    assert unmapped[-1].sum() == 0
    assert "not read" in repr(unmapped)


@pytest.mark.parametrize("attack", [*torch_zips.ATTACKS, *pickles.ATTACKS], ids=lambda attack: attack.name)
def test_hostile_files_are_refused_when_opened(tmp_path: Path, attack: torch_zips.Attack) -> None:
    data = attack.build(tmp_path / "marker")
    if attack in pickles.ATTACKS:
        data = pack(archive(data))
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(CheckpointError):
        rabbitllm.lazy_load(tmp_path / "x.bin")
    assert not (tmp_path / "marker").exists()
    assert not list(open_files(tmp_path))


def test_missing_or_mismatched_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="neither a file nor a folder"):
        rabbitllm.lazy_load(tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        rabbitllm.lazy_load(tmp_path)
    folder = write_shards(
        tmp_path / "m", {"a.safetensors": {"x": torch.ones(3)}, "b.safetensors": {"y": torch.ones(3)}}
    )
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "z": "b.safetensors"}}))
    with pytest.raises(InvalidIndexError, match=r"'z' into b\.safetensors"):
        rabbitllm.lazy_load(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(MissingShardError, match=r"b\.safetensors is missing"):
        rabbitllm.lazy_load(folder)
    index.write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    with pytest.raises(UnsafePathError):
        rabbitllm.lazy_load(folder)
    (folder / "b.safetensors").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"no weights")
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    with pytest.raises(UnsafePathError, match="leads outside its folder"):
        rabbitllm.lazy_load(folder)
    (tmp_path / "elsewhere").write_bytes((folder / "a.safetensors").read_bytes())
    assert rabbitllm.lazy_load(folder)["x"].tolist() == [1, 1, 1]


@MAPPED
def test_file_changed_after_opening(tmp_path: Path, mapped: bool) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4096), "b": torch.ones(4096)}, path)
    lazy = rabbitllm.lazy_load(path, mapped=mapped)
    kept = lazy["a"].clone()
    os.truncate(path, path.stat().st_size - 4096)
    for name in lazy:
        with pytest.raises(CorruptShardError, match="has changed since it was opened"):
            _ = lazy[name] + 1
    assert kept.sum() == 4096
    save_file({"a": torch.zeros(4096), "b": torch.zeros(4096)}, tmp_path / "new")
    lazy = rabbitllm.lazy_load(tmp_path / "new", mapped=mapped)
    os.replace(tmp_path / "new", path)  # another name is no change
    assert lazy["a"].sum() == 0
    path.unlink()
    assert lazy["b"].sum() == 0


@MAPPED
def test_closing(tmp_path: Path, mapped: bool) -> None:
    torch.save({"a": torch.ones(8), "b": torch.ones(8)}, tmp_path / "x.bin")
    with rabbitllm.lazy_load(tmp_path / "x.bin", mapped=mapped) as lazy:
        read, unread = lazy["a"], lazy["b"]
        assert read.sum() == 8
    assert read.add_(1).sum() == 16
    assert "not read" in repr(unread)
    with pytest.raises(ClosedCheckpointError, match="is closed"):
        unread.sum()
    lazy.close()
    tensor = rabbitllm.lazy_load(tmp_path / "x.bin", mapped=mapped)["a"]
    assert tensor.sum() == 8  # it keeps its file open by itself


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors")
def test_descriptors_are_closed_with_their_tensors(tmp_path: Path) -> None:
    write_shards(tmp_path, cut(llama_tensors(), 3))
    lazy = rabbitllm.lazy_load(tmp_path)
    assert len(list(open_files(tmp_path))) == 3
    name = next(iter(lazy))
    tensor = lazy[name]
    del lazy
    assert len(list(open_files(tmp_path))) == 1
    tensor.read()
    del tensor
    assert not list(open_files(tmp_path))


def test_checkpoint_is_neither_pickled_nor_deep_copied(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(8)}, tmp_path / "x.bin")
    lazy = rabbitllm.lazy_load(tmp_path / "x.bin")
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="holds open files"):
            attempt(lazy)
    assert torch.equal(pickle.loads(pickle.dumps(dict(lazy)))["a"], torch.ones(8))
    with pytest.raises(KeyError, match="'b'"):
        lazy["b"]


@MAPPED
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("embedding_dim", [0, 1])
def test_meta_files(tmp_path: Path, mapped: bool, ranks: int, embedding_dim: int) -> None:
    """Under transformers' names, pieces joined, Q and K in their order."""
    model = tiny_llama(kv_heads=4)
    write_meta(tmp_path, model, ranks=ranks, embedding_dim=embedding_dim)
    with rabbitllm.lazy_load(tmp_path, mapped=mapped) as loaded:
        assert "not read" in repr(loaded["model.layers.0.self_attn.q_proj.weight"])
        assert_same(loaded, weights_of(model))
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(loaded[name][3:5], weights_of(model)[name][3:5])
        other = tiny_llama(kv_heads=4, seed=1)
        other.load_state_dict(loaded, assign=True)
        assert_same(loaded, weights_of(other))


def test_meta_files_without_a_rank(tmp_path: Path) -> None:
    write_meta(tmp_path, tiny_llama(), ranks=4)
    (tmp_path / "consolidated.02.pth").unlink()
    with pytest.raises(MissingShardError, match=r"lacks consolidated\.02\.pth"):
        rabbitllm.lazy_load(tmp_path)


@MAPPED
def test_torch_format_before_1_6(tmp_path: Path, mapped: bool) -> None:
    tensors = llama_tensors()
    write_torch(tmp_path, torch_files(cut(tensors, 2)), index=True, legacy=True)
    with rabbitllm.lazy_load(tmp_path, mapped=mapped) as loaded:
        assert_same(loaded, tensors)


def test_index_linked_to_what_is_no_index_is_refused(tmp_path: Path) -> None:
    elsewhere = write_shards(tmp_path / "elsewhere", cut(llama_tensors(), 2))
    folder = write_shards(tmp_path / "model", cut(llama_tensors(), 2))
    (folder / INDEX_NAME).unlink()
    (elsewhere / INDEX_NAME).write_text("a secret")
    (folder / INDEX_NAME).symlink_to(elsewhere / INDEX_NAME)
    with pytest.raises(UnsafePathError):
        rabbitllm.lazy_load(folder)
