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
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.core_model_loading import ConversionOps
from transformers.integrations import mxfp4
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers.base import HfQuantizer

from rabbitllm.errors import UnknownArchitectureError
from rabbitllm.quant import published_kernels as kernels
from rabbitllm.quant.published_kernels import integers

AWQ, GPTQ = "awq", "gptq"
_CPU = torch.device("cpu")
"""The CPU without an index; a test's stand-in for another device has an index."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
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
    return _weight(qweight, 4, _awq_integers(qzeros), scales, group, torch.tensor(_AWQ_ORDER), dtype)


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
    """The matrix (N, K), on a CPU by a compiled kernel; see `published_kernels.integers`.

    Raises:
        ValueError: the sizes of the parts do not match, or a group does not exist.
    """
    inputs, outputs = len(group), scales.shape[1]
    wanted = (inputs, outputs * bits // 32) if order is not None else (inputs * bits // 32, outputs)
    fit, on_cpu = tuple(packed.shape) == wanted and zeros.shape == scales.shape, packed.device == _CPU
    if not fit or (on_cpu and not 0 <= int(group.min()) <= int(group.max()) < len(scales)):
        raise ValueError(f"parts of shapes {tuple(packed.shape)}, {tuple(zeros.shape)} and {tuple(scales.shape)}")
    if not on_cpu:
        codes = _integers(packed, bits, 1).flatten(0, 1) if order is None else _awq_integers(packed)  # (K, N)
        return ((codes - zeros[group]).float() * scales[group].float()).t().contiguous().to(dtype)
    made = torch.empty(outputs, inputs)
    given = (zeros.int().contiguous().numpy(), scales.float().contiguous().numpy(), group.contiguous().numpy())
    turns = order.numpy() if order is not None else None
    integers(packed.contiguous().numpy(), bits, *given, turns, made.numpy(), torch.get_num_threads())
    return made.to(dtype)


def _awq_integers(packed: torch.Tensor) -> torch.Tensor:
    """int32 (rows, columns) -> int32 (rows, 8 columns)."""
    found = _integers(packed, 4, 2)
    order = torch.tensor(_AWQ_ORDER, device=packed.device).argsort()
    return found.index_select(2, order).flatten(1)


def _integers(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The integers in each int32, lowest bits first, along a new dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    shape = [1] * (packed.ndim + 1)
    shape[dim] = len(shifts)
    found: torch.Tensor = (packed.unsqueeze(dim) >> shifts.view(shape)) & (2**bits - 1)
    return found


def _by_projection(input_dict: Mapping[str, Any]) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Projection -> the parts of each of its matrices by name, from parts by pattern (of experts a list of each)."""
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for pattern, tensors in input_dict.items():
        projection, _, part = pattern.rpartition(".")
        found.setdefault(projection, {})[part] = tensors if isinstance(tensors, list) else [tensors]
    return {
        projection: [dict(zip(parts, own, strict=True)) for own in zip(*parts.values(), strict=True)]
        for projection, parts in found.items()
    }


class Dequantize(ConversionOps):  # type: ignore[misc]
    """A conversion for transformers: the parts of a matrix, or of the matrices of all experts -> the matrices."""

    def __init__(self, hf_quantizer: PackedIntegers) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: Mapping[str, Any], full_layer_name: str = "", model: Any = None, **others: Any
    ) -> dict[str, Any]:
        """Parts by pattern -> the matrix under the parameter's name; for experts, lists of matrices under `…weight`."""
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        found: dict[str, Any] = {}
        for projection, matrices_parts in _by_projection(input_dict).items():
            matrices = [self._matrix(parts, dtype) for parts in matrices_parts]
            found[f"{projection}.weight" if projection else full_layer_name] = matrices if projection else matrices[0]
        return found

    def _matrix(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        if "weight" in parts:
            return parts["weight"].to(dtype)
        settings = self.hf_quantizer.quantization_config
        if settings.quant_method == AWQ:
            return awq_weight(parts["qweight"], parts["qzeros"], parts["scales"], dtype)
        offset = 1 if settings.format == "gptq" else 0
        codes, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
        return gptq_weight(codes, zeros, scales, parts.get("g_idx"), settings.bits, offset, dtype)


class PackedIntegers(HfQuantizer):  # type: ignore[misc]
    """A quantizer for transformers that loads AWQ's and GPTQ's parts into plain Linears.

    Raises:
        UnknownArchitectureError: the layout of the parts is not supported.
    """

    casts_plain = True
    """Tensors that are stored unquantized are cast to the model's dtype, as in any model."""
    serialized_names: Mapping[str, list[str]] = {"weight": ["weight", "qweight", "qzeros", "scales", "g_idx"]}

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        method, form = str(quantization_config.quant_method.value), str(quantization_config.format)
        if form not in _FORMATS[method] or quantization_config.bits not in _WIDTHS[method]:
            known = f"{' or '.join(_FORMATS[method])} at {' or '.join(map(str, _WIDTHS[method]))} bits"
            raise UnknownArchitectureError(
                f"The weights are already quantized by {method}, in the form {form} at {quantization_config.bits} "
                f"bits; expected {known}.",
                "Use the model's checkpoint in that form, or its unquantized one.",
            )
        quantization_config.dequantize = True

    def preprocess_model(self, model: Any, **options: Any) -> None:
        """Leave the modules unchanged.

        Raises:
            UnknownArchitectureError: AWQ scales activations too for this type of model.
        """
        kind = model.config.model_type
        if self.quantization_config.quant_method == AWQ and kind in _SCALED_ACTIVATIONS:
            raise UnknownArchitectureError(
                f"AWQ of a model of type {kind} scales its activations too, which is not supported.",
                "Use the model's unquantized checkpoint with compression='4bit' or '8bit'.",
            )
        super().preprocess_model(model, **options)

    def get_load_operations(self) -> dict[str, type]:
        """The operation that makes a matrix from its parts."""
        return {"dequantize": Dequantize}

    def is_serializable(self) -> bool:
        """False: the plain matrices would be another checkpoint."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False."""
        return False


_BITS = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32}
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


