"""A burst of mixed clients, all in memory: time to the first token and between tokens, against llama.cpp's server.

Of four clients two send short chats, one long prompts, one asks for a long stream; each sends its next request once the
last one is answered. Prompts are random token ids, all different; answers are greedy, streamed, and of a fixed length.
Both servers have a place for each client, and get the requests in the same order. One short request before does not
count.

    python -m benchmarks serve.mixed --model FILE.gguf [--llama FOLDER] [--clients 64] [--rounds 2] [--turns 3]
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, report
from benchmarks.lib.measure import fresh_folder, spread
from benchmarks.lib.peers import THIS
from benchmarks.lib.process import REPOSITORY, PeerError
from benchmarks.lib.runs import in_turns
from benchmarks.lib.server_process import Level, asked, served
from benchmarks.serve.report import figures

OURS, PEER = "rabbitllm serve", "llama-server"
CHAT, LONG, STREAM = "short chat", "long prompt", "long stream"
CLIENTS = (CHAT, STREAM, CHAT, LONG)
"""One after the other."""
SHORT_PROMPT, SHORT_ANSWER = 32, 32
IDS = range(100, 400)
"""Tokens of prompts: words or bytes of every vocabulary."""
WAITS = ("first_p50", "first_p95", "between_p50", "between_p95")


@dataclass
class MixedRun:
    """One server of one turn.

    Attributes:
        row, turn: what was measured.
        levels: `serve.report.figures` of each kind of clients.
        error: why there are none.
    """

    row: str
    turn: int
    levels: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str | None = None


def sizes(long: int, stream: int) -> Mapping[str, tuple[int, int]]:
    """Kind -> tokens of a prompt, and of its answer."""
    return {CHAT: (SHORT_PROMPT, SHORT_ANSWER), LONG: (long, SHORT_ANSWER // 2), STREAM: (SHORT_PROMPT, stream)}


def body_of(prompt: int, answer: int, number: int) -> dict[str, Any]:
    """The body of a request; each number has another prompt."""
    ids = random.Random(number).choices(IDS, k=prompt)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return {"prompt": ids, "max_tokens": answer, "temperature": 0, "ignore_eos": True, **streamed}


def levels_of(level: Level, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures of each kind, and of all together.

    Args:
        level: the answers, in the order of their requests.
        kinds: of the requests; those at the end may not have been sent.
    """
    levels = {"all": figures(level, 0, 0.0)}
    for kind in dict.fromkeys(kinds):
        of = tuple(answer for answer, its in zip(level.answers, kinds, strict=False) if its == kind)
        levels[kind] = figures(Level(level.at_once, of, level.seconds), 0, 0.0)
    return levels


def tabulate(runs: Sequence[MixedRun], rows: Sequence[str]) -> report.Table:
    """A line for each row and kind: medians of turns, with extremes."""
    lines = []
    for row in rows:
        good = [run for run in runs if run.row == row and run.error is None]
        for kind in good[0].levels if good else ():
            of = [run.levels[kind] for run in good]
            answered = f"{sum(level['whole'] for level in of)}/{sum(level['sent'] for level in of)}"
            columns = [[level[name] for level in of] for name in ("tokens_a_second", *WAITS)]
            lines.append((f"{row}, {kind}", answered, *map(_shown, columns)))
    headings = ("row", "answered", "tokens/s", "first s, p50", "first s, p95", "between s, p50", "between s, p95")
    return report.Table(headings, lines)


def _shown(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):  # a median of the others would be too good
        return "-"
    return report.shown(spread(known), 3) if len(known) > 1 else f"{known[0]:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if this project's server failed, or left a request without an answer."""
    parser = command_line.parser(__doc__, 3, (OURS, PEER))
    parser.add_argument("--model", type=Path, default=REPOSITORY / "rabbitllm" / "demo" / "model", metavar="FILE")
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="with llama-server; without it, only this project")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client (default: %(default)s)")
    parser.add_argument("--long", type=int, default=1024, help="tokens of a long prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=192, help="of a long stream (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="until clients disconnect (default: %(default)s)")
    options = command_line.parsed(parser, arguments, clients=4, rounds=1, long=100, tokens=8, only=[OURS])
    command_line.settle(options, "serve-mixed")
    command_line.check_tokens(options)
    rows = [row for row in options.only if row == OURS or options.llama is not None]
    count, runs = options.clients * options.rounds, list[MixedRun]()
    kinds = [CLIENTS[number % len(CLIENTS)] for number in range(count)]
    by_kind = sizes(options.long, options.tokens)
    context = max(map(sum, by_kind.values())) + 8
    with fresh_folder(options.work_dir / "mixed") as work:
        folder = ("--dir", str(work / "split"))
        jobs: Mapping[str, dict[str, Any]] = {
            OURS: {
                "how": "rabbitllm",
                "package": "rabbitllm",
                "model": str(options.model.absolute()),
                "arguments": [*folder, "--max-running", str(options.clients)],
            },
            PEER: {
                "how": "program",
                "package": None,
                "program": str((options.llama or Path()).absolute() / "llama-server"),
                "arguments": [
                    *("--model", str(options.model.absolute()), "--parallel", str(options.clients)),
                    *("--ctx-size", str(options.clients * context)),
                ],
            },
        }
        for turn, row in in_turns(rows, options.turns):
            bodies = [body_of(*by_kind[kind], turn * count + number) for number, kind in enumerate(kinds)]
            run = MixedRun(row, turn)
            runs.append(run)
            try:
                with served(THIS, jobs[row], options.work_dir, f"mixed-{row.split()[0]}-{turn}", []) as server:
                    route = f"{server.url}/v1/completions"
                    asked(route, [body_of(SHORT_PROMPT, 2, -1 - turn)], 1, options.seconds)
                    run.levels = levels_of(asked(route, bodies, options.clients, options.seconds), kinds)
            except PeerError as error:
                run.error = str(error)
    notes = [f"{options.model.name}, {options.clients} clients, {count} requests; all weights in memory."]
    notes += [f"{kind}: {prompt} tokens, answer of {answer}." for kind, (prompt, answer) in by_kind.items()]
    notes += [f"{run.row}, turn {run.turn}: {run.error}" for run in runs if run.error is not None]
    notes += [f"{run.row}: {error}" for run in runs for level in run.levels.values() for error in level["errors"]]
    title = f"A burst of mixed clients, {command_line.turns(options)}"
    report.write(options.results, title, tabulate(runs, rows), notes, runs, work=options.work_dir)
    ours = [run.levels.get("all") for run in runs if run.row == OURS]
    return 0 if all(level is not None and level["whole"] == level["sent"] for level in ours) else 1
