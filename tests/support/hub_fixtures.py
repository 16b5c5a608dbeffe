"""Fixtures that point this process at a local hub and at a temporary Hugging Face home.

huggingface_hub reads its environment once, when it is imported, so the environment alone would only reach
subprocesses: the values it has read, and the copies that some of its modules hold, are replaced as well. Everything is
put back at the end of the test. Works with huggingface_hub 1.33 and 2.4; knows nothing of rabbitllm.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest

from tests.support.local_hub import LocalHub

# Constants of huggingface_hub that lie under its home.
_PATHS = {
    "HF_HOME": "",
    "default_cache_path": "hub",
    "HUGGINGFACE_HUB_CACHE": "hub",
    "HF_HUB_CACHE": "hub",
    "default_assets_cache_path": "assets",
    "HUGGINGFACE_ASSETS_CACHE": "assets",
    "HF_ASSETS_CACHE": "assets",
    "default_xet_cache_path": "xet",
    "HF_XET_CACHE": "xet",
    "HF_TOKEN_PATH": "token",
    "HF_STORED_TOKENS_PATH": "stored_tokens",
    "CHECK_FOR_UPDATE_DONE_PATH": ".check_for_update_done",
    "CHECK_FOR_SKILL_UPDATE_DONE_PATH": ".check_for_skill_update_done",
    "AGENT_HARNESSES_PATH": ".agent_harnesses.json",
}
_SWITCHES = {
    "HF_HUB_OFFLINE": False,
    "HF_HUB_DISABLE_XET": True,
    "HF_HUB_DISABLE_TELEMETRY": True,
    "HF_HUB_DISABLE_UPDATE_CHECK": True,
    "HF_HUB_DISABLE_PROGRESS_BARS": True,
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": False,
}
_UNSET = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "TRANSFORMERS_OFFLINE",
    "HF_MODULES_CACHE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
)
# These copy constants when they are imported. Imported now, they hold the true values again after the test; imported
# during it, they would keep the temporary ones.
_COPYING_MODULES = (
    "huggingface_hub.hf_api",
    "huggingface_hub.utils.tqdm",
    "huggingface_hub.utils._cache_manager",
    "huggingface_hub.utils._cache_assets",
    "huggingface_hub.utils._git_credential",
    "transformers.utils.hub",
    "transformers.dynamic_module_utils",
)


@dataclass(frozen=True)
class HubEnvironment:
    """Where this process, and the subprocesses it starts, find the hub and keep its files."""

    url: str
    home: Path
    cache: Path


@pytest.fixture
def local_hub(tmp_path: Path) -> Iterator[LocalHub]:
    """A running hub that serves ``tmp_path/hub/<org>/<name>``."""
    root = tmp_path / "hub"
    root.mkdir()
    with LocalHub(root) as hub:
        yield hub


@pytest.fixture
def hub_environment(local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubEnvironment]:
    """Points huggingface_hub and transformers at ``local_hub`` and at an empty home."""
    environment = point_at(local_hub.url, tmp_path / "hf_home", monkeypatch)
    yield environment
    _forget_connections_and_listings()


def point_at(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> HubEnvironment:
    """Do what ``hub_environment`` does, for a hub made otherwise."""
    environment = HubEnvironment(url, home, home / "hub")
    paths = {name: str(home / below) for name, below in _PATHS.items()}
    _set_variables(url, paths, monkeypatch)
    for name in _COPYING_MODULES:
        importlib.import_module(name)
    values: dict[str, object] = {**paths, **_SWITCHES, "ENDPOINT": url}
    values["HUGGINGFACE_CO_URL_TEMPLATE"] = url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in _loaded("huggingface_hub"):
        for name in values.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, values[name])
    _patch_objects_made_at_import(url, home, monkeypatch)
    _forget_connections_and_listings()
    return environment


def _set_variables(url: str, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _UNSET:
        monkeypatch.delenv(name, raising=False)
    for name, path in paths.items():
        if name.startswith(("HF_", "HUGGINGFACE_")):
            monkeypatch.setenv(name, path)
    for name, switched in _SWITCHES.items():
        monkeypatch.setenv(name, str(int(switched)))
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


def _patch_objects_made_at_import(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _detect_agent, _http

    host = urlsplit(url)
    # The functions of huggingface_hub, such as model_info(), are methods of this one object.
    monkeypatch.setattr(hf_api.api, "endpoint", url)
    monkeypatch.setattr(constants, "HF_URL_HOSTS", constants.HF_URL_HOSTS | {host.hostname})
    if hasattr(_http, "_HUB_ORIGINS"):  # not in 1.33, which compares host names only
        origin = (host.scheme, host.hostname, host.port)
        monkeypatch.setattr(_http, "_HUB_ORIGINS", _http._HUB_ORIGINS | {origin})
    # Otherwise the first request of a process would be for a list of coding agents.
    monkeypatch.setattr(_detect_agent, "_registry", _detect_agent._EMPTY_REGISTRY)
    for module in _loaded("transformers"):
        if "HF_MODULES_CACHE" in vars(module):
            monkeypatch.setattr(module, "HF_MODULES_CACHE", str(home / "modules"))
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # not in 5.6


def _forget_connections_and_listings() -> None:
    """Drop what huggingface_hub keeps in memory: open connections, and the tree of every commit it has seen."""
    from huggingface_hub import _tree_cache
    from huggingface_hub.utils import _http

    _http.close_session()
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()


def _loaded(package: str) -> list[ModuleType]:
    modules = (sys.modules[name] for name in _names(package, tuple(sys.modules)))
    return [module for module in modules if isinstance(module, ModuleType)]


@functools.lru_cache(maxsize=4)
def _names(package: str, modules: tuple[str, ...]) -> list[str]:
    """Those of a package and its modules, of which some thousands are loaded and few are new to a test."""
    return [name for name in modules if name == package or name.startswith(f"{package}.")]
