"""Models are built beside no pass, one at a time."""

from __future__ import annotations

import os
import threading

from rabbitllm.base.building import Building

PATIENCE = 30.0


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
