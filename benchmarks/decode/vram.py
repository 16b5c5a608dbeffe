"""Generating on a GPU with less of its memory than the model has, compared with the projects that claim it.

A Qwen2 of 5.8 GB in bfloat16 (or of `--size` GB, up to 25), a prompt of 16 tokens, then greedy tokens, batch 1. Every
process may hold 2, 4 or 8 GiB of the GPU's memory, as torch's own allocator enforces it (`lib/worker_gpu.py` says why),
and plans, where it can be told, with an eighth of that less, 256 MiB at most. What the GPU does not hold comes

* from the disk: the process is in a control group that may take 2 GiB (`--ram`) more than the idle process, of which
  half is given to weights; where no group can be made, its files are dropped from the page cache before each token, and
  no row is given host memory for weights;
* from RAM: as it comes, with four fifths of what is free given to weights.

Runners follow one another, each in an environment of its own laid over this interpreter's torch, so that the disk holds
the checkpoint and one split at a time. The rates of pinned copies and of the disk are measured before each.

    sudo python -m benchmarks decode.vram [--size 6] [--vram 2 4 8] [--hosts disk RAM] [--ram 2] [--turns 1]
        [--tokens 4] [--only ROW ...] [--scale tiny]

Without a GPU it says what it found, needs and what to do, and exits with 2. Root is needed for control groups alone.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.decode import vram_model
from benchmarks.decode.vram_report import (
    GIB,
    OURS,
    REFERENCE,
    REFERENCE_HERE,
    Case,
    VramRun,
    notes_on,
    picture,
    tabulate,
)
from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import weight_bytes
from benchmarks.lib.control_group import can_limit_memory
from benchmarks.lib.disk_speed import read_speed
from benchmarks.lib.generation import PROMPT_TOKENS, Runner, prepare_files
from benchmarks.lib.idle_process import PeerError
from benchmarks.lib.measure import CACHE_STATE, drop_cached
from benchmarks.lib.peers import AIRLLM, RABBITLLM_1, THIS, TRANSFORMERS, over_this, prepare, run_worker
from benchmarks.lib.published import Checkpoint
from benchmarks.lib.runs import run_all, status

RUNNERS: Mapping[str, Runner] = {
    REFERENCE: Runner(over_this(TRANSFORMERS), "transformers", "placed"),
    REFERENCE_HERE: Runner(THIS, "transformers", "placed"),
    "rabbitllm-1.1.0": Runner(over_this(RABBITLLM_1), "rabbitllm"),
    "airllm-4.0.0": Runner(over_this(AIRLLM), "airllm"),
    "rabbitllm-2": Runner(THIS, "rabbitllm"),
    "rabbitllm-1.1.0-4bit": Runner(over_this(RABBITLLM_1), "rabbitllm", options={"compression": "4bit"}),
    "airllm-4.0.0-4bit": Runner(over_this(AIRLLM), "airllm", options={"compression": "4bit"}),
    "rabbitllm-2-4bit": Runner(THIS, "rabbitllm", options={"compression": "4bit"}),
}
BY_DEFAULT = [REFERENCE, "rabbitllm-1.1.0", "airllm-4.0.0", *OURS]
HOSTS = ("disk", "RAM")
SIZES = {"full": 6.0, "medium": 1.0, "tiny": 0.01}
"""GB, where `--size` says nothing."""
MAX_MARGIN = 256 << 20
"""Of a cap, for activations and the KV cache of 20 tokens; an eighth of it, if that is less."""
DISK_SAMPLE_BYTES = 2 << 30
RUN_LIMIT_SECONDS = 1200
ENVIRONMENT_BYTES = 10**9
TEST_DEVICE = "tests.support.rehearsed_gpu:RehearsedGpu"
"""Of all peers together, over a torch that is there."""


DRIVER = Path("/proc/driver/nvidia/version")


def what_is_missing(driver: Path = DRIVER) -> str | None:
    """None where torch sees a GPU; else three lines: what was found, what is needed, what to do."""
    import torch

    if torch.cuda.is_available():
        return None
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    loaded = driver.exists()
    found = f"torch {torch.__version__} {built}, and NVIDIA's driver is {'loaded' if loaded else 'not loaded'}"
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
        f"Found no GPU: {found}.\n"
        "Needed: Linux, one NVIDIA GPU, its driver, and a torch that is built with CUDA.\n"
        f"What to do: {remedy}."
    )


@dataclass(frozen=True)
class Workload:
    """What every row does, and where.

    Attributes:
        checkpoint: its folder.
        part: what is in it.
        folder: of one runner's own files at a time.
        prompt, tokens: token ids, and how many to generate.
        gpu: the stand-in for CUDA, or nothing.
        dtype: to compute in.
        ram: bytes in addition to the idle process.
        is_limited: whether a control group holds it to them; else its files are dropped from the page cache.
    """

    checkpoint: Path
    part: Checkpoint
    folder: Path
    prompt: Sequence[int]
    tokens: int
    gpu: str
    dtype: str
    ram: int
    is_limited: bool

    def host_bytes(self, host: str) -> int:
        """Host memory that weights may take."""
        if host == "RAM":
            return int(psutil.virtual_memory().available * 0.8)
        return self.ram // 2 if self.is_limited else 0


def weights_bytes(cap: int) -> int:
    """What of a cap weights may take."""
    return cap - min(cap // 8, MAX_MARGIN)


def make_files(row: str, workload: Workload, work: Path) -> None:
    """Make a runner's own files; those of the runner before it are gone.

    Raises:
        PeerError: it failed.
    """
    shutil.rmtree(workload.folder, ignore_errors=True)
    workload.folder.mkdir()
    prepare_files(RUNNERS[row], workload.checkpoint, workload.folder / "layers", work, f"vram-{row}-files")
    drop_cached(workload.folder)


def probe(gpu: str, work: Path) -> Mapping[str, Any]:
    """The link's rate, the dtype to compute in and the facts of the GPU, as a process of its own finds them.

    Raises:
        PeerError: it failed.
    """
    return run_worker(THIS, {"task": "gpu probe", "package": "rabbitllm", "gpu": gpu}, work, "vram-probe", []).answer


def disk_rate(folders: Sequence[Path]) -> float:
    """Bytes a second past the page cache, over the safetensors files below folders; 0 where that cannot be."""
    files = sorted(path for folder in folders for path in folder.rglob("*.safetensors"))
    try:
        return read_speed(files, DISK_SAMPLE_BYTES)
    except OSError:
        return 0.0


def measure(run: VramRun, case: Case, workload: Workload, work: Path) -> None:
    """Carry out one row of one turn."""
    runner, cap = RUNNERS[case.runner], int(case.vram * GIB)
    is_capped = case.host == "disk" and workload.is_limited
    is_dropped = case.host == "disk" and not workload.is_limited
    files = [workload.checkpoint, workload.folder]
    job = {
        "task": "gpu decode",
        "package": runner.package,
        "loader": runner.loader,
        "is_ours": runner.environment == THIS and runner.package == "rabbitllm",
        "gpu": workload.gpu,
        "vram": cap,
        "weights_bytes": weights_bytes(cap),
        "host_bytes": workload.host_bytes(case.host),
        "dtype": workload.dtype,
        "checkpoint": str(workload.checkpoint),
        "options": {"layer_shards_saving_path": str(workload.folder / "layers"), **runner.options},
        "offload_folder": str(workload.folder / "offload"),
        "told_ram": workload.ram if is_dropped else None,
        "cold": list(map(str, files)) if is_dropped else [],
        "prompt": list(workload.prompt),
        "tokens": workload.tokens,
    }
    label = f"vram-{case.name}-{run.turn}".replace(", ", "-").replace(" ", "")
    cap_bytes, limit = workload.ram if is_capped else None, RUN_LIMIT_SECONDS
    run.take(run_worker(runner.environment, job, work, label, files, cap_bytes=cap_bytes, limit_seconds=limit))
    if run.copied_bytes is None:
        run.copied_bytes = _least_copied(runner, workload)


def _least_copied(runner: Runner, workload: Workload) -> int | None:
    """Of a peer that does not tell: it brings every decoder layer for each token. At 4bit it is not known."""
    return None if runner.is_compressed else vram_model.layer_bytes(workload.part)


def run_row(row: str, cases: Sequence[Case], turns: int, workload: Workload, work: Path, problem: str) -> list[VramRun]:
    """All that is measured of one runner, from its files to their removal."""
    named = {case.name: case for case in cases}
    copies = disk = 0.0
    try:
        if not problem:
            try:
                make_files(row, workload, work)
                copies = float(probe(workload.gpu, work)["copy_speed"])
                disk = disk_rate([workload.folder if RUNNERS[row].loader == "layered" else workload.checkpoint])
            except PeerError as error:
                problem = f"its files: {error}"
        return run_all(
            list(named),
            turns,
            lambda name, turn: VramRun(name, turn, copy_speed=copies, disk_speed=disk),
            lambda run: measure(run, named[run.row], workload, work),
            dict.fromkeys(named, problem) if problem else {},
        )
    finally:
        shutil.rmtree(workload.folder, ignore_errors=True)


def about_the_host(workload: Workload) -> list[str]:
    """How the host's memory was kept from hiding the disk."""
    if workload.is_limited:
        disk = f"a control group of {workload.ram / GIB:g} GiB over the idle process, page cache included"
    else:
        disk = (
            "no control group could be made, so files were dropped from the page cache before each token; rabbitllm-2 "
            f"was told of {workload.ram / GIB:g} GiB of free memory, which it chooses its way of reading by"
        )
    return [f"disk: {disk}. RAM: not limited.", f"Page cache {CACHE_STATE}."]


