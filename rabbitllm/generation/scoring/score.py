"""Scores texts in shared passes, in a single one if there is room: first the plan, then the passes.

    texts ── rejected: at once
          └─ tasks ── micro-batches ── passes ── results after each
                          ↑ texts of a failed micro-batch, one by one

In a pass micro-batches go through each unit one after the other, while its weights are resident. They have no other
sync points, so that only one of them is computed at a time. Streamed experts are the exception: they compute the rows
of several micro-batches as one matrix, since each would load them again.

    unit 1: A B C D   unit 2: A B C D   …   head: A B C D
            between its turns the tensors of a micro-batch may be offloaded (`_activation_offload.py`)
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rabbitllm.base.building import BUILDING
from rabbitllm.engine.devices import OutOfDeviceMemory
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.kv_room import NEVER, angles_change_after
from rabbitllm.engine.placement import READY, Tier
from rabbitllm.engine.weight_tensors import WeightStandIn
from rabbitllm.errors import BatchError, NotANumberError, OptionError, RabbitLLMError, ScoringError
from rabbitllm.generation._coroutines import Coroutine, Coroutines, PendingCall, RowKind, SyncPoint, called, rowwise
from rabbitllm.generation._packed_batch import PACKABLE, NotPackable, can_be_packed, grouped, shares_keys
from rabbitllm.generation._sequence import ranked
from rabbitllm.generation.kv_cache import looks_ahead, tensors_in
from rabbitllm.generation.memory import cost_of_a_pass, repeated_bytes
from rabbitllm.generation.request import ModelLimits, TokenLogprob
from rabbitllm.generation.scoring._activation_offload import ActivationOffload, NoRoom
from rabbitllm.generation.scoring._tasks import Room, Scored, ScoredText, Task, TextRequest, check_text, tasks_of
from rabbitllm.generation.scoring.forward import LOGITS_BYTES, Keep, PrefixHandoff, ScoringForward
from rabbitllm.generation.scoring.micro_batches import MicroBatch, TextLayout, chains, linked, micro_batches
from rabbitllm.storage.durable import NamelessFile
from rabbitllm.telemetry.passes import PassInput

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)

ROOM = Room()
REMEDY = "If memory is short, give fewer tokens to a micro-batch, or load the model with less of it in memory."
"""Remedy of an unexpected error."""
_WITHOUT_LOADING = (Tier.ROWS, *READY)
"""Tiers of an input embedding for which a call loads nothing that the next call also needs."""


FILLABLE = PACKABLE | frozenset(
    {
        *("axk2", "bailing_hybrid", "bamba", "biogpt", "bloom", "codegen", "ctrl", "deepseek_v4"),
        *("diffllama", "doge", "dots3_note_text", "falcon", "falcon_h1", "falcon_mamba", "fuyu", "gpt_neo"),
        *("gpt_neox_japanese", "gptj", "granitemoehybrid", "hrm_text", "hy_v4", "inkling_text"),
        *("jamba", "jetmoe", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "llama4_text", "mamba", "mamba2"),
        *("minimax", "minimax_m3_vl_text", "moshi", "mpt", "nemotron_h", "olmo_hybrid", "openai-gpt", "opt"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "xglm", "xlm"),
        *("xlstm", "zamba", "zamba2", "zaya"),
    }
)
"""Model types whose results do not change if sequences are padded at the end (transformers 5.23 and 5.24), tested in
`tests/generation/scoring/test_every_family.py`. In such a model no token depends on later ones, by attention or by a
state, and no result depends on the length of the longest sequence in the batch."""
_OF_TEXTS = ScoringError, NotANumberError, OutOfDeviceMemory
"""Errors that other texts may not have."""
WAITING_SHARE, COMPUTING_SHARE = 2, 4
"""1 / `WAITING_SHARE` of free memory is for waiting micro-batches, 1 / `COMPUTING_SHARE` for the current one."""
MIN_TOKENS, MAX_TOKENS = 512, 8192
"""Default bounds of the tokens of a micro-batch. With fewer, shared prefixes are computed several times and products
are slow. More gain little for their memory, and on a CPU even lose time if tensors become too large for the allocator's
heaps (`memory.HEAP_BLOCK_BYTES`)."""
RESIDENT_BATCHES = 8
"""Maximum micro-batches in a pass of a model with resident weights: a shared prefix is computed once for all of them,
and an interruption loses only these."""
LOGITS_SHARE = 4
"""1 / `LOGITS_SHARE` of a micro-batch's memory is for logits, whose peak is a few times that."""
MIN_WAITING_BYTES = 16 << 20
"""Minimum of the default bytes in memory for waiting micro-batches."""


