"""Compares config, tokenizer and the like of a finished split with those that its source has now."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.checkpoint import Checkpoint, SourceIdentity, sidecars_in
from rabbitllm.checkpoints.config import MODELOPT_NAME, changed_settings
from rabbitllm.checkpoints.index import META_PARAMETERS, is_gguf, is_rank
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME, names_a_model
from rabbitllm.errors import InvalidIndexError, SplitMismatchError
from rabbitllm.prepare._finding import Source
from rabbitllm.store.manifest import MANIFEST_NAME

logger = logging.getLogger(__name__)
_READ_BY_MODELS = re.compile(r"config|params|token|vocab|merges|template|tekken|\.(model|tiktoken|bpe|jinja|py)$")
"""In names of files that change what a model does, unlike licences and notes."""


def check_small_files(source: Source, made_from: SourceIdentity, checkpoint: Checkpoint | None) -> None:
    """Compare config, tokenizer and the like of a finished split with those of its source; warn of others.

    Raises:
        SplitMismatchError: a config has other settings: the same weights mean something else.
    """
    folder, repository, shards = source.split_folder, source.repository, made_from.fingerprints
    now: Mapping[str, Callable[[bytes], bool]]
    path_of: Callable[[str], Path]
    split_time = (folder / MANIFEST_NAME).stat().st_mtime_ns
    if any(map(is_gguf, shards)):  # the metadata of its file, of which a part may be in no sample
        files = filter(None, map(checkpoint.at_hand, shards) if checkpoint is not None else ())
        if checkpoint is None or not any(file.stat().st_mtime_ns > split_time for file in files):
            return
        now = {name: content.__eq__ for name, content in checkpoint.derived().items()}
        path_of = folder.joinpath  # what differs is only named
    elif repository is not None:
        now, path_of = repository.small_files(), repository.download
    elif source.local is not None:
        now = {name: path.read_bytes().__eq__ for name, path in sidecars_in(source.local, needed=False).items()}
        path_of = source.local.joinpath
    else:
        return
    copies = {name: path for name, path in sidecars_in(folder).items() if name != MANIFEST_NAME}
    edited = {name for name, path in copies.items() if path.stat().st_mtime_ns > split_time}
    others = [name for name, is_of in now.items() if name not in copies or not is_of(copies[name].read_bytes())]
    for name in {CONFIG_NAME, MODELOPT_NAME, META_PARAMETERS}.intersection(others) - edited:
        path = path_of(name)
        if name == CONFIG_NAME and not names_a_model(path):
            continue
        try:
            changed = changed_settings(folder / name, path)
        except InvalidIndexError:  # half written, perhaps: the split does not need it
            continue
        if not all(re.search(r"_token_ids?$", setting) for setting in changed):  # these change no weight's meaning
            raise SplitMismatchError(
                f"{path} has changed since it was split into {folder}: it has other values of {listed(changed, 3)}.",
                f"To use the split unchanged, load {folder}. To use its weights with that file, copy it there. To "
                "split again, use another folder (--dir, layer_shards_saving_path).",
            )
        if not changed:
            others.remove(name)
    if CONFIG_NAME in now and not any(is_rank(shard) or is_gguf(shard) for shard in shards):  # some are derived
        others += copies.keys() - now.keys()
    if repository is None:  # a copy that is newer than both is what the user wants
        others = [name for name in others if name not in edited or _is_newer(path_of(name), copies[name])]
    if others := list(filter(_READ_BY_MODELS.search, others)):
        logger.warning(
            "%s has the weights of %s, but not the same %s; what it has is used. To use those of the source, copy them "
            "there and remove others, or split into another folder (--dir, layer_shards_saving_path).",
            *(folder, source.local if repository is None else f"commit {repository.commit}", listed(sorted(others))),
        )


def _is_newer(path: Path, copy: Path) -> bool:
    return path.exists() and path.stat().st_mtime_ns >= copy.stat().st_mtime_ns
