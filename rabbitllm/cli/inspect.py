"""`rabbitllm inspect`: the content of a file, a folder or a repository; reads no weights and runs no pickle."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from rabbitllm.cli.arguments import JsonOption, ModelArgument, RevisionOption, put_json


def inspect_command(
    source: ModelArgument,
    name: Annotated[
        str | None, typer.Option(help="Only names that contain this; with * or ? a pattern for the whole name.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Rows to show; 0 for all. By default 50 on a terminal, else all.", min=0)
    ] = None,
    skip: Annotated[int, typer.Option(help="Rows to skip before these.", min=0)] = 0,
    opcodes: Annotated[
        bool,
        typer.Option("--opcodes", help="Show the opcodes of a file's pickle instead, even of one that is refused."),
    ] = False,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the tensors, the vocabulary, the settings or the pickle of a file, of a checkpoint or of a split directory.

    Reads headers only and runs nothing; of a repository, headers by range requests. Exits with 1 for what is refused.

    Example: rabbitllm inspect consolidated.00.pth --name attention.wq
    """
    from huggingface_hub.utils import disable_progress_bars
    from rich.console import Console

    from rabbitllm.models.inspection import look
    from rabbitllm.models.inspection_report import ON_A_TERMINAL, RowChoice, as_record, show

    disable_progress_bars()  # at most an index or a config is fetched
    if isinstance(sys.stdout, io.TextIOWrapper):  # a piece that the terminal cannot encode is shown escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(highlight=False)
    with Console(stderr=True).status("reading headers …"):
        found = look(source, revision=revision, opcodes=opcodes)
    if limit is None and console.is_terminal and not as_json:
        limit = ON_A_TERMINAL
    choice = RowChoice(name, skip, limit or None)
    if as_json:
        put_json(as_record(found, choice))
    else:
        show(found, choice, console)
    if found.refusal is not None:
        sys.stdout.flush()
        raise found.refusal
