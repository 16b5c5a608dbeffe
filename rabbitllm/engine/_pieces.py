"""Heads in pieces: what is larger than a layer is read and multiplied by runs of rows; no buffer has its size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from rabbitllm.engine.prefetch import FilledSlot
from rabbitllm.engine.units import UnitSource, of_jobs
from rabbitllm.engine.weight_tensors import Multiply
from rabbitllm.quant.schemes import STORED
from rabbitllm.store.layer_store import StoredTensor
from rabbitllm.telemetry.passes import COMPUTE
from rabbitllm.telemetry.profiler import Profiler

PIECE_ROWS = 256
"""Rows of which a piece has a multiple, and the last one no fewer: torch multiplies few rows in another order. So
pieces had the bits of the whole matrix on an AMD EPYC, with AVX2 and AVX-512; with `exact` a head is not cut."""


def in_pieces(source: UnitSource, most: int) -> UnitSource:
    """A source whose only matrix is larger than `most` bytes, in pieces of no more; any other one as it is.

    Its module is a Linear that no layer has, such as a head: a run of its rows gives a run of its results.
    """
    is_alone = len(source.jobs) == len(source.unit.entries) == len(source.stored) == 1
    if not (is_alone and 0 < most < source.buffer_bytes):
        return source
    (job,), (entry,), (stored,) = source.jobs, source.unit.entries, source.stored.values()
    form, (part, *shared) = stored.quantized, stored.parts
    by_rows = form is None or STORED[form.scheme].block_bytes  # else its scales are a part of their own
    if not (entry.is_linear_weight and source.is_view and by_rows and stored.is_one_run):
        return source
    rows, pieces = entry.shape[0], []
    row_bytes = part.nbytes // rows
    step = max((most // row_bytes - rows % PIECE_ROWS) // PIECE_ROWS, 1) * PIECE_ROWS
    quantized = tuple((how, replace(entry, sibling=None)) for how, entry in job.quantized)
    ends = [*range(step, rows - PIECE_ROWS + 1, step), rows]
    for begin, end in itertools.pairwise([0, *ends]):
        count = end - begin
        shape, offset = (part.shape[0] * count // rows, *part.shape[1:]), part.offset + begin * row_bytes
        run = part._replace(shape=shape, offset=offset, nbytes=count * row_bytes)
        few = form and replace(form, shape=(count, *form.shape[1:]))
        tensors = {stored.name: StoredTensor(stored.name, (run, *shared), few)}
        pieces.append(of_jobs(source.unit, [replace(job, quantized=quantized)], tensors))
    return replace(source, pieces=tuple(pieces))


def product_of(
    source: UnitSource,
    model: PreTrainedModel,
    profiler: Profiler,
    take: Callable[[str], FilledSlot],
    give_back: Callable[[FilledSlot], None],
) -> Multiply:
    """The product with a matrix in pieces; `take` reads one by its name, and `give_back` frees its buffer."""

    def multiply(x: torch.Tensor, linear: Callable[..., torch.Tensor]) -> torch.Tensor:
        products = list[torch.Tensor]()
        for name, piece in source.reads.items():
            loaded = take(name)
            try:
                with profiler.stage(source.unit.name, COMPUTE), torch.no_grad():
                    for entry, rows in piece.parameters(model, piece.part_of(loaded.slot.buffer)):
                        products.append(linear(x, entry.bindable(rows)))
            finally:
                give_back(loaded)
        return torch.cat(products, dim=-1)

    return multiply
