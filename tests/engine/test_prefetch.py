"""Fixed buffers that are filled ahead of use: order, overlap, reuse, and no buffer lost after any error.

The prefetcher, the loader on real layer files, the uploader on a device that shows every race, and host memory.
"""

from __future__ import annotations

import gc
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rabbitllm.base.options import RunOptions
from rabbitllm.engine import prefetch, skeleton
from rabbitllm.engine._weights import map_weights
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import SLOTS, STAGING, Budget, PlacedUnit, Placement, Tier
from rabbitllm.engine.prefetch import (
    BufferSlot,
    FilledSlot,
    HostBuffers,
    Loader,
    Prefetcher,
    Uploader,
    bytes_of,
    keep_units,
    largest,
)
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, ReadMode, SpanReader
from rabbitllm.engine.units import UnitSource, find_units, source_of
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.telemetry.passes import PINNED_UPLOAD, READ, READ_WAIT, UPLOAD, UPLOAD_WAIT
from rabbitllm.telemetry.profiler import Profiler
from tests.support.builders import build_checkpoint
from tests.support.draws import draws
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import split


class Filler:
    """Jobs that write a number into a buffer when `gate` is open, and record the order."""

    def __init__(self, slots: int) -> None:
        self.ahead = Prefetcher([BufferSlot(torch.zeros(1, dtype=torch.uint8)) for _ in range(slots)], "fill")
        self.gate = threading.Event()
        self.gate.set()
        self.done: list[str] = []

    def request(self, name: str) -> None:
        def fill(slot: BufferSlot) -> str:
            assert self.gate.wait(600)
            slot.buffer.fill_(int(name))
            self.done.append(name)
            return f"ticket {name}"

        self.ahead.request(name, fill)

    def coming(self, names: str) -> list[str]:
        """The names that have a buffer, filled or not."""
        return [name for name in names if name in self.ahead._pending]

    def fail(self, name: str) -> None:
        def fail(slot: BufferSlot) -> None:
            raise ValueError(name)

        self.ahead.request(name, fail)


@pytest.fixture
def filler() -> Iterator[Filler]:
    prefetcher = Filler(2)
    yield prefetcher
    prefetcher.gate.set()
    prefetcher.ahead.close()


def test_taken_slot_is_the_requested_one(filler: Filler) -> None:
    for name in ("1", "2", "3"):
        filler.request(name)
        loaded = filler.ahead.take(name)
        assert (loaded.unit, loaded.ticket, loaded.slot.buffer.item()) == (name, f"ticket {name}", int(name))
        filler.ahead.give_back(loaded)


def test_requests_wait_for_buffers_in_order(filler: Filler) -> None:
    for name in "12345":
        filler.request(name)
    assert filler.coming("12345") == ["1", "2"]
    for name in "12345":
        loaded = filler.ahead.take(name)
        assert loaded.slot.buffer.item() == int(name)
        filler.ahead.give_back(loaded)
    assert filler.done == list("12345")


def test_repeated_request_is_one(filler: Filler) -> None:
    filler.request("1")
    filler.request("1")
    filler.ahead.give_back(filler.ahead.take("1"))
    assert filler.done == ["1"]


def test_longest_free_buffer_is_next(filler: Filler) -> None:
    used = []
    for name in "1234":
        filler.request(name)
        loaded = filler.ahead.take(name)
        used.append(loaded.slot.buffer.data_ptr())
        filler.ahead.give_back(loaded)
    assert used[0] != used[1]
    assert used[2:] == used[:2]


def test_mark_of_a_slot_reaches_its_next_job(filler: Filler) -> None:
    seen: list[Any] = []
    for index in range(4):
        filler.ahead.request("x", lambda slot: seen.append(slot.left))
        filler.ahead.give_back(filler.ahead.take("x"), index)
    assert seen == [None, None, 0, 1]


def test_forgotten_requests_free_their_buffers_even_while_running(filler: Filler) -> None:
    filler.gate.clear()
    for name in "1234":
        filler.request(name)
    filler.ahead.forget(but=["4"])
    assert filler.coming("1234") == []
    filler.request("5")
    assert filler.coming("45") == ["4", "5"]
    filler.gate.set()
    for name in "45":
        assert filler.ahead.take(name).slot.buffer.item() == int(name)
    # the one that was at work ended, before its buffer was filled again
    assert filler.done == ["1", "4", "5"]


