"""Predicts the seconds per token before a split is made: from the engine's placement and this machine's rates.

Only the needed rates are measured: none for a form that no unit is multiplied from, and no slowdown by reading if
nothing is streamed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from rabbitllm import prepare
from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.options import RunOptions, SplitOptions
from rabbitllm.engine.devices import OutOfDeviceMemory, memory_explained, resolve_devices
from rabbitllm.engine.heads import placed_beside, plan_heads
from rabbitllm.engine.load_plan import LoadPlan, cache_room, held_bytes, make_load_plan, too_little_memory
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, ReadMode, stays_cached
from rabbitllm.engine.units import UnitSource, input_embedding
from rabbitllm.errors import OptionError, RabbitLLMError
from rabbitllm.estimate.cost_model import (
    DRAFTED,
    PROMPT_TOKENS,
    DraftedPass,
    DraftEstimate,
    GenerationEstimate,
    RoutedWork,
    Speed,
    UnitWork,
    by_copies,
    bytes_of_a_pass,
    routed_work,
    work_of,
)
from rabbitllm.estimate.machine import READING, Machine, can_measure, multiplying, something_to_read
from rabbitllm.estimate.outline import Outline
from rabbitllm.estimate.scan import SourceScan
from rabbitllm.generation.draft import MTP, NGRAM, SELF, check_folders, check_goes_back, check_in_memory
from rabbitllm.splitter.plan import PlannedFiles
from rabbitllm.storage import durable
from rabbitllm.store.layer_file import LAYER_SUFFIX
from rabbitllm.store.layer_store import LayerStore, WeightFiles

logger = logging.getLogger(__name__)


def generations(
    scan: SourceScan, options: RunOptions, min_free: int, draft: LoadRequest | str | None = None
) -> tuple[tuple[str, ...], list[GenerationEstimate]]:
    """Return the devices of a model, and the generation estimate at each compression.

    Args:
        scan: of the model.
        options: as `AutoModel.from_pretrained` would get them.
        min_free: bytes of the disk to keep free.
        draft: as `draft_of` returns it.

    Raises:
        DeviceError: the device does not exist.
    """
    devices = resolve_devices(options.device, options.max_memory, options.pin_memory)
    estimates: dict[str | None, GenerationEstimate] = {}
    plans: dict[str | None, LoadPlan] = {}
    stores: dict[str | None, WeightFiles] = {}
    nearest, readable = next(iter(scan.folders.values())), _readable(scan)
    with prepare.config_folder(scan.source) as home, something_to_read(nearest, readable, min_free) as files:
        machine = Machine(devices, options, files)
        for compression in scan.folders:
            try:
                if (store := _store(scan, compression)) is None:
                    estimates[compression] = GenerationEstimate(compression, obstacle=scan.obstacle(compression))
                    continue
                plans[compression] = make_load_plan(store, options, home, devices)
                estimates[compression] = estimate(compression, plans[compression], machine)
                stores[compression] = store
            except RabbitLLMError as error:  # without a plan loading would refuse the model
                refused = compression not in plans
                estimates[compression] = GenerationEstimate(compression, obstacle=error.problem, refused=refused)
        if machine.is_disturbed:
            logger.warning(
                "This machine is busy: a token took longer than the first one. The rates are measured again."
            )
            machine.measure_again()
            estimates |= {c: estimate(c, plans[c], machine) for c, timed in estimates.items() if timed.speeds}
        if draft is not None:
            drafts = _DraftEstimator(draft, scan.source, home, machine)
            estimates |= {c: drafts.added(estimates[c], plans[c], store) for c, store in stores.items()}
    return tuple(device.name for device in devices), [*estimates.values()]


def _store(scan: SourceScan, compression: str | None) -> WeightFiles | None:
    """Return the layer files, existing or planned."""
    folder = scan.folders[compression]
    if compression in scan.manifests and scan.obstacle(compression) is None:
        return LayerStore(folder)
    return PlannedFiles(scan.plans[compression], folder) if compression in scan.plans else None


def _readable(scan: SourceScan) -> list[Path]:
    """Return files to measure reading with: layer files, or else shards."""
    layers = [path for folder in scan.folders.values() for path in folder.glob(f"*{LAYER_SUFFIX}")]
    if layers or scan.source.local is None or scan.checkpoint is None:
        return layers
    return [scan.source.local / shard for shard in scan.checkpoint.index.shards]


class _DraftEstimator:
    """Estimates with a draft.

    Raises:
        RabbitLLMError: there is no such draft model.
    """

    def __init__(self, draft: LoadRequest | str, source: prepare.Source, home: Path, machine: Machine) -> None:
        self._draft = draft
        self._name = draft if isinstance(draft, str) else draft.spec.name
        self._source = source
        self._scan = None if isinstance(draft, str) else SourceScan(draft.spec, draft.split or SplitOptions())
        self._home = home
        self._machine = machine

    def added(self, estimate: GenerationEstimate, plan: LoadPlan, store: WeightFiles) -> GenerationEstimate:
        """Return an estimate with that of the draft; `plan` and `store` are the model's."""
        machine = self._machine
        try:
            check_goes_back(plan.model)
            if self._draft == "auto" and not plan.placement.moved_bytes:
                raise OptionError("auto is none where all weights stay in memory.", "Name the draft.")
            with memory_explained(machine.devices, plan.placement.limits, "measuring"):
                draft = self._estimate(estimate.token_seconds, plan, store)
        except RabbitLLMError as error:
            draft = DraftEstimate(self._name, error.problem)
        return dataclasses.replace(estimate, draft=draft)

    def _estimate(self, plain: float | None, plan: LoadPlan, store: WeightFiles) -> DraftEstimate:
        plan, held, step = self._placed(plan, store)
        if (refusal := too_little_memory(plan, self._machine.devices)) is not None:
            raise refusal
        seconds = 0.0 if step is None else step.pass_seconds(1)
        name = NGRAM if step is None else MTP if self._name == "auto" else self._name
        model = PassEstimator.of(plan, self._machine)
        if plain is None or seconds is None:
            return DraftEstimate(name, held_bytes=held)
        passes, whole = [], plain
        for tokens, drafted in DRAFTED.items():
            whole = max(whole, model.pass_seconds(drafted + 1) or 0.0)  # more rows never take less time
            total = whole + drafted * seconds
            passes.append(DraftedPass(drafted, tokens, total / tokens, total / plain))
        return DraftEstimate(name, None, held, seconds, tuple(passes))

    def _placed(self, plan: LoadPlan, store: WeightFiles) -> tuple[LoadPlan, int, PassEstimator | None]:
        """Return the model's plan beside the draft, the draft's memory, and the estimator of a drafted token."""
        machine, draft = self._machine, self._draft
        if isinstance(draft, LoadRequest):
            drafting = self._plan_of_model
            held = held_bytes(drafting.placement, drafting.sources, drafting.experts)
            beside = placed_beside(plan, {drafting.placement.home: held}, machine.devices, machine.options)
            return beside, held, PassEstimator.of(drafting, machine)
        if draft == SELF:
            options = dataclasses.replace(machine.options, self_draft=True)
            plan = placed_beside(plan, {}, machine.devices, options)
            copies = plan.placement.copies
            assert copies is not None
            work, routed = by_copies(work_of(plan), routed_work(plan), copies)
            return plan, copies.nbytes, PassEstimator(plan, work, routed, machine)
        if draft == NGRAM:
            return plan, 0, None
        try:
            heads, plan = plan_heads(plan, store, self._home, machine.options, machine.devices)
        except RabbitLLMError:
            if draft == MTP:
                raise
            return plan, 0, None
        output = plan.model.get_output_embeddings()
        of_output = [unit for unit in work_of(plan) if plan.sources[unit.unit].unit.module is output]
        work = [*of_output, *work_of(heads.plan)]
        return plan, heads.nbytes, PassEstimator(heads.plan, work, routed_work(heads.plan), machine)

    @cached_property
    def _plan_of_model(self) -> LoadPlan:
        """The load plan of a draft model.

        Raises:
            RabbitLLMError: it cannot be loaded, does not fit in memory, or has another vocabulary.
        """
        assert isinstance(self._draft, LoadRequest)
        assert self._scan is not None
        scan, spec, run = self._scan, self._draft.spec, self._draft.run
        check_folders(self._source.config_folder, scan.source.config_folder)
        if (store := _store(scan, spec.compression)) is None:
            raise OptionError(
                f"The draft model has no estimate: {scan.obstacle(spec.compression)}", "Use another draft model."
            )
        with prepare.config_folder(scan.source) as home:
            plan = make_load_plan(store, run, home, self._machine.devices[:1])
        check_goes_back(plan.model)
        check_in_memory(plan.placement)
        return plan


