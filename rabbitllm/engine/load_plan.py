"""Decides a model's skeleton, dtype, attention, recipes of weights and placement from names and sizes.

On GPUs it also tries bitsandbytes' 4bit products. It reads no weights, so a plan of planned layer files has the costs
and placement of the loaded model. A process may compute a part of the model; other processes' units are never bound.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from rabbitllm.base.collection import uncollected
from rabbitllm.base.grouping import summed
from rabbitllm.base.options import RunOptions
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.base.terminal import size
from rabbitllm.engine import _published, skeleton
from rabbitllm.engine._copies import expert_copy_bytes, place_with_copies, unit_copy_bytes
from rabbitllm.engine._embedding_rows import has_readable_rows
from rabbitllm.engine._pieces import in_pieces
from rabbitllm.engine._weights import WeightMap, advice_on_names, check_unused, map_weights
from rabbitllm.engine.devices import Device, budget_of, dtype_on, have_bf16, host_room
from rabbitllm.engine.expert_finding import expert_sources, without_experts
from rabbitllm.engine.expert_source import ExpertSource, with_matrices
from rabbitllm.engine.experts import expert_costs
from rabbitllm.engine.forwards import route_llama4
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.placement import (
    HOOKED,
    READY,
    SLOTS,
    Budget,
    PlacedUnit,
    Placement,
    SharedTensor,
    Tier,
    UnitCost,
    min_bytes,
    place,
    ready_once,
)
from rabbitllm.engine.units import (
    MatrixChooser,
    UnitSource,
    find_tables,
    find_units,
    input_embedding,
    multiplied,
    source_of,
)
from rabbitllm.engine.weight_tensors import StoredMatrix
from rabbitllm.errors import (
    IncompleteCheckpointError,
    IncompleteSplitError,
    NotEnoughMemoryError,
    OptionError,
    RabbitLLMError,
)
from rabbitllm.quant import coded
from rabbitllm.quant.coded import CodedForm, CodedMatrix
from rabbitllm.quant.products import FusedMatrix, Matrix, can_multiply, multiplies
from rabbitllm.quant.quantize import NestedScales
from rabbitllm.quant.schemes import NESTED_BLOCK, NF4_BLOCK, Quantized, code_values
from rabbitllm.store.layer_store import StoredTensor, WeightFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from rabbitllm.engine.transformers_api import HfQuantizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The part of a model that a process computes.

    Attributes:
        units: names of its units; at least one.
        budgets: device -> bytes that their weights may take.
        fast_bfloat16: as in `RunOptions`, for all processes.
    """

    units: frozenset[str]
    budgets: Mapping[str, int]
    fast_bfloat16: bool | None


PartChooser = Callable[[Any, Mapping[str, UnitSource], Sequence[UnitCost], WeightFiles, Mapping[str, int]], ModelPart]
"""Chooses the part that this process computes, before any weight is read. Arguments: the skeleton, its units in the
order of a pass, the memory cost of each in the same order, the weights, and device -> bytes for weights if this process
computed the whole model. Raises `RabbitLLMError` if the model cannot be divided, or other processes are missing or
differ."""


