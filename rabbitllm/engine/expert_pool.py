"""Streamed experts: read when a token is routed to them, and cached by how often that happens.

A fixed run of the device's memory is cut into slots of one expert each. Most slots are a cache (`ExpertCache`). The few
transit slots are for experts that are not worth a slot of the cache: each is read for one use. If there are too few of
these, as in the prefill of a long prompt that uses nearly all experts, the layer's experts go through them in the order
of the file, read ahead while others compute.

For a device with memory of its own, host memory is a second cache. It holds experts without a slot on the device; an
expert that gets such a slot is removed from it. An expert is one read; several threads read at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from rabbitllm.base.forks import Workers
from rabbitllm.engine.devices import Device
from rabbitllm.engine.expert_source import ExpertPart, ExpertSource
from rabbitllm.engine.placement import EXPERT_STAGING
from rabbitllm.engine.prefetch import HostBuffers, bytes_of
from rabbitllm.engine.span_reader import SpanReader
from rabbitllm.errors import OptionError
from rabbitllm.formats.safetensors_file import MappedFile, TensorToWrite, encode_header
from rabbitllm.storage import durable
from rabbitllm.telemetry.passes import EXPERTS_IN_HOST_MEMORY, EXPERTS_ON_DEVICE, EXPERTS_READ, READ, READ_WAIT
from rabbitllm.telemetry.profiler import Profiler

HALF_LIVES = (3.0, 512.0)
"""Tokens after which a use counts half, in the recent average and in the long one."""

Numbers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


@dataclass(eq=False)
class ModuleSlots:
    """One module's slots and experts.

    Attributes:
        begin: its first slot.
        owner: slot -> expert, -1 for none.
        slot: expert -> slot, counted from `begin`, -1 for none.
        uses: half-life -> expert -> uses, older ones weighted less.
    """

    begin: int
    owner: Numbers
    slot: Numbers
    uses: Values

    @property
    def worth(self) -> Values:
        """The worth of each expert: a mean of its averages over both spans."""
        weighed: Values = self.uses.T @ _WEIGHTS
        return weighed

    @property
    def best(self) -> Numbers:
        """The experts that were used, those of most worth first."""
        return np.argsort(-self.worth, kind="stable")[: np.count_nonzero(self.worth)]


_WEIGHTS = 1.0 / np.array(HALF_LIVES)
_KEPT = 2.0**-_WEIGHTS
"""The factor by which one more token reduces the weight of a use."""


class ExpertCache:
    """Slots of one size, and the experts in them.

    Attributes:
        modules: the slots and experts of each module.
    """

    def __init__(self, experts: Sequence[int], slots: int) -> None:
        self.slots = slots
        ends = np.cumsum([0, *experts]) * slots // max(sum(experts), 1)
        self.modules = [
            ModuleSlots(int(begin), np.full(end - begin, -1), np.full(count, -1), np.zeros((len(HALF_LIVES), count)))
            for count, begin, end in zip(experts, ends[:-1], ends[1:], strict=True)
        ]

    def use(self, module: int, experts: Numbers, counts: Numbers, tokens: int) -> None:
        """Record that a pass uses these experts of a module.

        Args:
            module: its index.
            experts: distinct ones.
            counts: how many of the tokens use each; the uses count as spread evenly over the tokens.
            tokens: the number of tokens of the pass.
        """
        uses, left = self.modules[module].uses, _KEPT**tokens
        uses *= left[:, None]
        uses[:, experts] += np.outer((1 - left) / (1 - _KEPT), counts / tokens)

    def slots_of(self, module: int, experts: Numbers) -> Numbers:
        """The slot of each of these experts, -1 for none."""
        shelf = self.modules[module]
        found = shelf.slot[experts]
        return np.where(found >= 0, found + shelf.begin, -1)

    def admit(self, module: int, experts: Numbers, busy: Numbers) -> Numbers:
        """Give slots to experts that have none, to those of most worth first.

        Args:
            module: their module.
            experts: distinct ones.
            busy: slots whose experts are not evicted.

        Returns:
            The slot of each, -1 for none.
        """
        shelf, given = self.modules[module], np.full(len(experts), -1)
        worth = shelf.worth
        of_slots = np.where(shelf.owner >= 0, worth[shelf.owner], -1.0)
        of_slots[busy - shelf.begin] = np.inf
        victims = np.argsort(of_slots, kind="stable")[: len(experts)].tolist()
        order = np.argsort(-worth[experts], kind="stable").tolist()
        for at, victim in zip(order, victims, strict=False):
            expert = experts[at]
            if worth[expert] < of_slots[victim]:
                break
            if shelf.owner[victim] >= 0:
                shelf.slot[shelf.owner[victim]] = -1
            shelf.owner[victim], shelf.slot[expert] = expert, victim
            given[at] = shelf.begin + victim
        return given

    def forget(self, module: int, slot: int) -> None:
        """Mark a slot of a module as empty: its expert was not read, or is in other memory now."""
        shelf = self.modules[module]
        expert = shelf.owner[slot - shelf.begin]
        if expert >= 0:
            shelf.slot[expert] = shelf.owner[slot - shelf.begin] = -1

    @property
    def held(self) -> int:
        """The number of occupied slots."""
        return sum(int(np.count_nonzero(shelf.owner >= 0)) for shelf in self.modules)


Whose = tuple[int, int]
"""The index of a module, and that of an expert."""


@dataclass(eq=False)
class ExpertSlot:
    """Memory of one expert. It records its expert once all of the expert's bytes are in it.

    Attributes:
        memory: uint8, on the device or in host memory.
        left: the mark of its last use, for the next copy into it; in host memory the ticket of its last upload.
        coming: the pending fill.
        ticket: of the copy that filled it, until the computation waits for that copy.
        has: the expert that is completely in it.
        ready: (module, leaf) -> the weight, of leaves that are used in their stored form: a view of the memory,
            whichever expert is in it.
        made: the leaves whose scales were dequantized for the expert that is in it.
    """

    memory: torch.Tensor
    left: Any
    coming: Future[Any] | None = None
    ticket: Any = None
    has: Whose | None = None
    ready: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    made: set[tuple[int, str]] = field(default_factory=set)

    @property
    def is_quiet(self) -> bool:
        """Whether no fill is pending."""
        return self.coming is None or self.coming.done()


@dataclass(frozen=True, slots=True)
class Shelf:
    """A slot in host memory, -1 for none, and whether the expert is in it already."""

    number: int = -1
    filled: bool = False


MAX_TRANSIT = 16
TRANSIT_BYTES = 64 << 20
"""Limits, in slots and in bytes, up to which small experts get more transit slots than a token needs."""


@dataclass(frozen=True)
class _Call:
    """One pass over the experts of a module: the slots of experts, the experts that go through transit slots and where
    they are in host memory, and the slots in host memory that are free after the pass."""

    module: int
    slots: Mapping[int, ExpertSlot]
    passing: Mapping[int, Shelf]
    promoted: tuple[int, ...]


class ExpertPool:
    """The experts of all modules that compute on one device, as far as there is memory for them.

    Args:
        model: the skeleton, for conversions.
        sources: the modules.
        device: the device of the modules.
        slots: the number of cache slots on the device.
        disk: reads experts.
        profiler: records reads, waits, and cache hits.
        host: provides host memory to copy from, for a device with memory of its own.
        host_slots: the number of further slots in host memory.

    Attributes:
        sources: as given.
        waited: seconds that computations have waited for experts, in all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sources: Sequence[ExpertSource],
        device: Device,
        slots: int,
        disk: SpanReader,
        profiler: Profiler,
        host: HostBuffers | None = None,
        host_slots: int = 0,
    ) -> None:
        self.sources = tuple(sources)
        self.waited = 0.0
        self._model = model
        self._device = device
        self._profiler = profiler
        self._disk = disk
        self._nbytes = slot_bytes(sources)
        # staging first: every expert from the disk is copied from there
        self._staging = deque(host.take_slots(EXPERT_STAGING, self._nbytes) if host is not None else ())
        on_host = host.take_slots(host_slots, self._nbytes) if host is not None else ()
        self._host = [ExpertSlot(memory, None) for memory in on_host]
        self._keeper = host  # kept, since its buffers are unpinned when it is freed
        self._threads = Workers(EXPERT_STAGING, f"experts-{device.name}")
        made = [ExpertSlot(part, device.leave()) for part in self._allocated(slots + transit_slots(sources))]
        self._slots, self._transit = made[:slots], made[slots:]
        counts = [source.experts for source in sources]
        self.cache, self.host_cache = ExpertCache(counts, slots), ExpertCache(counts, host_slots)
        self._call: _Call | None = None
        self._sent: list[tuple[Future[Any], ExpertSlot | None]] = []

    def close(self) -> None:
        """Stop the reading threads."""
        self._threads.shutdown()

    def begin(self, module: int, experts: Numbers, counts: Numbers, tokens: int) -> None:
        """Begin to read the experts of a module that a pass uses, as far as there are slots.

        Args:
            module: its index among the sources.
            experts: distinct ones.
            counts: how many of the tokens use each.
            tokens: the number of tokens of the pass.
        """
        self.end()
        source = self.sources[module]
        for cache in (self.cache, self.host_cache):
            cache.use(module, experts, counts, tokens)
        slots = _really(self.cache, self._slots, module, experts)
        here = slots >= 0
        missing = experts[~here]
        given = self.cache.admit(module, missing, slots[here])
        shelves, promoted = self._shelves(module, missing, given)
        found = {e: self._slots[n] for e, n in zip(experts[here].tolist(), slots[here].tolist(), strict=True)}
        transit = iter(self._transit if np.count_nonzero(given < 0) <= len(self._transit) else ())
        passing = {}
        for expert, number, shelf in zip(missing.tolist(), given.tolist(), shelves, strict=True):
            slot = self._slots[number] if number >= 0 else next(transit, None)
            if slot is None:
                if shelf.number >= 0 and not shelf.filled:
                    self.host_cache.forget(module, shelf.number)  # its leaves are read at different times
                passing[expert] = shelf if shelf.filled else Shelf()
            else:
                found[expert] = slot
                self._send(module, expert, slot, shelf)
        self._call = _Call(module, found, passing, promoted)
        self._count(source, int(np.count_nonzero(here)), shelves)

    def warm(self, uses: Mapping[str, Values]) -> None:
        """Take over earlier use counts, and read the experts of most worth, as far as there are slots."""
        self.end()
        for module, source in enumerate(self.sources):
            for cache in (self.cache, self.host_cache):
                cache.modules[module].uses[:] = uses[source.name]
            best = self.cache.modules[module].best
            missing = best[_really(self.cache, self._slots, module, best) < 0]
            given = self.cache.admit(module, missing, best[:0])
            for expert, number in zip(missing[given >= 0].tolist(), given[given >= 0].tolist(), strict=True):
                self._send(module, expert, self._slots[number], Shelf())
            if self._host:
                spilled = missing[given < 0]
                spilled = spilled[_really(self.host_cache, self._host, module, spilled) < 0]
                given = self.host_cache.admit(module, spilled, spilled[:0])
                for expert, number in zip(spilled[given >= 0].tolist(), given[given >= 0].tolist(), strict=True):
                    self._sent.append((self._threads.submit(self._shelve, module, expert, number), None))
        self.end()

    def uses(self) -> dict[str, Values]:
        """How often each expert of each module was used, older uses weighted less."""
        return {source.name: own.uses.copy() for source, own in zip(self.sources, self.cache.modules, strict=True)}

    def _shelves(self, module: int, missing: Numbers, given: Numbers) -> tuple[list[Shelf], tuple[int, ...]]:
        """The slot in host memory of each missing expert, and the slots that are free after this pass.

        An expert with a slot on the device needs none in host memory.
        """
        if not self._host:
            return [Shelf()] * len(missing), ()
        at = _really(self.host_cache, self._host, module, missing)
        filled = at >= 0
        homeless = ~filled & (given < 0)
        at[homeless] = self.host_cache.admit(module, missing[homeless], at[filled])
        shelves = [Shelf(number, is_filled) for number, is_filled in zip(at.tolist(), filled.tolist(), strict=True)]
        return shelves, tuple(at[filled & (given >= 0)].tolist())

    def _count(self, source: ExpertSource, here: int, shelves: Sequence[Shelf]) -> None:
        near = sum(shelf.filled for shelf in shelves)
        found = {EXPERTS_ON_DEVICE: here, EXPERTS_IN_HOST_MEMORY: near, EXPERTS_READ: len(shelves) - near}
        for tier, count in found.items():
            if count:
                self._profiler.add(source.name, tier, 0.0, count * source.expert_bytes, count=count)

    def end(self) -> None:
        """End the pass over the experts of its module, complete or interrupted."""
        wait([future for future, _ in self._sent])
        sent, self._sent = self._sent, []
        for future, slot in sent:
            if slot is not None and slot.coming is future:
                slot.coming = None
                if not future.cancelled() and future.exception() is None:
                    slot.ticket = future.result()
        call, self._call = self._call, None
        if call is None:
            return
        left = self._device.leave()
        for slot in (*call.slots.values(), *self._transit):
            slot.left = left
        for number in call.promoted:
            self.host_cache.forget(call.module, number)

    def each(self, module: int, leaf: str, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `experts.Supply`."""
        call = self._call
        if call is None or call.module != module or not {*call.slots, *call.passing}.issuperset(experts):
            distinct = np.unique(np.asarray(experts, np.int64))  # `begin` was not called for these experts
            self.begin(module, distinct, np.ones_like(distinct), 1)
            call = self._call
            assert call is not None
        passing = self._through(module, leaf, [(e, call.passing[e]) for e in experts if e in call.passing])
        for expert in experts:
            slot = call.slots.get(expert)
            yield next(passing) if slot is None else self._weight(module, leaf, slot, expert)

    def order(self, module: int, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """See `experts.Supply`."""
        call = self._call
        if call is None or call.module != module:
            return [], list(range(len(experts)))
        here: list[int] = []
        coming: list[int] = []
        passing: list[int] = []
        for at, expert in enumerate(experts):
            slot = call.slots.get(expert)
            (passing if slot is None else here if slot.is_quiet else coming).append(at)
        return here, coming + passing

    def _through(self, module: int, leaf: str, experts: Sequence[tuple[int, Shelf]]) -> Iterator[torch.Tensor]:
        """One leaf of experts that have no slot, read ahead as far as there are transit slots."""
        coming: deque[tuple[ExpertSlot, int]] = deque()
        free, wanted = deque(self._transit), deque(experts)
        for _ in experts:
            while free and wanted:
                slot, (expert, shelf) = free.popleft(), wanted.popleft()
                slot.left = self._device.leave()  # all uses of its last expert are queued by now
                self._send(module, expert, slot, shelf, leaf)
                coming.append((slot, expert))
            slot, expert = coming.popleft()
            yield self._weight(module, leaf, slot, expert)
            free.append(slot)

    def _weight(self, module: int, leaf: str, slot: ExpertSlot, expert: int) -> torch.Tensor:
        source, key = self.sources[module], (module, leaf)
        self._wait(source, slot)
        chosen = source.leaves[leaf]

        def bytes_of(part: ExpertPart) -> torch.Tensor:
            return slot.memory[part.at : part.at + part.nbytes]

        if chosen.makes_scales and key not in slot.made:
            chosen.make_scales(bytes_of, expert)
            slot.made.add(key)
        found = slot.ready.get(key)
        if found is not None:
            return found
        made = chosen.weight(self._model, bytes_of, expert, made=True)
        if chosen.is_view or chosen.packed is not None:
            slot.ready[key] = made
        return made

    def _wait(self, source: ExpertSource, slot: ExpertSlot) -> None:
        if slot.coming is not None:
            start = time.perf_counter()
            try:
                slot.ticket = slot.coming.result()
                slot.coming = None
            finally:
                waited = time.perf_counter() - start
                self.waited += waited
                self._profiler.add(source.name, READ_WAIT, waited)
        if slot.ticket is not None:
            self._device.arrive(slot.ticket)
            slot.ticket = None

    def _send(self, module: int, expert: int, slot: ExpertSlot, shelf: Shelf, leaf: str | None = None) -> None:
        """Begin to fill a slot that has no pending fill, with an expert or with the bytes of one of its leaves."""
        slot.has = None
        slot.made.clear()
        slot.coming = self._threads.submit(self._fill, module, expert, slot, shelf, leaf)
        self._sent.append((slot.coming, slot))

    def _allocated(self, count: int) -> list[torch.Tensor]:
        """Memory for new slots on the device."""
        if self._device.shares_host_memory:  # one allocation, for huge pages
            return list(self._device.host_buffer(count * self._nbytes).view(count, -1))
        return [self._device.device_buffer(self._nbytes) for _ in range(count)]

    def _fill(self, module: int, expert: int, slot: ExpertSlot, shelf: Shelf, leaf: str | None) -> Any:
        source, ticket = self.sources[module], None
        if self._device.shares_host_memory:
            self._read(source, expert, leaf, slot.memory)
        elif shelf.number >= 0:
            if not shelf.filled:
                self._shelve(module, expert, shelf.number)
            kept = self._host[shelf.number]
            kept.left = ticket = self._upload(kept.memory, slot, source.extent(leaf))
        else:
            staged = self._staging.popleft()  # one for each thread
            try:
                self._read(source, expert, leaf, staged)
                ticket = self._upload(staged, slot, source.extent(leaf))
                self._device.landed(ticket)
            finally:
                self._staging.append(staged)
        slot.has = (module, expert) if leaf is None else None
        return ticket

    def _upload(self, host: torch.Tensor, slot: ExpertSlot, extent: slice) -> Any:
        return self._device.upload(host[extent], slot.memory[extent], slot.left)

    def _shelve(self, module: int, expert: int, place: int) -> None:
        kept = self._host[place]
        kept.has = None
        if kept.left is not None:
            self._device.landed(kept.left)
        self._read(self.sources[module], expert, None, kept.memory)
        kept.has = (module, expert)

    def _read(self, source: ExpertSource, expert: int, leaf: str | None, memory: torch.Tensor) -> None:
        spans = source.spans(expert, leaf)
        with self._profiler.stage(source.name, READ, sum(span.nbytes for span in spans)):
            self._disk.read(spans, bytes_of(memory))


class PooledExperts:
    """The experts of one module of a pool."""

    def __init__(self, pool: ExpertPool, module: int) -> None:
        self._pool = pool
        self._module = module

    def each(self, leaf: str, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `experts.Supply`."""
        return self._pool.each(self._module, leaf, experts)

    def order(self, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """See `experts.Supply`."""
        return self._pool.order(self._module, experts)

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin to read the experts that the module's second argument routes to, before the module computes."""
        found = routed(args, kwargs, self._pool.sources[self._module].experts)
        if found is not None:
            self._pool.begin(self._module, *found)

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the pass over the module's experts."""
        self._pool.end()


def routed(args: tuple[Any, ...], kwargs: Mapping[str, Any], experts: int) -> tuple[Numbers, Numbers, int] | None:
    """The experts that a call of an experts module uses: distinct experts, how many of the tokens use each, and the
    number of tokens; None if its second argument holds no expert indices."""
    index = args[1] if len(args) > 1 else kwargs.get("top_k_index")
    if not isinstance(index, torch.Tensor) or index.is_floating_point() or not index.numel():
        return None
    chosen, counts = np.unique(index.detach().cpu().numpy(), return_counts=True)
    known = (chosen >= 0) & (chosen < experts)
    return chosen[known], counts[known], len(index)


def _really(cache: ExpertCache, slots: Sequence[ExpertSlot], module: int, experts: Numbers) -> Numbers:
    """The slots of experts, -1 for none, after the removal of experts whose slot was never filled: a read failed, or a
    pass was interrupted between the choice of a slot and its fill."""
    for expert, slot in zip(experts.tolist(), cache.slots_of(module, experts).tolist(), strict=True):
        if slot >= 0 and slots[slot].has != (module, expert):
            cache.forget(module, slot)
    return cache.slots_of(module, experts)


def slot_bytes(sources: Iterable[ExpertSource]) -> int:
    """Bytes of a slot that fits any expert of these modules."""
    return max(source.nbytes for source in sources)


def transit_slots(sources: Sequence[ExpertSource]) -> int:
    """The number of transit slots: the experts of a token in one layer, and at least two."""
    more = min(TRANSIT_BYTES // slot_bytes(sources), MAX_TRANSIT)
    return min(max(2, more, *(source.used for source in sources)), max(source.experts for source in sources))


def write_uses(path: Path, uses: Mapping[str, Values]) -> None:
    """Write the uses of every module, durably, so that the next start is warm.

    A safetensors file with one float64 tensor (half-lives, experts) for each module, named as the module.
    """
    header, _ = encode_header(TensorToWrite(name, "F64", found.shape) for name, found in uses.items())
    durable.write_whole(path, header + b"".join(found.astype("<f8").tobytes() for found in uses.values()))


def read_uses(path: Path, sources: Sequence[ExpertSource]) -> dict[str, Values]:
    """The uses of each of these modules.

    Raises:
        CorruptShardError: it is not a safetensors file.
        OptionError: it was written for another model, or has numbers that are no use counts.
    """
    file = MappedFile(path)
    known = {spec.name: spec for spec in file.header.tensors}
    found = {}
    for source in sources:
        spec = known.get(source.name)
        shape = (len(HALF_LIVES), source.experts)
        if spec is None or (spec.dtype, spec.shape) != ("F64", shape):
            has = f"{spec.dtype} {spec.shape}" if spec else "nothing"
            raise OptionError(
                f"{path} has {has} for {source.name}; expected F64 {shape}: it is of another model.",
                "Use the file that save_expert_use wrote for this model.",
            )
        found[source.name] = np.frombuffer(file.bytes_of(spec), "<f8").reshape(shape).astype(np.float64)
        if not (np.isfinite(found[source.name]).all() and (found[source.name] >= 0).all()):
            raise OptionError(
                f"{path} has numbers for {source.name} that are not counts of uses.",
                "Write the file again with save_expert_use.",
            )
    return found
