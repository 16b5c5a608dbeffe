"""Check for the packages that only a server needs."""

from __future__ import annotations

import importlib.util

from rabbitllm.errors import MissingPackageError

NEEDED = ("fastapi", "uvicorn", "greenlet")


def check_installed() -> None:
    """
    Raises:
        MissingPackageError: one of them is not installed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"A server needs the package {missing[0]}, which is not installed.",
            'Install what it needs: pip install ".[serve]" in a copy of the repository.',
        )
