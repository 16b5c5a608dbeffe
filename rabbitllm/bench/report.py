"""A measurement as text, laid out for 80 columns. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import counted, harmless, put, put_fact, size
from rabbitllm.bench.measure import Measured
from rabbitllm.telemetry.passes import FURTHER, PassSums
from rabbitllm.telemetry.totals import COMPUTE, DEQUANTIZE, NOTHING, READ, READ_WAIT, UPLOAD_WAIT, copies_of

BAR = 36
"""Columns of a full bar."""
_STYLES = {READ_WAIT: "blue", UPLOAD_WAIT: "cyan", DEQUANTIZE: "magenta", COMPUTE: "yellow"}
_LABELS = {READ_WAIT: "wait for weights", UPLOAD_WAIT: UPLOAD_WAIT, DEQUANTIZE: "dequantize", COMPUTE: "compute"}


def show(measured: Measured, console: Console) -> None:
    """Print a measurement."""
    put(console, Text(headline(measured), "bold"))
    console.print()
    for name, value in _facts(measured):
        put_fact(console, name, value)
    console.print()
    put(console, Text("where the time of a further pass goes (profiler on)", "dim"))
    for label, seconds, share, style in shares(measured.sums[FURTHER]):
        bar = "█" * round(share * BAR)
        row = Text.assemble(f"  {label:<18}{seconds * 1e3:>10,.2f} ms {share:>5.0%}  ", (bar, style))
        console.print(row, soft_wrap=True)
    console.print()
    put(console, Text("where the weights are", "dim"))
    for line in str(measured.placement).splitlines():
        console.print(Text(f"  {line}"), soft_wrap=True)


def headline(measured: Measured) -> str:
    """Return the title: the model, its compression or dtype, and its device."""
    how = measured.compression or measured.dtype
    return f"{harmless(measured.name)}, {how}, on {measured.device}"


def summary(measured: Measured) -> str:
    """Return the main figures in one line, for a picture."""
    further = measured.sums[FURTHER]
    rate = f"{measured.further:.3g} s a token, {measured.tokens_per_second:.3g} tokens a second"
    return f"{rate}, overlap {further.overlap:.0%}, limit: {further.bottleneck}"


def shares(further: PassSums) -> Iterator[tuple[str, float, float, str]]:
    """Yield (label, mean seconds per pass, share of it, colour) of the calling thread's stages; the rest comes last."""
    mean, left = further.wall / further.passes, further.wall
    for stage, label in _LABELS.items():
        total = further.stages.get(stage, NOTHING)
        if total.count:
            left -= total.busy_seconds
            yield label, total.busy_seconds / further.passes, total.busy_seconds / further.wall, _STYLES[stage]
    left = max(left, 0.0) / further.passes
    yield "between layers", left, left / mean, "white"


def _facts(measured: Measured) -> Iterator[tuple[str, str]]:
    request, further = measured.request, measured.sums[FURTHER]
    sequences = "" if request.batch == 1 else f" in each of {counted(request.batch, 'sequence')}"
    prompt = counted(request.prompt_tokens, "token")
    yield "generated", f"{counted(request.tokens, 'token')} after {prompt}{sequences}; medians of {_turns(measured)}"
    yield "load", f"{measured.load:.2f} s, with what had to be split first"
    yield "first token", f"{measured.first:.3f} s; the very first one after loading {measured.first_after_load:.3f} s"
    times = sorted(turn.further for turn in measured.turns)
    spread = f" ({times[0]:.4f} to {times[-1]:.4f})" if len(times) > 1 else ""
    yield "each further", f"{measured.further:.4f} s{spread}, {measured.tokens_per_second:,.2f} tokens a second"
    yield "bytes a token", ", ".join(_bytes(measured, further))
    yield "overlap", f"{further.overlap:.0%} (the longer of moving and computing, of the wall time)"
    yield "limit", further.bottleneck or "none"
    if measured.peak is not None:
        yield "peak memory", f"{size(measured.peak)}, pages of mapped files included"


def _turns(measured: Measured) -> str:
    return counted(len(measured.turns), "turn")


def _bytes(measured: Measured, further: PassSums) -> Iterator[str]:
    read, copied = further.stages.get(READ, NOTHING), copies_of(further.stages)
    if read.nbytes:
        yield f"{size(round(measured.per_token(read.nbytes)))} from the disk at {_rate(read.nbytes, read.busy_seconds)}"
    if copied.nbytes:
        yield f"{size(round(measured.per_token(copied.nbytes)))} copied at {_rate(copied.nbytes, copied.busy_seconds)}"
    for where, nbytes in measured.in_place.items():
        yield f"{size(round(nbytes / measured.request.batch))} in memory ({where})"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{size(round(nbytes / seconds))}/s"
