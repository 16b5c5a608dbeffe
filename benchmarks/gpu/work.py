"""One rate of the link, and generating with the GPU's memory capped.

The cap is torch's own (`set_per_process_memory_fraction`): its allocator, through which every implementation here gets
all of its memory, refuses what is beyond it. So it binds all of them alike, those that plan for a limit and those that
know of none, and no program can pass it unseen; a process's CUDA context and its libraries are not counted, and are the
same for all. `max_memory` alone would bind only those that can be told.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.lib import worker

LINK_FIELDS = "driver_version,pcie.link.gen.current,pcie.link.width.current,pcie.link.gen.max,pcie.link.width.max"
COPY_BYTES = 256 << 20
COPY_TURNS = 9
BRINGING_TURNS = 2


class Cuda:
    """The first GPU."""

    device = "cuda:0"
    """What a model is asked to compute on."""
    inputs = "cuda:0"
    """Where its inputs go."""
    key: int | str = 0
    """In accelerate's `max_memory`."""
    copy_bytes = COPY_BYTES

    def begin(self, vram: int | None) -> None:
        """Make what any use of the GPU makes once, and refuse more than `vram` bytes from here on."""
        import torch

        if vram is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(vram / total, 1.0), 0)
        square = torch.ones(64, 64, dtype=torch.float16, device=self.device)
        (square @ square).sum().item()
        torch.cuda.reset_peak_memory_stats(0)

    def synchronise(self) -> None:
        import torch

        torch.cuda.synchronize(0)

    def dtype(self) -> str:
        """What bfloat16 weights are computed in here; GPUs before compute capability 8.0 only emulate it."""
        import torch

        return "bfloat16" if torch.cuda.get_device_capability(0) >= (8, 0) else "float16"

    def peaks(self) -> dict[str, int]:
        """Bytes that the allocator held at most, bytes of tensors at most, and bytes of the GPU in use now, by all."""
        import torch

        free, total = torch.cuda.mem_get_info(0)
        return {
            "vram_reserved": torch.cuda.max_memory_reserved(0),
            "vram_allocated": torch.cuda.max_memory_allocated(0),
            "vram_in_use": total - free,
        }

    def buffers(self) -> tuple[Any, Any]:
        """`copy_bytes` of pinned host memory, and as many on the GPU."""
        import torch

        host = torch.ones(self.copy_bytes, dtype=torch.uint8).pin_memory()
        return host, torch.empty(self.copy_bytes, dtype=torch.uint8, device=self.device)

    def facts(self, index: int = 0) -> dict[str, Any]:
        """What a table of figures must say of the hardware."""
        import torch

        found = torch.cuda.get_device_properties(index)
        which = ["-i", f"GPU-{found.uuid}"] if hasattr(found, "uuid") else []
        return {
            "gpu": found.name,
            "vram_gib": round(found.total_memory / 2**30, 1),
            "vram_bytes": found.total_memory,
            "compute_capability": f"{found.major}.{found.minor}",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **link_of(_said(["nvidia-smi", f"--query-gpu={LINK_FIELDS}", "--format=csv,noheader", *which])),
        }