class QuickFp8(Fp8Dequantize):  # type: ignore[misc]
    """See `Fp8Dequantize`, which divides a matrix into equal blocks, one for each scale.

    A matrix that is not a whole number of the config's blocks (DeepSeek-V3 has some of 576 rows, with blocks of 128)
    has smaller blocks at its ends instead. transformers' FP8 product handles these, but its dequantization does not: it
    refuses such a matrix, or divides it differently.
    """

    def _dequantize_one(
        self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        size = self._block(quantized, scales)
        if size is None or output_dtype is None:
            whole: torch.Tensor = super()._dequantize_one(quantized, scales, output_dtype)
            return whole
        factors = torch.exp2(scales.float() - 127.0) if scales.dtype == torch.uint8 else scales.float()
        if quantized.device != _CPU or output_dtype not in (torch.bfloat16, torch.float32):
            for dim in (0, 1):
                factors = factors.repeat_interleave(size[dim], dim).narrow(dim, 0, quantized.shape[dim])
            return (quantized.float() * factors).to(output_dtype)
        codes = quantized.view(torch.uint8).numpy()
        made = torch.empty(quantized.shape, dtype=output_dtype)
        kernels.blocks(codes, _values(quantized.dtype), factors.numpy(), size, _bits(made), torch.get_num_threads())
        return made

    def _block(self, quantized: torch.Tensor, scales: torch.Tensor) -> tuple[int, int] | None:
        """Rows and columns of a block; None for formats that are not supported here."""
        if quantized.dtype not in _CODES or quantized.dim() != 2 or scales.dim() != 2 or not quantized.is_contiguous():
            return None
        if scales.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
            return None
        (rows, columns), (n, k) = quantized.shape, scales.shape
        said = getattr(getattr(self.hf_quantizer, "quantization_config", None), "weight_block_size", None)
        if said is not None and (-(-rows // said[0]), -(-columns // said[1])) == (n, k):
            return int(said[0]), int(said[1])
        return (rows // n, columns // k) if n and k and not (rows % n or columns % k) else None


class QuickMxfp4(Mxfp4Dequantize):  # type: ignore[misc]
    """See `Mxfp4Dequantize`."""

    def convert(
        self, input_dict: Mapping[str, Any], model: Any = None, full_layer_name: str = "", **others: Any
    ) -> dict[str, torch.Tensor]:
        """Parts by pattern (`…_blocks`, `…_scales`) -> experts (E, in, out) under the parameter's name."""
        parts = {pattern.rpartition("_")[2]: tensors for pattern, tensors in input_dict.items()}
        blocks, scales = (tensors[0] if isinstance(tensors, list) else tensors for tensors in map(parts.get, _PARTS))
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        if blocks is None or scales is None or blocks.device != _CPU or dtype not in _BITS or blocks.shape[-1] != 16:
            return super().convert(  # type: ignore[no-any-return]
                dict(input_dict), model=model, full_layer_name=full_layer_name, **others
            )
        experts, outputs, groups = scales.shape
        made = torch.empty(experts, 32 * groups, outputs, dtype=dtype)
        for codes, factors, out in zip(blocks.numpy(), scales.numpy(), _bits(made), strict=True):
            kernels.nibbles(codes, factors, _table(dtype), out, torch.get_num_threads())
        return {full_layer_name: made}


_PARTS = ("blocks", "scales")


def _bits(tensor: torch.Tensor) -> Any:
    """A tensor's memory as unsigned integers of its element size."""
    kind = _BITS[tensor.dtype]
    return tensor.view(torch.int16 if kind is np.uint16 else torch.int32).numpy().view(kind)


@functools.cache
def _values(dtype: torch.dtype) -> Any:
    """The value of each byte, float32 (256,)."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()


@functools.cache
def _table(dtype: torch.dtype) -> Any:
    """The value of each pair of scale and code of MXFP4, (256, 16), computed by transformers itself."""
    codes = torch.arange(16, dtype=torch.uint8).expand(1, 256, 1, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    made = mxfp4.convert_moe_packed_tensors(codes.contiguous(), scales, dtype=dtype)  # (1, 32, 256)
    return _bits(made[0, ::2].t().contiguous())


class WrapAgain(ConversionOps):  # type: ignore[misc]
    """One 4bit weight of bitsandbytes: transformers' operation at the first call, then its result with new tensors.

    transformers' own operation reads a part of each weight's state from JSON in a tensor, and puts a number from it
    into another tensor. With tensors on a GPU, each matrix of each pass would wait for the computation. The state is
    the same in each pass, so it is read in the first only.
    """

    def __init__(self, first: Any) -> None:
        self.hf_quantizer = first.hf_quantizer
        self._first = first
        self._known: Any = None

    def convert(self, input_dict: Mapping[str, Any], **others: Any) -> dict[str, torch.Tensor]:
        """Parts by pattern ("weight", "weight.absmax", …) -> {"weight": bitsandbytes' parameter}."""
        parts = {pattern: tensors[0] for pattern, tensors in input_dict.items()}
        if self._known is None:
            made: torch.Tensor = self._first.convert(dict(parts), **others)["weight"]
            self._known = _without_tensors(made)
            return {"weight": made}
        kind, state = self._known
        state = copy.copy(state)
        state.absmax, state.code = parts["weight.absmax"], parts["weight.quant_map"]
        if state.nested:
            state.state2 = copy.copy(state.state2)
            state.state2.absmax, state.state2.code = parts["weight.nested_absmax"], parts["weight.nested_quant_map"]
        codes = parts["weight"]
        again = kind(
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


def _without_tensors(made: Any) -> tuple[type, Any]:
    """The type of a parameter, and a copy of its state without its tensors."""
    state = copy.copy(made.quant_state)
    state.absmax = state.code = None
    if state.nested:
        state.state2 = copy.copy(state.state2)
        state.state2.absmax = state.state2.code = None
    return type(made), state


_ROWWISE = ("tensor", "channel", "QuantizationStrategy.TENSOR", "QuantizationStrategy.CHANNEL")


class ExpertMatrices(ConversionOps):  # type: ignore[misc]
    """Experts of compressed-tensors: packed ones, and FP8 with a scale per row or matrix, by transformers' operation.

    Experts of another format (int8, FP8 with a scale per block) are decompressed matrix by matrix, by the compressor
    that compressed-tensors has for dense matrices of that format.
    """

    def __init__(self, first: Any) -> None:
        self.hf_quantizer = first.hf_quantizer
        self._first = first

    def convert(
        self, input_dict: Mapping[str, Any], source_patterns: Any, target_patterns: Any, **others: Any
    ) -> dict[str, Any]:
        """Parts by pattern (`…weight`, `…weight_scale`), a list with one for each expert -> experts (E, out, in)."""
        from transformers.integrations.compressed_tensors import get_experts_scheme  # in recent versions only

        settings = self.hf_quantizer.compressor.quantization_config
        scheme = self._first.scheme or get_experts_scheme(settings)
        weights, form = scheme.weights, scheme.format or settings.format
        rowwise = weights.type == "float" and weights.num_bits == 8 and str(weights.strategy) in _ROWWISE
        dense = "weight" in input_dict or "weight_scale" in input_dict
        if dense or rowwise or any(pattern.endswith("weight_packed") for pattern in input_dict):
            return self._first.convert(input_dict, source_patterns, target_patterns, **others)  # type: ignore[no-any-return]
        from compressed_tensors.compressors import BaseCompressor

        compressor = BaseCompressor.get_value_from_registry(form)
        dtype = others["model"].get_parameter(others["full_layer_name"]).dtype
        return {
            f"{projection}.weight": torch.stack(
                [compressor.decompress(one, scheme)["weight"].to(dtype) for one in each]
            )
            for projection, each in _by_projection(input_dict).items()
        }
