"""Fixed buffers filled ahead of need: order, reuse, and no buffer lost, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rabbitllm.engine.prefetcher import BufferSlot, Prefetcher


class Filler:
    """Jobs that write a number into a buffer when `gate` is open, and note the order."""

    def __init__(self, slots: int) -> None:
        self.ahead = Prefetcher([BufferSlot(torch.zeros(1, dtype=torch.uint8)) for _ in range(slots)], "fill")
        self.gate = threading.Event()
        self.gate.set()
        self.done: list[str] = []

    def request(self, name: str) -> None:
        def fill(slot: BufferSlot) -> str:
            assert self.gate.wait(60)
            slot.buffer.fill_(int(name))
            self.done.append(name)
            return f"ticket {name}"

        self.ahead.request(name, fill)

    def fail(self, name: str) -> None:
        def fail(slot: BufferSlot) -> None:
            raise ValueError(name)

        self.ahead.request(name, fail)


@pytest.fixture
def filler() -> Iterator[Filler]:
    made = Filler(2)
    yield made
    made.gate.set()
    made.ahead.close()


def test_what_is_taken_is_what_was_requested(filler: Filler) -> None:
    for name in ("1", "2", "3"):
        filler.request(name)
        loaded = filler.ahead.take(name)
        assert (loaded.unit, loaded.ticket, loaded.slot.buffer.item()) == (name, f"ticket {name}", int(name))
        filler.ahead.give_back(loaded)


def test_requests_wait_for_buffers_and_come_in_their_order(filler: Filler) -> None:
    for name in "12345":
        filler.request(name)
    assert [name for name in "12345" if filler.ahead.is_coming(name)] == ["1", "2"]
    for name in "12345":
        loaded = filler.ahead.take(name)
        assert loaded.slot.buffer.item() == int(name)
        filler.ahead.give_back(loaded)
    assert filler.done == list("12345")


def test_a_request_twice_is_one(filler: Filler) -> None:
    filler.request("1")
    filler.request("1")
    filler.ahead.give_back(filler.ahead.take("1"))
    assert filler.done == ["1"]


def test_the_buffer_that_is_free_for_longest_is_next(filler: Filler) -> None:
    used = []
    for name in "1234":
        filler.request(name)
        loaded = filler.ahead.take(name)
        used.append(loaded.slot.buffer.data_ptr())
        filler.ahead.give_back(loaded)
    assert used[0] != used[1]
    assert used[2:] == used[:2]


def test_what_was_left_is_there_for_the_next_job(filler: Filler) -> None:
    seen: list[Any] = []
    for number in range(4):
        filler.ahead.request("x", lambda slot: seen.append(slot.left))
        filler.ahead.give_back(filler.ahead.take("x"), number)
    assert seen == [None, None, 0, 1]


def test_forgotten_requests_free_their_buffers_even_at_work(filler: Filler) -> None:
    filler.gate.clear()
    for name in "1234":
        filler.request(name)
    filler.ahead.forget(but=["4"])
    assert [name for name in "1234" if filler.ahead.is_coming(name)] == []
    filler.request("5")
    assert [name for name in "45" if filler.ahead.is_coming(name)] == ["4", "5"]
    filler.gate.set()
    for name in "45":
        assert filler.ahead.take(name).slot.buffer.item() == int(name)
    # the one that was at work ended, before its buffer was filled again
    assert filler.done == ["1", "4", "5"]


def test_an_error_is_raised_where_it_is_taken_and_costs_no_buffer(filler: Filler) -> None:
    for _ in range(5):
        filler.fail("1")
        with pytest.raises(ValueError, match="1"):
            filler.ahead.take("1")
        assert not filler.ahead.is_coming("1")
    for name in "12":
        filler.request(name)
    assert [filler.ahead.take(name).slot.buffer.item() for name in "12"] == [1, 2]


def test_an_error_of_a_unit_that_is_not_taken_is_forgotten(filler: Filler) -> None:
    filler.fail("1")
    filler.fail("2")
    filler.ahead.forget()
    for name in "34":
        filler.request(name)
    assert [filler.ahead.take(name).slot.buffer.item() for name in "34"] == [3, 4]


def test_more_than_there_are_buffers_is_an_error_and_no_wait(filler: Filler) -> None:
    for name in "123":
        filler.request(name)
    held = [filler.ahead.take(name) for name in "12"]
    with pytest.raises(RuntimeError, match="no free buffer for 3"):
        filler.ahead.take("3")
    filler.ahead.give_back(held[1])
    assert filler.ahead.take("3").slot is held[1].slot
    assert held[0].slot.buffer.item() == 1


def test_interrupts_anywhere_in_a_call_lose_nothing(filler: Filler) -> None:
    """A KeyboardInterrupt may come between any two lines."""
    import sys

    calls = [
        lambda: filler.request("1"),
        lambda: filler.ahead.forget(but=["2"]),
        lambda: filler.ahead.take("2"),
    ]
    for call in calls:
        for line in range(40):
            filler.ahead.forget()
            filler.request("2")
            count = 0

            def interrupt(frame: Any, event: str, argument: Any, line: int = line) -> Any:
                nonlocal count
                if not frame.f_code.co_filename.endswith("prefetcher.py"):
                    return None
                if event == "line":
                    count += 1
                    if count == line:
                        raise KeyboardInterrupt
                return interrupt

            taken = None
            sys.settrace(interrupt)
            try:
                taken = call()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            if taken is not None:
                filler.ahead.give_back(taken)
            for slot in filler.ahead._slots:  # what `take` was about to hand out is the caller's to give back
                slot.taken = False
            for name in "345":
                filler.ahead.forget()
                filler.request(name)
                loaded = filler.ahead.take(name)
                assert loaded.slot.buffer.item() == int(name)
                filler.ahead.give_back(loaded)


def test_closing_ends_the_thread(filler: Filler) -> None:
    filler.ahead.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        filler.request("1")
