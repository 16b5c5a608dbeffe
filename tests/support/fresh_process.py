"""Checks of memory in a process of their own: in one that ran other tests, theirs may go at the same time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_a_fresh_process(check: Callable[..., None], *arguments: Any) -> None:
    """Call a function of a module's top level in a new process; what it raises is raised here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(check, *arguments).result(timeout=600)
