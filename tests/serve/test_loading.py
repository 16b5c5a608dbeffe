"""What weights leave free for keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.load import default_budget
from rabbitllm.pull.make import Wish
from rabbitllm.serve.loading import loaded, memory_beside
from tests.support.builders import build_checkpoint


def test_weights_leave_room_for_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda self: 600_000)
    weights = default_budget(CpuDevice())
    assert memory_beside("cpu", 200_000) == {"cpu": weights - 200_000}
    assert memory_beside("cpu", 1 << 40) == {"cpu": 0}

    folder = build_checkpoint(tmp_path / "llama", "llama")
    wish = Wish(name=str(folder), device="cpu")
    alone = loaded(wish, Console(quiet=True), split=True, dtype=None).model.placement
    beside = loaded(wish, Console(quiet=True), split=True, dtype=None, cache_bytes=300_000).model.placement
    assert beside.streamed_bytes > alone.streamed_bytes
    told = Wish(name=str(folder), device="cpu", max_memory={"cpu": weights})
    assert loaded(told, Console(quiet=True), split=True, dtype=None, cache_bytes=300_000).model.placement == alone