def test_error_is_raised_by_take_and_loses_no_buffer(filler: Filler) -> None:
    for _ in range(5):
        filler.fail("1")
        with pytest.raises(ValueError, match="1"):
            filler.ahead.take("1")
        assert not filler.coming("1")
    for name in "12":
        filler.request(name)
    assert [filler.ahead.take(name).slot.buffer.item() for name in "12"] == [1, 2]


def test_error_of_an_untaken_unit_is_forgotten(filler: Filler) -> None:
    filler.fail("1")
    filler.fail("2")
    filler.ahead.forget()
    for name in "34":
        filler.request(name)
    assert [filler.ahead.take(name).slot.buffer.item() for name in "34"] == [3, 4]


def test_taking_more_than_the_buffers_is_an_error(filler: Filler) -> None:
    for name in "123":
        filler.request(name)
    held = [filler.ahead.take(name) for name in "12"]
    with pytest.raises(RuntimeError, match="no free buffer for 3"):
        filler.ahead.take("3")
    filler.ahead.give_back(held[1])
    assert filler.ahead.take("3").slot is held[1].slot
    assert held[0].slot.buffer.item() == 1


def test_interrupts_in_a_call_lose_no_slot(filler: Filler) -> None:
    """A KeyboardInterrupt may come between any two lines."""
    import sys

    interrupts = 0
    calls = [
        lambda: filler.request("1"),
        lambda: filler.ahead.forget(but=["2"]),
        lambda: filler.ahead.take("2"),
    ]
    for call in calls:
        for line in range(40):
            filler.ahead.forget()
            filler.request("2")
            count = 0

            def interrupt(frame: Any, event: str, argument: Any, line: int = line) -> Any:
                nonlocal count
                if not frame.f_code.co_filename.endswith("prefetch.py"):
                    return None
                if event == "line":
                    count += 1
                    if count == line:
                        raise KeyboardInterrupt
                return interrupt

            taken = None
            sys.settrace(interrupt)
            try:
                taken = call()
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                sys.settrace(None)
            if taken is not None:
                filler.ahead.give_back(taken)
            for slot in filler.ahead._slots:  # what `take` was about to hand out is the caller's to give back
                slot.taken = False
            for name in "345":
                filler.ahead.forget()
                filler.request(name)
                loaded = filler.ahead.take(name)
                assert loaded.slot.buffer.item() == int(name)
                filler.ahead.give_back(loaded)
    assert interrupts > 20


def test_closing_ends_the_thread(filler: Filler) -> None:
    filler.ahead.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        filler.request("1")


LAYERS = [f"model.layers.{i}" for i in range(6)]


