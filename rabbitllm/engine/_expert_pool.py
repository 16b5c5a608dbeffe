"""Streamed experts: read when a token is routed to them, and cached by how often that happens.

The device's memory for experts is divided into slots of one expert. Most slots are a cache (`ExpertCache`). A few are
transit slots, for experts that are not worth a slot of the cache: each is read for one use. Many tokens use nearly
all experts of a layer, more than there are transit slots; then the experts go through these in the order of the file,
prefetched while others compute: whole, or leaf by leaf where the model's class computes.

For a device that does not share host memory, host memory is a second cache: of experts without a slot on the device. An
expert is one read; several threads read at once, and rearrange what lies otherwise than kernels take it. There the host
waits once a module, for the routing: grouped products read it from the ends of their groups, other kernels from the
indices.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from rabbitllm.base.forks import Workers
from rabbitllm.engine.devices import Device
from rabbitllm.engine.expert_source import ExpertSource, bytes_in
from rabbitllm.engine.placement import EXPERT_STAGING
from rabbitllm.engine.prefetch import HostBuffers, bytes_of
from rabbitllm.engine.span_reader import ReadTable, SpanReader
from rabbitllm.errors import OptionError
from rabbitllm.formats.safetensors_file import MappedFile, TensorToWrite, encode_header
from rabbitllm.quant import plain
from rabbitllm.storage import durable
from rabbitllm.storage.files import return_pages
from rabbitllm.storage.readers import Readers, ReadRequest
from rabbitllm.telemetry.passes import EXPERTS_IN_HOST_MEMORY, EXPERTS_ON_DEVICE, EXPERTS_READ, READ, READ_WAIT
from rabbitllm.telemetry.profiler import Profiler

HALF_LIVES = (3.0, 512.0)
"""Tokens after which a use counts half, in the recent average and in the long one."""

Numbers: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = npt.NDArray[np.float64]


@dataclass(eq=False)
class ModuleSlots:
    """One module's slots and experts.

    Attributes:
        begin: its first slot.
        owner: slot -> expert, -1 for none.
        slot: expert -> slot, -1 for none.
        uses: half-life -> expert -> uses, earlier ones weighted less.
        lent: slots that take no expert; see `ExpertCache.lend`.
    """

    begin: int
    owner: Numbers
    slot: Numbers
    uses: Values
    lent: Numbers

    @property
    def worth(self) -> Values:
        """The worth of each expert: a mean of its averages over both spans."""
        return self.uses.T @ _WEIGHTS

    @property
    def best(self) -> Numbers:
        """The experts that were used, by decreasing worth."""
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
            ModuleSlots(int(begin), np.full(end - begin, -1), np.full(count, -1), uses, np.empty(0, np.int64))
            for count, begin, end in zip(experts, ends[:-1], ends[1:], strict=True)
            for uses in [np.zeros((len(HALF_LIVES), count))]
        ]

    def use(self, module: int, experts: Numbers, counts: Numbers, tokens: int) -> None:
        """Record that a pass uses these experts of a module.

        Args:
            module: its index.
            experts: distinct ones.
            counts: the number of tokens that use each; they count as spread evenly over the tokens.
            tokens: the number of tokens of the pass.
        """
        from rabbitllm.engine._cache_kernels import use  # numba comes with it

        use(self.modules[module].uses, _KEPT, tokens, experts, counts)

    def slots_of(self, module: int, experts: Numbers) -> Numbers:
        """The slot of each of these experts, -1 for none."""
        return self.modules[module].slot[experts]

    def admit(self, module: int, experts: Numbers, busy: Numbers) -> Numbers:
        """Give slots to experts that have none, by decreasing worth.

        Args:
            module: their module.
            experts: distinct ones.
            busy: slots whose experts are not evicted.

        Returns:
            The slot of each, -1 for none.
        """
        from rabbitllm.engine._cache_kernels import admit  # numba comes with it

        state, slots = self.modules[module], np.full(len(experts), -1)
        if len(experts):
            busy = np.append(busy, state.lent) if len(state.lent) else busy
            admit(state.uses, _WEIGHTS, state.owner, state.slot, state.begin, experts, busy, slots)
        return slots

    def lend(self, count: int) -> list[int]:
        """Let `count` slots, those of least worth of each module in proportion, take no experts.

        Returns:
            Those that did before.
        """
        taken = list[int]()
        for module, state in enumerate(self.modules):
            worth = np.where(state.owner >= 0, state.worth[state.owner], -1.0)
            worth[state.lent - state.begin] = -2.0  # they remain lent first
            before, after = (count * slot // max(self.slots, 1) for slot in (state.begin, state.begin + len(worth)))
            lent = np.argsort(worth, kind="stable")[: after - before] + state.begin
            taken += np.setdiff1d(lent, state.lent).tolist()
            state.lent = lent
            for slot in lent:
                self.clear(module, slot)
        return taken

    def clear(self, module: int, slot: int) -> None:
        """Mark a slot of a module as empty: its expert was not read, or is in other memory now."""
        state = self.modules[module]
        expert = state.owner[slot - state.begin]
        if expert >= 0:
            state.slot[expert] = state.owner[slot - state.begin] = -1

    @property
    def occupied(self) -> int:
        """The number of slots with an expert."""
        return sum(int(np.count_nonzero(state.owner >= 0)) for state in self.modules)


ExpertKey = tuple[int, int]
"""The index of a module, and that of an expert."""


@dataclass(eq=False)
class ExpertSlot:
    """Memory of one expert. It records its expert once all of the expert's bytes are in it.

    Attributes:
        memory: uint8, on the device or in host memory.
        left: the mark of its last use, for the next copy into it; in host memory the ticket of its last upload.
        pending: the fill that was begun.
        ticket: of the copy that filled it, until the computation waits for that copy.
        expert: the expert whose bytes are all in it.
        ready: the number of an `ExpertParameter.view` -> that view, the same for every expert of all modules alike.
        dequantized: the leaves whose scales were dequantized for the expert that is in it.
        request: the request by which compiled code fills it, if it does.
    """

    memory: torch.Tensor
    left: Any
    pending: Future[Any] | _Reading | None = None
    ticket: Any = None
    expert: ExpertKey | None = None
    ready: dict[int, torch.Tensor] = field(default_factory=dict)
    dequantized: set[tuple[int, str]] = field(default_factory=set)
    request: ReadRequest | None = None


class _Reading:
    """A fill by compiled code, in place of a future; what that could not read is read by the one who waits.

    Args:
        request: the one that was sent.
        finish: is called when the request is over, with whether it was read.
    """

    def __init__(self, request: ReadRequest, finish: Callable[[bool], object]) -> None:
        self.request, self._calls = request, [finish]
        self._error: BaseException | None = None

    def forget(self) -> None:
        """Read nothing: the request was taken back."""
        self._calls.clear()
        self.request.wait()  # it keeps no files now

    def done(self) -> bool:
        """Whether the request is over."""
        return not self._calls or self.request.is_over

    def result(self) -> None:
        """Wait until the slot is filled."""
        if self._calls:
            is_read = self.request.wait()
            try:
                self._calls[0](is_read)
            except Exception as error:
                self._error = error
            self._calls.clear()  # not after a Ctrl-C: the slot may not be filled
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class HostSlot:
    """The number of a slot in host memory, -1 for none, and whether the expert is in it already."""

    number: int = -1
    filled: bool = False


MAX_TRANSIT = 32
TRANSIT_BYTES = 128 << 20
"""Maximum transit slots, and bytes of these; small experts get more than a token needs."""
_OFTEN = 2.0
"""Uses of an expert in the last pass from which the next pass probably uses it, too."""
LEAST_AHEAD_BYTES = 1 << 19
"""Bytes from which an expert is read before its router chooses: a read of fewer takes the processor as long."""
READS = 4
"""Experts that are read at once into memory that computes. More at once let those that are read ahead delay others."""


@dataclass(frozen=True)
class _Call:
    """One pass over the experts of a module.

    Attributes:
        module: its index.
        slots: expert -> its slot.
        transit: experts that go through transit slots -> their slots in host memory.
        passing: those of them that are whole in transit slots now.
        promoted: slots in host memory that are free after the pass: their experts have slots on the device now.
    """

    module: int
    slots: dict[int, ExpertSlot]
    transit: dict[int, HostSlot]
    promoted: tuple[int, ...]
    passing: dict[int, ExpertSlot] = field(default_factory=dict)


class ExpertPool:
    """The experts of all modules that compute on one device, as far as memory allows.

    Args:
        model: the skeleton, for conversions.
        sources: the modules.
        device: the device of the modules.
        slots: the number of cache slots on the device.
        disk: reads experts.
        profiler: records reads, waits, and cache hits.
        host: provides host memory to copy from, for a device that does not share host memory.
        host_slots: the number of further slots in host memory.

    Attributes:
        sources: as given.
        valid: the number of transit slots whose experts compute while others are read into the rest.
        waited: seconds that computations have waited for experts.
        is_paused: whether its modules compute with other experts now.
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
        self._device, self.shares_host_memory = device, device.shares_host_memory
        self._profiler = profiler
        self._disk = disk
        self._nbytes = slot_bytes(sources)
        # staging first: every expert from the disk is copied from there
        staging = host.take_slots(EXPERT_STAGING, self._nbytes) if host is not None else ()
        self._staging = deque[tuple[torch.Tensor, Any]]((memory, None) for memory in staging)  # and its last copy
        on_host = host.take_slots(host_slots, self._nbytes) if host is not None else ()
        self._host = [ExpertSlot(memory, None) for memory in on_host]
        self._memory = host  # kept, since its buffers are unpinned when it is freed
        self._readers: Readers | None = None
        self._tables: dict[int, ReadTable | None] = {}
        self._unsent: list[ReadRequest] = []
        self._threads = Workers(READS if device.shares_host_memory else EXPERT_STAGING, f"experts-{device.name}")
        count = slots + transit_slots(sources) + staging_slots(sources)
        if device.shares_host_memory:  # one allocation, for huge pages
            memory = list(device.host_buffer(count * self._nbytes).view(count, -1))
        else:
            memory = [device.device_buffer(self._nbytes) for _ in range(count)]
        for _ in range(staging_slots(sources)):
            self._staging.append((memory.pop(), None))
        expert_slots = [ExpertSlot(part, device.leave()) for part in memory]
        self._slots, self._transit = expert_slots[:slots], expert_slots[slots:]
        if device.shares_host_memory and disk.compiled_block and not any(source.is_rearranged for source in sources):
            self._readers = Readers.of(READS, f"experts-{device.name}", [slot.memory for slot in expert_slots])
        self.valid = max(len(self._transit) // 2, 1)
        views = dict[tuple[object, ...], int]()
        leaves = {(n, name): leaf.view for n, source in enumerate(sources) for name, leaf in source.leaves.items()}
        self._views = {key: views.setdefault(view, len(views)) for key, view in leaves.items() if view is not None}
        counts = [source.experts for source in sources]
        self.cache, self.host_cache = ExpertCache(counts, slots), ExpertCache(counts, host_slots)
        self._call: _Call | None = None
        self._ahead: tuple[int, ReadTable | None, dict[int, tuple[Future[Any] | _Reading, ExpertSlot | None]]]
        self._ahead = -1, None, {}
        self._routers = [_router_beside(model, source) if device.shares_host_memory else None for source in sources]
        self.is_paused, self._last_tokens = False, 0
        self._expected: tuple[int, torch.Tensor] | None = None
        self._copies: list[tuple[torch.Tensor, int | None, Numbers]] = []
        self._sent: list[tuple[Future[Any] | _Reading, ExpertSlot | None]] = []

    def close(self) -> None:
        """Stop the reading threads."""
        self._threads.shutdown()
        if self._readers is not None:
            self._readers.close()

    def expect(self, module: int, index: torch.Tensor) -> None:
        """Prepare the pass over a module that routes tokens by an index, integers (tokens, used).

        If the host would have to wait for the index, reads begin with the first use of an expert.
        """
        self.end()
        self._expected = module, index
        if self._device.shares_host_memory:
            self._begin_expected(module)

    def numbers(self, index: torch.Tensor) -> Numbers:
        """The values of an integer tensor (n,); a device is asked once for each tensor of a pass over a module."""
        if self._device.shares_host_memory:
            return index.numpy().ravel()  # integers have no gradients
        version = None if index.is_inference() else index._version
        key = index.data_ptr(), index.numel(), index.dtype
        for old, old_version, values in self._copies:
            if old_version == version and (old.data_ptr(), old.numel(), old.dtype) == key and index.is_contiguous():
                return values
        values = index.detach().cpu().numpy().ravel()
        if index.is_contiguous():
            self._copies.append((index, version, values))
        return values

    def ends(self, module: int, ends: torch.Tensor, rows: int) -> list[int]:
        """See `experts.ExpertProvider`."""
        offsets = self.numbers(ends)
        expected = self._expected
        if expected is not None and expected[0] == module and rows == expected[1].numel():
            counts = np.append(offsets[:1], offsets[1:] - offsets[:-1])
            chosen = np.flatnonzero(counts)
            self.begin(module, chosen, counts[chosen], len(expected[1]))
        return list(offsets.tolist())

    def _begin_expected(self, module: int) -> None:
        """Begin the pass over a module as its index says, if it was prepared and not begun."""
        expected = self._expected
        if expected is not None and expected[0] == module:
            index = expected[1]
            self.begin(module, *_counted(self.numbers(index), self.sources[module].experts), len(index))

    def begin(self, module: int, experts: Numbers, counts: Numbers, tokens: int) -> None:
        """Begin to read the experts of a module that a pass uses, as far as there are slots.

        Args:
            module: its index among the sources.
            experts: distinct ones.
            counts: the number of tokens that use each.
            tokens: the number of tokens of the pass.
        """
        self._expected, self._last_tokens = None, tokens
        self._end_call()
        table = self._table(module)
        ahead, source = self._taken_ahead(module, experts, table), self.sources[module]
        for cache in (self.cache, self.host_cache)[: 1 + bool(self._host)]:
            cache.use(module, experts, counts, tokens)
        slots = _filled_slots(self.cache, self._slots, module, experts)
        is_cached = slots >= 0
        cached, missing = experts[is_cached], experts[~is_cached]
        admitted = self.cache.admit(module, missing, slots[is_cached])
        host_slots, promoted = self._host_slots(module, missing, admitted)
        slots_by_expert = {e: self._slots[n] for e, n in zip(cached.tolist(), slots[is_cached].tolist(), strict=True)}
        unused = [slot for slot in self._transit if slot.pending is None]  # by what was read ahead
        free = iter(unused if np.count_nonzero(admitted < 0) <= len(unused) else ())
        transit = {}
        for expert, index, in_host in zip(missing.tolist(), admitted.tolist(), host_slots, strict=True):
            if (slot := ahead.get(expert)) is not None:
                slots_by_expert[expert] = slot
                if index >= 0:  # it stays, and the memory of the one that is evicted is a transit slot now
                    place = self._transit.index(slot)
                    self._slots[index], self._transit[place] = slot, self._slots[index]
                continue
            slot = self._slots[index] if index >= 0 else next(free, None)
            if slot is None:
                if in_host.number >= 0 and not in_host.filled:
                    self.host_cache.clear(module, in_host.number)  # its leaves are read at different times
                transit[expert] = in_host if in_host.filled else HostSlot()
            else:
                slots_by_expert[expert] = slot
                self._send(module, expert, slot, in_host, table=table)
        self._send_requests()
        self._call = _Call(module, slots_by_expert, transit, promoted)
        self._count(source, len(cached), host_slots)

    def look_ahead(self, module: int, x: Any) -> None:
        """Begin to read what the next module will probably choose: its router gets this module's input (1, hidden)."""
        router = self.next_router(module)
        if router is None or not isinstance(x, torch.Tensor) or x.shape != (1, router[0].shape[1]):
            return  # experts may get something else than it
        with torch.no_grad():
            logits = plain.product(x.to(router[0].dtype), *router)
        self.read_ahead(module, logits.topk(self.sources[module + 1].used).indices.numpy()[0])

    def next_router(self, module: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None] | None:
        """Weight and bias of the next module's router, if they are in memory now, and its choice is worth a guess."""
        router = self._routers[module + 1] if module + 1 < len(self.sources) else None
        weight, bias = (None if router is None else router._parameters.get(name) for name in ("weight", "bias"))
        in_memory = [each is None or (type(each) is torch.nn.Parameter and each.is_cpu) for each in (weight, bias)]
        return (weight, bias) if weight is not None and all(in_memory) else None

    def read_ahead(self, module: int, chosen: Numbers, *, is_reading: bool = False) -> bool:
        """Begin to read experts of the module after one whose pass has begun, as far as they are not in memory, behind
        those of the pass, into transit slots; returns whether this was done.

        Compiled code reads them one at a time while it reads nothing else, and what is not used in the end is taken
        back unless it has begun. Elsewhere what is not used is read in vain, and each read delays others: the surer
        half is read, and nothing while the pass `is_reading` its own.

        Args:
            module: the one whose pass has begun.
            chosen: experts of the next one, the surest first.
            is_reading: whether experts of the pass are being read.
        """
        if self._call is None or not len(chosen):
            return True
        table = self._table(module + 1)
        if table is None and is_reading:
            return False
        chosen = chosen[: (len(chosen) + 1) // 2] if table is None else chosen
        most, taken = max(source.used for source in self.sources), {*self._call.slots.values()}
        self._send_ahead(module + 1, chosen, taken, most, table, waits=True)
        return True

    def read_again_ahead(self, module: int) -> None:
        """After a pass over a module of several tokens, begin to read what the next one used twice or more in the last
        pass, while its layer does other things."""
        tokens, following = self._last_tokens, module + 1
        if tokens < 2 or following == len(self.sources) or not self.shares_host_memory:
            return
        recent = self.cache.modules[following].uses[0] * (1 - _KEPT[0]) * tokens
        often = np.argsort(-recent, kind="stable")[: np.count_nonzero(recent >= _OFTEN)]
        kept = len(self._transit) - len(self._transit) // 2
        self._send_ahead(following, often, set(), kept, self._table(following))

    def _send_ahead(
        self,
        module: int,
        chosen: Numbers,
        taken: Collection[ExpertSlot],
        kept: int,
        table: ReadTable | None,
        waits: bool = False,
    ) -> None:
        """Begin to read experts into transit slots, as far as they are not in memory; some slots stay for others. Where
        compiled code reads, it `waits` until it reads nothing else."""
        free = [slot for slot in self._transit if slot.pending is None and slot not in taken]
        most = max(len(self._transit) - kept, 0)
        missing, begin = chosen[self.cache.slots_of(module, chosen) < 0][:most].tolist(), len(self._sent)
        for expert, slot in zip(missing, free, strict=False):
            self._send(module, expert, slot, HostSlot(), table=table, waits=waits)
        self._send_requests()
        # an interrupt in between leaves each fill in one of the two, to be waited for
        self._ahead = module, table, dict(zip(missing, self._sent[begin:], strict=False))
        self._sent = self._sent[:begin]

    def lend(self, nbytes: int) -> None:
        """Leave `nbytes` of the cache, at most all, to other uses until the next call: experts of least worth go."""
        if nbytes <= 0 and not any(len(state.lent) for state in self.cache.modules):
            return
        self.end()
        count = min(max(-(-nbytes // self._nbytes), 0), len(self._slots))
        for number in self.cache.lend(count) if self.shares_host_memory else ():
            self._slots[number].expert = None
            return_pages(bytes_of(self._slots[number].memory))

    def step(self, module: int, experts: Sequence[int]) -> bool:
        """Begin a token's pass over a module; whether all of its experts have slots."""
        chosen = np.array(sorted(experts))
        self.begin(module, chosen, np.ones_like(chosen), 1)
        return self._call is not None and not self._call.transit

    def weights(self, module: int, leaves: Sequence[str], expert: int) -> Sequence[torch.Tensor]:
        """Some weights of an expert of the current pass that has a slot, once they are in memory."""
        slot = self._call.slots[expert] if self._call is not None else None
        if slot is None:
            return [next(self.each(module, leaf, [expert])) for leaf in leaves]
        return [self._weight(module, leaf, slot, expert) for leaf in leaves]

    def is_there(self, expert: int) -> bool:
        """Whether an expert of the current pass that has a slot is in memory."""
        pending = self._call.slots[expert].pending if self._call is not None else None
        return pending is None or pending.done()

    def _taken_ahead(self, module: int, experts: Numbers, table: ReadTable | None) -> dict[int, ExpertSlot]:
        """The slots of experts that were read ahead for this pass, if others are left for what it needs as well; what
        was for another pass is ended. What it does not use and compiled code has not begun to read is not read."""
        number, read_by, ahead = self._ahead
        self._sent = [*ahead.values()]
        self._ahead = -1, None, {}
        is_few = len(experts) <= self.sources[module].used or len(ahead) <= len(self._transit) // 2
        # bytes of a file that has changed since were not compared
        used = {*experts.tolist()} if number == module and read_by is table and is_few else set()
        if ahead and self._readers is not None:
            self._readers.withdraw()
        for expert, (reading, slot) in ahead.items():
            if isinstance(reading, _Reading) and reading.request.is_unsent and slot is not None:
                if expert in used:  # before all else, which takes Python longer
                    reading.request.hurry()
                    self._unsent.append(reading.request)
                else:
                    reading.forget()
                    slot.pending = None
        self._send_requests()
        if used:
            # other experts may have gone through a slot since
            return {expert: slot for expert, (reading, slot) in ahead.items() if slot and slot.pending is reading}
        self._settle()
        return {}

    def warm(self, uses: Mapping[str, Values]) -> None:
        """Set earlier use counts, and read the experts of most worth, as far as there are slots."""
        self.end()
        for module, source in enumerate(self.sources):
            for cache in (self.cache, self.host_cache):
                cache.modules[module].uses[:] = uses[source.name]
            best = self.cache.modules[module].best
            missing = best[_filled_slots(self.cache, self._slots, module, best) < 0]
            slots = self.cache.admit(module, missing, best[:0])
            for expert, index in zip(missing[slots >= 0].tolist(), slots[slots >= 0].tolist(), strict=True):
                self._send(module, expert, self._slots[index], HostSlot())
            if self._host:
                spilled = missing[slots < 0]
                spilled = spilled[_filled_slots(self.host_cache, self._host, module, spilled) < 0]
                slots = self.host_cache.admit(module, spilled, spilled[:0])
                for expert, index in zip(spilled[slots >= 0].tolist(), slots[slots >= 0].tolist(), strict=True):
                    self._sent.append((self._threads.submit(self._fill_host_slot, module, expert, index), None))
        self.end()

    def uses(self) -> dict[str, Values]:
        """The uses of each expert of each module, earlier ones weighted less."""
        return {source.name: state.uses.copy() for source, state in zip(self.sources, self.cache.modules, strict=True)}

    def _host_slots(self, module: int, missing: Numbers, admitted: Numbers) -> tuple[list[HostSlot], tuple[int, ...]]:
        """The slot in host memory of each missing expert, and the slots that are free after this pass.

        An expert with a slot on the device needs none in host memory.
        """
        if not self._host:
            return [HostSlot()] * len(missing), ()
        numbers = _filled_slots(self.host_cache, self._host, module, missing)
        filled = numbers >= 0
        wanting = ~filled & (admitted < 0)
        numbers[wanting] = self.host_cache.admit(module, missing[wanting], numbers[filled])
        host_slots = [HostSlot(*pair) for pair in zip(numbers.tolist(), filled.tolist(), strict=True)]
        return host_slots, tuple(numbers[filled & (admitted >= 0)].tolist())

    def _count(self, source: ExpertSource, on_device: int, host_slots: Sequence[HostSlot]) -> None:
        in_host = sum(slot.filled for slot in host_slots)
        counts = {
            EXPERTS_ON_DEVICE: on_device,
            EXPERTS_IN_HOST_MEMORY: in_host,
            EXPERTS_READ: len(host_slots) - in_host,
        }
        for tier, count in counts.items():
            if count:
                self._profiler.add(source.name, tier, 0.0, count * source.expert_bytes, count=count)

    def end(self) -> None:
        """End the pass over the experts of its module, complete or interrupted."""
        self._expected = None
        self._copies.clear()
        self._end_call()

    def _settle(self) -> None:
        """Wait for all fills."""
        futures = [future for future, _ in self._sent]
        _finish(futures)
        wait([future for future in futures if isinstance(future, Future)])
        sent, self._sent = self._sent, []
        self._unsent.clear()  # of a pass that was interrupted
        for future, slot in sent:
            if slot is not None and slot.pending is future:
                slot.pending = None
                if isinstance(future, Future) and not future.cancelled() and future.exception() is None:
                    slot.ticket = future.result()

    def _end_call(self) -> None:
        self._settle()
        call, self._call = self._call, None
        if call is None:
            return
        ticket = self._device.leave()
        for slot in (*call.slots.values(), *self._transit):
            slot.left = ticket
        for index in call.promoted:
            self.host_cache.clear(call.module, index)

    def each(self, module: int, leaf: str, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `experts.ExpertProvider`."""
        call = self._call_of(module, experts)
        passing = call.passing if all(e in call.slots or e in call.passing for e in experts) else {}
        in_transit = self._through_transit(module, leaf, [(e, call.transit[e]) for e in experts if e in call.transit])
        for expert in experts:
            slot = call.slots.get(expert) or passing.get(expert)
            yield next(in_transit) if slot is None else self._weight(module, leaf, slot, expert)

    def _call_of(self, module: int, experts: Sequence[int]) -> _Call:
        """The pass over the experts of a module, begun for these if it was not."""
        self._begin_expected(module)
        call = self._call
        if call is None or call.module != module or not all(e in call.slots or e in call.transit for e in experts):
            distinct = np.unique(np.asarray(experts, np.int64))
            self.begin(module, distinct, np.ones_like(distinct), 1)
            call = self._call
            assert call is not None
        return call

    def batches(self, module: int, experts: Sequence[int]) -> Iterator[list[int]]:
        """See `experts.ExpertProvider`."""
        call = self._call_of(module, experts)
        call.passing.clear()
        slots, passing = {e: call.slots[e] for e in experts if e in call.slots}, call.passing
        free, queue = self._free_transit(), deque(e for e in experts if e not in slots)
        passed = {*self._transit}
        while slots or queue or passing:
            while free and queue:
                slot, expert = free.popleft(), queue.popleft()
                self._send_transit(module, expert, slot, call.transit[expert])
                passing[expert] = slot
            left = slots or passing
            filled = [e for e, slot in left.items() if slot.pending is None or slot.pending.done()]
            # products of a few are slower than reads of the others
            batch = filled if slots and filled else [*left][: self.valid]
            yield batch
            for expert in batch:
                slot = left.pop(expert)
                if queue and slot in passed:  # another is read into it, also if this one was read ahead for the pass
                    free.append(slot)
                    if call.slots.pop(expert, None) is not None:
                        call.transit[expert] = HostSlot()

    def order(self, module: int, experts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """See `experts.ExpertProvider`."""
        self._begin_expected(module)
        call = self._call
        if call is None or call.module != module:
            return [], [], list(range(len(experts)))
        filled: list[int] = []
        pending: list[int] = []
        transit: list[int] = []
        for index, expert in enumerate(experts):
            slot = call.slots.get(expert)
            if slot is None:
                transit.append(index)
            else:
                (filled if slot.pending is None or slot.pending.done() else pending).append(index)
        return filled, pending, transit

    def _free_transit(self) -> deque[ExpertSlot]:
        """The transit slots with no expert that was read ahead for this pass."""
        taken = {*self._call.slots.values()} if self._call is not None else set()
        return deque(slot for slot in self._transit if slot not in taken)

    def _through_transit(
        self, module: int, leaf: str, experts: Sequence[tuple[int, HostSlot]]
    ) -> Iterator[torch.Tensor]:
        """One leaf of experts that have no slot, prefetched as far as there are transit slots."""
        pending: deque[tuple[ExpertSlot, int]] = deque()
        in_use: deque[ExpertSlot] = deque()
        free, queue = self._free_transit(), deque(experts)
        if self._call is not None:
            self._call.passing.clear()
        for _ in experts:
            if len(in_use) == self.valid:
                free.append(in_use.popleft())
            while free and queue:
                slot, (expert, in_host) = free.popleft(), queue.popleft()
                self._send_transit(module, expert, slot, in_host, leaf)
                pending.append((slot, expert))
            slot, expert = pending.popleft()
            in_use.append(slot)
            yield self._weight(module, leaf, slot, expert)

    def _weight(self, module: int, leaf: str, slot: ExpertSlot, expert: int) -> torch.Tensor:
        source, key = self.sources[module], (module, leaf)
        if slot.pending is not None or slot.ticket is not None:
            self._wait(source, slot)
        view, chosen = self._views.get(key), source.leaves[leaf]
        if view in slot.ready and not chosen.makes_scales:
            return slot.ready[view]
        of_slot = bytes_in(slot.memory)
        if chosen.makes_scales and key not in slot.dequantized:
            chosen.make_scales(of_slot, expert)
            slot.dequantized.add(key)
        if view is None:
            return chosen.weight(self._model, of_slot, expert, scaled=True)
        if view not in slot.ready:
            slot.ready[view] = chosen.weight(self._model, of_slot, expert, scaled=True)
        return slot.ready[view]

    def _wait(self, source: ExpertSource, slot: ExpertSlot) -> None:
        if slot.pending is not None:
            start = time.perf_counter()
            try:
                slot.ticket = slot.pending.result()
                slot.pending = None
            finally:
                waited = time.perf_counter() - start
                self.waited += waited
                self._profiler.add(source.name, READ_WAIT, waited)
        if slot.ticket is not None:
            self._device.arrive(slot.ticket)
            slot.ticket = None

    def _send_transit(
        self, module: int, expert: int, slot: ExpertSlot, in_host: HostSlot, leaf: str | None = None
    ) -> None:
        """Begin to fill a transit slot after the uses of what is in it."""
        if slot.pending is not None:  # of a use that broke off
            _finish([slot.pending])
            wait([slot.pending] if isinstance(slot.pending, Future) else [])
        slot.left = self._device.leave()  # all uses of its last expert are queued by now
        self._send(module, expert, slot, in_host, leaf)

    def _send(
        self,
        module: int,
        expert: int,
        slot: ExpertSlot,
        in_host: HostSlot,
        leaf: str | None = None,
        table: ReadTable | None = None,
        waits: bool = False,
    ) -> None:
        """Begin to fill a slot that has no pending fill, with an expert or with the bytes of one of its leaves; what
        compiled code reads of a table is sent later."""
        slot.expert = None
        slot.dequantized.clear()
        if table is not None and table.is_compared[expert]:
            self._ask(table, module, expert, slot, waits)
            return

        def keep(future: Future[Any]) -> None:
            self._sent.append((future, slot))
            slot.pending = future

        self._threads.submit(self._fill, module, expert, slot, in_host, leaf, table, keep=keep)

    def _table(self, module: int) -> ReadTable | None:
        """What compiled code may read of a module, now that its files are those that were opened last."""
        if self._readers is None or not (self._readers.is_usable and self._disk.compiled_block):
            return None
        table = self._tables.get(module)
        if module in self._tables and (table is None or table.is_valid):
            return table
        rows = [self.sources[module].spans(expert) for expert in range(self.sources[module].experts)]
        self._tables[module] = table = None  # closes the files of the other one
        with contextlib.suppress(OSError):  # others read, and tell of errors
            self._tables[module] = table = self._disk.table(rows)
        return table if table is not None and table.is_valid else None

    def _ask(self, table: ReadTable, module: int, expert: int, slot: ExpertSlot, waits: bool) -> None:
        """Have compiled code fill a slot once requests are sent."""
        assert self._readers is not None
        source, request = self.sources[module], slot.request or ReadRequest(self._readers)
        slot.request, spans = request, table.spans[expert]
        block = self._disk.compiled_block
        request.prepare(slot.memory.data_ptr(), spans.ctypes.data, len(spans), block, table, waits=waits)

        def finish(is_read: bool) -> None:
            if not is_read:
                self._fill(module, expert, slot, HostSlot(), None)
                return
            seconds, ended, thread = request.times
            self._profiler.add(source.name, READ, seconds, source.expert_bytes, ended=ended, thread=thread)
            slot.expert = module, expert

        reading = _Reading(request, finish)
        self._sent.append((reading, slot))
        slot.pending = reading
        self._unsent.append(request)

    def _send_requests(self) -> None:
        """Send what compiled code is to read."""
        requests, self._unsent = self._unsent, []
        if self._readers is not None:
            self._readers.send(requests)

    def _fill(
        self,
        module: int,
        expert: int,
        slot: ExpertSlot,
        in_host: HostSlot,
        leaf: str | None,
        table: ReadTable | None = None,
    ) -> Any:
        source, ticket = self.sources[module], None
        if self._device.shares_host_memory:
            self._read(source, expert, leaf, slot.memory)
            if table is not None:
                table.is_compared[expert] = True
        elif in_host.number >= 0:
            if not in_host.filled:
                self._fill_host_slot(module, expert, in_host.number)
            kept = self._host[in_host.number]
            kept.left = ticket = self._upload(kept.memory, slot, source.extent(leaf))
        else:
            staged, ticket = self._staging.popleft()  # one for each thread; the first copy from it is over soonest
            try:
                if ticket is not None:
                    self._device.landed(ticket)
                self._read(source, expert, leaf, staged)
                ticket = self._upload(staged, slot, source.extent(leaf))
            finally:
                self._staging.append((staged, ticket))
        slot.expert = (module, expert) if leaf is None else None
        return ticket

    def _upload(self, host: torch.Tensor, slot: ExpertSlot, extent: slice) -> Any:
        return self._device.upload(host[extent], slot.memory[extent], slot.left)

    def _fill_host_slot(self, module: int, expert: int, index: int) -> None:
        kept = self._host[index]
        kept.expert = None
        if kept.left is not None:
            self._device.landed(kept.left)
        self._read(self.sources[module], expert, None, kept.memory)
        kept.expert = (module, expert)

    def _read(self, source: ExpertSource, expert: int, leaf: str | None, memory: torch.Tensor) -> None:
        spans = source.spans(expert, leaf)
        staged, ticket = self._staging.popleft() if source.is_rearranged else (memory, None)  # one for each thread
        try:
            with self._profiler.stage(source.name, READ, sum(span.nbytes for span in spans)):
                self._disk.read(spans, bytes_of(staged))
            source.rearrange(staged, memory, leaf)
        finally:
            if source.is_rearranged:
                self._staging.append((staged, ticket))


class PooledExperts:
    """The experts of one module of a pool."""

    def __init__(self, pool: ExpertPool, module: int) -> None:
        self._pool = pool
        self._module = module
        self.valid = pool.valid
        self.is_on_device, self.is_in_place = not pool.shares_host_memory, False

    def stays(self, leaf: str) -> bool:
        """See `experts.ExpertProvider`."""
        return False

    def each(self, leaf: str, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `experts.ExpertProvider`."""
        return self._pool.each(self._module, leaf, experts)

    def order(self, experts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """See `experts.ExpertProvider`."""
        return self._pool.order(self._module, experts)

    def batches(self, experts: Sequence[int]) -> Iterator[list[int]]:
        """See `experts.ExpertProvider`."""
        return self._pool.batches(self._module, experts)

    @property
    def is_ready(self) -> bool:
        """Whether `begin` may be used now."""
        return self._pool.shares_host_memory and not self._pool.is_paused

    def has_only_hooks(self, module: torch.nn.Module) -> bool:
        """Whether no hook but ours sees what a module computes."""
        hooks = module._forward_pre_hooks, module._forward_hooks
        return [[*each.values()] for each in hooks] == [[self.before], [self.after]]

    @property
    def next_router(self) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None] | None:
        """See `ExpertPool`."""
        return self._pool.next_router(self._module)

    def begin(self, experts: Sequence[int]) -> bool:
        """See `ExpertPool.step`; in place of `before` and `after`."""
        return self._pool.step(self._module, experts)

    def read_ahead(self, experts: Sequence[int], *, is_reading: bool) -> bool:
        """See `ExpertPool`."""
        return self._pool.read_ahead(self._module, np.array(experts, np.int64), is_reading=is_reading)

    def is_there(self, expert: int) -> bool:
        """See `ExpertPool`."""
        return self._pool.is_there(expert)

    def weights(self, leaves: Sequence[str], expert: int) -> Sequence[torch.Tensor]:
        """See `ExpertPool`."""
        return self._pool.weights(self._module, leaves, expert)

    def numbers(self, index: torch.Tensor) -> list[int]:
        """See `experts.ExpertProvider`."""
        return list(self._pool.numbers(index).tolist())

    def ends(self, ends: torch.Tensor, rows: int) -> list[int]:
        """See `experts.ExpertProvider`."""
        return self._pool.ends(self._module, ends, rows)

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Prepare the pass, before the module computes, from its second argument."""
        index = _routing(args, kwargs)
        if index is not None and not self._pool.is_paused:
            self._pool.expect(self._module, index)
            self._pool.look_ahead(self._module, args[0] if args else None)

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the pass over the module's experts."""
        if not self._pool.is_paused:
            self._pool.end()
            self._pool.read_again_ahead(self._module)


def _finish(futures: Iterable[Future[Any] | _Reading]) -> None:
    """Wait for what compiled code reads, whether it can or not."""
    for future in futures:
        if isinstance(future, _Reading):
            with contextlib.suppress(Exception):
                future.result()


def routed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int] | None:
    """The experts that a call of an experts module names; None if its second argument has no expert indices."""
    index = _routing(args, kwargs)
    return None if index is None else set(index.flatten().tolist())


def _routing(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The second argument of an experts module, if it is an index of experts."""
    index = args[1] if len(args) > 1 else kwargs.get("top_k_index")
    return index if isinstance(index, torch.Tensor) and not index.is_floating_point() and index.numel() else None


def _router_beside(model: PreTrainedModel, source: ExpertSource) -> Any:
    """The module beside experts that has a row of weights for each; None if their size is not worth a guess."""
    beside: list[Any] = [*model.get_submodule(source.name.rpartition(".")[0]).children()]
    sizes = [(part, *part.weight.shape) for part in beside if isinstance(getattr(part, "weight", None), torch.Tensor)]
    routers = [part for part, *shape in sizes if len(shape) == 2 and shape[0] == source.experts]
    return routers[0] if len(routers) == 1 and source.expert_bytes >= LEAST_AHEAD_BYTES else None


def _counted(index: Numbers, experts: int) -> tuple[Numbers, Numbers]:
    """The distinct experts of an index, and how often each is in it."""
    counts = np.bincount(index[(index >= 0) & (index < experts)])
    chosen = np.flatnonzero(counts)
    return chosen, counts[chosen]


def _filled_slots(cache: ExpertCache, slots: Sequence[ExpertSlot], module: int, experts: Numbers) -> Numbers:
    """The slots of experts, -1 for none, after the removal of experts whose slot was never filled: a read failed, or a
    pass was interrupted between the choice of a slot and its fill."""
    for expert, slot in zip(experts.tolist(), cache.slots_of(module, experts).tolist(), strict=True):
        if slot >= 0 and slots[slot].expert != (module, expert):
            cache.clear(module, slot)
    return cache.slots_of(module, experts)


def slot_bytes(sources: Iterable[ExpertSource]) -> int:
    """Bytes of a slot that fits any expert of these modules."""
    return max(source.nbytes for source in sources)


def staging_slots(sources: Sequence[ExpertSource]) -> int:
    """The number of slots in memory that computes to which experts are read that are rearranged from there."""
    return READS if any(source.is_rearranged for source in sources) else 0


def transit_slots(sources: Sequence[ExpertSource]) -> int:
    """The number of transit slots: at least two, and at least the experts of a token in one layer."""
    more = min(TRANSIT_BYTES // slot_bytes(sources), MAX_TRANSIT)
    return min(max(2, more, *(source.used for source in sources)), max(source.experts for source in sources))


_USES = re.compile(
    rb'(?s:.{0,8}\Z|.{8})(\Z|\{"__metadata__":\{"format":"pt"\},?(\}|"[^"]+":\{"dtype":"F64","shape":\[%d,))'
    % len(HALF_LIVES)
)
"""The beginning of a file of `write_uses`: its header, after the length of that. A power cut may have emptied it."""


def write_uses(path: Path, uses: Mapping[str, Values]) -> None:
    """Write the uses of every module, durably, so that the next start is warm.

    A safetensors file with one float64 tensor (half-lives, experts) for each module, named as the module.

    Raises:
        OptionError: a file of that name is another one; nothing was changed.
    """
    durable.require_kind(path, "has no use counts", _USES)
    header, _ = encode_header(TensorToWrite(name, "F64", values.shape) for name, values in uses.items())
    durable.write_whole(path, header + b"".join(values.astype("<f8").tobytes() for values in uses.values()))


def read_uses(path: Path, sources: Sequence[ExpertSource]) -> dict[str, Values]:
    """The uses of each of these modules.

    Raises:
        CorruptShardError: it is not a safetensors file.
        OptionError: it was written for another model, or its use counts are invalid.
    """
    file = MappedFile(path)
    specs = {spec.name: spec for spec in file.header.tensors}
    uses = {}
    for source in sources:
        spec = specs.get(source.name)
        shape = (len(HALF_LIVES), source.experts)
        if spec is None or (spec.dtype, spec.shape) != ("F64", shape):
            has = f"{spec.dtype} {spec.shape}" if spec else "nothing"
            raise OptionError(
                f"The file belongs to another model: {path} has {has} for {source.name}; expected F64 {shape}.",
                "Use the file that save_expert_use wrote for this model.",
            )
        uses[source.name] = np.frombuffer(file.bytes_of(spec), "<f8").reshape(shape).astype(np.float64)
        if not (np.isfinite(uses[source.name]).all() and (uses[source.name] >= 0).all()):
            raise OptionError(
                f"Invalid use counts for {source.name} in {path}.", "Write the file again with save_expert_use."
            )
    return uses
