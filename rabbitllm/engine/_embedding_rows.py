"""Tables of which only the rows that a pass looks up are read: input embeddings, per-layer embeddings, n-gram tables.

A token uses one row, or a few, of a matrix of gigabytes. Every such module calls `torch.nn.functional.embedding`. The
placeholder of the weight answers it: it reads the rows of the distinct ids, and replaces the ids by their indices among
those. The result is the same bit for bit. A table may be concatenated from rows of several stored tensors, and may be
compressed: then the blocks around a row are dequantized.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from rabbitllm.engine._weights import Recipe
from rabbitllm.engine.units import UnitJob, UnitSource, of_jobs
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


def has_readable_rows(source: UnitSource, tables: Sequence[nn.Module]) -> bool:
    """Whether a unit is one of the model's tables, and its rows can be read one by one."""
    module = source.unit.module
    if not isinstance(module, nn.Embedding) or not any(module is table for table in tables):
        return False
    job = _table_job(source)
    if job is None or len(job.entries) != 1 or job.quantized:
        return False
    stored = [source.stored[name] for _, name in job.recipe.sources]
    width = module.weight.shape[1]
    if any(len(tensor.shape) != 2 or tensor.shape[1] != width or not tensor.is_one_run for tensor in stored):
        return False
    schemes = [STORED[tensor.quantized.scheme] for tensor in stored if tensor.quantized is not None]
    if any(width % (scheme.block if scheme.block_bytes else scheme.codes_a_byte) for scheme in schemes):
        return False
    return _only_adds_rows(job.recipe)


def _table_job(source: UnitSource) -> UnitJob | None:
    """The job of an embedding's matrix; others make small parameters, such as a scale for all rows."""
    name = f"{source.unit.name}.weight"
    return next((job for job in source.jobs if any(entry.target == name for _, entry in job.entries)), None)


def _only_adds_rows(recipe: Recipe) -> bool:
    """Whether the conversion, if there is one, stacks the rows of its sources and does nothing else."""
    if recipe.converter is None:
        return True
    patterns = {pattern for pattern, _ in recipe.sources}
    operations = [*recipe.converter.operations]
    if type(operations[0]).__name__ == "QuickFp8":  # it leaves codes without scales of their own as they are
        del operations[0]
    return len(patterns) == 1 and all(type(op).__name__ == "Concatenate" and op.dim == 0 for op in operations)


