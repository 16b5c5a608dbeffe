"""Messages between processes: a kind, a number, plain JSON, and tensors, in one buffer; and the arguments of a layer's
call as JSON and a list of tensors.

Received data is never unpickled. Format, little-endian: 8 bytes with the length of the head; the head, JSON; each
tensor at a multiple of 64 bytes, because kernels give different last bits on inputs that are aligned to less than 16.

A mask that all layers share is sent once. Only tensors, KV caches, plain values and tuples of these can be sent, not
dicts: a layer may write into a dict for later layers, which may be on another host.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from rabbitllm.base.rounding import round_up
from rabbitllm.errors import HostsError

ALIGNMENT = 64
_LENGTH = 8


class FrameType(enum.Enum):
    """The type of a frame."""

    READY = "ready"
    """From a worker: it has loaded its span, or the reason why not."""
    BEGIN = "begin"
    """To a worker: all have loaded theirs, or the reason why not."""
    PASS = "pass"
    """The inputs of the layers in one pass, except hidden states."""
    HIDDEN = "hidden"
    """The hidden states of a pass, from one process to the next."""
    FAILED = "failed"
    """In place of hidden states: the error of a pass."""
    ALIVE = "alive"
    """A heartbeat, with events of caches."""
    STOP = "stop"
    """No more passes follow."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        type: type of the message.
        number: number of the pass.
        content: plain JSON.
        tensors: tensors, on the host after it was received.
    """

    type: FrameType
    number: int = 0
    content: Any = None
    tensors: tuple[torch.Tensor, ...] = ()


def to_bytes(frame: Frame) -> torch.Tensor:
    """A frame as uint8 (nbytes,)."""
    flat = [tensor.detach().to("cpu").contiguous() for tensor in frame.tensors]
    described = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in flat]
    head = json.dumps([frame.type.value, frame.number, frame.content, described], allow_nan=True).encode()
    offsets = _offsets(_LENGTH + len(head), [tensor.nbytes for tensor in flat])
    total = offsets[-1] + flat[-1].nbytes if flat else _LENGTH + len(head)
    buffer = torch.zeros(total, dtype=torch.uint8)
    lead = len(head).to_bytes(_LENGTH, "little") + head
    buffer[: len(lead)] = torch.frombuffer(bytearray(lead), dtype=torch.uint8)
    for offset, tensor in zip(offsets, flat, strict=True):
        if tensor.nbytes:
            buffer[offset : offset + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
    return buffer


def from_bytes(buffer: torch.Tensor) -> Frame:
    """The frame that `to_bytes` wrote; its tensors are views of the buffer.

    Raises:
        HostsError: the bytes are not a frame.
    """
    try:
        length = int.from_bytes(buffer[:_LENGTH].numpy().tobytes(), "little")
        if not 0 < length <= len(buffer) - _LENGTH:
            raise ValueError("its header is longer than the message")
        type_, number, content, described = json.loads(buffer[_LENGTH : _LENGTH + length].numpy().tobytes())
        dtypes = [_dtype(name) for name, _ in described]
        shapes = [tuple(map(int, shape)) for _, shape in described]
        if any(size < 0 for shape in shapes for size in shape):
            raise ValueError("a shape is negative")
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
        offsets = _offsets(_LENGTH + length, sizes)
        if sizes and offsets[-1] + sizes[-1] > len(buffer):
            raise ValueError("its tensors are longer than the message")
        tensors = tuple(
            buffer[offset : offset + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
            for offset, size, dtype, shape in zip(offsets, sizes, dtypes, shapes, strict=True)
        )
        return Frame(FrameType(type_), int(number), content, tensors)
    except (ValueError, TypeError, RecursionError) as error:
        raise invalid(f": {error}") from None


def invalid(what: str) -> HostsError:
    """The error for what is no frame, which is said behind it."""
    remedy = "Use the same version of rabbitllm on every host, and an address that no other program uses."
    return HostsError(f"Another host sent an invalid message{what}.", remedy)


def _offsets(begin: int, sizes: Sequence[int]) -> list[int]:
    offsets = []
    for size in sizes:
        begin = round_up(begin, ALIGNMENT)
        offsets.append(begin)
        begin += size
    return offsets


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


_PLAIN = (bool, int, float, str)


class Packer:
    """Packs the calls of one pass.

    Args:
        number_of: a KV cache -> its number, which is the same in all processes.

    Attributes:
        tensors: the tensors found, each once.
    """

    def __init__(self, number_of: Callable[[Cache], int]) -> None:
        self._number_of = number_of
        self._indices: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def pack(self, value: Any) -> Any:
        """A value as JSON.

        Raises:
            HostsError: it cannot be sent.
        """
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, Cache):
            return {"cache": self._number_of(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if type(value) is tuple:
            return {"tuple": [self.pack(part) for part in value]}
        raise HostsError(
            f"Layers take a {type(value).__name__}, which cannot be sent to another host.",
            "Run this model on one host.",
        )

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The arguments of a call as JSON."""
        return [[self.pack(value) for value in args], {name: self.pack(value) for name, value in kwargs.items()}]

    def _tensor(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._indices:  # `tensors` keeps it alive, so its id remains unique
            self._indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._indices[id(tensor)]


def unpack(packed: Any, tensors: Sequence[torch.Tensor], cache: Callable[[int], Cache]) -> Any:
    """Restore a value from the result of `Packer.pack`.

    Args:
        packed: JSON.
        tensors: tensors of the pass.
        cache: number -> the KV cache in this process.
    """
    if not isinstance(packed, dict):
        return packed
    ((tag, content),) = packed.items()
    if tag == "tensor":
        return tensors[content]
    if tag == "cache":
        return cache(content)
    if tag == "dtype":
        return getattr(torch, content)
    return tuple(unpack(part, tensors, cache) for part in content)
