"""What the worker does with llama.cpp: generates. Stands alone too."""

from __future__ import annotations

import functools
import os
import statistics
import time
from typing import Any


def decode(worker: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Load the file, mapped, and generate greedily; the same figures as the other rows'."""
    from llama_cpp import Llama  # type: ignore[import-not-found,unused-ignore]

    threads = len(os.sched_getaffinity(0))
    begun = time.perf_counter()
    model = Llama(job["path"], n_ctx=512, n_threads=threads, n_threads_batch=threads, use_mmap=True, verbose=False)
    loaded = time.perf_counter()
    tokens, clock = [], worker.Clock()
    clock.put(None)
    for token in model.generate(job["prompt"], top_k=1, temp=0.0, repeat_penalty=1.0):
        clock.put(token)
        tokens.append(token)
        if len(tokens) == job["tokens"]:
            break
    return {
        "load_seconds": loaded - begun,
        "first_token_seconds": clock.times[1] - clock.times[0],
        "step_seconds": clock.steps(),
        "token_seconds": statistics.median(clock.steps()),
        "step_bytes": clock.step_bytes(),
        "tokens": tokens,
        "threads": threads,
        "dtype": job["kind"],
        "placed": "mapped",
    }


def tasks(worker: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What there is to do; `worker` is the module `worker.py`."""
    return {"decode": functools.partial(decode, worker)}
