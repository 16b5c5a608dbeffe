"""Any checkpoint that can be split, as sharded safetensors with a config and a tokenizer: `rabbitllm convert`.

An uncompressed split has all that is hard: each byte is moved once, in bounded memory, within a disk peak known before,
and a crash loses nothing. So one is made in a folder of ours inside the new one; then its layer files get the names of
shards, and an index is written with them. Of a finished split, whose original may be gone, the layer files are joined:
uncompressed tensors keep their bits; those at 4bit and 8bit are dequantized, a few megabytes at a time; published
quantized weights stay as they are. Knows no models.

Invariants: until the index is there, the folder of ours is, and the same call goes on; the index is written when all
that it names is durable; a folder with anything else in it is left as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.base.options import SplitOptions, check_transfer, expand, parse_size
from rabbitllm.checkpoints.checkpoint import SourceIdentity, sidecars_in
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import INDEX_NAME, read_index, shard_names
from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME
from rabbitllm.errors import (
    IncompleteSplitError,
    InvalidIndexError,
    OptionError,
    SplitMismatchError,
    system_errors_by_name,
)
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.formats.tensor_spec import DTYPES
from rabbitllm.models.convert.inputs import finished_split_of, input_of, require_same
from rabbitllm.splitter import journal
from rabbitllm.splitter.lock import HOLDER_NAME, LOCK_NAME, locked
from rabbitllm.storage import durable
from rabbitllm.store.checkpoint_folder import index_of_files, plan_shards, write_checkpoint
from rabbitllm.store.layer_store import (
    MANIFEST_NAME,
    LayerStore,
    Manifest,
    StoredTensor,
    directory_name,
    read_manifest,
)

# The last step: layer files get the names of shards, and an index is written that says what they were made from.
#
# A crash in between is gone on from, since what has its name already is passed over. Knows no sources but their
# identity.


def publish(folder: Path, split_folder: Path, manifest: Manifest) -> None:
    """Give everything its place and its name, and write the index when all of it is durable there.

    Args:
        folder: where to.
        split_folder: what is in it has its place there already, or gets it now.
        manifest: of the split.

    Raises:
        IncompleteSplitError: a layer is in neither folder, or has another size.
    """
    names = shard_names(len(manifest.layers))
    for record, name in zip(manifest.layers, names, strict=True):
        _move(split_folder / record.file, folder / name)
        if not (folder / name).exists() or (folder / name).stat().st_size != record.size:
            raise IncompleteSplitError(
                f"{folder / name}, with layer {record.id}, is missing or has not its {record.size:,} bytes.",
                "Put it back, or convert the checkpoint again into another folder.",
            )
    for name, path in sidecars_of(split_folder).items():
        durable.make_folder((folder / name).parent)
        _move(path, folder / name)
        durable.sync_folder((folder / name).parent)
    durable.sync_folder(folder)
    durable.write_whole(folder / INDEX_NAME, _index(folder, names, manifest.source))


def _move(path: Path, to: Path) -> None:
    """Rename; an earlier run may have done it."""
    if path.exists():
        durable.rename(path, to)


def sidecars_of(folder: Path) -> dict[str, Path]:
    """Config, tokenizer and the like of a split directory, or of the folder that it is in: name -> path."""
    return {name: path for name, path in sidecars_in(folder).items() if name != MANIFEST_NAME}


def _index(folder: Path, names: Iterable[str], source: SourceIdentity) -> bytes:
    return index_of_files({name: read_header(folder / name).tensors for name in names}, converted_from(source))


def converted_from(source: SourceIdentity) -> dict[str, Any]:
    """What an index says of where its shards came from; `origin_of` reads it back."""
    origin = {
        "kind": source.kind,
        "name": source.name,
        "commit": source.commit,
        "fingerprints": dict(source.fingerprints),
    }
    return {"converted_from": origin}


def origin_of(folder: Path) -> SourceIdentity:
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


WORK_NAME = ".converting"
"""The folder of ours inside the new one, for as long as that is not whole."""
_READY_NAME = "split.is.whole"
"""In that folder: the split is whole and cleared away, so that its files may be moved."""
SHARD_BYTES = 5_000_000_000
"""Of a shard that layer files of a finished split are joined into, at most, unless one tensor is larger."""


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


@system_errors_by_name()
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
    """Write a checkpoint again as safetensors, a shard a layer; or finish what an earlier call began.

    Args:
        path_or_repo_id: a folder or a repository, as `AutoModel.from_pretrained` takes it, or a single file of weights.
            Of a split directory, or a folder whose shards are used up by a split, the layer files are converted; what
            is compressed is dequantized to the dtype of its config.
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
    if (made := finished_split_of(str(path_or_repo_id))) is not None:
        if sequential or delete_original:
            raise OptionError(
                f"{made} is a split directory; sequential and delete_original are for checkpoints.",
                "Leave them out; `rabbitllm rm` removes a split.",
            )
        return _join_split(made, expand(path_or_repo_id), target)
    work = target / WORK_NAME
    split_folder = work / directory_name(None)
    with system_errors_by_name(target), locked(target):
        if (target / INDEX_NAME).exists():
            known = origin_of(target)
            require_same(known, input_of(str(path_or_repo_id), access, work), target)
            before = not work.exists()
            _clear(work)
            return _made(target, before=before)
        if not work.exists():
            _require_empty(target)
        source = input_of(str(path_or_repo_id), access, work)
        if not (work / _READY_NAME).exists():
            if (begun := _begun(split_folder)) is not None:  # before any shard of another one can be given up
                require_same(begun, source, target)
            source.split(options)
            require_same(_manifest(split_folder).source, source, target)
            durable.write_whole(work / _READY_NAME, b"")
        manifest = _manifest(split_folder)
        require_same(manifest.source, source, target)
        publish(target, split_folder, manifest)
        _clear(work)
        return _made(target)


