"""What is shown while layer files are checked, by a clock of the test's own."""

from __future__ import annotations

from rabbitllm.base.terminal import text_of
from rabbitllm.display.verify_display import Reading


def at(seconds: list[float], total: int = 4 << 30) -> Reading:
    return Reading(total, lambda: seconds[0])


def test_a_row_says_how_much_how_fast_and_how_long() -> None:
    now = [100.0]
    reading = at(now)
    reading.add(600 << 20)
    reading.add(424 << 20)
    now[0] = 102.0
    (row,) = reading.rows(100)
    said = text_of(row)
    assert said.startswith("reading ━━━━━━────")
    assert said.endswith(" 25 % · 1.00 of 4.00 GiB · 512 MiB/s · 6 s left")
    assert reading.line() == "reading 25 %, 1.00 of 4.00 GiB, 512 MiB/s, 6 s left"


def test_every_width_is_kept() -> None:
    now = [0.0]
    reading = at(now)
    reading.add(123_456_789)
    now[0] = 3.0
    for width in range(20, 121):
        (row,) = reading.rows(width)
        assert len(text_of(row)) <= width
        assert "3 %" in text_of(row)


def test_at_the_very_beginning_and_of_nothing() -> None:
    assert text_of(at([5.0]).rows(80)[0]).endswith(" 0 % · 0.00 of 4.00 GiB · 0 MiB/s")
    assert "100 %" in at([5.0], 0).line()
