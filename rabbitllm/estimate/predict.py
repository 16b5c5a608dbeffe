"""Predicts the seconds per token before a split is made: from the engine's placement and this machine's rates.

Only the needed rates are measured: none for a form that no unit is multiplied from, and no slowdown by reading if
nothing is streamed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rabbitllm import prepare
from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import OutOfDeviceMemory, memory_explained, resolve_devices
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.engine.load_plan import LoadPlan, cache_room, make_load_plan, place_units, too_little_memory
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, ReadMode, stays_cached
from rabbitllm.engine.units import UnitSource, input_embedding
from rabbitllm.errors import RabbitLLMError
from rabbitllm.estimate.cost_model import (
    ALONE,
    PROMPT_TOKENS,
    GenerationEstimate,
    RoutedWork,
    Speed,
    Strain,
    UnitTime,
    UnitWork,
    by_unit,
    bytes_of_a_pass,
    pass_seconds,
    routed_work,
    shapes,
    work_of,
)
from rabbitllm.estimate.machine import Machine, product_key, sizes_of
from rabbitllm.estimate.measure import DIRECT, DROPPED, FileSample, WorkingSet, can_measure, working_set
from rabbitllm.estimate.module_calls import ExpertCalls, binding_seconds
from rabbitllm.estimate.outline import Outline
from rabbitllm.estimate.plan import SourceScan
from rabbitllm.quant.schemes import STORED
from rabbitllm.splitter.plan import PlannedFiles
from rabbitllm.storage import durable
from rabbitllm.store.layer_file import LAYER_SUFFIX
from rabbitllm.store.layer_store import LayerStore, WeightFiles

logger = logging.getLogger(__name__)


def generations(
    scan: SourceScan, options: RunOptions, min_free: int
) -> tuple[tuple[str, ...], list[GenerationEstimate]]:
    """Return the devices of a model, and the generation estimate at each compression.

    Args:
        scan: of the model.
        options: as `AutoModel.from_pretrained` would get them.
        min_free: bytes of the disk to keep free.

    Raises:
        DeviceError: the device does not exist.
    """
    devices = resolve_devices(options.device, options.max_memory, options.pin_memory)
    machine = Machine(devices, options, min_free)
    found = []
    with prepare.config_folder(scan.source) as home:
        for compression in scan.folders:
            try:
                store = _store(scan, compression)
                plan = make_load_plan(store, options, home, devices) if store is not None else None
            except RabbitLLMError as error:
                found.append(GenerationEstimate(compression, obstacle=error.problem, refused=True))
                continue
            if store is None or plan is None:
                found.append(GenerationEstimate(compression, obstacle=scan.obstacle(compression)))
                continue
            try:
                found.append(estimate(compression, plan, store.folder, machine, _readable(scan, compression)))
            except RabbitLLMError as error:
                found.append(GenerationEstimate(compression, obstacle=error.problem))
    return tuple(device.name for device in devices), found


def _store(scan: SourceScan, compression: str | None) -> WeightFiles | None:
    """Return the layer files, existing or planned."""
    folder = scan.folders[compression]
    if compression in scan.manifests and scan.obstacle(compression) is None:
        return LayerStore(folder)
    return PlannedFiles(scan.plans[compression], folder) if compression in scan.plans else None


def _readable(scan: SourceScan, compression: str | None) -> Sequence[Path]:
    """Return files to measure reading with: layer files of this compression, or shards, or other layer files."""
    groups = [list(scan.folders[compression].glob(f"*{LAYER_SUFFIX}"))]
    if scan.source.local is not None and scan.checkpoint is not None:
        groups.append([scan.source.local / shard for shard in scan.checkpoint.index.shards])
    groups += [list(folder.glob(f"*{LAYER_SUFFIX}")) for folder in scan.folders.values()]
    return next((found for group in groups if (found := [path for path in group if path.is_file()])), [])


def estimate(
    compression: str | None, plan: LoadPlan, folder: Path, machine: Machine, readable: Sequence[Path]
) -> GenerationEstimate:
    """Return the generation estimate for a model from its load plan.

    Args:
        compression: of its files.
        plan: the load plan.
        folder: the folder of its layer files, which may not exist yet.
        machine: the machine to run it on.
        readable: files that may be on the same disk as the layer files.
    """
    plan = plan.as_multiplied()
    work, routed, refusal = work_of(plan), routed_work(plan), too_little_memory(plan, machine.devices)
    found = bytes_of_a_pass(compression, plan.placement, work, routed)
    if refusal is not None:
        return dataclasses.replace(found, too_little_memory=refusal.problem)
    if not can_measure():
        return found
    with machine.something_to_read(folder, readable) as files:
        return PassEstimator(plan, work, routed, machine, files).timed(found)


# A model of which only an outline is known. The load plan of the outline's sample model is made; then each of its
# decoder layers is repeated for all layers of its kind, and the whole is placed, listed and timed like any other model.


def predict_outline(
    outline: Outline,
    compression: str | None,
    folder: Path,
    machine: Machine,
    readable: Sequence[Path],
    work: Path,
) -> tuple[LoadPlan, GenerationEstimate]:
    """Return the load plan of a model and its generation estimate.

    Args:
        outline: the model.
        compression: one of its `compressions`.
        folder: the folder that its layer files would be in.
        machine: the machine to run it on.
        readable: files that may be on the disk of `folder`.
        work: an empty folder, for the sample's config.

    Raises:
        RabbitLLMError: `load_model` would refuse the model.
    """
    durable.write_scratch(work / "config.json", json.dumps(outline.sample).encode())
    store = PlannedFiles(outline.plans[compression], folder)
    plan = stretched(make_load_plan(store, machine.options, work, machine.devices), outline.layers, machine)
    return plan, estimate(compression, plan, folder, machine, readable)


def stretched(sample: LoadPlan, layers: Sequence[int], machine: Machine) -> LoadPlan:
    """Return a load plan with the decoder layers of a larger model, placed again.

    Args:
        sample: of the small model.
        layers: for each decoder layer of the large one, the number of the small one's of the same kind.
        machine: the machine to place it on.
    """
    own = [name for name, source in sample.sources.items() if source.unit.is_layer]
    own = [name for name in own if "language_model." in name] or own  # an encoder has layers too
    names = {f"{own[like].rpartition('.')[0]}.{at}": own[like] for at, like in enumerate(layers)}
    sources: dict[str, UnitSource] = {}
    for name, source in sample.sources.items():
        if name not in own:
            sources[name] = source
        elif name == own[0]:
            sources |= {long: sample.sources[short] for long, short in names.items()}
    inside: dict[str, list[ExpertSource]] = {}
    for found in sample.experts:
        inside.setdefault(found.unit, []).append(found)
    experts = tuple(
        dataclasses.replace(found, name=long + found.name.removeprefix(short), unit=long)
        for long, short in names.items()
        for found in inside.get(short, ())
    )
    placement = place_units(sample.model, sources, experts, machine.devices, machine.options, sample.choosers)
    return dataclasses.replace(sample, sources=sources, experts=experts, placement=placement)


# Times

Memory = tuple[str, bool]
"""The form that weights are multiplied from, and whether they are resident as mapped, or come into a buffer."""
Rates = Mapping[str, Mapping[Memory, float]]
"""Device -> form and memory of weights -> bytes of weights multiplied with per second, the commonest form first."""
_SMALL = 0.02
"""Share of all multiplied bytes; a form with less is assumed to be as fast as the commonest one."""
PIECE_BYTES = 1 << 20
"""Minimum size of the pieces that are read to measure smaller experts."""


@dataclass(frozen=True, slots=True)
class _Reads:
    """How streamed units are read: the mode, and bytes per second between two tokens and at the first."""

    mode: ReadMode
    steady: float
    disk: float


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Seconds of calls of one kind of module with experts; None if one could not be measured or is not needed.

    Attributes:
        found: for one token, with all its experts on the computing device.
        near: with all of them in pinned memory.
        read: with all of them read.
        prompt: for the first prompt, all of whose experts are read.
        from_the_disk: whether some are read from the disk for each token.
    """

    found: float
    near: float | None
    read: float | None
    prompt: float | None
    from_the_disk: bool = False

    def token(self, work: RoutedWork) -> float | None:
        """Return the expected seconds of a token if all experts are used equally; None if that is not known."""
        total = 0.0
        for share, seconds in ((work.on_device, self.found), (work.in_host, self.near), (work.missed, self.read)):
            if share and seconds is None:
                return None
            total += share * (seconds or 0.0)
        return total


