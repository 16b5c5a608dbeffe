"""The demonstration of a split: split a small model shard by shard, ask, score, sum up.

Everything uses the public API; this module only measures (disk, memory, time) and prints.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from rabbitllm.base import progress
from rabbitllm.base.forks import DaemonThread
from rabbitllm.base.terminal import amount
from rabbitllm.demo.models import BundledModel, DemoModel
from rabbitllm.demo.tasks import Problem
from rabbitllm.display.pictures import pictured
from rabbitllm.errors import OptionError
from rabbitllm.splitter.interrupted import not_resumable

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

QUESTIONS_SHOWN = 6
BAR_WIDTH = 24
SAMPLE_SECONDS = 0.005
MB = 1_000_000
MARK = ".rabbitllm-demo"
"""An empty file in a checkpoint that a demonstration wrote, which the next one may replace."""


@dataclass
class DemoPeaks:
    """Measured maxima: bytes on disk below the working folder, and resident memory of this process."""

    disk: int = 0
    memory: int = 0
    memory_before: int = 0


@contextmanager
def sample_peaks(folder: Path) -> Iterator[DemoPeaks]:
    """Sample disk and memory in a thread while the context is open."""
    import psutil

    from rabbitllm.splitter.disk_sampler import disk_bytes

    process = psutil.Process()
    peaks = DemoPeaks(memory_before=process.memory_info().rss)
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            peaks.disk = max(peaks.disk, disk_bytes(folder))
            peaks.memory = max(peaks.memory, process.memory_info().rss)

    thread = DaemonThread(sample, "demo-peaks")
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


class ShardTable:
    """Prints a line for every shard: the disk use, and that of the standard route.

    Attributes:
        standard_peak: peak disk use of the standard route in bytes.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._source = 0
        self._most = 1
        self.standard_peak = 0

    def __call__(self, event: progress.Event) -> None:
        if isinstance(event, progress.SplitStarted):
            self._source, self._most = event.source_bytes, event.source_bytes + event.output_bytes
            self._console.print(f"[bold]{'shard':7}{'disk in use':{BAR_WIDTH + 12}}standard route would use")
        elif isinstance(event, progress.ShardDone):
            in_use = event.disk_bytes + event.source_left_bytes
            standard = event.disk_bytes + self._source
            self.standard_peak = max(self.standard_peak, standard)
            self._console.print(
                f"{event.number:>2}/{event.of:<3} [green]{self._bar(in_use)}[/] {in_use / MB:5.1f} MB  "
                f"[yellow]{self._bar(standard)}[/] {standard / MB:5.1f} MB",
                highlight=False,
            )

    def _bar(self, nbytes: int) -> str:
        filled = round(BAR_WIDTH * nbytes / self._most)
        return "█" * filled + "░" * (BAR_WIDTH - filled)


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """A question, and the model's answer."""

    question: str
    answer: str
    expected: str
    right: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a demonstration; sizes in bytes, times in seconds.

    Attributes:
        compression: compression of the split.
        source_bytes: size of the model's shards.
        shards, shards_left: their number, and the names of the remaining ones.
        ready_seconds: time until the model was ready.
        peak_disk_bytes: peak of shards and layer files together.
        standard_peak_disk_bytes: the peak on the standard route, which keeps all shards.
        peak_memory_bytes, memory_before_bytes: resident memory of this process, and that before the import of torch.
        tokens_per_second: with one question at a time.
        problems: number of scored problems.
        exact_match: share of correct answers.
        recorded_exact_match: the same when the model was made.
        allowed_drop: allowed difference of these.
        asked: the first questions.
    """

    compression: str
    source_bytes: int
    shards: int
    shards_left: tuple[str, ...]
    ready_seconds: float
    peak_disk_bytes: int
    standard_peak_disk_bytes: int
    peak_memory_bytes: int
    memory_before_bytes: int
    tokens_per_second: float
    problems: int
    exact_match: float
    recorded_exact_match: float
    allowed_drop: float
    asked: tuple[DemoAnswer, ...]

    @property
    def passed(self) -> bool:
        """Whether the score is close to the recorded one and no shard survived."""
        return self.exact_match >= self.recorded_exact_match - self.allowed_drop and not self.shards_left


def as_record(outcome: Outcome) -> dict[str, Any]:
    """An outcome for `json.dumps`."""
    return {"passed": outcome.passed, **dataclasses.asdict(outcome)}


def run(
    folder: Path, problems: int, plot: Path | None = None, console: Console | None = None, of: DemoModel | None = None
) -> Outcome:
    """Run the whole demonstration.

    Args:
        folder: working folder, created if necessary; the checkpoint is written into it.
        problems: number of problems to score, if the model has that many.
        plot: path for a picture of the disk use during the split.
        console: receives the output; stdout by default.
        of: the model to demonstrate; the bundled one by default.

    Raises:
        OptionError: the working folder has a folder of the model's name which no demonstration wrote.
    """
    from rabbitllm import AutoModel
    from rabbitllm.generation.request import tokenizer_of

    console = Console() if console is None else console
    of = of or BundledModel()
    checkpoint = _write_checkpoint(folder, of)
    shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    size = sum((checkpoint / name).stat().st_size for name in shards)
    console.print(
        f"\n[bold]RabbitLLM[/] splits {of.name} ({amount(size)} in {len(shards)} shards) at {of.compression}\n"
        "and deletes each shard after use.\n",
        highlight=False,
    )
    start = time.perf_counter()
    shard_table = ShardTable(console)
    with sample_peaks(checkpoint) as peaks, pictured(plot), progress.listening(shard_table), not_resumable():
        model = AutoModel.from_pretrained(checkpoint, sequential_shard_processing=True, compression=of.compression)
    ready = time.perf_counter() - start
    surviving = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    chosen = of.problems(problems)
    console.print(f"\nReady after {ready:.1f} s. {of.introduction}\n")
    answers, rate = _answer_questions(console, model, chosen[:QUESTIONS_SHOWN], of)
    right = of.right_answers(model, tokenizer_of(model), chosen)
    outcome = Outcome(
        compression=of.compression,
        source_bytes=size,
        shards=len(shards),
        shards_left=tuple(surviving),
        ready_seconds=ready,
        peak_disk_bytes=peaks.disk,
        standard_peak_disk_bytes=shard_table.standard_peak,
        peak_memory_bytes=peaks.memory,
        memory_before_bytes=peaks.memory_before,
        tokens_per_second=rate,
        problems=len(chosen),
        exact_match=right / len(chosen),
        recorded_exact_match=of.recorded_score(),
        allowed_drop=of.allowed_drop,
        asked=answers,
    )
    _print_summary(console, outcome)
    return outcome


def _write_checkpoint(folder: Path, of: DemoModel) -> Path:
    """Write the checkpoint into the working folder, replacing that of an earlier demonstration.

    Raises:
        OptionError: there is a folder of that name which no demonstration wrote.
    """
    checkpoint = folder / of.folder
    if checkpoint.exists():
        if not (checkpoint / MARK).is_file():
            raise OptionError(
                f"{checkpoint} was not written by a complete demonstration, and is not replaced.",
                "Use another folder (--dir), or move or delete that one.",
            )
        shutil.rmtree(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{MARK}.part"  # what a killed demonstration leaves is under this name
    shutil.rmtree(part, ignore_errors=True)
    of.write(part)
    (part / MARK).touch()
    return part.rename(checkpoint)


def _answer_questions(
    console: Console, model: StreamedModel, problems: list[Problem], of: DemoModel
) -> tuple[tuple[DemoAnswer, ...], float]:
    """Print questions with the model's answers, one at a time; return them, and tokens per second."""
    from rabbitllm.generation.request import tokenizer_of

    answers, tokens, seconds, tokenizer = [], 0, 0.0, tokenizer_of(model)
    for problem in problems:
        start = time.perf_counter()
        answer = of.answers(model, tokenizer, [problem])[0]
        seconds += time.perf_counter() - start
        tokens += len(tokenizer(answer)["input_ids"]) + 1
        question = problem.prompt.removeprefix("Q: ").removesuffix("\nA:")
        answers.append(shown := DemoAnswer(question, answer, problem.answer, of.is_right(answer, problem)))
        mark = "[green]right[/]" if shown.right else f"[red]wrong, {problem.answer}[/]"
        if of.answers_in_words:
            sentence = "".join(answer.partition(". ")[:2])
            console.print(f"  {question}\n    {' '.join(sentence.split())} {mark}", highlight=False)
        else:
            console.print(f"  {question:<44} {answer:<22} {mark}", highlight=False)
    return tuple(answers), tokens / seconds


def _print_summary(console: Console, outcome: Outcome) -> None:
    disk, standard = amount(outcome.peak_disk_bytes), amount(outcome.standard_peak_disk_bytes)
    memory, memory_before = amount(outcome.peak_memory_bytes), amount(outcome.memory_before_bytes)
    score, recorded = 100 * outcome.exact_match, 100 * outcome.recorded_exact_match
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("peak disk", disk, f"{standard} on the standard route")
    table.add_row("peak RAM", memory, f"{memory_before} before the split")
    table.add_row("speed", f"{outcome.tokens_per_second:.0f} tokens/s", "one question at a time")
    table.add_row("exact match", f"{score:.1f} %", f"of {outcome.problems} problems; {recorded:.1f} % recorded")
    table.add_row("shards left", str(len(outcome.shards_left)), ", ".join(outcome.shards_left))
    console.print()
    console.print(table, highlight=False)
    console.print()
    console.print("[bold green]passed[/]" if outcome.passed else "[bold red]failed[/]")
