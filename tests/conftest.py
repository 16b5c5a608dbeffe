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

from tests.support.one_thread import THREADS
from tests.support.sweeps import leave_the_rest_to_the_long_run

pytest_plugins = ["tests.support.hub_fixtures"]

# A shell starts what runs in its background with interrupts ignored, and whatever that starts would ignore them too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Fixtures of a module, tests, and the processes that these start compute with the same number of threads.
os.environ["OMP_NUM_THREADS"] = str(THREADS)
torch.set_num_threads(THREADS)

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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Draw what is run of wide sweeps before others are left out by their marks, and put in order what stays."""
    leave_the_rest_to_the_long_run(items)
    yield
    put_in_order(items)


def put_in_order(items: list[pytest.Item]) -> None:
    """Files with long tests first, then those with many tests; within a file nothing is changed."""
    folder = Path(__file__).parent
    turns = {folder / name: turn for turn, name in enumerate(FIRST)}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (turns.get(item.path, len(turns)), -tests[item.path], item.path))
