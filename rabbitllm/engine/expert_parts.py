"""Which bytes of which layer files the experts of a module have, as one array of offsets for each kind of bytes.

What is the same for every expert of a module is told once; there are tens of thousands of them. Reads no weights.
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
        dtype, shape: of the tensor they are, for one expert.
        nbytes: of one expert.
        at: where they are among the bytes of an expert.
        files: where they lie, one file for each expert, or one for all.
        offsets: of each expert in its file, int64 (experts,).
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    at: int
    files: tuple[str, ...]
    offsets: npt.NDArray[np.int64]

    def file(self, expert: int) -> str:
        """Where an expert's bytes lie."""
        return self.files[expert if len(self.files) > 1 else 0]


@dataclass(frozen=True, eq=False)
class Nesting:
    """What makes float32 of the quantized scales of experts: little enough to be kept in memory.

    Attributes:
        made: float32, of one expert; among its bytes, behind all that is read.
        offsets: the mean of the scales of each expert's tensor, or of the one that all have together.
        where: where their scales' scales lie: once, or once for each expert.
        tables: where it lies what their codes mean.
        scales: what lies at `where`, float32 (experts, n), once it is read (`with_tables`).
        table: what lies at `tables`, the same for all.
    """

    made: ExpertPart
    offsets: npt.NDArray[np.float32]
    where: tuple[TensorSpec, ...]
    tables: tuple[TensorSpec, ...]
    scales: torch.Tensor | None = None
    table: torch.Tensor | None = None

    def expanded(self, codes: torch.Tensor, expert: int) -> torch.Tensor:
        """One expert's scales from their codes, uint8 (blocks,), again: float32."""
        assert self.scales is not None
        assert self.table is not None
        offset = float(self.offsets[expert if len(self.offsets) > 1 else 0])
        return expand_scales(codes, self.scales[expert], self.table, offset)


@dataclass(frozen=True, eq=False)
class Block:
    """A stored tensor that each expert has, or its slice of one that all have together.

    Attributes:
        pattern: of the checkpoint's name, as the conversion knows it.
        sliced: whether it is a slice.
        form: how it is compressed; None if it is stored as it is.
        payload, scales: its bytes.
        tables: where it lies what each code means: once, or once for each expert.
        table: that, once it is read (`with_tables`); the same for all.
        nesting: how scales are made that are quantized themselves; None where they are stored as they are.
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
        """Of one expert's tensor."""
        return self.form.shape if self.form else self.payload.shape

    @property
    def parts(self) -> tuple[ExpertPart, ...]:
        """Its bytes, payload first."""
        return (self.payload,) if self.scales is None else (self.payload, self.scales)

    def absmax(self, bytes_of: BytesOf, expert: int) -> torch.Tensor:
        """One expert's scales, float32 (blocks,); new ones, if they are quantized themselves."""
        assert self.scales is not None
        stored = typed(bytes_of(self.scales), retyped(self.scales, self.scales.shape))
        return stored if self.nesting is None else self.nesting.expanded(stored, expert)


def retyped(part: ExpertPart, shape: tuple[int, ...]) -> TensorSpec:
    """A part as a tensor of another shape, for `typed`."""
    return TensorSpec("", part.dtype, shape, "", 0, byte_size(part.dtype, shape))
