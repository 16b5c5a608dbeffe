"""The GPUs of a step: CUDA's, whose copies can be delayed and whose waits interrupted, or those of the tests."""

from __future__ import annotations

import contextlib
import importlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.child import Place
from rabbitllm.engine.devices import CudaDevice

REHEARSED_BYTES = 1 << 34
"""Of a GPU in a rehearsal."""
LINK_FIELDS = "driver_version,pcie.link.gen.current,pcie.link.width.current,pcie.link.gen.max,pcie.link.width.max"


def sleep(device: torch.device, cycles: int) -> None:
    """Let the current stream of a GPU wait for so many cycles of its clock."""
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


class DelayedGpu(CudaDevice):
    """A GPU whose copies can be late and whose waits can be interrupted.

    Attributes:
        cycles: of its clock before each copy.
        waits: of the main thread for it.
        interrupt_at: number of the wait in which Ctrl-C comes.
    """

    cycles = 0
    waits = 0
    interrupt_at: int | None = None

    def upload(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Any:
        """Upload late."""
        if self.cycles:
            with torch.cuda.stream(self._copies):
                sleep(self.torch_device, self.cycles)
        return super().upload(host, device, after)

    def landed(self, ticket: Any) -> None:
        """Count a wait."""
        self._wait()
        super().landed(ticket)

    def synchronise(self) -> None:
        """Count a wait."""
        self._wait()
        super().synchronise()

    def _wait(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.waits += 1
            if self.waits == self.interrupt_at:
                raise KeyboardInterrupt


def gpus(place: Place) -> list[Any]:
    """All GPUs; in a rehearsal two devices of the tests."""
    if place.is_rehearsal:
        return [_tests().FakeGpu(index, capacity=REHEARSED_BYTES) for index in range(2)]
    return [DelayedGpu(index) for index in range(torch.cuda.device_count())]


def watched(place: Place) -> contextlib.AbstractContextManager[Any]:
    """A context in which the devices of the tests check every operation and count memory."""
    context: contextlib.AbstractContextManager[Any] = (
        _tests().watched() if place.is_rehearsal else contextlib.nullcontext()
    )
    return context


def _tests() -> Any:
    return importlib.import_module("tests.support.fake_gpu")


def is_cuda(gpu: Any) -> bool:
    """Whether it is not a device of the tests."""
    return isinstance(gpu, CudaDevice)


def forget_peak(gpu: Any) -> int:
    """Start a new peak; return the present bytes of tensors."""
    if is_cuda(gpu):
        gpu.empty_cache()
        torch.cuda.reset_peak_memory_stats(gpu.torch_device)
        return int(torch.cuda.memory_allocated(gpu.torch_device))
    gpu.peak = gpu.used
    return int(gpu.peak)


def peak(gpu: Any) -> int:
    """The most bytes of tensors since `forget_peak`."""
    return int(torch.cuda.max_memory_allocated(gpu.torch_device) if is_cuda(gpu) else gpu.peak)


def held(gpu: Any) -> int:
    """The most bytes that the allocator held since `forget_peak`."""
    return int(torch.cuda.max_memory_reserved(gpu.torch_device) if is_cuda(gpu) else gpu.peak)


def limit(gpu: Any, nbytes: int | None) -> None:
    """Refuse allocations beyond so many bytes; None for all that there is.

    This binds every implementation alike, since torch's allocator refuses; it does not count the CUDA context.
    """
    if not is_cuda(gpu):
        gpu.capacity = REHEARSED_BYTES if nbytes is None else nbytes
        return
    gpu.empty_cache()
    total = torch.cuda.get_device_properties(gpu.torch_device).total_memory
    share = 1.0 if nbytes is None else min(nbytes / total, 1.0)
    torch.cuda.set_per_process_memory_fraction(share, gpu.torch_device)


def seconds_of(gpus: Sequence[Any], work: Callable[[], Any], turns: int = 5) -> float:
    """The median of a few turns, after one to warm up."""
    taken = []
    for _ in range(turns + 1):
        for gpu in gpus:
            gpu.synchronise()
        begun = time.perf_counter()
        work()
        for gpu in gpus:
            gpu.synchronise()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def copy_rate(gpu: Any, nbytes: int, host: torch.Tensor) -> float:
    """Bytes a second of copies to a GPU, the median."""
    buffer = gpu.device_buffer(nbytes)
    return nbytes / seconds_of([gpu], lambda: copy_to([gpu], [host], [buffer]))


def copy_to(gpus: Sequence[Any], hosts: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    """Copy each of the tensors to one of the GPUs in turn, into its only buffer."""
    for number, host in enumerate(hosts):
        gpu, buffer = gpus[number % len(gpus)], buffers[number % len(gpus)]
        gpu.arrive(gpu.upload(host, buffer, gpu.leave()))


def facts(index: int) -> dict[str, Any]:
    """Name, memory, compute capability, CUDA, driver and link of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    which = ["-i", f"GPU-{properties.uuid}"] if hasattr(properties, "uuid") else []
    return {
        "gpu": properties.name,
        "vram_gib": round(properties.total_memory / 2**30, 1),
        "vram_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **link_of(_first_line(["nvidia-smi", f"--query-gpu={LINK_FIELDS}", "--format=csv,noheader", *which])),
    }


def link_of(line: str) -> dict[str, str]:
    """Driver and link from a line of nvidia-smi with `LINK_FIELDS`; "unknown" for another line."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(LINK_FIELDS.split(",")):
        return {"driver": "unknown", "link": "unknown"}
    driver, generation, width, most, widest = fields
    return {"driver": driver, "link": f"PCIe {generation} x{width} (at most {most} x{widest})"}


def _first_line(command: list[str]) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
        return lines[0] if lines else ""
    return ""
