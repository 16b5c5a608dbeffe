"""A measurement as one JSON object. All times are seconds, all sizes bytes.

model, device, dtype, compression
tokens, prompt_tokens, batch       per sequence; number of sequences
load_seconds                       of loading (including a split, if one had to be made)
first_after_load_seconds           the very first token after loading
first_token_seconds                median of the turns
token_seconds                      median of the turns, of a further pass: a token of each sequence
tokens_per_second                  of all sequences, after the first token
turns                              each with `first_token_seconds` and `token_seconds`
bytes_per_token                    `disk`: read; `copied`: from host memory to a device; `in_place`: used without moving
                                   them, as "device tier" -> bytes
overlap                            max(moving, computing) / wall, of the further passes
bottleneck                         the stage that further passes wait for longest
peak_memory_bytes                  of the process, mapped files included, or null
placement                          a list of device, tier, units, bytes
profile                            see `rabbitllm/telemetry/record.py`; of one more turn, with the profiler on
"""

from __future__ import annotations

from typing import Any

from rabbitllm.bench.measure import Measured
from rabbitllm.telemetry.passes import FURTHER


def as_record(measured: Measured) -> dict[str, Any]:
    """Convert a measurement; see the module."""
    request, further = measured.request, measured.sums[FURTHER]
    return {
        "model": measured.name,
        "device": measured.device,
        "dtype": measured.dtype,
        "compression": measured.compression,
        "tokens": request.tokens,
        "prompt_tokens": request.prompt_tokens,
        "batch": request.batch,
        "load_seconds": measured.load,
        "first_after_load_seconds": measured.first_after_load,
        "first_token_seconds": measured.first,
        "token_seconds": measured.further,
        "tokens_per_second": measured.tokens_per_second,
        "turns": [{"first_token_seconds": turn.first, "token_seconds": turn.further} for turn in measured.turns],
        "bytes_per_token": {
            "disk": measured.per_token(further.disk_bytes),
            "copied": measured.per_token(further.copied_bytes),
            "in_place": {where: nbytes / request.batch for where, nbytes in measured.in_place.items()},
        },
        "overlap": further.overlap,
        "bottleneck": further.bottleneck,
        "peak_memory_bytes": measured.peak,
        "placement": _placement(measured.placement),
        "profile": measured.profile,
    }


def _placement(placement: Any) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for placed in placement.units:
        key = placed.device, placed.tier.value
        row = rows.setdefault(key, {"device": key[0], "tier": key[1], "units": 0, "bytes": 0})
        row["units"] += 1
        row["bytes"] += placed.counted
    return list(rows.values())