class Opened:
    """A split directory and the units of its model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = LayerStore(directory)
        config = skeleton.read_config(directory)
        model = skeleton.build_skeleton(directory, config, torch.float32, None)
        weights = map_weights(model, self.store.tensors, str(directory))
        self.sources = {unit.name: source_of(unit, weights, self.store) for unit in find_units(model)}
        self.profiler = Profiler()

    def loader(self, slots: int = 2, way: ReadMode = THROUGH_THE_CACHE) -> Loader:
        streamed = {name: self.sources[name] for name in LAYERS}
        device = CpuDevice()
        buffers = [device.host_buffer(largest(streamed)) for _ in range(slots)]
        return Loader(streamed, SpanReader(self.store, way), device, self.profiler, buffers, slots)

    def file(self, unit: str) -> Path:
        (name,) = {span.file for span in self.sources[unit].spans}
        return self.directory / name

    def is_right(self, loaded: FilledSlot) -> bool:
        """Whether every tensor in the slot has the bytes that safetensors finds in the layer file."""
        source: UnitSource = self.sources[loaded.unit]
        part = source.part_of(loaded.slot.buffer)
        expected = load_file(self.file(loaded.unit))
        actual = {spec.name: part(spec) for tensor in source.stored.values() for spec in tensor.parts}
        return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def sound_split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("prefetch") / "model"
    return split(build_checkpoint(model, "llama", shards=2, num_hidden_layers=6))


@pytest.fixture
def opened(sound_split: Path, tmp_path: Path) -> Opened:
    """A copy, which a test may damage."""
    return Opened(shutil.copytree(sound_split, tmp_path / "split"))


def until(condition: Callable[[], bool]) -> bool:
    """Whether something comes true within seconds."""
    end = time.monotonic() + 600
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def test_slots_have_the_bytes_of_the_layer_file(opened: Opened) -> None:
    loader = opened.loader()
    for name in LAYERS * 2:
        loaded = loader.take(name)
        assert loaded.unit == name
        assert opened.is_right(loaded)
        loader.give_back(loaded)
    assert loader.loads == 12


def test_requested_units_are_loaded_once(opened: Opened) -> None:
    loader = opened.loader()
    loader.request(LAYERS[0])
    loader.request(LAYERS[0])
    assert until(lambda: loader.loads == 1)
    assert opened.is_right(loader.take(LAYERS[0]))
    assert loader.loads == 1


def test_request_waits_for_a_slot(opened: Opened) -> None:
    loader = opened.loader(slots=2)
    first, second = loader.take(LAYERS[0]), loader.take(LAYERS[1])
    loader.request(LAYERS[2])
    time.sleep(0.05)
    assert loader.loads == 2
    assert opened.is_right(first)
    loader.give_back(first)
    assert opened.is_right(loader.take(LAYERS[2]))
    assert opened.is_right(second)


def test_buffers_are_allocated_once(opened: Opened) -> None:
    loader = opened.loader(slots=2)
    seen = set()
    for name, following in pairwise(LAYERS * 3):
        loaded = loader.take(name)
        loader.request(following)
        seen.add(loaded.slot.buffer.data_ptr())
        loader.give_back(loaded)
    assert len(seen) == 2
    assert all(address % 4096 == 0 for address in seen)


def test_wrong_prediction_loads_once_and_loses_no_slot(opened: Opened) -> None:
    loader = opened.loader(slots=2)
    for name in LAYERS:
        loaded = loader.take(name)
        loader.request(LAYERS[0])  # never what comes next
        assert opened.is_right(loaded)
        loader.give_back(loaded)
    held = [loader.take(name) for name in LAYERS[:2]]
    assert all(map(opened.is_right, held))


@pytest.mark.parametrize("slots", [1, 2])
def test_several_unused_requests(opened: Opened, slots: int) -> None:
    loader = opened.loader(slots)
    for name in LAYERS[1:]:
        loader.request(name)
    loaded = loader.take(LAYERS[0])
    assert opened.is_right(loaded)
    loader.give_back(loaded)
    assert opened.is_right(loader.take(LAYERS[5]))


def test_truncated_file_is_named_and_loses_no_slot(opened: Opened) -> None:
    loader = opened.loader(slots=2)
    path = opened.file(LAYERS[1])
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    for _ in range(5):
        with pytest.raises(OSError, match=f"{path.name} ends at byte"):
            loader.take(LAYERS[1])
    path.write_bytes(whole)
    assert opened.is_right(loader.take(LAYERS[1]))
    assert opened.is_right(loader.take(LAYERS[2]))


def test_failed_prefetch_of_an_unused_unit_is_forgotten(opened: Opened) -> None:
    loader = opened.loader(slots=2)
    path = opened.file(LAYERS[1])
    whole = path.read_bytes()
    path.unlink()
    loader.request(LAYERS[1])
    assert until(lambda: loader.loads == 1)
    assert opened.is_right(loader.take(LAYERS[4]))
    path.write_bytes(whole)
    assert opened.is_right(loader.take(LAYERS[1]))


def test_interrupted_wait_loses_no_slot(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = opened.loader(slots=2)

    class Interrupted:
        def result(self) -> None:
            raise KeyboardInterrupt

    pending = loader._prefetcher._pending
    for name in LAYERS[:3]:
        loader.prefetch([name])
        slot, under_way = pending[name]
        monkeypatch.setitem(pending, name, (slot, Interrupted()))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            loader.take(name)
        assert name in pending
        pending[name] = slot, under_way
    held = [loader.take(LAYERS[4]), loader.take(LAYERS[5])]
    assert all(map(opened.is_right, held))


def test_profiler_has_reads_and_waits(opened: Opened) -> None:
    loader = opened.loader()
    loader.give_back(loader.take(LAYERS[2]))
    stages = opened.profiler.layers[LAYERS[2]]
    assert stages[READ].nbytes == opened.sources[LAYERS[2]].stored_bytes
    assert stages[READ_WAIT].count == 1


def test_closing_ends_the_reading_thread(opened: Opened) -> None:
    loader = opened.loader()
    loader.take(LAYERS[0])
    loader.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        loader.take(LAYERS[1])


@pytest.mark.long
def test_uncompressed_model_is_loaded_and_run_without_bitsandbytes(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    code = (
        "import sys; from rabbitllm import AutoModel; import torch\n"
        "model = AutoModel.from_pretrained(sys.argv[1], device='cpu', show_layer_progress=False)\n"
        "model.generate(torch.tensor([[3, 4]]), max_new_tokens=2)\n"
        "assert 'bitsandbytes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


class Disk(SpanReader):
    """Real reads, in the order that `read` says, which wait as long as `gate` is closed."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened.store, THROUGH_THE_CACHE)
        self._opened = opened
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[str] = []

    def read(self, spans: Any, buffer: memoryview) -> None:
        spans = tuple(spans)
        (unit,) = (name for name in LAYERS if self._opened.sources[name].spans == spans)
        self.begun.append(unit)
        assert self.gate.wait(600)
        super().read(spans, buffer)


