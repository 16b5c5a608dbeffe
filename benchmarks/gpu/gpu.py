"""Measurements on a GPU, in about ten minutes: kernels, models of every type, commands, copies, races, peaks of memory,
and passes against the link.

    python -m benchmarks gpu [--only STEP ...] [--out FOLDER] [--again] [--seconds 580] [--list]
    python -m benchmarks gpu --rehearse

Each step runs in a process of its own with a time limit, so a crash costs that step alone, and its earlier figures are
kept. gpu.json has the results of each finished step, and gpu.md is made from it. The same command continues: it skips
steps with a result, unless `--again`. `--rehearse` uses the device of the tests and tiny sizes, in one process of two
minutes; its figures mean nothing.

`pip install ".[dev]"` installs all packages, but torch must be built with CUDA, and bitsandbytes needs a library for
the same CUDA. A step without one of its packages fails with their names, and the others run.

The exit status is 1 without a GPU, if a step failed, or if a check did not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import child
from benchmarks.lib import command_line, report
from benchmarks.lib.machine import describe_machine, versions_here
from benchmarks.lib.process import REPOSITORY

TOTAL_SECONDS = 580
LEAST_SECONDS = 10
"""With less time left, no other step begins."""
_LINES = 20
"""Of the log of a process that died."""
OK = "ok"
"""The column with the result of a check."""


DRIVER = Path("/proc/driver/nvidia/version")


def what_is_missing(driver: Path = DRIVER) -> str | None:
    """None where torch sees a GPU; else three lines: the finding, the need, the remedy."""
    import torch

    if torch.cuda.is_available():
        return None
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    loaded = driver.exists()
    finding = f"torch {torch.__version__} {built}, and NVIDIA's driver is {'loaded' if loaded else 'not loaded'}"
    if not loaded:
        remedy = (
            "use a machine with an NVIDIA GPU and its driver (on Kaggle and Colab: choose an accelerator in the "
            "session's settings; in a container: start it with --gpus all)"
        )
    elif torch.version.cuda:
        remedy = "see whether `nvidia-smi` lists the GPU, and whether CUDA_VISIBLE_DEVICES hides it"
    else:
        remedy = (
            "install a torch that is built with CUDA (https://pytorch.org/get-started says how), and run this again"
        )
    return (
        f"Found no GPU: {finding}.\n"
        "Needed: Linux, one NVIDIA GPU, its driver, and a torch that is built with CUDA.\n"
        f"What to do: {remedy}."
    )


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: on the command line.
        title: on the page.
        seconds: after which its process is killed.
        function: "module:name"; it takes a `Place` and yields rows.
    """

    name: str
    title: str
    seconds: float
    function: str


STEPS = (
    Step("versions", "Versions, memory, and the link", 60, "benchmarks.gpu.hardware:versions"),
    Step("kernels", "Kernels compared with the CPU and with float64", 90, "benchmarks.gpu.hardware:kernels"),
    Step("families", "Models of every type beside the CPU", 150, "benchmarks.gpu.families:families"),
    Step("commands", "The package's commands", 120, "benchmarks.gpu.commands:commands"),
    Step("pinned", "Pinned memory, and copies from it", 90, "benchmarks.gpu.hardware:pinned"),
    Step("attention", "Memory and time of attention", 60, "benchmarks.gpu.hardware:attention"),
    Step("races", "Small models with late copies and late layers", 150, "benchmarks.gpu.models:races"),
    Step("pace", "A pass against its limit", 180, "benchmarks.gpu.models:pace"),
    Step("overhead", "Layers of next to nothing, beside transformers", 150, "benchmarks.gpu.models:overhead"),
    Step("wide", "Two layers as wide as those of a 72B model", 150, "benchmarks.gpu.models:wide"),
    Step("whole", "A 72B model in a T4's memory, and all in GPU memory", 180, "benchmarks.gpu.models:whole"),
    Step("forms", "Other forms of weights, experts, and loading", 150, "benchmarks.gpu.models:forms"),
    Step("vram", "Tokens with little VRAM", 180, "benchmarks.gpu.models:little_vram"),
)


def run_step(step: Step, folder: Path, is_rehearsal: bool, seconds: float) -> dict[str, Any]:
    """Run a step in a process of its own; in a rehearsal in this one, since imports would take most of the time.

    Args:
        step: to run.
        folder: of its log and rows, and of a folder with its other files, which is removed at the end.
        is_rehearsal: on the device of the tests.
        seconds: after which its process and its children are killed.

    Returns:
        Its `rows`, `seconds`, and `error` or None; `is_over` if it ended by itself.
    """
    work = folder / step.name
    work.mkdir(parents=True, exist_ok=True)
    rows, log = folder / f"{step.name}.rows", folder / f"{step.name}.log"
    rows.unlink(missing_ok=True)
    job = {"function": step.function, "rows": str(rows), "work": str(work), "is_rehearsal": is_rehearsal}
    begun, is_over, status = time.perf_counter(), True, 0
    if is_rehearsal:
        with log.open("w") as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            child.main(job)
        shutil.rmtree(work, ignore_errors=True)
    else:
        is_over, status = _in_a_process(job, work, log, seconds)
    lines = rows.read_text(encoding="utf-8").splitlines(keepends=True) if rows.exists() else []
    results = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half a line
    error = next((row[child.ERROR] for row in results if child.ERROR in row), None)
    if not is_over:
        error = f"Not over after {seconds:.0f} s."
    elif error is None and status:
        said = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES:])
        error = f"The process died, exit status {status}.\n{said}"
    taken = round(time.perf_counter() - begun, 1)
    return {
        "title": step.title,
        "seconds": taken,
        "rows": [row for row in results if child.ERROR not in row],
        "error": error,
        "is_over": is_over,
    }


