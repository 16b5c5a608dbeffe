"""Any checkpoint that can be split, as sharded safetensors with a config and a tokenizer: `rabbitllm convert`.

An uncompressed split has all that is hard: each byte is moved once, in bounded memory, within a disk peak known before,
and a crash loses nothing. So one is made in a folder of ours inside the new one; then its layer files get the names of
shards, and an index is written beside them. Knows the source and the split directory, no models and no tensors' bytes.

Invariants: until the index is there, the folder of ours is, and the same call goes on; the index is written when all
that it names is durable; a folder with anything else in it is left as it is.
"""

from __future__ import annotations

from pathlib import Path

from rabbitllm import durable
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import INDEX_NAME, read_index
from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.convert.from_split import Conversion, join_split
from rabbitllm.convert.inputs import finished_split_of, input_of, require_same
from rabbitllm.convert.publish import origin_of, publish
from rabbitllm.errors import IncompleteSplitError, OptionError, system_errors_by_name
from rabbitllm.layers.layer_store import MANIFEST_NAME, Manifest, directory_name, read_manifest
from rabbitllm.options import SplitOptions, check_transfer, expand, parse_size
from rabbitllm.splitter import journal
from rabbitllm.splitter.lock import HOLDER_NAME, LOCK_NAME, locked
from rabbitllm.splitter.watch import reporting_full_disk

WORK_NAME = ".converting"
"""The folder of ours inside the new one, for as long as that is not whole."""
_READY_NAME = "split.is.whole"
"""In that folder: the split is whole and cleared away, so that its files may be moved."""


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
    """Write a checkpoint anew as safetensors, a shard a layer; or finish what an earlier call began.

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
        return join_split(made, expand(path_or_repo_id), target)
    work = target / WORK_NAME
    split_folder = work / directory_name(None)
    with reporting_full_disk(target), locked(target):
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
