"""For tests of plans: what this machine gives is measured for milliseconds, and its times mean nothing."""

from __future__ import annotations

from typing import Any

import pytest


def measure_little(machine: Any) -> None:
    """Have the module make every measurement on as little as it can be; with its own sizes those of a plan take 5 s."""
    machine.SHAPE = (64, 512)
    machine.SET_BYTES = 1 << 16
    machine.SECONDS = machine.READ_SECONDS = 0.0
    machine.SAMPLE_BYTES = machine.PIECE_BYTES = 1 << 16
    machine.UPLOADED_BYTES = 1 << 16
    machine.LAYERS, machine.TOKENS = (1, 2), 2
    machine.BETWEEN_BYTES = 1 << 12
    machine.ROUNDS = 1


@pytest.fixture(autouse=True)
def quick_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the quantizer's rate is measured, which has tests of its own."""
    measure_quickly(monkeypatch)


def measure_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fixture does, for a process of its own."""
    from rabbitllm.estimate import machine
    from rabbitllm.estimate.split_estimate import Rate

    measure_little(machine)
    monkeypatch.setattr("rabbitllm.estimate.split_estimate.quantize_rate", lambda *arguments, **named: Rate(50e6, 1))
