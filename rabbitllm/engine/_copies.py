"""Copies of what is streamed, at fewer bits and in memory: with them a model is its own draft (SubSpec, 2509.18344).

The matrices of Linears and of experts are encoded as blocks of ggml, which kernels multiply as they are; all else of a
streamed unit is kept as it is used. Nothing else is copied: units that stay in memory and the KV cache are the model's.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from rabbitllm.base.terminal import size_rounded_up
from rabbitllm.engine.expert_source import ExpertPart, ExpertSource, with_tables
from rabbitllm.engine.experts import MappedExperts, stack_of
from rabbitllm.engine.placement import ACCEPTED, Copies, Placement, Tier, tokens_per_read
from rabbitllm.engine.prefetch import bytes_of
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, SpanReader
from rabbitllm.engine.units import ParameterEntry, UnitSource
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.errors import OptionError
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant.products import Matrix, multiplies
from rabbitllm.quant.quantize import NO_SCALES
from rabbitllm.quant.schemes import ROW_ELEMENTS, Quantized, type_for_rows
from rabbitllm.store.layer_store import WeightFiles

_ENCODED_FROM = (torch.float32, torch.bfloat16, torch.float16)
HEAD = "IQ4_XS"
"""The type of the blocks of all copies outside of layers: at 2 bits a head alone would change a third of the tokens."""


def _type_of(kind: str, shape: Sequence[int], dtype: torch.dtype) -> str | None:
    """The type of the blocks of a matrix (N, K) in copies of a kind; None if it is kept as it is."""
    if len(shape) != 2 or shape[1] % ROW_ELEMENTS or not dtype.is_floating_point or not math.prod(shape):
        return None
    return type_for_rows(kind, shape[1])


def _copy_bytes(kind: str, shape: Sequence[int], dtype: torch.dtype, *, is_matrix: bool) -> int:
    blocks = _type_of(kind, shape, dtype) if is_matrix else None
    if blocks is None:
        return math.prod(shape) * dtype.itemsize
    return shape[0] * BLOCK_TYPES[blocks].row_bytes(shape[1])


def unit_copy_bytes(source: UnitSource, kind: str) -> int:
    """Bytes of the copy of a unit, with blocks of a type, or of smaller ones where its rows are no whole blocks."""
    kind = kind if source.unit.is_layer else HEAD
    return sum(_copy_bytes(kind, e.shape, e.dtype, is_matrix=e.is_linear_weight) for e in source.entries)


def expert_copy_bytes(source: ExpertSource, kind: str) -> int:
    """The same of all experts of a module."""
    leaves = source.leaves.values()
    return source.experts * sum(_copy_bytes(kind, leaf.shape, leaf.entry.dtype, is_matrix=True) for leaf in leaves)


def place_with_copies(plain: Placement, place: Callable[[str, bool], Placement]) -> Placement:
    """The placement with copies of all that it streams that is expected to give the most tokens a second.

    Args:
        plain: the placement without copies.
        place: a type of blocks, and whether a head stays in memory before any layer -> the placement with such copies.

    Raises:
        OptionError: there is nothing to copy, no room for copies, no kernel for them, or another device than the CPU
            computes.
    """
    remedy = "Leave the draft out, or use another kind of draft."
    if not all(budget.is_host for budget in plain.budgets):
        raise OptionError("draft='self' works on the CPU alone; this model computes on a GPU.", remedy)
    if not any(placed.tier in (Tier.STREAMED, Tier.ROUTED) for placed in (*plain.units, *plain.experts)):
        raise OptionError("draft='self' is for streamed layers; all weights of this model fit in memory.", remedy)
    kinds = [kind for kind in ACCEPTED if multiplies(Quantized(kind, (8, BLOCK_TYPES[kind].elements), None))]
    if not kinds:
        raise OptionError("draft='self' needs products with blocks of few bits; this machine has no kernel.", remedy)
    placements = [place(kind, small_first) for kind in kinds for small_first in (True, False)]
    lacking = min(placement.copies.lacking for placement in placements if placement.copies is not None)
    if lacking:
        least = sum(budget.nbytes for budget in plain.budgets) + lacking
        is_less = least < sum(placed.counted for placed in (*plain.units, *plain.experts))
        advice = f"Raise max_memory to {size_rounded_up(least)}, with which they fit, or"
        raise OptionError(
            f"draft='self' keeps copies of the streamed layers in memory, and {size_rounded_up(lacking)} are lacking "
            "for the smallest ones.",
            f"{advice if is_less else 'Copies of these weights save no memory:'} use draft='auto': the checkpoint's "
            f"own heads or the text so far. {remedy}",
        )
    possible = [(tokens_per_read(p, p.copies), p) for p in placements if p.copies is not None and not p.copies.lacking]
    return max(possible, key=operator.itemgetter(0))[1]


def _encoded(weight: torch.Tensor, blocks: str | None) -> torch.Tensor:
    """A weight, or a run of its rows, in blocks of a type: uint8 (bytes,); with None another tensor with its values."""
    if blocks is None:
        return weight.clone()
    from rabbitllm.quant import block_encoders  # needs numba

    values = weight.whole() if isinstance(weight, QuantizedWeight) else weight.detach()
    return block_encoders.encode(blocks, values if values.dtype in _ENCODED_FROM else values.float()).view(-1)


def _kept(
    runs: Sequence[torch.Tensor], blocks: str | None, entry: ParameterEntry, shape: Sequence[int]
) -> torch.Tensor:
    """A weight as it is kept, of the results of `_encoded` for its rows."""
    joined = torch.cat([*runs]) if len(runs) > 1 else runs[0]
    if blocks is None:
        return joined
    form = Quantized(blocks, tuple(shape), str(entry.dtype).removeprefix("torch."))
    return QuantizedWeight(Matrix(form, joined, NO_SCALES, NO_SCALES), entry.dtype, entry.sibling)


class _CopiedExperts(MappedExperts):
    """The copies of the experts of one module, by the name of the leaf and the expert."""

    def __init__(self, weights: Mapping[tuple[str, int], torch.Tensor]) -> None:
        self._weights = weights

    def _weight(self, leaf: str, expert: int) -> torch.Tensor:
        return self._weights[leaf, expert]


_Copy: TypeAlias = tuple[ParameterEntry, torch.Tensor]
"""A parameter of a streamed unit: where it is bound, and what is bound there while the model is its own draft."""


class WeightCopies:
    """The copies of all that a model streams.

    Args:
        model: the model, for conversions.
        sources, experts: its units, and its modules with experts.
        placement: says which of them are streamed; none is copied if it has no `copies`.
        store: their files. One unit or expert at a time is read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sources: Mapping[str, UnitSource],
        experts: Sequence[ExpertSource],
        placement: Placement,
        store: WeightFiles,
    ) -> None:
        self._copies: list[_Copy] = []
        if placement.copies is None:
            return
        disk = SpanReader(store, THROUGH_THE_CACHE, store.checks)
        for name in (placed.unit for placed in placement.units if placed.tier is Tier.STREAMED):
            self._copies += _of_unit(model, sources[name], placement.copies, disk)
        routed = {placed.unit for placed in placement.experts if placed.tier is Tier.ROUTED}
        for source in (source for source in experts if source.name in routed):
            with_values = with_tables(source, store, torch.device("cpu"))
            self._copies += _of_experts(model, with_values, placement.copies, disk)

    def __bool__(self) -> bool:
        return bool(self._copies)

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """A context in which the copies are bound instead of what the streamed units have between two passes."""
        before = [(entry, entry.table[entry.leaf]) for entry, _ in self._copies]
        try:
            for entry, weight in self._copies:
                entry.table[entry.leaf] = weight
            yield
        finally:
            for entry, weight in before:
                entry.table[entry.leaf] = weight


