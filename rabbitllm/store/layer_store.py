"""Files of weights opened for reading, a split directory or a checkpoint's own shards; and the verification of a split.

Only headers are read at first. With `split=False` the engine reads a checkpoint's shards instead of layer files:
nothing is written or compressed. Then tensors may be unaligned, and are copied when they are used; some are in another
order, and are rearranged in each use; and the tensors of a layer may be spread over a file, or over several.

Verification reads every byte of every layer file; it changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rabbitllm.base.collection import uncollected
from rabbitllm.base.forks import own_lock
from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.index import MODEL_DTYPES, SAFETENSORS_SUFFIX, dtype_without_config
from rabbitllm.errors import (
    CorruptShardError,
    IncompleteSplitError,
    RabbitLLMError,
    UnreadableFormatError,
)
from rabbitllm.formats.safetensors_file import MappedFile, read_header
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.formats.tensor_spec import Header, TensorSpec
from rabbitllm.quant.schemes import Quantized, scheme_of
from rabbitllm.storage.files import PositionalFile
from rabbitllm.store.checksums import (
    LayerChecks,
    block_starts,
    combine_all,
    crc32_of_file,
    how_to_repair,
    lengths_of,
    numbers,
)
from rabbitllm.store.layer_file import DONE_SUFFIX, LAYER_SUFFIX
from rabbitllm.store.manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    REMAKE,
    LayerRecord,
    Manifest,
    is_legacy,
    read_manifest,
    refuse_half_removed,
)
from rabbitllm.store.stored_form import part_names, read_state, state_key, stored_schemes

if TYPE_CHECKING:
    from rabbitllm.checkpoints.local import LocalCheckpoint


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
        return sum(part.extent for part in self.parts)

    @property
    def model_dtype(self) -> str | None:
        """Its dtype in the checkpoint, a torch name; None if a model cannot have it, or if it is not known."""
        return MODEL_DTYPES.get(self.parts[0].dtype) if self.quantized is None else self.quantized.dtype

    @property
    def is_one_run(self) -> bool:
        """Whether the bytes of each part are its elements in row-major order."""
        return all(part.is_one_run for part in self.parts)


def read_forms(path: Path, keys: Mapping[str, TensorSpec]) -> dict[str, Quantized | None]:
    """The compression of each checkpoint tensor in a layer file: name -> form, None for uncompressed ones.

    Args:
        path: the file.
        keys: stored key -> its entry in the file's header.

    Raises:
        RabbitLLMError: the parts of a compressed tensor contradict each other.
    """
    forms: dict[str, Quantized | None] = {}
    with PositionalFile(path) as file:
        for name, scheme in stored_schemes(keys).items():
            key = state_key(name, scheme)
            state = file.read_at(keys[key].offset, keys[key].nbytes) if key is not None else b""
            forms[name] = read_state(name, scheme, keys, state) if scheme is not None else None
    return forms


class WeightFiles(Protocol):
    """The interface between the engine and files of weights.

    Attributes:
        folder: the folder of the files.
        label: name in messages.
        is_split: whether they are the layer files of a split, whose original may be gone.
        tensors: checkpoint name -> stored tensor.
        dtype: of a model whose config names none, a torch name; None if all floating-point tensors had the same.
        checks: checks of bytes read; None if the files have no checksums, or none are to be compared.
    """

    folder: Path
    label: str
    is_split: bool
    tensors: dict[str, StoredTensor]
    dtype: str | None
    checks: LayerChecks | None

    def mapped(self, file: str) -> MappedFile:
        """A file, mapped."""

    def path(self, file: str) -> Path:
        """A file's path."""


class MappedWeights:
    """Files of weights, mapped on first use and kept mapped. Safe to use from several threads.

    None of them is held open. `path` is absolute, so it stays valid if the working directory changes.

    Args:
        folder: the folder of the files.
        label: its name in messages.
    """

    def __init__(self, folder: Path, label: str) -> None:
        self.folder = folder
        self.label = label
        self.tensors: dict[str, StoredTensor] = {}
        self._absolute = folder.absolute()
        self._headers: dict[str, Header] = {}
        self._mapped: dict[str, MappedFile] = {}
        self._lock = own_lock(threading.Lock())

    def path(self, file: str) -> Path:
        """A file's path."""
        return self._absolute / file

    def mapped(self, file: str) -> MappedFile:
        """A file, mapped."""
        with self._lock:
            if file not in self._mapped:
                self._mapped[file] = MappedFile(self.path(file), self._headers[file])
            return self._mapped[file]


