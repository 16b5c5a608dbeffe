"""Sums of pieces put together are the sum of the whole, as zlib makes it."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.store import checksums
from rabbitllm.store.checksums import combine_all, crc32_combine, crc32_of_file


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_two_runs(first: bytes, second: bytes) -> None:
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(pieces=st.lists(st.binary(max_size=40), max_size=12))
def test_any_number_of_runs(pieces: list[bytes]) -> None:
    assert combine_all((zlib.crc32(piece), len(piece)) for piece in pieces) == zlib.crc32(b"".join(pieces))


def test_long_runs() -> None:
    chance = random.Random(3)
    whole = chance.randbytes((9 << 20) + 5)
    for cut in (1, 4095, 4 << 20, len(whole) - 1):
        assert crc32_combine(zlib.crc32(whole[:cut]), zlib.crc32(whole[cut:]), len(whole) - cut) == zlib.crc32(whole)


@pytest.mark.parametrize("size", [0, 1, 1000, 4096, 4097, 10_000])
def test_sum_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(checksums, "READ_BYTES", 4096)
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    assert crc32_of_file(tmp_path / "file") == zlib.crc32(content)
