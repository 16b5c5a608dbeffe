"""Processor time of one token from the command line: `rabbitllm run` on a finished split, and a transformers script.

Most of it is imports. The script loads the checkpoint that the splits are made of, uncompressed.

    python -m benchmarks decode.start [--model FOLDER] [--turns 7] [--only ROW ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import command_line, report
from benchmarks.lib.peers import THIS, make_layer_files, variables
from benchmarks.lib.process import REPOSITORY, PeerError
from benchmarks.lib.runs import Run, carry_out, failures, ratios, status

REFERENCE, OURS = "transformers", "rabbitllm run"
SCHEMES = {f"{OURS}, {scheme}": scheme for scheme in ("none", "q8_0", "4bit", "8bit")}
SCRIPT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
prompt = tokenizer("What is a rabbit?", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=1, do_sample=False)[0]))
"""


@dataclass
class StartRun(Run):
    """One row of one turn.

    Attributes:
        core_seconds: of all threads, in user mode and in the system.
    """

    core_seconds: float = 0.0

    @property
    def headline(self) -> float:
        """Seconds of processors."""
        return self.core_seconds


def tabulate(runs: Sequence[StartRun], rows: Sequence[str], turns: int) -> report.Table:
    """A line a row."""
    columns: report.Columns[str, StartRun] = {
        "processor s": report.each(lambda run: run.core_seconds),
        "of transformers": lambda row, _: report.shown(ratios(runs, row, REFERENCE)),
    }
    return report.tabulated(runs, {row: row for row in rows}, turns, columns)


def core_seconds(command: Sequence[str], environment: dict[str, str]) -> float:
    """Run a program to its end, and return the processor time of all its threads.

    Raises:
        PeerError: it failed.
    """
    before = os.times()
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = os.times()
    if process.returncode:
        raise PeerError(f"exit status {process.returncode}: {process.stderr.strip()[-200:]}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 7, [REFERENCE, *SCHEMES])
    parser.add_argument("--model", type=Path, default=REPOSITORY / "rabbitllm" / "demo" / "model", metavar="FOLDER")
    options = command_line.parsed(parser, arguments, only=[f"{OURS}, none"])
    command_line.settle(options, "start")
    folder, model = options.work_dir / "start-run", str(options.model.absolute())

    def command(row: str) -> list[str]:
        if row == REFERENCE:
            return [sys.executable, "-c", SCRIPT, model]
        which = ["--compression", SCHEMES[row], "--dir", str(folder / SCHEMES[row]), "--max-new-tokens", "1"]
        return [sys.executable, "-m", "rabbitllm", "run", model, *which, "What is a rabbit?"]

    def seconds(row: str) -> float:
        environment = variables(THIS, options.work_dir) | {"PYTHONDONTWRITEBYTECODE": ""}
        return core_seconds(command(row), environment)

    def files(row: str) -> None:
        if row in SCHEMES:
            place, scheme = folder / SCHEMES[row], None if SCHEMES[row] == "none" else SCHEMES[row]
            make_layer_files(THIS, "rabbitllm", Path(model), place, scheme, options.work_dir, f"start-{place.name}")
        if not options.smallest:
            seconds(row)  # writes bytecode, and kernels that are not in numba's cache

    def measure(run: StartRun, row: str) -> None:
        run.core_seconds = seconds(row)

    runs = carry_out(options, options.only, StartRun, measure, dict.fromkeys(options.only, THIS), folder, files)
    notes = ["Processor time in user mode and in the system.", *failures(runs)]
    for row in (row for row in SCHEMES if row in options.only):
        share = report.median(ratios(runs, row, REFERENCE))
        notes.append(report.reach(f"{row}, of the transformers script", share, 1.0, at_most=True))
    title = f"One token from the command line, {command_line.turns(options)}"
    table = tabulate(runs, options.only, options.turns)
    report.write(options.results, title, table, notes, runs, work=options.work_dir)
    return status(runs, lambda row: row in SCHEMES)
