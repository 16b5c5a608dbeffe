"""Times of routed modules' calls for a token and for a prompt: selects the measurements and combines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.engine.load_plan import LoadPlan, cache_room
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, ReadMode, stays_cached
from rabbitllm.estimate.expert_calls import ExpertCalls
from rabbitllm.estimate.generation import PROMPT_TOKENS
from rabbitllm.estimate.machine import Machine
from rabbitllm.estimate.reading import FileSample
from rabbitllm.estimate.routing import RoutedWork

DIRECT, DROPPED = ReadMode(direct=True), ReadMode(drop=True)
PIECE_BYTES = 1 << 20
"""Minimum size of the pieces that are read to measure smaller experts."""


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Seconds of calls of one kind of module; None if one could not be measured or is not needed.

    Attributes:
        found: for one token, with all its experts on the computing device.
        near: with all of them in pinned memory.
        read: with all of them read.
        prompt: for the first prompt, all of whose experts are read.
    """

    found: float
    near: float | None
    read: float | None
    prompt: float | None

    def token(self, work: RoutedWork) -> float | None:
        """Return the expected seconds of a token if all experts are used equally; None if that is not known."""
        total = 0.0
        for share, seconds in ((work.on_device, self.found), (work.in_host, self.near), (work.missed, self.read)):
            if share and seconds is None:
                return None
            total += share * (seconds or 0.0)
        return total


class ExpertTimes:
    """Measures each kind of module once.

    Args:
        drawn: the model.
        work: work of a pass with its experts.
        machine: the machine.
        files: files to measure reading with.
    """

    def __init__(self, drawn: LoadPlan, work: Sequence[RoutedWork], machine: Machine, files: Sequence[Path]) -> None:
        self.from_the_disk = False
        self._drawn = drawn
        self._machine = machine
        self._files = files
        self._sources = {source.name: source for source in drawn.experts}
        self._times: dict[Any, CallTimes] = {}
        for routed in work:
            if routed.kind not in self._times:
                self._times[routed.kind] = self._measured(routed)

    def of(self, work: RoutedWork) -> CallTimes:
        """Return the times of one module."""
        return self._times[work.kind]

    def _measured(self, work: RoutedWork) -> CallTimes:
        source = self._sources[work.name]
        sample = FileSample(self._files, max(source.nbytes, PIECE_BYTES), whole=True)
        prompts = self._machine.prompts
        between = self._drawn.sources[source.unit].stored_bytes
        calls = ExpertCalls(self._drawn.model, source, self._machine.device(work.device), sample, between)
        if work.tier is not Tier.ROUTED:
            return _staying(calls, work, sample if prompts else None)
        pool = next(pool for pool in self._drawn.placement.pools if pool.device == work.device)
        own = [self._sources[p.unit] for p in self._drawn.placement.experts if p.device == work.device]
        way, is_cached = self._way(sample, own, pool.stored)
        if work.missed:
            self.from_the_disk = self.from_the_disk or not is_cached
        dropping = DIRECT if way == DIRECT else DROPPED
        prompt = calls.first(PROMPT_TOKENS, dropping, pool.slots) if prompts else None
        read = None
        if work.missed:
            if is_cached:
                sample.cached_rate()  # leaves it in the page cache
            read = calls.read(way, pool.slots)
        return CallTimes(calls.found(1), calls.near(1) if pool.host_slots else None, read, prompt)

    def _way(self, sample: FileSample, own: Sequence[ExpertSource], nbytes: int) -> tuple[ReadMode, bool]:
        """Return how the engine will read these experts, and whether they come from the page cache."""
        if stays_cached(nbytes, cache_room(self._drawn.placement, self._machine.devices)):
            return THROUGH_THE_CACHE, True
        past = self._machine.measured(("read", DIRECT), lambda: sample.rate(DIRECT))
        through = self._machine.measured(("read", DROPPED), lambda: sample.rate(DROPPED))
        in_blocks = all(source.in_blocks for source in own)
        if in_blocks and past is not None and (through is None or past >= through):
            return DIRECT, False
        return DROPPED, False


def _staying(calls: ExpertCalls, work: RoutedWork, sample: FileSample | None) -> CallTimes:
    """Return the times of resident experts in mapped files, many of which the first prompt reads from the disk."""
    for_good = work.tier is Tier.RESIDENT
    rate = sample.mapped_rate() if sample is not None else None
    prompt = None
    if rate is not None:
        prompt = calls.mapped(PROMPT_TOKENS, for_good=for_good) + work.touched_bytes(PROMPT_TOKENS) / rate
    return CallTimes(calls.mapped(1, for_good=for_good), None, None, prompt)