@dataclass(frozen=True, slots=True)
class ScoringLimits:
    """Memory and disk space that scoring may take.

    Attributes:
        device_bytes: bytes of waiting micro-batches on the computing device.
        host_bytes: bytes of offloaded micro-batches in host memory; 0 if the model computes there.
        disk_bytes: bytes of offloaded micro-batches in a file.
        folder: folder of the file.
        tokens: maximum tokens of a micro-batch.
        token_bytes: approximate bytes of a waiting token.
        experts_rows: maximum rows that go through streamed experts at a time.
        logits_bytes: maximum size of the float32 logits that are computed at a time.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    folder: Path
    tokens: int
    token_bytes: int
    experts_rows: int
    logits_bytes: int

    @property
    def total(self) -> int:
        """Bytes for all waiting micro-batches."""
        return self.device_bytes + self.host_bytes + self.disk_bytes


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """The plan of scoring.

    Attributes:
        passes: the micro-batches of each pass over the weights.
        layout: layout of the micro-batches.
        tokens: number of tokens of all tasks.
    """

    passes: tuple[tuple[MicroBatch, ...], ...]
    layout: TextLayout
    tokens: int

    @property
    def computed(self) -> int:
        """Number of tokens that are computed: fewer with shared prefixes, more with padding."""
        return sum(batch.tokens for batches in self.passes for batch in batches)

    def __str__(self) -> str:
        batches = sum(map(len, self.passes))
        return (
            f"{self.tokens:,} tokens, of which {self.computed:,} are computed ({self.layout.value}), in {batches:,} "
            f"micro-batches and {len(self.passes):,} {'pass' if len(self.passes) == 1 else 'passes'} over the weights"
        )


def check_scores(model: StreamedModel) -> None:
    """Refuse a model that cannot score.

    Raises:
        OptionError: it was not loaded by this package, or has an encoder.
    """
    if not hasattr(model, "placement") or not hasattr(model, "streamer"):
        raise OptionError(
            f"Scoring needs a model loaded by this package; found {type(model).__name__}.",
            "Load it with rabbitllm.AutoModel.from_pretrained.",
        )
    if model.config.is_encoder_decoder:
        raise OptionError(f"{type(model).__name__} has an encoder; scoring needs a decoder-only model.")


def layout_of(model: StreamedModel, *, exact: bool) -> TextLayout:
    """The layout of micro-batches in which the sequences do not change each other's results."""
    if exact:
        return TextLayout.ALONE
    config = model.config.get_text_config(decoder=True)
    if looks_ahead(model):
        return TextLayout.EQUAL
    if can_be_packed(model):
        return TextLayout.PACKED
    fills = config.model_type in FILLABLE and angles_change_after(config) == NEVER
    return TextLayout.FILLED if fills else TextLayout.EQUAL


