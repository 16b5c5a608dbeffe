"""Makes the shared fixtures known to every test, and every process of the tests one that can be interrupted.

Also the order of the files of tests: with `--dist loadfile` a process that has nothing left to do takes the next whole
file, so what is begun last should be short.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.support.parts import chosen, relative
from tests.support.sweeps import leave_the_rest_to_the_long_run

pytest_plugins = ["tests.support.hub_fixtures"]

# A shell starts what runs in its background with interrupts ignored, and whatever that starts would ignore them too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Several threads only wait for each other over matrices as small as those of tests; and on some processors their number
# changes last bits, so fixtures of a module, tests, and the processes that these start compute with the same number.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# The same examples each time, and no deadlines: how long one takes says nothing on a machine that others use.
settings.load_profile("ci")

FIRST = (
    "benchmarks/test_lazy_load.py",
    "engine/test_hybrid_caches.py",
    "engine/test_double.py",
    "benchmarks/test_kaggle_72b.py",
    "cli/test_library.py",
    "batching/test_texts_in_a_file.py",
    "cli/test_batch.py",
    "serve/test_under_load.py",
    "comparison/test_quality.py",
    "spread/test_on_a_cluster.py",
    "examples/test_kaggle_70b.py",
    "demo/test_train.py",
    "cli/test_serve.py",
    "cli/test_bench.py",
    "benchmarks/test_scale_model.py",
    "splitter/test_stateful.py",
    "serve/test_embeddings.py",
    "test_attacks.py",
    "cli/test_quality.py",
    "demo/test_run.py",
    "test_few_descriptors.py",
    "cli/test_chat.py",
    "comparison/test_compare.py",
    "splitter/test_repair.py",
    "cli/test_worker.py",
    "splitter/test_memory.py",
    "benchmarks/test_quantisers.py",
    "layers/test_compiling.py",
)
"""Files with few tests that take long, the longest ones first. By their number of tests, which orders the others, they
would be begun last."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the files of tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Draw what is run of wide sweeps before others are left out by their marks, and put in order what stays."""
    leave_the_rest_to_the_long_run(items)
    yield
    if part := config.getoption("--part"):
        files = chosen((relative(item.path) for item in items), part)
        config.hook.pytest_deselected(items=[item for item in items if relative(item.path) not in files])
        items[:] = [item for item in items if relative(item.path) in files]
    put_in_order(items)


def put_in_order(items: list[pytest.Item]) -> None:
    """Files with long tests first, then those with many tests; within a file nothing is changed."""
    folder = Path(__file__).parent
    turns = {folder / name: turn for turn, name in enumerate(FIRST)}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (turns.get(item.path, len(turns)), -tests[item.path], item.path))