def link_of(line: str) -> dict[str, str]:
    """Driver and link from a line of nvidia-smi with `LINK_FIELDS`; "unknown" where it says nothing."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(LINK_FIELDS.split(",")):
        return {"driver": "unknown", "link": "unknown"}
    driver, generation, width, most, widest = fields
    return {"driver": driver, "link": f"PCIe {generation} x{width} (at most {most} x{widest})"}


def _said(command: list[str]) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
        return said[0] if said else ""
    return ""


def chosen(name: str) -> Any:
    """`Cuda`, or the class that "module:class" names."""
    if not name:
        return Cuda()
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)()


def forget_files(folders: Sequence[str]) -> None:
    """Drop the page cache of every file below folders, but what a process has mapped."""
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


class GpuWork:
    """What is measured, and the GPU: CUDA's, or a class of the tests as "module:class", limited to `vram` bytes."""

    def __init__(self, gpu: str, vram: int | None = None) -> None:
        self.gpu = chosen(gpu)
        self.gpu.begin(vram)

    def probe(self) -> dict[str, Any]:
        """Facts of the hardware, and bytes a second of copies from pinned memory, the median of several."""
        host, there = self.gpu.buffers()
        seconds = []
        for _ in range(COPY_TURNS):
            self.gpu.synchronise()
            begun = time.perf_counter()
            there.copy_(host, non_blocking=True)
            self.gpu.synchronise()
            seconds.append(time.perf_counter() - begun)
        return {
            "copy_speed": len(host) / statistics.median(seconds[1:]),
            "dtype": self.gpu.dtype(),
            "facts": self.gpu.facts(),
        }

    def decode(self, job: dict[str, Any]) -> dict[str, Any]:
        """Load a model and generate greedily; of this project's, also what a pass takes that only brings, and one that
        only computes."""
        begun = time.perf_counter()
        model = LOADERS[job["loader"]](job, self.gpu)
        loaded = time.perf_counter()
        timed = self._generate(model, job)
        peaks = self.gpu.peaks()
        own = {}
        if getattr(model, "streamer", None) is not None:
            own = {
                "bring_seconds": self._bring_alone(model, job),
                "compute_seconds": self._compute_alone(model, job),
                "planned_read_bytes": model.placement.streamed_bytes,
            }
        copied = copied_bytes(model, job["loader"])
        return {**timed, **peaks, **own, "load_seconds": loaded - begun, "copied_bytes": copied}

    def _generate(self, model: Any, job: dict[str, Any]) -> dict[str, Any]:
        """The clock stands still after each token, until files are out of the page cache. What is read ahead meanwhile
        counts for nothing: a few layers at most, and of every implementation that reads ahead."""
        clock = worker.Clock(lambda: forget_files(job["cold"]))
        found: dict[str, Any] = worker.generate(model, job["prompt"], job["tokens"], clock, self.gpu.inputs)
        return found

    def _bring_alone(self, model: Any, job: dict[str, Any]) -> float:
        """Seconds of a pass that brings all it must and computes nothing: of the last of a few, since the first finds
        brought what was brought ahead while nothing was asked for."""
        taken = 0.0
        for _ in range(BRINGING_TURNS):
            forget_files(job["cold"])
            begun = time.perf_counter()
            for executor in model.streamer.executors.values():
                units = list(executor.follower)
                for at, unit in enumerate(units):
                    loaded = executor.loader.take(unit)
                    executor.loader.prefetch([*units[at + 1 :], *units[:at]])
                    executor.loader.give_back(loaded)
            self.gpu.synchronise()
            taken = time.perf_counter() - begun
        return taken

    def _compute_alone(self, model: Any, job: dict[str, Any]) -> float:
        """Seconds of a token that is computed with whatever the buffers hold: what it says means nothing."""
        with contextlib.ExitStack() as held:
            for executor in model.streamer.executors.values():
                held.enter_context(_brought_to_a_stop(executor))
            found: float = self._generate(model, job | {"cold": []})["token_seconds"]
        return found


@contextlib.contextmanager
def _brought_to_a_stop(executor: Any) -> Iterator[None]:
    """Let a executor of this project give out one of its buffers as it is, for every unit, and bring nothing."""
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


def copied_bytes(model: Any, loader: str) -> int | None:
    """What a pass copies to the GPU, as far as a model tells: this project's says so, and of one that accelerate
    placed it is what has no memory of its own between two passes; None for others."""
    placement = getattr(model, "placement", None)
    if placement is not None:
        return int(placement.uploaded_bytes)
    if loader != "placed":
        return None
    brought = (parameter for parameter in model.parameters() if parameter.device.type == "meta")
    return int(sum(parameter.numel() * parameter.element_size() for parameter in brought))


def _load_layered(job: dict[str, Any], gpu: Any) -> Any:
    """RabbitLLM 1.1, AirLLM and this project."""
    import torch

    package = importlib.import_module(job["package"])
    limits = {"max_memory": _limits(job, 0)} if job["is_ours"] else {}
    if job["is_ours"] and job["told_ram"] is not None:
        # where no control group says it: else it would read through a page cache that is emptied behind it
        planning: Any = importlib.import_module("rabbitllm.engine.load_plan")
        planning.available_ram = lambda: job["told_ram"]
    dtype = job["dtype"] if job["is_ours"] else getattr(torch, job["dtype"])
    return package.AutoModel.from_pretrained(
        job["checkpoint"], device=gpu.device, dtype=dtype, **limits, **job["options"]
    )


def _load_placed(job: dict[str, Any], gpu: Any) -> Any:
    """transformers, placed by accelerate: on the GPU what it may hold, then in memory, the rest offloaded to disk."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        job["checkpoint"],
        dtype=getattr(torch, job["dtype"]),
        device_map="auto",
        max_memory=_limits(job, gpu.key),
        offload_folder=job["offload_folder"],
    )


def _limits(job: dict[str, Any], key: int | str) -> dict[int | str, int]:
    """In accelerate's form, for those who plan by it."""
    return {"cpu": job["host_bytes"], key: job["weights_bytes"]}


LOADERS = {"layered": _load_layered, "placed": _load_placed}
