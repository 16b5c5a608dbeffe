"""The stored form of a tensor: the keys, dtypes and shapes of its parts in a layer file, and bitsandbytes' JSON.

At 4bit-double scales are quantized less their mean, which needs all of them. Until then they are kept as float32
outside the layer file: `arriving` has the parts that come from a shard, `settling` those that are made from all scales.

bitsandbytes' `QuantState.from_dict` (0.50) reads the JSON. If scales are quantized themselves, it has a number that
depends on the weights; blanks follow it, so that the layout of a layer file does not depend on its length.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, byte_size
from rabbitllm.quant.schemes import (
    DOUBLE,
    GGUF_MARK,
    NESTED_BLOCK,
    NF4_BLOCK,
    SCHEMES,
    STORED,
    PartRole,
    Quantized,
    int8_code,
    scheme_of,
)

if TYPE_CHECKING:
    from rabbitllm.quant.quantize import ReadScales

WAITING_SCALES = ".4bit.absmax.float32"
"""Ending of the name of scales that are not quantized yet; never in a layer file."""


def part_names(name: str, scheme: str | None) -> tuple[str, ...]:
    """The stored keys of a tensor: payload first, then its scales, then its code table."""
    return (name,) if scheme is None else tuple([name + ending for ending, _, _ in STORED[scheme].parts])


def stored_schemes(keys: Iterable[str]) -> dict[str, str | None]:
    """The tensors of a layer file with these stored keys: tensor name -> scheme, None or one of `STORED`."""
    schemes: dict[str, str | None] = dict.fromkeys(keys)
    for scheme, entry in SCHEMES.items():
        mark, *other_marks = entry.marks
        for key in [key for key in schemes if key.endswith(mark)]:
            name = key.removesuffix(mark)
            if name in schemes and all(name + ending in schemes for ending in other_marks):
                schemes[name] = scheme
    for key in [key for key in schemes if GGUF_MARK in key]:
        name, _, block = key.rpartition(GGUF_MARK)
        if name in schemes and block.upper() in BLOCK_TYPES:
            schemes[name] = block.upper()
    for name, how in tuple(schemes.items()):
        for part in part_names(name, how)[1:]:
            schemes.pop(part, None)
    return schemes


def state_key(name: str, scheme: str | None) -> str | None:
    """The stored key of a tensor's packed QuantState; None if the scheme has none."""
    parts = STORED[scheme].parts if scheme is not None else ()
    return next((name + ending for ending, _, role in parts if role is PartRole.STATE), None)


@dataclass(frozen=True, slots=True)
class StoredForm:
    """One checkpoint tensor as stored in a layer file.

    Attributes:
        source: the tensor in its shard.
        scheme: None, or one of `STORED`.
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

    @property
    def keeps_blocks(self) -> bool:
        """Whether it has the blocks of its file, unchanged."""
        return self.source.keeps_blocks(self.scheme)


def stored_form(spec: TensorSpec, compression: str | None) -> StoredForm:
    """The stored form of a tensor under `compression`."""
    return form_in(spec, scheme_of(spec, compression))


def form_in(spec: TensorSpec, scheme: str | None) -> StoredForm:
    """The stored form of a tensor uncompressed (None) or at one of `STORED`, even if it is not compressible."""
    if scheme is None:
        return StoredForm(spec, None, (TensorToWrite(spec.name, spec.dtype, spec.shape),))
    stored = zip(part_names(spec.name, scheme), *_part_shapes(scheme, spec.dtype, spec.shape), strict=True)
    return StoredForm(spec, scheme, tuple([TensorToWrite(*part) for part in stored]))


@functools.lru_cache(maxsize=1024)
def _part_shapes(
    scheme: str, dtype: str, shape: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Dtypes and shapes of the stored parts of such a tensor; cached, since tens of thousands of experts share them."""
    entry = STORED[scheme]
    if entry.block_bytes:
        return ("U8", "U8"), ((*shape[:-1], BLOCK_TYPES[scheme].row_bytes(shape[-1])), (1,))
    elements = _part_elements(scheme, shape)
    shapes: list[tuple[int, ...]] = []
    for _, _, role in entry.parts:
        if role is PartRole.CODES:
            shapes.append(shape if entry.codes_a_byte == 1 else (elements[role], 1))
        else:
            shapes.append((elements[role] if role in elements else _state_bytes(scheme, dtype, shape),))
    return tuple([part_dtype for _, part_dtype, _ in entry.parts]), tuple(shapes)


