"""The inputs of a conversion: a folder, a repository or a single file of weights; and the check of the new folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rabbitllm import prepare
from rabbitllm.base.options import SplitOptions, StreamOptions, expand
from rabbitllm.checkpoints.checkpoint import Checkpoint, ShardMetadata, SourceIdentity
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import (
    INDEX_NAME,
    TORCH_INDEX_NAME,
    WEIGHT_SUFFIXES,
    CheckpointIndex,
    index_of,
    read_index,
)
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME
from rabbitllm.checkpoints.naming import LayerNaming, guessed_naming, naming_for
from rabbitllm.errors import (
    CheckpointNotFoundError,
    CorruptVocabularyError,
    HubError,
    IncompleteCheckpointError,
    OptionError,
    SplitMismatchError,
    UnknownArchitectureError,
)
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.quant.compression import DOUBLE
from rabbitllm.splitter import journal
from rabbitllm.splitter.journal import telling_how_to_go_on
from rabbitllm.splitter.lock import locked
from rabbitllm.splitter.request import Acceptance, SplitRequest
from rabbitllm.splitter.split import clear_away, discard_original, split
from rabbitllm.store import locations
from rabbitllm.store.manifest import AUTO, directory_name, is_finished, read_manifest


class Input(Protocol):
    """An input of a conversion."""

    name: str

    def split(self, options: SplitOptions) -> None:
        """Make or resume its split in the work folder."""
        ...

    def checkpoint(self) -> Checkpoint | None:
        """The remaining weights; None if none are left or the hub cannot be reached."""
        ...


def input_of(name: str, access: HubAccess, work: Path) -> Input:
    """The input that a user names.

    Args:
        name: the name as the user wrote it.
        access: options for the hub.
        work: the work folder, in which the split is made.

    Raises:
        OptionError: `name` is an index instead of its folder.
    """
    path = expand(name)
    if name and not path.is_dir() and (path.is_file() or (path.suffix in WEIGHT_SUFFIXES and path.parent.is_dir())):
        if path.name.endswith(".index.json"):
            raise OptionError(f"{path} is an index of shards.", f"Name the folder: {path.parent}.")
        return _File(name, path, work / directory_name(None))
    return _Named(name, access, work)


@dataclass
class _Named:
    """A folder or a repository."""

    name: str
    access: HubAccess
    work: Path

    def _find(self) -> prepare.Source:
        return prepare.find(prepare.Sought(self.name, None, self.work, self.access, only_look=True))

    def split(self, options: SplitOptions) -> None:
        source = self._find()
        naming = _naming(prepare.family_of(source.config_folder))
        if not (options.sequential or options.delete_original):
            prepare.ensure_split(source, options, naming=naming)
            return
        try:
            with _acceptance(source) as accept:
                prepare.ensure_split(source, options, naming=naming, accept=accept)
        except (IncompleteCheckpointError, UnknownArchitectureError, CorruptVocabularyError) as error:
            raise type(error)(error.problem, f"{error.remedy} {_WITHOUT_DELETING}") from error

    def checkpoint(self) -> Checkpoint | None:
        try:
            source = self._find()
            return prepare.open_weights(source, [source.split_folder])
        except (CheckpointNotFoundError, HubError):
            return None


_WITHOUT_DELETING = "Without sequential and delete_original nothing is deleted, and it is converted as it is."


@contextlib.contextmanager
def _acceptance(source: prepare.Source) -> Iterator[Acceptance | None]:
    """The check before deletion; none without a config that identifies the model."""
    with prepare.config_folder(source) as folder:
        has_config = (folder / CONFIG_NAME).exists()
    if not has_config:
        yield None
        return
    with prepare.acceptance(source, StreamOptions(device="cpu")) as accept:
        yield accept


def finished_split_of(name: str) -> Path | None:
    """The split directory that a name means: the folder itself, or the most exact split in a folder without shards.

    Args:
        name: the name as the user wrote it.
    """
    folder = expand(name)
    if not name or not folder.is_dir():
        return None
    if is_finished(folder):
        return folder
    try:
        if any((folder / shard).exists() for shard in LocalCheckpoint(folder).index.shards):
            return None
    except CheckpointNotFoundError:
        pass
    splits = (locations.for_local(folder, None, compression) for compression in (None, "8bit", AUTO, "4bit", DOUBLE))
    return next(filter(is_finished, splits), None)


@dataclass
class _File:
    """A single file of weights. Other files in its folder are used only if the folder has a config."""

    name: str
    path: Path
    split_folder: Path

    def split(self, options: SplitOptions) -> None:
        source = prepare.Source(self.name, self.split_folder, self.path.parent, finished=False, local=self.path.parent)
        with (
            locked(self.split_folder),
            telling_how_to_go_on(self.split_folder),
            prepare.lock_source(source, options),
        ):
            checkpoint = self._open()
            if read_manifest(self.split_folder) is None:
                family = prepare.family_of(self.path.parent)
                split(SplitRequest(checkpoint, self.split_folder, family, options, _naming(family)))
                return
            clear_away(self.split_folder)
            if options.delete_original:
                discard_original(checkpoint)

    def checkpoint(self) -> Checkpoint | None:
        return self._open() if self.path.exists() else None

    def _open(self) -> LocalCheckpoint:
        folder, name = self.path.parent, self.path.name
        if self.path.exists():
            _refuse_one_of_several(folder, name)
            held = {tensor.name: name for tensor in read_shard_header(self.path).tensors}
        elif (earlier := journal.replay(self.split_folder)) is not None:
            held = {tensor.name: shard.name for shard in earlier.plan.shards for tensor in shard.tensors}
        elif read_manifest(self.split_folder) is not None:
            held = {}
        else:
            raise CheckpointNotFoundError(f"There is no file {self.name!r}.", "Check the path.")
        return _OfOneFile(folder, name, index_of(held))


class _OfOneFile(LocalCheckpoint):
    """A single file of weights; other weights in its folder are ignored."""

    def __init__(self, folder: Path, file: str, index: CheckpointIndex) -> None:
        super().__init__(folder, index=index)
        self._file = file

    def identity(self, shards: Iterable[ShardMetadata]) -> SourceIdentity:
        found = super().identity(shards)
        return dataclasses.replace(found, name=self._file) if found.kind == "local" else found

    def sidecars(self) -> Mapping[str, Path]:
        return super().sidecars() if (self.folder / "config.json").exists() else {}


def _naming(family: str | None) -> LayerNaming | None:
    """The layer naming for an unknown family: a guess is good enough for shards."""
    return None if naming_for(family) is not None else guessed_naming()


def _refuse_one_of_several(folder: Path, name: str) -> None:
    for index in (INDEX_NAME, TORCH_INDEX_NAME):
        if not (folder / index).exists():
            continue
        shards = read_index(folder / index).shards
        if name in shards and len(shards) > 1:
            raise OptionError(
                f"{folder / name} is one of the {len(shards)} shards of a checkpoint.", f"Name the folder: {folder}."
            )


def require_same(known: SourceIdentity, source: Input, folder: Path) -> None:
    """Refuse a checkpoint other than the folder's, by fingerprints, or by name if nothing else is left.

    Raises:
        SplitMismatchError: it is another one; the message says how they differ.
    """
    checkpoint = source.checkpoint()
    if checkpoint is None:
        name = Path(source.name).name
        if source.name == known.name or name == known.name or name in known.fingerprints:
            return
        why: str | None = "nothing of the one that was named is left by which to tell"
    else:
        found = checkpoint.identity(_present(checkpoint))
        why = known.differs_from(found)
        if why is None and found.fingerprints and known.fingerprints.keys().isdisjoint(found.fingerprints):
            why = f"it was made from {', '.join([*known.fingerprints][:3])}"
    if why is not None:
        raise SplitMismatchError(
            f"{folder} is the conversion of {known.name}, not of {source.name}: {why}.",
            "Convert into another folder, or delete that one if it is not needed.",
        )


def _present(checkpoint: Checkpoint) -> Iterator[ShardMetadata]:
    """The metadata of the shards on this machine; the others are not needed to identify a repository."""
    here = (shard for shard in checkpoint.index.shards if not checkpoint.stages(shard))
    yield from (facts for shard in here if (facts := checkpoint.facts(shard)) is not None)
