"""Whole models in the code for GPUs, on fake GPUs of CPU tensors that show every race; and tests that they show it."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations import sdpa_attention

from rabbitllm import AutoModel
from rabbitllm.base.options import RunOptions
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.engine import _expert_pool, forwards, placement, prefetch
from rabbitllm.engine._streamer import InputMover
from rabbitllm.engine.devices import OutOfDeviceMemory, memory_explained
from rabbitllm.engine.experts import ExpertStack
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import EXPERT_STAGING, SLOTS, STAGING, Tier
from rabbitllm.engine.prefetch import FilledSlot, Uploader
from rabbitllm.engine.span_reader import SpanReader
from rabbitllm.engine.units import UnitSource
from rabbitllm.engine.weight_tensors import AbsentWeight
from rabbitllm.errors import NotEnoughMemoryError, RabbitLLMError
from rabbitllm.prepare import SmallFiles
from rabbitllm.quant import products
from rabbitllm.store.layer_store import UnsplitStore
from rabbitllm.telemetry.passes import (
    EXPERT_TIERS,
    EXPERTS_IN_HOST_MEMORY,
    EXPERTS_ON_DEVICE,
    PINNED_UPLOAD,
    READ,
    UPLOAD,
)
from tests.engine.test_prefetch import until
from tests.support.builders import FAMILIES, SINGLE_NAME, Reference, build_checkpoint, read_tensors, reference_logits
from tests.support.fake_gpu import FakeGpu, Race, WrongDevice, current, watched
from tests.support.gguf_files import write_gguf
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import ALL, INPUT, assert_same, bytes_when_made, load, run, split, tiers

TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])
SHORT = {
    *(("llama", 1), ("llama", 2), ("gemma3", 2), ("gpt_oss", 1), ("qwen3_moe", 2), ("deepseek_v3", 2)),
    *(("qwen3_next", 2), ("opt", 2), ("t5", 1), ("t5", 2)),
}
"""Families, and on how many devices."""


def load_on(gpus: list[FakeGpu], folder: Path, budget: int = 0, host: int = 0, **options: Any) -> Any:
    """A model on fake GPUs, computing exactly, each with so many bytes for weights, and so many of host memory for all
    of them."""
    limits = {gpu.name: budget for gpu in gpus} | {"cpu": host}
    settings = {"max_memory": limits, "show_progress": False, "exact": True, **options}
    return load_model(folder, RunOptions(**settings), None, gpus)


def run_on(gpus: list[FakeGpu], folder: Path, budget: int = 0, host: int = 0, **options: Any) -> Reference:
    with watched():
        return run(load_on(gpus, folder, budget, host, **options))


def wait_for_copies_ahead(model: Any, gpu: FakeGpu) -> None:
    """Wait until the first units of the next pass are queued, for which no pass waits."""
    for _, future in model.streamer.executors[gpu.name].loader._prefetcher._pending.values():
        future.result(30)


@pytest.fixture(autouse=True)
def no_gpu_of_another_test_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "_repeating", set())
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3moe"])
@pytest.mark.parametrize(("budget", "host"), [(0, 0), (0, ALL), (ALL, 0)])
def test_gguf_file_without_a_split(
    family: str, budget: int, host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and values are rearranged on the device. To dequantize them takes no more memory than was planned."""
    file = write_gguf(tmp_path / "model.gguf", family)
    expected = run(AutoModel.from_pretrained(file, device="cpu", exact=True, layer_shards_saving_path=tmp_path / "out"))
    checkpoint, gpu = LocalCheckpoint(tmp_path, entry=file.name), FakeGpu(0, capacity=ALL)
    bind, bound = UnitSource.bind, list[str]()

    def measured(source: UnitSource, *args: Any) -> None:
        gpu.peak = before = gpu.used
        bind(source, *args)
        unaligned = max((tensor.nbytes for tensor in source.stored.values() if tensor.quantized is None), default=0)
        assert gpu.peak - before <= source.scratch_bytes + unaligned  # which is copied first
        bound.append(source.unit.name)

    monkeypatch.setattr(UnitSource, "bind", measured)
    limits = {gpu.name: budget, "cpu": host}
    with SmallFiles(checkpoint.sidecars(), checkpoint.derived(), checkpoint.folder) as small, watched():
        options = RunOptions(max_memory=limits, show_progress=False, exact=True)
        result = run(load_model(UnsplitStore(checkpoint), options, small.folder, [gpu]))
    assert_same(result, expected)
    assert bool(bound) == (budget == 0)


