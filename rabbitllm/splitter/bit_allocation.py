"""Chooses bits for each tensor of a split at "auto", from headers alone: the least expected loss within the budgets.

From top to bottom: the expected loss of a tensor at each scheme, the sizes of a split at any choice of bits, and the
choice itself. Pure, except that `disk_budget.shortage` reads the free disk.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rabbitllm.base.collection import uncollected
from rabbitllm.base.grouping import grouped, summed
from rabbitllm.base.options import SplitOptions
from rabbitllm.base.terminal import size
from rabbitllm.checkpoints.index import natural_key
from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.errors import NotEnoughSpaceException
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.schemes import (
    BLOCKS,
    COMPRESSIONS,
    DOUBLE,
    NF4_BLOCK,
    SCALE_BYTES,
    SCHEMES,
    is_compressible,
    scheme_of,
)
from rabbitllm.splitter._presets import LAYER, role_of
from rabbitllm.splitter.disk_budget import BitChoice, DiskBudget, EstimatedFile, Shortage, candidates, shortage
from rabbitllm.splitter.plan import SplitPlan, lay_out_layer, recompressed
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT
from rabbitllm.store.manifest import AUTO, BitAllocation
from rabbitllm.store.stored_form import stored_form

ERRORS: Mapping[str, float] = {
    "8bit": 1.8e-4,
    "4bit": 8.55e-3,
    DOUBLE: 8.57e-3,
    "Q8_0": 3.05e-5,
    "Q6_K": 2.86e-4,
    "Q5_K": 1.21e-3,
    "Q4_K": 5.1e-3,
    "IQ4_XS": 5.75e-3,
    "Q3_K": 2.25e-2,
    "Q2_K": 7.8e-2,
    "Q5_1": 1.15e-3,
    "Q5_0": 1.74e-3,
    "IQ4_NL": 5.65e-3,
}
"""Squared error of the weights stored with a scheme, relative to the squared weights.

Blocks: medians over matrices of SmolLM2-135M, Gemma 3 270M and Qwen2.5-Coder-1.5B, of which each model's is within 8 %.
"""
FITTED_ERRORS: Mapping[str, float] = {**ERRORS, "4bit": 0.84 * ERRORS["4bit"], DOUBLE: 0.89 * ERRORS[DOUBLE]}
"""The same with scales that are fitted to their blocks (`fit_scales`). Over the bundled model's 42 tensors of at least
32,768 elements, the median ratio of the errors is 0.838 (0.82 to 0.85), at 4bit-double 0.886 (0.87 to 0.90).
"""
WEIGHTS: Mapping[str, float] = {
    "head": 1.5,
    "embedding": 0.25,
    "query": 0.33,
    "key": 0.28,
    "value": 1.6,
    "query, key and value": 2.2,
    "attention output": 0.45,
    "gate and up": 0.85,
    "down": 1.9,
    "other": 1.0,
}
"""Divergence for each unit of relative squared error, of one matrix of all layers together; in no unit.

