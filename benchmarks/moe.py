"""A mixture of experts on the CPU with less memory than it has: seconds and bytes a token, and how good the cache is.

The checkpoint (`moe_checkpoint.py`, 6.6 GB in bfloat16) routes its texts the way trained models do: "flat" texts as was
published of a model with 512 experts, "skewed" ones more pronouncedly. Requests take turns among 8 topics, batch 1,
greedy; the first round warms the cache up, the second one is measured, without its prompts. Every process runs in a
control group of its own, bounded, once everything is imported, to what it takes then and a share of the size of the
weights in bfloat16; page cache counts too. Rows of others get two requests and few tokens, and no warm-up, since they
read all experts for each token.

Hits are counted by the engine; beside them stand what the optimum and LRU would have hit with as many slots, replayed
(`expert_policies.py`) over what the routers chose in that very process.

    sudo python -m benchmarks.moe [--turns 3] [--tokens 25] [--shares 25 50] [--only ROW ...] [--scale tiny]
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import bars, command_line, report
from benchmarks.checkpoint import shards
from benchmarks.control_group import control_group
from benchmarks.decode import Runner
from benchmarks.expert_policies import Clairvoyant, Recency, replay
from benchmarks.expert_trace import Trace
from benchmarks.measure import drop_cached, spread
from benchmarks.moe_checkpoint import HABITS, SCALES, TEXTS, make_moe_checkpoint, passage
from benchmarks.peers import THIS, Cap, PeerError, make_layer_files, run_worker
from benchmarks.runs import Run, failures, good, ratios, run_all, versions

RUNNERS: Mapping[str, Runner] = {
    "transformers": Runner(THIS, "transformers", "in memory"),
    "transformers-disk": Runner(THIS, "transformers", "offloaded"),
    "rabbitllm-2": Runner(THIS, "rabbitllm", options={"profiling_mode": True}),
    "rabbitllm-2-4bit": Runner(THIS, "rabbitllm", options={"profiling_mode": True, "compression": "4bit"}),
}
OURS = ("rabbitllm-2", "rabbitllm-2-4bit")
UNCAPPED = ("transformers", *OURS)
NEEDED_BYTES = {"full": 26 * 1000**3, "medium": 3 * 1000**3, "tiny": 300 * 1000**2}
"""Checkpoint, layer files of both kinds, and what transformers writes to offload it."""
PROMPT_TOKENS = {"full": 32, "medium": 32, "tiny": 6}
TOPICS = TEXTS // len(HABITS)
OTHERS_REQUESTS, OTHERS_TOKENS = 2, 4
RUN_LIMIT_SECONDS = 600
LEAST_ROOM_BYTES = 128 << 20
"""Beside the idle process, whatever the share: less than this a model that is only tried out with cannot compute in."""
BYTES_GOAL, HITS_GOAL, SPEED_GOAL = 1.1, 0.8, 10.0


@dataclass(frozen=True)
class Case:
    """A row: a runner, the habits of the texts it gets, and its cap in percent of the weights, or None."""

    runner: str
    habits: str
    share: int | None

    @property
    def name(self) -> str:
        return f"{self.runner}, {self.habits}, {'no cap' if self.share is None else f'{self.share} %'}"

    @property
    def is_ours(self) -> bool:
        return self.runner in OURS


@dataclass
class MoeRun(Run):
    """One row of one turn; seconds and bytes. What is said of steps leaves out first tokens and the warm-up.

    Attributes:
        load_seconds: until the model can be used; layer files are there already.
        first_token_seconds: median over the requests.
        token_seconds: mean of `step_seconds`.
        step_bytes: read from the disk in each step, as the system counts it.
        tokens: made, request by request.
        follows: whether they are those of the texts.
        hits, missed: experts that a step asked for and that were there, or were not.
        missed_bytes: of the latter.
        read_bytes: in those steps, as the profiler counts it.
        slots: experts that the cache holds.
        optimal_rate, recent_rate: hit rates of the optimum and of LRU with as many slots.
        stage_seconds, wall_seconds: the profiler's, of those steps.
    """

    load_seconds: float = 0.0
    first_token_seconds: float = 0.0
    token_seconds: float = 0.0
    step_seconds: Sequence[float] = ()
    step_bytes: Sequence[int] = ()
    tokens: Sequence[Sequence[int]] = ()
    follows: bool = False
    hits: int = 0
    missed: int = 0
    missed_bytes: int = 0
    read_bytes: int = 0
    slots: int = 0
    optimal_rate: float | None = None
    recent_rate: float | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0
    threads: int = 0
    placed: str = ""

    @property
    def headline(self) -> float:
        """Seconds a token."""
        return self.token_seconds

    @property
    def hit_rate(self) -> float | None:
        asked = self.hits + self.missed
        return self.hits / asked if asked and self.slots else None


@dataclass(frozen=True)
class Workload:
    """What every row does."""

    checkpoint: Path
    weights: int
    folder: Path
    scale: str
    tokens: int

    def requests(self, case: Case) -> tuple[list[list[int]], int]:
        """Passages, prompt and what is to come; and how many of them only warm up."""
        length = PROMPT_TOKENS[self.scale] + self.made(case)
        count = 2 * TOPICS if case.is_ours else OTHERS_REQUESTS
        found = [passage(self.scale, case.habits, request, length) for request in range(count)]
        return found, TOPICS if case.is_ours else 0

    def made(self, case: Case) -> int:
        """Tokens of each request."""
        return self.tokens if case.is_ours else min(self.tokens, OTHERS_TOKENS)

    def prepared(self, runner: str) -> Path:
        """Where a runner's layer files are."""
        return self.folder / f"layers-{RUNNERS[runner].options.get('compression', 'none')}"


