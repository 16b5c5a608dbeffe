"""torch's own team of threads, for compiled functions of ours.

torch computes in an OpenMP team whose threads wait actively between two operations. Threads of our own would compete
with them for the same cores, which took more than twice as long; and handing work to the team takes 2
microseconds, to a thread of Python 13 to 19. The interface is libgomp's, as compilers use it
(https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html). Where torch came with another library
there is no team, and the caller uses threads of its own.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

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