Means over models, of which a head that is the embedding too costs 1, and one of its own 1.6 to 1.9; see
docs/PERFORMANCE.md.
"""
LAST_LAYERS, LAST_WEIGHTS = 1 / 8, {"down": 2.8, "gate and up": 1.6}
"""Fraction of the decoder layers, from the last, and the factor there; other roles have 0.5."""

_EXPERT = re.compile(r"(?P<block>.*?experts\.(?:expert_)?)(?P<number>\d+)\.(?P<rest>.+)")
_ALL_EXPERTS = re.compile(r"(?:^|\.)experts\.")
_GATE_AND_UP = re.compile(r"(?:^|[._])(?:gate_up_proj|input_linear)(?:[._]|$)")
"""Names of tensors that hold both in one matrix."""
_UP = re.compile(r"(?<=[._])(?:gate_proj|up_proj|w1|w3|fc1|fc3)(?=[._]|$)")


@dataclass(frozen=True, slots=True)
class SchemeGroup:
    """Tensors that get the same scheme, since the engine joins them into one matrix or requires them to be alike.

    Attributes:
        role: their role, a key of `WEIGHTS`.
        tensors: in the checkpoint's order.
        weight: of all together; the factor of their relative squared error.
        predicts_further: whether they are of heads for multi-token prediction.
    """

    role: str
    tensors: tuple[TensorSpec, ...]
    weight: float
    predicts_further: bool = False

    def loss(self, compression: str | None, *, fitted: bool = False) -> float:
        """Return the expected loss at a compression, in no unit; it adds up over groups.

        Args:
            compression: one that `scheme_of` accepts.
            fitted: whether scales are fitted to their blocks.
        """
        scheme = scheme_of(self.tensors[0], compression)
        if compression is None or scheme is None:  # unchanged; blocks of a GGUF file may be kept
            return 0.0
        return self.weight * (FITTED_ERRORS if fitted else ERRORS)[scheme]

    def nbytes(self, compression: str | None) -> int:
        """Return the bytes stored at a compression."""
        distinct = {(spec.dtype, spec.shape): spec for spec in self.tensors}
        each = {key: stored_form(spec, compression).nbytes for key, spec in distinct.items()}
        return sum([each[spec.dtype, spec.shape] for spec in self.tensors])


def groups(
    tensors: Iterable[TensorSpec], experts_a_token: int | None = None, heads: Collection[str] = ()
) -> list[SchemeGroup]:
    """Group the compressible tensors of a model, in numerical order of their names.

    Gate and up projections of all experts of a layer are one group, and down projections another: experts that differ
    in form could not be streamed individually.

    Args:
        tensors: of the model.
        experts_a_token: number of experts the router picks, without shared ones; None if unknown: then routed experts
            and shared ones each have the weight of a dense layer's matrix.
        heads: names of those for multi-token prediction.
    """
    compressible = sorted(filter(is_compressible, tensors), key=lambda spec: natural_key(spec.name))
    by_group = grouped((_group_name(spec.name), spec) for spec in compressible)
    roles = {name: role_of(members[0].name) for name, members in by_group.items()}
    has_head = "head" in roles.values()
    layers = {layer for spec in compressible if (layer := _layer_index(spec.name)) is not None}
    depth = max(layers) + 1 if layers else 1
    computed = {name: _elements_a_token(members, experts_a_token) for name, members in by_group.items()}
    of_layer = grouped(((_layer_index(name), roles[name]), name) for name in by_group)
    scheme_groups = []
    for name, members in by_group.items():
        role = roles[name]
        weight = WEIGHTS[role] * _count_matrices(members)
        of_role = of_layer[_layer_index(name), role]
        if len(of_role) > 1 and any(_is_routed(by_group[peer]) for peer in of_role):
            peer_elements = [elements for peer in of_role if (elements := computed[peer]) is not None]
            if len(peer_elements) == len(of_role):
                weight *= peer_elements[of_role.index(name)] / sum(peer_elements)
        if role == "embedding" and not has_head:  # it is the head too
            weight += WEIGHTS["head"]
        if (layer := _layer_index(members[0].name)) is not None:
            is_last = layer >= depth - depth * LAST_LAYERS
            weight *= (LAST_WEIGHTS.get(role, 0.5) if is_last else 1.0) / depth
        scheme_groups.append(SchemeGroup(role, tuple(members), weight, members[0].name in heads))
    return scheme_groups


def _group_name(name: str) -> str:
    expert = _EXPERT.fullmatch(name)
    return _UP.sub("gate_up", f"{expert['block']}*.{expert['rest']}" if expert else name)


def _count_matrices(members: Sequence[TensorSpec]) -> int:
    """Return the number of matrices of a dense layer that a group counts for."""
    names = {match["rest"] if (match := _EXPERT.fullmatch(spec.name)) else spec.name for spec in members}
    return sum([2 if _GATE_AND_UP.search(name) else 1 for name in names])


def _is_routed(members: Sequence[TensorSpec]) -> bool:
    """Whether a group is of routed experts: each a tensor of its own, or all in one."""
    name = members[0].name
    return _EXPERT.fullmatch(name) is not None or _ALL_EXPERTS.search(name) is not None


def _elements_a_token(members: Sequence[TensorSpec], experts_a_token: int | None) -> float | None:
    """Return the number of a group's elements that a token is multiplied with; None if unknown."""
    elements = sum(spec.elements for spec in members)
    if not _is_routed(members):
        return elements
    if experts_a_token is None:
        return None
    numbers = {match["number"] for spec in members if (match := _EXPERT.fullmatch(spec.name)) is not None}
    experts = len(numbers) or members[0].shape[0]
    return elements * min(experts_a_token, experts) / experts


