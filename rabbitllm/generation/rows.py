"""Modules that treat every row of their input by itself, and how the rows of several calls go through one together.

linear     (…, in) -> (…, out)            rows: all but the last dimension
embedding  ids (…) -> (…, width)          rows: every id
experts    (tokens, hidden), (tokens, k), (tokens, k) -> (tokens, hidden), as transformers' routed experts have it
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
    """How rows lie in a call's tensors; the value is how many dimensions of the result are one row's."""

    FEATURES = 1
    IDS = 2
    EXPERTS = 3


def rowwise(module: nn.Module) -> RowKind | None:
    """Of which kind a module is; None if it may look at more than one row."""
    forward = type(module).forward  # what is derived from these may do more
    if forward in (nn.Linear.forward, Conv1D.forward):
        return RowKind.FEATURES
    if forward is nn.Embedding.forward:
        return RowKind.IDS
    return RowKind.EXPERTS if is_routed(module) else None


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of several calls.

    Attributes:
        args: for one call with all of them.
        parts: takes its result apart, into one for each call.
    """

    args: tuple[torch.Tensor, ...]
    parts: Callable[[Any], list[Any]]


def joined(kind: RowKind, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> RowBatch | None:
    """One call with the rows of all; None if they do not fit together.

    Args:
        kind: of the module.
        calls: arguments of each.
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
    """Of rows, and for each the numbers of its experts and their weights; so each expert is brought once for all."""
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
