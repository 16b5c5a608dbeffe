"""The main job on the bundled model, where it can be seen: split shard by shard at 4bit, ask, score, sum up.

Everything goes through the public front door; this module only watches (disk, memory, time) and prints.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rabbitllm import progress
from rabbitllm.demo.tasks import KINDS, Problem, exact_match, held_out
from rabbitllm.profiling.disk_picture import pictured
from rabbitllm.splitter.interrupted import starting_afresh

COMPRESSION = "4bit"
ALLOWED_DROP = 0.02
"""The score may fall this far below the recorded one: other kernels round differently."""
QUESTIONS_SHOWN = 6
BATCH = 50
BAR_WIDTH = 24
SAMPLE_SECONDS = 0.005
CHECKPOINT = "rabbitllm-demo-model"
MB = 1e6


@dataclass
class Peaks:
    """The most that was seen: bytes on disk below the working folder, and resident memory of this process."""

    disk: int = 0
    memory: int = 0
    memory_before: int = 0


@contextmanager
def watching(folder: Path) -> Iterator[Peaks]:
    """Sample disk and memory in a thread while the context is open."""
    import psutil

    from rabbitllm.splitter.watch import disk_bytes

    process = psutil.Process()
    peaks = Peaks(memory_before=process.memory_info().rss)
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            peaks.disk = max(peaks.disk, disk_bytes(folder))
            peaks.memory = max(peaks.memory, process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


class ShardTable:
    """Prints a line for every shard: what the disk holds, beside what it would hold on the standard route.

    Attributes:
        standard_peak: the most it would hold there, bytes.
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
            now = event.disk_bytes + event.source_left_bytes
            standard = event.disk_bytes + self._source
            self.standard_peak = max(self.standard_peak, standard)
            self._console.print(
                f"{event.number:>2}/{event.of:<3} [green]{self._bar(now)}[/] {now / MB:5.1f} MB  "
                f"[yellow]{self._bar(standard)}[/] {standard / MB:5.1f} MB",
                highlight=False,
            )

    def _bar(self, nbytes: int) -> str:
        filled = round(BAR_WIDTH * nbytes / self._most)
        return "█" * filled + "░" * (BAR_WIDTH - filled)


def run(folder: Path, problems: int, plot: Path | None = None) -> bool:
    """The whole demonstration.

    Args:
        folder: working folder, made if need be; the checkpoint is copied into it.
        problems: how many held-out problems to score; a multiple of the number of kinds.
        plot: where to draw the disk in use over the split.

    Returns:
        Whether the score is within 2 points of the recorded one and no shard survived.
    """
    from rabbitllm import AutoModel

    console = Console()
    checkpoint = _fresh_copy(folder)
    shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    size = sum((checkpoint / name).stat().st_size for name in shards)
    console.print(
        f"\n[bold]RabbitLLM[/] splits its bundled model ({size / MB:.1f} MB in {len(shards)} shards) at {COMPRESSION}\n"
        "and deletes each shard as soon as it is used up.\n",
        highlight=False,
    )
    start = time.perf_counter()
    shard_table = ShardTable(console)
    with watching(checkpoint) as peaks, pictured(plot), progress.listening(shard_table), starting_afresh():
        model = AutoModel.from_pretrained(checkpoint, sequential_shard_processing=True, compression=COMPRESSION)
    ready = time.perf_counter() - start
    surviving = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    chosen = held_out(problems - problems % len(KINDS), 0)
    console.print(f"\nReady after {ready:.1f} s. The model answers problems that it was never trained on:\n")
    rate = _ask(console, model, chosen[:QUESTIONS_SHOWN])
    right = sum(exact_match(text, problem) for text, problem in _answer_all(model, chosen))
    score, recorded = right / len(chosen), _recorded_score()
    rows = [
        ("peak disk", f"{peaks.disk / MB:.1f} MB", f"{shard_table.standard_peak / MB:.1f} MB on the standard route"),
        ("peak RAM", f"{peaks.memory / MB:.0f} MB", f"{peaks.memory_before / MB:.0f} MB before torch was imported"),
        ("speed", f"{rate:.0f} tokens/s", "one question at a time"),
        ("exact match", f"{100 * score:.1f} %", f"of {len(chosen)} problems; {100 * recorded:.1f} % recorded"),
        ("shards left", str(len(surviving)), ", ".join(surviving)),
    ]
    _sum_up(console, rows)
    passed = score >= recorded - ALLOWED_DROP and not surviving
    console.print("[bold green]passed[/]" if passed else "[bold red]failed[/]")
    return passed


def _fresh_copy(folder: Path) -> Path:
    """The bundled checkpoint in the working folder, in place of what an earlier demonstration left there."""
    checkpoint = folder / CHECKPOINT
    if checkpoint.exists():
        shutil.rmtree(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    with as_file(files("rabbitllm.demo") / "model") as bundled:
        shutil.copytree(bundled, checkpoint)
    return checkpoint


def _recorded_score() -> float:
    record = json.loads((files("rabbitllm.demo") / "score.json").read_text(encoding="utf-8"))
    return float(record[COMPRESSION]["exact_match"])


def _ask(console: Console, model: Any, problems: list[Problem]) -> float:
    """Print questions with the model's answers, one at a time; return tokens a second."""
    from rabbitllm.demo.answering import answers

    tokens, seconds = 0, 0.0
    for problem in problems:
        start = time.perf_counter()
        answer = answers(model, model.tokenizer, [problem])[0]
        seconds += time.perf_counter() - start
        tokens += len(model.tokenizer(answer)["input_ids"]) + 1
        mark = "[green]right[/]" if exact_match(answer, problem) else f"[red]wrong, {problem.answer}[/]"
        question = problem.prompt.removeprefix("Q: ").removesuffix("\nA:")
        console.print(f"  {question:<44} {answer:<22} {mark}", highlight=False)
    return tokens / seconds


def _answer_all(model: Any, problems: list[Problem]) -> Iterator[tuple[str, Problem]]:
    from rabbitllm.demo.answering import answers

    for at in range(0, len(problems), BATCH):
        batch = problems[at : at + BATCH]
        yield from zip(answers(model, model.tokenizer, batch), batch, strict=True)


def _sum_up(console: Console, rows: list[tuple[str, str, str]]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table, highlight=False)
    console.print()
