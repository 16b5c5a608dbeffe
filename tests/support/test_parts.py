"""Every file of tests is in one part, and the parts take about as long as each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.parts import SECONDS, chosen

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_every_file_is_in_one_part(count: int) -> None:
    files = [f"test_{n}.py" for n in range(40) for _ in range(n % 5 + 1)]
    parts = [chosen(files, f"{k + 1}/{count}", {"test_3.py": 30}) for k in range(count)]
    assert sorted(file for part in parts for file in part) == sorted(set(files))


def test_parts_take_about_as_long() -> None:
    seconds = {f"test_{n}.py": 100 + 10 * n for n in range(16)}
    loads = [sum(seconds[file] for file in chosen(seconds, f"{k}/4", seconds)) for k in range(1, 5)]
    assert max(loads) - min(loads) <= 100


@pytest.mark.parametrize("part", ["", "1", "0/4", "5/4", "1/x", "-1/4", "1/4/2"])
def test_a_malformed_part(part: str) -> None:
    with pytest.raises(ValueError, match="expected k/n"):
        chosen([], part)


def test_listed_files_exist() -> None:
    assert [file for file in SECONDS if not (TESTS / file).is_file()] == []
