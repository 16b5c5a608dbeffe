"""`rabbitllm doctor`: runs all probes, estimates the models of the short list, and gives advice.

A probe reads the state of the machine once. A probe that fails adds a line to the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import platform
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit, urlunsplit

from rabbitllm.base.forks import DaemonThread, fulfil
from rabbitllm.base.grouping import grouped
from rabbitllm.base.terminal import size, speed
from rabbitllm.base.transformers_version import TESTED, newer_than_tested, version_of
from rabbitllm.engine.free_memory import available_ram, group_limits, has_nvidia_driver, proc_fields, process_limits
from rabbitllm.estimate import outline
from rabbitllm.estimate.cost_model import Speed
from rabbitllm.estimate.doctor.records import (
    Advice,
    AtCompression,
    Failure,
    Gpu,
    Gpus,
    Hub,
    MachineInfo,
    Memory,
    ModelEstimate,
    Need,
    Package,
    Processor,
    Report,
)
from rabbitllm.estimate.outline import Published
from rabbitllm.estimate.split_estimate import ROUTES, STANDARD
from rabbitllm.quant.schemes import bitsandbytes
from rabbitllm.storage.durable import ScratchFolder
from rabbitllm.storage.folders import KAGGLE_TMP, KAGGLE_WORKING, Folder, Host, file_systems, folder_of, host_of
from rabbitllm.store import locations
from rabbitllm.version import TRANSFORMERS, __version__

if TYPE_CHECKING:
    from rabbitllm.estimate.machine import Machine

Found = TypeVar("Found")
HUB_SECONDS = 4.0
"""Time limit for the hub, name resolution included."""
QUICK_HUB_SECONDS = 1.5
MEASURING_SECONDS = 30.0
"""Time after which no further model is begun: a machine with a load of 8 takes a third of that for all."""
MEASURING_BYTES = 3 << 30
"""Bytes of RAM below which nothing is measured: torch, transformers and the measured matrices take 2.4 GB of it."""

# Probes of memory, processor, GPUs, hub, packages and folders; each may raise an error.

INSTRUCTIONS: Mapping[str, frozenset[str]] = {
    "AVX2": frozenset({"avx2"}),
    "AVX-512": frozenset({"avx512f"}),
    "VNNI": frozenset({"avx512_vnni", "avx_vnni"}),
    "AVX512-BF16": frozenset({"avx512_bf16"}),
    "AMX": frozenset({"amx_tile"}),
    "SHA": frozenset({"sha_ni", "sha2"}),
}
"""Name -> the flags of /proc/cpuinfo for it. Products use the first five, digests of shards the last."""
_ARM = {
    "NEON": frozenset({"asimd"}),
    "BF16": frozenset({"bf16"}),
    "I8MM": frozenset({"i8mm"}),
    "SHA": frozenset({"sha2"}),
}


def probe_memory(root: Path = Path("/")) -> Memory:
    """Return the machine's memory, with the limits of control groups and of the process."""
    import psutil

    memory = psutil.virtual_memory()
    groups, limits = tuple(group_limits(root)), tuple(process_limits(root))
    # memory is read twice; other processes may free some in between
    return Memory(int(memory.total), int(memory.available), min(available_ram(), int(memory.available)), groups, limits)


def probe_processor(root: Path = Path("/")) -> Processor:
    """Return the processor's name, cores and instructions."""
    values = proc_fields(root / "proc/cpuinfo")
    flags = set((values.get("flags") or values.get("Features") or "").split())
    instruction_flags = INSTRUCTIONS if "flags" in values else _ARM
    name = values.get("model name") or platform.processor() or platform.machine()
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    instructions = {name: bool(needed & flags) for name, needed in instruction_flags.items()} if flags else {}
    return Processor(name, cores, min([float(allowed), *_quotas(root)]), instructions)


