"""The choice whether a device multiplies one input from 4bit codes or dequantizes the matrix first: both are timed.

The faster way depends on the GPU, the shape and the version of bitsandbytes; the trial also verifies the kernel's
result on this device. One trial for each shape, with random codes and inputs, when the model is loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from rabbitllm.engine.devices import Device
from rabbitllm.quant.compression import NF4_BLOCK, Quantized
from rabbitllm.quant.fused_products import FusedMatrix, can_multiply

logger = logging.getLogger(__name__)

MAX_ROWS = 4096
"""Maximum rows of a trial's matrix: more rows only repeat the same work, and need memory."""
WORTH_IT = 0.9
"""Maximum time relative to dequantizing: an equally fast product is not worth different rounding."""
_ROUNDS, _REPEATS = 3, 4

Shape = tuple[str, int, int, torch.dtype]


class FusedChoice:
    """Caches the result of a trial for each device, shape and dtype."""

    def __init__(self) -> None:
        self._known: dict[Shape, bool] = {}

    def pays(self, device: Device, form: Quantized, dtype: torch.dtype) -> bool:
        """Whether to multiply from the codes.

        Args:
            device: the device that computes.
            form: the matrix; False at 8bit, or if a row is not a whole number of blocks.
            dtype: of the input.
        """
        if not can_multiply(form) or dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return False
        rows, columns = min(form.shape[0], MAX_ROWS), form.shape[1]
        key = (device.name, rows, columns, dtype)
        if key not in self._known:
            name = str(dtype).removeprefix("torch.")  # not the stored dtype, to which dequantizing rounds first
            self._known[key] = _try(device, Quantized("4bit", (rows, columns), name), dtype)
        return self._known[key]


def is_sooner(fused_seconds: float, dequantized_seconds: float) -> bool:
    """Whether products from codes are faster by enough to be used."""
    return fused_seconds < WORTH_IT * dequantized_seconds


def is_near(fused: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two products differ only by rounding."""
    error = float((fused.float() - expected.float()).norm())
    return error <= max(8 * torch.finfo(fused.dtype).eps, 1e-5) * float(expected.float().norm())


def _try(device: Device, form: Quantized, dtype: torch.dtype) -> bool:
    """Run one trial. False too if it fails: the kernel is missing, or there is not enough memory."""
    try:
        matrix, x = _sample(device, form, dtype)
        near = is_near(matrix.linear(x, None), torch.nn.functional.linear(x, matrix.dequantized(dtype)))
        if not near:
            logger.warning("bitsandbytes multiplies 4bit codes wrongly on %s; layers are dequantized.", device.name)
            return False
        fused = _seconds(device, lambda: matrix.linear(x, None))
        plain = _seconds(device, lambda: torch.nn.functional.linear(x, matrix.dequantized(dtype)))
    except Exception as error:
        logger.info("4bit codes are not multiplied on %s: %s: %s", device.name, type(error).__name__, error)
        return False
    logger.info(
        "%s at 4bit on %s: %.0f us from codes, %.0f us dequantized.", form.shape, device.name, fused * 1e6, plain * 1e6
    )
    return is_sooner(fused, plain)


def _sample(device: Device, form: Quantized, dtype: torch.dtype) -> tuple[FusedMatrix, torch.Tensor]:
    (rows, columns), place = form.shape, device.torch_device
    generator = torch.Generator().manual_seed(0)
    payload = torch.randint(0, 256, (rows * columns // 2, 1), dtype=torch.uint8, generator=generator)
    absmax = torch.rand(rows * columns // NF4_BLOCK, generator=generator)
    table, x = torch.linspace(-1, 1, 16), torch.randn(1, columns, generator=generator).to(dtype)
    return FusedMatrix(form, payload.to(place), absmax.to(place), table.to(place)), x.to(place)


def _seconds(device: Device, work: Callable[[], torch.Tensor]) -> float:
    """Seconds of one call: the best of a few rounds, after a warm-up."""
    work()
    best = float("inf")
    for _ in range(_ROUNDS):
        device.synchronise()
        begun = time.perf_counter()
        for _ in range(_REPEATS):
            work()
        device.synchronise()
        best = min(best, (time.perf_counter() - begun) / _REPEATS)
    return best
