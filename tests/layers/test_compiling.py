"""Functions are compiled with or without a place to keep them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
from rabbitllm.layers import packed_kernels, packed_products, vectors
from rabbitllm.layers.compression import quantise
assert quantise._compiled_kernels_agree("4bit")
assert packed_products._kernel_agrees("4bit") == bool(vectors.lanes())
if width := vectors.lanes():
    assert packed_kernels.in_a_team("4bit", width)
print("compiled")
"""


@pytest.mark.long
def test_where_nothing_can_be_kept() -> None:
    ran = subprocess.run([sys.executable, "-c", NOWHERE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    refused, done = ran.stdout.splitlines()
    assert refused.startswith("numba: cannot cache function")
    assert done == "compiled"


def test_the_kernels_are_kept_for_the_next_process(tmp_path: Path) -> None:
    """What numba cannot keep (a function that is handed on and not inlined, for one) it compiles anew, and warns."""
    code = """
import warnings
from numba.core.errors import NumbaWarning
warnings.simplefilter("error", NumbaWarning)
from rabbitllm.layers import packed_kernels, vectors
for scheme, width in packed_kernels._FUNCTIONS:
    if width == 32 and vectors.multiplies_pairs() or width <= vectors.lanes():
        packed_kernels.in_a_team(scheme, width)
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
