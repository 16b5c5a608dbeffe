"""The content of a file, a checkpoint's folder, a split directory or a repository, without reading any weights.

Finds them as a split would and reads headers, directories and pickles; of a repository, by range requests. Writes only
small files into the hub cache.
"""

from __future__ import annotations

import enum
import itertools
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rabbitllm import prepare
from rabbitllm.base.options import expand
from rabbitllm.checkpoints.checkpoint import Checkpoint, ShardMetadata, is_sidecar
from rabbitllm.checkpoints.config import model_type_of, why_no_heads
from rabbitllm.checkpoints.fetch import side_by_side
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import WEIGHT_SUFFIXES, gguf_label, read_index
from rabbitllm.checkpoints.naming import assign_layers, layer_order, naming_for, predicts_further
from rabbitllm.errors import CheckpointError, CheckpointNotFoundError, OptionError, RabbitLLMError
from rabbitllm.formats.bounded import open_regular, read_json
from rabbitllm.formats.pickle_reader import MAX_LISTED, MAX_PICKLE_BYTES, ListedOpcode, list_opcodes
from rabbitllm.formats.sentencepiece_model import SentencePieceModel, read_model
from rabbitllm.formats.shard_header import HEAD_BYTES, TORCH, Weights, read_shard_header, recognise
from rabbitllm.formats.tensor_spec import LeftOut, TensorSpec, is_contiguous
from rabbitllm.formats.torch_file import PICKLE, pickle_of, read_legacy_torch, read_torch_zip
from rabbitllm.models._conversion_input import finished_split_of
from rabbitllm.splitter.plan import tensors_by_shard
from rabbitllm.splitter.request import require_shards
from rabbitllm.store.layer_store import LayerStore, StoredTensor
from rabbitllm.store.manifest import JOURNAL_NAME, is_finished


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
        left_out: keys of a training checkpoint that hold no weights of the model.
        left_tensors: the tensors that they hold.
        why_no_heads: why heads for multi-token prediction are not used; empty if they are, or if a file has no config.
    """

    tensors: tuple[TensorInfo, ...]
    layers: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    left_tensors: tuple[LeftOut, ...] = ()
    why_no_heads: str = ""

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
    def heads(self) -> tuple[str, ...]:
        """Ids of layers for multi-token prediction, by their names or by the projection that only those have."""
        projecting = {tensor.layer for tensor in self.tensors if ".eh_proj." in tensor.name}
        return tuple(layer for layer in self.layers if layer in projecting or predicts_further(layer, None))

    @property
    def sharing(self) -> int:
        """Number of tensors that share a storage with an earlier one."""
        storages = [tensor.storage for tensor in self.tensors if tensor.storage is not None and tensor.elements]
        return len(storages) - len(set(storages))

    @property
    def strided(self) -> int:
        """Number of tensors that are not row-major."""
        return sum(not is_contiguous(tensor.shape, tensor.strides) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class ShardMap:
    """An index: tensor name -> shard, and its metadata."""

    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any]


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
    opcodes: tuple[ListedOpcode, ...]
    stopped: str | None = None


Content = Tensors | SentencePieceModel | ShardMap | dict[str, Any] | tuple[Pickle, ...]
"""Tensors, a `tokenizer.model`, an index, another JSON object (`params.json`, `config.json`), or a file's pickles."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """The content of a file, folder or repository.

    Attributes:
        source: as the user wrote it; for a repository, with its commit.
        format: as text.
        size: bytes of the file, or of all shards.
        content: None where nothing could be read.
        shards: each file of weights of a checkpoint, with its bytes.
        absent: missing shards that the index names.
        beside: names of the other files of a checkpoint.
        has_pickle: whether `--opcodes` would list anything.
        refusal: the error that a split would raise.
        gguf: "GGUF Q4_K_M" for a checkpoint of such files, or a split of them; None for others.
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
    gguf: str | None = None


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements, as torch reports them."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


MAX_PICKLES = 8
"""Limit of pickles in a zip; a TorchScript archive has two."""
LEGACY_PICKLES = 5
"""Number of pickles in a row in a torch file from before 1.6."""
HAVE_PICKLES = (Weights.TORCH_ZIP, Weights.TORCH_LEGACY, Weights.PICKLE)


