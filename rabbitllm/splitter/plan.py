"""The plan of a split, from headers alone: the layers and shards of each tensor, and its offset in a layer file.

From top to bottom: which layers and shards a checkpoint's tensors belong to, the plan with the layout of every layer
file, the runs of bytes that are moved from a shard and their order, and the future files as the engine reads them.
Pure. The peak disk use is in `disk_budget.py`.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rabbitllm.base.collection import uncollected
from rabbitllm.base.grouping import grouped
from rabbitllm.base.options import ShardPolicy
from rabbitllm.checkpoints.checkpoint import FileStat, ShardMetadata, SourceIdentity, has_digest
from rabbitllm.checkpoints.index import CheckpointIndex, dtype_without_config, index_of
from rabbitllm.checkpoints.naming import LayerName, layer_order
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.safetensors_file import MappedFile
from rabbitllm.formats.tensor_spec import DTYPES, LeftOut, TensorSpec
from rabbitllm.quant.schemes import DOUBLE, STORED, Quantized
from rabbitllm.splitter._presets import bits_by_tensor
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.layer_file import FORMAT_VERSION, LayerLayout, join, lay_out
from rabbitllm.store.layer_store import StoredTensor
from rabbitllm.store.manifest import AUTO, BitAllocation, LayerRecord
from rabbitllm.store.stored_form import StoredForm, form_in, stored_form

MAX_GAP_BYTES = 16 << 20
"""Limit of the bytes between tensors: enough for a directory and a pickle of 30,000 tensors."""


def has_small_gaps(tensors: Iterable[TensorSpec], size: int) -> bool:
    """Whether a file of `size` bytes consists of these tensors in order, and little else."""
    tensors = tuple(tensors)
    lengths = [end - begin for begin, end in _gaps(tensors, size)]
    is_plain = all(tensor.strides is None for tensor in tensors)
    return is_plain and min(lengths) >= 0 and sum(lengths) <= MAX_GAP_BYTES


def _gaps(tensors: Iterable[TensorSpec], size: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each gap in a shard of `size` bytes; its length is negative where tensors overlap."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        yield end, tensor.offset
        end = tensor.offset + tensor.nbytes
    yield end, size


class Gaps:
    """The bytes of a shard that belong to none of its tensors.

    Args:
        tensors: tensors for which `has_small_gaps` is true.
        size: of the shard, bytes.
    """

    def __init__(self, tensors: Iterable[TensorSpec], size: int) -> None:
        gaps = [(begin, end) for begin, end in _gaps(tensors, size) if begin < end]
        self._begins, self._ends = [begin for begin, _ in gaps], [end for _, end in gaps]
        self._kept = [bytearray() for _ in gaps]

    def watching(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the same chunks, all bytes of the shard in order, keeping the bytes in gaps."""
        position = gap = 0
        for chunk in chunks:
            end = position + len(chunk)
            while gap < len(self._begins) and self._begins[gap] < end:
                begin = max(self._begins[gap], position)
                self._kept[gap] += chunk[begin - position : min(self._ends[gap], end) - position]
                if self._ends[gap] > end:
                    break
                gap += 1
            position = end
            yield chunk

    def read_at(self, offset: int, length: int) -> bytes:
        """Return the bytes of a range within a gap; fewer, or none, if it is not within one."""
        gap = bisect_right(self._begins, offset) - 1
        if gap < 0:
            return b""
        start = offset - self._begins[gap]
        return bytes(self._kept[gap][start : start + length])


@dataclass(frozen=True, slots=True)
class LayerMap:
    """The distribution of a checkpoint's tensors over layers and shards.

    Attributes:
        layers: layer id -> its name, in the order of a forward pass.
        layer_to_tensors: layer id -> its tensors, in the index's order.
        layer_to_shards: layer id -> the shards that hold a tensor of it.
        shard_to_layers: shard -> the layers it holds a tensor of.
    """

    layers: Mapping[str, LayerName]
    layer_to_tensors: Mapping[str, tuple[str, ...]]
    layer_to_shards: Mapping[str, frozenset[str]]
    shard_to_layers: Mapping[str, tuple[str, ...]]

    def completed_by(self, shard: str, processed: Iterable[str]) -> tuple[str, ...]:
        """Return the layers that have all their tensors once `shard` joins the `processed` ones.

        Only the layers of the shard are checked, each with one set comparison.
        """
        done = {*processed, shard}
        return tuple(layer for layer in self.shard_to_layers.get(shard, ()) if self.layer_to_shards[layer] <= done)


