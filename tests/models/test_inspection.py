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
from rabbitllm.formats.shard_header import Weights, recognise
from rabbitllm.formats.torch_file import pickle_of
from rabbitllm.models.inspection import (
    Entries,
    Opcode,
    Pickles,
    ShardMap,
    TensorInfo,
    Tensors,
    Vocabulary,
    WeightlessFile,
    is_row_major,
    kind_of,
    list_pickles,
    look_at_file,
    row_major,
)
from rabbitllm.models.inspection_report import RowChoice, searched
from tests.attacks import pickles, protobuf_files, torch_zips
from tests.attacks.protobuf_files import SOUND
from tests.formats.test_torch_zip import views
from tests.support.builders import llama_tensors
from tests.support.published import LAYERS, llama_2_shapes, write_llama_2_vocabulary, write_llama_2_weights
from tests.support.torch_files import Member, archive, changed, pack, tensor_pickle


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


def test_registered_patterns_of_the_folders_model_type_name_the_layers_of_a_file(tmp_path: Path) -> None:
    save_file({"transformer.h.3.w": torch.zeros(2), "transformer.wte.weight": torch.zeros(2)}, tmp_path / "x.bin")
    assert tensors_of(tmp_path / "x.bin").layers == ("wte", "h.3")
    rabbitllm.register_layer_naming("registered_here", [r"(?P<id>transformer\.\w+)\."])
    (tmp_path / "config.json").write_text('{"model_type": "registered_here"}')
    assert tensors_of(tmp_path / "x.bin").layers == ("transformer.h", "transformer.wte")
    (tmp_path / "config.json").write_text("no JSON")
    assert tensors_of(tmp_path / "x.bin").layers == ("wte", "h.3")


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
    ("y.gguf", b"GGUF" + b"\xff" * 60, UnreadableFormatError),
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


# Opcodes of pickles of every kind of file, as `pickletools` lists them, where nothing may be run


def listed(path: Path) -> Pickles:
    return list_pickles(path, recognise(path.read_bytes()))


def test_a_torch_zip(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save(views(), path)
    (found,) = listed(path).pickles
    data = pickle_of(path)
    expected = [(opcode.name, at) for opcode, _, at in pickletools.genops(data)]
    assert [(opcode.name, opcode.position) for opcode in found.opcodes] == expected
    assert (found.name, found.nbytes, found.stopped) == ("data.pkl", len(data), None)
    assert found.opcodes[4].argument == "'whole'"
    depths = {opcode.name: opcode.depth for opcode in found.opcodes}
    assert (depths["STOP"], depths["SETITEMS"]) == (0, 0)
    assert max(opcode.depth for opcode in found.opcodes) == 3


def test_a_file_from_before_torch_1_6(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    assert recognise(path.read_bytes()) is Weights.TORCH_LEGACY
    found = listed(path).pickles
    content = path.read_bytes()
    assert len(found) == 5
    for one in found:
        assert (one.opcodes[0].name, one.opcodes[-1].name, one.stopped) == ("PROTO", "STOP", None)
        begin, end = one.opcodes[0].position, one.opcodes[-1].position
        assert content[begin : begin + 2] == b"\x80\x02"
        assert content[end : end + 1] == b"."
    assert "'torch._utils _rebuild_tensor_v2'" in [opcode.argument for opcode in found[3].opcodes]


@pytest.mark.parametrize("protocol", range(6))
def test_a_bare_pickle_of_any_protocol(tmp_path: Path, protocol: int) -> None:
    value = {"a": [1, 2.5, (None, True)], "b": b"\0\1", "c": {"d"}}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, protocol))
    (found,) = list_pickles(tmp_path / "x.pkl", Weights.PICKLE).pickles
    assert [o.name for o in found.opcodes] == [o.name for o, _, _ in pickletools.genops(pickle.dumps(value, protocol))]


def test_a_pickle_that_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(b"\x80\x02}X\x05\x00\x00\x00abcdeX\xff\xff\xff\xff.")
    (found,) = listed(tmp_path / "x.pkl").pickles
    assert [opcode.name for opcode in found.opcodes] == ["PROTO", "EMPTY_DICT", "BINUNICODE"]
    assert found.stopped is not None
    assert "cannot be listed beyond byte 3" in found.stopped


def test_a_zip_that_is_refused_is_listed_by_pythons_reader(tmp_path: Path) -> None:
    """Two pickles of one name, one more of another, one compressed."""
    other = [Member("archive/data.pkl", b"\x80\x02cos\nsystem\n."), Member("archive/constants.pkl", b"\x80\x02).")]
    (tmp_path / "x.pth").write_bytes(pack([*archive(), *other]))
    found = listed(tmp_path / "x.pth").pickles
    assert [one.name for one in found] == ["archive/data.pkl", "archive/data.pkl", "archive/constants.pkl"]
    assert "'os system'" in [opcode.argument for opcode in found[1].opcodes]
    with zipfile.ZipFile(tmp_path / "y.pth", "w", zipfile.ZIP_DEFLATED) as archived:
        archived.writestr("archive/data.pkl", tensor_pickle())
    (one,) = listed(tmp_path / "y.pth").pickles
    assert one.opcodes[-1].name == "STOP"


def test_what_no_reader_understands_lists_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(pack(archive())[:-30])
    assert listed(tmp_path / "x.pth").pickles == ()
    (tmp_path / "y.pth").write_bytes(pack(changed(archive(), "data.pkl", central={"method": 99})))
    assert listed(tmp_path / "y.pth").pickles == ()


# Which rows are shown


NAMES = ["a.weight", "b.weight", "a.bias", "[x]"]


@pytest.mark.parametrize(
    ("choice", "shown", "matching", "more"),
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
def test_rows(choice: RowChoice, shown: list[str], matching: int, more: int) -> None:
    assert choice.of(NAMES, str) == (shown, matching, more)


def test_an_opcode_is_found_by_its_name_and_by_its_argument() -> None:
    assert searched(Opcode(2, 0, "GLOBAL", "'os system'")) == "GLOBAL 'os system'"


def test_strides() -> None:
    assert [row_major(shape) for shape in ((), (3,), (2, 3, 4), (2, 0, 4))] == [(), (1,), (12, 4, 1), (4, 4, 1)]
    assert is_row_major((2, 1, 3), (3, 99, 1))
    assert not is_row_major((2, 3), (1, 2))
