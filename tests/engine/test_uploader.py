"""The lanes between host memory and a device, on a device that shows every race: order, overlap, and nothing lost."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rabbitllm.engine.loader import bytes_of
from rabbitllm.engine.pinned_memory import HostBuffers
from rabbitllm.engine.placement import SLOTS, STAGING
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, SpanReader
from rabbitllm.engine.uploader import Uploader
from rabbitllm.telemetry.profiler import PINNED_UPLOAD, READ, READ_WAIT, UPLOAD, UPLOAD_WAIT
from tests.engine.test_loader import LAYERS, Opened, until
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import split


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
        assert self.gate.wait(60)
        super().read(spans, buffer)


class Lanes:
    """An uploader over six layers, some of them kept in pinned memory."""

    def __init__(self, opened: Opened, kept: Sequence[str]) -> None:
        self.opened = opened
        self.gpu = FakeGpu(0)
        self.memory = HostBuffers(self.gpu)
        self.disk = Disk(opened)
        self.kept = {}
        for name in kept:
            self.kept[name] = self.memory.take(opened.sources[name].buffer_bytes)
            SpanReader(opened.store, THROUGH_THE_CACHE).read(opened.sources[name].spans, bytes_of(self.kept[name]))
        streamed = {name: opened.sources[name] for name in LAYERS}
        self.up = Uploader(streamed, self.kept, self.disk, self.gpu, opened.profiler, self.memory)

    def pass_over(self, names: Sequence[str], then: Sequence[str] = ()) -> None:
        """Take, check and give back each, expecting the ones behind it."""
        for at, name in enumerate(names):
            loaded = self.up.take(name)
            self.up.expect([*names[at + 1 :], *then])
            assert self.opened.is_right(loaded), name
            self.up.give_back(loaded)

    def slots_in_use(self) -> int:
        return sum(slot.taken for slot in self.up._ahead._slots)


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return Opened(split(build_checkpoint(tmp_path / "model", "llama", shards=2, num_hidden_layers=6)))


PATTERNS = {
    "all read": (),
    "all kept": LAYERS,
    "every other one": LAYERS[::2],
    "the first ones": LAYERS[:3],
    "all but one": LAYERS[:5],
}


@pytest.fixture(params=PATTERNS)
def lanes(request: pytest.FixtureRequest, opened: Opened) -> Iterator[Lanes]:
    made = Lanes(opened, PATTERNS[request.param])
    yield made
    made.up.close()


def test_brings_the_bytes_of_the_layer_files(lanes: Lanes) -> None:
    for _ in range(3):
        lanes.pass_over(LAYERS, LAYERS)
    assert lanes.slots_in_use() == 0
    # each pass reads what is not kept, and the first of the next pass may be read ahead
    away = len(LAYERS) - len(lanes.kept)
    assert 3 * away <= lanes.up.loads <= 3 * away + STAGING


def test_unexpected_units_come_too(lanes: Lanes) -> None:
    for name in (*LAYERS, *reversed(LAYERS), LAYERS[2], LAYERS[2], LAYERS[5]):
        loaded = lanes.up.take(name)
        assert lanes.opened.is_right(loaded)
        lanes.up.give_back(loaded)


def test_wrong_predictions_cost_no_slot(lanes: Lanes) -> None:
    for turn in range(12):
        name = LAYERS[turn % 6]
        loaded = lanes.up.take(name)
        lanes.up.expect([LAYERS[(turn + 3) % 6], LAYERS[(turn + 2) % 6], LAYERS[(turn + 5) % 6]])
        assert lanes.opened.is_right(loaded)
        lanes.up.give_back(loaded)
    held = [lanes.up.take(name) for name in LAYERS[:SLOTS]]
    assert all(map(lanes.opened.is_right, held))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=6)), max_size=25),
    st.sets(st.integers(0, 5)),
)
def test_any_order_with_any_expectation(opened: Opened, steps: list[tuple[int, list[int]]], kept: set[int]) -> None:
    lanes = Lanes(opened, [LAYERS[number] for number in sorted(kept)])
    for number, expected in steps:
        loaded = lanes.up.take(LAYERS[number])
        lanes.up.expect(dict.fromkeys(LAYERS[other] for other in expected if other != number))
        assert opened.is_right(loaded)
        lanes.up.give_back(loaded)
    lanes.pass_over(LAYERS)
    lanes.up.close()


def test_kept_units_are_copied_from_where_they_are(opened: Opened) -> None:
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


def test_a_kept_unit_does_not_wait_for_a_read_behind_it(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS[:4])
    lanes.disk.gate.clear()
    first = lanes.up.take(LAYERS[0])
    lanes.up.expect(LAYERS[1:])
    assert until(lambda: lanes.disk.begun == [LAYERS[4]])  # read already, while there is more to come before it
    lanes.up.give_back(first)
    lanes.pass_over(LAYERS[1:4], LAYERS[4:])
    assert lanes.disk.begun == [LAYERS[4]]
    lanes.disk.gate.set()
    lanes.pass_over(LAYERS[4:])
    assert lanes.disk.begun == LAYERS[4:]


def test_the_disk_is_read_as_far_ahead_as_buffers_reach(opened: Opened) -> None:
    lanes = Lanes(opened, [LAYERS[1], LAYERS[2], LAYERS[4]])
    first = lanes.up.take(LAYERS[0])
    lanes.up.expect([*LAYERS[1:], LAYERS[0]])
    assert until(lambda: lanes.disk.begun == [LAYERS[0], LAYERS[3], LAYERS[5]])
    lanes.up.give_back(first)
    lanes.pass_over(LAYERS[1:4], LAYERS[4:])
    assert lanes.disk.begun == [LAYERS[0], LAYERS[3], LAYERS[5]]


def test_slots_bound_what_is_copied_ahead(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS)
    first = lanes.up.take(LAYERS[0])
    lanes.up.expect(LAYERS[1:])
    assert until(lambda: lanes.gpu.uploads == SLOTS)
    assert not until_soon(lambda: lanes.gpu.uploads > SLOTS)
    lanes.up.give_back(first)
    assert until(lambda: lanes.gpu.uploads == SLOTS + 1)  # without another request
    second = lanes.up.take(LAYERS[1])
    assert lanes.opened.is_right(second)


def until_soon(condition: Any) -> bool:
    threading.Event().wait(0.05)
    return bool(condition())


def test_more_than_there_are_slots_at_once(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS[:2])
    held = [lanes.up.take(name) for name in LAYERS[:SLOTS]]
    with pytest.raises(RuntimeError, match=r"no free buffer for model\.layers\.4"):
        lanes.up.take(LAYERS[4])
    for loaded in held:
        assert opened.is_right(loaded)
        lanes.up.give_back(loaded)
    lanes.pass_over(LAYERS)


def test_a_file_cut_short_is_named_and_costs_no_buffer(opened: Opened) -> None:
    lanes = Lanes(opened, [LAYERS[0], LAYERS[2]])
    path = opened.file(LAYERS[1])
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    for _ in range(2 * (SLOTS + STAGING)):
        loaded = lanes.up.take(LAYERS[0])
        lanes.up.expect(LAYERS[1:])
        lanes.up.give_back(loaded)
        with pytest.raises(OSError, match=f"{path.name} ended at byte"):
            lanes.up.take(LAYERS[1])
    path.write_bytes(whole)
    for _ in range(2):
        lanes.pass_over(LAYERS, LAYERS)


def test_a_copy_that_fails_costs_no_buffer(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("the link is down")

    for _ in range(2 * (SLOTS + STAGING)):
        with monkeypatch.context() as patched:
            patched.setattr(lanes.gpu, "upload", fail)
            with pytest.raises(RuntimeError, match="the link is down"):
                lanes.up.take(LAYERS[1])
    lanes.pass_over(LAYERS)


def test_a_failed_read_of_what_is_not_needed_is_forgotten(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS[3:])
    path = opened.file(LAYERS[1])
    gone = path.rename(path.with_suffix(".gone"))
    loaded = lanes.up.take(LAYERS[0])
    lanes.up.expect(LAYERS[1:3])
    assert until(lambda: LAYERS[2] in lanes.disk.begun)
    lanes.up.give_back(loaded)
    lanes.pass_over(LAYERS[3:])
    gone.rename(path)
    lanes.pass_over(LAYERS)


def test_an_interrupted_wait_costs_nothing(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def result(self) -> None:
            raise KeyboardInterrupt

    pending = lanes.up._ahead._pending
    for name in LAYERS[:4]:
        lanes.up.expect([name])
        slot, under_way = pending[name]
        pending[name] = slot, Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            lanes.up.take(name)
        pending[name] = slot, under_way
    lanes.pass_over(LAYERS)


def test_records_bytes_by_where_they_come_from(opened: Opened) -> None:
    lanes = Lanes(opened, LAYERS[:2])
    lanes.pass_over(LAYERS)
    stages = {name: set(found) for name, found in opened.profiler.layers.items()}
    for name in LAYERS:
        kept = {PINNED_UPLOAD, UPLOAD_WAIT}
        assert stages[name] == (kept if name in lanes.kept else {READ, READ_WAIT, UPLOAD, UPLOAD_WAIT})
        copied = opened.profiler.layers[name][PINNED_UPLOAD if name in lanes.kept else UPLOAD]
        assert (copied.count, copied.nbytes) == (1, opened.sources[name].stored_bytes)
        assert copied.seconds > 0


def test_nothing_waits_for_a_copy_where_nothing_is_measured(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the next read into the same buffer: the computation waits on the device, by `arrive`."""
    opened.profiler.enabled = False
    lanes = Lanes(opened, LAYERS)

    def refuse(ticket: Any) -> None:
        raise AssertionError("the host waits for a copy")

    monkeypatch.setattr(lanes.gpu, "landed", refuse)
    for _ in range(2):
        lanes.pass_over(LAYERS, LAYERS)


def test_a_buffer_is_not_read_into_while_it_is_copied_from(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
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
