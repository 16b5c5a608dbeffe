"""Places in a file: no two overlap, none is beyond the limit, and all of it is there again at the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.generation.cache_file import FileSlots


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8)), max_size=60), st.integers(20, 300))
def test_places_never_overlap_and_are_used_again(steps: list[tuple[int, int]], limit: int) -> None:
    """Each step takes a place, and gives back one of those that are taken, if its number is one of theirs."""
    places = FileSlots(limit)
    held: list[tuple[int, int]] = []
    for nbytes, which in steps:
        begin = places.take(nbytes)
        if begin is not None:
            assert begin + nbytes <= limit
            assert all(begin + nbytes <= other or other + size <= begin for other, size in held)
            held.append((begin, nbytes))
        if which < len(held):
            places.give_back(*held.pop(which))
        assert places.taken == sum(size for _, size in held)
    for begin, nbytes in held:
        places.give_back(begin, nbytes)
    assert places.taken == 0
    assert places.take(limit) == 0


def test_the_first_hole_that_is_large_enough_is_taken() -> None:
    places = FileSlots(100)
    first, second, third = (places.take(20) for _ in range(3))
    assert (first, second, third) == (0, 20, 40)
    places.give_back(20, 20)
    assert places.take(30) == 60
    assert places.take(15) == 20
    assert places.take(20) is None
    assert places.take(5) == 35
