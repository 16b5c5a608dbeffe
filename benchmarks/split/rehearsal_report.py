"""What came of a rehearsal, for people and for checks: tables, a drawing, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.lib import report
from benchmarks.lib.disk_speed import THREADS
from benchmarks.split import curve
from benchmarks.split.rehearsal import Rehearsal, Setting, layer_bytes
from benchmarks.split.sampler import INTERVAL_SECONDS, peak_of, thinned
from benchmarks.split.spot_check import SpotCheck, named
from rabbitllm.store.layer_store import Verification

MAX_POINTS = 600
"""Of the curve that is kept."""
DISTRIBUTIONS = ("torch", "bitsandbytes", "numba", "huggingface_hub", "safetensors", "transformers")
SAMPLE_FIELDS = ("seconds", "[split directory, hub cache]", "fetched shards", "sent", "anonymous", "resident")


@dataclass(frozen=True)
class Outcome:
    """All there is to say of one mode; seconds and bytes.

    Attributes:
        setting: what was asked for.
        rehearsal: how it went.
        verification: of all layer files.
        spots: a sample of every tensor compared with bitsandbytes.
        checking_seconds: for both.
        checksums: of the layer files, by layer.
        forward: of a forward pass, or its error; None if none was asked for.
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
        """What the standard route would need: the checkpoint in the hub cache, and the layer files."""
        return self.setting.made.nbytes + self.verification.nbytes

    def peaks(self) -> dict[str, int]:
        """The most at any sample: on the disk, and of the memory of whichever process ran."""
        samples = self.rehearsal.samples
        return {
            "split_directory": peak_of(samples, lambda sample: sample.disk[0]),
            "split_directory_and_hub_cache": peak_of(samples, lambda sample: sample.disk_total),
            "fetched_shards": peak_of(samples, lambda sample: sample.part),
            "anonymous": peak_of(samples, lambda sample: sample.anonymous),
            "resident": peak_of(samples, lambda sample: sample.resident),
        }

    def checks(self) -> dict[str, bool]:
        """What must hold."""
        setting = self.setting
        return {
            "all layer files are sound (verify)": not self.verification.damaged,
            "every tensor is what bitsandbytes makes of it (sample)": not self.spots.wrong,
            f"killed {setting.kills} times": len(self.rehearsal.kills) == setting.kills,
            "the split directory stayed within max_disk": self.peaks()["split_directory"] <= setting.max_disk,
            **({"the forward passes gave numbers": self.forward.get("finite", False)} if self.forward else {}),
        }


@dataclass(frozen=True)
class Surroundings:
    """What the figures were made in.

    Attributes:
        machine: see `report.describe_machine`.
        hub_speed: as `hub_speed` found it.
        digests: what had to be hashed before.
        rate: MB/s to which each connection of the hub was limited; None for no limit.
    """

    machine: Mapping[str, Any]
    hub_speed: Mapping[str, Any]
    digests: Mapping[str, Any]
    rate: float | None


