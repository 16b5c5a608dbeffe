"""Opens a file of weights in one way, takes one tensor and then all of them, in a fresh process: seconds and memory.

    python -m benchmarks.split.lazy_load_child '{"row": "safe_open", "path": "...", "first": "...", "longest": 1000}'

One JSON object on stdout. Each tensor is copied into the same memory, as filling a model would, and let go; what the
library itself holds, it holds to the end.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.measure import memory_of


class Opened(NamedTuple):
    """What a library gives: the tensors' names, and a way to get each."""

    names: Iterable[str]
    get: Callable[[str], Any]


def _torch_load(path: Path, **options: Any) -> Opened:
    import torch

    tensors = torch.load(path, weights_only=True, **options)
    return Opened(tensors, tensors.__getitem__)


def _torchhacks(path: Path) -> Opened:
    tensors = importlib.import_module("torchhacks").lazy_load(path)
    return Opened(tensors, tensors.__getitem__)


def _load_file(path: Path) -> Opened:
    from safetensors.torch import load_file

    tensors = load_file(path)
    return Opened(tensors, tensors.__getitem__)


def _safe_open(path: Path) -> Opened:
    from safetensors import safe_open

    opened = safe_open(path, "pt")
    return Opened(opened.keys(), opened.get_tensor)


def _rabbitllm(path: Path) -> Opened:
    import rabbitllm

    tensors = rabbitllm.lazy_load(path)
    return Opened(tensors, tensors.__getitem__)


OURS_TORCH, OURS_SAFETENSORS = "lazy_load, torch file", "lazy_load, safetensors"
TORCH_ROWS: dict[str, Callable[[Path], Opened]] = {
    "torch.load": _torch_load,
    "torch.load(mmap=True)": lambda path: _torch_load(path, mmap=True),
    "torchhacks": _torchhacks,
    OURS_TORCH: _rabbitllm,
}
SAFETENSORS_ROWS: dict[str, Callable[[Path], Opened]] = {
    "load_file": _load_file,
    "safe_open": _safe_open,
    OURS_SAFETENSORS: _rabbitllm,
}
_IMPORTED = ("torch", "numpy", "safetensors.torch", "rabbitllm.lazy.load", "rabbitllm.lazy.tensor")


def main() -> None:
    """Do the job that the command line describes."""
    job = json.loads(sys.argv[1])
    sys.path += job["packages"]
    for module in (*_IMPORTED, *(["torchhacks"] if job["row"] == "torchhacks" else [])):
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    target = torch.ones(job["longest"], dtype=torch.bfloat16)
    idle = memory_of(os.getpid())
    assert idle is not None
    found: dict[str, Any] = {"anonymous_idle": idle.anonymous}
    seconds = cpu = 0.0

    def timed(stage: str, work: Callable[[], object]) -> None:
        nonlocal seconds, cpu
        begun, used = time.perf_counter(), time.process_time()
        held.append(work())
        seconds, cpu = seconds + time.perf_counter() - begun, cpu + time.process_time() - used
        now = memory_of(os.getpid())
        assert now is not None
        memory = {"anonymous": now.anonymous - idle.anonymous, "mapped": now.file - idle.file}
        found[stage] = {"seconds": seconds, "cpu": cpu, **memory}

    held: list[Any] = []

    def copied(*names: str) -> None:
        for name in names:
            tensor = opened.get(name)
            target[: tensor.shape.numel()].view(tensor.shape).copy_(tensor)

    timed("open", lambda: (TORCH_ROWS | SAFETENSORS_ROWS)[job["row"]](Path(job["path"])))
    opened: Opened = held[0]
    timed("first", lambda: copied(job["first"]))
    timed("all", lambda: copied(*opened.names))
    found["bits"] = _digest(opened) if job["digest"] else ""
    found["versions"] = _versions()
    print(json.dumps(found))


def _digest(opened: Opened) -> str:
    """Of all tensors' names and bits, so that all rows can be seen to have read the same."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(opened.names):
        digest.update(name.encode() + torch.clone(opened.get(name)).view(torch.int16).numpy().data)
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "safetensors", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
