"""Chooses bits for each tensor of a split at "auto", from headers alone: the least expected loss within the budgets.

The disk is a hard limit; `disk_budget.shortage` decides whether a plan keeps it, as for every split. Memory is a soft
limit: if the whole model can be resident at some choice, only such choices are made, since resident weights are not
read again for each token. If it cannot even at the fewest bits, each additional bit costs time with every token; then
only the disk limits, and tensors get more than 8bit only if the caller has set `max_disk`.

Where 8bit fits for all, tensors get fewer bits only if that is expected to lose a quarter less: the expectation is no
more precise than that. On one trained model, where a few hundredths less were expected, the loss was a quarter higher.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rabbitllm.base.options import SplitOptions
from rabbitllm.base.terminal import size, size_rounded_up
from rabbitllm.errors import NotEnoughSpaceException
from rabbitllm.quant.compression import COMPRESSIONS, DOUBLE
from rabbitllm.splitter.choices import BitChoice, BitChoices
from rabbitllm.splitter.disk_budget import DiskBudget, Shortage, candidates, shortage
from rabbitllm.splitter.plan import SplitPlan, recompressed
from rabbitllm.splitter.sensitivity import SchemeGroup, groups
from rabbitllm.store.manifest import AUTO, BitAllocation

# Selects an offer for each item so that all keep within a budget of bytes and the sum of their losses is small. Pure.
#
# Of each item only the offers on the lower convex hull of (bytes, loss) are candidates: a step from one to the next has
# a gain per byte, and steps are taken in descending order of it. A step that does not fit is skipped, with all later
# ones that build on it. The selection is optimal at a budget that is a sum of first steps; at others it loses less than
# the gain of the first step that was skipped. A larger budget never gives a worse selection: the steps before the first
# one that only it can take are the same, and those that the smaller one takes instead have no higher gain per byte, in
# fewer bytes than that step. Steps of equal gain go by the order of the items, so the outcome is deterministic.


@dataclass(frozen=True, slots=True)
class Offer:
    """One option for an item: its size in bytes, and its cost in quality."""

    nbytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class _Step:
    item: int
    level: int
    offer: int
    nbytes: int
    rate: float


def allocate(items: Sequence[Sequence[Offer]], budget: int) -> tuple[int, ...] | None:
    """Select an offer for each item.

    Args:
        items: the offers of each, at least one.
        budget: bytes that the selected offers may have together.

    Returns:
        The number of the offer for each item; None if even the smallest ones exceed the budget.
    """
    hulls = [_hull(offers) for offers in items]
    taken = [hull[0] for hull in hulls]
    left = budget - sum(offers[offer].nbytes for offers, offer in zip(items, taken, strict=True))
    if left < 0:
        return None
    levels = [0] * len(items)
    steps = [step for item, hull in enumerate(hulls) for step in _steps(item, items[item], hull)]
    for step in sorted(steps, key=lambda step: (-step.rate, step.item, step.level)):
        if step.nbytes <= left and levels[step.item] == step.level:
            taken[step.item] = step.offer
            levels[step.item] += 1
            left -= step.nbytes
    return tuple(taken)


def _steps(item: int, offers: Sequence[Offer], hull: Sequence[int]) -> Iterator[_Step]:
    """Yield the steps along a hull with their gain per byte, which despite rounding never rises from step to step."""
    rate = math.inf
    for level, (before, after) in enumerate(itertools.pairwise(hull)):
        nbytes = offers[after].nbytes - offers[before].nbytes
        rate = min(rate, (offers[before].loss - offers[after].loss) / nbytes)
        yield _Step(item, level, after, nbytes, rate)


def _hull(offers: Sequence[Offer]) -> list[int]:
    """Return the offers on the hull, the smallest first: each step has less gain per byte than the one before."""
    hull: list[int] = []
    for number in sorted(range(len(offers)), key=lambda n: (offers[n].nbytes, offers[n].loss, n)):
        if hull and offers[number].loss >= offers[hull[-1]].loss:
            continue
        while len(hull) > 1 and _bends_up(offers[hull[-2]], offers[hull[-1]], offers[number]):
            hull.pop()
        hull.append(number)
    return hull


def _bends_up(first: Offer, middle: Offer, last: Offer) -> bool:
    """Whether the middle offer lies above the line between the others."""
    gained = (first.loss - middle.loss) * (last.nbytes - middle.nbytes)
    return gained < (middle.loss - last.loss) * (middle.nbytes - first.nbytes)


WORTH_LESS_BITS = 0.75
"""Fewer bits for some tensors must be expected to lose at most this share of the loss with at least 8bit for all."""


def with_choice(
    plan: SplitPlan, disk_budget: DiskBudget, options: SplitOptions, experts_a_token: int | None = None
) -> SplitPlan:
    """Return the plan with the best bits for each tensor.

    Args:
        plan: of the same source, at any compression.
        disk_budget: the state of the disk that the split starts from.
        options: limits of the split.
        experts_a_token: see `sensitivity.groups`.

    Raises:
        NotEnoughSpaceException: not even the fewest bits fit.
    """
    bare = recompressed(plan, AUTO)
    found = groups(plan.tensors, experts_a_token)
    choices = BitChoices(bare, found)
    # at 4bit-double, scales wait in scratch files, so its peak on disk may exceed that of 4bit; both are tried
    fewest = {scheme: choices.at([scheme] * len(found)) for scheme in ("4bit", DOUBLE)}
    limits = _Limits(bare, disk_budget, options, None)
    lacking = {scheme: limits.over(least) for scheme, least in fewest.items()}
    if all(lacking.values()):
        raise _nothing_fits(limits, fewest[min(lacking, key=lambda scheme: lacking[scheme])])
    schemes = COMPRESSIONS
    if options.memory is not None:
        fitting = (least for scheme, least in fewest.items() if not lacking[scheme])
        if min(map(limits.resident_bytes, fitting)) <= options.memory:
            limits = dataclasses.replace(limits, memory=options.memory)
        elif options.max_disk is None:
            schemes = tuple(scheme for scheme in COMPRESSIONS if scheme is not None)
    ways = [schemes, tuple(scheme for scheme in schemes if scheme != DOUBLE)]
    fits = [made for allowed in ways if (made := _within(limits, choices, found, allowed)) is not None]
    fitted = options.fit_scales
    best = min(fits, key=lambda made: (_loss(found, made.schemes, fitted), made.output_bytes))
    if limits.over(choices.at(["8bit"] * len(found))) <= 0:
        sure = _within(limits, choices, found, schemes[: schemes.index("8bit") + 1])
        if sure is not None and _loss(found, best.schemes, fitted) > WORTH_LESS_BITS * _loss(
            found, sure.schemes, fitted
        ):
            best = sure
    return recompressed(bare, AUTO, BitAllocation(choices.schemes_of(best.schemes), options.max_disk, limits.memory))


@dataclass(frozen=True, slots=True)
class _Limits:
    """The limits of a choice; `bare` is the plan with all tensors uncompressed."""

    bare: SplitPlan
    disk_budget: DiskBudget
    options: SplitOptions
    memory: int | None

    def over(self, made: BitChoice) -> int:
        """Return the bytes by which a choice is too large."""
        short = self.shortage(made)
        over = short.need - short.have if short is not None else 0
        return over if self.memory is None else max(over, self.resident_bytes(made) - self.memory)

    def shortage(self, made: BitChoice) -> Shortage | None:
        """Return the lack of disk with the way for shards to arrive that takes least."""
        way = candidates(self.bare, self.options.shard_transfer)[-1]
        return shortage(made, self.disk_budget, self.options, way)

    def resident_bytes(self, made: BitChoice) -> int:
        """Return the bytes of memory that keep all of a choice's weights resident.

        The sum of the stored weights, the scales that are made from quantized ones, and room to make the largest layer.
        """
        largest = max((layout.size for layout in self.bare.layouts.values()), default=0)
        return made.output_bytes + made.scales_made + largest


def _within(
    limits: _Limits, choices: BitChoices, found: Sequence[SchemeGroup], allowed: Sequence[str | None]
) -> BitChoice | None:
    """Return the best choice among some schemes that keeps the limits; None if there is none."""
    fitted = limits.options.fit_scales
    offers = [[Offer(group.nbytes(c), group.loss(c, fitted=fitted)) for c in allowed] for group in found]
    budget = sum(max(offer.nbytes for offer in one) for one in offers)
    while (taken := allocate(offers, budget)) is not None:
        made = choices.at([allowed[offer] for offer in taken])
        over = limits.over(made)
        if over <= 0:
            return made
        # the excess falls by at most the bytes that the tensors do, so no choice that would fit is skipped
        budget = sum(one[offer].nbytes for one, offer in zip(offers, taken, strict=True)) - over
    return None


def _loss(found: Sequence[SchemeGroup], schemes: Iterable[str | None], fitted: bool) -> float:
    return sum(group.loss(scheme, fitted=fitted) for group, scheme in zip(found, schemes, strict=True))


def _nothing_fits(limits: _Limits, least: BitChoice) -> NotEnoughSpaceException:
    short = limits.shortage(least)
    assert short is not None
    if short.limited:
        remedy = f"max_disk={short.need} is the least that would do."
    else:
        missing = size_rounded_up(short.need - short.have)
        remedy = f"Free {missing} there, or name another place with layer_shards_saving_path."
    return NotEnoughSpaceException(
        f"compression='auto' finds no choice of bits for {limits.bare.source.name} in {limits.disk_budget.folder}: the "
        f"fewest need {short.needed} at the peak; {size(short.have)} is {short.where}.",
        remedy,
    )


def other_budget(chosen: BitAllocation | None, options: SplitOptions) -> str | None:
    """Describe the budget that a mixed split was chosen for, if the caller now sets another; else None."""
    if chosen is None:
        return None
    disk = options.max_disk is not None and options.max_disk != chosen.max_disk
    if not disk and not (options.memory_is_said and options.memory != chosen.memory):
        return None
    limits = [("max_disk", chosen.max_disk), ("memory", chosen.memory)]
    said = " and ".join(f"{name} {size(nbytes)}" for name, nbytes in limits if nbytes is not None)
    return f"for {said}" if said else "for what was free"


@dataclass(frozen=True, slots=True)
class RoleShare:
    """The tensors of one role at one scheme: how many, their elements, and their bytes in the layer files."""

    role: str
    scheme: str | None
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AllocationSummary:
    """Summary of a choice of bits.

    Attributes:
        shares: by role and scheme, in the order of COMPRESSIONS within a role.
        bits: average bits per weight, over the tensors that compression touches.
        loss: expected, relative to 4bit for all tensors with bitsandbytes' own scales.
        uniform: scheme -> the expected loss with that scheme for all tensors.
        max_disk, memory: the limits it keeps, bytes; None where there was none.
        fitted: whether `loss` and `uniform` are for scales that are fitted to their blocks.
    """

    shares: tuple[RoleShare, ...]
    bits: float
    loss: float
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
        experts_a_token: see `sensitivity.groups`.
    """
    if plan.chosen is None:
        return None
    schemes = plan.chosen.schemes
    found = groups(plan.tensors, experts_a_token)
    sums: dict[tuple[str, str | None], list[int]] = {}
    for group in found:
        scheme = schemes.get(group.tensors[0].name)
        entry = sums.setdefault((group.role, scheme), [0, 0, 0])
        entry[0] += len(group.tensors)
        entry[1] += sum(spec.elements for spec in group.tensors)
        entry[2] += group.nbytes(scheme)
    roles = list(dict.fromkeys(group.role for group in found))
    ordered = sorted(sums, key=lambda key: (roles.index(key[0]), COMPRESSIONS.index(key[1])))
    uniform = [scheme for scheme in COMPRESSIONS if scheme is not None]
    losses = {scheme: sum(group.loss(scheme, fitted=fitted) for group in found) for scheme in uniform}
    base = sum(group.loss("4bit") for group in found) or 1.0
    elements = sum(entry[1] for entry in sums.values()) or 1
    return AllocationSummary(
        tuple(RoleShare(role, scheme, *sums[role, scheme]) for role, scheme in ordered),
        8 * sum(entry[2] for entry in sums.values()) / elements,
        _loss(found, [schemes.get(group.tensors[0].name) for group in found], fitted) / base,
        {scheme: loss / base for scheme, loss in losses.items()},
        plan.chosen.max_disk,
        plan.chosen.memory,
        fitted,
    )
