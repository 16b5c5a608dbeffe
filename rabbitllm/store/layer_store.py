"""The split directory: its layers, its source, and the offset of each tensor.

`split.json` is written last, so a directory that has one is complete. It records the source (repository, commit,
shards), the compression and every layer file. A directory without one is unfinished (it has a journal), or made by
RabbitLLM 1.1 (every layer file has its `.done`), or not a split directory.
"""

from __future__ import annotations

import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rabbitllm.base.collection import uncollected
from rabbitllm.base.forks import own_lock
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.errors import (
    CorruptShardError,
    IncompleteSplitError,
    InvalidIndexError,
    RabbitLLMError,
    SplitMismatchError,
)
from rabbitllm.formats.json_text import text_of
from rabbitllm.formats.positional import PositionalFile
from rabbitllm.formats.safetensors_file import Header, MappedFile, read_header
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.compression import BLOCKS, Quantized, part_names, read_state, schemes, state_key
from rabbitllm.storage import durable
from rabbitllm.store import chosen
from rabbitllm.store.checksums import SUM_BYTES, LayerChecks, damaged
from rabbitllm.store.chosen import AUTO, BitAllocation
from rabbitllm.store.layer_file import DONE_SUFFIX, LAYER_SUFFIX
from rabbitllm.store.order import BY_NAME, FORMAT_VERSION

MANIFEST_NAME = "split.json"
JOURNAL_NAME = "split.journal"
SPLIT_DIRECTORY = "splitted_model"
"""RabbitLLM 1.1's directory name; the compression is appended, as `.4bit`."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer file of a finished split.

    Attributes:
        id, stem: id and stem of the layer.
        file: its name.
        size: bytes.
        tensors: the checkpoint's names.
        crc32: CRC-32 of the whole file as intended.
        shards: names of the shards that its tensors came from.
        blocks: CRC-32 of each of its blocks (`checksums.py`); None in an older split without them.
    """

    id: str
    stem: str
    file: str
    size: int
    tensors: tuple[str, ...]
    crc32: int
    shards: tuple[str, ...]
    blocks: bytes | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `split.json`.

    Attributes:
        source: the checkpoint that was split.
        compression: None, a single one for all tensors, or "auto".
        quantizer: name of the quantizer; None without compression.
        layers: all layer files.
        format_version: determines the order of tensors in them, see `order.py`.
        chosen: the bits of each tensor at "auto"; None otherwise.
        source_checksums: shard -> CRC-32 of its data that the split used (`source_check.source_crc32`); only for shards
            without a digest of the hub.
    """

    source: SourceIdentity
    compression: str | None
    quantizer: str | None
    layers: tuple[LayerRecord, ...]
    format_version: int = FORMAT_VERSION
    chosen: BitAllocation | None = None
    source_checksums: Mapping[str, int] = field(default_factory=dict)


FITTED = ", scales fitted"
"""Suffix of a quantizer's name if its 4bit scales are fitted to their blocks."""


def is_fitted(quantizer: str | None) -> bool:
    """Whether 4bit scales are fitted to their blocks, by the quantizer's name in the journal or the manifest."""
    return quantizer is not None and quantizer.endswith(FITTED)


