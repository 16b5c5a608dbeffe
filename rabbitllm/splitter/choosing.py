"""Chooses bits for each tensor of a split at "auto", from headers alone: the least expected loss in the budgets.

The disk is a limit that must be kept; whether a plan keeps it is what `space.shortage` says, which decides for every
split. Memory is a wish: if the whole model can stay in it at some choice, only such are made, since what stays need not
be read anew for each token. If it cannot even at the fewest bits, every bit more costs time with every token; then only
the disk limits, and beyond 8bit nothing is taken but where the caller has said what the disk may hold.

Where 8bit fits for all, nothing gets less unless a quarter less loss is expected of it: what is expected is not known
better than that, and on one trained model, where a few hundredths less were expected, it was a quarter more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rabbitllm.errors import NotEnoughSpaceException
from rabbitllm.layers.chosen import AUTO, Chosen
from rabbitllm.layers.compression import COMPRESSIONS, DOUBLE, NF4_BLOCK, SCALE_BYTES, scheme_of
from rabbitllm.options import SplitOptions
from rabbitllm.splitter.allocation import Offer, allocate
from rabbitllm.splitter.plan import SplitPlan, gib, recompressed
from rabbitllm.splitter.sensitivity import Group, groups
from rabbitllm.splitter.space import Ground, candidates, shortage

WORTH_LESS_BITS = 0.75
"""Of the loss that is expected where no tensor has less than 8bit: what must be expected of fewer bits for some."""


def with_choice(
    plan: SplitPlan, ground: Ground, options: SplitOptions, experts_a_token: int | None = None
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
    # at 4bit-double scales wait beside the layer files, so its peak may be above that of 4bit, and both are tried
    fewest = {scheme: _at(bare, found, [scheme] * len(found), options.max_disk) for scheme in ("4bit", DOUBLE)}
    lacking = {scheme: _disk_shortage(least, ground, options) for scheme, least in fewest.items()}
    if all(lacking.values()):
        raise _nothing_fits(fewest[min(lacking, key=lambda scheme: lacking[scheme])], ground, options)
    memory, schemes = None, COMPRESSIONS
    if options.memory is not None:
        fitting = (least for scheme, least in fewest.items() if not lacking[scheme])
        if min(resident_bytes(least, bare) for least in fitting) <= options.memory:
            memory = options.memory
        elif options.max_disk is None:
            schemes = tuple(scheme for scheme in COMPRESSIONS if scheme is not None)
    limits = _Limits(bare, ground, options, memory)
    ways = [schemes, tuple(scheme for scheme in schemes if scheme != DOUBLE)]
    fits = [made for allowed in ways if (made := _within(limits, found, allowed)) is not None]
    fitted = options.fit_scales
    best = min(fits, key=lambda made: (_loss(found, made, fitted), made.output_bytes))
    if limits.over(_at(bare, found, ["8bit"] * len(found), options.max_disk, memory)) <= 0:
        sure = _within(limits, found, schemes[: schemes.index("8bit") + 1])
        if sure is not None and _loss(found, best, fitted) > WORTH_LESS_BITS * _loss(found, sure, fitted):
            return sure
    return best


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a choice has to keep to; `bare` is the plan with all tensors as they are."""

    bare: SplitPlan
    ground: Ground
    options: SplitOptions
    memory: int | None

    def over(self, made: SplitPlan) -> int:
        """Bytes by which a choice is too large."""
        over = _disk_shortage(made, self.ground, self.options)
        return over if self.memory is None else max(over, resident_bytes(made, self.bare) - self.memory)


def _within(limits: _Limits, found: Sequence[Group], allowed: Sequence[str | None]) -> SplitPlan | None:
    """The best choice among some schemes that keeps the limits; None if there is none."""
    fitted = limits.options.fit_scales
    offers = [[Offer(group.nbytes(c), group.loss(c, fitted=fitted)) for c in allowed] for group in found]
    budget = sum(max(offer.nbytes for offer in one) for one in offers)
    while (taken := allocate(offers, budget)) is not None:
        schemes = [allowed[offer] for offer in taken]
        made = _at(limits.bare, found, schemes, limits.options.max_disk, limits.memory)
        over = limits.over(made)
        if over <= 0:
            return made
        # what is over falls by no more than the tensors do, so nothing that would fit is passed over
        budget = sum(one[offer].nbytes for one, offer in zip(offers, taken, strict=True)) - over
    return None


