"""The options that benchmarks share, and the checks of them."""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.checkpoint import SCALES

_BENCHMARKS = Path(__file__).resolve().parent.parent
WORK, RESULTS = _BENCHMARKS / "work", _BENCHMARKS / "results"
SMALLEST = "RABBITLLM_BENCHMARK_SMALLEST"
"""Environment variable of every process of a benchmark at the smallest size."""
NEEDED_BYTES: Mapping[str, int] = {"full": 10 * 1000**3, "medium": 2 * 1000**3, "tiny": 100 * 1000**2}
"""For checkpoints and splits, without environments."""


def parser(description: str | None, turns: int, rows: Sequence[str]) -> argparse.ArgumentParser:
    """The options of a benchmark of rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=turns, help="how often each row is run (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=rows, default=rows, metavar="ROW", help=f"of {', '.join(rows)}")
    parser.add_argument(
        "--scale", choices=list(SCALES), default="full", help="other than full: try it out, the figures mean nothing"
    )
    parser.add_argument("--work-dir", type=Path, default=WORK, help="for environments, checkpoint and splits")
    parser.add_argument("--results", type=Path, help="file to write, without suffix (default: in benchmarks/results)")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, **smallest: Any) -> argparse.Namespace:
    """Parse a command line, with `--smallest`: the size that shows that a benchmark runs.

    That size has 20 s of processor time, most of it for imports: the benchmark itself makes layer files, and workers
    import fewer libraries beforehand.

    Args:
        parser: the parser, without `--smallest`.
        arguments: None for those of the process.
        smallest: options at that size, besides one turn, the scale "tiny" and a temporary work folder; they replace
            those of the command line, except rows of `only` that it leaves out.
    """
    parser.add_argument("--smallest", action="store_true", help="show that it runs: within seconds, writes nothing")
    options = parser.parse_args(arguments)
    if not options.smallest:
        return options
    print("Smallest size: the figures mean nothing, and all files are deleted at the end.", flush=True)
    work = Path(tempfile.mkdtemp(prefix="rabbitllm-benchmark-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    os.environ[SMALLEST] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"  # with such small matrices, threads only wait for each other
    fields = vars(options)
    folders = {"work_dir": work, "work": work / "work", "results": work / "figures"}
    values = {"turns": 1, "scale": "tiny", **folders, **smallest}
    if "only" in smallest:
        values["only"] = [row for row in smallest["only"] if row in options.only] or smallest["only"]
        left_out = ", ".join(row for row in options.only if row not in values["only"])
        print(f"Left out, since they need other packages or longer: {left_out or 'nothing'}.", flush=True)
    fields.update({name: value for name, value in values.items() if name in fields})
    return options


def settle(options: argparse.Namespace, name: str, needed_bytes: Mapping[str, int] = NEEDED_BYTES) -> None:
    """Check options, make the work folder, and choose the results file.

    Args:
        options: of `parser`.
        name: of the benchmark.
        needed_bytes: on the disk, by scale.

    Raises:
        SystemExit: the benchmark cannot run.
    """
    if sys.platform != "linux":
        raise SystemExit("The benchmarks need Linux: /proc, posix_fadvise and the cp of GNU coreutils.")
    if options.turns < 1:
        raise SystemExit("--turns must be at least 1.")
    options.work_dir = options.work_dir.resolve()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(options.work_dir).free, needed_bytes[options.scale]
    if free < needed:
        raise SystemExit(f"{needed / 1e9:.1f} GB must be free for --work-dir; {free / 1e9:.1f} GB are.")
    if options.results is None:  # trial figures are not for keeping
        folder = RESULTS if options.scale == "full" else options.work_dir / "results"
        options.results = folder / f"{name}-{options.scale}"


def check_tokens(options: argparse.Namespace) -> None:
    """Refuse a generation without a step after the first one."""
    if options.tokens < 2:
        raise SystemExit("--tokens must be at least 2: the first one is counted apart.")


def turns(options: argparse.Namespace) -> str:
    """The end of a title: the number of turns, and a warning at a trial scale."""
    trial = "" if options.scale == "full" else f" (scale {options.scale}: a trial, the figures mean nothing)"
    return f"{options.turns} turns{trial}"
