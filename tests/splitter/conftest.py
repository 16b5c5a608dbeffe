"""Fixtures of the splitter's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.crashes import CrashServer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads only wait for each other over matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def crash_server() -> Iterator[CrashServer]:
    """One server for all tests that kill; it starts when the first of them asks for it."""
    with CrashServer() as server:
        yield server
