"""The machine and the versions that results name."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
"""Instruction sets, as Linux names them, that change the speed of products."""
_PACKAGES = ("torch", "transformers", "numpy", "numba", "bitsandbytes", "safetensors", "huggingface_hub")


def describe_machine(work: Path) -> dict[str, Any]:
    """Processor, cores, instruction sets, RAM, kernel, and the file system of the work folder."""
    flags = _field("/proc/cpuinfo", "flags").split()
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": " ".join(name for name in _SETS if name in flags) or "none of them",
        "ram_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "file_system": said(["df", "--output=fstype", str(work)])[-1],
    }


def versions_here(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Of the interpreter that runs the benchmark, and of these packages if they are installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _field(path: str, name: str) -> str:
    with open(path) as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "0 unknown")


def said(command: list[str]) -> list[str]:
    """The lines that a program prints."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines() or ["unknown"]