def unit_costs(
    model: nn.Module,
    sources: Mapping[str, UnitSource],
    experts: Iterable[ExpertSource] = (),
    choosers: Mapping[str, MatrixChooser] = MappingProxyType({}),
    kind: str | None = None,
) -> list[UnitCost]:
    """A cost for each unit, in the order of `sources`, which is that of a pass.

    With `choosers` (see `LoadPlan`) the memory of its use is the largest on any of their devices. `kind` is the type of
    blocks of copies, if there are any.
    """
    routed = summed((expert.unit, expert.stored_bytes) for expert in experts)
    # in the plan of a large model one source stands for many layers, which share no tensors
    distinct = {id(source): {job.recipe.key for job in source.jobs} for source in sources.values()}
    shared = {key for key, count in Counter(chain.from_iterable(distinct.values())).items() if count > 1}
    embedding, tables = input_embedding(model), find_tables(model)
    costs = []
    for name, source in sources.items():
        module = source.unit.module
        # a small module may return its weights as its output (a learned query), so they must outlive its forward
        streamable = source.unit.is_layer or isinstance(module, (nn.Linear, nn.Embedding))
        must_stay = source.unit.holds_units or not streamable or not source.jobs
        rows = has_readable_rows(source, tables)
        used = [multiplied(source, choose_matrix) for choose_matrix in choosers.values()] or [source]
        scratch = max(variant.scratch_bytes for variant in used)
        sizes = source.stored_bytes, source.ready_bytes, scratch, source.is_view
        # if some of its matrices have no kernel, those are larger when they are ready
        once = any(job.coded_bytes for job in source.jobs) and source.ready_bytes < 2 * source.stored_bytes
        scales = max(variant.scale_bytes if variant.is_view else 0 for variant in used)
        scales = max(source.ready_bytes - source.stored_bytes, 0) if once else scales
        tied = tuple(
            SharedTensor(job.recipe.key, job.stored_bytes, job.ready_bytes)
            for job in source.jobs
            if job.recipe.key in shared
        )
        is_table = rows and module is not embedding
        copy = unit_copy_bytes(source, kind) if kind is not None else 0
        form = source.unit.is_layer, must_stay, rows
        slot = source.slot_bytes if source.pieces else 0
        costs.append(UnitCost(name, *sizes, *form, routed.get(name, 0), scales, tied, is_table, copy, slot, once))
    return costs


def held_bytes(placement: Placement, sources: Mapping[str, UnitSource], experts: Iterable[ExpertSource]) -> int:
    """Bytes of weights in memory between two passes, and of the buffers for streamed weights.

    A tensor that several units use in its stored form counts once.
    """
    as_stored: dict[str, int] = {}
    ready: dict[frozenset[str], int] = {}
    largest: dict[str, int] = {}
    for placed in placement.units:
        source = sources[placed.unit]
        if placed.tier is Tier.RESIDENT and not source.is_view:
            ready[frozenset(source.stored)] = source.ready_bytes
        elif placed.tier in (*READY, Tier.PACKED, Tier.PINNED):
            as_stored |= {name: stored.nbytes for name, stored in source.stored.items()}
            if source.is_view and source.scale_bytes and placed.tier is not Tier.PINNED:
                ready[frozenset(source.stored)] = source.scale_bytes
        if placed.tier in (Tier.STREAMED, Tier.PINNED):
            largest[placed.device] = max(largest.get(placed.device, 0), source.slot_bytes)
    for expert in experts:
        tier = next(placed.tier for placed in placement.experts if placed.unit == expert.name)
        if tier is not Tier.ROUTED:
            ready[frozenset([expert.name])] = expert.ready_bytes if tier is Tier.RESIDENT else expert.stored_bytes
    pools = sum(pool.nbytes + pool.host_bytes for pool in placement.pools)
    copies = placement.copies.nbytes if placement.copies is not None else 0
    return sum(as_stored.values()) + sum(ready.values()) + pools + copies + SLOTS * sum(largest.values())


def cache_room(placement: Placement) -> int:
    """Bytes of host memory left to the page cache once all resident weights are loaded; call it before that."""
    return available_ram() - placement.host_bytes


_CHECK_THE_SOURCE = (
    "Download the checkpoint again, its config.json and every file that its index names; undo changes of config.json."
)
FIXED_BYTES = 16 << 20
"""Minimum memory of a pass of one token, without weights and buffers: activations, tables, threads."""
SCALES_IN_PLACE = frozenset({"rwkv"})
"""Model types whose forward changes weights; a streamed unit would lose the change when it is freed."""