class Lanes:
    """An uploader over six layers, some of them kept in pinned memory."""

    def __init__(self, opened: Opened, kept: Sequence[str]) -> None:
        self.opened = opened
        self.gpu = FakeGpu(0)
        self.memory = HostBuffers(self.gpu)
        self.disk = Disk(opened)
        self.kept = self.memory.units
        for name in kept:
            self.kept[name] = self.memory.take(opened.sources[name].buffer_bytes)
            SpanReader(opened.store, THROUGH_THE_CACHE).read(opened.sources[name].spans, bytes_of(self.kept[name]))
        streamed = {name: opened.sources[name] for name in LAYERS}
        self.up = Uploader(streamed, self.disk, self.gpu, opened.profiler, self.memory)

    def pass_over(self, names: Sequence[str], then: Sequence[str] = ()) -> None:
        """Take, check and give back each, with the following ones prefetched."""
        for position, name in enumerate(names):
            loaded = self.up.take(name)
            self.up.prefetch([*names[position + 1 :], *then])
            assert self.opened.is_right(loaded), name
            self.up.give_back(loaded)

    def slots_in_use(self) -> int:
        return sum(slot.taken for slot in self.up._prefetcher._slots)


PATTERNS = {
    "all read": (),
    "all kept": LAYERS,
    "every other one": LAYERS[::2],
    "the first ones": LAYERS[:3],
    "all but one": LAYERS[:5],
}


@pytest.fixture(params=PATTERNS)
def lanes(request: pytest.FixtureRequest, opened: Opened) -> Iterator[Lanes]:
    opened_lanes = Lanes(opened, PATTERNS[request.param])
    yield opened_lanes
    opened_lanes.up.close()


def test_uploaded_slots_have_the_bytes_of_the_layer_files(lanes: Lanes) -> None:
    for _ in range(3):
        lanes.pass_over(LAYERS, LAYERS)
    assert lanes.slots_in_use() == 0
    # each pass reads what is not kept, and the first of the next pass may be read ahead
    away = len(LAYERS) - len(lanes.kept)
    assert 3 * away <= lanes.up.loads <= 3 * away + STAGING


def test_unexpected_units_are_loaded(lanes: Lanes) -> None:
    for name in (*LAYERS, *reversed(LAYERS), LAYERS[2], LAYERS[2], LAYERS[5]):
        loaded = lanes.up.take(name)
        assert lanes.opened.is_right(loaded)
        lanes.up.give_back(loaded)


