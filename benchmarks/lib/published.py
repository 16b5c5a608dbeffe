"""The layout of published checkpoints: config, tensors, and their packing into shards, without weights.

A model has its published config and a function that lists the tensors of a config. A part of a model has fewer decoder
layers of the same shapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Config = Mapping[str, Any]

ELEMENT_BYTES = 2
"""bfloat16, as all of these are published."""
NF4_BITS = 4.5
"""Of an element at 4bit: its code, and a 64th of a float32 scale."""
LEAST_QUANTIZED = 4096
"""Elements; smaller matrices stay as they are."""
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class Tensor:
    """A tensor; `plain` if it is not quantized in spite of its shape (a router, a convolution, codes)."""

    name: str
    shape: tuple[int, ...]
    plain: bool = False
    dtype: str = "BF16"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """In a shard."""
        return self.elements * {"U8": 1, "I64": 8}.get(self.dtype, ELEMENT_BYTES)

    @property
    def is_quantized(self) -> bool:
        """At 4bit."""
        return len(self.shape) > 1 and self.elements >= LEAST_QUANTIZED and not self.plain

    @property
    def nbytes_4bit(self) -> int:
        """In a layer file at 4bit, without a few hundred bytes of constants."""
        return math.ceil(self.elements * NF4_BITS / 8) if self.is_quantized else self.nbytes


@dataclass(frozen=True)
class Model:
    """A published model.

    Attributes:
        title: in tables.
        repository: on the local hub; never the real name, since the weights are made up.
        config: its config.json.
        generation_config: its generation_config.json.
        tensors: lists the tensors of a config, in the order of packing.
        shard_bytes: the most bytes of a shard's tensors.
        max_disk: bytes that a split of the whole model may take.
    """

    title: str
    repository: str
    config: Config
    generation_config: Config
    tensors: Callable[[Config], Iterator[Tensor]]
    shard_bytes: int
    max_disk: int

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.config["num_hidden_layers"])


@dataclass(frozen=True)
class Placed:
    """A tensor and the offset of its first byte in its shard."""

    tensor: Tensor
    offset: int


@dataclass(frozen=True)
class Shard:
    """A safetensors file of a checkpoint.

    Attributes:
        name: of the file.
        header: its leading bytes, with their length.
        tensors: by name, the order of the format's own writer.
        size: bytes of the file.
        position: of its first tensor's first byte among the bytes of all tensors.
    """

    name: str
    header: bytes
    tensors: tuple[Placed, ...]
    size: int
    position: int


@dataclass(frozen=True)
class Checkpoint:
    """A model, or a part of its layers, packed into shards."""

    model: Model
    config: Config
    shards: tuple[Shard, ...]

    @cached_property
    def nbytes(self) -> int:
        """Of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.config["num_hidden_layers"])

    @cached_property
    def nbytes_4bit(self) -> int:
        """Of all layer files at 4bit, approximately."""
        return sum(placed.tensor.nbytes_4bit for shard in self.shards for placed in shard.tensors)

    def index(self) -> Config:
        """model.safetensors.index.json."""
        held = {placed.tensor.name: shard.name for shard in self.shards for placed in shard.tensors}
        total = sum(placed.tensor.nbytes for shard in self.shards for placed in shard.tensors)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(held.items()))}


def checkpoint(model: Model, scale: float) -> Checkpoint:
    """A model with `scale` times its layers (at least one), packed as `save_pretrained` packs."""
    config = {**model.config, "num_hidden_layers": max(1, round(model.layers * scale))}
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in model.tensors(config):
        if groups[-1] and filled + tensor.nbytes > model.shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    shards, position = [], 0
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shards.append(_shard(name, sorted(group, key=lambda tensor: tensor.name), position))
        position += sum(tensor.nbytes for tensor in group)
    return Checkpoint(model, config, tuple(shards))


def max_disk(model: Model, part: Checkpoint) -> int:
    """Bytes that a split of a part of a model may take: its layer files, and the whole model's room besides.

    The shards of a part are as large as those of the whole, so under this limit it behaves like the whole.
    """
    return model.max_disk - checkpoint(model, 1).nbytes_4bit + part.nbytes_4bit


def _shard(name: str, tensors: list[Tensor], position: int) -> Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw = raw.ljust(math.ceil(len(raw) / _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT)
    header = len(raw).to_bytes(8, "little") + raw
    placed = (Placed(t, len(header) + entries[t.name]["data_offsets"][0]) for t in tensors)
    return Shard(name, header, tuple(placed), len(header) + offset, position)
