"""Real forks of a process that has streamed a model."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

from rabbitllm.base import openmp
from rabbitllm.base.options import RunOptions
from rabbitllm.engine._first_use import ReadAhead
from rabbitllm.engine.load import load_model
from rabbitllm.engine.span_reader import FileSpan, ReadMode
from rabbitllm.errors import ForkedError, IncompleteSplitError
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.request import Request
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import FAMILIES, build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.forked import PATIENCE, in_a_fork
from tests.support.one_tiny_model import checkpoint, split_folder
from tests.support.tiny_models import INPUT, budget_that_keeps, load, split

__all__ = ["checkpoint", "split_folder"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

STREAMED = 60_000


def logits(model: Any) -> list[Any]:
    with torch.no_grad():
        return model(INPUT).logits.tolist()  # type: ignore[no-any-return]


def test_child_computes_with_a_streamed_model(split_folder: Path) -> None:
    model = load(split_folder, STREAMED, dtype="float32")
    before = logits(model)
    assert in_a_fork(lambda: logits(model)) == before
    assert in_a_fork(lambda: model.generate(INPUT, max_new_tokens=3, do_sample=False).tolist())
    assert logits(model) == before


def test_child_computes_without_its_parents_threads(split_folder: Path) -> None:
    model = load(split_folder, STREAMED, dtype="float32")
    torch.set_num_threads(2)
    large, heads = torch.ones(1000, 1000), torch.ones(2, 8, 256, 64)

    def by_a_team() -> None:
        (large @ large).exp().sum()
        scaled_dot_product_attention(heads, heads, heads)

    def work() -> tuple[list[Any], int, int]:
        threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
        by_a_team()
        own = load(split_folder, STREAMED, dtype="float32")  # which computes as the parent's does
        return [logits(model), logits(own)], threads, torch.get_num_threads()

    expected = logits(model)
    by_a_team()
    assert in_a_fork(work) == ([expected] * 2, 1, 2 if openmp.rest() else 1)
    by_a_team()
    assert logits(model) == expected
    assert torch.get_num_threads() == 2


def test_child_computes_on_one_thread_where_its_parents_team_stays(
    split_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another library of OpenMP than libgomp."""
    model = load(split_folder, STREAMED, dtype="float32")
    torch.set_num_threads(1)
    expected = logits(model)
    torch.set_num_threads(2)
    monkeypatch.setattr(openmp, "rest", lambda: False)
    assert in_a_fork(lambda: (logits(model), torch.get_num_threads())) == (expected, 1)


def test_fork_while_another_thread_computes_is_refused(split_folder: Path) -> None:
    model = load(split_folder, STREAMED, dtype="float32")
    expected = logits(model)
    inside, go_on = threading.Event(), threading.Event()

    def pause(module: Any, args: Any) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    handle = model.model.layers[1].register_forward_pre_hook(pause)
    thread = threading.Thread(target=lambda: logits(model))
    thread.start()
    assert inside.wait(PATIENCE)

    def work() -> list[Any]:
        handle.remove()
        return logits(model)

    try:
        for _ in range(2):
            with pytest.raises(ForkedError, match=r"A pass that another thread had begun belongs to process \d+"):
                in_a_fork(work)
        assert in_a_fork(lambda: model.tokenizer("12")["input_ids"])
    finally:
        go_on.set()
        thread.join()
    handle.remove()
    assert in_a_fork(work) == expected


def test_child_of_a_child(split_folder: Path) -> None:
    model = load(split_folder, STREAMED, dtype="float32")
    expected = logits(model)
    assert in_a_fork(lambda: (logits(model), in_a_fork(lambda: logits(model)))[1]) == expected


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_child_computes_with_a_resident_model(checkpoint: Path, compression: str | None) -> None:
    model = load(split(checkpoint, compression), dtype="float32", exact=False)
    assert in_a_fork(lambda: logits(model)) == logits(model)


def test_child_computes_with_streamed_experts(tmp_path: Path) -> None:
    folder = split(build_checkpoint(tmp_path / "moe", FAMILIES["mixtral"], dtype=torch.float32))
    model = load(folder, budget_that_keeps(folder, 0.5, dtype="float32"), dtype="float32")
    assert model.streamer.pools
    expected = logits(model)
    assert in_a_fork(lambda: logits(model)) == expected
    assert logits(model) == expected