def refuse(said: str) -> int:
    """Say why nothing is measured; the exit status."""
    print(said, file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    made = command_line.parser(__doc__, 1, list(RUNNERS))
    made.set_defaults(only=BY_DEFAULT)
    most = vram_model.MAX_GIGABYTES
    made.add_argument("--size", type=float, help=f"GB of the model in bfloat16, at most {most:g} (default: 6)")
    made.add_argument("--vram", type=float, nargs="+", default=[2, 4, 8], help="GiB (default: 2 4 8)")
    made.add_argument("--hosts", nargs="+", choices=HOSTS, default=HOSTS, help="where the rest comes from")
    made.add_argument("--ram", type=float, default=2, help="GiB over the idle process, for `disk` (default: 2)")
    made.add_argument("--tokens", type=int, default=4, help="to generate, at least 2 (default: %(default)s)")
    made.add_argument("--gpu", default="", help=argparse.SUPPRESS)  # "module:class", a stand-in; for tests
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 2 without a GPU that suits, 1 if a row of this project failed."""
    smallest: dict[str, Any] = {
        "only": ["rabbitllm-2"],
        "size": None,
        "vram": [0.002],
        "ram": 0.25,
        "hosts": ["disk"],
        "tokens": 3,
    }
    options = command_line.parsed(_parser(), arguments, **smallest)
    missing = None if options.gpu else what_is_missing()
    if missing is not None and options.smallest:
        print(f"{missing}\nThe smallest size runs on the device of the tests.", flush=True)
        options.gpu, missing = TEST_DEVICE, None
    if missing is not None:
        return refuse(missing)
    size = SIZES[options.scale] if options.size is None else options.size
    if not 0 < size <= vram_model.MAX_GIGABYTES:
        return refuse(f"--size is {size:g}; expected more than 0 and at most {vram_model.MAX_GIGABYTES:g} (GB).")
    command_line.check_tokens(options)
    part = vram_model.model_of(size, tiny=options.scale == "tiny")
    # the checkpoint, one split, and what transformers writes where it has to cast to offload
    command_line.settle(options, "vram", dict.fromkeys(SIZES, int(2.2 * part.nbytes) + ENVIRONMENT_BYTES))
    work = options.work_dir
    try:
        found = probe(options.gpu, work)
    except PeerError as error:
        return refuse(f"The GPU is there and does not work: {error}\nThe log is in {work / 'logs'}.")
    facts = dict(found["facts"])
    total = facts.pop("vram_bytes")
    caps = [cap for cap in options.vram if 0 < cap * GIB < total]
    if not caps:
        return refuse(f"Found {facts['gpu']} of {total / GIB:.1f} GiB; --vram needs a cap below that.")
    workload = Workload(
        work / f"vram-model-{options.scale}",
        part,
        work / "vram-run",
        [(i * 37 + 11) % part.config["vocab_size"] for i in range(PROMPT_TOKENS)],
        options.tokens,
        options.gpu,
        str(found["dtype"]),
        int(options.ram * GIB),
        can_limit_memory(),
    )
    cases = [Case(row, cap, host) for host in options.hosts for cap in caps for row in options.only]
    unusable = prepare({row: RUNNERS[row].environment for row in options.only}, work)
    print(f"Writing a model of {part.nbytes / 1e9:.2f} GB …", file=sys.stderr, flush=True)
    vram_model.write(part, workload.checkpoint)
    machine = report.describe_machine(work) | facts
    runs: list[VramRun] = []
    for row in options.only:
        own = [case for case in cases if case.runner == row]
        runs += run_row(row, own, options.turns, workload, work, unusable.get(row, ""))
    weights = weight_bytes(workload.checkpoint)
    title = (
        f"{options.tokens} tokens of a model of {weights / 1e9:.2f} GB with VRAM capped, on {facts['gpu']}, "
        f"{command_line.turns(options)}"
    )
    results = options.results.with_name(f"{options.results.name}-{_slug(facts['gpu'])}")
    table = tabulate(runs, cases, options.turns)
    notes = notes_on(runs, cases, about_the_host(workload))
    report.write(results, title, machine, table, notes, runs, picture(title, runs, cases))
    return status(runs, lambda row: row.startswith(tuple(f"{own}, " for own in OURS)))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
