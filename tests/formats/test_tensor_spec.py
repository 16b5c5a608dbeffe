"""Dtypes and sizes, against torch.

Strided tensors in a file, read in row-major order: every byte as torch would give it.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rabbitllm.formats import tensor_spec
from rabbitllm.formats.tensor_spec import (
    DTYPES,
    TensorSpec,
    byte_size,
    dtype_name,
    is_contiguous,
    read_run,
    torch_dtype,
)
from rabbitllm.storage.files import PositionalFile
from tests.support.draws import draws


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_names_of_torch_round_trip(name: str) -> None:
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name
    elements_in_one = 2 if name == "F4" else 1  # torch keeps two to an element
    assert dtype.itemsize * 8 == DTYPES[name].bits * elements_in_one


def test_quantizable_dtypes() -> None:
    assert {name for name, dtype in DTYPES.items() if dtype.quantizable} == {"F32", "F16", "BF16"}


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("F32", (), 4),
        ("F32", (2, 3), 24),
        ("BF16", (5,), 10),
        ("U8", (0, 9), 0),
        ("F4", (2, 8), 8),
        ("F4", (), None),
        ("F4", (3,), None),
        ("F64", (2**40, 2**40), 2**83),
    ],
)
def test_size(dtype: str, shape: tuple[int, ...], nbytes: int | None) -> None:
    if nbytes is not None:
        assert byte_size(dtype, shape) == nbytes
        return
    with pytest.raises(ValueError, match="not a whole number of bytes"):
        byte_size(dtype, shape)


def test_elements() -> None:
    assert TensorSpec("w", "F32", (3, 4), "f", 0, 48).elements == 12
    assert TensorSpec("w", "F32", (), "f", 0, 4).elements == 1
    assert TensorSpec("w", "F32", (3, 0), "f", 0, 0).elements == 0


OF_SIZE = {1: "U8", 2: "I16", 4: "I32", 8: "I64"}
OFFSET = 24


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strided") / "noise"
    values = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    path.write_bytes(values.numpy().tobytes())
    return path


def strided(offset: int, item: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorSpec:
    return TensorSpec("w", OF_SIZE[item], shape, "noise", offset, math.prod(shape) * item, strides)


def reference(path: Path, tensor: TensorSpec) -> bytes:
    data = bytearray(path.read_bytes()[tensor.offset :])
    flat = torch.frombuffer(data[: len(data) // 8 * 8], dtype=torch_dtype(tensor.dtype))
    assert tensor.strides is not None
    return torch.as_strided(flat, tensor.shape, tensor.strides).contiguous().numpy().tobytes()


def read(path: Path, tensor: TensorSpec, begin: int, length: int) -> bytes:
    buffer = bytearray(length)
    with PositionalFile(path) as file:
        assert read_run(file, tensor, begin, memoryview(buffer)) == length
    return bytes(buffer)


@st.composite
def tensors(draw: st.DrawFn) -> TensorSpec:
    """Of up to five dimensions, with any strides that stay inside the file."""
    shape = draw(st.lists(st.integers(1, 7), max_size=5))
    strides = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 50, 600, 3000]), min_size=len(shape), max_size=len(shape)))
    return strided(OFFSET, draw(st.sampled_from([1, 2, 4, 8])), tuple(shape), tuple(strides))


@pytest.mark.parametrize(("staging", "gap"), [(16 << 20, 4096), (64, 4096), (4096, 0), (1, 16)])
@settings(max_examples=draws(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensor=tensors(), data=st.data())
def test_any_range_of_any_tensor(
    noise: Path, monkeypatch: pytest.MonkeyPatch, staging: int, gap: int, tensor: TensorSpec, data: st.DataObject
) -> None:
    monkeypatch.setattr(tensor_spec, "STAGING_BYTES", staging)
    monkeypatch.setattr(tensor_spec, "GAP_BYTES", gap)
    elements, item = tensor.elements, tensor.nbytes // tensor.elements
    first = data.draw(st.integers(0, elements - 1))
    last = data.draw(st.integers(first, elements))
    begin, end = first * item, last * item
    assert read(noise, tensor, begin, end - begin) == reference(noise, tensor)[begin:end]


@pytest.mark.parametrize("shape", [(5,), (), (2, 3, 4), (1, 4, 1), (0, 3), (3, 1)])
def test_is_contiguous_equals_torch(shape: tuple[int, ...]) -> None:
    whole = torch.zeros(shape)
    assert is_contiguous(shape, whole.stride())
    for view in (whole.transpose(0, -1), whole[..., ::2], whole[::2]) if shape else ():
        assert is_contiguous(tuple(view.shape), view.stride()) == view.is_contiguous()


def test_strides_of_size_1_are_ignored() -> None:
    assert is_contiguous((1, 4), (999, 1))
    assert is_contiguous((4, 1), (1, 999))
    assert not is_contiguous((4, 2), (1, 4))


def test_transposed_tensor_is_read_in_few_reads(noise: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    plain = PositionalFile.read_into

    def counted(file: PositionalFile, buffer: memoryview, offset: int) -> int:
        reads.append(len(buffer))
        return plain(file, buffer, offset)

    monkeypatch.setattr(PositionalFile, "read_into", counted)
    tensor = strided(0, 2, (4096, 64), (1, 4096 * 2))  # columns of 8 KiB, with as much between them
    assert read(noise, tensor, 0, 4096 * 64 * 2) == reference(noise, tensor)
    assert len(reads) == 64
    assert sum(reads) == 4096 * 64 * 2


def test_staging_is_bounded(noise: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_spec, "STAGING_BYTES", 10_000)
    staged: list[int] = []
    plain = PositionalFile.read_into
    monkeypatch.setattr(
        PositionalFile,
        "read_into",
        lambda file, buffer, offset: staged.append(len(buffer)) or plain(file, buffer, offset),  # type: ignore[func-returns-value]
    )
    tensor = strided(0, 4, (200,), (1000,))  # 4,000 bytes apart, so read with what is between
    assert read(noise, tensor, 0, 800) == reference(noise, tensor)
    assert max(staged) <= 10_000
    assert sum(staged) < 4 * 200_000


def test_truncated_file(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(100))
    with PositionalFile(tmp_path / "short") as file:
        for strides in ((1, 16), (16, 1)):
            buffer = memoryview(bytearray(512))
            assert read_run(file, strided(0, 2, (16, 16), strides), 0, buffer) < 512
