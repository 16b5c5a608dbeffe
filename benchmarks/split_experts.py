"""Splitting hundreds of experts and splitting a dense model of the same size: what thousands of small tensors cost.

Both checkpoints have about the same size, in shards of the same, and hold the same values one after another; the one
with experts has twice as many tensors a GB as Qwen3-Coder-Next. Each is split on the sequential route at each
compression, in turns, into a folder next to it, until all is on the disk. Shards are links to those that were made
once, so that they can be given up. Process start and imports are not timed; seconds of all cores that the process takes
are, since they depend less on what else a machine does.

    python -m benchmarks.split_experts [--turns 7] [--only ROW ...] [--scale tiny] [--work-dir FOLDER]
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import command_line, qwen2, qwen3_next, report
from benchmarks.checkpoint import shards
from benchmarks.generated import Content
from benchmarks.measure import CACHE_STATE, Spread, drop_cached, spread
from benchmarks.peers import THIS, run_worker
from benchmarks.published import Config, Model, checkpoint
from benchmarks.runs import Run, failures, good, ratios, run_all, versions

RATIO_GOAL = 1.1
COMPRESSIONS = (None, "8bit", "4bit")
_EXPERTS: Config = {
    **qwen3_next.QWEN3_CODER_NEXT,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_hidden_layers": 1,
    "vocab_size": 4096,
}
_DENSE: Config = {
    **qwen2.QWEN2_5_72B,
    "hidden_size": 4096,
    "intermediate_size": 13568,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
}
CONFIGS = {
    "full": {"dense": _DENSE, "experts": _EXPERTS},
    "medium": {
        "dense": {**_DENSE, "num_hidden_layers": 1},
        "experts": {**_EXPERTS, "num_experts": 128},
    },
    "tiny": {"dense": qwen2.TINY, "experts": qwen3_next.TINY},
}
_TENSORS = {"dense": qwen2.tensors, "experts": qwen3_next.tensors}
_SHARD_BYTES = {"full": 450 * 1000**2, "medium": 120 * 1000**2, "tiny": 1_200_000}
ROWS = tuple(f"{kind}-{compression or 'none'}" for compression in COMPRESSIONS for kind in _TENSORS)


@dataclass
class ExpertsRun(Run):
    """One row of one turn.

    Attributes:
        source_bytes: of all shards.
        tensors: in them.
        seconds: of the call, which syncs what it writes.
        core_seconds: that the process took meanwhile.
        layer_bytes: of all layer files.
    """

    source_bytes: int = 0
    tensors: int = 0
    seconds: float = 0.0
    core_seconds: float = 0.0
    layer_bytes: int = 0

    @property
    def headline(self) -> float:
        """Seconds a GB."""
        return self.seconds / self.source_bytes * 1e9

    @property
    def core_headline(self) -> float:
        """Core-seconds a GB."""
        return self.core_seconds / self.source_bytes * 1e9


def make(kind: str, scale: str, work: Path) -> Path:
    """The checkpoint's folder, written unless an earlier run finished it."""
    config = CONFIGS[scale][kind]
    folder = work / f"split-experts-{scale}-{kind}"
    if (folder / "config.json").exists() and json.loads((folder / "config.json").read_text()) == config:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = Model(kind, kind, config, {}, _TENSORS[kind], _SHARD_BYTES[scale], 0)
    made, content = checkpoint(model, 1), Content()
    for shard in made.shards:
        with (folder / shard.name).open("wb") as file:
            for piece in content.of_file(shard, 0, shard.size):
                file.write(piece)
            os.fsync(file.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps(made.index()))
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def measure(run: ExpertsRun, scale: str, work: Path) -> None:
    """Carry out one row of one turn."""
    kind, compression = run.row.split("-")
    original = make(kind, scale, work)
    folder = work / "split-experts-run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in original.iterdir():
        os.link(path, folder / path.name)
    options: dict[str, Any] = {"sequential_shard_processing": True}
    options |= {} if compression == "none" else {"compression": compression}
    job = {"task": "split", "package": "rabbitllm", "checkpoint": str(folder), "options": options}
    run.source_bytes = sum(shard.stat().st_size for shard in shards(original))
    index = json.loads((original / "model.safetensors.index.json").read_text())
    run.tensors = len(index["weight_map"])
    try:
        outcome = run_worker(THIS, job, work, f"split-experts-{run.row}-{run.turn}", [folder])
        run.take_from(outcome)
        run.seconds, run.core_seconds = outcome.answer["seconds"], outcome.answer["core_seconds"]
        run.layer_bytes = sum(path.stat().st_size for path in shards(Path(outcome.answer["folder"])))
    finally:
        drop_cached(folder)
        shutil.rmtree(folder, ignore_errors=True)


HEADINGS = (
    "row",
    "ok",
    "GB",
    "tensors",
    "s a GB",
    "core-s a GB",
    "x dense",
    "x dense, core-s",
    "anon MiB over idle",
)


def tabulate(runs: Sequence[ExpertsRun], rows: Sequence[str], turns: int) -> report.Table:
    """A line a row: medians, and in brackets the extremes."""

    def cells(row: str, found: Sequence[ExpertsRun]) -> Sequence[str]:
        dense = row.replace("experts", "dense")
        compared = row != dense
        return (
            f"{found[0].source_bytes / 1e9:.2f}" if found else "-",
            f"{found[0].tensors:,}" if found else "-",
            report.shown(spread(run.headline for run in found)),
            report.shown(spread(run.core_headline for run in found)),
            report.shown(ratios(runs, row, dense) if compared else None),
            report.shown(core_ratios(runs, row, dense) if compared else None),
            report.shown(spread(run.anonymous_added for run in found), 1, 2**20),
        )

    return report.tabulated(HEADINGS, runs, {row: row for row in rows}, turns, cells)


def core_ratios(runs: Sequence[ExpertsRun], row: str, to: str) -> Spread | None:
    """The core-seconds a GB of a row divided by those of another in the same turn."""
    others = {run.turn: run.core_headline for run in good(runs, to)}
    return spread(run.core_headline / others[run.turn] for run in good(runs, row) if run.turn in others)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row failed."""
    parser = command_line.parser(__doc__, 7, list(ROWS))
    options = command_line.parsed(parser, arguments, only=["dense-4bit", "experts-4bit"])
    command_line.settle(options, "split-experts")
    work = options.work_dir
    for kind in _TENSORS:
        make(kind, options.scale, work)
    machine = report.describe_machine(work)
    runs = run_all(options.only, options.turns, ExpertsRun, lambda run: measure(run, options.scale, work), {})
    notes = [f"Page cache {CACHE_STATE}.", *versions(runs), *failures(runs)]
    for row in options.only:
        dense = row.replace("experts", "dense")
        if row != dense and dense in options.only:
            name = f"{row}, seconds a GB x {dense}"
            notes.append(report.reach(name, report.median(ratios(runs, row, dense)), RATIO_GOAL, at_most=True))
    title = f"Sequential split of experts and of a dense model, {command_line.turns(options)}"
    report.write(options.results, title, machine, tabulate(runs, options.only, options.turns), notes, runs)
    return int(any(run.error for run in runs))


if __name__ == "__main__":
    raise SystemExit(main())