def _in_a_process(job: Mapping[str, Any], work: Path, log: Path, seconds: float) -> tuple[bool, int]:
    """Whether a step ended by itself, and the exit status."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    is_over = True
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", json.dumps(job)],
            stdin=subprocess.PIPE,  # if this process dies, the pipe ends, and so does the child
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            is_over = False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            shutil.rmtree(work, ignore_errors=True)
    return is_over, process.returncode


def is_right(result: Mapping[str, Any]) -> bool:
    """Whether a step ran to its end, and all of its checks held."""
    return result["error"] is None and all(row.get(OK, True) for row in result["rows"])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return report.verdict([value])
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def tables(rows: Sequence[Mapping[str, Any]]) -> list[report.Table]:
    """A table for each set of columns, in their order."""
    groups: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append([_cell(value) for value in row.values()])
    return [report.Table(headings, lines) for headings, lines in groups.items()]


def page(results: Mapping[str, Any]) -> str:
    """The page of results, in Markdown."""
    steps = results["steps"]
    title = (
        "# Rehearsal on the device of the tests: the figures mean nothing" if results["is_rehearsal"] else "# On a GPU"
    )
    facts = {**results["machine"], **results["versions"]}
    described = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items())
    outcome = {name: "failed" if step["error"] else report.verdict([is_right(step)]) for name, step in steps.items()}
    lines = [(name, step["title"], f"{step['seconds']:g}", outcome[name]) for name, step in steps.items()]
    parts = [title, described, report.Table(("step", "", "seconds", "as expected"), lines).markdown()]
    for name, step in steps.items():
        parts += [f"## {name}: {step['title']}", *(table.markdown() for table in tables(step["rows"]))]
        parts += [f"```text\n{step['error'].rstrip()}\n```"] if step["error"] else []
    return "\n\n".join(parts) + "\n"


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def run(steps: Sequence[Step], base: Path, *, is_rehearsal: bool, again: bool, seconds: float) -> dict[str, Any]:
    """Run the steps without a result, and write results and page after each.

    Args:
        steps: in their order.
        base: of the files, without a suffix.
        is_rehearsal: on the device of the tests.
        again: repeat steps that have a result.
        seconds: for all together; a step that they cut short has no result, and is run by the next call.

    Returns:
        The content of the JSON.
    """
    base.parent.mkdir(parents=True, exist_ok=True)
    path, end = base.with_suffix(".json"), time.perf_counter() + seconds
    results: dict[str, Any] = {"is_rehearsal": is_rehearsal, "steps": {}}
    if path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
    results |= {"machine": describe_machine(base.parent), "versions": versions_here()}
    for step in steps:
        left = end - time.perf_counter()
        if step.name in results["steps"] and not again:
            print(f"{step.name}: has a result", flush=True)
        elif left < LEAST_SECONDS:
            print(f"{step.name}: no time is left; run the command again", flush=True)
        else:
            print(f"{step.name}: {step.title} …", flush=True)
            most = step.seconds
            result = run_step(step, base.parent / base.name, is_rehearsal, min(most, left))
            said = "as expected" if is_right(result) else result["error"] or "NOT as expected"
            print(f"{step.name}: {result['seconds']:g} s, {said.splitlines()[-1]}", flush=True)
            if result.pop("is_over") or left >= most:
                results["steps"][step.name] = result
        _write(path, json.dumps(results, indent=1) + "\n")
        _write(base.with_suffix(".md"), page(results))
    print(f"Written: {base}.json and .md")
    return results


def _parser() -> argparse.ArgumentParser:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="STEP", help=f"of {', '.join(names)}"
    )
    folder = command_line.WORK / "gpu"
    parser.add_argument(
        "--out", dest="work_dir", type=Path, default=folder, help="for results, logs and, in turns, models; 20 GB"
    )
    parser.add_argument("--again", action="store_true", help="repeat steps that have a result")
    parser.add_argument("--seconds", type=float, help=f"for all steps (default: {TOTAL_SECONDS}; not of a rehearsal)")
    parser.add_argument("--list", action="store_true", help="show the steps")
    parser.add_argument("--rehearse", action="store_true", help="on the device of the tests, at tiny sizes")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 without a GPU, if a step failed, or if a check did not hold."""
    options = command_line.parsed(_parser(), arguments, only=["versions", "attention"], rehearse=True)
    chosen = [step for step in STEPS if step.name in options.only]
    if options.list:
        print("\n".join(f"{step.name:<10} {step.title}; at most {step.seconds:g} s" for step in STEPS))
        return 0
    if not options.rehearse and (missing := what_is_missing()) is not None:
        print(f"{missing}\n--rehearse takes the device of the tests.", file=sys.stderr)
        return 1
    if options.rehearse:  # before torch is imported: threads only wait for each other at such sizes
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    seconds = options.seconds or (float("inf") if options.rehearse else TOTAL_SECONDS)
    base = options.work_dir.resolve() / ("rehearsal" if options.rehearse else "gpu")
    results = run(chosen, base, is_rehearsal=options.rehearse, again=options.again, seconds=seconds)["steps"]
    return int(not all(step.name in results and is_right(results[step.name]) for step in chosen))
