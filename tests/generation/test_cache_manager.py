"""Which sequences have their KV cache in a file: numbers in, decisions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.generation._sequence import RESERVED_TOKENS, SequenceLength
from rabbitllm.generation.cache_manager import CacheAllocation, RunningLengths


class Memory:
    """One byte a token; in a file a text takes ten, and twenty are ahead."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def bytes_for(self, tokens: int) -> int:
        return tokens

    def reserved(self, texts: Sequence[SequenceLength]) -> int:
        return sum(text.reserved for text in texts)

    def tail_bytes(self) -> int:
        return 10

    def prefetch_bytes(self) -> int:
        return 20


@given(
    st.lists(st.builds(SequenceLength, st.integers(1, 200), st.integers(0, 60)), min_size=1, max_size=20),
    st.integers(1, 600),
    st.integers(0, 3000),
)
def test_started_sequences_fit_and_the_first_always_starts(texts: list[SequenceLength], limit: int, disk: int) -> None:
    memory: Any = Memory(limit)
    near: list[SequenceLength] = []
    filed: list[SequenceLength] = []
    for index, text in enumerate(texts):
        where = RunningLengths(near, filed, disk).allocation(text, len(texts) - index - 1, memory)
        if where is CacheAllocation.LATER:
            assert near or filed
            return
        (near if where is CacheAllocation.MEMORY else filed).append(text)
        running = RunningLengths(near, filed, disk)
        assert running.reserved(memory) <= limit or len(near) + len(filed) == 1
        assert sum(length.tokens + length.room for length in filed) <= disk


def test_sequences_are_in_memory_while_room_for_the_others_remains() -> None:
    text, empty = SequenceLength(100, 0), RunningLengths([], [], 1000)
    assert empty.allocation(text, 2, Memory(300)) is CacheAllocation.MEMORY  # type: ignore[arg-type]
    memory: Any = Memory(299)
    assert empty.allocation(text, 2, memory) is CacheAllocation.MEMORY  # 100 + 2 x 10 + 20
    assert RunningLengths([text], [], 1000).allocation(text, 1, memory) is CacheAllocation.MEMORY  # 200 + 10 + 20
    assert RunningLengths([text, text], [], 1000).allocation(text, 0, memory) is CacheAllocation.FILE
    assert RunningLengths([text, text], [], 99).allocation(text, 0, memory) is CacheAllocation.LATER
    assert RunningLengths([text, text], [], 1000).allocation(SequenceLength(15, 0), 0, memory) is CacheAllocation.MEMORY


def test_a_sequence_starts_if_all_have_room_for_more_tokens() -> None:
    running = RunningLengths([SequenceLength(10, 1000)], [], 0)
    needed = (10 + RESERVED_TOKENS) + (20 + 5)
    for limit, fits in ((needed, True), (needed - 1, False)):
        memory: Any = Memory(limit)
        assert running.fits(SequenceLength(20, 5), memory) is fits
    assert RunningLengths([], [], 0).fits(SequenceLength(20, 5), memory)
