"""Models are built beside no pass, one at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from rabbitllm.base.building import Building

PATIENCE = 600.0


def test_a_builder_waits_for_passes_and_passes_for_it() -> None:
    building, events = Building(), list[str]()
    in_pass, ends = threading.Event(), threading.Event()

    def run(name: str) -> None:
        with building.a_pass():
            events.append(name)
            in_pass.set()
            assert ends.wait(PATIENCE)

    def build() -> None:
        with building, building:
            events.append("built")

    threads = [threading.Thread(target=run, args=("first",)), threading.Thread(target=build)]
    threads[0].start()
    assert in_pass.wait(PATIENCE)
    with building.a_pass():  # beside the other
        pass
    threads[1].start()
    while not building._builders:
        threading.Event().wait(0.001)
    threads.append(threading.Thread(target=run, args=("second",)))
    threads[2].start()
    assert events == ["first"]
    ends.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert events == ["first", "built", "second"]


def test_a_fork_during_a_pass_can_build() -> None:
    building = Building()
    with building.a_pass():
        child = os.fork()
        if not child:
            with building:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_pass_that_builds_or_has_another_within_does_not_wait_for_itself() -> None:
    """Also if two do so at once, and while a builder waits for them."""
    building, both, built = Building(), threading.Barrier(2), list[int]()

    def run(number: int) -> None:
        with building.a_pass():
            both.wait(PATIENCE)
            with building, building.a_pass():
                assert building._passes <= {threading.get_ident()}
                built.append(number)
            assert threading.get_ident() in building._passes

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(built) == [0, 1]
    with building.a_pass():
        builder = threading.Thread(target=building.__enter__, daemon=True)
        builder.start()
        while not building._builders:
            threading.Event().wait(0.001)
        with building.a_pass():
            assert not building._builder


def test_a_builder_that_is_interrupted_leaves_nothing() -> None:
    building, in_pass, ends, main = Building(), threading.Event(), threading.Event(), threading.get_ident()

    def run() -> None:
        with building.a_pass():
            in_pass.set()
            assert ends.wait(PATIENCE)

    def interrupt() -> None:
        while not building._builders:
            threading.Event().wait(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    other, sender = threading.Thread(target=run, daemon=True), threading.Thread(target=interrupt, daemon=True)
    other.start()
    assert in_pass.wait(PATIENCE)
    sender.start()
    with pytest.raises(KeyboardInterrupt), building:
        raise AssertionError
    with building.a_pass():
        ends.set()
    other.join(PATIENCE)
    with building:
        assert not building._passes


def test_a_fork_of_a_builder_or_a_pass_ends_it_as_its_parent_does() -> None:
    building = Building()
    for entered in (building, building.a_pass()):
        with entered:
            child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                with building, building:
                    pass
                with building.a_pass():
                    os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
