"""What is fuzzed: for each target a reader, what it starts from, and how that is changed.

A reader may raise RabbitLLMError and nothing else. What it believes must lie within the file, and the format's own
library must read it alike, which is asserted here.
To add one, add a `Target` to `TARGETS`.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import safetensors
import sentencepiece
import torch
from transformers.integrations.gguf import reader as gguf_reader

from rabbitllm.errors import CorruptShardError
from rabbitllm.formats._torch_pickle import name_tensors, read_torch_pickle
from rabbitllm.formats.gguf import parse_gguf
from rabbitllm.formats.gguf_types import BY_NUMBER, TENSOR_TYPES
from rabbitllm.formats.pickle_reader import list_opcodes
from rabbitllm.formats.safetensors_file import LENGTH_BYTES, TensorToWrite, encode_header, header_length, parse_header
from rabbitllm.formats.sentencepiece_model import SpecialIds, parse_model
from rabbitllm.formats.shard_header import recognise
from rabbitllm.formats.torch_file import parse_legacy_torch, parse_torch_zip
from tests.attacks import gguf_files, legacy_torch_files, pickles, protobuf_files, safetensors_files, torch_zips
from tests.support.mutations import (
    Mutator,
    change_bytes,
    change_gguf,
    change_pickle,
    change_protobuf,
    change_safetensors,
    change_torch_zip,
)
from tests.support.torch_files import archive, changed, pack, pickled, storage, tensor, tensor_pickle

MAX_SEED_BYTES = 8 << 10
NOWHERE = Path("nowhere")
"""The marker that payloads of the attacks would touch; they are read and not run."""


@dataclass(frozen=True, slots=True)
class Target:
    """One reader.

    Attributes:
        read: reads a whole file; raises RabbitLLMError for one that it refuses.
        seeds: files to start from, sound and hostile.
        mutate: changes one in keeping with its format.
    """

    read: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]
    mutate: Mutator


def read_safetensors(data: bytes) -> None:
    recognise(data)
    length = header_length(data[:LENGTH_BYTES], len(data), "fuzzed")
    header = parse_header(data[LENGTH_BYTES : LENGTH_BYTES + length], len(data), "fuzzed")
    assert sum(spec.nbytes for spec in header.tensors) + header.data_start == len(data)
    theirs = {name: (tuple(entry["shape"]), bytes(entry["data"])) for name, entry in safetensors.deserialize(data)}
    ours = {spec.name: (spec.shape, data[spec.offset : spec.offset + spec.nbytes]) for spec in header.tensors}
    assert ours == theirs


def read_torch_zip(data: bytes) -> None:
    read = parse_torch_zip(lambda offset, length: data[offset : offset + length], len(data), "fuzzed")
    for record in read.tensors:
        assert 0 <= record.storage_begin <= record.offset
        assert record.storage_end <= len(data)
        with contextlib.suppress(CorruptShardError):  # of four bits, and scalar or strided
            spec = record.spec()
            assert not spec.elements or spec.offset + spec.extent <= record.storage_end
    with zipfile.ZipFile(io.BytesIO(data)) as theirs:
        held = {info.filename.rpartition("/")[2]: info for info in theirs.infolist()}
    for record in read.tensors:
        assert held[record.storage].file_size == record.storage_end - record.storage_begin
        assert held[record.storage].compress_type == zipfile.ZIP_STORED


def read_legacy(data: bytes) -> None:
    read = parse_legacy_torch(lambda offset, length: data[offset : offset + length], len(data), "fuzzed")
    for record in read.tensors:
        assert 0 <= record.storage_begin <= record.offset
        assert record.storage_end <= len(data)
    assert max((record.storage_end for record in read.tensors), default=0) <= read.size == len(data)


def read_pickle(data: bytes) -> None:
    with contextlib.suppress(CorruptShardError):
        for _ in list_opcodes(data, "fuzzed"):
            pass
    root, storages = read_torch_pickle(data, "fuzzed")
    for record in name_tensors(root, "fuzzed")[0].values():
        assert storages[record.storage.key] == record.storage


def read_vocabulary(data: bytes) -> None:
    model = parse_model(data, "fuzzed")
    ids = model.special_ids()
    assert all(-1 <= number < len(model.pieces) for number in (ids.unk, ids.bos, ids.eos, ids.pad))
    try:
        theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError:
        specs = [spec for spec in (model.normalizer, model.denormalizer) if spec is not None]
        if any(spec.precompiled_charsmap_bytes for spec in specs):  # which only the library reads
            return
        raise
    assert [entry.text for entry in model.pieces] == [theirs.id_to_piece(number) for number in range(len(theirs))]
    assert ids == SpecialIds(theirs.unk_id(), theirs.bos_id(), theirs.eos_id(), theirs.pad_id())
    theirs.encode("the a \u2581a")


def _safetensors() -> list[bytes]:
    sound = [content for content, _ in safetensors_files.LEGAL.values()]
    lead, _ = encode_header(
        [TensorToWrite("a", "F32", (2, 3)), TensorToWrite("b", "BF16", (0, 4)), TensorToWrite("c", "F8_E4M3", ())]
    )
    return [lead + bytes(25), *sound, *(data for data, _ in safetensors_files.HOSTILE.values())]


def _pickles() -> list[bytes]:
    values = {"a": [1, (2, "x")], "b": {"c": b"y", 4: 1.5}, "w": tensor()}
    state = {"model": {"w": tensor(), "v": tensor(storage(), 1, (3,), (1,))}, "optimizer": {"step": 1}}
    sound = [tensor_pickle(), *(pickled(value, protocol) for value in ({"x": 1}, state) for protocol in (2, 3, 4, 5))]
    # but for those that take half a second each until a limit is reached, as would all that is made of them
    quick = (attack for attack in pickles.ATTACKS if "1,000,000 values" not in attack.message)
    return [*sound, pickled(values, 4), *(attack.build(NOWHERE) for attack in quick)]


def _torch_zips() -> list[bytes]:
    stream = io.BytesIO()
    held = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": held, "b": held.t(), "c": torch.nn.Parameter(torch.ones(1)), "d": torch.empty(0)}, stream)
    described = pack(changed(archive(), "data/0", described=True), zip64={})
    sound = [stream.getvalue(), pack(archive()), described]
    return [*sound, *(attack.build(NOWHERE) for attack in torch_zips.ATTACKS)]


def _legacy() -> list[bytes]:
    state = {"model": {"w": tensor(legacy_torch_files.storage())}, "step": 1}
    sound = [legacy_torch_files.parts(), legacy_torch_files.parts(state)]
    return [*sound, *(attack.build(NOWHERE) for attack in legacy_torch_files.ATTACKS)]


def _change_legacy(data: bytes, random: Random) -> bytes:
    """Bytes anywhere, or the pickle of the value alone."""
    if random.random() < 0.5:
        return change_bytes(data, random)
    value = pickled({"w": tensor(legacy_torch_files.storage())}, random.randint(2, 5))
    return legacy_torch_files.parts(raw=change_pickle(value, random))


def _vocabularies() -> list[bytes]:
    sound = protobuf_files.SOUND
    spec = protobuf_files.span(2, protobuf_files.number(3, 2) + protobuf_files.number(42, 2))
    rule = protobuf_files.charsmap([1 << 10] + [0] * 255)
    return [sound, sound + spec + rule, *(data for data, _ in protobuf_files.HOSTILE.values())]


def read_gguf(data: bytes) -> None:
    read = parse_gguf(lambda offset, length: data[offset : offset + length], len(data), "fuzzed")
    if "general.architecture" not in read.metadata:  # transformers' reader stops there; ours, when it makes the model
        return
    blob = np.frombuffer(data, np.uint8)
    _, count, at = gguf_reader._read_metadata(blob, "fuzzed")
    theirs, _ = gguf_reader._read_tensor_table(blob, count, at)
    ours = {spec.name: spec for spec in read.header.tensors}
    assert {(name, shape) for name, shape, *_ in theirs} == {(spec.name, spec.shape) for spec in ours.values()}
    for name, _, number, offset in theirs:
        spec = ours[name]
        assert spec.offset == read.header.data_start + offset
        assert spec.offset + spec.extent <= len(data)
        stored = spec.blocks.kind if spec.blocks is not None else TENSOR_TYPES[spec.dtype]
        assert stored is BY_NUMBER[number]


def _gguf() -> list[bytes]:
    return [*gguf_files.LEGAL.values(), *(data for data, *_ in gguf_files.HOSTILE.values())]


TARGETS = {
    "gguf": Target(read_gguf, _gguf, change_gguf),
    "safetensors": Target(read_safetensors, _safetensors, change_safetensors),
    "torch_zip": Target(read_torch_zip, _torch_zips, change_torch_zip),
    "torch_legacy": Target(read_legacy, _legacy, _change_legacy),
    "pickle": Target(read_pickle, _pickles, change_pickle),
    "sentencepiece": Target(read_vocabulary, _vocabularies, change_protobuf),
}


def seeds_of(target: Target) -> list[bytes]:
    """What a target starts from. Large files are left out, since every input made of one costs as much; the tests have
    them."""
    return [data for data in target.seeds() if len(data) <= MAX_SEED_BYTES]
