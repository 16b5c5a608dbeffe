"""The format of `torch.save` before torch 1.6 is read as torch reads it, without its data."""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rabbitllm.errors import CheckpointError, CorruptShardError
from rabbitllm.formats import torch_file
from rabbitllm.formats.torch_file import TorchFile, parse_legacy_torch, read_legacy_torch
from tests.attacks import legacy_torch_files
from tests.attacks.attack import Attack
from tests.attacks.legacy_torch_files import parts, storage
from tests.formats.test_torch_zip import assert_equal
from tests.support.draws import draws
from tests.support.fresh_process import python
from tests.support.torch_files import FOUR, bits, every_dtype, tensor, views

PROTOCOLS = [2, 3, 4, 5]


def saved(path: Path, value: Any, protocol: int = 2) -> TorchFile:
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    return read_legacy_torch(path)


def _has_a_storage_type(value: torch.Tensor) -> bool:
    return value.dtype in torch.storage._dtype_to_storage_type_map()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 3")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_dtype(tmp_path: Path, protocol: int) -> None:
    """torch writes those newer than its typed storages too, and cannot read them then; here they are read."""
    tensors = every_dtype()
    assert_equal(tmp_path / "x.bin", saved(tmp_path / "x.bin", tensors, protocol), tensors)
    if protocol <= 3:
        tensors = {name: value for name, value in tensors.items() if _has_a_storage_type(value)}
        assert len(tensors) == 11
        assert_equal(tmp_path / "x.bin", saved(tmp_path / "x.bin", tensors, protocol), tensors)
        loaded = torch.load(tmp_path / "x.bin", weights_only=True)
        assert {name: bits(value) for name, value in loaded.items()} == {n: bits(v) for n, v in tensors.items()}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 3")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_views_and_shared_storages(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.pth"
    read = saved(path, views(), protocol)
    assert_equal(path, read, views() if protocol > 3 else torch.load(path, weights_only=True))


def test_module_and_training_checkpoint(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = module.state_dict()
    assert_equal(tmp_path / "a.pt", saved(tmp_path / "a.pt", OrderedDict(state)), dict(state))
    read = saved(tmp_path / "b.pt", {"epoch": 3, "model": module.state_dict(), "optimizer": {"m": torch.ones(5)}})
    assert [record.name for record in read.tensors] == list(state)
    assert read.left_out == ("epoch", "optimizer")


def test_nan_and_infinite_weights_are_legal(tmp_path: Path) -> None:
    tensors = {"w": torch.tensor([float("nan"), float("inf"), -0.0]), "none": torch.empty(0, 3)}
    assert_equal(tmp_path / "x.bin", saved(tmp_path / "x.bin", tensors), tensors)


def test_pickles_longer_than_the_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"a.rather.long.name.{index}": torch.full((3,), index) for index in range(100)}
    whole = saved(tmp_path / "x.bin", tensors)
    for first in (1, 50, 211, 512, 5000):  # wherever the first read ends, inside whichever opcode
        monkeypatch.setattr(torch_file, "READS", (first, first + 700, 1 << 20))
        assert read_legacy_torch(tmp_path / "x.bin") == whole


def test_counts_left_out(tmp_path: Path) -> None:
    """What stands between the storages is not asked for, and the places are the same."""
    path = tmp_path / "x.bin"
    whole = saved(path, {str(index): torch.ones(70_000) for index in range(4)})
    content = path.read_bytes()
    reads: list[tuple[int, int]] = []

    def read(offset: int, length: int) -> bytes:
        reads.append((offset, length))
        return content[offset : offset + length]

    assert parse_legacy_torch(read, len(content), "x.bin", counts=False) == whole
    assert reads == [(0, 256 << 10)]


def test_built_files_are_loaded_by_torch(tmp_path: Path) -> None:
    """The control of the attacks: without its one change, each file is sound."""
    path = tmp_path / "x.bin"
    root = {"w": tensor(storage()), "v": tensor(storage("1", 2, torch.LongStorage), 0, (2,), (1,))}
    data = [struct.pack("<q", 2) + struct.pack("<2q", 7, 9), struct.pack("<q", 4) + FOUR]
    for content in (parts(), parts(root, keys=("1", "0"), storages=data)):
        path.write_bytes(content)
        assert_equal(path, read_legacy_torch(path), torch.load(path, weights_only=True))


@pytest.mark.parametrize("attack", legacy_torch_files.ATTACKS, ids=lambda attack: attack.name)
def test_attack(tmp_path: Path, attack: Attack) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "x.bin").write_bytes(attack.build(marker))
    with pytest.raises(attack.error, match=attack.message) as caught:
        read_legacy_torch(tmp_path / "x.bin")
    assert type(caught.value) is attack.error
    assert not marker.exists()
    assert "x.bin" in caught.value.problem
    assert caught.value.remedy


def test_file_truncated_anywhere(tmp_path: Path) -> None:
    content = parts()
    for length in range(len(content)):
        (tmp_path / "x.bin").write_bytes(content[:length])
        with pytest.raises(CorruptShardError):
            read_legacy_torch(tmp_path / "x.bin")


@settings(max_examples=draws(600), deadline=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 4), st.binary(max_size=4)), min_size=1, max_size=3))
@pytest.mark.filterwarnings("ignore::UserWarning")
@example([(259, 0, b"\0" * 4), (260, 0, b"G\0\0\0")])  # a float as requires_grad
def test_only_our_errors(tmp_path: Path, changes: list[tuple[int, int, bytes]]) -> None:
    """And whatever is accepted is what torch itself makes of it."""
    data = bytearray(parts())
    for offset, cut, new in changes:
        data[offset % len(data) : offset % len(data) + cut] = new.ljust(cut, b"\0")
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    try:
        read = read_legacy_torch(path)
    except CheckpointError:
        return
    loaded = torch.load(path, weights_only=True, map_location="cpu")  # a device that it does not know is nothing to us
    for record in read.tensors:
        assert tuple(loaded[record.name].shape) == record.shape


GIANT = """
import resource, sys
from pathlib import Path
from rabbitllm.formats.torch_file import read_legacy_torch
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read = read_legacy_torch(Path(sys.argv[1]))
print(len(read.tensors), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle)
assert "torch" not in sys.modules
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files, ru_maxrss in kilobytes")
def test_file_of_13_gb(tmp_path: Path) -> None:
    """Opened without its data, which torch itself would have to read whole."""
    elements = 4096 * 11008
    names = {f"layers.{index}.weight": str(index) for index in range(150)}
    value = {
        name: tensor(storage(key, elements, torch.BFloat16Storage), 0, (4096, 11008), (11008, 1))
        for name, key in names.items()
    }
    head = parts(value, keys=tuple(names.values()), storages=[])
    path = tmp_path / "pytorch_model.bin"
    with path.open("wb") as file:
        file.write(head)
        for _ in names:
            file.write(struct.pack("<q", elements))
            file.seek(2 * elements, 1)
        file.truncate()
    assert path.stat().st_size > 13_000_000_000
    ran = python(GIANT, path)
    path.unlink()
    count, kilobytes = map(float, ran.stdout.split())
    assert count == 150
    assert kilobytes < 50_000
