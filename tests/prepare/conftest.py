"""Two models in folders, and one on a hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub

REPO = "acme/tiny"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "model", cut(llama_tensors(), 3))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another model of the same architecture, with shards of the same names and sizes."""
    return write_shards(tmp_path / "other", cut(llama_tensors(seed=5), 3))


@pytest.fixture
def repository(tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub) -> Path:
    return write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(), 3))
