"""bitsandbytes' 4bit weights, made for each pass around streamed codes.

transformers' own operation reads a part of each weight's state from JSON in a tensor, and puts a number from it into
another tensor. With tensors on a GPU, each matrix of each pass would wait for the computation. The state is the same in
each pass, so it is read in the first only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps


class WrapAgain(ConversionOps):  # type: ignore[misc]
    """transformers' operation at the first call, then its result with the new tensors. For one weight.

    Args:
        first: transformers' operation.
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
