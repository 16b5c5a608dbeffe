"""Functions are compiled with or without a place to keep them, and kept as long as what they are made of."""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numba
import pytest

from rabbitllm.base import compiling, progress
from rabbitllm.engine import _norm_kernels
from rabbitllm.quant import _product_kernels, _vectors, quantize_kernels
from tests.support.forked import in_a_fork
from tests.support.fresh_process import python

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "rabbitllm" / "demo" / "model"

NOWHERE = """
import numba
import numba.core.caching
caching = numba.core.caching
(caching.CacheImpl if hasattr(caching, "CacheImpl") else caching._CacheImpl)._locator_classes = []
try:
    numba.njit(cache=True)(lambda: 1)
except RuntimeError as error:
    print("numba:", error)
from rabbitllm.quant import _kernels, _vectors, products, quantize
from rabbitllm.quant.schemes import Quantized
assert quantize._compiled_kernels_agree("4bit")
assert products.multiplies(Quantized("4bit", (64, 64), "float32")) == bool(_vectors.lanes())
if width := _vectors.lanes():
    assert _kernels.kernel("bytes", "4bit", 256)[0]
print("compiled")
"""


@pytest.mark.long
def test_compiling_without_a_writable_cache() -> None:
    ran = python(NOWHERE)
    refused, done = ran.stdout.splitlines()
    assert refused.startswith("numba: cannot cache function")
    assert done == "compiled"


@pytest.mark.long
def test_kernels_are_cached_for_the_next_process(tmp_path: Path) -> None:
    """What numba cannot keep (a function that is handed on and not inlined, for one) it compiles again, and warns."""
    code = """
import warnings
from numba.core.errors import NumbaWarning
warnings.simplefilter("error", NumbaWarning)
from rabbitllm.quant import _kernels, _vectors
if width := _vectors.lanes():
    for scheme in ("4bit", "8bit"):
        for method, lanes in (("codes", 64), ("bytes", 256), ("bfloats", width)):
            _kernels.kernel(method, scheme, lanes)
    for method in ("codes", "panels"):
        _kernels.kernel(method, "bfloat16", width)
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    python(code, env=environment)


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_what_an_interrupt_amid_compilation_leaves_is_used_or_made_again(tmp_path: Path) -> None:
    model, rabbitllm = shutil.copytree(DEMO, tmp_path / "model"), [sys.executable, "-m", "rabbitllm"]
    subprocess.run([*rabbitllm, "pull", model, "--compression", "4bit"], check=True, capture_output=True)
    command = [*rabbitllm, "run", model, "--compression", "4bit", "--max-new-tokens", "4", "What is a rabbit?"]
    answers = set()
    for seconds in (1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / f"after {seconds}")}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
            time.sleep(seconds)
            first.send_signal(signal.SIGINT)
            errors = first.communicate(timeout=600)[1]
        assert b"Traceback" not in errors
        assert first.returncode in (0, 130, -signal.SIGINT)  # a fast machine has finished
        again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
        answers.add(again.stdout)
    assert len(answers) == 1


KERNELS = """
from rabbitllm.base.compiling import c_function, compiled
from made_with.numbers import FACTOR
from numba import types
@compiled
def times(x):
    return x * FACTOR
def put(data):
    data[0] = FACTOR
def put_by_c():
    place = ctypes.c_int64()
    kept = c_function(types.void(types.CPointer(types.int64)), put)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kept.address)(ctypes.addressof(place))
    return place.value, kept.cache_hits
