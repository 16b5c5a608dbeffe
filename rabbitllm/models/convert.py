"""Writes any splittable checkpoint as sharded safetensors with config and tokenizer: `rabbitllm convert`.

The work is done by an uncompressed split: each byte is moved once, in bounded memory, within a disk peak known
beforehand, and a crash loses nothing. The split is made in a work folder inside the new folder; then its layer files
get the names of shards, and an index is written with them. Of a finished split, whose original may be gone, the layer
files are joined: uncompressed tensors keep their bits; those at 4bit and 8bit are dequantized, a few megabytes at a
time; published quantized weights are copied unchanged. Independent of models.

Invariants: the work folder exists until the index does, and until then the same call resumes; the index is written
once all files it names are durable; a folder that holds anything else is not touched.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rabbitllm import prepare
from rabbitllm.base.options import ShardPolicy, SplitOptions, arguments_checked, expand
from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.checkpoint import COMPANIONS, SourceIdentity, is_sidecar, sidecars_in
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.checkpoints.index import INDEX_NAME, read_index, shard_names
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME
from rabbitllm.errors import (
    IncompleteSplitError,
    InvalidIndexError,
    OptionError,
    SplitMismatchError,
    system_errors_by_name,
)
from rabbitllm.formats.bounded import read_json
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.models._conversion_input import (
    ANOTHER_FOLDER,
    Conversion,
    dtype_of,
    finished_split_of,
    identity_of_split,
    input_of,
    is_single_file,
    keeps_blocks,
    open_split,
    require_same,
)
from rabbitllm.splitter import journal
from rabbitllm.splitter.lock import LEASE_NAME, is_lock_file, locked
from rabbitllm.splitter.split import STAGING_NAME
from rabbitllm.storage import durable
from rabbitllm.store import checkpoint_folder
from rabbitllm.store.checkpoint_folder import index_of_files, named_dtype, plan_shards, refuse_foreign, write_checkpoint
from rabbitllm.store.checksums import crc32_of_file
from rabbitllm.store.layer_file import LAYER_SUFFIX
from rabbitllm.store.manifest import AUTO, JOURNAL_NAME, MANIFEST_NAME, Manifest, directory_name, read_manifest

SAFETENSORS, GGUF = "safetensors", "gguf"
"""The formats that are written."""
_EMPTY_FOLDER = "Use an output folder that is empty or does not exist."
_DTYPES = {AUTO: AUTO, "f32": "F32", "f16": "F16", "bf16": "BF16"}
"""`outtype` -> the dtype of safetensors that are made from GGUF files."""
WORK_NAME = ".converting"
_READY_NAME = "split.is.whole"
"""File in that folder: the split is complete and cleaned up; its files may be moved."""
SHARD_BYTES = 5_000_000_000
"""Limit of a shard into which layer files of a finished split are joined; a single larger tensor exceeds it."""


def publish(folder: Path, split_folder: Path, manifest: Manifest, dtype: str = AUTO) -> None:
    """Give layer files the names of shards, and write the index once all of them are durable there.

    Resumes after a crash: files that have their final name are skipped.

    Args:
        folder: the destination.
        split_folder: the split; its files may have been moved already.
        manifest: the manifest of the split.
        dtype: of GGUF tensors, if not their file's own.

    Raises:
        IncompleteSplitError: a layer is in neither folder, or has another size.
    """
    names = shard_names(len(manifest.layers))
    for record, name in zip(manifest.layers, names, strict=True):
        _move(split_folder / record.file, folder / name)
        if not (folder / name).exists() or (folder / name).stat().st_size != record.size:
            raise IncompleteSplitError(
                f"{folder / name} (layer {record.id}) is missing, or its size is not {record.size:,} bytes.",
                "Restore the file, or convert the checkpoint again into another folder.",
            )
    for name, path in sidecars_of(split_folder).items():
        durable.make_folder((folder / name).parent)
        _move(path, folder / name)
        durable.sync_folder((folder / name).parent)
    durable.sync_folder(folder)
    files = {name: read_header(folder / name).tensors for name in names}
    metadata = converted_from(manifest.source, dtype) | named_dtype(files, manifest.dtype)
    durable.write_whole(folder / INDEX_NAME, index_of_files(files, metadata))


def _require_as_written(folder: Path, split_folder: Path, manifest: Manifest, name: str) -> None:
    """Compare layer files with their checksums where an earlier run wrote some: shards have none."""
    damaged = []
    for record, shard in zip(manifest.layers, shard_names(len(manifest.layers)), strict=True):
        path = next(filter(Path.exists, (split_folder / record.file, folder / shard)), None)
        if path is not None and crc32_of_file(path) != record.crc32:
            damaged.append(path.name)
    if damaged:
        original = ["--original", str(expand(name))] if manifest.source.kind == "local" else []
        command = shlex.join(["rabbitllm", "verify", str(split_folder), "--repair", *original])
        raise IncompleteSplitError(
            f"{folder} is damaged: {listed(damaged, 3)} differs from what was written.",
            f"If every shard exists (or is on the hub), delete {folder}, and convert again. Or repair it: {command}",
        )


def _move(path: Path, to: Path) -> None:
    """Rename a file, unless an earlier run did."""
    if path.exists():
        durable.rename(path, to)


def sidecars_of(folder: Path) -> dict[str, Path]:
    """Config, tokenizer and similar files of a split directory, or of its parent folder: name -> path."""
    return {name: path for name, path in sidecars_in(folder).items() if name != MANIFEST_NAME}


def converted_from(source: SourceIdentity, dtype: str = AUTO) -> dict[str, Any]:
    """The index metadata that records the source of the shards; `origin_of` reads it back."""
    origin = asdict(source)
    return {"converted_from": origin if dtype == AUTO else {**origin, "dtype": dtype}}


def origin_of(folder: Path) -> SourceIdentity:
    """The source from which the checkpoint in a folder was converted.

    Raises:
        OptionError: the folder is not a finished conversion.
    """
    try:
        metadata: Any = read_json(folder / INDEX_NAME).get("metadata")
        source = metadata["converted_from"]
        return SourceIdentity(source["kind"], source["name"], source["commit"], dict(source["fingerprints"]))
    except (InvalidIndexError, KeyError, TypeError, ValueError):
        raise OptionError(
            f"{folder} holds a checkpoint that was not converted by RabbitLLM. Nothing was changed.", _EMPTY_FOLDER
        ) from None


@arguments_checked()
@system_errors_by_name()
def convert(
    path_or_repo_id: str | Path,
    folder: str | Path,
    *,
    to: str = SAFETENSORS,
    outtype: str = "auto",
    sequential: bool = False,
    delete_original: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    max_disk: int | str | None = None,
    min_free_disk: int | str = "1GB",
    shard_transfer: str = "auto",
) -> Conversion:
    """Rewrite a checkpoint as safetensors, one shard per layer, or as one GGUF file; or resume an earlier call.

    Args:
        path_or_repo_id: a folder or a repository, as `AutoModel.from_pretrained` takes it, or a single file of weights.
            Of a split directory, or a folder whose shards were deleted by a split, the layer files are converted;
            compressed tensors are dequantized to the dtype of the config.
        folder: the destination, empty or not existing yet; of GGUF the file.
        to: "safetensors" or "gguf".
        outtype: with GGUF the type of matrices: "auto" for those of the source, "f32", "f16", "bf16", "q8_0" or another
            of `OUTTYPES`. Vectors, norms and routers are float32. With safetensors, of a GGUF
            checkpoint only, the dtype of all tensors: "f32", "f16", "bf16", or "auto" for the file's own, float32 if it
            is quantized.
        sequential: take one shard at a time, and delete it as soon as all its tensors are copied.
        delete_original: remove the original once all of it is in the new folder.
        revision: branch, tag or commit of the repository.
        token: access token for the hub.
        cache_dir: the hub cache.
        max_disk: disk budget in bytes, e.g. "50GB".
        min_free_disk: bytes of the disk that must stay free.
        shard_transfer: how shards of a repository are fetched with `sequential`: "file", "stream" or "auto".

    Raises:
        OptionError: the folder holds something else, or options contradict each other.
        SplitMismatchError: the folder holds a conversion, finished or not, of another checkpoint.
        UnknownArchitectureError: a model of this type, or with this config, cannot be written as GGUF.
        RabbitLLMError: the source is malformed, or the disk budget is too small; nothing was changed.
    """
    shards = ShardPolicy.of(sequential=sequential, delete_original=delete_original)
    options = prepare.split_options(
        None, shards, max_disk=max_disk, min_free_disk=min_free_disk, shard_transfer=shard_transfer
    )
    access = HubAccess(revision, token, expand(cache_dir) if cache_dir else None)
    target = expand(folder)
    if to == GGUF:
        from rabbitllm.models.gguf_output import convert_to_gguf  # with transformers

        if sequential or delete_original:
            raise OptionError(
                "sequential=True and delete_original=True apply only to safetensors.",
                "Remove these options, or use safetensors.",
            )
        return convert_to_gguf(
            str(path_or_repo_id), target, outtype, access, max_disk=options.max_disk, min_free=options.min_free
        )
    if to != SAFETENSORS or outtype not in _DTYPES:
        raise OptionError(
            f"to={to!r} with outtype={outtype!r}; expected safetensors with {', '.join(_DTYPES)}, or gguf.",
            "Use to='gguf' for other types.",
        )
    if sequential and outtype == "f16":
        raise OptionError(
            "outtype='f16' with sequential: a value that exceeds float16 would be found after shards are deleted.",
            "Use outtype='bf16', or leave sequential out.",
        )
    options = replace(options, gguf_dtype=_DTYPES[outtype])  # the layers become a plain checkpoint
    if target.exists() and not target.is_dir():
        raise OptionError(f"{target} is a file; expected a folder.", _EMPTY_FOLDER)
    if target.suffix.lower() in (".gguf", ".safetensors") and not target.exists():
        raise OptionError(
            f"{target} is named as a file, but safetensors are written into a folder.",
            "Name a folder, or use to='gguf' for a GGUF file.",
        )
    split_folder = finished_split_of(str(path_or_repo_id))
    if split_folder is not None and (split_folder == expand(path_or_repo_id) or not _is_of_shards(target)):
        if sequential or delete_original:
            raise OptionError(
                f"{split_folder} is a split directory; sequential=True and delete_original=True apply only to "
                "checkpoints.",
                "Remove these options; `rabbitllm rm` removes a split.",
            )
        if outtype != "auto":
            raise OptionError(
                f"{split_folder} is a split directory; outtype applies only to GGUF files.",
                "Leave outtype out, or convert the GGUF file that was split.",
            )
        with prepare.read_lock(split_folder):
            return _join_split(split_folder, expand(path_or_repo_id), target)
    if is_single_file(str(path_or_repo_id)) and outtype != "auto":
        raise OptionError(
            f"{path_or_repo_id} is not a GGUF checkpoint; its tensors keep their dtypes.", "Leave outtype out."
        )
    with system_errors_by_name(target), locked(target):
        return _convert_by_split(str(path_or_repo_id), access, target, options)


def _convert_by_split(name: str, access: HubAccess, folder: Path, options: SplitOptions) -> Conversion:
    """Split a checkpoint in the work folder, or resume that, and make the layer files shards; or check a conversion."""
    dtype = str(options.gguf_dtype)
    works = {work_dtype: folder / _work_name(work_dtype) for work_dtype in _DTYPES.values()}
    work, before = works[dtype], False
    for own_work in works.values():
        refuse_foreign(own_work, lambda name: name in (directory_name(None), _READY_NAME))
        refuse_foreign(own_work / directory_name(None), _is_of_a_split)
    if (folder / INDEX_NAME).exists():
        origin = origin_of(folder)
        require_same(origin, input_of(name, access, work), folder)
        _require_dtype(dtype, read_json(folder / INDEX_NAME)["metadata"]["converted_from"].get("dtype", AUTO), folder)
        before = not work.exists()
    else:
        for begun_dtype, own_work in works.items():
            if begun_dtype != dtype and journal.source_of(own_work / directory_name(None)) is not None:
                _require_dtype(dtype, begun_dtype, folder)
        if not work.exists():
            _require_empty(folder)
        split_folder, source = work / directory_name(None), input_of(name, access, work)
        is_ready, begun = (work / _READY_NAME).exists(), journal.source_of(split_folder)
        if not is_ready:
            if begun is not None:  # before any shard of another checkpoint can be deleted
                require_same(begun, source, folder)
            source.split(options)
        if (manifest := read_manifest(split_folder)) is None:
            raise IncompleteSplitError(
                f"{split_folder} has no {MANIFEST_NAME}; expected the file of an unfinished conversion.",
                "Convert the checkpoint again into another folder; keep this one until then.",
            )
        require_same(manifest.source, source, folder)
        if begun is not None:
            _require_as_written(folder, split_folder, manifest, name)
        if not is_ready:
            durable.write_whole(work / _READY_NAME, b"")
        publish(folder, split_folder, manifest, dtype)
    for own_work in works.values():
        _clear(own_work)
    return _conversion_of(folder, before=before)


def _is_of_shards(folder: Path) -> bool:
    """Whether a folder holds a conversion, finished or not, of shards, which it may have used up since."""
    if (folder / INDEX_NAME).exists():
        return origin_of(folder).kind != "split"
    return any((folder / _work_name(dtype)).exists() for dtype in _DTYPES.values())


def _is_of_a_split(name: str) -> bool:
    """Whether a split writes files of this name into its folder, or copies them there."""
    records = (MANIFEST_NAME, JOURNAL_NAME, STAGING_NAME, LEASE_NAME, *COMPANIONS)
    return name in records or LAYER_SUFFIX in name or is_lock_file(name) or is_sidecar(name, 0)


def _work_name(dtype: str) -> str:
    """The name of the work folder inside the new folder, which exists until the conversion is complete."""
    return WORK_NAME if dtype == AUTO else f"{WORK_NAME}.{dtype}"


def outtype_of(folder: Path) -> str | None:
    """The `outtype` of the conversion whose work folder this is; None for any other folder."""
    return next((outtype for outtype, dtype in _DTYPES.items() if folder.name == _work_name(dtype)), None)


def _require_dtype(dtype: str, converted: str, folder: Path) -> None:
    if dtype != converted:
        names = {name: outtype for outtype, name in _DTYPES.items()}
        raise SplitMismatchError(
            f"{folder} holds the conversion with outtype={names.get(converted, converted)!r}, not {names[dtype]!r}.",
            ANOTHER_FOLDER,
        )


def _require_empty(folder: Path) -> None:
    reserved = {*map(_work_name, _DTYPES.values())}
    names = sorted(path.name for path in folder.iterdir() if path.name not in reserved and not is_lock_file(path.name))
    if names:
        raise OptionError(
            f"{folder} is not empty: it holds {len(names)} items, such as {names[0]!r}. Nothing was changed.",
            _EMPTY_FOLDER,
        )


def _clear(work: Path) -> None:
    """Remove the work folder, from which all needed files have been moved."""
    if not work.exists():
        return
    folders = [path for path in work.rglob("*") if path.is_dir()]
    for path in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        durable.remove_folder(path)
    durable.remove_folder(work)
    durable.sync_folder(work.parent)


def _conversion_of(folder: Path, *, before: bool) -> Conversion:
    index = read_index(folder / INDEX_NAME)
    paths = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    names = tuple(name for name in paths if name not in (INDEX_NAME, *index.shards) and not is_lock_file(name))
    size = read_json(folder / INDEX_NAME)["metadata"]["total_size"]
    return Conversion(folder, len(index.shards), len(index.weight_map), size, names, before)


def _join_split(split_folder: Path, named: Path, folder: Path) -> Conversion:
    """Write the checkpoint that a split was made from, bit for bit where the split is uncompressed.

    Args:
        split_folder: a finished split directory, also one of RabbitLLM 1.1.
        named: the folder named by the user; config and tokenizer are taken from it if the split has none.
        folder: the destination, empty or not existing yet.

    Raises:
        OptionError: the folder holds weights.
        SplitMismatchError: the folder holds a conversion of something else.
        IncompleteSplitError: a layer file is missing or damaged.
        NotEnoughSpaceException: the disk is too small.
    """
    from rabbitllm.store.checkpoint_folder import PlainReader, plain  # with torch

    home = split_folder if (split_folder / CONFIG_NAME).exists() else named
    store = open_split(split_folder, home)
    identity = identity_of_split(store)
    beside = {name: path.read_bytes() for name, path in sidecars_of(home).items()}
    tensors = {name: plain(stored, dtype_of(stored, store, home)) for name, stored in store.tensors.items()}
    shards = plan_shards((tensor.placed for tensor in tensors.values()), SHARD_BYTES)
    dtype = named_dtype({shard.name: shard.tensors for shard in shards}, store.dtype)
    content = read_json(home / CONFIG_NAME) if CONFIG_NAME in beside else {}
    if content and keeps_blocks(store) and any(stored.quantized for stored in store.tensors.values()):
        beside[CONFIG_NAME] = (json.dumps(content | {"dtype": "float32"}, indent=2) + "\n").encode()
    elif dtype and content and not (content.get("dtype") or content.get("torch_dtype")):
        # not in the index, which nothing reads where there is a single file
        beside[CONFIG_NAME] = (json.dumps(content | dtype, indent=2) + "\n").encode()
    before = (folder / INDEX_NAME).exists()
    if before and (why := origin_of(folder).differs_from(identity)) is not None:
        raise SplitMismatchError(
            f"{folder} holds the conversion of another model than {split_folder}: {why}.", ANOTHER_FOLDER
        )
    left = [folder / name for name in (checkpoint_folder.WORK_NAME, checkpoint_folder.LOCK_NAME)]
    if not before or any(path.exists() for path in left):
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
