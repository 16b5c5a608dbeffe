"""Conversions of weights that are published quantized, from stored parts to parameters, once for each pass.

AWQ and GPTQ: matrices of small integers in int32, with scales and zeros for groups of inputs. transformers runs such
checkpoints with a package of kernels, gptqmodel; here each matrix is dequantized when it is used, on any device. The
layouts are those of AutoAWQ's "gemm" and of AutoGPTQ ("gptq", and "gptq_v2", which differs in how zeros are stored),
for a Linear with K inputs and N outputs and 32 / bits integers in an int32:

- AWQ: `qweight` (K, N / 8), `qzeros` (groups, N / 8), in each int32 the outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest
  bits on; `scales` (groups, N);
- GPTQ: `qweight` (K bits / 32, N), `qzeros` (groups, N bits / 32), each less 1 in "gptq"; `scales` (groups, N);
  `g_idx` (K,), the group of each input.

The weight is (integer - zero) * scale, (K, N), and is used transposed. In float32 that product is exact, so it is
rounded once.

FP8 and MXFP4: transformers' own operations, by compiled kernels if the codes are on the CPU. The result is the same bit
for bit, in a fraction of the time, and without float32 or index tensors as large as the matrix.

Where torch dequantizes, some rows are made at a time: float32 and index tensors of a whole matrix of a large model are
gigabytes of a GPU. Tables are kept on the device: a copy to a GPU makes the host wait.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import ConversionOps, WeightConverter

from rabbitllm.base.transformers_version import check_call, checked_parts
from rabbitllm.engine.transformers_api import HfQuantizer
from rabbitllm.errors import UnknownArchitectureError
from rabbitllm.quant import dequantize_kernels as kernels
from rabbitllm.quant.coded import FP4_VALUES
from rabbitllm.quant.dequantize_kernels import integers

with checked_parts():
    from transformers.integrations import mxfp4
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import Mxfp4Dequantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    check_call(mxfp4.convert_moe_packed_tensors, "codes", "scales", dtype="")
    check_call(Fp8Dequantize._dequantize_one, "self", "codes", "scales", "dtype")
    check_call(Mxfp4Dequantize.convert, "self", "parts", model="", full_layer_name="")

AWQ, GPTQ = "awq", "gptq"
CPU = torch.device("cpu")
"""The CPU without an index; a device in tests has one."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each 4 bits of an int32, from the lowest on."""
_FORMATS = {AWQ: ("gemm",), GPTQ: ("gptq", "gptq_v2")}
_WIDTHS = {AWQ: (4,), GPTQ: (2, 4, 8)}  # 3 bits do not divide 32: integers would cross int32 boundaries
_SCALED_ACTIVATIONS = ("starcoder2", "falcon", "mpt", "gptj", "gpt_neox", "gpt_bigcode", "bloom")
"""Model types for which AWQ stores scales of activations too."""


