"""A plan, and its text: its values, a line for every route and for every compression, and the call that fits. Decides
nothing.

The layout is for 80 columns. A terminal gets colours and wrapped lines; elsewhere each is one plain line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rabbitllm.base.options import BIG_LAYER_BYTES
from rabbitllm.base.terminal import (
    Printed,
    counted,
    duration,
    harmless,
    large,
    listed,
    put,
    put_fact,
    size,
    size_rounded_up,
    speed,
    text_on,
)
from rabbitllm.engine.placement import Tier
from rabbitllm.errors import OptionError
from rabbitllm.estimate.cost_model import DRAFTED, PROMPT_TOKENS, Experts, GenerationEstimate
from rabbitllm.estimate.split_estimate import (
    Anatomy,
    CompressionEstimate,
    Rate,
    Route,
    SplitEstimate,
    TensorGroup,
    best,
    missing_bytes,
    smallest,
)
from rabbitllm.splitter.bit_allocation import AllocationSummary
from rabbitllm.store.manifest import AUTO, SPLITS

# The bit allocation of "auto": a line for each role, and the expected loss.

_ROLE_WIDTH = 22
_CELL_WIDTH = 11


def show_allocation(console: Console, allocation: AllocationSummary, *, is_whole: bool = True) -> None:
    """Print the expected loss next to those of uniform schemes, and the bytes of each role at each number of bits."""
    schemes = sorted({share.scheme for share in allocation.shares}, key=SPLITS.index)
    sizes = {(share.role, share.scheme): share.nbytes for share in allocation.shares}
    if is_whole:
        heads = "".join(f"{scheme or 'as is':>{_CELL_WIDTH}}" for scheme in schemes)
        put(console, Text(f"  {'bits chosen':<{_ROLE_WIDTH}}{heads}", "dim"))
        for role in dict.fromkeys(share.role for share in allocation.shares):
            cells = "".join(f"{_cell(sizes.get((role, scheme))):>{_CELL_WIDTH}}" for scheme in schemes)
            put(console, Text(f"  {role:<{_ROLE_WIDTH}}{cells}"))
    compared = allocation.compared
    uniform = {scheme: loss for scheme, loss in allocation.uniform.items() if allocation.fitted or scheme != compared}
    losses = ", ".join(f"{_times(loss)} at {scheme}" for scheme, loss in uniform.items())
    line = (
        f"  {allocation.bits:.2f} bits per weight; expected loss {_times(allocation.loss)} of {compared}'s ({losses})"
    )
    put(console, Text(line))
    if allocation.fitted:
        put(console, Text("  all with fitted scales, except the 4bit of the comparison", "dim"))
    put(console, Text(f"  {_limits(allocation)}", "dim"))


def _cell(nbytes: int | None) -> str:
    return "-" if nbytes is None else size(nbytes) if nbytes >= 10_000_000 else f"{nbytes / 1e6:.2f} MB"


def _times(loss: float) -> str:
    return "none" if loss == 0 else f"{loss:.2g}"


def _limits(allocation: AllocationSummary) -> str:
    if allocation.memory is not None:
        return f"all weights stay in {size(allocation.memory)} of memory; a token reads nothing from the disk"
    place = "max_disk" if allocation.max_disk is not None else "the free disk"
    return f"too large for memory at 4 bits; the limit is {place}, with at most 8 bits per weight"


@dataclass(frozen=True, slots=True)
class Plan(SplitEstimate, Printed):
    """The complete estimate of a split, and of generation after it; prints as `rabbitllm plan` does.

    Attributes:
        devices: devices that would compute.
        prompt_tokens: length of the prompt before the first token, in tokens.
        generations: one for each compression, in the order of `outlooks`.
    """

    devices: tuple[str, ...] = ()
    prompt_tokens: int = PROMPT_TOKENS
    generations: tuple[GenerationEstimate, ...] = ()

    def __str__(self) -> str:
        return text_on(lambda console: show(self, console))


GROUPS_SHOWN = 3
_ROUTES: Mapping[str, str] = {
    "standard": "standard",
    "sequential_ahead": "sequential, ahead",
    "sequential_file": "sequential, file",
    "sequential_stream": "sequential, stream",
}
_CONDITIONS: Mapping[str, str] = {
    "standard": "",
    "sequential": " if each shard is deleted after use",
    "sequential_ahead": " if each shard is deleted after use, with one shard downloaded ahead",
    "sequential_file": " if each shard is deleted after use, before the next download",
    "sequential_stream": " if shards are streamed into the layer files and never written to the disk",
}
_HEADS: Mapping[bool | None, str] = {
    True: "tied: the output head uses the input embedding",
    False: "not tied: the output head has separate weights",
    None: "no output head, and the config does not tie it to the embedding",
}

_LEGEND = "on the disk: growth of used space at its peak; written: what max_disk limits"


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    put(console, Text(_title(plan), "bold"))
    for warning in plan.warnings:
        put(console, Text(f"warning: {warning}", "yellow"))
    console.print()
    for name, value in _values(plan):
        put_fact(console, name, value)
    console.print()
    if any(estimate.routes for estimate in plan.outlooks):
        put(console, Text(_columns("", "on the disk", "written") + f"{'time':>31}", "dim"))
    for estimate in plan.outlooks:
        _show_estimate(console, plan, estimate)
    if any(estimate.routes for estimate in plan.outlooks):
        put(console, Text(_LEGEND, "dim"))
    console.print()
    show_generations(console, plan)
    _show_choice(console, plan)
    rates = ", ".join(_basis(plan))
    for basis in filter(None, (rates and f"Estimated times, without writing: {rates}.", generation_basis(plan))):
        console.print()
        put(console, Text(basis, "dim"))


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw the placement of the layers, at the compression of the proposed call, else at the requested one.

    Raises:
        OptionError: there is no generation estimate at that compression; or as `Placement.plot`.
    """
    chosen = plan.choice.compression if plan.choice is not None else plan.compression
    drawn = next((generation for generation in plan.generations if generation.compression == chosen), None)
    if drawn is None or drawn.placement is None:
        why = drawn.obstacle if drawn is not None and drawn.obstacle else "the model has no split at this compression"
        raise OptionError(f"There is no placement to plot: {why}.", "Remove --plot, or use another compression.")
    title = f"{_title(plan)}, {chosen or 'uncompressed'}: placement of the weights"
    note = f"{moment(drawn.token_seconds)} per token, {moment(drawn.first_token_seconds)} for the first"
    drawn.placement.plot(path, f"{title}\n{note}")


