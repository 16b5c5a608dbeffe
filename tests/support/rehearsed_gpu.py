"""What `benchmarks gpu` takes for CUDA in a rehearsal: this project then computes on the GPU made of CPU tensors.

Every copy is carried out as late as it may be and every race is an error (`fake_gpu.py`); rates and bytes of the GPU's
memory are real ones of this machine and mean nothing. It holds no cap: that is the allocator's, which is CUDA's.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.fake_gpu import FakeGpu

TOTAL_BYTES = 16 << 30


class RehearsedGpu:
    """The methods of `benchmarks.gpu.work.Cuda`."""

    device = "cuda:0"
    inputs = "cpu"
    key: int | str = "cpu"
    copy_bytes = 1 << 20

    def __init__(self) -> None:
        self._gpu = FakeGpu(0)
        self._gpu.name = self.device

    def begin(self, vram: int | None) -> None:
        from rabbitllm.engine import devices

        if vram is not None:
            self._gpu.memory = vram
        devices._gpu = lambda *named: self._gpu  # type: ignore[assignment, return-value]

    def synchronise(self) -> None:
        self._gpu.synchronise()

    def dtype(self) -> str:
        return "bfloat16"

    def peaks(self) -> dict[str, int]:
        held = self._gpu.allocated
        return {"vram_reserved": held, "vram_allocated": held, "vram_in_use": held}

    def buffers(self) -> tuple[Any, Any]:
        return torch.ones(self.copy_bytes, dtype=torch.uint8), torch.empty(self.copy_bytes, dtype=torch.uint8)

    def facts(self) -> dict[str, Any]:
        return {"gpu": "the test device", "vram_gib": TOTAL_BYTES >> 30, "vram_bytes": TOTAL_BYTES, "link": "none"}
