"""Inputs of Linears that a published scheme rounds to 8 bits, or to FP4, at each call, in one call of compiled code.

compressed-tensors takes some thirty operations of torch for that, more than a layer takes besides. The bits are its
own: its function is tried when a model is loaded. Where codes are multiplied, rounding is part of the calls that
multiply them, and once for all Linears with the same input. What else a scheme rounds, gradients and other dtypes are
left to compressed-tensors.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rabbitllm.base.programs import Place, Program, float_bits, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine import _published
from rabbitllm.engine._fusing import is_result, result_of, threads_for, trial_of
from rabbitllm.engine._gates import every_half
from rabbitllm.engine._siblings import dtype_of, is_plain, round_inputs

_GLOBAL, _SCALE, _ZERO = "input_global_scale", "input_scale", "input_zero_point"
"""Parameters with the number that multiplies all scales of NVFP4's inputs, and a published scale and its zero."""
_OF_MODULE = "quantization_scheme", "quantization_enabled", _GLOBAL, _ZERO
_FACTORS = 1.0, 0.0123, 31337.0
"""Factors with which roundings are tried that have one."""
_IN_POWERS = [("float", bits, True, "group", True, torch.uint8, 32) for bits in (8, 4)]
"""The settings of MXFP8 and MXFP4."""
_OF_SCHEME = "input_activations", "output_activations"
"""What says how a Linear rounds."""