def _title(plan: SplitEstimate) -> str:
    name = plan.label if plan.kind == "split" else plan.source
    return name if plan.commit is None else f"{name} at commit {plan.commit}"


def _values(plan: SplitEstimate) -> Iterator[tuple[str, str]]:
    if plan.anatomy is not None:
        yield from _of_anatomy(plan.anatomy)
    requested = plan.at(plan.compression)
    if requested is not None and (big := requested.layers_above_10_gb):
        above = f"{len(big)} above {size(BIG_LAYER_BYTES)} ({listed(big, GROUPS_SHOWN)})"
        yield "large layers", f"{above}; streaming a layer needs memory of its size"
    for disk in plan.disks:
        reserved = f", {size(plan.min_free_disk)} of it reserved (min_free_disk)" if plan.min_free_disk else ""
        yield "free disk", f"{size(disk.free_bytes)} at {disk.folder}{reserved}"
    if plan.max_disk is not None:
        yield "max_disk", f"{size(plan.max_disk)} for all files of the split"
    yield "memory", f"splitting takes at most {size(plan.memory_bytes)}"


def _of_anatomy(anatomy: Anatomy) -> Iterator[tuple[str, str]]:
    shards = counted(anatomy.shards, "shard")
    yield "checkpoint", f"{size(anatomy.total_bytes)} in {shards}, the largest {size(anatomy.largest_shard_bytes)}"
    yield "parameters", f"{large(anatomy.parameters)} in {counted(anatomy.tensors, 'tensor')}"
    largest = f"the largest {anatomy.largest_layer} with {size(anatomy.largest_layer_bytes)}"
    spread = f"{anatomy.layers_over_shards} in several shards (at most {anatomy.most_shards_of_a_layer})"
    yield "layer files", f"{anatomy.layers:,}, {largest}" + (f"; {spread}" if anatomy.layers_over_shards else "")
    yield "embeddings", _HEADS[anatomy.tied_embeddings]
    if anatomy.quantized is not None:
        yield "quantized", f"{anatomy.quantized}, as published; kept in this form"
    elif anatomy.never_compressed:
        yield "kept as is", f"{_groups(anatomy.never_compressed)}, at any compression"
    if anatomy.not_floating:
        yield "not floating", _groups(anatomy.not_floating)
    odd = [(anatomy.empty, "empty tensor"), (anatomy.scalars, "scalar")]
    if any(count for count, _ in odd):
        yield "odd shapes", ", ".join(counted(count, noun) for count, noun in odd if count)