def _part_ranges(stored: StoredTensor, index: int, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of the bytes that rows need of one part of a stored tensor."""
    part, form = stored.parts[index], stored.quantized
    scheme = STORED[form.scheme] if form is not None else None
    if index >= (1 if scheme is not None and scheme.block_bytes else _BY_ROW):  # shared by all rows
        yield part.offset, part.nbytes
    elif form is None or scheme is None:
        row_bytes = part.nbytes // stored.shape[0]
        yield from ((part.offset + row * row_bytes, row_bytes) for row in rows)
    else:
        nbytes = scheme.block_bytes or (part.nbytes // part.elements if index else scheme.block // scheme.codes_a_byte)
        for row in rows:  # the blocks that its elements are in
            first, last = row * form.shape[1] // scheme.block, math.ceil((row + 1) * form.shape[1] / scheme.block)
            begin, end = first * nbytes, min(last * nbytes, part.nbytes)
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
    valid = ids[(ids >= 0) & (ids < stored.shape[0])].tolist()
    for index, part in enumerate(stored.parts):
        checks.stored(part.file, list(_part_ranges(stored, index, valid)))


class TableRows:
    """Looks up rows of a table in its mapped files.

    Args:
        source: of the table's unit; see `has_readable_rows`.
        store: the files.
        device: of the result.

    Attributes:
        others: the parameters of the unit besides the table, which stay bound; None if there are none.
        rows_read: the number of rows that were read so far.
    """

    def __init__(self, source: UnitSource, store: WeightFiles, device: torch.device) -> None:
        job = _table_job(source)
        assert job is not None
        other_jobs = [other for other in source.jobs if other is not job]
        self.others = of_jobs(source.unit, other_jobs, source.stored) if other_jobs else None
        recipe = job.recipe
        self._stored = [source.stored[name] for _, name in recipe.sources]
        self._begins = [0, *itertools.accumulate(tensor.shape[0] for tensor in self._stored)]
        self._dtype = recipe.dtype or job.entries[0][1].dtype
        self._store = store
        self._device = device
        self.rows_read = 0
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
        pieces: list[torch.Tensor] = []
        for stored, begin, (first, last) in zip(self._stored, self._begins, itertools.pairwise(ends), strict=False):
            if first == last and pieces:
                continue
            local_ids = ids[first:last] - begin
            if self._store.checks is not None:
                check_rows(stored, local_ids, self._store.checks)
            for index, part in enumerate(stored.parts[:_BY_ROW]):
                data = self._bytes(part)
                for offset, nbytes in _part_ranges(stored, index, local_ids.tolist()):
                    begin_to_read(data[offset - part.offset :][:nbytes])
            form = stored.quantized
            widest = 1 if form is None else form.shape[1] + 2 * STORED[form.scheme].block
            pieces += [self._rows(stored, batch) for batch in torch.split(local_ids, max(1, _ELEMENTS // widest))]
        self.rows_read += len(ids)
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(self._device)

    def _bytes(self, part: TensorSpec) -> memoryview:
        return self._store.mapped(part.file).bytes_of(part)

    def _mapped(self, part: TensorSpec) -> torch.Tensor:
        """The bytes of a part, uint8 (nbytes,); values are viewed only after rows are copied, which aligns them."""
        return torch.frombuffer(self._bytes(part), dtype=torch.uint8)

    def _rows(self, stored: StoredTensor, ids: torch.Tensor) -> torch.Tensor:
        form = stored.quantized
        if form is None:
            rows = self._mapped(stored.parts[0]).view(stored.shape[0], -1).index_select(0, ids)
            return rows.view(torch_dtype(stored.parts[0].dtype)).to(self._dtype)
        if not len(ids):
            return torch.empty(0, form.shape[1], dtype=self._dtype)
        count, width = len(ids), form.shape[1]
        block, payload = STORED[form.scheme].block, self._mapped(stored.parts[0])
        if STORED[form.scheme].block_bytes:
            codes, empty = payload.view(form.shape[0], -1).index_select(0, ids), torch.empty(0)
            return dequantize(Quantized(form.scheme, (count, width), form.dtype), codes, empty, empty, self._dtype)
        scale_dtype = torch_dtype(stored.parts[1].dtype)
        scales = self._mapped(stored.parts[1]).view(-1, scale_dtype.itemsize)
        table, *nested = (self._mapped(part).clone().view(torch_dtype(part.dtype)) for part in stored.parts[2:5])
        # whole blocks around each row, as many for each: those beyond the last element are not used
        first, several = ids * width // block, 1 if block % width == 0 else -(-width // block) + bool(width % block)
        within = (first[:, None] + torch.arange(several)).clamp(max=len(scales) - 1)
        scales = scales[within.view(-1)].view(scale_dtype).view(-1)
        if form.offset is not None:
            scales = scales_at(scales, nested[0], nested[1], form.offset, within.view(-1) // NESTED_BLOCK)
        nbytes = block // STORED[form.scheme].codes_a_byte
        codes = payload[(first[:, None] * nbytes + torch.arange(several * nbytes)).clamp(max=len(payload) - 1)]
        blocks = Quantized(form.codes.scheme, (count, several * block), form.dtype)
        values = dequantize(blocks, codes.view(-1, 1) if blocks.scheme == "4bit" else codes, scales, table, self._dtype)
        return values.gather(1, (ids * width % block)[:, None] + torch.arange(width))
