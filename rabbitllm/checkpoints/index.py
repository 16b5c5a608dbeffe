"""The index of a checkpoint: tensor name -> shard, from `*.index.json` or made up for a single file.

Format: the `weight_map` that transformers writes beside sharded weights
(https://huggingface.co/docs/transformers/big_models#sharded-checkpoints). An index comes with the
download, so its shard names are checked before anything is opened, let alone deleted, by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.errors import InvalidIndexError, UnsafePathError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """Which shard holds each tensor.

    Attributes:
        weight_map: tensor name -> shard name, in the index's own order.
        shards: every shard once, in numerical order (`-2-` before `-10-`).
    """

    weight_map: Mapping[str, str]
    shards: tuple[str, ...]


def natural_key(name: str) -> tuple[object, ...]:
    """A sort key that puts `shard-2` before `shard-10`, whatever the padding."""
    pieces = _DIGITS.split(name)  # text and digits in turns, text first
    key: list[object] = [*pieces]
    key[1::2] = [(int(digits), digits) for digits in pieces[1::2]]
    return tuple(key)


def index_of(weight_map: Mapping[str, str]) -> CheckpointIndex:
    """An index from a weight map whose shard names are already checked."""
    return CheckpointIndex(dict(weight_map), tuple(sorted(set(weight_map.values()), key=natural_key)))


def read_index(path: Path) -> CheckpointIndex:
    """Read and check an index file.

    Raises:
        InvalidIndexError: no `weight_map` of strings, or an empty one.
        UnsafePathError: a shard name that is no plain relative name.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidIndexError(f"{path} has no weight_map; expected a table of tensor name to shard.")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise InvalidIndexError(f"{path} puts tensor {tensor!r} into {shard!r}; expected the name of a shard.")
        check_shard_name(shard, path.name)
    return index_of(weight_map)


def check_shard_name(shard: str, source: str) -> None:
    """Refuse a shard name that is anything but one or two plain path segments.

    Raises:
        UnsafePathError: absolute, `..`, a drive letter, a backslash, a control character, more than two segments.
    """
    segments = shard.split("/")
    if len(segments) > 2 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise UnsafePathError(
            f"{source} names the shard {shard!r}; expected a plain file name inside the checkpoint's own folder.",
            "Do not use this checkpoint: an honest index has no such name. Nothing was opened or deleted.",
        )


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a file that a symbolic link leads out of its folder.

    Raises:
        UnsafePathError: the resolved file is not below the resolved folder.
    """
    resolved = path.resolve()
    if not resolved.is_relative_to(folder.resolve()):
        raise UnsafePathError(
            f"{path} is a link that leads outside its folder, to {resolved}.",
            "Put the files themselves (or hard links) into one folder. Nothing was opened or deleted.",
        )
