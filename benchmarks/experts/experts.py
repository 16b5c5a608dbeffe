"""A mixture of experts on the CPU with less memory than the model: seconds and bytes a token, and hits of its cache.

The checkpoint (6.6 GB in bfloat16) routes its texts as trained models do: "flat" texts as published of a model with 512
experts, "skewed" ones with stronger preferences. Requests alternate among 4 topics; the first round warms the cache up,
and the steps of the second one are timed; without a cap it runs twice, and the second time is timed. In a third round
the engine counts hits. Rows of peers get two requests with few tokens and no warm-up, since they read all experts for
each token.

    sudo python -m benchmarks experts [--turns 3] [--tokens 48] [--shares 25 50] [--only ROW ...] [--scale tiny]

With `--shapes` the layers are those of a published model at 4bit, fewer of them, with `fast_bfloat16`, and shares are
of what they take at 4bit. Seconds a token are compared with their limit: missed bytes at the disk's rate, or a token's
at the memory's, measured between the requests of the same run. llama.cpp's server gets the same texts and a file at
Q4_0 (gpt-oss as published), under a cap with `--no-repack`, with `--cpu-moe`, and by direct I/O.

    sudo python -m benchmarks experts --shapes coder-next|30b-a3b|gpt-oss-20b|flash-next [--whole] [--sequences N]

With `--sequences` each request is of so many texts together, one of them warms up, one is timed, and the engine counts
hits in a third; there is no peer.

With `--whole` it has all layers (Flash-Next a quarter of them) and words: a hub of this machine sends it, and it is
split one shard at a time, so that the disk holds it at 4bit only. llama.cpp's file is written from that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.experts.checkpoint import (
    HABITS,
    SCALES,
    SHAPES,
    WHOLE,
    MoeWeights,
    make_moe_checkpoint,
    model_of,
    passage,
    touched_bytes,
)
from benchmarks.experts.report import LLAMA_CPP, OURS, MoeRun, notes_on, tabulate
from benchmarks.lib import command_line, llama, published, report
from benchmarks.lib.checkpoint import weight_bytes
from benchmarks.lib.generated import digests
from benchmarks.lib.generation import CappedCase, Runner, prepare_files
from benchmarks.lib.measure import drop_pages, memory_speed, read_speed
from benchmarks.lib.peers import LLAMA_SERVER, THIS, room, run_worker
from benchmarks.lib.process import Cap, control_group, run_tool
from benchmarks.lib.runs import carry_out, status
from benchmarks.quality.llama_cpp import quantized, tool
from benchmarks.split.hub import GeneratedHub, client_variables
from rabbitllm.store.manifest import directory_name

RUNNERS: Mapping[str, Runner] = {
    "transformers": Runner(THIS, "transformers", "in memory"),
    "transformers-disk": Runner(THIS, "transformers", "offloaded"),
    "rabbitllm-2": Runner(THIS, "rabbitllm"),
    "rabbitllm-2-4bit": Runner(THIS, "rabbitllm", options={"compression": "4bit"}),
    LLAMA_CPP: Runner(LLAMA_SERVER, "llama.cpp", options={"arguments": []}),
    "llama.cpp-no-repack": Runner(LLAMA_SERVER, "llama.cpp", options={"arguments": ["--no-repack"]}),
    "llama.cpp-cpu-moe": Runner(LLAMA_SERVER, "llama.cpp", options={"arguments": ["--cpu-moe"]}),
    "llama.cpp-direct-io": Runner(LLAMA_SERVER, "llama.cpp", options={"arguments": ["--load-mode", "dio"]}),
}
OF_SHAPES = [name for name, runner in RUNNERS.items() if runner.environment == LLAMA_SERVER]
"""Peers with the shapes of published models; all others run without `--shapes`."""
UNCAPPED = ("transformers", "rabbitllm-2", "rabbitllm-2-4bit", LLAMA_CPP)
"""These also run without a cap, with the first habits, for seconds of computing alone."""
NEEDED_BYTES = {"full": 26 * 1000**3, "medium": 3 * 1000**3, "tiny": 300 * 1000**2}
"""Checkpoint, layer files of both kinds, and transformers' offloaded weights."""
SHAPES_NEED_BYTES = {**NEEDED_BYTES, "full": 30 * 1000**3}
"""Checkpoint, layer files of one kind, and llama.cpp's files."""
WHOLE_NEEDS = 2.1
"""Times what it takes at 4bit: layer files, llama.cpp's file, and two shards. MXFP4 is there once more."""
PROMPT_TOKENS = {"full": 16, WHOLE: 16, "medium": 16, "tiny": 6}
TOPICS = 4
"""Each has a request that warms up, and one that is measured."""
OTHERS_REQUESTS, OTHERS_TOKENS = 2, 4
RUN_LIMIT_SECONDS, LLAMA_CPP_START_SECONDS = 600, 60
SPEED_BYTES = 1000**3
"""Read from the disk to measure its rate."""


