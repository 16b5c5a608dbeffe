"""The end of a split: the directory is declared whole, and what only the making needed is cleared away."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from pathlib import Path

from rabbitllm import durable
from rabbitllm.checkpoints.checkpoint import Checkpoint, Disposal
from rabbitllm.checkpoints.index import natural_key
from rabbitllm.formats.crc32 import combine_all, crc32_of_file
from rabbitllm.layers.compression import Settling, StoredForm, constants
from rabbitllm.layers.layer_file import LayerLayout
from rabbitllm.layers.layer_store import JOURNAL_NAME, LayerRecord, Manifest, read_manifest, write_manifest
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.splitter.request import Request

logger = logging.getLogger(__name__)

STAGING_NAME = ".staging"
"""Folder inside the split directory that fetched shards go to; ours, and gone when the split is whole."""


def finish(
    request: Request,
    plan: SplitPlan,
    quantiser: str | None,
    checksums: Mapping[str, tuple[int, ...]],
    source_checksums: Mapping[str, int],
) -> None:
    """Declare the directory whole, then clear away what only the making needed.

    Args:
        request: the split.
        plan: of the split.
        quantiser: as the manifest names it.
        checksums: tensor -> CRC-32 of each stored part.
        source_checksums: shard -> `source_check.source_crc32`.
    """
    if read_manifest(request.folder) is None:
        records = tuple(
            LayerRecord(
                layer,
                layout.layer.stem,
                layout.file_name,
                layout.size,
                layout.tensors,
                _checksum(layout, checksums, request.folder),
                tuple(sorted(plan.layer_map.layer_to_shards[layer], key=natural_key)),
            )
            for layer, layout in plan.layouts.items()
        )
        ordered = {s.name: source_checksums[s.name] for s in plan.shards if s.name in source_checksums}
        manifest = Manifest(
            plan.source, plan.compression, quantiser, records, plan.format_version, plan.chosen, ordered
        )
        write_manifest(request.folder, manifest)
    clear_away(request.folder)
    if request.options.delete_original:
        discard_original(request.checkpoint)


def _checksum(layout: LayerLayout, checksums: Mapping[str, tuple[int, ...]], folder: Path) -> int:
    """The CRC-32 of a layer file, from what was summed as it was written."""
    parts: dict[int, tuple[int, int]] = {}
    written: list[StoredForm | Settling] = [*layout.forms, *layout.joins, *layout.settles]
    for form in written:
        if form.source.name not in checksums:  # a crash came between the file's name and the journal's line
            return crc32_of_file(folder / layout.file_name)
        for part, crc in zip(form.parts, checksums[form.source.name], strict=True):
            if part.nbytes and part.name in layout.places:  # else it was in the scratch file
                parts[layout.places[part.name]] = (crc, part.nbytes)
    for form in layout.fixed:
        for name, content in constants(form).items():
            parts[layout.places[name]] = (zlib.crc32(content), len(content))
    pieces = [(zlib.crc32(layout.header), layout.header_bytes), *(parts[at] for at in sorted(parts))]
    return combine_all(pieces)


def clear_away(folder: Path) -> None:
    """Remove what only the making of a whole split directory needed: its journal and fetched shards.

    The directory must have its manifest. A crash may have come between that and this.
    """
    journal_path = folder / JOURNAL_NAME
    if journal_path.exists():  # asked first: a finished split may lie on a read-only mount
        durable.sync_folder(folder)  # the manifest's name: a process that died may have left it uncertain
        durable.remove(journal_path)
    durable.remove_folder(folder / STAGING_NAME)


def discard_original(checkpoint: Checkpoint) -> None:
    """Remove the shards that are left of a checkpoint, and what its kind counts as the rest (`delete_original`).

    The caller must have made sure that the split directory is whole and was made from this checkpoint.
    """
    disposals = [checkpoint.release(shard).disposal for shard in checkpoint.index.shards]
    if kept := disposals.count(Disposal.READ_ONLY):
        logger.warning("%d shards of %s cannot be deleted: their folder is read-only.", kept, checkpoint.label)
    for path in checkpoint.discard_rest():
        logger.info("Deleted %s.", path)
