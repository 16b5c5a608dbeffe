"""Inputs of Linears that a published scheme rounds to 8 bits at each call, in one call of compiled code.

compressed-tensors takes some thirty operations of torch for that, more than a layer takes besides. The bits are its
own: its function is tried when a model is loaded. What else it rounds, gradients and other dtypes are left to it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rabbitllm.base.programs import Place, Program, float_bits, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine import _published
from rabbitllm.engine._fusing import is_result, result_of, threads_for
from rabbitllm.engine._gates import every_bfloat
from rabbitllm.engine._siblings import is_plain


@dataclass(frozen=True)
class Rounding:
    """How a Linear's inputs are rounded: to integers or floats of 8 bits, with a scale for each token.

    Attributes:
        args: compressed-tensors' settings, for which this is.
        largest: the number of which a scale is the largest input's multiple.
        is_float: whether codes are float8_e4m3fn, else int8.
    """

    args: Any
    largest: float
    is_float: bool

    @classmethod
    def of(cls, args: Any) -> Rounding | None:
        """The rounding that settings may mean; None for others."""
        is_known = (args.num_bits, args.symmetric, args.dynamic, args.strategy) == (8, True, True, "token")
        if not is_known or args.scale_dtype is not None or args.type not in ("int", "float"):
            return None
        return cls(args, 448.0 if args.type == "float" else 127.5, args.type == "float")

    def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor | None:
        """The rounded inputs of a module; None if they are left to compressed-tensors."""
        own = Rounding.of(module.quantization_scheme.input_activations)  # a program may write to settings
        is_own = own == self and not hasattr(module, "input_global_scale")
        return self.rounded(x) if is_own and is_plain(x) else None

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Rounded bfloat16 on the CPU, without gaps; of up to two dimensions all have one scale."""
        rows, out = x.shape[:2].numel() if x.dim() > 2 else 1, torch.empty_like(x)
        numbers = self.largest, self.is_float, rows, x.numel() // rows, threads_for(x.numel())
        prepared(_add, 2, *numbers)(x.data_ptr(), out.data_ptr())
        return out


def _add(
    program: Program, x: Place, out: Place, largest: float, is_float: bool, rows: int, columns: int, threads: int
) -> None:
    from rabbitllm.engine._activation_kernels import round_rows  # numba comes with it

    least = float_bits(torch.finfo(torch.bfloat16).eps)
    program.add(round_rows, [x, out, rows, columns, float_bits(largest), int(is_float), least], threads)


def fuse_activations(model: nn.Module) -> int:
    """Let Linears whose inputs are rounded to 8 bits round them in one call.

    Returns:
        How many these are.
    """
    fused, right = 0, dict[tuple[float, bool], bool]()
    for module in model.modules():
        forward: Any = vars(module).get("forward")
        if getattr(forward, "func", None) is not _published.linear_with_activations:
            continue
        scheme: Any = module.quantization_scheme
        if (args := scheme.input_activations) is None or (rounding := Rounding.of(args)) is None:
            continue
        key = rounding.largest, rounding.is_float
        if key not in right:
            right[key] = _has_bits(rounding, module)
        if right[key]:
            module.forward = functools.partial(_published.linear_with_activations, module, rounding=rounding)
            fused += 1
    return fused


def _has_bits(rounding: Rounding, module: nn.Module) -> bool:
    """Whether compressed-tensors rounds so: tokens of any size, and all numbers at once."""
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    random, every = RandomTensors(), every_bfloat()
    scales = torch.logspace(-30, 4, 35, dtype=torch.float32, device="cpu").view(1, -1, 1)
    samples = [(random.normal(2, 35, 512) * scales).bfloat16(), random.normal(3, 512, dtype=torch.bfloat16)]
    samples += [every[every.abs() < size].view(1, 1, -1) for size in (1.0, 256.0)] + [torch.zeros_like(samples[0])]
    pairs = [(rounding.rounded(x), result_of(forward_quantize, module, x, "input", rounding.args)) for x in samples]
    return all(is_result(result, expected) for result, expected in pairs)