def _layer_index(name: str) -> int | None:
    match = LAYER.search(name)
    return int(match[1]) if match else None


_NUMBER = re.compile("[0-9]")


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, prepared for choosing.

    Attributes:
        name: its id and stem.
        specs: its tensors, ordered by name: for a layer that spans two shards the plan's order differs.
        order: the index of each of them in the plan's order.
        groups: indices of its tensors' groups, in order of appearance.
        kind: equal for alike layers.
    """

    name: LayerName
    specs: Sequence[TensorSpec]
    order: Sequence[int]
    groups: tuple[int, ...]
    kind: int


@dataclass(frozen=True, slots=True)
class _SharedSizes:
    """The sizes that layers of one kind share at the same bits; indices of tensors are those of `_Layer.specs`.

    Attributes:
        sizes: of one of them, with a scratch file that is padded behind the last scales, too.
        tensor_bytes: index of a tensor and bytes that come from its shard.
        filling: index of a tensor -> padding behind its scales in the scratch file, bytes.
    """

    sizes: EstimatedFile
    tensor_bytes: Sequence[tuple[int, int]]
    filling: Mapping[int, int]

    def of(self, layer: _Layer) -> EstimatedFile:
        """Return the sizes of a layer of the kind."""
        shard_bytes = summed((layer.specs[index].file, nbytes) for index, nbytes in self.tensor_bytes)
        scratch = self.sizes.scratch_bytes - _last_filling(self.filling, layer)
        return dataclasses.replace(self.sizes, shard_bytes=shard_bytes, scratch_bytes=scratch)


def _last_filling(filling: Mapping[int, int], layer: _Layer) -> int:
    return filling[max(filling, key=layer.order.__getitem__)] if filling else 0


class BitChoices:
    """Sizes of a split at any choice of bits for a plan's groups, without its plan: only the final choice is planned.

    Two layers are alike if their tensors have the same dtypes and shapes, and the same names except for the layer's
    number, which must have as many digits. Alike layers with the same bits have files of the same size: a header
    contains the names, and tensors are ordered by the part of the name behind the number. So one layer of each kind is
    laid out at each combination of bits that is tried, by the plan's own code; only the bytes from each shard are
    counted per layer.

    Args:
        bare: the plan at "auto" with all tensors uncompressed.
        scheme_groups: its groups.
    """

    @uncollected()
    def __init__(self, bare: SplitPlan, scheme_groups: Sequence[SchemeGroup]) -> None:
        self._bare, self._groups = bare, scheme_groups
        group_of = {spec.name: index for index, group in enumerate(scheme_groups) for spec in group.tensors}
        self._kinds: dict[Hashable, int] = {}
        specs = {spec.name: spec for shard in bare.shards for spec in shard.tensors}
        self._layers = [
            self._looked_at(name, [specs[tensor] for tensor in bare.layer_map.layer_to_tensors[layer]], group_of)
            for layer, name in bare.layer_map.layers.items()
        ]
        self._alike: dict[tuple[int, tuple[str | None, ...]], _SharedSizes] = {}
        self._sizes: dict[tuple[str, tuple[str | None, ...]], EstimatedFile] = {}
        self._scales = [_made_scale_bytes(group) for group in scheme_groups]

    @uncollected()
    def at(self, schemes: Sequence[str | None]) -> BitChoice:
        """Return the sizes of a split with a scheme for each group."""
        sizes = {layer.name.id: self._sizes_at(layer, schemes) for layer in self._layers}
        scale_bytes = sum(nbytes for scheme, nbytes in zip(schemes, self._scales, strict=True) if scheme == DOUBLE)
        return BitChoice(tuple(schemes), self._bare.shards, self._bare.layer_map, sizes, scale_bytes)

    def schemes_of(self, schemes: Sequence[str | None], indices: Sequence[int] | None = None) -> dict[str, str]:
        """Return tensor -> its compression, for the tensors that are compressed.

        Args:
            schemes: the scheme of each group.
            indices: of the groups to include; None for all.
        """
        return {
            spec.name: scheme if scheme in SCHEMES else compression
            for index in (range(len(self._groups)) if indices is None else indices)
            if (compression := schemes[index]) is not None
            for spec in self._groups[index].tensors
            if (scheme := scheme_of(spec, compression)) is not None
        }

    def _looked_at(self, name: LayerName, specs: Sequence[TensorSpec], group_of: Mapping[str, int]) -> _Layer:
        groups: dict[int, int] = {}
        alike: list[Hashable] = [_NUMBER.sub("0", name.stem)]
        order: Sequence[int] = range(len(specs))
        if not any(spec.piece for spec in specs):  # offsets of pieces in a scratch file depend on more than the last
            order = sorted(order, key=lambda index: _without_stem(specs[index].name, name.stem))
        specs = [specs[index] for index in order]
        for spec in specs:
            group = group_of.get(spec.whole.name)
            local = groups.setdefault(group, len(groups)) if group is not None else None
            alike.append((_without_stem(spec.name, name.stem), spec.dtype, spec.shape, local))
            if (piece := spec.piece) is not None:
                alike.append((_without_stem(piece.of, name.stem), piece.shape, piece.dim, piece.begin))
        kind_id = self._kinds.setdefault(tuple(alike), len(self._kinds))
        return _Layer(name, specs, order, tuple(groups), kind_id)

    def _sizes_at(self, layer: _Layer, schemes: Sequence[str | None]) -> EstimatedFile:
        layer_schemes = tuple([schemes[index] for index in layer.groups])
        if (sizes := self._sizes.get((layer.name.id, layer_schemes))) is None:
            if (alike := self._alike.get((layer.kind, layer_schemes))) is None:
                alike = self._alike[layer.kind, layer_schemes] = self._laid_out(layer, schemes)
            sizes = self._sizes[layer.name.id, layer_schemes] = alike.of(layer)
        return sizes

    def _laid_out(self, layer: _Layer, schemes: Sequence[str | None]) -> _SharedSizes:
        chosen = self.schemes_of(schemes, layer.groups)
        layout = lay_out_layer(layer.name, layer.specs, AUTO, BitAllocation(chosen), self._bare.format_version)
        indices = {spec.name: index for index, spec in enumerate(layer.specs)}
        tensor_bytes = [(indices[form.source.name], form.nbytes) for form in layout.forms]
        # a tensor in pieces has another name
        waiting = [settling for settling in layout.settles if settling.of.name in indices]
        filling = {indices[settling.of.name]: -settling.source.nbytes % TENSOR_ALIGNMENT for settling in waiting}
        scratch = layout.scratch_bytes + _last_filling(filling, layer)
        sizes = EstimatedFile(layout.header_bytes, layout.size, {}, scratch, layout.joined_bytes, layout.joins)
        return _SharedSizes(sizes, tensor_bytes, filling)


def _without_stem(name: str, stem: str) -> tuple[str, bool]:
    """Return the part of a tensor's name behind its layer's, where the number ends there; else the whole name."""
    suffix = name.removeprefix(stem)
    follows_stem = suffix != name and not _NUMBER.match(suffix)
    return (suffix, True) if follows_stem else (name, False)


def _made_scale_bytes(group: SchemeGroup) -> int:
    """Return the bytes of a group's scales that are made when the model is used, if the group is at 4bit-double."""
    doubled = [spec for spec in group.tensors if scheme_of(spec, DOUBLE) == DOUBLE]
    return sum([math.ceil(spec.elements / NF4_BLOCK) * SCALE_BYTES for spec in doubled])


