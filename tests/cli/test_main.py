"""The command line as a user meets it: a process, its output, its exit code."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rabbitllm.version import __version__
from tests.support.commands import invoke


def rabbitllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rabbitllm", *arguments], capture_output=True, text=True)


def test_version() -> None:
    run = rabbitllm("--version")
    assert (run.returncode, run.stdout) == (0, f"rabbitllm {__version__}\n")


def test_help_names_the_subcommands() -> None:
    run = rabbitllm("--help")
    assert run.returncode == 0
    assert "demo" in run.stdout


def test_a_wrong_option_exits_with_2() -> None:
    assert rabbitllm("demo", "--problem", "7").returncode == 2


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("pull", "x", "--delete"), "--delete-original"),
        (("pull", "x", "--sequentia"), "--sequential"),
        (("pull", "x", "--sequence"), "--sequential"),
        (("batch", "x", "y", "-o", "z", "--overwrit"), "--overwrite"),
        (("rm", "x", "--only"), "--only-copy"),
        (("rm", "x", "--yess"), "--yes"),
    ],
)
def test_no_suggestion_is_an_option_that_deletes(words: tuple[str, ...], option: str) -> None:
    result = invoke(*words, code=2)
    assert "No such option" in result.output
    assert option not in result.output.replace(f"option: {words[-1]}", "")


def test_a_harmless_option_is_suggested() -> None:
    assert "--compression" in invoke("pull", "x", "--compresion", "4bit", code=2).output


@pytest.mark.parametrize(
    ("word", "command"), [("remove", "rm"), ("delete", "rm"), ("list", "ls"), ("generate", "run"), ("serv", "serve")]
)
def test_the_command_is_named_that_another_program_calls_otherwise(word: str, command: str) -> None:
    assert f"Did you mean '{command}'?" in invoke(word, "x", code=2).output


USES_ALL = """
import sys
from rabbitllm.cli.main import main
sys.argv[1:] = ["--version"]
try:
    main()
except SystemExit:
    sys.exit(sys.stdin.read() or sys.stderr.isatty())
"""


@pytest.mark.skipif(os.name == "nt", reason="a shell")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(tmp_path: Path, closed: str) -> None:
    for words in (["-m", "rabbitllm", "ls", str(tmp_path), "--json"], ["-c", USES_ALL]):
        run = subprocess.run(
            ["sh", "-c", f"{shlex.join([sys.executable, *words])} {closed}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.skipif(os.name == "nt", reason="pipes")
@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], []])
def test_help_into_a_closed_pipe(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as out:
        run = subprocess.run([sys.executable, "-m", "rabbitllm", *words], stdout=out, stderr=subprocess.PIPE)
    assert (run.returncode, run.stderr) == (141, b"")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_memory_limit_below_torch_is_reported(limit: str, tmp_path: Path) -> None:
    """Before torch is imported, in which the process would end without a word, or with an error of the loader."""
    code = (
        f"import resource; resource.setrlimit(resource.{limit}, (200_000_000,) * 2)\n"
        "from rabbitllm.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "run", str(tmp_path), "hi"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 1
    assert process.stderr.startswith("error: This process may take ")
    assert f"({limit}, limit 200.00 MB); Python with torch takes" in process.stderr
    assert "What to do: Raise the limit" in process.stderr
    ended = subprocess.run([*command[:3], "--version"], capture_output=True, text=True, timeout=600, check=False)
    assert ended.stdout.startswith("rabbitllm ")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("run", "m", "x", "--max-new-tokens", "0"), "'--max-new-tokens': expected at least 1, not 0."),
        (("run", "m", "x", "--max-new-tokens", "two"), "'--max-new-tokens': expected a whole number, not two."),
        (("run", "m", "x", "--temperature", "hot"), "'--temperature': expected a number, not hot."),
        (("run", "m", "x", "--effort", "hgih"), "'--effort': 'hgih' is not one of 'low', 'medium', 'high'. │"),
        (("serve", "m", "--port", "70000"), "'--port': expected at most 65535, not 70000."),
    ],
)
def test_values_out_of_range_are_refused_in_our_words(words: tuple[str, ...], problem: str) -> None:
    result = invoke(*words, code=2)
    assert f"Invalid value for {problem}" in " ".join(result.output.split())
