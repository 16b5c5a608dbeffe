"""Measures how fast this machine multiplies with weights published in bitsandbytes' own form, with its modules.

They are constructed as for a checkpoint, around existing codes and scales; nothing is quantized for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rabbitllm.quant.schemes import Quantized

_FORM = "bitsandbytes "
_BLOCK = 64
"""Elements that share a scale, bitsandbytes' default."""
_STATE = ".quant_state.bitsandbytes__"


def form_of(module: nn.Module) -> str | None:
    """Return the form that a module's weight is multiplied from: "bitsandbytes 8bit", or 4bit with its compute dtype.

    None for any other module.
    """
    kind = type(module).__name__
    if kind == "Linear8bitLt":
        return f"{_FORM}8bit"
    if kind == "Linear4bit":
        return f"{_FORM}4bit in {str(module.compute_dtype or torch.float32).removeprefix('torch.')}"
    return None


def is_form(form: str) -> bool:
    """Whether a form is one of bitsandbytes' own."""
    return form.startswith(_FORM)


def nbytes_of(form: str, rows: int, columns: int) -> int:
    """Return the bytes of a matrix as stored, with its scales."""
    if "8bit" in form:
        return rows * columns + 4 * rows
    return rows * columns // 2 + -(-rows * columns // _BLOCK) * 4


class BitsandbytesMatrix:
    """A `StoredMatrix` that one of bitsandbytes' modules multiplies with.

    Args:
        module: with its weight bound.
        form: only its shape is used.
    """

    def __init__(self, module: Any, form: Quantized) -> None:
        self._module = module
        self.form = form
        self.payload = self.absmax = self.table = module.weight.data

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Never called."""
        raise NotImplementedError

    def grouped(self, x: torch.Tensor) -> None:
        """Return None: matrices are multiplied with one by one."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute `x @ W.T` with the module."""
        result: torch.Tensor = self._module(x)
        return result


def matrix(form: str, rows: int, columns: int, filled: Callable[[int], torch.Tensor]) -> BitsandbytesMatrix:
    """Return a matrix of made-up codes.

    Args:
        form: see `form_of`.
        rows, columns: of the matrix.
        filled: returns uint8 (nbytes,) that has been written to.
    """
    from bitsandbytes import functional
    from bitsandbytes import nn as modules

    if "8bit" in form:
        codes = filled(rows * columns).view(torch.int8).view(rows, columns)
        with torch.device("meta"):
            made = modules.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, threshold=6.0)
        scales = torch.ones(rows, device=codes.device)
        made.weight = modules.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)
    else:
        compute = getattr(torch, form.rpartition(" ")[2])
        codes = filled(rows * columns // 2).view(-1, 1)
        with torch.device("meta"):
            made = modules.Linear4bit(columns, rows, bias=False, compute_dtype=compute, quant_type="nf4")
        table = functional.get_4bit_type("nf4", device=codes.device)
        absmax = torch.ones(-(-rows * columns // _BLOCK), device=codes.device)
        state = functional.QuantState(
            absmax, torch.Size((rows, columns)), table, blocksize=_BLOCK, quant_type="nf4", dtype=compute
        )
        made.weight = modules.Params4bit(
            codes, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True, module=made
        )
    return BitsandbytesMatrix(made.eval(), Quantized(form, (rows, columns), None))


def made_up_state(name: str) -> torch.Tensor | None:
    """Return made-up content, uint8 (nbytes,), of a stored part of that name that is metadata; None for other parts."""
    if _STATE not in name:
        return None
    said = {
        "quant_type": name.rpartition("__")[2],
        "blocksize": _BLOCK,
        "dtype": "float32",
        "shape": [1, 1],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 0.0,
    }
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
