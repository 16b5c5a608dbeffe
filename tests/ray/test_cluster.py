"""What a call says where there is no Ray, or no cluster at the address; no cluster is started here."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.lib.server_process import free_port
from rabbitllm.errors import ClusterError, MissingPackageError, OptionError
from rabbitllm.ray._cluster import connected

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install '.[ray]'")


def test_missing_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"\.\[ray\]"), connected("auto"):
        pass


@needs_ray
def test_unreachable_address_is_refused() -> None:
    port = free_port()
    with pytest.raises(ClusterError, match=f"Nothing answers at 127.0.0.1:{port}"), connected(f"127.0.0.1:{port}"):
        pass


@needs_ray
@pytest.mark.parametrize("address", ["", "here", "host:", ":6379", "ray://host:10001", "host:port"])
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(OptionError, match="is not the address of a Ray cluster"), connected(address):
        pass


@needs_ray
def test_auto_uses_the_address_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ClusterError, match=r"Nothing answers at 127\.0\.0\.1:1 "), connected("auto"):
        pass
