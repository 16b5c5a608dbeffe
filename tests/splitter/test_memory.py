"""Memory of a split above that of an idle process: fixed buffers, independent of tensor, layer and shard."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
import torch

from rabbitllm.formats.safetensors_file import TensorToWrite, encode_header
from tests.attacks import legacy_torch_files
from tests.support.fresh_process import python
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.torch_files import Member, archive, pickled, storage, tensor, write_with_hole

MOST = 200_000_000

SPLIT_AND_WATCH = """
import sys, threading
import bitsandbytes.functional, torch
from rabbitllm.splitter import split as _
from tests.support.splitting import Call

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

source, saving_path, compression = sys.argv[1:]
idle, most, over = anonymous(), 0, threading.Event()

def watch():
    global most
    while not over.wait(0.01):
        most = max(most, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
Call(source, saving_path, None if compression == "none" else compression, sequential=False).make()
over.set()
watcher.join()
print(most - idle)
"""


def embedding(folder: Path, rows: int) -> Path:
    """A checkpoint of one shard and one bf16 tensor of so many rows of 4096; its zeros take no disk."""
    folder.mkdir()
    header, (offset,) = encode_header([TensorToWrite("model.embed_tokens.weight", "BF16", (rows, 4096))])
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(offset + rows * 4096 * 2)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def torch_embedding(folder: Path, rows: int, *, transposed: bool) -> Path:
    """The same as a file of torch.save."""
    folder.mkdir()
    held = storage("0", rows * 4096, torch.BFloat16Storage)
    weights = tensor(held, 0, (rows, 4096), (1, rows) if transposed else (4096, 1))
    members = archive(pickled({"model.embed_tokens.weight": weights}), {})
    write_with_hole(folder / "model.pth", [*members, Member("archive/data/0", b"")], rows * 4096 * 2)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def old_torch_embedding(folder: Path, rows: int) -> Path:
    """The same in torch's format from before 1.6, transposed."""
    folder.mkdir()
    held = legacy_torch_files.storage("0", rows * 4096, torch.BFloat16Storage)
    weights = tensor(held, 0, (rows, 4096), (1, rows))
    with (folder / "model.pth").open("wb") as file:
        file.write(legacy_torch_files.parts({"model.embed_tokens.weight": weights}, storages=[]))
        file.write(struct.pack("<q", rows * 4096))
        file.truncate(file.tell() + rows * 4096 * 2)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def over_idle(source: Path, saving_path: Path, compression: str | None) -> int:
    ran = python(SPLIT_AND_WATCH, source, saving_path, compression or "none")
    return int(ran.stdout.split()[-1])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("compression", [None, "8bit", "q4_k"])
def test_memory_for_a_tensor_larger_than_the_bound(tmp_path: Path, compression: str | None) -> None:
    source = embedding(tmp_path / "model", 60_000)
    assert (source / "model.safetensors").stat().st_size > 2 * MOST
    assert over_idle(source, tmp_path / "out", compression) < MOST


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("compression", "transposed"), [("4bit", True), pytest.param(None, False, marks=pytest.mark.long)]
)
@pytest.mark.long
def test_memory_for_a_torch_file(tmp_path: Path, compression: str | None, transposed: bool) -> None:
    source = torch_embedding(tmp_path / "model", 60_000, transposed=transposed)
    assert (source / "model.pth").stat().st_size > 2 * MOST
    assert over_idle(source, tmp_path / "out", compression) < MOST


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_for_a_torch_file_before_1_6(tmp_path: Path) -> None:
    """torch itself would hold all of it."""
    source = old_torch_embedding(tmp_path / "model", 60_000)
    assert (source / "model.pth").stat().st_size > 2 * MOST
    assert over_idle(source, tmp_path / "out", "4bit") < MOST


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("compression", [None, "8bit", "4bit"])
def test_memory_for_a_tensor_of_2_5_gb(tmp_path: Path, compression: str | None) -> None:
    source = embedding(tmp_path / "model", 305_176)
    assert (source / "model.safetensors").stat().st_size > 2_500_000_000
    assert over_idle(source, tmp_path / "out", compression) < MOST
    for path in (tmp_path / "out").rglob("*.safetensors"):
        path.unlink()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("compression", [None, "8bit"])
def test_memory_for_pieces_of_a_tensor_larger_than_the_bound(tmp_path: Path, compression: str | None) -> None:
    """Cut along the columns, so that the whole is read from a scratch file at strides."""
    model = tiny_llama(hidden=1024, intermediate=1024, layers=1, vocabulary=200_000)
    source = write_meta(tmp_path / "model", model, 2, 1, ffn_dim_multiplier=0.25)
    del model
    assert 2 * MOST < 200_000 * 1024 * 2
    assert over_idle(source, tmp_path / "out", compression) < MOST
