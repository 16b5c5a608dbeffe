"""Who is let in, in which order, and who is no longer wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rabbitllm.errors import BusyError, ClosedError
from rabbitllm.generation.request import FinishReason, Request
from rabbitllm.generation.scheduler import AdmissionQueue
from rabbitllm.generation.sequence import Generation, RequestHandle
from tests.support.tiny_models import load

Make = Callable[[AdmissionQueue], RequestHandle]


@pytest.fixture
def make(split_folder: Path) -> Make:
    model = load(split_folder, 60_000, dtype="float32")

    def handle(admission: AdmissionQueue) -> RequestHandle:
        return RequestHandle(
            admission.wake, Generation(model, Request((3, 4), 5), lambda event: None, time.monotonic())
        )

    return handle


def test_who_made_way_comes_before_those_who_wait(make: Make) -> None:
    admission = AdmissionQueue(2, 2)
    handles = [make(admission) for _ in range(4)]
    for handle in handles:
        admission.come_in(handle)
    for handle in handles[:2]:
        admission.begin(handle)
    admission.make_way(handles[1])
    assert admission.running == handles[:1]
    assert admission.waiting == handles[1:]
    admission.leave(handles[0])
    admission.leave(handles[2])
    assert not admission.running
    assert admission.waiting == [handles[1], handles[3]]


def test_as_many_wait_as_may_and_as_there_are_places(make: Make) -> None:
    admission = AdmissionQueue(2, 1)
    waiting = [make(admission) for _ in range(3)]
    for handle in waiting:
        admission.come_in(handle)
    with pytest.raises(BusyError, match="3 requests wait"):
        admission.come_in(make(admission))
    for handle in waiting[:2]:
        admission.begin(handle)
    with pytest.raises(BusyError, match="1 requests wait"):
        admission.come_in(make(admission))


def test_who_is_no_longer_wanted(make: Make) -> None:
    admission = AdmissionQueue(4, 4)
    cancelled, late, wanted = (make(admission) for _ in range(3))
    for handle in (cancelled, late, wanted):
        admission.come_in(handle)
    late.deadline = time.monotonic()
    cancelled.cancel()
    admission.begin(late)
    assert admission.unwanted() == [(late, FinishReason.TIMEOUT), (cancelled, FinishReason.CANCELLED)]
    admission.close()
    assert admission.unwanted() == [(late, FinishReason.TIMEOUT), (cancelled, FinishReason.CANCELLED)]
    admission.close(0)
    admission.close(60)  # it was to be over already
    assert dict(admission.unwanted())[wanted] is FinishReason.CANCELLED
    with pytest.raises(ClosedError):
        admission.come_in(make(admission))


def test_nothing_is_to_be_done_while_it_is_held(make: Make) -> None:
    admission = AdmissionQueue(4, 4)
    told: list[bool] = []
    with admission.held():
        admission.come_in(make(admission))
        thread = threading.Thread(target=lambda: told.append(admission.wait()))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(60)
    assert told == [True]
    admission.leave(admission.waiting[0])
    admission.close()
    assert not admission.wait()
