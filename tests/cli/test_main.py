"""The command line as a user meets it: a process, its output, its exit code."""

from __future__ import annotations

import subprocess
import sys

from rabbitllm.version import __version__


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