def _groups(groups: Iterable[TensorGroup]) -> str:
    tensor_groups = list(groups)
    shown = [f"{group.what} ({counted(group.count, 'tensor')}, {size(group.total_bytes)})" for group in tensor_groups]
    more = sum(group.count for group in tensor_groups[GROUPS_SHOWN:])
    return "; ".join(shown[:GROUPS_SHOWN] + ([f"{more:,} of other kinds"] if more else []))


def _columns(route: str, disk: str, created: str) -> str:
    return f"  {route:<19}{disk:>13}{created:>13}  "


def _show_estimate(console: Console, plan: SplitEstimate, estimate: CompressionEstimate) -> None:
    head = Text(plan.called(estimate.compression), "bold")
    if estimate.output_bytes is not None:
        head.append(f", {size(estimate.output_bytes)} of layer files", "not bold")
    if estimate.finished and estimate.finished_at is not None:
        head.append(f": finished {estimate.finished_at[:16].replace('T', ' ')} in {estimate.folder}", "not bold green")
    elif estimate.state == "unfinished":
        state = f": unfinished, {estimate.shards_used} of {estimate.shards} shards used; the rest takes"
        head.append(state, "not bold yellow")
    put(console, head, 2)
    if estimate.obstacle is not None:
        put(console, Text(f"  not possible: {estimate.obstacle}", "red"))
    elif estimate.mixture is not None:
        show_allocation(console, estimate.mixture, is_whole=plan.compression == AUTO)
    for route in estimate.routes:
        put(console, _row(estimate, route))


def _row(estimate: CompressionEstimate, route: Route) -> Text:
    is_limited = route.lacking is not None and route.lacking.limited  # by max_disk, rather than the free disk
    lacks = f"no, {size_rounded_up(missing_bytes(route))} {'over' if is_limited else 'short'}"
    verdict, style = ("fits", "green") if route.fits else (lacks, "red")
    time = "?" if route.seconds is None else "under 1 s" if route.seconds < 1 else duration(route.seconds)
    lead = _columns(
        _route_name(estimate, route), size_rounded_up(route.disk_bytes), size_rounded_up(route.created_bytes)
    )
    return Text.assemble(lead, (f"{verdict:<20}", style), f"{time:>11}")


def _route_name(estimate: CompressionEstimate, route: Route) -> str:
    return "sequential" if _is_alone(estimate, route.name) else _ROUTES[route.name]


def _is_alone(estimate: CompressionEstimate, route: str) -> bool:
    """Whether this is the only sequential route, as it is if nothing is fetched."""
    return route == "sequential_file" and len(estimate.routes) == 2


def _show_choice(console: Console, plan: Plan) -> None:
    choice = plan.choice
    if choice is None:
        put(console, Text(_nothing_fits(plan), "bold red"))
        return
    requested, chosen = plan.at(plan.compression), plan.at(choice.compression)
    assert chosen is not None
    if requested is not None and requested is not chosen:
        why = "fits on no route" if requested.routes else "is not possible"
        if requested.compression in _too_heavy(plan):
            why = "needs more memory than this process may use"
        put(console, Text(f"{_capitalised(plan, requested)} {why}.", "bold red"))
    if choice.route is None:
        verdict = "is finished. To load it"
    else:
        verdict = f"fits{_CONDITIONS['sequential' if _is_alone(chosen, choice.route) else choice.route]}"
    put(console, Text(f"{_capitalised(plan, chosen)} {verdict}:", "bold green"))
    if plan.kind == "local" and choice.route not in (None, "standard"):
        put(console, Text(f"This call deletes the shards in {plan.label}, one after the other.", "yellow"))
    console.print()
    console.print(Text(choice.call), soft_wrap=True)


def _capitalised(plan: SplitEstimate, estimate: CompressionEstimate) -> str:
    name = plan.called(estimate.compression)
    return name if "_" in name else name[0].upper() + name[1:]  # q4_k is written in small letters


