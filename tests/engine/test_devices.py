"""Names of devices, the calls that a GPU gets and their order, and the free memory."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama  # noqa: F401  it needs torch.cuda as it was

from rabbitllm.base.options import RunOptions
from rabbitllm.engine import devices, load_plan
from rabbitllm.engine.devices import CpuDevice, CudaDevice, _warn_of_no_cuda, missing_code, resolve_devices
from rabbitllm.errors import DeviceError
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import build_checkpoint
from tests.support.mappings import flags_of
from tests.support.tiny_models import split


class RecordingStream:
    """Stands for torch.cuda.Stream; records its calls."""

    log: list[tuple[Any, ...]]

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_event(self, event: RecordingEvent) -> None:
        self.log.append((self.name, "waits for", event.number))

    def __enter__(self) -> RecordingStream:
        self.log.append((self.name, "enters"))
        return self

    def __exit__(self, *error: object) -> None:
        self.log.append((self.name, "leaves"))


class RecordingEvent:
    """Stands for torch.cuda.Event."""

    log: list[tuple[Any, ...]]
    made = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        type(self).made += 1
        self.blocking = blocking
        self.number = type(self).made

    def record(self, stream: RecordingStream) -> None:
        self.log.append((stream.name, "records", self.number))

    def synchronize(self) -> None:
        self.log.append(("host", "sleeps until" if self.blocking else "spins until", self.number))

    def elapsed_time(self, end: RecordingEvent) -> float:
        return 1000.0 * (end.number - self.number)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """torch.cuda as on a machine with two GPUs; returns the log of its calls."""
    log: list[tuple[Any, ...]] = []
    monkeypatch.setattr(RecordingStream, "log", log, raising=False)
    monkeypatch.setattr(RecordingEvent, "log", log, raising=False)
    monkeypatch.setattr(RecordingEvent, "made", 0)
    current = RecordingStream("computation")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: RecordingStream(f"copies on {device}"))
    monkeypatch.setattr(torch.cuda, "Event", RecordingEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(("host", "waits for all of", str(device))))
    return log


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def names(device: str | None, max_memory: dict[str, int] | None = None) -> list[str]:
    return [resolved.name for resolved in resolve_devices(device, max_memory)]


@pytest.mark.parametrize(
    ("device", "max_memory", "expected"),
    [
        ("cuda:0", None, ["cuda:0"]),
        ("cuda", None, ["cuda:0"]),
        (None, None, ["cuda:0"]),
        ("cuda:1", None, ["cuda:1"]),
        ("auto", None, ["cuda:0", "cuda:1"]),
        ("cpu", None, ["cpu"]),
        ("cuda:0", {"cuda:0": 1, "cuda:1": 1}, ["cuda:0", "cuda:1"]),
        ("auto", {"cuda:1": 1, "cpu": 1}, ["cuda:1"]),
        ("cpu", {"cuda:1": 1}, ["cuda:1"]),
        ("cpu", {"cpu": 1}, ["cpu"]),
        ("cuda:0", {"cpu": 1}, ["cuda:0"]),
    ],
)
def test_device_names_on_two_gpus(
    gpus: object, device: str | None, max_memory: dict[str, int] | None, expected: list[str]
) -> None:
    assert names(device, max_memory) == expected


def test_gpus_are_in_numerical_order(gpus: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 12)
    assert names("cpu", {"cuda:10": 1, "cuda:2": 1, "cpu": 1}) == ["cuda:2", "cuda:10"]


def test_cpu_by_name_logs_no_message_about_gpus(no_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_no_cuda.cache_clear()
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        for device in (RunOptions().device, None, "cpu"):
            assert names(device) == ["cpu"]
    assert not caplog.records


def test_unusable_gpu_is_logged(
    no_gpu: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with a torch that is newer than the driver. WSL and Windows have no /dev/nvidia0."""
    _warn_of_no_cuda.cache_clear()
    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        assert names("cpu") == ["cpu"]
        assert not caplog.records
        assert names(None) == ["cpu"]
    assert "CUDA is not available on this machine" in caplog.text


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_default_falls_back_to_the_cpu_with_a_warning(
    no_gpu: None, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_no_cuda.cache_clear()
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        assert names(device) == ["cpu"]
        assert names(device) == ["cpu"]  # said once a process
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA is not available on this machine; the model runs on the CPU."
    ]


