"""The rows of matrices, parted among the threads that torch computes with, or threads of our own where it has no team.

A kernel is a compiled function of int64s, of which the last three are how many rows there are, the first row to do and
the one before which to stop. Knows neither what a kernel computes nor tensors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base.forks import Workers

# torch's own team of threads, for compiled functions of ours.
#
# torch computes in an OpenMP team whose threads wait actively between two operations. Threads of our own would compete
# with them for the same cores, which took more than twice as long; and handing work to the team takes 2 microseconds,
# to a thread of Python 13 to 19. The interface is libgomp's, as compilers use it
# (https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html). Where torch came with another library
# there is no team, and the caller uses threads of its own.

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Team:
    """The library that torch computes with.

    Attributes:
        thread_number: address of the function that tells a thread its number in the team, from 0.
        thread_count: address of the function that tells how many they are.
    """

    library: ctypes.CDLL
    thread_number: int
    thread_count: int

    def run(self, function: int, data: int, threads: int) -> None:
        """Call `function(data)`, both given as addresses, once in each thread of a team; return when all are done.

        The team has at most so many threads: fewer if there are limits, and one within another team. The calling
        thread is one of them, and the interpreter lock is released meanwhile.
        """
        self.library.GOMP_parallel(function, data, threads, 0)


@functools.cache
def torchs_team() -> Team | None:
    """The team of the libgomp that torch brought or was linked with; None if there is none, or it cannot be told."""
    import torch

    home = Path(torch.__file__).parent
    try:
        mapped = {Path(line.split()[-1]) for line in _MAPS.read_text().splitlines() if "/libgomp" in line}
    except OSError:
        return None
    own = [path for path in mapped if home in path.parents] or [*mapped]
    if len(own) != 1 or "OpenMP" not in torch.__config__.parallel_info():
        return None
    library = ctypes.CDLL(str(own[0]))
    library.GOMP_parallel.restype = None
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    number, count = (
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (library.omp_get_thread_num, library.omp_get_num_threads)
    )
    return Team(library, number, count) if number is not None and count is not None else None


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
