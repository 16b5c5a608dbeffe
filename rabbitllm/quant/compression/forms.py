"""The stored form of a tensor: its parts in a layer file, their dtypes and shapes, and the parts that are constant.

At 4bit-double scales are quantized less their mean, which needs all of them. Until then they are kept as float32
outside the layer file: `arriving` has the parts that come from a shard, `settling` those that are made from all scales.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size
from rabbitllm.quant.compression.keys import part_names
from rabbitllm.quant.compression.library import int8_code, nf4_map
from rabbitllm.quant.compression.schemes import (
    BLOCKS,
    CODES,
    CODES_A_BYTE,
    DOUBLE,
    NESTED_BLOCK,
    scheme_of,
)
from rabbitllm.quant.compression.states import nested_state_bytes, nf4_state

if TYPE_CHECKING:
    import torch

WAITING_SCALES = ".4bit.absmax.float32"
"""Ending of the name of scales that are not quantized yet; never in a layer file."""


@dataclass(frozen=True, slots=True)
class StoredForm:
    """One checkpoint tensor as stored in a layer file.

    Attributes:
        source: the tensor in its shard.
        scheme: None, "4bit", "4bit-double" or "8bit".
        parts: the stored tensors; the payload, under the tensor's own name, comes first, the scales second. A piece has
            only these two.
    """

    source: TensorSpec
    scheme: str | None
    parts: tuple[TensorToWrite, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum([byte_size(part.dtype, part.shape) for part in self.parts])


def stored_form(spec: TensorSpec, compression: str | None) -> StoredForm:
    """The stored form of a tensor under `compression`."""
    return form_in(spec, scheme_of(spec, compression))


def form_in(spec: TensorSpec, scheme: str | None) -> StoredForm:
    """The stored form of a tensor uncompressed (None) or at one of `BLOCKS`, even if it is not compressible."""
    if scheme is None:
        return StoredForm(spec, None, (TensorToWrite(spec.name, spec.dtype, spec.shape),))
    stored = zip(part_names(spec.name, scheme), *_part_shapes(scheme, spec.dtype, spec.shape), strict=True)
    return StoredForm(spec, scheme, tuple([TensorToWrite(*part) for part in stored]))


@functools.lru_cache(maxsize=1024)
def _part_shapes(
    scheme: str, dtype: str, shape: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Dtypes and shapes of the stored parts of such a tensor; cached, since tens of thousands of experts share them."""
    n = math.prod(shape)
    blocks = math.ceil(n / BLOCKS[scheme])
    if scheme == "8bit":
        return ("U8", "F32", "F32"), (shape, (blocks,), (256,))
    payload = (-(-n // CODES_A_BYTE[scheme]), 1)
    if scheme == "4bit":
        return ("U8", "F32", "F32", "U8"), (payload, (blocks,), (16,), (len(nf4_state(dtype, shape)),))
    nested, state = (math.ceil(blocks / NESTED_BLOCK),), (nested_state_bytes(dtype, shape),)
    return ("U8", "U8", "F32", "F32", "F32", "U8"), (payload, (blocks,), (16,), nested, (256,), state)


def constants(form: StoredForm) -> Mapping[str, bytes]:
    """The bytes of the parts that do not depend on the weights: stored key -> content; a piece has none."""
    if form.source.piece is not None or form.scheme is None:
        return {}
    names = part_names(form.source.name, form.scheme)
    if form.scheme == "8bit":
        return {names[2]: int8_code()}
    if form.scheme == DOUBLE:
        return {names[2]: nf4_map(), names[4]: int8_code()}
    return {names[2]: nf4_map(), names[3]: nf4_state(form.source.dtype, form.source.shape)}


def code_values(scheme: str) -> torch.Tensor:
    """The values of a scheme's codes, without scale: float32 (16,) or (256,), rising; a new tensor."""
    import torch

    table = nf4_map() if CODES[scheme] == "4bit" else int8_code()
    return torch.frombuffer(bytearray(table), dtype=torch.float32)


def arriving(form: StoredForm) -> StoredForm:
    """The parts of a tensor that come from its shard: all, with float32 scales at 4bit-double.

    These scales have a name of their own, and are still second; the parts made from them later are missing.
    """
    if form.scheme != DOUBLE:
        return form
    payload, scales, table, _, nested_table, _ = form.parts
    waiting = TensorToWrite(form.source.name + WAITING_SCALES, "F32", scales.shape)
    return StoredForm(form.source, form.scheme, (payload, waiting, table, nested_table))


@dataclass(frozen=True, slots=True)
class Settling:
    """The quantization of a tensor's scales, once all of them are there.

    Attributes:
        of: the tensor.
        source: the float32 scales, contiguous in a file; with the name of their stored codes.
        parts: the stored tensors: their codes, the scales of these, and the state with their mean.
    """

    of: TensorSpec
    source: TensorSpec
    parts: tuple[TensorToWrite, ...]


def settling(form: StoredForm, file: str, offset: int) -> Settling:
    """The quantization of the scales of a tensor at 4bit-double, which begin at `offset` bytes in `file`."""
    _, scales, _, nested, _, state = form.parts
    waiting = arriving(form).parts[1]
    source = TensorSpec(scales.name, waiting.dtype, waiting.shape, file, offset, waiting.nbytes)
    return Settling(form.source, source, (scales, nested, state))