def test_wrong_predictions_lose_no_slot(lanes: Lanes) -> None:
    for turn in range(12):
        name = LAYERS[turn % 6]
        loaded = lanes.up.take(name)
        lanes.up.prefetch([LAYERS[(turn + 3) % 6], LAYERS[(turn + 2) % 6], LAYERS[(turn + 5) % 6]])
        assert lanes.opened.is_right(loaded)
        lanes.up.give_back(loaded)
    held = [lanes.up.take(name) for name in LAYERS[:SLOTS]]
    assert all(map(lanes.opened.is_right, held))


@settings(max_examples=draws(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=6)), max_size=25),
    st.sets(st.integers(0, 5)),
)
def test_any_order_with_any_prediction(opened: Opened, steps: list[tuple[int, list[int]]], kept: set[int]) -> None:
    lanes = Lanes(opened, [LAYERS[index] for index in sorted(kept)])
    for index, expected in steps:
        loaded = lanes.up.take(LAYERS[index])
        lanes.up.prefetch(dict.fromkeys(LAYERS[other] for other in expected if other != index))
        assert opened.is_right(loaded)
        lanes.up.give_back(loaded)
    lanes.pass_over(LAYERS)
    lanes.up.close()


def test_kept_units_are_copied_from_their_memory(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS)
    for name in LAYERS:
        opened.file(name).rename(opened.file(name).with_suffix(".gone"))
    for _ in range(2):
        for name in LAYERS:
            loaded = lanes.up.take(name)
            loaded.slot.buffer.fill_(0)  # a slot is not what is kept
            lanes.up.give_back(loaded)
    assert lanes.gpu.uploaded_from == [lanes.kept[name].data_ptr() for name in LAYERS] * 2
    assert lanes.disk.begun == []
    assert set(lanes.gpu.locked) == {buffer.data_ptr() for buffer in lanes.kept.values()}


def test_kept_unit_does_not_wait_for_a_later_read(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS[:4])
    lanes.disk.gate.clear()
    first = lanes.up.take(LAYERS[0])
    lanes.up.prefetch(LAYERS[1:])
    assert until(lambda: lanes.disk.begun == [LAYERS[4]])  # read already, while there is more to come before it
    lanes.up.give_back(first)
    lanes.pass_over(LAYERS[1:4], LAYERS[4:])
    assert lanes.disk.begun == [LAYERS[4]]
    lanes.disk.gate.set()
    lanes.pass_over(LAYERS[4:])
    assert lanes.disk.begun == LAYERS[4:]


def test_staging_buffers_limit_reads_ahead(opened: Opened) -> None:
    lanes = Lanes(opened, [LAYERS[1], LAYERS[2], LAYERS[4]])
    first = lanes.up.take(LAYERS[0])
    lanes.up.prefetch([*LAYERS[1:], LAYERS[0]])
    assert until(lambda: lanes.disk.begun == [LAYERS[0], LAYERS[3], LAYERS[5]])
    lanes.up.give_back(first)
    lanes.pass_over(LAYERS[1:4], LAYERS[4:])
    assert lanes.disk.begun == [LAYERS[0], LAYERS[3], LAYERS[5]]


def test_slots_limit_copies_ahead(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS)
    first = lanes.up.take(LAYERS[0])
    lanes.up.prefetch(LAYERS[1:])
    assert until(lambda: lanes.gpu.uploads == SLOTS)
    assert not until_soon(lambda: lanes.gpu.uploads > SLOTS)
    lanes.up.give_back(first)
    assert until(lambda: lanes.gpu.uploads == SLOTS + 1)  # without another request
    second = lanes.up.take(LAYERS[1])
    assert lanes.opened.is_right(second)


def until_soon(condition: Any) -> bool:
    threading.Event().wait(0.05)
    return bool(condition())


def test_taking_more_than_the_slots_is_an_error(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS[:2])
    held = [lanes.up.take(name) for name in LAYERS[:SLOTS]]
    with pytest.raises(RuntimeError, match=r"no free buffer for model\.layers\.4"):
        lanes.up.take(LAYERS[4])
    for loaded in held:
        assert opened.is_right(loaded)
        lanes.up.give_back(loaded)
    lanes.pass_over(LAYERS)


