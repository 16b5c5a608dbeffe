"""Which published matrices are multiplied from their codes, from names, dtypes and shapes alone.

A kernel multiplies what a conversion of `_published_conversions.py` or `_published_exports.py` would dequantize, if its
parts are codes with a scale for each block: FP8, FP4, or integers of 4 or 8 bits. Those of AWQ and GPTQ, which lie by
inputs, are rearranged first, and zeros are brought to their scales. All else is dequantized. Decides without reading
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from rabbitllm.errors import UnknownArchitectureError
from rabbitllm.formats.tensor_spec import dtype_name
from rabbitllm.quant.coded import FP4, FP8, INT4, INT8, UINT8, WITH_ZEROS, CodedForm, CodedMatrix
from rabbitllm.quant.coded import SCALES as SCALE_DTYPES

if TYPE_CHECKING:
    from rabbitllm.engine._weights import Recipe
    from rabbitllm.store.layer_store import StoredTensor

CODES, SCALES, ZEROS, GROUPS, FACTOR, DIVISOR, _UNUSED = "codes", "scales", "zeros", "groups", "factor", "divisor", ""
_ROLES: Mapping[str, str] = {
    "weight": CODES,
    "weight_packed": CODES,
    "weight_scale": SCALES,
    "weight_scale_inv": SCALES,
    "weight_zero_point": ZEROS,
    "_proj": CODES,
    "_proj_scale_inv": SCALES,
    "_proj_blocks": CODES,
    "_proj_scales": SCALES,
    "weight_scale_2": FACTOR,
    "weight_global_scale": DIVISOR,
    "weight_shape": _UNUSED,
    "qweight": CODES,
    "qzeros": ZEROS,
    "scales": SCALES,
    "g_idx": GROUPS,
    "_weight_qdata": CODES,
    "_weight_scale": SCALES,
    "_weight_zero_point": ZEROS,
}
"""Ending of a source's pattern -> what the tensor is, in all formats."""
INTEGER_PARTS = (CODES, ZEROS, SCALES, GROUPS)
"""The parts of integers that lie by inputs, of which groups may be missing."""
_MODELOPT, _COMPRESSED, _FP8, _TORCHAO = "ModelOpt", "ExpertMatrices", "QuickFp8", "TorchAo"
_MATRICES = frozenset({_FP8, "FusedFp8", "QuickMxfp4", _COMPRESSED, _MODELOPT, _TORCHAO})
"""Operations whose parts a kernel may multiply, by `_name`."""
_PAIRS = ("U8", "I8", "F4")
"""Dtypes of codes of FP4, two a byte."""
_ZEROED = {dtype_name(dtype): words for dtype, words in WITH_ZEROS.items()}
"""Dtypes of scales that may have zeros -> those of both."""
_CODES_OF = {FP8: 1, INT8: 1, FP4: 2, UINT8: 4, INT4: 8}
"""Codes of an element of the stored tensor."""
Part = tuple[str, tuple[int, ...]]
"""The dtype and the shape of a stored tensor, of experts of one of them."""


