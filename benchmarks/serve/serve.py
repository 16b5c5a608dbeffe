"""Servers with less memory than the model: tokens a second for 1, 4, 16 and 64 clients at once, against peers.

Servers of 4 bits get a smaller share of the weights, so that their weights do not fit either. A Llama of 1.43 GB in
bfloat16; different prompts of 16 tokens; 32 greedy tokens, streamed over HTTP. The clients, in another process (on a
core of their own where there are three), send two requests each, one after the other, and disconnect after a minute,
since a server without batching would take hours. Tokens a second are all tokens over all the time, with prompts. One
short request before does not count.

`transformers serve` has no option for offloading: accelerate's disk offload replaces its loading of the model;
"-batching" is its option for continuous batching. `llama-server` has a slot for each client.

    sudo python -m benchmarks serve [--share 50] [--share-4bit 25] [--at-once 1 4 16 64] [--seconds 60]
                                    [--only ROW ...] [--scale tiny]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import SCALES, make_checkpoint, weight_bytes
from benchmarks.lib.process import Cap, PeerError, control_group
from benchmarks.lib.runs import carry_out, status
from benchmarks.lib.server_process import Served, asked, served
from benchmarks.serve.report import ServeRun, figures, notes_on, picture, tabulate
from benchmarks.serve.rows import SERVERS, Workload, body_of, job_of, prepare_files

LEAST_ROOM_BYTES = 384 << 20
"""On top of the idle process, at least: with less, a tiny model cannot compute."""
WARM_UP_TOKENS = 2
_OFFSET = 10_000
"""Between the prompts of one number of clients and the next: no prompt comes twice, so that none is cached."""


def measure(run: ServeRun, workload: Workload, shares: Mapping[int, int], work: Path) -> None:
    """Run one row of one turn."""
    run.share = shares[SERVERS[run.row].bits]
    nbytes = max(workload.weights * run.share // 100, LEAST_ROOM_BYTES)
    with control_group(f"rabbitllm-benchmark-{os.getpid()}") as group:
        cold = [workload.checkpoint, workload.folder]
        job, label = job_of(run.row, workload, work), f"serve-{run.row}-{run.turn}"
        with served(SERVERS[run.row].environment, job, work, label, cold, cap=Cap(group, nbytes)) as server:
            run.load_seconds, run.limit_bytes, run.versions = (
                server.load_seconds,
                server.idle.limit_bytes or 0,
                server.idle.versions,
            )
            _ask_all(run, server, workload)
            sampler = server.sampler
            run.anonymous_idle, run.anonymous_peak = sampler.anonymous_idle, sampler.anonymous_peak
            run.file_peak = sampler.file_peak


def _ask_all(run: ServeRun, server: Served, workload: Workload) -> None:
    route = f"{server.url}/v1/completions"
    first = asked(route, [body_of(run.row, workload, _OFFSET, WARM_UP_TOKENS)], 1, workload.limit_seconds * 2)
    server.check()
    if not first.whole:
        raise PeerError(f"does not answer: {first.answers[0].error}")
    for place, at_once in enumerate(workload.at_once):
        numbers = range(_OFFSET * (place + 2), _OFFSET * (place + 2) + at_once * workload.rounds)
        bodies = [body_of(run.row, workload, number, workload.new_tokens) for number in numbers]
        read, computed = server.bytes_read(), server.core_seconds()
        level = asked(route, bodies, at_once, workload.limit_seconds)
        run.levels.append(figures(level, server.bytes_read() - read, server.core_seconds() - computed))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_line.parser(__doc__, 1, list(SERVERS))
    parser.add_argument("--share", type=int, default=50, help="of the weights, in percent (default: %(default)s)")
    parser.add_argument("--share-4bit", type=int, default=25, help="for rows of 4 bits (default: %(default)s)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16, 64], help="clients")
    parser.add_argument("--seconds", type=float, default=60, help="for each number of clients (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    smallest = {"at_once": [3], "rounds": 1, "tokens": 3, "seconds": 60.0}
    options = command_line.parsed(parser(), arguments, only=["rabbitllm-serve"], **smallest)
    command_line.settle(options, "serve")
    command_line.check_tokens(options)
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale, "LlamaConfig")
    workload = Workload(
        checkpoint,
        weight_bytes(checkpoint),
        SCALES[options.scale].vocab_size,
        work / "serve-run",
        options.prompt_tokens,
        options.tokens,
        options.rounds,
        options.at_once,
        options.seconds,
    )
    shares = {16: options.share, 4: options.share_4bit}
    runs = carry_out(
        options,
        options.only,
        ServeRun,
        lambda run, row: measure(run, workload, shares, work),
        {row: SERVERS[row].environment for row in options.only},
        workload.folder,
        lambda row: prepare_files(row, workload, work),
    )
    rows = list(options.only)
    size = f"{workload.weights / 1e9:.2f} GB"
    title = f"A server of a model of {size} with memory capped, on the CPU, {command_line.turns(options)}"
    table = tabulate(runs, rows, options.at_once)
    notes, drawn = notes_on(runs, rows, options.at_once, options.seconds), picture(title, runs, rows)
    report.write(options.results, title, table, notes, runs, work=work, picture=drawn if drawn["lines"] else None)
    return status(runs, lambda row: SERVERS[row].is_ours)
