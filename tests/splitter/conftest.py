"""Fixtures of the splitter's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from rabbitllm.storage import files
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.one_thread import one_thread as one_thread
from tests.support.scenes import Route, Scene, scene_in_folder, scene_on_hub

MakeScene = Callable[..., Scene]
"""(route, tensors=None, others=None) -> scene"""


@pytest.fixture
def one_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of a shard's layer files is open at a time, so each is synced and closed for the next."""
    monkeypatch.setattr(files, "MAX_FILES", 1)


@pytest.fixture
def make_scene(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> MakeScene:
    """Makes the scene of a route, from a folder or from the local hub."""

    def make(
        route: Route,
        tensors: Mapping[str, torch.Tensor] | None = None,
        sidecars: Mapping[str, bytes] | None = None,
    ) -> Scene:
        if route.hub:
            return scene_on_hub(local_hub, hub_environment, tmp_path / "hub", route, tensors, sidecars)
        return scene_in_folder(tmp_path, route, tensors, sidecars)

    return make