def figures(outcome: Outcome, cores: int) -> report.Table:
    """A line for each figure; `cores` that the split and the hub had."""
    took, made, peaks = outcome.rehearsal, outcome.setting.made, outcome.peaks()
    uninterrupted = took.seconds - sum(kill.lost_seconds for kill in took.kills)
    shared = (took.cpu_seconds + took.hub_cpu_seconds) / cores
    rows = [
        ("checkpoint", f"{made.nbytes / 1e9:.1f} GB in {len(made.shards)} shards"),
        ("layer files", f"{outcome.verification.nbytes / 1e9:.2f} GB in {outcome.verification.files}"),
        ("wall time, restarts and all", f"{took.seconds:.1f} s"),
        ("of the checkpoint a second", f"{made.nbytes / took.seconds / 1e6:.0f} MB/s"),
        ("… without the seconds that kills cost", f"{made.nbytes / max(uninterrupted, 1e-9) / 1e6:.0f} MB/s"),
        ("core-seconds a GB of the checkpoint", f"{took.cpu_seconds / made.nbytes * 1e9:.2f}"),
        ("… of the hub beside it", f"{took.hub_cpu_seconds / made.nbytes * 1e9:.2f}"),
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
    return report.Table(("figure", "value"), [*rows, *_of_forward(outcome.forward)])


def _of_forward(forward: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if forward is None:
        return []
    if "error" in forward:
        return [("forward pass", f"failed: {forward['error']}")]
    read, seconds, disk = forward["token_read"], forward["token_seconds"], forward["disk_bytes_per_second"]
    return [
        ("forward pass of one token", f"{seconds:.2f} s on {forward['threads']} threads"),
        ("… read from the disk", f"{read / 1e9:.2f} GB, {read / seconds / 1e9:.2f} GB/s"),
        *(
            [("… of what the disk gives", f"{100 * read / seconds / disk:.0f} % of {disk / 1e9:.2f} GB/s")]
            if disk
            else []
        ),
        ("… further tokens", ", ".join(f"{seconds:.2f} s" for seconds in forward["further_seconds"])),
        ("… read for one of these", f"{forward['further_read'] / len(forward['further_seconds']) / 1e9:.2f} GB"),
        ("… the same logits again", "yes" if forward["repeats"] else "NO"),
        ("… streamed", f"{forward['streamed'] / 1e9:.2f} GB, {forward['way']}"),
        ("… loading before it", f"{forward['load_seconds']:.1f} s, {forward['load_read'] / 1e9:.2f} GB read"),
        ("… peak anonymous memory", f"{forward['anonymous_peak'] / 2**30:.2f} GiB"),
    ]


def kills(outcome: Outcome) -> report.Table:
    """A line for each kill."""
    rows = [
        (
            str(number),
            f"{kill.sent / 1e9:.2f}",
            f"{kill.seconds:.1f}",
            str(kill.used_shards),
            f"{kill.again / 1e6:.1f}",
            f"{kill.lost_seconds:.1f}",
        )
        for number, kill in enumerate(outcome.rehearsal.kills, 1)
    ]
    return report.Table(("kill", "at GB", "at s", "shards used up", "MB sent again", "s lost"), rows)


def stages(outcome: Outcome) -> report.Table:
    """A line for each stage of the last process, which no kill cut short."""
    found = outcome.rehearsal.stages
    taken = max((stage["nbytes"] for stage in found.values()), default=0) or 1
    rows = [
        (
            name,
            f"{stage['seconds'] / stage['threads']:.1f}",
            f"{stage['threads']:.0f}",
            f"{stage['cpu_seconds'] / taken * 1e9:.2f}" if stage["cpu_seconds"] else "",
        )
        for name, stage in found.items()
    ]
    return report.Table((f"stage, of {taken / 1e9:.1f} GB", "busy s", "threads", "core-s a GB"), rows)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB ({nbytes / 2**30:.2f} GiB)"


def notes_on(outcome: Outcome, around: Surroundings, others: Sequence[Outcome]) -> list[str]:
    """What the figures mean, and what held; `others` are modes that made the same layer files."""
    setting, spots, hashed = outcome.setting, outcome.spots, around.digests
    raw, through = around.hub_speed["socket"], around.hub_speed["fetch.stream"]
    same = [(other.setting.mode, other.checksums == outcome.checksums) for other in others]
    limited = "" if around.rate is None else f"; limited to {around.rate:g} MB/s a connection for the split"
    return [
        "MB and GB are 10^6 and 10^9 bytes.",
        "Killed with SIGKILL when the hub had sent so much for the first time; one moment at random in each of "
        f"{setting.kills} equal parts of the checkpoint (seed {setting.seed}).",
        "s lost: from a kill until the layer files grew beyond what they were; the start of Python and its libraries "
        "is in it.",
        "Stages: of the process that finished. What fetches in the background shows as the wait for it; busy s is what "
        "the threads of a stage spent in it, each, waiting included.",
        f"Disk and memory were sampled every {INTERVAL_SECONDS} s; the longest time between two samples was "
        f"{outcome.rehearsal.longest_gap:.3f} s.",
        f"The hub by itself: {raw['mb_per_second']:.0f} MB/s to a client that drops the bytes, "
        f"{through['mb_per_second']:.0f} MB/s through fetch.stream, digest and all "
        f"({raw['core_seconds_per_gb']:.2f} and {through['core_seconds_per_gb']:.2f} core-seconds a GB){limited}.",
        f"The disk by itself: whole chunks of 4 MiB of layer files, read with O_DIRECT in {THREADS} threads.",
        f"Digests: {hashed['hashed'] / 1e9:.1f} GB were hashed before, by {hashed['threads']} threads in "
        f"{hashed['seconds']:.1f} s; the rest was known.",
        f"Load average at the start: {outcome.load_average:.2f}.",
        f"python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in DISTRIBUTIONS)}.",
        *(f"{'yes' if held else 'NO'}: {what}" for what, held in outcome.checks().items()),
        *(f"DAMAGED {damage.file}: {damage.problem}" for damage in outcome.verification.damaged),
        *([f"WRONG: {named(spots.wrong)}"] if spots.wrong else []),
        *(f"{'yes' if so else 'NO'}: the layer files have the checksums of those of {mode!r}" for mode, so in same),
    ]


def write(base: Path, title: str, outcome: Outcome, around: Surroundings, notes: Sequence[str]) -> None:
    """Print the tables; write them to `base`.md, the curve to `base`.svg, and everything to `base`.json."""
    tables = (figures(outcome, int(around.machine["cores"])), kills(outcome), stages(outcome))
    described = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in around.machine.items())
    print("\n\n".join(["", title, described, *(table.text() for table in tables), "\n".join(notes)]))
    base.parent.mkdir(parents=True, exist_ok=True)
    base.with_name(base.name + ".svg").write_text(_drawing(outcome))
    shown = f"![disk in use over time]({base.name}.svg)"
    listed = "\n".join(f"* {note}" for note in notes)
    page = [f"# {title}", described, shown, *(table.markdown() for table in tables), listed]
    base.with_name(base.name + ".md").write_text("\n\n".join(page) + "\n")
    base.with_name(base.name + ".json").write_text(json.dumps(_raw(title, outcome, around, notes), indent=1) + "\n")
    print(f"\nWritten: {base}.json, .md and .svg")


def _drawing(outcome: Outcome) -> str:
    setting, need = outcome.setting, outcome.standard_route
    samples = thinned(outcome.rehearsal.samples, MAX_POINTS)
    points = [curve.Point(s.seconds, layer_bytes(s), s.disk_total - layer_bytes(s)) for s in samples]
    levels = [
        curve.Level(need, f"standard route: {_size(need)}", "#777"),
        curve.Level(setting.max_disk, f"max_disk: {_size(setting.max_disk)}", "#208040"),
    ]
    marks = [kill.seconds for kill in outcome.rehearsal.kills]
    title = f'{setting.made.model.title}, shards as "{setting.mode}": disk in use'
    return curve.drawing(title, points, levels, marks, "kill")


def _raw(title: str, outcome: Outcome, around: Surroundings, notes: Sequence[str]) -> dict[str, Any]:
    setting, made = outcome.setting, outcome.setting.made
    took = asdict(outcome.rehearsal)
    del took["folder"]
    took["samples"] = [list(asdict(sample).values()) for sample in thinned(outcome.rehearsal.samples, MAX_POINTS)]
    return {
        "title": title,
        **asdict(around),
        "notes": notes,
        "checkpoint": {
            "model": made.model.title,
            "layers": made.layers,
            "bytes": made.nbytes,
            "shards": [shard.size for shard in made.shards],
        },
        "setting": {"mode": setting.mode, "max_disk": setting.max_disk, "kills": setting.kills, "seed": setting.seed},
        "load_average": outcome.load_average,
        "layer_files": {"files": outcome.verification.files, "bytes": outcome.verification.nbytes},
        "standard_route": outcome.standard_route,
        "peaks": outcome.peaks(),
        "checks": outcome.checks(),
        "compared": {"tensors": outcome.spots.tensors, "bytes": outcome.spots.nbytes},
        "forward": outcome.forward,
        "sample_fields": SAMPLE_FIELDS,
        "rehearsal": took,
    }
