"""Seconds of a model's passes on a GPU: of all they do, of bringing weights alone, and of computing alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.lib import worker
from benchmarks.lib.measure import drop_cached

BRINGING_TURNS = 2


def generate(model: Any, tokens: int, cold: Sequence[Path] = ()) -> dict[str, Any]:
    """Generate greedily after 16 tokens; see `worker.generate`.

    The clock stands still after each token until the files below the folders `cold` are out of the page cache. Layers
    that are read ahead meanwhile cost nothing: a few at most, in every implementation that reads ahead.
    """
    vocabulary = model.config.get_text_config().vocab_size
    prompt = [(i * 37 + 11) % vocabulary for i in range(16)]
    return worker.generate(model, prompt, tokens, worker.Clock(lambda: _forget(cold)), model.device)


def seconds_to_bring(model: Any, gpu: Any, cold: Sequence[Path] = ()) -> float:
    """Of a pass that brings all its weights and computes nothing; the first one finds some that were read ahead."""
    seconds = 0.0
    for _ in range(BRINGING_TURNS):
        _forget(cold)
        begun = time.perf_counter()
        for executor in model.streamer.executors.values():
            units = list(executor.follower)
            for index, unit in enumerate(units):
                loaded = executor.loader.take(unit)
                executor.loader.prefetch([*units[index + 1 :], *units[:index]])
                executor.loader.give_back(loaded)
        gpu.synchronise()
        seconds = time.perf_counter() - begun
    return seconds


def seconds_to_compute(model: Any, tokens: int) -> float:
    """Of a token that is computed with the weights that happen to be in the buffers; its text means nothing."""
    with contextlib.ExitStack() as held:
        for executor in model.streamer.executors.values():
            held.enter_context(_without_loading(executor))
        seconds: float = generate(model, tokens)["token_seconds"]
    return seconds


def copied_bytes(model: Any) -> int:
    """That a pass copies to the GPU; of a model that accelerate placed, its parameters without memory of their own."""
    if (placement := getattr(model, "placement", None)) is not None:
        return int(placement.uploaded_bytes)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.is_meta)


@contextlib.contextmanager
def _without_loading(executor: Any) -> Iterator[None]:
    """Have an executor take the same buffer for every unit."""
    units = list(executor.follower)
    if not units:
        yield
        return
    loader, held = executor.loader, executor.loader.take(units[0])
    executor.loader = SimpleNamespace(
        take=lambda unit: held,
        prefetch=lambda units: None,
        give_back=lambda loaded: None,
        give_back_taken=lambda: None,
        waited=loader.waited,
        waited_for_copies=loader.waited_for_copies,
    )
    try:
        yield
    finally:
        executor.loader = loader
        loader.give_back(held)


def _forget(folders: Sequence[Path]) -> None:
    for folder in folders:
        drop_cached(folder)