def test_unaligned_shards_without_a_split_stay_within_the_counted_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of a safetensors file may begin at any multiple of 8; kernels get aligned copies."""
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.float32)
    (file,) = folder.glob("*.safetensors")
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    more = (8 - (8 + length)) % 16  # spaces after the header: the data begins 8 after a multiple of 16
    header = content[8 : 8 + length] + b" " * more
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    gpu, bind, bound = FakeGpu(0, capacity=ALL), UnitSource.bind, list[str]()

    def measured(source: UnitSource, *args: Any) -> None:
        gpu.peak = before = gpu.used
        bind(source, *args)
        assert gpu.peak - before <= source.scratch_bytes
        bound.append(source.unit.name)

    monkeypatch.setattr(UnitSource, "bind", measured)
    with watched():
        options = RunOptions(max_memory={gpu.name: 0, "cpu": 0}, show_progress=False, exact=True)
        result = run(load_model(UnsplitStore(LocalCheckpoint(folder)), options, folder, [gpu]))
    assert_same(result, run(load(split(folder))))
    assert bound


# The fake itself


def test_upload_arrives_as_late_as_possible() -> None:
    gpu = FakeGpu(0)
    host, buffer = gpu.host_buffer(4), gpu.device_buffer(4)
    host.copy_(torch.tensor([1, 2, 3, 4]))
    ticket = gpu.upload(host, buffer, gpu.leave())
    assert buffer.tolist() == [255] * 4
    gpu.landed(ticket)
    assert buffer.tolist() == [255] * 4
    host.fill_(9)  # allowed once it has landed
    gpu.landed(ticket)  # a second call changes nothing
    gpu.arrive(ticket)
    assert buffer.tolist() == [1, 2, 3, 4]
    assert (gpu.uploads, gpu.uploaded_bytes, gpu.allocated) == (1, 4, 4)


def test_host_buffer_overwritten_too_early_spoils_the_copy() -> None:
    gpu = FakeGpu(0)
    host, buffer = gpu.host_buffer(4), gpu.device_buffer(4)
    host.copy_(torch.tensor([1, 2, 3, 4]))
    ticket = gpu.upload(host, buffer, gpu.leave())
    host.fill_(9)
    gpu.landed(ticket)
    gpu.arrive(ticket)
    assert buffer.tolist() == [9] * 4


def test_upload_needs_a_mark_after_the_last_use() -> None:
    gpu, other = FakeGpu(0), FakeGpu(1)
    early = gpu.leave()
    host, buffer = gpu.host_buffer(4), gpu.device_buffer(4)
    for mark in (None, early, other.leave()):
        with pytest.raises(Race, match="no mark after the last use"):
            gpu.upload(host, buffer, mark)
    mark = gpu.leave()
    gpu.arrive(gpu.upload(host, buffer, mark))
    with pytest.raises(Race):  # the computation has used the buffer since
        gpu.upload(host, buffer, mark)
    mark = gpu.leave()
    with watched():
        buffer.view(torch.float32) + 1
    with pytest.raises(Race):
        gpu.upload(host, buffer, mark)
    gpu.upload(host, buffer, gpu.leave())


def test_use_before_the_arrival_is_detected() -> None:
    gpu = FakeGpu(0)
    host, buffer = gpu.host_buffer(16), gpu.device_buffer(16)
    ticket = gpu.upload(host, buffer, gpu.leave())
    with watched():
        view = buffer[4:12]
        with pytest.raises(Race, match="before its upload has arrived"):
            view + 1
        gpu.arrive(ticket)
        assert (view + 1).sum() == 0


def test_copy_is_timed_at_its_end() -> None:
    gpu = FakeGpu(0)
    host = gpu.host_buffer(8)
    buffer = gpu.device_buffer(8)
    ticket = gpu.upload(host.fill_(3), buffer, gpu.leave())
    with pytest.raises(RuntimeError, match="the copy is not over"):
        gpu.seconds(ticket)
    gpu.arrive(ticket)
    assert gpu.seconds(ticket) > 0
    assert torch.equal(buffer, host)


def test_uploads_into_one_buffer_are_in_order() -> None:
    gpu = FakeGpu(0)
    hosts, buffer = [gpu.host_buffer(4), gpu.host_buffer(4)], gpu.device_buffer(4)
    mark = gpu.leave()
    first, second = (gpu.upload(host.fill_(value), buffer, mark) for value, host in enumerate(hosts))
    with pytest.raises(Race, match="given to another upload"):
        gpu.arrive(first)
    gpu.arrive(second)
    gpu.synchronise()
    assert buffer.tolist() == [1] * 4


def test_page_locked_memory_is_counted_and_kept_during_a_copy() -> None:
    gpu = FakeGpu(0, lockable=10)
    host, buffer = gpu.host_buffer(8), gpu.device_buffer(8)
    with pytest.raises(RuntimeError, match="no more memory can be pinned"):
        gpu.host_buffer(3)
    ticket = gpu.upload(host, buffer, gpu.leave())
    with pytest.raises(Race, match="unlocked while a copy"):
        gpu.free_host_buffer(host)
    gpu.arrive(ticket)
    gpu.free_host_buffer(host)
    assert gpu.locked == {}
    with pytest.raises(KeyError):
        gpu.free_host_buffer(host)


def test_tensors_of_different_devices_do_not_mix() -> None:
    first, second = FakeGpu(0).torch_device, FakeGpu(1).torch_device
    with watched():
        on_host = torch.ones(3)
        on_gpu, elsewhere = on_host.to(first), torch.arange(3.0, device=second)
        assert (on_host.device, on_gpu.device, elsewhere.device) == (torch.device("cpu"), first, second)
        assert (on_host.is_cpu, on_gpu.is_cpu, on_gpu[1:].is_cpu) == (True, False, False)
        assert (on_gpu * 2).device == first
        assert torch.nn.Parameter(on_gpu[1:]).device == first
        assert on_gpu.new_zeros(2).device == first
        assert torch.zeros_like(on_gpu).device == first
        assert on_gpu.cpu().device == on_gpu.to("cpu").device == on_gpu.to(on_host).device == torch.device("cpu")
        assert on_gpu.to(elsewhere.device).device == second
        for a, b in ((on_host, on_gpu), (on_gpu, elsewhere)):
            with pytest.raises(WrongDevice):
                a + b
        assert (on_gpu + torch.tensor(2.0)).device == first  # numbers may come from the host
        assert on_gpu[torch.tensor([0, 2])].device == first  # and indices
        with pytest.raises(WrongDevice):
            on_host[torch.arange(2, device=first)]


def test_values_for_the_host_count_as_waits() -> None:
    gpu = FakeGpu(0)
    with watched():
        x = torch.arange(4, device=gpu.torch_device)
        waits: dict[str, Any] = {
            "item": lambda: int(x[2]) + bool((x > 2).any()),
            "tolist": x.tolist,
            "nonzero": lambda: (x > 2).nonzero(),
            "where": lambda: torch.where(x > 2),
            "an index of booleans": lambda: x[x > 2],
            "an index from the host": lambda: x[torch.tensor([1, 2])],
            "unique": lambda: torch.unique(x),
            "equal": lambda: torch.equal(x, x),
            "repeats": lambda: x.repeat_interleave(x),
            "to the host": lambda: (x.cpu(), x.to("cpu")),
            "from the host": lambda: (torch.ones(3).to(x.device), torch.tensor([1], device=x.device)),
        }
        for mode in (torch.no_grad, torch.inference_mode):
            for name, work in waits.items():
                gpu.waits = 0
                with mode():
                    work()
                expected = 2 if name in ("item", "to the host", "from the host") else 1
                assert gpu.waits == expected, (name, gpu.waited_for)
        gpu.waits = 0
        for work in (lambda: x.to("cpu", non_blocking=True), lambda: x[1:] * 2, x.sum, lambda: x[0]):
            work()
        x.repeat_interleave(2)
        torch.ones(3).to(x.device, non_blocking=True)
        assert gpu.waits == 0
        with pytest.raises(TypeError, match="can't convert"):
            x.numpy()


def test_asynchronous_copy_to_the_host_arrives_late() -> None:
    gpu = FakeGpu(0)
    ways: list[Any] = [gpu.synchronise, lambda: x.sum().item(), lambda: x.cpu()]
    for wait in ways:
        with watched():
            x, target = torch.arange(3.0, device=gpu.torch_device), torch.zeros(3)
            fetched = x.to("cpu", non_blocking=True)
            target.copy_(x, non_blocking=True)
            assert fetched.isnan().all()
            assert target.isnan().all()
            wait()
            assert fetched.tolist() == target.tolist() == [0, 1, 2]


def test_pool_threads_may_copy_but_not_compute() -> None:
    gpu = FakeGpu(0)
    with watched(), ThreadPoolExecutor(1) as pool:
        host, buffer = gpu.host_buffer(4).fill_(1), gpu.device_buffer(4)
        gpu.arrive(pool.submit(gpu.upload, host, buffer, gpu.leave()).result())
        with pytest.raises(Race, match="no stream orders"):
            pool.submit(lambda: buffer + 1).result()
        assert pool.submit(lambda: host + 1).result().tolist() == [2] * 4


def test_device_has_one_link() -> None:
    gpus = [FakeGpu(0), FakeGpu(1)]
    mega = 1 << 20
    copies = [(gpu.host_buffer(mega), gpu.device_buffer(mega), gpu) for gpu in gpus for _ in range(3)]
    tickets = [(gpu, gpu.upload(host, buffer, gpu.leave())) for host, buffer, gpu in copies]
    seconds = mega / FakeGpu.link_rate
    assert [ticket.end for _, ticket in tickets] == pytest.approx([seconds * count for count in (1, 2, 3)] * 2)
    for gpu, ticket in tickets[:2]:
        gpu.arrive(ticket)
    assert [gpu.now for gpu in gpus] == pytest.approx([2 * seconds, 0])


def test_placeholders_take_no_memory() -> None:
    gpu = FakeGpu(0, capacity=1000)
    with watched():
        absent = AbsentWeight(lambda: torch.zeros(1), torch.Size((100, 100)), torch.float32, gpu.torch_device)
        assert absent.detach().shape == (100, 100)
        assert gpu.used == 0
        torch.zeros(10, device=gpu.torch_device).sum()
        assert gpu.peak >= 40


# Whole models


@pytest.mark.parametrize(
    ("family", "count"),
    [
        pytest.param(name, count, marks=() if (name, count) in SHORT else pytest.mark.long)
        for name in FAMILIES
        for count in (1, 2)
    ],
)
def test_every_family_has_the_bits_of_transformers(tmp_path: Path, family: str, count: int) -> None:
    tied = FAMILIES[family].ties[-1]
    folder = build_checkpoint(tmp_path / "model", family, tied=tied, shards=2)
    expected = reference_logits(folder, INPUT, torch.float32)
    directory = split(folder)
    for budget in (ALL, 0):
        gpus = [FakeGpu(index) for index in range(count)]
        assert_same(run_on(gpus, directory, budget), expected)
        assert all(gpu.uploads for gpu in gpus)


@pytest.mark.parametrize(
    ("family", "compression"),
    [
        ("llama", "4bit"),
        ("qwen3_moe", "8bit"),
        pytest.param("llama", "8bit", marks=pytest.mark.long),
        pytest.param("qwen3_moe", "4bit", marks=pytest.mark.long),
        pytest.param("gpt_oss", "4bit", marks=pytest.mark.long),
        pytest.param("gpt_oss", "8bit", marks=pytest.mark.long),
    ],
)
def test_compressed_models_have_the_bits_of_the_cpu(tmp_path: Path, family: str, compression: str) -> None:
    directory = split(build_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16), compression)
    on_cpu = load(directory)
    expected = run(on_cpu)
    seen = set()
    for budget, host in ((ALL, 0), (bytes_when_made(on_cpu) - 1, 0), (0, 0), (0, ALL)):
        for gpus in ([FakeGpu(0)], [FakeGpu(0), FakeGpu(1)]):
            with watched():
                model = load_on(gpus, directory, budget // len(gpus), host)
                result = run(model)
            assert_same(result, expected)
            seen |= set(tiers(model).values())
    missing = {Tier.ELSEWHERE, Tier.MAPPED} | ({Tier.ROUTED} if family == "llama" else set())
    assert seen == set(Tier) - missing


@pytest.mark.parametrize("rooms", [(ALL, 1), (1, ALL)])
def test_device_without_units_is_unused(tmp_path: Path, rooms: tuple[int, int]) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    gpus = [FakeGpu(0), FakeGpu(1)]
    limits = {gpu.name: room for gpu, room in zip(gpus, rooms, strict=True)}
    with watched():
        model = load_model(split(folder), RunOptions(max_memory=limits, show_progress=False), None, gpus)
        result = run(model)
    busy, idle = (gpus[0], gpus[1]) if rooms[0] == ALL else (gpus[1], gpus[0])
    assert model.device == busy.torch_device
    assert idle.uploads == 0
    assert_same(result, reference_logits(folder, INPUT, torch.float32))


def test_outputs_are_on_the_device_of_the_inputs(tmp_path: Path) -> None:
    gpus = [FakeGpu(0), FakeGpu(1)]
    with watched():
        model = load_on(gpus, split(build_checkpoint(tmp_path / "model", "llama")))
        devices = [placed.device for placed in model.placement.units]
        assert len(set(devices)) == 2
        assert model.device == gpus[0].torch_device
        output = model(INPUT.to(model.device), output_hidden_states=True)
        assert output.logits.device == model.device
        assert {state.device for state in output.hidden_states} == {model.device}


@pytest.mark.long
def test_padding_beams_and_sampling_on_two_devices(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen2")
    plain: Any = FAMILIES["qwen2"].auto_class.from_pretrained(folder)
    ids = torch.tensor([[0, 0, 1, 40, 81], [1, 7, 200, 33, 160]])
    mask = (ids != 0).long()
    ways: list[dict[str, Any]] = [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "top_k": 20},
        {"do_sample": False, "prompt_lookup_num_tokens": 2},
    ]
    for way in ways:
        batch = slice(1, 2) if "prompt_lookup_num_tokens" in way else slice(None)
        torch.manual_seed(0)
        expected = plain.generate(ids[batch], attention_mask=mask[batch], max_new_tokens=8, **way)
        with watched():
            model = load_on([FakeGpu(0), FakeGpu(1)], split(folder))
            options = {"attention_mask": mask[batch].to(model.device), "max_new_tokens": 8}
            torch.manual_seed(0)
            tokens = model.generate(ids[batch].to(model.device), **options, **way)
        assert torch.equal(tokens, expected), way


@pytest.mark.parametrize(
    ("count", "compression"),
    [
        (1, None),
        (2, "4bit"),
        pytest.param(1, "4bit", marks=pytest.mark.long),
        pytest.param(2, None, marks=pytest.mark.long),
    ],
)
def test_page_locked_memory_changes_no_bit(tmp_path: Path, count: int, compression: str | None) -> None:
    """All of it resident, all or a part of what does not fit pinned, and nothing of it."""
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6)
    directory = split(folder, compression)
    expected = run(load(directory))
    if compression is None:
        assert_same(expected, reference_logits(folder, INPUT, torch.float32))
    whole = sum(placed.stored for placed in load(directory).placement.units)
    seen = set()
    for budget, host in ((ALL, 0), (0, ALL), (0, whole), (0, 3 * whole // 4), (whole // 2, whole // 2), (0, 0)):
        gpus = [FakeGpu(index) for index in range(count)]
        with watched():
            model = load_on(gpus, directory, budget // count, host)
            result = run(model)
        assert_same(result, expected)
        seen.add(frozenset(set(tiers(model).values()) & {Tier.PINNED, Tier.STREAMED}))
    assert seen == {
        frozenset(),
        frozenset({Tier.PINNED}),
        frozenset({Tier.PINNED, Tier.STREAMED}),
        frozenset({Tier.STREAMED}),
    }


@pytest.mark.parametrize("count", [2, pytest.param(1, marks=pytest.mark.long)])
def test_4bit_layers_are_multiplied_from_codes_by_a_right_kernel(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bitsandbytes' operation for CPUs, whose bits may differ from those of the dequantized matrices."""
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, num_hidden_layers=4)
    directory = split(folder, "4bit")
    ready_bytes = bytes_when_made(load(directory))
    expected, exact = run(load(directory)), exact_logits(folder, INPUT, "4bit")
    multiply, multiplied = products.multiply_4bit, []

    def counted(form: Any, *args: Any) -> torch.Tensor:
        multiplied.append(form.shape)
        return multiply(form, *args)

    monkeypatch.setattr(products, "multiply_4bit", counted)
    for is_right in (True, False):
        monkeypatch.setattr("rabbitllm.engine.load_plan._is_right", lambda *trial, answer=is_right: answer)
        seen = set()
        for budget, host in ((ALL, 0), (ready_bytes - 1, 0), (0, ALL), (0, 0)):
            with watched():
                gpus = [FakeGpu(index) for index in range(count)]
                model = load_on(gpus, directory, budget // count, host, exact=False)
                multiplied.clear()
                result = run(model)
            assert_as_near(result.logits, expected.logits, exact)
            if not multiplied:
                assert_same(result, expected)
            assert bool(multiplied) == (is_right and not model.placement.is_resident)
            kinds = {tier for unit, tier in tiers(model).items() if unit.startswith("model.layers")}
            if kinds == {Tier.PACKED} and is_right:  # never made, so never unmade
                assert all(len(layer._forward_hooks) == 1 for layer in model.model.layers)  # of the current device
            seen |= kinds
        assert seen == {Tier.RESIDENT, Tier.PACKED, Tier.PINNED, Tier.STREAMED}
    monkeypatch.setattr("rabbitllm.engine.load_plan._is_right", lambda *trial: True)
    multiplied.clear()
    assert_same(run_on([FakeGpu(0)], directory, host=ALL, exact=True), expected)
    assert not multiplied


def test_8bit_layers_are_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16), "8bit")
    monkeypatch.setattr("rabbitllm.engine.load_plan._is_right", lambda *trial: True)
    model = load_on([FakeGpu(0)], directory, exact=False)
    kinds = set()
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: kinds.add(type(module.down_proj.weight)))
    assert_same(run(model), run(load(directory)))
    assert kinds == {torch.nn.Parameter}


