"""The display of a split and of a check: rows on a terminal, lines elsewhere, none beside another display."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rabbitllm.base import progress
from rabbitllm.base.progress import (
    BytesDone,
    BytesFetched,
    CurrentRates,
    DiskSampled,
    DownloadStarted,
    KernelsCompiling,
    ShardStarted,
    SplitDone,
    SplitStarted,
    SplitStats,
    tell,
)
from rabbitllm.base.terminal import text_of
from rabbitllm.display import region
from rabbitllm.display.split_display import ReadingDisplay, SplitDisplay, line_of, rows_of, shown
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.screen import TerminalStream
from tests.support.splitting import split

MB, GB = 10**6, 10**9
FACTS = SplitStats(
    doing="splitting",
    label="org/model",
    done_bytes=60 * GB,
    total_bytes=145 * GB,
    rates=CurrentRates(118 * MB, 121 * MB, 118 * MB, 33 * MB),
    seconds_left=724,
    disk_bytes=21 * GB,
    limit_bytes=57 * GB,
    shard=13,
    shards=37,
    shard_here=0.64,
    layer="layers.27",
    layers_done=26,
    layers=83,
)
SPLIT = SplitStarted("m", ("a", "b"), 10 * GB, 3 * GB, 0, 0, (5 * GB, 5 * GB), 8)


def test_rows_of_a_terminal() -> None:
    rows = [text_of(row) for row in rows_of(FACTS, 79)]
    assert rows[0].startswith("splitting ━━━")
    assert rows[0].endswith("─ 41 % · 118 MB/s · 12 min left")
    assert rows[1:] == [
        "60.0 of 145.0 GB · shard 13 of 37 · 64 % downloaded · layers.27 · 26 of 83 layers"[:79].rpartition(" · ")[0],
        "disk in use 21.0 of 57.0 GB",
        "fetch 121 MB/s · quantize 118 MB/s · write 33.0 MB/s",
    ]


@pytest.mark.parametrize("width", range(40, 140))
def test_rows_fit_and_keep_important_pieces(width: int) -> None:
    rows = [text_of(row) for row in rows_of(FACTS, width)]
    assert len(rows) <= 4
    assert max(map(len, rows)) <= width
    text = "\n".join(rows)
    for fact in ("41 %", "12 min left", "60.0 of 145.0 GB", "disk in use 21.0 of 57.0 GB", "fetch 121 MB/s"):
        assert fact in text


def test_line_has_all_pieces() -> None:
    assert line_of(FACTS) == (
        "splitting 41 %, 118 MB/s, 12 min left, 60.0 of 145.0 GB, shard 13 of 37, 64 % downloaded, layers.27, "
        "26 of 83 layers, disk in use 21.0 of 57.0 GB, fetch 121 MB/s, quantize 118 MB/s, write 33.0 MB/s"
    )


def test_display_before_the_first_event() -> None:
    assert line_of(SplitStats(total_bytes=GB)) == "splitting 0 %, 1.00 GB"
    stalled = SplitStats(total_bytes=GB, rates=CurrentRates(0.0, 0.0, 0.0, 0.0), disk_bytes=9, limit_bytes=57 * GB)
    assert line_of(replace(stalled, shards=2, layers=8)) == "splitting 0 %, waiting, 1.00 GB, shard 1 of 2"


@pytest.mark.parametrize("seconds", [0.0, 600.0])
def test_kernels_that_are_compiled_for_long_are_named(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_SECONDS", seconds)
    display = SplitDisplay()
    display(replace(SPLIT, shards=()))
    display(KernelsCompiling())
    assert display.line().startswith("splitting " if seconds else "preparing kernels (once per installation) 0 %, ")
    display(BytesDone("a", GB, "layers.0"))
    assert display.line().startswith("splitting ")


def test_split_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalStream()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(region, "REFRESH_SECONDS", 0.01)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with shown():
        tell(DownloadStarted("m", 2, 4 * GB))
        tell(BytesFetched("a", 3 * GB))
        wait_for(terminal, "3.00 of 4.00 GB")
        assert terminal.screen(80)[0].startswith("downloading ━━")
        tell(DiskSampled(GB, 57 * GB))
        tell(SPLIT)
        tell(ShardStarted("a", 1, 2))
        tell(BytesDone("a", 2 * GB, "layers.3"))
        wait_for(terminal, "20 %")
        rows = terminal.screen(80)
        assert len(rows) == 3 + ("fetch" in rows[-1])
        assert rows[1].startswith("2.0 of 10.0 GB · shard 1 of 2 · ")
        assert rows[2] == "disk in use 1.0 of 57.0 GB"
        tell(SplitDone("there", 8, 3 * GB, 61.0, 4 * GB))
    assert terminal.screen(80) == ["split into 8 layer files, 3.00 GB, in 1 min 01 s; peak disk 4.00 GB"]


def wait_for(terminal: TerminalStream, text: str) -> None:
    end = time.monotonic() + 600
    while not any(text in line for line in terminal.screen(80)):
        assert time.monotonic() < end, terminal.screen(80)
        time.sleep(0.005)


def test_error_removes_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalStream()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    seen = []

    def break_off() -> None:
        with shown():
            tell(SPLIT)
            seen.extend(terminal.screen(80))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert seen
    assert terminal.screen(80) == []


def test_split_without_a_terminal_prints_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    with shown():
        split(source)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("split into 6 layer files, 0.")


def test_lines_every_few_seconds_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(region, "REFRESH_SECONDS", 0.005)
    monkeypatch.setattr(region, "LINE_SECONDS", 0.02)
    with shown():
        tell(SPLIT)
        tell(BytesDone("a", 2 * GB, "layers.3"))
        end = time.monotonic() + 600
        lines: list[str] = []
        while len(lines) < 3 and time.monotonic() < end:
            lines += capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert all(line.startswith("splitting 20 %, ") and "2.0 of 10.0 GB, shard 1 of 2" in line for line in lines)


def test_complete_split_shows_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with shown():
        tell(SplitStarted("m", (), GB, GB, 0, 2))
        tell(SplitDone("there", 8, GB, 0.1))
    assert capsys.readouterr().err == ""


def test_second_display_shows_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    with progress.listening(lambda event: None), shown():
        split(source)
    with shown(enabled=False):
        split(write_shards(tmp_path / "other", cut(llama_tensors(), 3)))
    assert capsys.readouterr().err == ""


def test_event_listener_does_not_replace_the_display(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    with progress.listening(lambda event: None, shows=False), shown():
        split(source)
    assert "split into 6 layer files" in capsys.readouterr().err


# The check of layer files


def at(seconds: list[float], total: int = 4 * GB) -> ReadingDisplay:
    return ReadingDisplay(total, lambda: seconds[0])


def test_row_of_a_read_has_share_speed_and_time() -> None:
    clock = [100.0]
    reading = at(clock)
    reading.add(600 * MB)
    reading.add(400 * MB)
    clock[0] = 102.0
    (row,) = reading.rows(100)
    text = text_of(row)
    assert text.startswith("reading ━━━━━━━━━━━━───")
    assert text.endswith(" 25 % · 1.00 of 4.00 GB · 500 MB/s · 6 s left")
    assert reading.line() == "reading 25 %, 1.00 of 4.00 GB, 500 MB/s, 6 s left"


def test_rows_fit_every_width() -> None:
    clock = [0.0]
    reading = at(clock)
    reading.add(123_456_789)
    clock[0] = 3.0
    for width in range(20, 121):
        (row,) = reading.rows(width)
        assert len(text_of(row)) <= width
        assert "3 %" in text_of(row)


def test_read_of_zero_bytes_and_before_the_first() -> None:
    assert text_of(at([5.0]).rows(80)[0]).endswith(" 0 % · 0.00 of 4.00 GB · 0 MB/s")
    assert "100 %" in at([5.0], 0).line()
