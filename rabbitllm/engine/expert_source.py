"""The bytes of a module's experts in layer files, and their conversion to weights.

A mixture-of-experts module has parameters of shape (experts, ...), of which a token uses a few slices. Their conversion
is decided once, when the model is built. The experts of a module differ only in the offsets of their bytes; these are
arrays, since a model has tens of thousands of experts. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from rabbitllm.engine._weights import Recipe
from rabbitllm.engine.published_codes import IntegerLayout, bring_together, order_of, rearrange
from rabbitllm.engine.span_reader import FileSpan, compare
from rabbitllm.engine.units import MatrixChooser, ParameterEntry, typed
from rabbitllm.engine.weight_tensors import QuantizedWeight, StoredMatrix
from rabbitllm.errors import IncompleteSplitError, UnknownArchitectureError
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size, torch_dtype
from rabbitllm.quant.coded import CodedForm, CodedMatrix
from rabbitllm.quant.products import FusedMatrix, Matrix
from rabbitllm.quant.quantize import NO_SCALES, NestedScales, dequantize
from rabbitllm.quant.schemes import STORED, Quantized, code_values
from rabbitllm.quant.turned import TurnedMatrix
from rabbitllm.store.layer_store import WeightFiles

BytesOf = Callable[["ExpertPart"], torch.Tensor]
"""A part of one expert -> its bytes, uint8 (nbytes,)."""


@dataclass(eq=False)
class ExpertPart:
    """Bytes of one kind that each expert has.

    Attributes:
        dtype, shape: of one expert's tensor.
        nbytes: of one expert.
        at: their offset in the memory of an expert.
        files: one file for each expert, or one for all.
        offsets: of each expert in its file, int64 (experts,).
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    at: int
    files: tuple[str, ...]
    offsets: npt.NDArray[np.int64]

    def file(self, expert: int) -> str:
        """The file that has an expert's bytes."""
        return self.files[expert if len(self.files) > 1 else 0]

    def is_followed_by(self, other: ExpertPart) -> bool:
        """Whether another part of every expert comes directly after this one, in its file and in memory."""
        adjacent = self.at + self.nbytes == other.at and self.files == other.files
        return adjacent and bool(np.all(self.offsets + self.nbytes == other.offsets))


def bytes_in(memory: torch.Tensor) -> BytesOf:
    """The bytes of an expert's parts where they lie in its memory, uint8."""
    return lambda part: memory[part.at : part.at + part.nbytes]


@dataclass(frozen=True, eq=False)
class QuantizedScales:
    """The data to dequantize quantized scales of experts to float32; small enough to be kept in memory.

    Attributes:
        dequantized: one expert's dequantized scales, float32; in its memory after all that is stored.
        offsets: the mean of the scales of each expert's tensor, or of the one tensor of all experts.
        where: the specs of the scales' scales: one, or one for each expert.
        tables: the specs of the code tables of the scales.
        scales: the values at `where`, float32 (experts, n), once they are read (`with_tables`).
        table: the values at `tables`, the same for all.
    """

    dequantized: ExpertPart
    offsets: npt.NDArray[np.float32]
    where: tuple[TensorSpec, ...]
    tables: tuple[TensorSpec, ...]
    scales: torch.Tensor | None = None
    table: torch.Tensor | None = None

    def expanded(self, codes: torch.Tensor, expert: int) -> torch.Tensor:
        """One expert's scales, float32, from their codes, uint8 (blocks,)."""
        assert self.scales is not None
        assert self.table is not None
        offset = torch.tensor(self.offsets[expert if len(self.offsets) > 1 else 0], device="cpu")
        return NestedScales(self.scales[expert], self.table, offset).expanded(codes)


