"""Any checkpoint that can be split, as sharded safetensors with a config and a tokenizer: `rabbitllm convert`.

An uncompressed split has all that is hard: each byte is moved once, in bounded memory, within a disk peak known before,
and a crash loses nothing. So one is made in a folder of ours inside the new one; then its layer files get the names of
shards, and an index is written beside them. Knows the source and the split directory, no models and no tensors' bytes.

Invariants: until the index is there, the folder of ours is, and the same call goes on; the index is written when all
that it names is durable; a folder with anything else in it is left as it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rabbitllm import durable, prepare
from rabbitllm.checkpoints.checkpoint import Checkpoint, ShardFacts, SourceIdentity
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import (
    INDEX_NAME,
    TORCH_INDEX_NAME,
    WEIGHT_SUFFIXES,
    CheckpointIndex,
    index_of,
    read_index,
    shard_names,
)
from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.checkpoints.naming import LayerNaming, guessed_naming, naming_for
from rabbitllm.errors import (
    CheckpointNotFoundError,
    HubError,
    IncompleteSplitError,
    InvalidIndexError,
    OptionError,
    SplitMismatchError,
)
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.layers.layer_file import DONE_SUFFIX
from rabbitllm.layers.layer_store import JOURNAL_NAME, MANIFEST_NAME, Manifest, directory_name, read_manifest
from rabbitllm.options import SplitOptions, check_transfer, expand, parse_size
from rabbitllm.splitter import journal
from rabbitllm.splitter.finish import clear_away, discard_original
from rabbitllm.splitter.interrupted import telling_how_to_go_on
from rabbitllm.splitter.lock import HOLDER_NAME, LOCK_NAME, locked
from rabbitllm.splitter.request import Request
from rabbitllm.splitter.split import split

WORK_NAME = ".converting"
"""The folder of ours inside the new one, for as long as that is not whole."""
_READY_NAME = "split.is.whole"
"""In that folder: the split is whole and cleared away, so that its files may be moved."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was made.

    Attributes:
        folder: where it is.
        shards, tensors: how many.
        nbytes: of all tensors.
        beside: config, tokenizer and the like that were copied, by name.
        before: it was whole already.
    """

    folder: Path
    shards: int
    tensors: int
    nbytes: int
    beside: tuple[str, ...]
    before: bool = False


def convert(
    path_or_repo_id: str | Path,
    folder: str | Path,
    *,
    sequential: bool = False,
    delete_original: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    max_disk: int | str | None = None,
    min_free_disk: int | str = "1GB",
    shard_transfer: str = "auto",
) -> Conversion:
    """Write a checkpoint anew as safetensors, a shard a layer; or finish what an earlier call began.

    Args:
        path_or_repo_id: a folder or a repository, as `AutoModel.from_pretrained` takes it, or a single file of weights.
        folder: where to, empty or not there yet.
        sequential: take one shard at a time, and delete it as soon as it is used up.
        delete_original: remove the original when all of it is in the new folder.
        revision: branch, tag or commit of the repository.
        token: for the hub.
        cache_dir: the hub cache.
        max_disk: bytes that this may occupy, e.g. "57GiB".
        min_free_disk: bytes of the disk that are to stay free.
        shard_transfer: how shards of a repository arrive with `sequential`: "file", "stream" or "auto".

    Raises:
        OptionError: the folder has something else in it.
        SplitMismatchError: the folder has, or is in work for, another checkpoint.
        RabbitLLMError: the source is malformed, or does not fit; nothing was touched.
    """
    options = SplitOptions(
        sequential=sequential,
        delete_original=delete_original,
        max_disk=None if max_disk is None else parse_size(max_disk, "max_disk"),
        min_free=parse_size(min_free_disk, "min_free_disk"),
        shard_transfer=check_transfer(shard_transfer, sequential),
    )
    access = HubAccess(revision, token, expand(cache_dir) if cache_dir else None)
    target = expand(folder)
    if target.exists() and not target.is_dir():
        raise OptionError(f"{target} is a file.", "Name a folder that is empty or not there yet.")
    work = target / WORK_NAME
    split_folder = work / directory_name(None)
    with locked(target):
        if (target / INDEX_NAME).exists():
            known = _origin(target)
            _require_same(known, _input(str(path_or_repo_id), access, work), target)
            before = not work.exists()
            _clear(work)
            return _made(target, before=before)
        if not work.exists():
            _require_empty(target)
        source = _input(str(path_or_repo_id), access, work)
        if not (work / _READY_NAME).exists():
            if (begun := _begun(split_folder)) is not None:  # before any shard of another one can be given up
                _require_same(begun, source, target)
            source.split(options)
            _require_same(_manifest(split_folder).source, source, target)
            durable.write_whole(work / _READY_NAME, b"")
        manifest = _manifest(split_folder)
        _require_same(manifest.source, source, target)
        _publish(target, split_folder, manifest)
        _clear(work)
        return _made(target)


class _Input(Protocol):
    """What is converted."""

    name: str

    def split(self, options: SplitOptions) -> None:
        """Make its split in our folder, or finish it."""
        ...

    def checkpoint(self) -> Checkpoint | None:
        """The weights as far as they are still there; None if nothing of them is, or the hub cannot be asked."""
        ...


def _input(name: str, access: HubAccess, work: Path) -> _Input:
    path = expand(name)
    if name and not path.is_dir() and (path.is_file() or (path.suffix in WEIGHT_SUFFIXES and path.parent.is_dir())):
        if path.name.endswith(".index.json"):
            raise OptionError(f"{path} is an index, and its shards are beside it.", f"Name the folder: {path.parent}.")
        return _File(name, path, work / directory_name(None))
    return _Named(name, access, work)


@dataclass
class _Named:
    """A folder or a repository."""

    name: str
    access: HubAccess
    work: Path

    def _find(self) -> prepare.Source:
        source = prepare.find(prepare.Sought(self.name, None, self.work, self.access, only_look=True))
        if not source.split_folder.is_relative_to(self.work):
            raise OptionError(
                f"{self.name} is a split directory, which AutoModel loads as it is.",
                "Convert the checkpoint that it was made from.",
            )
        return source

    def split(self, options: SplitOptions) -> None:
        source = self._find()
        prepare.ensure_split(source, options, naming=_naming(prepare.family_of(source.config_folder)))

    def checkpoint(self) -> Checkpoint | None:
        try:
            source = self._find()
            return prepare.open_weights(source, [source.split_folder])
        except (CheckpointNotFoundError, HubError):
            return None


@dataclass
class _File:
    """A single file of weights. Without a config beside it, what else is in its folder is no business of ours."""

    name: str
    path: Path
    split_folder: Path

    def split(self, options: SplitOptions) -> None:
        with locked(self.split_folder), telling_how_to_go_on(self.split_folder):
            checkpoint = self._open()
            if read_manifest(self.split_folder) is None:
                family = prepare.family_of(self.path.parent)
                split(Request(checkpoint, self.split_folder, family, options, _naming(family)))
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
    """A file of weights, whatever else there is in its folder."""

    def __init__(self, folder: Path, file: str, index: CheckpointIndex) -> None:
        super().__init__(folder, index=index)
        self._file = file

    def identity(self, shards: Iterable[ShardFacts]) -> SourceIdentity:
        found = super().identity(shards)
        return dataclasses.replace(found, name=self._file) if found.kind == "local" else found

    def sidecars(self) -> Mapping[str, Path]:
        return super().sidecars() if (self.folder / "config.json").exists() else {}


def _naming(family: str | None) -> LayerNaming | None:
    """What groups the tensors of a family that is not known: a guess is good enough for shards."""
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


def _require_empty(folder: Path) -> None:
    others = sorted(path.name for path in folder.iterdir() if path.name not in (LOCK_NAME, HOLDER_NAME))
    if others:
        raise OptionError(
            f"{folder} has {len(others)} other files or folders in it, {others[0]!r} among them. Nothing was touched.",
            "Name a folder that is empty or not there yet.",
        )


def _require_same(known: SourceIdentity, source: _Input, folder: Path) -> None:
    """Refuse another checkpoint than the one that the folder is for, as far as anything is left of it to tell."""
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


def _present(checkpoint: Checkpoint) -> Iterator[ShardFacts]:
    """Facts of the shards that are on this machine; to know a repository, none of the others is needed."""
    here = (shard for shard in checkpoint.index.shards if not checkpoint.stages(shard))
    yield from (facts for shard in here if (facts := checkpoint.facts(shard)) is not None)


def _begun(split_folder: Path) -> SourceIdentity | None:
    """What the split in our folder is made from, finished or not; None if there is none."""
    if (manifest := read_manifest(split_folder)) is not None:
        return manifest.source
    earlier = journal.replay(split_folder)
    return earlier.plan.source if earlier is not None else None


def _manifest(split_folder: Path) -> Manifest:
    manifest = read_manifest(split_folder)
    if manifest is None:
        raise IncompleteSplitError(
            f"{split_folder} has lost its {MANIFEST_NAME}, which says what is in it.",
            "Convert the checkpoint again, into another folder; keep this one until that is done.",
        )
    return manifest


def _publish(folder: Path, split_folder: Path, manifest: Manifest) -> None:
    """Give everything its place and its name, and write the index when all of it is durable there."""
    names = shard_names(len(manifest.layers))
    for record, name in zip(manifest.layers, names, strict=True):
        _move(split_folder / record.file, folder / name)
        if not (folder / name).exists() or (folder / name).stat().st_size != record.size:
            raise IncompleteSplitError(
                f"{folder / name}, with layer {record.id}, is missing or has not its {record.size:,} bytes.",
                "Put it back, or convert the checkpoint again into another folder.",
            )
    for name in _sidecars_in(split_folder):
        durable.make_folder((folder / name).parent)
        _move(split_folder / name, folder / name)
        durable.sync_folder((folder / name).parent)
    durable.sync_folder(folder)
    durable.write_whole(folder / INDEX_NAME, _index(folder, names, manifest.source))


def _move(path: Path, to: Path) -> None:
    """Rename; an earlier run may have done it."""
    if path.exists():
        durable.rename(path, to)


def _sidecars_in(split_folder: Path) -> tuple[str, ...]:
    """Config, tokenizer and the like: what is neither a layer nor only the split's."""
    ours = (MANIFEST_NAME, JOURNAL_NAME, LOCK_NAME, HOLDER_NAME)
    files = (path for path in sorted(split_folder.rglob("*")) if path.is_file() and path.name not in ours)
    kept = (path for path in files if not path.name.endswith((DONE_SUFFIX, durable.PART_SUFFIX)))
    return tuple(path.relative_to(split_folder).as_posix() for path in kept)