def test_by_default_host_memory_holds_the_overflow(tmp_path: Path) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama"))
    gpu = FakeGpu(0)
    options: dict[str, Any] = {"max_memory": {gpu.name: 0}, "show_progress": False}
    placed = tiers(load_model(directory, RunOptions(**options), None, [gpu]))
    assert Tier.STREAMED not in placed.values()
    assert placed["model.layers.1"] is Tier.PINNED
    unlocked = tiers(load_model(directory, RunOptions(**options, pin_memory=False), None, [FakeGpu(0)]))
    assert Tier.PINNED not in unlocked.values()


def test_refused_page_locking_keeps_layers_in_ordinary_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6)
    directory = split(folder)
    pinned = load_on([FakeGpu(0)], directory, host=ALL)
    layer = pinned.placement.of("model.layers.0").stored
    gpu = FakeGpu(0, lockable=3 * layer)
    with watched():
        model = load_on([gpu], directory, host=ALL)
        result = run(model)
    assert_same(result, reference_logits(folder, INPUT, torch.float32))
    assert model.placement.streamed_bytes == 0
    assert sum(gpu.locked.values()) <= gpu.lockable
    messages = [record.getMessage() for record in caplog.records]
    assert any("can be pinned (no more memory can be pinned); " in message for message in messages)
    assert any("from which copies are slower" in message for message in messages)