@dataclass(frozen=True)
class Rounding:
    """How a Linear's inputs are rounded: to integers or floats of 8 bits, with a scale for each token, or group of it;
    or to FP4, with such scales that are rounded too.

    Attributes:
        largest: the number of which a scale is the largest input's multiple: 448 if codes are float8_e4m3fn, 6 if they
            are FP4, 127.5 if they are int8.
        group: inputs with one scale; 0 for all of a token.
        dtype: of the inputs.
        factor: by NVFP4 the number that multiplies all scales; the scale itself if it is published; else 0.
        is_static: whether the scale is published, for all inputs.
        in_powers: whether scales are powers of two, by MXFP8 and MXFP4.
    """

    largest: float
    group: int = 0
    dtype: torch.dtype = torch.bfloat16
    factor: float = 0.0
    is_static: bool = False
    in_powers: bool = False

    @classmethod
    def of(cls, args: Any, dtype: torch.dtype = torch.bfloat16, factor: float = 1.0) -> Rounding | None:
        """The rounding of a dtype that compressed-tensors' settings may mean, with a factor if it has one; None for
        others."""
        settings = (args.type, args.num_bits, args.symmetric, args.strategy, args.dynamic, args.scale_dtype)
        if settings == ("float", 4, True, "tensor_group", "local", torch.float8_e4m3fn):
            return cls(6.0, args.group_size, dtype, factor) if 0 < factor < math.inf else None
        if (*settings, args.group_size) in _IN_POWERS:
            return cls({8: 448.0, 4: 6.0}[args.num_bits], args.group_size, dtype, in_powers=True)
        is_static = settings[3:5] == ("tensor", False)
        if args.type not in ("int", "float") or settings[1:3] + settings[5:] != (8, True, None):
            return None
        if not is_static and (args.strategy not in ("token", "group") or args.dynamic is not True):
            return None
        if is_static and not 0 < factor < math.inf:
            return None
        group = args.group_size if args.strategy == "group" else 0
        largest = 448.0 if args.type == "float" else 127.5
        return cls(largest, group, dtype, factor if is_static else 0.0, is_static)

    @property
    def named(self) -> str | None:
        """The name of the parameter with the factor."""
        return None if not self.factor else _SCALE if self.is_static else _GLOBAL

    def now(self, module: Any) -> Rounding | None:
        """What a module rounds by now, if it is this but for the factor, and nothing else: a program may write to its
        settings."""
        scheme = module.quantization_scheme if getattr(module, "quantization_enabled", True) else None
        if scheme is None or scheme.input_activations is None or scheme.output_activations is not None:
            return None
        if (factor := self._factor_in(module)) is None:
            return None
        own = Rounding.of(scheme.input_activations, self.dtype, factor)
        return own if own is not None and replace(own, factor=self.factor) == self else None

    def watches(self, module: Any) -> list[Callable[[], bool]]:
        """What no fact tells of, for a `Watch`: the factor may be written to."""
        if self.named is None or self._factor_in(module) is None:
            return []
        table, name, factor = module._parameters, self.named, _bytes_of(module._parameters[self.named])
        return [lambda: _bytes_of(table.get(name)) == factor]

    def facts(self, module: Any) -> list[tuple[dict[str, Any], str]]:
        """What `now` depends on, for a `Watch`."""
        scheme = module.quantization_scheme
        args = vars(scheme.input_activations) if scheme.input_activations is not None else {}
        own = [(vars(module), name) for name in _OF_MODULE] + [(vars(scheme), name) for name in _OF_SCHEME]
        return own + [(args, name) for name in args]

    def by_settings(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """What a module computes."""
        own = self.now(module) if is_plain(x, self.dtype) else None
        return _published.linear_with_activations(module, x, None if own is None else own.rounded)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Rounded inputs on the CPU, without gaps; of up to two dimensions all have one scale, or groups theirs."""
        rows, out = x.shape[:2].numel() if x.dim() > 2 else 1, torch.empty_like(x)
        sizes = rows, x.numel() // rows, threads_for(x.numel())
        prepared(self._add, 2, *sizes, dtype=self.dtype)(x.data_ptr(), out.data_ptr())
        return out

    def add_to(self, program: Program, x: Place, out: Place, rows: int, columns: int) -> None:
        """See `InputRounding`."""
        self._add(program, x, out, rows, columns, threads_for(rows * columns))

    def _add(self, program: Program, x: Place, out: Place, rows: int, columns: int, threads: int) -> None:
        from rabbitllm.engine import _activation_kernels as kernels  # numba comes with it

        wide = self.group or columns
        places = x, out, rows * columns // wide, wide
        if self.named == _GLOBAL:
            program.add(kernels.round_groups, [*places, float_bits(self.factor)], threads)
            return
        eps = torch.finfo(self.dtype).eps
        zero = -0.0 if self.is_static else 0.0  # which is added: a zero has no sign, but without a zero point
        numbers = self.largest, 1.0 if self.in_powers else eps, self.factor, zero
        quarter = round(1 / eps / 4) if self.in_powers else 0
        program.add(kernels.round_rows, [*places, *map(float_bits, numbers), quarter], threads)

    def _factor_in(self, module: Any) -> float | None:
        """The factor that a module has now, 0 if none is needed; None if it has others, or it is not in memory as it is
        published."""
        if any(getattr(module, name, None) is not None for name in {_GLOBAL, _ZERO} - {self.named}):
            return None
        if self.named is None:
            return 0.0
        value, dtype = module._parameters.get(self.named), torch.float32 if self.named == _GLOBAL else self.dtype
        if type(value) is not nn.Parameter or value.dtype is not dtype or not value.is_cpu or value.shape != (1,):
            return None
        stored = _bytes_of(value)
        if dtype is torch.bfloat16:
            dtype, stored = torch.float32, bytes(2) + stored
        return float(struct.unpack("<e" if dtype is torch.float16 else "<f", stored)[0])


def _bytes_of(value: Any) -> bytes:
    """A parameter's first number, by no operation of torch, which would take longer than all else here; nothing of one
    that is not in memory, whose address says nothing."""
    is_here = type(value) is nn.Parameter and value.is_cpu and value.numel()
    return ctypes.string_at(value.data_ptr(), value.itemsize) if is_here else b""


def fuse_activations(model: nn.Module) -> int:
    """Let Linears whose inputs are rounded to 8 bits, or to FP4, round them in one call.

    Returns:
        How many these are.
    """
    fused, right = 0, dict[Rounding, bool]()
    for module in model.modules():
        forward: Any = vars(module).get("forward")
        if getattr(forward, "func", None) is not _published.linear_with_activations:
            continue
        scheme: Any = module.quantization_scheme
        if (args := scheme.input_activations) is None:
            continue
        if (rounding := Rounding.of(args, dtype_of(module._parameters.get("weight")))) is None:
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

    dtype, args = rounding.dtype, module.quantization_scheme.input_activations
    random, every = RandomTensors(), every_half(dtype)
    scales = torch.logspace(-30, 4, 35, dtype=torch.float32, device="cpu").view(1, -1, 1)
    samples = [(random.normal(2, 35, 512).float() * scales).to(dtype), random.normal(3, 512, dtype=dtype)]
    samples += [every[every.abs() < size].view(1, 1, -1) for size in (1.0, 256.0)] + [torch.zeros_like(samples[0])]
    for factor in _FACTORS if rounding.factor else (0.0,):
        value = torch.tensor([factor], dtype=dtype if rounding.is_static else torch.float32, device="cpu")
        own = replace(rounding, factor=float(value))
        parameters = {rounding.named: nn.Parameter(value)} if rounding.named else {}
        like = trial_of(module, _parameters=parameters)
        pairs = ((own.rounded(x), result_of(forward_quantize, like, x, "input", args)) for x in samples)
        if not all(is_result(result, expected) for result, expected in pairs):
            return False
    return True
