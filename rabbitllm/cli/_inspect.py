"""`rabbitllm inspect`: the content of a file, a folder or a repository; reads no weights and runs no pickle."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from rabbitllm.cli.arguments import JsonOption, ModelArgument, RevisionOption, put_result


def inspect_command(
    source: ModelArgument,
    name: Annotated[
        str | None,
        typer.Option(help="Show only names that contain this text; with * or ?, a pattern of the whole name."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Maximum rows; 0 for all; by default 50 on a terminal, else all.", min=0)
    ] = None,
    skip: Annotated[int, typer.Option(help="Rows to skip.", min=0)] = 0,
    opcodes: Annotated[
        bool, typer.Option("--opcodes", help="Show the opcodes of the file's pickle, also of a refused one.")
    ] = False,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tensors of a file, a checkpoint or a split.

    Also shows vocabularies, settings and pickles. Reads headers only (of a repository, by range requests) and never
    runs a pickle. Exits with 1 if a file is refused.

    Examples:
      rabbitllm inspect my-checkpoint --limit 10
      rabbitllm inspect consolidated.00.pth --name attention.wq
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
        inspection = look(source, revision=revision, opcodes=opcodes)
    if limit is None and console.is_terminal and not as_json:
        limit = ON_A_TERMINAL
    choice = RowChoice(name, skip, limit or None)
    put_result(as_json, lambda: as_record(inspection, choice), lambda console: show(inspection, choice, console))
    if inspection.refusal is not None:
        sys.stdout.flush()
        raise inspection.refusal