@dataclass(frozen=True, slots=True)
class SchemeOption:
    """One option for an item: its size in bytes, and its cost in quality."""

    nbytes: int
    loss: float


def allocate(items: Sequence[Sequence[SchemeOption]], budget: int) -> tuple[int, ...] | None:
    """Select an option for each item, so that all keep within a budget and the sum of their losses is small. Pure.

    Of each item only the options on the lower convex hull of (bytes, loss) are candidates: a step from one to the next
    has a gain per byte, and steps are taken in descending order of it. A step that does not fit is skipped, with all
    later ones that build on it. The selection is optimal at a budget that is a sum of first steps; at others it loses
    less than the gain of the first step that was skipped. The item with the most bytes, such as a large embedding,
    could leave much of the budget: each of its options is tried with the best of the others. A larger budget never
    gives a worse selection: the steps before the first one that only it can take are the same, and those that the
    smaller one takes instead have no higher gain per byte, in fewer bytes than that step. Steps of equal gain go by the
    order of the items, so the outcome is deterministic.

    Args:
        items: the options of each, at least one.
        budget: bytes that the selected options may have together.

    Returns:
        The index of the option for each item; None if even the smallest ones exceed the budget.
    """
    hulls = [_hull(options) for options in items]
    largest = max(range(len(items)), key=lambda item: items[item][hulls[item][-1]].nbytes, default=None)
    tried = [hulls]
    if largest is not None:
        tried += [[*hulls[:largest], [option], *hulls[largest + 1 :]] for option in hulls[largest]]
    selections = [selection for hulls in tried if (selection := _in_order_of_gain(items, hulls, budget)) is not None]
    return min(selections, key=lambda selection: _sum_losses(items, selection), default=None)


