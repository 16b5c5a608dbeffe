"""`rabbitllm batch` and `rabbitllm.batch`: an input, a model loaded for it, an output; with a progress display."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rabbitllm.auto_model import LoadRequest
from rabbitllm.batch_jobs.display import JobDisplay
from rabbitllm.batch_jobs.input_scan import InputScan, surveyed
from rabbitllm.batch_jobs.items import Defaults, JobLimits
from rabbitllm.batch_jobs.journal import BatchJournal, errors_of_finished, opened
from rabbitllm.batch_jobs.run import Groups, Progress, head_of, keep, run
from rabbitllm.batch_jobs.spool import opened as opened_input
from rabbitllm.display.region import THE_REGION
from rabbitllm.generation.request import Sampling


@dataclass(frozen=True, slots=True)
class Ready:
    """A model that is ready to answer.

    Attributes:
        model: a model from `AutoModel.from_pretrained`.
        cache_bytes: limit of the KV cache, if it was fixed when the model was loaded.
        weights: see `loading.BatchModel`.
    """

    model: Any
    cache_bytes: int | None = None
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch job.

    Attributes:
        source: the input; see `spool.opened`.
        out: the output.
        name: the model's name as the user gave it.
        load: loads the model for a scanned input.
        defaults: for values that lines omit.
        limits: limits of the batch.
        settings: other settings that change answers; see `run.head_of`.
        columns: see `spool.opened`.
        overwrite: see `journal.opened`.
        elsewhere: provides the missing answers, if no model is loaded in this process.
    """

    source: Any
    out: Path
    name: str
    load: Callable[[InputScan], Ready]
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
        head = head_of(survey, batch.name, batch.settings)
        if not batch.overwrite and (errors := errors_of_finished(batch.out, head)) is not None:
            return Progress(len(survey), len(survey), errors, len(survey), 0, 0, 0.0)
        journal = stack.enter_context(opened(batch.out, len(survey), head, overwrite=batch.overwrite))
        progress = Progress(len(journal), journal.done, journal.errors, journal.resumed, 0, 0, 0.0)
        if journal.done < len(journal):
            progress = _answer(batch, survey, journal)
        journal.write_output(batch.out)
        return progress


def _answer(batch: BatchJob, survey: InputScan, journal: BatchJournal) -> Progress:
    if batch.elsewhere is not None:
        shown = JobDisplay()
        claim = THE_REGION.claim(shown)
        try:
            return keep(batch.elsewhere(survey, journal), journal, shown.told)
        finally:
            claim.release()
    ready = batch.load(survey)
    if ready.weights is not None:
        journal.check_weights(ready.weights)
    limits = batch.limits
    if limits.cache_bytes is None:
        limits = replace(limits, cache_bytes=ready.cache_bytes)
    shown = JobDisplay()
    line, ready.model.pass_line = ready.model.pass_line, None  # one row for all passes
    claim = THE_REGION.claim(shown)
    try:
        return run(ready.model, batch.name, survey, journal, limits, shown.told, shown.watch)
    finally:
        claim.release()
        ready.model.pass_line = line


def loading(request: LoadRequest, limits: JobLimits) -> Callable[[InputScan], Ready]:
    """A function that loads a model for a scanned input.

    Args:
        request: the model, its split and its run.
        limits: limits of the batch.
    """

    def load(survey: InputScan) -> Ready:
        from rich.console import Console
        from transformers import logging

        from rabbitllm.batch_jobs.loading import loaded

        errors = Console(stderr=True, highlight=False)
        with contextlib.redirect_stdout(sys.stderr):  # output while loading is not part of the result
            found = loaded(request, errors, survey, limits.sequences, limits.cache_bytes)
        logging.set_verbosity_error()  # no warnings about missing kernels amid progress
        return Ready(found.model, found.cache_bytes, found.weights)

    return load


def settings_of(request: LoadRequest) -> dict[str, Any]:
    """The settings of a model that change answers, without its name."""
    spec = request.spec
    return {"compression": spec.compression, "revision": spec.access.revision, "dtype": request.run.dtype}
