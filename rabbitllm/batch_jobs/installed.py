"""Check for the packages that only batches need; imports none of them."""

from __future__ import annotations

import importlib.util

from rabbitllm.errors import MissingPackageError


def check_installed() -> None:
    """
    Raises:
        MissingPackageError: greenlet, by which lines share passes, is not installed.
    """
    if importlib.util.find_spec("greenlet") is None:
        raise MissingPackageError(
            "A batch needs the package greenlet, which is not installed.",
            'Install what it needs: pip install ".[batch]" in a copy of the repository.',
        )
