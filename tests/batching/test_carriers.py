"""Which texts go through the model as one."""

from __future__ import annotations

import itertools
import random

import pytest

from rabbitllm.batching.carriers import grouped


@pytest.mark.parametrize(
    ("rows", "most", "groups"),
    [
        ([], 4, []),
        ([1, 2, 3], None, [[1, 2, 3]]),
        ([1, 2, 3], 3, [[1, 2], [3]]),
        ([9, 1, 1], 4, [[9], [1, 1]]),
        ([1, 9, 9, 1], 4, [[1], [9], [9], [1]]),
    ],
)
def test_groups(rows: list[int], most: int | None, groups: list[list[int]]) -> None:
    assert [rows[group] for group in grouped(rows, most)] == groups


def test_every_text_is_carried_once_and_no_more_together_than_may_be() -> None:
    chance = random.Random(0)
    for _ in range(200):
        rows = [chance.randint(1, 12) for _ in range(chance.randint(1, 12))]
        groups = [rows[group] for group in grouped(rows, 10)]
        assert list(itertools.chain(*groups)) == rows
        assert all(len(group) == 1 or sum(group) <= 10 for group in groups)
        assert all(sum(one) + after[0] > 10 for one, after in itertools.pairwise(groups))
