"""The line over a slow pass."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.base.terminal import text_of
from rabbitllm.display import region
from rabbitllm.engine import pass_line
from rabbitllm.engine.pass_line import PassLine
from rabbitllm.telemetry.passes import PassInput
from tests.support.builders import build_checkpoint
from tests.support.screen import TerminalStream
from tests.support.tiny_models import ALL, INPUT, load, split

PROMPT = PassInput(1, 7, 0, 1)
WAIT, WORK = 0.03, 0.01


@pytest.fixture
def every_pass_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_line, "SLOW_SECONDS", 0)
    monkeypatch.setattr(region, "REFRESH_SECONDS", 0.005)
    monkeypatch.setattr(region, "LINE_SECONDS", 0.0)


class Stack(nn.Module):
    """Four units; before each of them the weights are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity() for _ in range(4)])
        self.waited = 0.0
        for part in self.parts:
            part.register_forward_pre_hook(self._bring)

    def _bring(self, module: nn.Module, args: Any) -> None:
        time.sleep(WAIT)
        self.waited += WAIT

    def forward(self, value: int, fail: type[BaseException] | None = None) -> int:
        for number, part in enumerate(self.parts):
            if fail is not None and number == 2:
                raise fail("in the third part")
            part(value)
            time.sleep(WORK)
        return value


def watched(stack: Stack) -> PassLine:
    return PassLine(list(stack.parts), lambda: (stack.waited, 0.0))


def test_lines_over_a_slow_pass(every_pass_is_slow: None, capsys: pytest.CaptureFixture[str]) -> None:
    stack = Stack()
    line = watched(stack)
    with line.over(PROMPT, None):
        stack(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    pattern = r"pass 1, 7 tokens of prompt, layer (\d) of 4, 0 s, disk (\d+) %.*"
    found = [match for text in lines if (match := re.fullmatch(pattern, text))]
    assert len(found) == len(lines)
    layers = [int(match[1]) for match in found]
    assert layers == sorted(layers)
    assert layers[0] == 1
    assert 50 < int(found[-1][2]) < 100
    assert "compute" in lines[-1]
    with line.over(PassInput(1, 1, 7, 1), None):
        stack(1)
    assert "pass 2, layer 1 of 4" in capsys.readouterr().err


def test_on_a_terminal_it_is_one_row_below_the_tokens(
    every_pass_is_slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = TerminalStream()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    stack, cache, seen = Stack(), Stack(), []
    line = watched(stack)
    stack.parts[3].register_forward_hook(lambda *args: seen.append(terminal.screen(100)))
    for number in range(3):
        with line.over(PassInput(1, 1, 7 + number, 1) if number else PROMPT, cache):
            stack(1)
        print(f"token{number} ", end="", flush=True)
        assert terminal.screen(100) == [" ".join(f"token{n}" for n in range(number + 1))]
    assert [len(rows) for rows in seen] == [1, 2, 2]
    assert re.match(r"pass 3 · layer [0-3] of 4 · \d+(\.\d+)? tokens/s · disk \d+ %", seen[2][1])
    assert seen[2][0] == "token0 token1"


def test_a_fast_pass_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stack = Stack()
    with watched(stack).over(PROMPT, None):
        stack(1)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_takes_the_line_away(
    error: type[BaseException], every_pass_is_slow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = Stack()
    line = watched(stack)
    with pytest.raises(error, match="third part"), line.over(PROMPT, None):
        stack(1, fail=error)
    assert capsys.readouterr().err
    stack.parts[0](1)  # outside a pass
    time.sleep(5 * region.REFRESH_SECONDS)
    assert capsys.readouterr().err == ""
    with line.over(PROMPT, None):
        stack(1)
    assert "pass 2, 7 tokens of prompt, layer 1 of 4" in capsys.readouterr().err


def test_a_pass_in_a_pass_is_part_of_it(every_pass_is_slow: None, capsys: pytest.CaptureFixture[str]) -> None:
    stack = Stack()
    line = watched(stack)
    with line.over(PROMPT, None), line.over(PROMPT, None):
        stack(1)
    err = capsys.readouterr().err
    assert "pass 1" in err
    assert "pass 2" not in err


@pytest.mark.parametrize("width", range(30, 130, 10))
def test_it_is_one_row_that_fits(width: int) -> None:
    line = watched(Stack())
    cache = Stack()
    with line.over(PassInput(1, 12_345, 0, 1), cache):
        (row,) = line.rows(width)
        assert "pass 1" in text_of(row)
        assert len(text_of(row)) <= width


@pytest.mark.parametrize(
    ("budget", "wanted", "shown"), [(0, True, True), (0, False, False), (ALL, True, False)], ids=str
)
def test_only_streamed_models_have_one_and_only_if_wanted(
    tmp_path: Path,
    every_pass_is_slow: None,
    capsys: pytest.CaptureFixture[str],
    budget: int,
    wanted: bool,
    shown: bool,
) -> None:
    model: Any = load(split(build_checkpoint(tmp_path, "llama")), budget, show_progress=wanted)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *args: time.sleep(0.03))
    capsys.readouterr()
    with torch.inference_mode():
        model.generate(INPUT, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    err = capsys.readouterr().err
    assert ("pass 1, " in err) == shown
    assert ("pass 3, layer" in err and "tokens/s" in err and "compute" in err) == shown
