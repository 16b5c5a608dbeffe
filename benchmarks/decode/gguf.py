"""Generating from GGUF files on the CPU, against llama.cpp on the same file, with and without a cap on memory.

A Llama of 0.7 billion random weights, or with `--mixture` a Qwen3 MoE of 0.85 billion, 4 of 32 experts for each token,
quantized by llama.cpp's own tool. llama.cpp maps the file, and rewrites some types for its kernels into memory of its
own; further rows are its memory options: `--no-repack`, direct I/O, which takes memory for the whole file, and
`--cpu-moe` for a mixture. A cap is a share of the file.

    sudo python -m benchmarks decode.gguf [--turns 3] [--types Q4_K_M Q8_0] [--shares 50] [--mixture] [--only ROW ...]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.lib import command_line, llama, report
from benchmarks.lib.checkpoint import MIXTURE, make_checkpoint
from benchmarks.lib.generation import CappedCase, Runner, StepsRun, Workload, prompt_for
from benchmarks.lib.peers import LLAMA_CPP, THIS, make_layer_files, room
from benchmarks.lib.runs import carry_out, failures, ratios, status, versions
from benchmarks.quality.llama_cpp import PLAIN, quantized, tool

PEER, OURS, UNSPLIT = "llama.cpp", "rabbitllm-2", "rabbitllm-2-no-split"
NO_REPACK, DIRECT, CPU_MOE = "llama.cpp-no-repack", "llama.cpp-direct-io", "llama.cpp-cpu-moe"
RUNNERS = {
    PEER: Runner(LLAMA_CPP, "llama_cpp"),
    NO_REPACK: Runner(LLAMA_CPP, "llama_cpp", options={"no_repack": True}),
    DIRECT: Runner(LLAMA_CPP, "llama_cpp", options={"direct_io": True}),
    CPU_MOE: Runner(LLAMA_CPP, "llama_cpp", options={"cpu_moe": True}),
    OURS: Runner(THIS, "rabbitllm"),
    UNSPLIT: Runner(THIS, "rabbitllm", options={"split": False}),
}
TYPES = ("Q4_0", "Q4_K_M", "Q6_K", "Q8_0")
RUN_LIMIT_SECONDS = 90


def tabulate(runs: Sequence[StepsRun], cases: Sequence[CappedCase], turns: int) -> report.Table:
    """A line a row."""
    columns: report.Columns[CappedCase, StepsRun] = {
        "load s": report.each(lambda run: run.load_seconds),
        "first token s": report.each(lambda run: run.first_token_seconds),
        "s/token": report.each(lambda run: run.token_seconds, 3),
        "x llama.cpp": lambda case, _: report.shown(ratios(runs, replace(case, runner=PEER).name, case.name)),
        "MB/token from disk": report.each(lambda run: statistics.median(run.step_bytes), 0, 1e6),
        "anon MiB over idle": report.ADDED_MEMORY,
    }
    return report.tabulated(runs, {case.name: case for case in cases}, turns, columns)


def write_files(checkpoint: Path, folder: Path, kinds: Sequence[str], work: Path) -> dict[str, Path]:
    """The files, by type; those that this project cannot encode are made by llama.cpp's tool.

    Raises:
        PeerError: the tool cannot be built here.
    """
    plain = llama.write_file(checkpoint, folder / f"{PLAIN}.gguf", PLAIN)
    others = [name for name in kinds if name != PLAIN]
    paths = {PLAIN: plain} if PLAIN in kinds else {}
    paths |= {name: quantized(tool(work), plain, folder / f"{name}.gguf", name) for name in others}
    if PLAIN not in kinds:
        plain.unlink()
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 3, list(RUNNERS))
    parser.add_argument("--tokens", type=int, default=16, help="to generate, at least 2 (default: %(default)s)")
    parser.add_argument("--types", nargs="+", default=list(TYPES), help="of the files (default: %(default)s)")
    parser.add_argument("--shares", type=int, nargs="*", default=[50], help="of the file, in percent")
    parser.add_argument("--mixture", action="store_true", help="of experts, instead of a Llama")
    options = command_line.parsed(parser, arguments, only=[OURS, UNSPLIT], tokens=3, types=[PLAIN], shares=[])
    command_line.settle(options, "gguf")
    command_line.check_tokens(options)
    work = options.work_dir
    if options.mixture:
        checkpoint = make_checkpoint(work, options.scale, "Qwen3MoeConfig", MIXTURE)
    else:
        checkpoint = make_checkpoint(work, options.scale, "LlamaConfig")
        options.only = [row for row in options.only if row != CPU_MOE]
    workload = Workload(checkpoint, work / "gguf-run", prompt_for(options.scale), options.tokens)
    shares = (None, *options.shares)
    cases = [CappedCase(row, share, name) for name in options.types for share in shares for row in options.only]
    paths: dict[str, Path] = {}
    sizes: dict[str, int] = {}

    def files(row: str) -> None:
        if not paths:
            paths.update(write_files(checkpoint, workload.folder, options.types, work))
            sizes.update((name, path.stat().st_size) for name, path in paths.items())
        for name in options.types if row == OURS else ():
            make_layer_files(THIS, "rabbitllm", paths[name], workload.folder / name, None, work, f"gguf-{name}-split")

    def measure(run: StepsRun, case: CappedCase) -> None:
        path = paths[case.given]
        place = workload.folder / (case.given if case.runner == OURS else "none")
        outcome = workload.decode(
            RUNNERS[case.runner],
            work,
            f"gguf-{case.given}-{case.runner}-{case.share}-{run.turn}",
            checkpoint=path,
            place=place if case.runner in (OURS, UNSPLIT) else path,
            cap_bytes=room(sizes[case.given], case.share),
            limit_seconds=RUN_LIMIT_SECONDS,
        )
        run.take(outcome)

    environments = {row: RUNNERS[row].environment for row in options.only}
    runs = carry_out(options, cases, StepsRun, measure, environments, workload.folder, files)
    notes = [
        "Files: " + ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items()) + ".",
        "x llama.cpp: how many times as many tokens a second as llama.cpp with the same file under the same cap.",
        report.MEMORY_NOTE,
        *versions(runs),
        *failures(runs),
    ]
    subject = " of a mixture of experts" if options.mixture else ""
    title = f"{options.tokens} tokens from a GGUF file{subject}, on the CPU, {command_line.turns(options)}"
    report.write(options.results, title, tabulate(runs, cases, options.turns), notes, runs, work=work)
    return status(runs, lambda row: row.startswith(OURS))
