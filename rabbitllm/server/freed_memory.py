"""Gives memory that the allocator keeps free back to the system, now and then.

Requests free blocks of all sizes in any order, so that glibc's heaps grow long after the used memory has stopped
growing: by 40 MiB in five minutes of a tiny model's server, without any leak. Python and torch never ask for free
memory to be given back.
"""

from __future__ import annotations

import asyncio

from rabbitllm.engine.allocator import trimming

EVERY_SECONDS = 10.0


async def give_back_freed() -> None:
    """Do it again and again, until cancelled; at once over where the allocator cannot be asked."""
    trim = trimming()
    while trim is not None:
        await asyncio.sleep(EVERY_SECONDS)
        await asyncio.to_thread(trim)
