"""tools/strings.py finds texts of every kind."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools.strings import KINDS, all_strings, strings_of

CODE = '''
"""A module."""
def hop_command(far: Annotated[int, typer.Option(help="Metres per hop.")]) -> None:
    """Hop across a field."""
    raise HareError(f"{far} m is no hop; expected 1 to 3.", "Pass --far 2.")
    logger.warning("%s hops are slow", far)
    logger.info("hopped %d m", far)
    put_fact(console, "field", "style")
    return f"hopped {far} m in all"
'''


def test_each_kind_is_found_with_its_line() -> None:
    found = [
        (one.line, one.kind, one.text) for one in strings_of("rabbitllm/cli/hop.py", ast.parse(CODE), {"HareError"})
    ]
    assert found == [
        (3, "help", "Metres per hop."),
        (4, "help", "Hop across a field."),
        (5, "error", "… m is no hop; expected 1 to 3. | Pass --far 2."),
        (6, "warning", "… hops are slow"),
        (7, "log", "hopped … m"),
        (8, "label", "field"),
        (8, "label", "style"),
        (9, "text", "hopped … m in all"),
    ]


def test_the_package_has_texts_of_each_kind() -> None:
    found = all_strings()
    assert {one.kind for one in found} == set(KINDS)
    assert len([one for one in found if one.kind == "error"]) > 400
    assert all("\0" not in one.text for one in found)


@pytest.mark.long
def test_the_command_counts_them() -> None:
    command = [sys.executable, "-m", "tools.strings", "--kind", "help", "--words"]
    shown = subprocess.run(command, cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True).stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["help", "all"]