def _require_empty(folder: Path) -> None:
    others = sorted(path.name for path in folder.iterdir() if path.name not in (LOCK_NAME, HOLDER_NAME))
    if others:
        raise OptionError(
            f"{folder} has {len(others)} other files or folders in it, {others[0]!r} among them. Nothing was touched.",
            "Name a folder that is empty or not there yet.",
        )


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


def _join_split(split_folder: Path, named: Path, folder: Path) -> Conversion:
    """Write the checkpoint that a split was made from, as far as the split has its bits.

    Args:
        split_folder: a finished split directory, of RabbitLLM 1.1 too.
        named: the folder that the user named; config and tokenizer are taken from there if the split has none.
        folder: where to, empty or not there yet.

    Raises:
        OptionError: the folder has weights in it.
        SplitMismatchError: they are a conversion of something else.
        IncompleteSplitError: a layer file is missing or damaged.
        NotEnoughSpaceException: it does not fit.
    """
    from rabbitllm.store.plain_tensors import PlainReader, plain  # with torch

    store = LayerStore(split_folder)
    home = split_folder if (split_folder / CONFIG_NAME).exists() else named
    identity = _identity_of(store)
    beside = {name: path.read_bytes() for name, path in sidecars_of(home).items()}
    tensors = {name: plain(stored, _dtype_of(stored, home)) for name, stored in store.tensors.items()}
    shards = plan_shards((tensor.placed for tensor in tensors.values()), SHARD_BYTES)
    before = (folder / INDEX_NAME).exists()
    if before:
        if (why := origin_of(folder).differs_from(identity)) is not None:
            raise SplitMismatchError(
                f"{folder} is a conversion of something else than {split_folder}: {why}.",
                "Convert into another folder, or delete that one if it is not needed.",
            )
    else:
        with PlainReader(store) as reader:
            write_checkpoint(
                folder,
                shards,
                beside,
                lambda name: reader.chunks(tensors[name]),
                source=json.dumps(dict(identity.fingerprints)),
                metadata=converted_from(identity),
            )
    nbytes = sum(tensor.placed.nbytes for tensor in tensors.values())
    return Conversion(folder, len(shards), len(tensors), nbytes, tuple(sorted(beside)), before)


def _identity_of(store: LayerStore) -> SourceIdentity:
    """A split by the checksums of its layer files; by their sizes where RabbitLLM 1.1 made them."""
    if store.manifest is not None:
        marks = {record.file: f"crc32:{record.crc32:08x}" for record in store.manifest.layers}
    else:
        files = {part.file for stored in store.tensors.values() for part in stored.parts}
        marks = {file: f"size:{store.path(file).stat().st_size}" for file in sorted(files)}
    return SourceIdentity("split", store.folder.name, None, marks)


def _dtype_of(stored: StoredTensor, home: Path) -> str:
    """What a compressed tensor is dequantized to: the dtype that it had, else the config's, else float32."""
    names = {entry.torch_name: name for name, entry in DTYPES.items() if entry.quantizable}
    if stored.quantized is not None and stored.quantized.dtype is not None:
        return names[stored.quantized.dtype]
    config = read_json(home / CONFIG_NAME) if (home / CONFIG_NAME).exists() else {}
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        said = part.get("dtype", part.get("torch_dtype"))
        if isinstance(said, str) and said in names:
            return names[said]
    return "F32"
