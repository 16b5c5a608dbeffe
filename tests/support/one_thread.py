"""How many threads tests compute with, and a fixture that applies by itself wherever it is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

THREADS = int(os.environ.get("RABBITLLM_TEST_THREADS", "1"))
"""Of torch, in every process and thread of the tests whose results are compared; `tools/matrix.py` asks for others.

Several threads only wait for each other over matrices as small as those of tests, and on some processors their number
changes last bits.
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch computes with `THREADS` threads, whichever number another test has left behind."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)
