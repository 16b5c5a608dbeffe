"""What lies between tensors, kept as a shard passes by in chunks of any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.splitter import plan
from rabbitllm.splitter.plan import Gaps, can_be_kept


def tensor(offset: int, nbytes: int, strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec("w", "U8", (nbytes,), "shard", offset, nbytes, strides)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.integers(0, 9),
    st.lists(st.integers(1, 25), max_size=20),
)
def test_what_is_no_tensor_s_is_kept_and_nothing_else(runs: list[tuple[int, int]], last: int, cuts: list[int]) -> None:
    tensors, between, at = [], [], 0
    for gap, nbytes in runs:
        between.append((at, at + gap))
        tensors.append(tensor(at + gap, nbytes))
        at += gap + nbytes
    between.append((at, at + last))
    content = bytes(number % 251 + 1 for number in range(at + last))
    assert can_be_kept(tensors, len(content))
    kept = Gaps(reversed(tensors), len(content))
    chunks, begin = [], 0
    for length in [*cuts, len(content)]:
        chunks.append(content[begin : begin + length])
        begin += length
    assert b"".join(kept.watching(chunks)) == content
    held = {at for begin, end in between for at in range(begin, end)}
    for offset in range(len(content)):
        assert kept.read_at(offset, 1) == (content[offset : offset + 1] if offset in held else b"")
    for begin, end in between:
        assert kept.read_at(begin, end - begin) == content[begin:end]
    assert sum(map(len, kept._kept)) == len(held)


def test_what_cannot_be_kept() -> None:
    assert can_be_kept([tensor(10, 5), tensor(15, 5), tensor(30, 0)], 40)
    assert not can_be_kept([tensor(10, 6), tensor(15, 5)], 40)  # they share a byte
    assert not can_be_kept([tensor(10, 5), tensor(10, 5)], 40)
    assert not can_be_kept([tensor(10, 5, (2,))], 40)
    assert not can_be_kept([tensor(36, 5)], 40)
    assert can_be_kept([tensor(0, 100)], 100 + plan.MAX_BYTES)
    assert not can_be_kept([tensor(1, 100)], 102 + plan.MAX_BYTES)  # a shard of which little is a tensor of ours
