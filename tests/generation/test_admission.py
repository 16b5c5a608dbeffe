"""Who is let in, in which order, and who is no longer wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rabbitllm.errors import BusyError, ClosedError
from rabbitllm.generation.admission import AdmissionQueue
from rabbitllm.generation.generation import Generation
from rabbitllm.generation.request import FinishReason, Request
from rabbitllm.generation.request_handle import RequestHandle
from tests.support.tiny_models import load

Make = Callable[[AdmissionQueue], RequestHandle]


@pytest.fixture
def make(split_folder: Path) -> Make:
    model = load(split_folder, 60_000, dtype="float32")

    def ticket(door: AdmissionQueue) -> RequestHandle:
        return RequestHandle(door.wake, Generation(model, Request((3, 4), 5), lambda event: None, time.monotonic()))

    return ticket


def test_who_made_way_comes_before_those_who_wait(make: Make) -> None:
    door = AdmissionQueue(2, 2)
    tickets = [make(door) for _ in range(4)]
    for ticket in tickets:
        door.come_in(ticket)
    for ticket in tickets[:2]:
        door.begin(ticket)
    door.make_way(tickets[1])
    assert door.running == tickets[:1]
    assert door.waiting == tickets[1:]
    door.leave(tickets[0])
    door.leave(tickets[2])
    assert not door.running
    assert door.waiting == [tickets[1], tickets[3]]


def test_as_many_wait_as_may_and_as_there_are_places(make: Make) -> None:
    door = AdmissionQueue(2, 1)
    waiting = [make(door) for _ in range(3)]
    for ticket in waiting:
        door.come_in(ticket)
    with pytest.raises(BusyError, match="3 requests wait"):
        door.come_in(make(door))
    for ticket in waiting[:2]:
        door.begin(ticket)
    with pytest.raises(BusyError, match="1 requests wait"):
        door.come_in(make(door))


def test_who_is_no_longer_wanted(make: Make) -> None:
    door = AdmissionQueue(4, 4)
    cancelled, late, wanted = (make(door) for _ in range(3))
    for ticket in (cancelled, late, wanted):
        door.come_in(ticket)
    late.deadline = time.monotonic()
    cancelled.cancel()
    door.begin(late)
    assert door.unwanted() == [(late, FinishReason.TIMEOUT), (cancelled, FinishReason.CANCELLED)]
    door.close()
    assert door.unwanted() == [(late, FinishReason.TIMEOUT), (cancelled, FinishReason.CANCELLED)]
    door.close(0)
    door.close(60)  # it was to be over already
    assert dict(door.unwanted())[wanted] is FinishReason.CANCELLED
    with pytest.raises(ClosedError):
        door.come_in(make(door))


def test_nothing_is_to_be_done_while_it_is_held(make: Make) -> None:
    door = AdmissionQueue(4, 4)
    told: list[bool] = []
    with door.held():
        door.come_in(make(door))
        thread = threading.Thread(target=lambda: told.append(door.wait()))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(60)
    assert told == [True]
    door.leave(door.waiting[0])
    door.close()
    assert not door.wait()
