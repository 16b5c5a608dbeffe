"""The JSON that bitsandbytes stores in a tensor with each 4bit weight, and its validation.

bitsandbytes' `QuantState.as_dict(packed=True)` (0.50) writes it, and its `QuantState.from_dict` can read the JSON that
is written here. If scales are quantized themselves, it has a number that depends on the weights, and whose text varies
in length. Blanks follow it, which JSON allows, so that the layout of a layer file does not depend on the number.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec
from rabbitllm.quant.compression.keys import part_names
from rabbitllm.quant.compression.schemes import BLOCKS, CODES, CODES_A_BYTE, DOUBLE, NESTED_BLOCK, NF4_BLOCK

LONGEST_STATE = 4096
"""Maximum bytes of a QuantState's JSON; usual are about 90, or 190 at 4bit-double."""
LONGEST_NUMBER = 24
"""Maximum characters of a float that Python writes: `-1.7976931348623157e+308`."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """The scheme, shape and dtype of a quantized tensor, without its weights.

    Attributes:
        scheme: "4bit", "4bit-double" or "8bit".
        shape: of the original tensor.
        dtype: the torch dtype name it was quantized from; None at 8bit, which does not store it.
        offset: at 4bit-double the mean of all scales, which was subtracted before they were quantized.
    """

    scheme: str
    shape: tuple[int, ...]
    dtype: str | None
    offset: float | None = None

    @property
    def codes(self) -> Quantized:
        """The same with dequantized scales, float32, as kernels get it."""
        return self if self.scheme == CODES[self.scheme] else replace(self, scheme=CODES[self.scheme], offset=None)


@functools.lru_cache(maxsize=1024)
def nf4_state(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The JSON of a weight of this safetensors dtype and shape at 4bit, byte for byte as bitsandbytes writes it."""
    return json.dumps(_plain(dtype, shape)).encode()


def nested_state(dtype: str, shape: tuple[int, ...], offset: float) -> bytes:
    """The same at 4bit-double, with the mean of the scales, padded with blanks to `nested_state_bytes`."""
    return json.dumps(_nested(dtype, shape, offset)).encode().ljust(nested_state_bytes(dtype, shape))


@functools.lru_cache(maxsize=1024)
def nested_state_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The length of `nested_state`, which does not depend on the mean."""
    return len(json.dumps(_nested(dtype, shape, 0.0))) - len("0.0") + LONGEST_NUMBER


def _plain(dtype: str, shape: tuple[int, ...]) -> dict[str, object]:
    return {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK,
        "dtype": DTYPES[dtype].torch_name,
        "shape": list(shape),
    }


def _nested(dtype: str, shape: tuple[int, ...], offset: float) -> dict[str, object]:
    more = {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    return _plain(dtype, shape) | more


def read_state(name: str, scheme: str, parts: Mapping[str, TensorSpec], state: bytes) -> Quantized:
    """Check the sizes of a quantized tensor's parts against each other.

    The kernels do not check them: with scales for too few blocks they would read past their end.

    Args:
        name: the tensor.
        scheme: one of `BLOCKS`.
        parts: the layer file's stored keys, by name.
        state: the bytes of its packed QuantState at 4bit; ignored at 8bit.

    Raises:
        IncompleteSplitError: a part is missing, or has a size that does not fit the payload.
    """
    for part in part_names(name, scheme):
        if part not in parts:
            raise IncompleteSplitError(f"tensor {name!r} is stored at {scheme} without its part {part!r}.")
    found = Quantized(scheme, parts[name].shape, None) if scheme == "8bit" else _parse_state(name, scheme, state)
    for part, (dtype, elements) in zip(part_names(name, scheme), _part_sizes(scheme, found.shape), strict=False):
        spec = parts[part]
        if spec.dtype != dtype or spec.elements != elements:
            raise IncompleteSplitError(
                f"the part {part!r} has {spec.elements:,} elements of {spec.dtype}; a {scheme} tensor of shape "
                f"{found.shape} needs {elements:,} of {dtype}."
            )
    return found


@functools.lru_cache(maxsize=1024)
def _part_sizes(scheme: str, shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Dtype and number of elements of the parts that kernels use, for a tensor of this shape."""
    n = math.prod(shape)
    payload, blocks = -(-n // CODES_A_BYTE[scheme]), math.ceil(n / BLOCKS[scheme])
    if scheme == DOUBLE:
        nested = math.ceil(blocks / NESTED_BLOCK)
        return ("U8", payload), ("U8", blocks), ("F32", 16), ("F32", nested), ("F32", 256)
    return ("U8", payload), ("F32", blocks), ("F32", 16 if scheme == "4bit" else 256)


def _parse_state(name: str, scheme: str, raw: bytes) -> Quantized:
    found = (_nested_form(raw) if scheme == DOUBLE else _nf4_form(raw)) if len(raw) <= LONGEST_STATE else None
    if found is None:
        nested = f" with scales quantized in blocks of {NESTED_BLOCK}" if scheme == DOUBLE else ""
        raise IncompleteSplitError(
            f"the quantization state of {name!r} is {raw[:120]!r}; expected the JSON of "
            f"{'a nested' if nested else 'an unnested'} nf4 state of blocks of {NF4_BLOCK}{nested}."
        )
    return found


@functools.lru_cache(maxsize=1024)
def _nf4_form(raw: bytes) -> Quantized | None:
    """Parse the JSON of a QuantState; None if it is not an unnested nf4 state. Cached, since experts share it."""
    try:
        state = json.loads(raw)
        if any(key.startswith("nested") for key in state):
            return None
        return _form(state, "4bit", None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _nested_form(raw: bytes) -> Quantized | None:
    try:
        state = json.loads(raw)
        offset = state["nested_offset"]
        if (state["nested_blocksize"], state["nested_dtype"]) != (NESTED_BLOCK, "float32") or type(offset) is not float:
            return None
        return _form(state, DOUBLE, offset)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _form(state: dict[str, Any], scheme: str, offset: float | None) -> Quantized | None:
    shape = tuple(state["shape"])
    sound = (
        state["quant_type"] == "nf4"
        and state["blocksize"] == NF4_BLOCK
        and state["dtype"] in ("bfloat16", "float16", "float32")
        and all(type(size) is int and size >= 0 for size in shape)
    )
    return Quantized(scheme, shape, state["dtype"], offset) if sound else None
