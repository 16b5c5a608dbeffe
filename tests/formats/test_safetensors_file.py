"""Headers that are believed, headers that are not and what is said of them, and the files that are written."""

from __future__ import annotations

import contextlib
import json
import math
import re
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rabbitllm.errors import CheckpointError, CorruptShardError
from rabbitllm.formats.safetensors_file import (
    DATA_ALIGNMENT,
    MAX_HEADER_BYTES,
    MappedFile,
    TensorToWrite,
    encode_header,
    header_length,
    parse_header,
    read_header,
    view_bytes,
)
from rabbitllm.formats.tensor_spec import DTYPES, Header, TensorSpec, torch_dtype
from tests.attacks.safetensors_files import ACCEPTED_BY_THE_LIBRARY, HOSTILE, LEGAL, TEXT, file_of
from tests.support.draws import draws


def parse(content: bytes) -> Header:
    """What `read_header` does, without a file."""
    length = header_length(content[:8], len(content), "shard.safetensors")
    return parse_header(content[8 : 8 + length], len(content), "shard.safetensors")


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    (tmp_path / "shard.safetensors").write_bytes(content)
    with pytest.raises(CorruptShardError) as refused:
        read_header(tmp_path / "shard.safetensors")
    assert re.search(message, str(refused.value)), str(refused.value)
    assert str(refused.value).startswith("shard.safetensors is not a valid safetensors file: ")
    assert len(str(refused.value)) < 700
    assert isinstance(refused.value, CheckpointError)


@pytest.mark.long
def test_malformed_inputs_that_the_library_refuses() -> None:
    read = set()
    for case, (content, _) in HOSTILE.items():
        with contextlib.suppress(safetensors.SafetensorError):
            safetensors.deserialize(content)
            read.add(case)
    assert read == ACCEPTED_BY_THE_LIBRARY


@pytest.mark.parametrize("case", LEGAL)
def test_sound(tmp_path: Path, case: str) -> None:
    content, expected = LEGAL[case]
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    header = read_header(path)
    assert {t.name: (t.dtype, t.shape, t.nbytes) for t in header.tensors} == expected
    assert list(header.tensors) == sorted(header.tensors, key=lambda t: t.offset)
    assert all(t.file == "a.safetensors" for t in header.tensors)
    assert header.data_start == len(content) - sum(t.nbytes for t in header.tensors)
    assert read_header(path, "model/a.safetensors").tensors == tuple(
        TensorSpec(t.name, t.dtype, t.shape, "model/a.safetensors", t.offset, t.nbytes) for t in header.tensors
    )
    assert set(as_reference(content)) == set(expected)


def as_reference(content: bytes) -> dict[str, dict[str, Any]]:
    """What the safetensors library makes of a file."""
    return dict(safetensors.deserialize(content))


