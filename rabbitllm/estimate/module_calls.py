"""Measures calls of the model's own modules: the binding of streamed weights, and modules with experts.

Both run the code that a pass runs, on made-up bytes.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from rabbitllm.engine.devices import Device
from rabbitllm.engine.expert_pool import HALF_LIVES, ExpertPool, Numbers, PooledExperts
from rabbitllm.engine.expert_source import Block, ExpertPart, ExpertSource, Leaf
from rabbitllm.engine.experts import MappedExperts, Supply, stack_of
from rabbitllm.engine.load_plan import LoadPlan
from rabbitllm.engine.prefetch import HostBuffers
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, FileSpan, ReadMode, SpanReader
from rabbitllm.engine.units import ParameterEntry, PartReader, UnitJob, UnitSource, typed
from rabbitllm.estimate import measure
from rabbitllm.estimate.measure import FileSample, small_pages
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.schemes import NESTED_BLOCK, code_values
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT
from rabbitllm.telemetry.profiler import Profiler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MADE_BYTES = 64 << 20
"""Bytes of a conversion of many tensors (experts) that are carried out; the whole is extrapolated from these."""
_STATE = ".quant_state.bitsandbytes__"
"""In the names of stored parts that are bitsandbytes' metadata of a tensor."""


def binding_seconds(plan: LoadPlan, unit: str, device: Device) -> float:
    """Measure the seconds to make and bind a unit's parameters from its stored bytes, and to free them."""
    source = plan.sources[unit]
    part = _made_up(source, device)
    total = 0.0
    for job, times in _in_small(source):
        few = dataclasses.replace(source, jobs=(job,))
        total += times * min(_seconds(few, plan.model, part, device) for _ in range(3 if times == 1 else 2))
    absent = [(entry, entry.placeholder(device.torch_device, _never_read)) for entry in source.entries]
    start = time.perf_counter()
    for entry, placeholder in absent:
        entry.bind(placeholder)
    return total + time.perf_counter() - start


def _never_read(entry: ParameterEntry) -> torch.Tensor:
    raise AssertionError(entry.target)


def _seconds(source: UnitSource, model: PreTrainedModel, part: PartReader, device: Device) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        source.bind(model, part)
    device.synchronise()
    return time.perf_counter() - start


def _in_small(source: UnitSource) -> Iterator[tuple[UnitJob, float]]:
    """Yield each job, or one like it with fewer sources, and the factor from its time to that of the whole job."""
    for job in source.jobs:
        of_pattern: dict[str, list[tuple[str, str]]] = {}
        for pattern, name in job.recipe.sources:
            of_pattern.setdefault(pattern, []).append((pattern, name))
        made = sum(entry.nbytes for _, entry in job.entries)
        count = min(map(len, of_pattern.values()))
        few = max(count * MADE_BYTES // max(made, 1), 1)
        if job.recipe.converter is None or few >= count:
            yield job, 1
            continue
        kept = tuple(entry for entries in of_pattern.values() for entry in entries[:few])
        yield dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, sources=kept)), count / few


def _made_up(source: UnitSource, device: Device) -> PartReader:
    """Return a reader of parts that all have the same bytes, on the device."""
    largest = max((part.nbytes for tensor in source.stored.values() for part in tensor.parts), default=0)
    make = device.host_buffer if device.shares_host_memory else device.device_buffer
    buffer = make(max(largest, 1))
    if any(job.entries and (job.recipe.converter or not source.is_view) for job in source.jobs):
        buffer.fill_(0)  # untouched memory is read at no cost

    def read(spec: TensorSpec) -> torch.Tensor:
        if _STATE not in spec.name:
            return typed(buffer[: spec.nbytes], spec)
        state = {
            "quant_type": spec.name.rpartition("__")[2],
            "blocksize": 64,
            "dtype": "float32",
            "shape": [1, 1],
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": 0.0,
        }
        return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8).to(device.torch_device)

    return read


# A routed module gets made-up experts: as many as fit into `measure.SET_BYTES`, or all of them overlapping in that
# memory, so that few are found in the processor's caches. They come from a real pool, which reads missing ones from
# existing files. So the calls include all costs of a token: products with small matrices, Python, lookup and reading.
# The experts that a call uses are drawn uniformly.

BETWEEN_BYTES = 64 << 20
"""Bytes used between two calls, after which no processor's caches contain earlier data."""
_BYTE = 0x3C
"""Byte that experts are filled with: see `measure`."""

_Call = Callable[[torch.Tensor], None]
"""The module's forward, for tokens with this routing."""
_NO_FILE = 1 << 50
"""Size of a placeholder file from which only the layout of tensors is read."""


