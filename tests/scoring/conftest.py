"""A small model of a plain family, split once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.builders import FAMILIES, build_checkpoint
from tests.support.tiny_models import one_thread, plain_model, split

__all__ = ["one_thread"]


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("scoring") / "llama", FAMILIES["llama"], dtype=torch.float32)


@pytest.fixture(scope="package")
def split_folder(checkpoint: Path) -> Path:
    return split(checkpoint)


@pytest.fixture(scope="package")
def plain(checkpoint: Path) -> Any:
    return plain_model(checkpoint, dtype=torch.float32).eval()
