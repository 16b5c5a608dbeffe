"""`rabbitllm doctor`: the resources of this machine, the models it can run, and its problems."""

from __future__ import annotations

from typing import Annotated

import typer

from rabbitllm.cli import exit_codes
from rabbitllm.cli.arguments import JsonOption, put_result


def doctor_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the measurements; no estimates of seconds per token.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show all details of each model, also of models that do not fit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: resources, models that fit, problems.

    Shows for well-known models whether they fit and how fast they would be, and for each problem what to do. Measures
    for some seconds; changes nothing. Exits with 1 if a problem prevents every model from running.

    Examples:
      rabbitllm doctor
      rabbitllm doctor --quick --json
    """
    from rich.console import Console

    from rabbitllm.estimate.doctor.examine import examine
    from rabbitllm.estimate.doctor.records import as_record
    from rabbitllm.estimate.doctor.report import show

    with Console(stderr=True).status("checking …") as status:
        report = examine(quick=quick, every=every, on_probe=lambda name: status.update(f"checking {name} …"))
    put_result(as_json, lambda: as_record(report), lambda console: show(report, console, every=every))
    if not report.can_run:
        raise typer.Exit(exit_codes.ERROR)
