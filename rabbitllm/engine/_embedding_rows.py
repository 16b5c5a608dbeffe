"""Tables of which only the rows that a pass looks up are read: input embeddings, per-layer embeddings, n-gram tables.

A token uses one row, or a few, of a matrix of gigabytes. Every such module calls `torch.nn.functional.embedding`. The
placeholder of the weight answers it: it reads the rows of the distinct ids, and replaces the ids by their indices among
those. The result is the same bit for bit. A table may be concatenated from rows of several stored tensors, and may be
compressed: then the blocks around a row are dequantized.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rabbitllm.engine._weights import Recipe
from rabbitllm.engine.units import UnitJob, UnitSource, of_jobs
from rabbitllm.formats.tensor_spec import TensorSpec, torch_dtype
from rabbitllm.quant.quantize import NO_SCALES, dequantize
from rabbitllm.quant.schemes import NESTED_BLOCK, STORED, Quantized
from rabbitllm.storage.files import begin_to_read
from rabbitllm.store import checksums
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


def _runs(stored: StoredTensor, index: int, ids: torch.Tensor, step: int) -> Iterator[tuple[int, int]]:
    """The bytes that rows need of one part of a stored tensor: from one offset in its file up to another.

    Args:
        stored: the table.
        index: of the part.
        ids: the rows, integers (n,), rising.
        step: bytes that are read at once; a run has whole steps.
    """
    part, form = stored.parts[index], stored.quantized
    scheme = STORED[form.scheme] if form is not None else None
    if index >= (1 if scheme is not None and scheme.block_bytes else _BY_ROW):  # shared by all rows
        return iter([(part.offset, part.offset + part.nbytes)])
    if not (count := ids.shape[0]):  # `len` of a tensor takes Python a microsecond
        return iter(())
    # of one row Python computes the same in a tenth of the time
    first: Any = int(ids) if count == 1 else ids.numpy().astype(np.int64)
    nbytes = part.nbytes // stored.shape[0]
    last = first + 1
    if form is not None and scheme is not None:  # the blocks that its elements are in
        nbytes = scheme.block_bytes or (part.nbytes // part.elements if index else scheme.block // scheme.codes_a_byte)
        first, last = first * form.shape[1] // scheme.block, -(-last * form.shape[1] // scheme.block)
    begins = (part.offset + first * nbytes) // step * step
    ends = -(-(part.offset + last * nbytes) // step) * step
    if count == 1:
        return iter([(max(begins, part.offset), min(ends, part.offset + part.nbytes))])
    is_first = np.append(True, begins[1:] > ends[:-1])
    runs = np.stack([begins[is_first], ends[np.append(is_first[1:], True)]])
    first, last = runs.clip(part.offset, part.offset + part.nbytes).tolist()
    return zip(first, last, strict=True)  # no list: so many tuples at once would have Python collect garbage


def check_rows(tables: Iterable[tuple[StoredTensor, torch.Tensor]], checks: checksums.LayerChecks) -> None:
    """Compare rows of tables, and the stored parts that all rows share, with their checksums.

    Args:
        tables: each with rows that it has, integers (n,), rising.
        checks: the checksums of its file, which may have none for parts of it.

    Raises:
        IncompleteSplitError: a checksum differs.
    """
    runs: dict[str, list[Iterator[tuple[int, int]]]] = {}
    for stored, ids in tables:
        if checks.by_block(stored.parts[0].file) and not checks.is_done(stored.parts[0].file):
            for index, part in enumerate(stored.parts):
                runs.setdefault(part.file, []).append(_runs(stored, index, ids, checksums.BLOCK_BYTES))
    for file, of_file in runs.items():
        checks.stored(file, ((begin, end - begin) for begin, end in itertools.chain(*of_file)))


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

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows (n, width) of distinct ids (n,), rising.

        Raises:
            IndexError: an id is out of range.
            IncompleteSplitError: a checksum differs.
        """
        if (count := ids.shape[0]) and not 0 <= int(ids[0]) <= int(ids[-1]) < self._begins[-1]:
            raise IndexError("index out of range in self")  # as torch's
        tables = [(self._stored[0], ids)]
        if count and len(self._stored) > 1:
            ends = torch.searchsorted(ids, torch.tensor(self._begins, device="cpu")).tolist()
            spans = zip(self._stored, self._begins, itertools.pairwise(ends), strict=False)
            tables = [(stored, ids[first:last] - begin) for stored, begin, (first, last) in spans if first < last]
        if self._store.checks is not None:
            check_rows(tables, self._store.checks)
        for stored, local_ids in tables:  # all reads are begun before the first is waited for
            for index, part in enumerate(stored.parts[:_BY_ROW]):
                begin_to_read(self._store.mapped(part.file).whole(), _runs(stored, index, local_ids, mmap.PAGESIZE))
        pieces: list[torch.Tensor] = []
        for stored, local_ids in tables:
            form = stored.quantized
            widest = 1 if form is None else form.shape[1] + 2 * STORED[form.scheme].block
            most = max(1, _ELEMENTS // widest)
            batches = torch.split(local_ids, most) if local_ids.shape[0] > most else [local_ids]
            pieces += [self._rows(stored, batch) for batch in batches]
        self.rows_read += count
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
        count, width = ids.shape[0], form.shape[1]
        if not count:
            return torch.empty(0, width, dtype=self._dtype, device="cpu")
        block, payload = STORED[form.scheme].block, self._mapped(stored.parts[0])
        if STORED[form.scheme].block_bytes:
            codes, some = payload.view(form.shape[0], -1).index_select(0, ids), replace(form, shape=(count, width))
            return dequantize(some, codes, NO_SCALES, NO_SCALES, self._dtype)
        scale_dtype = torch_dtype(stored.parts[1].dtype)
        scales = self._mapped(stored.parts[1]).view(-1, scale_dtype.itemsize)
        table, *nested = (self._mapped(part).clone().view(torch_dtype(part.dtype)) for part in stored.parts[2:5])
        if width % block == 0 and form.offset is None:  # rows are whole blocks
            codes, scales = (each.view(form.shape[0], -1).index_select(0, ids) for each in (payload, scales))
            return dequantize(replace(form, shape=(count, width)), codes, scales.view(scale_dtype), table, self._dtype)
        # whole blocks around each row, as many for each: those beyond the last element are not used
        first, several = ids * width // block, 1 if block % width == 0 else -(-width // block) + bool(width % block)
        within = (first[:, None] + torch.arange(several, device="cpu")).clamp(max=len(scales) - 1)
        scales = scales[within.view(-1)].view(scale_dtype).view(-1)
        if form.offset is not None:
            scales = nested[1][scales.long()] * nested[0][within.view(-1) // NESTED_BLOCK] + form.offset
        nbytes = block // STORED[form.scheme].codes_a_byte
        codes = payload[
            (first[:, None] * nbytes + torch.arange(several * nbytes, device="cpu")).clamp(max=len(payload) - 1)
        ]
        blocks = Quantized(form.codes.scheme, (count, several * block), form.dtype)
        values = dequantize(blocks, codes.view(-1, 1) if blocks.scheme == "4bit" else codes, scales, table, self._dtype)
        return values.gather(1, (ids * width % block)[:, None] + torch.arange(width, device="cpu"))