class LayerStore(MappedWeights):
    """A finished split directory, opened for reading: only headers are read.

    Attributes:
        folder: the split directory.
        manifest: None for a directory of RabbitLLM 1.1.
        tensors, dtype: see `WeightFiles`.
        checks: checks of bytes read; None for a directory of RabbitLLM 1.1, which has no checksums, or without
            `verify_checksums`.
    """

    is_split = True

    @uncollected()
    def __init__(self, folder: Path, manifest: Manifest | None = None, *, verify_checksums: bool = True) -> None:
        """
        Args:
            folder: the split directory.
            manifest: its manifest, if that has not been written yet.
            verify_checksums: whether to compare bytes read, headers included, with their checksums. False only where
                the user asks for it.

        Raises:
            IncompleteSplitError: a layer file is missing, differs in size from the manifest, or is damaged.
        """
        super().__init__(folder, str(folder))
        self.manifest = manifest or read_manifest(folder)
        self.checks = LayerChecks(folder) if verify_checksums and self.manifest is not None else None
        for file, record in self._files().items():
            self._open(file, record)
        self.dtype = None if self.manifest is None else self.manifest.dtype or self._likely_dtype(self.manifest.layers)

    def _likely_dtype(self, layers: Sequence[LayerRecord]) -> str | None:
        """The dtype of an older split, which did not record it: of the first tensor by name, of those that may have
        been in the first shard. Shards of torch files had another order: that of the layers is nearest."""
        if len({tensor.model_dtype for tensor in self.tensors.values()} - {None}) < 2:
            return None
        first = min((shard for record in layers for shard in record.shards), default="")
        if not first.endswith(SAFETENSORS_SUFFIX):
            return None
        names = sorted(name for record in layers if first in record.shards for name in record.tensors)
        tensors = (self.tensors[name] for name in names if name in self.tensors)
        return next((dtype for tensor in tensors if (dtype := tensor.model_dtype) is not None), None)

    def _files(self) -> dict[str, LayerRecord | None]:
        files, unfinished = _layer_files(self.folder, self.manifest), []
        for file, record in files.items():
            path = self.folder / file
            size = path.stat().st_size if path.exists() else None
            if record is None:
                unfinished += [] if path.with_name(file + DONE_SUFFIX).exists() else [file]
            elif size != record.size:
                state = "is missing" if size is None else f"has {size:,} bytes"
                raise IncompleteSplitError(
                    f"{path} {state}; by {MANIFEST_NAME} it has {record.size:,} bytes.", how_to_repair(path)
                )
        if unfinished or (self.manifest is None and not files):
            raise IncompleteSplitError(
                f"{self.folder} is not a finished split: "
                + (f"{listed(unfinished, 3)} has no .done marker." if unfinished else "it has no layer files."),
                REMAKE,
            )
        return files

    def is_current(self) -> bool:
        """Whether the directory still has this manifest, and files of these sizes."""
        try:
            return self.manifest is not None and read_manifest(self.folder) == self.manifest and bool(self._files())
        except RabbitLLMError:
            return False

    def _open(self, file: str, record: LayerRecord | None) -> None:
        remedy = REMAKE if record is None else how_to_repair(self.folder / file)
        try:
            header = read_header(self.folder / file, file)
        except CorruptShardError as error:
            raise IncompleteSplitError(f"In {self.folder}: {error.problem}", remedy) from None
        self._headers[file] = header
        keys = {spec.name: spec for spec in header.tensors}
        if self.checks is not None and record is not None:
            self.checks.open(file, header, lambda: self.mapped(file).whole(), record.crc32, record.blocks)
            if record.blocks is not None:
                states = (key for name, scheme in stored_schemes(keys).items() if (key := state_key(name, scheme)))
                self.checks.stored(file, [(keys[key].offset, keys[key].nbytes) for key in states], unmapped=True)
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


class UnsplitStore(MappedWeights):
    """The shards of a local checkpoint, opened for reading: only headers are read.

    Attributes:
        folder: the checkpoint.
        tensors, dtype: see `WeightFiles`.
        checks: none; a checkpoint's shards have no checksums.
    """

    is_split = False
    checks: LayerChecks | None = None

    def __init__(self, checkpoint: LocalCheckpoint) -> None:
        """
        Raises:
            UnreadableFormatError: a tensor is in pieces, so the checkpoint has to be split first.
            CheckpointError: see `read_shard_header`.
        """
        super().__init__(checkpoint.folder, checkpoint.label)
        for shard in checkpoint.index.shards:
            self._headers[shard] = checkpoint.taken_from(shard, read_shard_header(self.path(shard), shard))
        last = {spec.name: shard for shard in sorted(self._headers) for spec in self._headers[shard].tensors}
        owner = {**last, **checkpoint.index.weight_map}  # as a split takes them
        for shard, header in self._headers.items():
            self.tensors |= {spec.name: _stored_tensor(spec) for spec in header.tensors if owner[spec.name] == shard}
        headers = {shard: header.tensors for shard, header in self._headers.items()}
        self.dtype = dtype_without_config(checkpoint.index, headers)