def limits_of(model: StreamedModel, room: Room, longest: int = 0) -> ScoringLimits:
    """The memory and disk space that scoring may take, with the weights of the model loaded.

    `longest`: tokens of the longest text, whose keys and values a GPU may repeat for all query heads.

    Raises:
        OptionError: a number in `room` is out of its range, or its folder does not exist.
    """
    for name in ("memory_bytes", "disk_bytes", "tokens"):
        value = getattr(room, name)
        if value is not None and value < (name == "tokens"):
            raise OptionError(f"{name}={value}; expected a positive number.", "Use a positive number.")
    executors = model.streamer.executors.values()
    on_host = all(executor.device.shares_host_memory for executor in executors)
    free = min(executor.free_bytes() for executor in executors)
    config, itemsize = model.config.get_text_config(decoder=True), model.dtype.itemsize
    on_device = max(free // WAITING_SHARE, MIN_WAITING_BYTES)
    memory = room.memory_bytes
    if memory is None:
        memory = on_device if on_host else on_device + available_ram() // WAITING_SHARE
    if on_host or memory < on_device:
        on_device = memory
    folder = _folder(model, room)
    disk = room.disk_bytes if room.disk_bytes is not None else shutil.disk_usage(folder).free // WAITING_SHARE
    if not NamelessFile.READS_AT_OFFSETS:  # one offset cannot be read while another is written
        disk = 0
    repeated = 0 if on_host else repeated_bytes(config, itemsize, longest)
    computing = max(free // COMPUTING_SHARE - repeated, 0)
    cost = cost_of_a_pass(config, itemsize)
    max_tokens = min(cost.max_tokens, MAX_TOKENS) if on_host else MAX_TOKENS
    tokens = room.tokens or min(max(cost.tokens_in(computing), MIN_TOKENS), max_tokens)
    token_bytes = itemsize * config.hidden_size * 5 // 2  # hidden states, the input of the layer, and rotary angles
    rows = max(computing // max(cost.experts, 1), tokens)
    logits = min(computing // LOGITS_SHARE, LOGITS_BYTES)
    return ScoringLimits(on_device, memory - on_device, disk, folder, tokens, token_bytes, rows, logits)


def _folder(model: StreamedModel, room: Room) -> Path:
    """The folder of the file: by default that of the weights, whose disk is large, or the system's temporary one."""
    if room.scratch is not None:
        if not room.scratch.is_dir():
            raise OptionError(f"{room.scratch} is not a folder.", "Use an existing folder.")
        return room.scratch
    model_folder = Path(model.name_or_path)
    return model_folder if model_folder.is_dir() and os.access(model_folder, os.W_OK) else Path(tempfile.gettempdir())


def planned(
    tasks: Sequence[Task], layout: TextLayout, limits: ScoringLimits, *, streamed: bool, shares: bool = True
) -> ScoringPlan:
    """Plan the micro-batches and passes.

    Args:
        tasks: see `tasks_of`.
        layout: layout of the micro-batches.
        limits: memory and disk limits.
        streamed: whether weights are streamed. If all are resident, a pass has only a few micro-batches, linked by
            prefixes, so that results are yielded early, and nothing is offloaded to a file.
        shares: whether a micro-batch may use the KV cache of a prefix of the one before.
    """
    batches = micro_batches(tasks, layout, limits.tokens)
    sizes = [batch.tokens * limits.token_bytes for batch in batches]
    limit = limits.total if streamed else limits.device_bytes + limits.host_bytes
    passes = [batches[group] for group in grouped(sizes, limit)]
    if not streamed:
        passes = [chain for group in passes for chain in chains(group, RESIDENT_BATCHES if shares else 1)]
    elif shares:
        passes = [linked(group) for group in passes]
    tokens = sum(len(task.ids) for task in tasks)
    return ScoringPlan(tuple(map(tuple, passes)), layout, tokens)


def score(
    model: StreamedModel,
    texts: Sequence[ScoredText],
    room: Room = ROOM,
    *,
    on_plan: Callable[[ScoringPlan], None] = lambda plan: None,
    keep: Keep | None = None,
) -> Iterator[Scored]:
    """Yield the results of texts, in any order: rejected texts at once, the others after their pass.

    Computes in the caller's thread while it waits for the next result. The model must not be used otherwise until the
    last result.

    Args:
        model: a causal model as `AutoModel.from_pretrained` returns it.
        texts: any number of texts.
        room: limits and options.
        on_plan: called with the plan before the passes, and again before failed texts are retried.
        keep: called with the hidden states that predict each continuation, in place of computing probabilities.

    Raises:
        OptionError: the model cannot score, or `room` is invalid.
        BatchError: the model is answering requests.
        OSError, RabbitLLMError: the weights cannot be read, or there is no room for waiting micro-batches.
    """
    check_scores(model)
    limits, has_head = ModelLimits.of(model), model.get_output_embeddings() is not None
    if model.shared_passes is not None:
        raise BatchError("The model is busy with other requests.", "Score when these are finished.")
    valid = []
    for position, text in enumerate(texts):
        try:
            check_text(text, limits, has_head=has_head, truncate=room.truncate)
            valid.append(position)
        except OptionError as refusal:
            yield Scored(text.index, tokens=len(text.continuation), error=refusal)
    indices = [text.index for text in texts]
    tasks = tasks_of(texts, valid, limits.context, shared=not room.exact)
    shares = not (can_be_packed(model) and shares_keys(model))  # a layer's KV cache exists during its turn only
    waiting = deque([(tasks, layout_of(model, exact=room.exact))] if tasks else [])
    while waiting:
        tasks, layout = waiting.popleft()
        streamed = not model.placement.is_resident
        longest = max(len(task.ids) for task in tasks)
        plan = planned(tasks, layout, limits_of(model, room, longest), streamed=streamed, shares=shares)
        logger.info("scoring %s", plan)
        on_plan(plan)
        retried: dict[TextLayout, list[Task]] = {}
        for batches in plan.passes:
            results, failed = _pass(model, batches, layout, indices, room, keep)
            yield from results
            for batch, error in failed:
                layout_then = _layout_after(layout, batch, error, some_passed=bool(results))
                if layout_then is None:
                    yield from _refused(batch, indices, error)
                else:
                    retried.setdefault(layout_then, []).extend(batch.tasks)
        waiting += [(tasks, layout) for layout, tasks in retried.items()]


def token_logprobs(model: StreamedModel, ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """The log probability of each token of a text but the first, with those of the `count` most likely ones.

    May be called while a batch of the model runs.

    Raises:
        ScoringError: the model's body returned no hidden states.
        OSError, RabbitLLMError: the weights cannot be read.
    """
    tokens = [TokenLogprob(ids[0])]
    if len(ids) == 1:
        return tokens
    batch = MicroBatch((Task(tuple(ids[:-1]), (TextRequest(0, 0, tuple(ids[1:]), None),)),))
    rows = max(LOGITS_BYTES // (4 * ModelLimits.of(model).vocabulary), 1)
    with _kept_states(model, batch) as (forward, (states,)):
        for begin in range(0, len(states), rows):
            logprobs = torch.log_softmax(forward.logits(states[begin : begin + rows]).float(), -1)
            following = ids[begin + 1 : begin + 1 + len(logprobs)]
            tokens += [ranked(row, token, count) for row, token in zip(logprobs, following, strict=True)]
    return tokens


def next_logits(model: StreamedModel, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> torch.Tensor:
    """Logits of some tokens after each prompt, in one pass; may be called while a batch of the model runs.

    Args:
        model: see `score`.
        prompts: of one length, unless shorter sequences may be padded; see `layout_of`.
        tokens: the tokens.

    Returns:
        (prompts, tokens), float32 on the host.

    Raises:
        ScoringError: the model's body returned no hidden states.
        OSError, RabbitLLMError: the weights cannot be read.
    """
    requests = [TextRequest(index, len(ids) - 1, (tokens[0],), None) for index, ids in enumerate(prompts)]
    batch = MicroBatch(tuple(Task(tuple(ids), (one,)) for ids, one in zip(prompts, requests, strict=True)))
    with _kept_states(model, batch) as (forward, states):
        return forward.logits(torch.cat(states))[:, list(tokens)].float().cpu()


@contextlib.contextmanager
def _kept_states(model: StreamedModel, batch: MicroBatch) -> Iterator[tuple[ScoringForward, list[torch.Tensor]]]:
    """Compute a micro-batch; yield each text's rows that predict its targets, for logits inside the context."""
    kept: list[torch.Tensor] = []
    forward, count = ScoringForward(model, keep=lambda _, states: kept.append(states.clone())), len(batch.tasks)
    # calls of several threads replace the body's call one after the other: each puts back what it found
    with BUILDING.a_pass(), model.joint_pass(PassInput(count, batch.length, None, None)), forward.installed():
        forward(batch, forward.ids(batch), range(count))
        yield forward, kept


def _layout_after(layout: TextLayout, batch: MicroBatch, error: Exception, *, some_passed: bool) -> TextLayout | None:
    """The layout in which the texts of a failed micro-batch are retried; None if they are not retried."""
    if isinstance(error, NotPackable):
        logger.warning("Texts do not share their prefixes: %s.", error)
        return TextLayout.EQUAL
    if isinstance(error, NoRoom) and some_passed:
        logger.warning("Another pass computes the texts that did not fit in memory: %s.", error)
        return layout
    logger.warning("A micro-batch has failed.", exc_info=error)
    return TextLayout.ALONE if len(batch.tasks) > 1 else None


def _refused(batch: MicroBatch, indices: Sequence[int], error: Exception) -> Iterator[Scored]:
    if not isinstance(error, RabbitLLMError):
        error = ScoringError(f"The text could not be scored: {type(error).__name__}: {error}", REMEDY)
    for request in batch.tasks[0].asked:
        yield Scored(indices[request.number], tokens=len(request.targets), error=error)


def _pass(
    model: StreamedModel,
    batches: Sequence[MicroBatch],
    layout: TextLayout,
    indices: Sequence[int],
    room: Room,
    keep: Keep | None,
) -> tuple[list[Scored], list[tuple[MicroBatch, Exception]]]:
    """Take micro-batches through the model in one pass over its weights.

    Returns:
        The results, and the micro-batches without results, each with its error.

    Raises:
        OSError, RabbitLLMError: the weights cannot be read.
    """
    limits = limits_of(model, room)
    packed = layout is TextLayout.PACKED
    forward = ScoringForward(model, packed=packed, whole=room.exact, logits_bytes=limits.logits_bytes, keep=keep)
    results: dict[int, list[Scored]] = {}
    relays = [PrefixHandoff() for _ in range(len(batches) + 1)]
    weights = [each for each in (*model.parameters(), *model.buffers()) if not isinstance(each, WeightStandIn)]
    fixed = frozenset(tensor.untyped_storage()._cdata for tensor in weights)
    with ActivationOffload(
        limits.device_bytes, limits.host_bytes, limits.disk_bytes, limits.folder, fixed=fixed
    ) as offload:
        runner = MicroBatchRunner(
            model, offload, exact=room.exact, alone=len(batches) == 1, experts_rows=limits.experts_rows
        )

        def work(index: int, batch: MicroBatch) -> None:
            ids = forward.ids(batch)
            runner.coroutines.wait_for_pass((), {"input_ids": ids})
            with model.streamer.memory_explained():
                results[index] = forward(batch, ids, indices, relays[index], relays[index + 1])

        try:
            with forward.installed():
                coroutines = [runner.coroutines.add(partial(work, *numbered)) for numbered in enumerate(batches)]
                runner.run(coroutines)
        finally:
            runner.coroutines.close()
    failed = []
    for index, (batch, coroutine) in enumerate(zip(batches, coroutines, strict=True)):
        if index in results:
            continue
        error = coroutine.error
        if not isinstance(error, Exception):
            raise error or ScoringError("A micro-batch returned no result.")
        if isinstance(error, OSError | RabbitLLMError) and not isinstance(error, _OF_TEXTS):
            raise error
        failed.append((batch, error))
    return [result for index in sorted(results) for result in results[index]], failed


class MicroBatchRunner:
    """Runs a pass of micro-batches, which take turns at the units of a model.

    Args:
        model: a streamed model.
        offload: offloads the tensors of micro-batches that wait.
        exact: compute experts too for each micro-batch by itself.
        alone: whether there is only one micro-batch, for which nothing is offloaded.
        experts_rows: maximum rows that go through a layer's experts together, unless one micro-batch has more.

    Attributes:
        coroutines: the coroutines, each of which computes a micro-batch.
    """

    def __init__(
        self, model: StreamedModel, offload: ActivationOffload, *, exact: bool, alone: bool, experts_rows: int
    ) -> None:
        self._model = model
        self._offload = offload
        self._alone = alone
        self._experts_rows = experts_rows
        self._embeddings: dict[Coroutine, list[torch.Tensor]] = {}
        self._pooled = {id(source.module) for pool in model.streamer.pools.values() for source in pool.sources}
        placed = {id(model.get_submodule(placed.unit)): placed for placed in model.placement.units}
        embedding = placed.get(id(model.get_input_embeddings()))
        self._looks_up_alone = embedding is not None and embedding.tier in _WITHOUT_LOADING
        executors = model.streamer.executors
        at_boundaries = placed if len(executors) > 1 else {}
        self._boundaries = {key: executors[unit.device].boundary for key, unit in at_boundaries.items()}
        self.coroutines = Coroutines(
            model, self._kind_of, self._compute, self._before_resuming, self._after_running, exact=exact
        )

    def run(self, coroutines: Sequence[Coroutine]) -> None:
        """Run the pass; afterwards each of the coroutines has ended."""
        with self._model.joint_pass(PassInput(1, sum(coroutine.tokens for coroutine in coroutines))):
            self.coroutines.run(coroutines)

    def _kind_of(self, module: nn.Module) -> RowKind | None:
        if id(module) in self._pooled:
            return RowKind.EXPERTS
        if module is not self._model.get_input_embeddings():
            return None
        return RowKind.IDS if isinstance(module, nn.Embedding) else rowwise(module)

    def _before_resuming(self, coroutine: Coroutine, answer: Any) -> None:
        self._offload.take(coroutine)
        point = None if coroutine.call is None else coroutine.call.point
        if point is not None and point.kind is RowKind.IDS:
            self._embeddings[coroutine] = tensors_in([answer])

    def _after_running(self, coroutine: Coroutine) -> None:
        if coroutine.dead:
            self._offload.drop(coroutine)
            self._embeddings.pop(coroutine, None)
        elif not self._alone:
            call = coroutine.pending
            tensors = [*tensors_in([call.args, call.kwargs]), *self._embeddings.get(coroutine, ())]
            try:
                self._offload.leave(coroutine, tensors)
            except Exception as error:  # no room to offload it
                self.coroutines.throw(coroutine, error)

    def _compute(self, point: SyncPoint, waiting: Sequence[Coroutine]) -> None:
        if point.kind is RowKind.IDS and self._looks_up_alone:
            for coroutine in waiting:
                call = coroutine.pending
                try:
                    answer = called(point.module, *call.args, **call.kwargs)
                except Exception as error:
                    self.coroutines.throw(coroutine, error)
                else:
                    self.coroutines.resume(coroutine, answer)
            return
        if point.kind is None:
            self._take_turns(point, waiting)
            return
        for group in self._groups(waiting) if point.kind is RowKind.EXPERTS else [waiting]:
            for coroutine in group:
                self._offload.take(coroutine)
            if not self.coroutines.compute_rows(point, group):
                self._take_turns(point, group)

    def _groups(self, waiting: Sequence[Coroutine]) -> list[Sequence[Coroutine]]:
        """Groups of coroutines whose rows go through a layer's experts together."""
        inputs = [coroutine.pending.args for coroutine in waiting]
        rows = [len(args[0]) if args else self._experts_rows for args in inputs]
        return [waiting[group] for group in grouped(rows, self._experts_rows)]

    def _take_turns(self, point: SyncPoint, waiting: Sequence[Coroutine]) -> None:
        """Run a unit's hooks once, and between them every coroutine's calls, until all have left it.

        The hooks get no inputs, since most of them are offloaded: the boundary between devices is run for each
        coroutine.
        """
        module = point.module
        boundary = self._boundaries.get(id(module))

        def forward(*args: Any, **kwargs: Any) -> None:
            for coroutine, following in zip(waiting, [*waiting[1:], waiting[0]], strict=True):
                if following is not coroutine:
                    self._offload.prefetch(following)
                while coroutine.call is not None and coroutine.call.point is point:  # the head, for several slices
                    call = coroutine.call
                    self._offload.take(coroutine)
                    moved = boundary(module, call.args, call.kwargs) if boundary is not None else None
                    self.coroutines.resume(coroutine, call if moved is None else PendingCall(point, *moved))
            self.coroutines.leave(point, waiting)

        with point.replaced(forward):
            called(module)