def test_missing_gpu(gpus: object) -> None:
    with pytest.raises(DeviceError) as caught:
        names("cuda:7")
    assert caught.value.problem == "device='cuda:7' does not exist: this machine has cuda:0, cuda:1."
    assert "device='cpu'" in caught.value.remedy


@pytest.mark.parametrize("device", ["cuda:1", "cuda:7"])
def test_missing_gpu_by_name_is_not_replaced_by_the_cpu(no_gpu: None, device: str) -> None:
    with pytest.raises(DeviceError) as caught:
        names(device)
    assert caught.value.problem == f"device={device!r} does not exist: this machine has no GPU."


def test_limit_for_a_missing_gpu(no_gpu: None) -> None:
    with pytest.raises(DeviceError, match="max_memory names 'cuda:0', which does not exist: this machine has no GPU"):
        names("cpu", {"cuda:0": 1})


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:", "cuda:x", "", "0"])
def test_unknown_device_name(gpus: object, device: str) -> None:
    with pytest.raises(DeviceError) as caught:
        names(device)
    assert f"device={device!r} is not a device; expected 'cpu', 'cuda:N' or 'auto'" in caught.value.problem
    assert "this machine has cuda:0, cuda:1" in caught.value.problem


KAGGLE_BUILD = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.fixture
def build(gpus: object, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the architectures that torch has code for, and the capabilities of the two GPUs."""

    def set_up(built: list[str], *capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla P100-PCIE-16GB")

    return set_up


@pytest.mark.parametrize("device", [None, "auto", "cuda", "cuda:0", "cuda:1"])
def test_gpu_without_code_in_torch_is_refused(build: Callable[..., None], device: str | None) -> None:
    build(KAGGLE_BUILD, (6, 0), (6, 0))
    with pytest.raises(DeviceError) as caught:
        names(device)
    problem = f"has no code for {device if device == 'cuda:1' else 'cuda:0'}, Tesla P100-PCIE-16GB (sm_60); it has code"
    assert f"{problem} for sm_70, sm_75" in caught.value.problem
    assert "GPU T4 x2" in caught.value.remedy
    assert names("cpu") == ["cpu"]
    with pytest.raises(DeviceError, match="has no code for cuda:1"):
        names("cpu", {"cuda:1": 1})


def test_auto_leaves_out_gpus_without_code(build: Callable[..., None]) -> None:
    build(KAGGLE_BUILD, (6, 1), (8, 9))
    assert names("auto") == ["cuda:1"]


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_50", "sm_60", "sm_70"], (6, 0), True),
        (["sm_50", "sm_60", "sm_70"], (6, 1), True),
        (["sm_61"], (6, 0), False),
        (["sm_75", "sm_80"], (7, 0), False),
        (["sm_80"], (8, 9), True),
        (["sm_80", "sm_90a"], (9, 0), True),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (12, 0), True),
        (["sm_100", "sm_120"], (12, 1), True),
        (["gfx90a", "gfx1100"], (9, 0), True),
        ([], (6, 0), True),
    ],
)
def test_code_for_a_gpu(build: Callable[..., None], built: list[str], capability: tuple[int, int], runs: bool) -> None:
    """As in NVIDIA's "CUDA C++ Programming Guide", Binary and PTX Compatibility."""
    build(built, capability)
    assert (missing_code(0) is None) == runs


def test_upload_and_computation_wait_for_each_other(gpus: list[tuple[Any, ...]]) -> None:
    device = CudaDevice(1, pin_memory=False)
    host, on_device = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    mark = device.leave()
    ticket = device.upload(host, on_device, mark)
    device.landed(ticket)
    device.arrive(ticket)
    copies = "copies on cuda:1"
    assert gpus == [
        ("computation", "records", 1),
        (copies, "enters"),
        (copies, "waits for", 1),
        (copies, "records", 2),
        (copies, "records", 3),
        (copies, "leaves"),
        ("host", "sleeps until", 3),
        ("computation", "waits for", 3),
    ]
    assert torch.equal(on_device, host)


def test_device_buffer_is_recorded_on_the_copying_stream(
    gpus: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the allocator would give its memory away, once it is freed, while a copy into it may be queued."""
    device, calls = CudaDevice(1, pin_memory=False), list[Any]()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda nbytes, dtype, device: empty(nbytes, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda buffer, stream: calls.append((len(buffer), stream.name)))
    assert device.device_buffer(8).shape == (8,)
    assert calls == [(8, "copies on cuda:1")]


def test_copy_is_timed_without_its_wait(gpus: list[tuple[Any, ...]]) -> None:
    device = CudaDevice(1, pin_memory=False)
    ticket = device.upload(torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), device.leave())
    assert device.seconds(ticket) == 1.0
    assert gpus.index((f"copies on {device.torch_device}", "waits for", 1)) < gpus.index(
        ("copies on cuda:1", "records", 2)
    )


class Driver:
    """Stands for torch.cuda.cudart(): locks up to a limit, and remembers an error as CUDA does."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.locked: dict[int, tuple[int, int]] = {}
        self.error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        taken = sum(length for length, _ in self.locked.values())
        if address in self.locked or taken + nbytes > self.limit:
            self.error = 2
            return 2
        self.locked[address] = nbytes, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.locked:
            self.error = 713
            return 713
        del self.locked[address]
        return 0

    def launch(self, *args: Any, **kwargs: Any) -> None:
        """Like the launch of the next kernel, which raises the error and clears it."""
        if self.error:
            self.error = 0
            raise RuntimeError("CUDA error")


@pytest.fixture
def driver(gpus: object, monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver(100_000)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "ones", fake.launch)
    return fake


@pytest.mark.parametrize("nbytes", [1, 4096, 10_000])
def test_host_buffers_are_locked_in_place_exactly(driver: Driver, nbytes: int) -> None:
    device = CudaDevice(1)
    buffer = device.host_buffer(nbytes)
    assert driver.locked == {buffer.data_ptr(): (nbytes, 1)}
    assert buffer.data_ptr() % 4096 == 0
    assert (buffer.shape, buffer.dtype) == ((nbytes,), torch.uint8)
    device.free_host_buffer(buffer)
    assert driver.locked == {}


@pytest.mark.skipif(sys.platform != "linux", reason="smaps is Linux's")
@pytest.mark.parametrize("pins", [True, False])
def test_locked_memory_is_not_copied_by_a_fork(driver: Driver, pins: bool) -> None:
    """proc_pid_smaps(5): "dc" is "do not copy area on fork"."""
    buffer = CudaDevice(1, pin_memory=pins).host_buffer(80_000)
    flags = flags_of(buffer.data_ptr())
    assert "rd" in flags
    assert ("dc" in flags) == pins


def test_failed_lock_is_not_reported_by_a_later_kernel(driver: Driver) -> None:
    device = CudaDevice(0)
    kept = device.host_buffer(60_000)
    with pytest.raises(RuntimeError, match="cannot pin 60,000 more bytes, error 2"):
        device.host_buffer(60_000)
    assert driver.error == 0
    device.free_host_buffer(kept)
    device.free_host_buffer(kept)
    assert driver.error == 0
    device.host_buffer(60_000)


def test_without_page_locking_the_driver_is_not_called(driver: Driver) -> None:
    device = CudaDevice(0, pin_memory=False)
    device.free_host_buffer(device.host_buffer(200_000))
    assert driver.locked == {}


def test_measuring_waits_for_all_work(gpus: list[tuple[Any, ...]]) -> None:
    CudaDevice(1).synchronise()
    assert gpus == [("host", "waits for all of", "cuda:1")]


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 1180), (0.2, 880), (0.06, 180), (0.01, 180)])
def test_free_memory_counts_the_allocators_cache_and_limit(
    gpus: object, monkeypatch: pytest.MonkeyPatch, fraction: float, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 120)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    assert CudaDevice(0).free_bytes() == expected


