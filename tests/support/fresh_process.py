"""Checks in a process of their own: of memory, since other tests' may go at the same time, and of what is imported."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def in_a_fresh_process(check: Callable[..., None], *arguments: Any) -> None:
    """Call a function of a module's top level in a new process; what it raises is raised here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(check, *arguments).result(timeout=600)


def python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a new process of this Python, in the folder of the repository; it must end without an error.

    Args:
        code: the code.
        arguments: `sys.argv` after its first entry.
        options: of `subprocess.run`.
    """
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)
    assert ran.returncode == 0, ran.stderr
    return ran
