"""Sums of pieces that were written in any order are those of the whole; a part with a hole has none."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.splitter.sums import Sums, part_sums, runs_of, sums_of, whole_sum
from rabbitllm.store import checksums
from rabbitllm.store.stored_form import StoredForm, stored_form

FORM = stored_form(TensorSpec("w", "U8", (1000,), "shard", 0, 1000), None)
CONTENT = random.Random(0).randbytes(1000)


def added(sums: Sums, form: StoredForm, cuts: list[int], place: int | None = 0) -> None:
    pieces = list(zip(cuts, [*cuts[1:], 1000], strict=True))
    random.Random(1).shuffle(pieces)
    for begin, end in pieces:
        sums.add(form, 0, begin, memoryview(CONTENT[begin:end]), place)


@given(st.sets(st.integers(1, 999), max_size=20))
def test_pieces_in_any_order(cuts: set[int]) -> None:
    sums = Sums()
    sums.expect([FORM])
    added(sums, FORM, [0, *sorted(cuts)])
    sums.expect([FORM])  # a later batch of the same tensor
    assert sums.take([FORM]) == {"w": (part_sums(zlib.crc32(CONTENT)),)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, 999), max_size=20), place=st.integers(0, 300))
def test_each_run_between_cuts_of_the_file(cuts: set[int], place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums between multiples of the block length, at any offset and for any pieces."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 128)
    sums = Sums()
    sums.expect([FORM])
    added(sums, FORM, [0, *sorted(cuts)], place)
    (part,) = sums.take([FORM])["w"]
    ends = [*range(128 - place % 128, 1000, 128), 1000]
    expected = [
        (place + begin, end - begin, zlib.crc32(CONTENT[begin:end]))
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
    assert whole_sum(part) == zlib.crc32(CONTENT)
    assert runs_of(part, place, 1000) == expected
    assert sums_of(CONTENT, place) == part
    assert runs_of(part[:4], place, 1000) is None  # what an earlier version noted


def test_part_in_a_scratch_file_has_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 128)
    sums = Sums()
    sums.expect([FORM])
    added(sums, FORM, [0, 100, 600], None)
    assert sums.take([FORM]) == {"w": (part_sums(zlib.crc32(CONTENT)),)}


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_incomplete_part_has_no_sum(missing: int) -> None:
    sums = Sums()
    sums.expect([FORM])
    for index, (begin, end) in enumerate([(0, 300), (300, 700), (700, 1000)]):
        if index != missing:
            sums.add(FORM, 0, begin, memoryview(CONTENT[begin:end]), 0)
    with pytest.raises(AssertionError, match=f"w was written up to byte {(0, 300, 700)[missing]} of 1000"):
        sums.take([FORM])


OVERLAPPING = {
    "a gap as long as the overlap": [(0, 400), (300, 500), (600, 1000)],
    "an overlap": [(0, 400), (300, 1000)],
    "all of it twice": [(0, 1000), (0, 1000)],
    "an end twice": [(0, 1000), (900, 1000)],
    "the first piece twice": [(0, 500), (0, 500)],
}


@pytest.mark.parametrize("pieces", OVERLAPPING.values(), ids=OVERLAPPING)
@pytest.mark.parametrize("place", [0, None])
def test_overlapping_pieces_have_no_sum(pieces: list[tuple[int, int]], place: int | None) -> None:
    sums = Sums()
    sums.expect([FORM])
    for begin, end in pieces:
        sums.add(FORM, 0, begin, memoryview(CONTENT[begin:end]), place)
    end, begin = pieces[0][1], pieces[1][0]
    with pytest.raises(AssertionError, match=f"w was written up to byte {end} of 1000, and then from byte {begin}"):
        sums.take([FORM])


def test_source_read_in_overlapping_pieces_has_no_sum() -> None:
    form = stored_form(TensorSpec("w", "F32", (64, 64), "shard", 0, 1 << 14), "8bit")
    sums = Sums()
    sums.expect([form], sources=True)
    for part, tensor in enumerate(form.parts):
        sums.add(form, part, 0, memoryview(bytes(tensor.nbytes)), 0)
    for begin, nbytes in [(0, 1 << 13), (1 << 12, 1 << 13)]:
        sums.add_source(form, begin, memoryview(bytes(nbytes)))
    with pytest.raises(AssertionError, match="w was written up to byte 8192 of 16384, and then from byte 4096"):
        sums.take_with_sources([form])


def test_rewritten_part_is_summed_again() -> None:
    sums = Sums()
    sums.expect([FORM])
    added(sums, FORM, [0, 500])
    sums.forget([FORM])
    sums.expect([FORM])
    added(sums, FORM, [0])
    assert sums.take([FORM]) == {"w": (part_sums(zlib.crc32(CONTENT)),)}
