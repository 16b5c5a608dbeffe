"""Tests do not wait for the disk: a sync only checks that the file is open, and split weights go to the page cache.

A split of a tiny model syncs thirty times, a tenth of a second that no core works in. That everything is synced, and in
which order, is tested by recorded calls and models of power cuts; commands that tests start, and files of tests that
import `real_disk`, wait for the disk.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support.after_import import after_import

_sync = os.fsync
_write_past_the_cache: list[Any] = []


def install() -> None:
    """For this process and its forks, from now on."""
    os.fsync = os.fstat  # type: ignore[assignment]
    after_import("rabbitllm.storage.durable", _write_through_the_cache)


def _write_through_the_cache(durable: Any) -> None:
    _write_past_the_cache.append(durable.GrowingFile._write_direct)
    durable.GrowingFile._write_direct = lambda file, data, offset: 0


@pytest.fixture(autouse=True)
def real_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs are real, and whole blocks are written past the page cache; applies by itself wherever it is imported."""
    from rabbitllm.storage.durable import GrowingFile

    monkeypatch.setattr(os, "fsync", _sync)
    monkeypatch.setattr(GrowingFile, "_write_direct", _write_past_the_cache[0])
