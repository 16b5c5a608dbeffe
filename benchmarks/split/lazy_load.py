"""Opening a file of weights and taking tensors from it, by `rabbitllm.lazy_load`, torch, safetensors and torchhacks.

The same tensors lie in a torch file and in a safetensors file. Each row takes its turn in a fresh process, with its
libraries imported and the file in the page cache; it opens the file, copies one tensor out of its middle, then every
tensor.

    python -m benchmarks split.lazy_load [--turns 7] [--only ROW ...] [--scale tiny] [--work-dir FOLDER]
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, report
from benchmarks.lib.measure import Spread, spread
from benchmarks.lib.peers import REPOSITORY, RUN_LIMIT_SECONDS, PeerError
from benchmarks.lib.runs import Run, failures, good, run_all, versions
from benchmarks.split.lazy_load_child import OURS_SAFETENSORS, OURS_TORCH, SAFETENSORS_ROWS, TORCH_ROWS

ROWS = (*TORCH_ROWS, *SAFETENSORS_ROWS)
STAGES = {"open": "to open", "first": "to one tensor", "all": "to all tensors"}
TORCHHACKS = "torchhacks==0.0.1"
FIRST = "model.layers.{}.mlp.down_proj.weight"
_READ_AT_ONCE = 16 << 20


@dataclass(frozen=True)
class Shape:
    """Of a Llama model in bfloat16."""

    hidden: int
    inner: int
    layers: int
    keys: int
    vocabulary: int


SHAPES = {"full": Shape(2048, 5632, 28, 512, 32000), "tiny": Shape(64, 128, 3, 32, 500)}
"""By scale; "full" has 2.8 GB in 255 tensors."""


@dataclass
class LazyRun(Run):
    """One row of one turn; seconds and bytes, by stage.

    Attributes:
        seconds, cpu: since the call that opens the file, on the clock and of the processor.
        anonymous, mapped: memory of the process above what it had before, after the stage.
        bits: a digest of all tensors, in the first turn.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    anonymous: dict[str, int] = field(default_factory=dict)
    mapped: dict[str, int] = field(default_factory=dict)
    bits: str = ""

    @property
    def headline(self) -> float:
        return self.seconds["first"]


def shapes_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The tensors of the model, name -> shape."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for number in range(shape.layers):
        layer = f"model.layers.{number}."
        for name, rows, columns in (
            ("self_attn.q_proj", shape.hidden, shape.hidden),
            ("self_attn.k_proj", shape.keys, shape.hidden),
            ("self_attn.v_proj", shape.keys, shape.hidden),
            ("self_attn.o_proj", shape.hidden, shape.hidden),
            ("mlp.gate_proj", shape.inner, shape.hidden),
            ("mlp.up_proj", shape.inner, shape.hidden),
            ("mlp.down_proj", shape.hidden, shape.inner),
        ):
            found[f"{layer}{name}.weight"] = (rows, columns)
        found[f"{layer}input_layernorm.weight"] = found[f"{layer}post_attention_layernorm.weight"] = (shape.hidden,)
    return found | {"model.norm.weight": (shape.hidden,), "lm_head.weight": (shape.vocabulary, shape.hidden)}


