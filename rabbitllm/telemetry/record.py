"""A profile as a JSON object. All times are seconds, all sizes bytes; fields may be added, none changes meaning.

    title             title of the profile
    bottleneck        the stage that made the caller wait longest, or null
    stages            stage -> total, the busiest first
    layers            layer -> stage -> total, in the order of the first record
    passes            one object for each of the last passes, oldest first
    sums              kind ("prompt", "further") -> sums of all passes, dropped ones too
    in_place_bytes    "device tier" -> stored bytes that each pass uses without moving them

A total: `seconds` of all threads in the stage, `busy_seconds` if they shared it evenly, `count` of records, `bytes`
moved, `cpu_seconds` (core-seconds; 0 where they were not measured), `threads`.

A pass: `number` (from 1), `kind`, `seconds`, `tokens_in` (batch times length), `batch`, `length`, `past` (positions in
the KV cache before it, or null), `tokens_made` (over the batch, or null if unknown, as for the last pass of a
generation), `disk_bytes`, `copied_bytes` (host to device), `overlap` (max(moving, computing) / wall), `bottleneck`,
`stages`. Sums have `passes`, `seconds`, `median_seconds` (of those kept individually), `tokens_in`, `tokens_made`,
`tokens_per_pass` (null if unknown), and the same from `disk_bytes` on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rabbitllm.telemetry.passes import Pass, PassSums, median_of
from rabbitllm.telemetry.totals import NOTHING, READ, Total, copies_of, limit_of

Totals = Mapping[str, Total]


def as_record(
    title: str,
    stages: Totals,
    layers: Mapping[str, Totals],
    passes: Sequence[Pass],
    sums: Mapping[str, PassSums],
    in_place: Mapping[str, int],
) -> dict[str, Any]:
    """See the module."""
    return {
        "title": title,
        "bottleneck": limit_of(stages),
        "stages": _totals(stages),
        "layers": {layer: _totals(totals) for layer, totals in layers.items()},
        "passes": [_pass(one) for one in passes],
        "sums": {kind: _sums(kind, total, passes) for kind, total in sums.items()},
        "in_place_bytes": dict(in_place),
    }


def _totals(totals: Totals) -> dict[str, dict[str, float]]:
    return {
        stage: {
            "seconds": total.seconds,
            "busy_seconds": total.busy_seconds,
            "count": total.count,
            "bytes": total.nbytes,
            "cpu_seconds": total.cpu_seconds,
            "threads": total.threads,
        }
        for stage, total in totals.items()
    }


def _pass(one: Pass) -> dict[str, Any]:
    return {
        "number": one.number,
        "kind": one.kind,
        "seconds": one.wall,
        "tokens_in": one.tokens,
        "batch": one.entry.batch,
        "length": one.entry.length,
        "past": one.entry.past,
        "tokens_made": one.made,
        "disk_bytes": one.stages.get(READ, NOTHING).nbytes,
        "copied_bytes": copies_of(one.stages).nbytes,
        "overlap": one.overlap,
        "bottleneck": one.bottleneck,
        "stages": _totals(one.stages),
    }


def _sums(kind: str, total: PassSums, passes: Sequence[Pass]) -> dict[str, Any]:
    return {
        "passes": total.passes,
        "seconds": total.wall,
        "median_seconds": median_of(passes, kind),
        "tokens_in": total.tokens,
        "tokens_made": total.made,
        "tokens_per_pass": total.made_per_pass,
        "disk_bytes": total.disk_bytes,
        "copied_bytes": total.copied_bytes,
        "overlap": total.overlap,
        "bottleneck": total.bottleneck,
        "stages": _totals(total.stages),
    }
