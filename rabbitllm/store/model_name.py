"""The meaning of a model's name, the same for every command and for `AutoModel`.

A folder and a repository as `organisation/name` are returned unchanged; an address on the hub
(`hf://organisation/name`, or the browser's URL) means that repository, and a file of weights means the checkpoint in
its folder. Opens at most an index, and never contacts the hub: other code checks whether the repository exists.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TypeVar

from rabbitllm.base.options import expand
from rabbitllm.checkpoints.index import META_PARAMETERS, WEIGHT_SUFFIXES, is_index, is_meta, is_rank, read_index
from rabbitllm.checkpoints.local import entry_in
from rabbitllm.errors import CheckpointNotFoundError, OptionError, RabbitLLMError
from rabbitllm.store import locations
from rabbitllm.store.layer_store import SPLIT_DIRECTORY

_Error = TypeVar("_Error", bound=RabbitLLMError)
MAX_NEAR = 3
"""Limit of proposed names."""
_HUB_ADDRESS = re.compile(r"(?:hf://(?:models/)?|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(.*)")


def meant(name: str) -> str:
    """The folder or repository id that the user means; other names are returned unchanged.

    Raises:
        OptionError: an address on the hub that is not a repository's.
        CheckpointNotFoundError: the file does not belong to the checkpoint of its folder.
        InvalidIndexError, UnsafePathError: see `read_index`.
    """
    address = _HUB_ADDRESS.fullmatch(name)
    if address is not None:
        return _repository(name, address[1])
    path = expand(name)
    if not name or path.is_dir():
        return name
    if path.is_file():
        return str(_folder_of(path))
    if path.suffix in WEIGHT_SUFFIXES and any(path.parent.glob(f"{SPLIT_DIRECTORY}*")):
        return str(path.parent)  # a split has deleted that file
    return name


def _repository(name: str, rest: str) -> str:
    """The repository of an address; a browser's URL may continue with `tree/main` and the like."""
    parts = rest.partition("?")[0].rstrip("/").split("/")
    repo_id = "/".join(parts[:2])
    browsed = name.startswith("http") and parts[2:] in ([], ["tree", "main"])
    if not locations.is_repo_id(repo_id) or not (len(parts) <= 2 or browsed):
        raise OptionError(
            f"{name} is no address of a repository of weights.",
            "Give hf://organisation/name; a branch, tag or commit goes into --revision.",
        )
    return repo_id


def _folder_of(file: Path) -> Path:
    folder = file.parent
    entry = entry_in(folder)
    whole = entry == file.name
    if is_index(entry):
        whole = whole or file.name in read_index(folder / entry).shards
    if is_meta(entry):
        whole = whole or is_rank(file.name) or file.name == META_PARAMETERS
    if not whole:
        raise CheckpointNotFoundError(
            f"{file} is not what the checkpoint in {folder} begins with: that is {entry}.",
            "Name the folder, or put the file into one of its own, with config and tokenizer.",
        )
    return folder


def near(name: str) -> tuple[str, ...]:
    """Local names similar to one that was not found, most similar first: of split models, and of folders next to a
    path."""
    known = locations.known_names()
    path = expand(name)
    if path.parent.is_dir():
        siblings = (other for other in path.parent.iterdir() if other.is_dir() and not other.name.startswith("."))
        known = [*known, *(str(other) for other in siblings)]
    wanted = name.lower()
    by_part: dict[str, list[str]] = {}
    for one in known:
        for part in {one.lower(), one.lower().rpartition("/")[2]}:
            by_part.setdefault(part, []).append(one)
    found = [
        one
        for part in {wanted: None, wanted.rpartition("/")[2]: None}
        for like in difflib.get_close_matches(part, by_part, n=MAX_NEAR, cutoff=0.7)
        for one in by_part[like]
    ]
    return tuple(dict.fromkeys(found))[:MAX_NEAR]


def with_near_names(error: _Error, name: str) -> _Error:
    """The same error, with a suggestion of similar local names."""
    found = [one for one in near(name) if one != name]
    if not found:
        return error
    return type(error)(error.problem, f"Did you mean {' or '.join(found)}? Else: {error.remedy}")
