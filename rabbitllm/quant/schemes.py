"""The schemes of quantization: one registry, the choice of tensors to compress, and the stored form of a tensor.

An entry of `SCHEMES` says how a scheme is stored. Stored keys are RabbitLLM 1.1's (and AirLLM's) pattern:

- 4bit: `<name>` uint8 ((n+1)//2, 1), `<name>.4bit.absmax` float32 (blocks of 64), `<name>.4bit.quant_map`
  float32 (16), `<name>.4bit.quant_state.bitsandbytes__nf4` (the JSON bytes of bitsandbytes' packed QuantState);
- 4bit-double: the same, but `<name>.4bit.absmax` is uint8 codes, with their scales in `<name>.4bit.nested_absmax`
  float32 (blocks of 256 scales) and their values in `<name>.4bit.nested_quant_map` float32 (256); bitsandbytes' names;
- 8bit: `<name>` uint8 in the tensor's own shape, `<name>.8bit.absmax` float32 (blocks of 2048), `<name>.8bit.code`
  float32 (256).

Blocks of ggml (`gguf_blocks.py`), which came from a GGUF file or are made by `block_encoders.py`: `<name>` uint8, the
tensor's shape with bytes of a row in place of its elements, and `<name>.gguf.q4_k` uint8 (1,), the number of the type,
whose name is in the key.

At 4bit-double scales are quantized less their mean, which needs all of them. Until then they are kept as float32
outside the layer file: `arriving` has the parts that come from a shard, `settling` those that are made from all scales.

bitsandbytes' `QuantState.from_dict` (0.50) reads the JSON. If scales are quantized themselves, it has a number that
depends on the weights; blanks follow it, so that the layout of a layer file does not depend on its length.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import itertools
import json
import logging
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rabbitllm.errors import IncompleteSplitError, MissingPackageError, OptionError
from rabbitllm.formats.gguf_types import BLOCK_TYPES, TensorType
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, ValueChange, byte_size

if TYPE_CHECKING:
    import torch

NF4_BLOCK = 64
"""Elements that share a scale at 4bit."""
INT8_BLOCK = 2048
"""Elements that share a scale at 8bit."""
NESTED_BLOCK = 256
"""Scales that share a scale of their own at 4bit-double."""
DOUBLE = "4bit-double"
"""4bit with scales that are quantized themselves, as bitsandbytes' `compress_statistics` does."""
NF4_STATE = ".4bit.quant_state.bitsandbytes__nf4"
WAITING_SCALES = ".4bit.absmax.float32"
"""Ending of the name of scales that are not quantized yet; never in a layer file."""
SCALE_BYTES = 4
"""A scale is a float32, unless it is quantized itself."""
MIN_ELEMENTS = 4096
"""Smaller tensors are not compressed: the keys would take more bytes than are saved."""
MIN_DOUBLE_ELEMENTS = 1 << 15
"""Smaller tensors are at 4bit under 4bit-double: the 1,024 bytes of the scales' code table are more than is saved."""
MAX_ROUTER_ROWS = 1024
"""A matrix named `gate` with more rows is not a router: no model has so many experts."""


class PartRole(enum.Enum):
    """What a stored part of a quantized tensor holds."""

    CODES = enum.auto()
    SCALES = enum.auto()
    TABLE = enum.auto()
    NESTED_SCALES = enum.auto()
    NESTED_TABLE = enum.auto()
    STATE = enum.auto()
    KIND = enum.auto()


# bitsandbytes, imported when it is needed, and the values of the codes


@functools.cache
def bitsandbytes() -> Any:
    """The package.

    Raises:
        MissingPackageError: it is not installed, or cannot be imported.
    """
    # on a CPU it logs at import that a package of faster kernels is missing
    backend = logging.getLogger("bitsandbytes.backends.cpu.ops")
    backend.addFilter(lambda record: "kernels-community" not in record.getMessage())
    try:
        import bitsandbytes
        import bitsandbytes.functional
    except ImportError as error:
        raise MissingPackageError(
            f"compression needs the package bitsandbytes, which cannot be imported: {error}.",
            "Run `pip install bitsandbytes`, or remove compression.",
        ) from error
    return bitsandbytes


def functional() -> Any:
    """Its functions; raises as `bitsandbytes` does."""
    return bitsandbytes().functional


_NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)


def nf4_map() -> bytes:
    """The values of the 16 codes of 4bit, float32, rising."""
    return struct.pack("<16f", *_NF4)


@functools.cache
def int8_code() -> bytes:
    """The values of the 256 codes of 8bit, and of scales that are quantized themselves, float32, rising.

    These are the values of bitsandbytes' `create_dynamic_map`. It uses `torch.linspace`, whose last bits depend on
    whether the processor has a fused multiply-add. Here they are on every machine those of a processor that has it.
    """
    import numpy as np

    tenth, whole = np.float32(0.1), np.float32(1)
    values = [np.float32(0), whole]
    for exponent in range(-6, 1):
        parts = 2 ** (exponent + 6)
        step = float((whole - tenth) / np.float32(parts))
        edges = [
            np.float32(float(tenth) + step * k if k < (parts + 1) // 2 else 1 - step * (parts - k))
            for k in range(parts + 1)
        ]
        for low, high in itertools.pairwise(edges):
            value = np.float32(10.0**exponent) * ((low + high) / np.float32(2))
            values += [value, -value]
    return np.sort(np.array(values, np.float32)).tobytes()


@dataclass(frozen=True, slots=True)
class Scheme:
    """One scheme of quantization.

    Attributes:
        block: elements that share a scale.
        codes_a_byte: codes in a byte.
        codes: the scheme of its codes for kernels, which get dequantized scales.
        values: the values of the codes, float32, rising; as bytes.
        parts: stored parts in order, codes and scales first: ending of the key, dtype, role.
        marks: endings of keys by which a stored tensor is recognised; if those of several schemes fit, the last counts.
        fits: whether scales can be fitted to their block.
        min_elements: smaller tensors have the scheme `smaller` instead.
        block_bytes: bytes of a block that has its scales in it; 0 if codes and scales are separate parts.
    """

    block: int
    codes_a_byte: int
    codes: str
    values: Callable[[], bytes]
    parts: tuple[tuple[str, str, PartRole], ...]
    marks: tuple[str, ...]
    fits: bool = False
    min_elements: int = 0
    smaller: str | None = None
    block_bytes: int = 0

    def payload_bytes(self, elements: int) -> int:
        """Bytes of the first part for so many elements, which are whole blocks."""
        return elements // self.block * self.block_bytes if self.block_bytes else elements // self.codes_a_byte


_CODES = ("", "U8", PartRole.CODES)
_NF4_TABLE = (".4bit.quant_map", "F32", PartRole.TABLE)
_STATE = (NF4_STATE, "U8", PartRole.STATE)
SCHEMES: Mapping[str, Scheme] = {
    "4bit": Scheme(
        block=NF4_BLOCK,
        codes_a_byte=2,
        codes="4bit",
        values=nf4_map,
        parts=(_CODES, (".4bit.absmax", "F32", PartRole.SCALES), _NF4_TABLE, _STATE),
        marks=(NF4_STATE,),
        fits=True,
    ),
    "8bit": Scheme(
        block=INT8_BLOCK,
        codes_a_byte=1,
        codes="8bit",
        values=int8_code,
        parts=(_CODES, (".8bit.absmax", "F32", PartRole.SCALES), (".8bit.code", "F32", PartRole.TABLE)),
        marks=(".8bit.absmax",),
    ),
    DOUBLE: Scheme(
        block=NF4_BLOCK,
        codes_a_byte=2,
        codes="4bit",
        values=nf4_map,
        parts=(
            _CODES,
            (".4bit.absmax", "U8", PartRole.SCALES),
            _NF4_TABLE,
            (".4bit.nested_absmax", "F32", PartRole.NESTED_SCALES),
            (".4bit.nested_quant_map", "F32", PartRole.NESTED_TABLE),
            _STATE,
        ),
        marks=(".4bit.nested_absmax", NF4_STATE),
        fits=True,
        min_elements=MIN_DOUBLE_ELEMENTS,
        smaller="4bit",
    ),
}
GGUF_MARK = ".gguf."
"""In the ending of the key that names the type of blocks."""


def _of_blocks(block: TensorType) -> Scheme:
    mark = GGUF_MARK + block.name.lower()
    parts = (_CODES, (mark, "U8", PartRole.KIND))
    return Scheme(block.elements, 0, block.name, bytes, parts, (mark,), block_bytes=block.nbytes)


STORED: Mapping[str, Scheme] = {**SCHEMES, **{name: _of_blocks(block) for name, block in BLOCK_TYPES.items()}}
"""The schemes of stored tensors: those of `SCHEMES`, and the types of blocks."""
BLOCKS: Mapping[str, str] = {
    name.lower(): name for name in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "Q4_0", "Q3_K", "Q2_K")
}
"""Compression -> the type of its blocks."""
_SMALLER_BLOCKS = dict.fromkeys(("IQ4_XS", "Q3_K", "Q2_K"), "IQ4_NL") | {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}
"""Type of blocks of 256 -> the one of blocks of 32 for rows that are not a multiple of 256; as in llama.cpp."""
ROW_ELEMENTS = 64
"""Rows that are no multiple of it stay uncompressed by blocks: products have no kernel for them."""
PRESETS: Mapping[str, tuple[str, str]] = {"q5_k_m": ("q5_k", "q6_k"), "q4_k_m": ("q4_k", "q6_k")}
"""Mixture of llama.cpp -> the compression of most tensors, and that of the tensors that need more bits."""
COMPRESSIONS: tuple[str | None, ...] = (None, *sorted(SCHEMES, key=lambda name: SCHEMES[name].codes_a_byte))
"""The compressions of a split that are not of blocks, from the largest output to the smallest."""


