"""Makes the shared fixtures known to every test, and every process of the tests one that can be interrupted.

Also the order of the files of tests: with `--dist loadfile` a process that has nothing left to do takes the next whole
file, so what is begun last should be short.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests.support import draws, swift_disk
from tests.support.after_import import after_import, read_certificates_once
from tests.support.one_thread import THREADS
from tests.support.parts import chosen, relative
from tests.support.quick_compiling import compare_quickly
from tests.support.quick_measuring import measure_little
from tests.support.survivors import end_with_this_process
from tests.support.sweeps import leave_the_rest_to_the_long_run

PROCESSOR_SECONDS = "processor seconds"
"""Property of a test: what the processes that it started took together; shown at the end of the test run."""
SPENT = "spent processor seconds"
"""Property of a test: what it took with its fixtures, and processes that have ended; shown as sums of rooms."""

pytest_plugins = ["tests.support.crash_servers", "tests.support.hub_fixtures"]

# A shell starts what runs in its background with interrupts ignored, and whatever that starts would ignore them too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Fixtures of a module, tests, and the processes that these start compute with the same number of threads.
os.environ["OMP_NUM_THREADS"] = str(THREADS)
after_import("torch", lambda torch: torch.set_num_threads(THREADS))

# What a developer has set is not for tests: their splits would be in that folder, their servers want that key.
for _variable in ("RABBITLLM_HOME", "RABBITLLM_LOG", "RABBITLLM_API_KEY"):
    os.environ.pop(_variable, None)

# Tests do not wait for the disk; commands that they start do.
swift_disk.install()

# For processes that tests start: the half of what `tests.support` does.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# The same examples each time, and no deadlines: how long one takes says nothing on a machine that others use.
after_import("hypothesis", lambda hypothesis: hypothesis.settings.load_profile("ci"))

# The command line is the same in each test that calls it; making it takes 20 ms.
after_import("typer.testing", lambda testing: setattr(testing, "_get_command", cache(testing._get_command)))

# What clients of HTTP trust is read in 20 ms, for each client of each test.
for _library in ("httpx", "httpx2"):
    after_import(f"{_library}._config", read_certificates_once)

# What plans measure of this machine is of no interest; tests of the measurements ask for their own sizes.
after_import("rabbitllm.estimate.machine", measure_little)

# A search for cycles after every 700 objects is a tenth of a compilation, and of much else; tests that need one ask.
gc.set_threshold(10_000, 10, 10)

# In a fresh clone every kernel is compiled once.
after_import("numba.core.targetconfig", compare_quickly)

if os.environ.get("RABBITLLM_TEST_VECTORS") == "emulated":
    from tests.support import emulated_vectors

    emulated_vectors.install()


def _equal_codes(functional: Any) -> None:
    """Without fused multiply-add, bitsandbytes' 8bit table has other last bits than everywhere else (`int8_code`)."""
    import torch

    from rabbitllm.quant.schemes import code_values

    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        functional.name2qmap["dynamic"] = code_values("8bit")


after_import("bitsandbytes.functional", _equal_codes)

BITS = frozenset(
    [
        "frozen/test_families.py",
        "frozen/test_generate.py",
        "frozen/test_on_disk.py",
        "generation/test_session.py",
        "generation/test_batch.py",
        "generation/test_kv_cache.py",
        "generation/test_packed_batch.py",
        "generation/test_model_runner.py",
        "batch_jobs/test_answers.py",
        "evaluation/test_compare.py",
        "evaluation/test_every_family.py",
        "engine/test_around_the_weights.py",
        "engine/test_double.py",
        "engine/test_embedding_rows.py",
        "engine/test_experts.py",
        "engine/test_fake_gpu.py",
        "engine/test_families.py",
        "engine/test_hybrid_caches.py",
        "engine/test_forwards.py",
        "engine/test_meta_logits.py",
        "engine/test_published.py",
        "engine/test_published_conversions.py",
        "engine/test_reading.py",
        "engine/test_streamer.py",
        "engine/test_weight_tensors.py",
        "quant/test_bfloat_products.py",
        "quant/test_vectors.py",
        "quant/test_compression.py",
        "quant/test_quantize_kernels.py",
        "quant/test_fitting.py",
        "quant/test_products.py",
        "quant/test_kernel_trial.py",
        "quant/test_nested_scales.py",
        "base/test_openmp.py",
        "pipeline/test_families.py",
        "pipeline/test_spread.py",
        "prepare/test_mixed.py",
        "generation/scoring/test_every_family.py",
        "generation/scoring/test_activation_offload.py",
        "generation/scoring/test_score.py",
        "server/test_embeddings.py",
        "server/test_openai_client.py",
        "test_auto_model.py",
    ]
)
"""Files whose tests compare bits, tokens or products; they are marked `bits`, and `tools/matrix.py` runs them."""

