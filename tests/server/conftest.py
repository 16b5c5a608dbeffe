"""One tiny model, split once, and what plain transformers makes of the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import Running, running
from tests.support.one_tiny_model import checkpoint, plain, split_folder
from tests.support.tiny_models import one_thread

__all__ = ["checkpoint", "one_thread", "plain", "split_folder"]


@pytest.fixture(scope="package")
def served(split_folder: Path) -> Iterator[Running]:
    with running(split_folder) as server:
        yield server
