"""Estimates for one model on one machine: selects the measurements, and computes times from them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rabbitllm.engine.load_plan import LoadPlan, cache_room
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, ReadMode, stays_cached
from rabbitllm.engine.units import input_embedding
from rabbitllm.estimate.expert_times import DIRECT, DROPPED, ExpertTimes
from rabbitllm.estimate.generation import PROMPT_TOKENS, Speed
from rabbitllm.estimate.machine import Machine, product_key
from rabbitllm.estimate.overheads import binding_seconds, sizes_of
from rabbitllm.estimate.products import WorkingSet, working_set
from rabbitllm.estimate.reading import FileSample
from rabbitllm.estimate.routing import RoutedWork, by_unit
from rabbitllm.estimate.work import UnitWork, shapes
from rabbitllm.quant.compression import BLOCKS

# The time of a pass, from the times of reading and computing each unit. Pure: seconds in, seconds out.
#
# A pass runs the units in order, and is followed by the next one. Of a device's streamed units one computes while the
# following one is read: reading begins when the one before it is taken, continues while other units compute until it is
# needed, and is waited for if it is not done by then (`engine/prefetch.py`: one thread and two buffers per device). The
# first streamed unit of a pass is read while the last units of the pass before compute.
#
# While both are in progress, each is slower than alone: computing by `Strain.computing`, reading by `Strain.reading`,
# which are measured, not assumed. (Reading past the page cache costs the processor little; from the page cache it is a
# copy that occupies a core.) Devices that read at the same time share the disk.
#
# So for consecutive streamed units with r seconds of reading and c of computing each, a unit takes max(r, c) if neither
# slows the other down, and r + c if it is the only streamed unit, since nothing is read ahead of it.

PASSES = 3
"""Passes that are simulated after the first one, for which nothing was read ahead."""
_NOTHING = 1e-12
"""Remaining seconds that are due to rounding."""


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Times of one unit of a pass, in seconds of undisturbed work.

    Attributes:
        device: the device that computes; each has a reader of its own.
        compute: seconds to bind, make and multiply.
        read: seconds to read or copy it; 0 if it is resident.
    """

    device: str
    compute: float
    read: float = 0.0


@dataclass(frozen=True, slots=True)
class Strain:
    """The factors by which computing and reading take longer while both are in progress; at least 1."""

    computing: float = 1.0
    reading: float = 1.0


ALONE = Strain()


def pass_seconds(steps: Sequence[UnitTime], strain: Strain = ALONE) -> float:
    """Return the seconds of a pass that follows others: the mean of a few, since those of several devices may differ.

    Args:
        steps: the units, in the order of a pass.
        strain: how reading and computing slow each other down.
    """
    walk = _Walk(strain)
    follower = _followers(steps)
    begun = 0.0
    for turn, number in itertools.product(range(1 + PASSES), range(len(steps))):
        if (turn, number) == (1, 0):
            begun = walk.now
        step = steps[number]
        if step.read:
            walk.wait(step.device, step.read)
            if follower[number] != number:
                walk.begin(step.device, steps[follower[number]].read)
        walk.compute(step.compute)
    return (walk.now - begun) / PASSES


def _followers(steps: Sequence[UnitTime]) -> dict[int, int]:
    """Map each streamed unit to the next one of its device, cyclically; to itself if it is the only one."""
    found: dict[int, int] = {}
    for device in {step.device for step in steps}:
        order = [number for number, step in enumerate(steps) if step.device == device and step.read]
        found |= dict(zip(order, order[1:] + order[:1], strict=True))
    return found


