"""Headers that are believed, headers that are not and what is said of them, and the files that are written."""

from __future__ import annotations

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
    Header,
    MappedFile,
    Placed,
    encode_header,
    header_length,
    parse_header,
    read_header,
    view_bytes,
)
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, torch_dtype

EIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
"""A tensor of 8 bytes."""


def file_of(header: Any, data: bytes = bytes(8), *, length: int | None = None) -> bytes:
    """A file with this header: JSON text, bytes as they are, or a table."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def parse(content: bytes) -> Header:
    """What `read_header` does, without a file."""
    length = header_length(content[:8], len(content), "shard.safetensors")
    return parse_header(content[8 : 8 + length], len(content), "shard.safetensors")


def one(**changes: Any) -> dict[str, Any]:
    """A header of one tensor `t`, with other fields; a field that is None is left out."""
    entry = {**EIGHT, **changes}
    return {"t": {key: value for key, value in entry.items() if value is not None}}


def two(first: tuple[int, int], second: tuple[int, int]) -> dict[str, Any]:
    """A header of two tensors of bytes at these offsets."""
    spans = {"a": first, "b": second}
    return {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in spans.items()
    }


TEXT = json.dumps({"t": EIGHT})
NESTED = "[" * 200 + "]" * 200
DEEP = "[" * 100_000 + "]" * 100_000

MALFORMED: dict[str, tuple[bytes, str]] = {
    # the length
    "empty file": (b"", "it has 0 bytes; a safetensors file has at least 8"),
    "shorter than a length": (b"1234567", "it has 7 bytes"),
    "length of zero": (file_of("", b""), "claims a header of 0 bytes and is itself 8 bytes long"),
    "length of one": (file_of("{", b""), "claims a header of 1 bytes"),
    "length above the format's limit": (file_of(TEXT, length=100_000_001), "at most 100,000,000 is allowed"),
    "length that overflows": (file_of(TEXT, length=2**64 - 1), "claim a header of 18,446,744,073,709,551,615 bytes"),
    "length beyond the file": (file_of("{}", b"", length=3), "header of 3 bytes and is itself 10 bytes long"),
    # the text
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not valid JSON .*can't decode byte 0xff"),
    "byte order mark": (file_of(b"\xef\xbb\xbf" + TEXT.encode()), r"starts with b'\\xef'"),
    "leading space": (file_of(" " + TEXT), "starts with b' '; a safetensors header starts with '{'"),
    "leading newline": (file_of("\n" + TEXT), "starts with"),
    "a list": (file_of("[]"), r"starts with b'\['"),
    "null": (file_of("null"), "starts with b'n'"),
    "not JSON": (file_of('{"t": }'), "not valid JSON"),
    "cut off": (file_of(TEXT[:-1]), "not valid JSON"),
    "something after the JSON": (file_of(TEXT + "x"), "not valid JSON .*Extra data"),
    "a second object": (file_of(TEXT + TEXT), "not valid JSON .*Extra data"),
    "NUL after the JSON": (file_of(TEXT + "\0"), "not valid JSON .*Extra data"),
    "nested": (file_of(f'{{"t": {NESTED}}}'), r"is described by \[\["),
    "nested without end": (file_of(f'{{"t": {DEEP}}}'), "not valid JSON .*recursion"),
    "lone surrogate": (file_of(TEXT.replace('"t"', '"\\ud800"')), "not printable"),
    "NaN": (file_of('{"t": NaN}'), "NaN is no JSON"),
    "Infinity": (file_of('{"t": -Infinity}'), "-Infinity is no JSON"),
    "number out of range": (file_of(TEXT.replace("[2]", "[1e999]")), r"has shape \[inf\]"),
    "number of thousands of digits": (file_of(TEXT.replace("[2]", f"[{'9' * 5000}]")), "not valid JSON|has shape"),
    # names
    "tensor twice over one range": (
        file_of(f'{{"t": {json.dumps(EIGHT)}, "t": {json.dumps(EIGHT)}}}'),
        "'t' appears twice",
    ),
    "metadata twice": (file_of('{"__metadata__": {}, "__metadata__": {}}', b""), "'__metadata__' appears twice"),
    "field twice": (file_of(TEXT.replace('"shape"', '"shape": [2], "shape"')), "'shape' appears twice"),
    "empty name": (file_of({"": EIGHT}), "empty or not printable"),
    "NUL in a name": (file_of({"a\0b": EIGHT}), "empty or not printable"),
    "newline in a name": (file_of({"a\nb": EIGHT}), "empty or not printable"),
    # metadata
    "metadata null": (file_of({"__metadata__": None}, b""), "__metadata__ is not a table of strings"),
    "metadata a list": (file_of({"__metadata__": []}, b""), "__metadata__ is not a table of strings"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}, b""), "__metadata__ is not a table of strings"),
    # fields
    "no table": (file_of({"t": 5}), "tensor 't' is described by 5"),
    "no dtype": (file_of(one(dtype=None)), "expected dtype, shape and data_offsets alone"),
    "no shape": (file_of(one(shape=None)), "expected dtype, shape and data_offsets alone"),
    "no offsets": (file_of(one(data_offsets=None)), "expected dtype, shape and data_offsets alone"),
    "unknown field": (file_of(one(checksum="x")), "expected dtype, shape and data_offsets alone"),
    "unknown dtype": (file_of(one(dtype="F33")), "has dtype 'F33'; known ones are F64, F32, F16"),
    "lower-case dtype": (file_of(one(dtype="f32")), "has dtype 'f32'"),
    "dtype a number": (file_of(one(dtype=5)), "has dtype 5"),
    "dtype a list": (file_of(one(dtype=["F32"])), "has dtype"),
    "dtype torch does not have": (file_of(one(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3])), "has dtype 'F6_E2M3'"),
    "shape negative": (file_of(one(shape=[-2])), r"has shape \[-2\]; expected at most 64 natural numbers"),
    "shape of floats": (file_of(one(shape=[2.0])), r"has shape \[2.0\]"),
    "shape of text": (file_of(one(shape=["2"])), "has shape"),
    "shape of null": (file_of(one(shape=[None])), "has shape"),
    "shape of true": (file_of(one(shape=[2, True])), "has shape"),
    "shape a number": (file_of(one(shape=2)), "has shape 2"),
    "shape above 64 bits": (file_of(one(shape=[2**64 + 2])), "has shape"),
    "shape of very many dimensions": (file_of(one(shape=[2] + [1] * 99_999)), "expected at most 64 natural numbers"),
    "one offset": (file_of(one(data_offsets=[0])), r"has data_offsets \[0\]; expected \[begin, end\]"),
    "three offsets": (file_of(one(data_offsets=[0, 8, 8])), "has data_offsets"),
    "negative offset": (file_of(one(data_offsets=[-8, 0])), "has data_offsets"),
    "offsets above 64 bits": (file_of(one(data_offsets=[2**64, 2**64 + 8])), "has data_offsets"),
    "end before start": (file_of(one(data_offsets=[8, 0])), "has data_offsets"),
    # the data
    "larger than its shape": (file_of(one(shape=[1])), r"spans 8 bytes; F32 of shape \[1\] needs 4"),
    "smaller than its shape": (file_of(one(shape=[3])), r"spans 8 bytes; F32 of shape \[3\] needs 12"),
    "product that overflows": (file_of(one(shape=[2**62, 2**62])), "no tensor is that large"),
    "huge but for a zero": (file_of(one(shape=[0, 2**62, 2**62], data_offsets=[0, 0]), b""), "no tensor is that large"),
    "not ending on a byte": (file_of(one(dtype="F4", shape=[15])), "60 bits, which is no whole number of bytes"),
    "hole at the start": (
        file_of(one(data_offsets=[8, 16]), bytes(16)),
        "'t' leaves a hole before it: it starts at byte",
    ),
    "hole in the middle": (file_of(two((0, 3), (4, 8))), "'b' leaves a hole before it"),
    "overlap": (file_of(two((0, 5), (4, 8))), "'b' overlaps the tensor before it"),
    "one range twice": (file_of(two((0, 8), (0, 8))), "overlaps the tensor before it"),
    "empty tensor inside another": (file_of(two((0, 8), (4, 4))), "overlaps the tensor before it"),
    "truncated": (file_of({"t": EIGHT}, bytes(7)), "it is truncated: .* bytes found, .* expected from its header"),
    "truncated to its header": (file_of({"t": EIGHT}, b""), "it is truncated"),
    "trailing bytes": (file_of({"t": EIGHT}, bytes(9)), "followed by bytes that belong to no tensor"),
    "trailing bytes and no tensor": (file_of({}, bytes(1)), "followed by bytes that belong to no tensor"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    (tmp_path / "shard.safetensors").write_bytes(content)
    with pytest.raises(CorruptShardError) as refused:
        read_header(tmp_path / "shard.safetensors")
    assert re.search(message, str(refused.value)), str(refused.value)
    assert str(refused.value).startswith("shard.safetensors is not a sound safetensors file: ")
    assert len(str(refused.value)) < 700
    assert isinstance(refused.value, CheckpointError)


SOUND: dict[str, tuple[bytes, dict[str, tuple[str, tuple[int, ...], int]]]] = {
    "no tensor": (file_of({}, b""), {}),
    "metadata": (file_of({"__metadata__": {"format": "pt"}, "t": EIGHT}), {"t": ("F32", (2,), 8)}),
    "padded with spaces": (file_of(TEXT + " " * 99), {"t": ("F32", (2,), 8)}),
    "a name that looks like a path": (file_of({"../../x": EIGHT}), {"../../x": ("F32", (2,), 8)}),
    "a name in another script": (file_of({"слой.0": EIGHT}), {"слой.0": ("F32", (2,), 8)}),
    "out of order": (
        file_of(dict(reversed(two((0, 3), (3, 8)).items()))),
        {"a": ("U8", (3,), 3), "b": ("U8", (5,), 5)},
    ),
    "scalar": (file_of(one(shape=[], dtype="I64")), {"t": ("I64", (), 8)}),
    "empty ones sharing an offset": (
        file_of({**two((0, 8), (8, 8)), "c": {"dtype": "F32", "shape": [0, 7], "data_offsets": [0, 0]}}),
        {"c": ("F32", (0, 7), 0), "a": ("U8", (8,), 8), "b": ("U8", (0,), 0)},
    ),
    "4-bit floats": (file_of(one(dtype="F4", shape=[2, 8])), {"t": ("F4", (2, 8), 8)}),
    "64 dimensions": (file_of(one(shape=[2] + [1] * 63)), {"t": ("F32", (2, *[1] * 63), 8)}),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound(tmp_path: Path, case: str) -> None:
    content, expected = SOUND[case]
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
    with pytest.raises(CorruptShardError, match="claims a header of 100,000,000 bytes"):
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
        for number in range(draw(st.integers(0, 4))):
            dtype, shape = draw(st.sampled_from(list(DTYPES))), draw(st.lists(st.integers(0, 4), max_size=3))
            nbytes = math.prod(shape) * DTYPES[dtype].bits // 8
            header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
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
    valid = [content for content, _ in SOUND.values()]

    def mutate(draw: Draw) -> bytes:
        content = bytearray(draw(st.sampled_from(valid)))
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(content) - 1)) if content else 0
            change = draw(st.sampled_from(["set", "insert", "delete", "copy"]))
            if change == "set" and content:
                content[at] = draw(st.integers(0, 255))
            elif change == "insert":
                content[at:at] = draw(
                    st.sampled_from([b'"', b"0", b",", b" ", b"-", b"1", b"e", b"\0", b"\xc3", b"[", b"}"])
                )
            elif change == "delete":
                del content[at : at + draw(st.integers(1, 3))]
            else:
                content[at:at] = content[at : at + draw(st.integers(1, 30))]
        if draw(st.booleans()) and len(content) >= 8:  # make the length agree, so that the text is looked at
            end = content.rfind(b"}") + 1
            content[:8] = max(end - 8, 0).to_bytes(8, "little")
        return bytes(content)

    return st.composite(mutate)()  # type: ignore[arg-type]


@settings(max_examples=500, deadline=None)
@given(content=st.one_of(near_misses(), mutations()))
def test_what_is_accepted_the_reference_accepts_too(content: bytes) -> None:
    check_against_reference(content)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None)
@given(content=st.one_of(near_misses(), mutations()))
def test_what_is_accepted_the_reference_accepts_too_long(content: bytes) -> None:
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


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=TABLES, seed=st.integers(0, 99))
def test_round_trip_of_anything(tmp_path: Path, table: dict[str, tuple[str, tuple[int, ...]]], seed: int) -> None:
    placed = [Placed(name, dtype, shape) for name, (dtype, shape) in table.items()]
    lead, offsets = encode_header(placed)
    data = torch.randint(0, 2, (sum(p.nbytes for p in placed),), generator=torch.Generator().manual_seed(seed))
    content = lead + bytes(data.to(torch.uint8).numpy())
    assert len(lead) % DATA_ALIGNMENT == 0
    header = parse(content)
    ours = {t.name: (t.dtype, t.shape, t.offset) for t in header.tensors}
    assert ours == {p.name: (p.dtype, p.shape, offset) for p, offset in zip(placed, offsets, strict=True)}
    assert header.metadata == {"format": "pt"}
    assert set(as_reference(content)) == set(ours)


def test_data_starts_at_a_multiple_of_4096_whatever_the_header() -> None:
    starts = set()
    for length in range(3900, 4120):
        lead, offsets = encode_header([Placed("x" * length, "F32", (2,))])
        assert len(lead) % 4096 == 0
        assert offsets == (len(lead),)
        assert lead[8:9] == b"{"
        assert int.from_bytes(lead[:8], "little") == len(lead) - 8
        starts.add(len(lead))
    assert starts == {4096, 8192}


def test_tensors_are_placed_in_turn_without_holes() -> None:
    lead, offsets = encode_header([Placed("b", "U8", (3,)), Placed("a", "F32", (0, 4)), Placed("c", "BF16", (5,))])
    assert [offset - len(lead) for offset in offsets] == [0, 3, 3]


# To and from the safetensors library


def every_dtype() -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        raw = torch.arange(1, 3 * 4 * dtype.bits // 8 + 1, dtype=torch.uint8)
        raw = raw % 2 if name == "BOOL" else raw
        rows = raw.view(torch_dtype(name)).view(3, -1)
        made[name] = rows
    return made


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt", "made": "by a test"})
    mapped = MappedFile(tmp_path / "m.safetensors")
    assert mapped.header.metadata == {"format": "pt", "made": "by a test"}
    specs = {spec.name: spec for spec in mapped.header.tensors}
    assert specs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = mapped.tensor(specs[name])
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(found) == bytes_of(tensor)
        assert specs[name].dtype == name


def test_files_that_are_written_are_read_by_the_library(tmp_path: Path) -> None:
    tensors = every_dtype()
    shapes = dict.fromkeys(tensors, (3, 4))
    lead, _ = encode_header(Placed(name, name, shapes[name]) for name in tensors)
    (tmp_path / "m.safetensors").write_bytes(lead + b"".join(bytes_of(tensor) for tensor in tensors.values()))
    theirs = load_file(tmp_path / "m.safetensors")
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert theirs[name].dtype == tensor.dtype
        assert bytes_of(theirs[name]) == bytes_of(tensor)


# Mapped tensors


def test_mapped_tensor_may_be_changed_and_the_file_is_not(tmp_path: Path) -> None:
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
    found = view_bytes(memoryview(memory)[shift : shift + 24], spec)
    assert torch.equal(found, values.view(2, 3))
    memory[shift : shift + 4] = bytes(4)
    assert found[0, 0] == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2**62), (2**31, 0, 2**31)])
def test_tensor_without_elements(shape: tuple[int, ...]) -> None:
    assert view_bytes(memoryview(b""), TensorSpec("w", "BF16", shape, "f", 0, 0)).shape == shape