@dataclass(frozen=True)
class Workload:
    """The job of every row.

    Attributes:
        checkpoint: what is loaded, and what the disk's rate is measured with: the layer files of a whole model.
        weights: bytes of all layer files.
        folder: of the runners' files.
        scale: a key of `SCALES`.
        tokens: of each request.
        options: of this project.
        sequences: of each request.
    """

    checkpoint: Path
    weights: int
    folder: Path
    scale: str
    tokens: int
    options: Mapping[str, Any]
    sequences: int = 1

    def requests(self, case: CappedCase) -> tuple[list[list[list[int]]], int]:
        """Requests, each of passages, which are a prompt and its continuation; and how many of them only warm up. In
        the last ones of this project under a cap the engine counts."""
        length, warms_up = self.prompt + self.made(case), case.runner in (*OURS, LLAMA_CPP)
        count = 2 * self.timed + self.counted(case) if warms_up else OTHERS_REQUESTS
        passages = [
            passage(self.scale, case.given, number % TOPICS, number // TOPICS, length)
            for number in range(count * self.sequences)
        ]
        requests = [passages[first : first + self.sequences] for first in range(0, len(passages), self.sequences)]
        if warms_up and case.share is None:  # what a page's first use costs is not counted
            requests = [*requests, *requests[self.timed :]]
        return requests, len(requests) - self.timed - self.counted(case) if warms_up else 0

    @property
    def timed(self) -> int:
        """Requests that are timed."""
        return TOPICS if self.sequences == 1 else 1

    def counted(self, case: CappedCase) -> int:
        """Requests in which the engine counts hits."""
        return self.timed if case.runner in OURS and case.share is not None else 0

    @property
    def prompt(self) -> int:
        """Tokens of each prompt."""
        return PROMPT_TOKENS[self.scale.rpartition("-")[2]]

    def made(self, case: CappedCase) -> int:
        """Tokens of each request."""
        return self.tokens if case.runner in (*OURS, LLAMA_CPP) else min(self.tokens, OTHERS_TOKENS)

    @property
    def probed(self) -> list[Path]:
        """Files on whose disk the rate is measured."""
        return sorted(self.checkpoint.rglob("*.safetensors"))

    def files(self, runner: str) -> Path:
        """The folder of a runner's layer files, or llama.cpp's file."""
        if runner in OF_SHAPES:
            return self.folder / "llama.cpp.gguf"
        return self.folder / f"layers-{RUNNERS[runner].options.get('compression', 'none')}"


def measure(run: MoeRun, case: CappedCase, workload: Workload, work: Path) -> None:
    """Run one row of one turn."""
    (_ask_llama_cpp if case.runner in OF_SHAPES else _generate)(run, case, workload, work)
    if case.runner not in OURS or case.share is None:
        run.disk_speed = read_speed(workload.probed, SPEED_BYTES)
    if case.runner not in OURS or case.share is not None:
        run.memory_speed = memory_speed()


def _ask_llama_cpp(run: MoeRun, case: CappedCase, workload: Workload, work: Path) -> None:
    (requests, warm_up), nbytes = workload.requests(case), room(workload.weights, case.share)
    prompt, new_tokens, file = workload.prompt, workload.made(case), workload.files(case.runner)
    drop_pages(file)
    context, threads = str(prompt + new_tokens + 8), str(len(os.sched_getaffinity(0)))
    sizes = ["--ctx-size", context, "--parallel", "1", "--threads", threads]
    arguments = ["--model", str(file), *sizes, "--no-webui", *RUNNERS[case.runner].options["arguments"]]
    body = {"n_predict": new_tokens, "temperature": 0, "cache_prompt": False, "ignore_eos": True, "return_tokens": True}
    with contextlib.ExitStack() as held:
        cap = None
        if nbytes is not None:
            cap = Cap(held.enter_context(control_group(f"rabbitllm-benchmark-{os.getpid()}")), nbytes)
        label, program = f"moe-{case.runner}-{case.share}-{run.turn}", llama.built(work, "llama-server")
        limits = {"seconds": RUN_LIMIT_SECONDS, "start_seconds": LLAMA_CPP_START_SECONDS}
        ask = held.enter_context(llama.serving(program, arguments, work, label, cap=cap, **limits))
        answers = [ask("/completion", prompt=each[:prompt], **body) for (each,) in requests]
    times = [answer["timings"] for answer in answers[warm_up:]]
    run.first_token_seconds = statistics.median(each["prompt_ms"] for each in times) / 1000
    run.token_seconds = statistics.fmean(each["predicted_ms"] / (new_tokens - 1) for each in times) / 1000
    run.follows = [answer["tokens"] for answer in answers] == [each[prompt:] for (each,) in requests]


def _generate(run: MoeRun, case: CappedCase, workload: Workload, work: Path) -> None:
    chosen, (requests, warm_up) = RUNNERS[case.runner], workload.requests(case)
    prompt, new_tokens = workload.prompt, workload.made(case)
    label = f"moe-{case.runner}-{case.given}-{case.share}-{run.turn}"
    offload = workload.folder / "offload"
    place = {"layer_shards_saving_path": str(workload.files(case.runner))}
    if workload.checkpoint.is_relative_to(workload.folder):  # a split directory
        place = {}
    options = {**place, **chosen.options, **workload.options}
    job = {
        "task": "requests",
        "package": chosen.package,
        "loader": chosen.loader,
        "checkpoint": str(workload.checkpoint),
        "options": options,
        "offload_folder": str(offload),
        "prompts": [[passage[:prompt] for passage in request] for request in requests],
        "tokens": new_tokens,
        "warm_up": warm_up,
        "counted": workload.counted(case),
        "probed": [] if case.share is None else [*map(str, workload.probed)],
    }
    cold, nbytes = [workload.checkpoint, workload.folder], room(workload.weights, case.share)
    try:
        run.take(run_worker(THIS, job, work, label, cold, cap_bytes=nbytes, limit_seconds=RUN_LIMIT_SECONDS))
    finally:
        shutil.rmtree(offload, ignore_errors=True)
    run.follows = run.tokens == [[passage[prompt:] for passage in request] for request in requests]


def split_whole(scale: str, runner: Runner, place: Path, work: Path) -> None:
    """Split a model that the disk does not hold, from a hub in this process, one shard at a time.

    Raises:
        PeerError: it failed.
    """
    model, weights = published.checkpoint(model_of(scale), 1), MoeWeights(scale)
    sums = digests(model, weights, work / f"{scale}-digests.json")
    home, compression = place.with_name("hub-home"), runner.options.get("compression", "none")
    pull = [sys.executable, "-m", "rabbitllm", "pull", model.model.repository, "--sequential"]
    pull += ["--dir", str(place), "--compression", compression]
    place.mkdir()
    try:
        with GeneratedHub(model, weights, sums.of) as hub:
            run_tool(pull, f"rabbitllm pull of {scale} failed", client_variables(hub.url, home))
    except BaseException:
        shutil.rmtree(place)  # as `make_layer_files`
        raise
    finally:
        shutil.rmtree(home, ignore_errors=True)


def cases_of(rows: Sequence[str], shares: Sequence[int], habits: Sequence[str]) -> list[CappedCase]:
    """This project's rows with all habits, peers' rows with the first, since they read all experts anyway."""
    cases = [CappedCase(row, None, habits[0]) for row in UNCAPPED if row in rows]
    for share in shares:
        cases += [
            CappedCase(row, share, habit)
            for row in rows
            for habit in habits[: None if row in OURS else 1]
            if row != LLAMA_CPP  # it rewrites weights into memory of its own, and does not start
        ]
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 3, list(RUNNERS))
    parser.add_argument("--tokens", type=int, default=48, help="of each request, at least 2 (default: %(default)s)")
    parser.add_argument("--shares", type=int, nargs="+", default=[25, 50], help="of the weights, in percent")
    parser.add_argument("--keep-files", action="store_true", help="keep layer files for the next run, and use them")
    parser.add_argument("--shapes", choices=list(SHAPES), help="of a published model, at 4bit (default: smaller ones)")
    parser.add_argument("--whole", action="store_true", help="with --shapes: all layers, from a hub of this machine")
    parser.add_argument("--sequences", type=int, default=1, help="with --shapes: texts together (default: %(default)s)")
    parser.add_argument("--habits", nargs="+", choices=list(HABITS), default=list(HABITS), help="of the texts")
    smallest = {"tokens": 3, "shares": [50], "habits": list(HABITS)[:1], "keep_files": False, "shapes": None}
    options = command_line.parsed(parser, arguments, only=["rabbitllm-2"], **smallest, whole=False, sequences=1)
    if options.whole and (options.shapes is None or options.scale != "full"):
        raise SystemExit("--whole needs --shapes, and no --scale.")
    if options.sequences < 1 or (options.sequences > 1 and options.shapes is None):
        raise SystemExit("--sequences needs --shapes, and is at least 1.")
    scale = f"{options.shapes}-{WHOLE if options.whole else options.scale}" if options.shapes else options.scale
    at_4bit = published.checkpoint(model_of(scale), 1).nbytes_4bit if options.shapes else 0
    is_published_at_4bit = SCALES[scale].kind == "gpt-oss"
    needed = SHAPES_NEED_BYTES if options.shapes else NEEDED_BYTES
    needed = {**needed, **({"full": round((WHOLE_NEEDS + is_published_at_4bit) * at_4bit)} if options.whole else {})}
    name = f"moe-{options.shapes}{'-whole' * options.whole}" if options.shapes else "moe"
    together = options.sequences > 1
    name += f"-{options.sequences}-sequences" * together
    command_line.settle(options, name, needed)
    command_line.check_tokens(options)
    work, folder = options.work_dir, options.work_dir / f"moe-run-{scale}"
    if options.shapes:
        peers = [] if together else [row for row in options.only if row in OF_SHAPES]
        options.only = [OURS[not is_published_at_4bit], *peers]
    else:
        options.only = [row for row in options.only if row not in OF_SHAPES]
    fastest = {"fast_bfloat16": True} if options.shapes else {}
    checkpoint = make_moe_checkpoint(work, scale) if not options.whole else folder
    weights = at_4bit or weight_bytes(checkpoint)
    workload = Workload(checkpoint, weights, folder, scale, options.tokens, fastest, options.sequences)
    if options.whole:
        split = directory_name(RUNNERS[options.only[0]].options.get("compression"))
        workload = replace(workload, checkpoint=workload.files(options.only[0]) / split)
    cases = cases_of(options.only, options.shares, options.habits)

    def files(row: str) -> None:
        if options.whole and not workload.files(row).exists():
            if row in OURS:
                split_whole(scale, RUNNERS[row], workload.files(row), work)
                return
            llama.built(work, "llama-server")
            if not is_published_at_4bit:
                llama.write_file(workload.checkpoint, workload.files(row), "Q4_0")
                return
            plain = workload.files(row).with_name("plain")  # MXFP4, which this project does not export
            convert = [sys.executable, "-m", "rabbitllm", "convert", str(workload.checkpoint), "--output", str(plain)]
            run_tool(convert, f"rabbitllm convert of {scale} failed")
            llama.write_by_llama_cpp(plain, workload.files(row), work)
            shutil.rmtree(plain)
            return
        if row not in OF_SHAPES:
            prepare_files(RUNNERS[row], checkpoint, workload.files(row), work, f"moe-{row}-files")
            return
        llama.built(work, "llama-server")
        file = workload.files(row)
        if not file.exists():
            plain = file if is_published_at_4bit else file.with_name("plain.gguf")
            llama.write_by_llama_cpp(checkpoint, plain, work, ["--no-mtp"] if options.shapes == "coder-next" else [])
            if plain != file:
                quantized(tool(work), plain, file, "Q4_0")
                plain.unlink()

    runs = carry_out(
        options,
        cases,
        MoeRun,
        lambda run, case: measure(run, case, workload, work),
        {row: RUNNERS[row].environment for row in options.only},
        workload.folder,
        files,
        keep=options.keep_files,
    )
    experts = (
        f"{SCALES[scale].num_experts} experts a layer, {SCALES[scale].num_hidden_layers} layers, {weights / 1e9:.2f} GB"
    )
    if options.shapes:
        texts = f", {options.sequences} texts together" * together
        experts = f"{options.shapes}'s shapes at 4bit, {experts}{texts}"
    title = f"A mixture of {experts}, with memory capped, on the CPU, {command_line.turns(options)}"
    touched = touched_bytes(scale) if options.shapes else None
    table = tabulate(runs, cases, options.turns, SCALES[scale].experts, touched)
    bars = {case.name: (case.share, f"{case.runner}, {case.given}", case.runner in OURS) for case in cases}
    drawn = report.bars_by_cap(title, runs, bars)
    report.write(options.results, title, table, notes_on(runs, cases, touched), runs, work=work, picture=drawn)
    return status(runs, lambda row: row.startswith(OURS))
