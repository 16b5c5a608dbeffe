"""The input of a conversion: a folder, a repository, a single file of weights or a split; and its result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rabbitllm import prepare
from rabbitllm.base.options import RunOptions, SplitOptions, expand
from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.checkpoint import Checkpoint, ShardMetadata, SourceIdentity
from rabbitllm.checkpoints.config import model_type_of, read_config, text_config
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import (
    INDEX_NAME,
    TORCH_INDEX_NAME,
    WEIGHT_SUFFIXES,
    CheckpointIndex,
    gguf_label,
    gguf_named,
    has_format_of,
    index_of,
    is_gguf_file,
    read_index,
)
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME
from rabbitllm.checkpoints.naming import naming_for
from rabbitllm.errors import (
    CheckpointNotFoundError,
    CorruptVocabularyError,
    HubError,
    IncompleteCheckpointError,
    OptionError,
    SplitMismatchError,
    UnknownArchitectureError,
)
from rabbitllm.formats.bounded import read_json
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.formats.tensor_spec import DTYPES
from rabbitllm.splitter import journal
from rabbitllm.splitter.interrupted import reporting_interrupts
from rabbitllm.splitter.lock import locked
from rabbitllm.splitter.request import Acceptance, SplitRequest
from rabbitllm.splitter.split import clean_up, discard_finished, split
from rabbitllm.store import locations
from rabbitllm.store.layer_store import LayerStore, StoredTensor
from rabbitllm.store.manifest import SPLITS, directory_name, is_finished, read_manifest


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        folder: the new folder, or the GGUF file.
        shards, tensors: their numbers.
        nbytes: bytes of all tensors.
        beside: names of config, tokenizer and similar files that were copied.
        before: whether it was complete before this call.
        matrices: types of the matrices of a GGUF file, as text; "" for a folder.
    """

    folder: Path
    shards: int
    tensors: int
    nbytes: int
    beside: tuple[str, ...]
    before: bool = False
    matrices: str = ""


def input_of(name: str, access: HubAccess, work: Path) -> ModelInput | WeightsInput:
    """The input that a user names.

    Args:
        name: as the user wrote it.
        access: options for the hub.
        work: the work folder, in which the split is made.

    Raises:
        OptionError: `name` is an index instead of its folder.
    """
    path = expand(name)
    if is_single_file(name):
        if path.name.endswith(".index.json"):
            raise OptionError(f"{path} is an index file; expected a checkpoint.", f"Use its folder: {path.parent}.")
        return WeightsInput(name, path, work / directory_name(None))
    return ModelInput(name, access, work)


def is_single_file(name: str) -> bool:
    """Whether a user names a single file of weights, other than a GGUF file."""
    path = expand(name)
    if not name or path.is_dir() or is_gguf_file(path):
        return False
    return path.is_file() or (path.suffix in WEIGHT_SUFFIXES and path.parent.is_dir())


@dataclass
class ModelInput:
    """A folder or a repository."""

    name: str
    access: HubAccess
    work: Path

    def _find(self) -> prepare.Source:
        return prepare.find(prepare.ModelSpec(self.name, None, self.work, self.access), only_look=True)

    def split(self, options: SplitOptions) -> None:
        """Make or resume its split in the work folder."""
        source = self._find()
        naming = naming_for(model_type_of(read_config(source.config_folder)))
        if not options.shards.deletes_original:
            prepare.ensure_split(source, options, naming=naming)
            return
        try:
            with _acceptance(source) as accept:
                prepare.ensure_split(source, options, naming=naming, accept=accept)
        except (IncompleteCheckpointError, UnknownArchitectureError, CorruptVocabularyError) as error:
            raise type(error)(error.problem, f"{error.remedy} {_WITHOUT_DELETING}") from error

    def checkpoint(self) -> Checkpoint | None:
        """The remaining weights; None if none are left or the hub cannot be reached."""
        try:
            source = self._find()
            return prepare.open_weights(source, [source.split_folder])
        except (CheckpointNotFoundError, HubError):
            return None


_WITHOUT_DELETING = "Without sequential=True and delete_original=True the checkpoint is converted unchecked, and kept."


