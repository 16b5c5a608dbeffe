"""The last step: layer files get the names of shards, and an index is written that says what they were made from.

A crash in between is gone on from, since what has its name already is passed over. Knows no sources but their identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rabbitllm.checkpoints.checkpoint import SourceIdentity, sidecars_in
from rabbitllm.checkpoints.index import INDEX_NAME, shard_names
from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.errors import IncompleteSplitError, InvalidIndexError, OptionError
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.storage import durable
from rabbitllm.store.checkpoint_folder import index_of_files
from rabbitllm.store.layer_store import MANIFEST_NAME, Manifest


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
