"""`rabbitllm doctor`: asks all probes, one after the other; estimates the models of the short list; and gives advice.

A probe that fails adds a line to the report.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rabbitllm.base.terminal import size, speed
from rabbitllm.estimate import outline
from rabbitllm.estimate.cost_model import Speed
from rabbitllm.estimate.doctor import probes
from rabbitllm.estimate.doctor.probes import CACHE, SPLITS
from rabbitllm.estimate.doctor.records import (
    Advice,
    AtCompression,
    Failure,
    MachineInfo,
    ModelEstimate,
    Need,
    Package,
    Report,
)
from rabbitllm.estimate.outline import Published
from rabbitllm.estimate.split_estimate import ROUTES, STANDARD
from rabbitllm.storage.folders import Folder, host_of
from rabbitllm.version import __version__

if TYPE_CHECKING:
    from rabbitllm.estimate.machine import Machine

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
        found: Future[Found] = Future()

        def run() -> None:
            try:
                found.set_result(probe())
            except Exception as error:
                found.set_exception(error)

        until = time.perf_counter() + seconds
        thread = threading.Thread(target=run, name=f"probe-{what}", daemon=True)
        thread.start()

        def wait() -> Found:
            thread.join(max(until - time.perf_counter(), 0))
            if not found.done():
                raise TimeoutError(f"no answer within {seconds:.0f} s")
            return found.result()

        return lambda: self.ask(what, wait)


def examine(*, quick: bool = False, every: bool = False, say: Say = lambda what: None) -> Report:
    """Run all probes and return the report.

    Args:
        quick: measure nothing and load no libraries: seconds less, and no times of tokens.
        every: also estimate times of models for which the disk has no room.
        say: called with the name of each probe.
    """
    start = time.perf_counter()
    asking = Probes(say)
    memory = asking.ask("memory", probes.memory)  # before any library takes its share
    hub = asking.begin("the hub", probes.hub, QUICK_HUB_SECONDS if quick else HUB_SECONDS)
    host = asking.ask("the host", lambda: host_of(os.environ))
    folders = asking.ask("disks", lambda: probes.folders(host)) or ()
    models = [
        found
        for model in asking.ask("the list of models", outline.published) or ()
        if (found := asking.ask(model.repository, partial(on_disk, model, folders)))
    ]
    packages = asking.ask("packages", lambda: probes.packages(load=not quick)) or ()
    gpus = asking.ask("GPUs", lambda: probes.gpus(ask_torch=not quick))
    rates: tuple[Speed, ...] = ()
    devices: tuple[str, ...] = ()
    if not quick and (memory is None or memory.usable >= MEASURING_BYTES):
        rates, models, devices = _measured(asking, models, every)
    elif not quick and memory is not None:
        little = f"{size(memory.usable)} of RAM is available; measuring takes up to {size(MEASURING_BYTES)}"
        asking.failures.append(Failure("times", little))
    machine = MachineInfo(
        memory=memory,
        processor=asking.ask("the processor", probes.processor),
        gpus=gpus,
        folders=folders,
        host=host,
        hub=hub(),
        packages=packages,
        rates=rates,
    )
    advice = advise(machine, smallest_need(models))
    seconds = time.perf_counter() - start
    return Report(__version__, machine, tuple(models), devices, advice, tuple(asking.failures), seconds)


def _measured(
    asking: Probes, models: list[ModelEstimate], every: bool
) -> tuple[tuple[Speed, ...], list[ModelEstimate], tuple[str, ...]]:
    """Measure the rates; return them, the models with their times, and the devices they would compute on."""
    engine = asking.ask("the engine", lambda: importlib.import_module("rabbitllm.estimate.machine"))  # takes seconds
    if engine is None:
        return (), models, ()
    known = {model.repository: model for model in outline.published()}
    rates: list[Speed] = []

    def all_of_it() -> tuple[str, ...]:
        from rabbitllm.store import locations

        with engine.rough_machine(locations.home(), MIN_FREE_BYTES) as machine:
            for measure, what in engine.measurements(machine):
                rate = asking.ask(what, measure)
                rates.extend([Speed(what, rate)] if rate else [])
            begun = time.perf_counter()
            for at, one in enumerate(models):
                if time.perf_counter() - begun > MEASURING_SECONDS and not every:
                    why = f"measuring took longer than {MEASURING_SECONDS:.0f} s: this machine is busy"
                    asking.failures.append(Failure(f"speed of {one.name} and later models", why))
                    break
                timed = partial(with_times, known[one.repository], one, machine, locations.home(), every)
                models[at] = asking.ask(one.name, timed) or one
            return tuple(device.name for device in machine.devices)

    devices = asking.ask("measuring", all_of_it) or ()
    return tuple(rates), models, devices


# The models of the short list: disk use by their sizes, generation as in a plan

MIN_FREE_BYTES = 1000**3
"""Bytes of a disk to keep free, as in a split by default."""
_SHARDS = {"sequential_ahead": 2, "sequential_file": 1, "sequential_stream": 0}


def on_disk(model: Published, folders: Iterable[Folder]) -> ModelEstimate:
    """Return a model's disk use at each compression and on each route, without generation.

    Args:
        model: the model.
        folders: those of splits and of the hub cache are used.
    """
    tensors = model.outline
    places = {use: folder for folder in folders for use in folder.uses}
    found = tuple(
        AtCompression(compression, output, tuple(_need(name, model, output, places) for name in ROUTES))
        for compression in tensors.compressions
        for output in [tensors.output_bytes(compression)]
    )
    return ModelEstimate(model.repository, model.parameters, tensors.checkpoint_bytes, found, model.quantized)


def _need(route: str, model: Published, output: int, places: Mapping[str, Folder]) -> Need:
    splits, cache = places.get(SPLITS), places.get(CACHE)
    downloads = model.outline.checkpoint_bytes if route == STANDARD else 0
    created = output + _SHARDS.get(route, 0) * model.largest_shard_bytes
    if splits is None:
        return Need(route, created + downloads, 0)
    if cache is None or cache.disk == splits.disk:
        missing = created + downloads + MIN_FREE_BYTES - splits.room
    else:
        lacking = downloads + MIN_FREE_BYTES - cache.room if downloads else 0
        missing = max(created + MIN_FREE_BYTES - splits.room, lacking)
    return Need(route, created + downloads, max(missing, 0))


def with_times(
    model: Published, found: ModelEstimate, machine: Machine, folder: Path, every: bool = False
) -> ModelEstimate:
    """Return the same estimate with times of generation; a problem at one compression is recorded there.

    Args:
        model: the model.
        found: of it, from `on_disk`.
        machine: a rough one.
        folder: the future folder of layer files.
        every: also for compressions for which the disk has no room.
    """
    from rabbitllm.estimate.predict import predict_outline

    def timed(one: AtCompression) -> AtCompression:
        with tempfile.TemporaryDirectory(prefix="rabbitllm-doctor-") as work:
            try:
                _, generation = predict_outline(model.outline, one.compression, folder, machine, (), Path(work))
            except Exception as error:  # one failed estimate must not end the list
                return dataclasses.replace(one, problem=str(error).split("\n")[0] or type(error).__name__)
        return dataclasses.replace(one, generation=generation)

    return dataclasses.replace(
        found, at=tuple(timed(one) if every or one.route is not None else one for one in found.at)
    )


def smallest_need(models: Sequence[ModelEstimate]) -> int:
    """Return the least bytes of disk with which any model of the list can be split."""
    return min((need.disk_bytes for found in models for one in found.at for need in one.needs), default=0)


# Advice on what is missing or could be better, with the command for it


LEAST_MEMORY = 1 << 30
"""Bytes of RAM needed to generate with any model of the list: torch and transformers take half of that."""
LITTLE_MEMORY = 4 << 30
LITTLE_DISK = 20 << 30
"""Room below which only small models fit."""
SLOW_DISK = 300e6
"""Bytes per second below which layers of a model that does not fit in memory take seconds each."""


def advise(machine: MachineInfo, needed: int) -> tuple[Advice, ...]:
    """Return all advice, the essential first.

    Args:
        machine: results of the probes.
        needed: bytes of disk that the smallest model takes.
    """
    found = [*_of_packages(machine), *_of_disks(machine, needed), *_of_memory(machine)]
    found += [*_of_gpus(machine), *_of_processor(machine), *_of_hub(machine), *_of_rates(machine)]
    return tuple(sorted(found, key=lambda advice: not advice.essential))


def _of_packages(machine: MachineInfo) -> Iterator[Advice]:
    for package in machine.packages:
        if package.sound or (package.optional and package.found is None):
            continue
        command = f"pip install --upgrade {shlex.quote(package.name + package.wanted)}"
        yield Advice(package.essential, f"{_state_of(package)} It is for {package.brings}.", command)


def _state_of(package: Package) -> str:
    if package.found is None:
        return f"{package.name} is missing."
    if package.problem is not None:
        return f"{package.name} {package.found} cannot be loaded ({package.problem})."
    return f"{package.name} {package.found} is not supported; expected {package.wanted}."


def _of_disks(machine: MachineInfo, needed: int) -> Iterator[Advice]:
    splits = next((folder for folder in machine.folders if SPLITS in folder.uses), None)
    if splits is None:
        return
    others = [one for one in machine.folders if one is not splits and one.writable and not one.in_memory]
    roomiest = max(others, key=lambda folder: folder.room, default=None)
    better = roomiest if roomiest is not None and roomiest.room >= max(needed, 2 * splits.room) else None
    command = f"export RABBITLLM_HOME={shlex.quote(str(better.path / 'rabbitllm'))}" if better is not None else None
    elsewhere = f"; {better.path} has {size(better.room)}" if better is not None else ""
    name = "set RABBITLLM_HOME to a folder on another disk"
    if not splits.writable:
        yield Advice(True, f"{splits.path}, the folder for splits of hub models, is not writable: {name}.", command)
    elif splits.room < needed:
        text = (
            f"Too little disk at {splits.path}: {size(splits.room)}; the smallest model takes {size(needed)}{elsewhere}"
        )
        yield Advice(True, f"{text}. Free disk space, or {name}.", command)
    elif splits.in_memory:
        yield Advice(
            False, f"{splits.path} is in memory ({splits.filesystem}); layer files there use RAM: {name}.", command
        )
    elif splits.room < LITTLE_DISK:
        text = f"Only {size(splits.room)} are available at {splits.path}{elsewhere}: larger models do not fit"
        yield Advice(False, f"{text}; {name}, or use --dir.", command)
    elif better is not None:
        yield Advice(False, f"{splits.path} has {size(splits.room)}{elsewhere}: {name} for large models.", command)


def _of_memory(machine: MachineInfo) -> Iterator[Advice]:
    memory = machine.memory
    if memory is None:
        return
    named = [(one.room, f"the control group {one.folder} allows {size(one.limit)}") for one in memory.groups]
    named += [(one.room, f"{one.name} allows {size(one.limit)}") for one in memory.limits]
    room, limit = min(named, default=(memory.free, ""))
    why = f": {limit}" if room < memory.free else ""
    if memory.usable < LEAST_MEMORY:
        yield Advice(
            True, f"Only {size(memory.usable)} of RAM is available{why}. End other programs, or raise the limit."
        )
    elif memory.usable < LITTLE_MEMORY:
        text = f"Only {size(memory.usable)} of RAM is available{why}: each token reads most of a model again"
        yield Advice(False, f"{text}. End other programs, or raise the limit.")


def _of_gpus(machine: MachineInfo) -> Iterator[Advice]:
    gpus = machine.gpus
    if gpus is None:
        return
    if gpus.driver and not gpus.found and gpus.torch is not None:
        text = f"NVIDIA's driver is installed, but torch {gpus.torch} finds no GPU: it may be built for the CPU, or for"
        command = "pip install --upgrade --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
        yield Advice(False, f"{text} a newer driver, or CUDA_VISIBLE_DEVICES hides it.", command)
    for gpu in gpus.found:
        if gpu.free < gpu.total // 2:
            text = f"{gpu.device}: {size(gpu.total - gpu.free)} of {size(gpu.total)} are in use by other programs"
            yield Advice(False, f"{text} (or by an earlier cell of this notebook).", "nvidia-smi")


def _of_processor(machine: MachineInfo) -> Iterator[Advice]:
    processor, gpus = machine.processor, machine.gpus
    if processor is None or gpus is None or gpus.found:
        return
    # the names of `probes.py`; without AVX2 there is no kernel
    if processor.instructions.get("AVX2") and not processor.instructions.get("AVX512-BF16"):
        text = "Uncompressed models compute in bfloat16, and this processor has no bfloat16 instructions"
        yield Advice(False, f"{text}: --fast-bfloat16 (fast_bfloat16=True) uses a faster kernel.")


def _of_hub(machine: MachineInfo) -> Iterator[Advice]:
    hub = machine.hub
    if hub is None:
        return
    if hub.offline:
        text = "HF_HUB_OFFLINE is set: only models on this machine can be used"
        yield Advice(False, f"{text}.", "unset HF_HUB_OFFLINE")
    elif not hub.reachable:
        kaggle = machine.host is not None and machine.host.name == "Kaggle"
        do = "Turn on Internet in the notebook's settings" if kaggle else "Check the connection and the proxy"
        text = f"The hub at {hub.endpoint} does not answer ({hub.problem}). {do}, or set HF_ENDPOINT to a mirror"
        yield Advice(False, f"{text}. Models on this machine can be used.")
    if not hub.token and hub.reachable:
        yield Advice(False, "No access token for the hub is set; gated models (Llama) need one.", "hf auth login")


def _of_rates(machine: MachineInfo) -> Iterator[Advice]:
    reading = [rate.bytes_per_second for rate in machine.rates if rate.what.startswith("reading")]
    if reading and max(reading) < SLOW_DISK:
        text = f"The disk reads only {speed(max(reading))}, which limits models that do not fit in memory"
        yield Advice(False, f"{text}. Put splits on a local SSD (RABBITLLM_HOME), or use 4bit.")
