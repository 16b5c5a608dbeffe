"""The benchmark of drafts, in small."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.decode.drafts import (
    MODEL,
    PEER,
    PEER_MODEL,
    PEERS,
    PLAIN,
    PLAIN_INSIDE,
    ROWS,
    SELF,
    WRONG,
    WRONG_INSIDE,
    Answer,
    answer,
    files_of,
    load,
    main,
    rates,
)
from tests.support.always_drafts import always_drafts  # noqa: F401  a fixture that applies by itself
from tests.support.splitting import layer_files, split

DEMO = Path(__file__).resolve().parents[2] / "rabbitllm" / "demo" / "model"


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smallest", "--draft", str(DEMO)]) == 0
    lines = {line.partition("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    for row in ROWS:
        assert (f"{row}, prose, 0.7" in lines) == (row not in (SELF, *PEERS))
    assert any(line.startswith("self: ") and " are lacking for the smallest " in line for line in lines.values())
    # the same model as the draft, and one that is never right
    assert "100%" in lines[f"{MODEL}, code, 0.0"]
    for row in (WRONG, WRONG_INSIDE):
        assert lines[f"{row}, code, 0.0"].split()[-1] == "0%"
        assert any(line.startswith(f"{row}, of the rate without a draft: ") for line in lines.values())
    assert any("equal to those without a draft: 8 of 8" in line for line in lines)


def test_a_split_folder_is_streamed_from_files_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What leaves the page cache, and the memory that they get, is that of the files that passes read."""
    folder = split(shutil.copytree(DEMO, tmp_path / "demo"), tmp_path / "given")
    caplog.set_level("INFO", "rabbitllm")
    subjects = load(Namespace(model=folder, draft=None, compression=None, share=0.25), tmp_path, [PLAIN])
    given, files = layer_files(folder), files_of(tmp_path, "model")
    assert {path.name: path.read_bytes() for path in files}.items() <= given.items()
    assert subjects.room == round(sum(path.stat().st_size for path in files) / 4)
    assert subjects.streamed.placement.moved_bytes
    assert "A byte past the page cache takes" in caplog.text  # however much memory this machine has
    shutil.rmtree(folder)
    assert len(answer(subjects.streamed, None, PLAIN, "code", 0.0, 0, 4, files).ids) == 4


def test_rates_are_those_of_the_same_turn() -> None:
    def of(row: str, turn: int, seconds: float) -> Answer:
        return Answer(row, "code", 0.0, turn, seconds, 7, 8)

    answers = [of(PLAIN, 1, 4.0), of(PLAIN, 2, 2.0), of(WRONG, 1, 5.0), of(WRONG, 2, 1.0), of(WRONG, 3, 1.0)]
    assert rates(answers, answers[2:]) == pytest.approx([0.8, 2.0])
    # in memory beside that in memory, and llama.cpp's beside its own
    inside, peers = [of(PLAIN_INSIDE, 1, 1.0), of(WRONG_INSIDE, 1, 2.0)], [of(PEER, 1, 8.0), of(PEER_MODEL, 1, 2.0)]
    assert rates([*answers, *inside, *peers], [inside[1], *peers]) == pytest.approx([0.5, 0.5, 4.0])
