"""bitsandbytes, imported when it is needed: the only module of this package that names it."""

from __future__ import annotations

import functools
import logging
from typing import Any

from rabbitllm.errors import MissingPackageError


@functools.cache
def bitsandbytes() -> Any:
    """The package.

    Raises:
        MissingPackageError: it is not installed, or cannot be imported.
    """
    # on a CPU it asks for a package of faster kernels at import, whether or not they are wanted
    backend = logging.getLogger("bitsandbytes.backends.cpu.ops")
    backend.addFilter(lambda record: "kernels-community" not in record.getMessage())
    try:
        import bitsandbytes
        import bitsandbytes.functional
    except ImportError as error:
        raise MissingPackageError(
            f"compression needs the package bitsandbytes, which cannot be imported: {error}.",
            "Run `pip install bitsandbytes`, or leave compression out.",
        ) from error
    return bitsandbytes


def functional() -> Any:
    """Its functions; raises as `bitsandbytes` does."""
    return bitsandbytes().functional


@functools.cache
def nf4_map() -> bytes:
    """What the 16 codes of 4bit mean, float32, rising."""
    return bytes(functional().get_4bit_type("nf4", device="cpu").numpy())


@functools.cache
def int8_code() -> bytes:
    """What the 256 codes of 8bit, and of scales that are quantised themselves, mean, float32, rising."""
    return bytes(functional().create_dynamic_map().numpy())
