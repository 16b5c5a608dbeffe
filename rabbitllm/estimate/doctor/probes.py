"""Probes of memory, processor, GPUs, hub, packages and folders. Each reads the state once and may raise."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from rabbitllm.engine.free_memory import available_ram, group_limits, has_nvidia_driver, process_limits
from rabbitllm.estimate.doctor.records import Gpu, Gpus, Hub, Memory, Package, Processor
from rabbitllm.quant.schemes import check_compression
from rabbitllm.storage.folders import KAGGLE_TMP, KAGGLE_WORKING, Folder, Host, file_systems, folder_of
from rabbitllm.store import locations

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


def memory(root: Path = Path("/")) -> Memory:
    """Return the machine's memory, and what limits of control groups and of the process leave of it."""
    import psutil

    found = psutil.virtual_memory()
    groups, limits = tuple(group_limits(root)), tuple(process_limits(root))
    # read twice; other processes may have freed some in between
    return Memory(int(found.total), int(found.available), min(available_ram(), int(found.available)), groups, limits)


def processor(root: Path = Path("/")) -> Processor:
    """Return the processor's name, cores and instructions."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    words = {name.strip(): value.strip() for name, sign, value in (line.partition(":") for line in lines) if sign}
    flags = set((words.get("flags") or words.get("Features") or "").split())
    kinds = INSTRUCTIONS if "flags" in words else _ARM
    name = words.get("model name") or platform.processor() or platform.machine()
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return Processor(
        name,
        cores,
        min([float(allowed), *_quotas(root)]),
        {what: bool(marks & flags) for what, marks in kinds.items()} if flags else {},
    )


def _quotas(root: Path) -> list[float]:
    """Return the cores that control groups allow at a time (v2: cpu.max; v1: cpu.cfs_quota_us)."""
    found = []
    for folder, names in (("", ("cpu.max",)), ("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"))):
        try:
            words = " ".join((root / "sys/fs/cgroup" / folder / name).read_text() for name in names).split()
        except OSError:
            continue
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return found


def gpus(*, ask_torch: bool = True) -> Gpus:
    """Return the GPUs that torch can use.

    Args:
        ask_torch: load torch even without a sign of a GPU, which takes seconds.
    """
    driver = has_nvidia_driver()
    if not driver and not ask_torch:
        return Gpus((), False, None)
    import torch

    from rabbitllm.engine.devices import capability_suits_bf16

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (about.major, about.minor)
        bfloat16 = capability_suits_bf16(capability)
        found.append(Gpu(f"cuda:{index}", about.name, total, free, capability, bfloat16))
    return Gpus(tuple(found), driver, torch.__version__)


SECONDS = 3.0


def hub(seconds: float = SECONDS) -> Hub:
    """Send a request to the hub, unless that is forbidden; any answer means that it is reachable."""
    from huggingface_hub import constants, get_token

    endpoint, token = _harmless(constants.ENDPOINT), get_token() is not None
    if constants.is_offline_mode() if hasattr(constants, "is_offline_mode") else constants.HF_HUB_OFFLINE:
        return Hub(endpoint, True, None, None, token)
    from huggingface_hub.utils import get_session

    start = time.perf_counter()
    try:
        get_session().head(constants.ENDPOINT, timeout=seconds)
    except Exception as error:  # depends on huggingface_hub's HTTP library, and on proxies
        return Hub(endpoint, False, False, None, token, f"{type(error).__name__}: {error}".split("\n")[0])
    return Hub(endpoint, False, True, time.perf_counter() - start, token)


def _harmless(address: str) -> str:
    """Return an address without a possible password."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


NAME = "rabbitllm"
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
_LOADED: Mapping[str, Callable[[], object]] = {
    "torch": lambda: importlib.import_module("torch"),
    "transformers": lambda: importlib.import_module("transformers"),
    "bitsandbytes": lambda: check_compression("4bit"),
    "numba": lambda: importlib.import_module("numba"),
}
"""Packages with compiled parts, which may not fit this machine -> a function that loads them."""


def packages(*, load: bool = True) -> tuple[Package, ...]:
    """Return all packages that are used, the essential first.

    Args:
        load: try to import those with compiled parts, which takes seconds.
    """
    demands = _demands()
    found = []
    for names, essential, optional in ((ESSENTIAL, True, False), (WANTED, False, False), (OPTIONAL, False, True)):
        for name, brings in names.items():
            found.append(_package(name, brings, demands.get(_plain(name), ""), essential, optional, load))
    return tuple(found)


def _package(name: str, brings: str, wanted: str, essential: bool, optional: bool, load: bool) -> Package:
    try:
        version: str | None = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    fits = version is not None and _fits(version, wanted)
    problem = _loading(_LOADED[name]) if load and version is not None and name in _LOADED else None
    return Package(name, version, wanted, fits, brings, essential, optional, problem)


def _loading(load: Callable[[], object]) -> str | None:
    """Return why a package cannot be loaded; None if it can."""
    try:
        load()
    except Exception as error:  # a broken library may raise anything
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return None


def _demands() -> dict[str, str]:
    """Return package -> required versions; empty if this package is on the path but not installed."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires(NAME) or []:
            with contextlib.suppress(InvalidRequirement):
                one = Requirement(line)
                if str(one.specifier):
                    found[_plain(one.name)] = str(one.specifier)
    return found


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _fits(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return not wanted or SpecifierSet(wanted).contains(version, prereleases=True)


SPLITS = "splits of hub models"
CACHE = "hub cache"
TEMPORARY = "temporary files"
HERE = "this folder"


def folders(known: Host | None = None, mounts: Path = Path("/proc/self/mountinfo")) -> tuple[Folder, ...]:
    """Return the folders that weights pass through, each path once; the one for layer files first."""
    from huggingface_hub import constants

    wanted = [
        (SPLITS, locations.home()),
        (CACHE, Path(constants.HF_HUB_CACHE)),
        (HERE, Path.cwd()),
        (TEMPORARY, Path(tempfile.gettempdir())),
        *(("Kaggle", path) for path in (KAGGLE_TMP, KAGGLE_WORKING) if path.exists()),
    ]
    uses: dict[Path, list[str]] = {}
    for use, path in wanted:
        uses.setdefault(path.expanduser().absolute(), []).append(use)
    kinds = file_systems(mounts)
    return tuple(folder_of(tuple(found), path, kinds, known) for path, found in uses.items())
