"""The inspection of a single file: its format by its first bytes, and its content by that format's reader.

Reads headers, directories and pickles, but no weights. Independent of folders and repositories.
"""

from __future__ import annotations

import enum
import itertools
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from rabbitllm.checkpoints.index import read_index
from rabbitllm.checkpoints.naming import assign_layers, guessed_naming, layer_order, naming_for
from rabbitllm.errors import CheckpointError, CheckpointNotFoundError
from rabbitllm.formats.bounded import read_json
from rabbitllm.formats.pickle_reader import MAX_LISTED, MAX_PICKLE_BYTES, list_opcodes
from rabbitllm.formats.sentencepiece_model import read_model
from rabbitllm.formats.shard_header import HEAD_BYTES, TORCH, Weights, read_shard_header, recognise
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.formats.torch_file import PICKLE, TorchTensor, pickle_of, read_legacy_torch, read_torch_zip
from rabbitllm.models.inspection.records import (
    Content,
    Entries,
    Inspection,
    Opcode,
    Pickle,
    Pickles,
    ShardMap,
    TensorInfo,
    Tensors,
    Vocabulary,
    row_major,
)

# The pickles of a file as lists of opcodes, for people to look at. Nothing of them is run, built or imported.
#
# A refused file is the one most worth looking at, so content that the strict readers refuse is still listed as far as
# possible: a zip unlike torch's by Python's own reader (which may see another file in it than torch does), a truncated
# pickle up to its end.

MAX_PICKLES = 8
"""Limit of pickles per file. A torch file from before 1.6 has five in a row, a TorchScript archive two."""
HAVE_PICKLES = (Weights.TORCH_ZIP, Weights.TORCH_LEGACY, Weights.PICKLE)
_OPENS = {"MARK"}
_CLOSES = {
    *("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS", "ADDITEMS", "FROZENSET", "INST", "OBJ", "POP_MARK"),
}


def list_pickles(path: Path, kind: Weights) -> Pickles:
    """Every pickle of a local file.

    Args:
        path: the file.
        kind: its format; one of `HAVE_PICKLES`.
    """
    if kind is Weights.TORCH_ZIP:
        return Pickles(tuple(_listed(data, name) for name, data in _pickles_of_zip(path)))
    with path.open("rb") as stream:
        data = stream.read(MAX_PICKLE_BYTES)
    return Pickles(tuple(_one_after_the_other(data, path.name, 5 if kind is Weights.TORCH_LEGACY else 1)))


def _pickles_of_zip(path: Path) -> list[tuple[str, bytes]]:
    try:
        return [(PICKLE, pickle_of(path))]
    except CheckpointError:
        return list(_by_pythons_reader(path))


def _by_pythons_reader(path: Path) -> Iterator[tuple[str, bytes]]:
    """The pickles of any zip; the size limit holds for each, whatever size it declares."""
    try:
        with zipfile.ZipFile(path) as archive:
            wanted = (entry for entry in archive.infolist() if entry.filename.endswith(".pkl"))
            for entry in itertools.islice(wanted, MAX_PICKLES):
                with archive.open(entry) as stream:
                    yield entry.filename, stream.read(MAX_PICKLE_BYTES)
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, RuntimeError, NotImplementedError, EOFError):
        return  # the strict reader has reported the problem


def _one_after_the_other(data: bytes, name: str, most: int) -> Iterator[Pickle]:
    at = 0
    for number in range(min(most, MAX_PICKLES)):
        listed = _listed(data[at:], f"{name}, pickle {number + 1}" if most > 1 else name, at)
        yield listed
        if listed.stopped is not None:
            return
        at = listed.opcodes[-1].position + 1


def _listed(data: bytes, name: str, begin: int = 0) -> Pickle:
    """A pickle's opcodes up to its STOP; positions count from `begin` bytes before the pickle."""
    opcodes: list[Opcode] = []
    depth, stopped = 0, None
    try:
        for opcode in list_opcodes(data, name):
            depth -= depth > 0 and opcode.name in _CLOSES
            opcodes.append(Opcode(begin + opcode.position, depth, opcode.name, opcode.argument))
            depth += opcode.name in _OPENS
    except CheckpointError as error:
        stopped = error.problem
    if stopped is None and len(opcodes) == MAX_LISTED and opcodes[-1].name != "STOP":
        stopped = f"More than {MAX_LISTED:,} opcodes are not listed."
    return Pickle(name, len(data), tuple(opcodes), stopped)


class WeightlessFile(enum.Enum):
    """A file without weights; the value is its format in words."""

    VOCABULARY = "a SentencePiece vocabulary"
    JSON = "JSON"


