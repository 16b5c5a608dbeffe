"""Advice on what is missing or could be better, with the command for it. Pure: facts in, advice out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rabbitllm.base.terminal import size, speed
from rabbitllm.estimate.doctor.places import SPLITS
from rabbitllm.estimate.doctor.records import Advice, MachineInfo, Package
from rabbitllm.storage.folders import Folder

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
        yield Advice(package.essential, f"{_state_of(package)} It {_brings(package)}.", command)


def _brings(package: Package) -> str:
    return package.brings if package.essential else f"is for {package.brings}"


def _state_of(package: Package) -> str:
    if package.found is None:
        return f"{package.name} is missing."
    if package.problem is not None:
        return f"{package.name} {package.found} cannot be loaded ({package.problem})."
    return f"{package.name} {package.found} does not do; {package.wanted} is needed."


def _of_disks(machine: MachineInfo, needed: int) -> Iterator[Advice]:
    splits = next((folder for folder in machine.folders if SPLITS in folder.uses), None)
    if splits is None:
        return
    others = [one for one in machine.folders if one is not splits and one.writable and not one.in_memory]
    roomiest = max(others, key=lambda folder: folder.room, default=None)
    better = roomiest if roomiest is not None and roomiest.room >= max(needed, 2 * splits.room) else None
    command = f"export RABBITLLM_HOME={shlex.quote(str(_inside(better)))}" if better is not None else None
    elsewhere = f"; {better.path} has {size(better.room)}" if better is not None else ""
    name = "set RABBITLLM_HOME to a folder on another disk"
    if not splits.writable:
        yield Advice(True, f"{splits.path} cannot be written to, and splits of hub models go there: {name}.", command)
    elif splits.room < needed:
        text = f"No room at {splits.path}: {size(splits.room)}, and the smallest model takes {size(needed)}{elsewhere}"
        yield Advice(True, f"{text}. Free some, or {name}.", command)
    elif splits.in_memory:
        yield Advice(
            False, f"{splits.path} lies in memory ({splits.filesystem}), so layers there take RAM: {name}.", command
        )
    elif splits.room < LITTLE_DISK:
        text = f"Only {size(splits.room)} may be written at {splits.path}{elsewhere}: larger models have no room"
        yield Advice(False, f"{text}; {name}, or name one with --dir.", command)
    elif better is not None:
        yield Advice(False, f"{splits.path} has {size(splits.room)}{elsewhere}: {name} for large models.", command)


def _inside(folder: Folder | None) -> str:
    return "" if folder is None else str(folder.path / "rabbitllm")


def _of_memory(machine: MachineInfo) -> Iterator[Advice]:
    memory = machine.memory
    if memory is None:
        return
    named = [(one.room, f"the control group {one.folder} allows {size(one.limit)}") for one in memory.groups]
    named += [(one.room, f"{one.name} allows {size(one.limit)}") for one in memory.limits]
    room, limit = min(named, default=(memory.free, ""))
    why = f": {limit}" if room < memory.free else ""
    if memory.usable < LEAST_MEMORY:
        yield Advice(True, f"Only {size(memory.usable)} of RAM can be had{why}. End other programs, or allow more.")
    elif memory.usable < LITTLE_MEMORY:
        text = f"Only {size(memory.usable)} of RAM can be had{why}: most of a model is read again for each token"
        yield Advice(False, f"{text}. End other programs, or allow more.")


def _of_gpus(machine: MachineInfo) -> Iterator[Advice]:
    gpus = machine.gpus
    if gpus is None:
        return
    if gpus.driver and not gpus.found and gpus.torch is not None:
        text = f"NVIDIA's driver is there, but torch {gpus.torch} finds no GPU: it may be built for the CPU, or for"
        command = "pip install --upgrade --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
        yield Advice(False, f"{text} a newer driver, or CUDA_VISIBLE_DEVICES hides it.", command)
    for gpu in gpus.found:
        if gpu.free < gpu.total // 2:
            text = f"{gpu.device}: {size(gpu.total - gpu.free)} of {size(gpu.total)} are taken by other programs"
            yield Advice(False, f"{text} (or by an earlier cell of this notebook).", "nvidia-smi")


def _of_processor(machine: MachineInfo) -> Iterator[Advice]:
    processor, gpus = machine.processor, machine.gpus
    if processor is None or gpus is None or gpus.found:
        return
    # the names of `hardware.py`; without AVX2 there is no kernel
    if processor.instructions.get("AVX2") and not processor.instructions.get("AVX512-BF16"):
        text = "Models that are not compressed compute in bfloat16, for which this processor has no instructions"
        yield Advice(False, f"{text}: --fast-bfloat16 (fast_bfloat16=True) multiplies by a kernel that does without.")


def _of_hub(machine: MachineInfo) -> Iterator[Advice]:
    hub = machine.hub
    if hub is None:
        return
    if hub.offline:
        text = "HF_HUB_OFFLINE is set: only models that are here already can be used"
        yield Advice(False, f"{text}.", "unset HF_HUB_OFFLINE")
    elif not hub.reachable:
        kaggle = machine.host is not None and machine.host.name == "Kaggle"
        do = "Turn Internet on in the notebook's settings" if kaggle else "Look at the connection and the proxy"
        text = f"The hub does not answer at {hub.endpoint} ({hub.problem}). {do}; models that are here can be used"
        yield Advice(False, f"{text}, and HF_ENDPOINT names a mirror.")
    if not hub.token and hub.reachable:
        yield Advice(False, "There is no token for the hub: gated models (Llama) need one.", "hf auth login")


def _of_rates(machine: MachineInfo) -> Iterator[Advice]:
    reading = [rate.bytes_per_second for rate in machine.rates if rate.what.startswith("reading")]
    if reading and max(reading) < SLOW_DISK:
        text = f"The disk is read at {speed(max(reading))}: a model that does not fit in memory waits for it"
        yield Advice(False, f"{text}. Put layers on a local SSD (RABBITLLM_HOME), or use 4bit.")
