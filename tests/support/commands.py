"""The `rabbitllm` command in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from rabbitllm.cli.main import app


def invoke(*words: object, code: int | None = 0, columns: int | None = None, typed: str | None = None) -> Result:
    """Run the command; its errors are raised here.

    Args:
        words: the command, its arguments and options.
        code: the exit code that it must have; None for any.
        columns: width of the terminal.
        typed: standard input.
    """
    width = {"COLUMNS": str(columns)} if columns is not None else None
    result = CliRunner().invoke(app, [*map(str, words)], typed, width, catch_exceptions=False)
    assert code in (None, result.exit_code), result.output
    return result
