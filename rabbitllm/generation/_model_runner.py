"""Runs passes of the model for many sequences, so that each unit's weights are loaded once for all of them.

There are two ways through a pass. If the model allows it, the rows of all sequences are packed into one forward
(`_packed_batch`). A sequence that cannot be packed goes through the layers as a coroutine by itself. The packed forward
is then one more coroutine, and at each unit and each product the rows of all coroutines are joined (`_coroutines`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from rabbitllm.generation._cache_file import NO_MEMORY, CacheFile
from rabbitllm.generation._coroutines import (
    Coroutine,
    Coroutines,
    PendingCall,
    RowKind,
    SyncPoint,
    called,
    copy_of,
    rowwise,
)
from rabbitllm.generation._packed_batch import NotPackable, PackedForward, PackedSequence, can_be_packed, grouped
from rabbitllm.telemetry.passes import PassInput

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)


class PackedGroup:
    """Sequences that go through the model in one packed forward.

    Args:
        forward: computes the packed forward.
        members: the coroutine and the input of each sequence.

    Attributes:
        coroutines: coroutine of each sequence, which waits for its output.
        inputs: input of each sequence.
        outputs: output of each sequence, once the forward has succeeded.
        error: the error that ended the forward, if any.
    """

    def __init__(self, forward: PackedForward, members: Sequence[tuple[Coroutine, PackedSequence]]) -> None:
        self._forward = forward
        self.coroutines = [coroutine for coroutine, _ in members]
        self.inputs = [sequence for _, sequence in members]
        self.outputs: list[Any] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        """Run the packed forward."""
        try:
            self.outputs = self._forward(self.inputs)
        except BaseException as error:
            self.error = error


class ModelRunner:
    """Runs passes of coroutines that generate.

    Args:
        model: a streamed model.
        exact: compute each sequence's rows separately in every module, so that its results are bitwise those that it
            would have alone.
        packing: pack sequences into one forward if possible.
        max_rows: maximum rows of a packed forward; with more rows several packed forwards go through each layer, one
            after the other. None for no limit.
        file: file in which sequences may have their KV cache; those that are not packed get it back in memory.

    Attributes:
        coroutines: the coroutines, each of which calls `generate` for a sequence.
    """

    def __init__(
        self,
        model: StreamedModel,
        *,
        exact: bool = False,
        packing: bool = True,
        max_rows: int | None = None,
        file: CacheFile | None = None,
    ) -> None:
        self._model = model
        self.coroutines = Coroutines(model, self._kind_of, self._compute, exact=exact)
        self._max_rows = max_rows
        self._packed = PackedForward(model, file) if packing and not exact and can_be_packed(model) else None
        self._file = file

    @property
    def packs(self) -> bool:
        """Whether sequences are packed, and so their tokens divisible."""
        return self._packed is not None

    def run(self, coroutines: Sequence[Coroutine]) -> None:
        """Run one pass for some coroutines; afterwards each of them has ended or waits for the next one.

        An error in a coroutine ends only that coroutine (see its `error`); an error with the weights ends all.
        """
        if not coroutines:
            return
        rows = sum(c.lookahead.lacks + len(c.lookahead.tokens) for c in coroutines if c.lookahead is not None)
        rows += sum(coroutine.tokens for coroutine in coroutines)
        with self._model.joint_pass(PassInput(1, rows)):
            groups = self._packed_groups(coroutines)
            packed = {coroutine for group in groups for coroutine in group.coroutines}
            unpacked = [coroutine for coroutine in coroutines if coroutine not in packed]
            if self._file is not None:
                unpacked = [coroutine for coroutine in unpacked if self._is_in_memory(coroutine, self._file)]
                self._file.begin([sequence.cache for group in groups for sequence in group.inputs])
            if len(groups) == 1 and not unpacked:
                groups[0]()
            else:
                for group in groups:
                    unpacked.append(Coroutine(group, syncs_rows=len(groups) == 1))
                    unpacked[-1].is_in_pass = True
            # forwards that take turns are left in any order
            with self._packed.attending() if self._packed and len(groups) > 1 else contextlib.nullcontext():
                self.coroutines.run(unpacked)
            for group in groups:
                self._answer(group)

    def _is_in_memory(self, coroutine: Coroutine, file: CacheFile) -> bool:
        """Take back the KV cache of a coroutine that is not packed; if that fails, end the coroutine by the error."""
        cache = coroutine.inputs[1]
        try:
            file.take_back(cache)
        except (OSError, *NO_MEMORY) as error:
            file.lose(cache, error)
            self.coroutines.throw(coroutine, copy_of(error))
            return False
        return True

    def _packed_groups(self, coroutines: Sequence[Coroutine]) -> list[PackedGroup]:
        """Groups of those whose calls can be packed, in their order; the others are in none."""
        forward = self._packed
        if forward is None:
            return []
        read = [(coroutine, forward.read(coroutine.pending.args, coroutine.pending.kwargs)) for coroutine in coroutines]
        candidates = [
            (coroutine, sequence if coroutine.lookahead is None else coroutine.lookahead.widened(sequence))
            for coroutine, whole in read
            if whole is not None and (sequence := whole.first(coroutine.rows))
        ]
        fits = forward.fitting([sequence for _, sequence in candidates]) if candidates else []
        packed = [candidate for candidate, is_fitting in zip(candidates, fits, strict=True) if is_fitting]
        groups = grouped([sequence.ids.shape[1] for _, sequence in packed], self._max_rows)
        return [PackedGroup(forward, packed[group]) for group in groups]

    def _answer(self, group: PackedGroup) -> None:
        """Resume the coroutines of a group with their outputs, or end them by its error."""
        if group.error is not None and not isinstance(group.error, Exception):
            raise group.error
        if isinstance(group.error, NotPackable):
            logger.warning("Packed passes are disabled: %s.", group.error)
            self._packed = None
        outputs = group.outputs if group.error is None else [group.error] * len(group.coroutines)
        for coroutine, output in zip(group.coroutines, outputs, strict=True):
            if isinstance(output, Exception):
                self.coroutines.throw(coroutine, copy_of(output))
            elif not coroutine.advance():
                self.coroutines.resume(coroutine, output)

    def _kind_of(self, module: nn.Module) -> RowKind | None:
        if module is self._model.get_input_embeddings() and isinstance(module, nn.Embedding):
            return RowKind.IDS  # some embeddings also scale each row
        return rowwise(module)

    def _compute(self, point: SyncPoint, waiting: Sequence[Coroutine]) -> None:
        if self.coroutines.compute_rows(point, waiting):
            return

        def forward(*inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
            for coroutine, (args, kwargs) in zip(waiting, inputs, strict=True):
                self.coroutines.resume(coroutine, PendingCall(point, args, kwargs))
            self.coroutines.leave(point, waiting)

        # the unit's hooks run once, and between them every coroutine's call
        with point.replaced(forward):
            called(point.module, *((coroutine.pending.args, coroutine.pending.kwargs) for coroutine in waiting))