def estimate(compression: str | None, plan: LoadPlan, machine: Machine, *, first: bool = True) -> GenerationEstimate:
    """Return the generation estimate for a model from its load plan.

    Args:
        compression: of its files.
        plan: the load plan.
        machine: the machine to run it on.
        first: whether the first token is estimated too.
    """
    plan = plan.as_multiplied()
    work, routed, refusal = work_of(plan), routed_work(plan), too_little_memory(plan, machine.devices)
    in_bytes = bytes_of_a_pass(compression, plan.placement, work, routed)
    if refusal is not None:
        return dataclasses.replace(in_bytes, too_little_memory=refusal.problem)
    return PassEstimator(plan, work, routed, machine).timed(in_bytes, first=first) if can_measure() else in_bytes


# A model of which only an outline is known. The load plan of the outline's sample model is made; then each of its
# decoder layers is repeated for all layers of its kind, and the whole is placed, listed and timed like any other model.


def predict_outline(
    outline: Outline, compression: str | None, folder: Path, machine: Machine, work: Path
) -> tuple[LoadPlan, GenerationEstimate]:
    """Return the load plan of a model and its generation estimate.

    Args:
        outline: the model.
        compression: one of its `compressions`.
        folder: the folder that its layer files would be in.
        machine: the machine to run it on.
        work: an empty folder, for the sample's config.

    Raises:
        RabbitLLMError: `load_model` would refuse the model.
    """
    durable.write_scratch(work / "config.json", json.dumps(outline.sample).encode())
    store = PlannedFiles(outline.plans[compression], folder)
    plan = stretched(make_load_plan(store, machine.options, work, machine.devices), outline.layers, machine)
    return plan, estimate(compression, plan, machine, first=False)