def _at(
    bare: SplitPlan,
    found: Sequence[Group],
    schemes: Sequence[str | None],
    max_disk: int | None,
    memory: int | None = None,
) -> SplitPlan:
    by_name = {
        spec.name: stored
        for group, scheme in zip(found, schemes, strict=True)
        for spec in group.tensors
        if (stored := scheme_of(spec, scheme)) is not None
    }
    return recompressed(bare, AUTO, Chosen(by_name, max_disk, memory))


def _loss(found: Sequence[Group], plan: SplitPlan, fitted: bool) -> float:
    assert plan.chosen is not None
    schemes = plan.chosen.schemes
    return sum(group.loss(schemes.get(group.tensors[0].name), fitted=fitted) for group in found)


def _nothing_fits(least: SplitPlan, ground: Ground, options: SplitOptions) -> NotEnoughSpaceException:
    short = shortage(least, ground, options, candidates(least, options.shard_transfer)[-1])
    assert short is not None
    if "max_disk" in short.where:
        remedy = f"max_disk={short.need} is the least that would do."
    else:
        remedy = f"Free {gib(short.need - short.have)} there, or name another place with layer_shards_saving_path."
    return NotEnoughSpaceException(
        f"compression='auto' finds no choice of bits for {least.source.name} in {ground.folder}: the fewest need "
        f"{gib(short.need)} at the peak; {gib(short.have)} is {short.where}.",
        remedy,
    )


def other_budget(chosen: Chosen | None, options: SplitOptions) -> str | None:
    """For what a mixed split was chosen, where the caller says something else now; None where nothing differs."""
    if chosen is None:
        return None
    disk = options.max_disk is not None and options.max_disk != chosen.max_disk
    if not disk and not (options.memory_is_said and options.memory != chosen.memory):
        return None
    limits = [("max_disk", chosen.max_disk), ("memory", chosen.memory)]
    said = " and ".join(f"{name} {gib(nbytes)}" for name, nbytes in limits if nbytes is not None)
    return f"for {said}" if said else "for what was free"


def resident_bytes(plan: SplitPlan, bare: SplitPlan) -> int:
    """Memory in which all of a split's weights stay: as they are stored, scales that are made of quantised ones
    beside them, and room to make the largest layer.

    Args:
        plan: the split.
        bare: the same with all tensors as they are.
    """
    of = plan.chosen.schemes.get if plan.chosen is not None else None
    made = 0
    for spec in plan.tensors:
        if (of(spec.name) if of is not None else scheme_of(spec, plan.compression)) == DOUBLE:
            made += math.ceil(spec.elements / NF4_BLOCK) * SCALE_BYTES
    return plan.output_bytes + made + max((layout.size for layout in bare.layouts.values()), default=0)


def _disk_shortage(plan: SplitPlan, ground: Ground, options: SplitOptions) -> int:
    """Bytes that are lacking for a split where its shards arrive in the way that takes least."""
    short = shortage(plan, ground, options, candidates(plan, options.shard_transfer)[-1])
    return short.need - short.have if short is not None else 0


@dataclass(frozen=True, slots=True)
class Share:
    """What tensors of one role have at one scheme: how many, their elements, and bytes in the layer files."""

    role: str
    scheme: str | None
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Mixture:
    """A choice, summed up.

    Attributes:
        shares: by role and scheme, in the order of COMPRESSIONS within a role.
        bits: a weight, on the average over what compression touches.
        loss: expected, relative to 4bit for all tensors with bitsandbytes' own scales.
        uniform: the same of each scheme for all, by scheme.
        max_disk, memory: the limits it keeps, bytes; None where there was none.
        fitted: whether scales fit their blocks, in `loss` and in `uniform`.
    """

    shares: tuple[Share, ...]
    bits: float
    loss: float
    uniform: Mapping[str, float]
    max_disk: int | None
    memory: int | None
    fitted: bool = False


def mixture_of(plan: SplitPlan, *, fitted: bool = False, experts_a_token: int | None = None) -> Mixture | None:
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
    return Mixture(
        tuple(Share(role, scheme, *sums[role, scheme]) for role, scheme in ordered),
        8 * sum(entry[2] for entry in sums.values()) / elements,
        _loss(found, plan, fitted) / base,
        {scheme: loss / base for scheme, loss in losses.items()},
        plan.chosen.max_disk,
        plan.chosen.memory,
        fitted,
    )
