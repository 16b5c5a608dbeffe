"""The line over a slow pass, from the arguments of a forward, and from entries and seconds that the test gives."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, StaticCache

from rabbitllm.base.terminal import text_of
from rabbitllm.display import region
from rabbitllm.engine import pass_line
from rabbitllm.engine.pass_line import PassLedger, PassLine, pass_input_of
from rabbitllm.telemetry.passes import PassInput
from tests.support.builders import build_checkpoint
from tests.support.screen import TerminalStream
from tests.support.tiny_models import ALL, INPUT, load, split

IDS = torch.ones(3, 7, dtype=torch.long)
CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1)


def filled(cache: Any) -> Any:
    states = torch.ones(3, 1, 5, 8)
    cache.update(states, states, 0)
    return cache


@pytest.mark.parametrize(
    ("args", "kwargs", "entry"),
    [
        ((IDS,), {}, PassInput(3, 7)),
        ((), {"input_ids": IDS}, PassInput(3, 7)),
        ((), {"input_ids": None, "inputs_embeds": torch.ones(3, 7, 8)}, PassInput(3, 7)),
        ((), {"input_ids": torch.ones(3, 90), "decoder_input_ids": IDS}, PassInput(3, 7)),
        ((), {"input_ids": IDS, "logits_to_keep": 2}, PassInput(3, 7, None, 2)),
        ((), {"input_ids": IDS, "logits_to_keep": 0}, PassInput(3, 7)),  # all of them
        ((), {"input_ids": IDS, "past_key_values": DynamicCache()}, PassInput(3, 7, 0)),
        ((), {"input_ids": IDS, "past_key_values": filled(DynamicCache())}, PassInput(3, 7, 5)),
        ((), {"input_ids": IDS, "past_key_values": filled(StaticCache(CONFIG, max_cache_len=9))}, PassInput(3, 7, 5)),
        ((), {"encoder_outputs": object()}, PassInput(1, 0)),
    ],
)
def test_entries(args: tuple[Any, ...], kwargs: dict[str, Any], entry: PassInput) -> None:
    assert pass_input_of(args, kwargs) == (entry, kwargs.get("past_key_values"))


def test_cache_without_a_length() -> None:
    class Silent:
        def get_seq_length(self) -> int:
            raise ValueError

    cache = Silent()
    assert pass_input_of((), {"input_ids": IDS, "cache_params": cache}) == (PassInput(3, 7), cache)


class Cache:
    """Stands for a KV cache: an object that is the same, or another."""


def test_token_rate() -> None:
    ledger, cache = PassLedger(4), Cache()
    assert ledger.begin(PassInput(1, 100, 0, 1), cache, 10.0)
    assert (ledger.number, ledger.prompt, ledger.tokens, ledger.tokens_per_second(12.0)) == (1, 100, 0, None)
    assert ledger.seconds(12.0) == 2
    for index in range(5):  # the prompt takes 30 s, each token 2
        assert not ledger.begin(PassInput(1, 1, 100 + index, 1), cache, 40.0 + 2 * index)
    assert (ledger.number, ledger.prompt, ledger.tokens) == (6, 0, 5)
    assert ledger.tokens_per_second(49.0) == 4 / 9  # the first came of the prompt


def test_accepted_candidates_count() -> None:
    ledger, cache = PassLedger(4), Cache()
    ledger.begin(PassInput(1, 10, 0, 1), cache, 0.0)
    ledger.begin(PassInput(1, 4, 10, 4), cache, 10.0)  # three candidates
    ledger.begin(PassInput(1, 4, 13, 4), cache, 12.0)  # two of them were right, and one token more came
    assert ledger.tokens == 4
    assert ledger.tokens_per_second(12.0) == 1.5


def test_counts_of_another_sequence_begin_at_zero() -> None:
    ledger, first, second = PassLedger(4), Cache(), Cache()
    ledger.begin(PassInput(2, 10, 0, 1), first, 0.0)
    ledger.begin(PassInput(2, 1, 10, 1), first, 1.0)
    ledger.begin(PassInput(2, 1, 11, 1), first, 2.0)
    assert ledger.tokens == 4
    assert ledger.begin(PassInput(2, 10, 0, 1), second, 5.0)
    assert (ledger.number, ledger.prompt, ledger.tokens) == (4, 20, 0)
    assert ledger.begin(PassInput(1, 10), None, 7.0)
    assert ledger.begin(PassInput(1, 11), None, 8.0)  # without a cache nothing is known of the sequence
    assert ledger.tokens_per_second(9.0) is None


def test_shares_of_time() -> None:
    ledger, cache = PassLedger(2), Cache()
    ledger.begin(PassInput(1, 10, 0, 1), cache, 0.0)
    assert ledger.shares == {}
    ledger.spend(disk=6, dequantize=1)
    ledger.spend(compute=3)
    ledger.unit_done()
    assert ledger.layer == 1
    assert ledger.shares == {"disk": 0.6, "copies": 0, "dequantize": 0.1, "compute": 0.3}
    ledger.begin(PassInput(1, 1, 10, 1), cache, 10.0)  # a further token is another thing
    assert ledger.layer == 0
    ledger.spend(copies=1)
    ledger.begin(PassInput(1, 1, 11, 1), cache, 11.0)  # and the next one is the same
    assert ledger.shares["copies"] == 1


PROMPT = PassInput(1, 7, 0, 1)
WAIT, WORK = 0.03, 0.01


@pytest.fixture
def every_pass_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_line, "SLOW_SECONDS", 0)
    monkeypatch.setattr(region, "REFRESH_SECONDS", 0.005)
    monkeypatch.setattr(region, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(region, "SHARE_BETWEEN_LINES", 0.0)


def tick() -> None:
    """Show what is claimed, as the region's thread does; a busy machine may keep that one waiting."""
    with region.THE_REGION._lock:
        region.THE_REGION._show()