def stretched(sample: LoadPlan, layers: Sequence[int], machine: Machine) -> LoadPlan:
    """Return a load plan with the decoder layers of a larger model, placed again.

    Args:
        sample: of the small model.
        layers: for each decoder layer of the large one, the number of the small one's of the same kind.
        machine: the machine to place it on.
    """
    units = [name for name, source in sample.sources.items() if source.unit.is_layer]
    units = [name for name in units if "language_model." in name] or units  # an encoder has layers too
    names = {f"{units[like].rpartition('.')[0]}.{index}": units[like] for index, like in enumerate(layers)}
    sources: dict[str, UnitSource] = {}
    for name, source in sample.sources.items():
        if name not in units:
            sources[name] = source
        elif name == units[0]:
            sources |= {long: sample.sources[short] for long, short in names.items()}
    experts = tuple(
        dataclasses.replace(expert, name=long + expert.name.removeprefix(short), unit=long)
        for long, short in names.items()
        for expert in sample.experts
        if expert.unit == short
    )
    return dataclasses.replace(sample, sources=sources, experts=experts).placed(machine.devices, machine.options)


# Times: a roofline. Every byte is read once at the rate of where it is, and each module costs Python's time.
#
# Streamed units are read and copied while others compute: placement spreads them over the pass, and over the devices,
# whose links work at the same time. So the slowest decides: computing, the disk, or the busiest link. Reading out of
# the page cache into host memory is a copy that takes its bandwidth and a core, so it hides nothing. Experts come on
# demand.

