"""A model as one GGUF file, for llama.cpp: `rabbitllm convert --to gguf`.

The header is made first, and read as `GgufCheckpoint` reads any GGUF file: that says which tensors of the model each
tensor of the file becomes, and by which order and change of its elements. Writing does the opposite. So there is no
table of permutations here, and a file is what transformers reads back. Of a source that is GGUF itself, all metadata
but empty arrays, and all names, are kept.

Tensors are written one after the other, a few megabytes at a time. The file gets its name when it is complete and
synced. Until then a log next to it counts the tensors that are synced, and identifies header and source: the same call
continues after them.

Invariants: an unsupported model, and a disk that is too small, are refused before a byte of weights is written; rows of
blocks of the requested type are copied, not decoded.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbitllm import prepare
from rabbitllm.base.grouping import summed
from rabbitllm.base.options import expand
from rabbitllm.base.rounding import round_up
from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.checkpoint import Checkpoint, SourceIdentity, sidecars_in
from rabbitllm.checkpoints.gguf_checkpoint import GgufCheckpoint
from rabbitllm.checkpoints.gguf_model import Target, stored_shapes
from rabbitllm.checkpoints.gguf_rotary import FACTORS, rotary_factors
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import GGUF_SUFFIX
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME
from rabbitllm.errors import (
    CorruptShardError,
    IncompleteCheckpointError,
    InUseError,
    OptionError,
    RabbitLLMError,
    UnreadableFormatError,
    system_errors_by_name,
)
from rabbitllm.formats.bounded import short
from rabbitllm.formats.gguf import parse_gguf, read_gguf
from rabbitllm.formats.gguf_types import TENSOR_TYPES, TensorType
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, ValueChange, torch_dtype
from rabbitllm.models import _gguf_metadata
from rabbitllm.models._conversion_input import (
    Conversion,
    WeightsInput,
    dtype_of,
    finished_split_of,
    identity_of_split,
    is_single_file,
    open_split,
    shards_at_hand,
)
from rabbitllm.quant.schemes import STORED, type_for_rows
from rabbitllm.storage import durable
from rabbitllm.storage.file_lock import LOCK_SUFFIX, locked_file
from rabbitllm.storage.files import PositionalFile
from rabbitllm.storage.folders import bytes_freed_by_deleting, require_room
from rabbitllm.store.checksums import crc32
from rabbitllm.store.layer_store import LayerStore, StoredTensor
from rabbitllm.store.tensor_values import read_tensor

if TYPE_CHECKING:
    import gguf
    import numpy as np
    import numpy.typing as npt

AUTO = "auto"
"""Each tensor keeps the type in which the source stores it."""
OUTTYPES: Mapping[str, str] = {
    name.lower(): name
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
        *("MXFP4", "Q3_K", "Q2_K", "TQ2_0", "TQ1_0"),
    )
}
"""Option -> type of ggml, of those that `block_encoders` or else the package `gguf` can encode."""
PIECE_ELEMENTS = 1 << 19
"""Elements that are encoded at a time; their float32 values and what the encoder needs take some megabytes."""
CHUNK_BYTES = 8 << 20
SYNC_BYTES = 256 << 20
"""Sync interval; an interrupted conversion writes at most this many bytes again."""
LOG_SUFFIX = ".progress"
"""Suffix of the log of an unfinished file."""
MAX_HALF = 65504.0
"""The largest float16, which is also that of the scales of blocks."""
_ALWAYS_SINGLE = ("ffn_gate_inp", "position_embd", "token_types", "ssm_conv1d", "shortconv.conv")
"""Tensors of two dimensions that llama.cpp needs in float32."""


# The source: tensors by name, each read in row-major order.


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the source.

    Attributes:
        shape: in torch's order.
        kind: its type as stored.
        chunks: its bytes in row-major order, as `kind` or, with True, as values: of the same dtype if that is plain, of
            float32 otherwise.
        decoded: the scheme, if it is stored in one of which GGUF has no type.
    """

    shape: tuple[int, ...]
    kind: TensorType
    chunks: Callable[[bool], Iterator[memoryview]]
    decoded: str = ""


def _kind_of(spec: TensorSpec) -> TensorType:
    if spec.blocks is not None and spec.blocks.change is ValueChange.NONE:
        return spec.blocks.kind
    if spec.dtype not in TENSOR_TYPES:
        raise UnreadableFormatError(
            f"{spec.name} has the dtype {spec.dtype}, which GGUF export does not support.",
            "Use a checkpoint of float32, float16 or bfloat16 weights. Nothing was written.",
        )
    return TENSOR_TYPES[spec.dtype]