def list_pickles(path: Path, form: Weights) -> tuple[Pickle, ...]:
    """Every pickle of a local file, as opcodes. Nothing is run, built or imported.

    Content that the strict readers refuse is listed as far as possible: a zip unlike torch's by Python's own reader
    (which may see another file in it than torch does), a truncated pickle up to its end.

    Args:
        path: the file.
        form: its format; one of `HAVE_PICKLES`.
    """
    if form is Weights.TORCH_ZIP:
        try:
            pickles = [(PICKLE, pickle_of(path))]
        except CheckpointError:
            pickles = [*_read_with_zipfile(path)]
        return tuple(_list_pickle(data, name) for name, data in pickles)
    with path.open("rb") as stream:
        data = stream.read(MAX_PICKLE_BYTES)
    return tuple(_list_sequence(data, path.name, LEGACY_PICKLES if form is Weights.TORCH_LEGACY else 1))


def _read_with_zipfile(path: Path) -> Iterator[tuple[str, bytes]]:
    """The pickles of any zip; the size limit holds for each, whatever size it declares."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = (entry for entry in archive.infolist() if entry.filename.endswith(".pkl"))
            for entry in itertools.islice(pickles, MAX_PICKLES):
                with archive.open(entry) as stream:
                    yield entry.filename, stream.read(MAX_PICKLE_BYTES)
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, RuntimeError, NotImplementedError, EOFError):
        return  # the strict reader has reported the problem


def _list_sequence(data: bytes, name: str, count: int) -> Iterator[Pickle]:
    offset = 0
    for index in range(count):
        listed = _list_pickle(data[offset:], f"{name}, pickle {index + 1}" if count > 1 else name, offset)
        yield listed
        if listed.stopped is not None:
            return
        offset = listed.opcodes[-1].position + 1


def _list_pickle(data: bytes, name: str, begin: int = 0) -> Pickle:
    """A pickle's opcodes up to its STOP; `begin` is its offset in the file."""
    opcodes: list[ListedOpcode] = []
    stopped = None
    try:
        opcodes.extend(list_opcodes(data, name, begin))  # those before an error stay
    except CheckpointError as error:
        stopped = error.problem
    if stopped is None and len(opcodes) == MAX_LISTED and opcodes[-1].name != "STOP":
        stopped = f"More than {MAX_LISTED:,} opcodes are not listed."
    return Pickle(name, len(data), tuple(opcodes), stopped)


class WeightlessFile(enum.Enum):
    """A file without weights; the value is its format as text."""

    VOCABULARY = "a SentencePiece vocabulary"
    JSON = "JSON"


def kind_of(head: bytes, name: str) -> Weights | WeightlessFile:
    """The format of a file that begins with `head`; its name decides only where `head` is of no known format."""
    form = recognise(head)
    if form not in (Weights.EMPTY, Weights.UNKNOWN):
        return form
    # the first message has a text and a score, and perhaps a type, as sentencepiece writes them
    if len(head) > 3 and head[0] == head[2] == 0x0A and head[1] - head[3] in (7, 9):
        return WeightlessFile.VOCABULARY
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return WeightlessFile.JSON
    return WeightlessFile.VOCABULARY if name.endswith(".model") else form


def look_at_file(path: Path, *, opcodes: bool = False) -> Inspection:
    """The content of a file, with the error if its reader refuses it.

    Args:
        path: a regular file.
        opcodes: list its pickles instead of its tensors; a bare pickle can only be listed so.

    Raises:
        CheckpointNotFoundError: there is no such file, or it cannot be read.
    """
    error = CheckpointNotFoundError(f"{path} is neither a file nor a folder.", "Use a file, a folder or a repository.")
    try:
        with open_regular(path, lambda _: error) as stream:
            form = kind_of(stream.read(HEAD_BYTES), path.name)
    except PermissionError:
        raise CheckpointNotFoundError(
            f"{path} cannot be read: permission denied.", "Check the permissions of the file."
        ) from None
    content: Content | None = None
    refusal = None
    try:
        content = _read(path, form)
    except CheckpointError as problem:
        refusal = problem
    has_pickle = form in HAVE_PICKLES
    if isinstance(form, Weights) and has_pickle and (opcodes or form is Weights.PICKLE):
        content = list_pickles(path, form)
    gguf = gguf_label([path.name]) if form is Weights.GGUF else None
    size = path.stat().st_size
    return Inspection(str(path), form.value, size, content, has_pickle=has_pickle, refusal=refusal, gguf=gguf)


