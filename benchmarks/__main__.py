"""Run a benchmark by its name, list them, or draw the picture of results again."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.catalogue import CATALOGUE, listed, main_of
from benchmarks.lib.pictures import redraw

USAGE = """Usage: python -m benchmarks list
       python -m benchmarks picture RESULTS.json
       python -m benchmarks NAME [--smallest] [options; --help names them]
"""


def main(arguments: list[str]) -> int:
    """Return the exit status; 2 for an unknown name."""
    if arguments[:1] == ["list"]:
        print(listed())
        return 0
    if arguments[:1] == ["picture"] and len(arguments) == 2:
        print(*redraw(Path(arguments[1])), sep="\n")
        return 0
    if not arguments or arguments[0] not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        print(f"{USAGE}Names: {known}", file=sys.stdout if arguments[:1] == ["--help"] else sys.stderr)
        return 0 if arguments[:1] == ["--help"] else 2
    sys.argv = [f"python -m benchmarks {arguments[0]}", *arguments[1:]]
    return main_of(arguments[0])(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
