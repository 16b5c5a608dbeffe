"""`rabbitllm doctor`: the resources of this machine, the models it can run, and its problems."""

from __future__ import annotations

from typing import Annotated

import typer

from rabbitllm.cli import exit_codes
from rabbitllm.cli.arguments import JsonOption, put_json


def doctor_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure nothing: no times of tokens, but done at once.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Everything about each model, and times also of models without room.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell what this machine has, which well-known models fit it and how fast, and what to do about what is missing.

    Measures for some seconds, and changes nothing. Exits with 1 if no model can be run before something is mended.

    Example: rabbitllm doctor --quick
    """
    from rich.console import Console

    from rabbitllm.estimate.doctor.examine import examine
    from rabbitllm.estimate.doctor.records import as_record
    from rabbitllm.estimate.doctor.report import show

    with Console(stderr=True).status("looking …") as status:
        report = examine(quick=quick, every=every, say=lambda what: status.update(f"looking at {what} …"))
    if as_json:
        put_json(as_record(report))
    else:
        show(report, Console(highlight=False), every=every)
    if not report.can_run:
        raise typer.Exit(exit_codes.ERROR)
