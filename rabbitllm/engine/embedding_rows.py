"""An input embedding of which only the rows of the input tokens are read.

A token uses one row of a matrix of gigabytes. Before the embedding's forward, its weight is replaced by the rows of
the distinct input ids, and the ids by their indices among those; the result is the same bit for bit. Works on
quantized weights too, if a row is a whole number of quantization blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rabbitllm.engine.units import PartReader, UnitSource
from rabbitllm.quant import gguf_blocks
from rabbitllm.quant.quantize import dequantize, scales_at
from rabbitllm.quant.schemes import NESTED_BLOCK, STORED, Quantized
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.layer_store import StoredTensor

_BY_ROW = 2
"""The first parts of a stored tensor have a run of bytes for each row: values or codes, and scales if it has them."""


def can_bring_rows(source: UnitSource, embedding: nn.Module | None) -> bool:
    """Whether a unit is the model's input embedding and its rows can be read one by one."""
    if source.unit.module is not embedding or not isinstance(embedding, nn.Embedding) or len(source.jobs) != 1:
        return False
    job = source.jobs[0]
    if job.recipe.converter is not None or len(job.places) != 1:
        return False
    stored = source.stored[job.recipe.sources[0][1]]
    if stored.quantized is None:
        return True
    return stored.shape[1] % STORED[stored.quantized.scheme].block == 0


def check_rows(stored: StoredTensor, ids: torch.Tensor, checks: LayerChecks) -> None:
    """Compare rows of an embedding, and the stored parts that all rows share, with their checksums.

    Args:
        stored: the embedding.
        ids: the rows, integers (n,); those out of range are skipped and left to the embedding.
        checks: the checksums of its file, which may have none for parts of it.

    Raises:
        IncompleteSplitError: a checksum differs.
    """
    if not checks.by_block(stored.parts[0].file):
        return
    rows = stored.shape[0]
    known = ids[(ids >= 0) & (ids < rows)].tolist()
    for number, part in enumerate(stored.parts):
        row = part.nbytes // rows
        by_row = [(part.offset + row * one, row) for one in known]
        is_by_row = number < _BY_ROW and part.nbytes % rows == 0
        checks.stored(part.file, by_row if is_by_row else [(part.offset, part.nbytes)])


class EmbeddingRows:
    """The hook that binds the rows; register with `with_kwargs=True`."""

    def __init__(
        self,
        source: UnitSource,
        part: PartReader,
        device: torch.device,
        unbind: Callable[[], None],
        checks: LayerChecks | None = None,
    ) -> None:
        job = source.jobs[0]
        self._stored = source.stored[job.recipe.sources[0][1]]
        self._place = job.places[0][1]
        self._dtype = job.recipe.dtype
        self._part = part
        self._device = device
        self._unbind = unbind
        self._checks = checks
        self.rows_brought = 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Bind the rows of the ids in the first argument, and renumber the ids."""
        first = next(iter(kwargs), "")  # the name of a forward's first argument differs
        ids = args[0] if args else kwargs[first]
        distinct, renumbered = torch.unique(ids.cpu(), return_inverse=True)
        if self._checks is not None:
            check_rows(self._stored, distinct, self._checks)
        self._place.bind(self._rows(distinct).to(self._device))
        self.rows_brought += len(distinct)
        # checked against the number of rows, and of no use without gradients
        module.padding_idx = None  # type: ignore[assignment]
        renumbered = renumbered.to(ids.device)
        return ((renumbered, *args[1:]), kwargs) if args else (args, kwargs | {first: renumbered})

    def let_go(self, *hook: Any) -> None:
        """Free the rows: as a forward hook, or after an interrupt that kept torch from calling it."""
        self._unbind()

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        form = self._stored.quantized
        if form is None:
            return self._part(self._stored.parts[0]).index_select(0, ids).to(self._dtype)
        assert self._dtype is not None
        count, width = len(ids), form.shape[1]
        if STORED[form.scheme].block_bytes:
            rows = self._part(self._stored.parts[0]).index_select(0, ids)
            return gguf_blocks.dequantize(form.scheme, rows, (count, width), self._dtype)
        payload, absmax, table, *nested = (self._part(spec) for spec in self._stored.parts[:5])
        # index_select: like an embedding, and unlike [], it takes no negative ids
        codes = payload.view(form.shape[0], -1).index_select(0, ids)
        scales = absmax.view(form.shape[0], -1).index_select(0, ids).view(-1)
        if form.offset is not None:
            blocks = absmax.numel() // form.shape[0]
            within = (ids[:, None] * blocks + torch.arange(blocks)).view(-1) // NESTED_BLOCK
            scales = scales_at(scales, nested[0], nested[1], form.offset, within)
        kind = form.codes.scheme
        codes = codes.view(-1, 1) if kind == "4bit" else codes
        return dequantize(Quantized(kind, (count, width), form.dtype), codes, scales, table, self._dtype)
