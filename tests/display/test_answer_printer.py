"""Answers on a terminal and in a pipe: what a person sees, and that no letter is lost or doubled."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from rabbitllm.display.answer_printer import AnswerPrinter, WordWrap
from rabbitllm.display.region import THE_REGION
from tests.support.screen import Screen, TerminalStream


def test_text_is_printed_at_once_in_the_terminals_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    AnswerPrinter(Console(file=io.StringIO())).write("é🐇")
    assert raw.getvalue() == b"\xe9?"


@pytest.mark.skipif(os.name == "nt", reason="there are no such terminals there")
def test_terminals_get_escapes_and_pipes_get_raw_text() -> None:
    written, shown = "a\x1b[2J\u202eb می\u200cرود", "a\\x1b[2J\\u202eb می\u200cرود"
    for (reader, writer), expected in ((os.openpty(), shown), (os.pipe(), written)):
        with os.fdopen(reader, "rb", 0) as read, os.fdopen(writer, "w", encoding="utf-8") as out:
            AnswerPrinter(Console(file=io.StringIO()), out).write(written)
            assert read.read(100).decode() == expected


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
def test_a_closed_pipe_ends_printing() -> None:
    code = (
        "from rich.console import Console; from rabbitllm.display.answer_printer import AnswerPrinter\n"
        "printer = AnswerPrinter(Console(stderr=True))\nwhile True: printer.write('word ')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == b"word word "
        process.stdout.close()
        assert b"BrokenPipeError" in process.stderr.read()


def wrapped(text: str, columns: int, cuts: list[int] = []) -> list[str]:  # noqa: B006
    """Lines of a terminal after a text that came in pieces."""
    wrap = WordWrap()
    offsets = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    written = "".join(wrap.feed(text[a:b], columns) for a, b in pairwise(offsets))
    return Screen(columns).feed(written).shown


def test_lines_end_with_whole_words() -> None:
    text = "They are a carnivore and a member of the family.\n\nA line that fits\n"
    assert wrapped(text, 20) == [
        "They are a",
        "carnivore and a",
        "member of the",
        "family.",
        "",
        "A line that fits",
    ]


def test_code_and_long_words_are_left_to_the_terminal() -> None:
    code = "    x = some_function(with_arguments, more)"
    text = f"Look at this code:\n```python\n{code}\n```\nand https://example.org/a/long/address here too"
    assert wrapped(text, 20) == [
        "Look at this code:",
        "```python",
        *(code[:20], code[20:40], code[40:]),
        "```",
        "and",
        "https://example.org/",
        "a/long/address here",
        "too",
    ]


def test_wide_characters_count_two() -> None:
    lines = Screen(11).feed(WordWrap().feed("兔子是一种小型哺乳动物", 11)).lines
    assert lines == ["兔子是一种", "小型哺乳动", "物"]
    assert max(map(cell_len, lines)) < 11


@given(st.text("ab \n\t`漢-", max_size=60), st.integers(4, 30), st.lists(st.integers(0, 60), max_size=8))
def test_no_letter_is_lost_or_doubled(text: str, columns: int, cuts: list[int]) -> None:
    wide = Screen(1000).feed(WordWrap().feed(text, columns)).shown
    lines = wrapped(text, columns, cuts)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert lines == wrapped(text, columns)
    if "`" not in text:  # words of letters are whole
        words = [word for word in text.split() if len(word) < columns and word.isascii()]
        assert [word for word in words if word not in " ".join(wide).split()] == []


def test_thoughts_are_one_line_that_only_their_time_is_left_of(monkeypatch: pytest.MonkeyPatch) -> None:
    out = TerminalStream()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, out)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    printer = AnswerPrinter(Console(file=io.StringIO()))
    for tokens, piece in enumerate(("The \x1b[2Juser\n", "greets me,\n\n", "so 兔子 greet too.")):
        printer.think(piece, tokens)
    THE_REGION._show()
    assert out.screen(50) == ["thinking … 0 s, 2 tokens · me, so 兔子 greet too."]
    printer.write("Hello there, ")
    printer.write("person.")
    printer.end()
    assert out.screen(50) == ["(thought for 1 s)", "Hello there, person."]
    assert out.getvalue().endswith("\x1b[2m(thought for 1 s)\n\x1b[0mHello there, person.\n")


@pytest.mark.parametrize("is_watched", [False, True])
def test_pipes_get_the_answer_alone(is_watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out, notes = io.StringIO(), TerminalStream() if is_watched else io.StringIO()
    monkeypatch.setattr(sys, "stderr", notes)
    printer: Any = AnswerPrinter(Console(file=notes), out)
    printer.think("Why?", 0)
    printer.write("A line that is longer than most terminals, " * 5)
    printer.end()
    assert out.getvalue() == "A line that is longer than most terminals, " * 5 + "\n"
    assert ("thought for" in notes.getvalue()) == is_watched
