"""Tables of which only the rows that a pass looks up are read: input embeddings, per-layer embeddings, n-gram tables.

A token uses one row, or a few, of a matrix of gigabytes. The placeholder of such a weight answers
`torch.nn.functional.embedding`, which every such module calls, by the rows of the distinct ids, and the ids by their
indices among those; the result is the same bit for bit. Works through a conversion that concatenates rows of several
stored tensors, and on compressed weights: of these the blocks around a row are dequantized.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from rabbitllm.engine.units import UnitJob, UnitSource
from rabbitllm.engine.weights import Recipe
from rabbitllm.formats.tensor_spec import TensorSpec, torch_dtype
from rabbitllm.quant.quantize import dequantize, scales_at
from rabbitllm.quant.schemes import NESTED_BLOCK, STORED, Quantized
from rabbitllm.storage.files import begin_to_read, expect_random_reads
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.layer_store import StoredTensor, WeightFiles

_BY_ROW = 2
"""The first parts of a stored tensor have a run of bytes for each block of elements: values or codes, and scales."""
_ELEMENTS = 1 << 22
"""Maximum elements of blocks that are gathered at a time."""


def can_bring_rows(source: UnitSource, tables: Sequence[nn.Module]) -> bool:
    """Whether a unit is one of the model's tables and its rows can be read one by one."""
    module = source.unit.module
    if not isinstance(module, nn.Embedding) or not any(module is table for table in tables):
        return False
    job = _table_job(source)
    if job is None or len(job.places) != 1 or job.packed:
        return False
    stored = [source.stored[name] for _, name in job.recipe.sources]
    width = module.weight.shape[1]
    if any(len(tensor.shape) != 2 or tensor.shape[1] != width or not tensor.is_one_run for tensor in stored):
        return False
    if any(tensor.quantized is not None and width % _codes_a_byte(tensor.quantized) for tensor in stored):
        return False
    return _only_adds_rows(job.recipe)


def _table_job(source: UnitSource) -> UnitJob | None:
    """The job of an embedding's matrix; others make small parameters, such as a scale for all rows."""
    name = f"{source.unit.name}.weight"
    return next((job for job in source.jobs if any(place.target == name for _, place in job.places)), None)


def _only_adds_rows(recipe: Recipe) -> bool:
    """Whether the conversion, if there is one, stacks the rows of its sources and does nothing else."""
    if recipe.converter is None:
        return True
    patterns = {pattern for pattern, _ in recipe.sources}
    operations = [*recipe.converter.operations]
    if type(operations[0]).__name__ == "QuickFp8":  # it leaves codes without scales of their own as they are
        del operations[0]
    return len(patterns) == 1 and all(type(one).__name__ == "Concatenate" and one.dim == 0 for one in operations)


def _codes_a_byte(form: Quantized) -> int:
    entry = STORED[form.scheme]
    return entry.block if entry.block_bytes else entry.codes_a_byte


def _around(form: Quantized, row: int) -> tuple[int, int]:
    """The blocks that a row's elements are in: the first, and the one after the last."""
    width, block = form.shape[1], STORED[form.scheme].block
    return row * width // block, -(-(row + 1) * width // block)


