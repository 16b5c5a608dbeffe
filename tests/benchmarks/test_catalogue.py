"""The list of the benchmarks, and the command that starts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.catalogue import CATALOGUE, module_of

ROOT = Path(__file__).resolve().parents[2]


def source_of(name: str) -> str:
    return (ROOT / f"{module_of(name).replace('.', '/')}.py").read_text(encoding="utf-8")


def test_every_benchmark_is_listed_and_every_one_that_is_listed_is_there() -> None:
    """A module of a subject that takes a command line is a benchmark; processes of benchmarks have `__main__`."""
    found = set()
    for path in (ROOT / "benchmarks").glob("*/*.py"):
        text = path.read_text(encoding="utf-8")
        if "\ndef main(arguments: Sequence[str] | None = None) -> int:" in text and '"__main__"' not in text:
            subject, name = path.parent.name, path.stem
            found.add(subject if subject == name else f"{subject}.{name}")
    assert found == set(CATALOGUE)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_benchmark_says_how_it_is_started(name: str) -> None:
    docstring = source_of(name).split('"""')[1]
    assert re.search(rf"^    (sudo )?python -m benchmarks {re.escape(name)}( |$)", docstring, re.MULTILINE)


def test_the_list_says_what_each_needs_and_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    for name, one in CATALOGUE.items():
        assert re.search(rf"^{re.escape(name)} +{re.escape(one.measures)}$", said, re.MULTILINE)
        assert f"takes: {one.takes}" in said


def test_a_name_that_is_unknown_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode.fast"]) == 2
    assert "decode.capped" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "python -m benchmarks list" in capsys.readouterr().out
