"""What a tensor becomes under compression, how it gets there block by block, and the way back.

The only module that quantises with bitsandbytes. The stored keys are RabbitLLM 1.1's (and AirLLM's):

- 4bit: `<name>` uint8 ((n+1)//2, 1), `<name>.4bit.absmax` float32 (blocks of 64), `<name>.4bit.quant_map`
  float32 (16), `<name>.4bit.quant_state.bitsandbytes__nf4` (the JSON bytes of bitsandbytes' packed QuantState);
- 8bit: `<name>` uint8 in the tensor's own shape, `<name>.8bit.absmax` float32 (blocks of 2048), `<name>.8bit.code`
  float32 (256).

Blocks are independent, so a tensor of any size goes through in chunks of whole blocks. Knows no files.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rabbitllm.errors import IncompleteSplitError, MissingPackageError, OptionError
from rabbitllm.formats.safetensors_file import Placed
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, byte_size, torch_dtype

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

NF4_BLOCK = 64
"""Elements that share a scale at 4bit."""
INT8_BLOCK = 2048
"""Elements that share a scale at 8bit."""
BLOCKS: Mapping[str, int] = {"4bit": NF4_BLOCK, "8bit": INT8_BLOCK}
COMPRESSIONS: tuple[str | None, ...] = (None, "8bit", "4bit")
"""At which a model can be split, from the largest output to the smallest."""
SCALE_BYTES = 4
"""A scale is a float32."""
MIN_ELEMENTS = 4096
"""Smaller tensors stay as they are: the keys would cost more than is saved."""
MAX_ROUTER_ROWS = 1024
"""A matrix named `gate` with more rows is no router: no model has that many experts."""

LONGEST_STATE = 4096
"""Bytes of a QuantState's JSON; they have about 90."""
INT8_SCALES = ".8bit.absmax"
NF4_STATE = ".4bit.quant_state.bitsandbytes__nf4"
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|shared_expert_gate)(?:\.|$)")
_STATE_SPACE_DECAY = re.compile(r"(?:^|\.)A_log$")
_BIAS = re.compile(r"(?:^|[._])bias$")


@dataclass(frozen=True, slots=True)
class StoredForm:
    """One checkpoint tensor as a layer file holds it.

    Attributes:
        source: the tensor in its shard.
        scheme: None, "4bit" or "8bit".
        parts: what is stored; the payload, under the tensor's own name, comes first, the scales second. A piece has no
            more than these.
    """

    source: TensorSpec
    scheme: str | None
    parts: tuple[Placed, ...]

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum([byte_size(part.dtype, part.shape) for part in self.parts])


def check_compression(compression: str | None) -> None:
    """Refuse a compression that does not exist, or whose package is not installed.

    Raises:
        OptionError: not None, "4bit" or "8bit".
        MissingPackageError: bitsandbytes is not installed.
    """
    if compression is not None and compression not in BLOCKS:
        raise OptionError(
            f"compression={compression!r} does not exist; expected '4bit', '8bit' or None.",
            "4bit is a quarter of the size of bf16 plus scales, 8bit half.",
        )
    if compression is not None:
        _bitsandbytes()


@functools.cache
def _bitsandbytes() -> Any:
    # on a CPU it asks for a package of faster kernels at import, whether or not they are wanted
    backend = logging.getLogger("bitsandbytes.backends.cpu.ops")
    backend.addFilter(lambda record: "kernels-community" not in record.getMessage())
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise MissingPackageError(
            f"compression needs the package bitsandbytes, which cannot be imported: {error}.",
            "Run `pip install bitsandbytes`, or leave compression out.",
        ) from error
    return bitsandbytes.functional


def is_compressible(spec: TensorSpec) -> bool:
    """Whether compression touches a tensor.

    Every floating tensor of two or more dimensions and at least 4,096 elements, embeddings and head included,
    except what is small and sensitive: expert routers, convolutions, the biases of all experts in one tensor, and the
    decay of a state-space layer.
    """
    if not _is_worth_it(spec.dtype, spec.shape) or "conv" in spec.name.lower():
        return False
    if _STATE_SPACE_DECAY.search(spec.name) or _BIAS.search(spec.name):
        return False
    return spec.shape[0] > MAX_ROUTER_ROWS or not _ROUTER.search(spec.name)


