"""What the user named, and what of it was found: records that the steps of preparing hand on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rabbitllm.checkpoints.hub import HubAccess, HubRepository


@dataclass(frozen=True)
class Source:
    """What the user named, found.

    Attributes:
        name: as the user wrote it.
        split_folder: its split directory, finished or to be made.
        config_folder: a folder with config and tokenizer.
        finished: whether the split directory is whole.
        repository: on the hub, that has the weights; None where they are in a folder, or a finished split is all.
        local: the folder with the weights.
        missing_from: the repository to fetch shards from that the folder lacks.
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
    """What to look for.

    Attributes:
        name: a folder, a split directory, or a repository id; see `model_name`.
        compression: None, one for all tensors, or "auto".
        saving_path: where the user wants the split directory; None for the default place.
        access: how to reach the hub.
        repo_id: a repository to fetch shards from that a local folder lacks.
        base: first part of the split directory's name.
        only_look: for a plan: nothing is written down, and a source whose config or weights are gone is found too.
    """

    name: str
    compression: str | None = None
    saving_path: Path | None = None
    access: HubAccess = field(default_factory=HubAccess)
    repo_id: str | None = None
    base: str = "splitted_model"
    only_look: bool = False