def _quotas(root: Path) -> list[float]:
    """Return the cores that control groups allow at a time (v2: cpu.max; v1: cpu.cfs_quota_us)."""
    quotas = []
    for folder, names in (("", ("cpu.max",)), ("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"))):
        try:
            quota = " ".join((root / "sys/fs/cgroup" / folder / name).read_text() for name in names).split()
        except OSError:
            continue
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
            quotas.append(int(quota[0]) / int(quota[1]))
    return quotas


def probe_gpus(*, ask_torch: bool = True) -> Gpus:
    """Return the GPUs that torch can use.

    Args:
        ask_torch: load torch even without NVIDIA's driver; this takes seconds.
    """
    driver = has_nvidia_driver()
    if not driver and not ask_torch:
        return Gpus((), False, None)
    import torch

    from rabbitllm.engine.devices import capability_suits_bf16, missing_code

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if missing_code(index) is not None:
            continue
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        bfloat16 = capability_suits_bf16(capability)
        gpus.append(Gpu(f"cuda:{index}", properties.name, total, free, capability, bfloat16))
    return Gpus(tuple(gpus), driver, torch.__version__)


def probe_hub(seconds: float = 3.0) -> Hub:
    """Send a request to the hub, unless that is forbidden; any answer means that it is reachable."""
    from huggingface_hub import constants, get_token

    address = urlsplit(constants.ENDPOINT)
    endpoint = urlunsplit((address.scheme, address.netloc.rpartition("@")[2], address.path, "", ""))  # no password
    token = get_token() is not None
    if constants.is_offline_mode():
        return Hub(endpoint, True, None, None, token)
    from huggingface_hub.utils import get_session

    start = time.perf_counter()
    try:
        get_session().head(constants.ENDPOINT, timeout=seconds)
    except Exception as error:  # depends on huggingface_hub's HTTP library, and on proxies
        return Hub(endpoint, False, False, None, token, _first_line(error))
    return Hub(endpoint, False, True, time.perf_counter() - start, token)


ESSENTIAL: Mapping[str, str] = {
    "torch": "all computation",
    "transformers": "the models",
    "safetensors": "the format of layer files",
    "huggingface_hub": "downloads of models",
    "accelerate": "moving outputs between devices",
    "psutil": "measuring free memory",
    "filelock": "locks between processes",
}
WANTED: Mapping[str, str] = {
    "bitsandbytes": "compression, 8bit and 4bit",
    "numba": "full speed of compressed models on the CPU",
}
OPTIONAL: Mapping[str, str] = {
    "hf_xet": "faster downloads on the standard route",
    "matplotlib": "plots (--plot)",
    "kernels": "transformers' own kernels for FP8 and MXFP4 on GPUs",
    "flash-attn": "FlashAttention 2, on GPUs with bfloat16",
    "sentencepiece": "tokenizers of some older models",
    "tiktoken": "tokenizers of some models",
    "compressed-tensors": "checkpoints in the compressed-tensors format",
}
"""Packages -> their use."""


def _load_transformers() -> None:
    import transformers  # noqa: F401

    if newer_than_tested():
        from rabbitllm.engine.transformers_check import try_transformers
        from rabbitllm.generation import transformers_api  # noqa: F401  checks its parts

        try_transformers()


_LOADED: Mapping[str, Callable[[], object]] = {
    "torch": lambda: importlib.import_module("torch"),
    "transformers": _load_transformers,
    "bitsandbytes": bitsandbytes,
    "numba": lambda: importlib.import_module("numba"),
}
"""Packages with compiled parts, which may not fit this machine -> a function that loads them."""


def probe_packages(*, load: bool = True) -> tuple[Package, ...]:
    """Return all packages that are used, the essential first.

    Args:
        load: try to import those with compiled parts; this takes seconds.
    """
    from packaging.utils import canonicalize_name

    versions = _wanted_versions()
    return tuple(
        _package(name, use, versions.get(canonicalize_name(name), ""), uses, load)
        for uses in (ESSENTIAL, WANTED, OPTIONAL)
        for name, use in uses.items()
    )


