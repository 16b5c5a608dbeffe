"""What is freed between what stays is given back."""

from __future__ import annotations

import asyncio

import psutil
import pytest
import torch

from rabbitllm.server import server

BLOCK, COUNT = 16 << 10, 12_000

pytestmark = pytest.mark.skipif(server.trimming() is None, reason="no glibc here")


def test_what_lies_between_blocks_in_use_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "EVERY_SECONDS", 0.01)
    process = psutil.Process()
    blocks = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(COUNT)]
    stays = blocks[::2]
    del blocks
    before = process.memory_info().rss

    async def for_a_moment() -> None:
        giving = asyncio.ensure_future(server.give_back_freed())
        for _ in range(200):
            await asyncio.sleep(0.02)
            if process.memory_info().rss < before - BLOCK * COUNT // 4:
                break
        giving.cancel()

    asyncio.run(for_a_moment())
    assert process.memory_info().rss < before - BLOCK * COUNT // 4
    assert all(bool(block.all()) for block in stays)


def test_without_glibc_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "trimming", lambda: None)
    asyncio.run(asyncio.wait_for(server.give_back_freed(), 1))
