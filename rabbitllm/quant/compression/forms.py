"""What a tensor becomes: the parts that a layer file holds of it, their dtypes and shapes, and those that are the same
for any weights.

At 4bit-double scales are quantized by their mean, which is known when the last of them is. Until then they wait as they
are, outside the layer file: `arriving` is what a shard gives, `settling` what becomes of it when all is there.
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
"""What the name of scales that wait to be quantized ends with; never in a layer file."""


@dataclass(frozen=True, slots=True)
class StoredForm:
    """One checkpoint tensor as a layer file holds it.

    Attributes:
        source: the tensor in its shard.
        scheme: None, "4bit", "4bit-double" or "8bit".
        parts: what is stored; the payload, under the tensor's own name, comes first, the scales second. A piece has no
            more than these.
    """

    source: TensorSpec
    scheme: str | None
    parts: tuple[TensorToWrite, ...]

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum([byte_size(part.dtype, part.shape) for part in self.parts])


def stored_form(spec: TensorSpec, compression: str | None) -> StoredForm:
    """How a layer file holds a tensor under `compression`."""
    return form_in(spec, scheme_of(spec, compression))


def form_in(spec: TensorSpec, scheme: str | None) -> StoredForm:
    """A tensor as it is (None), or at one of `BLOCKS`, whether or not compression would touch it."""
    if scheme is None:
        return StoredForm(spec, None, (TensorToWrite(spec.name, spec.dtype, spec.shape),))
    stored = zip(part_names(spec.name, scheme), *_part_shapes(scheme, spec.dtype, spec.shape), strict=True)
    return StoredForm(spec, scheme, tuple([TensorToWrite(*part) for part in stored]))


@functools.lru_cache(maxsize=1024)
def _part_shapes(
    scheme: str, dtype: str, shape: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Dtypes and shapes of the stored parts of such a tensor; experts have the same ones in their ten thousands."""
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
    """What a scheme's codes mean, before their scale: float32 (16,) or (256,), rising; a new tensor."""
    import torch

    table = nf4_map() if CODES[scheme] == "4bit" else int8_code()
    return torch.frombuffer(bytearray(table), dtype=torch.float32)


def arriving(form: StoredForm) -> StoredForm:
    """What a tensor's shard gives of it: all that is stored, but for scales that are quantized themselves. These are
    float32 then, under a name of their own, and still second."""
    if form.scheme != DOUBLE:
        return form
    payload, scales, table, _, nested_table, _ = form.parts
    waiting = TensorToWrite(form.source.name + WAITING_SCALES, "F32", scales.shape)
    return StoredForm(form.source, form.scheme, (payload, waiting, table, nested_table))


@dataclass(frozen=True, slots=True)
class Settling:
    """What becomes of scales that have waited for the last of them.

    Attributes:
        of: the tensor that they are of.
        source: where all of them lie, float32, one after the other; named as what is stored of them.
        parts: what is stored: their codes, the scales of these, and the state that has their mean.
    """

    of: TensorSpec
    source: TensorSpec
    parts: tuple[TensorToWrite, ...]


def settling(form: StoredForm, file: str, offset: int) -> Settling:
    """What becomes of the scales of a tensor at 4bit-double, the first of which lies `offset` bytes into `file`."""
    _, scales, _, nested, _, state = form.parts
    waiting = arriving(form).parts[1]
    source = TensorSpec(scales.name, waiting.dtype, waiting.shape, file, offset, waiting.nbytes)
    return Settling(form.source, source, (scales, nested, state))