def make_files(work: Path, scale: str) -> tuple[Path, Path]:
    """The torch file and the safetensors file, of the same random tensors; made again."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(shape, dtype=torch.int16).random_(generator=generator).view(torch.bfloat16)
        for name, shape in shapes_of(SHAPES[scale]).items()
    }
    torch_file, safetensors_file = work / f"lazy-{scale}.bin", work / f"lazy-{scale}.safetensors"
    torch.save(tensors, torch_file)
    save_file(tensors, safetensors_file, metadata={"format": "pt"})
    return torch_file, safetensors_file


def install_torchhacks(work: Path) -> tuple[list[str], str | None]:
    """The folder to find it in, without the torch that it asks for; and why it could not be had, if so."""
    folder = work / "environments" / TORCHHACKS.replace("==", "-")
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), TORCHHACKS]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            return [], f"pip install {TORCHHACKS} failed: {made.stderr.strip().splitlines()[-1:]}"
    return [str(folder)], None


def measure(run: LazyRun, path: Path, packages: Sequence[str], scale: str) -> None:
    """Fill in a run, in a process of its own."""
    warm(path)
    shapes = shapes_of(SHAPES[scale])
    job = {
        "row": run.row,
        "path": str(path),
        "packages": list(packages),
        "first": FIRST.format(SHAPES[scale].layers // 2),
        "longest": max(rows * (rest[0] if rest else 1) for rows, *rest in shapes.values()),
        "digest": run.turn == 0,
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.split.lazy_load_child", json.dumps(job)]
    ran = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=RUN_LIMIT_SECONDS
    )
    if ran.returncode:
        raise PeerError((ran.stderr.strip() or f"ended with {ran.returncode}").splitlines()[-1])
    found = json.loads(ran.stdout)
    for stage in STAGES:
        run.seconds[stage], run.cpu[stage] = found[stage]["seconds"], found[stage]["cpu"]
        run.anonymous[stage], run.mapped[stage] = found[stage]["anonymous"], found[stage]["mapped"]
    run.anonymous_idle, run.anonymous_peak = found["anonymous_idle"], max(run.anonymous.values())
    run.bits, run.versions = found["bits"], found["versions"]


def warm(path: Path) -> None:
    """Read a file, so that it is in the page cache."""
    buffer = bytearray(_READ_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def ratios(runs: Sequence[LazyRun], ours: str, other: str, stage: str, clock: str = "seconds") -> Spread | None:
    """Our time divided by that of another row in the same turn; the clock is "seconds" or "cpu"."""
    others = {run.turn: getattr(run, clock)[stage] for run in good(runs, other)}
    mine = {run.turn: getattr(run, clock)[stage] for run in good(runs, ours)}
    return spread(mine[turn] / others[turn] for turn in mine if turn in others)


def same_bits(runs: Sequence[LazyRun]) -> bool:
    """Whether all rows read the same."""
    return len({run.bits for run in runs if run.bits}) <= 1


def table(runs: Sequence[LazyRun], rows: Sequence[str]) -> report.Table:
    """Times, and memory after each stage."""
    headings = ["", *(f"{words}, ms" for words in STAGES.values())]
    headings += [f"{kind}, MB: {words}" for kind in ("anonymous", "mapped") for words in STAGES.values()]
    lines = []
    for row in rows:
        found = good(runs, row)
        line = [row, *(report.shown(spread(run.seconds[stage] for run in found), 2, 1e-3) for stage in STAGES)]
        for kind in ("anonymous", "mapped"):
            line += [report.shown(spread(getattr(run, kind)[stage] for run in found), 0, 1e6) for stage in STAGES]
        lines.append(line)
    return report.Table(headings, lines)


def notes(runs: Sequence[LazyRun], rows: Sequence[str], nbytes: Mapping[str, int]) -> list[str]:
    """What the table does not say."""
    lines = [
        f"The files: {', '.join(f'{name} {size / 1e9:.2f} GB' for name, size in nbytes.items())}; in the page cache.",
        "Times count from the call that opens the file, libraries imported, one thread; each tensor is copied into the "
        "same memory and let go. MB are 10^6 bytes above the same process before that call: anonymous, and pages of "
        "mapped files, which the system may take back.",
        f"All rows read the same bits: {report.verdict([same_bits(runs)])}.",
    ]
    for ours, format_rows in ((OURS_TORCH, TORCH_ROWS), (OURS_SAFETENSORS, SAFETENSORS_ROWS)):
        for other, (stage, words) in itertools.product(format_rows, STAGES.items()):
            found, cpu = ratios(runs, ours, other, stage), ratios(runs, ours, other, stage, "cpu")
            if other != ours and found is not None:
                goal = report.reach(f"{ours}, {words}, beside {other}", found.median, 1.0, at_most=True)
                lines.append(f"{goal}; {report.shown(found)}, of processor time {report.shown(cpu)}.")
    lines.append(
        "safe_open is compiled; torchhacks leaves the pickle to Python's own unpickler, which imports what the file "
        "names. lazy_load checks every entry of a header, and interprets the pickle, in Python."
    )
    return lines + failures(runs) + versions(runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if the bits differ."""
    smallest = [OURS_TORCH, OURS_SAFETENSORS, "safe_open"]
    options = command_line.parsed(command_line.parser(__doc__, 7, ROWS), arguments, only=smallest)
    command_line.settle(options, "lazy_load")
    rows = list(options.only)
    packages, failed = install_torchhacks(options.work_dir) if "torchhacks" in rows else ([], None)
    torch_file, safetensors_file = make_files(options.work_dir, options.scale)
    try:
        runs = run_all(
            rows,
            options.turns,
            LazyRun,
            lambda run: measure(
                run, torch_file if run.row in TORCH_ROWS else safetensors_file, packages, options.scale
            ),
            {"torchhacks": failed} if failed else {},
        )
        sizes: dict[str, Any] = {path.suffix: path.stat().st_size for path in (torch_file, safetensors_file)}
    finally:
        torch_file.unlink()
        safetensors_file.unlink()
    machine = report.describe_machine(options.work_dir)
    machine.pop("copied_with")
    title = f"Weights opened and read, {command_line.turns(options)}"
    report.write(options.results, title, machine, table(runs, rows), notes(runs, rows, sizes), runs)
    return int(not same_bits(runs))
