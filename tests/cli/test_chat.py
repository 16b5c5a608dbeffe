"""`rabbitllm chat` as a user meets it: over a pipe, and at a terminal with the bundled model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rabbitllm.errors import OptionError
from tests.generation.test_mtp import streamed_with_head
from tests.support import terminals
from tests.support.commands import invoke
from tests.support.demo_models import demo_model, endless_model
from tests.support.mtp_heads import build_with_head, make_predictable
from tests.support.splitting import split
from tests.support.terminals import Terminal

OF_AN_ANSWER = r"(?<![\d\[?;])(1[2-9]|[2-9]\d)"
"""Digits that are neither a count of the model's 11 units, while it is waited for, nor part of an escape sequence."""
PATIENCE = 600
"""Seconds until a test gives up on a process."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model(tmp_path_factory.mktemp("chat") / "demo-model")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model without an end: it goes on until it is stopped."""
    return endless_model(tmp_path_factory.mktemp("chat") / "endless")


def command(folder: Path, *options: str) -> list[str]:
    fixed = "chat", str(folder), "--device", "cpu", "--temperature", "0"
    return [sys.executable, "-m", "rabbitllm", *fixed, *options]


def piped(folder: Path, lines: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    line = command(folder, *options)
    return subprocess.run(line, input=lines.encode(), capture_output=True, timeout=PATIENCE, check=False)


@pytest.mark.long
def test_lines_over_a_pipe(demo: Path, tmp_path: Path) -> None:
    """Answers alone are on stdout; what went wrong is in the exit code, and the talk went on after it."""
    talk = tmp_path / "talk.json"
    lines = f"What is 12 + 7?\n/save {talk}\n/stats\n/load nowhere.json\nWhat is 20 + 22?\n"
    process = piped(demo, lines, "--max-memory", "cpu=0")
    notes = process.stderr.decode()
    assert (process.returncode, process.stdout.decode()) == (1, "19\n42\n"), notes
    assert re.search(r"moved +[\d.]+ MB from the disk", notes)
    assert "error: nowhere.json cannot be read" in notes
    assert "Traceback" not in notes
    assert json.loads(talk.read_text())["messages"][0]["content"] == "What is 12 + 7?"
    assert (demo / "model-00001-of-00012.safetensors").exists()


@pytest.mark.long
def test_options_of_answers(demo: Path) -> None:
    """Each changes the answer, or the exit code."""
    plain = piped(demo, "What is 12 + 7?\n").stdout
    assert plain == b"19\n"
    digit = AutoTokenizer.from_pretrained(demo).convert_tokens_to_ids("1")
    for options in (
        ("--logit-bias", f"{digit}=-100"),
        ("--stop", "9"),
        ("--temperature", "90", "--top-k", "0", "--seed", "3"),
        ("--ignore-eos", "--max-new-tokens", "9"),
        ("--min-tokens", "7"),
    ):
        answered = piped(demo, "What is 12 + 7?\n", *options)
        assert (answered.returncode, answered.stdout == plain) == (0, False), options
    refused = piped(demo, "What is 12 + 7?\n", "--no-thinking")
    assert refused.returncode == 2
    assert b"Thinking cannot be turned on or off" in refused.stderr


def at_a_terminal(folder: Path, *options: str) -> AbstractContextManager[Terminal]:
    return terminals.at_a_terminal(command(folder, *options), PATIENCE)


@pytest.mark.long
def test_with_a_draft_model(demo: Path) -> None:
    plain, drafted = (piped(demo, "1 + 2 =\nAnd 2 + 2 =\n", *draft) for draft in ((), ("--draft", str(demo))))
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)
    assert b"no reusable KV cache" not in drafted.stderr


@pytest.mark.long
def test_the_default_draft(demo: Path, tmp_path: Path) -> None:
    """Where layers are streamed, and no other: the text so far, or the checkpoint's heads where these fit."""
    head = make_predictable(build_with_head(tmp_path / "head", "qwen3_5"), "right")
    room = streamed_with_head(split(head))._internals.options.max_memory["cpu"]
    for folder, limit, brings in ((demo, "0", "ngram"), (head, room, "mtp"), (head, "1GB", None)):
        lines = "1 2 1 2 1 2 =\n/stats\n"
        plain, drafted = (
            piped(folder, lines, "--max-memory", f"cpu={limit}", "--max-new-tokens", "40", *draft)
            for draft in (("--draft", "none"), ())
        )
        assert (drafted.returncode, drafted.stdout) == (0, plain.stdout), drafted.stderr
        assert b"tokens a pass" not in plain.stderr
        found = re.search(rb"drafts +[\d.]+ tokens a pass(?::| by) (\w+)", drafted.stderr)
        assert (found and found[1].decode()) == brings, drafted.stderr


def stop_answer(terminal: Terminal) -> None:
    terminal.until(r"\?(\"\"\")?\r\n(?s:.*?)" + OF_AN_ANSWER)
    terminal.send("typed\x03")
    came = terminal.until(r"stopped; the partial answer stays")
    assert not re.search(r"typed|\^C", came)
    terminal.until(r">>> ")


@pytest.mark.long
def test_at_a_terminal(endless: Path, tmp_path: Path) -> None:
    """Ctrl-C stops an answer and not the conversation; at the prompt it says how to leave. Nothing is amid an answer
    that is typed meanwhile, and pasted lines are one message.
    """
    talk = tmp_path / "talk.json"
    with at_a_terminal(endless, "--max-memory", "cpu=0") as terminal:
        terminal.until(r"Ctrl-D")
        terminal.until(r">>> ")
        terminal.interrupt_until(r"/exit or Ctrl-D exits")
        terminal.until(r">>> ")
        for first, last in (("What is 12 + 7?", ""), ('"""What is', '12 + 7?"""')):
            terminal.send(f"{first}\r")
            if last:
                terminal.until(r"\.\.\. ")
                terminal.send(f"{last}\r")
            stop_answer(terminal)
        if "libedit" not in str(pytest.importorskip("readline").__doc__):
            terminal.send("\x1b[200~What is\r12 + 7?\x1b[201~\r")
            stop_answer(terminal)
            terminal.send("/undo\r")
            terminal.until(r"removed the last exchange; 2 left(?s:.*?)>>> ")
        terminal.send(f"/save {talk}\r")
        terminal.until(r"wrote 2 exchanges")
        terminal.until(r">>> ")
        terminal.send("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    messages = json.loads(talk.read_text())["messages"]
    assert [message.get("stopped", False) for message in messages] == [False, True, False, True]
    assert messages[1]["content"].strip().startswith("1")
    assert messages[2]["content"] == "What is\n12 + 7?"


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--max-memory", "24GiB"], "names no device"), (["--compression", "3bit"], "does not exist")],
)
def test_wrong_options_are_refused(demo: Path, options: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        invoke("chat", demo, *options)