@dataclass(frozen=True)
class LoadPlan:
    """A model as decided before any of its weights is read.

    Attributes:
        model: the skeleton; none of its weights is bound.
        weights: the recipes of the parameters.
        sources: its units, in the order of a pass, without the experts.
        experts: the modules whose experts are streamed individually.
        placement: the tier and device of each.
        quantizer: transformers' own, of weights that are published quantized; None for plain ones.
        is_narrowed: whether it computes in float16 although it is a bfloat16 model.
        choosers: GPU -> its choice of matrices that are multiplied from their codes wherever they would be dequantized
            for each use; `sources` and `experts` are without them.
    """

    model: PreTrainedModel
    weights: WeightMap
    sources: Mapping[str, UnitSource]
    experts: tuple[ExpertSource, ...]
    placement: Placement
    quantizer: HfQuantizer | None = None
    is_narrowed: bool = False
    choosers: Mapping[str, MatrixChooser] = field(default_factory=dict)

    def as_multiplied(self) -> LoadPlan:
        """The plan with `sources` and `experts` as the passes of a loaded model use them.

        Resident units are dequantized once, which is as fast for any number of inputs.
        """
        chosen = {
            placed.unit: choose_matrix
            for placed in (*self.placement.units, *self.placement.experts)
            if placed.tier in _AS_STORED and (choose_matrix := self.choosers.get(placed.device))
        }
        sources = {name: multiplied(s, chosen[name]) if name in chosen else s for name, s in self.sources.items()}
        experts = tuple(with_matrices(source, chosen.get(source.name)) for source in self.experts)
        return replace(self, sources=sources, experts=experts, choosers={})

    def placed(
        self, devices: Sequence[Device], options: RunOptions, limits: Mapping[str, int] = MappingProxyType({})
    ) -> LoadPlan:
        """The plan, placed again; `limits` are bytes for weights by device, instead of those of `options`."""
        if limits:
            options = replace(options, max_memory={**(options.max_memory or {}), **limits})
        placement = place_units(self.model, self.sources, self.experts, devices, options, self.choosers)
        return replace(self, placement=placement)


_AS_STORED = (*HOOKED, Tier.ROUTED)


TooLittle: TypeAlias = Literal["refuse", "warn", "ignore"]
"""Action if this process may not take the memory that one layer needs."""


@dataclass(frozen=True)
class BareModel:
    """A model without weights, and how it will compute.

    Attributes:
        config_file: the content of its config.json.
        config: the config before the model was built.
        model: the skeleton.
        quantizer, is_narrowed: see `LoadPlan`.
        dtype_is_final: whether the weights cannot change its dtype.
    """

    config_file: bytes
    config: PretrainedConfig
    model: PreTrainedModel
    quantizer: HfQuantizer | None
    is_narrowed: bool
    dtype_is_final: bool


def make_load_plan(store: WeightFiles, options: RunOptions, home: Path, devices: Sequence[Device]) -> LoadPlan:
    """Decide all that `load_model` decides from names and sizes alone; see `LoadPlanner`."""
    return LoadPlanner(options, devices, home).take(store, home, options)