def test_deleted_model_unlocks_its_memory(tmp_path: Path) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6))
    gpu = FakeGpu(0)
    model = load_on([gpu], directory, host=load_on([FakeGpu(0)], directory).placement.streamed_bytes // 2)
    assert {Tier.PINNED, Tier.STREAMED} <= set(tiers(model).values())
    assert len(gpu.locked) == sum(tier is Tier.PINNED for tier in tiers(model).values()) + STAGING
    run(model)
    del model
    assert until(lambda: gc.collect() >= 0 and not gpu.locked)  # a reader that is at work holds what it works for


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_ctrl_c_in_a_wait_for_the_device_loses_no_buffer(tmp_path: Path, family: str) -> None:
    """Twice in each wait, more often than there are buffers; waits are most with the profiler."""
    folder = build_checkpoint(tmp_path / "model", family, num_hidden_layers=3)
    directory, gpu = split(folder), FakeGpu(0)
    model = load_on([gpu], directory, profiling=True)
    with torch.inference_mode():
        expected = model(INPUT).logits
        before = gpu.waits
        model(INPUT)
        waits = gpu.waits - before
        assert waits > 2 * 3  # for each layer's copy and its computation
        for index in range(1, waits + 1):
            for _ in range(SLOTS):
                gpu.interrupt_at = gpu.waits + index
                with pytest.raises(KeyboardInterrupt):
                    model(INPUT)
            assert torch.equal(model(INPUT).logits, expected), index
    assert not any(slot.taken for slot in model.streamer.executors[gpu.name].loader._prefetcher._slots)


@pytest.mark.parametrize("budget", [ALL, 0])
def test_out_of_memory_in_a_pass_is_explained_and_harmless(tmp_path: Path, budget: int) -> None:
    """Even while the caller keeps the error: activations are not freed as long as a traceback refers to them."""
    directory, gpu = split(build_checkpoint(tmp_path / "model", "llama")), FakeGpu(0, capacity=ALL)
    with watched(), torch.inference_mode():
        model = load_on([gpu], directory, budget)
        ids = INPUT.to(model.device)
        long = ids.repeat(8, 30)
        expected = model(ids).logits.cpu()
        model(long)
        free, errors = gpu.used, []
        for part in (2, 4, 8):
            gpu.capacity = free + (gpu.peak - free) * part // 9
            with pytest.raises(NotEnoughMemoryError, match=r"max_memory=\{'fake:0': \d+") as caught:
                model(long)
            errors.append(caught.value)
            assert isinstance(caught.value, torch.OutOfMemoryError)
            assert "CUDA out of memory. Tried to allocate" in caught.value.problem
            assert gpu.used == free
            assert torch.equal(model(ids).logits.cpu(), expected)


def test_out_of_memory_while_loading_is_explained(tmp_path: Path) -> None:
    directory, gpu = split(build_checkpoint(tmp_path / "model", "llama")), FakeGpu(0, capacity=100_000)
    with watched(), pytest.raises(NotEnoughMemoryError) as caught:
        load_on([gpu], directory, ALL)
    assert caught.value.problem.startswith("A GPU has too little memory for loading: CUDA out of memory. Tried to")
    assert "max_memory={'fake:0': " in caught.value.problem
    assert gpu.used == 0


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously. For debugging",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_out_of_memory_in_cuda_libraries_is_explained(message: str) -> None:
    with pytest.raises(OutOfDeviceMemory) as caught, memory_explained([FakeGpu(0)], {"fake:0": 5}):
        raise RuntimeError(message)
    first = message.splitlines()[0]
    assert caught.value.problem == (
        f"A GPU has too little memory for this pass: {first}. Weights may take max_memory={{'fake:0': 5}} bytes."
    )


@pytest.mark.parametrize("message", ["CUDA error: invalid argument", "a stack is out of memory", "shapes do not match"])
def test_other_errors_are_unchanged(message: str) -> None:
    with pytest.raises(RuntimeError) as caught, memory_explained([FakeGpu(0)], {}):
        raise RuntimeError(message)
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == message


def test_bfloat16_model_stays_finite_in_float16(tmp_path: Path) -> None:
    """Hidden states beyond float16 are clamped; if the caller chose float16, the garbage is an error."""
    folder, ids = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16), INPUT
    weights = read_tensors(folder)
    weights["model.layers.1.mlp.up_proj.weight"] *= 1000
    weights["model.layers.1.mlp.down_proj.weight"] *= 300
    save_file(weights, folder / SINGLE_NAME, {"format": "pt"})
    directory, t4 = split(folder), FakeGpu(0, has_bf16=False)
    for budget in (ALL, 0):
        with watched(), torch.inference_mode():
            model = load_on([t4], directory, budget)
            assert model.dtype == torch.float16
            states = model(ids.to(model.device), output_hidden_states=True).hidden_states
            assert [bool(state.isfinite().all()) for state in states] == [True] * 4
            assert float(states[2].abs().max()) == torch.finfo(torch.float16).max
            model.generate(ids.to(model.device), max_new_tokens=4, do_sample=True)
            chosen = load_on([t4], directory, budget, dtype="float16")
            with pytest.raises(RabbitLLMError, match="The logits contain inf or nan"):
                chosen(ids.to(chosen.device))
            assert load_on([t4], directory, budget, dtype="float32")(ids.to(model.device)).logits.isfinite().all()


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_families_beyond_float16_compute_in_float32(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU without bfloat16; unless the caller or the checkpoint says float16."""
    directory = split(build_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16))
    model, t4 = load(directory, dtype="float32"), FakeGpu(0, has_bf16=False)
    assert_same(run_on([t4], directory), run(model))
    (message,) = [record.getMessage() for record in caplog.records if "bfloat16" in record.getMessage()]
    assert message.endswith(f"too narrow for {model.config.model_type}: it computes in float32.")
    assert load_on([t4], directory, dtype="float16").dtype == torch.float16
    assert load_on([FakeGpu(1)], directory).dtype == torch.bfloat16
    narrow = split(build_checkpoint(tmp_path / "narrow", family, dtype=torch.float16))
    assert load_on([t4], narrow).dtype == torch.float16


def test_before_sm_80_keys_are_repeated_for_efficient_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", num_key_value_heads=2)
    directory, attend = split(folder), torch.nn.functional.scaled_dot_product_attention
    seen: list[tuple[bool, int]] = []

    def noted(query: Any, key: Any, *args: Any, **named: Any) -> torch.Tensor:
        seen.append((bool(named.get("enable_gqa")), query.shape[1] // key.shape[1]))
        return attend(query, key, *args, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    logits = []
    for gpu in (FakeGpu(0), FakeGpu(1, has_bf16=False)):
        with watched(), torch.inference_mode():
            model = load_on([gpu], directory, ALL)
            seen.clear()
            logits.append(model(INPUT.to(model.device)).logits.cpu())
        assert set(seen) == ({(True, 2)} if gpu.has_bf16 else {(False, 1)})
    assert torch.allclose(*logits, atol=1e-5)


@pytest.mark.parametrize("budget", [ALL, 0])
@pytest.mark.parametrize("chosen", [[0, 1], [1]])
def test_current_device_is_that_of_the_running_module(
    tmp_path: Path, budget: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches where the current device is. It is the caller's again after a pass, whole or interrupted."""
    directory, gpus = split(build_checkpoint(tmp_path / "model", "llama")), [FakeGpu(index) for index in chosen]
    seen: list[tuple[Any, Any]] = []
    with watched(), torch.inference_mode():
        model = load_on(gpus, directory, budget)
        kinds = [type(model.model.layers[0].mlp), type(model.model.norm)]
        for module_class in kinds:

            def looked(self: Any, x: torch.Tensor, ordinary: Any = module_class.forward) -> torch.Tensor:
                seen.append((current.device, x.device))
                if len(seen) == stop:
                    raise KeyboardInterrupt
                return ordinary(self, x)

            monkeypatch.setattr(module_class, "forward", looked)
        stop = 0
        model(INPUT.to(model.device))
        assert {where for _, where in seen} == {gpu.torch_device for gpu in gpus}
        assert all(device == where for device, where in seen)
        for stop in range(1, len(seen) + 1):
            seen.clear()
            with pytest.raises(KeyboardInterrupt):
                model(INPUT.to(model.device))
            assert budget or current.device == torch.device("cpu", 1)
            stop = 0
            model(INPUT.to(model.device))
            assert current.device == torch.device("cpu", 1)


def test_each_thread_has_its_own_current_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resident model computes in several threads at once; one begins a pass while another is inside a unit."""
    directory, gpus = split(build_checkpoint(tmp_path / "model", "llama")), [FakeGpu(1), FakeGpu(2)]
    model = load_on(gpus, directory, ALL)
    norm_class = type(model.model.norm)
    ordinary, inside, go_on = norm_class.forward, threading.Event(), threading.Event()
    where: dict[str, list[Any]] = {"inside": [], "after": []}

    def waits(self: Any, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is other and not inside.is_set():
            inside.set()
            assert go_on.wait(600)
            where["inside"].append(current.device)
        return ordinary(self, x)

    def compute() -> None:
        with torch.inference_mode():
            model(INPUT)
        where["after"].append(current.device)

    monkeypatch.setattr(norm_class, "forward", waits)
    other, before = threading.Thread(target=compute), current.device
    other.start()
    assert inside.wait(600)
    model.streamer.begin()  # as the next pass of this thread does
    assert current.device == before
    go_on.set()
    other.join(600)
    assert where == {"inside": [gpus[0].torch_device], "after": [before]}


# What a pass costs


def test_pinned_units_are_copied_once_a_pass_and_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6))
    gpu = FakeGpu(0)
    model = load_on([gpu], directory, host=ALL, profiling=True)
    assert model.placement.streamed_bytes == 0

    def refuse(*args: Any) -> None:
        raise AssertionError("the disk was asked")

    monkeypatch.setattr(SpanReader, "read", refuse)
    run(model)
    kept = set(gpu.locked)
    assert len(kept) == 7  # the layers and the head, and nothing to read into
    wait_for_copies_ahead(model, gpu)
    del gpu.uploaded_from[:]
    with torch.inference_mode():
        model(INPUT)
    wait_for_copies_ahead(model, gpu)
    assert set(gpu.uploaded_from) == kept
    assert len(gpu.uploaded_from) == 7
    stages = model.profiler.stages
    assert READ not in stages
    assert UPLOAD not in stages
    passes = model.profiler.layers["lm_head"][PINNED_UPLOAD].count
    assert stages[PINNED_UPLOAD].nbytes == passes * model.placement.uploaded_bytes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_inputs_are_copied_between_devices_once_for_all_layers(tmp_path: Path, family: str, mode: Any) -> None:
    """The hidden states, and what every layer gets: a mask, rotary angles."""
    counts = []
    for layers in (4, 10):
        folder = build_checkpoint(tmp_path / f"{layers}", family, num_hidden_layers=layers)
        gpus = [FakeGpu(0), FakeGpu(1)]
        mask = torch.tensor([[0, 0, *[1] * (INPUT.shape[1] - 2)]])
        directory = split(folder)
        with mode(), watched() as operations:
            model = load_on(gpus, directory, ALL)
            ids, mask = INPUT.to(model.device), mask.to(model.device)
            operations.crossings.clear()
            logits = model(ids, attention_mask=mask, use_cache=False).logits
            counts.append(operations.crossings[gpus[0].torch_device, gpus[1].torch_device])
        plain: Any = FAMILIES[family].auto_class.from_pretrained(folder)
        with torch.no_grad():
            assert torch.equal(logits, plain(INPUT, attention_mask=mask, use_cache=False).logits)
    assert counts[0] == counts[1]
    assert 1 < counts[0] <= 9


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "prefill_chunk_size": 4}])
def test_cache_is_on_the_devices_of_its_layers(tmp_path: Path, cache: dict[str, Any]) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6)
    with watched():
        model = load_on([FakeGpu(0), FakeGpu(1)], split(folder), host=ALL)
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, **cache}
        output = model.generate(INPUT.to(model.device), **options)
        devices = [layer.keys.device for layer in output.past_key_values.layers]
        assert [layer.values.device for layer in output.past_key_values.layers] == devices
    by_name = {executor.device.name: executor.device.torch_device for executor in model.streamer.executors.values()}
    assert devices == [by_name[model.placement.of(f"model.layers.{i}").device] for i in range(6)]
    assert len(set(devices)) == 2
    plain: Any = FAMILIES["llama"].auto_class.from_pretrained(folder)
    assert torch.equal(output.sequences, plain.generate(INPUT, **options).sequences)


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_host_does_not_wait_between_layers(tmp_path: Path, compression: str | None) -> None:
    """Whatever is copied from or to the host otherwise than by an upload makes it wait, whatever it is: per pass then,
    for ids and logits, and not per layer."""
    counts = []
    for layers in (4, 10):
        folder = build_checkpoint(tmp_path / f"{layers}", "qwen2", dtype=torch.bfloat16, num_hidden_layers=layers)
        gpu = FakeGpu(0)
        with torch.no_grad(), watched() as operations:  # in inference mode not every copy is seen
            model = load_on([gpu], split(folder, compression), host=ALL)
            ids = INPUT.to(model.device)
            model(ids)
            operations.crossings.clear()
            model(ids)
            assert gpu.uploads >= 2 * layers  # of both passes: how far the first ran ahead into the second is chance
        counts.append(operations.crossings.total())
    assert counts[0] == counts[1]


def decoding_waits(model: Any, gpu: FakeGpu) -> Counter[str]:
    """The waits of the host for a GPU in a pass of one token."""
    ids = INPUT.to(model.device)
    with torch.no_grad():  # in inference mode not every operation is seen
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache)
        gpu.waited_for.clear()
        model(ids[:, 1:2], past_key_values=cache)
    return gpu.waited_for.copy()


@pytest.mark.parametrize("where", ["streamed", "pinned", "packed"])
def test_decode_pass_waits_only_for_an_embedding_row(tmp_path: Path, where: str) -> None:
    """Its number is fetched; the row is copied there."""
    folder = build_checkpoint(tmp_path / "model", "qwen2", dtype=torch.bfloat16, num_hidden_layers=6)
    directory, gpu = split(folder, "4bit"), FakeGpu(0)
    budget = bytes_when_made(load(directory)) - 1 if where == "packed" else 0
    with watched():
        model = load_on([gpu], directory, budget, ALL if where == "pinned" else 0)
        waits = decoding_waits(model, gpu)
    tier = {"streamed": Tier.STREAMED, "pinned": Tier.PINNED, "packed": Tier.PACKED}[where]
    assert {tiers(model)[f"model.layers.{index}"] for index in range(6)} == {tier}
    assert waits == {"a copy to the host": 1, "a copy from ordinary memory": 1}


@pytest.mark.parametrize("kernel", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_layer_of_experts_waits_only_for_its_routing(tmp_path: Path, kernel: str, compression: str | None) -> None:
    more = MANY_EXPERTS | {"num_hidden_layers": 5}
    folder = build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **more)
    directory, gpu = split(folder, compression), FakeGpu(0)
    expected = run(load(directory))
    with watched():
        model = load_on([gpu], directory, 1 << 18, 1 << 19)
        model.set_experts_implementation(kernel)
        waits = decoding_waits(model, gpu)
        result = run(model)
    assert_same(result, expected)
    assert waits - Counter({"a copy to the host": 1, "a copy from ordinary memory": 1}) == {"a copy to the host": 5}


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_decoding_multiplies_experts_where_they_lie(
    tmp_path: Path, family: str, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers decodes by copies of the chosen experts' matrices on a GPU; two tokens here have some in common."""
    folder = build_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16)
    directory, gpu, copied = split(folder, compression), FakeGpu(0), ExpertStack.copied
    plain, copies, ids = load(directory), list[str](), INPUT[:, :2]
    plain.set_experts_implementation("batched_mm")
    expected, exact = plain(ids).logits, exact_logits(folder, ids, compression)

    def noted(stack: ExpertStack, experts: Sequence[int]) -> torch.Tensor:
        copies.append(stack.device.type)
        return copied(stack, experts)

    for budget, host in ((1 << 18, 1 << 19), (0, 0)):
        with watched():
            model = load_on([gpu], directory, budget, host)
            model.set_experts_implementation("batched_mm")
            with monkeypatch.context() as patch:
                patch.setattr(ExpertStack, "copied", noted)
                logits = model(ids.to(model.device)).logits
        assert not copies
        assert_as_near(logits, expected, exact)