def build_layer_map(weight_map: Mapping[str, str], assigned: Mapping[str, LayerName]) -> LayerMap:
    """Make the maps that the loop needs from tensor -> shard and tensor -> layer.

    Args:
        weight_map: tensor name -> shard name, as the index has it.
        assigned: tensor name -> layer (`assign_layers`).
    """
    names: dict[str, LayerName] = {}
    tensors: dict[str, list[str]] = {}
    shards: dict[str, set[str]] = {}
    touched: dict[str, dict[str, None]] = {}
    for tensor, shard in weight_map.items():
        layer = assigned[tensor]
        names[layer.id] = layer
        tensors.setdefault(layer.id, []).append(tensor)
        shards.setdefault(layer.id, set()).add(shard)
        touched.setdefault(shard, {})[layer.id] = None
    order = sorted(names, key=lambda layer: layer_order(names[layer].stem))
    return LayerMap(
        {layer: names[layer] for layer in order},
        {layer: tuple(tensors[layer]) for layer in order},
        {layer: frozenset(shards[layer]) for layer in order},
        {shard: tuple(layers) for shard, layers in touched.items()},
    )


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
        left_out: what its file has that is in no layer file.
        metadata: texts in its header besides the format, of a shard that is not on the hub.
    """

    name: str
    size: int
    fingerprint: str
    tensors: tuple[TensorSpec, ...]
    staged: bool
    header_first: bool = True
    stat: FileStat | None = None
    expected_crc32: int | None = None
    left_out: tuple[LeftOut, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Whether it can be used while it arrives: its header is first, or is in gaps, which are kept; and no run of
        bytes that has to be read at once is longer than a chunk."""
        return (self.header_first or has_small_gaps(self.tensors, self.size)) and all(map(_fits_a_chunk, self.tensors))

    def is_kept(self, source: SourceIdentity, policy: ShardPolicy) -> bool:
        """Whether it is kept although the policy deletes shards: its file has what is nowhere else.

        What the files a repository have is on the hub.
        """
        return bool(self.left_out) and source.kind == "local" and not self.staged and not policy.deletes_all

    @property
    def needs_checksum(self) -> bool:
        """Whether its checksum must be recorded for a later comparison: it is local and has no digest."""
        return not self.staged and not has_digest(self.fingerprint)


