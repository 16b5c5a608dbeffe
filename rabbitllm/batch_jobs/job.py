"""`rabbitllm batch` and `rabbitllm.batch`: an input, a model loaded for it, an output; with a progress display.

    input ─▶ scan ─▶ unanswered lines, in an efficient order ─▶ answers ─▶ journal ─▶ output, in the input's order

A separate thread writes the answers, so that no pass waits for the disk: during an fsync the next answers collect
and are written together.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rabbitllm.batch_jobs.answers import answered
from rabbitllm.batch_jobs.display import JobDisplay, Progress
from rabbitllm.batch_jobs.inputs import InputScan, surveyed
from rabbitllm.batch_jobs.inputs import opened as opened_input
from rabbitllm.batch_jobs.items import BatchAnswer, Defaults, JobLimits
from rabbitllm.batch_jobs.journal import BatchJournal, errors_of_finished, opened
from rabbitllm.batch_jobs.loading import BatchModel
from rabbitllm.display.region import THE_REGION
from rabbitllm.generation.request import Sampling

Groups = Generator[list[BatchAnswer]]
"""Answers, in groups that are complete at the same time."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch job.

    Attributes:
        source: the input; see `inputs.opened`.
        out: the output.
        name: the model's name as the user gave it.
        load: loads the model for a scanned input.
        defaults: for values that lines omit.
        limits: limits of the batch.
        settings: other settings that change answers; compression, dtype, revision.
        columns: see `inputs.opened`.
        overwrite: see `journal.opened`.
        elsewhere: provides the missing answers, if no model is loaded in this process.
    """

    source: Any
    out: Path
    name: str
    load: Callable[[InputScan], BatchModel]
    defaults: Defaults
    limits: JobLimits
    settings: Mapping[str, Any]
    columns: Mapping[str, str] | None = None
    overwrite: bool = False
    elsewhere: Callable[[InputScan, BatchJournal], Groups] | None = None


def work(batch: BatchJob) -> Progress:
    """Run the job; a finished output of the same input, model and settings is kept as it is.

    Everything that can be refused is refused before the model is loaded.

    Raises:
        OptionError: a temperature or top_p out of its range.
        RabbitLLMError: the input cannot be read, the output exists already or belongs to another input, the model
            cannot be loaded, or the disk is full; earlier answers are kept.
    """
    Sampling(batch.defaults.temperature, batch.defaults.top_p)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(opened_input(batch.source, batch.columns))
        survey = surveyed(file, batch.defaults)
        defaults = {name: list(one) if isinstance(one, tuple) else one for name, one in asdict(batch.defaults).items()}
        head = {"input": survey.digest, "lines": len(survey), "model": batch.name, **batch.settings, **defaults}
        if not batch.overwrite and (errors := errors_of_finished(batch.out, head)) is not None:
            return Progress(len(survey), len(survey), errors, len(survey), 0, 0, 0.0)
        journal = stack.enter_context(opened(batch.out, len(survey), head, overwrite=batch.overwrite))
        progress = Progress(len(journal), journal.done, journal.errors, journal.resumed, 0, 0, 0.0)
        if journal.done < len(journal):
            progress = _answer(batch, survey, journal)
        journal.write_output(batch.out)
        return progress


def _answer(batch: BatchJob, survey: InputScan, journal: BatchJournal) -> Progress:
    shown = JobDisplay()
    if batch.elsewhere is not None:
        with _displayed(shown):
            return keep(batch.elsewhere(survey, journal), journal, shown.told)
    ready = batch.load(survey)
    if ready.weights is not None:
        journal.check_weights(ready.weights)
    limits = batch.limits
    if limits.cache_bytes is None:
        limits = replace(limits, cache_bytes=ready.cache_bytes)
    items = map(survey.item, survey.ordered(journal.missing()))
    line, ready.model.pass_line = ready.model.pass_line, None  # one row for all passes
    try:
        with _displayed(shown):
            return keep(answered(ready.model, batch.name, items, limits, shown.watch), journal, shown.told)
    finally:
        ready.model.pass_line = line


@contextlib.contextmanager
def _displayed(shown: JobDisplay) -> Iterator[None]:
    claim = THE_REGION.claim(shown)
    try:
        yield
    finally:
        claim.release()


def keep(groups: Groups, journal: BatchJournal, tell: Callable[[Progress], object]) -> Progress:
    """Make answers from any source durable.

    Args:
        groups: the answers.
        journal: the journal of the output.
        tell: called with the progress whenever more answers are durable; in a separate thread.

    Raises:
        RabbitLLMError, OSError, MemoryError: see `answers.answers` and `BatchJournal.add`; earlier answers are kept.
    """
    writer = _Writer(journal, tell)
    try:
        with contextlib.closing(groups):
            for group in groups:
                writer.put(group)
    finally:
        writer.close()
    writer.check()
    return writer.progress


class _Writer:
    """Appends answers to a journal in a thread; see `keep`."""

    def __init__(self, journal: BatchJournal, tell: Callable[[Progress], object]) -> None:
        self._journal = journal
        self._tell = tell
        self._start = time.monotonic()
        self._tokens = [0, 0]
        self._queue: queue.SimpleQueue[list[BatchAnswer] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="rabbitllm-journal", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> Progress:
        """The current progress."""
        journal = self._journal
        seconds = time.monotonic() - self._start
        read, made = self._tokens
        return Progress(len(journal), journal.done, journal.errors, journal.resumed, read, made, seconds)

    def put(self, answers: list[BatchAnswer]) -> None:
        """Queue answers for writing.

        Raises:
            RabbitLLMError: earlier answers could not be written.
        """
        self.check()
        self._queue.put(answers)

    def check(self) -> None:
        """Raise the error of a failed write."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write the queued answers, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        over = False
        self._tell(self.progress)
        while not over:
            groups = [self._queue.get()]
            try:
                while True:
                    groups.append(self._queue.get_nowait())
            except queue.Empty:
                pass
            over = None in groups
            answers = [one for group in groups if group is not None for one in group]
            if answers and self._error is None:
                try:
                    self._journal.add(answers)
                except BaseException as error:
                    self._error = error
                    continue
                self._tokens[0] += sum(one.prompt_tokens for one in answers)
                self._tokens[1] += sum(one.new_tokens for one in answers)
                self._tell(self.progress)
