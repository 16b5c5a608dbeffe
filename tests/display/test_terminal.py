"""Rows on a terminal, and output of other code meanwhile, on an emulated screen."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from rabbitllm.base.terminal import Row
from rabbitllm.display.region import DisplayForm, Terminal, column_after, form_of
from tests.support.screen import Screen, TerminalStream

WIDTH = 40


def as_output(monkeypatch: pytest.MonkeyPatch) -> TerminalStream:
    """stderr and stdout at once, as on a terminal; in a test, not before: pytest sets both as it begins."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm")
    terminal = TerminalStream()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


def begin(monkeypatch: pytest.MonkeyPatch) -> tuple[Terminal, TerminalStream]:
    stream = as_output(monkeypatch)
    return Terminal(stream, threading.RLock()), stream


def rows(*texts: str) -> list[Row]:
    return [((text, "bold"),) for text in texts]


def test_rows_change_in_place_and_are_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stream = begin(monkeypatch)
    print("before")
    terminal.paint(rows("one", "two, which is long"))
    assert stream.screen(WIDTH) == ["before", "one", "two, which is long"]
    terminal.paint(rows("three"))
    assert stream.screen(WIDTH) == ["before", "three"]
    terminal.erase()
    print("after")
    assert stream.screen(WIDTH) == ["before", "after"]


def test_unchanged_rows_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stream = begin(monkeypatch)
    terminal.paint(rows("one"))
    length = len(stream.getvalue())
    terminal.paint(rows("one"))
    assert len(stream.getvalue()) == length


def test_lines_of_other_code_are_whole_above_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stream = begin(monkeypatch)
    terminal.paint(rows("one", "two"))
    print("a warning", file=sys.stderr)
    long = "a line that is much longer than the terminal is wide"
    print(long, file=sys.stderr)
    assert stream.screen(WIDTH) == ["a warning", long[:WIDTH], long[WIDTH:], "one", "two"]


def test_growing_line_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stream = begin(monkeypatch)
    text = ""
    for index in range(30):  # tokens as they come, over several lines
        token = f"word{index} "
        text += token
        print(token, end="", flush=True)
        terminal.paint(rows(f"pass {index}"))
        shown = stream.screen(WIDTH)
        assert shown[-1] == f"pass {index}"
        assert "".join(line.ljust(WIDTH) for line in shown[:-1]).rstrip() == text.rstrip()
    terminal.erase()
    print()
    assert len(stream.screen(WIDTH)) == -(-len(text) // WIDTH)


def test_line_that_ends_at_the_right_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stream = begin(monkeypatch)
    print("x" * WIDTH, end="")
    terminal.paint(rows("one"))
    assert stream.screen(WIDTH) == ["x" * WIDTH, "one"]
    print()  # ends that line, and makes no empty one
    print("y" * WIDTH, end="")
    terminal.paint(rows("two"))
    print("z")
    assert stream.screen(WIDTH) == ["x" * WIDTH, "y" * WIDTH, "z", "two"]


WRITES = st.lists(
    st.one_of(
        st.text("ab\n", max_size=50).map(lambda text: ("write", text)),
        st.integers(0, 3).map(lambda count: ("paint", str(count))),
    ),
    max_size=25,
)


@given(WRITES)
def test_written_text_equals_that_without_rows(steps: list[tuple[str, str]]) -> None:
    stream = TerminalStream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(WIDTH))
        patch.setenv("LINES", "24")
        patch.setattr(sys, "stdout", stream)
        terminal = Terminal(stream, threading.RLock())
        written = ""
        for action, value in steps:
            if action == "write":
                stream.write(value)
                written += value
            else:
                terminal.paint(rows(*["row"] * int(value)))
        terminal.erase()
    assert stream.screen(WIDTH) == Screen(WIDTH).feed(written).shown


def test_rows_are_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stream = begin(monkeypatch)
    terminal.paint(rows("x" * 100, "宽" * 100))
    first, second = stream.screen(WIDTH)
    assert first == "x" * (WIDTH - 1)
    assert second == "宽" * ((WIDTH - 1) // 2)
    terminal.erase()
    monkeypatch.setenv("LINES", "3")
    terminal.paint(rows("1", "2", "3", "4"))
    assert stream.screen(WIDTH) == ["1", "2"]


def test_without_utf8_and_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    raw = io.BytesIO()

    class Latin(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    stream = Latin(raw, encoding="latin-1")
    Terminal(stream, threading.RLock()).paint([(("━━─ · ", "bold"),)])
    assert b"==. | " in raw.getvalue()
    assert b"\x1b[1m" not in raw.getvalue()


@pytest.mark.parametrize("columns", [WIDTH - 10, WIDTH])
def test_tqdm_bar_stays_in_its_line_above_the_rows(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    terminal, stream = begin(monkeypatch)
    terminal.paint(rows("ours"))
    bar = tqdm(total=4, desc="theirs", file=sys.stderr, ncols=columns, mininterval=0)
    for step in range(1, 5):
        bar.update()
        shown = stream.screen(WIDTH)
        assert shown[0].startswith(f"theirs: {25 * step:3}%")
        assert shown[1:] == ["ours"]
    bar.close()
    terminal.erase()
    (line,) = stream.screen(WIDTH)
    assert line.startswith("theirs: 100%")


def test_streams_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stream = begin(monkeypatch)
    assert "write" in vars(stream)
    terminal.paint(rows("one"))
    terminal.detach()
    assert "write" not in vars(stream)
    assert stream.screen(WIDTH) == []


@pytest.mark.parametrize(
    ("column", "text", "after"),
    [
        (0, "abc", 3),
        (3, "", 3),
        (3, "\n", 0),
        (3, "x\ny", 1),
        (38, "ab", 40),
        (38, "abc", 1),
        (0, "a\tb", 9),
        (5, "\rab", 2),
        (0, "\x1b[1mab\x1b[0m", 2),
        (0, "宽", 2),
    ],
)
def test_columns(column: int, text: str, after: int) -> None:
    assert column_after(column, text, WIDTH) == after


def test_forms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream = as_output(monkeypatch)
    assert form_of(stream, {"TERM": "xterm"}) is DisplayForm.TERMINAL
    assert form_of(stream, {"TERM": "dumb"}) is DisplayForm.LINES
    assert form_of(stream, {"JPY_PARENT_PID": "7"}) is DisplayForm.LINES
    assert form_of(None, {}) is DisplayForm.LINES
    with (tmp_path / "log").open("w") as file:
        assert form_of(file, {}) is DisplayForm.LINES


def test_lines_while_rich_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = as_output(monkeypatch)
    from rich.console import Console
    from rich.live import Live

    with Live("something", console=Console(file=stream), redirect_stderr=True):
        assert form_of(sys.stderr, {}) is DisplayForm.LINES
    assert form_of(sys.stderr, {}) is DisplayForm.TERMINAL
