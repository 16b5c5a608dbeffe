"""Inputs of Linears that a published scheme rounds to 8 bits at each call, in one call of compiled code.

compressed-tensors takes some thirty operations of torch for that, more than a layer takes besides. The bits are its
own: its function is tried when a model is loaded. Where codes are multiplied, rounding is part of the calls that
multiply them, and once for all Linears with the same input. What else a scheme rounds, gradients and other dtypes are
left to compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rabbitllm.base.programs import Place, Program, float_bits, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine import _published
from rabbitllm.engine._fusing import is_result, result_of, threads_for
from rabbitllm.engine._gates import every_bfloat
from rabbitllm.engine._siblings import is_plain, round_inputs

_OF_MODULE = "quantization_scheme", "quantization_enabled", "input_global_scale"
_OF_SCHEME = "input_activations", "output_activations"
"""What says how a Linear rounds."""


@dataclass(frozen=True)
class Rounding:
    """How a Linear's inputs are rounded: to integers or floats of 8 bits, with a scale for each token, or group of it.

    Attributes:
        largest: the number of which a scale is the largest input's multiple.
        is_float: whether codes are float8_e4m3fn, else int8.
        group: inputs with one scale; 0 for all of a token.
    """

    largest: float
    is_float: bool
    group: int = 0

    @classmethod
    def of(cls, args: Any) -> Rounding | None:
        """The rounding that compressed-tensors' settings may mean; None for others."""
        if (args.num_bits, args.symmetric, args.dynamic, args.scale_dtype) != (8, True, True, None):
            return None
        if args.type not in ("int", "float") or args.strategy not in ("token", "group"):
            return None
        group = args.group_size if args.strategy == "group" else 0
        return cls(448.0 if args.type == "float" else 127.5, args.type == "float", group)

    def is_of(self, module: Any) -> bool:
        """Whether nothing else is rounded by a module, whose settings a program may write to."""
        scheme = module.quantization_scheme if getattr(module, "quantization_enabled", True) else None
        if scheme is None or scheme.input_activations is None or scheme.output_activations is not None:
            return False
        return Rounding.of(scheme.input_activations) == self and not hasattr(module, "input_global_scale")

    def facts(self, module: Any) -> list[tuple[dict[str, Any], str]]:
        """What `is_of` depends on, for a `Watch`."""
        scheme = module.quantization_scheme
        args = vars(scheme.input_activations) if scheme.input_activations is not None else {}
        own = [(vars(module), name) for name in _OF_MODULE] + [(vars(scheme), name) for name in _OF_SCHEME]
        return own + [(args, name) for name in args]

    def by_settings(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """What a module computes."""
        rounds = self.is_of(module) and is_plain(x)
        return _published.linear_with_activations(module, x, self.rounded if rounds else None)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Rounded bfloat16 on the CPU, without gaps; of up to two dimensions all have one scale, or groups theirs."""
        rows, out = x.shape[:2].numel() if x.dim() > 2 else 1, torch.empty_like(x)
        prepared(self._add, 2, rows, x.numel() // rows, threads_for(x.numel()))(x.data_ptr(), out.data_ptr())
        return out

    def add_to(self, program: Program, x: Place, out: Place, rows: int, columns: int) -> None:
        """See `InputRounding`."""
        self._add(program, x, out, rows, columns, threads_for(rows * columns))

    def _add(self, program: Program, x: Place, out: Place, rows: int, columns: int, threads: int) -> None:
        from rabbitllm.engine._activation_kernels import round_rows  # numba comes with it

        wide = self.group or columns
        numbers = rows * columns // wide, wide, float_bits(self.largest), int(self.is_float)
        program.add(round_rows, [x, out, *numbers, float_bits(torch.finfo(torch.bfloat16).eps)], threads)


def fuse_activations(model: nn.Module) -> int:
    """Let Linears whose inputs are rounded to 8 bits round them in one call.

    Returns:
        How many these are.
    """
    fused, right = 0, dict[Rounding, bool]()
    for module in model.modules():
        forward: Any = vars(module).get("forward")
        if getattr(forward, "func", None) is not _published.linear_with_activations:
            continue
        scheme: Any = module.quantization_scheme
        if (args := scheme.input_activations) is None or (rounding := Rounding.of(args)) is None:
            continue
        if rounding not in right:
            right[rounding] = _has_bits(rounding, module)
        if right[rounding]:
            round_inputs(module, rounding)
            fused += 1
    return fused


def _has_bits(rounding: Rounding, module: Any) -> bool:
    """Whether compressed-tensors rounds so: tokens of any size, and all numbers at once."""
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    random, every, args = RandomTensors(), every_bfloat(), module.quantization_scheme.input_activations
    scales = torch.logspace(-30, 4, 35, dtype=torch.float32, device="cpu").view(1, -1, 1)
    samples = [(random.normal(2, 35, 512) * scales).bfloat16(), random.normal(3, 512, dtype=torch.bfloat16)]
    samples += [every[every.abs() < size].view(1, 1, -1) for size in (1.0, 256.0)] + [torch.zeros_like(samples[0])]
    pairs = [(rounding.rounded(x), result_of(forward_quantize, module, x, "input", args)) for x in samples]
    return all(is_result(result, expected) for result, expected in pairs)
