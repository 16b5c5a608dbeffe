"""Probes of memory, processor and GPUs. Each reads the state once, changes nothing, and raises errors it meets."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from rabbitllm.engine.free_memory import available_ram, group_limits, process_limits
from rabbitllm.estimate.doctor.records import Gpu, Gpus, Memory, Processor

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


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    """Whether NVIDIA's driver is installed, without loading torch."""
    return (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists() or _wsl()


def _wsl() -> bool:
    return shutil.which("nvidia-smi") is not None


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
