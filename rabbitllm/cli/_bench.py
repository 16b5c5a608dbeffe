"""`rabbitllm bench`: the speed of generation on this machine, and the stage that limits it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli.arguments import (
    NO_OPTIONS,
    DequantizeOption,
    DraftOption,
    JsonOption,
    ModelArgument,
    ModelOptions,
    command_draft,
    put_result,
    with_model_options,
)


@with_model_options("dtype", "max_disk", "sequential", "verify_source", "revision", "trust_remote_code")
def bench_command(
    model: ModelArgument,
    options: ModelOptions = NO_OPTIONS,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per sequence.", min=2)] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the random prompt.", min=1)] = 16,
    batch: Annotated[int, typer.Option(help="Sequences per batch.", min=1)] = 1,
    turns: Annotated[int, typer.Option(help="Number of runs; medians are reported.", min=1)] = 3,
    exact: DequantizeOption = False,
    draft: DraftOption = "none",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot where a token's time goes to this file (.png, .svg or .pdf)."),
    ] = None,
    plot_tiers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the placement of layers to this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace of all events to this file (JSON, for Perfetto).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure seconds and bytes per token, and where the time goes.

    Generation is greedy. A model without a split is split first, into --dir or the checkpoint's folder. Nothing is ever
    deleted. With --no-split nothing is written.

    Examples:
      rabbitllm bench my-checkpoint --compression 4bit
      rabbitllm bench my-checkpoint --max-memory cpu=8GB --plot time.png
    """
    from rich.console import Console

    from rabbitllm.base.options import ShardPolicy
    from rabbitllm.bench import BenchRequest, as_record, headline, measure, show, summary
    from rabbitllm.display.pictures import check_picture, draw_pass
    from rabbitllm.display.wait_status import waiting
    from rabbitllm.telemetry.profiler import check_trace

    for picture in filter(None, (plot, plot_tiers)):
        check_picture(picture)
    if trace is not None:
        check_trace(trace)
    request = options.request(model, shards=ShardPolicy.KEEP, of_split={"profiling": True}, exact=exact)
    generation, drafting = BenchRequest(tokens, prompt_tokens, batch, turns), command_draft(draft, request)
    with waiting(Console(stderr=True), "starting") as status:
        measured = measure(request, generation, status.say, drafting)
    if plot is not None:
        draw_pass(measured.trace, plot, headline(measured), summary(measured))
    if plot_tiers is not None:
        measured.placement.plot(plot_tiers, headline(measured))
    if trace is not None:
        measured.trace.write(trace)
    put_result(as_json, lambda: as_record(measured), lambda console: show(measured, console))
