"""One `CrashServer` for all tests of a process that kill; making it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.crashes import CrashServer

KILLS = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def crash_server(pytestconfig: pytest.Config) -> Iterator[CrashServer]:
    """The first of the tests that kill starts it."""
    from tests.support.crashes import CrashServer

    with CrashServer() as server:
        yield server
        pytestconfig.stash[KILLS] = server.kills


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many processes were killed."""
    if kills := config.stash.get(KILLS, 0):
        terminalreporter.write_line(f"{kills} processes were killed at a step on the disk")