@contextlib.contextmanager
def _acceptance(source: prepare.Source) -> Iterator[Acceptance | None]:
    """The check before deletion; none without a config that identifies the model."""
    with prepare.config_folder(source) as folder:
        has_config = (folder / CONFIG_NAME).exists()
    if not has_config:
        yield None
        return
    with prepare.acceptance(source, RunOptions(device="cpu")) as accept:
        yield accept


def open_split(folder: Path, home: Path) -> LayerStore:
    """Open a finished split; one of RabbitLLM 1.1, which has no list of its tensors, is compared with the config.

    Args:
        folder: the split directory.
        home: the folder of the config, if there is one.

    Raises:
        IncompleteSplitError: a layer file is damaged, or lacks tensors of the model.
    """
    store = LayerStore(folder)
    if store.manifest is None and (home / CONFIG_NAME).exists():
        from rabbitllm.engine.devices import CpuDevice
        from rabbitllm.engine.load_plan import make_load_plan

        with contextlib.suppress(UnknownArchitectureError):  # its tensors are converted all the same
            make_load_plan(store, RunOptions(device="cpu"), home, [CpuDevice()])
    return store


def finished_split_of(name: str) -> Path | None:
    """The split directory that a name means: the folder itself, or the most exact split in a folder without shards.

    Args:
        name: the name as the user wrote it.
    """
    place, model = locations.one_of_several(name)
    folder, base = expand(place), locations.base_for(model, None)
    if not name or not folder.is_dir():
        return None
    if is_finished(folder):
        return folder
    try:
        entry = gguf_named(folder, model) if model else None
        if any((folder / shard).exists() for shard in LocalCheckpoint(folder, entry=entry).index.shards):
            return None
    except CheckpointNotFoundError:
        pass
    splits = (locations.for_local(folder, None, compression, base) for compression in SPLITS)
    return next(filter(is_finished, splits), None)


@dataclass
class WeightsInput:
    """A single file of weights. Other files in its folder are used only if the folder has a config."""

    name: str
    path: Path
    split_folder: Path

    def split(self, options: SplitOptions) -> None:
        """Make or resume its split in the work folder."""
        source = prepare.Source(self.name, self.split_folder, self.path.parent, finished=False, local=self.path.parent)
        with locked(self.split_folder), reporting_interrupts(self.split_folder), prepare.lock_source(source, options):
            checkpoint = self.open()
            if (manifest := read_manifest(self.split_folder)) is None:
                config = read_config(self.path.parent)
                split(SplitRequest(checkpoint, self.split_folder, config, options, naming_for(model_type_of(config))))
                return
            clean_up(self.split_folder)
            if options.shards.deletes_rest:
                shards = [*shards_at_hand(checkpoint)]
                discard_finished(checkpoint, manifest, shards, self.split_folder, options.shards)

    def checkpoint(self) -> Checkpoint | None:
        """The remaining weights; None if none are left."""
        return self.open() if self.path.exists() else None

    def open(self) -> LocalCheckpoint:
        """Its checkpoint, also if it is used up."""
        folder, name = self.path.parent, self.path.name
        if self.path.exists():
            _refuse_one_of_several(folder, name)
            index = index_of({tensor.name: name for tensor in read_shard_header(self.path).tensors})
        elif (earlier := journal.replay(self.split_folder)) is not None:
            index = earlier.plan.index
        elif read_manifest(self.split_folder) is not None:
            index = index_of({})
        else:
            raise CheckpointNotFoundError(f"There is no file {self.name!r}.", "Check the path.")
        return _OfOneFile(folder, name, index)


class _OfOneFile(LocalCheckpoint):
    """A single file of weights; other weights in its folder are ignored."""

    def __init__(self, folder: Path, file: str, index: CheckpointIndex) -> None:
        super().__init__(folder, index=index)
        self._file = file

    def identity(self, shards: Iterable[ShardMetadata]) -> SourceIdentity:
        identity = super().identity(shards)
        return dataclasses.replace(identity, name=self._file) if identity.kind == "local" else identity

    def sidecars(self) -> Mapping[str, Path]:
        return super().sidecars() if (self.folder / "config.json").exists() else {}