def test_copy_of_an_expert_is_awaited_only_before_its_buffer_is_refilled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **MANY_EXPERTS)
    directory, landed = split(folder), FakeGpu.landed
    waited: list[str] = []

    def noted(self: FakeGpu, ticket: Any) -> None:
        waited.append(threading.current_thread().name)
        landed(self, ticket)

    with watched(), torch.inference_mode():
        model = load_on([FakeGpu(0)], directory)
        (pool,) = model.streamer.pools.values()
        monkeypatch.setattr(FakeGpu, "landed", noted)
        read_spans, read = pool._disk.read, list[Any]()
        monkeypatch.setattr(pool._disk, "read", lambda *args: (read.append(args), read_spans(*args)))
        model(INPUT[:, :1].to(model.device))
    in_pool = [name for name in waited if name.startswith("experts")]
    assert len(in_pool) == len(read) - EXPERT_STAGING < len(read)


@pytest.mark.parametrize("count", [1, 2])
def test_pinned_layers_alternate_between_both_links(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=16))
    seconds = []
    for divide in (placement._in_turns, placement._runs):
        monkeypatch.setattr(placement, "_in_turns", divide)
        gpus = [FakeGpu(index) for index in range(count)]
        with watched(), torch.inference_mode():
            model = load_on(gpus, directory, 0, ALL)
            ids = INPUT.to(model.device)
            model(ids).logits.cpu()
            begun = max(gpu.now for gpu in gpus)
            model(ids).logits.cpu()
            seconds.append(max(gpu.now for gpu in gpus) - begun)
    layers = model.placement.uploaded_bytes / FakeGpu.link_rate
    if count == 1:
        assert seconds == pytest.approx([layers] * 2, rel=0.2)
    else:
        assert seconds[0] < 0.6 * layers < 0.75 * layers < seconds[1]  # the second's first copies are begun at once