def directory_name(compression: str | None, base: str = SPLIT_DIRECTORY) -> str:
    """`splitted_model`, or with the compression: `splitted_model.4bit`, `splitted_model.auto`."""
    return base if compression is None else f"{base}.{compression}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Declare the directory complete. All files that the manifest names must be durable already."""
    from rabbitllm.version import __version__

    layers = [
        {
            "id": r.id,
            "stem": r.stem,
            "file": r.file,
            "size": r.size,
            "crc32": f"{r.crc32:08x}",
            **({} if r.blocks is None else {"blocks": b64encode(r.blocks).decode()}),
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
        "quantiser": manifest.quantizer,
        "layers": layers,
    }
    durable.write_whole(folder / MANIFEST_NAME, (json.dumps(content, indent=1) + "\n").encode())


def read_manifest(folder: Path, name: str = MANIFEST_NAME) -> Manifest | None:
    """The manifest of a finished split; None if there is none.

    Args:
        folder: the split directory.
        name: name of the file, if not the usual one.

    Raises:
        IncompleteSplitError: it is malformed.
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
    crc, blocks = int(text_of(entry["crc32"]), 16), entry.get("blocks")
    known = None if blocks is None else b64decode(text_of(blocks), validate=True)
    if known is not None and len(known) % SUM_BYTES:
        raise ValueError(f"{len(known)} bytes are no checksums")
    return LayerRecord(text_of(entry["id"]), text_of(entry["stem"]), file, size, tensors, crc, shards, known)


def is_legacy(folder: Path) -> bool:
    """Whether RabbitLLM 1.1 (or AirLLM) made this directory: finished layer files, but no manifest or journal."""
    if (folder / MANIFEST_NAME).exists() or (folder / JOURNAL_NAME).exists() or not folder.is_dir():
        return False
    return any(folder.glob(f"*{LAYER_SUFFIX}{DONE_SUFFIX}"))


def is_finished(folder: Path) -> bool:
    """Whether a folder is a complete split directory by its manifest, or by RabbitLLM 1.1's markers."""
    return (folder / MANIFEST_NAME).exists() or is_legacy(folder)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A checkpoint tensor in a split directory.

    Attributes:
        name: the checkpoint's name.
        parts: its stored keys in `part_names` order, payload first; `file` is the layer file's name.
        quantized: its compression; None if it is stored uncompressed.
    """

    name: str
    parts: tuple[TensorSpec, ...]
    quantized: Quantized | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint tensor."""
        return self.quantized.shape if self.quantized else self.parts[0].shape

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return sum(part.nbytes for part in self.parts)


def read_forms(path: Path, keys: Mapping[str, TensorSpec]) -> dict[str, Quantized | None]:
    """The compression of each checkpoint tensor in a layer file: name -> form, None for uncompressed ones.

    Args:
        path: the file.
        keys: stored key -> its entry in the file's header.

    Raises:
        RabbitLLMError: the parts of a compressed tensor contradict each other.
    """
    found: dict[str, Quantized | None] = {}
    with PositionalFile(path) as file:
        for name, scheme in schemes(keys).items():
            key = state_key(name, scheme)
            state = file.read_at(keys[key].offset, keys[key].nbytes) if key is not None else b""
            found[name] = read_state(name, scheme, keys, state) if scheme is not None else None
    return found


class WeightFiles(Protocol):
    """The interface between the engine and files of weights.

    Attributes:
        folder: the folder of the files.
        label: name in messages.
        is_split: whether they are the layer files of a split, whose original may be gone.
        tensors: checkpoint name -> stored tensor.
        checks: checks of bytes read; None if the files have no checksums, or none are to be compared.
    """

    folder: Path
    label: str
    is_split: bool
    tensors: dict[str, StoredTensor]
    checks: LayerChecks | None

    def mapped(self, file: str) -> MappedFile:
        """A file, mapped."""
        ...

    def path(self, file: str) -> Path:
        """A file's path."""
        ...


class Maps:
    """Files of weights, mapped on first use and kept mapped. Safe to use from several threads.

    None of them is held open. `path` is absolute, so it stays valid if the working directory changes.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._headers: dict[str, Header] = {}
        self._mapped: dict[str, MappedFile] = {}
        self._lock = own_lock(threading.Lock())

    def add(self, file: str, header: Header) -> None:
        """Add a file and its header."""
        self._headers[file] = header

    def path(self, file: str) -> Path:
        """A file's path."""
        return self._folder / file

    def mapped(self, file: str) -> MappedFile:
        """A file, mapped."""
        with self._lock:
            if file not in self._mapped:
                self._mapped[file] = MappedFile(self.path(file), self._headers[file])
            return self._mapped[file]


class LayerStore:
    """A finished split directory, opened for reading: only headers are read.

    Attributes:
        folder: the split directory.
        manifest: None for a directory of RabbitLLM 1.1.
        tensors: checkpoint name -> stored tensor.
        checks: checks of bytes read, if requested and if the split has checksums.
    """

    is_split = True

    @uncollected()
    def __init__(self, folder: Path, manifest: Manifest | None = None, *, verify_checksums: bool = False) -> None:
        """
        Args:
            folder: the split directory.
            manifest: its manifest, if that has not been written yet.
            verify_checksums: whether to compare bytes read, headers included, with their checksums.

        Raises:
            IncompleteSplitError: a layer file is missing, differs in size from the manifest, or is damaged.
        """
        self.folder = folder
        self.label = str(folder)
        self.manifest = manifest or read_manifest(folder)
        self.checks = LayerChecks(folder) if verify_checksums and self.manifest is not None else None
        self.tensors: dict[str, StoredTensor] = {}
        self._maps = Maps(folder)
        for file, record in self._files().items():
            self._open(file, record)

    def _files(self) -> dict[str, LayerRecord | None]:
        if self.manifest is not None:
            for record in self.manifest.layers:
                path = self.folder / record.file
                size = path.stat().st_size if path.exists() else None
                if size != record.size:
                    state = "is missing" if size is None else f"has {size:,} bytes"
                    raise IncompleteSplitError(
                        f"{path} {state}; {MANIFEST_NAME} says it has {record.size:,} bytes.", _REMAKE
                    )
            return {record.file: record for record in self.manifest.layers}
        files = sorted(path.name for path in self.folder.glob(f"*{LAYER_SUFFIX}"))
        unfinished = [name for name in files if not (self.folder / (name + DONE_SUFFIX)).exists()]
        if unfinished or not files:
            raise IncompleteSplitError(
                f"{self.folder} is no finished split: "
                + (f"{', '.join(unfinished[:3])} has no .done marker." if unfinished else "it has no layer files."),
                _REMAKE,
            )
        return dict.fromkeys(files)

    def _open(self, file: str, record: LayerRecord | None) -> None:
        remedy = _REMAKE if record is None else damaged(self.folder / file, "").remedy
        try:
            header = read_header(self.folder / file, file)
        except CorruptShardError as error:
            raise IncompleteSplitError(f"In {self.folder}: {error.problem}", remedy) from None
        self._maps.add(file, header)
        keys = {spec.name: spec for spec in header.tensors}
        if self.checks is not None and record is not None:
            self.checks.open(file, header, lambda: self._maps.mapped(file).whole(), record.crc32, record.blocks)
            if record.blocks is not None:
                states = (key for name, scheme in schemes(keys).items() if (key := state_key(name, scheme)))
                self.checks.stored(file, [(keys[key].offset, keys[key].nbytes) for key in states])
        try:
            for name, quantized in read_forms(self.folder / file, keys).items():
                parts = tuple(keys[part] for part in part_names(name, quantized.scheme if quantized else None))
                self.tensors[name] = StoredTensor(name, parts, quantized)
        except RabbitLLMError as error:
            raise IncompleteSplitError(f"In {self.folder / file}: {error.problem}", remedy) from None

    @property
    def compression(self) -> str | None:
        """The compression of the directory as a whole."""
        if self.manifest is not None:
            return self.manifest.compression
        return next((t.quantized.scheme for t in self.tensors.values() if t.quantized), None)

    def mapped(self, file: str) -> MappedFile:
        """A layer file, mapped."""
        return self._maps.mapped(file)

    def path(self, file: str) -> Path:
        """A layer file's path."""
        return self._maps.path(file)
