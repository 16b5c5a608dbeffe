"""What is large is given back at once, wherever what was allocated after it stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rabbitllm.engine.allocator import trimming

pytestmark = pytest.mark.skipif(trimming() is None, reason="no glibc here")

CODE = """
import sys
import psutil, torch
from rabbitllm.engine.allocator import keep_large_apart, trimming
if sys.argv[1] == "apart":
    assert keep_large_apart()
used = lambda: psutil.Process().memory_info().rss >> 20
for size in (8, 24):  # after which glibc has blocks of up to so many MiB in its heap
    torch.ones(size << 20, dtype=torch.uint8)
large, stays = [], []
before = used()
for number in range(20):
    large.append(torch.ones(6 << 20, dtype=torch.uint8))
    stays.append(torch.ones(60_000, dtype=torch.uint8))
filled = used()
del large
freed = used()
trimming()()
print(filled - before, freed - before, used() - before)
"""


@pytest.mark.long
def test_large_blocks_are_apart() -> None:
    found = {}
    for how in ("apart", "as usual"):
        done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
        found[how] = [int(part) for part in done.stdout.split()]
    assert min(filled for filled, _, _ in found.values()) > 110
    assert found["apart"][1] < 20
    assert found["as usual"][1] > 80  # else there is nothing to mend
    assert found["as usual"][2] < 20
