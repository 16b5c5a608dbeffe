"""A profile as text: the stages, the passes, and the slowest layers. Decides nothing.

Laid out for 80 columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rabbitllm.base.terminal import amount, speed
from rabbitllm.telemetry.passes import PROMPT, Pass, PassSums, median_of
from rabbitllm.telemetry.totals import CALLER_STAGES, EXPERT_TIERS, EXPERTS_READ, NOTHING, Total, limit_of

SLOWEST = 3
_NAMES = {True: "first token", False: "further tokens"}


def stage_table(stages: Mapping[str, Total], title: str) -> list[str]:
    """A line for each stage, with the bottleneck marked and named."""
    limit = limit_of(stages)
    rows = [("stage", "busy s", "threads", "core s", "records", "mean ms", "rate", "")]
    for name, total in stages.items():
        if name in EXPERT_TIERS:
            continue  # counts, which have their own table
        rate = speed(total.nbytes / total.busy_seconds) if total.nbytes and total.seconds else ""
        mark = "<-- BOTTLENECK" if name == limit else ""
        mean = total.seconds / total.count * 1e3
        cores = f"{total.cpu_seconds:.3f}" if total.cpu_seconds else ""
        busy, threads = f"{total.busy_seconds:.3f}", str(total.threads)
        rows.append((name, busy, threads, cores, str(total.count), f"{mean:.2f}", rate, mark))
    lines = [title] if title else []
    lines += _aligned(rows)
    if limit is not None:
        lines.append(f"Bottleneck: {limit} ({stages[limit].busy_seconds:.3f} s)")
    return lines


def pass_table(sums: Mapping[str, PassSums], passes: Sequence[Pass]) -> list[str]:
    """A line for prefill passes and one for decode passes.

    Args:
        sums: sums of all passes.
        passes: those kept individually, for the median.
    """
    rows = [("passes", "n", "median s", "tokens", "made", "read", "copied", "overlap", "limit")]
    for kind, total in sums.items():
        made = total.made_per_pass
        rows.append(
            (
                _NAMES[kind == PROMPT],
                str(total.passes),
                f"{median_of(passes, kind):.3f}",
                f"{total.tokens / total.passes:.1f}",
                "" if made is None else f"{made:.2f}",
                amount(total.disk_bytes / total.passes),
                amount(total.copied_bytes / total.passes),
                f"{total.overlap:.0%}",
                total.bottleneck or "",
            )
        )
    return _aligned(rows) if sums else []


def expert_table(sums: Mapping[str, PassSums]) -> list[str]:
    """Experts used per pass of each kind, and their tiers; empty for a model without experts."""
    where = (tier.removeprefix("experts ") for tier in EXPERT_TIERS)
    rows: list[Sequence[str]] = [("experts", "used a pass", *where, "")]
    for kind, total in sums.items():
        found = [total.stages.get(tier, NOTHING) for tier in EXPERT_TIERS]
        used = sum(one.count for one in found)
        if used:
            shares = [f"{one.count / used:.0%}" for one in found]
            read = amount(found[EXPERT_TIERS.index(EXPERTS_READ)].nbytes / total.passes)
            rows.append((_NAMES[kind == PROMPT], f"{used / total.passes:.1f}", *shares, read))
    return _aligned(rows) if rows[1:] else []


def slowest_layers(layers: Mapping[str, Mapping[str, Total]], count: int = SLOWEST) -> list[str]:
    """The layers on which a caller spends the most time in the mean pass, by stage."""
    rows: list[Sequence[str]] = [("slowest layers", "mean ms", *CALLER_STAGES)]
    spent = {layer: [_mean_ms(stages.get(stage)) for stage in CALLER_STAGES] for layer, stages in layers.items()}
    for layer in sorted(spent, key=lambda layer: -sum(spent[layer]))[:count]:
        rows.append((layer, f"{sum(spent[layer]):.2f}", *(f"{mean:.2f}" for mean in spent[layer])))
    return _aligned(rows)


def _mean_ms(total: Total | None) -> float:
    return total.seconds / total.count * 1e3 if total is not None else 0.0


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, with the first and last column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells, row[-1]]).rstrip())
    return lines
