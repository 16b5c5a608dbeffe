"""Stored tensors come out as a checkpoint has them, however they are cut into chunks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.tensor_spec import dtype_name
from rabbitllm.store import checkpoint_folder
from rabbitllm.store.checkpoint_folder import PlainReader, in_memory, plain
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import build_checkpoint, read_tensors
from tests.support.tiny_models import dequantized, split


@pytest.mark.parametrize("chunk", [4096, 6144, 8 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_chunks_make_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None, dtype: torch.dtype, chunk: int
) -> None:
    monkeypatch.setattr(checkpoint_folder, "CHUNK_BYTES", max(chunk, 2048 * dtype.itemsize))
    # rows of 80 elements: no whole blocks; 17,408 elements of the embedding: no whole chunks
    source = build_checkpoint(tmp_path / "source", "llama", dtype=dtype, intermediate_size=80)
    meant = source if compression is None else dequantized(source, tmp_path / "meant", compression, dtype)
    store, expected = LayerStore(split(source, compression)), read_tensors(meant)
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
        found = [bytes(part) for part in reader.chunks(tensor)]
    assert len(found) == math.ceil(256 / 100)
    assert b"".join(found) == changed.numpy().tobytes()


def test_a_file_that_was_cut_off_meanwhile(tmp_path: Path) -> None:
    store = LayerStore(split(build_checkpoint(tmp_path, "llama")))
    stored = store.tensors["model.norm.weight"]
    path = store.path(stored.parts[0].file)
    path.write_bytes(path.read_bytes()[:-1])
    with PlainReader(store) as reader, pytest.raises(IncompleteSplitError, match="was cut off since"):
        list(reader.chunks(plain(stored, "F32")))
