"""What kernels are tried on finds one that is off, and leaves the caller's random numbers alone."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.quant._kernels import agrees, in_threads
from rabbitllm.quant.products import sample
from tests.quant.test_products import meant

SHAPES = ((1, 7, 192), (3, 5, 2048))


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
def test_correct_and_wrong_kernels(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    def trials(factor: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = RandomTensors()
        for inputs, rows, columns in SHAPES:
            matrix, x = sample(scheme, (rows, columns), random), random.normal(inputs, columns, dtype=torch.float32)
            operands = matrix.form, matrix.payload, matrix.absmax, matrix.table
            right = (x.double() @ meant(operands).T).float()
            wrong = factor if inputs == SHAPES[1][0] else 1  # the second one alone
            yield right * wrong, x @ matrix.dequantized(torch.float32).T

    before = torch.get_rng_state()
    assert agrees("tried", trials(1))
    for factor, error in ((1.001, "1.0e-03"), (0.5, "5.0e-01"), (math.nan, "nan")):
        assert not agrees("tried", trials(factor))
        assert caplog.messages[-1] == f"The kernel for products tried is off by {error} here and is not used."
    assert torch.equal(torch.get_rng_state(), before)


TRIAL = """
import os, time
import torch
from rabbitllm.quant._kernels import agrees
torch.set_num_threads(4)
def products():
    found = torch.ones(1 << 20).mul(2)  # by a team of four threads
    assert threads() > before + 1
    yield found, found
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
assert agrees("tried", products())
until = time.monotonic() + 600
while threads() > before and time.monotonic() < until:
    time.sleep(0.05)
print(threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_trial_leaves_no_threads() -> None:
    """Two teams are more threads than cores: libgomp then lets all of them sleep at each barrier."""
    done = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, text=True, timeout=600)
    assert done.stdout == "0\n", done.stderr


def test_an_interrupt_waits_for_the_other_threads() -> None:
    """The caller frees afterwards what they write."""
    begun, ended = threading.Event(), threading.Event()

    def work(number: int) -> None:
        if number == 0:
            begun.wait()
            raise KeyboardInterrupt
        begun.set()
        time.sleep(0.1)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        in_threads(work, 2)
    assert ended.is_set()