def _read(path: Path, spec: TensorSpec, begin: int, length: int) -> memoryview:
    """A run of a tensor's bytes in row-major order."""
    buffer = memoryview(bytearray(length))
    with PositionalFile(path) as file:
        if read_tensor(file, spec, begin, buffer) != length:
            raise CorruptShardError(
                f"{path} ends within {spec.name}: it was truncated while it was read.", "Restore the file."
            )
    return buffer


def _chunks(path: Path, spec: TensorSpec, as_values: bool) -> Iterator[memoryview]:
    if spec.blocks is not None and not as_values:
        spec = spec._replace(dtype="U8", shape=(spec.blocks.nbytes,), nbytes=spec.blocks.nbytes, blocks=None)
    for begin in range(0, spec.nbytes, CHUNK_BYTES):
        yield _read(path, spec, begin, min(CHUNK_BYTES, spec.nbytes - begin))


def _joined(pieces: Sequence[tuple[Path, TensorSpec]], as_values: bool) -> Iterator[memoryview]:
    """The bytes of a tensor of two dimensions, or of one, of which files have pieces."""
    import numpy as np

    _, first = pieces[0]
    assert first.piece is not None
    ordered = sorted(pieces, key=lambda piece: piece[1].piece.begin if piece[1].piece is not None else 0)
    if first.piece.dim == 0:
        for path, spec in ordered:
            yield from _chunks(path, spec, as_values)
        return
    rows, width = first.piece.shape[0], DTYPES[first.dtype].bits // 8
    step = max(1, CHUNK_BYTES // (first.piece.shape[1] * width))
    for row in range(0, rows, step):
        count = min(step, rows - row)
        parts = []
        for path, spec in ordered:
            length = spec.shape[1] * width
            parts.append(np.frombuffer(_read(path, spec, row * length, count * length), np.uint8).reshape(count, -1))
        yield memoryview(np.concatenate(parts, axis=1).reshape(-1))  # type: ignore[arg-type]


def _tensors_of_files(checkpoint: LocalCheckpoint) -> dict[str, SourceTensor]:
    """The tensors of a checkpoint under transformers' names."""
    owner = checkpoint.index.weight_map
    pieces: dict[str, list[tuple[Path, TensorSpec]]] = {}
    for shard in checkpoint.index.shards:
        path = checkpoint.acquire(shard)
        for spec in checkpoint.taken_from(shard, read_shard_header(path, shard)).tensors:
            if spec.piece is not None or owner.get(spec.name, shard) == shard:
                pieces.setdefault(spec.whole.name, []).append((path, spec))
    tensors = {}
    for name, parts in pieces.items():
        path, spec = parts[0]
        if spec.piece is None:
            tensors[name] = SourceTensor(spec.shape, _kind_of(spec), functools.partial(_chunks, path, spec))
        else:
            tensors[name] = SourceTensor(spec.whole.shape, _kind_of(spec), functools.partial(_joined, tuple(parts)))
    return tensors


def _tensor_of_split(store: LayerStore, stored: StoredTensor, dtype: str) -> SourceTensor:
    """A tensor of a split directory; one at 4bit or 8bit is dequantized."""
    from rabbitllm.store.checkpoint_folder import PlainReader, plain  # with torch

    form = stored.quantized
    is_block = form is not None and bool(STORED[form.scheme].block_bytes)

    def chunks(as_values: bool) -> Iterator[memoryview]:
        read = replace(stored, quantized=None) if is_block and not as_values else stored
        with PlainReader(store) as reader:
            yield from reader.chunks(plain(read, "F32" if is_block else dtype))

    if is_block:
        assert form is not None
        return SourceTensor(stored.shape, TENSOR_TYPES[form.scheme], chunks)
    spec = stored.parts[0]._replace(name=stored.name)
    if form is None:
        return SourceTensor(stored.shape, _kind_of(spec), chunks)
    return SourceTensor(stored.shape, TENSOR_TYPES[dtype], chunks, form.scheme)


# The layout: what each tensor of the file is made of.


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A run of elements of a tensor of the file, and the tensor of the source that they come from.

    Attributes:
        source: its name.
        first: the first element in the tensor of the file.
        sizes: dimensions of the source's elements, in row-major order.
        order: those dimensions in the order of the file.
        change: operation on each element when the file is read.
    """

    source: str
    first: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    change: ValueChange = ValueChange.NONE

    @property
    def fixed(self) -> int:
        """Number of leading dimensions that the file has in the same order."""
        return next((index for index, dim in enumerate(self.order) if index != dim), len(self.order))

    @property
    def group(self) -> int:
        """Number of elements that are rearranged together."""
        return math.prod(self.sizes[self.fixed :])

    def keeps_blocks(self, block: TensorType) -> bool:
        """Whether blocks are moved as a whole."""
        if self.change is not ValueChange.NONE:
            return False
        plain = block.elements == 1 or self.fixed == len(self.order)
        return plain or (self.order[-1] == len(self.order) - 1 and self.sizes[-1] % block.elements == 0)


def _part_of(target: Target) -> SourcePart:
    """The inverse of reading `target`.

    Raises:
        UnreadableFormatError: it is a part of a tensor of the source, or leaves elements out.
    """
    elements = math.prod(target.shape)
    if target.strides is None and target.piece is None:
        return SourcePart(target.name, target.first, (elements,), (0,), target.change)
    sizes, strides = target.view or target.shape, target.strides or ()
    order = tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))
    expected = 1
    for dim in reversed(order):
        if strides[dim] != expected:
            break
        expected *= sizes[dim]
    if target.piece is not None or expected != elements:
        raise UnreadableFormatError(
            f"Export of {target.name} to GGUF is not supported.",
            "Use safetensors (without --to gguf). Nothing was written.",
        )
    return SourcePart(target.name, target.first, sizes, order, target.change)


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    parts: tuple[SourcePart, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.kind.elements * self.kind.nbytes


def type_of(name: str, shape: tuple[int, ...], stored: TensorType, outtype: str) -> TensorType:
    """The type of a tensor of the file, by the rules of llama.cpp's converter.

    Vectors, norms and routers are float32. If its blocks do not divide a row, smaller ones or float16
    are taken instead.

    Args:
        name, shape: of the tensor in the file.
        stored: its type in the source.
        outtype: a key of `OUTTYPES`, or `AUTO`.
    """
    if stored.dtype is not None and stored.dtype not in ("F64", "F32", "F16", "BF16"):
        return stored
    special = any(mark in name for mark in _ALWAYS_SINGLE) or not name.endswith(".weight")
    if len(shape) < 2 or name.endswith("_norm.weight") or special:
        return TENSOR_TYPES["F32"]
    tensor_type = stored if outtype == AUTO else TENSOR_TYPES[OUTTYPES[outtype]]
    if tensor_type.name == "F64":
        return TENSOR_TYPES["F32"]
    if tensor_type.name in ("TQ1_0", "TQ2_0") and name in ("token_embd.weight", "output.weight"):
        return TENSOR_TYPES["F16"]
    if tensor_type.dtype is not None:
        return tensor_type
    return TENSOR_TYPES[type_for_rows(tensor_type.name, shape[-1]) or "F16"]


# Encoding.


def _rearranged(data: npt.NDArray[Any], part: SourcePart, width: int, last: int) -> npt.NDArray[Any]:
    """Whole groups of `part.group` elements in the order of the file.

    Args:
        data: bytes or values, flat, in row-major order of the source.
        width: entries of `data` for each unit of the last dimension.
        last: units in that dimension.
    """
    if part.fixed == len(part.order):
        return data
    sizes = (*part.sizes[part.fixed : -1], last, width)
    dims = [dim - part.fixed + 1 for dim in part.order[part.fixed :]]
    grouped = data.reshape(-1, *sizes)
    return grouped.transpose(0, *dims, len(sizes)).reshape(-1)


def _encoded(values: npt.NDArray[np.float32], block: TensorType, name: str) -> memoryview:
    """The bytes of float32 values as a type.

    Raises:
        UnreadableFormatError: float16 cannot hold one of them.
    """
    import gguf
    import numpy as np

    if block.name not in ("F32", "BF16") and values.size and not float(np.abs(values).max()) <= MAX_HALF:
        raise UnreadableFormatError(
            f"{name} has the value {float(np.abs(values).max())}, which exceeds float16, the type of values or scales "
            f"of {block.name}.",
            "Use --outtype bf16 or f32.",
        )
    from rabbitllm.quant import block_encoders

    if block.name in block_encoders.ENCODED:
        return block_encoders.encode(block.name, values.reshape(-1, block.elements)).numpy().data.cast("B")
    encoded = gguf.quants.quantize(values.reshape(1, -1), gguf.GGMLQuantizationType[block.name])
    return memoryview(np.ascontiguousarray(encoded).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _pieces(source: SourceTensor, part: SourcePart, target: TensorType, name: str) -> Iterator[memoryview]:
    """The bytes of a part in the order of the file."""
    import numpy as np
    import torch

    raw = source.kind is target and part.keeps_blocks(target)
    read = source.kind if raw or source.kind.dtype is not None else TENSOR_TYPES["F32"]
    group = math.lcm(part.group, target.elements, read.elements)
    step = max(1, PIECE_ELEMENTS // group) * group // read.elements * read.nbytes
    for chunk in _in_steps(source.chunks(not raw), step):
        if raw:
            data = np.frombuffer(chunk, np.uint8)
            yield memoryview(_rearranged(data, part, read.nbytes, part.sizes[-1] // read.elements))  # type: ignore[arg-type]
            continue
        assert read.dtype is not None
        values = torch.frombuffer(chunk, dtype=torch_dtype(read.dtype)).float().numpy()
        values = _rearranged(values, part, 1, part.sizes[-1])
        if part.change is ValueChange.MINUS_ONE:
            values = values + np.float32(1)
        elif part.change is ValueChange.LOG_OF_NEGATIVE:
            values = -np.exp(values)
        yield _encoded(values, target, name)


def _in_steps(chunks: Iterable[memoryview], step: int) -> Iterator[memoryview]:
    """The same bytes in pieces of `step`; the last may be shorter."""
    pending = bytearray()
    for chunk in chunks:
        pending += chunk
        while len(pending) >= step:
            yield memoryview(bytearray(pending[:step]))
            del pending[:step]
    if pending:
        yield memoryview(pending)


# The header.


@dataclass
class _Metadata:
    """Metadata without the types of tensors; `fill` adds them to a writer."""

    architecture: str
    fill: Callable[[gguf.GGUFWriter], object]

    def header(self, tensors: Sequence[TensorInFile]) -> tuple[bytes, list[int], int]:
        """The bytes before the data, the offset of each tensor in the file, and the size of the file."""
        import gguf
        import numpy as np

        with durable.ScratchFolder() as folder:
            path = folder / "header.gguf"
            writer = gguf.GGUFWriter(path, self.architecture)
            self.fill(writer)
            writer.add_file_type(file_type_of(tensors))
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for tensor in tensors:
                ggml_type = gguf.GGMLQuantizationType(tensor.kind.number)
                writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, ggml_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            head = path.read_bytes()
        alignment = writer.data_alignment
        sizes = (round_up(tensor.nbytes, alignment) for tensor in tensors)
        *offsets, end = itertools.accumulate(sizes, initial=round_up(len(head), alignment))
        return head, offsets, end


def file_type_of(tensors: Iterable[TensorInFile]) -> int:
    """llama.cpp's number of the type that most bytes of a file have (`LlamaFileType`)."""
    import gguf

    sizes = summed((tensor.kind.name, tensor.nbytes * (len(tensor.shape) > 1)) for tensor in tensors)
    largest = max(sizes, key=lambda name: sizes[name], default="F32")
    names = {member.name: int(member) for member in gguf.LlamaFileType}
    candidates = (f"ALL_{largest}", f"MOSTLY_{largest}", f"MOSTLY_{largest}_M", f"MOSTLY_{largest}_MOE")
    return next((names[name] for name in candidates if name in names), int(gguf.LlamaFileType.GUESSED))


# The two ways: metadata of a model of transformers, and metadata of a GGUF file.


@dataclass(frozen=True)
class _Model:
    """A model of transformers as a file.

    Attributes:
        metadata: of the file.
        shapes: names in the file -> shapes.
        factors: of Llama 3's rotary frequencies, float32; None without them.
        checkpoint: the header as it is read.
    """

    metadata: _Metadata
    shapes: Mapping[str, tuple[int, ...]]
    factors: npt.NDArray[np.float32] | None
    checkpoint: GgufCheckpoint


def _of_model(folder: Path, name: str, tensors: Mapping[str, SourceTensor]) -> _Model:
    """The model whose small files are in a folder."""
    family = _gguf_metadata.family_of(folder, name)
    config = _gguf_metadata.config_of(folder, family, name)
    if config.tie_word_embeddings and _has_own_head(tensors):
        config.tie_word_embeddings = False
    tokenizer = _gguf_metadata.tokenizer_in(folder, name)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_type("model")
        writer.add_name(name.rstrip("/").rpartition("/")[2] or name)
        _gguf_metadata.add_config(writer, config, family, name)
        if tokenizer is not None:
            _gguf_metadata.add_tokenizer(writer, tokenizer, config, folder, name)

    metadata = _Metadata(family.architecture, fill)
    shapes, factors = stored_shapes(config, family.architecture), rotary_factors(config)
    first = {} if factors is None else {FACTORS: factors.shape}
    drafts = [TensorInFile(tensor, shape, TENSOR_TYPES["F32"], ()) for tensor, shape in (first | shapes).items()]
    head, offsets, end = metadata.header(drafts)
    data = {} if factors is None else {offsets[0]: factors.tobytes()}
    checkpoint = _as_read(head, data, end)
    _gguf_metadata.require_same_config(config, checkpoint.model.config, name)
    if tokenizer is not None:
        with durable.ScratchFolder() as scratch:
            _gguf_metadata.warn_of_other_ids(tokenizer, checkpoint.derived(()), scratch, name)
    return _Model(metadata, shapes, factors, checkpoint)


def _has_own_head(tensors: Mapping[str, SourceTensor]) -> bool:
    """Whether the output head is another matrix than the embedding; transformers does not tie it then."""
    pair = [tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight")]
    both = [_in_steps(tensor.chunks(True), CHUNK_BYTES) for tensor in pair if tensor is not None]
    return len(both) == 2 and any(head != embedding for head, embedding in itertools.zip_longest(*both))


def _as_read(head: bytes, data: Mapping[int, bytes], end: int) -> GgufCheckpoint:
    """Parse a header, and data at some offsets, as a GGUF checkpoint."""

    def read(offset: int, length: int) -> bytes:
        return (data.get(offset) or head[offset:])[:length]

    file = "model.gguf"
    return GgufCheckpoint((file,), {file: parse_gguf(read, end, file)}, read)


def _with_tensors(
    model: _Model, tensors: Mapping[str, SourceTensor], outtype: str, name: str, identity: SourceIdentity
) -> _PlannedFile:
    """The file of a model of transformers.

    Args:
        model: the model.
        tensors: of the source, by transformers' names.
        outtype: a key of `OUTTYPES`, or `AUTO`.
        name: of the model, for messages.
        identity: of the source.

    Raises:
        IncompleteCheckpointError: the source lacks tensors, or has them in other shapes, or has others.
    """
    in_file, used, problems = [], set[str](), []
    for gguf_name, shape in model.shapes.items():
        targets = model.checkpoint.model.targets(gguf_name, shape)
        for target in targets:
            used.add(target.name)
            tensor = tensors.get(target.name)
            if tensor is None:
                problems.append(f"{target.name} is missing")
            elif tensor.shape != target.shape:
                problems.append(f"{target.name} has shape {tensor.shape}, expected {target.shape}")
        if not problems:
            parts = tuple(_part_of(target) for target in targets)
            kinds = {tensors[part.source].kind for part in parts}
            stored = kinds.pop() if len(kinds) == 1 else TENSOR_TYPES["F32"]
            if any(not part.keeps_blocks(stored) for part in parts) and stored.dtype is None:
                stored = TENSOR_TYPES["F16"] if outtype == AUTO else stored
            in_file.append(TensorInFile(gguf_name, shape, type_of(gguf_name, shape, stored, outtype), parts))
    tied = {"lm_head.weight"} if model.checkpoint.model.config.tie_word_embeddings else set[str]()
    unused = sorted(key for key in tensors.keys() - used - tied if not key.endswith("rotary_emb.inv_freq"))
    problems += [f"{key} has no place in a GGUF file" for key in unused]
    if problems:
        some = listed((short(problem, 160) for problem in problems), 3, "; ")
        raise IncompleteCheckpointError(
            f"The weights of {name} do not match its config: {some}.",
            "Use the config.json that was published with the weights. Nothing was written.",
        )
    sources = dict(tensors)
    if model.factors is not None:
        data, shape = model.factors.tobytes(), tuple(model.factors.shape)
        sources[FACTORS] = SourceTensor(
            shape, TENSOR_TYPES["F32"], lambda as_values: iter([memoryview(bytearray(data))])
        )
        part = SourcePart(FACTORS, 0, shape, (0,))
        in_file.append(TensorInFile(FACTORS, shape, TENSOR_TYPES["F32"], (part,)))
    return _PlannedFile(model.metadata, in_file, sources, identity)


def _of_gguf(first: Path) -> _Metadata:
    """The metadata of a GGUF file, except what depends on the types of its tensors and on its parts."""
    import gguf

    reader = gguf.GGUFReader(first)
    architecture = str(reader.fields["general.architecture"].contents())
    of_writer = tuple(f"general.{key}" for key in ("architecture", "file_type", "quantization_version", "alignment"))

    def fill(writer: gguf.GGUFWriter) -> None:
        for key, field in reader.fields.items():
            value_type, *inner = field.types
            is_empty = value_type is gguf.GGUFValueType.ARRAY and not inner  # the package writes none
            if not (is_empty or key.startswith(("GGUF.", "split.", *of_writer))):
                writer.add_key_value(key, field.contents(), value_type, inner[-1] if inner else None)

    return _Metadata(architecture, fill)


# The whole conversion.


@dataclass(frozen=True, slots=True)
class _PlannedFile:
    """A GGUF file that can be written.

    Attributes:
        metadata: of the model.
        tensors: of the file, in its order.
        sources: the tensors of the source by name.
        identity: of the source.
    """

    metadata: _Metadata
    tensors: Sequence[TensorInFile]
    sources: Mapping[str, SourceTensor]
    identity: SourceIdentity

    def placed(self, index: int, offset: int) -> Iterator[tuple[int, memoryview]]:
        """The bytes of a tensor that begins at an offset of the file, in pieces, each with its own offset."""
        tensor = self.tensors[index]
        for part in tensor.parts:
            place = offset + part.first // tensor.kind.elements * tensor.kind.nbytes
            for piece in _pieces(self.sources[part.source], part, tensor.kind, part.source):
                yield place, piece
                place += len(piece)

    def conversion(self, file: Path, *, before: bool = False) -> Conversion:
        """The result, once the file is written."""
        nbytes = sum(tensor.nbytes for tensor in self.tensors)
        return Conversion(file, 1, len(self.tensors), nbytes, (), before, self._matrices())

    def _matrices(self) -> str:
        """Types of the matrices, and the scheme that they had before: a file of 4bit is larger than its source."""
        counts = collections.Counter(
            (tensor.kind.name, next(filter(None, (self.sources[part.source].decoded for part in tensor.parts)), ""))
            for tensor in self.tensors
            if len(tensor.shape) > 1
        )
        return ", ".join(
            f"{count} {type_name}" + (f" (decoded from {scheme})" if scheme else "")
            for (type_name, scheme), count in counts.items()
        )


@system_errors_by_name()
def convert_to_gguf(
    path_or_repo_id: str, file: Path, outtype: str, access: HubAccess, *, max_disk: int | None, min_free: int
) -> Conversion:
    """Write a model as one GGUF file.

    Args:
        path_or_repo_id: a folder, a split directory, a repository or a single file of weights.
        file: the file to write; must not exist, unless it has the very bytes that would be written.
        outtype: a key of `OUTTYPES`, or "auto".
        access: options for the hub.
        max_disk: limit of the file, bytes.
        min_free: bytes of the disk that must stay free.

    Raises:
        OptionError: the file exists, or an option is invalid.
        UnknownArchitectureError: the model cannot be written.
    """
    if outtype != AUTO and outtype not in OUTTYPES:
        raise OptionError(
            f"outtype={outtype!r} is not a type of a GGUF file.", f"Use one of: {', '.join([AUTO, *OUTTYPES])}."
        )
    if file.suffix != GGUF_SUFFIX or file.is_dir():
        raise OptionError(
            f"{file} is not the name of a GGUF file.", f"Use a name such as {file.with_suffix(GGUF_SUFFIX)}."
        )
    if file.exists():
        return _finished(path_or_repo_id, file, outtype, access)
    _refuse_foreign(file)
    with system_errors_by_name(str(file)), _planned(path_or_repo_id, outtype, access) as planned:
        head, offsets, nbytes = planned.metadata.header(planned.tensors)
        part = file.with_name(file.name + durable.PART_SUFFIX)
        reusable = bytes_freed_by_deleting(part, part.stat().st_dev) if part.exists() else 0
        writing = f"Writing {file} as GGUF"
        require_room(file.parent, nbytes, writing, reusable=reusable, max_disk=max_disk, min_free=min_free)
        durable.make_folder(file.absolute().parent)
        with locked_file(file.with_name(file.name + LOCK_SUFFIX), file):
            if file.exists():  # another process has written it meanwhile
                return _finished(path_or_repo_id, file, outtype, access)
            try:
                _write(file, head, planned, offsets, nbytes)
            except UnreadableFormatError:  # the same call would fail again
                for suffix in (durable.PART_SUFFIX, LOG_SUFFIX):  # the log last: it identifies the unfinished file
                    durable.remove(file.with_name(file.name + suffix))
                raise
    return planned.conversion(file)


def _finished(name: str, file: Path, outtype: str, access: HubAccess) -> Conversion:
    """The conversion, if a file is what it writes, byte for byte; an earlier call may have been killed at its end.

    Fetches nothing.

    Raises:
        OptionError: the file is something else.
    """
    refusal = OptionError(f"{file} exists already. Nothing was changed.", "Use another name, or delete the file.")
    try:
        with _planned(name, outtype, replace(access, local_files_only=True)) as planned:
            head, offsets, nbytes = planned.metadata.header(planned.tensors)
            if file.stat().st_size != nbytes:
                raise refusal
            with file.open("rb") as written:
                data = (planned.placed(index, offset) for index, offset in enumerate(offsets))
                for offset, piece in itertools.chain([(0, memoryview(head))], *data):
                    written.seek(offset)
                    if written.read(len(piece)) != piece:
                        raise refusal
    except (RabbitLLMError, OSError):
        raise refusal from None
    log, lock = (file.with_name(file.name + suffix) for suffix in (LOG_SUFFIX, LOCK_SUFFIX))
    if _is_log(log) or lock.exists():
        # another process has it until it ends
        with contextlib.suppress(InUseError, OSError), locked_file(lock, file):
            if _is_log(log):
                durable.remove(log)
    return planned.conversion(file, before=True)


@contextlib.contextmanager
def _planned(name: str, outtype: str, access: HubAccess) -> Iterator[_PlannedFile]:
    """The file to write, by the headers and small files of the source."""
    if (split_folder := finished_split_of(name)) is not None:
        home = split_folder if (split_folder / CONFIG_NAME).exists() else expand(name)
        with prepare.read_lock(split_folder), prepare.SmallFiles(sidecars_in(home), {}) as files:
            store = open_split(split_folder, home)
            stored = {key: _tensor_of_split(store, t, dtype_of(t, store, home)) for key, t in store.tensors.items()}
            model = _of_model(files.folder, name, stored)
            yield _with_tensors(model, stored, outtype, name, identity_of_split(store))
        return
    with contextlib.ExitStack() as stack:
        if is_single_file(name):
            checkpoint: Checkpoint = WeightsInput(name, expand(name), expand(name).parent).open()
            assert isinstance(checkpoint, LocalCheckpoint)
        else:
            source = prepare.find(prepare.ModelSpec(name, None, None, access), only_look=True)
            if source.repository is not None and source.repository.gguf_entry() is None:
                remote = prepare.open_weights(source, [source.split_folder])
                assert remote is not None
                with prepare.SmallFiles(remote.sidecars(), remote.derived()) as files:
                    _of_model(files.folder, name, {})  # refused before a shard is fetched
            checkpoint, lock = prepare.whole_checkpoint(source)
            stack.callback(lock.close)
        if isinstance(checkpoint.translation, GgufCheckpoint):
            yield _from_gguf(checkpoint, outtype)
            return
        with prepare.SmallFiles(checkpoint.sidecars(), checkpoint.derived()) as files:
            in_files = _tensors_of_files(checkpoint)
            model = _of_model(files.folder, name, in_files)
            yield _with_tensors(model, in_files, outtype, name, checkpoint.identity(shards_at_hand(checkpoint)))


def _from_gguf(checkpoint: LocalCheckpoint, outtype: str) -> _PlannedFile:
    """The same for a source that is GGUF: its tensors keep their names and orders."""
    paths = [checkpoint.acquire(shard) for shard in checkpoint.index.shards]
    tensors = {
        spec.name: SourceTensor(spec.shape, _kind_of(spec), functools.partial(_chunks, path, spec))
        for path in paths
        for spec in read_gguf(path).header.tensors
    }
    layout = []
    for name, tensor in tensors.items():
        part = SourcePart(name, 0, (math.prod(tensor.shape),), (0,))
        tensor_type = tensor.kind if outtype == AUTO else type_of(name, tensor.shape, tensor.kind, outtype)
        layout.append(TensorInFile(name, tensor.shape, tensor_type, (part,)))
    return _PlannedFile(_of_gguf(paths[-1]), layout, tensors, checkpoint.identity(shards_at_hand(checkpoint)))


def _write(file: Path, head: bytes, planned: _PlannedFile, offsets: Sequence[int], nbytes: int) -> None:
    """Write the file under another name, or the rest of it; sync it, and give it its name."""
    part_path, log_path = (file.with_name(file.name + suffix) for suffix in (durable.PART_SUFFIX, LOG_SUFFIX))
    made_of = json.dumps([sorted(planned.identity.fingerprints.items()), version("gguf")])
    key = hashlib.sha256(made_of.encode() + head).hexdigest()
    sizes = (tensor.nbytes for tensor in planned.tensors)
    complete, crc = _tensors_in(part_path, log_path, key, nbytes, zip(offsets, sizes, strict=True))
    # first: it identifies the unfinished file as this package's; without a line that was cut off
    durable.write_whole(log_path, f"{key}\n{complete} {crc}\n".encode())
    if not complete:
        durable.remove(part_path)
    with contextlib.closing(durable.GrowingFile(part_path, nbytes, write_back=True)) as written:
        written.write_at(memoryview(head), 0)
        with contextlib.closing(durable.Log(log_path)) as log:
            unsynced = 0
            for index in range(complete, len(offsets)):
                for offset, piece in planned.placed(index, offsets[index]):
                    written.write_at(piece, offset)
                    crc = crc32(piece, crc)
                unsynced += planned.tensors[index].nbytes
                if unsynced >= SYNC_BYTES:
                    written.sync()
                    log.append(f"{index + 1} {crc}")
                    unsynced = 0
        written.sync()
    durable.publish(part_path, file.absolute())
    durable.remove(log_path)


_LOG = re.compile(rb"[0-9a-f]{64}\n|[0-9a-f]{0,64}\Z")
"""The beginning of the log of an unfinished GGUF file: its first line, which may be cut off."""


def _is_log(path: Path) -> bool:
    return path.is_file() and durable.begins_as(path, _LOG)


def _refuse_foreign(file: Path) -> None:
    """
    Raises:
        OptionError: files beside the GGUF file, which would be replaced, were not written by an earlier call.
    """
    part, log = (file.with_name(file.name + suffix) for suffix in (durable.PART_SUFFIX, LOG_SUFFIX))
    log_part = log.with_name(log.name + durable.PART_SUFFIX)
    are_own = {log: _is_log(log), part: _is_log(log), log_part: _is_log(log_part)}
    foreign = [path for path, is_own in are_own.items() if path.exists() and not is_own]
    if foreign:
        raise OptionError(
            f"{foreign[0]} was not written by an earlier conversion into {file.name}. Nothing was changed.",
            "Move that file away, or use another name.",
        )


_LINE = re.compile(rb"(\d{1,9}) (\d{1,10})")
"""A further line: the number of complete tensors, and the CRC-32 of all of them."""


def _tensors_in(part: Path, log: Path, key: str, nbytes: int, spans: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Number of tensors that an earlier call wrote into the unfinished file, and their CRC-32.

    Both are 0 if it is not of the same source, or is damaged. `spans` are offset and bytes of each tensor.
    """
    try:
        lines = log.read_bytes().split(b"\n")[:-1]  # a line without an end was cut off
        if part.stat().st_size != nbytes:
            return 0, 0
    except FileNotFoundError:
        return 0, 0
    line = _LINE.fullmatch(lines[-1]) if len(lines) > 1 and lines[0] == key.encode() else None
    if line is None:
        return 0, 0
    count, expected, crc = int(line[1]), int(line[2]), 0
    with PositionalFile(part) as file:
        file.advise_sequential()
        for begin, size in itertools.islice(spans, count):
            for offset in range(begin, begin + size, CHUNK_BYTES):
                crc = crc32(file.read_at(offset, min(CHUNK_BYTES, begin + size - offset)), crc)
    return (count, crc) if crc == expected else (0, 0)