class LoadPlanner:
    """Makes the load plan of a model, once: the plan of planned layer files becomes that of the finished ones.

    It is also the check of a split: called with planned layer files before the first shard is touched, and with the
    finished ones before the last shard is deleted, it raises the errors of `load_model`.

    Args:
        options: of the run.
        devices: the devices to compute on.
        folder: of config and tokenizer, until the folder of the weights has them.
        too_little: action if this process may not take the memory that one layer needs: "refuse" if it will load the
            model itself, "warn" (once) if the split may be for another machine, "ignore" if several processes will load
            it.

    Attributes:
        store: the files of the last plan; None before it.
    """

    def __init__(
        self, options: RunOptions, devices: Sequence[Device], folder: Path, too_little: TooLittle = "refuse"
    ) -> None:
        self.store: WeightFiles | None = None
        self._options, self._devices, self._folder, self._too_little = options, devices, folder, too_little
        self._bare: BareModel | None = None
        self._plan: LoadPlan | None = None
        self._tokenizer: tuple[Path, PreTrainedTokenizerBase | None] | None = None

    def check_config(self) -> None:
        """Check the model, the dtype and the attention by the config alone, without a request for a header.

        Raises:
            UnknownArchitectureError, OptionError: as `load_model` does.
        """
        self._bare_model(self._folder, None)

    def __call__(self, store: WeightFiles) -> None:
        """Raise the errors of `load_model` for existing or planned layer files.

        Raises:
            RabbitLLMError: as `take` does.
            NotEnoughMemoryError: if the action is "refuse".
            CorruptVocabularyError: the tokenizer's files are malformed.
        """
        home = store.folder if (store.folder / "config.json").exists() else self._folder
        plan = self._planned(store, home, self._options)
        if self._tokenizer is None or self._tokenizer[0] != home:
            # errors name what can be mended: the copy leaves with the split directory
            self._tokenizer = home, skeleton.check_tokenizer(home, self._options.trust_remote_code, self._folder)
        error = None if self._too_little == "ignore" else too_little_memory(plan, self._devices)
        if error is not None and self._too_little == "refuse":
            raise error
        if error is not None:
            logger.warning("This machine cannot load the model: %s", error.problem)
        if self._too_little == "warn":
            self._too_little = "ignore"

    def take(self, store: WeightFiles, home: Path, options: RunOptions) -> LoadPlan:
        """The plan to load a model from these files; its skeleton is no longer kept here.

        Args:
            store: the files of the weights.
            home: the folder of config and tokenizer.
            options: of the run, perhaps with other limits than those of the check.

        Raises:
            IncompleteSplitError, UnknownArchitectureError, OptionError: as `load_model` does.
            IncompleteCheckpointError: instead of IncompleteSplitError, for a checkpoint that is not split yet.
            RabbitLLMError: the model changes its weights, and not all of them can be resident.
        """
        checked = self._plan
        try:
            plan = self._planned(store, home, options)
        finally:
            self._bare = self._plan = None
        if plan is not checked:
            return plan
        return plan.placed(self._devices, options)  # other memory may be free now than when it was checked

    def tokenizer(self, home: Path) -> PreTrainedTokenizerBase | None:
        """The tokenizer in a folder, as `skeleton.read_tokenizer` gives it."""
        checked_home, tokenizer = self._tokenizer or (None, None)
        if tokenizer is not None and checked_home == home:
            return tokenizer
        return skeleton.read_tokenizer(home, self._options.trust_remote_code)

    @uncollected()
    def _planned(self, store: WeightFiles, home: Path, options: RunOptions) -> LoadPlan:
        bare, devices = self._bare_model(home, store), self._devices
        if self.store is None or not _have_same_layout(self.store, store):
            self._plan = None
        if self._plan is None or self.store is None or self.store.tensors != store.tensors:
            # not equal: the means of quantized scales, which are known when the layer files are made
            weights = None if self._plan is None else self._plan.weights
            self._plan = _plan_of(bare, weights, store, options, devices)
        self.store = store
        return self._plan

    def _bare_model(self, home: Path, store: WeightFiles | None) -> BareModel:
        """The skeleton, built by the config alone if that names the dtype; else the weights do."""
        bare, options, devices = self._bare, self._options, self._devices
        if bare is not None and bare.config_file != (home / "config.json").read_bytes():
            bare = None
        if bare is not None and (bare.dtype_is_final or store is None):
            if bare.model.config.name_or_path != str(home):  # its own files are there by now
                skeleton.set_source_folder(bare.model, home)
            if store is not None:
                skeleton.check_counts(bare.config, len(store.tensors), store.label)
            return bare
        config = skeleton.read_config(home, options.trust_remote_code)
        tensors, label = (None, str(home)) if store is None else (len(store.tensors), store.label)
        skeleton.check_counts(config, tensors, label)
        dtype_is_final = store is not None or (options.dtype or getattr(config, "dtype", None)) is not None
        quantizer = _published.quantizer_for(home, config, devices)
        dtype, is_narrowed = _choose_dtype(options.dtype, config, store, devices)
        if quantizer is not None:
            dtype = quantizer.update_dtype(dtype)
        attention = _attention(options.attn_implementation, config, devices, dtype)
        model = skeleton.build_skeleton(home, config, dtype, attention, options.trust_remote_code, quantizer)
        if not have_bf16(devices):
            _published.narrow(model, dtype)
        route_llama4(model)
        content = (home / "config.json").read_bytes()
        self._bare = BareModel(content, config, model, quantizer, is_narrowed, dtype_is_final)
        self._plan = None
        return self._bare


def _have_same_layout(first: WeightFiles, second: WeightFiles) -> bool:
    """Whether files have the same tensors in the same places; the means of quantized scales may differ."""

    def without_offset(tensor: StoredTensor) -> StoredTensor:
        form = tensor.quantized
        return tensor if form is None or form.offset is None else replace(tensor, quantized=replace(form, offset=None))

    return first.tensors.keys() == second.tensors.keys() and all(
        without_offset(tensor) == without_offset(second.tensors[name]) for name, tensor in first.tensors.items()
    )