FIRST = (
    "ray/test_on_a_cluster.py",
    "generation/test_batch_drafts.py",
    "cli/test_imported_modules.py",
    "generation/test_lookahead.py",
    "generation/test_self_draft.py",
    "test_attacks.py",
    "generation/test_rewind.py",
    "generation/test_preemption.py",
    "prepare/test_damaged_checkpoints.py",
    "splitter/test_without_flock.py",
    "engine/test_transformers_check.py",
    "prepare/test_two_at_once.py",
    "splitter/test_stateful.py",
    "server/test_outside_fields.py",
    "engine/test_copy_files.py",
    "engine/test_thinkers.py",
    "test_strings.py",
    "splitter/test_power_cut.py",
    "cli/test_start.py",
    "engine/test_in_forks.py",
    "generation/test_swapped_to_file.py",
    "engine/test_streams.py",
    "base/test_logs.py",
    "splitter/test_announced_need.py",
    "prepare/test_mixed.py",
    "generation/test_fairness.py",
    "splitter/test_failing_disk.py",
    "server/test_drafts.py",
    "engine/test_interrupts.py",
    "cli/test_doctor.py",
    "cli/test_wrong_types.py",
)
"""Files with few tests that take long, the longest ones first. By their number of tests, which orders the others, they
would be begun last."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the files of tests")
    parser.addoption("--listed", metavar="FILE", help="run what this file in tests/ names, a file or a test a line")


def pytest_configure(config: pytest.Config) -> None:
    end_with_this_process()
    draws.SHARE = 4 if "not long" in config.option.markexpr else 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One a core: a process waits a quarter of its time, but one more takes 7 % longer in all."""
    return os.cpu_count() or 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.scheduling import Scheduling

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def listed(config: pytest.Config) -> Sequence[str]:
    """Files and tests, relative to the folder of tests; none: all are to run.

    As arguments of pytest they would have it import the conftest of each of their rooms in every process at once.
    """
    name = config.getoption("--listed")
    return Path(__file__).with_name(name).read_text().splitlines() if name else ()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py" or not (lines := listed(config)):
        return None
    return relative(collection_path) not in {line.partition("::")[0] for line in lines} or None


def import_a_share(config: pytest.Config) -> None:
    """Import the tests that are this process's share of all, before it collects them.

    All processes collect all tests, in the same order, and each would compile every one that has changed; so each
    compiles its share, and finds the others compiled.
    """
    worker: Mapping[str, Any] = getattr(config, "workerinput", {})
    if not worker or config.args_source is not pytest.Config.ArgsSource.TESTPATHS or listed(config):
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[number::count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it says what is wrong
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """No search for cycles looks at libraries and tests, half a second each time: they stay to the end."""
    gc.disable()
    try:
        import_a_share(session.config)
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Give marks, and draw what is run of wide sweeps, before others are left out by them; put in order what stays."""
    for item in items:
        if relative(item.path) in BITS:
            item.add_marker(pytest.mark.bits)
    leave_the_rest_to_the_long_run(items)
    if lines := {f"tests/{line}" for line in listed(config)}:
        items[:] = [item for item in items if {item.nodeid.partition(mark)[0] for mark in ("::", "[")} & lines]
    yield
    if part := config.getoption("--part"):
        files = chosen((relative(item.path) for item in items), part)
        config.hook.pytest_deselected(items=[item for item in items if relative(item.path) not in files])
        items[:] = [item for item in items if relative(item.path) in files]
    put_in_order(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What earlier files of tests have imported and kept is no longer searched for cycles.

    Otherwise each search takes half a second, and each load on a GPU makes one. A long test has more time than others
    before it is taken for one that hangs.
    """
    if item.get_closest_marker("long") is not None and (seconds := item.config.getini("faulthandler_timeout")):
        descriptor = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(float(seconds) * LONGER, file=descriptor, exit=True)
    if item.path != item.config.stash.get(FILE, None):
        item.config.stash[FILE] = item.path
        gc.collect()
        gc.freeze()


LONGER = 12
FILE = pytest.StashKey[Path]()
"""The file of the test before."""


class Clock:
    """Processor time of this process and of those that it started and waited for."""

    def __init__(self) -> None:
        self._before = self._now()

    def lap(self) -> float:
        """Seconds since the lap before."""
        before, self._before = self._before, self._now()
        return self._before - before

    @staticmethod
    def _now() -> float:
        return sum(os.times()[:4])


CLOCK = pytest.StashKey[Clock]()


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[CLOCK] = Clock()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append((SPENT, item.config.stash[CLOCK].lap()))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the processor time of each room, and the times that tests recorded, the longest first."""
    rooms: Counter[str] = Counter()
    for report in terminalreporter.stats.get("", []):
        folders = report.nodeid.partition("::")[0].split("/")[1:-1]
        rooms[folders[0] if folders else "tests of the whole"] += dict(report.user_properties).get(SPENT, 0)
    if rooms:
        terminalreporter.section(f"{PROCESSOR_SECONDS}: {rooms.total():.0f} in all")
    for room, seconds in rooms.most_common():
        terminalreporter.line(f"{seconds:8.1f}  {room}")
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    found = [(dict(getattr(report, "user_properties", ())).get(PROCESSOR_SECONDS), report) for report in reports]
    taken = sorted(((seconds, report.nodeid) for seconds, report in found if seconds is not None), reverse=True)
    if taken:
        terminalreporter.section(PROCESSOR_SECONDS)
    for seconds, name in taken:
        terminalreporter.line(f"{seconds:8.1f}  {name}")


def put_in_order(items: list[pytest.Item]) -> None:
    """Files with long tests first, then those with many tests; within a file nothing is changed."""
    folder = Path(__file__).parent
    turns = {folder / name: turn for turn, name in enumerate(FIRST)}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (turns.get(item.path, len(turns)), -tests[item.path], item.path))
