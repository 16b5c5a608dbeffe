"""What the layer files of a split must hold, by the checksums that were recorded as they were written.

The manifest has these checksums. A resumed split compares the files with them before it deletes a shard: the earlier
run may be long ago, and the shard is then the only sound copy of what was damaged since.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.index import natural_key
from rabbitllm.checkpoints.naming import layer_order
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.splitter.filler import SplitWork
from rabbitllm.splitter.source_check import READ_BYTES, showing_progress
from rabbitllm.splitter.sums import PartSums, TensorSums, part_sums, runs_of, sums_of, whole_sum
from rabbitllm.storage import durable
from rabbitllm.storage.files import PositionalFile
from rabbitllm.store.checksums import block_starts, block_sums, combine_all, crc32, sums_of_file
from rabbitllm.store.layer_file import DONE_SUFFIX, LayerLayout
from rabbitllm.store.manifest import LayerRecord, Manifest
from rabbitllm.store.stored_form import ScalesForm, StoredForm, constants

_Parts = dict[int, tuple[int, PartSums]]
"""Offset in a file -> bytes and sums of the part there."""


def manifest_of(work: SplitWork, checksums: TensorSums, source_checksums: Mapping[str, int]) -> Manifest:
    """Return the manifest of a directory all of whose layer files are complete.

    Args:
        work: the split.
        checksums: of every tensor that was summed as it was written.
        source_checksums: shard -> `source_check.source_crc32`.
    """
    plan = work.plan
    is_doubled = any(shard.left_out for shard in plan.shards)
    shard_of = {spec.name: shard.name for shard in plan.shards for spec in shard.tensors}
    records = tuple(
        LayerRecord(
            layer,
            layout.layer.stem,
            layout.file_name,
            layout.size,
            layout.tensors,
            crc,
            shards,
            blocks,
            owners if len(shards) > 1 and is_doubled and len(owners) == len(layout.tensors) else (),
        )
        for layer, layout in plan.layouts.items()
        for shards in [tuple(sorted(plan.layer_map.layer_to_shards[layer], key=natural_key))]
        for owners in [tuple(shards.index(shard_of[name]) for name in layout.tensors if name in shard_of)]
        for crc, blocks in [_file_checksums(layout, checksums, work)]
    )
    records = tuple(sorted((*records, *plan.kept), key=lambda record: layer_order(record.stem)))
    ordered = {s.name: source_checksums[s.name] for s in plan.shards if s.name in source_checksums}
    fields = plan.source, plan.compression, work.quantizer, records, plan.format_version, plan.chosen, ordered
    return Manifest(*fields, plan.dtype, {shard.name: shard.metadata for shard in plan.shards if shard.metadata})


def _file_checksums(layout: LayerLayout, checksums: TensorSums, work: SplitWork) -> tuple[int, bytes | None]:
    """Return the CRC-32 of a layer file and of each of its blocks, from the sums taken as it was written."""
    parts = ((layout.offsets[part.name], part.nbytes) for part in layout.parts)
    starts, path = block_starts(layout.size, layout.header_bytes, parts), work.folder / layout.file_name
    written = _all_parts(layout, checksums)
    if layout.layer.id in work.sound:
        crc, blocks = work.sound[layout.layer.id]
        if blocks is not None:
            return crc, blocks
    elif written is None:  # a crash came between the rename of the file and the journal's line
        return sums_of_file(path, starts)
    else:
        ordered = [(offset, *written[offset]) for offset in sorted(written)]
        crc = combine_all((whole_sum(sums), nbytes) for _, nbytes, sums in ordered)
        runs = [runs_of(sums, offset, nbytes) for offset, nbytes, sums in ordered]
        if None not in runs:
            return crc, block_sums(itertools.chain.from_iterable(filter(None, runs)), starts)
    file_crc, blocks = sums_of_file(path, starts)  # the split was begun before blocks had checksums
    return crc, blocks if file_crc == crc else None  # on a mismatch the file is damaged, as its checksum will show


def _all_parts(layout: LayerLayout, checksums: TensorSums) -> _Parts | None:
    """Return all parts of a layer file; None if the sums of some are unknown."""
    forms = layout.all_forms
    if any(form.source.name not in checksums for form in forms):
        return None
    parts = _recorded(forms, checksums, layout.offsets)  # others were in the scratch file
    parts[0] = (layout.header_bytes, sums_of(layout.header, 0))
    for whole in layout.fixed:
        for name, content in constants(whole).items():
            parts[layout.offsets[name]] = (len(content), sums_of(content, layout.offsets[name]))
    return parts


def _recorded(forms: Iterable[StoredForm | ScalesForm], checksums: TensorSums, offsets: Mapping[str, int]) -> _Parts:
    """Return the parts of these tensors that lie in the file with these offsets, as far as their sums are known."""
    return {
        offsets[part.name]: (part.nbytes, sums)
        for form in forms
        if form.source.name in checksums
        for part, sums in zip(form.parts, checksums[form.source.name], strict=True)
        if part.nbytes and part.name in offsets
    }


def take_names_back(work: SplitWork) -> None:
    """Make layers unfinished again whose last shard is not recorded as used: a crash came between their names and that.

    Nothing says which bytes they must have, so that shard is moved into them once more. Those that had a scratch file
    stay: their checksums are recorded before they get their names.
    """
    for layer, layout in work.plan.layouts.items():
        file = work.folder / layout.file_name
        part, marker = (file.with_name(file.name + suffix) for suffix in (durable.PART_SUFFIX, DONE_SUFFIX))
        is_recorded = work.plan.layer_map.layer_to_shards[layer] <= work.used or layer in work.sound
        if is_recorded or layout.scratch_bytes or part.exists() or not file.exists():
            continue
        if marker.exists():
            durable.remove(marker)
        durable.rename(file, part)
    durable.sync_folder(work.folder)


def require_as_written(work: SplitWork) -> None:
    """Compare what an earlier run wrote with its checksums, where this run would delete shards that it is made of.

    Pieces that wait in scratch files are always compared: they will be joined to a file with checksums of its own.

    Raises:
        IncompleteSplitError: a file is damaged; nothing was deleted.
    """
    files = [*_to_compare(work)]
    with showing_progress(sum(nbytes for _, parts in files for nbytes, _ in parts.values())) as tell:
        damaged = []
        for path, parts in files:
            if _differs(path, parts):
                damaged.append(path.name)
            tell(path.name, sum(nbytes for nbytes, _ in parts.values()))
    if not damaged:
        return
    source, folder = work.checkpoint.label, work.folder
    remedy = f"If every shard still exists (or is on the hub), delete {folder} and make the same call again. Otherwise "
    if any(layout.scratch_name in damaged for layout in work.plan.layouts.values()):
        remedy += "restore these files; the folder may hold the only copy of some tensors."
    else:
        original = ["--original", source] if work.plan.source.kind == "local" else []
        remedy += (
            "make it without sequential_shard_processing and delete_original (--sequential, --delete-original): it "
            "finishes the split and keeps the shards. Then repair it: "
            f"{shlex.join(['rabbitllm', 'verify', str(folder), '--repair', *original])}"
        )
    raise IncompleteSplitError(
        f"{folder} is damaged: {listed(damaged, 3)} differs from what an earlier run wrote. No shard of {source} was "
        "deleted.",
        remedy,
    )


def _to_compare(work: SplitWork) -> Iterator[tuple[Path, _Parts]]:
    """Yield each file to compare, with the parts of it whose sums are known."""
    plan, policy, checkpoint = work.plan, work.options.shards, work.checkpoint
    deletes = policy.deletes_original and checkpoint.deletable
    local = (shard for shard in plan.shards if deletes and not shard.staged and checkpoint.at_hand(shard.name))
    deletable = {shard.name for shard in local if not shard.is_kept(plan.source, policy)}
    for layer, layout in plan.layouts.items():
        file, shards = work.folder / layout.file_name, plan.layer_map.layer_to_shards[layer]
        if layer in work.sound:
            if shards & deletable:
                yield file, {0: (layout.size, part_sums(work.sound[layer][0]))}
            continue
        part = file.with_name(file.name + durable.PART_SUFFIX)
        is_final = file.exists() and not part.exists()
        used = [form for form in layout.forms if form.source.file in work.used]  # others are written once more
        whole = _all_parts(layout, work.checksums) if is_final else None
        if shards & deletable & (shards if whole else work.used):
            yield file if is_final else part, whole or _recorded(used, work.checksums, layout.offsets)
        if layout.scratch_bytes and not is_final and used:
            yield work.folder / layout.scratch_name, _recorded(used, work.checksums, layout.scratch_offsets)


def _differs(path: Path, parts: _Parts) -> bool:
    if not path.exists():
        return True
    buffer = memoryview(bytearray(READ_BYTES))
    with PositionalFile(path) as file:
        file.advise_sequential()
        for offset, (nbytes, sums) in sorted(parts.items()):
            crc, end = 0, offset + nbytes
            for begin in range(offset, end, READ_BYTES):
                read = buffer[: min(READ_BYTES, end - begin)]
                crc = crc32(read[: file.read_into(read, begin)], crc)
            if crc != whole_sum(sums):
                return True
    return False