import ctypes
"""


def heard_of(compiles: Callable[[], Any], heard: list[list[progress.Event]]) -> Any:
    """What it returns; the events meanwhile are added as a list."""
    heard.append([])
    with progress.listening(heard[-1].append, shows=False):
        return compiles()


def test_changed_sources_recompile_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant in another module is in the machine code, which is taken up as long as both are what they were.

    Displays of progress hear of what is compiled, and not of what is taken up.
    """
    package = tmp_path / "made_with"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))

    def of_a_new_process(factor: int, began: bool = True) -> tuple[int, bool, int, bool]:
        (package / "numbers.py").write_text(f"FACTOR = {factor}\n")
        changed = (package / "numbers.py").stat().st_ctime
        monkeypatch.setattr(compiling, "_BEGAN", changed if began else math.nextafter(changed, 0))
        compiling.digest_of.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "made_with"]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        kernels = importlib.import_module("made_with.kernels")
        heard: list[list[progress.Event]] = []
        product, (by_c, hits) = (
            heard_of(compiles, heard) for compiles in (partial(kernels.times, 1), kernels.put_by_c)
        )
        assert [bool(events) for events in heard] == [not kernels.times.stats.cache_hits, not hits]
        return product, bool(kernels.times.stats.cache_hits), by_c, bool(hits)

    assert of_a_new_process(2) == (2, False, 2, False)
    assert of_a_new_process(2) == (2, True, 2, True)
    assert of_a_new_process(3) == (3, False, 3, False)
    assert of_a_new_process(2) == (2, True, 2, True)
    # what was imported before the sources changed is not kept as theirs
    assert of_a_new_process(4, began=False) == (4, False, 4, False)
    assert of_a_new_process(4) == (4, False, 4, False)


@pytest.mark.skipif(os.name == "nt", reason="forks")
def test_processes_that_need_a_function_at_once_compile_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of one that was killed holds nobody up."""
    forks = multiprocessing.get_context("fork")
    together = forks.Barrier(2)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "digest_of", lambda package: "0" * 32)
    times = compiling.compiled(times_two)

    def die_with_the_lock() -> None:
        with compiling._alone(times._cache, times_two):
            os.kill(os.getpid(), signal.SIGKILL)

    def compiles() -> int:
        together.wait()
        assert times(21) == 42
        return sum(times.stats.cache_misses.values())

    killed = forks.Process(target=die_with_the_lock)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(in_a_fork, [compiles] * 2)) == [0, 1]


@pytest.mark.skipif(os.name == "nt", reason="forks")
def test_locks_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process is waited for once, whatever it has locked, and not for what is in the cache."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "digest_of", lambda package: "0" * 32)
    monkeypatch.setattr(compiling, "_PATIENCE", 0.1)
    fcntl = pytest.importorskip("fcntl")
    numbers = [compiling.compiled(function) for function in (times_two, times_three, times_four)]

    def compiles() -> None:
        slept = list[float]()
        monkeypatch.setattr(compiling.time, "sleep", slept.append)
        assert (numbers[0](4), len(slept)) == (8, 0)
        assert numbers[1](4) == 12
        count = len(slept)
        assert (numbers[2](4), len(slept)) == (16, count)
        assert count

    in_a_fork(lambda: numbers[0](4))
    with contextlib.ExitStack() as stack:
        for times in numbers:
            path = f"{times._cache.cache_path}/{times.__module__}.{times.__name__}.lock"
            fcntl.flock(stack.enter_context(open(path, "ab")), fcntl.LOCK_EX)
        in_a_fork(compiles)


def times_two(x: int) -> int:
    return 2 * x


def times_three(x: int) -> int:
    return 3 * x


def times_four(x: int) -> int:
    return 4 * x


def test_changed_helpers_recompile_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compiling` has a few that become part of kernels of all packages."""
    package, digests = tmp_path / "package", set[str | None]()
    package.mkdir()
    (package / "kernels.py").touch()
    monkeypatch.setattr(compiling, "files", lambda name: tmp_path if name == "rabbitllm.base" else package)
    for number in range(2):
        (tmp_path / "compiling.py").write_text(f"NUMBER = {number}\n")
        monkeypatch.setattr(compiling, "_BEGAN", (tmp_path / "compiling.py").stat().st_ctime)
        digests.add(compiling.digest_of.__wrapped__("a package"))
    assert len(digests) == 2
    assert None not in digests


def test_kernels_use_only_modules_of_their_package() -> None:
    """Only of these and of `compiling` a digest is part of a kernel's name."""
    for module in (_product_kernels, quantize_kernels, _vectors, _norm_kernels):
        package = module.__name__.rpartition(".")[0]
        for value in vars(module).values():
            name = getattr(value, "__module__", None) or ""
            assert not name.startswith("rabbitllm.") or name == compiling.__name__ or name.startswith(package + ".")
