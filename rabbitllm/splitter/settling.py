"""Scales that waited in a scratch file until all of them were there: read from it, and quantized. Writes nothing."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.positional import PositionalFile
from rabbitllm.quant.compression import SCALE_BYTES, Settling, settled


def settled_parts(form: Settling, scratch: Path) -> Generator[tuple[int, int, memoryview]]:
    """What a tensor's stored parts are made of once its scales are quantized, a run at a time.

    Args:
        form: the tensor.
        scratch: the file of its layer in which its scales have waited, all of them.

    Yields:
        Which part, how many bytes into it, and the run.

    Raises:
        IncompleteSplitError: the file ends too early.
    """
    with PositionalFile(scratch) as file:

        def read(first: int, count: int) -> npt.NDArray[np.float32]:
            run = bytearray(count * SCALE_BYTES)
            if file.read_into(memoryview(run), form.source.offset + first * SCALE_BYTES) != len(run):
                raise IncompleteSplitError(
                    f"{scratch} ends before the scales of {form.of.name!r} do.",
                    "If every shard of the source is still there (or it is on the hub), delete that folder and "
                    "call again. Otherwise keep it: it may hold the only copy of some tensors.",
                )
            return np.frombuffer(run, np.float32)

        yield from settled(form, read)