@dataclass(frozen=True)
class CodedRecipe:
    """The parts of a matrix of a Linear.

    Attributes:
        form: of the matrix.
        codes, scales: the names of the stored tensors.
        factor: the name of a number that multiplies all scales, or divides them, and -1 in this case; None without one.
        cast: the dtype that scales are rounded to first; None if they are used as stored.
        rearranged: how integers lie that are rearranged, and the names of their `INTEGER_PARTS`; None for others.
        zeros: the name of zeros that are brought to the scales, which lie as they do; None without them. Codes are
            copied then, so that nothing that was read has to stay. If the form has none, they are all to be 0.
    """

    form: CodedForm
    codes: str
    scales: str
    factor: tuple[str, int] | None = None
    cast: torch.dtype | None = None
    rearranged: tuple[IntegerLayout, tuple[str, ...]] | None = None
    zeros: str | None = None

    @property
    def made_bytes(self) -> int:
        """Bytes of codes and scales that are no views of stored tensors."""
        if self.rearranged is None:
            return self.form.nbytes if self.form.has_zeros else 0
        layout, names = self.rearranged
        ordered = layout.in_any_order and len(names) == len(INTEGER_PARTS)
        return self.form.nbytes + _ORDER_BYTES * self.form.shape[1] * ordered

    def matrix(self, read: Callable[[str], torch.Tensor], target: str) -> CodedMatrix:
        """The matrix of its stored tensors, on the CPU; views of them where possible.

        Raises:
            UnknownArchitectureError: as `order_of` does for a parameter of this name, or a zero is not 0.
        """
        if self.rearranged is not None:
            layout, names = self.rearranged
            sizes = self.form.nbytes - self.form.scale_bytes, self.form.scale_bytes
            codes, words = (torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes)
            parts = [read(name) for name in names]
            order = order_of(layout, parts, target)
            rearrange(layout, parts, codes, words, order)
            return CodedMatrix(self.form, codes, words, order=order)
        scales = read(self.scales)
        if self.cast is not None:
            scales = scales.to(self.cast)
        if self.zeros is not None and not self.form.has_zeros and read(self.zeros).any():
            raise UnknownArchitectureError(
                f"Integers of {target} have zeros that are not 0, with scales in float32.",
                "Load it with exact=True (--exact).",
            )
        if self.zeros is not None and self.form.has_zeros:
            words = torch.empty(self.form.scale_bytes, dtype=torch.uint8, device="cpu")
            bring_together(self.form, scales, read(self.zeros), words)
            return CodedMatrix(self.form, _bytes(read(self.codes)).clone(), words)
        factor = 1.0 if self.factor is None else float(read(self.factor[0]).float() ** self.factor[1])
        return CodedMatrix(self.form, _bytes(read(self.codes)), _bytes(scales), factor)


def linear_recipe(
    recipe: Recipe, tensors: Mapping[str, StoredTensor], shape: tuple[int, ...], dtype: torch.dtype
) -> CodedRecipe | None:
    """The parts of the matrix (N, K) that a conversion makes for a Linear; None if it has to dequantize them."""
    operations: Sequence[Any] = getattr(recipe.converter, "operations", ())
    if len(operations) != 1 or recipe.targets != (recipe.key,):
        return None
    names = _by_role(recipe.sources)
    if names is None or not all(tensors[name].is_one_run for name in names.values()):
        return None
    if (layout := integer_layout(operations[0])) is not None:
        form = integer_form({role: _part(tensors[name]) for role, name in names.items()}, layout, shape[-1])
        if form is None or form.shape != tuple(shape):
            return None
        parts = tuple(names[role] for role in INTEGER_PARTS if role in names)
        return CodedRecipe(form, names[CODES], names[SCALES], rearranged=(layout, parts))
    codes, scales = (_part(tensors[names[role]]) for role in (CODES, SCALES))
    zeros, cast = _part(tensors[names[ZEROS]]) if ZEROS in names else None, cast_of(operations[0], scales[0], dtype)
    used = scales if cast is None else (dtype_name(cast), scales[1])
    form = form_of(operations[0], recipe.key.rpartition(".")[0], codes, used, (shape[0], shape[-1]), zeros)
    if form is None or len(shape) != 2:
        return None
    factors = [(names[role], power) for role, power in ((FACTOR, 1), (DIVISOR, -1)) if role in names]
    if len(factors) != (form.scales == "F8_E4M3") or any(math.prod(tensors[name].shape) != 1 for name, _ in factors):
        return None
    factor = factors[0] if factors else None
    return CodedRecipe(form, names[CODES], names[SCALES], factor, cast, zeros=names.get(ZEROS))


