"""The bytes of experts in layer files, as one array of offsets for each kind of bytes of a module.

Fields that all experts of a module share are stored once, since there are tens of thousands of experts. Reads no
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rabbitllm.engine.unit_source import typed
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size
from rabbitllm.quant.compression import Quantized, expand_scales

BytesOf = Callable[["ExpertPart"], torch.Tensor]
"""A part of one expert -> its bytes, uint8 (nbytes,)."""


@dataclass(frozen=True, eq=False)
class ExpertPart:
    """Bytes of one kind that each expert has.

    Attributes:
        dtype, shape: of one expert's tensor.
        nbytes: of one expert.
        at: their offset in the bytes of an expert.
        files: one file for each expert, or one for all.
        offsets: of each expert in its file, int64 (experts,).
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    at: int
    files: tuple[str, ...]
    offsets: npt.NDArray[np.int64]

    def file(self, expert: int) -> str:
        """The file that holds an expert's bytes."""
        return self.files[expert if len(self.files) > 1 else 0]


@dataclass(frozen=True, eq=False)
class Nesting:
    """The data to dequantize quantized scales of experts to float32; small enough to be kept in memory.

    Attributes:
        made: one expert's float32 scales; in its bytes, after all that are read.
        offsets: the mean of the scales of each expert's tensor, or of the one tensor of all experts.
        where: the specs of the scales' scales: one, or one for each expert.
        tables: the specs of the code tables of the scales.
        scales: the values at `where`, float32 (experts, n), once they are read (`with_tables`).
        table: the values at `tables`, the same for all.
    """

    made: ExpertPart
    offsets: npt.NDArray[np.float32]
    where: tuple[TensorSpec, ...]
    tables: tuple[TensorSpec, ...]
    scales: torch.Tensor | None = None
    table: torch.Tensor | None = None

    def expanded(self, codes: torch.Tensor, expert: int) -> torch.Tensor:
        """One expert's scales, float32, from their codes, uint8 (blocks,)."""
        assert self.scales is not None
        assert self.table is not None
        offset = float(self.offsets[expert if len(self.offsets) > 1 else 0])
        return expand_scales(codes, self.scales[expert], self.table, offset)


@dataclass(frozen=True, eq=False)
class Block:
    """A stored tensor of each expert, or an expert's slice of the one tensor of all experts.

    Attributes:
        pattern: of the checkpoint's name, as in the conversion.
        sliced: whether it is a slice.
        form: how it is compressed; None if it is uncompressed.
        payload, scales: its bytes.
        tables: the specs of the code table: one, or one for each expert.
        table: the code table, once it is read (`with_tables`); the same for all.
        nesting: the data to dequantize quantized scales; None if the scales are not quantized.
    """

    pattern: str
    sliced: bool
    form: Quantized | None
    payload: ExpertPart
    scales: ExpertPart | None = None
    tables: tuple[TensorSpec, ...] = ()
    table: torch.Tensor | None = None
    nesting: Nesting | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one expert's tensor."""
        return self.form.shape if self.form else self.payload.shape

    @property
    def parts(self) -> tuple[ExpertPart, ...]:
        """Its bytes, payload first."""
        return (self.payload,) if self.scales is None else (self.payload, self.scales)

    def absmax(self, bytes_of: BytesOf, expert: int) -> torch.Tensor:
        """One expert's scales, float32 (blocks,); a new tensor if they are quantized."""
        assert self.scales is not None
        stored = typed(bytes_of(self.scales), retyped(self.scales, self.scales.shape))
        return stored if self.nesting is None else self.nesting.expanded(stored, expert)


def retyped(part: ExpertPart, shape: tuple[int, ...]) -> TensorSpec:
    """A part as a tensor of another shape, for `typed`."""
    return TensorSpec("", part.dtype, shape, "", 0, byte_size(part.dtype, shape))