@functools.lru_cache(maxsize=1024)
def _is_worth_it(dtype: str, shape: tuple[int, ...]) -> bool:
    return DTYPES[dtype].quantisable and 2 <= len(shape) <= 3 and math.prod(shape) >= MIN_ELEMENTS


def stored_form(spec: TensorSpec, compression: str | None) -> StoredForm:
    """How a layer file holds a tensor under `compression`."""
    return form_in(spec, compression if is_compressible(spec) else None)


def form_in(spec: TensorSpec, scheme: str | None) -> StoredForm:
    """A tensor as it is (None), or at "4bit" or "8bit", whether or not compression would touch it."""
    if scheme is None:
        return StoredForm(spec, None, (Placed(spec.name, spec.dtype, spec.shape),))
    stored = zip(part_names(spec.name, scheme), *_part_shapes(scheme, spec.dtype, spec.shape), strict=True)
    return StoredForm(spec, scheme, tuple([Placed(*part) for part in stored]))


@functools.lru_cache(maxsize=1024)
def _part_shapes(
    scheme: str, dtype: str, shape: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Dtypes and shapes of the stored parts of such a tensor; experts have the same ones in their ten thousands."""
    n = math.prod(shape)
    if scheme == "4bit":
        shapes = ((n + 1) // 2, 1), (math.ceil(n / NF4_BLOCK),), (16,), (len(_nf4_state(dtype, shape)),)
        return ("U8", "F32", "F32", "U8"), shapes
    return ("U8", "F32", "F32"), (shape, (math.ceil(n / INT8_BLOCK),), (256,))


def constants(form: StoredForm) -> Mapping[str, bytes]:
    """The bytes of the parts that do not depend on the weights: stored key -> content; a piece has none."""
    if form.source.piece is not None:
        return {}
    if form.scheme == "4bit":
        return {form.parts[2].name: _nf4_map(), form.parts[3].name: _nf4_state(form.source.dtype, form.source.shape)}
    return {form.parts[2].name: _int8_code()} if form.scheme == "8bit" else {}


def code_values(scheme: str) -> torch.Tensor:
    """What the codes of "4bit" or "8bit" mean, before their scale: float32 (16,) or (256,), rising; a new tensor."""
    import torch

    return torch.frombuffer(bytearray(_nf4_map() if scheme == "4bit" else _int8_code()), dtype=torch.float32)


@functools.lru_cache(maxsize=1024)
def _nf4_state(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The JSON that bitsandbytes' QuantState packs into a tensor, byte for byte as it writes it."""
    state = {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK,
        "dtype": DTYPES[dtype].torch_name,
        "shape": list(shape),
    }
    return json.dumps(state).encode()


@functools.cache
def _nf4_map() -> bytes:
    return bytes(_bitsandbytes().get_4bit_type("nf4", device="cpu").numpy())


@functools.cache
def _int8_code() -> bytes:
    return bytes(_bitsandbytes().create_dynamic_map().numpy())


def quantise_blocks(scheme: str, data: memoryview, dtype: str, device: str) -> tuple[memoryview, memoryview]:
    """Quantise a run of blocks.

    Args:
        scheme: "4bit" or "8bit".
        data: the elements' bytes; a whole number of blocks, unless it is the tensor's end.
        dtype: F32, F16 or BF16.
        device: where to do it, "cpu" or "cuda:N".

    Returns:
        The payload (uint8: two elements a byte at 4bit, one at 8bit) and the scales (float32, one a block), as bytes.
    """
    if device == "cpu" and _compiled_kernels_agree(scheme):
        return _quantise_compiled(scheme, data, dtype)
    return _quantise_with_bitsandbytes(scheme, data, dtype, device)


def _quantise_with_bitsandbytes(
    scheme: str, data: memoryview, dtype: str, device: str
) -> tuple[memoryview, memoryview]:
    import torch

    functional = _bitsandbytes()
    values = torch.frombuffer(data, dtype=torch_dtype(dtype)).to(device)
    if scheme == "4bit":
        codes, state = functional.quantize_4bit(values, blocksize=NF4_BLOCK, quant_type="nf4")
    else:
        codes, state = functional.quantize_blockwise(values, blocksize=INT8_BLOCK)
    return _bytes_of(codes), _bytes_of(state.absmax)


def _quantise_compiled(scheme: str, data: memoryview, dtype: str) -> tuple[memoryview, memoryview]:
    import numpy as np

    from rabbitllm.layers import cpu_kernels

    values: cpu_kernels.Values = np.frombuffer(data, np.float32) if dtype == "F32" else np.frombuffer(data, np.uint16)
    quantise = cpu_kernels.quantise_nf4 if scheme == "4bit" else cpu_kernels.quantise_int8
    levels = np.frombuffer(_nf4_map() if scheme == "4bit" else _int8_code(), np.float32)
    codes, scales = quantise(values, cpu_kernels.KINDS[dtype], levels)
    return codes.data.cast("B"), scales.data.cast("B")


@functools.cache
def _compiled_kernels_agree(scheme: str) -> bool:
    """Whether our compiled kernels are there and give, on a sample, what the installed bitsandbytes gives.

    Another version of it, or another processor (its ARM path rounds otherwise), may not follow the same rules.
    """
    import torch

    try:
        import numba  # noqa: F401
    except ImportError:
        logger.info("numba is not installed; bitsandbytes quantises, at a fraction of the speed.")
        return False
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(8 * INT8_BLOCK + 33, generator=generator) * 0.02
    sample[:NF4_BLOCK] = 0
    for dtype in ("BF16", "F16", "F32"):
        data = _bytes_of(sample.to(torch_dtype(dtype)).view(torch.uint8))
        if _quantise_compiled(scheme, data, dtype) != _quantise_with_bitsandbytes(scheme, data, dtype, "cpu"):
            logger.warning("This bitsandbytes quantises to %s otherwise than our kernels; it is used instead.", scheme)
            return False
    return True


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().contiguous().view(-1).numpy().data.cast("B")


def schemes(keys: Iterable[str]) -> dict[str, str | None]:
    """Which tensors a layer file with these stored keys holds, and how: tensor name -> None, "4bit" or "8bit"."""
    found: dict[str, str | None] = dict.fromkeys(keys)
    for scheme, mark in (("4bit", NF4_STATE), ("8bit", INT8_SCALES)):
        for key in [key for key in found if key.endswith(mark)]:
            name = key.removesuffix(mark)
            if name in found:
                found[name] = scheme
    for name, how in tuple(found.items()):
        for part in part_names(name, how)[1:]:
            found.pop(part, None)
    return found


def part_names(name: str, scheme: str | None) -> tuple[str, ...]:
    """The stored keys of a tensor, payload first."""
    if scheme == "4bit":
        return (name, f"{name}.4bit.absmax", f"{name}.4bit.quant_map", name + NF4_STATE)
    if scheme == "8bit":
        return (name, name + INT8_SCALES, f"{name}.8bit.code")
    return (name,)


@dataclass(frozen=True, slots=True)
class Quantised:
    """What is known of a stored, quantised tensor without its weights.

    Attributes:
        scheme: "4bit" or "8bit".
        shape: of the tensor it stands for.
        dtype: the torch dtype name it was quantised from; None at 8bit, which does not store it.
    """

    scheme: str
    shape: tuple[int, ...]
    dtype: str | None


def read_state(name: str, scheme: str, parts: Mapping[str, TensorSpec], state: bytes) -> Quantised:
    """Check the sizes of a quantised tensor's parts against each other.

    The kernels trust them: scales for fewer blocks than there are would be read past their end.

    Args:
        name: the tensor.
        scheme: how it is stored.
        parts: the layer file's stored keys, by name.
        state: the bytes of its packed QuantState at 4bit; ignored at 8bit.

    Raises:
        IncompleteSplitError: a part is missing, or has a size that does not fit the payload.
    """
    for part in part_names(name, scheme):
        if part not in parts:
            raise IncompleteSplitError(f"tensor {name!r} is stored at {scheme} without its part {part!r}.")
    found = Quantised(scheme, parts[name].shape, None) if scheme == "8bit" else _parse_nf4_state(name, state)
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
    """Dtype and elements of the parts that kernels are given, for a tensor of this shape."""
    n = math.prod(shape)
    payload, table = ((n + 1) // 2, 16) if scheme == "4bit" else (n, 256)
    return ("U8", payload), ("F32", math.ceil(n / BLOCKS[scheme])), ("F32", table)


def _parse_nf4_state(name: str, raw: bytes) -> Quantised:
    found = _nf4_form(raw) if len(raw) <= LONGEST_STATE else None
    if found is None:
        raise IncompleteSplitError(
            f"the quantisation state of {name!r} is {raw[:120]!r}; expected the JSON of an unnested nf4 state of "
            f"blocks of {NF4_BLOCK}."
        )
    return found


@functools.lru_cache(maxsize=1024)
def _nf4_form(raw: bytes) -> Quantised | None:
    """What the JSON of a QuantState says; None where it is none of ours. Experts have the same in their thousands."""
    try:
        state = json.loads(raw)
        shape = tuple(state["shape"])
        sound = (
            state["quant_type"] == "nf4"
            and state["blocksize"] == NF4_BLOCK
            and state["dtype"] in ("bfloat16", "float16", "float32")
            and all(type(size) is int and size >= 0 for size in shape)
            and not any(key.startswith("nested") for key in state)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound = False
    return Quantised("4bit", shape, state["dtype"]) if sound else None


def dequantise(
    form: Quantised, payload: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The tensor that quantised parts stand for, on their device.

    Args:
        form: as `read_state` found it.
        payload: uint8 codes.
        absmax: float32, one a block.
        table: float32, what each code means.
        dtype: of the result. At 4bit bitsandbytes dequantises to the dtype stored with the tensor, and the result is
            cast; at 8bit, where none is stored, it dequantises to `dtype` directly.

    Returns:
        A new tensor of shape `form.shape`.
    """
    functional = _bitsandbytes()
    if form.scheme == "4bit":
        whole = replace(form, shape=_in_whole_blocks(form.shape))
        result: torch.Tensor = functional.dequantize_4bit(payload, _nf4_quant_state(whole, absmax, table))
    else:
        state = functional.QuantState(absmax=absmax, code=table, blocksize=INT8_BLOCK, dtype=dtype)
        result = functional.dequantize_blockwise(payload, state)
    return result.to(dtype).view(form.shape)


def _in_whole_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of as many elements whose rows are whole blocks, where that can be; else one row.

    bitsandbytes' kernel for the CPU (0.50) begins a block with each row, whatever was quantised: in rows of 80 elements
    all but the first come out with the scales of others.
    """
    if shape and shape[-1] % NF4_BLOCK == 0:
        return shape
    elements = math.prod(shape)
    return (elements // NF4_BLOCK, NF4_BLOCK) if elements % NF4_BLOCK == 0 else (elements,)


def multiply_4bit(
    form: Quantised, payload: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """`x @ W.T` by bitsandbytes from the codes, where it has a kernel for the device; else it dequantises.

    Its `matmul_4bit` is called rather than `gemv_4bit`, which on some CPUs takes the codes in another order.

    Args:
        form: (N, K) at 4bit, K a multiple of 64.
        payload, absmax, table: as for `dequantise`.
        x: (1, K), contiguous, of a floating dtype.

    Returns:
        (1, N), of x's dtype; rounded otherwise than a product with the dequantised matrix.
    """
    import bitsandbytes

    state = _nf4_quant_state(form, absmax, table)
    product: torch.Tensor = bitsandbytes.matmul_4bit(x, payload.view(-1, 1).t(), quant_state=state)
    return product


def _nf4_quant_state(form: Quantised, absmax: torch.Tensor, table: torch.Tensor) -> Any:
    import torch

    assert form.dtype is not None
    return _bitsandbytes().QuantState(
        absmax=absmax,
        shape=torch.Size(form.shape),
        dtype=getattr(torch, form.dtype),
        blocksize=NF4_BLOCK,
        code=table,
        quant_type="nf4",
    )