def test_claimed_length_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(file_of(TEXT, length=MAX_HEADER_BYTES))
    tracemalloc.start()
    with pytest.raises(CorruptShardError, match="declares a header of 33,554,432 bytes"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


# Whatever is believed here, the reference library reads in the same way


Draw = Callable[[st.SearchStrategy[Any]], Any]
CHANGES: Mapping[str, Callable[[dict[str, Any], int], object]] = {
    "dtype": lambda entry, by: entry.update(dtype=list(DTYPES)[by % len(DTYPES)]),
    "shape": lambda entry, by: entry["shape"].append(by % 3),
    "begin": lambda entry, by: entry.update(data_offsets=[entry["data_offsets"][0] + by - 2, entry["data_offsets"][1]]),
    "end": lambda entry, by: entry.update(data_offsets=[entry["data_offsets"][0], entry["data_offsets"][1] + by - 2]),
    "extra": lambda entry, by: entry.update(extra=by),
    "lacks": lambda entry, by: entry.pop(("dtype", "shape", "data_offsets")[by % 3]),
    "nothing": lambda entry, by: None,
}


def near_misses() -> st.SearchStrategy[bytes]:
    """Files that are sound but for one change or none."""

    def make(draw: Draw) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"a": "b"}} if draw(st.booleans()) else {}
        end = 0
        for index in range(draw(st.integers(0, 4))):
            dtype, shape = draw(st.sampled_from(list(DTYPES))), draw(st.lists(st.integers(0, 4), max_size=3))
            nbytes = math.prod(shape) * DTYPES[dtype].bits // 8
            header[f"t{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
        names = draw(st.permutations(list(header)))
        tensors = [name for name in names if name != "__metadata__"]
        if tensors:
            CHANGES[draw(st.sampled_from(list(CHANGES)))](
                header[draw(st.sampled_from(tensors))], draw(st.integers(0, 40))
            )
        text = json.dumps({name: header[name] for name in names}) + draw(st.sampled_from(["", " ", "\n", "\t", "x"]))
        return file_of(text, bytes(max(end + draw(st.sampled_from([0, 0, 0, -1, 1])), 0)))

    return st.composite(make)()  # type: ignore[arg-type]


def mutations() -> st.SearchStrategy[bytes]:
    """Sound files with some of their bytes changed."""
    valid = [content for content, _ in LEGAL.values()]

    def mutate(draw: Draw) -> bytes:
        content = bytearray(draw(st.sampled_from(valid)))
        for _ in range(draw(st.integers(1, 4))):
            offset = draw(st.integers(0, len(content) - 1)) if content else 0
            change = draw(st.sampled_from(["set", "insert", "delete", "copy"]))
            if change == "set" and content:
                content[offset] = draw(st.integers(0, 255))
            elif change == "insert":
                content[offset:offset] = draw(
                    st.sampled_from([b'"', b"0", b",", b" ", b"-", b"1", b"e", b"\0", b"\xc3", b"[", b"}"])
                )
            elif change == "delete":
                del content[offset : offset + draw(st.integers(1, 3))]
            else:
                content[offset:offset] = content[offset : offset + draw(st.integers(1, 30))]
        if draw(st.booleans()) and len(content) >= 8:  # make the length agree, so that the text is looked at
            end = content.rfind(b"}") + 1
            content[:8] = max(end - 8, 0).to_bytes(8, "little")
        return bytes(content)

    return st.composite(mutate)()  # type: ignore[arg-type]


@settings(max_examples=draws(500), deadline=None)
@given(content=st.one_of(near_misses(), mutations()))
def test_accepted_headers_are_accepted_by_the_reference(content: bytes) -> None:
    check_against_reference(content)


@pytest.mark.long
@settings(max_examples=draws(20_000), deadline=None)
@given(content=st.one_of(near_misses(), mutations()))
def test_accepted_headers_are_accepted_by_the_reference_long(content: bytes) -> None:
    check_against_reference(content)


def check_against_reference(content: bytes) -> None:
    try:
        header = parse(content)
    except CorruptShardError:
        return
    theirs = as_reference(content)
    assert set(theirs) == {tensor.name for tensor in header.tensors}
    for tensor in header.tensors:
        assert bytes(theirs[tensor.name]["data"]) == content[tensor.offset : tensor.offset + tensor.nbytes]
        assert tuple(theirs[tensor.name]["shape"]) == tensor.shape


# What is written


NAMES = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters=""), min_size=1, max_size=30)
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
TABLES = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__" and name.isprintable()),
    st.tuples(st.sampled_from([name for name, dtype in DTYPES.items() if dtype.bits >= 8]), SHAPES),
    max_size=8,
)


