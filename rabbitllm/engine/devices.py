"""Devices that compute, as the few operations that streaming needs, and the memory for weights on each.

There are two kinds: the CPU, whose buffers are host memory, and CUDA, with a copy stream. Importing this module needs
no CUDA. Tests pass a device of a third kind, which checks that every copy is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import mmap
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.free_memory import available_ram, has_nvidia_driver, unspent, untouched_bytes
from rabbitllm.errors import DeviceError, NotEnoughMemoryError
from rabbitllm.storage.files import page_aligned

logger = logging.getLogger(__name__)


_FOR_EVERY_GPU = 1
"""cudaHostRegisterPortable: pinned to all CUDA contexts."""


class Device(Protocol):
    """A device that computes.

    `upload` may return before the copy is complete; call `arrive` before the bytes are used. `leave` marks the last use
    of a device buffer; the next `upload` into it waits for that mark. The first `upload` needs a mark too: a queued
    computation may still use memory that was just allocated.
    """

    name: str
    torch_device: torch.device
    shares_host_memory: bool
    """Whether a host buffer is a device buffer, so that nothing is copied."""

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bfloat16 itself."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory on a page boundary, uint8 (nbytes,), pinned if the device copies from it.

        Raises:
            RuntimeError, MemoryError, OSError: there is not enough memory, or it cannot be pinned.
        """

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        """Unpin a `host_buffer` before its memory is freed, once no copy uses it."""

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8 (nbytes,)."""

    def upload(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Any:
        """Begin to copy `host` to `device` (same length) once the computation reaches the mark `after`, from `leave`.

        Returns:
            A ticket for `arrive` and `landed`.
        """

    def landed(self, ticket: Any) -> None:
        """Block the calling thread until the host buffer of an upload may be overwritten."""

    def arrive(self, ticket: Any) -> None:
        """Make the computation that follows wait for an upload."""

    def seconds(self, ticket: Any) -> float:
        """Seconds of an upload's copy alone; call it after `arrive` and `landed`."""

    def leave(self) -> Any:
        """Mark this point of the computation, for the next `upload` into a buffer that it used."""

    def synchronise(self) -> None:
        """Block until all queued work of the device is done; for measuring."""

    def free_bytes(self) -> int:
        """Bytes of memory that can still be allocated."""

    def empty_cache(self) -> None:
        """Return memory that the allocator keeps unused, after an allocation has failed."""

    def as_current(self) -> AbstractContextManager[Any]:
        """A context in which it is torch's current device, where kernels of other libraries (Triton) are launched."""


def aligned_host(nbytes: int) -> torch.Tensor:
    """Host memory on a page boundary, uint8 (nbytes,)."""
    return _as_tensor(page_aligned(max(nbytes, 1)), nbytes)


