"""Formats told apart by their first bytes, whatever the file is called."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rabbitllm.formats.shard_header import Weights, recognise, recognise_file
from tests.support.torch_files import pickled

TENSORS = {"w": torch.arange(4.0)}


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.txt", "model"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_writes(tmp_path: Path, name: str, protocol: int) -> None:
    path = tmp_path / name
    torch.save(TENSORS, path, pickle_protocol=protocol)
    assert recognise_file(path) is Weights.TORCH_ZIP
    torch.save(TENSORS, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    assert recognise_file(path) is Weights.TORCH_LEGACY


def test_other_formats(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    save_file(TENSORS, path)
    assert recognise_file(path) is Weights.SAFETENSORS
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(__file__, "pickle")
    assert recognise_file(path) is Weights.TORCH_TAR
    path.write_bytes(pickled({"x": 1}, 4))
    assert recognise_file(path) is Weights.PICKLE


@pytest.mark.parametrize(
    ("head", "weights"),
    [
        (b"", Weights.UNKNOWN),
        (b"PK", Weights.UNKNOWN),
        (b"PK\x05\x06", Weights.UNKNOWN),
        (b"GGUF\x03\0\0\0", Weights.GGUF),
        (b"\x80", Weights.UNKNOWN),
        (b"\x80\x06", Weights.UNKNOWN),
        (b"<!DOCTYPE html>", Weights.UNKNOWN),
        (b"version https://git-lfs.github.com/spec/v1\n", Weights.UNKNOWN),
        (b"\x02\0\0\0\0\0\0\0{}", Weights.SAFETENSORS),
        (b"\x80\x00\0\0\0\0\0\0{}", Weights.SAFETENSORS),  # headers whose length begins like a pickle
        (b"\x80\x05\0\0\0\0\0\0{}", Weights.SAFETENSORS),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", Weights.UNKNOWN),
    ],
)
def test_heads(head: bytes, weights: Weights) -> None:
    assert recognise(head) is weights
