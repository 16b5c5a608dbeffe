"""`rabbitllm batch`: a file of prompts, and a file of answers."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli import exit_codes
from rabbitllm.cli.arguments import (
    NO_ANSWER_OPTIONS,
    NO_OPTIONS,
    AnswerOptions,
    BatchDraftOption,
    ExactOption,
    JsonOption,
    ModelArgument,
    ModelOptions,
    RayOption,
    command_draft,
    put_json,
    with_model_options,
)
from rabbitllm.cli.help import answer_option, hosts_option, limits_option


@with_model_options("fast_bfloat16", "context")
def batch_command(
    model: ModelArgument,
    source: Annotated[str, typer.Argument(metavar="INPUT", help="File of JSON lines, Parquet file, or - for stdin.")],
    out: Annotated[
        Path,
        answer_option(
            "--output", "-o", metavar="FILE", help="File for the answers, one JSON line for each line of the input."
        ),
    ],
    max_new_tokens: Annotated[
        int, answer_option(help="Maximum tokens per answer, unless the line sets its own.", min=1)
    ] = 512,
    answers: AnswerOptions = NO_ANSWER_OPTIONS,
    pooling: Annotated[
        str, answer_option(metavar="NAME", help="Pooling of embeddings: last (hidden state of the last token) or mean.")
    ] = "last",
    normalise: Annotated[bool, answer_option("--normalise", help="Scale embeddings to length 1.")] = False,
    column: Annotated[
        list[str] | None,
        answer_option(
            metavar="NAME=COLUMN", help="Read a field from another column, e.g. prompt=question; repeatable."
        ),
    ] = None,
    sequences: Annotated[int, limits_option(help="Maximum lines in one pass.", min=1)] = 256,
    cache_memory: Annotated[
        str | None,
        limits_option(
            metavar="SIZE",
            help="Memory for the KV cache, e.g. 8GB; by default as much as needed, up to half of free memory.",
        ),
    ] = None,
    cache_disk: Annotated[
        str | None,
        limits_option(
            metavar="SIZE",
            help="Disk for KV caches of running lines that do not fit in memory, e.g. 40GB; 0 for none; by default "
            "up to a quarter of free disk.",
        ),
    ] = None,
    exact: ExactOption = False,
    draft: BatchDraftOption = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output, or one of another batch.")
    ] = False,
    options: ModelOptions = NO_OPTIONS,
    ray: RayOption = None,
    ray_workers: Annotated[
        int | None, hosts_option(help="With --ray: number of workers; by default one per GPU, else one per machine.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer every line of a file: text, scores or embeddings.

    Each pass over the weights computes as many lines as memory allows. A line is {"prompt": ...}, {"messages": ...},
    {"context": ..., "continuation": ...}, {"context": ..., "choices": ...}, {"input": ...}, or a line of OpenAI's
    batch format. Tokens are chosen greedily, unless an option or the line says otherwise. Killed or interrupted, the
    same command resumes.

    Examples:
      rabbitllm batch my-checkpoint questions.jsonl -o answers.jsonl
      rabbitllm batch my-checkpoint in.jsonl -o out.jsonl --sequences 64 --exact
    """
    from rich.console import Console

    from rabbitllm.base.options import expand, parse_size
    from rabbitllm.batch_jobs.display import put_end, record, reporting_interrupts
    from rabbitllm.batch_jobs.inputs import STDIN, columns_of
    from rabbitllm.batch_jobs.items import Defaults, JobLimits, pooling_of
    from rabbitllm.batch_jobs.job import BatchJob, work

    request = options.request(model)
    cache_bytes = None if cache_memory is None else parse_size(cache_memory, "--cache-memory")
    disk_bytes = None if cache_disk is None else parse_size(cache_disk, "--cache-disk")
    limits = JobLimits(sequences, cache_bytes, exact, disk_bytes, command_draft(draft, request))
    output = expand(out)
    task = BatchJob(
        source if source == STDIN else expand(source),
        output,
        request,
        Defaults(max_new_tokens, answers.sampling, answers.stops, pooling_of(pooling), normalise, answers.thoughts),
        limits,
        columns_of(column or ()),
        overwrite,
    )
    if ray is not None:
        from rabbitllm.ray.lines import answering_on

        task = replace(task, elsewhere=answering_on(ray, request, limits, ray_workers))
    console = Console(stderr=True, highlight=False)
    try:
        with reporting_interrupts(console):
            progress = work(task)
    except KeyboardInterrupt:
        console.print("interrupted; finished answers are kept; run the same command to resume", style="yellow")
        sys.stderr.flush()
        os._exit(exit_codes.INTERRUPTED)  # the batch's thread may be in a pass, which cannot be interrupted
    if as_json:
        put_json(record(output, model, progress))
    else:
        put_end(console, output, progress)
    if 0 < progress.lines == progress.errors:  # no line has an answer
        raise typer.Exit(exit_codes.ERROR)
