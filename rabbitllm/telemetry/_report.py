"""A profile as text for 80 columns, and as a JSON object. Decides nothing.

In JSON all times are seconds, all sizes bytes; fields may be added, none changes meaning.

    title             title of the profile
    bottleneck        the stage that made the caller wait longest, or null
    stages            stage -> total, the busiest first
    layers            layer -> stage -> total, in the order of the first record
    passes            one object for each of the last passes, oldest first
    sums              kind ("prompt", "further") -> sums of all passes, dropped ones too
    in_place_bytes    "device tier" -> stored bytes that each pass uses without moving them
    drafts            what drafts brought, or null
    before            an object like this one for each earlier step: the split, the load

A total: `seconds` of all threads in the stage, `busy_seconds` if they shared it evenly, `count` of records, `bytes`
moved, `cpu_seconds` (core-seconds; 0 where they were not measured), `threads`.

A pass: `number` (from 1), `kind`, `seconds`, `tokens_in` (batch times length), `batch`, `length`, `past` (positions in
the KV cache before it, or null), `tokens_made` (over the batch, or null if unknown, as for the last pass of a
generation), `disk_bytes`, `copied_bytes` (host to device), `overlap` (max(moving, computing) / wall), `bottleneck`,
`stages`. Sums have `passes`, `seconds`, `median_seconds` (of those kept individually), `tokens_in`, `tokens_made`,
`tokens_per_pass` (null if unknown), and the same from `disk_bytes` on.

Drafts: `passes`, and `tokens` that they brought; `tokens_per_pass`; `right_by_depth`, the share of right tokens among
those that were checked at each depth; `seconds` in which tokens were drafted, and `share` of the time of all passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rabbitllm.base.plain_json import fields_of
from rabbitllm.base.terminal import aligned, amount, speed
from rabbitllm.telemetry.passes import (
    CALLER_STAGES,
    EXPERT_TIERS,
    EXPERTS_READ,
    NOTHING,
    PROMPT,
    SHARD_WAIT,
    Drafts,
    Pass,
    PassSums,
    Total,
    limit_of,
    median_of,
    shown,
)

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
        rows.append((shown(name), busy, threads, cores, str(total.count), f"{mean:.2f}", rate, mark))
    lines = [title] if title else []
    lines += _aligned(rows)
    if limit is not None:
        lines.append(f"Bottleneck: {shown(limit)} ({stages[limit].busy_seconds:.3f} s)")
    return lines


def wait_table(layers: Mapping[str, Mapping[str, Total]]) -> list[str]:
    """A line for each layer of a split that waited for a further shard, in their order; empty if none did."""
    rows: list[Sequence[str]] = [("layer", f"{SHARD_WAIT}, s")]
    rows += [(layer, f"{stages[SHARD_WAIT].seconds:.3f}") for layer, stages in layers.items() if SHARD_WAIT in stages]
    return ["", *aligned(rows, left=(0,))] if rows[1:] else []


def pass_table(sums: Mapping[str, PassSums], passes: Sequence[Pass]) -> list[str]:
    """A line for prefill passes and one for decode passes."""
    rows: list[Sequence[str]] = [("passes", "n", "median s", "tokens", "made", "read", "copied", "overlap", "limit")]
    for kind, total in sums.items():
        counts = str(total.passes), f"{median_of(passes, kind):.3f}", f"{total.tokens / total.passes:.1f}"
        made = "" if total.made_per_pass is None else f"{total.made_per_pass:.2f}"
        moved = amount(total.disk_bytes / total.passes), amount(total.copied_bytes / total.passes)
        limit = shown(total.bottleneck or "")
        rows.append((_NAMES[kind == PROMPT], *counts, made, *moved, f"{total.overlap:.0%}", limit))
    return _aligned(rows) if sums else []


def expert_table(sums: Mapping[str, PassSums]) -> list[str]:
    """Experts used per pass of each kind, and their tiers; empty for a model without experts."""
    tiers = (tier.removeprefix("experts ") for tier in EXPERT_TIERS)
    rows: list[Sequence[str]] = [("experts", "used a pass", *tiers, "")]
    for kind, total in sums.items():
        totals = [total.stages.get(tier, NOTHING) for tier in EXPERT_TIERS]
        used = sum(tier.count for tier in totals)
        if used:
            shares = [f"{tier.count / used:.0%}" for tier in totals]
            read = amount(totals[EXPERT_TIERS.index(EXPERTS_READ)].nbytes / total.passes)
            rows.append((_NAMES[kind == PROMPT], f"{used / total.passes:.1f}", *shares, read))
    return _aligned(rows) if rows[1:] else []


def slowest_layers(layers: Mapping[str, Mapping[str, Total]]) -> list[str]:
    """The layers on which a caller spends the most time in the mean pass, by stage."""
    rows: list[Sequence[str]] = [("slowest layers", "mean ms", *map(shown, CALLER_STAGES))]
    spent = {layer: [_mean_ms(stages.get(stage)) for stage in CALLER_STAGES] for layer, stages in layers.items()}
    for layer in sorted(spent, key=lambda layer: -sum(spent[layer]))[:SLOWEST]:
        rows.append((layer, f"{sum(spent[layer]):.2f}", *(f"{mean:.2f}" for mean in spent[layer])))
    return _aligned(rows)


def _mean_ms(total: Total | None) -> float:
    return total.seconds / total.count * 1e3 if total is not None else 0.0


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    return aligned(rows, left=(0, len(rows[0]) - 1))


Totals = Mapping[str, Total]


def drafts_record(drafts: Drafts | None) -> dict[str, Any] | None:
    """See the module."""
    if drafts is None:
        return None
    return {
        **fields_of(drafts, "passes", "tokens", "tokens_per_pass"),
        "right_by_depth": drafts.by_depth,
        **fields_of(drafts, "seconds", "share"),
    }


def totals_record(totals: Totals) -> dict[str, dict[str, float]]:
    return {
        stage: {
            **fields_of(total, "seconds", "busy_seconds", "count"),
            "bytes": total.nbytes,
            **fields_of(total, "cpu_seconds", "threads"),
        }
        for stage, total in totals.items()
    }


def pass_record(step: Pass) -> dict[str, Any]:
    return {
        **fields_of(step, "number", "kind"),
        "seconds": step.wall,
        "tokens_in": step.tokens,
        **fields_of(step.entry, "batch", "length", "past"),
        "tokens_made": step.made,
        **_measured(step),
    }


def sums_record(kind: str, total: PassSums, passes: Sequence[Pass]) -> dict[str, Any]:
    return {
        "passes": total.passes,
        "seconds": total.wall,
        "median_seconds": median_of(passes, kind),
        "tokens_in": total.tokens,
        "tokens_made": total.made,
        "tokens_per_pass": total.made_per_pass,
        **_measured(total),
    }


def _measured(measured: Pass | PassSums) -> dict[str, Any]:
    return {
        **fields_of(measured, "disk_bytes", "copied_bytes", "overlap", "bottleneck"),
        "stages": totals_record(measured.stages),
    }
