"""Which bits "auto" chose, as text for people: a line for each role, and what is expected of it. Decides nothing."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import put, size
from rabbitllm.quant.compression import COMPRESSIONS
from rabbitllm.splitter.choosing import AllocationSummary

_ROLE_WIDTH = 22


def show_allocation(console: Console, mixture: AllocationSummary) -> None:
    """Print the bytes of each role at each number of bits, and the expected loss next to those of uniform schemes."""
    schemes = [scheme for scheme in COMPRESSIONS if any(share.scheme == scheme for share in mixture.shares)]
    heads = "".join(f"{scheme or 'as is':>13}" for scheme in schemes)
    put(console, Text(f"  {'bits chosen':<{_ROLE_WIDTH}}{heads}", "dim"))
    found = {(share.role, share.scheme): share.nbytes for share in mixture.shares}
    for role in dict.fromkeys(share.role for share in mixture.shares):
        cells = "".join(f"{size(found[role, s]) if (role, s) in found else '-':>13}" for s in schemes)
        put(console, Text(f"  {role:<{_ROLE_WIDTH}}{cells}"))
    uniform = {scheme: loss for scheme, loss in mixture.uniform.items() if mixture.fitted or scheme != "4bit"}
    others = ", ".join(f"{_times(loss)} at {scheme}" for scheme, loss in uniform.items())
    said = f"  {mixture.bits:.2f} bits a weight; expected loss {_times(mixture.loss)} of 4bit's ({others})"
    put(console, Text(said))
    if mixture.fitted:
        put(console, Text("  all with scales that fit their blocks, but for the 4bit that is compared with", "dim"))
    put(console, Text(f"  {_limits(mixture)}", "dim"))


def _times(loss: float) -> str:
    return "none" if loss == 0 else f"{loss:.2g}"


def _limits(mixture: AllocationSummary) -> str:
    if mixture.memory is not None:
        return f"all of it stays in {size(mixture.memory)} of memory, so nothing is read for a token"
    place = "max_disk" if mixture.max_disk is not None else "the free disk"
    return f"too large for memory at any bits: {place} is the limit, and no more than 8bit is taken of what is free"
