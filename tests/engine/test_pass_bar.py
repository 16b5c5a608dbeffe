"""The bar over a slow pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.engine import pass_bar
from rabbitllm.engine.pass_bar import PassBar
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import ALL, INPUT, load, split


@pytest.fixture
def every_pass_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_bar, "SLOW_SECONDS", 0)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity() for _ in range(4)])

    def forward(self, value: int, fail: bool = False) -> int:
        for number, part in enumerate(self.parts):
            if fail and number == 2:
                raise RuntimeError("in the third part")
            part(value)
        return value


def test_counts_the_units_of_a_slow_pass(every_pass_is_slow: None, capsys: pytest.CaptureFixture[str]) -> None:
    stack = Stack()
    PassBar(stack, list(stack.parts))
    stack(1)
    shown = capsys.readouterr().err
    assert "pass 1:" in shown
    assert "0/4" in shown
    stack(1)
    assert "pass 2:" in capsys.readouterr().err


def test_a_fast_pass_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stack = Stack()
    PassBar(stack, list(stack.parts))
    stack(1)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_an_exception_takes_the_bar_away(every_pass_is_slow: None, capsys: pytest.CaptureFixture[str]) -> None:
    stack = Stack()
    bar = PassBar(stack, list(stack.parts))
    with pytest.raises(RuntimeError, match="third part"):
        stack(1, fail=True)
    assert bar._bar is None
    capsys.readouterr()
    stack.parts[0](1)  # outside a pass
    assert capsys.readouterr().err == ""
    stack(1)
    assert "pass 2:" in capsys.readouterr().err


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
    capsys.readouterr()
    with torch.inference_mode():
        model(INPUT)
    assert ("pass 1:" in capsys.readouterr().err) == shown