def test_bytes_by_source(tmp_path: Path) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6))
    half = load_on([FakeGpu(0)], directory).placement.streamed_bytes // 2
    model = load_on([FakeGpu(0)], directory, host=half, profiling=True)
    with torch.inference_mode():
        for _ in range(3):
            model(INPUT)
    stages = model.profiler.stages
    assert 0 < model.placement.streamed_bytes < model.placement.uploaded_bytes
    assert stages[UPLOAD].nbytes == 3 * model.placement.streamed_bytes
    assert stages[PINNED_UPLOAD].nbytes == 3 * (model.placement.uploaded_bytes - model.placement.streamed_bytes)
    assert stages[UPLOAD].seconds > 0


def test_resident_units_are_uploaded_once(tmp_path: Path) -> None:
    gpu = FakeGpu(0)
    model = load_on([gpu], split(build_checkpoint(tmp_path / "model", "llama")), ALL)
    uploads = gpu.uploads
    assert uploads == len(model.placement.units)
    run(model)
    assert gpu.uploads == uploads


def test_resident_weights_of_another_dtype_are_cast_once(tmp_path: Path) -> None:
    """As on a T4, which computes in float16 what is stored in bfloat16."""
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, num_hidden_layers=6))
    expected = run(load(directory, dtype="float16"))
    budget = 3 * load_on([FakeGpu(0)], directory, 0).placement.streamed_bytes // 4
    with watched():
        model = load_on([FakeGpu(0)], directory, budget, dtype="float16")
        kept = [name for name, tier in tiers(model).items() if tier is Tier.RESIDENT and "layers" in name]
        before = {name: weight.data_ptr() for name, weight in model.named_parameters() if name.startswith(tuple(kept))}
        result = run(model)
    assert_same(result, expected)
    assert {Tier.RESIDENT, Tier.STREAMED} <= set(tiers(model).values())
    assert Tier.PACKED not in tiers(model).values()
    assert before
    assert before == {name: weight.data_ptr() for name, weight in model.named_parameters() if name in before}