def _sum_losses(items: Sequence[Sequence[SchemeOption]], selection: Sequence[int]) -> float:
    return math.fsum(options[option].loss for options, option in zip(items, selection, strict=True))


def _in_order_of_gain(
    items: Sequence[Sequence[SchemeOption]], hulls: Sequence[Sequence[int]], budget: int
) -> tuple[int, ...] | None:
    selected = [hull[0] for hull in hulls]
    remaining = budget - sum(options[option].nbytes for options, option in zip(items, selected, strict=True))
    if remaining < 0:
        return None
    levels = [0] * len(items)
    steps = [step for item, hull in enumerate(hulls) for step in _steps(item, items[item], hull)]
    for _, item, level, option, nbytes in sorted(steps):
        if nbytes <= remaining and levels[item] == level:
            selected[item] = option
            levels[item] += 1
            remaining -= nbytes
    return tuple(selected)


def _steps(
    item: int, options: Sequence[SchemeOption], hull: Sequence[int]
) -> Iterator[tuple[float, int, int, int, int]]:
    """Yield the steps along a hull: less the gain per byte, which despite rounding never rises from step to step; the
    item, the number of the step, the option that it leads to, and the bytes that it takes."""
    rate = math.inf
    for level, (before, after) in enumerate(itertools.pairwise(hull)):
        nbytes = options[after].nbytes - options[before].nbytes
        rate = min(rate, (options[before].loss - options[after].loss) / nbytes)
        yield -rate, item, level, after, nbytes


def _hull(options: Sequence[SchemeOption]) -> list[int]:
    """Return the options on the hull, the smallest first: each step has less gain per byte than the one before."""
    hull: list[int] = []
    for index in sorted(range(len(options)), key=lambda n: (options[n].nbytes, options[n].loss, n)):
        if hull and options[index].loss >= options[hull[-1]].loss:
            continue
        while len(hull) > 1 and _bends_up(options[hull[-2]], options[hull[-1]], options[index]):
            hull.pop()
        hull.append(index)
    return hull


