"""The split directory: which layers are there, whose they are, and where each tensor lies.

`split.json` is written last, so a directory that has one is whole. It names the source (repository, commit,
shards), the compression and every layer file. A directory without one is either in work (it has a journal), or
RabbitLLM 1.1 made it (every layer file has its `.done`), or it is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rabbitllm import durable
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.collection import uncollected
from rabbitllm.errors import (
    CorruptShardError,
    IncompleteSplitError,
    InvalidIndexError,
    RabbitLLMError,
    SplitMismatchError,
)
from rabbitllm.formats.json_text import text_of
from rabbitllm.formats.safetensors_file import MappedFile, read_header
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.layers import chosen
from rabbitllm.layers.chosen import AUTO, Chosen
from rabbitllm.layers.compression import BLOCKS, Quantised, part_names, read_state, schemes, state_key
from rabbitllm.layers.layer_file import DONE_SUFFIX, LAYER_SUFFIX
from rabbitllm.layers.order import BY_NAME, FORMAT_VERSION

MANIFEST_NAME = "split.json"
JOURNAL_NAME = "split.journal"
SPLIT_DIRECTORY = "splitted_model"
"""RabbitLLM 1.1's name; the compression is appended, as `.4bit`."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer file of a finished split.

    Attributes:
        id, stem: of the layer.
        file: its name.
        size: bytes.
        tensors: the checkpoint's names.
        crc32: of the whole file as it was meant to be written.
        shards: those that its tensors came from.
    """

    id: str
    stem: str
    file: str
    size: int
    tensors: tuple[str, ...]
    crc32: int
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `split.json` says.

    Attributes:
        source: what was split.
        compression: None, one that all tensors have, or "auto".
        quantiser: what quantised; None without compression.
        layers: every layer file.
        format_version: in which order these hold their tensors, see `order.py`.
        chosen: what each tensor has at "auto"; None at every other compression.
        source_checksums: shard -> CRC-32 of the data that the split used of it (`source_check.source_crc32`); only of
            shards without a digest of the hub.
    """

    source: SourceIdentity
    compression: str | None
    quantiser: str | None
    layers: tuple[LayerRecord, ...]
    format_version: int = FORMAT_VERSION
    chosen: Chosen | None = None
    source_checksums: Mapping[str, int] = field(default_factory=dict)


FITTED = ", scales fitted"
"""What a quantiser's name ends with whose scales of 4bit fit their blocks."""


def is_fitted(quantiser: str | None) -> bool:
    """Whether the scales of 4bit fit their blocks, by what the journal or the manifest says of the quantiser."""
    return quantiser is not None and quantiser.endswith(FITTED)


def directory_name(compression: str | None, base: str = SPLIT_DIRECTORY) -> str:
    """`splitted_model`, or with the compression: `splitted_model.4bit`, `splitted_model.auto`."""
    return base if compression is None else f"{base}.{compression}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Declare the directory whole. Everything it names must be durable already."""
    from rabbitllm.version import __version__

    layers = [
        {
            "id": r.id,
            "stem": r.stem,
            "file": r.file,
            "size": r.size,
            "crc32": f"{r.crc32:08x}",
            "shards": list(r.shards),
            "tensors": list(r.tensors),
        }
        for r in manifest.layers
    ]
    source = manifest.source
    checksums = {shard: f"{crc:08x}" for shard, crc in manifest.source_checksums.items()}
    content = {
        "format": "rabbitllm split directory",
        "format_version": manifest.format_version,
        "written_by": f"rabbitllm {__version__}",
        "source": {
            "kind": source.kind,
            "name": source.name,
            "commit": source.commit,
            "fingerprints": dict(source.fingerprints),
            **({"crc32": checksums} if checksums else {}),
        },
        "compression": manifest.compression,
        **({} if manifest.chosen is None else {"chosen": manifest.chosen.as_json()}),
        "quantiser": manifest.quantiser,
        "layers": layers,
    }
    durable.write_whole(folder / MANIFEST_NAME, (json.dumps(content, indent=1) + "\n").encode())


def read_manifest(folder: Path, name: str = MANIFEST_NAME) -> Manifest | None:
    """The manifest of a finished split; None if there is none.

    Args:
        folder: the split directory.
        name: of the file, where it has another one than usual.

    Raises:
        IncompleteSplitError: it is no manifest.
        SplitMismatchError: a later version of this package wrote it.
    """
    path = folder / name
    if not path.exists():
        return None
    try:
        content = read_json(path)
    except InvalidIndexError as error:
        raise IncompleteSplitError(error.problem, _REMAKE) from None
    version = content.get("format_version")
    if type(version) is not int or version < BY_NAME:
        raise IncompleteSplitError(f"{path} is no manifest: it has no format_version.", _REMAKE)
    if version > FORMAT_VERSION:
        raise SplitMismatchError(
            f"{path} has format version {version}; this rabbitllm reads up to {FORMAT_VERSION}.",
            "Update rabbitllm, or split again into another folder.",
        )
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IncompleteSplitError(f"{path} is damaged: {type(error).__name__} {error}.", _REMAKE) from None


_REMAKE = (
    "Split the checkpoint again, into another folder (layer_shards_saving_path) or after moving this one away. Keep "
    "this one until that is done: if the checkpoint was deleted, it holds the only copy."
)


