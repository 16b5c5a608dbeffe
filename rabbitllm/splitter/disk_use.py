"""The peak disk use of a split over its steps, from its plan. Pure; `disk_budget` compares it with the free disk."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from rabbitllm.splitter.layer_map import LayerMap
from rabbitllm.splitter.plan import PlannedShard, SplitPlan
from rabbitllm.store import checksums

BLOCK_BYTES = 4096
"""Files occupy a multiple of this."""
RECORDED_NAMES = 5
"""How often journal and manifest together contain a tensor's name."""
CHOSEN_NAMES = 2
"""How often they contain it in addition where each tensor has a compression of its own."""
RECORD_BYTES = 340
"""Bytes that they contain for a tensor in addition to its name: dtype, shape, offset, checksums, JSON."""
BLOCK_RECORD_BYTES = 12
"""Bytes that they contain for a block of a layer file: its checksum, in base64, in each of them."""
SHARD_RECORD_BYTES = 1024
"""Bytes that they contain for a shard, and once for the whole."""
CACHE_RECORD_BYTES = 512
"""Upper bound of one file's entry in the listing of huggingface_hub's cache, bytes."""
NOTHING: Mapping[str, int] = MappingProxyType({})
"""For a split in which the deletion of shards frees nothing."""


class ShardTransfer(enum.Enum):
    """The way that fetched shards reach their layer files."""

    FILE_AHEAD = "file, the next one fetched meanwhile"
    FILE = "file, one at a time"
    STREAM = "stream, never a file"


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes on disk over a split.

    Attributes:
        created: the most that the split directory occupies at any moment: layer files, staged shards and small files.
        added: the most by which disk use exceeds the present one; less than `created` if the deletion of shards frees
            space on this disk, or if an earlier run has created a part.
    """

    created: int
    added: int


class FileSizes(Protocol):
    """The sizes of a layer file that are needed here; see `LayerLayout`."""

    @property
    def header_bytes(self) -> int: ...
    @property
    def shard_bytes(self) -> Mapping[str, int]: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def joined_bytes(self) -> int: ...
    @property
    def joins(self) -> Sequence[object]: ...


class PlanSizes(Protocol):
    """The part of a plan that is needed here; see `SplitPlan`."""

    @property
    def shards(self) -> tuple[PlannedShard, ...]: ...
    @property
    def layer_map(self) -> LayerMap: ...
    @property
    def layouts(self) -> Mapping[str, FileSizes]: ...


def disk_use(
    plan: PlanSizes,
    *,
    shard_transfer: ShardTransfer = ShardTransfer.FILE,
    freed: Mapping[str, int] = NOTHING,
    small_files: int = 0,
    used: frozenset[str] = frozenset(),
    in_use: int = 0,
) -> DiskUse:
    """Return the peak over the steps of the plan.

    Args:
        plan: the split, or just its sizes.
        shard_transfer: the way that fetched shards arrive.
        freed: shard -> bytes that its deletion frees on the disk of the layer files.
        small_files: bytes of the other files in the split directory: config, tokenizer and the like, journal, manifest.
        used: shards that an earlier run used up.
        in_use: bytes that the split directory occupies already.
    """
    written = small_files
    freed_so_far = created = added = 0
    seen: set[str] = set()
    processed: set[str] = set()
    waiting = [shard for shard in plan.shards if shard.name not in used]
    following = dict(zip((shard.name for shard in waiting), [*waiting[1:], None], strict=False))
    for shard in plan.shards:
        written += _bytes_from(plan, shard, seen)
        most, written = _joining(plan, shard, processed, written)
        processed.add(shard.name)
        if shard.name in used:
            continue
        there = _staged_bytes(shard, following[shard.name], shard_transfer)
        created = max(created, most + there)
        added = max(added, most + there - freed_so_far - in_use)
        if not shard.staged:
            freed_so_far += freed.get(shard.name, 0)
    return DiskUse(max(created, written), added)


def _joining(plan: PlanSizes, shard: PlannedShard, processed: set[str], written: int) -> tuple[int, int]:
    """Return the peak of written bytes while the layers that this shard completes are finished, and those after it.

    Layers that waited only for scales are finished together, those with pieces one after the other.
    """
    completed = [plan.layouts[layer] for layer in plan.layer_map.completed_by(shard.name, processed)]
    at_once = [layout for layout in completed if layout.scratch_bytes and not layout.joins]
    one_by_one = [[layout] for layout in completed if layout.joins]
    most = written
    for layouts in (at_once, *one_by_one):
        written += sum(layout.joined_bytes for layout in layouts)
        most = max(most, written)
        written -= sum(layout.scratch_bytes + scratch_slack(layout) for layout in layouts)
    return most, written


def scratch_slack(layout: FileSizes) -> int:
    """Return bytes for begun blocks: at the ends of pieces in the scratch file and around gaps in the layer file."""
    return 3 * BLOCK_BYTES * (len(layout.joins) + 1) if layout.scratch_bytes else 0


def _staged_bytes(shard: PlannedShard, following: PlannedShard | None, shard_transfer: ShardTransfer) -> int:
    """Return the bytes of fetched shards that lie on the disk while `shard` is used."""
    if shard_transfer is ShardTransfer.STREAM:
        return 0
    there = [shard, following] if shard_transfer is ShardTransfer.FILE_AHEAD else [shard]
    return sum(on_disk(one.size) for one in there if one is not None and one.staged)


def on_disk(nbytes: int) -> int:
    """Return the bytes that a file of this length occupies, in whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def in_hub_cache(sizes: Collection[int], listed: int) -> int:
    """Return the bytes that a hub cache needs for files: whole blocks, one block for each link, and its listing.

    Args:
        sizes: sizes of the files; 0 is returned for none.
        listed: number of files in the repository's listing.
    """
    return (
        sum(map(on_disk, sizes)) + BLOCK_BYTES * len(sizes) + on_disk(CACHE_RECORD_BYTES * (1 + listed)) if sizes else 0
    )


def own_records_bytes(plan: SplitPlan) -> int:
    """Return an upper bound of the bytes of journal and manifest, from the names and checksums that they list."""
    names = sum(len(tensor.name) for shard in plan.shards for tensor in shard.tensors)
    tensors = sum(len(shard.tensors) for shard in plan.shards)
    times = RECORDED_NAMES if plan.chosen is None else RECORDED_NAMES + CHOSEN_NAMES
    blocks = sum(tensor.nbytes for shard in plan.shards for tensor in shard.tensors) // checksums.BLOCK_BYTES
    listed = times * names + RECORD_BYTES * tensors + BLOCK_RECORD_BYTES * blocks
    return on_disk(listed + SHARD_RECORD_BYTES * (len(plan.shards) + 1))


def _bytes_from(plan: PlanSizes, shard: PlannedShard, seen: set[str]) -> int:
    """Return the growth of layer files by a shard; a file's header and last block count at its first tensor."""
    total = 0
    for layer in plan.layer_map.shard_to_layers.get(shard.name, ()):
        layout = plan.layouts[layer]
        if layer not in seen:
            seen.add(layer)
            total += layout.header_bytes + BLOCK_BYTES + scratch_slack(layout)
        total += layout.shard_bytes[shard.name]
    return total
