"""Takes a micro-batch through the model's own forward, and keeps only the requested results.

Logits of all tokens would be larger than the weights. So the output of the model's body is cut down to the rows whose
logits are needed. The model's own code then continues with its head, including the family's soft caps and scales. If
these rows are still many, the model's forward is called again for each slice of them, and the body returns that slice
at once.

    forward ── body: layers ──> all rows ── rows of slice 1 ── head ──> logits
    forward ── body: at once ────────────── rows of slice 2 ── head ──> logits

A callback (`Keep`) can get the rows themselves, before the head, instead. `ScoringForward.logits` computes their logits
later. Packed segments have a `SegmentCache`, in which later segments read the KV cache of earlier ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from rabbitllm.base.contexts import assigned
from rabbitllm.engine.streamed_model import refuse_overflow
from rabbitllm.errors import ScoringError
from rabbitllm.generation._packed_batch import (
    MaskSpan,
    NotPackable,
    PackedCache,
    Pair,
    attending_configs,
    attention_by_sequence,
    sequences_of,
    shares_keys,
)
from rabbitllm.generation.kv_cache import CACHE_ARGUMENT
from rabbitllm.generation.request import ModelLimits
from rabbitllm.generation.scoring._tasks import Scored, TextRequest
from rabbitllm.generation.scoring.micro_batches import MicroBatch, Segment, Segments

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rabbitllm.engine.streamed_model import StreamedModel


class PrefixHandoff:
    """The KV cache of a prefix in one layer, (1, heads, tokens, width), from one micro-batch to the next.

    Not a dict: what containers in a waiting function hold is offloaded, and two micro-batches hold a relay.
    """

    def __init__(self) -> None:
        self._layer = -1
        self._pair: Pair | None = None

    def put(self, layer: int, pair: Pair) -> None:
        """Replace the pair by that of another layer."""
        self._layer, self._pair = layer, pair

    def pop(self, layer: int) -> Pair:
        """Take the pair of a layer.

        Raises:
            NotPackable: it is not here, for example after an error.
        """
        pair, self._pair = self._pair, None
        if pair is None or self._layer != layer:
            raise NotPackable("the micro-batch before has not computed what this one begins with")
        return pair


class SegmentCache(PackedCache):
    """The cache of one forward.

    Args:
        segments: segments of the micro-batch.
        config: config of the text model.
        shares: whether layers use the KV cache of others.
        before: source of the KV cache of known segments; None if there are none.
        after: target of the KV cache that the next micro-batch needs; None if it needs none.
        shared_prefix: number of tokens of that prefix of the last text.
    """

    def __init__(
        self,
        segments: Segments,
        config: PretrainedConfig,
        shares: bool,
        before: PrefixHandoff | None = None,
        after: PrefixHandoff | None = None,
        shared_prefix: int = 0,
    ) -> None:
        computed = segments.computed
        super().__init__([DynamicCache(config=config)], [len(part.ids) for part in computed], shares)
        self._segments = segments
        self._knows = len(computed) < len(segments.parts)
        self._before, self._after, self._shared_prefix = before, after, shared_prefix
        self._spans = [MaskSpan(len(part.ids), part.begins, part.begins + len(part.ids), 0) for part in computed]
        self._known: Pair | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the new key and value tensor of a layer, and pass that of a prefix to the next micro-batch.

        Args:
            key_states, value_states: (1, heads, rows of all segments, width).
            layer_idx: number of the layer.

        Returns:
            The same tensors.
        """
        self._new[layer_idx] = key_states, value_states, []
        self._unused += 1
        if self._knows:
            assert self._before is not None
            self._known = self._before.pop(layer_idx)
        if self._after is not None and self._shared_prefix:
            path = self._segments.path(len(self._segments.ends) - 1)
            keys, values = self._joined(path, self._by_row(key_states, value_states), self._known)
            shared = keys[:, :, : self._shared_prefix].clone(), values[:, :, : self._shared_prefix].clone()
            self._after.put(layer_idx, shared)
        return key_states, value_states

    def _pairs(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, pairs: Sequence[Pair | None]
    ) -> Iterator[Pair]:
        """The key and value tensor that each segment may attend to."""
        computed, prefix, self._known = self._by_row(keys, values), self._known, None
        for part in self._segments.computed:
            yield self._joined([*(self._segments.parts[index] for index in part.after), part], computed, prefix)

    def _by_row(self, keys: torch.Tensor, values: torch.Tensor) -> dict[int, Pair]:
        """First row of a segment -> its new key and value tensor."""
        return {
            part.row: pair for part, pair in zip(self._segments.computed, self._by_sequence(keys, values), strict=True)
        }

    def _joined(self, chain: Sequence[Segment], computed: Mapping[int, Pair], prefix: Pair | None) -> Pair:
        """The key and value tensor of a chain of segments."""
        end = sum(len(part.ids) for part in chain if part.is_known)
        pairs = [computed[part.row] for part in chain if not part.is_known]
        if end:
            assert prefix is not None
            pairs.insert(0, (prefix[0][:, :, :end], prefix[1][:, :, :end]))
        if len(pairs) == 1:
            return pairs[0]
        keys, values = zip(*pairs, strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def spans(self) -> list[MaskSpan]:
        """The sizes of each segment's mask, the same in all layers; the mask function applies sliding windows."""
        return self._spans


LOGITS_BYTES = 128 << 20
"""Maximum size of the float32 logits that are computed at a time; the peak is a few times as much."""


Keep = Callable[[int, torch.Tensor], None]
"""Called with the index of a text and the rows that predict its continuation, (tokens, hidden), valid in the call."""

_RETURN = {"return_dict": True}
_Chances = dict[tuple[int, int], tuple[float, bool]]
"""(row, token) -> log probability of the token in that row, and whether it is the most likely one."""


class _Cut:
    """The cut of the body's output in the forward of this greenlet.

    Args:
        rows: indices of the output rows for the head, in the flattened batch; None for all.
        keeps: whether all rows are needed too.

    Attributes:
        is_reached: whether the body has been called.
        output: output of the body, whose rows `give` replaces.
        states: (all rows, hidden) if they are needed, else None.
        chosen: (rows, hidden); None if all rows are used, or if the output cannot be cut.
        part: the slice of `chosen` for the current call of the head.
    """

    def __init__(self, rows: torch.Tensor | None, keeps: bool) -> None:
        self._wanted = rows
        self._keeps = keeps
        self.is_reached = False
        self.output: Any = None
        self.states: torch.Tensor | None = None
        self.chosen: torch.Tensor | None = None
        self.part = slice(0, 0)

    def take(self, output: Any) -> None:
        """Keep the needed rows of the body's output."""
        self.output = output
        states = getattr(output, "last_hidden_state", None)
        if not isinstance(states, torch.Tensor) or states.dim() != 3:
            return
        rows = states.flatten(0, 1)
        self.states = rows if self._keeps else None
        # with several devices the rows may be on another one than the ids
        self.chosen = None if self._wanted is None else rows.index_select(0, self._wanted.to(rows.device))

    def give(self) -> Any:
        """The output of the body from which the model's forward continues."""
        if self.chosen is not None:
            self.output.last_hidden_state = self.chosen[self.part][None]
        return self.output


class _RowsAlone:
    """A body's output with kept rows alone; all other attributes that a family's forward may read are None."""

    last_hidden_state: torch.Tensor

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


_active: ContextVar[_Cut | None] = ContextVar("forward that scores", default=None)
"""The cut of this thread and greenlet."""


class ScoringForward:
    """Computes micro-batches.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        packed: whether micro-batches have segments.
        whole: compute all logits at once, so that they are bitwise those of plain transformers.
        logits_bytes: see `LOGITS_BYTES`.
        keep: called with the rows of the body's output that predict, in place of computing probabilities.
    """

    def __init__(
        self,
        model: StreamedModel,
        *,
        packed: bool = False,
        whole: bool = False,
        logits_bytes: int = LOGITS_BYTES,
        keep: Keep | None = None,
    ) -> None:
        self._model = model
        # some models call a module inside their base model; some have no base model under the name that they declare
        named = (model.base_model, model.get_decoder(), *model.children())
        bodies = [body for body in named if isinstance(body, PreTrainedModel)]
        self._bodies = list({id(body): body for body in bodies if body is not model}.values())
        self._base = self._bodies[0] if self._bodies else model
        self._whole = whole
        self._keep = keep
        self._config = model.config.get_text_config(decoder=True)
        self._vocabulary = ModelLimits.of(model).vocabulary
        self._rows_at_once = max(logits_bytes // (4 * self._vocabulary), 1)
        self._configs = attending_configs(model) if packed else []
        self._shares = shares_keys(model) if packed else False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Cut the output of the model's body inside the context, for the forwards of this object."""
        before = [(body, body._compiled_call_impl) for body in self._bodies]
        try:
            for body, compiled in before:
                body._compiled_call_impl = _cutting(compiled or body._call_impl)
            with attention_by_sequence(self._configs):
                yield
        finally:
            for body, compiled in before:
                body._compiled_call_impl = compiled

    def ids(self, batch: MicroBatch) -> torch.Tensor:
        """The ids of a micro-batch: (1, rows) if packed, else (texts, length)."""
        if batch.segments is not None:
            ids = torch.tensor([[token for part in batch.segments.computed for token in part.ids]])
        else:
            ids = torch.zeros(len(batch.tasks), batch.length, dtype=torch.long)
            for row, task in zip(ids, batch.tasks, strict=True):
                row[: len(task.ids)] = torch.tensor(task.ids)
        return ids.to(self._model.device)

    @torch.no_grad()
    def __call__(
        self,
        batch: MicroBatch,
        ids: torch.Tensor,
        indices: Sequence[int],
        before: PrefixHandoff | None = None,
        after: PrefixHandoff | None = None,
    ) -> list[Scored]:
        """Compute the results of all texts of a micro-batch.

        Args:
            batch: the micro-batch.
            ids: see `ids`.
            indices: indices of all texts, see `ScoredText.index`.
            before, after: see `SegmentCache`.

        Raises:
            NotPackable: the model deviates from the tested behaviour of its family.
            ScoringError: its forward returns an unexpected output.
        """
        rows = [batch.rows(text) for text in range(len(batch.tasks))]
        targets = {} if self._keep is not None else _wanted(batch, rows)
        keeps = self._keep is not None or any(request.pooling for task in batch.tasks for request in task.asked)
        cut = _Cut(torch.tensor(list(targets), device=ids.device) if targets and not self._whole else None, keeps)
        with assigned(_active, cut):
            if batch.segments is None:
                chances = self._chances(cut, {"input_ids": ids, "use_cache": False, **_RETURN}, targets)
            else:
                shared_prefix = batch.shared_prefix
                cache = SegmentCache(batch.segments, self._config, self._shares, before, after, shared_prefix)
                with sequences_of(cache):
                    chances = self._chances(cut, _packed_inputs(batch.segments, ids, cache), targets)
                cache.finish()
        requests = [(indices[r.number], r, rows[text]) for text, task in enumerate(batch.tasks) for r in task.asked]
        if self._keep is None:
            return [_scored(index, request, text_rows, chances, cut.states) for index, request, text_rows in requests]
        if cut.states is None:
            raise ScoringError(f"The body of {type(self._model).__name__} returned no hidden states.")
        for index, request, text_rows in requests:
            self._keep(index, cut.states[text_rows[request.first : request.first + len(request.targets)]])
        return [Scored(index, tokens=len(request.targets)) for index, request, _ in requests]

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of rows that were kept; must be called inside `installed`.

        Args:
            states: (rows, hidden), with the dtype and device of the body's output.

        Returns:
            (rows, vocabulary).
        """
        cut = _Cut(None, keeps=False)
        cut.is_reached, cut.chosen, cut.part = True, states, slice(None)
        cut.output = _RowsAlone()
        with assigned(_active, cut):
            ids = torch.zeros((1, len(states)), dtype=torch.long, device=self._model.device)
            logits: torch.Tensor = self._model.forward(input_ids=ids, use_cache=False, **_RETURN).logits
            refuse_overflow(logits, "logits", can_exclude=True)
            return logits[0]

    def _chances(self, cut: _Cut, inputs: dict[str, Any], targets: dict[int, list[int]]) -> _Chances:
        if not targets:
            if self._base is self._model:
                cut.take(self._call(**inputs))
            else:
                self._base(**inputs)
            return {}
        every = list(targets)
        chances: _Chances = {}
        step = len(every) if self._whole else self._rows_at_once
        for begin in range(0, len(every), step):
            part = every[begin : begin + step]
            cut.part = slice(begin, begin + len(part))
            # later slices bypass the hooks of a whole pass, which would free the weights in use
            logits = (self._model.forward if begin else self._call)(**inputs).logits.flatten(0, 1)
            if cut.chosen is None:
                return _chances_in(logits[every], targets)
            if len(logits) != len(part):
                raise ScoringError(
                    f"{type(self._model).__name__} returned {len(logits):,} rows of logits for {len(part):,}.",
                    "Score with exact=True.",
                )
            chances |= _chances_in(logits, {row: targets[row] for row in part})
        return chances

    def _call(self, **inputs: Any) -> Any:
        # bypasses the model's own call, which would wait for this very pass
        return nn.Module.__call__(self._model, **inputs)


def _cutting(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of a body; the outermost body of a forward returns the cut output."""

    def call(*args: Any, **kwargs: Any) -> Any:
        cut = _active.get()
        if cut is None or (cut.is_reached and cut.output is None):
            return ordinary(*args, **kwargs)
        if not cut.is_reached:
            cut.is_reached = True
            cut.take(ordinary(*args, **kwargs))
        return cut.give()

    return call


def _packed_inputs(segments: Segments, ids: torch.Tensor, cache: SegmentCache) -> dict[str, Any]:
    positions = torch.cat([torch.arange(part.begins, part.begins + len(part.ids)) for part in segments.computed])
    return {
        "input_ids": ids,
        "position_ids": positions[None].to(ids.device),
        CACHE_ARGUMENT: cache,
        "use_cache": True,
        **_RETURN,
    }


def _wanted(batch: MicroBatch, rows: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Row -> distinct tokens whose probabilities are needed from its logits; rows in ascending order."""
    targets: dict[int, dict[int, None]] = {}
    for text_rows, task in zip(rows, batch.tasks, strict=True):
        for request in task.asked:
            for position, target in enumerate(request.targets, request.first):
                targets.setdefault(text_rows[position], {})[target] = None
    return {row: list(targets[row]) for row in sorted(targets)}


def _chances_in(logits: torch.Tensor, targets: Mapping[int, Sequence[int]]) -> _Chances:
    """Log probability of each target token, and whether it is the most likely one of its row.

    Args:
        logits: (rows, vocabulary).
        targets: index in the batch of each of these rows -> its target tokens.
    """
    refuse_overflow(logits, "logits", can_exclude=True)
    logprobs = torch.log_softmax(logits.float(), -1)
    wanted = [(index, row, token) for index, (row, tokens) in enumerate(targets.items()) for token in tokens]
    indices = torch.tensor([(index, token) for index, _, token in wanted], device=logprobs.device)
    values = logprobs[indices.unbind(1)].tolist()
    best = logprobs.argmax(-1).tolist()
    return {
        (row, token): (value, best[index] == token) for (index, row, token), value in zip(wanted, values, strict=True)
    }


def _scored(
    index: int, request: TextRequest, rows: Sequence[int], chances: _Chances, states: torch.Tensor | None
) -> Scored:
    embedding = None
    if request.pooling is not None:
        if states is None:
            raise ScoringError("The model's body returned no hidden states, which embeddings need.")
        refuse_overflow(states[list(rows)], "hidden states")
        if request.pooling == "last":
            embedding = tuple(states[rows[-1]].float().tolist())
        else:
            embedding = tuple(states[list(rows)].float().mean(0).tolist())
    if not request.targets:
        return Scored(index, embedding=embedding)
    results = [chances[rows[position], target] for position, target in enumerate(request.targets, request.first)]
    return Scored(
        index, math.fsum(value for value, _ in results), len(results), all(is_best for _, is_best in results), embedding
    )