def _stored_tensor(spec: TensorSpec) -> StoredTensor:
    """A tensor of a checkpoint as the engine reads it: blocks that a split would keep stay blocks."""
    if spec.piece is not None:
        raise UnreadableFormatError(
            f"The tensor {spec.name!r} in {spec.file} is a piece of a larger one; split=False reads whole ones only.",
            "Remove split=False: a split joins the pieces.",
        )
    scheme, payload = scheme_of(spec, None), spec.row_blocks
    if scheme is None or payload is None:
        return StoredTensor(spec.name, (spec,), None)
    return StoredTensor(spec.name, (payload,), Quantized(scheme, spec.shape, None))


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged layer file: its name, the layer's id, and the problem."""

    file: str
    layer: str
    problem: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification.

    Attributes:
        folder: the split directory.
        manifest: None for a directory of RabbitLLM 1.1, which has neither checksums nor a list of its layers.
        files: number of layer files checked.
        nbytes: their total size.
        damaged: the damaged ones.
    """

    folder: Path
    manifest: Manifest | None
    files: int
    nbytes: int
    damaged: tuple[Damage, ...]


def verify(folder: Path, on_file: Callable[[str, int], None] = lambda name, nbytes: None) -> Verification:
    """Check every layer file of a finished split directory.

    Args:
        folder: the split directory.
        on_file: called with each file's name and size in bytes after its check.

    Raises:
        IncompleteSplitError: the directory is not a finished split, or its manifest is damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None and not is_legacy(folder):
        if (folder / JOURNAL_NAME).exists():
            raise IncompleteSplitError(
                f"{folder} is an unfinished split.", "Make the call that started it again: it resumes."
            )
        refuse_half_removed(folder)
        raise IncompleteSplitError(f"{folder} is not a split directory.", "Use a folder that has a split.json.")
    damaged, files, nbytes = [], 0, 0
    for file, record in _layer_files(folder, manifest).items():
        path = folder / file
        size = path.stat().st_size if path.exists() else 0
        problem = _find_problem(path, record)
        if problem is not None:
            damaged.append(Damage(file, record.id if record else file.removesuffix(LAYER_SUFFIX), problem))
        files, nbytes = files + 1, nbytes + size
        on_file(file, size)
    return Verification(folder, manifest, files, nbytes, tuple(damaged))


def _layer_files(folder: Path, manifest: Manifest | None) -> dict[str, LayerRecord | None]:
    """Names of the layer files, with their records; None in a directory of RabbitLLM 1.1."""
    if manifest is not None:
        return {record.file: record for record in manifest.layers}
    return dict.fromkeys(sorted(path.name for path in folder.glob(f"*{LAYER_SUFFIX}")))


def _find_problem(path: Path, record: LayerRecord | None) -> str | None:
    """The problem with a layer file, as text; None if it is intact."""
    if not path.exists():
        return "it is missing"
    if record is None and not path.with_name(path.name + DONE_SUFFIX).exists():
        return f"it has no {DONE_SUFFIX} marker"
    size = path.stat().st_size
    if record is not None and size != record.size:
        return f"it has {size:,} bytes; {record.size:,} were written"
    try:
        header = read_header(path)
        tensors = set(read_forms(path, {spec.name: spec for spec in header.tensors}))
    except RabbitLLMError as error:
        return error.problem
    except OSError as error:
        return f"it cannot be read: {error}"
    if record is None:
        return None
    if lost := sorted(set(record.tensors) ^ tensors):
        return f"its tensors are not those of its layer: {lost[0]!r}{f' and {len(lost) - 1} more' * (len(lost) > 1)}"
    if record.blocks is not None:
        parts = ((part.offset, part.nbytes) for part in header.tensors)
        lengths = lengths_of(block_starts(size, header.data_start, parts), size)
        sums = numbers(record.blocks)
        if len(sums) != len(lengths) or combine_all(zip(sums, lengths, strict=True)) != record.crc32:
            return "the checksums of its blocks are not those of the file"
    crc = crc32_of_file(path)
    return None if crc == record.crc32 else f"its checksum is {crc:08x}; {record.crc32:08x} was written"