def _part_ranges(stored: StoredTensor, number: int, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of what rows need of one part of a stored tensor."""
    part, form = stored.parts[number], stored.quantized
    of_blocks = form is not None and bool(STORED[form.scheme].block_bytes)
    if number >= (1 if of_blocks else _BY_ROW):  # shared by all rows
        yield part.offset, part.nbytes
    elif form is None:
        row = part.nbytes // stored.shape[0]
        yield from ((part.offset + row * one, row) for one in rows)
    else:
        entry = STORED[form.scheme]
        block = entry.block_bytes or (part.nbytes // part.elements if number else entry.block // entry.codes_a_byte)
        for first, last in (_around(form, row) for row in rows):
            begin, end = first * block, min(last * block, part.nbytes)
            yield part.offset + begin, end - begin


def check_rows(stored: StoredTensor, ids: torch.Tensor, checks: LayerChecks) -> None:
    """Compare rows of a table, and the stored parts that all rows share, with their checksums.

    Args:
        stored: the table.
        ids: the rows, integers (n,); those out of range are skipped and left to the embedding.
        checks: the checksums of its file, which may have none for parts of it.

    Raises:
        IncompleteSplitError: a checksum differs.
    """
    if not checks.by_block(stored.parts[0].file):
        return
    known = ids[(ids >= 0) & (ids < stored.shape[0])].tolist()
    for number, part in enumerate(stored.parts):
        checks.stored(part.file, list(_part_ranges(stored, number, known)))


class TableRows:
    """Looks up rows of a table in its mapped files.

    Args:
        source: of the table's unit; see `can_bring_rows`.
        store: the files.
        device: of the result.

    Attributes:
        beside: the part of the unit that is not the table, to be bound for good; None if there is nothing else.
        rows_brought: the number of rows that were read so far.
    """

    def __init__(self, source: UnitSource, store: WeightFiles, device: torch.device) -> None:
        job = _table_job(source)
        assert job is not None
        others = [other for other in source.jobs if other is not job]
        self.beside = source.of_jobs(others) if others else None
        recipe = job.recipe
        self._stored = [source.stored[name] for _, name in recipe.sources]
        self._begins = [0, *itertools.accumulate(tensor.shape[0] for tensor in self._stored)]
        self._dtype = recipe.dtype or job.places[0][1].dtype
        self._store = store
        self._device = device
        self.rows_brought = 0
        for stored in self._stored:
            for part in stored.parts[:_BY_ROW]:
                expect_random_reads(self._bytes(part))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows (n, width) of distinct ids (n,), rising.

        Raises:
            IndexError: an id is out of range.
            IncompleteSplitError: a checksum differs.
        """
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self._begins[-1]:
            raise IndexError("index out of range in self")  # as torch's
        ends = torch.searchsorted(ids, torch.tensor(self._begins)).tolist()
        found: list[torch.Tensor] = []
        for stored, begin, (first, last) in zip(self._stored, self._begins, itertools.pairwise(ends), strict=False):
            if first == last and found:
                continue
            own = ids[first:last] - begin
            if self._store.checks is not None:
                check_rows(stored, own, self._store.checks)
            self._begin_to_read(stored, own.tolist())
            found += [self._rows(stored, some) for some in torch.split(own, self._at_once(stored))]
        self.rows_brought += len(ids)
        return (found[0] if len(found) == 1 else torch.cat(found)).to(self._device)

    def _begin_to_read(self, stored: StoredTensor, rows: Sequence[int]) -> None:
        for number, part in enumerate(stored.parts[:_BY_ROW]):
            data = self._bytes(part)
            for offset, nbytes in _part_ranges(stored, number, rows):
                begin_to_read(data[offset - part.offset :][:nbytes])

    def _bytes(self, part: TensorSpec) -> memoryview:
        return self._store.mapped(part.file).bytes_of(part)

    def _mapped(self, part: TensorSpec) -> torch.Tensor:
        """The bytes of a part, uint8 (nbytes,); values are viewed only after rows are copied, which aligns them."""
        return torch.frombuffer(self._bytes(part), dtype=torch.uint8)

    def _at_once(self, stored: StoredTensor) -> int:
        form = stored.quantized
        widest = 1 if form is None else form.shape[1] + 2 * STORED[form.scheme].block
        return max(1, _ELEMENTS // widest)

    def _rows(self, stored: StoredTensor, ids: torch.Tensor) -> torch.Tensor:
        form = stored.quantized
        if form is None:
            rows = self._mapped(stored.parts[0]).view(stored.shape[0], -1).index_select(0, ids)
            return rows.view(torch_dtype(stored.parts[0].dtype)).to(self._dtype)
        if not len(ids):
            return torch.empty(0, form.shape[1], dtype=self._dtype)
        count, width = len(ids), form.shape[1]
        block, of_blocks = STORED[form.scheme].block, STORED[form.scheme].block_bytes
        payload = self._mapped(stored.parts[0])
        if of_blocks:
            codes = payload.view(form.shape[0], -1).index_select(0, ids)
            none = torch.empty(0)
            return dequantize(Quantized(form.scheme, (count, width), form.dtype), codes, none, none, self._dtype)
        of_scales = torch_dtype(stored.parts[1].dtype)
        scales = self._mapped(stored.parts[1]).view(-1, of_scales.itemsize)
        table, *nested = (self._mapped(part).clone().view(torch_dtype(part.dtype)) for part in stored.parts[2:5])
        # whole blocks around each row, as many for each: those beyond the last element are not used
        first, several = ids * width // block, 1 if block % width == 0 else -(-width // block) + bool(width % block)
        within = (first[:, None] + torch.arange(several)).clamp(max=len(scales) - 1)
        scales = scales[within.view(-1)].view(of_scales).view(-1)
        if form.offset is not None:
            scales = scales_at(scales, nested[0], nested[1], form.offset, within.view(-1) // NESTED_BLOCK)
        nbytes = block // STORED[form.scheme].codes_a_byte
        begins = first * nbytes
        where = (begins[:, None] + torch.arange(several * nbytes)).clamp(max=len(payload) - 1)
        codes = payload[where]
        kind = form.codes.scheme
        around = Quantized(kind, (count, several * block), form.dtype)
        made = dequantize(around, codes.view(-1, 1) if kind == "4bit" else codes, scales, table, self._dtype)
        return made.gather(1, (ids * width % block)[:, None] + torch.arange(width))
