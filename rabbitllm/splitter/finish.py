"""The end of a split: writes the manifest and removes files that only the split needed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from pathlib import Path

from rabbitllm.checkpoints.checkpoint import Checkpoint, Disposal
from rabbitllm.checkpoints.index import natural_key
from rabbitllm.quant.compression import Settling, StoredForm, constants
from rabbitllm.splitter.request import SplitRequest
from rabbitllm.splitter.sums import PartSums, TensorSums, runs_of, sums_of, whole_sum
from rabbitllm.splitter.work import SplitWork
from rabbitllm.storage import durable
from rabbitllm.store.checksums import block_starts, block_sums, combine_all, sums_of_file
from rabbitllm.store.layer_file import LayerLayout
from rabbitllm.store.manifest import JOURNAL_NAME, LayerRecord, Manifest, read_manifest, write_manifest

logger = logging.getLogger(__name__)

STAGING_NAME = ".staging"
"""Folder inside the split directory for fetched shards; removed when the split is complete."""


def manifest_of(
    work: SplitWork, quantizer: str | None, checksums: TensorSums, source_checksums: Mapping[str, int]
) -> Manifest:
    """Return the manifest of a directory all of whose layer files are complete.

    Args:
        work: the split.
        quantizer: as the manifest names it.
        checksums: of every tensor that was summed as it was written.
        source_checksums: shard -> `source_check.source_crc32`.
    """
    plan = work.plan
    records = tuple(
        LayerRecord(
            layer,
            layout.layer.stem,
            layout.file_name,
            layout.size,
            layout.tensors,
            crc,
            tuple(sorted(plan.layer_map.layer_to_shards[layer], key=natural_key)),
            blocks,
        )
        for layer, layout in plan.layouts.items()
        for crc, blocks in [_checksums(layout, checksums, work.folder)]
    )
    ordered = {s.name: source_checksums[s.name] for s in plan.shards if s.name in source_checksums}
    return Manifest(plan.source, plan.compression, quantizer, records, plan.format_version, plan.chosen, ordered)


def finish(request: SplitRequest, manifest: Manifest) -> None:
    """Write the manifest, then remove files that only the split needed."""
    if read_manifest(request.folder) is None:
        write_manifest(request.folder, manifest)
    clear_away(request.folder)
    if request.options.delete_original:
        discard_original(request.checkpoint)


def _checksums(layout: LayerLayout, known: TensorSums, folder: Path) -> tuple[int, bytes | None]:
    """Return the CRC-32 of a layer file and of each of its blocks, from the sums taken as it was written."""
    parts = ((layout.places[part.name], part.nbytes) for part in layout.parts)
    starts, path = block_starts(layout.size, layout.header_bytes, parts), folder / layout.file_name
    written = _written(layout, known)
    if written is None:  # a crash came between the rename of the file and the journal's line
        return sums_of_file(path, starts)
    crc = combine_all((whole_sum(sums), nbytes) for _, nbytes, sums in written)
    runs = [runs_of(sums, at, nbytes) for at, nbytes, sums in written]
    if None not in runs:
        return crc, block_sums(itertools.chain.from_iterable(filter(None, runs)), starts)
    found, blocks = sums_of_file(path, starts)  # the journal was begun before blocks had checksums
    return crc, blocks if found == crc else None  # on a mismatch the file is damaged, as its checksum will show


def _written(layout: LayerLayout, known: TensorSums) -> list[tuple[int, int, PartSums]] | None:
    """Return offset, bytes and sums of all parts of a layer file, in its order; None if some of them are unknown."""
    found: dict[int, tuple[int, PartSums]] = {0: (layout.header_bytes, sums_of(layout.header, 0))}
    forms: list[StoredForm | Settling] = [*layout.forms, *layout.joins, *layout.settles]
    for form in forms:
        if form.source.name not in known:
            return None
        for part, sums in zip(form.parts, known[form.source.name], strict=True):
            if part.nbytes and part.name in layout.places:  # else it was in the scratch file
                found[layout.places[part.name]] = (part.nbytes, sums)
    for whole in layout.fixed:
        for name, content in constants(whole).items():
            found[layout.places[name]] = (len(content), sums_of(content, layout.places[name]))
    return [(at, *found[at]) for at in sorted(found)]


def clear_away(folder: Path) -> None:
    """Remove files that only the split needed: its journal and fetched shards.

    The directory must have its manifest. Also completes a removal that a crash interrupted.
    """
    journal_path = folder / JOURNAL_NAME
    if journal_path.exists():  # checked first: a finished split may lie on a read-only mount
        durable.sync_folder(folder)  # the manifest's name may not be durable yet if an earlier process died
        durable.remove(journal_path)
    durable.remove_folder(folder / STAGING_NAME)


def discard_original(checkpoint: Checkpoint) -> None:
    """Remove the remaining shards of a checkpoint, and the other files that its kind allows (`delete_original`).

    The caller must have made sure that the split directory is complete and was made from this checkpoint.
    """
    disposals = [checkpoint.release(shard).disposal for shard in checkpoint.index.shards]
    if kept := disposals.count(Disposal.READ_ONLY):
        logger.warning("%d shards of %s cannot be deleted: their folder is read-only.", kept, checkpoint.label)
    for path in checkpoint.discard_rest():
        logger.info("Deleted %s.", path)
