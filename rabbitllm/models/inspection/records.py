"""What was found when something was looked at, as records. Nothing here opens a file."""

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
        name: the file's own name for it; of a split directory, the checkpoint's.
        dtype: as safetensors names it; "8bit", "4bit" or "4bit-double" where it is compressed.
        shape, strides: elements along each dimension, and from one index to the next.
        offset: its first byte, from the start of the file.
        nbytes: what it takes, bytes; in row-major order.
        layer: id of the layer that it belongs to.
        file: the file that it is in.
        storage: of a torch zip, the run of bytes that it views, by its entry's name; tensors may share one.
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
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a file, or of all files of a checkpoint.

    Attributes:
        tensors: in the file's own order.
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
        """Of all tensors, bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def dtypes(self) -> Mapping[str, int]:
        """How many tensors have which dtype, the commonest first."""
        return dict(Counter(tensor.dtype for tensor in self.tensors).most_common())

    @property
    def sharing(self) -> int:
        """Tensors in a storage that an earlier one is in, too."""
        held = [tensor.storage for tensor in self.tensors if tensor.storage is not None and tensor.elements]
        return len(held) - len(set(held))

    @property
    def strided(self) -> int:
        """Tensors whose elements do not lie one after the other."""
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
    """One opcode of a pickle: its byte, how many marks are open, its name, and its argument as text."""

    position: int
    depth: int
    name: str
    argument: str


@dataclass(frozen=True, slots=True)
class Pickle:
    """A pickle's opcodes.

    Attributes:
        name: where it is: the entry of a zip, or the file.
        nbytes: its length, or of what is left of the file where it begins.
        opcodes: as far as they can be told.
        stopped: why they end before the pickle does; None if they do not.
    """

    name: str
    nbytes: int
    opcodes: tuple[Opcode, ...]
    stopped: str | None = None


@dataclass(frozen=True, slots=True)
class Pickles:
    """What a file has of pickles, listed and not run."""

    pickles: tuple[Pickle, ...]


Content = Tensors | Vocabulary | Entries | ShardMap | Pickles


@dataclass(frozen=True, slots=True)
class Inspection:
    """What there is at a name.

    Attributes:
        source: as the user wrote it; of a repository, with its commit.
        format: in words.
        size: bytes of the file, or of all shards.
        content: None where nothing could be told.
        shards: of a checkpoint, each file of weights and its bytes.
        absent: shards that the index names and that are not there.
        beside: other files of a checkpoint, by name.
        has_pickle: whether `--opcodes` would list something.
        refusal: what is wrong with it; a split would be refused with the same words.
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
    """The strides of a tensor whose elements lie one after the other, in elements, as torch gives them."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * max(shape[at + 1], 1)
    return tuple(strides)


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie one after the other; the stride of a dimension of one element says nothing."""
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, row_major(shape), strict=True))
