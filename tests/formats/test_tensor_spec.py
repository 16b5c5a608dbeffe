"""Dtypes and sizes, against torch."""

from __future__ import annotations

import pytest

from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, byte_size, dtype_name, torch_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_is_torchs_own_and_the_name_comes_back(name: str) -> None:
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name
    elements_in_one = 2 if name == "F4" else 1  # torch keeps two to an element
    assert dtype.itemsize * 8 == DTYPES[name].bits * elements_in_one


def test_what_bitsandbytes_takes() -> None:
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
    with pytest.raises(ValueError, match="no whole number of bytes"):
        byte_size(dtype, shape)


def test_elements() -> None:
    assert TensorSpec("w", "F32", (3, 4), "f", 0, 48).elements == 12
    assert TensorSpec("w", "F32", (), "f", 0, 4).elements == 1
    assert TensorSpec("w", "F32", (3, 0), "f", 0, 0).elements == 0
