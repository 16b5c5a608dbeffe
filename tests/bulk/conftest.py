"""A small model of a plain family, split once, and what plain transformers makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.builders import FAMILIES, build_checkpoint
from tests.support.tiny_models import load, one_thread, plain_model, split

__all__ = ["one_thread"]


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("bulk") / "llama", FAMILIES["llama"], dtype=torch.float32)


@pytest.fixture(scope="package")
def model(checkpoint: Path) -> Any:
    """One that streams most of itself."""
    return load(split(checkpoint), 60_000, dtype="float32", exact=False)


@pytest.fixture(scope="package")
def plain(checkpoint: Path) -> Any:
    return plain_model(checkpoint, dtype=torch.float32).eval()