def _bends_up(first: SchemeOption, middle: SchemeOption, last: SchemeOption) -> bool:
    """Whether the middle option lies above the line between the others."""
    gained = (first.loss - middle.loss) * (last.nbytes - middle.nbytes)
    return gained < (middle.loss - last.loss) * (middle.nbytes - first.nbytes)


@dataclass(frozen=True, slots=True)
class Palette:
    """The compressions that a choice is made from.

    Attributes:
        compressions: from the largest output to the smallest.
        half: the one of 8 bits, whose loss is little.
        quarter: those of 4 bits, at which a model is still good enough to keep it in memory rather than stream it.
        compared: the one whose loss, for all tensors, is the unit of the expected loss.
    """

    compressions: tuple[str | None, ...]
    half: str
    quarter: tuple[str, ...]
    compared: str

    def applied(self, compression: str | None, scheme_groups: Sequence[SchemeGroup]) -> list[str | None]:
        """Return the compression of each group at one for all: heads for multi-token prediction keep 8 bits."""
        of_heads = compression if compression is None else self.half
        return [of_heads if group.predicts_further else compression for group in scheme_groups]


FUSED = Palette(COMPRESSIONS, "8bit", ("4bit", DOUBLE), "4bit")
"""Those that a GPU multiplies from their codes."""
BLOCKWISE = Palette((None, *(name for name in BLOCKS if name != "q4_0")), "q8_0", ("iq4_xs",), "q4_k")
"""Blocks, for a CPU; q4_0 has no fewer bits than q4_k, and loses more."""


def palette_of(options: SplitOptions) -> Palette:
    """Return the palette for a split; scales can be fitted only at 4bit."""
    return FUSED if options.for_gpu or options.fit_scales else BLOCKWISE


WORTH_LESS_BITS = 0.75
"""Fewer bits for some tensors must be expected to lose at most this share of the loss with at least 8 bits for all."""


def with_choice(
    plan: SplitPlan, disk_budget: DiskBudget, options: SplitOptions, experts_a_token: int | None = None
) -> SplitPlan:
    """Return the plan with the best bits for each tensor.

    The disk is a hard limit (`disk_budget.shortage`). Memory is a soft limit: if the whole model can be resident at
    about 4 bits, only resident choices are made, since resident weights are not read again for each token. If it
    cannot, each additional bit costs time with every token; then only the disk limits. Tensors get more than 8 bits
    only if the caller has set a limit, `max_disk` or for a resident model also the memory, or a GPU keeps all of them.

    If 8 bits fit for all, tensors get fewer only if a quarter less loss is expected: the expectation is not more
    precise. On one trained model, where a few hundredths less were expected, the loss was a quarter higher.

    Args:
        plan: of the same source, at any compression.
        disk_budget: the state of the disk that the split starts from.
        options: limits of the split.
        experts_a_token: see `groups`.

    Raises:
        NotEnoughSpaceException: not even the fewest bits fit.
    """
    bare = recompressed(plan, AUTO)
    palette = palette_of(options)
    scheme_groups = groups(plan.tensors, experts_a_token, plan.heads)
    choices = BitChoices(bare, scheme_groups)

    def uniform(compression: str | None) -> BitChoice:
        return choices.at(palette.applied(compression, scheme_groups))

    limits = _SizeLimits(bare, disk_budget, options, None)
    # at 4bit-double, scales wait in scratch files, so its peak on disk may exceed that of 4bit; both are tried
    fewest = [uniform(name) for name in dict.fromkeys([*palette.quarter, palette.compressions[-1]])]
    if all(limits.over(choice) > 0 for choice in fewest):
        raise _shortage_error(limits, min(fewest, key=limits.over))
    # matrices at 8 bits are multiplied faster than uncompressed ones, except by a GPU that has them in memory
    at_most_8_bits = options.max_disk is None and not options.memory_is_given and not options.for_gpu
    if options.memory is not None:
        quarters = [quarter for quarter in map(uniform, palette.quarter) if limits.over(quarter) <= 0]
        if quarters and min(map(limits.resident_bytes, quarters)) <= options.memory:
            limits = dataclasses.replace(limits, memory=options.memory)
        else:
            at_most_8_bits = options.max_disk is None
    schemes = palette.compressions[1:] if at_most_8_bits else palette.compressions
    choosable = dict.fromkeys([schemes, tuple(scheme for scheme in schemes if scheme != DOUBLE)])
    fits = [
        choice for allowed in choosable if (choice := _best_choice(limits, choices, scheme_groups, allowed)) is not None
    ]
    fitted = options.fit_scales
    best = min(fits, key=lambda choice: (_total_loss(scheme_groups, choice.schemes, fitted), choice.output_bytes))
    if limits.over(uniform(palette.half)) <= 0:
        sure = _best_choice(limits, choices, scheme_groups, schemes[: schemes.index(palette.half) + 1])
        if sure is not None and _total_loss(scheme_groups, best.schemes, fitted) > WORTH_LESS_BITS * _total_loss(
            scheme_groups, sure.schemes, fitted
        ):
            best = sure
    return recompressed(bare, AUTO, BitAllocation(choices.schemes_of(best.schemes), options.max_disk, limits.memory))


