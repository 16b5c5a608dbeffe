"""The benchmark of prompts beyond memory, at a scale that says nothing of speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.batch.beyond_memory import main


@pytest.mark.long
def test_a_file_makes_the_texts_that_memory_makes_in_as_few_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--scale", "tiny", "--sequences", "8", "--prompt-tokens", "160", "--tokens", "6"]
    given = [*shape, "--cache-memory", "400kB", "--weights-memory", "0", "--work-dir", str(tmp_path)]
    assert main(given) == 0
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    whole, filed, waiting = ([cell.strip() for cell in line] for line in table)
    assert (whole[3], whole[5]) == (filed[3], "0.00")
    assert int(waiting[3]) > 2 * int(filed[3])
    assert filed[6] == "8 of 8"
