"""The contract of every format of weights: told apart by first bytes, read from its header alone, and within bounds."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from rabbitllm.errors import CheckpointError, UnreadableFormatError
from rabbitllm.formats.gguf_types import TENSOR_TYPES
from rabbitllm.formats.shard_header import (
    FORMATS,
    HEAD_BYTES,
    WeightFormat,
    Weights,
    parse_shard_header,
    read_shard_header,
    recognise,
)
from rabbitllm.formats.tensor_spec import byte_size, dtype_name, read_run, torch_dtype
from rabbitllm.storage.files import PositionalFile
from tests.attacks.gguf_files import file_of
from tests.support.torch_files import pickled

TENSORS = {"w": torch.arange(4.0)}


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.txt", "model"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_files_of_torch(tmp_path: Path, name: str, protocol: int) -> None:
    path = tmp_path / name
    torch.save(TENSORS, path, pickle_protocol=protocol)
    assert recognise(path.read_bytes()) is Weights.TORCH_ZIP
    torch.save(TENSORS, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    assert recognise(path.read_bytes()) is Weights.TORCH_LEGACY


def test_other_formats(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    save_file(TENSORS, path)
    assert recognise(path.read_bytes()) is Weights.SAFETENSORS
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(__file__, "pickle")
    assert recognise(path.read_bytes()) is Weights.TORCH_TAR
    path.write_bytes(pickled({"x": 1}, 4))
    assert recognise(path.read_bytes()) is Weights.PICKLE


@pytest.mark.parametrize(
    ("head", "weights"),
    [
        (b"", Weights.EMPTY),
        (b"PK", Weights.UNKNOWN),
        (b"PK\x05\x06", Weights.UNKNOWN),
        (b"GGUF\x03\0\0\0", Weights.GGUF),
        (b"\x80", Weights.UNKNOWN),
        (b"\x80\x06", Weights.UNKNOWN),
        (b"<!DOCTYPE html>", Weights.UNKNOWN),
        (b"version https://git-lfs.github.com/spec/v1\n", Weights.POINTER),
        (b"\x02\0\0\0\0\0\0\0{}", Weights.SAFETENSORS),
        (b"\x80\x00\0\0\0\0\0\0{}", Weights.SAFETENSORS),  # headers whose length begins like a pickle
        (b"\x80\x05\0\0\0\0\0\0{}", Weights.SAFETENSORS),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", Weights.UNKNOWN),
    ],
)
def test_heads(head: bytes, weights: Weights) -> None:
    assert recognise(head) is weights


Tensors = dict[str, torch.Tensor]
SHARD: Tensors = {
    "a.weight": torch.arange(300_000.0).view(300, 1000),
    "b.weight": torch.arange(12, dtype=torch.int64).view(3, 4),
    "c": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 7),
}
DATA_BYTES = 1_200_000


def _saved(tensors: Tensors, *, zipped: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(tensors, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


def _tar(tensors: Tensors) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(__file__, "pickle")
    return stream.getvalue()


def _gguf(tensors: Tensors) -> bytes:
    listed, data = [], b""
    for name, tensor in tensors.items():
        type_id = TENSOR_TYPES[dtype_name(tensor.dtype)].number
        listed.append((name, tuple(tensor.shape)[::-1], type_id, len(data)))
        data += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        data += bytes(-len(data) % 32)
    return file_of(listed, data=data)


WRITERS: dict[Weights, Callable[[Tensors], bytes]] = {
    Weights.SAFETENSORS: save,
    Weights.TORCH_ZIP: partial(_saved, zipped=True),
    Weights.TORCH_LEGACY: partial(_saved, zipped=False),
    Weights.TORCH_TAR: _tar,
    Weights.PICKLE: lambda tensors: pickled({"x": 1}, 4),
    Weights.GGUF: _gguf,
    Weights.POINTER: lambda tensors: b"version https://git-lfs.github.com/spec/v1\n",
    Weights.EMPTY: lambda tensors: b"",
    Weights.UNKNOWN: lambda tensors: b"<!DOCTYPE html>",
}
"""A sound file of each format; a new entry of the registry needs one here."""

EVERY = pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: entry.kind.name)
READ = pytest.mark.parametrize(
    "entry", [entry for entry in FORMATS if entry.header is not None], ids=lambda entry: entry.kind.name
)


def made(entry: WeightFormat, folder: Path) -> Path:
    path = folder / "shard.bin"
    path.write_bytes(WRITERS[entry.kind](SHARD))
    return path


def test_each_format_is_registered_once() -> None:
    assert sorted(entry.kind.name for entry in FORMATS) == sorted(weights.name for weights in Weights)
    assert FORMATS[-1].kind is Weights.UNKNOWN


@EVERY
def test_format_is_recognised_by_first_bytes(entry: WeightFormat, tmp_path: Path) -> None:
    path = made(entry, tmp_path)
    assert recognise(path.read_bytes()[:HEAD_BYTES]) is entry.kind
    assert next(candidate for candidate in FORMATS if candidate.begins(path.read_bytes()[:HEAD_BYTES])) is entry
    if entry.header is None:
        assert entry.remedy
        with pytest.raises(UnreadableFormatError, match=re.escape(f"shard.bin is {entry.kind.value}")) as refused:
            read_shard_header(path)
        assert refused.value.remedy == entry.remedy
    else:
        assert {spec.name for spec in read_shard_header(path).tensors} == {*SHARD}


@READ
@pytest.mark.parametrize("scattered", [True, False])
def test_header_is_read_in_ranges_without_the_data(entry: WeightFormat, scattered: bool, tmp_path: Path) -> None:
    path = made(entry, tmp_path)
    content, nbytes = path.read_bytes(), 0
    assert len(content) > DATA_BYTES

    def read(offset: int, length: int) -> bytes:
        nonlocal nbytes
        assert 0 <= offset <= len(content)
        assert 0 <= length <= len(content)
        nbytes += length
        return content[offset : offset + length]

    header = parse_shard_header(read, len(content), "shard.bin", scattered=scattered)
    assert header == read_shard_header(path)
    assert nbytes < len(content) - DATA_BYTES / 2
    if header.comes_first:
        assert min(spec.offset for spec in header.tensors) == header.data_start
    assert {spec.file for spec in header.tensors} == {"shard.bin"}
    assert read_shard_header(path, "other").tensors[0].file == "other"


@READ
def test_tensors_equal_the_written_ones(entry: WeightFormat, tmp_path: Path) -> None:
    path = made(entry, tmp_path)
    with PositionalFile(path) as file:
        for spec in read_shard_header(path).tensors:
            expected = SHARD[spec.name]
            assert (torch_dtype(spec.dtype), spec.shape) == (expected.dtype, tuple(expected.shape))
            assert spec.nbytes == byte_size(spec.dtype, spec.shape)
            buffer = bytearray(spec.nbytes)
            assert read_run(file, spec, 0, memoryview(buffer)) == spec.nbytes if spec.nbytes else True
            assert bytes(buffer) == expected.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@READ
def test_truncated_or_extended_file_is_refused(entry: WeightFormat, tmp_path: Path) -> None:
    content = made(entry, tmp_path).read_bytes()
    wrong = [content[:length] for length in (*range(0, 600, 7), *range(600, len(content), 100_003), len(content) - 1)]
    for damaged in [*wrong, content + b"\0"]:
        with pytest.raises(CheckpointError) as refused:
            parse_shard_header(_reader(damaged), len(damaged), "shard.safetensors")
        assert "shard.safetensors" in str(refused.value)


def _reader(content: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: content[offset : offset + length]


@READ
@given(data=st.data())
def test_changed_byte_is_refused_or_harmless(entry: WeightFormat, data: st.DataObject) -> None:
    content = bytearray(WRITERS[entry.kind]({"w": torch.arange(4.0)}))
    offset = data.draw(st.integers(0, len(content) - 1))
    content[offset] = data.draw(st.integers(0, 255))
    try:
        header = parse_shard_header(_reader(bytes(content)), len(content), "shard.safetensors")
    except CheckpointError:
        return
    for spec in header.tensors:
        assert 0 <= spec.offset <= spec.offset + spec.extent <= len(content)
