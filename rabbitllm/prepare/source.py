"""Records of the source that the user named and of what was found for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rabbitllm.checkpoints.hub import HubAccess, HubRepository


@dataclass(frozen=True)
class Source:
    """A source that was found.

    Attributes:
        name: as the user wrote it.
        split_folder: its split directory, finished or to be made.
        config_folder: a folder with config and tokenizer.
        finished: whether the split directory is complete.
        repository: repository with the weights; None if they are in a folder, or only a finished split exists.
        local: the folder with the weights.
        missing_from: repository from which shards that the folder lacks are fetched.
    """

    name: str
    split_folder: Path
    config_folder: Path
    finished: bool
    repository: HubRepository | None = None
    local: Path | None = None
    missing_from: HubRepository | None = None


@dataclass(frozen=True)
class Sought:
    """A request to find a source.

    Attributes:
        name: a folder, a split directory, or a repository id; see `locations.meant`.
        compression: None, one for all tensors, or "auto".
        saving_path: folder for the split directory by the user; None for the default.
        access: how to reach the hub.
        repo_id: repository from which shards that a local folder lacks are fetched.
        base: first part of the split directory's name.
        only_look: for a plan: nothing is recorded, and a source whose config or weights are gone is found too.
    """

    name: str
    compression: str | None = None
    saving_path: Path | None = None
    access: HubAccess = field(default_factory=HubAccess)
    repo_id: str | None = None
    base: str = "splitted_model"
    only_look: bool = False
