"""Prints a comparison, laid out for 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import Column, counted, harmless, put, put_fact, put_table, size
from rabbitllm.evaluation.quality import Quality, Side

_SIDES = (Column(""), Column("compression"), Column("weights", True), Column("perplexity", True), Column("right", True))


def show(quality: Quality, console: Console) -> None:
    """Print a comparison."""
    summary = quality.summary
    put(console, Text(harmless(quality.model.name), "bold"))
    console.print()
    put_fact(console, "against", harmless(quality.reference.name, 400))
    on = f"{harmless(quality.text, 400)}: {counted(summary.positions, 'token')} in {counted(quality.windows, 'window')}"
    put_fact(console, "on", on if quality.windows != summary.positions else harmless(quality.text, 400))
    put_fact(console, "computed in", quality.dtype)
    console.print()
    rows = [
        _row("reference", quality.reference, summary.reference_perplexity, quality.problems),
        _row("model", quality.model, summary.perplexity, quality.problems),
    ]
    columns = _SIDES if quality.problems else _SIDES[:-1]
    put_table(console, columns, [row[: len(columns)] for row in rows])
    console.print()
    divergence = summary.divergence
    put(console, Text("divergence of the model from the reference, nats a token", "dim"))
    for name, value in (
        ("mean", f"{number(divergence.mean)} ± {number(divergence.error)}"),
        ("median", number(divergence.median)),
        ("99 in 100 below", number(divergence.percentile)),
        ("largest", number(divergence.largest)),
    ):
        console.print(f"  {name:<18}{value}", soft_wrap=True)
    console.print()
    same = f"{summary.agreement:.2%}" if summary.agreement < 1 else "100%"
    put(console, Text(f"The most likely token is the same at {same} of {counted(summary.positions, 'position')}."))


def number(value: float) -> str:
    """A number with four decimals; below 0.01 with three significant digits, below 0.0001 with an exponent."""
    if value == 0:
        return "0"
    return f"{value:.4f}" if value >= 0.01 else f"{value:.2e}" if value < 1e-4 else f"{value:.3g}"


def _row(label: str, side: Side, perplexity: float, problems: int) -> list[str]:
    right = f"{side.right} of {problems}" if side.right is not None else ""
    return [label, side.compression or "none", size(side.nbytes), f"{perplexity:,.4f}", right]
