"""How products run compiled kernels: rows divided among torch's OpenMP team or threads of our own, and a trial first.

The modules of kernels (see `_kernel_interface.py`) are imported when the first one runs. Needs no numba.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch

from rabbitllm.base.forks import Workers
from rabbitllm.base.openmp import torchs_team
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant._kernel_interface import (
    BFLOATS,
    BYTES,
    CODES,
    NUMBERS,
    PANELS,
    SEGMENT,
    TURNED,
    CodeKernel,
    call,
)

logger = logging.getLogger(__name__)

WORTH_A_THREAD = {CODES: 1 << 16, TURNED: 1 << 16, PANELS: 1 << 14, BYTES: 1 << 14, NUMBERS: 1 << 14, BFLOATS: 1 << 14}
"""Method -> bytes of codes per thread; larger matrices use more threads. By codes these are about 4 microseconds of
work, while starting a second thread takes 2."""


def run(method: str, scheme: str | CodeKernel, width: int, work: Sequence[tuple[int, ...]], nbytes: int) -> None:
    """Run a kernel on all rows of each piece of work, in as many threads as the bytes of all codes are worth.

    A piece is `_kernel_interface.ARGUMENTS`; all have the same number of rows.
    """
    (function, tile), threads = kernel(method, scheme, width), threads_for(method, nbytes)
    data = array("q", [tile, len(work), *(value for piece in work for value in piece)])
    if threads == 1:
        call(function, data)
    elif (team := torchs_team()) is not None:
        team.run(function, data.buffer_info()[0], threads)
    else:
        in_threads(lambda thread: call(function, data, thread, threads), threads)


def in_threads(work: Callable[[int], object], count: int) -> None:
    """Run `work` for each number below `count` in a thread of its own, and for 0 in this one."""
    futures = list[Future[Any]]()
    try:
        for number in range(1, count):
            futures.append(_threads().submit(work, number))
        work(0)
    finally:
        wait(futures)  # after a Ctrl-C the caller frees, or fills again, what they read and write
    for future in futures:
        future.result()


def threads_for(method: str, nbytes: int) -> int:
    """Threads that compute a product with codes of so many bytes."""
    return min(torch.get_num_threads(), -(-nbytes // WORTH_A_THREAD[method]))


@functools.cache
def kernel(method: str, scheme: str | CodeKernel, width: int) -> tuple[int, int]:
    """The address of a kernel, and the rows that it computes together."""
    from rabbitllm.base.compiling import address_of  # numba comes with it, which takes a second
    from rabbitllm.quant import _block_kernels, _byte_kernels, _code_kernels, _product_kernels, _vectors

    if isinstance(scheme, CodeKernel):
        function = _code_kernels.kernel(method, scheme, width)
    elif method == BYTES:
        function = _byte_kernels.kernel(method, scheme, width)
    else:
        function = (_block_kernels if scheme in BLOCK_TYPES else _product_kernels).kernel(method, scheme, width)
    tiles = {BYTES: _byte_kernels.VECTORS * _vectors.lanes(), TURNED: SEGMENT}
    return address_of(function), tiles.get(method, _product_kernels.ROWS)


@functools.cache
def _threads() -> Workers:
    return Workers(64, "product")  # an upper limit; threads are created on demand


# Trials of a kernel before it is used: the samples, and the tolerated error.

TOLERANCE = 1e-5
"""Maximum error relative to the norm of a product: float32 sums of thousands of terms, in another order."""


def agrees(name: str, products: Iterable[tuple[torch.Tensor, torch.Tensor]], tolerance: float = TOLERANCE) -> bool:
    """Whether all products are right; if not, the relative error (of norms) of the first wrong one is logged.

    Computes in a thread of its own, with which OpenMP's team ends. If that of the loading thread stayed, there would be
    more threads than cores, which then sleep at each barrier: passes of a batch job took 1.3 times as long.

    Args:
        name: the products, in the message.
        products: the kernel's result and the correct one, for each product.
    """
    trial = Workers(1, "kernel-trial")
    try:
        return bool(trial.submit(_agrees, name, products, tolerance).result())
    finally:
        trial.shutdown()


def _agrees(name: str, products: Iterable[tuple[torch.Tensor, torch.Tensor]], tolerance: float) -> bool:
    for result, expected in products:
        error = float((result - expected).norm() / expected.norm())
        if not error < tolerance:  # true for NaN too
            logger.warning("The kernel for products %s is off by %.1e here and is not used.", name, error)
            return False
    return True
