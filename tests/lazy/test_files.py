"""An open shard: its tensors, views that share memory, and closing while it is read."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rabbitllm.errors import (
    ClosedCheckpointError,
    CorruptShardError,
)
from rabbitllm.formats import shard_header
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.lazy import _files
from rabbitllm.lazy._files import ShardFile
from rabbitllm.storage.files import CAN_MAP_PRIVATELY, PositionalFile
from tests.support.leftovers import open_files

VALUES = torch.arange(24.0).reshape(4, 6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save({"plain": VALUES, "turned": VALUES.t(), "none": VALUES[:0]}, tmp_path / "x.bin")
    return tmp_path / "x.bin"


def spec(file: ShardFile, name: str) -> TensorSpec:
    return next(tensor for tensor in file.header.tensors if tensor.name == name)


@pytest.mark.skipif(not CAN_MAP_PRIVATELY, reason="nothing is mapped here")
def test_view_has_the_strides_of_the_file_and_a_read_copy_is_contiguous(path: Path) -> None:
    for mapped in (True, False):
        file = ShardFile(path, "x.bin", mapped=mapped)
        turned = file.tensor(spec(file, "turned"))
        assert torch.equal(turned, VALUES.t())
        assert turned.stride() == ((1, 6) if mapped else (4, 1))
        assert file.viewable(spec(file, "turned")) is mapped
        assert file.tensor(spec(file, "none")).shape == (0, 6)


def test_tensor_at_an_odd_address_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3, dtype=torch.uint8), "b": VALUES}, tmp_path / "x")
    raw = (tmp_path / "x").read_bytes()
    length = int.from_bytes(raw[:8], "little") + 3
    (tmp_path / "x").write_bytes(length.to_bytes(8, "little") + raw[8 : 5 + length] + b"   " + raw[5 + length :])
    file = ShardFile(tmp_path / "x", "x", mapped=True)
    assert [file.viewable(tensor) for tensor in file.header.tensors if tensor.name == "b"] == [False]
    assert torch.equal(file.tensor(spec(file, "b")), VALUES)


@pytest.mark.skipif(not CAN_MAP_PRIVATELY, reason="nothing is mapped here")
def test_mapping_is_closed_with_its_views_unless_kept(path: Path) -> None:
    file = ShardFile(path, "x.bin", mapped=True)
    plain = spec(file, "plain")
    first = file.tensor(plain)
    first.zero_()
    assert not file.tensor(plain).any()
    del first
    gc.collect()
    assert torch.equal(file.tensor(plain), VALUES)
    kept = file.tensor(plain)
    file.hold_mapping()
    kept.zero_()
    del kept
    assert not file.tensor(plain).any()
    assert torch.equal(torch.load(path, weights_only=True)["plain"], VALUES)


def test_system_without_mappings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: PositionalFile) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(PositionalFile, "map_privately", refused)
    file = ShardFile(path, "x.bin", mapped=True)
    assert torch.equal(file.tensor(spec(file, "plain")), VALUES)
    assert torch.equal(file.tensor(spec(file, "turned")), VALUES.t())


def test_closing_waits_for_readers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ShardFile(path, "x.bin", mapped=False)
    reading, closed = threading.Event(), threading.Event()
    plain = PositionalFile.read_into

    def slow(opened: PositionalFile, buffer: memoryview, offset: int) -> int:
        reading.set()
        assert closed.wait(600)
        return plain(opened, buffer, offset)

    monkeypatch.setattr(PositionalFile, "read_into", slow)
    tensors: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: tensors.append(file.tensor(spec(file, "plain"))))
    thread.start()
    assert reading.wait(600)
    file.close()
    closed.set()
    thread.join()
    assert torch.equal(tensors[0], VALUES)
    with pytest.raises(ClosedCheckpointError):
        file.tensor(spec(file, "plain"))
    assert not list(open_files(path.parent))


def test_file_replaced_while_opening(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(file: Path, name: str) -> shard_header.Header:
        other = file.with_name("other")
        torch.save({"plain": VALUES}, other)
        other.replace(file)
        return shard_header.read_shard_header(file, name)

    monkeypatch.setattr(_files, "read_shard_header", replaced)
    with pytest.raises(CorruptShardError, match="has changed since it was opened"):
        ShardFile(path, "x.bin", mapped=True)
