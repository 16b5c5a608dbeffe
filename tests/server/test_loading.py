"""What the weights may take when many are to be answered."""

from __future__ import annotations

import pytest

from rabbitllm.base.options import StreamOptions
from rabbitllm.engine.devices import default_budget
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.server import loading
from rabbitllm.server.loading import with_room
from tests.support.fake_gpu import FakeGpu


def test_weights_leave_room_for_requests() -> None:
    run = StreamOptions(device="cpu")
    for cache_bytes in (None, 1 << 20):
        limits = with_room(run, cache_bytes)
        assert limits is not None
        nbytes = limits["cpu"]
        assert isinstance(nbytes, int)
        least = 1 / 5 if cache_bytes is None else 1 / 10
        free = available_ram()
        assert 0 < nbytes < free * (1.05 - least)  # other processes come and go meanwhile
    everything = with_room(run, 1 << 60)
    assert everything == {"cpu": 0}


def test_a_given_limit_holds() -> None:
    assert with_room(StreamOptions(device="cpu", max_memory={"cpu": 1 << 30}), None) == {"cpu": 1 << 30}


def test_gpus_leave_their_shares_where_the_size_of_the_cache_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [FakeGpu(0, memory=8 << 30), FakeGpu(1, memory=8 << 30)]
    monkeypatch.setattr(loading, "resolve_devices", lambda device, limits: gpus)
    run = StreamOptions(device="auto")
    assert with_room(run, None) is None
    weights = default_budget(gpus[0])
    assert with_room(run, 1 << 30) == {gpu.name: weights - (1 << 29) for gpu in gpus}