class _Walk:
    """The simulated time, and the undisturbed seconds left for each device's reader; 0 when its unit can be taken."""

    def __init__(self, strain: Strain) -> None:
        self.now = 0.0
        self._strain = strain
        self._left: dict[str, float] = {}

    def begin(self, device: str, seconds: float) -> None:
        """Start reading the next unit."""
        self._left[device] = seconds

    def wait(self, device: str, seconds: float) -> None:
        """Wait until the unit being read is complete; `seconds` is its time if none was begun."""
        self._left.setdefault(device, seconds)
        while self._left[device] > _NOTHING:
            self._pass(float("inf"), 1.0)
        del self._left[device]

    def compute(self, seconds: float) -> None:
        """Compute for this many seconds of undisturbed work."""
        while seconds > _NOTHING:
            speed = 1 / self._strain.computing if self._reading() else 1.0
            seconds -= self._pass(seconds / speed, self._strain.reading) * speed

    def _reading(self) -> list[str]:
        return [device for device, left in self._left.items() if left > _NOTHING]

    def _pass(self, most: float, slower: float) -> float:
        """Advance the time until a reader is done, by at most this many seconds; return how many."""
        readers = self._reading()
        slower *= max(len(readers), 1)
        took = min([most, *(self._left[device] * slower for device in readers)])
        for device in readers:
            self._left[device] -= took / slower
        self.now += took
        return took


Memory = tuple[str, bool]
"""The form that weights are multiplied from, and whether they are resident as mapped, or come into a buffer."""
_SMALL = 0.02
"""Share of all multiplied bytes; a form with less is assumed to be as fast as the commonest one."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times in seconds, None for those that could not be measured; see `generation.GenerationEstimate`."""

    from_the_disk: bool
    token_seconds: float | None
    first_token_seconds: float | None
    speeds: tuple[Speed, ...]
    found_token_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _Reads:
    """How streamed units are read: the mode, and bytes per second between two tokens and at the first."""

    way: ReadMode
    steady: float
    disk: float


class _Products:
    """Rates of products with a number of inputs, by the form and the memory of the weights."""

    def __init__(self, sets: Mapping[Memory, _Set], tokens: int) -> None:
        self.tokens = tokens
        self.rates = {memory: found.rate(tokens) for memory, found in sets.items()}

    def seconds(self, unit: UnitWork) -> float:
        """Return the seconds of all products of a unit; forms that were not measured count as the commonest one."""
        commonest = next(iter(self.rates.values()), 0.0)
        return sum(
            product.touched(self.tokens) / self.rates.get((product.form, not unit.streamed), commonest)
            for product in unit.products
        )


class _Set:
    """Matrices to measure with, which are made on first use."""

    def __init__(self, machine: Machine, device: str, memory: Memory, make: Callable[[], WorkingSet]) -> None:
        self.key = (device, *memory)
        self._machine = machine
        self._make = make
        self._made: WorkingSet | None = None

    def rate(self, tokens: int) -> float:
        """Return the bytes of weights per second, with this many inputs at a time."""
        return self._machine.measured(product_key(*self.key, tokens), lambda: self.matrices.rate(tokens))

    @property
    def matrices(self) -> WorkingSet:
        """The matrices, made on first use."""
        if self._made is None:
            self._made = self._make()
        return self._made


