"""Modules that compute every row of their input independently, and how to join the rows of several calls.

linear     (…, in) -> (…, out)            rows: all but the last dimension
embedding  ids (…) -> (…, width)          rows: every id
experts    (tokens, hidden), (tokens, k), (tokens, k) -> (tokens, hidden), as in transformers' routed experts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rabbitllm.engine.expert_finding import is_routed


class RowKind(Enum):
    """The layout of rows in the tensors of a call; see the module's docstring."""

    FEATURES = 1
    IDS = 2
    EXPERTS = 3


def rowwise(module: nn.Module) -> RowKind | None:
    """The kind of a module; None if it may combine rows."""
    forward = type(module).forward  # subclasses with a forward of their own may combine rows
    if forward in (nn.Linear.forward, Conv1D.forward):
        return RowKind.FEATURES
    if forward is nn.Embedding.forward:
        return RowKind.IDS
    return RowKind.EXPERTS if is_routed(module) else None


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of several calls.

    Attributes:
        args: arguments for one call with all rows.
        parts: splits the result of that call into the result of each call.
    """

    args: tuple[torch.Tensor, ...]
    parts: Callable[[Any], list[Any]]


def joined(kind: RowKind, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> RowBatch | None:
    """One call with the rows of all calls; None if they cannot be joined.

    Args:
        kind: kind of the module.
        calls: positional and keyword arguments of each call.
    """
    if kind is RowKind.EXPERTS:
        return _routed(calls)
    if any(kwargs or len(args) != 1 for args, kwargs in calls):
        return None
    given = [args[0] for args, _ in calls]
    if len(given) == 1:
        return RowBatch((given[0],), lambda result: [result])
    first = given[0]
    width = first.shape[-1:] if kind is RowKind.FEATURES else ()
    if any(
        one.dtype != first.dtype or one.device != first.device or (kind is RowKind.FEATURES and one.shape[-1:] != width)
        for one in given
    ):
        return None
    rows = [one.reshape(-1, *width) for one in given]
    lengths = [len(one) for one in rows]
    shapes = [one.shape[: one.dim() - len(width)] for one in given]

    def parts(result: torch.Tensor) -> list[torch.Tensor]:
        return [
            part.view(*shape, *result.shape[1:])
            for part, shape in zip(torch.split(result, lengths), shapes, strict=True)
        ]

    return RowBatch((torch.cat(rows),), parts)


def _routed(calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> RowBatch | None:
    """Join rows with the indices and weights of their experts, so that each expert is loaded once for all calls."""
    first = calls[0][0]
    for args, kwargs in calls:
        if kwargs or len(args) != 3 or any(not isinstance(one, torch.Tensor) or one.dim() != 2 for one in args):
            return None
        if any(
            (one.dtype, one.device, one.shape[1]) != (other.dtype, other.device, other.shape[1])
            or len(one) != len(args[0])
            for one, other in zip(args, first, strict=True)
        ):
            return None
    lengths = [len(args[0]) for args, _ in calls]
    together = tuple(torch.cat(tensors) for tensors in zip(*(args for args, _ in calls), strict=True))
    return RowBatch(together, lambda result: list(torch.split(result, lengths)))
