"""Folders in a hosted notebook: large files go to its scratch disk, and none into its saved output.

Kaggle saves `/kaggle/working` (20 GB) with the notebook and shows the free space of its host, terabytes that a notebook
may not use; its scratch disk is any other folder, and is deleted when the notebook stops. Colab has one disk, whose
free space is correct. Uses folders, environment variables and Kaggle's secrets only; loads no model and sends no
requests to the hub.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.base.options import expand
from rabbitllm.base.terminal import size
from rabbitllm.checkpoints.hub_cache import folder_name, snapshot_of
from rabbitllm.checkpoints.index import ENTRY_NAMES, META_PARAMETERS
from rabbitllm.splitter.disk_sampler import disk_bytes
from rabbitllm.storage import durable
from rabbitllm.storage.folders import KAGGLE_BYTES
from rabbitllm.store.locations import (
    HOME_VARIABLE,
    LOCAL_FOLDER,
    home,
    local_folder_name,
    one_of_several,
    resolve_name,
)
from rabbitllm.store.manifest import MANIFEST_NAME

logger = logging.getLogger(__name__)

ROOT = Path("/")
"""Root of the notebook's folders; replaced in tests."""
ELSEWHERE = "this machine"
HF_HOME = "HF_HOME"
HF_HUB_CACHE = "HF_HUB_CACHE"
HF_TOKEN = "HF_TOKEN"
_COLAB_VARIABLE = "COLAB_RELEASE_TAG"
_SCRATCH = {"Kaggle": ("kaggle/tmp", "tmp", "var/tmp"), "Colab": ("content", "tmp")}
_DEEPEST = 6
"""Maximum depth of a checkpoint below `/kaggle/input`: models/owner/name/framework/variation/version."""


@dataclass(frozen=True)
class Places:
    """The folders to use; prints as a table.

    Attributes:
        kind: "Kaggle", "Colab", or "this machine".
        layers: folder for split directories.
        hub: huggingface_hub's own folder (`HF_HOME`): its cache of small files and of models without a split, tokens.
        room: bytes that splits and the hub cache may occupy; None if free space shows it.
        attached: folders with checkpoints or splits that are attached to the notebook, read without copying.
    """

    kind: str
    layers: Path
    hub: Path
    room: int | None
    attached: tuple[Path, ...] = ()

    def max_disk(self, model: str | Path) -> int | None:
        """Return the bytes that a split of this model may occupy: the room, less what other models occupy.

        Those are splits, and files in the hub cache. Load a draft model first: then it counts.

        Args:
            model: repository or folder of the model.

        Returns:
            Bytes; None if the free space of the disk is the limit.

        Raises:
            OptionError, CheckpointNotFoundError: the name is not that of a model.
        """
        if self.room is None:
            return None
        name, _ = one_of_several(resolve_name(str(model)))
        local, checkpoint = self.layers / LOCAL_FOLDER, expand(name)
        own_names = {folder_name(name)}
        if checkpoint.is_dir():
            snapshot = snapshot_of(checkpoint)
            own_names = {snapshot.repo_folder if snapshot is not None else local_folder_name(checkpoint)}
        splits = [folder for folder in (*_folders_in(self.layers), *_folders_in(local)) if folder != local]
        cached = _folders_in(Path(os.environ.get(HF_HUB_CACHE) or self.hub / "hub"))
        used = sum(disk_bytes(folder) for folder in splits if folder.name not in own_names)
        used += sum(_file_bytes(folder) for folder in cached if folder.name not in own_names)
        return max(self.room - used, 0)

    def __str__(self) -> str:
        lines = [
            self.kind,
            f"  layers    {self.layers}",
            f"  hub       {self.hub}",
            f"  room      {'what is free there' if self.room is None else size(self.room)}",
        ]
        return "\n".join([*lines, *(f"  attached  {folder}" for folder in self.attached)])


def find(environment: Mapping[str, str] = os.environ) -> Places:
    """Return the folders for the notebook that this process runs in; on any other machine, the default ones.

    `RABBITLLM_HOME` and `HF_HOME` are kept if they are set.

    Args:
        environment: variables to read.
    """
    host = _kind(environment)
    scratch = _scratch(host)
    if scratch is None:
        from huggingface_hub import constants

        return Places(host, home(), Path(constants.HF_HOME), None)
    layers, hub = environment.get(HOME_VARIABLE), environment.get(HF_HOME)
    return Places(
        host,
        Path(layers) if layers else scratch / "rabbitllm",
        Path(hub) if hub else scratch / "huggingface",
        KAGGLE_BYTES if host == "Kaggle" else None,
        tuple(_checkpoints_in(ROOT / "kaggle" / "input")) if host == "Kaggle" else (),
    )


def settle() -> Places:
    """Find the folders; in a hosted notebook create them, and set `RABBITLLM_HOME` and `HF_HOME` to them.

    On Kaggle the secret `HF_TOKEN` becomes the environment variable, if that is not set. (huggingface_hub reads those
    of Colab itself.)

    Must be called before anything imports huggingface_hub, which reads its variable once.

    Returns:
        The folders.

    Raises:
        OSError: a folder cannot be created.
    """
    folders = find()
    if folders.kind == ELSEWHERE:
        return folders
    for folder in (folders.layers, folders.hub):
        durable.make_folder(folder)
    os.environ[HOME_VARIABLE], os.environ[HF_HOME] = str(folders.layers), str(folders.hub)
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None and Path(constants.HF_HOME) != folders.hub:
        logger.warning(
            "huggingface_hub was imported before and still uses %s; restart the kernel to change that.",
            constants.HF_HOME,
        )
    if folders.kind == "Kaggle" and not os.environ.get(HF_TOKEN):
        _take_secret(HF_TOKEN)
    return folders


def _take_secret(name: str) -> None:
    """Set an environment variable to Kaggle's secret of that name, if there is one."""
    try:
        secret = importlib.import_module("kaggle_secrets").UserSecretsClient().get_secret(name)
    except Exception as error:  # no such secret, or Internet is off: the client's own errors
        logger.info("Kaggle gives no secret %s: %s", name, error)
    else:
        os.environ[name] = secret


def _kind(environment: Mapping[str, str]) -> str:
    if (ROOT / "kaggle" / "working").is_dir():
        return "Kaggle"
    return "Colab" if environment.get(_COLAB_VARIABLE) else ELSEWHERE


def _scratch(host: str) -> Path | None:
    """Return the scratch folder: the first if it can be created, else the one with the most room; None elsewhere."""
    candidates = [ROOT / name for name in _SCRATCH.get(host, ())]
    if not candidates:
        return None
    first, *fallbacks = candidates
    with contextlib.suppress(OSError):
        durable.make_folder(first)
        if first.is_dir() and os.access(first, os.W_OK):
            return first
    return max(filter(Path.is_dir, fallbacks), key=lambda folder: shutil.disk_usage(folder).free)


def _checkpoints_in(folder: Path) -> Iterator[Path]:
    """Yield folders below this one with a checkpoint or a finished split; none below another such folder."""
    for where, folders, names in os.walk(folder):
        path = Path(where)
        if {*ENTRY_NAMES, META_PARAMETERS, MANIFEST_NAME} & set(names):
            folders.clear()
            yield path
        elif len(path.relative_to(folder).parts) >= _DEEPEST:
            folders.clear()
        folders.sort()


def _file_bytes(folder: Path) -> int:
    """Return the sizes of the files in a folder of the hub cache; its links are in the same folder.

    Not the blocks on the disk, which differ from one moment to the next: `max_disk` must be the same when an
    interrupted split goes on.
    """
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
