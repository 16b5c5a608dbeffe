"""The compression schemes, and the choice of tensors to compress.

Pure: from names, dtypes and shapes alone.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping

from rabbitllm.errors import OptionError
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec
from rabbitllm.quant.compression.library import bitsandbytes

NF4_BLOCK = 64
"""Elements that share a scale at 4bit."""
INT8_BLOCK = 2048
"""Elements that share a scale at 8bit."""
NESTED_BLOCK = 256
"""Scales that share a scale of their own at 4bit-double."""
DOUBLE = "4bit-double"
"""4bit with scales that are quantized themselves, as bitsandbytes' `compress_statistics` does."""
BLOCKS: Mapping[str, int] = {"4bit": NF4_BLOCK, "8bit": INT8_BLOCK, DOUBLE: NF4_BLOCK}
CODES_A_BYTE: Mapping[str, int] = {"4bit": 2, "8bit": 1, DOUBLE: 2}
CODES: Mapping[str, str] = {"4bit": "4bit", "8bit": "8bit", DOUBLE: "4bit"}
"""Scheme -> the scheme for kernels: with dequantized scales, double is 4bit."""
COMPRESSIONS: tuple[str | None, ...] = (None, "8bit", "4bit", DOUBLE)
"""The compressions of a split, from the largest output to the smallest."""
SCALE_BYTES = 4
"""A scale is a float32, unless it is quantized itself."""
MIN_ELEMENTS = 4096
"""Smaller tensors are not compressed: the keys would take more bytes than are saved."""
MIN_DOUBLE_ELEMENTS = 1 << 15
"""Smaller tensors are at 4bit under 4bit-double: the 1,024 bytes of the scales' code table are more than is saved."""
MAX_ROUTER_ROWS = 1024
"""A matrix named `gate` with more rows is not a router: no model has so many experts."""

_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|shared_expert_gate)(?:\.|$)")
_STATE_SPACE_DECAY = re.compile(r"(?:^|\.)A_log$")
_BIAS = re.compile(r"(?:^|[._])bias$")


def check_compression(compression: str | None) -> None:
    """Refuse a compression that does not exist, or whose package is not installed.

    Raises:
        OptionError: it is not None, "4bit", "4bit-double" or "8bit".
        MissingPackageError: bitsandbytes is not installed.
    """
    if compression is not None and compression not in BLOCKS:
        raise OptionError(
            f"compression={compression!r} does not exist; expected 'auto', '4bit', '4bit-double', '8bit' or None "
            "('none' on the command line).",
            "4bit is a quarter of the size of bf16 plus scales, 4bit-double the same with smaller scales, 8bit half.",
        )
    if compression is not None:
        bitsandbytes()


def check_fitting(compression: str | None, *, fit_scales: bool) -> bool:
    """Check that a compression has 4bit scales to fit; return `fit_scales`.

    Raises:
        OptionError: it has none.
    """
    if fit_scales and compression in (None, "8bit"):
        raise OptionError(
            f"fit_scales=True has nothing to fit at compression={compression!r}.",
            "It is for '4bit' and '4bit-double'; leave it out.",
        )
    return fit_scales


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
    """The scheme of a tensor in a model that is split at `compression`; None if it is not compressed."""
    if compression is None or not is_compressible(spec):
        return None
    if compression == DOUBLE and spec.elements < MIN_DOUBLE_ELEMENTS:
        return "4bit"
    return compression