class ExpertCalls:
    """The experts module of one kind, on one device.

    Args:
        model: the skeleton that contains it.
        source: one module of the kind; it is left with placeholders.
        device: the device that computes.
        sample: to read from.
        between: bytes of other weights that a pass uses between two such modules: they pass through the processor's
            caches between two calls, and are not counted.
    """

    def __init__(
        self, model: PreTrainedModel, source: ExpertSource, device: Device, sample: FileSample, between: int = 0
    ) -> None:
        self._model = model
        self._source = source
        self._device = device
        self._sample = sample
        self._between = torch.ones(min(between, BETWEEN_BYTES) // 4 if device.shares_host_memory else 0)
        self._random = np.random.default_rng(0)
        self._some = max(min(measure.set_bytes() // source.nbytes, source.experts), source.used)

    def mapped(self, tokens: int, *, for_good: bool) -> float:
        """Measure the seconds of a call whose experts are all in mapped files, or converted once (`for_good`)."""
        with self._with_stacks(_laid_over_each_other(self._model, self._source, for_good)) as call:
            return self._mean(lambda: call(self._draw(tokens, np.arange(self._source.experts))))

    def found(self, tokens: int) -> float:
        """Measure the seconds of a call whose experts are all in slots of a pool."""
        return self._kept(tokens, self._some, 0)

    def near(self, tokens: int) -> float:
        """Measure the seconds of a call whose experts are all in pinned memory, and copied from there."""
        return self._kept(tokens, 0, self._some)

    def _kept(self, tokens: int, slots: int, host_slots: int) -> float:
        filling = _Filling(self._sample, THROUGH_THE_CACHE)
        with self._pool(slots, host_slots, filling) as pool, self._pooled(pool) as call:
            _warm(pool, self._some)
            return self._mean(lambda: call(self._draw(tokens, np.arange(self._some))))

    def read(self, mode: ReadMode, slots: int) -> float | None:
        """Measure the seconds of a token's call whose experts are all read; None if there is nothing to read.

        They are read into one slot after the other, so that the processor's caches contain none of them.

        Args:
            mode: the mode of reading.
            slots: slots of the pool; at most one per measured expert is used.
        """
        slots = min(slots, self._some, self._source.experts - self._source.used)

        def once(pool: ExpertPool, call: _Call) -> None:
            everyone = np.arange(self._source.experts)
            call(self._draw(1, everyone[pool.cache.slots_of(0, everyone) < 0]))

        return self._reading(mode, slots, once)

    def first(self, tokens: int, mode: ReadMode, slots: int) -> float | None:
        """Measure the seconds of a call for a prompt, with an empty pool."""

        def once(pool: ExpertPool, call: _Call) -> None:
            for slot in range(pool.cache.slots):
                pool.cache.clear(0, slot)
            call(self._draw(tokens, np.arange(self._source.experts)))

        return self._reading(mode, min(slots, self._some), once)

    def _reading(self, mode: ReadMode, slots: int, once: Callable[[ExpertPool, _Call], None]) -> float | None:
        spans = [span for span in self._sample.spans if span.nbytes >= self._source.nbytes]
        if not spans:
            return None
        with self._pool(slots, 0, SpanReader(self._sample, mode), spans) as pool, self._pooled(pool) as call:
            try:
                return self._mean(lambda: once(pool, call))
            except OSError:
                return None

    def _mean(self, call: Callable[[], None]) -> float:
        """Return the mean seconds of a call without the slowest tenth, after one call that is not counted.

        Not the median: threads that read while others compute slow down some calls, and a token makes many calls.
        """
        call()
        taken: list[float] = []
        begun = time.perf_counter()
        while not taken or time.perf_counter() - begun < measure.SECONDS:
            self._between.sum()
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return statistics.mean(sorted(taken)[: -(-len(taken) * 9 // 10)])

    def _draw(self, tokens: int, among: Numbers) -> torch.Tensor:
        """Draw the experts that each token is routed to, int64 (tokens, used)."""
        chosen = [self._random.choice(among, self._source.used, replace=False) for _ in range(tokens)]
        return torch.from_numpy(np.stack(chosen)).to(self._device.torch_device)

    @contextmanager
    def _pool(
        self, slots: int, host_slots: int, disk: SpanReader, spans: Sequence[FileSpan] = ()
    ) -> Iterator[ExpertPool]:
        host = None if self._device.shares_host_memory else HostBuffers(self._device)
        source = _moved(self._source, spans or [FileSpan("", 0, self._source.nbytes, 0)], self._device.torch_device)
        pool = ExpertPool(self._model, [source], self._device, slots, disk, Profiler(False), host, host_slots)
        try:
            yield pool
        finally:
            pool.end()
            pool.close()

    @contextmanager
    def _pooled(self, pool: ExpertPool) -> Iterator[_Call]:
        """Yield the module's call with the experts of a pool."""
        supply, module = PooledExperts(pool, 0), self._source.module
        before = module.register_forward_pre_hook(supply.before, with_kwargs=True)
        after = module.register_forward_hook(supply.after, always_call=True)
        try:
            with self._with_stacks({key: self._stack(supply, key) for key in self._source.leaves}) as call:
                yield call
        finally:
            before.remove()
            after.remove()

    def _stack(self, supply: Supply, key: str) -> torch.Tensor:
        return stack_of(supply, key, self._source.leaves[key], self._device.torch_device)

    @contextmanager
    def _with_stacks(self, stacks: dict[str, torch.Tensor]) -> Iterator[_Call]:
        """Yield the module's call with these parameters, and made-up others (biases)."""
        module, device, dtype = self._source.module, self._device.torch_device, self._model.dtype
        for key, stack in stacks.items():
            self._source.leaves[key].entry.bind(stack)
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and key not in stacks:
                made = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
                module._parameters[key] = nn.Parameter(made, requires_grad=False)
        width = _width(self._source)

        def call(index: torch.Tensor) -> None:
            inputs = torch.full((len(index), width), 0.5, dtype=dtype, device=device)
            module(inputs, index, torch.full(index.shape, 1 / index.shape[1], dtype=dtype, device=device))
            self._device.synchronise()

        try:
            with torch.inference_mode():
                yield call
        finally:
            for leaf in self._source.leaves.values():
                leaf.entry.bind(torch.empty(leaf.entry.shape, dtype=leaf.entry.dtype, device="meta"))


class _Filling(SpanReader):
    """A reader that reads nothing and fills memory with made-up weights."""

    def read(self, spans: Any, buffer: memoryview) -> None:
        """Fill all of it."""
        np.frombuffer(buffer, np.uint8)[:] = _BYTE


def _width(source: ExpertSource) -> int:
    """Return the width of the inputs of a module's experts."""
    first = next(leaf for key, leaf in source.leaves.items() if not key.startswith("down"))
    return first.shape[0] if source.module.is_transposed else first.shape[-1]


def _warm(pool: ExpertPool, count: int) -> None:
    """Bring the first experts into memory."""
    (source,) = pool.sources
    uses = np.zeros((len(HALF_LIVES), source.experts))
    uses[:, :count] = 1
    pool.warm({source.name: uses})


def _moved(source: ExpertSource, spans: Sequence[FileSpan], device: torch.device) -> ExpertSource:
    """Return the same experts at these spans of a sample, each with its real number of runs."""
    runs = source.spans(0)
    experts = np.arange(source.experts)

    def part(old: ExpertPart) -> ExpertPart:
        number = max(at for at, run in enumerate(runs) if run.at <= old.at)
        chosen = [spans[at % len(spans)] for at in (experts * len(runs) + number).tolist()]
        offsets = np.array([span.offset for span in chosen], np.int64) + (old.at - runs[number].at)
        return dataclasses.replace(old, files=tuple(span.file for span in chosen), offsets=offsets)

    return _with_parts(source, part, device)


def _with_parts(source: ExpertSource, part: Callable[[ExpertPart], ExpertPart], device: torch.device) -> ExpertSource:
    """Return a source with other parts, and made-up tables."""

    def block(old: Block) -> Block:
        scales = None if old.scales is None else part(old.scales)
        table = code_values(old.form.scheme).to(device) if old.form else None
        nesting = old.nesting
        if nesting is not None:
            own = -(-nesting.made.shape[0] // NESTED_BLOCK)
            nesting = dataclasses.replace(
                nesting, scales=torch.ones(source.experts, own, device=device), table=code_values("8bit").to(device)
            )
        return dataclasses.replace(old, payload=part(old.payload), scales=scales, table=table, nesting=nesting)

    def leaf(old: Leaf) -> Leaf:
        return dataclasses.replace(old, blocks=tuple(map(block, old.blocks)))

    return dataclasses.replace(source, leaves={key: leaf(old) for key, old in source.leaves.items()})


def _laid_over_each_other(model: PreTrainedModel, source: ExpertSource, for_good: bool) -> dict[str, torch.Tensor]:
    """Lay all experts over small pages of `SET_BYTES` in all; as ordinary tensors where the model will have such."""
    largest = max(source.nbytes, *(leaf.ready_bytes // source.experts for leaf in source.leaves.values()))
    memory = small_pages(max(measure.set_bytes(), 2 * largest)).fill_(_BYTE)
    step = (len(memory) - largest) // source.experts // TENSOR_ALIGNMENT * TENSOR_ALIGNMENT
    supply = MappedExperts(model, _overlapping(source, step), lambda file: memory)
    real = MappedExperts(model, source, lambda file: torch.empty(_NO_FILE, dtype=torch.uint8, device="meta"))
    made: dict[str, torch.Tensor] = {}
    for key, leaf in source.leaves.items():
        dtype = leaf.entry.dtype
        if real.strided(key) is not None or (for_good and leaf.matrix_type is None):
            inner = torch.empty(leaf.shape, device="meta").stride()
            flat = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
            made[key] = flat.as_strided((source.experts, *leaf.shape), (step // dtype.itemsize, *inner))
        else:
            made[key] = stack_of(supply, key, leaf, torch.device("cpu"))
    return made


def _overlapping(source: ExpertSource, step: int) -> ExpertSource:
    def part(old: ExpertPart) -> ExpertPart:
        return dataclasses.replace(old, files=("",), offsets=old.at + step * np.arange(source.experts, dtype=np.int64))

    return _with_parts(source, part, torch.device("cpu"))
