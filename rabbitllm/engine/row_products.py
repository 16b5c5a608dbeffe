"""Linear layers that use the fastest bfloat16 product on this machine (`quant/bfloat_products.py`).

A single sequence goes through torch's own product, so that its logits equal those of transformers bit for bit, unless
`fast_bfloat16=True`. Packed batches always use the product here: torch's results depend on the number of rows anyway.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from rabbitllm.quant import bfloat_products


class RowProducts:
    """Replaces the forward of each linear layer until it is closed.

    Args:
        model: the model; its layers may be streamed.
    """

    def __init__(self, model: Any) -> None:
        make_kernels(model)
        self._linears = [
            module
            for module in model.modules()
            if type(module).forward is nn.Linear.forward and "forward" not in module.__dict__
        ]
        for module in self._linears:
            module.forward = functools.partial(_forward, module)

    def close(self) -> None:
        """Restore the forward of each layer."""
        for module in self._linears:
            del module.forward
        self._linears = []


def make_kernels(model: Any) -> None:
    """Load the kernels that the model's layers will need; compile them if necessary.

    Call it before the first request, and before free memory is measured.
    """
    if model.dtype == torch.bfloat16:
        bfloat_products.kernel_here()


def _forward(module: Any, input: torch.Tensor) -> torch.Tensor:
    # the kernels have no backward pass: a gradient would be missing, and others would be wrong without an error
    trains = torch.is_grad_enabled() and (input.requires_grad or module.weight.requires_grad)
    if not trains and bfloat_products.multiplies(input, module.weight):
        return bfloat_products.linear(input, module.weight, module.bias)
    return nn.functional.linear(input, module.weight, module.bias)
