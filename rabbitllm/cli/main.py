"""The entry point: collects the subcommands, turns the package's errors into one message and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rabbitllm.cli.bench import bench_command
from rabbitllm.cli.convert import convert_command
from rabbitllm.cli.demo import demo
from rabbitllm.cli.inspect import inspect_command
from rabbitllm.cli.plan import plan_command
from rabbitllm.cli.verify import verify_command
from rabbitllm.errors import RabbitLLMError
from rabbitllm.version import __version__

EXIT_ERROR = 1
"""A `RabbitLLMError`; wrong arguments exit with 2, an interrupt with 130."""
EXIT_INTERRUPT = 130

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rabbitllm {__version__}")
        raise typer.Exit


@app.callback(help="Run language models that fit neither the GPU, nor RAM, nor (while they are prepared) the disk.")
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Options that come before a subcommand."""


app.command(name="bench")(bench_command)
app.command(name="convert")(convert_command)
app.command(name="demo")(demo)
app.command(name="inspect")(inspect_command)
app.command(name="plan")(plan_command)
app.command(name="verify")(verify_command)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except RabbitLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPT)
