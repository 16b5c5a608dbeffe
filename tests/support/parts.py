"""Divides the files of tests into parts that take about as long as each other, for `make test-long PART=1/4`.

A file is never divided: its fixtures are made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

SECONDS: Mapping[str, int] = {}
"""File -> seconds in the long run, of those that take longest (AMD EPYC, 2 cores)."""
SECONDS_A_TEST = 0.4
"""Of files that are not listed."""


def chosen(files: Iterable[str], part: str, seconds: Mapping[str, int] = SECONDS) -> frozenset[str]:
    """The files of one part.

    Args:
        files: the file of each test, relative to the folder of tests; as often as it has tests.
        part: "k/n": the k-th of n, from 1 on.
        seconds: what files take that take long.

    Raises:
        ValueError: `part` is malformed.
    """
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"part {part!r}: expected k/n with k from 1 to n, such as 1/4")
    tests = Counter(files)
    weights = {file: seconds.get(file, SECONDS_A_TEST * tests[file]) for file in tests}
    parts: list[list[str]] = [[] for _ in range(int(count))]
    loads = [0.0] * len(parts)
    for file in sorted(weights, key=lambda file: (-weights[file], file)):
        least = loads.index(min(loads))
        parts[least].append(file)
        loads[least] += weights[file]
    return frozenset(parts[int(number) - 1])


def relative(path: Path) -> str:
    """The name of a file of tests, as `SECONDS` has it; that of another file is its whole path."""
    folder = Path(__file__).parent.parent
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()