@dataclass(frozen=True, slots=True)
class _SizeLimits:
    """The limits of a choice; `bare` is the plan with all tensors uncompressed."""

    bare: SplitPlan
    disk_budget: DiskBudget
    options: SplitOptions
    memory: int | None

    def over(self, choice: BitChoice) -> int:
        """Return the bytes by which a choice is too large."""
        short = self.shortage(choice)
        over = short.missing if short is not None else 0
        return over if self.memory is None else max(over, self.resident_bytes(choice) - self.memory)

    def shortage(self, choice: BitChoice) -> Shortage | None:
        """Return the lack of disk with the transfer of shards that takes least."""
        transfer = candidates(self.bare, self.options.shard_transfer)[-1]
        return shortage(choice, self.disk_budget, self.options, transfer)

    def resident_bytes(self, choice: BitChoice) -> int:
        """Return the bytes of memory that keep all of a choice's weights resident.

        The sum of the stored weights, the scales that are made from quantized ones, and room to make the largest layer.
        """
        largest = max((layout.size for layout in self.bare.layouts.values()), default=0)
        return choice.output_bytes + choice.scales_made + largest


def _best_choice(
    limits: _SizeLimits, choices: BitChoices, scheme_groups: Sequence[SchemeGroup], allowed: Sequence[str | None]
) -> BitChoice | None:
    """Return the best choice among some schemes that keeps the limits; None if there is none."""
    fitted, palette = limits.options.fit_scales, palette_of(limits.options)
    of_groups = [*zip(*(palette.applied(compression, scheme_groups) for compression in allowed), strict=True)]
    items = [
        [SchemeOption(group.nbytes(compression), group.loss(compression, fitted=fitted)) for compression in of_group]
        for group, of_group in zip(scheme_groups, of_groups, strict=True)
    ]
    budget = sum(max(option.nbytes for option in item) for item in items)
    while (selected := allocate(items, budget)) is not None:
        choice = choices.at([of_group[option] for of_group, option in zip(of_groups, selected, strict=True)])
        over = limits.over(choice)
        if over <= 0:
            return choice
        # the excess falls by at most the bytes that the tensors do, so no choice that would fit is skipped
        budget = sum(item[option].nbytes for item, option in zip(items, selected, strict=True)) - over
    return None


def _total_loss(scheme_groups: Sequence[SchemeGroup], schemes: Iterable[str | None], fitted: bool) -> float:
    return sum(group.loss(scheme, fitted=fitted) for group, scheme in zip(scheme_groups, schemes, strict=True))


