"""`rabbitllm bench`: the speed of generation on this machine, and the stage that limits it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli.arguments import (
    NO_OPTIONS,
    DequantizeOption,
    JsonOption,
    ModelArgument,
    ModelOptions,
    put_json,
    with_model_options,
)


@with_model_options(
    *("dtype", "max_disk", "sequential", "verify_source", "revision", "trust_remote_code"), uncompressed=True
)
def bench_command(
    model: ModelArgument,
    options: ModelOptions = NO_OPTIONS,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each sequence.", min=2)] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt, which is random.", min=1)] = 16,
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    turns: Annotated[int, typer.Option(help="Number of generations; medians are reported.", min=1)] = 3,
    exact: DequantizeOption = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the time of a further token into this file: .png, .svg or .pdf (needs matplotlib)."),
    ] = None,
    plot_tiers: Annotated[
        Path | None, typer.Option(help="Draw the placement of layers into this file, in the same formats.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write every event to this file (JSON; open it in Perfetto).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Generate greedily and tell seconds a token, bytes a token, and what the time goes into.

    A model that is not split yet is split first, exactly as AutoModel.from_pretrained does by default: in the folder of
    the checkpoint or in --dir, keeping every shard. Nothing is ever deleted. With --no-split nothing is written either.

    Example: rabbitllm bench my-checkpoint --compression 4bit --device cpu --max-memory cpu=8GiB --plot time.png
    """
    from rich.console import Console

    from rabbitllm.base.options import ShardPolicy
    from rabbitllm.bench import BenchRequest, as_record, headline, measure, show, summary
    from rabbitllm.display.pictures import check_picture, draw_pass
    from rabbitllm.engine.tier_picture import draw_placement

    for picture in filter(None, (plot, plot_tiers)):
        check_picture(picture)
    request = options.request(model, shards=ShardPolicy.KEEP, of_split={"profiling": True}, exact=exact)
    generation = BenchRequest(tokens, prompt_tokens, batch, turns)
    with Console(stderr=True).status("starting") as status:
        measured = measure(request, generation, lambda text: status.update(f"{text} …"))
    if plot is not None:
        draw_pass(measured.trace, plot, headline(measured), summary(measured))
    if plot_tiers is not None:
        draw_placement(measured.placement, plot_tiers, headline(measured))
    if trace is not None:
        measured.trace.write(trace)
    if as_json:
        put_json(as_record(measured))
    else:
        show(measured, Console(highlight=False))
