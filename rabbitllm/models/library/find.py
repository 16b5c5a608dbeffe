"""The search for split directories: all under `home()`, those in a folder, and those of one model.

A split directory outside `locations.home()` is only found by its folder. Never contacts the hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rabbitllm.base.options import expand
from rabbitllm.errors import CheckpointNotFoundError, OptionError
from rabbitllm.models.library.entry import WHOLE, SplitEntry, look
from rabbitllm.store import locations
from rabbitllm.store.locations import meant, with_near_names
from rabbitllm.store.manifest import SPLIT_DIRECTORY, SPLITS, directory_name, losses_first

DEPTH = 4
"""Levels below a folder that are searched: `home()` has its splits three below it."""


def known() -> list[SplitEntry]:
    """Every split directory under `home()`."""
    return _entries(_split_directories(locations.home(), DEPTH))


def below(folder: Path) -> list[SplitEntry]:
    """Split directories in a folder, or the folder itself if it is one.

    Raises:
        CheckpointNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"There is no folder {str(folder)!r}.", "Check the path.")
    return _entries(_split_directories(folder, DEPTH))


def of_model(name: str, compression: str | None = None, saving_path: Path | None = None) -> list[SplitEntry]:
    """The split directories of one model, the largest compression last.

    Args:
        name: a split directory, a checkpoint's folder, a repository, or a name in the entries of `known`.
        compression: one of `SPLITS`, "none" for uncompressed; None for all.
        saving_path: folder that the user chose for them; None for the usual locations.

    Raises:
        OptionError: the compression is unknown.
    """
    if compression not in ("none", *SPLITS):
        raise OptionError(
            f"compression={compression!r} does not exist.", f"Give one of none, {', '.join(filter(None, SPLITS))}."
        )
    found = _entries(_places(meant(name), saving_path))
    if compression is None:
        return found
    return [entry for entry in found if (entry.compression or "none") == compression]


def one_of_model(name: str, compression: str | None = None, saving_path: Path | None = None) -> SplitEntry:
    """The split directory of a model, which must have exactly one.

    Raises:
        CheckpointNotFoundError: there is none.
        OptionError: there are several.
    """
    found = of_model(name, compression, saving_path)
    if not found:
        raise no_split_of(name)
    if len(found) > 1:
        several = "; ".join(f"{entry.compression or 'none'} in {entry.folder}" for entry in found)
        raise OptionError(
            f"{name} has {len(found)} split directories here: {several}.",
            "Say which with --compression, or name its folder.",
        )
    return found[0]


def compression_here(name: str, saving_path: Path | None = None) -> str | None:
    """The default compression of a model: that of its least compressed complete split, else none."""
    whole = [entry.compression for entry in of_model(name, saving_path=saving_path) if entry.state == WHOLE]
    return min(whole, key=losses_first, default=None)


def no_split_of(name: str) -> CheckpointNotFoundError:
    """The error for a model without a split on this machine."""
    error = CheckpointNotFoundError(
        f"No split of {name} is known here.",
        "`rabbitllm ls` shows those that are; one that lies elsewhere is named by its folder.",
    )
    return with_near_names(error, name)


def _places(name: str, saving_path: Path | None) -> Iterator[Path]:
    """Folders that may be splits of a model; some may not exist."""
    folder = expand(name)
    if name and folder.is_dir():
        if look(folder) is not None:
            yield folder
            return
        for compression in SPLITS:
            yield locations.for_local(folder, saving_path, compression)
        return
    if saving_path is not None:
        yield from (saving_path / directory_name(compression) for compression in SPLITS)
        return
    if locations.is_repo_id(name):
        for compression in SPLITS:
            yield from locations.of_other_commits(name, "", compression)
        if "/" not in name:
            found = (locations.home() / locations.LOCAL_FOLDER).glob(f"{name}-*/{SPLIT_DIRECTORY}*")
            yield from sorted(path for path in found if path.parent.name.rpartition("-")[0] == name)


def _entries(folders: Iterable[Path]) -> list[SplitEntry]:
    found = (entry for folder in folders if (entry := _looked(folder)) is not None)
    return sorted(found, key=lambda entry: (entry.name.lower(), entry.folder.parent, _order(entry)))


def _looked(folder: Path) -> SplitEntry | None:
    try:
        return look(folder)
    except OSError:  # removed meanwhile, or not readable by this user
        return None


def _order(entry: SplitEntry) -> float:
    return losses_first(entry.compression)


def _split_directories(folder: Path, depth: int) -> Iterator[Path]:
    if look(folder) is not None:
        yield folder
        return
    if depth:
        for path in _folders_in(folder):
            yield from _split_directories(path, depth - 1)


def _folders_in(folder: Path) -> Sequence[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