class PassEstimator:
    """Measures only the rates that this model needs, and computes its times.

    Args:
        drawn: the model.
        work: work of a pass with its units.
        routed: work of a pass with experts that have a placement of their own.
        machine: the machine.
        files: files to measure reading with.
    """

    def __init__(
        self,
        drawn: LoadPlan,
        work: Sequence[UnitWork],
        routed: Sequence[RoutedWork],
        machine: Machine,
        files: Sequence[Path],
    ) -> None:
        self._drawn = drawn
        self._work = work
        self._routed = routed
        self._machine = machine
        self._files = files
        self._streamed = drawn.placement.streamed_bytes
        self._largest = max(unit.streamed for unit in work) or max(p.stored for p in drawn.placement.units)
        self._cached = stays_cached(self._streamed, cache_room(drawn.placement, machine.devices))
        self._speeds: list[Speed] = []

    def pace(self) -> PassTimes:
        """Measure and return the times."""
        reads = self._reads()
        if reads is None and self._streamed:
            return PassTimes(not self._cached, None, None, ())
        sets = {device: self._working_sets(device) for device in self._devices()}
        one = {name: _Products(found, 1) for name, found in sets.items()}
        strain = self._strain(reads, sets, one) if reads is not None and self._streamed else ALONE
        self._note(one, reads)
        calls = ExpertTimes(self._drawn, self._routed, self._machine, self._files)
        self._note_experts(calls)
        binding = self._bindings()
        steady, disk = (reads.steady, reads.disk) if reads is not None else (1.0, 1.0)
        decoding = [unit for unit in self._work if not unit.once]

        def token(experts: Mapping[str, float] | None) -> float | None:
            return (
                None if experts is None else pass_seconds(self._steps(one, binding, steady, decoding, experts), strain)
            )

        first, prompt = None, self._of_units(lambda routed: calls.of(routed).prompt)
        if reads is not None and prompt is not None and self._machine.prompts:
            many = {name: _Products(found, PROMPT_TOKENS) for name, found in sets.items()}
            computing = pass_seconds(self._steps(many, binding, disk, self._work, prompt), strain)
            touched = sum(routed.touched_bytes(PROMPT_TOKENS) for routed in self._routed)
            first = max(computing, (self._mapped_bytes() + self._streamed + touched) / disk)
        return PassTimes(
            from_the_disk=(bool(self._streamed) and not self._cached) or calls.from_the_disk,
            token_seconds=token(self._of_units(lambda routed: calls.of(routed).token(routed))),
            first_token_seconds=first,
            speeds=tuple(self._speeds),
            found_token_seconds=token(self._of_units(lambda routed: calls.of(routed).found)),
        )

    def _of_units(self, seconds: Callable[[RoutedWork], float | None]) -> dict[str, float] | None:
        """Return the seconds of the experts of each unit; None if those of one are not known."""
        found: dict[str, float] = {}
        for unit, modules in by_unit(self._routed).items():
            taken = [seconds(routed) for routed in modules]
            known = [one for one in taken if one is not None]
            if len(known) < len(taken):
                return None
            found[unit] = sum(known)
        return found

    def _devices(self) -> list[str]:
        return list(dict.fromkeys(unit.device for unit in self._work))

    # Reading

    @cached_property
    def _sample(self) -> FileSample:
        return FileSample(self._files, self._largest)

    def _read_rate(self, way: ReadMode) -> float | None:
        return self._machine.measured(("read", way), lambda: self._sample.rate(way))

    def _cached_rate(self) -> float | None:
        return self._sample.cached_rate()

    def _reads(self) -> _Reads | None:
        through = self._read_rate(DROPPED)
        if through is None:
            return None
        if not self._streamed:
            return _Reads(THROUGH_THE_CACHE, through, through)
        if self._cached:
            steady = self._machine.measured("read again", self._cached_rate) or through
            return _Reads(THROUGH_THE_CACHE, steady, through)
        past = self._read_rate(DIRECT)
        if past is not None and past >= through:
            return _Reads(DIRECT, past, past)
        return _Reads(DROPPED, through, through)

    def _mapped_bytes(self) -> int:
        """Return the bytes that are mapped into host memory from the files, and read from the disk on first use."""
        found = 0
        embedding = input_embedding(self._drawn.model)
        for placed in self._drawn.placement.units:
            source = self._drawn.sources[placed.unit]
            mapped = placed.tier is Tier.PACKED or (placed.tier is Tier.RESIDENT and source.is_view)
            if mapped and self._machine.device(placed.device).shares_host_memory:
                found += placed.counted if source.unit.module is not embedding else 0
        return found

    # Computing

    def _working_sets(self, device: str) -> dict[Memory, _Set]:
        """Return matrices by form and kind of memory, the most bytes first; forms with few bytes have none."""
        here = [unit for unit in self._work if unit.device == device]
        touched: Counter[Memory] = Counter()
        stored: Counter[Memory] = Counter()
        for unit in here:
            for product in unit.products:
                touched[product.form, not unit.streamed] += round(product.touched(1))
                stored[product.form, not unit.streamed] += product.nbytes
        least, dtype = _SMALL * touched.total(), self._drawn.model.dtype
        found = {}
        for (form, mapped), nbytes in touched.most_common():
            if nbytes >= least:
                like = shapes((unit for unit in here if mapped is not bool(unit.streamed)), form)
                make = partial(
                    working_set, form, like, dtype, self._machine.device(device), stored[form, mapped], mapped=mapped
                )
                found[form, mapped] = _Set(self._machine, device, (form, mapped), make)
        return found

    def _strain(self, reads: _Reads, sets: dict[str, dict[Memory, _Set]], alone: dict[str, _Products]) -> Strain:
        """Measure how reading and the commonest products slow each other down; those on a GPU are not slowed down."""
        for name, found in sets.items():
            if found and self._machine.device(name).shares_host_memory:
                memory, commonest = next(iter(found.items()))
                undisturbed = alone[name].rates[memory]
                key = ("strain", commonest.key, reads.way)
                return self._machine.measured(key, partial(self._strained, reads, commonest, undisturbed))
        return ALONE

    def _strained(self, reads: _Reads, commonest: _Set, alone: float) -> Strain:
        with self._sample.going_on(reads.way) as background:
            rate = commonest.matrices.rate(1, disturbed=True)
        self._sample.forget()
        slower = reads.steady / background.rate if background.rate else 1.0
        return Strain(max(alone / rate, 1.0), max(slower, 1.0))

    def _bindings(self) -> dict[tuple[Any, ...], float]:
        """Measure the binding of each kind of unit whose parameters are bound for each pass."""
        found: dict[tuple[Any, ...], float] = {}
        for unit in self._work:
            if unit.hooked and unit.kind not in found:
                found[unit.kind] = binding_seconds(self._drawn, unit.unit, self._machine.device(unit.device))
        return found

    def _steps(
        self,
        rates: Mapping[str, _Products],
        binding: Mapping[tuple[Any, ...], float],
        read_rate: float,
        work: Sequence[UnitWork],
        experts: Mapping[str, float],
    ) -> list[UnitTime]:
        """Return the times of a pass; `experts`: unit -> seconds of its experts, for which nothing is read ahead."""
        dtype, home = self._drawn.model.dtype, self._drawn.placement.home
        sizes = sizes_of(self._drawn.model.config.get_text_config())
        steps = [UnitTime(home, self._machine.overhead(sizes, dtype, home).a_pass)]
        bringing = {device: self._bringing(device, work, read_rate) for device in self._devices()}
        for unit in work:
            device = self._machine.device(unit.device)
            small = self._machine.overhead(sizes, dtype, unit.device).a_module * unit.modules
            products = rates[unit.device].seconds(unit)
            bound = binding[unit.kind] if unit.hooked else 0.0
            # a GPU's work is queued ahead of its execution
            compute = bound + (small + products if device.shares_host_memory else max(small, products))
            compute += experts.get(unit.unit, 0.0)
            brought = unit.streamed if device.shares_host_memory else unit.uploaded
            steps.append(UnitTime(unit.device, compute, brought * bringing[unit.device]))
        return steps

    def _bringing(self, name: str, work: Sequence[UnitWork], read_rate: float) -> float:
        """Return the seconds per byte that a pass brings to a device.

        To a device that does not share host memory bytes are copied while others are read ahead, and the slower of the
        two decides; while units in pinned memory are copied, the disk has time to read a streamed one.
        """
        here = [unit for unit in work if unit.device == name]
        read, copied = sum(unit.streamed for unit in here), sum(unit.uploaded for unit in here)
        if not copied:
            return 1 / read_rate
        return max(read / read_rate, copied / self._machine.upload(name)) / copied

    def _note(self, rates: Mapping[str, _Products], reads: _Reads | None) -> None:
        """Record the rates that the times are based on, with their descriptions."""
        for device, known in rates.items():
            said = set()
            for (form, _), rate in known.rates.items():
                if form not in said:
                    what = f"{form} codes" if form in BLOCKS else form
                    self._speeds.append(Speed(f"multiplying with {what} on {device}", rate))
                said.add(form)
        if reads is not None and self._streamed:
            words = {DIRECT: "past the page cache", DROPPED: "through the page cache"}
            self._speeds.append(Speed(f"reading {words.get(reads.way, 'out of the page cache')}", reads.steady))

    def _note_experts(self, calls: ExpertTimes) -> None:
        """Do the same for experts: bytes that a token uses, per second of their module's call."""
        said = set()
        for routed in self._routed:
            times = calls.of(routed)
            kinds = {"at hand": times.found, "in page-locked memory": times.near, "to be read": times.read}
            for kind, seconds in kinds.items():
                what = f"using experts {kind} on {routed.device}"
                if seconds is not None and what not in said:
                    self._speeds.append(Speed(what, routed.used_bytes / seconds))
                    said.add(what)
