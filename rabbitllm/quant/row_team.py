"""Divides the rows of matrices among the threads of torch's OpenMP team, or threads of our own if it has no team.

A kernel is a compiled function of int64s. The last three are the number of rows, and the begin and the end of the rows
to compute.
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
# with them for the same cores, which took more than twice as long; and submitting work to the team takes 2
# microseconds, to a thread of Python 13 to 19. The interface is libgomp's, as compilers use it
# (https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html). If torch uses another library, there is
# no team, and the caller uses threads of its own.

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Team:
    """The OpenMP library that torch computes with.

    Attributes:
        library: libgomp.
        thread_number: address of the function that returns a thread's index in the team.
        thread_count: address of the function that returns the number of threads in the team.
    """

    library: ctypes.CDLL
    thread_number: int
    thread_count: int

    def run(self, function: int, data: int, threads: int) -> None:
        """Call `function(data)`, both given as addresses, once in each thread of a team; return when all are done.

        The team has at most `threads` threads: fewer if there are limits, and one within another team. The calling
        thread is one of them, and the interpreter lock is released during the call.
        """
        self.library.GOMP_parallel(function, data, threads, 0)


@functools.cache
def torchs_team() -> Team | None:
    """The team of the libgomp that torch uses; None if there is none, or if it cannot be identified."""
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
"""Number of int64s before the pieces of work in the data of a team's threads.

These are the addresses of the functions that return a thread's index and the number of threads, the rows for each
thread, and the number of pieces. The arguments of each piece follow, up to its number of rows. A team may have fewer
threads than requested: the last one computes all remaining rows.
"""

RowRange = Callable[..., None]


def over_rows(
    kernel: RowRange, in_a_team: Callable[[], int], work: Sequence[tuple[int, ...]], threads: int, tile: int
) -> None:
    """Run a kernel on all rows of each piece of work.

    Args:
        kernel: the compiled function.
        in_a_team: returns the address of the function for a thread of a team, which takes the address of the data (see
            `BEFORE_WORK`); called only if there is a team, since the function may have to be compiled.
        work: the arguments of the kernel without the last two; all pieces have the same number of rows, their last
            argument.
        threads: maximum number of threads.
        tile: rows that the kernel computes together; no tile is divided.
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
    return Workers(64, "product")  # an upper limit; threads are created on demand


def address_of(function: Any, signature: Any) -> int:
    """Compile a function for threads of a team; return its address, which is valid until the process ends."""
    from rabbitllm.quant.compiling import c_function

    made = c_function(signature, function)
    _KEPT.append(made)
    return int(made.address)


_KEPT: list[Any] = []
"""Compiled functions whose addresses are in use."""
