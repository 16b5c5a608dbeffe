"""Ctrl-C in every wait of a pass: the next pass has the same logits, and no slot, thread or pinned piece is lost."""

from __future__ import annotations

import ast
import concurrent.futures
import inspect
import platform
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.engine import _expert_pool, _first_use, devices, span_reader
from rabbitllm.engine.placement import EXPERT_STAGING, SLOTS
from rabbitllm.engine.prefetch import Uploader
from rabbitllm.engine.span_reader import ReadMode, SpanReader
from rabbitllm.storage.readers import Readers, ReadRequest
from tests.engine.test_fake_gpu import MANY_EXPERTS, load_on
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import ALL, INPUT, load, split

ENGINE = Path(inspect.getfile(devices)).parent
LATE_SECONDS = 0.2
HELD_SECONDS = 0.5
"""After which jobs go on that were held until an interrupt, in case that something waits for them before it comes."""


class Waits:
    """Counts the waits of the main thread in the engine, and interrupts one.

    Jobs that begin after the wait before it are held, so that it is a wait for something that is not done.

    Attributes:
        places: functions that waited, as "module.Class.function".
        count: waits so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: set[str] = set()
        self.count = 0
        self._target = 0
        self._may_read = threading.Event()
        self._may_read.set()
        monkeypatch.setattr(Future, "result", self._around(Future.result))
        for module in (_expert_pool, _first_use, span_reader):
            monkeypatch.setattr(module, "wait", self._around(concurrent.futures.wait))
        for name in ("landed", "synchronise"):
            monkeypatch.setattr(FakeGpu, name, self._around(getattr(FakeGpu, name)))
        monkeypatch.setattr(SpanReader, "read", self._held(SpanReader.read))
        monkeypatch.setattr(FakeGpu, "upload", self._held(FakeGpu.upload))

    def interrupt(self, index: int, work: Callable[[], Any]) -> bool:
        """Do some work, with Ctrl-C in its wait of this number; whether it has so many."""
        self._target = self.count + index
        self._hold_before_the_target()
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            self._target = 0
            self._may_read.set()
        return False

    def _hold_before_the_target(self) -> None:
        if self.count == self._target - 1:
            self._may_read.clear()
            threading.Timer(HELD_SECONDS, self._may_read.set).start()

    def _around(self, ordinary: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            frame = inspect.currentframe()
            caller = frame.f_back if frame is not None else None
            is_main = threading.current_thread() is threading.main_thread()
            if caller is None or not is_main or Path(caller.f_code.co_filename).parent != ENGINE:
                return ordinary(*args, **kwargs)
            if caller.f_code.co_name == "_release":  # another test's model is freed, at any time
                return ordinary(*args, **kwargs)
            self.count += 1
            self.places.add(f"{Path(caller.f_code.co_filename).stem}.{caller.f_code.co_name}")
            if self.count == self._target:
                raise KeyboardInterrupt
            result = ordinary(*args, **kwargs)
            if self._target:
                self._hold_before_the_target()
            return result

        return wait

    def _held(self, ordinary: Callable[..., Any]) -> Callable[..., Any]:
        def job(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self._may_read.wait()
            return ordinary(*args, **kwargs)

        return job


FORWARD = {"prefetch.take"}
PROFILED = {"prefetch._record_copy", "_streamer.before", "_streamer._stop"}
EXPERTS = {"_expert_pool._settle", "_expert_pool._wait"}
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "streamed to a GPU": ({"profiling": True}, FORWARD | PROFILED),
    "pinned": ({"host": ALL, "profiling": True}, FORWARD | PROFILED),
    "streamed to the CPU": ({"gpu": False}, FORWARD),
    "experts of a GPU": ({"family": "qwen3_moe"}, FORWARD | EXPERTS),
    "experts of the host": ({"family": "qwen3_moe", "host": 1 << 19, "budget": 1 << 20}, EXPERTS),
    "experts of the CPU": ({"family": "qwen3_moe", "gpu": False, "budget": 1 << 20}, EXPERTS),
}
"""How a model is loaded, and the functions that wait in a pass of it."""
OTHERS = {
    "_copy_files.read": "while a model is loaded",
    "_first_use.wait_for": "in the first pass of a model: test_ctrl_c_while_weights_are_compared",
    "_first_use.before": "the same",
    "_first_use.after": "the same",
    "_expert_pool._fill": "in a thread of the pool",
    "_expert_pool._fill_host_slot": "in a thread of the pool",
    "_expert_pool._finish": "for compiled code: test_ctrl_c_while_compiled_code_reads",
    "_expert_pool.result": "the same",
    "_expert_pool.forget": "for a request that was taken back, which is over",
    "_expert_pool._send_transit": "after a use that broke off, for a read that stays noted until it is over",
    "prefetch._read": "in the thread that reads",
    "prefetch._release": "when a model is freed",
    "prefetch.wait_for_jobs": "before a model is loaded",
    "span_reader._read_in_place": "in the thread that reads",
    "_streamer._part": "while a model is loaded",
}
"""Functions that wait elsewhere."""


def case(name: str, tmp_path: Path) -> tuple[Any, FakeGpu | None]:
    options = dict(CASES[name][0])
    family = options.pop("family", "llama")
    more: dict[str, Any] = MANY_EXPERTS if family == "qwen3_moe" else {"num_hidden_layers": 3}
    directory = split(build_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16, **more))
    budget = options.pop("budget", 0)
    if not options.pop("gpu", True):
        return load(directory, budget), None
    gpu = FakeGpu(0)
    return load_on([gpu], directory, budget, options.pop("host", 0), **options), gpu


def check_nothing_is_lost(model: Any) -> None:
    """Between two passes."""
    loaders = [executor.loader for executor in model.streamer.executors.values()]
    for loader in loaders:  # what is prefetched for the next pass
        for _, future in list(loader._prefetcher._pending.values()):
            future.result(30)
    loaders += [loader._disk for loader in loaders if isinstance(loader, Uploader)]
    workers = [thread for loader in loaders if (thread := loader._prefetcher._thread) is not None]
    workers += [pool._threads for pool in model.streamer.pools.values()]
    assert all(thread.is_alive() for worker in workers for thread in worker._pool._threads)
    assert not any(slot.taken for loader in loaders for slot in loader._prefetcher._slots)
    for pool in model.streamer.pools.values():
        assert not pool._sent
        assert not any(slot.pending for slot in (*pool._slots, *pool._transit))
        assert len(pool._staging) == (0 if pool._device.shares_host_memory else EXPERT_STAGING)


@pytest.mark.parametrize("name", CASES)
def test_ctrl_c_in_a_wait_of_a_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as there are slots."""
    monkeypatch.setattr(_expert_pool, "MAX_TRANSIT", 1)  # so that experts go through slots one after the other
    model, gpu = case(name, tmp_path)
    waits = Waits(monkeypatch)
    with torch.inference_mode():
        expected = model(INPUT).logits
        other_input = INPUT.flip(1)
        model(other_input)
        waits.places = set()
        model(INPUT)
        assert waits.places == CASES[name][1]
        held = (gpu.locked.copy(), gpu.allocated) if gpu is not None else None
        index, came = 0, [True]
        while all(came):  # how many waits there are depends on the experts in the slots
            index += 1
            came = [waits.interrupt(index, lambda: model(INPUT)) for _ in range(SLOTS)]
            assert torch.equal(model(INPUT).logits, expected), index
            check_nothing_is_lost(model)
            model(other_input)
        assert index > len(waits.places)
    assert held == ((gpu.locked, gpu.allocated) if gpu is not None else None)


