"""`rabbitllm demo`: a split and its score, on the bundled model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli import exit_codes
from rabbitllm.cli.arguments import DiskPlotOption, JsonOption, put_json


def demo(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Work here and leave the files; by default in a temporary folder.")
    ] = None,
    problems: Annotated[int, typer.Option(help="Number of held-out problems to score.", min=4)] = 200,
    plot: DiskPlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Split the bundled model shard by shard at 4bit, ask it questions, and score its answers.

    Exits with 1 if it scores too low, or if a shard is left.

    Example: rabbitllm demo --dir /tmp/rabbit
    """
    from rich.console import Console

    from rabbitllm.demo.run import as_record, run

    console = Console(stderr=as_json)
    if folder is not None:
        outcome = run(folder, problems, plot, console)
    else:
        with tempfile.TemporaryDirectory(prefix="rabbitllm-demo-") as temporary:
            outcome = run(Path(temporary), problems, plot, console)
    if as_json:
        put_json(as_record(outcome))
    if not outcome.passed:
        raise typer.Exit(exit_codes.ERROR)
