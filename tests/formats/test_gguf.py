"""GGUF headers: what the package gguf writes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from rabbitllm.formats.gguf import GgufArray, outline, parse_gguf, read_gguf, strings
from tests.attacks import gguf_files
from tests.support.gguf_files import write_gguf


def read_in(data: bytes) -> object:
    return parse_gguf(lambda offset, length: data[offset : offset + length], len(data), "x.gguf")


@pytest.mark.parametrize("name", gguf_files.HOSTILE)
def test_hostile_headers_are_refused(name: str) -> None:
    data, says, error = gguf_files.HOSTILE[name]
    with pytest.raises(error, match=says) as refused:
        read_in(data)
    assert refused.value.remedy


@pytest.mark.parametrize("name", gguf_files.LEGAL)
def test_legal_headers_are_read(name: str) -> None:
    read_in(gguf_files.LEGAL[name])


def test_header_equals_that_of_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen3moe")
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    specs = {spec.name: spec for spec in ours.header.tensors}
    assert len(specs) == len(theirs.tensors)
    for tensor in theirs.tensors:
        spec = specs[tensor.name]
        assert (spec.offset, spec.extent) == (tensor.data_offset, tensor.n_bytes)
        assert spec.shape == tuple(int(size) for size in tensor.shape)[::-1]
    assert ours.header.data_start == theirs.data_offset
    assert {*ours.metadata} == {name for name in theirs.fields if not name.startswith("GGUF.")}
    assert ours.metadata["qwen3moe.block_count"] == 2


@pytest.mark.parametrize("long_arrays", [True, False])
def test_outline_has_metadata_and_names(tmp_path: Path, long_arrays: bool) -> None:
    words = [f"word {index}" for index in range(5000)]
    path = write_gguf(tmp_path / "model.gguf", changed=lambda writer: writer.add_array("words", words))
    data = path.read_bytes()
    file = read_gguf(path)
    array = file.metadata["words"]
    assert isinstance(array, GgufArray)
    assert [*strings(lambda offset, length: data[offset : offset + length], array, "x")] == words
    names = ["a", "blk.0.b"]
    outline_path = tmp_path / "outline.gguf"
    outline_path.write_bytes(
        b"".join(outline(file, lambda offset, length: data[offset : offset + length], names, long_arrays=long_arrays))
    )
    again = read_gguf(outline_path)
    assert {spec.name for spec in again.header.tensors} == {*names}
    assert [tensor.name for tensor in gguf.GGUFReader(outline_path).tensors] == names
    expected = {key for key in file.metadata if long_arrays or key != "words"}
    assert {*again.metadata} == expected
