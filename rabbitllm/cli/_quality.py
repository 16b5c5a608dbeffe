"""`rabbitllm quality`: the loss of a compressed model against the uncompressed one."""

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
    limits_of,
    put_result,
    with_model_options,
)


@with_model_options("dtype", "max_disk", "sequential", "no_split", "verify_source", "fast_bfloat16")
def quality_command(
    model: ModelArgument,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model to compare with; by default the uncompressed original.")
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="UTF-8 text; by default a bundled one.")] = None,
    options: ModelOptions = NO_OPTIONS,
    window: Annotated[
        int | None, typer.Option(help="Tokens per window; by default 512, or the context length if shorter.", min=2)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Maximum tokens to predict.", min=16)] = 4096,
    problems: Annotated[
        int | None,
        typer.Option(
            help="Held-out problems for the bundled models, a multiple of 4; by default 400, or 0 with --text.", min=0
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Dtype of the computation; auto takes the config's.")
    ] = "float32",
    exact: DequantizeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the loss by compression, against the original.

    Reports the distance of next-token distributions (KL divergence) and perplexity. Both models may be larger than
    memory: each takes one pass over its weights, layer by layer. A model without a split is split first; the shards
    are kept.

    Examples:
      rabbitllm quality my-checkpoint --compression 4bit
      rabbitllm quality my-checkpoint --compression 8bit --text chapter.txt
    """
    from rich.console import Console

    from rabbitllm.display.wait_status import waiting
    from rabbitllm.evaluation.quality import quality, show

    with waiting(Console(stderr=True), "starting") as status:
        result = quality(
            model,
            against,
            text=text,
            compression=options.compression,
            window=window,
            tokens=tokens,
            problems=problems,
            device=options.device,
            max_memory=limits_of(options.max_memory),
            dtype=None if dtype == "auto" else dtype,
            exact=exact,
            layer_shards_saving_path=options.folder,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            verify_checksums=not options.no_verify_checksums,
            say=status.say,
        )
    put_result(as_json, result.as_json, lambda console: show(result, console))
