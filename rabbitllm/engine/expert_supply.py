"""Experts of mapped layer files, used in place: nothing is read ahead and nothing is copied.

For models that fit the memory; the system reads a page when it is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from rabbitllm.engine.expert_parts import ExpertPart
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT
from rabbitllm.store.layer_store import WeightFiles

FileBytes = Callable[[str], torch.Tensor]
"""A file's name -> its bytes, mapped, uint8."""


class MappedExperts:
    """The experts of one module.

    Args:
        model: the skeleton, for conversions.
        source: the module's experts.
        file_bytes: provides the mapped files.
    """

    def __init__(self, model: PreTrainedModel, source: ExpertSource, file_bytes: FileBytes) -> None:
        self._model = model
        self._source = source
        self._file_bytes = file_bytes
        self._ready: dict[tuple[str, int], torch.Tensor] = {}

    def each(self, leaf: str, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `expert_stack.Supply`."""
        for expert in experts:
            yield self._weight(leaf, expert)

    def order(self, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """See `expert_stack.Supply`."""
        return list(range(len(experts))), []

    def strided(self, leaf: str) -> torch.Tensor | None:
        """All experts as one strided tensor over the mapped file; None if they are not at equal distances in it, or not
        used in their stored form."""
        chosen, experts = self._source.leaves[leaf], self._source.experts
        first = chosen.parts[0]
        steps = np.unique(np.diff(first.offsets))
        if not chosen.is_view or len(first.files) > 1 or len(self._source.spans(0, leaf)) > 1 or len(steps) != 1:
            return None
        step, itemsize = int(steps[0]), chosen.place.dtype.itemsize
        begin, end = int(first.offsets[0]), int(first.offsets[-1]) + sum(part.nbytes for part in chosen.parts)
        flat = self._file_bytes(first.file(0))[begin:end]
        if step <= 0 or step % TENSOR_ALIGNMENT or flat.data_ptr() % TENSOR_ALIGNMENT:
            return None
        inner = torch.empty(chosen.shape, device="meta").stride()
        return flat.view(chosen.place.dtype).as_strided((experts, *chosen.shape), (step // itemsize, *inner))

    def _weight(self, leaf: str, expert: int) -> torch.Tensor:
        chosen = self._source.leaves[leaf]

        def bytes_of(part: ExpertPart) -> torch.Tensor:
            begin = int(part.offsets[expert])
            return self._file_bytes(part.file(expert))[begin : begin + part.nbytes]

        if not (chosen.is_view or chosen.packed):
            return chosen.weight(self._model, bytes_of, expert)
        found = self._ready.get((leaf, expert))
        if found is None:
            found = self._ready[leaf, expert] = chosen.weight(self._model, bytes_of, expert)
        return found


def mapped_bytes(store: WeightFiles) -> FileBytes:
    """The bytes of a store's files, each mapped once."""
    found: dict[str, torch.Tensor] = {}

    def read(file: str) -> torch.Tensor:
        if file not in found:
            found[file] = torch.frombuffer(store.mapped(file).whole(), dtype=torch.uint8)
        return found[file]

    return read