def _read(path: Path, form: Weights | WeightlessFile) -> Content:
    if form is WeightlessFile.VOCABULARY:
        return read_model(path)
    if form is WeightlessFile.JSON:
        if not path.name.endswith(".index.json"):
            return read_json(path)
        metadata = read_json(path).get("metadata")
        return ShardMap(read_index(path).weight_map, metadata if isinstance(metadata, dict) else {})
    if form in TORCH:
        read = read_torch_zip(path) if form is Weights.TORCH_ZIP else read_legacy_torch(path)
        layers, order = layers_of((tensor.name for tensor in read.tensors), path.parent)
        lead = "data/" if form is Weights.TORCH_ZIP else ""
        tensors = []
        for t in read.tensors:
            place = t.strides, t.offset, t.nbytes, layers[t.name], t.file, lead + t.storage
            tensors.append(TensorInfo(t.name, t.dtype, t.shape, *place))
        return Tensors(tuple(tensors), order, left_out=read.left_out, left_tensors=read.left_tensors)
    header = read_shard_header(path)
    layers, order = layers_of((spec.name for spec in header.tensors), path.parent)
    return Tensors(tuple(of_spec(spec, layers[spec.name]) for spec in header.tensors), order, header.metadata)


def layers_of(names: Iterable[str], folder: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """The id of each tensor's layer, and all ids in the order of a pass; guessed if the folder's config names no
    known family."""
    family = model_type_of(config_of(folder))
    assigned = assign_layers(list(names), family, naming_for(family))
    stems = {layer.id: layer.stem for layer in assigned.values()}
    ids = {tensor: layer.id for tensor, layer in assigned.items()}
    return ids, tuple(sorted(stems, key=lambda layer: layer_order(stems[layer])))


def config_of(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json; empty if it cannot be read."""
    try:
        return read_json(folder / "config.json")
    except (CheckpointError, OSError):
        return {}


def of_spec(spec: TensorSpec, layer: str) -> TensorInfo:
    """A tensor in a shard's header."""
    strides = row_major(spec.shape) if spec.strides is None else spec.strides
    dtype, nbytes = spec.dtype, spec.nbytes
    if spec.blocks is not None:
        dtype, nbytes = spec.blocks.kind.name, spec.blocks.nbytes
    return TensorInfo(spec.name, dtype, spec.shape, strides, spec.offset, nbytes, layer, spec.file)


HEADER_THREADS = 8
_FILE_SUFFIXES = (*WEIGHT_SUFFIXES, ".model", ".json")


def look(name: str | Path, *, revision: str | None = None, opcodes: bool = False) -> Inspection:
    """The content of a file, folder or repository.

    Args:
        name: a file, a folder, or a repository as `organisation/name`.
        revision: branch, tag or commit of the repository.
        opcodes: list the pickles of a file instead of its tensors.

    Returns:
        A record; its `refusal` is the problem with it, if any.

    Raises:
        CheckpointNotFoundError: nothing of that name exists.
        HubError: the hub did not answer.
        OptionError: opcodes of something that is not a file.
    """
    path = expand(name)
    if str(name) and path.exists() and not path.is_dir():
        return look_at_file(path, opcodes=opcodes)
    if opcodes:
        raise OptionError(f"--opcodes works on a file, and {name} is not a file.", "Use one of its files.")
    if path.is_dir() and is_finished(path):
        return _look_at_split(path)
    if path.is_dir() and (path / JOURNAL_NAME).exists():
        raise CheckpointNotFoundError(
            f"{path} is an unfinished split; some of its tensors are still in the shards.",
            "Use the original checkpoint: `rabbitllm plan` shows the progress; to resume, repeat the split command.",
        )
    if not path.is_dir() and path.suffix in _FILE_SUFFIXES:
        raise CheckpointNotFoundError(f"There is no file {str(path)!r}.", "Check the path.")
    return _look_at_checkpoint(str(name), revision)


def _look_at_split(folder: Path) -> Inspection:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sizes = {path.name: path.stat().st_size for path in files if path.suffix == ".safetensors"}
    beside = tuple(path.name for path in files if is_sidecar(path.name, path.stat().st_size))
    total = sum(sizes.values())
    try:
        store = LayerStore(folder)
    except RabbitLLMError as error:
        return Inspection(str(folder), "a split directory", total, None, sizes, beside=beside, refusal=error)
    layers, order = layers_of(store.tensors, folder)
    origin, gguf = "RabbitLLM 1.1's", None
    if (manifest := store.manifest) is not None:
        layers = {tensor: record.id for record in manifest.layers for tensor in record.tensors}
        order = tuple(record.id for record in manifest.layers)
        origin = f"of {manifest.source.title}"
        gguf = gguf_label(manifest.source.fingerprints, manifest.source_metadata)
    tensors = tuple(_of_stored(tensor, layers[tensor.name]) for tensor in store.tensors.values())
    content = Tensors(tensors, order, why_no_heads=why_no_heads(config_of(folder)))
    title = f"a split directory, {store.compression or gguf or 'uncompressed'}, {origin}"
    return Inspection(str(folder), title, total, content, sizes, beside=beside, gguf=gguf)


def _of_stored(tensor: StoredTensor, layer: str) -> TensorInfo:
    first = tensor.parts[0]
    dtype = tensor.quantized.scheme if tensor.quantized is not None else first.dtype
    strides = row_major(tensor.shape)
    return TensorInfo(tensor.name, dtype, tensor.shape, strides, first.offset, tensor.nbytes, layer, first.file)


def _look_at_checkpoint(name: str, revision: str | None) -> Inspection:
    if (split_folder := finished_split_of(name)) is not None:
        return _look_at_split(split_folder)
    source = prepare.find(prepare.ModelSpec(name, access=HubAccess(revision)), only_look=True)
    checkpoint = prepare.open_weights(source, [source.split_folder])
    if checkpoint is None:
        return _look_at_split(source.split_folder)
    shards = checkpoint.index.shards
    results = dict(zip(shards, side_by_side(lambda s: _metadata(checkpoint, s), shards, HEADER_THREADS), strict=True))
    metadata = {shard: result for shard, result in results.items() if isinstance(result, ShardMetadata)}
    absent = tuple(shard for shard, result in results.items() if result is None)
    specs = [spec for shard in metadata.values() for spec in shard.header.tensors]
    layers, order = layers_of((spec.name for spec in specs), source.config_folder)
    commit = source.repository.commit if source.repository is not None else None
    gguf = gguf_label(shards, {shard: info.header.metadata for shard, info in metadata.items()})
    return Inspection(
        name if commit is None else f"{name} at commit {commit}",
        "a checkpoint on the hub" if commit is not None else "a checkpoint",
        sum(shard.size for shard in metadata.values()),
        Tensors(
            tuple(of_spec(spec, layers[spec.name]) for spec in specs),
            order,
            why_no_heads=why_no_heads(config_of(source.config_folder)),
        ),
        {shard: info.size for shard, info in metadata.items()},
        absent,
        tuple(sorted(checkpoint.sidecar_sizes())),
        refusal=_refusal(checkpoint, results, metadata),
        gguf=gguf,
    )


def _metadata(checkpoint: Checkpoint, shard: str) -> ShardMetadata | CheckpointError | None:
    """The metadata of a shard, or the error in it; None where the shard is absent."""
    try:
        return checkpoint.metadata(shard)
    except CheckpointError as error:
        return error


def _refusal(
    checkpoint: Checkpoint,
    results: Mapping[str, ShardMetadata | CheckpointError | None],
    metadata: Mapping[str, ShardMetadata],
) -> CheckpointError | None:
    """The error that a split would raise: an unsound shard, missing shards, or an unsound index."""
    broken = next((result for result in results.values() if isinstance(result, CheckpointError)), None)
    if broken is not None:
        return broken
    try:
        require_shards(checkpoint.index.shards, metadata, checkpoint)
        tensors_by_shard(checkpoint.index, metadata.values())
    except CheckpointError as error:
        return error
    return None