def check_compression(compression: str | None) -> None:
    """Refuse a compression that does not exist, or whose package is not installed.

    Raises:
        OptionError: it is not None, and in none of `SCHEMES`, `BLOCKS` and `PRESETS`.
        MissingPackageError: bitsandbytes is needed and not installed.
    """
    if compression not in (None, *SCHEMES, *BLOCKS, *PRESETS):  # a list cannot be looked up
        raise OptionError(
            f"compression={compression!r} does not exist; expected 'auto', '4bit', '4bit-double', '8bit', "
            f"{', '.join(map(repr, {**BLOCKS, **PRESETS}))} or None ('none' on the command line).",
            "8bit is half the size of bf16, 4bit a quarter (plus scales), 4bit-double a quarter with smaller scales; "
            "the others are named as in llama.cpp.",
        )
    if compression in SCHEMES and importlib.util.find_spec("bitsandbytes") is None:
        bitsandbytes()  # is not imported where it is installed: that takes a second


def quantizes_as_bitsandbytes(compression: str | None) -> bool:
    """Whether the bytes that a compression writes may depend on the installed bitsandbytes; so may those of "auto"."""
    return compression not in (None, *BLOCKS, *PRESETS)


def check_fitting(compression: str | None, *, fit_scales: bool) -> bool:
    """Check that a compression has 4bit scales to fit; return `fit_scales`.

    Raises:
        OptionError: it has none.
    """
    fits: dict[str | None, bool] = {None: False, **dict.fromkeys([*BLOCKS, *PRESETS], False)}
    fits |= {name: scheme.fits for name, scheme in SCHEMES.items()}
    if fit_scales and not fits.get(compression, True):
        raise OptionError(
            f"fit_scales=True has no effect at compression={compression!r}.",
            "Remove it, or use '4bit' or '4bit-double'.",
        )
    return fit_scales


# The choice of tensors to compress.

_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|shared_expert_gate)(?:\.|$)")
_STATE_SPACE_DECAY = re.compile(r"(?:^|\.)A_log$")
_BIAS = re.compile(r"(?:^|[._])bias$")


def is_compressible(spec: TensorSpec) -> bool:
    """Whether compression touches a tensor.

    Every floating tensor of two or three dimensions and at least 4,096 elements, embeddings and head included, except
    small and sensitive ones: expert routers, convolutions, the biases of all experts in one tensor, and the decay of a
    state-space layer.
    """
    if not _is_worth_it(spec.dtype, spec.shape) or "conv" in spec.name.lower():
        return False
    if _STATE_SPACE_DECAY.search(spec.name) or _BIAS.search(spec.name):
        return False
    return spec.shape[0] > MAX_ROUTER_ROWS or not _ROUTER.search(spec.name)


