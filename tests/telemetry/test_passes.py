"""Passes as records: which kind, how many tokens came of one, sums, the overlap, the limit."""

from __future__ import annotations

import pytest

from rabbitllm.telemetry.passes import (
    COMPUTE,
    DEQUANTIZE,
    FURTHER,
    PROMPT,
    READ,
    READ_WAIT,
    UPLOAD,
    WRITE,
    Pass,
    PassInput,
    PassSums,
    Total,
    limit_of,
    median_of,
    median_pass,
    sums_of,
)


def a_pass(number: int, wall: float, entry: PassInput, made: int | None = None, **seconds: float) -> Pass:
    stages = {"read": READ, "copy": UPLOAD, "wait": READ_WAIT, "make": DEQUANTIZE, "compute": COMPUTE}
    totals = {stages[name]: Total(length, 2, 100) for name, length in seconds.items()}
    return Pass(number, 10.0 * number, wall, entry, made, totals)


ONE = PassInput(1, 1, past=30, logits=1)


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        (PassInput(1, 30, past=0, logits=1), PROMPT),
        (PassInput(1, 1, past=0, logits=1), PROMPT),
        (PassInput(1, 30, past=0, logits=None), PROMPT),
        (PassInput(4, 30, past=30, logits=1), PROMPT),  # a chunk in the middle
        (PassInput(1, 1, past=30, logits=1), FURTHER),
        (PassInput(1, 5, past=30, logits=5), FURTHER),  # a token and four candidates
        (PassInput(1, 5, past=30, logits=None), FURTHER),
        (PassInput(1, 30), PROMPT),
        (PassInput(1, 1), FURTHER),  # a state-space model's cache does not tell its length
    ],
)
def test_kinds(entry: PassInput, kind: str) -> None:
    assert entry.kind == kind


@pytest.mark.parametrize(
    ("entry", "then", "made"),
    [
        (PassInput(1, 30, 0, 1), PassInput(1, 1, 30, 1), 1),
        (PassInput(8, 30, 0, 1), PassInput(8, 1, 30, 1), 8),
        (PassInput(1, 30, 0, 1), PassInput(1, 30, 30, 1), 0),  # the next chunk
        (PassInput(1, 34, 0, 5), PassInput(1, 5, 30, 5), 1),  # none of the four candidates was right
        (PassInput(1, 34, 0, 5), PassInput(1, 5, 33, 5), 4),
        (PassInput(1, 1, 30, 1), PassInput(1, 1, 31, 1), 1),
        (PassInput(8, 1, 30, 1), PassInput(8, 1, 31, 1), 8),
        (PassInput(1, 5, 30, 5), PassInput(1, 5, 35, 5), 5),
        (PassInput(1, 5, 30, 5), PassInput(1, 1, 31, 1), 1),
        (PassInput(1, 1, 30, 1), PassInput(1, 9, 31, 1), 1),  # the user says more
        (PassInput(1, 1, 30, 1), PassInput(1, 30, 0, 1), None),  # a cache that was emptied
        (PassInput(1, 30, 0, None), PassInput(1, 1, 20, 1), None),  # one that was cut
        (PassInput(1, 30), PassInput(1, 31), None),
    ],
)
def test_tokens_made(entry: PassInput, then: PassInput, made: int | None) -> None:
    assert entry.made(then) == made


def test_overlap_is_the_longer_of_moving_and_computing() -> None:
    assert a_pass(1, 10.0, ONE, read=6.0, copy=8.0, wait=3.0, make=1.0, compute=5.0).overlap == 0.8
    assert a_pass(1, 10.0, ONE, read=1.0, copy=2.0, wait=3.0, make=1.0, compute=5.0).overlap == 0.6
    assert a_pass(1, 0.0, ONE).overlap == 0.0
    lanes = {READ: Total(12.0, 4, 0, threads=2), COMPUTE: Total(4.0, 1, 0)}  # two devices, each with its reader
    assert Pass(1, 0.0, 8.0, ONE, None, lanes).overlap == 0.75


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ({READ: 9.0, READ_WAIT: 4.0, COMPUTE: 3.0}, READ_WAIT),
        ({READ: 2.0, UPLOAD: 7.0, READ_WAIT: 4.0, COMPUTE: 3.0}, UPLOAD),  # what is waited for is the copy
        ({READ: 2.0, UPLOAD: 7.0, READ_WAIT: 1.0, COMPUTE: 3.0}, COMPUTE),
        ({DEQUANTIZE: 4.0, COMPUTE: 3.0}, DEQUANTIZE),
        ({READ: 2.0, WRITE: 1.0}, READ),  # a split
        ({}, None),
    ],
)
def test_limits(seconds: dict[str, float], limit: str | None) -> None:
    assert limit_of({stage: Total(length, 1, 0) for stage, length in seconds.items()}) == limit


def test_sums_by_kind_add_to_earlier_sums() -> None:
    passes = [
        a_pass(1, 4.0, PassInput(2, 30, 0, 1), 2, read=4.0),
        a_pass(2, 1.0, PassInput(2, 1, 30, 1), 2, read=1.0, compute=0.5),
        a_pass(3, 2.0, PassInput(2, 1, 31, 1), 6, read=1.0, compute=1.0),
        a_pass(4, 3.0, PassInput(2, 1, 32, 1), None, compute=1.0),
    ]
    sums = sums_of(passes, {})
    assert list(sums) == [PROMPT, FURTHER]
    assert sums[PROMPT] == PassSums(1, 4.0, 60, 2, 1, {READ: Total(4.0, 2, 100)})
    further = sums[FURTHER]
    assert (further.passes, further.wall, further.tokens, further.made_per_pass) == (3, 6.0, 6, 4.0)
    assert further.stages == {READ: Total(2.0, 4, 200), COMPUTE: Total(2.5, 6, 300)}
    assert (further.disk_bytes, further.copied_bytes, further.bottleneck) == (200, 0, COMPUTE)
    assert further.overlap == 2.5 / 6.0
    assert sums_of(passes[2:], sums_of(passes[:2], {})) == sums
    assert sums_of([], {}) == {}
    assert PassSums().made_per_pass is None


def test_median_pass_prefers_decode_passes() -> None:
    passes = [
        a_pass(1, 9.0, PassInput(1, 30, 0, 1)),
        *(a_pass(n, wall, ONE) for n, wall in ((2, 1.0), (3, 5.0), (4, 2.0))),
    ]
    middle = median_pass(passes)
    assert middle is not None
    assert middle.number == 4
    assert (median_of(passes, FURTHER), median_of(passes, PROMPT), median_of([], PROMPT)) == (2.0, 9.0, 0.0)
    assert median_pass(passes[:1]) is passes[0]
    assert median_pass([]) is None
