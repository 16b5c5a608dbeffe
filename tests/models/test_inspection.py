"""A file looked at: known by its first bytes, and shown as its own reader gives it, refused or not."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import rabbitllm
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
from rabbitllm.formats.sentencepiece_model import SentencePieceModel
from rabbitllm.formats.shard_header import Weights, recognise
from rabbitllm.formats.torch_file import pickle_of
from rabbitllm.models.inspection import (
    Pickle,
    ShardMap,
    TensorInfo,
    Tensors,
    WeightlessFile,
    kind_of,
    list_pickles,
    look_at_file,
    row_major,
)
from rabbitllm.models.inspection_report import RowChoice
from tests.attacks import pickles, protobuf_files, torch_zips
from tests.attacks.protobuf_files import SOUND
from tests.support.builders import llama_tensors
from tests.support.published import LAYERS, llama_2_shapes, write_llama_2_vocabulary, write_llama_2_weights
from tests.support.torch_files import Member, archive, changed, pack, tensor_pickle, views


def tensors_of(path: Path) -> Tensors:
    result = look_at_file(path)
    assert result.refusal is None
    assert result.size == path.stat().st_size
    assert isinstance(result.content, Tensors)
    return result.content


def bytes_at(path: Path, tensor: TensorInfo) -> torch.Tensor:
    """The tensor that a fact describes, taken from the file by what the fact says alone."""
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "I16": torch.int16}[tensor.dtype]
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    length = (last + 1 if tensor.elements else 0) * dtype.itemsize
    raw = path.read_bytes()[tensor.offset : tensor.offset + length]
    assert len(raw) == length
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return values.as_strided(tensor.shape, tensor.strides)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_tensors_of_a_torch_file_equal_those_of_torch(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "x.pth"
    torch.save(views(), path, _use_new_zipfile_serialization=not legacy)
    tensors = tensors_of(path)
    assert [tensor.name for tensor in tensors.tensors] == list(views())
    for tensor in tensors.tensors:
        expected = views()[tensor.name]
        assert (tensor.shape, tensor.strides) == (tuple(expected.shape), expected.stride())
        assert torch.equal(bytes_at(path, tensor), expected)
        assert tensor.nbytes == expected.numel() * expected.element_size()
    assert tensors.sharing > 0
    assert tensors.strided == sum(not tensor.is_contiguous() for tensor in views().values())


def test_tensors_of_a_safetensors_file(tmp_path: Path) -> None:
    path, tensors = tmp_path / "x.safetensors", llama_tensors()
    save_file(tensors, path, metadata={"format": "pt"})
    infos = tensors_of(path)
    assert {tensor.name for tensor in infos.tensors} == set(tensors)
    for tensor in infos.tensors:
        assert tensor.strides == tensors[tensor.name].stride()
        assert torch.equal(bytes_at(path, tensor), tensors[tensor.name])
    assert infos.metadata == {"format": "pt"}
    assert infos.layers == ("embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "lm_head")
    assert (infos.sharing, infos.strided) == (0, 0)


def test_training_checkpoint_lists_what_is_left_out(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "x.ckpt")
    tensors = tensors_of(tmp_path / "x.ckpt")
    assert [tensor.name for tensor in tensors.tensors] == ["w"]
    assert tensors.left_out == ("epoch", "optimizer")


def test_weights_of_llama_2(tmp_path: Path) -> None:
    path = write_llama_2_weights(tmp_path)
    assert path.stat().st_size > 13_400_000_000
    assert path.stat().st_blocks * 512 < 20_000_000
    tensors = tensors_of(path)
    assert {tensor.name: tensor.shape for tensor in tensors.tensors} == llama_2_shapes()
    first = tensors.tensors[0]
    assert len(tensors.tensors) == 292
    assert (first.name, first.dtype, first.shape, first.strides) == (
        "tok_embeddings.weight",
        "BF16",
        (32000, 4096),
        (4096, 1),
    )
    assert (first.storage, first.nbytes, first.elements) == ("data/0", 262_144_000, 131_072_000)
    assert first.offset % 64 == 0
    stack = tuple(f"layers.{layer}" for layer in range(LAYERS))
    assert tensors.layers == ("rope", "tok_embeddings", *stack, "norm", "output")
    assert [tensor.layer for tensor in tensors.tensors if "layers.17." in tensor.name] == ["layers.17"] * 9


def test_vocabulary_of_llama_2(tmp_path: Path) -> None:
    result = look_at_file(write_llama_2_vocabulary(tmp_path))
    model = result.content
    assert isinstance(model, SentencePieceModel)
    assert (len(model.pieces), model.trainer.vocab_size, model.normalizer.name) == (32000, 32000, "identity")
    shown = {i: (model.pieces[i].text, model.pieces[i].score, model.pieces[i].type) for i in (0, 13, 259, 31001)}
    assert shown == {0: ("<unk>", 0, 2), 13: ("<0x0A>", 0, 6), 259: ("▁▁", -1e9, 1), 31001: ("동", -30742, 1)}


def test_registered_patterns_name_the_layers(tmp_path: Path) -> None:
    save_file({"transformer.h.3.w": torch.zeros(2), "transformer.wte.weight": torch.zeros(2)}, tmp_path / "x.bin")
    assert tensors_of(tmp_path / "x.bin").layers == ("wte", "h.3")
    rabbitllm.register_layer_naming("registered_here", [r"(?P<id>transformer\.\w+)\."])
    (tmp_path / "config.json").write_text('{"model_type": "registered_here"}')
    assert tensors_of(tmp_path / "x.bin").layers == ("transformer.h", "transformer.wte")
    (tmp_path / "config.json").write_text("no JSON")
    assert tensors_of(tmp_path / "x.bin").layers == ("wte", "h.3")


def test_config_and_index(tmp_path: Path) -> None:
    params = {"dim": 4096, "norm_eps": 1e-05, "deep": {"a": [1, None]}}
    (tmp_path / "params.json").write_text(json.dumps(params))
    content = look_at_file(tmp_path / "params.json").content
    assert content == params
    index = {"metadata": {"total_size": 7}, "weight_map": {"b": "1.safetensors", "a": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    content = look_at_file(tmp_path / "model.safetensors.index.json").content
    assert isinstance(content, ShardMap)
    assert (content.weight_map, content.metadata) == (index["weight_map"], index["metadata"])


@pytest.mark.parametrize(
    ("head", "name", "form"),
    [
        (SOUND[:512], "x", WeightlessFile.VOCABULARY),
        (b"", "tokenizer.model", WeightlessFile.VOCABULARY),
        (b"", "x.bin", Weights.EMPTY),
        (b"IQ== 0\nIg== 1\n", "tokenizer.model", WeightlessFile.VOCABULARY),
        (b'\xef\xbb\xbf \n{"a": 1}', "x", WeightlessFile.JSON),
        (b'\n{\n  "a": 1}', "x", WeightlessFile.JSON),
        (b"PK\x03\x04", "tokenizer.model", Weights.TORCH_ZIP),
        (b"<!DOCTYPE html>", "model.safetensors", Weights.UNKNOWN),
        (b"GGUF", "x", Weights.GGUF),
    ],
)
def test_formats_by_first_bytes(head: bytes, name: str, form: Weights | WeightlessFile) -> None:
    assert kind_of(head, name) is form


REFUSED = [
    ("x.safetensors", b"", CorruptShardError),
    ("x.safetensors", b"<html>", CorruptShardError),
    ("x.bin", b"<html>", UnreadableFormatError),
    ("x.gguf", b"GGUF" + bytes(60), UnreadableFormatError),
    ("y.gguf", b"GGUF" + b"\xff" * 60, UnreadableFormatError),
    ("tokenizer.model", b"IQ== 0\nIg== 1\n", CorruptVocabularyError),
    ("x.model", protobuf_files.HOSTILE["NaN"][0], CorruptVocabularyError),
    ("x.json", b'{"a": 1, "a": 2}', InvalidIndexError),
    ("x.index.json", b'{"weight_map": {"w": "../x"}}', UnsafePathError),
    ("x.pkl", b"\x80\x02cos\nsystem\n.", UnreadableFormatError),
    ("x.pth", pack(archive(b"\x80\x02cos\nsystem\n.")), UnsafePickleError),
]


@pytest.mark.parametrize(("name", "content", "error"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_refused_files_have_the_error(tmp_path: Path, name: str, content: bytes, error: type[RabbitLLMError]) -> None:
    (tmp_path / name).write_bytes(content)
    result = look_at_file(tmp_path / name)
    assert type(result.refusal) is error
    assert isinstance(result.content, tuple) == (name == "x.pkl")


@pytest.mark.parametrize("attack", [*torch_zips.ATTACKS, *pickles.ATTACKS], ids=lambda attack: attack.name)
def test_attacks_are_refused(tmp_path: Path, attack: torch_zips.Attack) -> None:
    """With the opcodes asked for, too, of which there are as many as can be told."""
    marker, path = tmp_path / "marker", tmp_path / "x.pth"
    content = attack.build(marker)
    path.write_bytes(pack(archive(content)) if attack in pickles.ATTACKS else content)
    result = look_at_file(path, opcodes=True)
    assert isinstance(result.refusal, RabbitLLMError)
    assert result.content is None or isinstance(result.content, tuple)
    assert not marker.exists()


def test_irregular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointNotFoundError, match="neither a file nor a folder"):
        look_at_file(tmp_path / "pipe")


# Opcodes of pickles of every kind of file, as `pickletools` lists them, where nothing may be run


def listed(path: Path) -> tuple[Pickle, ...]:
    return list_pickles(path, recognise(path.read_bytes()))


def test_opcodes_of_a_torch_zip(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save(views(), path)
    (listing,) = listed(path)
    data = pickle_of(path)
    expected = [(opcode.name, offset) for opcode, _, offset in pickletools.genops(data)]
    assert [(opcode.name, opcode.position) for opcode in listing.opcodes] == expected
    assert (listing.name, listing.nbytes, listing.stopped) == ("data.pkl", len(data), None)
    assert listing.opcodes[4].argument == "'whole'"
    depths = {opcode.name: opcode.depth for opcode in listing.opcodes}
    assert (depths["STOP"], depths["SETITEMS"]) == (0, 0)
    assert max(opcode.depth for opcode in listing.opcodes) == 3


def test_opcodes_of_a_legacy_torch_file(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    assert recognise(path.read_bytes()) is Weights.TORCH_LEGACY
    listings = listed(path)
    content = path.read_bytes()
    assert len(listings) == 5
    for listing in listings:
        assert (listing.opcodes[0].name, listing.opcodes[-1].name, listing.stopped) == ("PROTO", "STOP", None)
        begin, end = listing.opcodes[0].position, listing.opcodes[-1].position
        assert content[begin : begin + 2] == b"\x80\x02"
        assert content[end : end + 1] == b"."
    assert "'torch._utils _rebuild_tensor_v2'" in [opcode.argument for opcode in listings[3].opcodes]


@pytest.mark.parametrize("protocol", range(6))
def test_opcodes_of_a_bare_pickle(tmp_path: Path, protocol: int) -> None:
    value = {"a": [1, 2.5, (None, True)], "b": b"\0\1", "c": {"d"}}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, protocol))
    (listing,) = list_pickles(tmp_path / "x.pkl", Weights.PICKLE)
    assert [o.name for o in listing.opcodes] == [
        o.name for o, _, _ in pickletools.genops(pickle.dumps(value, protocol))
    ]


def test_truncated_pickle(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(b"\x80\x02}X\x05\x00\x00\x00abcdeX\xff\xff\xff\xff.")
    (listing,) = listed(tmp_path / "x.pkl")
    assert [opcode.name for opcode in listing.opcodes] == ["PROTO", "EMPTY_DICT", "BINUNICODE"]
    assert listing.stopped is not None
    assert "cannot be listed beyond byte 3" in listing.stopped


def test_refused_zip_is_listed_by_pythons_reader(tmp_path: Path) -> None:
    """Two pickles of one name, one more of another, one compressed."""
    members = [Member("archive/data.pkl", b"\x80\x02cos\nsystem\n."), Member("archive/constants.pkl", b"\x80\x02).")]
    (tmp_path / "x.pth").write_bytes(pack([*archive(), *members]))
    listings = listed(tmp_path / "x.pth")
    assert [listing.name for listing in listings] == ["archive/data.pkl", "archive/data.pkl", "archive/constants.pkl"]
    assert "'os system'" in [opcode.argument for opcode in listings[1].opcodes]
    with zipfile.ZipFile(tmp_path / "y.pth", "w", zipfile.ZIP_DEFLATED) as archived:
        archived.writestr("archive/data.pkl", tensor_pickle())
    (listing,) = listed(tmp_path / "y.pth")
    assert listing.opcodes[-1].name == "STOP"


def test_unreadable_zip_has_no_pickles(tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(pack(archive())[:-30])
    assert listed(tmp_path / "x.pth") == ()
    (tmp_path / "y.pth").write_bytes(pack(changed(archive(), "data.pkl", central={"method": 99})))
    assert listed(tmp_path / "y.pth") == ()


# Which rows are shown


NAMES = ["a.weight", "b.weight", "a.bias", "[x]"]


@pytest.mark.parametrize(
    ("choice", "shown", "matching", "remaining"),
    [
        (RowChoice(), NAMES, 4, 0),
        (RowChoice(limit=3), NAMES[:3], 4, 1),
        (RowChoice(skip=1, limit=2), NAMES[1:3], 4, 1),
        (RowChoice(skip=9, limit=2), [], 4, 0),
        (RowChoice("weight"), NAMES[:2], 2, 0),
        (RowChoice("a.*"), ["a.weight", "a.bias"], 2, 0),
        (RowChoice("?.bias"), ["a.bias"], 1, 0),
        (RowChoice("weigh?"), [], 0, 0),
        (RowChoice("[[]x]"), ["[x]"], 1, 0),
        (RowChoice("a", skip=1, limit=1), ["a.bias"], 2, 0),
        (RowChoice(""), NAMES, 4, 0),
    ],
)
def test_row_choice(choice: RowChoice, shown: list[str], matching: int, remaining: int) -> None:
    assert choice.of(NAMES, str) == (shown, matching, remaining)


def test_strides() -> None:
    assert [row_major(shape) for shape in ((), (3,), (2, 3, 4), (2, 0, 4))] == [(), (1,), (12, 4, 1), (4, 4, 1)]
