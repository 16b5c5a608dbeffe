"""A file looked at: known by its first bytes, and shown as its own reader gives it, refused or not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rabbitllm.errors import (
    CheckpointNotFoundError,
    CorruptShardError,
    CorruptVocabularyError,
    InvalidIndexError,
    RabbitLLMError,
    UnreadableFormatError,
    UnsafePathError,
    UnsafePickleError,
)
from rabbitllm.formats.shard_header import Weights
from rabbitllm.models.inspection.files import WeightlessFile, kind_of, look_at_file
from rabbitllm.models.inspection.records import Entries, Pickles, ShardMap, TensorInfo, Tensors, Vocabulary
from tests.attacks import pickles, protobuf_files, torch_zips
from tests.attacks.protobuf_files import SOUND
from tests.formats.test_torch_zip import views
from tests.support.builders import llama_tensors
from tests.support.published import LAYERS, llama_2_shapes, write_llama_2_vocabulary, write_llama_2_weights
from tests.support.torch_files import archive, pack


def tensors_of(path: Path) -> Tensors:
    found = look_at_file(path)
    assert found.refusal is None
    assert found.size == path.stat().st_size
    assert isinstance(found.content, Tensors)
    return found.content


def bytes_at(path: Path, tensor: TensorInfo) -> torch.Tensor:
    """The tensor that a fact describes, taken from the file by what the fact says alone."""
    kind = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "I16": torch.int16}[tensor.dtype]
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    length = (last + 1 if tensor.elements else 0) * kind.itemsize
    raw = path.read_bytes()[tensor.offset : tensor.offset + length]
    assert len(raw) == length
    held = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind) if raw else torch.empty(0, dtype=kind)
    return held.as_strided(tensor.shape, tensor.strides)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_every_fact_of_a_torch_file_is_what_torch_loads(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "x.pth"
    torch.save(views(), path, _use_new_zipfile_serialization=not legacy)
    found = tensors_of(path)
    assert [tensor.name for tensor in found.tensors] == list(views())
    for tensor in found.tensors:
        expected = views()[tensor.name]
        assert (tensor.shape, tensor.strides) == (tuple(expected.shape), expected.stride())
        assert torch.equal(bytes_at(path, tensor), expected)
        assert tensor.nbytes == expected.numel() * expected.element_size()
    assert found.sharing > 0
    assert found.strided == sum(not tensor.is_contiguous() for tensor in views().values())


def test_every_fact_of_a_safetensors_file(tmp_path: Path) -> None:
    path, tensors = tmp_path / "x.safetensors", llama_tensors()
    save_file(tensors, path, metadata={"format": "pt"})
    found = tensors_of(path)
    assert {tensor.name for tensor in found.tensors} == set(tensors)
    for tensor in found.tensors:
        assert tensor.strides == tensors[tensor.name].stride()
        assert torch.equal(bytes_at(path, tensor), tensors[tensor.name])
    assert found.metadata == {"format": "pt"}
    assert found.layers == ("embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "lm_head")
    assert (found.sharing, found.strided) == (0, 0)


def test_entries_of_a_training_checkpoint_that_are_no_weights(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "x.ckpt")
    found = tensors_of(tmp_path / "x.ckpt")
    assert [tensor.name for tensor in found.tensors] == ["w"]
    assert found.left_out == ("epoch", "optimizer")


def test_the_weights_of_llama_2_as_published(tmp_path: Path) -> None:
    path = write_llama_2_weights(tmp_path)
    assert path.stat().st_size > 13_400_000_000
    assert path.stat().st_blocks * 512 < 20_000_000
    found = tensors_of(path)
    assert {tensor.name: tensor.shape for tensor in found.tensors} == llama_2_shapes()
    first = found.tensors[0]
    assert len(found.tensors) == 292
    assert (first.name, first.dtype, first.shape, first.strides) == (
        "tok_embeddings.weight",
        "BF16",
        (32000, 4096),
        (4096, 1),
    )
    assert (first.storage, first.nbytes, first.elements) == ("data/0", 262_144_000, 131_072_000)
    assert first.offset % 64 == 0
    stack = tuple(f"layers.{layer}" for layer in range(LAYERS))
    assert found.layers == ("rope", "tok_embeddings", *stack, "norm", "output")
    assert [tensor.layer for tensor in found.tensors if "layers.17." in tensor.name] == ["layers.17"] * 9


def test_the_vocabulary_of_llama_2_as_published(tmp_path: Path) -> None:
    found = look_at_file(write_llama_2_vocabulary(tmp_path))
    assert isinstance(found.content, Vocabulary)
    model = found.content.model
    assert (len(model.pieces), model.trainer.vocab_size, model.normalizer.name) == (32000, 32000, "identity")
    shown = {at: (model.pieces[at].text, model.pieces[at].score, model.pieces[at].type) for at in (0, 13, 259, 31001)}
    assert shown == {0: ("<unk>", 0, 2), 13: ("<0x0A>", 0, 6), 259: ("▁▁", -1e9, 1), 31001: ("동", -30742, 1)}


def test_the_family_of_the_folders_config_names_the_layers_of_a_file(tmp_path: Path) -> None:
    save_file({"transformer.h.3.w": torch.zeros(2), "transformer.wte.weight": torch.zeros(2)}, tmp_path / "x.bin")
    assert tensors_of(tmp_path / "x.bin").layers == ("transformer.wte", "transformer.h.3")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert tensors_of(tmp_path / "x.bin").layers == ("wte", "h.3")
    (tmp_path / "config.json").write_text("no JSON")
    assert tensors_of(tmp_path / "x.bin").layers == ("transformer.wte", "transformer.h.3")


def test_settings_and_an_index(tmp_path: Path) -> None:
    params = {"dim": 4096, "norm_eps": 1e-05, "deep": {"a": [1, None]}}
    (tmp_path / "params.json").write_text(json.dumps(params))
    found = look_at_file(tmp_path / "params.json").content
    assert isinstance(found, Entries)
    assert found.entries == params
    index = {"metadata": {"total_size": 7}, "weight_map": {"b": "1.safetensors", "a": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = look_at_file(tmp_path / "model.safetensors.index.json").content
    assert isinstance(found, ShardMap)
    assert (found.weight_map, found.metadata) == (index["weight_map"], index["metadata"])


@pytest.mark.parametrize(
    ("head", "name", "kind"),
    [
        (SOUND[:512], "x", WeightlessFile.VOCABULARY),
        (b"", "tokenizer.model", WeightlessFile.VOCABULARY),
        (b"", "x.bin", Weights.UNKNOWN),
        (b"IQ== 0\nIg== 1\n", "tokenizer.model", WeightlessFile.VOCABULARY),
        (b'\xef\xbb\xbf \n{"a": 1}', "x", WeightlessFile.JSON),
        (b'\n{\n  "a": 1}', "x", WeightlessFile.JSON),
        (b"PK\x03\x04", "tokenizer.model", Weights.TORCH_ZIP),
        (b"<!DOCTYPE html>", "model.safetensors", Weights.UNKNOWN),
        (b"GGUF", "x", Weights.GGUF),
    ],
)
def test_kinds(head: bytes, name: str, kind: Weights | WeightlessFile) -> None:
    assert kind_of(head, name) is kind


REFUSED = [
    ("x.safetensors", b"", CorruptShardError),
    ("x.safetensors", b"<html>", CorruptShardError),
    ("x.bin", b"<html>", UnreadableFormatError),
    ("x.gguf", b"GGUF" + bytes(60), UnreadableFormatError),
    ("tokenizer.model", b"IQ== 0\nIg== 1\n", CorruptVocabularyError),
    ("x.model", protobuf_files.HOSTILE["NaN"][0], CorruptVocabularyError),
    ("x.json", b'{"a": 1, "a": 2}', InvalidIndexError),
    ("x.index.json", b'{"weight_map": {"w": "../x"}}', UnsafePathError),
    ("x.pkl", b"\x80\x02cos\nsystem\n.", UnreadableFormatError),
    ("x.pth", pack(archive(b"\x80\x02cos\nsystem\n.")), UnsafePickleError),
]


@pytest.mark.parametrize(("name", "content", "error"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_refused_comes_with_the_refusal(
    tmp_path: Path, name: str, content: bytes, error: type[RabbitLLMError]
) -> None:
    (tmp_path / name).write_bytes(content)
    found = look_at_file(tmp_path / name)
    assert type(found.refusal) is error
    assert isinstance(found.content, Pickles) == (name == "x.pkl")


@pytest.mark.parametrize("attack", [*torch_zips.ATTACKS, *pickles.ATTACKS], ids=lambda attack: attack.build.__name__)
def test_no_attack_does_more_than_be_refused(tmp_path: Path, attack: torch_zips.Attack) -> None:
    """With the opcodes asked for, too, of which there are as many as can be told."""
    marker, path = tmp_path / "marker", tmp_path / "x.pth"
    content = attack.build(marker)
    path.write_bytes(pack(archive(content)) if attack in pickles.ATTACKS else content)
    found = look_at_file(path, opcodes=True)
    assert isinstance(found.refusal, RabbitLLMError)
    assert found.content is None or isinstance(found.content, Pickles)
    assert not marker.exists()


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointNotFoundError, match="neither a file nor a folder"):
        look_at_file(tmp_path / "pipe")
