"""The benchmark of a server's memory after loads."""

from __future__ import annotations

import argparse
import mmap
import os
import sys

import pytest

from benchmarks.serve_memory import MIB, Reading, anonymous_bytes, bodies, row


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_anonymous_memory_is_what_was_written_to() -> None:
    before = anonymous_bytes(os.getpid())
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        assert anonymous_bytes(os.getpid()) < before + 32 * MIB
        memory[:] = bytes(len(memory))
        assert anonymous_bytes(os.getpid()) > before + 60 * MIB


def test_a_row_leaves_the_cache_out() -> None:
    first, last = Reading(100 * MIB, 10 * MIB), Reading(150 * MIB, 40 * MIB)
    assert row("3", last, first) == "| 3 | 150 | 40 | +20 |"


def test_no_two_requests_begin_alike() -> None:
    options = argparse.Namespace(scale="tiny", clients=8, rounds=2, prompt_tokens=16, tokens=4)
    prompts = [tuple(body["prompt"]) for load in range(3) for body in bodies(load, options)]
    assert len(set(prompts)) == len(prompts) == 48