def kind_of(head: bytes, name: str) -> Weights | WeightlessFile:
    """The format of a file that begins with `head`; its name decides only where `head` is of no known format."""
    found = recognise(head)
    if found is not Weights.UNKNOWN:
        return found
    if _begins_with_a_piece(head):
        return WeightlessFile.VOCABULARY
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return WeightlessFile.JSON
    return WeightlessFile.VOCABULARY if name.endswith(".model") else found


def _begins_with_a_piece(head: bytes) -> bool:
    """Whether the first message has a text and a score, and perhaps a type, as sentencepiece writes them."""
    return len(head) > 3 and head[0] == head[2] == 0x0A and head[1] - head[3] in (7, 9)


def look_at_file(path: Path, *, opcodes: bool = False) -> Inspection:
    """The content of a file; for a file that its reader refuses, with the refusal.

    Args:
        path: a regular file.
        opcodes: list its pickles instead of its tensors; a bare pickle can only be listed so.

    Raises:
        CheckpointNotFoundError: there is no such file, or it cannot be read.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
        raise CheckpointNotFoundError(
            f"{path} is neither a file nor a folder.", "Name a file, a folder or a repository."
        )
    try:
        with path.open("rb") as stream:
            kind = kind_of(stream.read(HEAD_BYTES), path.name)
    except PermissionError:
        raise CheckpointNotFoundError(f"{path} may not be read.", "Check its permissions.") from None
    content, refusal = _read(path, kind)
    has_pickle = kind in HAVE_PICKLES
    if isinstance(kind, Weights) and has_pickle and (opcodes or kind is Weights.PICKLE):
        content = list_pickles(path, kind)
    return Inspection(str(path), kind.value, found.st_size, content, has_pickle=has_pickle, refusal=refusal)


def _read(path: Path, kind: Weights | WeightlessFile) -> tuple[Content | None, CheckpointError | None]:
    try:
        if kind is WeightlessFile.VOCABULARY:
            return Vocabulary(read_model(path)), None
        if kind is WeightlessFile.JSON:
            return _read_text(path), None
        return _read_weights(path, kind), None
    except CheckpointError as error:
        return None, error


def _read_text(path: Path) -> Content:
    if path.name.endswith(".index.json"):
        metadata = read_json(path).get("metadata")
        return ShardMap(read_index(path).weight_map, metadata if isinstance(metadata, dict) else {})
    return Entries(read_json(path))


def _read_weights(path: Path, kind: Weights | WeightlessFile) -> Tensors:
    family = family_in(path.parent)
    if kind in TORCH:
        read = read_torch_zip(path) if kind is Weights.TORCH_ZIP else read_legacy_torch(path)
        layers, order = layers_of((tensor.name for tensor in read.tensors), family)
        return Tensors(
            tuple(_of_torch(tensor, layers[tensor.name], zipped=kind is Weights.TORCH_ZIP) for tensor in read.tensors),
            order,
            left_out=read.left_out,
        )
    header = read_shard_header(path)
    layers, order = layers_of((spec.name for spec in header.tensors), family)
    return Tensors(tuple(of_spec(spec, layers[spec.name]) for spec in header.tensors), order, header.metadata)


def family_in(folder: Path) -> str | None:
    """The `model_type` of the config in a folder, if there is a readable one."""
    try:
        family = read_json(folder / "config.json").get("model_type")
    except (CheckpointError, OSError):
        return None
    return family if isinstance(family, str) else None


def layers_of(names: Iterable[str], family: str | None) -> tuple[dict[str, str], tuple[str, ...]]:
    """The id of each tensor's layer, and all ids in the order of a pass; guessed for an unknown family."""
    assigned = assign_layers(list(names), family, naming_for(family) or guessed_naming())
    stems = {layer.id: layer.stem for layer in assigned.values()}
    ids = {tensor: layer.id for tensor, layer in assigned.items()}
    return ids, tuple(sorted(stems, key=lambda layer: layer_order(stems[layer])))


def of_spec(spec: TensorSpec, layer: str) -> TensorInfo:
    """A tensor in a shard's header."""
    strides = row_major(spec.shape) if spec.strides is None else spec.strides
    return TensorInfo(spec.name, spec.dtype, spec.shape, strides, spec.offset, spec.nbytes, layer, spec.file)


def _of_torch(tensor: TorchTensor, layer: str, *, zipped: bool) -> TensorInfo:
    return TensorInfo(
        tensor.name,
        tensor.dtype,
        tensor.shape,
        tensor.strides,
        tensor.offset,
        tensor.nbytes,
        layer,
        tensor.file,
        f"data/{tensor.storage}" if zipped else tensor.storage,
    )
