"""Makes damaged layers of a finished split again, from only the shards that they need.

The directory becomes an unfinished split whose other shards are used up, and is finished like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from rabbitllm.checkpoints.index import natural_key
from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.errors import SplitMismatchError
from rabbitllm.splitter import journal
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.splitter.request import SplitRequest, plan_split, quantizer_of
from rabbitllm.splitter.split import split
from rabbitllm.storage import durable
from rabbitllm.store.layer_file import DONE_SUFFIX
from rabbitllm.store.manifest import MANIFEST_NAME, Manifest

logger = logging.getLogger(__name__)


def shards_for(manifest: Manifest, layers: Collection[str]) -> list[str]:
    """Return the shards that these layers were made from, in numerical order."""
    return sorted(
        {shard for record in manifest.layers if record.id in layers for shard in record.shards}, key=natural_key
    )


def repair(request: SplitRequest, manifest: Manifest, layers: Collection[str]) -> None:
    """Make these layers of a finished split again.

    Args:
        request: with the source that the split was made from, and its compression.
        manifest: of the directory.
        layers: ids of the damaged layers; their files are deleted once the source is verified.

    Raises:
        SplitMismatchError: the source is another one, or would be split differently; nothing was touched.
        CheckpointError, HubError: the source is not available; nothing was touched.
    """
    folder = request.folder
    # grouped as before: a family's naming may have changed since, or may have been given by the caller
    assigned = {tensor: LayerName(record.id, record.stem) for record in manifest.layers for tensor in record.tensors}
    plan = plan_split(replace(request, chosen=manifest.chosen), manifest.format_version, assigned)
    _refuse_another(plan, manifest, folder)
    quantizer = quantizer_of(request)
    if quantizer != manifest.quantizer:
        logger.warning("The other layers were quantized by %s, these will be by %s.", manifest.quantizer, quantizer)
    needed = set(shards_for(manifest, layers))
    known = manifest.source_checksums
    # the shards that are read must be unchanged since the split was made; changes of the others do not matter
    shards = [
        replace(shard, expected_crc32=known.get(shard.name)) if shard.name in needed else replace(shard, stat=None)
        for shard in plan.shards
    ]
    plan = replace(plan, shards=tuple(shards))
    journal.begin(folder, plan, manifest.quantizer)
    opened = journal.SplitJournal(folder)
    try:
        for shard in plan.shards:
            if shard.name not in needed:
                opened.mark_used(shard.name, {}, known.get(shard.name))
    finally:
        opened.close()
    # The damaged files are removed before the manifest. A journal is ignored if there is a manifest, and a manifest
    # that names a missing file is refused, so a crash at any point here is detected and repaired by the next call.
    for record in manifest.layers:
        if record.id in layers:
            for suffix in (DONE_SUFFIX, ""):
                durable.remove(folder / (record.file + suffix))
    durable.sync_folder(folder)
    durable.remove(folder / MANIFEST_NAME)
    durable.sync_folder(folder)
    split(request)


def _refuse_another(plan: SplitPlan, manifest: Manifest, folder: Path) -> None:
    why = manifest.source.differs_from(plan.source)
    planned = {layer: (layout.file_name, layout.size) for layer, layout in plan.layouts.items()}
    if why is None and planned != {record.id: (record.file, record.size) for record in manifest.layers}:
        why = "it would be split into other layer files"
    if why is not None:
        raise SplitMismatchError(
            f"{folder} cannot be repaired from {plan.source.name}: {why}.",
            "Split again into another folder (layer_shards_saving_path).",
        )
