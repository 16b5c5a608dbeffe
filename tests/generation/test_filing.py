"""Which sequences have their KV cache in a file: numbers in, decisions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.generation.cache_manager import Begins, Running, begins
from rabbitllm.generation.sequence import SequenceMemory


class Memory:
    """One byte a token; in a file a text takes ten, and twenty are ahead."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def bytes_for(self, tokens: int) -> int:
        return tokens

    def soon(self, texts: Sequence[SequenceMemory]) -> int:
        return sum(text.soon for text in texts)

    def beside_file(self) -> int:
        return 10

    def ahead(self) -> int:
        return 20


@given(
    st.lists(st.builds(SequenceMemory, st.integers(1, 200), st.integers(0, 60)), min_size=1, max_size=20),
    st.integers(1, 600),
    st.integers(0, 3000),
)
def test_all_that_begin_fit_and_the_first_always_begins(texts: list[SequenceMemory], limit: int, most: int) -> None:
    memory: Any = Memory(limit)
    near: list[SequenceMemory] = []
    filed: list[SequenceMemory] = []
    for number, text in enumerate(texts):
        where = begins(text, Running(near, filed, most), len(texts) - number - 1, memory)
        if where is Begins.LATER:
            assert near or filed
            return
        (near if where is Begins.NEAR else filed).append(text)
        running = Running(near, filed, most)
        assert running.soon(memory) <= limit or len(near) + len(filed) == 1
        assert sum(one.tokens + one.room for one in filed) <= most


def test_all_are_in_memory_where_they_fit_and_else_as_many_as_leave_room_for_the_others() -> None:
    one, nothing = SequenceMemory(100, 0), Running([], [], 1000)
    assert begins(one, nothing, 2, Memory(300)) is Begins.NEAR  # type: ignore[arg-type]
    memory: Any = Memory(299)
    assert begins(one, nothing, 2, memory) is Begins.NEAR  # 100 + 2 x 10 + 20
    assert begins(one, Running([one], [], 1000), 1, memory) is Begins.NEAR  # 200 + 10 + 20
    assert begins(one, Running([one, one], [], 1000), 0, memory) is Begins.FILED
    assert begins(one, Running([one, one], [], 99), 0, memory) is Begins.LATER
    assert begins(SequenceMemory(15, 0), Running([one, one], [], 1000), 0, memory) is Begins.NEAR