def _package(name: str, use: str, accepted: str, uses: Mapping[str, str], load: bool) -> Package:
    from packaging.specifiers import SpecifierSet

    version = version_of(name)
    fits = version is not None and (not accepted or SpecifierSet(accepted).contains(version, prereleases=True))
    problem = None
    if load and version is not None and name in _LOADED:
        try:
            _LOADED[name]()
        except Exception as error:  # a broken library may raise anything
            problem = _first_line(error)
    return Package(name, version, accepted, fits, use, uses is ESSENTIAL, uses is OPTIONAL, problem)


def _wanted_versions() -> dict[str, str]:
    """Return package -> required versions; empty if this package is on the path but not installed."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    versions: dict[str, str] = {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("rabbitllm") or []:
            with contextlib.suppress(InvalidRequirement):
                requirement = Requirement(line)
                if str(requirement.specifier):
                    versions[canonicalize_name(requirement.name)] = str(requirement.specifier)
    return versions


SPLITS = "splits of hub models"
CACHE = "hub cache"
TEMPORARY = "temporary files"
HERE = "this folder"


def probe_folders(host: Host | None = None) -> tuple[Folder, ...]:
    """Return the folders of weights, each path once; the one for layer files first."""
    from huggingface_hub import constants

    named = [
        (SPLITS, locations.home()),
        (CACHE, Path(constants.HF_HUB_CACHE)),
        (HERE, Path.cwd()),
        (TEMPORARY, Path(tempfile.gettempdir())),
        *(("Kaggle", path) for path in (KAGGLE_TMP, KAGGLE_WORKING) if path.exists()),
    ]
    uses = grouped((path.expanduser().absolute(), use) for use, path in named)
    kinds = file_systems()
    return tuple(folder_of(tuple(folder_uses), path, kinds, host) for path, folder_uses in uses.items())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


# The report.


class Probes:
    """Runs probes, and records which of them failed."""

    def __init__(self, on_probe: Callable[[str], None]) -> None:
        self.failures: list[Failure] = []
        self._on_probe = on_probe

    def run(self, name: str, probe: Callable[[], Found]) -> Found | None:
        """Return the result of a probe; if it fails, record that and return None."""
        self._on_probe(name)
        try:
            return probe()
        except Exception as error:  # one broken part of a machine must not hide the others
            self.failures.append(Failure(name, _first_line(error)))
            return None

    def begin(self, name: str, probe: Callable[[], Found], seconds: float) -> Callable[[], Found | None]:
        """Begin a probe that may not return; the returned function waits for it until `seconds` from now at most."""
        answer: Future[Found] = Future()
        until = time.perf_counter() + seconds
        thread = DaemonThread(fulfil, f"probe-{name}", answer, probe)
        thread.start()

        def wait() -> Found:
            thread.join(max(until - time.perf_counter(), 0))
            if not answer.done():
                raise TimeoutError(f"no answer within {seconds:.0f} s")
            return answer.result()

        return lambda: self.run(name, wait)


def examine(*, quick: bool = False, every: bool = False, on_probe: Callable[[str], None] = lambda name: None) -> Report:
    """Run all probes and return the report.

    Args:
        quick: measure nothing and load no libraries: seconds less, and no times of tokens.
        every: also estimate times of models for which the disk has no room.
        on_probe: called with the name of each probe.
    """
    start = time.perf_counter()
    probes = Probes(on_probe)
    memory = probes.run("memory", probe_memory)  # before any library takes its share
    hub = probes.begin("the hub", probe_hub, QUICK_HUB_SECONDS if quick else HUB_SECONDS)
    host = probes.run("the host", lambda: host_of(os.environ))
    folders = probes.run("disks", lambda: probe_folders(host)) or ()
    models = [
        estimate
        for model in probes.run("the list of models", outline.published) or ()
        if (estimate := probes.run(model.repository, partial(on_disk, model, folders)))
    ]
    packages = probes.run("packages", lambda: probe_packages(load=not quick)) or ()
    gpus = probes.run("GPUs", lambda: probe_gpus(ask_torch=not quick))
    rates: tuple[Speed, ...] = ()
    devices: tuple[str, ...] = ()
    if not quick and (memory is None or memory.usable >= MEASURING_BYTES):
        rates, models, devices = _measured(probes, models, every)
    elif not quick and memory is not None:
        little = f"{size(memory.usable)} of RAM is available; measuring takes up to {size(MEASURING_BYTES)}"
        probes.failures.append(Failure("times", little))
    processor = probes.run("the processor", probe_processor)
    machine = MachineInfo(memory, processor, gpus, folders, host, hub(), packages, rates)
    smallest = min((need.disk_bytes for model in models for choice in model.at for need in choice.needs), default=0)
    advice = advise(machine, smallest)
    seconds = time.perf_counter() - start
    return Report(__version__, machine, tuple(models), devices, advice, tuple(probes.failures), seconds)


def _measured(
    probes: Probes, models: list[ModelEstimate], every: bool
) -> tuple[tuple[Speed, ...], list[ModelEstimate], tuple[str, ...]]:
    """Measure the rates; return them, the models with their times, and the devices they would compute on."""
    engine = probes.run("the engine", lambda: importlib.import_module("rabbitllm.estimate.machine"))  # takes seconds
    if engine is None:
        return (), models, ()
    published = {model.repository: model for model in outline.published()}
    rates: list[Speed] = []

    def measure_all() -> tuple[str, ...]:
        with engine.this_machine(locations.home(), MIN_FREE_BYTES) as machine:
            for measure, name in engine.measurements(machine):
                rate = probes.run(name, measure)
                rates.extend([Speed(name, rate)] if rate else [])
            for device in machine.devices:  # once, for all models
                probes.run(f"small operations on {device.name}", partial(machine.overhead, device.name))
            start = time.perf_counter()
            for index, model in enumerate(models):
                if time.perf_counter() - start > MEASURING_SECONDS and not every:
                    why = f"estimating took longer than {MEASURING_SECONDS:.0f} s: this machine is busy"
                    probes.failures.append(Failure(f"speed of {model.name} and later models", why))
                    break
                timed = partial(with_times, published[model.repository], model, machine, locations.home(), every)
                models[index] = probes.run(model.name, timed) or model
            return tuple(device.name for device in machine.devices)

    devices = probes.run("measuring", measure_all) or ()
    return tuple(rates), models, devices


# The models of the short list: disk use by their sizes, generation as in a plan.

MIN_FREE_BYTES = 1000**3
"""Bytes of a disk to keep free, as in a split by default."""


def on_disk(model: Published, folders: Iterable[Folder]) -> ModelEstimate:
    """Return a model's disk use at each compression and on each route, without generation.

    Args:
        model: the model.
        folders: those of splits and of the hub cache are used.
    """
    model_outline = model.outline
    by_use = {use: folder for folder in folders for use in folder.uses}
    choices = tuple(
        AtCompression(compression, output, tuple(_need(name, model, output, by_use) for name in ROUTES))
        for compression in model_outline.compressions
        for output in [model_outline.output_bytes(compression)]
    )
    return ModelEstimate(model.repository, model.parameters, model_outline.checkpoint_bytes, choices, model.quantized)


def _need(route: str, model: Published, output: int, by_use: Mapping[str, Folder]) -> Need:
    splits, cache = by_use.get(SPLITS), by_use.get(CACHE)
    downloads = model.outline.checkpoint_bytes if route == STANDARD else 0
    created = output + (0 if route == STANDARD else ROUTES[route].files * model.largest_shard_bytes)
    if splits is None:
        return Need(route, created + downloads, 0)
    if cache is None or cache.disk == splits.disk:
        missing = created + downloads + MIN_FREE_BYTES - splits.room
    else:
        lacking = downloads + MIN_FREE_BYTES - cache.room if downloads else 0
        missing = max(created + MIN_FREE_BYTES - splits.room, lacking)
    return Need(route, created + downloads, max(missing, 0))


def with_times(
    model: Published, estimate: ModelEstimate, machine: Machine, folder: Path, every: bool = False
) -> ModelEstimate:
    """Return the same estimate with times of generation; a problem at one compression is recorded there.

    Args:
        model: the model.
        estimate: its estimate from `on_disk`.
        machine: the machine.
        folder: the future folder of layer files.
        every: also for compressions for which the disk has no room.
    """
    from rabbitllm.estimate.predict import predict_outline

    def timed(choice: AtCompression) -> AtCompression:
        with ScratchFolder() as work:
            try:
                _, generation = predict_outline(model.outline, choice.compression, folder, machine, work)
            except Exception as error:  # one failed estimate must not end the list
                return dataclasses.replace(choice, problem=str(error).split("\n")[0] or type(error).__name__)
        return dataclasses.replace(choice, generation=generation)

    return dataclasses.replace(
        estimate, at=tuple(timed(choice) if every or choice.route is not None else choice for choice in estimate.at)
    )


# Advice: what is missing or could be better, each with its command if there is one.


MIN_MEMORY = 1 << 30
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
    memory, gpus, processor, hub = machine.memory, machine.gpus, machine.processor, machine.hub
    items = [*_of_packages(machine.packages), *_of_disks(machine.folders, needed)]
    items += _of_memory(memory) if memory is not None else ()
    items += _of_gpus(gpus) if gpus is not None else ()
    items += _of_processor(processor) if processor is not None and gpus is not None and not gpus.found else ()
    items += _of_hub(hub, machine.host) if hub is not None else ()
    items += _of_rates(machine.rates)
    return tuple(sorted(items, key=lambda advice: not advice.essential))


def _of_packages(packages: Iterable[Package]) -> Iterator[Advice]:
    for package in packages:
        if package.name == "transformers" and package.sound and newer_than_tested():
            text = f"transformers {package.found} is newer than the tested versions ({' to '.join(TRANSFORMERS)})"
            checks = "The parts that RabbitLLM uses are checked here, unless --quick is given, and at the first load"
            yield Advice(False, f"{text}. {checks}. If a model fails:", f"pip install {shlex.quote(TESTED)}")
        if package.sound or (package.optional and package.found is None):
            continue
        name = TESTED if package.name == "transformers" and package.fits else package.name + package.wanted
        command = f"pip install --upgrade {shlex.quote(name)}"
        yield Advice(package.essential, f"{_state_of(package)} It is for {package.brings}.", command)


def _state_of(package: Package) -> str:
    if package.found is None:
        return f"{package.name} is missing."
    if package.problem is not None:
        return f"{package.name} {package.found} cannot be loaded ({package.problem})."
    return f"{package.name} {package.found} is not supported; expected {package.wanted}."


def _of_disks(folders: Sequence[Folder], needed: int) -> Iterator[Advice]:
    splits = next((folder for folder in folders if SPLITS in folder.uses), None)
    if splits is None:
        return
    others = [folder for folder in folders if folder is not splits and folder.writable and not folder.in_memory]
    roomiest = max(others, key=lambda folder: folder.room, default=None)
    better = roomiest if roomiest is not None and roomiest.room >= max(needed, 2 * splits.room) else None
    command = f"export RABBITLLM_HOME={shlex.quote(str(better.path / 'rabbitllm'))}" if better is not None else None
    elsewhere = f"; {better.path} has {size(better.room)}" if better is not None else ""
    name = "set RABBITLLM_HOME to a folder on another disk"
    if not splits.writable:
        yield Advice(True, f"{splits.path}, the folder for splits of hub models, is not writable: {name}.", command)
    elif splits.room < needed:
        need = f"{size(splits.room)}; the smallest model takes {size(needed)}{elsewhere}"
        yield Advice(True, f"Too little disk at {splits.path}: {need}. Free disk space, or {name}.", command)
    elif splits.in_memory:
        text = f"{splits.path} is in memory ({splits.filesystem}); layer files there use RAM"
        yield Advice(False, f"{text}: {name}.", command)
    elif splits.room < LITTLE_DISK:
        text = f"Only {size(splits.room)} is available at {splits.path}{elsewhere}: larger models do not fit"
        yield Advice(False, f"{text}; {name}, or use --dir.", command)
    elif better is not None:
        yield Advice(False, f"{splits.path} has {size(splits.room)}{elsewhere}: {name} for large models.", command)


def _of_memory(memory: Memory) -> Iterator[Advice]:
    named = [(group.room, f"the control group {group.folder} allows {size(group.limit)}") for group in memory.groups]
    named += [(limit.room, f"{limit.name} allows {size(limit.limit)}") for limit in memory.limits]
    room, limit = min(named, default=(memory.free, ""))
    why = f": {limit}" if room < memory.free else ""
    if memory.usable < LITTLE_MEMORY:
        essential = memory.usable < MIN_MEMORY
        effect = "" if essential else ": each token reads most of a model again"
        text = f"Only {size(memory.usable)} of RAM is available{why}{effect}"
        yield Advice(essential, f"{text}. End other programs, or raise the limit.")


def _of_gpus(gpus: Gpus) -> Iterator[Advice]:
    if gpus.driver and not gpus.found and gpus.torch is not None:
        text = f"NVIDIA's driver is installed, but torch {gpus.torch} can use no GPU: it may be built for the CPU, for"
        command = "pip install --upgrade --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
        yield Advice(False, f"{text} newer GPUs or a newer driver, or CUDA_VISIBLE_DEVICES hides it.", command)
    for gpu in gpus.found:
        if gpu.free < gpu.total // 2:
            text = f"{gpu.device}: other programs use {size(gpu.total - gpu.free)} of {size(gpu.total)}"
            yield Advice(False, f"{text} (or by an earlier cell of this notebook).", "nvidia-smi")


def _of_processor(processor: Processor) -> Iterator[Advice]:
    if processor.instructions.get("AVX2"):
        what = "tokens" if processor.instructions.get("AMX") else "prompts and tokens"
        by = "fast_bfloat16=True, as the commands do by default (--no-fast-bfloat16); the last bits differ"
        yield Advice(False, f"Uncompressed models compute {what} faster with {by}.")


def _of_hub(hub: Hub, host: Host | None) -> Iterator[Advice]:
    if hub.offline:
        text = "HF_HUB_OFFLINE is set: only models on this machine can be used"
        yield Advice(False, f"{text}.", "unset HF_HUB_OFFLINE")
    elif not hub.reachable:
        kaggle = host is not None and host.name == "Kaggle"
        remedy = "Turn on Internet in the notebook's settings" if kaggle else "Check the connection and the proxy"
        text = f"The hub at {hub.endpoint} does not answer ({hub.problem}). {remedy}, or set HF_ENDPOINT to a mirror"
        yield Advice(False, f"{text}. Models on this machine can be used.")
    if not hub.token and hub.reachable:
        yield Advice(False, "No access token for the hub is set; gated models (Llama) need one.", "hf auth login")


def _of_rates(rates: Iterable[Speed]) -> Iterator[Advice]:
    reading = [rate.bytes_per_second for rate in rates if rate.what.startswith("reading")]
    if reading and max(reading) < SLOW_DISK:
        text = f"The disk reads only {speed(max(reading))}, which limits models that do not fit in memory"
        yield Advice(False, f"{text}. Put splits on a local SSD (RABBITLLM_HOME), or use 4bit.")