@functools.lru_cache(maxsize=1024)
def _part_elements(scheme: str, shape: tuple[int, ...]) -> Mapping[PartRole, int]:
    """Number of elements of the parts that kernels use, for a tensor of this shape."""
    entry, n = SCHEMES[scheme], math.prod(shape)
    blocks = math.ceil(n / entry.block)
    return {
        PartRole.CODES: -(-n // entry.codes_a_byte),
        PartRole.SCALES: blocks,
        PartRole.TABLE: 1 << 8 // entry.codes_a_byte,
        PartRole.NESTED_SCALES: math.ceil(blocks / NESTED_BLOCK),
        PartRole.NESTED_TABLE: 256,
    }


def constants(form: StoredForm) -> Mapping[str, bytes]:
    """The bytes of the parts that do not depend on the weights: stored key -> content; a piece has none."""
    if form.source.piece is not None or form.scheme is None:
        return {}
    contents, entry = {}, STORED[form.scheme]
    for ending, _, role in entry.parts:
        if role is PartRole.KIND:
            contents[form.source.name + ending] = bytes([BLOCK_TYPES[form.scheme].number])
        elif role is PartRole.TABLE:
            contents[form.source.name + ending] = entry.values()
        elif role is PartRole.NESTED_TABLE:
            contents[form.source.name + ending] = int8_code()
        elif role is PartRole.STATE and form.scheme != DOUBLE:
            contents[form.source.name + ending] = _state(form.source.dtype, form.source.shape)
    return contents


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
class ScalesForm:
    """The quantization of a tensor's scales, once all of them are there.

    Attributes:
        of: the tensor.
        source: the float32 scales, contiguous in a file; with the name of their stored codes.
        parts: the stored tensors: their codes, the scales of these, and the state with their mean.
    """

    of: TensorSpec
    source: TensorSpec
    parts: tuple[TensorToWrite, ...]


def settling(form: StoredForm, file: str, offset: int) -> ScalesForm:
    """The quantization of the scales of a tensor at 4bit-double, which begin at `offset` bytes in `file`."""
    _, scales, _, nested, _, state = form.parts
    waiting = arriving(form).parts[1]
    source = TensorSpec(scales.name, waiting.dtype, waiting.shape, file, offset, waiting.nbytes)
    return ScalesForm(form.source, source, (scales, nested, state))


def settled(form: ScalesForm, read: ReadScales) -> Iterator[tuple[int, int, memoryview]]:
    """The stored bytes of a tensor's scales: (index in `form.parts`, offset in that part, bytes); reads them twice."""
    from rabbitllm.quant.quantize import mean_of, quantized_scales  # torch comes with it

    count = form.source.elements
    mean = mean_of(read, count)
    yield from quantized_scales(read, count, mean)
    yield 2, 0, memoryview(nested_state(form.of.dtype, form.of.shape, float(mean)))


# The JSON of bitsandbytes that is stored with each 4bit weight, and its validation.

LONGEST_STATE = 4096
"""Maximum bytes of a QuantState's JSON; usual are about 90, or 190 at 4bit-double."""
LONGEST_NUMBER = 24
"""Maximum characters of a float that Python writes: `-1.7976931348623157e+308`."""


def nested_state(dtype: str, shape: tuple[int, ...], offset: float) -> bytes:
    """The JSON of a weight at 4bit-double, with the mean of its scales, padded with blanks to a length for any mean."""
    return _state(dtype, shape, offset).ljust(_state_bytes(DOUBLE, dtype, shape))


@functools.lru_cache(maxsize=1024)
def _state_bytes(scheme: str, dtype: str, shape: tuple[int, ...]) -> int:
    if scheme != DOUBLE:
        return len(_state(dtype, shape))
    return len(_state(dtype, shape, 0.0)) - len("0.0") + LONGEST_NUMBER


def _state(dtype: str, shape: tuple[int, ...], offset: float | None = None) -> bytes:
    """The JSON of a weight of this safetensors dtype and shape, byte for byte as bitsandbytes writes it."""
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": DTYPES[dtype].torch_name, "shape": list(shape)}
    if offset is not None:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    return json.dumps(state).encode()


def read_state(name: str, scheme: str, parts: Mapping[str, TensorSpec], state: bytes) -> Quantized:
    """Check the sizes of a quantized tensor's parts against each other.

    The kernels do not check them: with scales for too few blocks they would read past their end.

    Args:
        name: the tensor.
        scheme: one of `STORED`.
        parts: the layer file's stored keys, by name.
        state: the bytes of its packed QuantState at 4bit; ignored otherwise.

    Raises:
        IncompleteSplitError: a part is missing, or has a size that does not fit the payload.
    """
    names = part_names(name, scheme)
    for part in names:
        if part not in parts:
            raise IncompleteSplitError(f"tensor {name!r} is stored at {scheme} without its part {part!r}.")
    if STORED[scheme].block_bytes:
        return _of_payload(scheme, parts[name])
    has_state = state_key(name, scheme) is not None
    form = _parse_state(name, scheme, state) if has_state else Quantized(scheme, parts[name].shape, None)
    elements = _part_elements(scheme, form.shape)
    for part, (_, dtype, role) in zip(names, SCHEMES[scheme].parts, strict=True):
        spec = parts[part]
        if role in elements and (spec.dtype != dtype or spec.elements != elements[role]):
            raise IncompleteSplitError(
                f"the part {part!r} has {spec.elements:,} elements of {spec.dtype}; a {scheme} tensor of shape "
                f"{form.shape} needs {elements[role]:,} of {dtype}."
            )
    return form


def _of_payload(scheme: str, payload: TensorSpec) -> Quantized:
    """The form of blocks, whose rows are those of the stored bytes."""
    block = BLOCK_TYPES[scheme]
    if payload.dtype != "U8" or not payload.shape or payload.shape[-1] % block.nbytes:
        raise IncompleteSplitError(
            f"the tensor {payload.name!r} is stored as {payload.dtype} {payload.shape}; expected U8 rows of {scheme} "
            f"blocks of {block.nbytes} bytes."
        )
    columns = payload.shape[-1] // block.nbytes * block.elements
    return Quantized(scheme, (*payload.shape[:-1], columns), None)


def _parse_state(name: str, scheme: str, raw: bytes) -> Quantized:
    form = _form(raw, scheme == DOUBLE) if len(raw) <= LONGEST_STATE else None
    if form is None:
        raise IncompleteSplitError(
            f"the quantization state of {name!r} is {raw[:120]!r}; expected the JSON of "
            f"{'a nested' if scheme == DOUBLE else 'an unnested'} nf4 state of blocks of {NF4_BLOCK}"
            f"{f' with scales quantized in blocks of {NESTED_BLOCK}' if scheme == DOUBLE else ''}."
        )
    return form


@functools.lru_cache(maxsize=1024)
def _form(raw: bytes, nested: bool) -> Quantized | None:
    """Parse the JSON of a QuantState; None if it is not such an nf4 state. Cached, since experts share it."""
    try:
        state = json.loads(raw)
        shape, offset = tuple(state["shape"]), state["nested_offset"] if nested else None
        if nested:
            blocks = state["nested_blocksize"], state["nested_dtype"]
            scales_are_sound = blocks == (NESTED_BLOCK, "float32") and type(offset) is float
        else:
            scales_are_sound = not any(key.startswith("nested") for key in state)
        is_sound = (
            scales_are_sound
            and state["quant_type"] == "nf4"
            and state["blocksize"] == NF4_BLOCK
            and state["dtype"] in ("bfloat16", "float16", "float32")
            and all(type(size) is int and size >= 0 for size in shape)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Quantized(DOUBLE if nested else "4bit", shape, state["dtype"], offset) if is_sound else None
