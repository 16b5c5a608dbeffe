"""The collector is off inside and as it was afterwards, whatever happens."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest

from rabbitllm.base.collection import uncollected


def test_collector_is_off_inside_and_on_after_an_error() -> None:
    @uncollected()
    def fail() -> None:
        with uncollected():
            pass
        assert not gc.isenabled()
        raise KeyError

    gc.enable()  # a test that interrupts a call anywhere may have left it off
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_collector_stays_off_if_it_was_off() -> None:
    @uncollected()
    def asked() -> bool:
        return gc.isenabled()

    gc.disable()
    try:
        assert not asked()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert not asked()
    assert gc.isenabled()


def test_collector_is_on_after_several_threads() -> None:
    def work() -> None:
        while time.monotonic() < until:
            with uncollected():
                assert not gc.isenabled()

    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(8):
            until = time.monotonic() + 0.05
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert gc.isenabled()
    finally:
        sys.setswitchinterval(switches)
        gc.enable()