def test_ctrl_c_while_a_read_is_handed_to_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has no future of it; it is not to write later into a slot that has another expert by then."""
    model, _ = case("experts of the CPU", tmp_path)
    ordinary, countdown, over = ThreadPoolExecutor.submit, [0], list[bool]()

    def submit(self: ThreadPoolExecutor, job: Callable[..., Any], *args: Any) -> Future[Any]:
        countdown[0] -= self._thread_name_prefix.startswith("experts")
        if countdown[0]:
            return ordinary(self, job, *args)

        def late() -> None:
            time.sleep(LATE_SECONDS)
            job(*args)
            over.append(True)

        ordinary(self, late)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    inputs = [INPUT[:, index : index + 1] for index in range(6)]
    with torch.inference_mode():
        expected = [model(ids).logits for ids in inputs]
        for index in range(1, 7):
            model(INPUT.flip(1))
            countdown[0] = index
            with pytest.raises(KeyboardInterrupt):
                model(INPUT)
            while len(over) < index:
                for ids, logits in zip(inputs, expected, strict=True):
                    assert torch.equal(model(ids).logits, logits), index
            for ids, logits in zip(inputs, expected, strict=True):
                assert torch.equal(model(ids).logits, logits), index
            check_nothing_is_lost(model)


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="compiled code reads there")
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("owner", [Readers, ReadRequest])
def test_ctrl_c_while_compiled_code_reads(
    owner: type, is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after its requests are sent, and each is waited for."""
    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *_: ReadMode(direct=True))
    model, _ = case("experts of the CPU", tmp_path)
    inputs = [INPUT[:, index : index + 1] for index in range(6)]
    name, countdown = "send" if owner is Readers else "wait", [0]
    ordinary = getattr(owner, name)

    def interrupted(self: Any, *args: Any) -> Any:
        countdown[0] -= 1
        result = ordinary(self, *args) if countdown[0] or is_late else None
        if not countdown[0]:
            raise KeyboardInterrupt
        return result

    with torch.inference_mode():
        expected = [model(ids).logits for ids in inputs]
        model(INPUT.flip(1))
        for index in range(1, 12):
            for ids in inputs[::-1]:
                model(ids)
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                countdown[0] = index
                with pytest.raises(KeyboardInterrupt):
                    [model(ids) for ids in inputs * 4]
            for ids, logits in zip(inputs * 2, expected * 2, strict=True):
                assert torch.equal(model(ids).logits, logits), index
            model.streamer.pools["cpu"].end()
            check_nothing_is_lost(model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_ctrl_c_while_weights_are_compared(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before their first use."""
    directory = split(build_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16))
    with torch.inference_mode():
        expected = load(directory, ALL)(INPUT).logits
        waits = Waits(monkeypatch)
        load(directory, ALL)(INPUT)
        count, seen = waits.count, waits.places
        of_experts = {"_first_use.before", "_first_use.after"} if family != "llama" else set()
        assert seen == {"_first_use.wait_for"} | of_experts
        for index in range(1, count + 1):
            model = load(directory, ALL)
            assert waits.interrupt(index, lambda: model(INPUT))  # noqa: B023
            assert torch.equal(model(INPUT).logits, expected), index


def test_every_wait_of_the_engine_is_tested() -> None:
    waiting = set()
    for path in ENGINE.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef)][1:]
                inside = {id(node) for nested in inner for node in ast.walk(nested)}
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and id(node) not in inside]
                if any(_waits(call) for call in calls):
                    waiting.add(f"{path.stem}.{function.name}")
    assert waiting == set().union(*(places for _, places in CASES.values()), OTHERS)


def _waits(call: ast.Call) -> bool:
    """Whether it is a wait: for a future, or for a device."""
    if isinstance(call.func, ast.Name):
        return call.func.id in ("wait", "as_completed")
    if not isinstance(call.func, ast.Attribute):
        return False
    of_future = call.func.attr == "result" and ast.unparse(call.func.value) != "product"
    return of_future or call.func.attr in ("landed", "synchronise", "wait", "wait_for", "acquire", "join_thread")