def test_truncated_file_is_named_and_loses_no_buffer(opened: Opened) -> None:
    lanes = Lanes(opened, [LAYERS[0], LAYERS[2]])
    path = opened.file(LAYERS[1])
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    for _ in range(2 * (SLOTS + STAGING)):
        loaded = lanes.up.take(LAYERS[0])
        lanes.up.prefetch(LAYERS[1:])
        lanes.up.give_back(loaded)
        with pytest.raises(OSError, match=f"{path.name} ends at byte"):
            lanes.up.take(LAYERS[1])
    path.write_bytes(whole)
    for _ in range(2):
        lanes.pass_over(LAYERS, LAYERS)


def test_failed_copy_loses_no_buffer(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("the link is down")

    for _ in range(2 * (SLOTS + STAGING)):
        with monkeypatch.context() as patched:
            patched.setattr(lanes.gpu, "upload", fail)
            with pytest.raises(RuntimeError, match="the link is down"):
                lanes.up.take(LAYERS[1])
    lanes.pass_over(LAYERS)


def test_failed_read_of_an_unused_unit_is_forgotten(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS[3:])
    path = opened.file(LAYERS[1])
    gone = path.rename(path.with_suffix(".gone"))
    loaded = lanes.up.take(LAYERS[0])
    lanes.up.prefetch(LAYERS[1:3])
    assert until(lambda: LAYERS[2] in lanes.disk.begun)
    lanes.up.give_back(loaded)
    lanes.pass_over(LAYERS[3:])
    gone.rename(path)
    lanes.pass_over(LAYERS)


def test_interrupted_wait_loses_no_buffer(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def result(self) -> None:
            raise KeyboardInterrupt

    pending = lanes.up._prefetcher._pending
    for name in LAYERS[:4]:
        lanes.up.prefetch([name])
        slot, under_way = pending[name]
        pending[name] = slot, Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            lanes.up.take(name)
        pending[name] = slot, under_way
    lanes.pass_over(LAYERS)


def test_profiler_has_bytes_by_source(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS[:2])
    lanes.pass_over(LAYERS)
    stages = {name: set(totals) for name, totals in opened.profiler.layers.items()}
    for name in LAYERS:
        kept = {PINNED_UPLOAD, UPLOAD_WAIT}
        assert stages[name] == (kept if name in lanes.kept else {READ, READ_WAIT, UPLOAD, UPLOAD_WAIT})
        copied = opened.profiler.layers[name][PINNED_UPLOAD if name in lanes.kept else UPLOAD]
        assert (copied.count, copied.nbytes) == (1, opened.sources[name].stored_bytes)
        assert copied.seconds > 0


def test_without_measurement_the_host_does_not_wait_for_copies(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the next read into the same buffer: the computation waits on the device, by `arrive`."""
    opened.profiler.enabled = False
    lanes = Lanes(opened, LAYERS)

    def refuse(ticket: Any) -> None:
        raise AssertionError("the host waits for a copy")

    monkeypatch.setattr(lanes.gpu, "landed", refuse)
    for _ in range(2):
        lanes.pass_over(LAYERS, LAYERS)


def test_buffer_is_not_refilled_during_its_copy(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that wait the copies, which the test device carries out late, have other bytes."""
    opened.profiler.enabled = False
    for waits in (True, False):
        lanes = Lanes(opened, ())
        late: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(lanes.gpu, "arrive", late.append)
            if not waits:
                patched.setattr(lanes.gpu, "landed", lambda ticket: None)
            first, second = (lanes.up.take(name) for name in LAYERS[:2])
            lanes.up.give_back(second)
            lanes.up.take(LAYERS[2])
        lanes.gpu.arrive(late[0])
        assert opened.is_right(first) == waits


def test_closing_ends_both_threads(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS[:1])
    lanes.pass_over(LAYERS)
    lanes.up.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        lanes.up.take(LAYERS[1])


def test_memory_is_unpinned_when_it_is_no_longer_needed(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS[:2])
    gpu, begun = lanes.gpu, lanes.disk.begun
    lanes.pass_over(LAYERS[:4], LAYERS[4:])
    assert len(gpu.locked) == 2 + STAGING
    assert until(lambda: len(begun) == 4)
    del lanes
    assert until(lambda: gc.collect() >= 0 and not gpu.locked)


def placed(opened: Opened, pinned: list[str], devices: list[str]) -> Placement:
    """Six layers, split evenly over devices, some of them pinned and the rest streamed."""
    units = []
    for index, name in enumerate(LAYERS):
        tier = Tier.PINNED if name in pinned else Tier.STREAMED
        units.append(PlacedUnit(name, devices[index * len(devices) // 6], tier, opened.sources[name].stored_bytes))
    return Placement(tuple(units), tuple(Budget(name, 0, False) for name in devices))


def test_buffers_are_given_back_together() -> None:
    gpu = FakeGpu(0)
    memory = HostBuffers(gpu)
    buffers = [memory.take(5000), memory.take_anyhow(100)]
    assert [len(buffer) for buffer in buffers] == [5000, 100]
    assert set(gpu.locked) == {buffer.data_ptr() for buffer in buffers}
    del memory
    gc.collect()
    assert gpu.locked == {}


def test_running_copies_end_before_memory_is_unlocked() -> None:
    gpu = FakeGpu(0)
    memory = HostBuffers(gpu)
    host, buffer = memory.take(4).fill_(7), gpu.device_buffer(4)
    gpu.upload(host, buffer, gpu.leave())
    del memory
    gc.collect()
    assert gpu.locked == {}
    assert buffer.tolist() == [7] * 4


def test_required_buffers_are_unlocked_if_locking_fails(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu(0, lockable=4096)
    memory = HostBuffers(gpu)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        buffer = memory.take_anyhow(8192)
    assert (buffer.shape, buffer.dtype) == ((8192,), torch.uint8)
    assert gpu.locked == {}
    assert "8,192 bytes of host memory could not be pinned" in caplog.records[0].getMessage()
    with pytest.raises(RuntimeError, match="no more memory"):
        memory.take(8192)


@pytest.mark.parametrize("lockable", [0, 5 * 8192, 1 << 20])
def test_slots_are_locked_in_pieces(
    lockable: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of the driver costs only what is beyond it."""
    monkeypatch.setattr(prefetch, "PIECE_BYTES", 2 * 8192 + 100)
    gpu = FakeGpu(0, lockable=lockable)
    memory = HostBuffers(gpu)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        slots = memory.take_slots(7, 8192)
    for index, slot in enumerate(slots):
        slot.fill_(index)
    assert [slot.tolist() for slot in slots] == [[index] * 8192 for index in range(7)]
    assert all(slot.data_ptr() % 4096 == 0 for slot in slots)
    pinned = {0: 0, 5 * 8192: 4}.get(lockable, 7)
    assert sum(gpu.locked.values()) == pinned * 8192
    assert len(gpu.locked) == -(-pinned // 2)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (pinned < 7)
    assert not messages or f"{(7 - pinned) * 8192:,} bytes of host memory could not be pinned" in messages[0]


def test_each_device_gets_its_units(opened: Opened) -> None:
    gpus = {gpu.name: gpu for gpu in (FakeGpu(0), FakeGpu(1))}
    before = placed(opened, LAYERS[1:5], list(gpus))
    after, kept = keep_units(before, opened.sources, {**gpus, "cpu": CpuDevice()}, opened.store)
    assert after == before
    assert {name: list(host.units) for name, host in kept.items()} == {"fake:0": LAYERS[1:3], "fake:1": LAYERS[3:5]}
    for name, gpu in gpus.items():
        assert set(gpu.locked) == {buffer.data_ptr() for buffer in kept[name].units.values()}
        for unit, buffer in kept[name].units.items():
            source = opened.sources[unit]
            part = source.part_of(buffer)
            from safetensors.torch import load_file

            expected = load_file(opened.file(unit))
            assert all(torch.equal(part(tensor.parts[0]), expected[key]) for key, tensor in source.stored.items())


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, OSError])
@pytest.mark.parametrize("enough", [True, False])
def test_refused_units_are_in_ordinary_memory_or_streamed_with_a_warning(
    opened: Opened,
    error: type[Exception],
    enough: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In ordinary memory if only pinning is refused."""
    gpu = FakeGpu(0)
    take, asked = gpu.host_buffer, []

    def some(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        if len(asked) > 2:
            raise error("enough")
        return take(nbytes)

    def none(nbytes: int) -> torch.Tensor:
        raise MemoryError("none")

    monkeypatch.setattr(gpu, "host_buffer", some)
    if not enough:
        monkeypatch.setattr(prefetch, "aligned_host", none)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        after, kept = keep_units(placed(opened, LAYERS[:5], [gpu.name]), opened.sources, {gpu.name: gpu}, opened.store)
    assert len(asked) == 3  # no more requests after the first refusal
    assert len(gpu.locked) == 2
    ordinary = enough and error is RuntimeError
    assert list(kept[gpu.name].units) == LAYERS[: 5 if ordinary else 2]
    assert after == placed(opened, LAYERS[: 5 if ordinary else 2], [gpu.name])
    messages = [record.getMessage() for record in caplog.records]
    assert ("can be pinned (enough); 3 layers of" in messages[0]) == (error is RuntimeError)
    assert ("3 layers of" in messages[-1] and "are read from the disk" in messages[-1]) != ordinary
    for unit, buffer in kept[gpu.name].units.items():
        source, expected = opened.sources[unit], load_file(opened.file(unit))
        part = source.part_of(buffer)
        assert all(torch.equal(part(tensor.parts[0]), expected[key]) for key, tensor in source.stored.items())


def test_unreadable_file_is_an_error_and_leaves_no_locked_memory(opened: Opened) -> None:
    gpu = FakeGpu(0)
    opened.file(LAYERS[1]).unlink()
    with pytest.raises(OSError):  # noqa: PT011
        keep_units(placed(opened, LAYERS[:3], [gpu.name]), opened.sources, {gpu.name: gpu}, opened.store)
    gc.collect()
    assert gpu.locked == {}


def test_a_model_is_loaded_once_reads_of_a_dropped_one_have_freed_their_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thread of the dropped model reads ahead, for a pass that never comes."""
    folder, gpu = split(build_checkpoint(tmp_path / "model", "llama")), FakeGpu(0, capacity=1 << 30)
    options = RunOptions(max_memory={gpu.name: 0, "cpu": 0}, show_progress=False)
    model: Any = load_model(folder, options, None, [gpu])
    highest, resident, real, is_reading, may_go_on = (
        gpu.peak,
        gpu.used,
        SpanReader.read,
        threading.Event(),
        threading.Event(),
    )

    def read(self: SpanReader, *given: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            is_reading.set()
            assert may_go_on.wait(600)
        real(self, *given)

    monkeypatch.setattr(SpanReader, "read", read)
    next(iter(model.streamer.executors.values())).loader.prefetch(["model.layers.0", "model.layers.1"])
    assert is_reading.wait(600)
    del model
    gc.collect()
    assert gpu.used > 0
    threading.Timer(0.2, may_go_on.set).start()
    following = load_model(folder, options, None, [gpu])
    assert gpu.peak == highest
    gc.collect()
    assert gpu.used == resident
    assert following.placement.moved_bytes


def test_a_load_waits_while_another_model_reads() -> None:
    """The jobs of other models come and go meanwhile."""
    ended, fillers = threading.Event(), [Filler(1) for _ in range(2)]

    def keep_reading(filler: Filler) -> None:
        while not ended.is_set():
            filler.request("0")
            filler.ahead.give_back(filler.ahead.take("0"))

    threads = [threading.Thread(target=keep_reading, args=(filler,)) for filler in fillers]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        limit = time.monotonic() + 1
        while time.monotonic() < limit:
            prefetch.wait_for_jobs()
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join(600)


def test_a_load_does_not_wait_for_cancelled_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a thread that has ended stay so."""
    job: Future[Any] = Future()
    monkeypatch.setattr(prefetch, "_JOBS", {job})
    job.cancel()
    begin = time.monotonic()
    prefetch.wait_for_jobs(1200)
    assert time.monotonic() < begin + 600
