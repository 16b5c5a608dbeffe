"""Chooses bits for each tensor of a split at "auto", from headers alone: the least expected loss in the budgets.

The disk is a limit that must be kept; whether a plan keeps it is what `space.shortage` says, which decides for every
split. Memory is a wish: if the whole model can stay in it at some choice, only such are made, since what stays need not
be read again for each token. If it cannot even at the fewest bits, each bit more costs time with every token; then only
the disk limits, and beyond 8bit nothing is taken but where the caller has said what the disk may hold.

Where 8bit fits for all, nothing gets less unless a quarter less loss is expected of it: what is expected is not known
better than that, and on one trained model, where a few hundredths less were expected, it was a quarter more.
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
from rabbitllm.store.chosen import AUTO, BitAllocation

# Which offer to take for each item so that all keep within a budget of bytes and their losses add up to little. Pure.
#
# Of each item only the offers on the lower convex hull of (bytes, loss) can be taken: a step from one to the next has
# a gain a byte, and steps are taken in the order of that gain. One that does not fit is passed over, and all behind it
# that build on it. At a budget that is a sum of first steps nothing is better; at others what is lost is less than the
# gain of the first step that was passed over. What a larger budget gives is never worse: what it takes before the
# first step that only it can take is the same, and what the smaller one takes instead has no more gain a byte, in
# fewer bytes than that step. Steps of equal gain go by the order of the items, so the outcome depends on nothing else.


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to have an item: what it takes, bytes, and what it costs in quality."""

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
    """Which offer each item gets.

    Args:
        items: the offers of each, at least one.
        budget: bytes that the offers taken may have together.

    Returns:
        For each item the number of its offer; None if not even the smallest ones keep within the budget.
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
    """From each offer of a hull to the next, with its gain a byte; rounded, it must not be above the one before."""
    rate = math.inf
    for level, (before, after) in enumerate(itertools.pairwise(hull)):
        nbytes = offers[after].nbytes - offers[before].nbytes
        rate = min(rate, (offers[before].loss - offers[after].loss) / nbytes)
        yield _Step(item, level, after, nbytes, rate)


def _hull(offers: Sequence[Offer]) -> list[int]:
    """The offers that are worth their bytes, the smallest first: each step has less gain a byte than the one before."""
    hull: list[int] = []
    for number in sorted(range(len(offers)), key=lambda n: (offers[n].nbytes, offers[n].loss, n)):
        if hull and offers[number].loss >= offers[hull[-1]].loss:
            continue
        while len(hull) > 1 and _bends_up(offers[hull[-2]], offers[hull[-1]], offers[number]):
            hull.pop()
        hull.append(number)
    return hull


def _bends_up(first: Offer, middle: Offer, last: Offer) -> bool:
    """Whether the middle one lies above the line between the others."""
    gained = (first.loss - middle.loss) * (last.nbytes - middle.nbytes)
    return gained < (middle.loss - last.loss) * (middle.nbytes - first.nbytes)


WORTH_LESS_BITS = 0.75
"""Of the loss that is expected where no tensor has less than 8bit: what must be expected of fewer bits for some."""


def with_choice(
    plan: SplitPlan, disk_budget: DiskBudget, options: SplitOptions, experts_a_token: int | None = None
) -> SplitPlan:
    """The plan with the bits for each tensor that suit it best.

    Args:
        plan: of the same source, at any compression.
        ground: what the split stands on.
        options: its limits.
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
    """What a choice has to keep to; `bare` is the plan with all tensors as they are."""

    bare: SplitPlan
    disk_budget: DiskBudget
    options: SplitOptions
    memory: int | None

    def over(self, made: BitChoice) -> int:
        """Bytes by which a choice is too large."""
        short = self.shortage(made)
        over = short.need - short.have if short is not None else 0
        return over if self.memory is None else max(over, self.resident_bytes(made) - self.memory)

    def shortage(self, made: BitChoice) -> Shortage | None:
        """What the disk lacks where shards arrive in the way that takes least."""
        way = candidates(self.bare, self.options.shard_transfer)[-1]
        return shortage(made, self.disk_budget, self.options, way)

    def resident_bytes(self, made: BitChoice) -> int:
        """Bytes of memory that keep all of a choice's weights resident.

        The sum of the stored weights, the scales that are made from quantized ones, and room to make the largest layer.
        """
        largest = max((layout.size for layout in self.bare.layouts.values()), default=0)
        return made.output_bytes + made.scales_made + largest


def _within(
    limits: _Limits, choices: BitChoices, found: Sequence[SchemeGroup], allowed: Sequence[str | None]
) -> BitChoice | None:
    """The best choice among some schemes that keeps the limits; None if there is none."""
    fitted = limits.options.fit_scales
    offers = [[Offer(group.nbytes(c), group.loss(c, fitted=fitted)) for c in allowed] for group in found]
    budget = sum(max(offer.nbytes for offer in one) for one in offers)
    while (taken := allocate(offers, budget)) is not None:
        made = choices.at([allowed[offer] for offer in taken])
        over = limits.over(made)
        if over <= 0:
            return made
        # what is over falls by no more than the tensors do, so nothing that would fit is passed over
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
    """For what a mixed split was chosen, where the caller says something else now; None where nothing differs."""
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
    """What tensors of one role have at one scheme: how many, their elements, and bytes in the layer files."""

    role: str
    scheme: str | None
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AllocationSummary:
    """A choice, summed up.

    Attributes:
        shares: by role and scheme, in the order of COMPRESSIONS within a role.
        bits: a weight, on the average over what compression touches.
        loss: expected, relative to 4bit for all tensors with bitsandbytes' own scales.
        uniform: the same of each scheme for all, by scheme.
        max_disk, memory: the limits it keeps, bytes; None where there was none.
        fitted: whether scales fit their blocks, in `loss` and in `uniform`.
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
    """What a plan at "auto" chose; None at other compressions.

    Args:
        plan: any.
        fitted: whether its scales fit their blocks, or are to.
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
