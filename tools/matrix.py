"""Runs the tests that compare bits or products under several instruction sets and numbers of threads.

    python -m tools.matrix                         every set that this machine has, with 1, 2 and 4 threads
    python -m tools.matrix --set avx2 --threads 2 tests/engine/test_double.py

Each cell is a process of pytest with the tests marked `bits`; what torch, oneDNN, MKL and numba may use in it is said
by their own environment variables. Of AVX-512 with products of bfloat16 the package's kernels can be emulated, torch's
cannot. Exits with 1 where a test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "build" / "matrix"
"""Where numba keeps machine code, a folder for each set."""
THREADS = (1, 2, 4)
_AVX2 = "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"
_AVX512 = "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"


@dataclass(frozen=True)
class InstructionSet:
    """What a process may use of its processor.

    Attributes:
        needs: flags of /proc/cpuinfo.
        variables: of its environment.
    """

    name: str
    needs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def _limited(aten: str, onednn: str, mkl: str, cpu: str, features: str) -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
    }


# without a limit there is more to use than in the set before only where the processor multiplies bfloat16
SETS = (
    InstructionSet("sse4", (), _limited("default", "SSE41", "SSE4_2", "x86-64", "+sse4.2,+popcnt")),
    InstructionSet("avx2", ("avx2", "fma"), _limited("avx2", "AVX2", "AVX2", "haswell", _AVX2)),
    InstructionSet(
        "avx2-vnni",
        ("avx2", "fma", "avx_vnni"),
        _limited("avx2", "AVX2_VNNI", "AVX2", "haswell", f"{_AVX2},+avxvnni"),
    ),
    InstructionSet(
        "avx512",
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"),
        _limited("avx512", "AVX512_CORE", "AVX512", "skylake-avx512", f"{_AVX2},{_AVX512}"),
    ),
    InstructionSet("best", ("avx512_bf16",)),
    InstructionSet("emulated", ("avx2", "fma"), {"RABBITLLM_TEST_VECTORS": "emulated"}),
)


@dataclass(frozen=True)
class Cell:
    """What came of one process."""

    set_name: str
    threads: int
    passed: int
    failed: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """The tool; returns its exit code."""
    options = _parser().parse_args(arguments)
    flags = cpu_flags(Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else frozenset()
    cells = []
    for entry in SETS:
        if options.set and entry.name not in options.set:
            continue
        lacking = [flag for flag in entry.needs if flag not in flags]
        if lacking:
            print(f"{entry.name:10} not here: this processor has no {' '.join(lacking)}", flush=True)
            continue
        for threads in options.threads or THREADS:
            cells.append(run_cell(entry, threads, options.tests, everything=options.long))
            print(_row(cells[-1]), flush=True)
    return 1 if not cells or any(cell.failed or not cell.passed for cell in cells) else 0


def cpu_flags(text: str) -> frozenset[str]:
    """The flags of the first processor in /proc/cpuinfo."""
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(next((value for name, _, value in lines if name.strip() == "flags"), "").split())


def environment_of(entry: InstructionSet, threads: int) -> dict[str, str]:
    """Of a process of so many threads."""
    numbers = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "RABBITLLM_TEST_THREADS")
    others = {"NUMBA_CACHE_DIR": str(KEPT / entry.name), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **others, **entry.variables, **dict.fromkeys(numbers, str(threads))}


def run_cell(entry: InstructionSet, threads: int, tests: Sequence[str], *, everything: bool = False) -> Cell:
    """Run the marked ones of these tests.

    Args:
        everything: also those that are marked `long`.
    """
    marks = "bits" if everything else "bits and not long"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = environment_of(entry, threads)
        done = subprocess.run(
            [*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if not report.exists():
            return Cell(entry.name, threads, 0, (f"pytest ended with {done.returncode}: {done.stderr[-500:]}",))
        return read_report(entry.name, threads, report.read_text())


def read_report(set_name: str, threads: int, report: str) -> Cell:
    """A cell of pytest's report in XML."""
    failed, passed = [], 0
    for case in ElementTree.fromstring(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failed.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        elif "skipped" not in outcomes:
            passed += 1
    return Cell(set_name, threads, passed, tuple(failed))


def _row(cell: Cell) -> str:
    lines = [f"{cell.set_name:10} {cell.threads} threads  {cell.passed:5} passed  {len(cell.failed):3} failed"]
    return "\n".join([*lines, *(f"    {name}" for name in cell.failed)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", help="files or tests; all that are marked `bits` if none is named")
    parser.add_argument(
        "--set", action="append", choices=[entry.name for entry in SETS], help="may be given several times"
    )
    parser.add_argument("--threads", action="append", type=int, help="may be given several times")
    parser.add_argument("--long", action="store_true", help="also the tests that take long")
    return parser


if __name__ == "__main__":
    sys.exit(main())