class Stack(nn.Module):
    """Four units; before each of them the weights are waited for. It has a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity() for _ in range(4)])
        self.now = self.waited = 0.0
        for part in self.parts:
            part.register_forward_pre_hook(self._bring)

    def _bring(self, module: nn.Module, args: Any) -> None:
        self.now += WAIT
        self.waited += WAIT
        tick()

    def forward(self, value: int, fail: type[BaseException] | None = None) -> int:
        for index, part in enumerate(self.parts):
            if fail is not None and index == 2:
                raise fail("in the third part")
            part(value)
            self.now += WORK
            tick()
        return value


def watched(stack: Stack) -> PassLine:
    return PassLine(list(stack.parts), lambda: (stack.waited, 0.0), lambda: stack.now)


def test_lines_of_a_slow_pass(every_pass_is_slow: None, capsys: pytest.CaptureFixture[str]) -> None:
    stack = Stack()
    line = watched(stack)
    with line.over(PROMPT, None):
        stack(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    pattern = r"pass 1, 7 tokens of prompt, layer (\d) of 4, 0 s, disk (\d+) %.*"
    matches = [match for text in lines if (match := re.fullmatch(pattern, text))]
    assert len(matches) == len(lines)
    layers = [int(match[1]) for match in matches]
    assert layers == sorted(layers)
    assert layers[0] == 1
    assert 50 < int(matches[-1][2]) < 100
    assert "compute" in lines[-1]
    with line.over(PassInput(1, 1, 7, 1), None):
        stack(1)
    assert "pass 2, layer 1 of 4" in capsys.readouterr().err


def test_terminal_has_one_row_below_the_tokens(every_pass_is_slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalStream()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    stack, cache, seen = Stack(), Stack(), []
    line = watched(stack)
    stack.parts[3].register_forward_hook(lambda *args: seen.append(terminal.screen(100)))
    for index in range(3):
        with line.over(PassInput(1, 1, 7 + index, 1) if index else PROMPT, cache):
            stack(1)
        print(f"token{index} ", end="", flush=True)
        assert terminal.screen(100) == [" ".join(f"token{n}" for n in range(index + 1))]
    assert [len(rows) for rows in seen] == [1, 2, 2]
    assert re.match(r"pass 3 · layer [0-3] of 4 · \d+(\.\d+)? tokens/s · disk \d+ %", seen[2][1])
    assert seen[2][0] == "token0 token1"


def test_fast_pass_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    stack = Stack()
    with watched(stack).over(PROMPT, None):
        stack(1)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exception_removes_the_line(
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


def test_nested_pass_is_part_of_the_outer_one(every_pass_is_slow: None, capsys: pytest.CaptureFixture[str]) -> None:
    stack = Stack()
    line = watched(stack)
    with line.over(PROMPT, None), line.over(PROMPT, None):
        stack(1)
    err = capsys.readouterr().err
    assert "pass 1" in err
    assert "pass 2" not in err


@pytest.mark.parametrize("width", range(30, 130, 10))
def test_line_is_one_row_that_fits(width: int) -> None:
    line = watched(Stack())
    cache = Stack()
    with line.over(PassInput(1, 12_345, 0, 1), cache):
        (row,) = line.rows(width)
        assert "pass 1" in text_of(row)
        assert len(text_of(row)) <= width


@pytest.mark.parametrize(
    ("budget", "show_progress", "shown"), [(0, True, True), (0, False, False), (ALL, True, False)], ids=str
)
def test_only_streamed_models_show_progress(
    tmp_path: Path,
    every_pass_is_slow: None,
    capsys: pytest.CaptureFixture[str],
    budget: int,
    show_progress: bool,
    shown: bool,
) -> None:
    model: Any = load(split(build_checkpoint(tmp_path, "llama")), budget, show_progress=show_progress)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *args: tick())
    capsys.readouterr()
    with torch.inference_mode():
        model.generate(INPUT, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    err = capsys.readouterr().err
    assert ("pass 1, " in err) == shown
    assert ("pass 3, layer" in err and "tokens/s" in err and "compute" in err) == shown
