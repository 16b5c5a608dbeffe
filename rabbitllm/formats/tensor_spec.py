"""The description of a tensor: its name, dtype, shape, file and bytes.

The dtype names are those of the safetensors format, which every other format is mapped to.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type: bits per element, and whether bitsandbytes can quantize it."""

    bits: int
    torch_name: str
    quantizable: bool = False


DTYPES: dict[str, Dtype] = {
    "F64": Dtype(64, "float64"),
    "F32": Dtype(32, "float32", quantizable=True),
    "F16": Dtype(16, "float16", quantizable=True),
    "BF16": Dtype(16, "bfloat16", quantizable=True),
    "F8_E4M3": Dtype(8, "float8_e4m3fn"),
    "F8_E4M3FNUZ": Dtype(8, "float8_e4m3fnuz"),
    "F8_E5M2": Dtype(8, "float8_e5m2"),
    "F8_E5M2FNUZ": Dtype(8, "float8_e5m2fnuz"),
    "F8_E8M0": Dtype(8, "float8_e8m0fnu"),
    "F4": Dtype(4, "float4_e2m1fn_x2"),
    "I64": Dtype(64, "int64"),
    "I32": Dtype(32, "int32"),
    "I16": Dtype(16, "int16"),
    "I8": Dtype(8, "int8"),
    "U64": Dtype(64, "uint64"),
    "U32": Dtype(32, "uint32"),
    "U16": Dtype(16, "uint16"),
    "U8": Dtype(8, "uint8"),
    "BOOL": Dtype(8, "bool"),
    "C64": Dtype(64, "complex64"),
}
"""The dtypes of https://docs.rs/safetensors/latest/safetensors/tensor/enum.Dtype.html that torch has too.

The sub-byte F6 types are left out: torch has no dtype for them.
"""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The part of a larger tensor, cut along one dimension, that a tensor is.

    Attributes:
        of: the larger tensor's name.
        shape: shape of the larger tensor.
        dim: the dimension of the cut.
        begin: the first index along that dimension in this piece.
    """

    of: str
    shape: tuple[int, ...]
    dim: int
    begin: int


class TensorSpec(NamedTuple):
    """One tensor of one file: a run of its bytes in row-major order, or elements at strides.

    A named tuple, since plans make hundreds of thousands of them, and a frozen dataclass takes twice as long.

    Attributes:
        name: its name in the checkpoint. Never a path.
        dtype: a key of `DTYPES`.
        shape: elements along each dimension; `()` is a scalar.
        file: name of the shard, relative to the checkpoint.
        offset: of its first element, from the start of the file.
        nbytes: length in bytes, in row-major order.
        strides: in elements, one per dimension, never negative; None for a contiguous tensor. Only dtypes of whole
            bytes have them.
        view: the shape of the strides, if it differs: the same elements in the same row-major order with other
            dimensions. None if it is `shape`.
        piece: its part of a larger tensor; None for a tensor of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None = None
    view: tuple[int, ...] | None = None
    piece: TensorPiece | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Bytes of the file from the first of its elements to the end of the last."""
        if self.strides is None:
            return self.nbytes
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return (last + 1) * DTYPES[self.dtype].bits // 8

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the strides: the view, or the shape."""
        return self.shape if self.view is None else self.view

    @property
    def whole(self) -> TensorSpec:
        """The tensor that this is a piece of, as far as one piece determines it; itself if it is not a piece."""
        if self.piece is None:
            return self
        shape = self.piece.shape
        return TensorSpec(self.piece.of, self.dtype, shape, self.file, 0, byte_size(self.dtype, shape))


@functools.lru_cache(maxsize=4096)
def byte_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor.

    Raises:
        ValueError: the elements do not end on a byte (sub-byte dtypes).
    """
    bits = math.prod(shape) * DTYPES[dtype].bits
    if bits % 8:
        raise ValueError(f"{shape} elements of {dtype} are {bits} bits, which is no whole number of bytes")
    return bits // 8


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name."""
    import torch

    found: torch.dtype = getattr(torch, DTYPES[dtype].torch_name)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors dtype name of a torch dtype."""
    wanted = str(dtype).removeprefix("torch.")
    return next(name for name, entry in DTYPES.items() if entry.torch_name == wanted)
