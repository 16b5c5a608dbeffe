"""Fixtures of a small model of a plain family: built and split once for each package of tests that imports them.

Each `conftest.py` has its own, so that no package waits for, or finds changed, what another one has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.builders import FAMILIES, build_checkpoint
from tests.support.tiny_models import plain_model, split


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", FAMILIES["llama"], dtype=torch.float32)


@pytest.fixture(scope="package")
def split_folder(checkpoint: Path) -> Path:
    return split(checkpoint)


@pytest.fixture(scope="package")
def plain(checkpoint: Path) -> Any:
    """What plain transformers makes of the same weights."""
    return plain_model(checkpoint, dtype=torch.float32).eval()