class PassEstimator:
    """Measures only the rates that this model needs, and computes its times.

    Args:
        plan: the model.
        work: work of a pass with its units.
        routed: work of a pass with experts that have a placement of their own.
        machine: the machine.
        files: files to measure reading with.
    """

    def __init__(
        self,
        plan: LoadPlan,
        work: Sequence[UnitWork],
        routed: Sequence[RoutedWork],
        machine: Machine,
        files: Sequence[Path],
    ) -> None:
        self._plan = plan
        self._work = work
        self._routed = routed
        self._machine = machine
        self._files = files
        self._streamed = plan.placement.streamed_bytes
        self._room = cache_room(plan.placement)
        self._cached = stays_cached(self._streamed, self._room)
        self._devices = list(dict.fromkeys(unit.device for unit in work))

    def timed(self, found: GenerationEstimate) -> GenerationEstimate:
        """Measure, and return the estimate with times; without some that could not be measured."""
        try:
            with memory_explained(self._machine.devices, self._plan.placement.limits, "measuring"):
                return self._measured(found)
        except OutOfDeviceMemory as error:
            problem = error.problem
            logger.warning("The seconds per token cannot be measured: %s", problem)
            return found

    def _measured(self, found: GenerationEstimate) -> GenerationEstimate:
        reads = self._reads()
        if reads is None and self._streamed:
            return dataclasses.replace(found, from_the_disk=not self._cached)
        rates = self._product_rates(1)
        strain = self._strain(reads, rates) if reads is not None and self._streamed else ALONE
        calls: dict[Any, CallTimes] = {}
        for routed in self._routed:
            if routed.kind not in calls:
                calls[routed.kind] = self._call_times(routed)
        binding: dict[Any, float] = {}
        for unit in self._work:
            if unit.hooked and unit.kind not in binding:
                binding[unit.kind] = binding_seconds(self._plan, unit.unit, self._machine.device(unit.device))
        steps = partial(self._steps, binding)
        steady, disk = (reads.steady, reads.disk) if reads is not None else (1.0, 1.0)
        decoding = [unit for unit in self._work if not unit.once]

        def token(experts: Mapping[str, float] | None) -> float | None:
            return None if experts is None else pass_seconds(steps(rates, 1, steady, decoding, experts), strain)

        first, prompt = None, self._of_units(lambda routed: calls[routed.kind].prompt)
        if reads is not None and prompt is not None and not self._machine.rough:
            many = self._product_rates(PROMPT_TOKENS)
            computing = pass_seconds(steps(many, PROMPT_TOKENS, disk, self._work, prompt), strain)
            touched = sum(routed.touched_bytes(PROMPT_TOKENS) for routed in self._routed)
            first = max(computing, (self._mapped_bytes() + self._streamed + touched) / disk)
        return dataclasses.replace(
            found,
            from_the_disk=(bool(self._streamed) and not self._cached)
            or any(one.from_the_disk for one in calls.values()),
            token_seconds=token(self._of_units(lambda routed: calls[routed.kind].token(routed))),
            first_token_seconds=first,
            speeds=self._speeds(rates, reads, calls),
            found_token_seconds=token(self._of_units(lambda routed: calls[routed.kind].found)),
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

    # Reading

    @cached_property
    def _sample(self) -> FileSample:
        largest = max(unit.streamed for unit in self._work) or max(p.stored for p in self._plan.placement.units)
        return FileSample(self._files, largest)

    def _read_rate(self, mode: ReadMode, sample: FileSample | None = None) -> float | None:
        return self._machine.measured(("read", mode), lambda: (sample or self._sample).rate(mode))

    def _reads(self) -> _Reads | None:
        through = self._read_rate(DROPPED)
        if through is None:
            return None
        if not self._streamed:
            return _Reads(THROUGH_THE_CACHE, through, through)
        if self._cached:
            steady = self._machine.measured("read again", lambda: self._sample.cached_rate()) or through
            return _Reads(THROUGH_THE_CACHE, steady, through)
        past = self._read_rate(DIRECT)
        if past is not None and past >= through:
            return _Reads(DIRECT, past, past)
        return _Reads(DROPPED, through, through)

    def _mapped_bytes(self) -> int:
        """Return the bytes that are mapped into host memory from the files, and read from the disk on first use."""
        found = 0
        embedding = input_embedding(self._plan.model)
        for placed in self._plan.placement.units:
            source = self._plan.sources[placed.unit]
            mapped = placed.tier is Tier.PACKED or (placed.tier is Tier.RESIDENT and source.is_view)
            if mapped and self._machine.device(placed.device).shares_host_memory:
                found += placed.counted if source.unit.module is not embedding else 0
        return found

    # Computing

    @cached_property
    def _sets(self) -> dict[str, dict[Memory, Callable[[], WorkingSet]]]:
        """Matrices of each device by form and memory, the most bytes first; made on first use, of few bytes never."""
        return {device: self._working_sets(device) for device in self._devices}

    def _working_sets(self, device: str) -> dict[Memory, Callable[[], WorkingSet]]:
        here = [unit for unit in self._work if unit.device == device]
        touched: Counter[Memory] = Counter()
        stored: Counter[Memory] = Counter()
        for unit in here:
            for product in unit.products:
                touched[product.form, not unit.streamed] += round(product.touched(1))
                stored[product.form, not unit.streamed] += product.nbytes
        least, dtype, on = _SMALL * touched.total(), self._plan.model.dtype, self._machine.device(device)
        found: dict[Memory, Callable[[], WorkingSet]] = {}
        for (form, mapped), nbytes in touched.most_common():
            if nbytes >= least:
                like = shapes((unit for unit in here if mapped is not bool(unit.streamed)), form)
                make = partial(working_set, form, like, dtype, on, stored[form, mapped], mapped=mapped)
                found[form, mapped] = functools.cache(make)
        return found

    def _product_rates(self, tokens: int) -> Rates:
        """Measure the rates of products with this many inputs at a time."""

        def rate(device: str, memory: Memory, matrices: Callable[[], WorkingSet]) -> float:
            return self._machine.measured(product_key(device, *memory, tokens), lambda: matrices().rate(tokens))

        return {
            device: {memory: rate(device, memory, matrices) for memory, matrices in sets.items()}
            for device, sets in self._sets.items()
        }

    def _strain(self, reads: _Reads, alone: Rates) -> Strain:
        """Measure how reading and the commonest products slow each other down; those on a GPU are not slowed down."""
        hosts = (name for name, sets in self._sets.items() if sets and self._machine.device(name).shares_host_memory)
        if (name := next(hosts, None)) is None:
            return ALONE
        memory, matrices = next(iter(self._sets[name].items()))
        key = ("strain", name, *memory, reads.mode)
        return self._machine.measured(key, lambda: self._strained(reads, matrices(), alone[name][memory]))

    def _strained(self, reads: _Reads, commonest: WorkingSet, alone: float) -> Strain:
        with self._sample.reading(reads.mode) as background:
            rate = commonest.rate(1, disturbed=True)
        self._sample.forget()
        (read,) = background
        return Strain(max(alone / rate, 1.0), max(reads.steady / read if read else 1.0, 1.0))

    # Experts

    def _call_times(self, work: RoutedWork) -> CallTimes:
        source = next(one for one in self._plan.experts if one.name == work.name)
        sample = FileSample(self._files, max(source.nbytes, PIECE_BYTES), whole=True)
        between = self._plan.sources[source.unit].stored_bytes
        calls = ExpertCalls(self._plan.model, source, self._machine.device(work.device), sample, between)
        if work.tier is not Tier.ROUTED:
            return self._staying(calls, work, sample)
        pool = next(pool for pool in self._plan.placement.pools if pool.device == work.device)
        cached = stays_cached(pool.stored, self._room)
        mode = THROUGH_THE_CACHE if cached else self._expert_mode(sample, work.device)
        prompt = None
        if not self._machine.rough:
            prompt = calls.first(PROMPT_TOKENS, DIRECT if mode == DIRECT else DROPPED, pool.slots)
        if work.missed and cached:
            sample.cached_rate()  # leaves it in the page cache
        read = calls.read(mode, pool.slots) if work.missed else None
        near = calls.near(1) if pool.host_slots else None
        return CallTimes(calls.found(1), near, read, prompt, bool(work.missed) and not cached)

    def _expert_mode(self, sample: FileSample, device: str) -> ReadMode:
        """Return how the engine will read experts from the disk."""
        past, through = self._read_rate(DIRECT, sample), self._read_rate(DROPPED, sample)
        own = {placed.unit for placed in self._plan.placement.experts if placed.device == device}
        in_blocks = all(source.in_blocks for source in self._plan.experts if source.name in own)
        return DIRECT if in_blocks and past is not None and (through is None or past >= through) else DROPPED

    def _staying(self, calls: ExpertCalls, work: RoutedWork, sample: FileSample) -> CallTimes:
        """Return the times of resident experts in mapped files, many of which the first prompt reads from the disk."""
        for_good = work.tier is Tier.RESIDENT
        rate = None if self._machine.rough else sample.mapped_rate()
        prompt = None
        if rate is not None:
            prompt = calls.mapped(PROMPT_TOKENS, for_good=for_good) + work.touched_bytes(PROMPT_TOKENS) / rate
        return CallTimes(calls.mapped(1, for_good=for_good), None, None, prompt)

    # Both

    def _steps(
        self,
        binding: Mapping[Any, float],
        rates: Rates,
        tokens: int,
        read_rate: float,
        work: Sequence[UnitWork],
        experts: Mapping[str, float],
    ) -> list[UnitTime]:
        """Return the times of a pass.

        Args:
            binding: kind of a unit -> seconds to bind its parameters, where that is done for each pass.
            rates: of products with this many `tokens`.
            tokens: at a time.
            read_rate: bytes per second.
            work: of the pass.
            experts: unit -> seconds of its experts, for which nothing is read ahead.
        """
        dtype, home = self._plan.model.dtype, self._plan.placement.home
        sizes = sizes_of(self._plan.model.config.get_text_config())
        steps = [UnitTime(home, self._machine.overhead(sizes, dtype, home).a_pass)]
        bringing = {device: self._bringing(device, work, read_rate) for device in self._devices}
        for unit in work:
            device, known = self._machine.device(unit.device), rates[unit.device]
            commonest = next(iter(known.values()), 0.0)
            products = sum(
                product.touched(tokens) / known.get((product.form, not unit.streamed), commonest)
                for product in unit.products
            )
            small = self._machine.overhead(sizes, dtype, unit.device).a_module * unit.modules
            # a GPU's work is queued ahead of its execution
            compute = small + products if device.shares_host_memory else max(small, products)
            compute += (binding[unit.kind] if unit.hooked else 0.0) + experts.get(unit.unit, 0.0)
            brought = unit.streamed if device.shares_host_memory else unit.uploaded
            seconds, by_link = bringing[unit.device]
            steps.append(UnitTime(unit.device, compute, brought * seconds, by_link))
        return steps

    def _bringing(self, name: str, work: Sequence[UnitWork], read_rate: float) -> tuple[float, bool]:
        """Return the seconds per byte that a pass brings to a device, and whether its link decides them.

        To a device that does not share host memory bytes are copied while others are read ahead, and the slower of the
        two decides; while units in pinned memory are copied, the disk has time to read a streamed one.
        """
        here = [unit for unit in work if unit.device == name]
        read, copied = sum(unit.streamed for unit in here), sum(unit.uploaded for unit in here)
        if not copied:
            return 1 / read_rate, False
        reading, copying = read / read_rate, copied / self._machine.upload(name)
        return max(reading, copying) / copied, copying > reading

    def _speeds(self, rates: Rates, reads: _Reads | None, calls: Mapping[Any, CallTimes]) -> tuple[Speed, ...]:
        """Return the rates that the times are based on; of experts, bytes that a token uses per second of a call."""
        found: dict[str, float] = {}
        for device, known in rates.items():
            for (form, _), rate in known.items():
                found.setdefault(f"multiplying with {form}{' codes' if form in STORED else ''} on {device}", rate)
        if reads is not None and self._streamed:
            words = {DIRECT: "past the page cache", DROPPED: "through the page cache"}
            found[f"reading {words.get(reads.mode, 'out of the page cache')}"] = reads.steady
        for routed in self._routed:
            times = calls[routed.kind]
            kinds = {"at hand": times.found, "in pinned memory": times.near, "to be read": times.read}
            for kind, seconds in kinds.items():
                if seconds is not None:
                    found.setdefault(f"using experts {kind} on {routed.device}", routed.used_bytes / seconds)
        return tuple(Speed(what, rate) for what, rate in found.items())