def _plan_of(
    bare: BareModel, weights: WeightMap | None, store: WeightFiles, options: RunOptions, devices: Sequence[Device]
) -> LoadPlan:
    """The plan of a skeleton with these files; `weights` are the recipes, if they are known."""
    model = bare.model
    if model.config.model_type in SCALES_IN_PLACE:  # a matrix that its forward changes has no codes
        options = replace(options, exact=True, fast_bfloat16=None)
    try:
        if weights is None:
            casts = options.dtype is not None or not have_bf16(devices)
            weights = map_weights(model, store.tensors, store.label, bare.quantizer, casts=casts)
            if not store.is_split:
                check_unused(model, weights, store)
        skeleton.share_dtypes(model, weights.ties)
        plan = plan_with(model, weights, store, options, devices)
    except IncompleteSplitError as error:
        if store.is_split:
            raise
        remedy = advice_on_names(store.tensors, model.state_dict()) or _CHECK_THE_SOURCE
        raise IncompleteCheckpointError(f"{error.problem} Nothing was deleted.", remedy) from error
    return replace(plan, quantizer=bare.quantizer, is_narrowed=bare.is_narrowed)


def plan_with(
    model: PreTrainedModel, weights: WeightMap, store: WeightFiles, options: RunOptions, devices: Sequence[Device]
) -> LoadPlan:
    """The plan of a skeleton with the recipes of its parameters, but for what loads and narrows these."""
    choose_matrix, choosers = choosers_for(devices, options)
    units = find_units(model)
    experts = expert_sources(model, units, weights, store, choose_matrix)
    sources = {unit.name: source_of(without_experts(unit, experts), weights, store, choose_matrix) for unit in units}
    if not options.exact and all(device.shares_host_memory for device in devices):
        most = max((source.buffer_bytes for source in sources.values() if source.unit.is_layer), default=0)
        sources = {n: s if s.unit.is_layer else in_pieces(s, most) for n, s in sources.items()}
    placement = place_units(model, sources, experts, devices, options, choosers)
    return LoadPlan(model, weights, sources, tuple(experts), placement, choosers=choosers)


def choosers_for(
    devices: Sequence[Device], options: RunOptions
) -> tuple[MatrixChooser | None, dict[str, MatrixChooser]]:
    """The choice of matrices that are multiplied from their codes: on the host alone, and of each GPU."""
    if options.exact:
        return None, {}
    if all(device.shares_host_memory for device in devices):
        return _matrix_on_host, {}
    return None, {device.name: fused_chooser(device) for device in devices}


def too_little_memory(plan: LoadPlan, devices: Sequence[Device]) -> NotEnoughMemoryError | None:
    """The error if not even one layer of a model at a time fits the memory that this process may use.

    Returns:
        The error, with the minimum memory of a pass and the memory that this process may use; None if that suffices.
    """
    used = {placed.unit for placed in plan.placement.units}
    costs = [cost for cost in unit_costs(plan.model, plan.sources, plan.experts) if cost.name in used]
    for device in [d for d in devices if d.shares_host_memory]:  # a full GPU raises an error, and the process goes on
        (minimum, unit), free = min_bytes(costs, plan.placement, device.name), device.free_bytes()
        if minimum and minimum + FIXED_BYTES > free:
            return NotEnoughMemoryError(
                f"A pass takes at least {size(minimum + FIXED_BYTES)} of memory"
                f"{f' (its largest unit is {unit})' if unit else ''}; this process may take {size(free)}.",
                "Use a stronger compression, end other processes, or raise the limit (container, `ulimit -v`).",
            )
    return None


def only_a_part(
    plan: LoadPlan, share: PartChooser, store: WeightFiles, devices: Sequence[Device], options: RunOptions
) -> tuple[LoadPlan, RunOptions]:
    """The plan of the part of the model that this process places and computes, and its options."""
    budgets = {device.name: budget_of(device, options) for device in devices}
    part = share(plan.model, plan.sources, unit_costs(plan.model, plan.sources, plan.experts), store, budgets)
    sources = {name: source for name, source in plan.sources.items() if name in part.units}
    experts = tuple(source for source in plan.experts if source.unit in part.units)
    placement = replace(plan, sources=sources, experts=experts).placed(devices, options, part.budgets).placement
    placed_here = {placed.unit: placed for placed in placement.units}
    units = (
        placed_here.get(name) or PlacedUnit(name, placement.home, Tier.ELSEWHERE, source.stored_bytes)
        for name, source in plan.sources.items()
    )
    plan = replace(plan, experts=experts, placement=replace(placement, units=tuple(units)))
    return plan, replace(options, fast_bfloat16=part.fast_bfloat16)