@settings(max_examples=draws(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=TABLES, seed=st.integers(0, 99))
def test_round_trip_of_any_header(tmp_path: Path, table: dict[str, tuple[str, tuple[int, ...]]], seed: int) -> None:
    placed = [TensorToWrite(name, dtype, shape) for name, (dtype, shape) in table.items()]
    lead, offsets = encode_header(placed)
    data = torch.randint(0, 2, (sum(p.nbytes for p in placed),), generator=torch.Generator().manual_seed(seed))
    content = lead + bytes(data.to(torch.uint8).numpy())
    assert len(lead) % DATA_ALIGNMENT == 0
    header = parse(content)
    ours = {t.name: (t.dtype, t.shape, t.offset) for t in header.tensors}
    assert ours == {p.name: (p.dtype, p.shape, offset) for p, offset in zip(placed, offsets, strict=True)}
    assert header.metadata == {"format": "pt"}
    assert set(as_reference(content)) == set(ours)


def test_data_starts_at_a_multiple_of_4096() -> None:
    starts = set()
    for length in range(3900, 4120):
        lead, offsets = encode_header([TensorToWrite("x" * length, "F32", (2,))])
        assert len(lead) % 4096 == 0
        assert offsets == (len(lead),)
        assert lead[8:9] == b"{"
        assert int.from_bytes(lead[:8], "little") == len(lead) - 8
        starts.add(len(lead))
    assert starts == {4096, 8192}


def test_tensors_are_adjacent() -> None:
    lead, offsets = encode_header(
        [TensorToWrite("b", "U8", (3,)), TensorToWrite("a", "F32", (0, 4)), TensorToWrite("c", "BF16", (5,))]
    )
    assert [offset - len(lead) for offset in offsets] == [0, 3, 3]


# To and from the safetensors library


def every_dtype() -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        raw = torch.arange(1, 3 * 4 * dtype.bits // 8 + 1, dtype=torch.uint8)
        raw = raw % 2 if name == "BOOL" else raw
        rows = raw.view(torch_dtype(name)).view(3, -1)
        tensors[name] = rows
    return tensors


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def test_files_of_the_library(tmp_path: Path) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt", "made": "by a test"})
    mapped = MappedFile(tmp_path / "m.safetensors")
    assert mapped.header.metadata == {"format": "pt", "made": "by a test"}
    specs = {spec.name: spec for spec in mapped.header.tensors}
    assert specs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        view = mapped.tensor(specs[name])
        assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(view) == bytes_of(tensor)
        assert specs[name].dtype == name


def test_written_files_are_read_by_the_library(tmp_path: Path) -> None:
    tensors = every_dtype()
    shapes = dict.fromkeys(tensors, (3, 4))
    lead, _ = encode_header(TensorToWrite(name, name, shapes[name]) for name in tensors)
    (tmp_path / "m.safetensors").write_bytes(lead + b"".join(bytes_of(tensor) for tensor in tensors.values()))
    theirs = load_file(tmp_path / "m.safetensors")
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert theirs[name].dtype == tensor.dtype
        assert bytes_of(theirs[name]) == bytes_of(tensor)


# Mapped tensors


def test_writes_to_a_mapped_tensor_do_not_reach_the_file(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    mapped = MappedFile(tmp_path / "m.safetensors")
    weights = mapped.tensor(mapped.header.tensors[0])
    weights.mul_(3)
    assert weights.tolist() == [3.0] * 4
    assert (tmp_path / "m.safetensors").read_bytes() == before


def test_mapped_tensor_outlives_its_file_object_and_the_file(tmp_path: Path) -> None:
    save_file({"w": torch.arange(5)}, tmp_path / "m.safetensors")
    mapped = MappedFile(tmp_path / "m.safetensors")
    weights = mapped.tensor(mapped.header.tensors[0])
    del mapped
    (tmp_path / "m.safetensors").unlink()
    assert weights.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_misaligned_data_is_copied(shift: int) -> None:
    values = torch.arange(6, dtype=torch.float32)
    memory = bytearray(64)
    memory[shift : shift + 24] = bytes_of(values)
    spec = TensorSpec("w", "F32", (2, 3), "f", shift, 24)
    tensor = view_bytes(memoryview(memory)[shift : shift + 24], spec)
    assert torch.equal(tensor, values.view(2, 3))
    memory[shift : shift + 4] = bytes(4)
    assert tensor[0, 0] == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2**62), (2**31, 0, 2**31)])
def test_tensor_without_elements(shape: tuple[int, ...]) -> None:
    assert view_bytes(memoryview(b""), TensorSpec("w", "BF16", shape, "f", 0, 0)).shape == shape
