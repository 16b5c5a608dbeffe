"""The figures of a mixture of experts under a memory cap, and their table, notes and picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from benchmarks.lib import report
from benchmarks.lib.generation import CappedCase
from benchmarks.lib.measure import Spread, spread
from benchmarks.lib.runs import Run, failures, good, ratios, versions

OURS = ("rabbitllm-2", "rabbitllm-2-4bit")
LLAMA_CPP = "llama.cpp"
BYTES_GOAL, SPEED_GOAL, LIMIT_GOAL = 1.1, 10.0, 1.4


@dataclass
class MoeRun(Run):
    """One row of one turn; seconds and bytes. Steps exclude first tokens and the warm-up.

    Attributes:
        load_seconds: of loading the model from existing layer files.
        first_token_seconds: median over the requests.
        token_seconds: mean of `step_seconds`.
        step_bytes: read from the disk in each step, as the system counts.
        tokens: of each text of each request.
        follows: whether they are those of the texts.
        hits, missed: experts that steps needed, in the cache or not.
        missed_bytes: of the missed ones.
        read_bytes: in those steps, as the profiler counts.
        slots: experts that the cache can hold.
        stage_seconds, wall_seconds: the profiler's, of those steps.
        disk_speed, memory_speed: bytes a second; the one that limits this project between its requests, the other one
            after the run.
    """

    load_seconds: float = 0.0
    first_token_seconds: float = 0.0
    token_seconds: float = 0.0
    step_seconds: Sequence[float] = ()
    step_bytes: Sequence[int] = ()
    tokens: Sequence[Sequence[Sequence[int]]] = ()
    follows: bool = False
    hits: int = 0
    missed: int = 0
    missed_bytes: int = 0
    read_bytes: int = 0
    slots: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0
    threads: int = 0
    placed: str = ""
    disk_speed: float = 1.0
    memory_speed: float = 1.0

    @property
    def headline(self) -> float:
        """Seconds a token."""
        return self.token_seconds

    @property
    def hit_rate(self) -> float | None:
        lookups = self.hits + self.missed
        return self.hits / lookups if lookups and self.slots else None


@dataclass(frozen=True)
class Limit:
    """The least that a token can take, at the rates of its own run, since a cloud's change from minute to minute.

    Attributes:
        disk, memory: bytes a second of all runs.
        touched: bytes that a token needs in memory.
    """

    disk: Spread
    memory: Spread
    touched: int

    @classmethod
    def of(cls, runs: Sequence[MoeRun], touched: int) -> Limit | None:
        """The limit of these runs; None if none has figures."""
        measured = [run for run in runs if run.error is None]
        disk, memory = spread(run.disk_speed for run in measured), spread(run.memory_speed for run in measured)
        return None if disk is None or memory is None else cls(disk, memory, touched)

    def seconds(self, run: MoeRun) -> float:
        """Seconds of a token of this run, by its missed bytes; without a cap, by the bytes it read."""
        missed = (run.missed_bytes or sum(run.step_bytes)) / max(len(run.step_seconds), 1)
        return max(missed / max(run.disk_speed, 1), self.touched / run.memory_speed)


def of_missed(runs: Sequence[MoeRun], case: CappedCase) -> list[float]:
    """Bytes that the process read from the disk, over those of the missed experts."""
    return [sum(run.step_bytes) / run.missed_bytes for run in good(runs, case.name) if run.missed_bytes]


def our_case_for(case: CappedCase, cases: Sequence[CappedCase]) -> CappedCase:
    """The row of this project to compare with, under the same cap; there is only one where llama.cpp runs."""
    if case.runner.startswith(LLAMA_CPP):
        return replace(case, runner=next(row.runner for row in cases if row.runner in OURS))
    return replace(case, runner=OURS[case.runner == OURS[1]])


def tabulate(
    runs: Sequence[MoeRun], cases: Sequence[CappedCase], turns: int, experts: int, touched: int | None = None
) -> report.Table:
    """A line for each row; `experts` is the number in all layers, `touched` the bytes that a token needs."""

    def cached(of: Callable[[MoeRun], float], digits: int) -> Callable[[CappedCase, Sequence[MoeRun]], str]:
        column = report.each(of, digits, 0.01)
        return lambda case, row_runs: column(case, [run for run in row_runs if run.hit_rate is not None])

    def read(case: CappedCase, row_runs: Sequence[MoeRun]) -> str:
        column = report.each(lambda run: statistics.fmean(run.step_bytes), 0, 1e6)
        return column(case, [run for run in row_runs if run.step_bytes])

    columns: report.Columns[CappedCase, MoeRun] = {
        "first token s": report.each(lambda run: run.first_token_seconds),
        "s/token": report.each(lambda run: run.token_seconds, 3),
        "tokens/s": report.each(lambda run: len(run.tokens[0] if run.tokens else [0]) / run.token_seconds, 1),
        "x ours": lambda case, _: report.shown(ratios(runs, case.name, our_case_for(case, cases).name), 1),
        "MB/token from disk": read,
        "of missed experts'": lambda case, _: report.shown(spread(of_missed(runs, case))),
        "cache, % of experts": cached(lambda run: run.slots / experts, 0),
        "hits %": cached(lambda run: run.hit_rate or 0.0, 1),
        "anon MiB over idle": report.ADDED_MEMORY,
        "text right": lambda case, row_runs: report.verdict([run.follows for run in row_runs]),
    }
    limit = None if touched is None else Limit.of(runs, touched)
    if limit is not None:

        def ours(
            column: Callable[[CappedCase, Sequence[MoeRun]], str],
        ) -> Callable[[CappedCase, Sequence[MoeRun]], str]:
            return lambda case, row_runs: column(case, row_runs) if case.runner in OURS else ""

        of_limit = report.each(lambda run: run.token_seconds / limit.seconds(run))
        columns = {**columns, "limit ms": ours(report.each(limit.seconds, 1, 1e-3)), "x limit": ours(of_limit)}
    return report.tabulated(runs, {case.name: case for case in cases}, turns, columns)


def notes_on(runs: Sequence[MoeRun], cases: Sequence[CappedCase], touched: int | None = None) -> list[str]:
    """The meaning of the columns, the stages, errors, and the goals."""
    notes = [
        "s/token: mean over the steps of a turn, without first tokens; a step is a token of each text. x ours: beside "
        "this project's row with the same texts under the same cap in the same turn.",
        "of missed experts': bytes read from the disk over the bytes of the experts that were not in the cache.",
        "hits: of the experts that steps needed.",
        "text right: whether the answer continues the text of the prompt.",
        report.MEMORY_NOTE,
        *versions(runs),
        *failures(runs),
        *(line for case in cases for line in _time_of(runs, case)),
    ]
    limit = None if touched is None else Limit.of(runs, touched)
    if limit is not None:
        disk, memory = (
            report.shown(Spread(*(value / 1e9 for value in astuple(rate)))) for rate in (limit.disk, limit.memory)
        )
        notes.append(
            f"limit: missed bytes or the {limit.touched / 1e6:.0f} MB that a token needs, at the rates of each run; of "
            f"all {disk} GB/s of the disk, {memory} of the memory."
        )
    for case in cases:
        if limit is not None and case.runner in OURS:
            of_limit = [run.token_seconds / limit.seconds(run) for run in good(runs, case.name)]
            times = report.median(spread(of_limit))
            notes.append(report.reach(f"{case.name}, x limit", times, LIMIT_GOAL, at_most=True))
        if case.share is None and not case.runner.startswith(LLAMA_CPP):
            continue
        if case.runner in OURS:
            missed = report.median(spread(of_missed(runs, case)))
            notes.append(report.reach(f"{case.name}, bytes of the missed", missed, BYTES_GOAL, at_most=True))
        else:
            compared = ratios(runs, case.name, our_case_for(case, cases).name)
            goal = 1.0 if case.runner.startswith(LLAMA_CPP) else SPEED_GOAL
            notes.append(report.against_ours(case.name, compared, goal))
    return notes


def _time_of(runs: Sequence[MoeRun], case: CappedCase) -> list[str]:
    """A line with the profiler's stages of a step, in the median turn."""
    sorted_runs = sorted(good(runs, case.name), key=lambda run: run.token_seconds)
    if not sorted_runs or not sorted_runs[len(sorted_runs) // 2].stage_seconds:
        return []
    run = sorted_runs[len(sorted_runs) // 2]
    steps = len(run.step_seconds)
    stages = sorted(run.stage_seconds.items(), key=lambda item: -item[1])
    times = ", ".join(f"{stage} {seconds / steps * 1000:.1f}" for stage, seconds in stages)
    return [f"{case.name}, ms a step ({run.wall_seconds / steps * 1000:.1f} in the pass), threads added up: {times}."]
