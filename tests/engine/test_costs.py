"""What the page cache may take, beside what a placement keeps in host memory."""

from __future__ import annotations

import pytest

from rabbitllm.engine import costs
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.placement import Budget, Placed, Placement, Tier
from tests.support.fake_gpu import FakeGpu


def test_page_locked_memory_is_host_memory_whatever_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "available_ram", lambda: 1000)
    gpu = FakeGpu(0)
    units = (
        Placed("a", gpu.name, Tier.RESIDENT, 500),
        Placed("b", gpu.name, Tier.PINNED, 300),
        Placed("c", gpu.name, Tier.STREAMED, 700),
        Placed("d", "cpu", Tier.RESIDENT, 20),
        Placed("e", "cpu", Tier.PACKED, 3),
        Placed("f", "cpu", Tier.STREAMED, 70),
    )
    placement = Placement(units, (Budget(gpu.name, 0, False), Budget("cpu", 0, True)))
    assert costs.cache_room(placement, [gpu, CpuDevice()]) == 1000 - 300 - 20 - 3
