"""The words of a spinner while kernels are compiled."""

from __future__ import annotations

import io

import numba
import pytest
from rich.console import Console

import rabbitllm.base.compiling  # noqa: F401  tells that something is compiled
from rabbitllm.base import progress
from rabbitllm.base.progress import COMPILING
from rabbitllm.display.wait_status import compilation_told, waiting


@pytest.mark.parametrize(("seconds", "is_said"), [(0.0, True), (600.0, False)])
def test_a_long_compilation_is_said(seconds: float, is_said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_SECONDS", seconds)
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with waiting(console, "loading [a] …") as status:
        assert str(status.__rich__()) == "loading [a] …"
        numba.njit(lambda number: number + 1)(1)
        status.say("the first token")
        expected = f"the first token … {COMPILING}" if is_said else "the first token …"
        assert str(status.__rich__()) == expected
        monkeypatch.setattr(progress, "PAUSE_SECONDS", 0.0)
        assert str(status.__rich__()) == "the first token …"
    assert "the first token …" in shown.getvalue()


@pytest.mark.parametrize(("seconds", "has_display", "lines"), [(0.0, False, 1), (0.0, True, 0), (600.0, False, 0)])
def test_a_long_compilation_is_told_once_where_no_display_shows_it(
    seconds: float, has_display: bool, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LONG_SECONDS", seconds)
    told = list[str]()
    with progress.listening(lambda event: None, shows=has_display), compilation_told(told.append):
        numba.njit(lambda number: number + 1)(1)
        numba.njit(lambda number: number + 2)(1)
    assert told == [f"{COMPILING} …"] * lines
