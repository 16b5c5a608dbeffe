"""AWQ and GPTQ: dequantizes matrices of small integers in int32, with scales and zeros for groups of inputs.

transformers runs such checkpoints with a package of kernels, gptqmodel; here each matrix is dequantized when it is
used, on any device. The layouts are those of AutoAWQ's "gemm" and of AutoGPTQ ("gptq", and "gptq_v2", which differs in
how zeros are stored), for a Linear with K inputs and N outputs and 32 / bits integers in an int32:

- AWQ: `qweight` (K, N / 8), `qzeros` (groups, N / 8), in each int32 the outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest
  bits on; `scales` (groups, N);
- GPTQ: `qweight` (K bits / 32, N), `qzeros` (groups, N bits / 32), each less 1 in "gptq"; `scales` (groups, N);
  `g_idx` (K,), the group of each input.

The weight is (integer - zero) * scale, (K, N), and is used transposed. In float32 that product is exact, so it is
rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from rabbitllm.errors import UnknownArchitectureError
from rabbitllm.quant.published_kernels import integers

AWQ, GPTQ = "awq", "gptq"
_CPU = torch.device("cpu")
"""The CPU without an index; a test's stand-in for another device has an index."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each 4 bits of an int32, from the lowest on."""
_FORMATS = {AWQ: ("gemm",), GPTQ: ("gptq", "gptq_v2")}
_BITS = {AWQ: (4,), GPTQ: (2, 4, 8)}  # 3 bits do not divide 32: integers would cross int32 boundaries
_SCALED_ACTIVATIONS = ("starcoder2", "falcon", "mpt", "gptj", "gpt_neox", "gpt_bigcode", "bloom")
"""Model types for which AWQ stores scales of activations too."""


def awq_weight(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix (N, K) of AWQ's parts."""
    if qweight.device == _CPU:
        zeros = _awq_integers(qzeros)
        group = torch.arange(len(qweight)) // (len(qweight) // len(scales))
        return _by_kernel(qweight, 4, zeros, scales, group, torch.tensor(_AWQ_ORDER), dtype)
    codes = _awq_integers(qweight)  # (K, N)
    grouped = codes.view(scales.shape[0], -1, scales.shape[1]) - _awq_integers(qzeros)[:, None]
    return _product(grouped, scales[:, None]).flatten(0, 1).t().contiguous().to(dtype)


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
    group = g_idx.to(torch.int64)
    if qweight.device == _CPU:
        return _by_kernel(qweight, bits, zeros, scales, group, None, dtype)
    codes = _integers(qweight, bits, 1).flatten(0, 1)  # (K, N)
    return _product(codes - zeros[group], scales[group]).t().contiguous().to(dtype)


def _by_kernel(
    packed: torch.Tensor,
    bits: int,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    group: torch.Tensor,
    order: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The matrix (N, K), by a compiled kernel; see `published_kernels.integers`.

    Raises:
        ValueError: the sizes of the parts do not match, or a group does not exist.
    """
    inputs, outputs = len(group), scales.shape[1]
    wanted = (inputs, outputs * bits // 32) if order is not None else (inputs * bits // 32, outputs)
    if (
        tuple(packed.shape) != wanted
        or zeros.shape != scales.shape
        or not 0 <= int(group.min()) <= int(group.max()) < len(scales)
    ):
        raise ValueError(f"parts of shapes {tuple(packed.shape)}, {tuple(zeros.shape)} and {tuple(scales.shape)}")
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


def _product(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.float32) * scales.to(torch.float32)


class Dequantize(ConversionOps):  # type: ignore[misc]
    """A conversion for transformers: the parts of a matrix, or of the matrices of all experts -> the matrices."""

    def __init__(self, hf_quantizer: PackedIntegers) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: Mapping[str, Any], full_layer_name: str = "", model: Any = None, **others: Any
    ) -> dict[str, Any]:
        """Parts by pattern -> the matrix under the parameter's name; for experts, lists of matrices under `…weight`."""
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        projections: dict[str, dict[str, Sequence[torch.Tensor]]] = {}
        for pattern, tensors in input_dict.items():
            projection, _, part = pattern.rpartition(".")
            projections.setdefault(projection, {})[part] = tensors if isinstance(tensors, list) else [tensors]
        found: dict[str, Any] = {}
        for projection, parts in projections.items():
            matrices = [
                self._matrix(dict(zip(parts, one, strict=True)), dtype) for one in zip(*parts.values(), strict=True)
            ]
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
        if form not in _FORMATS[method] or quantization_config.bits not in _BITS[method]:
            known = f"{' or '.join(_FORMATS[method])} at {' or '.join(map(str, _BITS[method]))} bits"
            raise UnknownArchitectureError(
                f"The weights are quantized already by {method}, in the form {form} at {quantization_config.bits} "
                f"bits; expected {known}.",
                "Name the model's checkpoint in that form, or its unquantized one.",
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
                "Name the model's unquantized checkpoint; compression='4bit' or '8bit' makes it small.",
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