def form_of(
    operation: Any, path: str, codes: Part, scales: Part, shape: tuple[int, int], zeros: Part | None = None
) -> CodedForm | None:
    """The form of a matrix (N, K) from its parts; None if no kernel could multiply it.

    Args:
        operation: the conversion that dequantizes it.
        path: of its module.
        codes, scales: the parts.
        shape: (N, K).
        zeros: of integers, if they have some.
    """
    codes_form, bits = _codes_form(operation, path, codes[0], zeros is not None)
    if _name(operation) not in _MATRICES or codes_form is None or not codes[1]:
        return None
    if codes[1][0] != shape[0] or math.prod(codes[1][1:]) * _CODES_OF[codes_form] != shape[1] or shape[1] % 8:
        return None
    if scales[0] not in SCALE_DTYPES:
        return None
    block = _block(_configured_block(operation, path), scales[1], shape)
    if block is None:
        return None
    form = CodedForm(codes_form, scales[0], block, shape)
    if zeros == ("I8", scales[1]) and scales[0] == "F32" and _is_symmetric(operation):
        return form
    return form if zeros is None else _zeroed_form(form, scales, zeros, bits)


def _is_symmetric(operation: Any) -> bool:
    """Whether integers are torchao's by a type that has no zeros, but writes them."""
    is_torchao = _name(operation) == _TORCHAO
    return is_torchao and "IntxWeight" not in str(operation.hf_quantizer.quantization_config.quant_type)


def _codes_form(operation: Any, path: str, dtype: str, has_zeros: bool) -> tuple[str | None, int]:
    """What codes of a dtype are, None if no kernel could multiply them; and the bits of integers, else 0."""
    weights = _weights_of(operation, path) if _name(operation) == _COMPRESSED else None
    if weights is not None and str(getattr(weights.type, "value", weights.type)) == "int":
        bits = int(weights.num_bits)
        form = INT8 if dtype == "I8" else {4: INT4, 8: UINT8}.get(bits) if dtype == "I32" else None
        return form if has_zeros or weights.symmetric else None, bits
    if dtype == "I8" and _name(operation) == _TORCHAO:
        return INT8, 8
    form = FP8 if dtype == "F8_E4M3" else FP4 if dtype in _PAIRS else None
    return None if has_zeros else form, 0