def _refuse_one_of_several(folder: Path, name: str) -> None:
    for index in (INDEX_NAME, TORCH_INDEX_NAME):
        if not (folder / index).exists():
            continue
        shards = read_index(folder / index).shards
        if name in shards and len(shards) > 1:
            raise OptionError(
                f"{folder / name} is one of the {len(shards)} shards of a checkpoint.", f"Use the folder: {folder}."
            )
    manifest = read_manifest(folder)
    if manifest is not None and name in (record.file for record in manifest.layers):
        raise OptionError(
            f"{folder / name} is one of the {len(manifest.layers)} layer files of a split.",
            f"Use the folder: {folder}.",
        )


ANOTHER_FOLDER = (
    "Use another output folder. Delete this one only if every shard of its original still exists: it may have the only "
    "copy."
)


def require_same(origin: SourceIdentity, source: ModelInput | WeightsInput, folder: Path) -> None:
    """Refuse a checkpoint other than the folder's, by fingerprints, or by name if nothing else is left.

    Raises:
        SplitMismatchError: it is another one; the message says how they differ.
    """
    checkpoint = source.checkpoint()
    if checkpoint is None or (origin.kind == "local" and _is_of_other_format(checkpoint, origin)):
        name = Path(source.name).name
        if source.name == origin.name or name == origin.name or name in origin.fingerprints:
            return
        why: str | None = "no shard of the named checkpoint is left to compare"
    else:
        identity = checkpoint.identity(shards_at_hand(checkpoint))
        why = origin.differs_from(identity)
        if why is None and identity.fingerprints and origin.fingerprints.keys().isdisjoint(identity.fingerprints):
            why = f"it was made from {listed(origin.fingerprints, 3)}"
    if why is not None:
        raise SplitMismatchError(
            f"{folder} holds the conversion of {origin.instead_of(source.name)}: {why}.",
            f"If that is this one, restore its files, and make the same call again. {ANOTHER_FOLDER}",
        )


def _is_of_other_format(checkpoint: Checkpoint, origin: SourceIdentity) -> bool:
    """Whether the original is gone, and its folder has weights in another format, which no split looks at either."""
    left = any(map(checkpoint.at_hand, origin.fingerprints))
    return not left and not any(has_format_of(shard, origin.fingerprints) for shard in checkpoint.index.shards)


def shards_at_hand(checkpoint: Checkpoint) -> Iterator[ShardMetadata]:
    """The metadata of the shards on this machine; the others are not needed to identify a repository."""
    here = (shard for shard in checkpoint.index.shards if not checkpoint.stages(shard))
    yield from (metadata for shard in here if (metadata := checkpoint.metadata(shard)) is not None)


def identity_of_split(store: LayerStore) -> SourceIdentity:
    """The identity of a split: checksums of its layer files, or their sizes where RabbitLLM 1.1 made them."""
    if store.manifest is not None:
        marks = {record.file: f"crc32:{record.crc32:08x}" for record in store.manifest.layers}
    else:
        files = {part.file for stored in store.tensors.values() for part in stored.parts}
        marks = {file: f"size:{store.path(file).stat().st_size}" for file in sorted(files)}
    return SourceIdentity("split", store.folder.name, None, marks)


def keeps_blocks(store: LayerStore) -> bool:
    """Whether a split holds the blocks of a GGUF file as they are."""
    record = store.manifest
    return record is not None and record.compression is None and gguf_label(record.source.fingerprints) is not None


def dtype_of(stored: StoredTensor, store: LayerStore, home: Path) -> str:
    """The dtype to which a compressed tensor is dequantized: its original one, else the config's, else float32; blocks
    of a GGUF file become float32, as where the file itself is converted."""
    names = {entry.torch_name: name for name, entry in DTYPES.items() if entry.quantizable}
    if stored.quantized is not None and stored.quantized.dtype is not None:
        return names[stored.quantized.dtype]
    if keeps_blocks(store):
        return "F32"
    config = read_json(home / CONFIG_NAME) if (home / CONFIG_NAME).exists() else {}
    for part in (config, text_config(config)):
        dtype = part.get("dtype", part.get("torch_dtype"))
        if isinstance(dtype, str) and dtype in names:
            return names[dtype]
    return "F32"
