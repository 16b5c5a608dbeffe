"""A system prompt that many requests begin with: what is computed of it, and what that does to the first token.

`rabbitllm serve` with memory capped, a generated model in bfloat16. So many clients at once ask one short question
each, behind a system prompt of 1,000 tokens: the same one for all; the same one, when an earlier request has left it
there; and, in addition, one of the same length for each client, so that nothing can be shared. Every row in a server
of its own. What was computed is what the server's `/metrics` says of prompts, less what it says was kept.

    sudo python -m benchmarks serve.shared_prompt [--turns 3] [--clients 8] [--scale medium] [--share 100]
"""

from __future__ import annotations

import os
import random
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import SCALES, make_checkpoint, weight_bytes
from benchmarks.lib.control_group import control_group
from benchmarks.lib.measure import drop_cached, spread
from benchmarks.lib.peers import THIS, Cap, PeerError, make_layer_files
from benchmarks.lib.runs import Run, failures, good, run_all, versions
from benchmarks.lib.server_process import asked, served
from benchmarks.lib.work_folder import fresh_folder
from benchmarks.serve.latencies import percentile

SYSTEM_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 1000, 16, 8
LIMIT_SECONDS = 600.0
LEAST_ROOM_BYTES = 384 << 20
ALIKE, LEFT, APART = "the same for all", "the same, and it is there already", "one for each"
ROWS = (ALIKE, LEFT, APART)


@dataclass
class SharedRun(Run):
    """One row of one turn; seconds.

    Attributes:
        prompt_tokens: of all requests that count.
        computed_tokens: of these.
        first_p50, first_p95: until the first token.
        seconds: for all requests.
    """

    prompt_tokens: int = 0
    computed_tokens: int = 0
    first_p50: float = 0.0
    first_p95: float = 0.0
    seconds: float = 0.0

    @property
    def headline(self) -> float:
        """Until the first token of half of them."""
        return self.first_p50


def bodies(row: str, clients: int, vocabulary: int) -> list[dict[str, Any]]:
    """Of the requests that count, one a client; and of the one before them, last."""

    def words(seed: int, count: int) -> str:
        chance = random.Random(seed)
        return " ".join(f"w{chance.randrange(1, vocabulary)}" for _ in range(count))

    made = []
    for number in range(clients + 1):
        system = words(number if row == APART else 10_000, SYSTEM_TOKENS)
        text = f"{system} {words(20_000 + number, QUESTION_TOKENS)}"
        made.append({"prompt": text, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True})
        made[-1]["stream_options"] = {"include_usage": True}
    return made