def _index(folder: Path, names: Iterable[str], source: SourceIdentity) -> bytes:
    headers = {name: read_header(folder / name) for name in names}
    weight_map = {spec.name: name for name, header in headers.items() for spec in header.tensors}
    specs = [spec for header in headers.values() for spec in header.tensors]
    metadata = {
        "total_parameters": sum(spec.elements for spec in specs),
        "total_size": sum(spec.nbytes for spec in specs),
        "converted_from": {
            "kind": source.kind,
            "name": source.name,
            "commit": source.commit,
            "fingerprints": dict(source.fingerprints),
        },
    }
    return (
        json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
    ).encode()


def _origin(folder: Path) -> SourceIdentity:
    """What the checkpoint in a folder was converted from.

    Raises:
        OptionError: it was not made here.
    """
    try:
        metadata: Any = read_json(folder / INDEX_NAME).get("metadata")
        source = metadata["converted_from"]
        return SourceIdentity(source["kind"], source["name"], source["commit"], dict(source["fingerprints"]))
    except (InvalidIndexError, KeyError, TypeError, ValueError):
        raise OptionError(
            f"{folder} holds a checkpoint that was not converted here. Nothing was touched.",
            "Name a folder that is empty or not there yet.",
        ) from None


def _clear(work: Path) -> None:
    """Remove our folder, from which everything that is wanted has gone."""
    if not work.exists():
        return
    folders = [path for path in work.rglob("*") if path.is_dir()]
    for path in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        durable.remove_folder(path)
    durable.remove_folder(work)
    durable.sync_folder(work.parent)


def _made(folder: Path, *, before: bool = False) -> Conversion:
    index = read_index(folder / INDEX_NAME)
    others = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    known = {INDEX_NAME, LOCK_NAME, HOLDER_NAME, *index.shards}
    size = read_json(folder / INDEX_NAME)["metadata"]["total_size"]
    beside = tuple(name for name in others if name not in known)
    return Conversion(folder, len(index.shards), len(index.weight_map), size, beside, before)