@dataclass(frozen=True, eq=False)
class Block:
    """A stored tensor of each expert, or an expert's slice of the one tensor of all experts.

    Attributes:
        pattern: of the checkpoint's name, as in the conversion.
        sliced: whether it is a slice.
        form: its quantized form; None if it is not compressed.
        payload, scales: its bytes.
        tables: the specs of the code table: one, or one for each expert.
        table: the code table, once it is read (`with_tables`); the same for all.
        nesting: the data to dequantize quantized scales; None if the scales are not quantized.
    """

    pattern: str
    sliced: bool
    form: Quantized | None
    payload: ExpertPart
    scales: ExpertPart | None = None
    tables: tuple[TensorSpec, ...] = ()
    table: torch.Tensor | None = None
    nesting: QuantizedScales | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one expert's tensor."""
        return self.form.shape if self.form else self.payload.shape

    @property
    def parts(self) -> tuple[ExpertPart, ...]:
        """Its bytes, payload first."""
        return (self.payload,) if self.scales is None else (self.payload, self.scales)

    def absmax(self, bytes_of: BytesOf, expert: int) -> torch.Tensor:
        """One expert's scales, float32 (blocks,); a new tensor if they are quantized, empty for blocks of GGUF."""
        if self.scales is None:  # they are in the blocks
            return NO_SCALES
        stored = typed(bytes_of(self.scales), retyped(self.scales, self.scales.shape))
        return stored if self.nesting is None else self.nesting.expanded(stored, expert)


def retyped(part: ExpertPart, shape: tuple[int, ...]) -> TensorSpec:
    """A part as a tensor of another shape, for `typed`."""
    return TensorSpec("", part.dtype, shape, "", 0, byte_size(part.dtype, shape))


@dataclass(frozen=True, eq=False)
class Rearranged:
    """Codes and scales that are rearranged when an expert is read: integers that lie by inputs in a file, to rows;
    scales that have a factor for each of several matrices, to float32 for all; or scales and zeros.

    Attributes:
        layout: how integers lie; None if codes stay as they are.
        matrices: the indices of the blocks of each: its integers, zeros and scales, and the groups of its inputs, if
            these are stored; or its codes and scales, and their factor or zeros, if they have some.
        codes, scales, order: the rearranged ones, of all of them, and the order of the inputs, if groups of them may
            lie anywhere; in an expert's memory, where nothing else is.
        power: of the factor.
        cast: the dtype that scales are rounded to first; None if they are used as stored.
    """

    layout: IntegerLayout | None
    matrices: tuple[tuple[int, ...], ...]
    codes: ExpertPart
    scales: ExpertPart
    power: int = 1
    cast: torch.dtype | None = None
    order: ExpertPart | None = None

    @property
    def parts(self) -> tuple[ExpertPart, ...]:
        """What is in an expert's memory."""
        return (self.codes, self.scales) if self.order is None else (self.codes, self.scales, self.order)


@dataclass(frozen=True, eq=False)
class CodedBlocks:
    """The blocks of a published matrix that is multiplied from its codes.

    Attributes:
        form: of one expert's matrix, whose rows are those of all blocks.
        codes, scales: the indices of its blocks, by rows.
        is_turned: whether the parameter is the transposed matrix.
        rearranged: in place of codes and scales, what is rearranged first.
    """

    form: CodedForm
    codes: tuple[int, ...]
    scales: tuple[int, ...]
    is_turned: bool
    rearranged: Rearranged | None = None