def _choose_dtype(
    requested: str | None, config: PretrainedConfig, store: WeightFiles | None, devices: Sequence[Device]
) -> tuple[torch.dtype, bool]:
    """The caller's dtype, else the config's, else that of the weights; fp16, or fp32, for bf16 if a GPU has no bf16.

    The second result is whether it is fp16 for that reason.
    """
    if requested is not None:
        named = getattr(torch, requested, None)
        if not isinstance(named, torch.dtype) or not named.is_floating_point:
            problem = f"dtype={requested!r} is not a floating-point dtype of torch."
            raise OptionError(problem, "Example: dtype='bfloat16'.")
        return named, False
    # that of the whole model; that of a part does not count, as in transformers
    dtype: torch.dtype | None = getattr(config, "dtype", None)
    if dtype is None:
        of_weights = (tensor.model_dtype for tensor in store.tensors.values()) if store is not None else ()
        name = store.dtype if store is not None else None
        dtype = getattr(torch, name or next(filter(None, of_weights), "float32"))
    name = config.get_text_config(decoder=True).model_type
    if (usable := dtype_on(devices, dtype, name)) is torch.float32 and dtype is torch.bfloat16:
        logger.warning("This GPU has no bfloat16, and float16 is too narrow for %s: it computes in float32.", name)
    elif usable is not dtype:
        logger.warning("This GPU has no bfloat16; the model computes in float16. Pass dtype='float32' if it overflows.")
    return usable, usable is torch.float16 and usable is not dtype


def _attention(requested: str, config: PretrainedConfig, devices: Sequence[Device], dtype: torch.dtype) -> str | None:
    """The `attn_implementation` for transformers, None for its default; "auto": FlashAttention 2 if it is usable."""
    if requested != "auto":
        return requested
    if devices[0].torch_device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or not have_bf16(devices):
        return None
    from rabbitllm.engine.transformers_api import supports_flash_attention_2

    return "flash_attention_2" if supports_flash_attention_2(skeleton.model_class(config)) else None


def place_units(
    model: PreTrainedModel,
    sources: Mapping[str, UnitSource],
    experts: Sequence[ExpertSource],
    devices: Sequence[Device],
    options: RunOptions,
    choosers: Mapping[str, MatrixChooser] = MappingProxyType({}),
) -> Placement:
    """The placement of every unit, within the free memory or the caller's limits; see `LoadPlan` for `choosers`.

    GPUs try their products only if not all units are resident. bitsandbytes' own products take a part of their
    memory in each pass.

    Raises:
        RabbitLLMError: the model changes its weights, and not all of them can be resident.
    """
    work = _published.product_bytes(model)
    budgets = [
        Budget(device.name, max(budget_of(device, options) - (0 if is_host else work), 0), is_host)
        for device in devices
        for is_host in [device.shares_host_memory]
    ]
    placed = functools.partial(
        place,
        budgets=budgets,
        small_first=options.small_layers_resident,
        cached_layers=options.cache_layers or 0,
        host_bytes=host_room(devices, options),
    )
    costs = unit_costs(model, sources, experts)
    placement = placed(costs, experts=expert_costs(experts))
    if choosers and any(unit.tier in HOOKED for unit in placement.units):
        placement = placed(unit_costs(model, sources, experts, choosers), experts=expert_costs(experts))
    if options.self_draft:

        def with_copies(kind: str, small_first: bool) -> Placement:
            copied = [expert_copy_bytes(source, kind) for source in experts]
            inside = [replace(cost, copy=nbytes) for cost, nbytes in zip(expert_costs(experts), copied, strict=True)]
            sizes = unit_costs(model, sources, experts, kind=kind)
            return placed(sizes, experts=inside, kind=kind, small_first=small_first and options.small_layers_resident)

        placement = place_with_copies(placement, with_copies)
    name = model.config.model_type
    if name in SCALES_IN_PLACE and not placement.is_resident:
        raise RabbitLLMError(
            f"{name} rescales its weights in place, so all of them must be resident; they need "
            f"{size(ready_once(costs))}, more than the limits allow.",
            "Raise max_memory.",
        )
    return placement