def _as_tensor(memory: memoryview, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


class CpuDevice:
    """The CPU and host memory: a buffer can be used as soon as it is read."""

    name = "cpu"
    torch_device = torch.device("cpu")
    shares_host_memory = True
    has_bf16 = True

    def __init__(self) -> None:
        self._buffers: WeakValueDictionary[int, memoryview] = WeakValueDictionary()

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        memory = page_aligned(max(nbytes, 1))
        self._buffers[id(memory)] = memory
        return _as_tensor(memory, nbytes)

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        pass

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        raise AssertionError("on the CPU the host buffer is the device buffer")

    def upload(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Any:
        raise AssertionError("on the CPU nothing is copied")

    def landed(self, ticket: Any) -> None:
        pass

    def arrive(self, ticket: Any) -> None:
        pass

    def seconds(self, ticket: Any) -> float:
        return 0.0

    def leave(self) -> Any:
        return None

    def synchronise(self) -> None:
        pass

    def free_bytes(self) -> int:
        return max(-self.missing_bytes(0), 0)

    def missing_bytes(self, nbytes: int) -> int:
        """Bytes by which less than `nbytes` can still be allocated; negative if more can."""
        # buffers that were not yet filled count as used
        return nbytes + sum(untouched_bytes(buffer) for buffer in list(self._buffers.values())) - available_ram()

    def empty_cache(self) -> None:
        pass

    def as_current(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


class CudaDevice:
    """One GPU. Copies run on another stream, so that they overlap with computation.

    Args:
        index: of the GPU.
        pin_memory: pin the host buffers; without it copies are neither fast nor concurrent.
    """

    shares_host_memory = False

    def __init__(self, index: int, pin_memory: bool = True) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self._pin = pin_memory
        self._copies = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    @property
    def has_bf16(self) -> bool:
        return capability_suits_bf16(torch.cuda.get_device_capability(self.torch_device))

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        # not by torch's allocator of pinned memory, which rounds each buffer up to a power of two and never frees it
        memory = page_aligned(max(nbytes, 1))
        buffer = _as_tensor(memory, nbytes)
        if self._pin and nbytes:
            with torch.cuda.device(self.torch_device):
                code = int(_cudart().cudaHostRegister(buffer.data_ptr(), nbytes, _FOR_EVERY_GPU))
            if code:
                self._forget_error()
                raise RuntimeError(f"the CUDA driver cannot pin {nbytes:,} more bytes, error {code}")
            if sys.platform == "linux":  # it would copy pinned pages at a fork, such as a notebook's `!command`
                cast(mmap.mmap, memory.obj).madvise(mmap.MADV_DONTFORK)
        return buffer

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        if self._pin and len(buffer):
            with torch.cuda.device(self.torch_device):
                if int(_cudart().cudaHostUnregister(buffer.data_ptr())):
                    self._forget_error()

    def _forget_error(self) -> None:
        """Clear CUDA's last error, which the next launch of a kernel would raise."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.torch_device)

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        # allocated on the stream of the computation: once it is freed, it is not reused before queued copies are done
        buffer.record_stream(self._copies)
        return buffer

    def upload(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Any:
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(after)
            begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # blocking: a thread that waits for the event sleeps; by default it would keep a core busy
            arrived = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            begun.record(self._copies)
            device.copy_(host, non_blocking=True)
            arrived.record(self._copies)
        return begun, arrived

    def landed(self, ticket: Any) -> None:
        ticket[1].synchronize()

    def seconds(self, ticket: Any) -> float:
        milliseconds: float = ticket[0].elapsed_time(ticket[1])
        return milliseconds / 1e3

    def arrive(self, ticket: Any) -> None:
        torch.cuda.current_stream(self.torch_device).wait_event(ticket[1])

    def leave(self) -> Any:
        passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        passed.record(torch.cuda.current_stream(self.torch_device))
        return passed

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        # the limit of torch's allocator, which the user may have lowered
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.torch_device)) - reserved
        left = max(min(free, allowed), 0) + reserved - torch.cuda.memory_allocated(self.torch_device)
        return max(left - unspent(self.name), 0)

    def empty_cache(self) -> None:
        with self.as_current():
            torch.cuda.empty_cache()

    def as_current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.torch_device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class OutOfDeviceMemory(NotEnoughMemoryError, torch.OutOfMemoryError):
    """`NotEnoughMemoryError` of a GPU; also torch's error, which callers catch to try a smaller batch."""


_LACKS_MEMORY = re.compile(r"\bCUDA\b.*\bout of memory\b|_STATUS_ALLOC_FAILED\b")
"""In the errors of CUDA and its libraries that are not of torch's class for a lack of memory."""


@contextlib.contextmanager
def memory_explained(devices: Iterable[Device], budgets: Mapping[str, int], doing: str = "this pass") -> Iterator[None]:
    """Raise the error of a GPU without memory as ours, after the tensors of the interrupted work are freed.

    Args:
        devices: those that compute.
        budgets: device -> bytes for weights, for the message.
        doing: the work, for the message.

    Raises:
        OutOfDeviceMemory: instead of torch.OutOfMemoryError, or an error of CUDA that says the same.
    """
    try:
        yield
        return
    except RuntimeError as error:
        lacks_memory = isinstance(error, torch.OutOfMemoryError) or _LACKS_MEMORY.search(str(error))
        if isinstance(error, OutOfDeviceMemory) or not lacks_memory:
            raise
        first, *_ = str(error).splitlines() or ["no reason given"]
        reason = ". ".join(first.split(". ")[:2]).rstrip(".")
        cause: BaseException | None = error
        while cause is not None:
            _drop_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
    gc.collect()
    for device in devices:
        device.empty_cache()
    limits = ", ".join(f"{name!r}: {nbytes:,}" for name, nbytes in budgets.items())
    explained = NotEnoughMemoryError(
        f"A GPU has too little memory for {doing}: {reason}. Weights may take max_memory={{{limits}}} bytes.",
        "Load the model with a smaller max_memory to leave more memory to activations and the KV cache; or use fewer "
        "or shorter sequences, or fewer beams. A loaded model is unchanged, and the next call works.",
    )
    raise OutOfDeviceMemory(*explained.args) from None


def _drop_frames(trace: TracebackType | None) -> None:
    """Free the frames of a traceback, which refer to activations, as the closures of their functions do; context
    managers between the error and its handler still refer to the first entries."""
    traceback.clear_frames(trace)
    while trace is not None:
        following, trace.tb_next = trace.tb_next, None
        trace = following


def resolve_devices(device: str | None, max_memory: Mapping[str, int] | None, pin_memory: bool = True) -> list[Device]:
    """The devices to compute on, first layer first.

    "auto" means every GPU that torch has code for, None the first GPU, or the CPU if there is none. GPUs in
    `max_memory` take precedence over `device`. Without a GPU, "auto", "cuda" and "cuda:0" mean the CPU, with a warning
    once a process; None too, if there is a GPU that torch cannot use.

    Raises:
        DeviceError: this machine has no such GPU, torch has no code for it, or the string names no device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = sorted((name for name in max_memory or {} if name != "cpu"), key=lambda name: int(name[5:]))
    if named:
        return [_gpu(name, count, pin_memory, f"max_memory names {name!r}, which") for name in named]
    if device == "cpu":
        return [CpuDevice()]
    if count == 0 and device in (None, "auto", "cuda", "cuda:0"):
        if device is not None or has_nvidia_driver():
            _warn_of_no_cuda()
        return [CpuDevice()]
    if device == "auto":
        usable = [i for i in range(count) if missing_code(i) is None]
        return [_gpu(f"cuda:{i}", count, pin_memory) for i in usable or range(count)]
    return [_gpu("cuda:0" if device in (None, "cuda") else device, count, pin_memory)]


@functools.cache
def _warn_of_no_cuda() -> None:
    logger.warning("CUDA is not available on this machine; the model runs on the CPU.")


def _gpu(name: str, count: int, pin_memory: bool, subject: str = "") -> CudaDevice:
    match = re.fullmatch(r"cuda:(\d+)", name)
    has = f"this machine has {', '.join(f'cuda:{i}' for i in range(count)) or 'no GPU'}"
    if match is None:
        raise DeviceError(f"device={name!r} is not a device; expected 'cpu', 'cuda:N' or 'auto'; {has}.")
    if int(match[1]) >= count:
        subject = subject or f"device={name!r}"
        raise DeviceError(f"{subject} does not exist: {has}.", "Use an existing device, or device='cpu' or 'auto'.")
    if (architecture := missing_code(int(match[1]))) is not None:
        raise DeviceError(
            f"torch {torch.__version__} has no code for {name}, {torch.cuda.get_device_name(int(match[1]))} "
            f"({architecture}); it has code for {', '.join(torch.cuda.get_arch_list())}.",
            f"Use another GPU (on Kaggle: GPU T4 x2) or device='cpu', or install a torch built for {architecture}.",
        )
    return CudaDevice(int(match[1]), pin_memory)


def missing_code(index: int) -> str | None:
    """Return the architecture of a GPU that the installed torch has no code for; None if it has, or does not say.

    Code for an architecture (`sm_75`) runs on later minor versions of it, portable code (`compute_75`) on all later
    ones. Without either the first kernel fails, though torch calls the GPU available.
    """
    built = re.findall(r"\b(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    if not built:  # no CUDA, or AMD's names
        return None
    major, minor = torch.cuda.get_device_capability(index)
    runs = (
        (major, minor) >= (int(code_major), int(code_minor)) and (form == "compute" or major == int(code_major))
        for form, code_major, code_minor in built
    )
    return None if any(runs) else f"sm_{major}{minor}"


def capability_suits_bf16(capability: tuple[int, int]) -> bool:
    """Whether a GPU computes in bfloat16 itself; those before compute capability 8.0 (T4, V100) emulate it."""
    return capability >= (8, 0)


def have_bf16(devices: Iterable[Device]) -> bool:
    """Whether all devices compute in bfloat16 themselves."""
    return all(device.has_bf16 for device in devices)


BEYOND_HALF = frozenset({"gemma2", "gemma3_text", "gemma3n_text", "glm4"})
"""Types of text models whose hidden states, in bfloat16, are beyond float16 in usual texts: those of Gemma-3-270M are
up to 104,000 in 9 of 18 layers, and clamped ones make logits that are 0.04 (KL) from those in float32. vLLM refuses
float16 for Gemma 2 and 3 and GLM-4 (`vllm/config/model.py`); unsloth uses float32 for Gemma 3n too (its pull request
5092)."""


def dtype_on(devices: Iterable[Device], dtype: torch.dtype, kind: str) -> torch.dtype:
    """The dtype in which devices compute a type of text model, unless the caller names another than this, its own."""
    if dtype is not torch.bfloat16 or have_bf16(devices):
        return dtype
    return torch.float32 if kind in BEYOND_HALF else torch.float16


HOST_MARGIN = 1 << 30
DEVICE_MARGIN = 3 << 29
"""Bytes reserved for activations and the KV cache if the caller sets no limit, at most a sixteenth of the free memory;
a tenth of the free memory is reserved in addition."""


def budget_of(device: Device, options: RunOptions) -> int:
    """Bytes for weights on a device."""
    limit = (options.max_memory or {}).get(device.name)
    return default_budget(device) if limit is None else limit


def weight_memory(devices: Sequence[Device], options: RunOptions) -> int:
    """Bytes of memory for weights: on the devices, and pinned host memory."""
    return sum(budget_of(device, options) for device in devices) + host_room(devices, options)


def host_room(devices: Sequence[Device], options: RunOptions) -> int:
    """Bytes of host memory to pin, for all devices that do not share it; at most the free memory, since pinned memory
    cannot be swapped."""
    if not options.pin_memory or all(device.shares_host_memory for device in devices):
        return 0
    free = default_budget(CpuDevice())
    return min((options.max_memory or {}).get("cpu", free), free)


def default_budget(device: Device) -> int:
    """Bytes for weights on a device without a limit: free memory less the needs of one sequence."""
    free = device.free_bytes()
    margin = HOST_MARGIN if device.shares_host_memory else DEVICE_MARGIN
    return free - free // 10 - min(margin, free // 16)