def _zeroed_form(form: CodedForm, scales: Part, zeros: Part, bits: int) -> CodedForm | None:
    """The same of integers with a zero for each of their scales; None if these do not fit each other."""
    packed = -(-form.shape[0] * bits // 32), form.grid[1]
    if scales[0] not in _ZEROED or form.block[0] != 1 or zeros[1] != {"I8": scales[1], "I32": packed}.get(zeros[0]):
        return None
    return replace(form, scales=_ZEROED[scales[0]]) if zeros[0] == "I8" or form.codes != INT8 else None


def bring_together(form: CodedForm, scales: torch.Tensor, zeros: torch.Tensor, words: torch.Tensor) -> None:
    """Write scales with zeros in a form that has them.

    Args:
        form: of the matrix, or of more rows than these.
        scales, zeros: as stored, but for a dtype of scales that the form has.
        words: the memory of the result, uint8.
    """
    from rabbitllm.quant.dequantize_kernels import with_zeros  # numba comes with it

    rows, bits = len(words) // 4 // form.grid[1], 4 if form.codes == INT4 else 8
    halves, upper = scales.view(torch.int16).view(rows, -1), int(scales.dtype == torch.float16)
    zeros = zeros.view(-1, form.grid[1])
    with_zeros(halves.numpy(), zeros.numpy(), bits, upper, words.view(torch.int16).view(rows, -1, 2).numpy())


@dataclass(frozen=True)
class IntegerLayout:
    """How integers lie in int32, by inputs, until they are rearranged.

    Attributes:
        order: the output of each integer of an int32, from the lowest bits on; None if an int32 has several inputs.
        offset: the number that was subtracted from each stored zero.
        in_any_order: whether the inputs of a group may lie anywhere.
        bits: of an integer, 4 or 8.
    """

    order: tuple[int, ...] | None
    offset: int
    in_any_order: bool = False
    bits: int = 4


def integer_layout(operation: Any) -> IntegerLayout | None:
    """The layout of what a conversion dequantizes; None if it is another one."""
    from rabbitllm.engine._published_conversions import AWQ, AWQ_ORDER

    if _name(operation) != "PackedIntegers":
        return None
    settings = operation.hf_quantizer.quantization_config
    if settings.quant_method == AWQ:
        return IntegerLayout(AWQ_ORDER, 0)
    if settings.bits not in (4, 8):
        return None
    return IntegerLayout(None, 1 if settings.format == "gptq" else 0, bool(settings.desc_act), settings.bits)


def integer_form(parts: Mapping[str, Part], layout: IntegerLayout, inputs: int) -> CodedForm | None:
    """The form of rearranged integers, (N, inputs), from their parts by role; None if these do not fit each other."""
    if parts.keys() - {GROUPS} != {CODES, ZEROS, SCALES} or parts[SCALES][0] not in _ZEROED:
        return None
    if {part[0] for role, part in parts.items() if role != SCALES} != {"I32"}:
        return None
    if len(parts[SCALES][1]) != 2:
        return None
    (groups, outputs), together = parts[SCALES][1], 32 // layout.bits
    words = (inputs // together, outputs) if layout.order is None else (inputs, outputs // together)
    expected = {CODES: words, ZEROS: (groups, outputs // together), SCALES: (groups, outputs), GROUPS: (inputs,)}
    if outputs % 8 or inputs % 8 or any(part[1] != expected[role] for role, part in parts.items()):
        return None
    block = _block(None, (outputs, groups), (outputs, inputs))
    if block is None:
        return None
    codes = INT4 if layout.bits == 4 else UINT8
    return CodedForm(codes, _ZEROED[parts[SCALES][0]], (1, block[1]), (outputs, inputs))


_ORDER_BYTES = torch.int64.itemsize
_ORDERS: WeakValueDictionary[bytes, torch.Tensor] = WeakValueDictionary()


def order_of(layout: IntegerLayout, parts: Sequence[torch.Tensor], target: str) -> torch.Tensor | None:
    """The input of each column of a matrix whose groups of inputs follow each other, int64 (K,); None if they do so as
    stored. Matrices with equal orders share one tensor, so that their inputs are brought into that order once.

    Args:
        layout: of its integers.
        parts: the `INTEGER_PARTS` that there are, of their shapes.
        target: the parameter that it is for.

    Raises:
        UnknownArchitectureError: the groups have another order than the settings say, or not all have one size.
    """
    if len(parts) < len(INTEGER_PARTS):
        return None
    groups, count = parts[-1], len(parts[2])
    in_order = torch.arange(len(groups), dtype=torch.int32, device="cpu") // (len(groups) // count)
    if torch.equal(groups, in_order):
        return None
    order = groups.argsort(stable=True)
    if layout.in_any_order and torch.equal(groups[order], in_order):
        return _ORDERS.setdefault(groups.numpy().tobytes(), order)
    raise UnknownArchitectureError(
        f"Inputs of {target} have groups of another order or size than desc_act and group_size in the settings say.",
        "Load it with exact=True (--exact), or correct its config.json.",
    )


def rearrange(
    layout: IntegerLayout,
    parts: Sequence[torch.Tensor],
    codes: torch.Tensor,
    words: torch.Tensor,
    order: torch.Tensor | None,
    threads: int | None = None,
) -> None:
    """Write a matrix whose integers lie by inputs in the form of `integer_form`.

    Args:
        layout, parts, order: see `order_of`.
        codes, words: the memory of the result, uint8.
        threads: how many may be used at most; None for all.
    """
    from rabbitllm.quant.dequantize_kernels import by_rows  # numba comes with it

    packed, zeros, scales = parts[:3]
    count, outputs = scales.shape
    stored = packed.numpy(), zeros.numpy(), scales.view(torch.int16).numpy(), layout.bits
    halves = words.view(torch.int16).view(outputs, count, 2).numpy()[..., :: 1 if scales.dtype == torch.float16 else -1]
    results = codes.view(torch.int32).view(outputs, -1).numpy(), halves
    by_rows(*stored, layout.order, layout.offset, *results, None if order is None else order.numpy(), threads)


def _by_role(sources: Sequence[tuple[str, str]]) -> dict[str, str] | None:
    """What it is -> the name of each source; None if one is not known, or if codes or scales are missing."""
    names: dict[str, str] = {}
    for pattern, name in sources:
        role, _ = role_of(pattern)
        if role is None or role in names:
            return None
        if role != _UNUSED:
            names[role] = name
    return names if {CODES, SCALES} <= names.keys() else None


def role_of(pattern: str) -> tuple[str | None, str]:
    """What the tensors of a pattern are, None if that is not known, and the projection that they belong to."""
    plain = pattern.removesuffix("$")
    for ending, role in _ROLES.items():
        before = plain.removesuffix(ending)
        if before != plain and (ending.startswith("_") or before.endswith(".") or not before):
            return role, before.removesuffix(".")
    return None, plain


def _part(stored: StoredTensor) -> Part:
    return stored.parts[0].dtype, stored.shape


def cast_of(operation: Any, scales: str, dtype: torch.dtype, *, is_expert: bool = False) -> torch.dtype | None:
    """The dtype of fewer bits, or others, to which a conversion casts scales first, for a parameter of `dtype`."""
    casts = (_MODELOPT,) if is_expert else (_COMPRESSED, _MODELOPT)
    is_other = scales in ("F32", "BF16", "F16") and dtype_name(dtype) not in (scales, "F32")
    return dtype if is_other and _name(operation) in casts else None


def _name(operation: Any) -> str:
    """The name of a conversion; one by a quantizer of ours has the quantizer's name."""
    name = type(operation).__name__
    return type(operation.hf_quantizer).__name__ if name == "Dequantize" else name


def _configured_block(operation: Any, path: str) -> tuple[int, int] | None:
    """Rows and columns of a block by the settings; None if all blocks are equal."""
    configured = None
    if _name(operation) == _FP8:
        configured = getattr(operation.hf_quantizer.quantization_config, "weight_block_size", None)
    elif _name(operation) == _COMPRESSED:
        configured = getattr(_weights_of(operation, path), "block_structure", None)
    return (int(configured[0]), int(configured[1])) if configured is not None else None


def _weights_of(operation: Any, path: str) -> Any:
    from rabbitllm.engine._published_conversions import scheme_of

    return scheme_of(operation.hf_quantizer.compressor.quantization_config, path).weights


def _block(
    configured: tuple[int, int] | None, scales: tuple[int, ...], shape: tuple[int, int]
) -> tuple[int, int] | None:
    """Rows and columns of a block, 0 for all, from the shape of the scales; None if they are of no grid."""
    if math.prod(scales) == 1:
        return 0, 0
    if len(scales) == 1:
        return (1, 0) if scales[0] == shape[0] else None
    if len(scales) == 4 and scales[1] == scales[3] == 1:
        scales = scales[0], scales[2]
    if len(scales) != 2:
        return None
    if configured is not None and all(-(-of // by) == n for of, by, n in zip(shape, configured, scales, strict=True)):
        return configured
    if any(not n or of % n for of, n in zip(shape, scales, strict=True)):
        return None
    rows, columns = (0 if n == 1 else of // n for of, n in zip(shape, scales, strict=True))
    return rows if shape[0] != 1 else 1, columns


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
