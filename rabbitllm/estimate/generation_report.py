"""The generation estimate as text: a line for every compression, laid out for 80 columns. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import put, size, speed
from rabbitllm.engine.placement import Tier
from rabbitllm.estimate.generation import Experts, GenerationEstimate, Plan

NAME_WIDTH = 19
"""Width of the first column."""


def show_generations(console: Console, plan: Plan) -> None:
    """Print a line per compression; an obstacle that all of them share is printed once."""
    known = [found for found in plan.generations if found.obstacle is None]
    for obstacle in dict.fromkeys(found.obstacle for found in plan.generations if found.obstacle is not None):
        which = [plan.called(found.compression) for found in plan.generations if found.obstacle == obstacle]
        of = "" if len(which) == len(plan.generations) else f" of {', '.join(which)}"
        put(console, Text(f"no time of a token{of}: {obstacle}", "yellow"))
    if known:
        title = f"generating on {', '.join(plan.devices)}"
        if len(title) >= NAME_WIDTH:
            put(console, Text(title, "dim"))
            title = ""
        put(console, Text(_columns(title, "stays there", "read a token", "first token", "a token"), "dim"))
        for found in known:
            _show(console, plan, found)
        for problem in dict.fromkeys(one.too_little_memory for one in known if one.too_little_memory is not None):
            refused = ", ".join(plan.called(one.compression) for one in known if one.too_little_memory == problem)
            put(console, Text(f"{refused} would be refused here: {problem}", "yellow"))
        legend = f"first token: after a prompt of {plan.prompt_tokens}, nothing of the model in memory before"
        put(console, Text(legend, "dim"))
        for line in _legend_of_experts([own for found in known for own in found.experts]):
            put(console, Text(line, "dim"))
    if plan.generations:
        console.print()


def _columns(name: str, stays: str, read: str, first: str, token: str) -> str:
    return f"{name:<{NAME_WIDTH}}{stays:>12}{read:>21}{first:>14}{token:>12}"


def _show(console: Console, plan: Plan, found: GenerationEstimate) -> None:
    source = "disk" if found.from_the_disk else "cached"
    read = f"{size(found.read_bytes)}, {source}" if found.read_bytes else "nothing"
    times = (moment(found.first_token_seconds), moment(found.token_seconds))
    name = plan.called(found.compression)
    put(console, Text(_columns(f"  {name}", size(found.stays_bytes), read, *times)))
    if found.copied_bytes:
        copied = f"    {size(found.copied_bytes)} are copied from host memory for each token"
        put(console, Text(copied, "dim"))
    for line in _of_experts(found):
        put(console, Text(f"    {line}", "dim"))
    if len(plan.devices) > 1:
        kept = dict.fromkeys(plan.devices, 0)
        for held in found.placed:
            kept[held.device] += held.stored_bytes if held.tier in ("resident", "packed") else 0
        for own in found.experts:
            kept[own.device] += own.kept_bytes
        put(console, Text("    " + ", ".join(f"{size(nbytes)} on {device}" for device, nbytes in kept.items()), "dim"))


def _of_experts(found: GenerationEstimate) -> Iterator[str]:
    """Describe the kept part of streamed experts, and a token that finds all of its experts there."""
    coming = [own for own in found.experts if own.tier == Tier.ROUTED.value]
    if not coming:
        return
    kept, pinned, stored, used = (
        sum(getattr(own, name) for own in coming) for name in ("kept_bytes", "host_bytes", "stored_bytes", "used_bytes")
    )
    places = size(kept) + (f" and {size(pinned)} in page-locked RAM" if pinned else "")
    yield f"of {size(stored)} of experts {places} are kept"
    near = f"; {moment(found.found_token_seconds)} if all of them are there" if kept else ""
    yield f"a token uses {size(used)} of them{near}"


def _legend_of_experts(known: Sequence[Experts]) -> Iterator[str]:
    """Yield the assumptions about experts, in lines of 80 columns."""
    if any(own.tier == Tier.ROUTED.value for own in known):
        yield "experts: as if all were used alike, when most is read; models prefer some, which"
        yield "are kept: others found 44 to 91 % of what they used with 12 to 54 % kept"
    if any(own.tier != Tier.ROUTED.value for own in known):
        yield "experts that stay: after each was used once; before, it is read from the disk"


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
    found: dict[str, float] = {}
    for generation in plan.generations:
        for one in generation.speeds:
            found.setdefault(one.what, one.bytes_per_second)
    if not found:
        return None
    said = ", ".join(f"{what} {speed(rate)}" for what, rate in found.items())
    return f"Tokens are estimates too, from what was measured here just now: {said}."
