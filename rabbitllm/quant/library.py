"""bitsandbytes, imported when it is needed: the only module of this room that names it."""

from __future__ import annotations

import functools
import itertools
import logging
from typing import Any

from rabbitllm.errors import MissingPackageError


@functools.cache
def bitsandbytes() -> Any:
    """The package.

    Raises:
        MissingPackageError: it is not installed, or cannot be imported.
    """
    # on a CPU it logs at import that a package of faster kernels is missing
    backend = logging.getLogger("bitsandbytes.backends.cpu.ops")
    backend.addFilter(lambda record: "kernels-community" not in record.getMessage())
    try:
        import bitsandbytes
        import bitsandbytes.functional
    except ImportError as error:
        raise MissingPackageError(
            f"compression needs the package bitsandbytes, which cannot be imported: {error}.",
            "Run `pip install bitsandbytes`, or remove compression.",
        ) from error
    return bitsandbytes


def functional() -> Any:
    """Its functions; raises as `bitsandbytes` does."""
    return bitsandbytes().functional


@functools.cache
def nf4_map() -> bytes:
    """The values of the 16 codes of 4bit, float32, rising."""
    return bytes(functional().get_4bit_type("nf4", device="cpu").numpy())


@functools.cache
def int8_code() -> bytes:
    """The values of the 256 codes of 8bit, and of scales that are quantized themselves, float32, rising.

    These are the values of bitsandbytes' `create_dynamic_map`. It uses `torch.linspace`, whose last bits depend on
    whether the processor has a fused multiply-add. Here they are on every machine those of a processor that has it.
    """
    import numpy as np

    tenth, one = np.float32(0.1), np.float32(1)
    values = [np.float32(0), one]
    for exponent in range(-6, 1):
        parts = 2 ** (exponent + 6)
        step = float((one - tenth) / np.float32(parts))
        edges = [
            np.float32(float(tenth) + step * k if k < (parts + 1) // 2 else 1 - step * (parts - k))
            for k in range(parts + 1)
        ]
        for low, high in itertools.pairwise(edges):
            value = np.float32(10.0**exponent) * ((low + high) / np.float32(2))
            values += [value, -value]
    return np.sort(np.array(values, np.float32)).tobytes()
