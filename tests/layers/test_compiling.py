"""Functions are compiled with or without a place to keep them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

NOWHERE = """
import numba
import numba.core.caching
caching = numba.core.caching
(caching.CacheImpl if hasattr(caching, "CacheImpl") else caching._CacheImpl)._locator_classes = []
try:
    numba.njit(cache=True)(lambda: 1)
except RuntimeError as error:
    print("numba:", error)
from rabbitllm.layers import compression, packed_kernels, packed_products
assert compression._compiled_kernels_agree("4bit")
assert packed_products._kernel_agrees("4bit") == bool(packed_kernels.lanes("4bit"))
if width := packed_kernels.lanes("4bit"):
    assert packed_kernels.in_a_team("4bit", width)
print("compiled")
"""


def test_where_nothing_can_be_kept() -> None:
    ran = subprocess.run([sys.executable, "-c", NOWHERE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    refused, done = ran.stdout.splitlines()
    assert refused.startswith("numba: cannot cache function")
    assert done == "compiled"