def tokens_of_prompts(url: str) -> tuple[int, int]:
    """All that came, and of these what was not computed again, as the server has counted them so far."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/metrics", timeout=30) as answer:
        return counted(answer.read().decode())


def counted(text: str) -> tuple[int, int]:
    """From the text of `/metrics`."""
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    names = ("rabbitllm_prompt_tokens_total", "rabbitllm_kept_tokens_total")
    return int(float(found[names[0]])), int(float(found[names[1]]))


def measure(run: SharedRun, layers: Path, clients: int, vocabulary: int, nbytes: int, work: Path) -> None:
    """Carry out one row of one turn."""
    job = {"how": "rabbitllm", "package": "rabbitllm", "model": str(layers), "arguments": []}
    *counting, before = bodies(run.row, clients, vocabulary)
    with (
        control_group(f"rabbitllm-benchmark-{os.getpid()}") as group,
        served(THIS, job, work, f"shared-prompt-{run.turn}", [layers], cap=Cap(group, nbytes)) as server,
    ):
        run.versions = server.idle.versions
        route = f"{server.url}/v1/completions"
        short = {**before, "prompt": "w1 w2 w3"}
        asked(route, [before if run.row == LEFT else short], 1, LIMIT_SECONDS)  # the weights have come once
        old, old_kept = tokens_of_prompts(server.url)
        level = asked(route, counting, clients, LIMIT_SECONDS)
        server.check()
        if level.whole < clients:
            raise PeerError(f"{level.whole} of {clients} were answered: {[one.error for one in level.answers]}")
        new, new_kept = tokens_of_prompts(server.url)
        run.prompt_tokens, run.computed_tokens = new - old, new - old - (new_kept - old_kept)
        run.first_p50, run.first_p95 = (percentile(level.firsts, percent) or 0.0 for percent in (50, 95))
        run.seconds = level.seconds
        run.anonymous_idle = server.sampler.anonymous_idle
        run.anonymous_peak = server.sampler.anonymous_peak


HEADINGS = (
    "system prompt",
    "ok",
    "prompt tokens",
    "computed",
    "first token s, p50",
    "p95",
    "all s",
    "anon MiB over idle",
)


def tabulate(runs: Sequence[SharedRun], turns: int) -> report.Table:
    """A line a row: medians, and in brackets the extremes."""

    def cell(found: Sequence[SharedRun], of: Callable[[SharedRun], float], digits: int) -> str:
        return report.shown(spread(of(run) for run in found), digits)

    def cells(row: str, found: Sequence[SharedRun]) -> Sequence[str]:
        return (
            cell(found, lambda run: run.prompt_tokens, 0),
            cell(found, lambda run: run.computed_tokens, 0),
            cell(found, lambda run: run.first_p50, 2),
            cell(found, lambda run: run.first_p95, 2),
            cell(found, lambda run: run.seconds, 2),
            cell(found, lambda run: run.anonymous_added / 2**20, 0),
        )

    return report.tabulated(HEADINGS, runs, {row: row for row in ROWS}, turns, cells)


def compared(runs: Sequence[SharedRun], of: Callable[[SharedRun], float]) -> Mapping[str, float | None]:
    """Median over that of the row that shares nothing."""
    apart = report.median(spread(of(run) for run in good(runs, APART)))
    found = {row: report.median(spread(of(run) for run in good(runs, row))) for row in (ALIKE, LEFT)}
    return {row: value / apart if apart and value is not None else None for row, value in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row failed."""
    parser = command_line.parser(__doc__, 3, list(ROWS))
    parser.set_defaults(scale="medium")
    parser.add_argument("--clients", type=int, default=8, help="at once (default: %(default)s)")
    parser.add_argument("--share", type=int, default=100, help="of the weights, in percent (default: %(default)s)")
    options = command_line.parsed(parser, arguments, only=[ALIKE], clients=2)
    command_line.settle(options, "shared-prompt")
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale, "LlamaConfig")
    weights = weight_bytes(checkpoint)
    nbytes = max(weights * options.share // 100, LEAST_ROOM_BYTES)
    vocabulary = SCALES[options.scale].vocab_size
    with fresh_folder(work / "shared-prompt-run") as folder:
        make_layer_files(THIS, "rabbitllm", checkpoint, folder / "layers", None, work, "shared-prompt-files")
        drop_cached(folder)
        machine = report.describe_machine(work)
        layers = folder / "layers" / "splitted_model"
        runs = run_all(
            options.only,
            options.turns,
            SharedRun,
            lambda run: measure(run, layers, options.clients, vocabulary, nbytes, work),
            {},
        )
    title = (
        f"{options.clients} requests at once behind a system prompt of {SYSTEM_TOKENS:,} tokens, a model of "
        f"{weights / 1e9:.2f} GB with memory capped, {options.turns} turns"
    )
    notes = [
        f"Each request has {QUESTION_TOKENS} more tokens of its own, and gets {NEW_TOKENS}.",
        f"Memory: {options.share} % of the weights beside the idle process, at least {LEAST_ROOM_BYTES >> 20} MiB.",
        "computed: tokens of prompts that went through the model.",
        *versions(runs),
        *failures(runs),
    ]
    ratios = (("computed", lambda run: float(run.computed_tokens)), ("first token, p50", lambda run: run.first_p50))
    for name, of in ratios:
        for row, ratio in compared(runs, of).items():
            if ratio is not None:
                notes.append(f"{row}: {name} {ratio:.3f} of what it is where nothing is shared.")
    report.write(options.results, title, machine, tabulate(runs, options.turns), notes, runs)
    return int(any(run.error for run in runs))
