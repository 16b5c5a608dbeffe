"""A report as one JSON object: snake_case keys, sizes in bytes, times in seconds."""

from __future__ import annotations

import dataclasses
from typing import Any

from rabbitllm.base.plain_json import plain
from rabbitllm.estimate.doctor.records import Report


def as_record(report: Report) -> dict[str, Any]:
    """Convert a report to JSON, with derived values."""
    content: dict[str, Any] = plain(dataclasses.asdict(report))
    content["can_run"] = report.can_run
    for entry, model in zip(content["models"], report.models, strict=True):
        best = model.best
        entry["best"] = None if best is None else {"compression": best.compression, "route": best.route}
        for record, one in zip(entry["at"], model.at, strict=True):
            record["route"], record["fits"] = one.route, one.route is not None
    for entry, package in zip(content["machine"]["packages"], report.machine.packages, strict=True):
        entry["sound"] = package.sound
    return content
