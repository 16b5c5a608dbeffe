"""Many prompts at once with one implementation; loaded by `lib/worker.py`, in the environment of that implementation.

Prompts are made here, since thousands of them are more than a command line holds. Imports nothing of this repository
but the package that is measured.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def prompt(number: int, length: int, vocabulary: int) -> list[int]:
    """Token ids; no two numbers begin alike."""
    return [(number * 7919 + place * (37 + number % 11) + 11) % vocabulary for place in range(length)]


def _ours(job: dict[str, Any], count: int) -> Any:
    package = importlib.import_module(job["package"])
    (manifest,) = Path(job["path"]).rglob("split.json")
    return package.batch(
        str(manifest.parent),
        [{"tokens": prompt(number, job["length"], job["vocabulary"])} for number in range(count)],
        job["out"],
        max_new_tokens=job["tokens"],
        sequences=job["sequences"],
        device="cpu",
        overwrite=True,
        **job["options"],
    )


def tasks(worker: Any, job: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """What there is to do; `worker` is the module `worker.py`."""

    def bulk(job: dict[str, Any]) -> dict[str, Any]:
        """Generate for so many prompts at once: seconds from the first to the last of them, loading not counted."""
        count, before = job["sequences"], worker.bytes_read()
        if job["package"] == "rabbitllm" and job["is_ours"]:
            report = _ours(job, count)
            if report.errors:
                raise RuntimeError(Path(job["out"]).read_text().splitlines()[0][:200])
            made, seconds = report.new_tokens, report.seconds
        else:
            made, seconds = _generated(job, count)
        if made != count * job["tokens"]:
            raise RuntimeError(f"{count * job['tokens']} tokens were asked for; {made} came")
        return {"seconds": seconds, "new_tokens": made, "disk_bytes": worker.bytes_read() - before}

    def _generated(job: dict[str, Any], count: int) -> tuple[int, float]:
        import torch

        model = worker.LOADERS[job["loader"]](job)
        ids = torch.tensor([prompt(number, job["length"], job["vocabulary"]) for number in range(count)])
        begun = time.perf_counter()
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["tokens"], do_sample=False
        )
        return output[:, job["length"] :].numel(), time.perf_counter() - begun

    return {"bulk": bulk}
