"""A fixture for tests of plans: what this machine gives is measured for milliseconds, and its times mean nothing."""

from __future__ import annotations

import pytest

from rabbitllm.estimate import machine
from rabbitllm.estimate.split_estimate import Rate


@pytest.fixture(autouse=True)
def quick_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement is made, on as little as it can be; but for the quantizer's, which has tests of its own."""
    measure_quickly(monkeypatch)


def measure_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fixture does, for a process of its own."""
    monkeypatch.setattr(machine, "SHAPE", (64, 512))
    monkeypatch.setattr(machine, "SET_BYTES", 1 << 18)
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    monkeypatch.setattr(machine, "READ_SECONDS", 0.0)
    monkeypatch.setattr(machine, "SAMPLE_BYTES", machine.PIECE_BYTES)
    monkeypatch.setattr(machine, "UPLOADED_BYTES", 1 << 16)
    monkeypatch.setattr(machine, "TOKENS", 2)
    monkeypatch.setattr(machine, "ROUNDS", 1)
    monkeypatch.setattr("rabbitllm.estimate.split_estimate.quantize_rate", lambda *arguments, **named: Rate(50e6, 1))