def _too_heavy(plan: Plan) -> dict[str | None, str]:
    """Return why loading would be refused for lack of memory, by compression."""
    problems = {generation.compression: generation.too_little_memory for generation in plan.generations}
    return {compression: problem for compression, problem in problems.items() if problem is not None}


def _nothing_fits(plan: Plan) -> str:
    too_heavy = _too_heavy(plan)
    if best([outlook for outlook in plan.outlooks if outlook.compression in too_heavy], plan.compression) is not None:
        return f"It fits on the disk, but not in memory. {[*too_heavy.values()][-1]}"
    least = smallest(plan.outlooks)
    if least is None:
        return "This model cannot be split or loaded here."
    estimate, route = least
    assert route.lacking is not None
    lacking = route.lacking
    return (
        f"Nothing fits. The smallest is {plan.called(estimate.compression)}, {_route_name(estimate, route)}: it needs "
        f"{lacking.needed} at its peak; {lacking.found}. {lacking.advice}, or use a "
        "folder on another disk (--dir, layer_shards_saving_path)."
    )


def _basis(plan: SplitEstimate) -> Iterator[str]:
    """Yield the rates that the times of a split are based on."""
    rates = plan.rates
    if rates.fetch is not None:
        yield f"{_rate(rates.fetch)} from the hub"
    if rates.read is not None:
        yield f"{_rate(rates.read)} from this disk"
    if rates.quantize:
        speeds = " and ".join(f"{scheme} {speed(rate.bytes_per_second)}" for scheme, rate in rates.quantize.items())
        yield f"quantizing {speeds} (measured on {rates.threads} CPU threads)"


def _rate(rate: Rate) -> str:
    how = f"measured over {size(rate.measured_bytes)}" if rate.measured_bytes else "as given"
    return f"{speed(rate.bytes_per_second)} ({how})"


# The generation estimate: a line for every compression.

NAME_WIDTH = 19
"""Width of the first column."""


def show_generations(console: Console, plan: Plan) -> None:
    """Print a line per compression; an obstacle that all of them share is printed once."""
    loadable = [g for g in plan.generations if g.obstacle is None]
    _put_obstacles(console, "speed estimate", {plan.called(g.compression): g.obstacle for g in plan.generations})
    if loadable:
        title = f"generating on {', '.join(plan.devices)}"
        if len(title) >= NAME_WIDTH:
            put(console, Text(title, "dim"))
            title = ""
        put(console, Text(_generation_columns(title, "in memory", "read/token", "first token", "a token"), "dim"))
        for generation in loadable:
            _show(console, plan, generation)
        for problem in dict.fromkeys(g.too_little_memory for g in loadable if g.too_little_memory is not None):
            refused = ", ".join(plan.called(g.compression) for g in loadable if g.too_little_memory == problem)
            put(console, Text(f"{refused} cannot be loaded here: {problem}", "yellow"))
        legend = f"first token: {plan.prompt_tokens}-token prompt, cold page cache"
        put(console, Text(legend, "dim"))
        for line in _legend_of_experts([experts for generation in loadable for experts in generation.experts]):
            put(console, Text(line, "dim"))
        _show_drafts(console, plan, [g for g in loadable if g.draft is not None and g.too_little_memory is None])
    if plan.generations:
        console.print()


def _put_obstacles(console: Console, lacking: str, obstacles: Mapping[str, str | None]) -> None:
    """Print each obstacle once, with the compressions that have it unless all do."""
    for obstacle in dict.fromkeys(filter(None, obstacles.values())):
        which = [name for name, other in obstacles.items() if other == obstacle]
        of = "" if len(which) == len(obstacles) else f" of {', '.join(which)}"
        put(console, Text(f"no {lacking}{of}: {obstacle}", "yellow"))


