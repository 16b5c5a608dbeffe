"""What a person sees of a split: a bar on a terminal, a line a shard elsewhere, nothing where someone else listens."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from rabbitllm import progress, split_display
from rabbitllm.progress import (
    BytesDone,
    BytesFetched,
    DownloadStarted,
    ShardDone,
    ShardStarted,
    SplitDone,
    SplitStarted,
    tell,
)
from rabbitllm.split_display import shown
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.splitting import split


class Terminal(io.StringIO):
    """A stderr that says it is one."""

    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(split_display, "REFRESH_SECONDS", 0.0)
    with shown():
        tell(SplitStarted("m", ("a", "b"), 10_000_000_000, 3_000_000_000, 0, 0))
        tell(ShardStarted("a", 1, 2))
        assert "splitting shard 1/2" in terminal.getvalue()
        tell(BytesFetched("a", 1_000_000_000))
        tell(BytesFetched("a", 1_500_000_000))
        assert terminal.getvalue().rstrip("]").endswith("fetched 2.50 GB")
        tell(BytesDone("a", 5_000_000_000))
        tell(ShardDone("a", 1, 2, "deleted", 1_500_000_000, 0))
        assert "50%" in terminal.getvalue()
        assert "disk 1.50 GB" in terminal.getvalue()
        tell(SplitDone("there", 3, 3_000_000_000, 1.0))
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")  # the line is empty again


def test_download_of_the_standard_route_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown():
        tell(DownloadStarted("m", 2, 4_000_000_000))
        tell(BytesFetched("a", 1_000_000_000))
        tell(BytesFetched("b", 2_000_000_000))
        tell(BytesFetched("b", -1_000_000_000))  # it starts over
        time.sleep(0.2)  # a bar is drawn at most ten times a second
        tell(BytesFetched("b", 1_000_000_000))
        assert "downloading:  75%" in terminal.getvalue()
        tell(SplitStarted("m", ("a", "b"), 4_000_000_000, 3_000_000_000, 0, 0))
        assert terminal.getvalue().rpartition("downloading")[2].count("splitting:   0%") == 1  # one bar at a time
        tell(SplitDone("there", 3, 3_000_000_000, 1.0))
    assert terminal.getvalue().endswith("\r")


def test_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    with shown():
        split(source)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"split {n}/3 model-0000{n}-of-00003.safetensors (deleted)" for n in (1, 2, 3)
    ]
    assert all(line.endswith(" GB") and "disk in use" in line for line in lines)


def test_nothing_where_someone_else_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    with progress.listening(lambda event: None), shown():
        split(source)
    with shown(wanted=False):
        split(write_shards(tmp_path / "other", cut(llama_tensors(), 3)))
    assert capsys.readouterr().err == ""
