"""`rabbitllm demo`: the main job, on the bundled model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Work here and leave the files; by default in a temporary folder.")
    ] = None,
    problems: Annotated[int, typer.Option(help="How many held-out problems to score.", min=4)] = 200,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the disk in use over the split into this file (.png, .svg or .pdf).")
    ] = None,
) -> None:
    """Split the bundled model shard by shard at 4bit, ask it questions, and score its answers.

    Example: rabbitllm demo --dir /tmp/rabbit
    """
    from rabbitllm.demo.run import run

    if folder is not None:
        passed = run(folder, problems, plot)
    else:
        with tempfile.TemporaryDirectory(prefix="rabbitllm-demo-") as temporary:
            passed = run(Path(temporary), problems, plot)
    raise typer.Exit(0 if passed else 1)