@dataclass(frozen=True, eq=False)
class ExpertParameter:
    """One parameter of shape (experts, ...).

    Attributes:
        entry: the parameter that it is bound to.
        recipe: the conversion from the blocks.
        blocks: in the order of the recipe's patterns.
        stacks: whether it is the concatenated rows of the blocks.
        matrix_type: the type that multiplies it in its quantized form; None if each use dequantizes it.
        coded: the parts of a published matrix, if its type multiplies these.
    """

    entry: ParameterEntry
    recipe: Recipe
    blocks: tuple[Block, ...]
    stacks: bool
    matrix_type: type[StoredMatrix] | None = None
    coded: CodedBlocks | None = None

    @property
    def parts(self) -> tuple[ExpertPart, ...]:
        """The stored parts that it is made from."""
        return tuple(part for block in self.blocks for part in block.parts)

    @property
    def coded_parts(self) -> tuple[list[ExpertPart], ...]:
        """The codes and the scales of a published matrix, which form one each; none if it is dequantized."""
        if self.rearranged is not None:
            return [self.rearranged.codes], [self.rearranged.scales]
        chosen = () if self.coded is None else (self.coded.codes, self.coded.scales)
        return tuple([self.blocks[index].payload for index in indices] for indices in chosen)

    @property
    def rearranged(self) -> Rearranged | None:
        """What is rearranged when it is read; None if it is used as it is stored."""
        return None if self.coded is None else self.coded.rearranged

    @cached_property
    def _runs(self) -> tuple[Sequence[ExpertPart], ...]:
        """The parts of its codes or values, and of the scales that it is multiplied with, each as one if adjacent."""
        if self.coded is not None:
            return tuple(map(_as_one, self.coded_parts))
        scales = [block.nesting.dequantized if block.nesting is not None else block.scales for block in self.blocks]
        return _as_one([block.payload for block in self.blocks]), _as_one([part for part in scales if part is not None])

    @property
    def is_view(self) -> bool:
        """Whether an expert's weight is a view of the stored bytes if its blocks are contiguous."""
        dtype = torch_dtype(self.blocks[0].payload.dtype)
        plain = all(block.form is None for block in self.blocks)
        return self.stacks and plain and (dtype == self.recipe.dtype or not dtype.is_floating_point)

    @property
    def view(self) -> tuple[object, ...] | None:
        """All that a weight depends on which is a view of an expert's memory, but for that; None if it is none."""
        if not self.is_view and self.matrix_type is None:
            return None
        table, parts = self.blocks[0].table, [part for run in self._runs for part in run]
        parts += () if self.rearranged is None else self.rearranged.parts  # the order of inputs, too
        values = None if table is None else table.cpu().numpy().tobytes()
        places = tuple((part.dtype, part.shape, part.nbytes, part.at) for part in parts)
        forms = self.matrix_type, self.blocks[0].form, self.coded and self.coded.form
        return self.shape, self.entry.dtype, self.recipe.dtype, forms, places, values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one expert's weight."""
        return tuple(self.entry.shape[1:])

    @cached_property
    def makes_scales(self) -> bool:
        """Whether an expert's scales are dequantized before it is multiplied in its quantized form."""
        return self.matrix_type is not None and any(block.nesting is not None for block in self.blocks)

    def rearrange(self, stored: BytesOf, memory: BytesOf) -> None:
        """Write the rearranged codes and scales of an expert, if it has some, to its memory.

        Raises:
            UnknownArchitectureError: as `order_of` does, or the orders of its matrices differ.
        """
        if (how := self.rearranged) is None or self.coded is None:
            return
        if how.layout is None:
            self._expand(how, self.coded.form, stored, memory)
            return
        (rows, columns), begin, orders = self.coded.form.shape, 0, list[torch.Tensor | None]()
        codes, words = (memory(part).view(rows, -1) for part in (how.codes, how.scales))
        for indices in how.matrices:
            payloads = (self.blocks[index].payload for index in indices)
            parts = [typed(stored(part), retyped(part, part.shape)) for part in payloads]
            end = begin + parts[2].shape[1]
            order = order_of(how.layout, parts, self.entry.target)
            rearrange(how.layout, parts, codes[begin:end].view(-1), words[begin:end].view(-1), order, threads=1)
            orders.append(order)
            begin = end
        if how.order is not None:
            in_order = torch.arange(columns, device="cpu")
            first, *others = (in_order if order is None else order for order in orders)
            if not all(torch.equal(order, first) for order in others):
                raise UnknownArchitectureError(
                    f"Inputs of {self.entry.target} have another order in each matrix of an expert.",
                    "Load it with exact=True (--exact).",
                )
            memory(how.order).view(torch.int64).copy_(first)

    def _expand(self, how: Rearranged, form: CodedForm, stored: BytesOf, memory: BytesOf) -> None:
        from rabbitllm.engine._published_conversions import as_factors

        scales, codes, begin, filled = memory(how.scales).view(form.grid[0], -1), memory(how.codes), 0, 0
        for indices in how.matrices:
            payload, *others = (self.blocks[index].payload for index in indices)
            given, *factors = (typed(stored(part), retyped(part, part.shape)) for part in others)
            codes[filled : filled + payload.nbytes] = stored(payload)
            end = begin + -(-payload.shape[0] // form.block[0])
            if form.has_zeros:
                bring_together(form, given, factors[0], scales[begin:end].view(-1))
            else:
                floats = as_factors(given if how.cast is None else given.to(how.cast))
                for factor in factors:
                    floats = floats * factor.float().reshape(()) ** how.power
                scales.view(torch.float32)[begin:end] = floats.reshape(-1, 1 if floats.numel() == 1 else form.grid[1])
            begin, filled = end, filled + payload.nbytes

    def in_memory(self, stored: BytesOf) -> BytesOf:
        """The bytes to make an expert's weight of: the stored ones, or rearranged ones in memory of their own."""
        if self.rearranged is None:
            return stored
        parts = {part: torch.empty(part.nbytes, dtype=torch.uint8, device="cpu") for part in self.rearranged.parts}
        self.rearrange(stored, parts.__getitem__)
        return parts.__getitem__

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of the dequantized scales that are kept for one expert."""
        nested = [block.nesting for block in self.blocks if block.nesting is not None]
        return sum(nesting.dequantized.nbytes for nesting in nested) if self.matrix_type is not None else 0

    def make_scales(self, bytes_of: BytesOf, expert: int) -> None:
        """Write the dequantized scales of an expert to their offset in its memory."""
        for block in self.blocks:
            if block.nesting is not None:
                scales = block.nesting.dequantized
                bytes_of(scales).view(torch.float32).copy_(block.absmax(bytes_of, expert))

    def weight(self, model: PreTrainedModel, bytes_of: BytesOf, expert: int, *, scaled: bool = False) -> torch.Tensor:
        """One expert's weight, of `shape`, or transposed if it is coded and turned; a view of its bytes if possible.

        Args:
            model: the skeleton, for conversions.
            bytes_of: provides that expert's bytes.
            expert: its index.
            scaled: whether `make_scales` has written the scales into its memory.
        """
        if self.coded is not None:
            codes, scales = (_joined(bytes_of, parts) for parts in self._runs)
            how = self.rearranged
            order = bytes_of(how.order).view(torch.int64) if how is not None and how.order is not None else None
            return QuantizedWeight(CodedMatrix(self.coded.form, codes, scales, order=order), self.entry.dtype)
        if self.matrix_type is not None:
            assert not issubclass(self.matrix_type, CodedMatrix)
            return self._quantized(self.matrix_type, bytes_of, expert, scaled)
        if self.is_view:
            first = self.blocks[0].payload
            flat = _joined(bytes_of, self._runs[0])
            return typed(flat, retyped(first, self.shape))
        if self.stacks:
            parts = [self._dequantized(block, bytes_of, expert) for block in self.blocks]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._converted(model, bytes_of, expert)

    def _quantized(
        self, matrix_type: type[Matrix] | type[FusedMatrix], bytes_of: BytesOf, expert: int, scaled: bool
    ) -> torch.Tensor:
        first = self.blocks[0]
        assert first.form is not None
        assert first.table is not None
        payload = _joined(bytes_of, self._runs[0])
        form = replace(first.form, shape=self.shape)
        codes = typed(payload, retyped(first.payload, (len(payload),)))
        if first.scales is None or (self.makes_scales and not scaled):
            absmax = torch.cat([block.absmax(bytes_of, expert) for block in self.blocks])
        else:
            scales = _joined(bytes_of, self._runs[1])
            absmax = typed(scales, retyped(self._runs[1][0], (len(scales) // 4,)))
        assert self.recipe.dtype is not None
        return QuantizedWeight(matrix_type(form, codes, absmax, first.table), self.recipe.dtype)

    def _dequantized(self, block: Block, bytes_of: BytesOf, expert: int) -> torch.Tensor:
        payload = typed(bytes_of(block.payload), retyped(block.payload, block.payload.shape))
        dtype = self.recipe.dtype
        if block.form is None:
            return payload.to(dtype) if dtype is not None and payload.is_floating_point() else payload
        assert dtype is not None
        assert block.table is not None
        return dequantize(block.form, payload, block.absmax(bytes_of, expert), block.table, dtype)

    def _converted(self, model: PreTrainedModel, bytes_of: BytesOf, expert: int) -> torch.Tensor:
        names = tuple((block.pattern, str(index)) for index, block in enumerate(self.blocks))

        def read(name: str, dtype: torch.dtype | None) -> torch.Tensor:
            block = self.blocks[int(name)]
            tensor = self._dequantized(block, bytes_of, expert)
            return tensor[None] if block.sliced else tensor

        tensor = replace(self.recipe, sources=names).make(model, read)[self.entry.target]
        return tensor[0]


@dataclass(frozen=True, eq=False)
class ExpertSource:
    """The experts of one module, as decided when the model is built.

    Attributes:
        name: the module's path in the model.
        unit: the name of the unit that it is in.
        module: the experts module.
        experts: the number of its experts.
        used: the number of them that a token uses.
        leaves: its parameters of shape (experts, ...), by the name of the leaf.
        nbytes: memory of one expert; a multiple of the block of a file system.
    """

    name: str
    unit: str
    module: nn.Module
    experts: int
    used: int
    leaves: Mapping[str, ExpertParameter]
    nbytes: int

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts on disk."""
        return self.expert_bytes * self.experts

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert on disk."""
        return sum(part.nbytes for leaf in self.leaves.values() for part in leaf.parts)

    @property
    def ready_bytes(self) -> int:
        """Bytes of all experts, ready to multiply with."""
        ready = 0
        for leaf in self.leaves.values():
            parts = leaf.parts if leaf.rearranged is None else leaf.rearranged.parts
            coded = sum(part.nbytes for part in parts) + leaf.dequantized_bytes
            ready += coded * self.experts if leaf.matrix_type else leaf.entry.nbytes
        return ready

    @cached_property
    def is_rearranged(self) -> bool:
        """Whether an expert is read to other memory first, and rearranged from there."""
        return any(leaf.rearranged is not None for leaf in self.leaves.values())

    def rearrange(self, stored: torch.Tensor, memory: torch.Tensor, leaf: str | None) -> None:
        """Write what is rearranged of an expert, or of one leaf of it, to its memory: uint8, both of `nbytes`."""
        for chosen in self.leaves.values() if leaf is None else (self.leaves[leaf],):
            chosen.rearrange(bytes_in(stored), bytes_in(memory))

    @property
    def is_ready(self) -> bool:
        """Whether every weight is used in its stored form: as a view, or multiplied from its codes."""
        return all(leaf.is_view or leaf.matrix_type is not None for leaf in self.leaves.values())

    def spans(self, expert: int, leaf: str | None = None) -> list[FileSpan]:
        """The reads of an expert into memory of `nbytes` bytes: all of its parts, or those of one leaf."""
        return [
            FileSpan(part.file(expert), int(part.offsets[expert]), nbytes, part.at) for part, nbytes in self._runs[leaf]
        ]

    @cached_property
    def ranges(self) -> list[FileSpan]:
        """For each file a run from the first byte of all experts to the last."""
        files = dict[str, tuple[int, int]]()
        for span in (span for expert in range(self.experts) for span in self.spans(expert)):
            begin, end = files.get(span.file, (span.offset, 0))
            files[span.file] = min(begin, span.offset), max(end, span.offset + span.nbytes)
        return [FileSpan(file, begin, end - begin, 0) for file, (begin, end) in files.items()]

    def extent(self, leaf: str | None = None) -> slice:
        """The range of an expert's bytes in its memory, or of the bytes of one leaf."""
        chosen = self.leaves.values() if leaf is None else (self.leaves[leaf],)
        parts = [part for parameter in chosen for part in parameter.parts]
        return slice(min(part.at for part in parts), max(part.at + part.nbytes for part in parts))

    @cached_property
    def _runs(self) -> Mapping[str | None, list[tuple[ExpertPart, int]]]:
        """Runs of parts that are contiguous in the files and in memory: the first part, and the bytes of the run."""
        runs_by_leaf: dict[str | None, list[tuple[ExpertPart, int]]] = {}
        everything = [part for leaf in self.leaves.values() for part in leaf.parts]
        for key, parts in ((None, everything), *((name, list(leaf.parts)) for name, leaf in self.leaves.items())):
            runs: list[list[ExpertPart]] = []
            for part in sorted(parts, key=lambda part: part.at):
                if runs and runs[-1][-1].is_followed_by(part):
                    runs[-1].append(part)
                else:
                    runs.append([part])
            runs_by_leaf[key] = [(run[0], sum(part.nbytes for part in run)) for run in runs]
        return runs_by_leaf


def with_matrices(source: ExpertSource, choose_matrix: MatrixChooser | None) -> ExpertSource:
    """A source; its matrices are multiplied in quantized form if `choose_matrix` returns a type for them."""
    if choose_matrix is None:
        return source
    is_turned = bool(source.module.is_transposed)
    return replace(
        source,
        leaves={
            key: replace(leaf, matrix_type=leaf.matrix_type or _matrix_type(leaf, choose_matrix, is_turned))
            for key, leaf in source.leaves.items()
        },
    )


def with_tables(source: ExpertSource, store: WeightFiles, device: torch.device) -> ExpertSource:
    """A source with the code tables of its blocks, on the device that computes.

    Raises:
        IncompleteSplitError: the tables of two experts differ, or a checksum does.
    """
    blocks = [block for leaf in source.leaves.values() for block in leaf.blocks]
    checks = store.checks
    if checks is not None:
        nestings = [block.nesting for block in blocks if block.nesting is not None]
        tables = [spec for block in blocks for spec in block.tables]
        tables += [spec for nesting in nestings for spec in (*nesting.where, *nesting.tables)]
        compare(checks, (spec for spec in tables if checks.by_block(spec.file)))
    leaves = {}
    for key, leaf in source.leaves.items():
        blocks_with_table = tuple(_with_table(source, block, store, device) for block in leaf.blocks)
        leaves[key] = replace(leaf, blocks=blocks_with_table)
    return replace(source, leaves=leaves)


def _with_table(source: ExpertSource, block: Block, store: WeightFiles, device: torch.device) -> Block:
    if block.form is None:
        return block
    if not block.tables:  # blocks of GGUF have none
        return replace(block, table=code_values(block.form.scheme).to(device))
    nesting = block.nesting
    if nesting is not None:
        raw = b"".join(bytes(store.mapped(spec.file).bytes_of(spec)) for spec in nesting.where)
        scales = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(source.experts, -1).to(device)
        nesting = replace(nesting, scales=scales, table=_table(source, nesting.tables, store, device))
    return replace(block, table=_table(source, block.tables, store, device), nesting=nesting)


def _table(source: ExpertSource, specs: Sequence[TensorSpec], store: WeightFiles, device: torch.device) -> torch.Tensor:
    values = {bytes(store.mapped(spec.file).bytes_of(spec)) for spec in specs}
    if len(values) > 1:
        raise IncompleteSplitError(
            f"the experts of {source.name} were quantized with {len(values)} different tables; expected a single one.",
            "Split the checkpoint again into another folder (--dir, layer_shards_saving_path).",
        )
    return torch.frombuffer(bytearray(values.pop()), dtype=torch.float32).to(device)


def _matrix_type(leaf: ExpertParameter, choose_matrix: MatrixChooser, is_turned: bool) -> type[StoredMatrix] | None:
    """The type that multiplies all rows as one quantized matrix, or None; `is_turned`: from the left."""
    first = leaf.blocks[0].form
    if not leaf.stacks or first is None or len(leaf.shape) != 2:
        return None
    for block in leaf.blocks:
        if block.form is None or replace(block.form, shape=first.shape) != first:
            return None
        if (block.nesting is None) != (leaf.blocks[0].nesting is None):
            return None
        if block.form.shape[0] * block.form.shape[1] % STORED[first.scheme].block:
            return None
    if leaf.recipe.dtype is None:
        return None
    matrix_type = choose_matrix(replace(first, shape=leaf.shape), leaf.recipe.dtype)
    if not is_turned:
        return matrix_type
    return TurnedMatrix if matrix_type is Matrix and leaf.recipe.dtype is torch.bfloat16 else None


def _as_one(parts: Sequence[ExpertPart]) -> Sequence[ExpertPart]:
    """One part with the bytes of all if they are adjacent, else these."""
    if len(parts) < 2 or not all(map(ExpertPart.is_followed_by, parts, parts[1:])):
        return parts
    return [replace(parts[0], nbytes=sum(part.nbytes for part in parts))]


def _joined(bytes_of: BytesOf, parts: Sequence[ExpertPart]) -> torch.Tensor:
    """The concatenated bytes of parts; a view if they are contiguous in memory."""
    first, *others = joined = [*map(bytes_of, parts)]
    end = first.data_ptr() + first.numel()
    for part in others:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(joined)
        end += part.numel()
    return first.as_strided((end - first.data_ptr(),), (1,)) if others else first