def _fits_a_chunk(spec: TensorSpec) -> bool:
    if spec.blocks is None:
        return True
    begin, end = spec.span(0, spec.granule)
    return max(end - begin, spec.granule * DTYPES[spec.dtype].bits // 8) <= CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The complete plan of a split.

    Attributes:
        source: identity of the source.
        compression: None, one for all tensors, a preset, or "auto".
        shards: in processing order.
        layer_map: the layers and shards of all tensors.
        layouts: layer id -> its file.
        format_version: of the layer files.
        chosen: the compressions of tensors, if they are not all the same.
        dtype: of the model, if neither its config nor its layer files show it (`index.dtype_without_config`).
        heads: tensors for multi-token prediction, which have 8 bits at least; none if the split was begun without that.
        kept: of a repair, the layers that are in none of these maps: some of their shards are not there. Those shards
            have no tensors here.
    """

    source: SourceIdentity
    compression: str | None
    shards: tuple[PlannedShard, ...]
    layer_map: LayerMap
    layouts: Mapping[str, LayerLayout]
    format_version: int = FORMAT_VERSION
    chosen: BitAllocation | None = None
    dtype: str | None = None
    heads: frozenset[str] = frozenset()
    kept: tuple[LayerRecord, ...] = ()

    def stored_form(self, spec: TensorSpec) -> StoredForm:
        """Return the form in which a whole tensor is stored."""
        return stored_form(spec, _scheme_of(spec, self.compression, self.chosen))

    @property
    def index(self) -> CheckpointIndex:
        """The index of the source."""
        return index_of({tensor.name: shard.name for shard in self.shards for tensor in shard.tensors})

    @property
    def output_bytes(self) -> int:
        """Bytes of all layer files."""
        return sum(layout.size for layout in self.layouts.values())

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of the model; one that is cut into pieces appears once, as a whole."""
        wholes = (tensor.whole for shard in self.shards for tensor in shard.tensors)
        return tuple({tensor.name: tensor for tensor in wholes}.values())

    @property
    def source_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def unstreamable(self) -> tuple[str, ...]:
        """The fetched shards that must be complete on the disk before they are used."""
        return tuple(shard.name for shard in self.shards if shard.staged and not shard.streams)


@uncollected()
def tensors_by_shard(index: CheckpointIndex, metadata: Iterable[ShardMetadata]) -> dict[str, tuple[TensorSpec, ...]]:
    """Return the tensors that each shard contributes, from index and headers together.

    The index decides between two shards that hold the same tensor. A tensor that is only in headers is included too,
    as in transformers: from the last file that has it, by the order of names.

    Raises:
        InvalidIndexError: the index assigns a tensor to a shard that does not have it.
    """
    metadata = sorted(metadata, key=lambda shard: shard.name)
    last = {tensor.name: shard.name for shard in metadata for tensor in shard.header.tensors}
    owner = {**last, **index.weight_map}
    chosen: dict[str, tuple[TensorSpec, ...]] = {}
    promised = grouped((holder, name) for name, holder in index.weight_map.items())
    for shard in metadata:
        chosen[shard.name] = tuple(t for t in shard.header.tensors if owner[t.name] == shard.name)
        absent = sorted({*promised.get(shard.name, ())} - {t.name for t in chosen[shard.name]})
        if absent:
            raise InvalidIndexError(
                f"The index puts {absent[0]!r}{f' and {len(absent) - 1} more' if len(absent) > 1 else ''} into "
                f"{shard.name}, whose header does not have it.",
                "Download the index and that shard again: they are of different versions.",
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
    dtype: str | None = None,
    heads: frozenset[str] = frozenset(),
    kept: tuple[LayerRecord, ...] = (),
) -> SplitPlan:
    """Lay out every layer file from the shards' tensors and the layer each belongs to.

    Without `chosen`, "auto" stores all tensors unchanged. For `dtype`, `heads` and `kept` see `SplitPlan`; `dtype` is
    None if headers with all tensors do not say more than the shards.
    """
    elsewhere = {tensor for record in kept for tensor in record.tensors}
    weight_map = {
        tensor.name: shard.name for shard in shards for tensor in shard.tensors if tensor.name not in elsewhere
    }
    layer_map = build_layer_map(weight_map, assigned)
    if dtype is None and not kept:  # which not all tensors would tell
        dtype = dtype_without_config(index_of({}), {shard.name: shard.tensors for shard in shards})
    without_files = SplitPlan(
        source, compression, shards, layer_map, {}, format_version, dtype=dtype, heads=heads, kept=kept
    )
    return recompressed(without_files, compression, chosen)


def _scheme_of(spec: TensorSpec, compression: str | None, chosen: BitAllocation | None) -> str | None:
    """Return the scheme for a whole tensor, if compression touches it."""
    return compression if chosen is None else chosen.schemes.get(spec.name)


def lay_out_layer(
    name: LayerName, specs: Iterable[TensorSpec], compression: str | None, chosen: BitAllocation | None, version: int
) -> LayerLayout:
    """Lay out one layer's file; `specs` are its tensors in the plan's order, `version` is the format's."""
    whole: list[StoredForm] = []
    cut: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        if spec.piece is None:
            whole.append(stored_form(spec, _scheme_of(spec, compression, chosen)))
        else:
            cut.setdefault(spec.piece.of, []).append(spec)
    joined = [join(pieces, _scheme_of(pieces[0].whole, compression, chosen)) for pieces in cut.values()]
    return lay_out(name, whole, joined, version)


@uncollected()
def recompressed(plan: SplitPlan, compression: str | None, chosen: BitAllocation | None = None) -> SplitPlan:
    """Return the same split at another compression, or with another choice."""
    if compression == AUTO:
        chosen = chosen or BitAllocation({})
        if plan.compression is None and not chosen.schemes:  # all are unchanged
            return dataclasses.replace(plan, compression=AUTO, chosen=chosen)
    specs = {tensor.name: tensor for shard in plan.shards for tensor in shard.tensors}
    if chosen is None and compression is not None:
        schemes = bits_by_tensor(compression, [spec.whole for spec in specs.values()], plan.heads)
        chosen = BitAllocation(schemes) if schemes else None
    tensors = plan.layer_map.layer_to_tensors
    layouts = {
        layer: lay_out_layer(name, map(specs.__getitem__, tensors[layer]), compression, chosen, plan.format_version)
        for layer, name in plan.layer_map.layers.items()
    }
    return dataclasses.replace(plan, compression=compression, layouts=layouts, chosen=chosen)


CHUNK_BYTES = 4 << 20
"""Source bytes that are read, quantized and written at a time by one thread."""


@dataclass(frozen=True, slots=True)
class Move:
    """One run of bytes of a shard and its target.

    Attributes:
        form: the tensor.
        first: index of its first element in this run, in row-major order; of a tensor that is stored unchanged, of its
            first byte.
        elements: number of elements; or bytes.
        offset: offset of the run in the shard, bytes; of a tensor with strides or blocks, the offset it would have
            without.
        nbytes: its length, bytes, of the tensor's dtype.
    """

    layer: str
    form: StoredForm
    first: int
    elements: int
    offset: int
    nbytes: int

    @property
    def begin(self) -> int:
        """The offset of this run in the tensor, in row-major order, bytes."""
        return self.offset - self.form.source.offset

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the shard that contain it, from the start of the shard."""
        if self.form.source.blocks is None:
            return self.offset, self.offset + self.nbytes
        width = DTYPES[self.form.source.dtype].bits // 8
        return self.form.source.span(self.begin // width, self.nbytes // width)


def moves(plan: SplitPlan, shard: str, layers: Iterable[str]) -> Iterator[Move]:
    """Yield the runs of a shard for `layers`, in the shard's own order, each at most `CHUNK_BYTES` long.

    A run that is quantized is a whole number of blocks, unless it ends its tensor. A tensor without elements yields one
    empty run, so that its constants are still written.
    """
    layer_ids = set(layers)
    return moves_of(
        (layer, form)
        for layer in plan.layer_map.shard_to_layers.get(shard, ())
        if layer in layer_ids
        for form in plan.layouts[layer].forms
        if form.source.file == shard
    )


def moves_of(forms: Iterable[tuple[str, StoredForm]]) -> Iterator[Move]:
    """Yield the runs of some tensors of one file, each given with its layer; see `moves`."""
    for layer, form in sorted(forms, key=lambda item: item[1].source.offset):
        spec = form.source
        if form.scheme is None:  # plain bytes: elements do not matter, and may be smaller than a byte
            step = CHUNK_BYTES if spec.blocks is None else _step(spec, 1) * DTYPES[spec.dtype].bits // 8
            for begin in range(0, max(spec.nbytes, 1), step):
                length = min(step, spec.nbytes - begin)
                yield Move(layer, form, begin, length, spec.offset + begin, length)
            continue
        # blocks that are kept move by whole rows
        block = spec.shape[-1] if form.keeps_blocks else STORED[form.scheme].block
        width, step = DTYPES[spec.dtype].bits // 8, _step(spec, block)
        for first in range(0, spec.elements, step):
            count = min(step, spec.elements - first)
            yield Move(layer, form, first, count, spec.offset + first * width, count * width)


def _step(spec: TensorSpec, block: int) -> int:
    """Return the elements of a run: whole quantization blocks, and whole granules of the shard if they fit a chunk."""
    width = DTYPES[spec.dtype].bits / 8
    if spec.blocks is not None:
        width = max(width, spec.blocks.kind.nbytes / spec.blocks.kind.elements)
    limit = int(CHUNK_BYTES / width)
    granule = math.lcm(block, spec.granule) if spec.blocks is not None else block
    unit = granule if granule <= limit else block
    return limit // unit * unit


class PlannedFiles:
    """The files that `LayerStore` will find when a plan is carried out: every tensor and its offset, without data.

    The engine estimates from them what a model will take.

    Attributes:
        folder: the future split directory.
        tensors: checkpoint name -> its future file and offsets.
        dtype: see `SplitPlan`.
        checks: None, since there is nothing to read.
    """

    is_split = False
    checks: LayerChecks | None = None

    @uncollected()
    def __init__(self, plan: SplitPlan, folder: Path) -> None:
        self.folder = folder
        self.label = plan.source.name
        self.dtype = plan.dtype
        self.tensors: dict[str, StoredTensor] = {}
        for layout in plan.layouts.values():
            file = layout.file_name
            for form in _whole_forms(layout, plan):
                self.tensors[form.source.name] = _planned_tensor(form, layout, file)

    def mapped(self, file: str) -> MappedFile:
        """Always raise, since no file exists.

        Raises:
            FileNotFoundError: always.
        """
        raise FileNotFoundError(f"{self.path(file)} is only planned")

    def path(self, file: str) -> Path:
        """Return the future path of a file."""
        return self.folder / file


def _whole_forms(layout: LayerLayout, plan: SplitPlan) -> Iterator[StoredForm]:
    """Yield the tensors of a layer as its file holds them; one that is cut into pieces once."""
    cut: set[str] = set()
    for form in layout.forms:
        if form.source.piece is None:
            yield form_in(form.source, form.scheme)
        elif form.source.piece.of not in cut:
            cut.add(form.source.piece.of)
            yield plan.stored_form(form.source.whole)


def _planned_tensor(form: StoredForm, layout: LayerLayout, file: str) -> StoredTensor:
    offsets = layout.offsets
    parts = tuple([TensorSpec(*part, file, offsets[part.name], part.nbytes) for part in form.parts])
    if form.scheme is None:
        return StoredTensor(form.source.name, parts, None)
    dtype = (
        None if form.scheme == "8bit" or STORED[form.scheme].block_bytes else DTYPES[form.source.dtype].torch_name
    )  # 8bit does not store it
    mean = 0.0 if form.scheme == DOUBLE else None  # the scales do not exist yet
    return StoredTensor(form.source.name, parts, Quantized(form.scheme, form.source.shape, dtype, mean))
