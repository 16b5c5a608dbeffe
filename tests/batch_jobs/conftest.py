"""A small model of a plain family, split once, and what plain transformers makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.one_tiny_model import checkpoint, plain
from tests.support.tiny_models import load, one_thread, split

__all__ = ["checkpoint", "one_thread", "plain"]


@pytest.fixture(scope="package")
def model(checkpoint: Path) -> Any:
    """One that streams most of itself."""
    return load(split(checkpoint), 60_000, dtype="float32", exact=False)