def _of_unit(model: PreTrainedModel, source: UnitSource, copies: Copies, disk: SpanReader) -> Iterator[_Copy]:
    kind = copies.kind if source.unit.is_layer else HEAD
    blocks = {e.target: _type_of(kind, e.shape, e.dtype) if e.is_linear_weight else None for e in source.entries}
    runs = defaultdict[str, list[torch.Tensor]](list)
    buffer = torch.empty(source.slot_bytes, dtype=torch.uint8, device="cpu")
    for piece in source.reads.values():
        disk.read(piece.spans, bytes_of(buffer))
        for entry, weight in piece.parameters(model, piece.part_of(buffer)):
            runs[entry.target].append(_encoded(weight, blocks[entry.target]))
    for entry in source.entries:
        copied = _kept(runs.pop(entry.target), blocks[entry.target], entry, entry.shape)
        if entry.sibling is not None and isinstance(copied, QuantizedWeight):
            entry.sibling.install()
        yield entry, entry.bindable(copied)


def _of_experts(model: PreTrainedModel, source: ExpertSource, copies: Copies, disk: SpanReader) -> Iterator[_Copy]:
    weights: dict[tuple[str, int], torch.Tensor] = {}
    buffer = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu")

    def part_of(part: ExpertPart) -> torch.Tensor:
        return buffer[part.at : part.at + part.nbytes]

    for expert in range(source.experts):
        disk.read(source.spans(expert), bytes_of(buffer))
        for name, leaf in source.leaves.items():
            weight = leaf.weight(model, part_of, expert)
            blocks = _type_of(copies.kind, weight.shape, leaf.entry.dtype)
            weights[name, expert] = _kept([_encoded(weight, blocks)], blocks, leaf.entry, weight.shape)
    supply = _CopiedExperts(weights)
    for name, leaf in source.leaves.items():
        stack = stack_of(supply, name, leaf, torch.device("cpu"))
        yield leaf.entry, leaf.entry.bindable(stack)
