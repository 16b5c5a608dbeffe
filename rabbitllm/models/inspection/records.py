"""Records of an inspection. Nothing here opens a file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rabbitllm.errors import RabbitLLMError
from rabbitllm.formats.sentencepiece_model import SentencePieceModel


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        name: its name in the file; in a split directory, its name in the checkpoint.
        dtype: as safetensors names it; "8bit", "4bit" or "4bit-double" where it is compressed.
        shape, strides: shape and strides in elements.
        offset: of its first byte, from the start of the file.
        nbytes: its size in row-major order.
        layer: id of its layer.
        file: name of its file.
        storage: in a torch zip, the entry whose bytes it views; several tensors may view the same.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int
    layer: str
    file: str
    storage: str | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a file, or of all files of a checkpoint.

    Attributes:
        tensors: in the order of the file.
        layers: ids in the order of a pass.
        metadata: `__metadata__` of a safetensors file.
        left_out: keys of a training checkpoint that hold no weights.
    """

    tensors: tuple[TensorInfo, ...]
    layers: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def dtypes(self) -> Mapping[str, int]:
        """Number of tensors of each dtype, most frequent first."""
        return dict(Counter(tensor.dtype for tensor in self.tensors).most_common())

    @property
    def sharing(self) -> int:
        """Number of tensors that share a storage with an earlier one."""
        held = [tensor.storage for tensor in self.tensors if tensor.storage is not None and tensor.elements]
        return len(held) - len(set(held))

    @property
    def strided(self) -> int:
        """Number of tensors that are not row-major."""
        return sum(tensor.elements > 0 and not is_row_major(tensor.shape, tensor.strides) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A `tokenizer.model`."""

    model: SentencePieceModel


@dataclass(frozen=True, slots=True)
class Entries:
    """A JSON object: `params.json`, `config.json` and the like."""

    entries: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ShardMap:
    """An index: tensor name -> shard, and its metadata."""

    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Opcode:
    """One opcode of a pickle: its byte offset, the number of open marks, its name, and its argument as text."""

    position: int
    depth: int
    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class Pickle:
    """A pickle's opcodes.

    Attributes:
        name: the entry of a zip, or the file.
        nbytes: its length, or the length of the rest of the file from its beginning.
        opcodes: as many as could be decoded.
        stopped: why the list ends before the pickle; None if it is complete.
    """

    name: str
    nbytes: int
    opcodes: tuple[Opcode, ...]
    stopped: str | None = None


@dataclass(frozen=True, slots=True)
class Pickles:
    """The pickles of a file, listed but not run."""

    pickles: tuple[Pickle, ...]


Content = Tensors | Vocabulary | Entries | ShardMap | Pickles


@dataclass(frozen=True, slots=True)
class Inspection:
    """The content of a file, folder or repository.

    Attributes:
        source: as the user wrote it; for a repository, with its commit.
        format: in words.
        size: bytes of the file, or of all shards.
        content: None where nothing could be read.
        shards: each file of weights of a checkpoint, with its bytes.
        absent: missing shards that the index names.
        beside: names of the other files of a checkpoint.
        has_pickle: whether `--opcodes` would list anything.
        refusal: the error that a split would raise.
    """

    source: str
    format: str
    size: int
    content: Content | None = None
    shards: Mapping[str, int] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    has_pickle: bool = False
    refusal: RabbitLLMError | None = None


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements, as torch reports them."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * max(shape[at + 1], 1)
    return tuple(strides)


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor is contiguous; strides of dimensions of size 1 do not count."""
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, row_major(shape), strict=True))
