"""Finds and loads the two models of a comparison, each with a share of the memory.

The reference is read from whole shards or from an existing split; nothing is written for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.auto_model import AutoModel
from rabbitllm.base.options import expand, parse_max_memory
from rabbitllm.checkpoints.local import entry_in
from rabbitllm.engine.devices import resolve_devices
from rabbitllm.engine.free_memory import available_ram
from rabbitllm.errors import CheckpointError, QualityError
from rabbitllm.models.library import compression_here
from rabbitllm.store.locations import meant
from rabbitllm.store.manifest import directory_name, read_manifest

SHARE = 3
"""By default 1 / `SHARE` of free memory is for the weights of each model. A pass reads each weight once, so resident
weights gain nothing. The rest is for waiting micro-batches."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How both models are loaded; see `AutoModel.from_pretrained`."""

    device: str | None = None
    max_memory: Mapping[int | str, int | str] | None = None
    dtype: str | None = None
    exact: bool = False
    folder: Path | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    verify_checksums: bool = True


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The name and options of a model to load.

    Attributes:
        name: a folder, a split directory or a repository.
        compression: None for none, or for that of a split directory.
        revision: revision of a repository.
    """

    name: str
    compression: str | None = None
    revision: str | None = None


def the_model(name: str, compression: str | None, loading: Loading, *, alone: bool = False) -> NamedModel:
    """The compared model; the default compression is that of an existing split.

    Raises:
        QualityError: with `alone`, it is uncompressed without a request by `compression`, and would be compared with
            itself.
    """
    chosen = compression_here(name, loading.folder) if compression is None else compression
    if alone and compression is None and chosen in (None, "none"):
        folder = expand(meant(name))
        manifest = read_manifest(folder) if folder.is_dir() else None
        if manifest is None or manifest.compression is None:
            raise QualityError(
                f"{name} is not compressed; by default it would be compared with itself.",
                "Name a compression (--compression 4bit), or what to compare with (--against; in Python, against=).",
            )
    return NamedModel(name, None if chosen == "none" else chosen, loading.revision)


def the_reference(model: NamedModel, against: Any, loading: Loading) -> NamedModel:
    """The reference: the model that the user names, else the same model uncompressed.

    Raises:
        QualityError: the uncompressed model of a split directory cannot be found.
    """
    if against is not None:
        return NamedModel(str(against), None, loading.revision)
    folder = expand(meant(model.name))
    manifest = read_manifest(folder) if folder.is_dir() else None
    if manifest is None:
        return NamedModel(model.name, None, model.revision)
    if manifest.compression is None:
        return model
    uncompressed = folder.parent / directory_name(None)
    if read_manifest(uncompressed) is not None:
        return NamedModel(str(uncompressed))
    if _is_checkpoint(folder.parent):
        return NamedModel(str(folder.parent))
    if manifest.source is not None and manifest.source.kind == "hub":
        return NamedModel(manifest.source.name, None, manifest.source.commit)
    raise QualityError(
        f"{folder} is compressed, and the uncompressed model is not in its parent folder.",
        "Say where it is, with --against (in Python, against=).",
    )


def loaded(named: NamedModel, loading: Loading, *, split: bool) -> Any:
    """Load a model.

    Args:
        named: name of the model.
        loading: how to load it.
        split: whether it may be split first.

    Raises:
        RabbitLLMError: as `AutoModel.from_pretrained` does.
    """
    with contextlib.redirect_stdout(sys.stderr):  # output while loading must not mix with the result
        return AutoModel.from_pretrained(
            named.name,
            compression=named.compression,
            device=loading.device,
            max_memory=loading.max_memory or _shares(loading.device),
            dtype=loading.dtype,
            exact=loading.exact,
            layer_shards_saving_path=loading.folder,
            revision=named.revision,
            trust_remote_code=loading.trust_remote_code,
            verify_checksums=loading.verify_checksums,
            split=split,
            show_layer_progress=split,
        )


def _shares(device: str | None) -> dict[int | str, int | str]:
    """Device -> bytes that the weights of one model may take."""
    found: dict[int | str, int | str] = {"cpu": available_ram() // SHARE}
    for one in resolve_devices(device, parse_max_memory(None)):
        if one.name != "cpu":
            found[int(one.name.removeprefix("cuda:"))] = one.free_bytes() // SHARE
    return found


def _is_checkpoint(folder: Path) -> bool:
    try:
        return bool(entry_in(folder))
    except (CheckpointError, OSError):
        return False