_SMALL = 0.02
"""Share of the bytes that a token multiplies with; a form with less is taken for as fast as the commonest one."""
BINDING = 0.3
"""Overhead of binding a parameter, in modules: a tensor of its type is made from a view of the bytes."""
MAKING = 4.0
"""Bytes that are moved for each byte of a parameter that is made from others for a pass."""
EXPERT, READ_EXPERT = 8.0, 6.0
"""Overhead of an expert, in modules: its rows are selected, multiplied and added; and of one that another thread reads.
Fitted to measurements, as the figures above: see benchmarks/NOTES.md."""


class PassEstimator:
    """The seconds of a model's passes from a machine's rates, of which only the needed ones are measured.

    Args:
        plan: the model.
        work: work of a pass with its units.
        routed: work of a pass with experts that have a placement of their own.
        machine: the machine.
    """

    def __init__(
        self, plan: LoadPlan, work: Sequence[UnitWork], routed: Sequence[RoutedWork], machine: Machine
    ) -> None:
        self._plan = plan
        self._work = work
        self._routed: dict[str, list[RoutedWork]] = {}
        self._machine = machine
        room = cache_room(plan.placement)
        pooled = sum(pool.stored for pool in plan.placement.pools)
        self._is_cached = stays_cached(plan.placement.streamed_bytes + pooled, room)
        self._streams = any(unit.streamed for unit in work) or any(experts.missed for experts in routed)
        self._forms: dict[str, Counter[str]] = {unit.device: Counter() for unit in work}
        for unit in work:
            for product in unit.products:
                self._forms[unit.device][product.form] += round(product.touched(1))
        for experts in routed:
            self._routed.setdefault(experts.source.unit, []).append(experts)
            for product in experts.products:
                self._forms[experts.device][product.form] += product.nbytes * experts.source.used

    @classmethod
    def of(cls, plan: LoadPlan, machine: Machine) -> PassEstimator:
        """Return the estimator of a model as it is loaded."""
        plan = plan.as_multiplied()
        return cls(plan, work_of(plan), routed_work(plan), machine)

    def timed(self, estimate: GenerationEstimate, *, first: bool = True) -> GenerationEstimate:
        """Measure, and return the estimate with times; without some that could not be measured.

        Args:
            estimate: the bytes.
            first: whether the first token is estimated too.
        """
        try:
            with memory_explained(self._machine.devices, self._plan.placement.limits, "measuring"):
                return self._measured(estimate, first)
        except OutOfDeviceMemory as error:
            logger.warning("The seconds per token cannot be measured: %s", error.problem)
            return estimate

    def _measured(self, estimate: GenerationEstimate, first: bool) -> GenerationEstimate:
        estimate = dataclasses.replace(estimate, from_the_disk=self._streams and not self._is_cached)
        if (reads := self._reads()) is None:
            return estimate
        (mode, steady), disk = reads, self._machine.disk() if first else None
        token = self._seconds(1, steady)
        first_token = self._first(disk[1]) if first and disk is not None else None
        if first_token is not None and first_token < token:  # it does all the work of the other, and more
            self._machine.is_disturbed, first_token = True, token
        return dataclasses.replace(
            estimate,
            token_seconds=token,
            first_token_seconds=first_token,
            speeds=self._speeds({mode: steady} if self._streams else {}),
            found_token_seconds=self._seconds(1, steady, all_kept=True),
        )

    def _reads(self) -> tuple[ReadMode, float] | None:
        """Return how streamed weights are read, and the rate; None if it cannot be measured."""
        disk = self._machine.disk() if self._streams else (THROUGH_THE_CACHE, 1.0)
        if disk is None or not self._streams or not self._is_cached:
            return disk
        return THROUGH_THE_CACHE, self._machine.reading(THROUGH_THE_CACHE) or disk[1]

    def pass_seconds(self, rows: int) -> float | None:
        """Return the seconds of a pass with so many rows, after the first one; None if a rate cannot be measured."""
        reads = self._reads()
        return None if reads is None else self._seconds(rows, reads[1])

    def _seconds(self, tokens: int, read_rate: float, *, all_kept: bool = False) -> float:
        """Return the seconds of a pass with this many tokens; with `all_kept` its experts are all in memory."""
        work = [unit for unit in self._work if tokens > 1 or not unit.once]
        computing = self._machine.overhead(self._plan.placement.home).a_token
        computing += sum(self._computing(unit, tokens) for unit in work)
        reading = in_turn = 0.0
        copying = dict.fromkeys((unit.device for unit in work), 0.0)
        for unit in work:
            if unit.uploaded:
                copying[unit.device] += unit.uploaded / self._machine.link(unit.device)
            if self._is_cached and not unit.uploaded:
                in_turn += unit.streamed / read_rate
            else:
                reading += unit.streamed / read_rate
            for routed in self._routed.get(unit.unit, ()):
                count = routed.touched_bytes(tokens) / routed.source.expert_bytes
                computing += count * self._expert_seconds(routed)
                if not all_kept:
                    in_turn += count * self._bringing_seconds(routed, read_rate)
        return max(computing, reading, *copying.values()) + in_turn

    def _computing(self, unit: UnitWork, tokens: int) -> float:
        device = self._machine.device(unit.device)
        overhead = self._machine.overhead(unit.device).a_module * (unit.modules + BINDING * unit.bound)
        products = sum(
            product.touched(tokens) / self._rate(unit.device, product.form, tokens) for product in unit.products
        )
        products += MAKING * unit.made / self._memory(unit.device) if unit.made else 0.0
        # a GPU's work is queued ahead of its execution
        return overhead + products if device.shares_host_memory else max(overhead, products)

    def _rate(self, device: str, form: str, rows: int = 1) -> float:
        """Return the rate of products with this many rows."""
        forms = self._forms[device]
        if forms[form] < _SMALL * forms.total():
            form = forms.most_common(1)[0][0]
        return self._machine.product(device, form, self._plan.model.dtype, rows)

    def _memory(self, device: str) -> float:
        """Return the rate of a device's memory: that of products in the model's own dtype."""
        dtype = self._plan.model.dtype
        return self._machine.product(device, str(dtype).removeprefix("torch."), dtype)

    def _expert_seconds(self, routed: RoutedWork) -> float:
        """Return the seconds in which an expert computes."""
        seconds = EXPERT * self._machine.overhead(routed.device).a_module
        seconds += sum(product.nbytes / self._rate(routed.device, product.form) for product in routed.products)
        return seconds + (MAKING * routed.made / self._memory(routed.device) if routed.made else 0.0)

    def _bringing_seconds(self, routed: RoutedWork, read_rate: float) -> float:
        """Return the expected seconds in which an expert is read and copied."""
        copied = 0.0 if routed.is_host else 1.0 - routed.on_device
        copying = copied * routed.source.expert_bytes / self._machine.link(routed.device) if copied else 0.0
        waiting = READ_EXPERT * self._machine.overhead(routed.device).a_module
        return routed.missed * (routed.source.expert_bytes / read_rate + waiting) + copying

    def _first(self, disk: float) -> float:
        """Return the seconds of the first token, for which all weights come from the disk."""
        mapped = 0
        embedding = input_embedding(self._plan.model)
        for placed in self._plan.placement.units:
            source = self._plan.sources[placed.unit]
            if placed.tier is Tier.PACKED or (placed.tier is Tier.RESIDENT and source.is_view):
                on_host = self._machine.device(placed.device).shares_host_memory
                mapped += placed.counted if on_host and source.unit.module is not embedding else 0
        for routed in itertools.chain.from_iterable(self._routed.values()):
            mapped += round((1 - routed.missed) * routed.touched_bytes(PROMPT_TOKENS))
        return self._seconds(PROMPT_TOKENS, disk) + mapped / disk

    def _speeds(self, reads: Mapping[ReadMode, float]) -> tuple[Speed, ...]:
        """Return the rates that the times are based on."""
        speeds = {
            multiplying(form, device): self._rate(device, form)
            for device, forms in self._forms.items()
            for form, nbytes in forms.most_common()
            if nbytes >= _SMALL * forms.total()
        }
        speeds |= {f"reading {READING[mode]}": rate for mode, rate in reads.items()}
        return tuple(Speed(name, rate) for name, rate in speeds.items())
