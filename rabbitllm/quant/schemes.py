"""The schemes of quantization: one registry, and the choice of tensors to compress.

An entry of `SCHEMES` says how a scheme is stored, by keys of the pattern of RabbitLLM 1.1 and AirLLM; see
docs/reference/files.md. Blocks of ggml (`gguf_blocks.py`) came from a GGUF file or are made by `block_encoders.py`.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import itertools
import logging
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rabbitllm.errors import MissingPackageError, OptionError
from rabbitllm.formats.gguf_types import BLOCK_TYPES, TensorType
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec

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
_NF4_PARTS = (_CODES, (".4bit.absmax", "F32", PartRole.SCALES), _NF4_TABLE, _STATE)
_NF4_SCHEME = Scheme(NF4_BLOCK, 2, "4bit", nf4_map, _NF4_PARTS, (NF4_STATE,), fits=True)
SCHEMES: Mapping[str, Scheme] = {
    "4bit": _NF4_SCHEME,
    "8bit": Scheme(
        block=INT8_BLOCK,
        codes_a_byte=1,
        codes="8bit",
        values=int8_code,
        parts=(_CODES, (".8bit.absmax", "F32", PartRole.SCALES), (".8bit.code", "F32", PartRole.TABLE)),
        marks=(".8bit.absmax",),
    ),
    DOUBLE: replace(
        _NF4_SCHEME,
        parts=(
            _CODES,
            (".4bit.absmax", "U8", PartRole.SCALES),
            _NF4_TABLE,
            (".4bit.nested_absmax", "F32", PartRole.NESTED_SCALES),
            (".4bit.nested_quant_map", "F32", PartRole.NESTED_TABLE),
            _STATE,
        ),
        marks=(".4bit.nested_absmax", NF4_STATE),
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

    @property
    def expanded_bytes(self) -> int:
        """Bytes of its dequantized scales, float32; 0 if its scales are not quantized."""
        return 0 if self.offset is None else math.ceil(math.prod(self.shape) / NF4_BLOCK) * SCALE_BYTES


def code_values(scheme: str) -> torch.Tensor:
    """The values of a scheme's codes, without scale: float32 (16,) or (256,), rising, a new tensor; none for blocks."""
    import torch

    values = memoryview(STORED[scheme].values()).cast("f")
    return torch.tensor(values.tolist(), dtype=torch.float32, device="cpu")


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
    without = {None, *BLOCKS, *PRESETS, *(name for name, scheme in SCHEMES.items() if not scheme.fits)}
    if fit_scales and compression in without:
        raise OptionError(
            f"fit_scales=True has no effect at compression={compression!r}.",
            "Remove it, or use '4bit' or '4bit-double'.",
        )
    return fit_scales


# The choice of tensors to compress.

_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|shared_expert_gate)(?:\.|$)")
_DECAY_OR_BIAS = re.compile(r"(?:^|\.)A_log$|(?:^|[._])bias$")


def is_compressible(spec: TensorSpec) -> bool:
    """Whether compression touches a tensor.

    Every floating tensor of two or three dimensions and at least 4,096 elements, embeddings and head included, except
    small and sensitive ones: expert routers, convolutions, the biases of all experts in one tensor, and the decay of a
    state-space layer.
    """
    if not DTYPES[spec.dtype].quantizable or not 2 <= len(spec.shape) <= 3 or spec.elements < MIN_ELEMENTS:
        return False
    if "conv" in spec.name.lower() or _DECAY_OR_BIAS.search(spec.name):
        return False
    return spec.shape[0] > MAX_ROUTER_ROWS or not _ROUTER.search(spec.name)


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
    return stored.kind.name if stored is not None and spec.keeps_blocks(stored.kind.name) else None


def type_for_rows(name: str, columns: int) -> str | None:
    """The type of blocks for rows of so many elements: the one that is named, or smaller blocks; None if none fits."""
    names = (name, _SMALLER_BLOCKS.get(name, name))
    return next((smaller for smaller in names if columns % BLOCK_TYPES[smaller].elements == 0), None)
