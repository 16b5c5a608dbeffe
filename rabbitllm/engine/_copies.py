"""Copies of what is streamed, at fewer bits and in memory: with them a model is its own draft (SubSpec, 2509.18344).

The matrices of Linears and of experts are encoded as blocks of ggml, which kernels multiply as they are; all else of a
streamed unit is kept as it is used. Nothing else is copied: units that stay in memory and the KV cache are the model's.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from rabbitllm.base.terminal import size_rounded_up
from rabbitllm.engine._copy_files import CopyBytes, CopyJob, kept_or_made
from rabbitllm.engine.expert_source import ExpertParameter, ExpertSource, bytes_in, with_tables
from rabbitllm.engine.experts import ResidentExperts, stack_of
from rabbitllm.engine.placement import ACCEPTED, Placement, Tier, tokens_per_read
from rabbitllm.engine.prefetch import bytes_of
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, SpanReader
from rabbitllm.engine.units import ParameterEntry, UnitSource
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.errors import OptionError
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.tensor_spec import dtype_name
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


def _form_of(name: str, shape: Sequence[int], dtype: torch.dtype, blocks: str | None) -> TensorToWrite:
    """How the result of `_encoded` for a whole weight lies in a file."""
    if blocks is None:
        return TensorToWrite(name, dtype_name(dtype), tuple(shape))
    return TensorToWrite(name, "U8", (shape[0] * BLOCK_TYPES[blocks].row_bytes(shape[1]),))


def _kept(encoded: torch.Tensor, blocks: str | None, entry: ParameterEntry, shape: Sequence[int]) -> torch.Tensor:
    """A weight as it is kept, of the result of `_encoded`."""
    if blocks is None:
        return encoded
    form = Quantized(blocks, tuple(shape), str(entry.dtype).removeprefix("torch."))
    return QuantizedWeight(Matrix(form, encoded, NO_SCALES, NO_SCALES), entry.dtype, entry.sibling)


_Copy: TypeAlias = tuple[ParameterEntry, torch.Tensor]
"""A parameter of a streamed unit: where it is bound, and what is bound there while the model is its own draft."""


class WeightCopies:
    """The copies of all that a model streams.

    Args:
        model: the model, for conversions.
        sources, experts: its units, and its modules with experts.
        placement: says which of them are streamed; none is copied if it has no `copies`.
        store: their files. One unit or expert at a time is read, and only if its copy is in no file yet.
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
        kind, disk = placement.copies.kind, SpanReader(store, THROUGH_THE_CACHE, store.checks)
        streamed = [sources[placed.unit] for placed in placement.units if placed.tier is Tier.STREAMED]
        routed = {placed.unit for placed in placement.experts if placed.tier is Tier.ROUTED}
        copied: list[_UnitCopy | _ExpertCopies] = [_UnitCopy(model, source, kind, disk) for source in streamed]
        copied += [_ExpertCopies(model, source, kind, disk, store) for source in experts if source.name in routed]
        for copy, encoded in zip(copied, kept_or_made([copy.job for copy in copied], store), strict=True):
            self._copies += copy.bindable(encoded)

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


class _UnitCopy:
    """The copy of one unit, in blocks of a kind, or of `HEAD`'s."""

    def __init__(self, model: PreTrainedModel, source: UnitSource, kind: str, disk: SpanReader) -> None:
        self._source = source
        kind = kind if source.unit.is_layer else HEAD
        self._blocks = {
            e.target: _type_of(kind, e.shape, e.dtype) if e.is_linear_weight else None for e in source.entries
        }
        forms = tuple(_form_of(e.target, e.shape, e.dtype, self._blocks[e.target]) for e in source.entries)
        about = repr([(e.shape, e.dtype, self._blocks[e.target]) for e in source.entries])
        self.job = CopyJob(source.unit.name, kind, forms, about, functools.partial(self._make, model, disk))

    def _make(self, model: PreTrainedModel, disk: SpanReader) -> CopyBytes:
        runs = defaultdict[str, list[torch.Tensor]](list)
        buffer = torch.empty(self._source.slot_bytes, dtype=torch.uint8, device="cpu")
        for piece in self._source.reads.values():
            disk.read(piece.spans, bytes_of(buffer))
            for entry, weight in piece.parameters(model, piece.part_of(buffer)):
                runs[entry.target].append(_encoded(weight, self._blocks[entry.target]))
        return {target: torch.cat(parts) if len(parts) > 1 else parts[0] for target, parts in runs.items()}

    def bindable(self, encoded: CopyBytes) -> Iterator[_Copy]:
        for entry in self._source.entries:
            copied = _kept(encoded[entry.target], self._blocks[entry.target], entry, entry.shape)
            if entry.sibling is not None and isinstance(copied, QuantizedWeight):
                entry.sibling.install()
            yield entry, entry.bindable(copied)


class _ExpertCopies:
    """The copies of the experts of one module."""

    def __init__(
        self, model: PreTrainedModel, source: ExpertSource, kind: str, disk: SpanReader, store: WeightFiles
    ) -> None:
        self._source = source
        self._shapes = {name: _shape_of(leaf) for name, leaf in source.leaves.items()}
        dtypes = {name: leaf.entry.dtype for name, leaf in source.leaves.items()}
        self._blocks = {name: _type_of(kind, shape, dtypes[name]) for name, shape in self._shapes.items()}
        forms = [
            _form_of(f"{name}.{expert}", shape, dtypes[name], self._blocks[name])
            for expert in range(source.experts)
            for name, shape in self._shapes.items()
        ]
        about = repr((self._shapes, dtypes, self._blocks))
        self.job = CopyJob(source.name, kind, tuple(forms), about, functools.partial(self._make, model, disk, store))

    def _make(self, model: PreTrainedModel, disk: SpanReader, store: WeightFiles) -> CopyBytes:
        encoded: CopyBytes = {}
        source = with_tables(self._source, store, torch.device("cpu"))
        buffer = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu")
        for expert in range(source.experts):
            disk.read(source.spans(expert), bytes_of(buffer))
            for name, leaf in source.leaves.items():
                weight = leaf.weight(model, leaf.in_memory(bytes_in(buffer)), expert)
                encoded[f"{name}.{expert}"] = _encoded(weight, self._blocks[name])
        return encoded

    def bindable(self, encoded: CopyBytes) -> Iterator[_Copy]:
        leaves = self._source.leaves
        supply = ResidentExperts(
            {
                (name, expert): _kept(encoded[f"{name}.{expert}"], self._blocks[name], leaf.entry, self._shapes[name])
                for name, leaf in leaves.items()
                for expert in range(self._source.experts)
            }
        )
        for name, leaf in leaves.items():
            yield leaf.entry, leaf.entry.bindable(stack_of(supply, name, leaf, torch.device("cpu")))


def _shape_of(leaf: ExpertParameter) -> tuple[int, ...]:
    """The shape of `leaf.weight`."""
    return leaf.shape[::-1] if leaf.coded is not None and leaf.coded.is_turned else leaf.shape
