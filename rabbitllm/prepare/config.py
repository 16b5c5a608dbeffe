"""The config of a source before there is a split directory: its file, or one derived from Meta's parameters.

Independent of model classes; the engine interprets the config.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rabbitllm.checkpoints.checkpoint import Checkpoint
from rabbitllm.checkpoints.config import experts_a_token
from rabbitllm.checkpoints.index import META_PARAMETERS
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME, GENERATION_NAME, names_a_model
from rabbitllm.formats.bounded import read_json
from rabbitllm.prepare.source import Source
from rabbitllm.prepare.weights import open_weights
from rabbitllm.storage import durable
from rabbitllm.store.manifest import is_finished


@contextlib.contextmanager
def config_folder(source: Source) -> Iterator[Path]:
    """Yield a folder with the model's config, before there is a split directory; a scratch one if it is derived.

    Raises:
        CheckpointError: the files that it would be derived from are invalid.
    """
    derived: Mapping[str, bytes] = {}
    home = source.config_folder
    if not source.finished and _may_derive(source) and not names_a_model(home / CONFIG_NAME):
        try:
            checkpoint = open_weights(source, [source.split_folder])
            derived = checkpoint.derived() if checkpoint is not None else {}
        except FileNotFoundError:  # another process has finished the split meanwhile, or something is missing
            if not is_finished(source.split_folder):
                raise
            home = source.split_folder
    if CONFIG_NAME not in derived:
        yield home
        return
    with tempfile.TemporaryDirectory(prefix="rabbitllm-config-") as folder:
        for name in filter(derived.__contains__, (CONFIG_NAME, GENERATION_NAME)):
            durable.write_scratch(Path(folder) / name, derived[name])
        yield Path(folder)


def _may_derive(source: Source) -> bool:
    """Whether the file that a config is derived from exists."""
    if source.repository is not None:
        return META_PARAMETERS in source.repository.files
    return source.local is not None and (source.local / META_PARAMETERS).exists()


def family_of(config_folder: Path, checkpoint: Checkpoint | None = None) -> str | None:
    """Return the model type by the config in a folder, or by the one that a checkpoint derives."""
    family = config_of(config_folder, checkpoint).get("model_type")
    return family if isinstance(family, str) else None


def experts_of(config_folder: Path, checkpoint: Checkpoint | None = None) -> int | None:
    """Return the number of experts that a router picks for a token, by the same config."""
    return experts_a_token(config_of(config_folder, checkpoint))


def config_of(config_folder: Path, checkpoint: Checkpoint | None = None) -> Mapping[str, Any]:
    """Return the config in a folder, or the one that a checkpoint derives; empty if there is none."""
    path = config_folder / CONFIG_NAME
    derived = checkpoint.derived() if checkpoint is not None else {}
    if CONFIG_NAME in derived:
        found: Mapping[str, Any] = json.loads(derived[CONFIG_NAME])
        return found
    return read_json(path) if path.exists() else {}
