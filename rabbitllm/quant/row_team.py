"""The rows of matrices, parted among the threads that torch computes with, or threads of our own where it has no team.

A kernel is a compiled function of int64s, of which the last three are how many rows there are, the first row to do and
the one before which to stop. Knows neither what a kernel computes nor tensors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from rabbitllm.base.forks import Workers
from rabbitllm.quant.openmp import torchs_team

BEFORE_WORK = 4
"""What a thread of a team is given: the addresses of the functions that tell its number and how many they are, rows for
each, and how many pieces of work; then the int64s of each piece, up to how many rows there are. A team may have fewer
threads than were asked for: the last one does what is left."""

RowRange = Callable[..., None]


def over_rows(
    kernel: RowRange, in_a_team: Callable[[], int], work: Sequence[tuple[int, ...]], threads: int, tile: int
) -> None:
    """Run a kernel on all rows of each piece of work.

    Args:
        kernel: the compiled function.
        in_a_team: gives the address of one that a thread of a team calls with the address of `BEFORE_WORK` and what
            follows; asked for where it is needed, since it may have to be compiled.
        work: what the kernel is given, but for the last two; all pieces have the same number of rows, their last.
        threads: at most.
        tile: rows that the kernel takes together; no tile is parted.
    """
    rows = work[0][-1]
    share = -(-rows // (threads * tile)) * tile
    if threads == 1:
        for given in work:
            kernel(*given, 0, rows)
    elif (team := torchs_team()) is not None:
        told = [team.thread_number, team.thread_count, share, len(work), *(value for given in work for value in given)]
        data = (ctypes.c_int64 * len(told))(*told)
        team.run(in_a_team(), ctypes.addressof(data), threads)
    else:
        for given in work:
            others = [_threads().submit(kernel, *given, at, min(at + share, rows)) for at in range(share, rows, share)]
            kernel(*given, 0, min(share, rows))
            for other in others:
                other.result()


@functools.cache
def _threads() -> Workers:
    return Workers(64, "product")  # as many as are asked of it, made when they are


def address_of(function: Any, signature: Any) -> int:
    """The address of a function compiled for threads of a team, now; it stays good as long as the process."""
    from rabbitllm.quant.compiling import c_function

    made = c_function(signature, function)
    _KEPT.append(made)
    return int(made.address)


_KEPT: list[Any] = []
"""Compiled functions whose addresses are in use."""