def awq_weight(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix (N, K) of AWQ's parts."""
    if len(qweight) % len(scales):
        raise ValueError(f"{len(qweight)} inputs in {len(scales)} groups")
    group = torch.arange(len(qweight), device=qweight.device) // (len(qweight) // len(scales))
    return _weight(qweight, 4, _awq_integers(qzeros), scales, group, _on(CPU, AWQ_ORDER, torch.int64), dtype)


def gptq_weight(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    bits: int,
    offset: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The matrix (N, K) of GPTQ's parts.

    Args:
        qweight, qzeros, scales: the parts.
        g_idx: the group of each input; None if they are in order.
        bits: of an integer.
        offset: the number that was subtracted from each stored zero.
        dtype: of the result.
    """
    zeros = _integers(qzeros, bits, 2).flatten(1) + offset  # (groups, N)
    if g_idx is None:
        inputs = qweight.shape[0] * 32 // bits
        g_idx = torch.arange(inputs, device=qweight.device) // -(-inputs // scales.shape[0])
    return _weight(qweight, bits, zeros, scales, g_idx.to(torch.int64), None, dtype)


def _weight(
    packed: torch.Tensor,
    bits: int,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    group: torch.Tensor,
    order: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The matrix (N, K), on a CPU by a compiled kernel; see `dequantize_kernels.integers`.

    Raises:
        ValueError: the sizes of the parts do not match, or a group does not exist.
    """
    inputs, outputs = len(group), scales.shape[1]
    shape = (inputs, outputs * bits // 32) if order is not None else (inputs * bits // 32, outputs)
    fit, on_cpu = tuple(packed.shape) == shape and zeros.shape == scales.shape, packed.device == CPU
    if not fit or (on_cpu and not 0 <= int(group.min()) <= int(group.max()) < len(scales)):
        raise ValueError(f"parts of shapes {tuple(packed.shape)}, {tuple(zeros.shape)} and {tuple(scales.shape)}")
    if not on_cpu:
        matrix, of = torch.empty(outputs, inputs, dtype=dtype, device=packed.device), len(packed) / max(inputs, 1)
        for begin, end in _runs(inputs, outputs, packed.device, 32 // bits):
            words, some = packed[int(begin * of) : int(end * of)], group[begin:end]
            codes = _integers(words, bits, 1).flatten(0, 1) if order is None else _awq_integers(words)  # (K, N)
            matrix[:, begin:end] = ((codes - zeros[some]).float() * scales[some].float()).t()
        return matrix
    matrix = torch.empty(outputs, inputs, dtype=torch.float32, device="cpu")
    arrays = (zeros.int().contiguous().numpy(), scales.float().contiguous().numpy(), group.contiguous().numpy())
    turns = order.numpy() if order is not None else None
    integers(packed.contiguous().numpy(), bits, *arrays, turns, matrix.numpy())
    return matrix.to(dtype)


def _awq_integers(packed: torch.Tensor) -> torch.Tensor:
    """int32 (rows, columns) -> int32 (rows, 8 columns)."""
    places = tuple(map(AWQ_ORDER.index, range(len(AWQ_ORDER))))
    return _integers(packed, 4, 2).index_select(2, _on(packed.device, places, torch.int64)).flatten(1)


AT_ONCE = 1 << 22
"""Numbers that torch dequantizes at a time."""
_WORK = 24
"""Bytes that it takes for each of them besides the result, at most."""


def work_bytes(elements: int) -> int:
    """Bytes that a matrix of so many elements takes at most while it is made, besides its own."""
    return _WORK * min(elements, AT_ONCE)


def _runs(rows: int, columns: int, device: torch.device, unit: int = 1) -> Iterator[tuple[int, int]]:
    """The first row and the end of each run of whole units of rows; on the meta device there is one run."""
    step = max(rows, 1) if device.type == "meta" else max(AT_ONCE // max(columns * unit, 1), 1) * unit
    return ((begin, min(begin + step, rows)) for begin in range(0, rows, step))


@functools.cache
def _on(device: torch.device, values: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values on a device."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def rows_of(scales: torch.Tensor, rows: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """The scale of each number of some rows; `rows`: the row of blocks of each. Blocks are so wide."""
    return scales[rows].repeat_interleave(width, 1)[:, :columns]


def _integers(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The integers in each int32, lowest bits first, along a new dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    shape = [1] * (packed.ndim + 1)
    shape[dim] = len(shifts)
    values: torch.Tensor = (packed.unsqueeze(dim) >> shifts.view(shape)) & (2**bits - 1)
    return values


def _by_projection(input_dict: Mapping[str, Any]) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Projection -> the parts of each of its matrices by name, from parts by pattern (of experts a list of each)."""
    tensors_by_part: dict[str, dict[str, list[torch.Tensor]]] = {}
    for pattern, tensors in input_dict.items():
        projection, _, part = pattern.rpartition(".")
        tensors_by_part.setdefault(projection, {})[part] = tensors if isinstance(tensors, list) else [tensors]
    return {
        projection: [dict(zip(parts, matrix_parts, strict=True)) for matrix_parts in zip(*parts.values(), strict=True)]
        for projection, parts in tensors_by_part.items()
    }


class Dequantize(ConversionOps):  # type: ignore[misc]
    """A conversion for transformers: the parts of a matrix, or of the matrices of all experts -> the matrices."""

    def __init__(self, hf_quantizer: IntoPlain) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: Mapping[str, Any], full_layer_name: str = "", model: Any = None, **options: Any
    ) -> dict[str, Any]:
        """Parts by pattern -> the matrix under the parameter's name; for experts, lists of matrices under `…weight`."""
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        result: dict[str, Any] = {}
        for projection, matrices_parts in _by_projection(input_dict).items():
            matrices = [self.hf_quantizer.matrix(parts, dtype) for parts in matrices_parts]
            result[f"{projection}.weight" if projection else full_layer_name] = matrices if projection else matrices[0]
        return result


class PlainSettings(QuantizationConfigMixin):  # type: ignore[misc]
    """Quantization settings as transformers keeps them in a config, for an `IntoPlain`."""

    def __init__(self, method: str, settings: Mapping[str, Any] | QuantizationConfigMixin) -> None:
        self.__dict__.update(settings if isinstance(settings, Mapping) else settings.to_dict())
        self.quant_method = method
        self.dequantize = True


class IntoPlain(HfQuantizer):  # type: ignore[misc]
    """A quantizer for transformers that loads the stored parts of each matrix into a plain Linear or experts."""

    unread: tuple[str, ...] = ()
    """Suffixes of unused parts."""

    def matrix(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The matrix (out, in) of its parts by name, on their device, which may be meta.

        Raises:
            ValueError: the parts do not belong together.
        """
        raise NotImplementedError

    def get_load_operations(self) -> dict[str, type]:
        """The operation that makes a matrix from its parts."""
        return {"dequantize": Dequantize}

    def is_serializable(self) -> bool:
        """False: saving would write another checkpoint."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False."""
        return False


class PackedIntegers(IntoPlain):
    """A quantizer for transformers that loads AWQ's and GPTQ's parts.

    Raises:
        UnknownArchitectureError: the layout of the parts is not supported.
    """

    serialized_names: Mapping[str, list[str]] = {"weight": ["weight", "qweight", "qzeros", "scales", "g_idx"]}

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        method, form = str(quantization_config.quant_method.value), str(quantization_config.format)
        if form not in _FORMATS[method] or quantization_config.bits not in _WIDTHS[method]:
            expected = f"{' or '.join(_FORMATS[method])} at {' or '.join(map(str, _WIDTHS[method]))} bits"
            raise UnknownArchitectureError(
                f"The weights are already quantized by {method}, in the form {form} at {quantization_config.bits} "
                f"bits; expected {expected}.",
                "Use the model's checkpoint in that form, or its unquantized one.",
            )
        quantization_config.dequantize = True

    def matrix(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        if "weight" in parts:
            return parts["weight"].to(dtype)
        settings = self.quantization_config
        if settings.quant_method == AWQ:
            return awq_weight(parts["qweight"], parts["qzeros"], parts["scales"], dtype)
        offset = 1 if settings.format == "gptq" else 0
        codes, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
        return gptq_weight(codes, zeros, scales, parts.get("g_idx"), settings.bits, offset, dtype)

    def preprocess_model(self, model: Any, **options: Any) -> None:
        """Leave the modules unchanged.

        Raises:
            UnknownArchitectureError: AWQ scales activations too for this type of model.
        """
        model_type = model.config.model_type
        if self.quantization_config.quant_method == AWQ and model_type in _SCALED_ACTIVATIONS:
            raise UnknownArchitectureError(
                f"AWQ also scales the activations of {model_type} models, which is not supported.",
                "Use the model's unquantized checkpoint with compression='4bit' or '8bit'.",
            )
        super().preprocess_model(model, **options)


_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether elements are FP8."""
    return dtype in _CODES


class QuickFp8(Fp8Dequantize):  # type: ignore[misc]
    """See `Fp8Dequantize`, which divides a matrix into equal blocks, one for each scale.

    A matrix that is not a whole number of the config's blocks (DeepSeek-V3 has some of 576 rows, with blocks of 128)
    has smaller blocks at its ends. transformers' FP8 product supports these; its dequantization refuses such a matrix,
    or divides it differently.
    """

    def _dequantize_one(
        self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        rows_agree = quantized.dim() == 2 and scales.shape[:1] == quantized.shape[:1]
        if quantized.dtype in (torch.int8, torch.float4_e2m1fn_x2) and rows_agree and output_dtype is not None:
            return fp4_matrix(quantized, as_factors(scales), output_dtype)
        size = self._block(quantized, scales)
        if size is None or output_dtype is None:
            whole: torch.Tensor = super()._dequantize_one(quantized, scales, output_dtype)
            return whole
        factors = as_factors(scales)
        return blocks(quantized, factors.reshape(1, 1) if factors.numel() == 1 else factors, output_dtype, size)

    def _block(self, quantized: torch.Tensor, scales: torch.Tensor) -> tuple[int, int] | None:
        """Rows and columns of a block; None for formats that are not supported here."""
        if quantized.dtype not in _CODES or quantized.dim() != 2 or not quantized.is_contiguous():
            return None
        if scales.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e8m0fnu):
            return None
        if scales.dim() != 2:
            return (*quantized.shape,) if scales.numel() == 1 else None
        (rows, columns), (n, k) = quantized.shape, scales.shape
        block = getattr(getattr(self.hf_quantizer, "quantization_config", None), "weight_block_size", None)
        if block is not None and (-(-rows // block[0]), -(-columns // block[1])) == (n, k):
            return int(block[0]), int(block[1])
        return (rows // n, columns // k) if n and k and not (rows % n or columns % k) else None


class FusedFp8(ConversionOps):  # type: ignore[misc]
    """FP8 codes of all experts in one tensor, with a scale, or a grid of scales, for each of them."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: Mapping[str, Any], model: Any = None, full_layer_name: str = "", **options: Any
    ) -> dict[str, torch.Tensor]:
        """Parts by pattern -> experts (E, out, in) under the parameter's name; plain ones are cast.

        Raises:
            ValueError: the scales are missing, or are not of these codes.
        """
        parts = {
            pattern: tensors[0] if isinstance(tensors, list) else tensors for pattern, tensors in input_dict.items()
        }
        codes = next(part for pattern, part in parts.items() if pattern.endswith("_proj$"))
        scales = next((part for pattern, part in parts.items() if pattern.endswith(_SCALE)), None)
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        if codes.dtype not in _CODES:
            return {full_layer_name: codes.to(dtype)}
        if scales is None:
            raise ValueError(f"codes of {len(codes)} experts without scales")
        grids = scales.float().reshape(len(codes), *(scales.shape[1:] if scales.dim() == 3 else (1, 1)))
        matrices = [blocks(expert_codes, grid, dtype) for expert_codes, grid in zip(codes, grids, strict=True)]
        return {full_layer_name: torch.stack(matrices)}


_SCALE = "_scale_inv$"


class Fp8(FineGrainedFP8HfQuantizer):  # type: ignore[misc]
    """transformers' quantizer for FP8, which dequantizes experts only if each has tensors of its own."""

    unread = ("activation_scale", "activation_scale$")

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Those of transformers, and those of fused experts (Mistral Small 4)."""
        conversions: list[WeightConverter] = super().get_weight_conversions()
        for leaf in ("gate_up_proj", "down_proj"):
            parts = [rf"experts\.{leaf}{part}$" for part in ("", "_scale_inv", "_activation_scale")]
            conversions.append(WeightConverter(parts, f"experts.{leaf}", [FusedFp8(self)]))
        return conversions


def as_factors(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32; a byte is the exponent of a power of two."""
    return torch.exp2(scales.float() - 127.0) if scales.dtype == torch.uint8 else scales.float()


def blocks(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, size: tuple[int, int] | None = None
) -> torch.Tensor:
    """The matrix (N, K) of FP8 or int8 codes with a scale for each block: value * scale in float32, rounded once.

    Args:
        codes: (N, K), FP8 or int8.
        scales: float32, (rows of blocks, columns of blocks).
        dtype: of the result.
        size: rows and columns of a block, of which those at the ends may be smaller; by default all are equal.

    Raises:
        ValueError: `size` is not given, and the matrix is not a whole number of equal blocks.
    """
    if size is None:
        if any(of % by for of, by in zip(codes.shape, scales.shape, strict=True)):
            raise ValueError(f"codes of shape {tuple(codes.shape)} and scales of shape {tuple(scales.shape)}")
        size = codes.shape[0] // scales.shape[0], codes.shape[1] // scales.shape[1]
    if codes.device != CPU:
        return scaled(codes, scales, None, size, dtype)
    return kernels.blocks(codes.contiguous().view(torch.uint8), _values(codes.dtype), scales, size, dtype)


def scaled(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, size: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The matrix (N, K) of codes with a scale, and a zero, for each block: (value - zero) * scale, by torch."""
    (rows, columns), width = codes.shape, size[1]
    matrix = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    block = torch.arange(rows, device=codes.device) // size[0]
    for begin, end in _runs(rows, columns, codes.device):
        values, some = codes[begin:end].float(), block[begin:end]
        if zeros is not None:
            values -= rows_of(zeros, some, width, columns)
        matrix[begin:end] = values * rows_of(scales, some, width, columns).float()
    return matrix


def fp4_matrix(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix (N, K) of FP4 codes with a scale for each run of inputs: value * scale in float32, rounded once.

    Args:
        codes: (N, K / 2), of one byte, the lower half first.
        scales: float32, (N, runs).
        dtype: of the result.

    Raises:
        ValueError: the inputs do not divide into runs of whole bytes.
    """
    rows, inputs = codes.shape[0], 2 * codes.shape[1]
    if scales.dim() != 2 or scales.shape[0] != rows or inputs % (2 * scales.shape[1]):
        raise ValueError(f"codes of shape {tuple(codes.shape)} and scales of shape {tuple(scales.shape)}")
    packed, table = codes.view(torch.uint8), _on(codes.device, tuple(FP4_VALUES), torch.float32)
    if codes.device == CPU:
        return kernels.blocks(packed, table, scales, (1, inputs // scales.shape[1]), dtype, 0)
    matrix = torch.empty(rows, inputs, dtype=dtype, device=codes.device)
    for begin, end in _runs(rows, inputs, codes.device):
        some = packed[begin:end]
        values = table[torch.stack((some & 15, some >> 4), 2).int()].view(end - begin, scales.shape[1], -1)
        matrix[begin:end] = (values * scales[begin:end, :, None]).flatten(1)
    return matrix


class QuickMxfp4(Mxfp4Dequantize):  # type: ignore[misc]
    """See `Mxfp4Dequantize`."""

    def convert(
        self, input_dict: Mapping[str, Any], model: Any = None, full_layer_name: str = "", **options: Any
    ) -> dict[str, torch.Tensor]:
        """Parts by pattern (`…_blocks`, `…_scales`) -> experts (E, in, out) under the parameter's name."""
        parts = {pattern.rpartition("_")[2]: tensors for pattern, tensors in input_dict.items()}
        blocks, scales = (tensors[0] if isinstance(tensors, list) else tensors for tensors in map(parts.get, _PARTS))
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        if blocks is None or scales is None or blocks.is_meta or dtype not in _BITS or blocks.shape[-1] != 16:
            return super().convert(  # type: ignore[no-any-return]
                dict(input_dict), model=model, full_layer_name=full_layer_name, **options
            )
        experts, outputs, groups = scales.shape
        matrices = torch.empty(experts, 32 * groups, outputs, dtype=dtype, device=blocks.device)
        if blocks.device != CPU:
            table = _table_on(blocks.device, dtype)
            for packed, exponents, matrix in zip(blocks, scales, matrices, strict=True):
                for begin, end in _runs(outputs, 32 * groups, blocks.device):
                    some = packed[begin:end]
                    codes = torch.stack((some & 15, some >> 4), 3).view(end - begin, groups, 32)
                    values = table[exponents[begin:end, :, None].int() * 16 + codes]
                    matrix[:, begin:end] = values.flatten(1).t()
            return {full_layer_name: matrices}
        bits = matrices.view(_BITS[dtype]).numpy()
        for codes, factors, out in zip(blocks.numpy(), scales.numpy(), bits, strict=True):
            kernels.nibbles(codes, factors, _table(dtype), out)
        return {full_layer_name: matrices}


_PARTS = ("blocks", "scales")


@functools.cache
def _values(dtype: torch.dtype) -> torch.Tensor:
    """The value of each byte, float32 (256,)."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()


@functools.cache
def _table(dtype: torch.dtype) -> Any:
    """The value of each pair of scale and code of MXFP4, (256, 16), computed by transformers itself."""
    codes = torch.arange(16, dtype=torch.uint8, device="cpu").expand(1, 256, 1, 16)
    scales = torch.arange(256, dtype=torch.uint8, device="cpu").view(1, 256, 1)
    products = mxfp4.convert_moe_packed_tensors(codes.contiguous(), scales, dtype=dtype)  # (1, 32, 256)
    return products[0, ::2].t().contiguous().view(_BITS[dtype]).numpy()


@functools.cache
def _table_on(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The same on a device, (4096,)."""
    with torch.inference_mode(False):
        return torch.from_numpy(_table(dtype)).view(dtype).view(-1).to(device)


class WrapAgain(ConversionOps):  # type: ignore[misc]
    """One 4bit weight of bitsandbytes: transformers' operation at the first call, then its result with new tensors.

    transformers' own operation reads a part of each weight's state from JSON in a tensor, and writes a number from it
    to another tensor. On a GPU each matrix of each pass would wait for the computation. The state is the same in each
    pass, so it is read in the first only.
    """

    def __init__(self, first: Any) -> None:
        self.hf_quantizer = first.hf_quantizer
        self._first = first
        self._known: Any = None

    def convert(self, input_dict: Mapping[str, Any], **options: Any) -> dict[str, torch.Tensor]:
        """Parts by pattern ("weight", "weight.absmax", …) -> {"weight": bitsandbytes' parameter}."""
        parts = {pattern: tensors[0] for pattern, tensors in input_dict.items()}
        if self._known is None:
            parameter: torch.Tensor = self._first.convert(dict(parts), **options)["weight"]
            self._known = _without_tensors(parameter)
            return {"weight": parameter}
        parameter_type, state = self._known
        state = copy.copy(state)
        state.absmax, state.code = parts["weight.absmax"], parts["weight.quant_map"]
        if state.nested:
            state.state2 = copy.copy(state.state2)
            state.state2.absmax, state.state2.code = parts["weight.nested_absmax"], parts["weight.nested_quant_map"]
        codes = parts["weight"]
        again = parameter_type(
            codes,
            requires_grad=False,
            quant_state=state,
            blocksize=state.blocksize,
            compress_statistics=state.nested,
            quant_type=state.quant_type,
            quant_storage=codes.dtype,
            bnb_quantized=True,
        )
        return {"weight": again}


def _without_tensors(parameter: Any) -> tuple[type, Any]:
    """The type of a parameter, and a copy of its state without its tensors."""
    state = copy.copy(parameter.quant_state)
    state.absmax = state.code = None
    if state.nested:
        state.state2 = copy.copy(state.state2)
        state.state2.absmax = state.state2.code = None
    return type(parameter), state


class ExpertMatrices(ConversionOps):  # type: ignore[misc]
    """Matrices of compressed-tensors, dense or of experts, each by the compressor that it has for dense ones.

    transformers' own operation uses one scheme for all dense matrices and one for all experts, drops the global scales
    of NVFP4 experts, and refuses experts of some formats. It is used for FP8 experts with a scale for each row or
    matrix, which it multiplies in float32.
    """

    def __init__(self, first: Any) -> None:
        self.hf_quantizer = first.hf_quantizer
        self._first = first

    def convert(self, input_dict: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Parts by pattern (`…weight`, `…weight_scale`), of experts lists -> a matrix, or experts (E, out, in)."""
        settings, name = self.hf_quantizer.compressor.quantization_config, options["full_layer_name"]
        target = options["model"].get_parameter(name)
        dtype, result = target.dtype, dict[str, Any]()
        for projection, matrices in _by_projection(input_dict).items():
            if not projection:
                scheme = scheme_of(settings, name.rpartition(".")[0])
                return {name: _decompressed(matrices[0], scheme, settings, dtype, columns=target.shape[1])}
            path = f"{name.rpartition('.')[0]}.0.{projection.rpartition('.')[2]}"
            scheme = scheme_of(settings, path)
            tensors = [_decompressed(parts, scheme, settings, dtype, wide=True) for parts in matrices]
            result[f"{projection}.weight"] = torch.stack(tensors)
        return result


def _decompressed(
    parts: Mapping[str, torch.Tensor],
    scheme: Any,
    settings: Any,
    dtype: torch.dtype,
    *,
    wide: bool = False,
    columns: int | None = None,
) -> torch.Tensor:
    """A matrix of its parts, which has so many columns; None if it has as many as its codes.

    If `wide`, FP8 with a scale for each row or matrix is multiplied in float32. Other scales keep their dtype if
    `wide`, and else are cast first, as transformers does.
    """
    if "weight_scale" not in parts:
        return parts["weight"].to(dtype)
    codes, scales = parts.get("weight"), parts["weight_scale"]
    if not wide and scales.is_floating_point() and scales.dtype.itemsize > 1:  # transformers loads them in that dtype
        parts = {**parts, "weight_scale": scales.to(dtype)}
    if wide and codes is not None and codes.is_floating_point() and scales.numel() in (1, len(codes)):
        return (codes.float() * scales.float()).to(dtype)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format

    form = scheme.format or settings.format
    if str(getattr(form, "value", form)) in ("mixed-precision", "None"):
        form = infer_module_format(torch.nn.Linear, scheme)
    compressor, packed = BaseCompressor.get_value_from_registry(form), parts.get("weight_packed", codes)
    assert packed is not None
    rows, width, has_words = len(packed), packed.shape[1], packed.dtype == torch.int32
    if columns is None:
        columns = width if packed is codes else width * packed.element_size() * 8 // scheme.weights.num_bits
    by_row = {name: rows // len(part) for name, part in parts.items() if part.dim() > 1 and len(part) > 1}
    unit = math.lcm(*by_row.values())
    if rows % unit:  # of parts of which some belong to parts of rows
        return compressor.decompress(dict(parts), scheme)["weight"].to(dtype)  # type: ignore[no-any-return]
    matrix = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    for begin, end in _runs(rows, 3 * columns if has_words else columns, packed.device, unit):  # as words of 64 bits
        some = {n: p[begin // by_row[n] : end // by_row[n]] if n in by_row else p for n, p in parts.items()}
        if has_words:
            some["weight_shape"] = torch.tensor([end - begin, columns], device="cpu")
        matrix[begin:end] = compressor.decompress(some, scheme)["weight"]
    return matrix


def scheme_of(settings: Any, path: str) -> Any:
    """The scheme of the matrix of a module: of the first group with its name, else of the first for all Linears."""
    from compressed_tensors.utils.match import match_name

    groups = list(settings.config_groups.values())
    named = [group for group in groups if any(match_name(path, target) for target in group.targets)]
    for_all = [group for group in groups if any(not target.startswith("re:") for target in group.targets)]
    return (named or for_all or groups)[0]