@functools.lru_cache(maxsize=1024)
def _is_worth_it(dtype: str, shape: tuple[int, ...]) -> bool:
    return DTYPES[dtype].quantizable and 2 <= len(shape) <= 3 and math.prod(shape) >= MIN_ELEMENTS


def scheme_of(spec: TensorSpec, compression: str | None) -> str | None:
    """The scheme of a tensor in a model that is split at `compression`; None if it is not compressed.

    Blocks of GGUF files that compression does not touch are stored as they are, if that is possible.

    Args:
        spec: the tensor.
        compression: None, or of `SCHEMES` or `BLOCKS`.
    """
    if compression is not None and is_compressible(spec):
        if (scheme := SCHEMES.get(compression)) is not None:
            return scheme.smaller if spec.elements < scheme.min_elements else compression
        if spec.shape[-1] % ROW_ELEMENTS == 0:
            return type_for_rows(BLOCKS[compression], spec.shape[-1])
    stored = spec.blocks
    return stored.kind.name if stored is not None and keeps_blocks(spec, stored.kind.name) else None


def type_for_rows(name: str, columns: int) -> str | None:
    """The type of blocks for rows of so many elements: the one that is named, or smaller blocks; None if none fits."""
    names = (name, _SMALLER_BLOCKS.get(name, name))
    return next((one for one in names if columns % BLOCK_TYPES[one].elements == 0), None)


# Stored keys and forms.


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
    return name + NF4_STATE if scheme is not None and _STATE in STORED[scheme].parts else None


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


def row_blocks(spec: TensorSpec) -> TensorSpec | None:
    """The blocks of a tensor of a GGUF file as a tensor of bytes; None if its rows are not made of whole blocks.

    Returns:
        A specification of U8, whose shape has the bytes of a row in place of its elements, with the same blocks in the
        same order.
    """
    stored = spec.blocks
    if stored is None or stored.kind.dtype is not None or stored.change is not ValueChange.NONE or len(spec.shape) < 2:
        return None
    columns, run, block = spec.shape[-1], spec.sizes[-1], stored.kind
    if columns % block.elements or run % block.elements:
        return None
    shape = (*spec.shape[:-1], block.row_bytes(columns))
    view = None if spec.view is None else (*spec.view[:-1], block.row_bytes(run))
    strides = spec.strides
    if strides is not None:
        if strides[-1] != 1 or any(stride % block.elements for stride in strides[:-1]):
            return None
        strides = (*(block.row_bytes(stride) for stride in strides[:-1]), 1)
    return TensorSpec(spec.name, "U8", shape, spec.file, spec.offset, math.prod(shape), strides, view)


def keeps_blocks(spec: TensorSpec, scheme: str | None) -> bool:
    """Whether a tensor that is stored at `scheme` has its blocks unchanged from its file."""
    stored = spec.blocks
    return stored is not None and stored.kind.name == scheme and stored.may_stay and row_blocks(spec) is not None


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


def code_values(scheme: str) -> torch.Tensor:
    """The values of a scheme's codes, without scale: float32 (16,) or (256,), rising, a new tensor; none for blocks."""
    import torch

    values = bytearray(STORED[scheme].values())
    return torch.frombuffer(values, dtype=torch.float32) if values else torch.empty(0)


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


# The JSON of bitsandbytes that is stored with each 4bit weight, and its validation.

LONGEST_STATE = 4096
"""Maximum bytes of a QuantState's JSON; usual are about 90, or 190 at 4bit-double."""
LONGEST_NUMBER = 24
"""Maximum characters of a float that Python writes: `-1.7976931348623157e+308`."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """The scheme, shape and dtype of a quantized tensor, without its weights.

    Attributes:
        scheme: one of `STORED`.
        shape: of the original tensor.
        dtype: the torch dtype name it was quantized from; None at 8bit and for blocks, which do not store it.
        offset: at 4bit-double the mean of all scales, which was subtracted before they were quantized.
    """

    scheme: str
    shape: tuple[int, ...]
    dtype: str | None
    offset: float | None = None

    @property
    def codes(self) -> Quantized:
        """The same with dequantized scales, float32, as kernels get it."""
        codes = STORED[self.scheme].codes
        return self if self.scheme == codes else replace(self, scheme=codes, offset=None)


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