def test_each_pass_uploads_each_streamed_unit_once(tmp_path: Path) -> None:
    gpu = FakeGpu(0)
    model = load_on([gpu], split(build_checkpoint(tmp_path / "model", "llama")))
    streamed = sum(tier is Tier.STREAMED for tier in tiers(model).values())
    before = gpu.uploads
    with torch.inference_mode():
        for _ in range(3):
            model(INPUT)
    wait_for_copies_ahead(model, gpu)
    assert gpu.uploads - before == 3 * streamed + SLOTS


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_resident_units_free_their_stored_form(tmp_path: Path, compression: str) -> None:
    """Norms are used as they are stored, in the same run of bytes as the codes of their layer."""
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16), compression)
    gpu = FakeGpu(0)
    with watched():
        model = load_on([gpu], directory, ALL)
        result = run(model)
    assert set(tiers(model).values()) == {Tier.RESIDENT}
    views = [p.stored for p in model.placement.units if p.unit == "model.norm"]  # and nothing else is all view
    assert gpu.allocated <= sum(views) + 4096
    assert_same(result, run(load(directory)))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_buffers_stay_within_the_limit(tmp_path: Path, compression: str | None, share: float) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=8), compression)
    whole = load_on([FakeGpu(0)], directory, ALL)
    budget = int(share * sum(placed.stored for placed in whole.placement.units))
    gpu = FakeGpu(0)
    model = load_on([gpu], directory, budget)
    largest = max(placed.stored for placed in model.placement.units if placed.tier is Tier.STREAMED or share == 1.0)
    fixed = sum(placed.stored for placed in model.placement.units if placed.unit == "model.norm")
    assert gpu.allocated <= max(budget, SLOTS * largest + fixed) + (SLOTS + len(tiers(model))) * 4096  # of whole blocks
    assert_same(run(model), run(whole))


