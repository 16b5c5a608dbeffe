"""Runs all probes, one after the other, and collects their results; a probe that fails adds a line to the report."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TypeVar

from rabbitllm.base.terminal import size
from rabbitllm.estimate.doctor import hardware, hub, models, outlooks, packages, places
from rabbitllm.estimate.doctor.advice import advise
from rabbitllm.estimate.doctor.records import Failure, MachineInfo, ModelEstimate, Report
from rabbitllm.estimate.generation import Speed
from rabbitllm.storage.folders import host_of
from rabbitllm.version import __version__

Found = TypeVar("Found")
Say = Callable[[str], None]
HUB_SECONDS = 4.0
"""Time limit for the hub, name resolution included."""
QUICK_HUB_SECONDS = 1.5
MEASURING_SECONDS = 30.0
"""Time after which no further model is begun: an idle machine takes a third of that for all."""
MEASURING_BYTES = 3 << 30
"""Bytes of RAM below which nothing is measured: torch, transformers and the measured matrices take 2.4 GB of it."""


class Probes:
    """Calls probes, and records which of them failed."""

    def __init__(self, say: Say) -> None:
        self.failures: list[Failure] = []
        self._say = say

    def ask(self, what: str, probe: Callable[[], Found]) -> Found | None:
        """Return the result of a probe; if it fails, record that and return None."""
        self._say(what)
        try:
            return probe()
        except Exception as error:  # one broken part of a machine must not hide the others
            self.failures.append(Failure(what, f"{type(error).__name__}: {error}".split("\n")[0]))
            return None

    def begin(self, what: str, probe: Callable[[], Found], seconds: float) -> Callable[[], Found | None]:
        """Begin a probe that may not return; the returned function waits for it until `seconds` from now at most."""
        found: list[Callable[[], Found]] = []

        def run() -> None:
            try:
                value = probe()
                found.append(lambda: value)
            except Exception as error:
                failure = error

                def again() -> Found:
                    raise failure

                found.append(again)

        thread = threading.Thread(target=run, name=f"probe-{what}", daemon=True)
        until = time.perf_counter() + seconds
        thread.start()

        def wait() -> Found:
            thread.join(max(until - time.perf_counter(), 0))
            if not found:
                raise TimeoutError(f"no answer within {seconds:.0f} s")
            return found[0]()

        return lambda: self.ask(what, wait)


def examine(*, quick: bool = False, every: bool = False, say: Say = lambda what: None) -> Report:
    """Run all probes and return the report.

    Args:
        quick: measure nothing and load no libraries: seconds less, and no times of tokens.
        every: also estimate times of models for which the disk has no room.
        say: called with the name of each probe.
    """
    start = time.perf_counter()
    probes = Probes(say)
    memory = probes.ask("memory", hardware.memory)  # before any library takes its share
    asked = probes.begin("the hub", hub.hub, QUICK_HUB_SECONDS if quick else HUB_SECONDS)
    host = probes.ask("the host", lambda: host_of(os.environ))
    folders = probes.ask("disks", lambda: places.folders(host)) or ()
    outlook = [
        found
        for model in probes.ask("the list of models", models.published) or ()
        if (found := probes.ask(model.repository, partial(outlooks.on_disk, model, folders)))
    ]
    there = probes.ask("packages", lambda: packages.packages(load=not quick)) or ()
    gpus = probes.ask("GPUs", lambda: hardware.gpus(ask_torch=not quick))
    rates: tuple[Speed, ...] = ()
    devices: tuple[str, ...] = ()
    if not quick and (memory is None or memory.usable >= MEASURING_BYTES):
        rates, outlook, devices = _measured(probes, outlook, every)
    elif not quick and memory is not None:
        little = f"{size(memory.usable)} of RAM can be had, and measuring takes up to {size(MEASURING_BYTES)}"
        probes.failures.append(Failure("times", little))
    machine = MachineInfo(
        memory=memory,
        processor=probes.ask("the processor", hardware.processor),
        gpus=gpus,
        folders=folders,
        host=host,
        hub=asked(),
        packages=there,
        rates=rates,
    )
    advice = advise(machine, outlooks.smallest_need(outlook))
    seconds = time.perf_counter() - start
    return Report(__version__, machine, tuple(outlook), devices, advice, tuple(probes.failures), seconds)


def _measured(
    probes: Probes, outlook: list[ModelEstimate], every: bool
) -> tuple[tuple[Speed, ...], list[ModelEstimate], tuple[str, ...]]:
    """Measure the rates; return them, the models with their times, and the devices they would compute on."""
    speeds = probes.ask("the engine", _speeds)
    if speeds is None:
        return (), outlook, ()
    known = {model.repository: model for model in models.published()}
    rates: list[Speed] = []

    def all_of_it() -> tuple[str, ...]:
        from rabbitllm.store import locations

        with speeds.bench_at(locations.home(), outlooks.MIN_FREE_BYTES) as bench:
            for measure, what in speeds.measurements(bench):
                rate = probes.ask(what, measure)
                rates.extend([Speed(what, rate)] if rate else [])
            begun = time.perf_counter()
            for at, one in enumerate(outlook):
                if time.perf_counter() - begun > MEASURING_SECONDS and not every:
                    why = f"measuring took {MEASURING_SECONDS:.0f} s already: something else is at work on this machine"
                    probes.failures.append(Failure(f"times from {one.name} on", why))
                    break
                timed = probes.ask(one.name, partial(outlooks.with_times, known[one.repository], one, bench, every))
                outlook[at] = timed or one
            return tuple(device.name for device in bench.machine.devices)

    devices = probes.ask("measuring", all_of_it) or ()
    return tuple(rates), outlook, devices


def _speeds() -> ModuleType:
    """Import the probes that need the engine and torch, which takes seconds."""
    from rabbitllm.estimate.doctor import speeds

    return speeds
