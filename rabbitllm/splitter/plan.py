"""The plan of a split, from headers alone: the shard of each tensor, and its offset in a layer file.

Pure. The runs in which bytes are moved are in `moves.py`, the peak disk use in `disk_use.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rabbitllm.base.collection import uncollected
from rabbitllm.checkpoints.checkpoint import FileStat, ShardMetadata, SourceIdentity, has_digest
from rabbitllm.checkpoints.index import CheckpointIndex
from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.compression import StoredForm, stored_form
from rabbitllm.splitter.gaps import can_be_kept
from rabbitllm.splitter.layer_map import LayerMap, build_layer_map
from rabbitllm.store.layer_file import FORMAT_VERSION, LayerLayout, join, lay_out
from rabbitllm.store.manifest import AUTO, BitAllocation


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One shard of the plan.

    Attributes:
        name, size, fingerprint: as in `ShardMetadata`.
        tensors: the tensors that this shard provides for layer files.
        staged: whether the split fetches it, so that it takes disk while it is used.
        header_first: whether its header comes before its data.
        stat: metadata of its file when the split was begun; None if the shard is not on this machine, or if an earlier
            version of this package began the split.
        expected_crc32: `source_check.source_crc32` of it, if it was read in advance.
    """

    name: str
    size: int
    fingerprint: str
    tensors: tuple[TensorSpec, ...]
    staged: bool
    header_first: bool = True
    stat: FileStat | None = None
    expected_crc32: int | None = None

    @property
    def streams(self) -> bool:
        """Whether it can be used as it arrives: the header is first, or it is verified at the end from kept bytes."""
        return self.header_first or can_be_kept(self.tensors, self.size)

    @property
    def needs_checksum(self) -> bool:
        """Whether its checksum must be recorded for a later comparison: it is local and has no digest."""
        return not self.staged and not has_digest(self.fingerprint)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The complete plan of a split.

    Attributes:
        source: identity of the source.
        compression: None, one for all tensors, or "auto".
        shards: in processing order.
        layer_map: the layers and shards of all tensors.
        layouts: layer id -> its file.
        format_version: of the layer files.
        chosen: the schemes of tensors at "auto"; None at every other compression.
    """

    source: SourceIdentity
    compression: str | None
    shards: tuple[PlannedShard, ...]
    layer_map: LayerMap
    layouts: Mapping[str, LayerLayout]
    format_version: int = FORMAT_VERSION
    chosen: BitAllocation | None = None

    def stored_form(self, spec: TensorSpec) -> StoredForm:
        """Return the form in which a whole tensor is stored."""
        return stored_form(spec, _scheme_of(spec, self.compression, self.chosen))

    @property
    def output_bytes(self) -> int:
        """Bytes of all layer files."""
        return sum(layout.size for layout in self.layouts.values())

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of the model; one that is cut into pieces appears once, as a whole."""
        found = (tensor.whole for shard in self.shards for tensor in shard.tensors)
        return tuple({tensor.name: tensor for tensor in found}.values())

    @property
    def source_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def unstreamable(self) -> tuple[str, ...]:
        """The fetched shards that must be complete on the disk before they are used."""
        return tuple(shard.name for shard in self.shards if shard.staged and not shard.streams)


@uncollected()
def tensors_by_shard(index: CheckpointIndex, facts: Iterable[ShardMetadata]) -> dict[str, tuple[TensorSpec, ...]]:
    """Return the tensors that each shard contributes, from index and headers together.

    The index decides between two shards that hold the same tensor. A tensor that is only in a header is included too,
    as in transformers.

    Raises:
        InvalidIndexError: the index assigns a tensor to a shard that does not have it.
    """
    owner = dict(index.weight_map)
    chosen: dict[str, tuple[TensorSpec, ...]] = {}
    promised: dict[str, set[str]] = {}
    for name, holder in index.weight_map.items():
        promised.setdefault(holder, set()).add(name)
    for shard in facts:
        for tensor in shard.header.tensors:
            owner.setdefault(tensor.name, shard.name)
        chosen[shard.name] = tuple(t for t in shard.header.tensors if owner[t.name] == shard.name)
        absent = sorted(promised.get(shard.name, set()) - {t.name for t in chosen[shard.name]})
        if absent:
            raise InvalidIndexError(
                f"The index puts {absent[0]!r}{f' and {len(absent) - 1} more' if len(absent) > 1 else ''} into "
                f"{shard.name}, whose header does not have it.",
                "Fetch the index and that shard again: they are of different versions.",
            )
    return chosen


@uncollected()
def make_plan(
    source: SourceIdentity,
    shards: tuple[PlannedShard, ...],
    assigned: Mapping[str, LayerName],
    compression: str | None,
    format_version: int = FORMAT_VERSION,
    chosen: BitAllocation | None = None,
) -> SplitPlan:
    """Lay out every layer file from the shards' tensors and the layer each belongs to.

    At "auto" `chosen` has the scheme of each tensor; without it all are stored unchanged.
    """
    weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    layer_map = build_layer_map(weight_map, assigned)
    return _plan_with(source, shards, layer_map, compression, format_version, chosen)


def _plan_with(
    source: SourceIdentity,
    shards: tuple[PlannedShard, ...],
    layer_map: LayerMap,
    compression: str | None,
    format_version: int,
    chosen: BitAllocation | None,
) -> SplitPlan:
    if compression == AUTO and chosen is None:
        chosen = BitAllocation({})
    specs = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    layouts = {
        layer: _layout(
            name, map(specs.__getitem__, layer_map.layer_to_tensors[layer]), compression, chosen, format_version
        )
        for layer, name in layer_map.layers.items()
    }
    return SplitPlan(source, compression, shards, layer_map, layouts, format_version, chosen)


def _scheme_of(spec: TensorSpec, compression: str | None, chosen: BitAllocation | None) -> str | None:
    """Return the scheme for a whole tensor, if compression touches it."""
    return compression if chosen is None else chosen.schemes.get(spec.name)


def _layout(
    name: LayerName, specs: Iterable[TensorSpec], compression: str | None, chosen: BitAllocation | None, version: int
) -> LayerLayout:
    whole: list[StoredForm] = []
    cut: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        if spec.piece is None:
            whole.append(stored_form(spec, _scheme_of(spec, compression, chosen)))
        else:
            cut.setdefault(spec.piece.of, []).append(spec)
    joined = [join(pieces, _scheme_of(pieces[0].whole, compression, chosen)) for pieces in cut.values()]
    return lay_out(name, whole, joined, version)


def layout_at(name: LayerName, specs: Iterable[TensorSpec], schemes: Mapping[str, str], version: int) -> LayerLayout:
    """Lay out one layer's file at "auto".

    Args:
        name: the layer.
        specs: its tensors, in the plan's order.
        schemes: tensor -> its scheme; others are stored unchanged.
        version: of the format.
    """
    return _layout(name, specs, AUTO, BitAllocation(schemes), version)


@uncollected()
def recompressed(plan: SplitPlan, compression: str | None, chosen: BitAllocation | None = None) -> SplitPlan:
    """Return the same split at another compression, or at "auto" with another choice."""
    if plan.compression is None and compression == AUTO and not (chosen and chosen.schemes):  # all are unchanged
        return dataclasses.replace(plan, compression=AUTO, chosen=chosen or BitAllocation({}))
    return _plan_with(plan.source, plan.shards, plan.layer_map, compression, plan.format_version, chosen)
