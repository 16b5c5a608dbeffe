"""`rabbitllm batch` as a process: what it says, and that it goes on after a kill in the middle."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.batch_jobs.journal import _answer_in
from rabbitllm.cli import exit_codes
from tests.support.commands import invoke
from tests.support.demo_models import endless_model

PATIENCE = 600
LINES = 28


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model without an end, so that every line takes as many tokens as it asks for."""
    checkpoint = endless_model(tmp_path_factory.mktemp("batch") / "demo-model")
    lines = [{"id": f"q{n}", "prompt": f"Q: {n} + {n}\nA:", "max_tokens": 3 + 7 * n % 25} for n in range(LINES)]
    (checkpoint.parent / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return checkpoint


def command(folder: Path, out: Path, *options: str) -> list[str]:
    source = folder.parent / "in.jsonl"
    start = [sys.executable, "-m", "rabbitllm", "batch", str(folder), str(source), "-o", str(out)]
    # which requests share a pass is another matter after a kill: without --exact near ties may be decided otherwise
    return [*start, "--device", "cpu", "--max-memory", "cpu=0", "--sequences", "4", "--exact", *options]


def run(folder: Path, out: Path, *options: str, code: int = 0, **extra: Any) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(command(folder, out, *options), capture_output=True, text=True, check=False, **extra)
    assert ran.returncode == code, ran.stderr
    return ran


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("expected") / "out.jsonl"
    ran = run(folder, out, "--json")
    record = json.loads(ran.stdout)
    assert (record["lines"], record["errors"], record["resumed"]) == (LINES, 0, 0)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"q{n}" for n in range(LINES)]
    assert record["new_tokens"] == sum(line["new_tokens"] for line in lines)
    return out.read_text()


def killed(folder: Path, out: Path, answers: int, how: int = signal.SIGKILL) -> subprocess.Popen[str]:
    """A run that is sent a signal when so many more answers are durable than before."""
    journal = out.with_name(out.name + ".journal")
    before = len(answered_in(journal))
    process = subprocess.Popen(command(folder, out), stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + PATIENCE
    while len(answered_in(journal)) < before + answers and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.002)
    process.send_signal(how)
    process.wait(PATIENCE)
    return process


def answered_in(journal: Path) -> list[int]:
    """Lines that have a whole answer there, in the order in which they came."""
    try:
        entries = [_answer_in(line) for line in journal.read_bytes().split(b"\n")]
    except FileNotFoundError:
        return []
    return [entry["index"] for entry in entries if entry is not None and "index" in entry]


@pytest.mark.long
def test_killed_command_is_resumed(folder: Path, expected: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert killed(folder, out, 8).returncode == -signal.SIGKILL
    assert not out.exists()
    before = answered_in(out.with_name("out.jsonl.journal"))
    assert 8 <= len(before) < LINES
    record = json.loads(run(folder, out, "--json").stdout)
    assert record["resumed"] == len(before)  # none of them is done again
    assert out.read_text() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.done"]


@pytest.mark.long
def test_repeated_kills_are_resumed(folder: Path, expected: str, tmp_path: Path) -> None:
    drawn = random.Random(5)
    for attempt in range(2):
        out = tmp_path / str(attempt) / "out.jsonl"
        out.parent.mkdir()
        journal = out.with_name("out.jsonl.journal")
        earlier: list[int] = []
        while not out.exists():
            killed(folder, out, drawn.randint(0, 12))
            now = answered_in(journal) if journal.exists() else earlier
            assert now[: len(earlier)] == earlier  # nothing is lost
            assert len(set(now)) == len(now)  # and nothing is done twice
            earlier = now
        if journal.exists():
            run(folder, out)
        assert out.read_text() == expected


@pytest.mark.long
def test_ctrl_c_says_how_to_resume(folder: Path, expected: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    process = killed(folder, out, 5, signal.SIGINT)
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.returncode == exit_codes.INTERRUPTED, errors
    assert "stopping after this pass" in errors
    assert "the same command to resume" in errors
    assert "Traceback" not in errors
    ran = run(folder, out)
    assert f"answers       {LINES} lines in" in ran.stderr
    assert "were answered before" in ran.stderr
    assert ran.stdout == ""
    assert out.read_text() == expected


@pytest.mark.long
def test_finished_output_exits_with_0(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(folder, out)
    first = out.read_bytes()
    second = run(folder, out)
    assert "all lines were answered before" in second.stderr
    assert out.read_bytes() == first


@pytest.mark.long
def test_other_options_of_an_unfinished_output_are_refused(folder: Path, expected: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    killed(folder, out, 5)
    ran = run(folder, out, "--temperature", "0.5", code=exit_codes.ERROR)
    assert "temperature was null, now 0.5" in ran.stderr
    assert "--overwrite" in ran.stderr
    out.write_text("mine")
    out.with_name("out.jsonl.journal").unlink()
    refused = run(folder, out, code=exit_codes.ERROR)
    assert re.search("^error: ", refused.stderr, re.MULTILINE)  # imported packages may print lines of their own
    assert "already exists" in refused.stderr
    assert out.read_text() == "mine"
    run(folder, out, "--overwrite")
    assert out.read_text() == expected


@pytest.mark.long
def test_from_a_pipe(folder: Path, expected: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    raw = (folder.parent / "in.jsonl").read_text()
    arguments = command(folder, out)
    arguments[arguments.index(str(folder.parent / "in.jsonl"))] = "-"
    subprocess.run(arguments, input=raw, text=True, capture_output=True, check=True)
    assert out.read_text() == expected


def test_a_job_whose_lines_all_failed_exits_with_1(folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "Q: 1 + 1\nA:", "max_tokens": wrong} for wrong in (-2, "many")]
    source = tmp_path / "in.jsonl"
    for more, code in ([], 1), ([{"prompt": "Q: 1 + 1\nA:", "max_tokens": 1}], 0):
        source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *more]))
        words = "batch", folder, source, "-o", tmp_path / f"out{code}.jsonl"
        for _ in range(1 + code):  # the second one does nothing
            assert "2 lines failed" in invoke(*words, code=code).output


@pytest.mark.long
def test_a_draft_model_is_refused_where_each_request_has_its_own_passes(folder: Path, tmp_path: Path) -> None:
    refused = run(folder, tmp_path / "out.jsonl", "--draft", str(folder), code=2)
    assert "passes of all requests together, without --exact" in refused.stderr


@pytest.mark.long
def test_options_of_answers_are_those_of_lines(folder: Path, tmp_path: Path) -> None:
    values = {"temperature": 1.4, "top_p": 0.97, "top_k": 9, "min_p": 0.01, "seed": 5, "min_tokens": 3, "stop": "zz"}
    penalties = {"repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"9": 2}}
    flags = {**values, **penalties, "logit_bias": "9=2"}
    line = {"prompt": "Q: 7 + 8\nA:", "max_tokens": 20}
    texts = []
    for number, (fields, options) in enumerate((({}, flags), ({**values, **penalties}, {}), ({}, {}))):
        source, out = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.out"
        source.write_text(json.dumps({**line, **fields}) + "\n")
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        start = [sys.executable, "-m", "rabbitllm", "batch", str(folder), str(source), "-o", str(out)]
        subprocess.run([*start, "--device", "cpu", *words], check=True, capture_output=True)
        texts.append(json.loads(out.read_text())["text"])
    assert texts[0] == texts[1] != texts[2]