def _shortage_error(limits: _SizeLimits, least: BitChoice) -> NotEnoughSpaceException:
    short = limits.shortage(least)
    assert short is not None
    return NotEnoughSpaceException(
        f"compression='auto' finds no bits for {limits.bare.source.title} that fit in {limits.disk_budget.folder}: the "
        f"smallest split needs {short.needed} at its peak; {short.found}.",
        f"{short.advice}, or use a folder on another disk (--dir, layer_shards_saving_path).",
    )


def other_budget(chosen: BitAllocation | None, options: SplitOptions) -> str | None:
    """Describe the budget that a mixed split was chosen for, if the caller now sets another; else None."""
    if chosen is None:
        return None
    disk = options.max_disk is not None and options.max_disk != chosen.max_disk
    if not disk and not (options.memory_is_given and options.memory != chosen.memory):
        return None
    limits = [("max_disk", chosen.max_disk), ("memory", chosen.memory)]
    budget = " and ".join(f"{name} {size(nbytes)}" for name, nbytes in limits if nbytes is not None)
    return f"for {budget}" if budget else "for the free disk and memory"


@dataclass(frozen=True, slots=True)
class RoleAllocation:
    """The tensors of one role at one compression: their number, elements, and bytes in the layer files."""

    role: str
    scheme: str | None
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AllocationSummary:
    """Summary of a choice of bits.

    Attributes:
        shares: by role and scheme, from the most bits to the fewest within a role.
        bits: average bits per weight, over the tensors that compression touches.
        loss: expected, relative to `compared` for all tensors, with bitsandbytes' own scales if that is 4bit.
        compared: a compression.
        uniform: some compressions, and the expected loss with each of them for all tensors.
        max_disk, memory: the limits it keeps, bytes; None where there was none.
        fitted: whether `loss` and `uniform` are for scales that are fitted to their blocks.
    """

    shares: tuple[RoleAllocation, ...]
    bits: float
    loss: float
    compared: str
    uniform: Mapping[str, float]
    max_disk: int | None
    memory: int | None
    fitted: bool = False


def allocation_of(
    plan: SplitPlan, *, fitted: bool = False, experts_a_token: int | None = None
) -> AllocationSummary | None:
    """Summarize the choice of a plan at "auto"; None at other compressions.

    Args:
        plan: any.
        fitted: whether its scales are fitted to their blocks, or will be.
        experts_a_token: see `groups`.
    """
    if plan.chosen is None or plan.compression != AUTO:
        return None
    schemes = plan.chosen.schemes
    palette = FUSED if SCHEMES.keys() & set(schemes.values()) else BLOCKWISE
    scheme_groups = groups(plan.tensors, experts_a_token, plan.heads)
    sums: dict[tuple[str, str | None], list[int]] = {}
    for group in scheme_groups:
        scheme = schemes.get(group.tensors[0].name)
        entry = sums.setdefault((group.role, scheme), [0, 0, 0])
        entry[0] += len(group.tensors)
        entry[1] += sum(spec.elements for spec in group.tensors)
        entry[2] += group.nbytes(scheme)
    roles = list(dict.fromkeys(group.role for group in scheme_groups))
    ordered = sorted(sums, key=lambda key: (roles.index(key[0]), palette.compressions.index(key[1])))
    base = sum(group.loss(palette.compared) for group in scheme_groups) or 1.0
    named = dict.fromkeys([palette.half, *palette.quarter])
    losses = {scheme: sum(group.loss(scheme, fitted=fitted) for group in scheme_groups) for scheme in named}
    elements = sum(entry[1] for entry in sums.values()) or 1
    return AllocationSummary(
        tuple(RoleAllocation(role, scheme, *sums[role, scheme]) for role, scheme in ordered),
        8 * sum(entry[2] for entry in sums.values()) / elements,
        _total_loss(scheme_groups, [schemes.get(group.tensors[0].name) for group in scheme_groups], fitted) / base,
        palette.compared,
        {scheme: loss / base for scheme, loss in losses.items()},
        plan.chosen.max_disk,
        plan.chosen.memory,
        fitted,
    )
