"""A rehearsal of what the README promises: a model of 150 GB split to 4bit on a Kaggle disk, killed on the way.

A hub in a process of its own serves a checkpoint with the published config, names and shapes (Qwen2.5-72B: 145 GB in 37
shards, 45 GiB of disk; Qwen3-Coder-Next: 159 GB in 40 shards with 74,000 matrices of experts, 48 GiB) and weights that
are made while they are sent. The splitting half of `AutoModel` takes it one shard at a time, in a process
that is killed with SIGKILL at random moments and started again with the same call. Disk and memory are sampled ten
times a second. Afterwards every layer file is verified, and a sample of every tensor is compared with what bitsandbytes
itself makes of the weights.

    python -m benchmarks split.kaggle [--model coder-next] [--scale 0.05] [--modes file,stream] [--kills 5] [--forward]
                                    [--work-dir FOLDER]

`--scale` leaves out decoder layers, and with them their share of the allowed disk, but changes no shape; embeddings and
head alone are 5 GB of the 72B model and 1.2 GB of the other. The whole wants 51 or 54 GB of free disk. The first run of
a scale hashes every shard once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, report
from benchmarks.lib.disk_speed import read_speed
from benchmarks.lib.generated import Content
from benchmarks.lib.measure import Sampler, drop_cached
from benchmarks.lib.published import Checkpoint, checkpoint, max_disk
from benchmarks.split import spot_check
from benchmarks.split.hub_process import HubProcess
from benchmarks.split.models import MODELS
from benchmarks.split.rehearsal import RehearsalError, Setting, rehearse
from benchmarks.split.rehearsal_report import Outcome, Surroundings, notes_on, write
from rabbitllm.base.options import parse_size
from rabbitllm.store.layer_store import verify

MODES = ("file", "stream", "auto")
DEFAULT_MODEL = "qwen2.5-72b"
SPARE_BYTES = 2 * 1000**3
"""In addition to what the split may take: what stays free during it, the hub cache, logs."""
SPEED_BYTES = 2 * 1000**3
"""Read from the hub, in each way, and from the disk, to say how fast they are by themselves."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with what follows from it; refuses what cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default=DEFAULT_MODEL, help="tiny, tiny-moe: try it out")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times the model's layers (at least one)")
    parser.add_argument("--modes", default="file,stream", help=f"of {', '.join(MODES)} (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="in each mode (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (default: %(default)s)")
    parser.add_argument("--max-disk", help="for the split (default: see above, less what layers left out would take)")
    parser.add_argument("--rate", type=float, help="MB/s of each of the hub's connections (default: all it can)")
    parser.add_argument("--forward", action="store_true", help="one forward pass on the CPU, when the split is whole")
    parser.add_argument("--work-dir", type=Path, default=command_line.WORK, help="for splits and digests")
    parser.add_argument("--results", type=Path, help="files to write, without mode and suffix")
    smallest = {"model": "tiny", "scale": 1.0, "modes": "file", "kills": 1, "max_disk": None, "rate": 6.0}
    options = command_line.parsed(parser, arguments, **smallest)
    if sys.platform != "linux":
        raise SystemExit("The benchmarks need Linux: /proc and signals.")
    options.modes = options.modes.split(",")
    if unknown := set(options.modes) - set(MODES):
        raise SystemExit(f"--modes has {', '.join(sorted(unknown))}; there are {', '.join(MODES)}.")
    if not 0 < options.scale <= 1:
        raise SystemExit("--scale must be above 0 and at most 1.")
    if options.kills < 0 or (options.rate is not None and options.rate <= 0):
        raise SystemExit("--kills must be 0 or more, and --rate above 0.")
    model = MODELS[options.model]
    options.made = checkpoint(model, options.scale)
    asked = options.max_disk
    options.max_disk = parse_size(asked, "--max-disk") if asked else max_disk(model, options.made)
    options.trial = options.scale < 1 or options.model.startswith("tiny")
    options.work_dir = options.work_dir.resolve()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    for mode in options.modes:  # what a run that was broken off has left there
        shutil.rmtree(_folder(options, mode), ignore_errors=True)
    needed, free = options.max_disk + SPARE_BYTES, shutil.disk_usage(options.work_dir).free
    if free < needed:
        raise SystemExit(
            f"{needed / 1e9:.1f} GB must be free for --work-dir ({options.max_disk / 1e9:.1f} GB of it for the split); "
            f"{free / 1e9:.1f} GB are. A smaller --scale or --max-disk needs less."
        )
    if options.results is None:  # trial figures are not for keeping
        name = "kaggle-72b" if options.model == DEFAULT_MODEL else f"kaggle-{options.model}"
        options.results = (options.work_dir / "results" if options.trial else command_line.RESULTS) / name
    return options


def _folder(options: argparse.Namespace, mode: str) -> Path:
    """Where a mode is rehearsed."""
    folder: Path = options.work_dir / f"kaggle-{options.model}-{mode}"
    return folder


def measure(options: argparse.Namespace, mode: str, hub: HubProcess, content: Content) -> Outcome:
    """Rehearse one mode, check what it made, and clear it away."""
    folder = _folder(options, mode)
    folder.mkdir()
    setting = Setting(options.made, mode, options.max_disk, options.kills, options.seed, folder)
    load_average = os.getloadavg()[0]
    try:
        rehearsal = rehearse(setting, hub)
        print(f"{mode}: whole after {rehearsal.seconds:.1f} s; checking it …", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        verification = verify(rehearsal.folder)
        spots = spot_check.check(options.made, content, rehearsal.folder, options.seed)
        seconds = time.perf_counter() - begun
        assert verification.manifest is not None
        checksums = {record.id: record.crc32 for record in verification.manifest.layers}
        forward = _forward(rehearsal.folder, hub.variables(setting.home)) if options.forward else None
        return Outcome(setting, rehearsal, verification, spots, seconds, checksums, forward, load_average)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def hub_speed(made: Checkpoint, scale: float, work: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """What the hub sends by itself, and through rabbitllm's own fetching; and what its digests took."""
    job = json.dumps({"repository": made.model.repository, "nbytes": SPEED_BYTES})
    command = [sys.executable, "-m", "benchmarks.split.hub_speed", job]
    home = work / "kaggle-72b-hf-home"
    try:
        with HubProcess(made, scale, work) as hub:
            said = subprocess.run(command, env=hub.variables(home), stdout=subprocess.PIPE, text=True, check=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    found: dict[str, Any] = json.loads(said.stdout)
    return found, hub.digests


def _forward(folder: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """One forward pass in a process of its own, with nothing of the layer files in the page cache; or its error."""
    command = [sys.executable, "-m", "benchmarks.split.forward_child", json.dumps({"folder": str(folder)})]
    with subprocess.Popen(
        command, env=dict(variables), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        drop_cached(folder)
        disk = read_speed(sorted(folder.glob("*.safetensors")), SPEED_BYTES)
        with Sampler([], child.pid) as sampler:
            child.stdin.write("go\n")
            child.stdin.flush()
            said = child.stdout.readline()
        child.stdin.close()
    if not said:
        return {"error": f"exit status {child.returncode}"}
    return {
        **json.loads(said),
        "disk_bytes_per_second": disk,
        "anonymous_peak": sampler.anonymous_peak,
        "file_peak": sampler.file_peak,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a mode failed or something that must hold did not."""
    options = parse(arguments)
    made: Checkpoint = options.made
    machine = report.describe_machine(options.work_dir)
    machine.pop("copied_with")
    speed, hashed = hub_speed(made, options.scale, options.work_dir)
    around = Surroundings(machine, speed, hashed, options.rate)
    content = Content()
    done: list[Outcome] = []
    failed = False
    for mode in options.modes:
        try:
            with HubProcess(made, options.scale, options.work_dir, options.rate) as hub:
                outcome = measure(options, mode, hub, content)
        except RehearsalError as error:
            print(f"{mode}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        trial = f" (scale {options.scale:g}: a trial)" if options.trial else ""
        title = (
            f"{made.model.title}'s shapes, {made.nbytes / 1e9:.1f} GB, to 4bit within "
            f"{options.max_disk / 2**30:.2f} GiB, shards as {mode!r}, killed {options.kills} times{trial}"
        )
        base = options.results.with_name(f"{options.results.name}-{mode}")
        write(base, title, outcome, around, notes_on(outcome, around, done))
        done.append(outcome)
        failed = failed or not all(outcome.checks().values())
    return int(failed)
