"""A rehearsal of the README's promise: a model of 150 GB is split to 4bit on a Kaggle disk, and killed on the way.

A hub in a process of its own serves a checkpoint with the published config, names and shapes (Qwen2.5-72B: 145 GB in 37
shards, 45 GiB of disk; Qwen3-Coder-Next: 159 GB in 40 shards with 74,000 matrices of experts, 48 GiB) and weights that
are made while they are sent. The splitting part of `AutoModel` takes it one shard at a time, in a process that is
killed with SIGKILL at random moments and restarted with the same call. Then every layer file is verified, and a sample
of every tensor is compared with bitsandbytes' own quantization of the weights.

    python -m benchmarks split.kaggle [--model coder-next] [--scale 0.05] [--modes file,stream] [--kills 5] [--forward]
                                      [--work-dir FOLDER]

`--scale` leaves decoder layers out, and their share of the allowed disk, but changes no shape; embeddings and head are
5 GB of the 72B model and 1.2 GB of the other. The whole needs 51 or 54 GB of free disk. The first run of a scale hashes
every shard once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, pictures, report
from benchmarks.lib.generated import Content
from benchmarks.lib.measure import THREADS, drop_cached, read_speed
from benchmarks.lib.models import MODELS
from benchmarks.lib.peers import THIS, run_worker
from benchmarks.lib.process import PeerError
from benchmarks.lib.published import Checkpoint, checkpoint, max_disk
from benchmarks.split import spot_check
from benchmarks.split.hub import HubProcess
from benchmarks.split.rehearsal import INTERVAL_SECONDS, Rehearsal, RehearsalError, Setting, peak_of, rehearse, thinned
from benchmarks.split.spot_check import SpotCheck
from rabbitllm.base.options import parse_size
from rabbitllm.store.layer_store import Verification, verify

MODES = ("file", "stream", "auto")
DEFAULT_MODEL = "qwen2.5-72b"
SPARE_BYTES = 2 * 1000**3
"""Of disk, besides the split: the room that stays free, the hub cache, logs."""
SPEED_BYTES = 2 * 1000**3
"""Read from the disk to measure its speed alone."""
MAX_POINTS = 600
"""Of the curve in the results."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked and completed.

    Raises:
        SystemExit: the rehearsal cannot run.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default=DEFAULT_MODEL, help="tiny, tiny-moe: try it out")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times the model's layers (at least one)")
    parser.add_argument("--modes", default="file,stream", help=f"of {', '.join(MODES)} (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="in each mode (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (default: %(default)s)")
    parser.add_argument("--max-disk", help="for the split (default: see above, less the share of the layers left out)")
    parser.add_argument("--rate", type=float, help="MB/s of each of the hub's connections (default: all it can)")
    parser.add_argument("--forward", action="store_true", help="three tokens on the CPU, when the split is whole")
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
    allowed = options.max_disk
    options.max_disk = parse_size(allowed, "--max-disk") if allowed else max_disk(model, options.made)
    options.trial = options.scale < 1 or options.model.startswith("tiny")
    options.work_dir = options.work_dir.resolve()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    for mode in options.modes:  # an interrupted run leaves some
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
    return Path(options.work_dir, f"kaggle-{options.model}-{mode}")


@dataclass(frozen=True)
class Outcome:
    """The results of one mode; seconds and bytes.

    Attributes:
        verification: of all layer files.
        spots: a sample of every tensor compared with bitsandbytes.
        checking_seconds: of both.
        checksums: of the layer files, by layer.
        forward: figures of a few tokens, or an error; None without `--forward`.
        load_average: at the start.
    """

    setting: Setting
    rehearsal: Rehearsal
    verification: Verification
    spots: SpotCheck
    checking_seconds: float
    checksums: Mapping[str, int]
    forward: Mapping[str, Any] | None
    load_average: float

    @property
    def standard_route(self) -> int:
        """Bytes of the standard route: the checkpoint in the hub cache, and the layer files."""
        return self.setting.made.nbytes + self.verification.nbytes

    def peaks(self) -> dict[str, int]:
        """The most at any sample, of disk and of the running process's memory."""
        samples = self.rehearsal.samples
        return {
            "split_directory": peak_of(samples, lambda sample: sample.splits),
            "split_directory_and_hub_cache": peak_of(samples, lambda sample: sample.disk),
            "fetched_shards": peak_of(samples, lambda sample: sample.staged),
            "anonymous": peak_of(samples, lambda sample: sample.anonymous),
            "resident": peak_of(samples, lambda sample: sample.resident),
        }

    def checks(self) -> dict[str, bool]:
        """Conditions of success."""
        setting = self.setting
        return {
            "all layer files are sound (verify)": not self.verification.damaged,
            "every tensor equals bitsandbytes' own (sample)": not self.spots.wrong,
            f"killed {setting.kills} times": len(self.rehearsal.kills) == setting.kills,
            "the split directory stayed within max_disk": self.peaks()["split_directory"] <= setting.max_disk,
            **({"tokens were generated": "error" not in self.forward} if self.forward is not None else {}),
        }


def measure(options: argparse.Namespace, mode: str, hub: HubProcess, content: Content) -> Outcome:
    """Rehearse one mode, check its layer files, and remove them."""
    folder = _folder(options, mode)
    folder.mkdir()
    setting = Setting(options.made, mode, options.max_disk, options.kills, options.seed, folder)
    load_average = os.getloadavg()[0]
    try:
        rehearsal = rehearse(setting, hub)
        assert rehearsal.folder is not None
        print(f"{mode}: whole after {rehearsal.seconds:.1f} s; checking it …", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        verification = verify(rehearsal.folder)
        spots = spot_check.check(options.made, content, rehearsal.folder, options.seed)
        seconds = time.perf_counter() - begun
        assert verification.manifest is not None
        checksums = {record.id: record.crc32 for record in verification.manifest.layers}
        forward = _forward(rehearsal.folder, folder) if options.forward else None
        return Outcome(setting, rehearsal, verification, spots, seconds, checksums, forward, load_average)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _forward(folder: Path, work: Path) -> dict[str, Any]:
    """Figures of a few tokens, with the layer files out of the page cache; or an error."""
    drop_cached(folder)
    disk = read_speed(sorted(folder.glob("*.safetensors")), SPEED_BYTES)
    job = {"task": "decode", "package": "rabbitllm", "loader": "layered", "checkpoint": str(folder)}
    try:
        outcome = run_worker(THIS, {**job, "options": {}, "prompt": [1], "tokens": 3}, work, "forward", [folder])
    except PeerError as error:
        return {"error": str(error)}
    answer = outcome.answer
    return {
        "load_seconds": answer["load_seconds"],
        "token_seconds": answer["first_token_seconds"],
        "further_seconds": answer["step_seconds"],
        "further_read": sum(answer["step_bytes"]),
        "placed": answer["placed"],
        "threads": answer["threads"],
        "disk_bytes_per_second": disk,
        "anonymous_peak": outcome.sampler.anonymous_peak,
    }


def figures(outcome: Outcome, cores: int) -> report.Table:
    """A line for each figure; the split and the hub had `cores` together."""
    took, source, peaks = outcome.rehearsal, outcome.setting.made, outcome.peaks()
    uninterrupted = took.seconds - sum(kill.lost_seconds for kill in took.kills)
    shared = (took.cpu_seconds + took.hub_cpu_seconds) / cores
    rows = [
        ("checkpoint", f"{source.nbytes / 1e9:.1f} GB in {len(source.shards)} shards"),
        ("layer files", f"{outcome.verification.nbytes / 1e9:.2f} GB in {outcome.verification.files}"),
        ("wall time, restarts and all", f"{took.seconds:.1f} s"),
        ("of the checkpoint a second", f"{source.nbytes / took.seconds / 1e6:.0f} MB/s"),
        ("… without the seconds that kills cost", f"{source.nbytes / max(uninterrupted, 1e-9) / 1e6:.0f} MB/s"),
        ("core-seconds a GB of the checkpoint", f"{took.cpu_seconds / source.nbytes * 1e9:.2f}"),
        ("… of the hub beside it", f"{took.hub_cpu_seconds / source.nbytes * 1e9:.2f}"),
        ("wall time without kills / (both / cores)", f"{uninterrupted / max(shared, 1e-9):.2f}"),
        ("peak disk, split directory", _size(peaks["split_directory"])),
        ("… of it fetched shards, at their own peak", _size(peaks["fetched_shards"])),
        ("… with the hub cache", _size(peaks["split_directory_and_hub_cache"])),
        ("… announced before the first byte", _size(took.planned_peak)),
        ("… allowed (max_disk)", _size(outcome.setting.max_disk)),
        ("… that the standard route would need", _size(outcome.standard_route)),
        ("peak anonymous memory", f"{peaks['anonymous'] / 2**20:.0f} MiB"),
        ("… above that when the split began (last process)", f"{took.added_memory / 2**20:.0f} MiB"),
        ("peak resident memory, mapped libraries too", f"{peaks['resident'] / 2**20:.0f} MiB"),
        ("sent by the hub", f"{took.sent / 1e9:.2f} GB, {took.again / 1e6:.1f} MB of it again"),
        ("… to look at headers", f"{took.probed / 1e6:.1f} MB"),
        ("compared with bitsandbytes", f"{outcome.spots.nbytes / 1e6:.0f} MB of {outcome.spots.tensors} tensors"),
        ("that and verify", f"{outcome.checking_seconds:.1f} s"),
    ]
    forward = outcome.forward
    if forward is not None and "error" in forward:
        rows.append(("tokens on the CPU", f"failed: {forward['error']}"))
    elif forward is not None:
        further = forward["further_seconds"]
        read, disk = forward["further_read"] / len(further), forward["disk_bytes_per_second"]
        rows += [
            ("first token on the CPU", f"{forward['token_seconds']:.2f} s on {forward['threads']} threads"),
            ("… further tokens", ", ".join(f"{seconds:.2f} s" for seconds in further)),
            ("… read for one of these", f"{read / 1e9:.2f} GB ({forward['placed']})"),
            ("… the disk alone", f"{disk / 1e9:.2f} GB/s"),
            ("… loading before it", f"{forward['load_seconds']:.1f} s"),
            ("… peak anonymous memory", f"{forward['anonymous_peak'] / 2**30:.2f} GiB"),
        ]
    return report.Table(("figure", "value"), rows)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB ({nbytes / 2**30:.2f} GiB)"


def kills(outcome: Outcome) -> report.Table:
    """A line for each kill."""
    rows = []
    for number, kill in enumerate(outcome.rehearsal.kills, 1):
        cells = (f"{kill.sent / 1e9:.2f}", f"{kill.seconds:.1f}", str(kill.used_shards), f"{kill.again / 1e6:.1f}")
        rows.append((str(number), *cells, f"{kill.lost_seconds:.1f}"))
    return report.Table(("kill", "at GB", "at s", "shards used up", "MB sent again", "s lost"), rows)


def stages(outcome: Outcome) -> report.Table:
    """A line for each stage of the last process, which no kill cut short."""
    entries = outcome.rehearsal.stages
    taken = max((stage["nbytes"] for stage in entries.values()), default=0) or 1
    rows = []
    for name, stage in entries.items():
        core = f"{stage['cpu_seconds'] / taken * 1e9:.2f}" if stage["cpu_seconds"] else ""
        rows.append((name, f"{stage['seconds'] / stage['threads']:.1f}", f"{stage['threads']:.0f}", core))
    return report.Table((f"stage, of {taken / 1e9:.1f} GB", "busy s", "threads", "core-s a GB"), rows)


def notes_on(outcome: Outcome, hashed: Mapping[str, Any], rate: float | None, others: Sequence[Outcome]) -> list[str]:
    """The meaning of the figures, and the checks; `others` are modes that made the same layer files."""
    setting, spots = outcome.setting, outcome.spots
    same = [(other.setting.mode, other.checksums == outcome.checksums) for other in others]
    return [
        "MB and GB are 10^6 and 10^9 bytes.",
        "Killed with SIGKILL when the hub had sent that many new bytes; one random moment in each of "
        f"{setting.kills} equal parts of the checkpoint (seed {setting.seed}).",
        "s lost: from a kill until the layer files outgrew their size at it, with the start of Python and its "
        "libraries.",
        "Stages: of the process that finished. Fetching in the background shows as the wait for it; busy s: seconds of "
        "each thread of a stage, with waiting.",
        f"Disk and memory were sampled every {INTERVAL_SECONDS} s; the longest time between two samples was "
        f"{outcome.rehearsal.longest_gap:.3f} s.",
        f"The hub sends {'all it can' if rate is None else f'{rate:g} MB/s a connection'}; the disk alone: whole "
        f"chunks of 4 MiB of layer files, read with O_DIRECT in {THREADS} threads.",
        f"Digests: {hashed['hashed'] / 1e9:.1f} GB were hashed before, by {hashed['threads']} threads in "
        f"{hashed['seconds']:.1f} s; the rest was known.",
        f"Load average at the start: {outcome.load_average:.2f}.",
        *(f"{'yes' if held else 'NO'}: {check}" for check, held in outcome.checks().items()),
        *(f"DAMAGED {damage.file}: {damage.problem}" for damage in outcome.verification.damaged),
        *([f"WRONG: {spot_check.named(spots.wrong)}"] if spots.wrong else []),
        *(f"{'yes' if so else 'NO'}: the layer files have the checksums of those of {mode!r}" for mode, so in same),
    ]


def picture(outcome: Outcome) -> pictures.Picture:
    """The disk in use over time."""
    setting, samples = outcome.setting, thinned(outcome.rehearsal.samples, MAX_POINTS)
    parts = {
        "layer files": [sample.layers / 1e9 for sample in samples],
        "fetched shards and the hub cache": [(sample.disk - sample.layers) / 1e9 for sample in samples],
    }
    levels = {
        f"standard route: {_size(outcome.standard_route)}": outcome.standard_route / 1e9,
        f"max_disk: {_size(setting.max_disk)}": setting.max_disk / 1e9,
    }
    title = f'{setting.made.model.title}, shards as "{setting.mode}": disk in use'
    marks = [kill.seconds for kill in outcome.rehearsal.kills]
    return pictures.areas(title, parts, [sample.seconds for sample in samples], levels, marks)


def facts(outcome: Outcome) -> dict[str, Any]:
    """Further keys of the JSON."""
    setting, source, took = outcome.setting, outcome.setting.made, asdict(outcome.rehearsal)
    sizes = [shard.size for shard in source.shards]
    took["samples"] = [list(asdict(sample).values()) for sample in thinned(outcome.rehearsal.samples, MAX_POINTS)]
    del took["folder"]
    return {
        "checkpoint": {"layers": source.layers, "bytes": source.nbytes, "shards": sizes},
        "setting": {"mode": setting.mode, "max_disk": setting.max_disk, "kills": setting.kills, "seed": setting.seed},
        "layer_files": {"files": outcome.verification.files, "bytes": outcome.verification.nbytes},
        "standard_route": outcome.standard_route,
        "peaks": outcome.peaks(),
        "checks": outcome.checks(),
        "compared": {"tensors": outcome.spots.tensors, "bytes": outcome.spots.nbytes},
        "forward": outcome.forward,
        "rehearsal": took,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a mode or a check failed."""
    options = parse(arguments)
    source: Checkpoint = options.made
    content = Content()
    done: list[Outcome] = []
    failed = False
    for mode in options.modes:
        try:
            with HubProcess(source, options.scale, options.work_dir, options.rate) as hub:
                outcome, hashed = measure(options, mode, hub, content), hub.digests
        except RehearsalError as error:
            print(f"{mode}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        trial = f" (scale {options.scale:g}: a trial)" if options.trial else ""
        title = (
            f"{source.model.title}'s shapes, {source.nbytes / 1e9:.1f} GB, to 4bit within "
            f"{options.max_disk / 2**30:.2f} GiB, shards as {mode!r}, killed {options.kills} times{trial}"
        )
        report.write(
            options.results.with_name(f"{options.results.name}-{mode}"),
            title,
            figures(outcome, len(os.sched_getaffinity(0))),
            notes_on(outcome, hashed, options.rate, done),
            work=options.work_dir,
            picture=picture(outcome),
            more={"Kills": kills(outcome), "Stages": stages(outcome)},
            facts=facts(outcome),
        )
        done.append(outcome)
        failed = failed or not all(outcome.checks().values())
    return int(failed)