def _matrix_on_host(form: Quantized | CodedForm, dtype: torch.dtype) -> type[StoredMatrix] | None:
    if isinstance(form, CodedForm):
        return CodedMatrix if coded.multiplies(form) else None
    return Matrix if multiplies(form.codes) else None


TRIED = (1, 4, 6, 16, 48, 128, 600)
"""Rows of input in a trial: bitsandbytes (0.50) has other kernels and tiles for them, and dequantizes for the last."""
MAX_ROWS = 1 << 15
"""Maximum rows of a trial's matrix. Tiles depend on their number, on a T4 up to 25,600 (csrc/gemm_4bit_sm75.cu)."""
DISTINCT_ROWS = 1280
"""Rows with codes of their own, which are repeated: whole blocks of quantized scales, and no power of two."""
_OFFSET = 2.0
"""The mean of quantized scales in a trial."""


def fused_chooser(device: Device) -> MatrixChooser:
    """The choice whether a device multiplies by bitsandbytes' 4bit products, or dequantizes each matrix first.

    A product from codes moves a ninth of the bytes. A trial for each shape and dtype, with random codes and inputs,
    verifies the results of its kernels on this device.
    """
    trial = functools.cache(functools.partial(_is_right, device))

    def choose_matrix(form: Quantized | CodedForm, dtype: torch.dtype) -> type[StoredMatrix] | None:
        if isinstance(form, CodedForm) or not can_multiply(form):
            return None
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return None
        shape = (min(form.shape[0], MAX_ROWS), form.shape[1])
        name = str(dtype).removeprefix("torch.")  # not the stored dtype, to which dequantizing rounds first
        offset = None if form.offset is None else _OFFSET
        return FusedMatrix if trial(Quantized(form.scheme, shape, name, offset), dtype) else None

    return choose_matrix


def is_near(fused: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two products differ only by rounding."""
    error = float((fused.float() - expected.float()).norm())
    return error <= max(8 * torch.finfo(fused.dtype).eps, 1e-5) * float(expected.float().norm())


def _is_right(device: Device, form: Quantized, dtype: torch.dtype) -> bool:
    """Run one trial. False too if it fails: the kernel is missing, or there is not enough memory."""
    try:
        x, matrix, expected = _operands(device.torch_device, form, dtype)
        if all(is_near(matrix.linear(x[:count], None), expected[:count]) for count in TRIED):
            return True
        logger.warning("bitsandbytes multiplies 4bit codes incorrectly on %s; layers are dequantized.", device.name)
    except Exception as error:
        logger.info("4bit codes are not multiplied on %s: %s: %s", device.name, type(error).__name__, error)
    return False


def _operands(to: torch.device, form: Quantized, dtype: torch.dtype) -> tuple[torch.Tensor, FusedMatrix, torch.Tensor]:
    """Inputs, a matrix of this form, and their product by dequantizing, on a device."""
    (rows, columns), random = form.shape, RandomTensors()
    distinct = min(rows, DISTINCT_ROWS)
    times, blocks = math.ceil(rows / distinct), distinct * columns // NF4_BLOCK
    payload, table = random.integers(0, 256, distinct * columns // 2, 1).to(to), code_values("4bit").to(to)
    scales = random.positive(blocks, least=0, dtype=torch.float32)
    nested = None
    if form.offset is not None:
        absmax = random.integers(0, 256, blocks).to(to)
        scales = scales[: math.ceil(blocks / NESTED_BLOCK)].to(to)
        nested = NestedScales(
            scales, torch.linspace(-1, 1, 256, device="cpu").to(to), torch.tensor(form.offset, device="cpu").to(to)
        )
    else:
        absmax = scales.to(to)
    sample = FusedMatrix(replace(form.codes, shape=(distinct, columns)), payload, absmax, table, nested)
    x = random.normal(max(TRIED), columns, dtype=dtype).to(to)
    product = torch.nn.functional.linear(x, sample.dequantized(dtype)).repeat(1, times)[:, :rows]
    matrix = replace(
        sample,
        form=form.codes,
        payload=payload.repeat(times, 1)[: rows * columns // 2],
        absmax=absmax.repeat(times)[: rows * columns // NF4_BLOCK],
        nested=None if nested is None else replace(nested, scales=nested.scales.repeat(times)),
    )
    return x, matrix, product