def prepare_files(runner: str, workload: Workload, work: Path) -> None:
    """The layer files of this project's rows, unless they are there.

    Raises:
        PeerError: it failed.
    """
    place = workload.prepared(runner)
    if runner in OURS and not place.exists():
        compression = RUNNERS[runner].options.get("compression")
        make_layer_files(THIS, "rabbitllm", workload.checkpoint, place, compression, work, f"moe-{runner}-files")


def measure(run: MoeRun, case: Case, workload: Workload, work: Path) -> None:
    """Carry out one row of one turn."""
    chosen, (passages, warm_up) = RUNNERS[case.runner], workload.requests(case)
    prompt, made = PROMPT_TOKENS[workload.scale], workload.made(case)
    label = f"moe-{case.runner}-{case.habits}-{case.share}-{run.turn}"
    trace, offload = workload.folder / f"{label}.npz", workload.folder / "offload"
    job = {
        "task": "requests",
        "package": chosen.package,
        "loader": chosen.loader,
        "checkpoint": str(workload.checkpoint),
        "options": {"layer_shards_saving_path": str(workload.prepared(case.runner)), **chosen.options},
        "offload_folder": str(offload),
        "prompts": [one[:prompt] for one in passages],
        "tokens": made,
        "warm_up": warm_up,
        "trace": str(trace),
    }
    cold = [workload.checkpoint, workload.folder]
    try:
        if case.share is None:
            outcome = run_worker(THIS, job, work, label, cold, limit_seconds=RUN_LIMIT_SECONDS)
        else:
            with control_group(f"rabbitllm-benchmark-{os.getpid()}") as group:
                cap = Cap(group, max(workload.weights * case.share // 100, LEAST_ROOM_BYTES))
                outcome = run_worker(THIS, job, work, label, cold, cap=cap, limit_seconds=RUN_LIMIT_SECONDS)
    finally:
        shutil.rmtree(offload, ignore_errors=True)
    for name, value in outcome.answer.items():
        setattr(run, name, value)
    run.take_from(outcome)
    run.follows = run.tokens == [one[prompt:] for one in passages]
    if run.slots:
        compare(run, Trace.load(trace), made, warm_up)


def compare(run: MoeRun, trace: Trace, tokens: int, warm_up: int) -> None:
    """What the optimum and LRU would have hit with as many slots, in the steps that the engine's hits are of."""
    counted = [number % tokens > 0 and number // tokens >= warm_up for number in range(len(trace.ends))]
    run.optimal_rate = replay(trace, run.slots, Clairvoyant(), counted=counted).rate
    run.recent_rate = replay(trace, run.slots, Recency(), counted=counted).rate


def of_missed(runs: Sequence[MoeRun], case: Case) -> list[float]:
    """Bytes that the process read from the disk, over those of the experts it missed."""
    return [sum(run.step_bytes) / run.missed_bytes for run in good(runs, case.name) if run.missed_bytes]


def of_optimum(runs: Sequence[MoeRun], case: Case) -> list[float]:
    """Hit rates over the optimum's."""
    found = good(runs, case.name)
    return [run.hit_rate / run.optimal_rate for run in found if run.hit_rate is not None and run.optimal_rate]


HEADINGS = (
    "row",
    "ok",
    "first token s",
    "s/token",
    "tokens/s",
    "x ours",
    "MB/token from disk",
    "of missed experts'",
    "cache, % of experts",
    "hits %",
    "LRU's %",
    "optimum's %",
    "of optimum",
    "anon MiB over idle",
    "text right",
)


def ours_beside(case: Case) -> Case:
    """The row of this project that a row is compared with, under the same cap."""
    return Case("rabbitllm-2-4bit" if case.runner == "rabbitllm-2-4bit" else "rabbitllm-2", case.habits, case.share)


def tabulate(runs: Sequence[MoeRun], cases: Sequence[Case], turns: int, scale: str) -> report.Table:
    """A line a row: medians over the turns, and in brackets the extremes."""
    slots = SCALES[scale].num_hidden_layers * SCALES[scale].num_experts
    lines = []
    for case in cases:
        found = good(runs, case.name)
        cached = [run for run in found if run.hit_rate is not None]
        lines.append(
            (
                case.name,
                f"{len(found)}/{turns}",
                report.shown(spread(run.first_token_seconds for run in found)),
                report.shown(spread(run.token_seconds for run in found), 3),
                report.shown(spread(1 / run.token_seconds for run in found), 1),
                report.shown(ratios(runs, case.name, ours_beside(case).name), 1),
                report.shown(spread(statistics.fmean(run.step_bytes) for run in found), 0, 1e6),
                report.shown(spread(of_missed(runs, case))),
                report.shown(spread(run.slots / slots for run in cached), 0, 0.01),
                report.shown(spread(run.hit_rate or 0.0 for run in cached), 1, 0.01),
                report.shown(spread(run.recent_rate or 0.0 for run in cached), 1, 0.01),
                report.shown(spread(run.optimal_rate or 0.0 for run in cached), 1, 0.01),
                report.shown(spread(of_optimum(runs, case))),
                report.shown(spread(run.anonymous_added for run in found), 0, 2**20),
                report.verdict([run.follows for run in found]),
            )
        )
    return report.Table(HEADINGS, lines)


def notes_on(runs: Sequence[MoeRun], cases: Sequence[Case]) -> list[str]:
    """What the columns mean, where the time goes, errors, and the goals."""
    notes = [
        "s/token: mean over the steps of a turn, first tokens left out. x ours: beside this project's row with the "
        "same texts under the same cap in the same turn.",
        "of missed experts': bytes read from the disk over the bytes of the experts that were not in the cache. hits, "
        "LRU's, optimum's: of the experts that steps asked for; the latter two replayed with as many slots.",
        "text right: whether what was generated is the text that the prompt is from.",
        report.MEMORY_NOTE,
        *versions(runs),
        *failures(runs),
        *(line for case in cases for line in _time_of(runs, case)),
    ]
    for case in cases:
        if case.share is None:
            continue
        if case.is_ours:
            missed, optimum = report.median(spread(of_missed(runs, case))), report.median(spread(of_optimum(runs, case)))
            notes.append(report.reach(f"{case.name}, bytes of the missed", missed, BYTES_GOAL, at_most=True))
            notes.append(report.reach(f"{case.name}, hits of the optimum", optimum, HITS_GOAL, at_most=False))
        else:
            beside = report.median(ratios(runs, case.name, ours_beside(case).name))
            notes.append(report.reach(f"{case.name}, seconds beside ours", beside, SPEED_GOAL, at_most=False))
    return notes


def _time_of(runs: Sequence[MoeRun], case: Case) -> list[str]:
    """A line on where the seconds of a step went, as the profiler says, in the median turn."""
    found = sorted(good(runs, case.name), key=lambda run: run.token_seconds)
    if not found or not found[len(found) // 2].stage_seconds:
        return []
    run = found[len(found) // 2]
    steps = len(run.step_seconds)
    stages = sorted(run.stage_seconds.items(), key=lambda item: -item[1])
    told = ", ".join(f"{stage} {seconds / steps * 1000:.1f}" for stage, seconds in stages)
    return [f"{case.name}, ms a step ({run.wall_seconds / steps * 1000:.1f} in the pass), threads added up: {told}."]


def _bars(runs: Sequence[MoeRun], cases: Sequence[Case]) -> dict[str, list[bars.Bar]]:
    """A group a cap, the quickest row first."""
    groups: dict[str, list[bars.Bar]] = {}
    for case in cases:
        heading = "no cap" if case.share is None else f"idle process + {case.share} % of the weights"
        figures = spread(run.token_seconds for run in good(runs, case.name))
        groups.setdefault(heading, []).append(bars.Bar(f"{case.runner}, {case.habits}", figures, case.is_ours))
    for found in groups.values():
        found.sort(key=lambda bar: bar.figures.median if bar.figures is not None else float("inf"))
    return groups


def cases_of(rows: Sequence[str], shares: Sequence[int], habits: Sequence[str]) -> list[Case]:
    """This project's rows with all habits, those of others with the first, since they read all experts anyway."""
    found = [Case(row, one, None) for row in UNCAPPED if row in rows for one in habits[: None if row in OURS else 1]]
    for share in shares:
        found += [Case(row, one, share) for row in rows for one in habits[: None if row in OURS else 1]]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 3, list(RUNNERS))
    parser.add_argument("--tokens", type=int, default=25, help="of each request, at least 2 (default: %(default)s)")
    parser.add_argument("--shares", type=int, nargs="+", default=[25, 50], help="of the weights, in percent")
    parser.add_argument("--habits", nargs="+", choices=list(HABITS), default=list(HABITS), help="of the texts")
    options = parser.parse_args(arguments)
    command_line.settle(options, "moe", NEEDED_BYTES)
    command_line.check_tokens(options)
    work = options.work_dir
    checkpoint = make_moe_checkpoint(work, options.scale)
    weights = sum(path.stat().st_size for path in shards(checkpoint))
    workload = Workload(checkpoint, weights, work / "moe-run", options.scale, options.tokens)
    shutil.rmtree(workload.folder, ignore_errors=True)
    workload.folder.mkdir()
    cases = cases_of(options.only, options.shares, options.habits)
    unusable: dict[str, str] = {}
    try:
        for row in options.only:
            try:
                prepare_files(row, workload, work)
            except PeerError as error:
                unusable[row] = f"its files: {error}"
        drop_cached(workload.folder)
        machine = report.describe_machine(work)
        named = {case.name: case for case in cases}
        without = {case.name: unusable[case.runner] for case in cases if case.runner in unusable}
        runs = run_all(
            list(named), options.turns, MoeRun, lambda run: measure(run, named[run.row], workload, work), without
        )
    finally:
        shutil.rmtree(workload.folder, ignore_errors=True)
    title = (
        f"A mixture of {SCALES[options.scale].num_experts} experts a layer, {weights / 1e9:.2f} GB, with memory capped, "
        f"on the CPU, {command_line.turns(options)}"
    )
    table = tabulate(runs, cases, options.turns, options.scale)
    report.write(options.results, title, machine, table, notes_on(runs, cases), runs)
    bars.draw(options.results.with_name(options.results.name + ".svg"), title, "seconds a token", _bars(runs, cases))
    return int(any(run.error for run in runs if named[run.row].is_ours))


if __name__ == "__main__":
    raise SystemExit(main())