def _show_drafts(console: Console, plan: Plan, generations: Sequence[GenerationEstimate]) -> None:
    """Print two lines per compression: seconds a token, and how many tokens a pass it takes to be faster."""
    named = {plan.called(g.compression): g.draft for g in generations if g.draft is not None}
    usable = {name: draft for name, draft in named.items() if draft.obstacle is None}
    _put_obstacles(console, "estimate with this draft", {name: draft.obstacle for name, draft in named.items()})
    if not usable:
        return
    console.print()
    names = " or ".join(dict.fromkeys(harmless(draft.name) for draft in usable.values()))
    put(console, Text(f"with the draft {names}, if half of the drafted tokens are right (assumed)", "dim"))
    put(console, Text(_draft_columns("", "memory", [f"{tokens:g} a pass" for tokens in DRAFTED]), "dim"))
    for name, draft in usable.items():
        times = [moment(drafted_pass.token_seconds) for drafted_pass in draft.passes] or ["?"] * len(DRAFTED)
        put(console, Text(_draft_columns(f"  {name}", size(draft.held_bytes) if draft.held_bytes else "none", times)))
        if draft.passes:
            needed = [f"{drafted_pass.break_even:.2f}" for drafted_pass in draft.passes]
            put(console, Text(_draft_columns("    pays above", "", needed), "dim"))
        if draft.name == "self" and draft.held_bytes:
            put(console, Text(f"    its first start adds {size(draft.held_bytes)} of copies to the split", "dim"))
    drafted = ", ".join(map(str, DRAFTED.values()))
    put(console, Text(f"a pass: tokens that it brings, {drafted} being drafted; pays above: so many", "dim"))


def _draft_columns(name: str, memory: str, cells: Sequence[str]) -> str:
    return f"{name:<{NAME_WIDTH}}{memory:>12}" + "".join(f"{cell:>12}" for cell in cells)


def _generation_columns(name: str, stays: str, read: str, first: str, token: str) -> str:
    return f"{name:<{NAME_WIDTH}}{stays:>12}{read:>21}{first:>14}{token:>12}"


def _show(console: Console, plan: Plan, generation: GenerationEstimate) -> None:
    source = "disk" if generation.from_the_disk else "cached"
    read = f"{size(generation.read_bytes)}, {source}" if generation.read_bytes else "nothing"
    times = (moment(generation.first_token_seconds), moment(generation.token_seconds))
    name = plan.called(generation.compression)
    put(console, Text(_generation_columns(f"  {name}", size(generation.stays_bytes), read, *times)))
    if generation.copied_bytes:
        copied = f"    each token copies {size(generation.copied_bytes)} from host memory"
        put(console, Text(copied, "dim"))
    for line in _of_experts(generation):
        put(console, Text(f"    {line}", "dim"))
    if len(plan.devices) > 1:
        sums = dict.fromkeys(plan.devices, 0)
        for content in generation.placed:
            sums[content.device] += content.stored_bytes if content.tier in ("resident", "packed") else 0
        for experts in generation.experts:
            sums[experts.device] += experts.kept_bytes
        put(console, Text("    " + ", ".join(f"{size(nbytes)} on {device}" for device, nbytes in sums.items()), "dim"))


def _of_experts(generation: GenerationEstimate) -> Iterator[str]:
    """Describe the kept part of streamed experts, and a token that finds all of its experts there."""
    coming = [experts for experts in generation.experts if experts.tier == Tier.ROUTED.value]
    if not coming:
        return
    kept, pinned, stored, used = (
        sum(getattr(e, name) for e in coming) for name in ("kept_bytes", "host_bytes", "stored_bytes", "used_bytes")
    )
    places = size(kept) + (f" and {size(pinned)} in pinned RAM" if pinned else "")
    yield f"kept: {places}, of {size(stored)} of experts"
    near = f"; {moment(generation.found_token_seconds)} if all of these are kept" if kept else ""
    yield f"a token uses {size(used)} of experts{near}"


def _legend_of_experts(groups: Sequence[Experts]) -> Iterator[str]:
    """Yield the assumptions about experts, in lines of 80 columns."""
    if any(experts.tier == Tier.ROUTED.value for experts in groups):
        yield "experts: estimated for uniform use, the worst case; with 12 to 54 % of experts"
        yield "kept, published measurements found 44 to 91 % of the used ones in memory"
    if any(experts.tier != Tier.ROUTED.value for experts in groups):
        yield "resident experts: after the first use of each, which reads it from the disk"


def moment(seconds: float | None) -> str:
    """Format the time of a token: milliseconds below a second, minutes from one on."""
    if seconds is None:
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min"


def generation_basis(plan: Plan) -> str | None:
    """Return the measured rates that the times of tokens are based on, as text; None if there are none."""
    by_name: dict[str, float] = {}
    for generation in plan.generations:
        for entry in generation.speeds:
            by_name.setdefault(entry.what, entry.bytes_per_second)
    if not by_name:
        return None
    rates = ", ".join(f"{what} {speed(rate)}" for what, rate in by_name.items())
    return f"Estimated seconds per token, from measurements on this machine: {rates}."