def test_child_reads_experts_by_threads_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at once: it asks nothing of threads of compiled code, which it has not."""
    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *_: ReadMode(direct=True))
    folder = split(build_checkpoint(tmp_path / "moe", FAMILIES["mixtral"], dtype=torch.float32))
    model = load(folder, budget_that_keeps(folder, 0.5, dtype="float32"), dtype="float32")
    (pool,) = model.streamer.pools.values()
    expected = logits(model)
    asked = list[object]()
    monkeypatch.setattr(type(pool), "_ask", lambda self, table, module, expert, slot: asked.append(expert))
    assert in_a_fork(lambda: (logits(model), asked)) == (expected, [])
    monkeypatch.undo()
    assert logits(model) == expected


def test_child_that_exits_or_deletes_the_model(split_folder: Path) -> None:
    held = [load(split_folder, STREAMED, dtype="float32")]
    logits(held[0])
    assert in_a_fork(held.clear) is None
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE)
        try:
            sys.exit(0)
        except SystemExit:
            import concurrent.futures.thread as threads

            threads._python_exit()  # what an ordinary end of the interpreter runs first
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    logits(held[0])


class Texts(Dataset[list[int]]):
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[int]:
        ids: list[int] = self._tokenizer(f"rabbit {index}")["input_ids"]
        return ids


def test_workers_of_a_data_loader_tokenise_while_the_parent_generates(split_folder: Path) -> None:
    model = load(split_folder, STREAMED, dtype="float32")
    expected = model.generate(INPUT, max_new_tokens=3, do_sample=False).tolist()
    texts = Texts(model.tokenizer)
    batches = []
    loader = DataLoader(texts, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=PATIENCE)
    for ids in loader:
        batches.append([int(token) for token in ids])
        assert model.generate(INPUT, max_new_tokens=3, do_sample=False).tolist() == expected
    assert batches == [texts[index] for index in range(len(texts))]


def on_a_gpu(folder: Path, device: FakeGpu, memory: int) -> Any:
    options = RunOptions(max_memory={device.name: memory, "cpu": 0}, show_progress=False)
    return load_model(folder, options, devices=[device])


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_on_a_gpu_a_child_is_refused(split_folder: Path, memory: int) -> None:
    model = on_a_gpu(split_folder, FakeGpu(0), memory)
    for call in (lambda: logits(model), lambda: model.model(INPUT)):
        with pytest.raises(ForkedError, match=r"A model on a GPU belongs to process \d+, .* forked from it"):
            in_a_fork(call)


def test_host_memory_of_a_gpu_stays_locked_when_a_child_deletes_it(split_folder: Path) -> None:
    device = FakeGpu(0)
    held = [on_a_gpu(split_folder, device, 0)]
    locked = dict(device.locked)
    assert locked

    def work() -> bool:
        import gc

        held.clear()
        gc.collect()
        return device.locked == locked

    assert in_a_fork(work)


def test_batch_belongs_to_its_process(split_folder: Path) -> None:
    model, request = load(split_folder, STREAMED, dtype="float32", exact=False), Request((1, 2), max_new_tokens=1)
    with Batch(model) as batch, pytest.raises(ForkedError, match="The batch belongs to process"):
        in_a_fork(lambda: batch.submit(request, lambda event: None))


def test_uncompared_bytes_are_compared_in_the_child(split_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(split_folder, tmp_path / "split")  # of which this process has compared nothing
    layer = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(layer.read_bytes())
    store = LayerStore(folder, verify_checksums=True)
    assert store.checks is not None
    begun, go_on = threading.Event(), threading.Event()
    checks, compare = store.checks, store.checks.stored

    def slowly(file: str, ranges: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        compare(file, ranges)

    checks.stored = slowly  # type: ignore[method-assign]
    size = len(data)
    ahead = ReadAhead({"unit": [FileSpan(layer.name, size - 64, 64, 0)]}, store, checks)
    assert begun.wait(PATIENCE)
    checks.stored = compare  # type: ignore[method-assign]
    try:
        assert in_a_fork(lambda: ahead.wait_for("unit")) is None
        data[-1] ^= 1
        layer.write_bytes(data)
        with pytest.raises(IncompleteSplitError, match="is damaged"):
            in_a_fork(lambda: ahead.wait_for("unit"))
    finally:
        go_on.set()
