"""The drafts of all sequences of a batch, and the tokens that grammars force.

A draft model proposes for all of them in passes of its own: each proposal is a coroutine, as each answer is. So does
the model itself with its copies, and so do the heads of a checkpoint in calls of their own.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING

from transformers import GenerationConfig, LogitsProcessorList

from rabbitllm.generation._coroutines import Coroutine
from rabbitllm.generation._lookahead import Lookahead
from rabbitllm.generation._model_runner import ModelRunner
from rabbitllm.generation._mtp import PackedHeads
from rabbitllm.generation._proposals import MTP, NGRAM, SELF, Draft, proposals_of
from rabbitllm.generation._rewind import Rewindable
from rabbitllm.generation._sequence import SequenceStatus
from rabbitllm.generation._width import Width, costs_of
from rabbitllm.generation.kv_cache import MIN_PREFIX_TOKENS, CacheCost, common_prefix, cost_by_config
from rabbitllm.generation.request import end_tokens
from rabbitllm.telemetry.passes import Drafts

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel
    from rabbitllm.generation._sequence import Sequence as Generated
    from rabbitllm.generation.request import BatchStats

logger = logging.getLogger(__name__)

_Wanting = Sequence[tuple[Lookahead, Sequence[int], int]]
"""Drafts of sequences, each with the sequence's tokens and the number of tokens that are wanted."""


class BatchDrafts:
    """The drafts of the sequences of a batch.

    Args:
        model: a model for which `keeps` and `can_go_back` hold.
        draft: what proposes tokens, after `prepare_draft`; None for forced tokens alone.
        stats: totals, of which it raises the drafted and the accepted tokens.
        runner: of the model.
    """

    def __init__(self, model: StreamedModel, draft: Draft | None, stats: BatchStats, runner: ModelRunner) -> None:
        self._model = model
        self._draft = draft
        self._stats = stats
        if draft is not None:
            stats.drafts = replace(stats.drafts, name=draft if isinstance(draft, str) else "a draft model")
        self._of_draft = None if draft is None or isinstance(draft, str) else ModelRunner(draft)
        self._runner = runner if draft == SELF else self._of_draft
        self._heads = PackedHeads(model.heads) if draft == MTP and model.heads is not None else None
        # proposals are the most probable tokens: random numbers are those of the answer
        self._config = GenerationConfig(do_sample=False, eos_token_id=sorted(end_tokens(model)) or None)
        self._cost = _cost_of(model, draft)
        self._costs = costs_of(model, draft or NGRAM)
        self._widths: list[Width] = []  # of sequences that have ended: what one teaches, the next one knows

    def begin(self, sequence: Generated) -> Lookahead | None:
        """The drafts of a sequence that begins or goes on, with its KV cache; None if it can have none."""
        draft, grammar = self._draft or NGRAM, sequence.grammar
        if sequence.request.media is not None:
            if self._draft is not None and sequence.status is not SequenceStatus.PREEMPTED:
                if not self._stats.undrafted:
                    logger.warning("Requests with pictures and sounds are answered without drafts.")
                self._stats.undrafted += 1
            return None
        if sequence.cache is None or (self._draft is None and grammar is None):
            return None
        width = self._widths.pop() if self._widths else Width(self._costs)
        track = Rewindable(self._model, sequence.cache, sequence.num_computed_tokens, has_begun=True)
        processors = LogitsProcessorList([] if grammar is None else [grammar])
        propose = partial(proposals_of, draft, self._model, track, processors, self._config, width, trees=False)
        learns, ids = None if self._draft is None else width, lambda: sequence.ids
        return Lookahead(self._stats, track, ids, learns, propose, self._cost, self._widths.append, grammar)

    def propose(self, wanting: _Wanting) -> int:
        """Draft for the next pass.

        Args:
            wanting: what is wanted.

        Returns:
            The number of drafted tokens.
        """
        begin = time.perf_counter()
        with self._model.streamer.drafting() if wanting and self._draft == SELF else contextlib.nullcontext():
            errors = self._each(wanting) if self._runner is None else self._together(self._runner, wanting)
        for (lookahead, *_), error in zip(wanting, errors, strict=True):
            if error is not None:  # such as a lack of memory; the sequence goes on without
                logger.warning("A draft has failed: %s", error)
                lookahead.forget()
        seconds = time.perf_counter() - begin
        steps = sum(lookahead.steps for lookahead, *_ in wanting)
        for lookahead, *_ in wanting:
            lookahead.seconds = seconds * lookahead.steps / steps
        return sum(len(lookahead.tokens) for lookahead, *_ in wanting)

    def _each(self, wanting: _Wanting) -> Sequence[BaseException | None]:
        if self._heads is not None:
            return self._heads.run([partial(lookahead.propose, ids, most) for lookahead, ids, most in wanting])
        errors: list[BaseException | None] = []
        for lookahead, ids, most in wanting:
            try:
                lookahead.propose(ids, most)
                errors.append(None)
            except Exception as error:
                errors.append(error)
        return errors

    def _together(self, runner: ModelRunner, wanting: _Wanting) -> Sequence[BaseException | None]:
        """The same with a model. What several sequences begin with is read for the first of them, before the others."""
        proposals = [partial(lookahead.propose, ids, most) for lookahead, ids, most in wanting]
        reading, copying = list[int](), list[int]()
        for index, (lookahead, ids, most) in enumerate(wanting):
            lengths = [0 if lookahead.nbytes else common_prefix(ids, wanting[other][1]) for other in reading]
            if self._draft == SELF or (shared := max(lengths, default=0)) < MIN_PREFIX_TOKENS:
                reading.append(index)
                continue
            copying.append(index)
            reader = wanting[reading[lengths.index(shared)]][0]
            proposals[index] = partial(lookahead.propose, ids, most, reader, shared)
        proposing = dict[int, Coroutine]()
        for turn in (reading, copying):
            proposing |= {index: runner.coroutines.add(proposals[index]) for index in turn}
            while waiting := [coroutine for coroutine in proposing.values() if not coroutine.dead]:
                runner.run(waiting)
        return [proposing[index].error for index in range(len(wanting))]

    def learn(self, lookaheads: Sequence[Lookahead], rows: int, seconds: float) -> None:
        """Take in the pass that is over: the drafts of its sequences, its rows and its time."""
        self._costs.learn_pass(rows, seconds, any(lookahead.was_checked for lookahead in lookaheads))
        brought = reduce(Drafts.plus, [lookahead.learn(rows) for lookahead in lookaheads], Drafts(whole=seconds))
        if self._draft is not None and brought.passes:
            brought = replace(brought, name=self._stats.drafts.name)
            self._stats.drafts = self._stats.drafts.plus(brought)
            self._model.profiler.add_drafts(brought)

    def close(self) -> None:
        """Restore the draft model."""
        if self._of_draft is not None:
            self._of_draft.coroutines.close()


def _cost_of(model: StreamedModel, draft: Draft | None) -> CacheCost:
    """What a draft keeps of a sequence."""
    if draft == MTP:
        assert model.heads is not None
        config = model.heads.config
        cost = cost_by_config(config, model.dtype)
        return replace(cost, every_token=cost.every_token + config.hidden_size * model.dtype.itemsize)
    if draft is None or isinstance(draft, str):
        return CacheCost(0)
    return cost_by_config(draft.config.get_text_config(decoder=True), draft.dtype)
