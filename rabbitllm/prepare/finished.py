"""Checks of a finished split directory: whether it is of this source, and whether files remain to be removed.

Compares with the part of the source that still exists. Makes nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path

from rabbitllm.base.options import SplitOptions
from rabbitllm.checkpoints.checkpoint import Checkpoint, ShardMetadata, SourceIdentity
from rabbitllm.checkpoints.hub import HubCheckpoint, HubRepository
from rabbitllm.checkpoints.index import is_index
from rabbitllm.checkpoints.local import LocalCheckpoint, begins_with_any, is_writable
from rabbitllm.errors import CheckpointNotFoundError, SplitMismatchError
from rabbitllm.prepare.source import Source
from rabbitllm.splitter.choosing import other_budget
from rabbitllm.splitter.finish import STAGING_NAME, clear_away, discard_original
from rabbitllm.splitter.lease import LEASE_NAME
from rabbitllm.splitter.lock import is_left_over
from rabbitllm.splitter.request import Acceptance
from rabbitllm.splitter.source_check import check_finished_source
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.store.manifest import AUTO, JOURNAL_NAME, MANIFEST_NAME, Manifest, is_fitted, read_manifest

logger = logging.getLogger(__name__)


def has_work_left(folder: Path, options: SplitOptions) -> bool:
    """Whether something must be removed after a finished split; only then is the lock needed.

    A split in a folder that cannot be written never has work left, and is loaded without a lock.
    """
    if not (folder / MANIFEST_NAME).exists() or not is_writable(folder):
        return False
    left = (folder / JOURNAL_NAME).exists() or (folder / STAGING_NAME).exists() or is_left_over(folder)
    left = left or (folder / LEASE_NAME).exists()
    return left or options.delete_original


def check_finished(source: Source, options: SplitOptions, accept: Acceptance | None = None) -> None:
    """Check that a finished split is of this source, as far as the source still exists.

    With `delete_original` the original is then deleted, if `accept` accepts the split.
    """
    manifest = read_manifest(source.split_folder)
    if manifest is None:
        return  # made by RabbitLLM 1.1; missing tensors are detected when the model is built
    if manifest.compression != options.compression and source.split_folder != source.config_folder:
        raise SplitMismatchError(
            f"{source.split_folder} is a split at compression {manifest.compression}; "
            f"{options.compression} was asked for.",
            "Split into another folder (layer_shards_saving_path).",
        )
    _tell_other_budget(source, manifest, options)
    if options.fit_scales and not is_fitted(manifest.quantizer):
        raise SplitMismatchError(
            f"{source.split_folder} is a split whose scales are bitsandbytes' own; fit_scales=True was asked for.",
            "Split into another folder (layer_shards_saving_path), or leave fit_scales out.",
        )
    if is_writable(source.split_folder):
        clear_away(source.split_folder)
    if source.repository is not None:
        refuse_another(source, manifest, source.repository.identity(manifest.source.fingerprints))
    checkpoint = _still_there(source, manifest)
    if checkpoint is None:
        return
    found = [facts for shard in checkpoint.index.shards if (facts := _present(checkpoint, shard)) is not None]
    refuse_another(source, manifest, checkpoint.identity(found))
    _refuse_without_evidence(source, manifest, found)
    check_finished_source(manifest, found, checkpoint, source.split_folder, verify=options.verify_source)
    if options.delete_original:
        store = LayerStore(source.split_folder)  # checks all sizes and headers before anything is deleted
        if accept is not None:
            accept(store)
        discard_original(checkpoint)


def _tell_other_budget(source: Source, manifest: Manifest, options: SplitOptions) -> None:
    """Warn that a mixed split was made for another budget; refuse it only if it is larger than the disk may hold."""
    other = other_budget(manifest.chosen, options) if options.compression == AUTO else None
    if other is None:
        return
    remake = "`rabbitllm rm` removes it, if the original can be had again; layer_shards_saving_path names another place"
    nbytes = sum(record.size for record in manifest.layers)
    if options.max_disk is not None and nbytes > options.max_disk:
        raise SplitMismatchError(
            f"{source.split_folder} was made {other} and has {nbytes:,} bytes of layer files; "
            f"max_disk={options.max_disk:,} was given now.",
            f"Leave max_disk out to use it as it is. {remake[0].upper()}{remake[1:]}.",
        )
    logger.warning("%s was made %s and is used as it is. %s.", source.split_folder, other, remake)


def refuse_another(source: Source, manifest: Manifest, identity: SourceIdentity) -> None:
    """Refuse a finished split that was made from something else.

    Raises:
        SplitMismatchError: the source differs; the message says how.
    """
    why = manifest.source.differs_from(identity)
    if why is not None and manifest.source.is_named_like(identity):
        raise SplitMismatchError(
            f"{source.name} has changed since it was split into {source.split_folder}: {why}.",
            f"To use the split as it is, name {source.split_folder} itself. To split the changed checkpoint, choose "
            "another folder (layer_shards_saving_path), or delete that one if its model is not needed.",
        )
    if why is not None:
        raise SplitMismatchError(
            f"{source.split_folder} was split from {manifest.source.name}, not from {source.name}: {why}.",
            "Split into another folder (layer_shards_saving_path), or delete that one if its model is not needed.",
        )


def _refuse_without_evidence(source: Source, manifest: Manifest, found: list[ShardMetadata]) -> None:
    """Refuse a split that lies elsewhere and whose model has another name, if no shard is left to compare."""
    known = manifest.source
    if source.local is None or found or known.kind != "local" or source.split_folder.is_relative_to(source.local):
        return
    if known.name != source.local.resolve().name:
        raise SplitMismatchError(
            f"{source.split_folder} was split from a folder named {known.name!r}, and {source.local} has no shard left "
            "by which to tell whether that is the same model.",
            f"If it is, name the split directory itself: {source.split_folder}.",
        )


def _still_there(source: Source, manifest: Manifest) -> Checkpoint | None:
    """Return the local weights that a finished split was made from; None if they are used up.

    The folder may have the weights in another form too. The split does not use that form: it is not opened, and never
    discarded.
    """
    shards = manifest.source.fingerprints
    try:
        if source.repository is not None:
            remote = HubCheckpoint(source.repository) if _index_is_cached(source.repository) else None
            return remote if remote is not None and not shards.keys().isdisjoint(remote.index.shards) else None
        if source.local is None:
            return None
        if begins_with_any(source.local, shards):
            return LocalCheckpoint(source.local, known_shards=shards)
    except CheckpointNotFoundError:
        return None
    _refuse_without_evidence(source, manifest, [])
    return None


def _index_is_cached(repository: HubRepository) -> bool:
    entry = repository.entry()
    return is_index(entry) and repository.cached(entry) is not None


def _present(checkpoint: Checkpoint, shard: str) -> ShardMetadata | None:
    """Return the facts of a shard that is on this machine; headers are not requested from a repository."""
    if isinstance(checkpoint, HubCheckpoint) and checkpoint.repository.cached(shard) is None:
        return None
    return checkpoint.facts(shard)