def test_host_buffers_without_page_locking(gpus: object) -> None:
    buffer = CudaDevice(0, pin_memory=False).host_buffer(100)
    assert (buffer.shape, buffer.dtype) == ((100,), torch.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 10_000])
def test_host_buffers_of_the_cpu_start_on_a_page(nbytes: int) -> None:
    buffer = CpuDevice().host_buffer(nbytes)
    assert (buffer.shape, buffer.dtype) == ((nbytes,), torch.uint8)
    assert nbytes == 0 or buffer.data_ptr() % 4096 == 0


@pytest.mark.parametrize(("capability", "suits"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bfloat16_by_compute_capability(
    gpus: object, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], suits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert CudaDevice(0).has_bf16 == suits
    assert CpuDevice().has_bf16


def test_gpu_without_bfloat16_computes_in_float16_with_one_warning(
    gpus: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    directory = split(build_checkpoint(tmp_path, "llama", dtype=torch.bfloat16))
    from rabbitllm.engine import skeleton

    config = skeleton.read_config(directory)
    t4s = [CudaDevice(0), CudaDevice(1)]
    store = LayerStore(directory)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        assert load_plan._choose_dtype(None, config, store, t4s) == (torch.float16, True)
    (record,) = caplog.records
    assert "no bfloat16; the model computes in float16" in record.getMessage()
    caplog.clear()
    assert load_plan._choose_dtype("bfloat16", config, store, t4s)[0] == torch.bfloat16  # the caller knows best
    assert load_plan._choose_dtype(None, config, store, [CpuDevice()]) == (torch.bfloat16, False)
    assert not caplog.records


def test_flash_attention_needs_model_gpu_and_installation(gpus: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr("rabbitllm.engine.transformers_api.is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    chosen = [CudaDevice(0)]

    def attention(family: str, requested: str = "auto", dtype: torch.dtype = torch.bfloat16) -> str | None:
        names = {"llama": "LlamaForCausalLM", "bloom": "BloomForCausalLM", "gpt_oss": "GptOssForCausalLM"}
        config = transformers.AutoConfig.for_model(family, architectures=[names[family]])
        return load_plan._attention(requested, config, chosen, dtype)

    assert attention("llama") == "flash_attention_2"
    assert attention("llama", "eager") == "eager"
    assert attention("llama", dtype=torch.float32) is None
    assert attention("bloom") is None  # has none
    assert attention("gpt_oss") is None  # only with a kernel of its own
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index == 0 else (7, 5))
    chosen[:] = [CudaDevice(0), CudaDevice(1)]  # each computes some layers
    assert attention("llama") is None
    chosen[:] = [CudaDevice(0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert attention("llama") is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("rabbitllm.engine.transformers_api.is_flash_attn_2_available", lambda: False)
    assert attention("llama") is None
    chosen[:] = [CpuDevice()]  # type: ignore[list-item]
    assert attention("llama") is None


def test_lockable_host_memory_is_limited_by_caller_and_free_memory(
    gpus: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "available_ram", lambda: 20 << 30)
    free = devices.default_budget(CpuDevice())
    assert 0 < free < 20 << 30
    cards: list[Any] = [CudaDevice(0), CudaDevice(1)]

    def room(used: list[Any], **options: Any) -> int:
        return devices.host_room(used, RunOptions(**options))

    assert room(cards) == free
    assert room(cards, max_memory={"cuda:0": 1}) == free
    assert room(cards, max_memory={"cpu": 5}) == 5
    assert room(cards, max_memory={"cpu": 0}) == 0
    assert room(cards, max_memory={"cpu": 1 << 40}) == free
    assert room(cards, pin_memory=False) == 0
    assert room([CpuDevice()]) == 0


def test_limit_leaves_memory_for_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_ram", lambda: 20 << 30)
    assert devices.default_budget(CpuDevice()) == (20 << 30) - (2 << 30) - (1 << 30)
    monkeypatch.setattr(devices, "available_ram", lambda: 1 << 29)
    assert devices.default_budget(CpuDevice()) == (1 << 29) - (1 << 29) // 10 - (1 << 25)