def _parse(content: dict[str, Any]) -> Manifest:
    source, compression = content["source"], content["compression"]
    if compression not in (None, AUTO, *BLOCKS):
        raise ValueError(f"{compression!r} is no compression")
    fingerprints = {shard: text_of(mark) for shard, mark in source["fingerprints"].items()}
    identity = SourceIdentity(text_of(source["kind"]), text_of(source["name"]), source["commit"], fingerprints)
    layers = tuple(_record(r) for r in content["layers"])
    mixture = chosen.from_json(content["chosen"]) if compression == AUTO else None
    checksums = {shard: int(text_of(crc), 16) for shard, crc in source.get("crc32", {}).items()}
    return Manifest(identity, compression, content["quantiser"], layers, content["format_version"], mixture, checksums)


def _record(entry: dict[str, Any]) -> LayerRecord:
    file, size = text_of(entry["file"]), entry["size"]
    if Path(file).name != file or not file.endswith(LAYER_SUFFIX):  # a folder may come from anywhere
        raise ValueError(f"{file!r} is no name of a layer file")
    if type(size) is not int or size < 0:
        raise ValueError(f"{size!r} is no size")
    tensors = tuple(text_of(name) for name in entry["tensors"])
    shards = tuple(text_of(name) for name in entry["shards"])
    return LayerRecord(
        text_of(entry["id"]), text_of(entry["stem"]), file, size, tensors, int(text_of(entry["crc32"]), 16), shards
    )


def is_legacy(folder: Path) -> bool:
    """Whether RabbitLLM 1.1 (or AirLLM) made this directory: finished layer files, and neither manifest nor journal."""
    if (folder / MANIFEST_NAME).exists() or (folder / JOURNAL_NAME).exists() or not folder.is_dir():
        return False
    return any(folder.glob(f"*{LAYER_SUFFIX}{DONE_SUFFIX}"))


def is_finished(folder: Path) -> bool:
    """Whether a folder says of itself that it is a whole split directory, by its manifest or as RabbitLLM 1.1 did."""
    return (folder / MANIFEST_NAME).exists() or is_legacy(folder)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a checkpoint tensor lies in a split directory.

    Attributes:
        name: the checkpoint's name.
        parts: its stored keys in `part_names` order, payload first; `file` is the layer file's name.
        quantised: how it is compressed; None if it is stored as it is.
    """

    name: str
    parts: tuple[TensorSpec, ...]
    quantised: Quantised | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint tensor."""
        return self.quantised.shape if self.quantised else self.parts[0].shape

    @property
    def nbytes(self) -> int:
        """Bytes it occupies on disk."""
        return sum(part.nbytes for part in self.parts)


class WeightFiles(Protocol):
    """What the engine asks of the files that weights lie in.

    Attributes:
        folder: what they lie in.
        tensors: checkpoint name -> where it lies.
    """

    folder: Path
    tensors: dict[str, StoredTensor]

    def mapped(self, file: str) -> MappedFile:
        """A file, mapped."""
        ...

    def path(self, file: str) -> Path:
        """A file's path."""
        ...


class LayerStore:
    """A finished split directory, opened for reading: headers are read, weights are not.

    Attributes:
        folder: the split directory.
        manifest: None for a directory of RabbitLLM 1.1.
        tensors: checkpoint name -> where it lies.
    """

    @uncollected()
    def __init__(self, folder: Path) -> None:
        """
        Raises:
            IncompleteSplitError: a layer file is missing, has another size than the manifest says, or is damaged.
        """
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self._maps: dict[str, MappedFile] = {}
        for file in self._files():
            self._open(file)

    def _files(self) -> list[str]:
        if self.manifest is not None:
            for record in self.manifest.layers:
                path = self.folder / record.file
                size = path.stat().st_size if path.exists() else None
                if size != record.size:
                    state = "is missing" if size is None else f"has {size:,} bytes"
                    raise IncompleteSplitError(
                        f"{path} {state}; {MANIFEST_NAME} says it has {record.size:,} bytes.", _REMAKE
                    )
            return [record.file for record in self.manifest.layers]
        files = sorted(path.name for path in self.folder.glob(f"*{LAYER_SUFFIX}"))
        unfinished = [name for name in files if not (self.folder / (name + DONE_SUFFIX)).exists()]
        if unfinished or not files:
            raise IncompleteSplitError(
                f"{self.folder} is no finished split: "
                + (f"{', '.join(unfinished[:3])} has no .done marker." if unfinished else "it has no layer files."),
                _REMAKE,
            )
        return files

    def _open(self, file: str) -> None:
        try:
            header = read_header(self.folder / file, file)
        except CorruptShardError as error:
            raise IncompleteSplitError(f"In {self.folder}: {error.problem}", _REMAKE) from None
        mapped = self._maps[file] = MappedFile(self.folder / file, header)
        keys = {spec.name: spec for spec in header.tensors}
        for name, scheme in schemes(keys).items():
            try:
                state = bytes(mapped.bytes_of(keys[key])) if (key := state_key(name, scheme)) else b""
                quantised = read_state(name, scheme, keys, state) if scheme else None
            except RabbitLLMError as error:
                raise IncompleteSplitError(f"In {self.folder / file}: {error.problem}", _REMAKE) from None
            parts = tuple(keys[part] for part in part_names(name, scheme))
            self.tensors[name] = StoredTensor(name, parts, quantised)

    @property
    def compression(self) -> str | None:
        """The compression of the directory as a whole."""
        if self.manifest is not None:
            return self.manifest.compression
        return next((t.quantised.scheme for t in self.tensors.values() if t.quantised), None)

    def mapped(self, file: str) -> MappedFile:
        """A layer file, mapped."""
        return self._maps[file]

    def path(self, file: str) -> Path:
        """A layer file's path."""
        return self.folder / file