@pytest.mark.parametrize("count", [1, 2])
def test_cached_layers_are_read_once_on_any_number_of_devices(tmp_path: Path, count: int) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6))
    model = load_on([FakeGpu(index) for index in range(count)], directory, cache_layers=2, profiling=True)
    run(model)
    layers = {f"model.layers.{index}" for index in range(6)}
    read = {unit for unit, stages in model.profiler.layers.items() if READ in stages}
    assert layers - read == {"model.layers.0", "model.layers.1"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exception_in_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with watched():
        model = load_on([FakeGpu(0), FakeGpu(1)], split(folder))
        for layer in model.model.layers:
            with monkeypatch.context() as patched:
                patched.setattr(layer.mlp, "forward", fail)
                with pytest.raises(error):
                    model(INPUT.to(model.device))
        result = run(model)
    assert_same(result, reference_logits(folder, INPUT, torch.float32))


# Negative controls: the same runs with one mistake each


def test_missing_wait_for_a_routing_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16))
    expected, numbers = run(load(directory)), _expert_pool.ExpertPool.numbers

    def without_a_wait(pool: _expert_pool.ExpertPool, index: torch.Tensor) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "cpu", lambda tensor: tensor.to("cpu", non_blocking=True))
            return numbers(pool, index)

    monkeypatch.setattr(_expert_pool.ExpertPool, "numbers", without_a_wait)
    with watched(), torch.inference_mode():
        model = load_on([FakeGpu(0)], directory)
        logits = model(INPUT.to(model.device)).logits.cpu()
    assert not torch.equal(logits, expected.logits)


class NeverArrives(FakeGpu):
    def arrive(self, ticket: Any) -> None:
        pass


def test_missing_wait_for_a_copy_is_detected(tmp_path: Path) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama"))
    for budget in (ALL, 0):
        assert run(load_on([NeverArrives(0)], directory, budget)).logits.isnan().any()
        with pytest.raises(Race, match="before its upload has arrived"):
            run_on([NeverArrives(0)], directory, budget)


def test_missing_wait_of_a_loader_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama"))
    take = Uploader.take

    def without_waiting(self: Uploader, unit: str) -> FilledSlot:
        self._device.arrive = lambda ticket: None  # type: ignore[method-assign]
        return take(self, unit)

    monkeypatch.setattr(Uploader, "take", without_waiting)
    with pytest.raises(Race, match="before its upload has arrived"):
        run_on([FakeGpu(0)], directory)


def test_slot_without_a_new_mark_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama"))
    monkeypatch.setattr(
        Uploader, "give_back", lambda self, loaded: self._prefetcher.give_back(loaded, loaded.slot.left)
    )
    with pytest.raises(Race, match="no mark after the last use"):
        run(load_on([FakeGpu(0)], directory))


def test_slot_given_back_too_early_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama"))
    take, give_back = Uploader.take, Uploader.give_back

    def and_give_back(self: Uploader, unit: str) -> FilledSlot:
        loaded = take(self, unit)
        give_back(self, loaded)
        return loaded

    monkeypatch.setattr(Uploader, "take", and_give_back)
    monkeypatch.setattr(Uploader, "give_back", lambda self, loaded: None)
    with pytest.raises(Race):
        run_on([FakeGpu(0)], directory)


def test_unmoved_inputs_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama"))
    monkeypatch.setattr(InputMover, "__call__", lambda self, module, args, kwargs: None)
    assert run_on([FakeGpu(0)], directory).logits.isfinite().all()
    with pytest.raises(WrongDevice):
        run_on([FakeGpu(0), FakeGpu(1)], directory)


@pytest.mark.skipif(TRANSFORMERS < (5, 15), reason="its models take their buffers along themselves")
def test_unmoved_buffers_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "gemma3"))
    monkeypatch.setattr(
        "rabbitllm.engine.load._device_finder", lambda placement, devices: lambda path: torch.device("cpu")
    )
    with pytest.raises(WrongDevice):
        run_on([FakeGpu(0)], directory)


MANY_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3}


@pytest.mark.parametrize("compression", [None, pytest.param("4bit", marks=pytest.mark.long)])
@pytest.mark.parametrize("count", [1, 2])
def test_experts_from_device_host_memory_and_disk(tmp_path: Path, compression: str | None, count: int) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **MANY_EXPERTS)
    directory = split(folder, compression)
    expected = run(load(directory))
    seen = set()
    for budget, host in ((0, 0), (0, 1 << 19), (1 << 20, 1 << 19), (ALL, 0)):
        gpus = [FakeGpu(index) for index in range(count)]
        with watched():
            model = load_on(gpus, directory, budget // count, count * host, profiling=True)
            result = run(model)
        assert_same(result, expected)
        stages = model.profiler.stages
        used = {tier for tier in EXPERT_TIERS if tier in stages}
        pools = model.placement.pools
        assert EXPERTS_IN_HOST_MEMORY not in used or any(pool.host_slots for pool in pools)
        assert EXPERTS_ON_DEVICE not in used or any(pool.slots for pool in pools)
        assert sum(gpu.allocated for gpu in gpus) >= sum(pool.nbytes for pool in pools)
        seen |= used
    assert seen == set(EXPERT_TIERS)


@pytest.mark.parametrize("kernel", ["eager", "batched_mm", "grouped_mm"])
def test_transit_experts_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """With fewer slots than a prompt uses, each is filled again while others compute."""
    monkeypatch.setattr(_expert_pool, "MAX_TRANSIT", 1)
    folder = build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **MANY_EXPERTS)
    plain, directory = load(split(folder)), split(folder)
    plain.set_experts_implementation(kernel)
    expected = run(plain)
    for host in (0, 1 << 19):
        with watched():
            model = load_on([FakeGpu(0)], directory, 0, host)
            model.set_experts_implementation(kernel)
            result = run(model)
        assert_same(result, expected)
        (pool,) = model.placement.pools
        assert (pool.slots, pool.transit) == (0, 3)


def test_driver_limit_leaves_some_experts_in_ordinary_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them, and those that are copied from the disk come from pinned memory."""
    directory = split(build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **MANY_EXPERTS))
    expected, locked = run(load(directory)), []
    for lockable in (1 << 40, 12 << 15):
        monkeypatch.setattr(prefetch, "PIECE_BYTES", 1 << 16)
        gpu = FakeGpu(0, lockable=lockable)
        with watched():
            model = load_on([gpu], directory, 0, 1 << 19)
            result = run(model)
        assert_same(result, expected)
        (pool,) = model.streamer.pools.values()
        assert {len(slot.memory) for slot in pool._host} == {pool._nbytes}
        locked.append(sum(gpu.locked.values()))
    assert locked[0] > locked[1] > EXPERT_STAGING * pool._nbytes


def test_experts_on_the_device_leave_host_memory(tmp_path: Path) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **MANY_EXPERTS))
    with watched():
        model = load_on([FakeGpu(0)], directory, 1 << 20, 1 << 19)
        run(model)
    (pool,) = model.streamer.pools.values()
    everything = np.arange(MANY_EXPERTS["num_experts"])
    for module in range(len(pool.sources)):
        is_twice = (pool.cache.slots_of(module, everything) >= 0) & (pool.host_cache.slots_of(module, everything) >= 0)
        assert not is_twice.any()
    assert pool.cache.occupied
    assert pool.host_cache.occupied
