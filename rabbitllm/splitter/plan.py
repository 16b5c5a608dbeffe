"""What a split will do, from headers alone: where every byte goes, and the most disk it will take.

Pure: nothing here writes, or asks what the disk has. That is `space.py`'s.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rabbitllm.checkpoints.checkpoint import ShardFacts, SourceIdentity
from rabbitllm.checkpoints.index import CheckpointIndex
from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.collection import uncollected
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec
from rabbitllm.layers.chosen import AUTO, Chosen
from rabbitllm.layers.compression import BLOCKS, StoredForm, stored_form
from rabbitllm.layers.layer_file import LayerLayout, lay_out
from rabbitllm.layers.order import FORMAT_VERSION
from rabbitllm.layers.pieces import join
from rabbitllm.splitter.gaps import can_be_kept
from rabbitllm.splitter.layer_map import LayerMap, build_layer_map

CHUNK_BYTES = 4 << 20
"""Source bytes that are read, quantised and written at a time by one thread."""
BLOCK_BYTES = 4096
"""What files occupy is a multiple of this."""
RECORDED_NAMES = 5
"""How often journal and manifest together write out a tensor's name."""
CHOSEN_NAMES = 2
"""How often they do once more where each tensor has a compression of its own."""
RECORD_BYTES = 300
"""What they write of a tensor beside its name: dtype, shape, place, checksums, JSON."""
SHARD_RECORD_BYTES = 1024
"""What they write of a shard, and once of the whole."""


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One shard of the plan.

    Attributes:
        name, size, fingerprint: as in `ShardFacts`.
        tensors: those that this shard gives to layer files.
        staged: fetched by us, so it costs disk of ours while it is used.
        header_first: its header stands before its data.
    """

    name: str
    size: int
    fingerprint: str
    tensors: tuple[TensorSpec, ...]
    staged: bool
    header_first: bool = True

    @property
    def streams(self) -> bool:
        """Whether it can be used as it comes: its header is seen first, or is confirmed by what is kept until then."""
        return self.header_first or can_be_kept(self.tensors, self.size)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A whole split, decided.

    Attributes:
        source: what is split.
        compression: None, one that all tensors have, or "auto".
        shards: in the order they are taken.
        layer_map: which layer is in which shards.
        layouts: layer id -> its file.
        format_version: of the layer files.
        chosen: what each tensor has at "auto"; None at every other compression.
    """

    source: SourceIdentity
    compression: str | None
    shards: tuple[PlannedShard, ...]
    layer_map: LayerMap
    layouts: Mapping[str, LayerLayout]
    format_version: int = FORMAT_VERSION
    chosen: Chosen | None = None

    def stored_form(self, spec: TensorSpec) -> StoredForm:
        """How a whole tensor is stored."""
        return stored_form(spec, _scheme_of(spec, self.compression, self.chosen))

    @property
    def output_bytes(self) -> int:
        """Of all layer files."""
        return sum(layout.size for layout in self.layouts.values())

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Of the model: those that are cut into pieces once, as a whole."""
        found = (tensor.whole for shard in self.shards for tensor in shard.tensors)
        return tuple({tensor.name: tensor for tensor in found}.values())

    @property
    def source_bytes(self) -> int:
        """Of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def unstreamable(self) -> tuple[str, ...]:
        """The shards that are fetched and have to be whole on the disk before they are used."""
        return tuple(shard.name for shard in self.shards if shard.staged and not shard.streams)


@uncollected()
def tensors_by_shard(index: CheckpointIndex, facts: Iterable[ShardFacts]) -> dict[str, tuple[TensorSpec, ...]]:
    """The tensors that each shard contributes, by index and headers together.

    The index decides between two shards that hold the same tensor. A tensor that only a header knows is taken too,
    as transformers does.

    Raises:
        InvalidIndexError: the index puts a tensor into a shard that does not have it.
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
    chosen: Chosen | None = None,
) -> SplitPlan:
    """Fix every layer file from the shards' tensors and the layer each belongs to.

    At "auto" `chosen` says what each tensor has; without it all are stored as they are.
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
    chosen: Chosen | None,
) -> SplitPlan:
    if compression == AUTO and chosen is None:
        chosen = Chosen({})
    specs = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    layouts = {
        layer: _layout(
            name, map(specs.__getitem__, layer_map.layer_to_tensors[layer]), compression, chosen, format_version
        )
        for layer, name in layer_map.layers.items()
    }
    return SplitPlan(source, compression, shards, layer_map, layouts, format_version, chosen)


def _scheme_of(spec: TensorSpec, compression: str | None, chosen: Chosen | None) -> str | None:
    """What a whole tensor is to be stored at, where compression touches it."""
    return compression if chosen is None else chosen.schemes.get(spec.name)


def _layout(
    name: LayerName, specs: Iterable[TensorSpec], compression: str | None, chosen: Chosen | None, version: int
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


class Arrival(enum.Enum):
    """How shards that are fetched reach their layer files."""

    FILE_AHEAD = "file, the next one fetched meanwhile"
    FILE = "file, one at a time"
    STREAM = "stream, never a file"


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes on disk over a split.

    Attributes:
        created: the most that the split directory occupies at any moment, layer files, staged shards and the small
            files beside them.
        added: the most by which the disk is fuller than now; less than `created` where shards of the source are
            deleted on the way, or an earlier run has created some of it.
    """

    created: int
    added: int


def disk_use(
    plan: SplitPlan,
    *,
    arrival: Arrival = Arrival.FILE,
    deletes_shards: bool,
    small_files: int = 0,
    used: frozenset[str] = frozenset(),
    in_use: int = 0,
) -> DiskUse:
    """The peak over the steps of the plan.

    Args:
        plan: the split.
        arrival: of the shards that are fetched.
        deletes_shards: whether a local source's shards are deleted when used up.
        small_files: bytes of what lies beside the layer files: config, tokenizer and the like, journal, manifest.
        used: shards that an earlier run used up.
        in_use: bytes that the split directory occupies already.
    """
    written = small_files
    freed = created = added = 0
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
        there = _staged_bytes(shard, following[shard.name], arrival)
        created = max(created, most + there)
        added = max(added, most + there - freed - in_use)
        if deletes_shards and not shard.staged:
            freed += shard.size
    return DiskUse(max(created, written), added)


def _joining(plan: SplitPlan, shard: PlannedShard, processed: set[str], written: int) -> tuple[int, int]:
    """The most that is written at a time while the layers that this shard completes are finished, and what is then.

    Those whose scales alone have waited are finished together, those with pieces one after the other.
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


def scratch_slack(layout: LayerLayout) -> int:
    """Of blocks that are begun: where pieces end in the scratch file, and around what the layer file lacks as yet."""
    return 3 * BLOCK_BYTES * (len(layout.joins) + 1) if layout.scratch_bytes else 0


def _staged_bytes(shard: PlannedShard, following: PlannedShard | None, arrival: Arrival) -> int:
    """Of fetched shards that lie on the disk while `shard` is used."""
    if arrival is Arrival.STREAM:
        return 0
    there = [shard, following] if arrival is Arrival.FILE_AHEAD else [shard]
    return sum(on_disk(one.size) for one in there if one is not None and one.staged)


def on_disk(nbytes: int) -> int:
    """What a file of this length occupies, in whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def own_records_bytes(plan: SplitPlan) -> int:
    """What journal and manifest may grow to, from the names that they list, bytes."""
    names = sum(len(tensor.name) for shard in plan.shards for tensor in shard.tensors)
    tensors = sum(len(shard.tensors) for shard in plan.shards)
    times = RECORDED_NAMES if plan.chosen is None else RECORDED_NAMES + CHOSEN_NAMES
    return on_disk(times * names + RECORD_BYTES * tensors + SHARD_RECORD_BYTES * (len(plan.shards) + 1))


def _bytes_from(plan: SplitPlan, shard: PlannedShard, seen: set[str]) -> int:
    """What layer files grow by while a shard is used; a file's header and last block count at its first tensor."""
    total = 0
    for layer in plan.layer_map.shard_to_layers.get(shard.name, ()):
        layout = plan.layouts[layer]
        if layer not in seen:
            seen.add(layer)
            total += layout.header_bytes + BLOCK_BYTES + scratch_slack(layout)
        total += layout.shard_bytes[shard.name]
    return total


@uncollected()
def recompressed(plan: SplitPlan, compression: str | None, chosen: Chosen | None = None) -> SplitPlan:
    """The same split at another compression, or at "auto" with another choice."""
    return _plan_with(plan.source, plan.shards, plan.layer_map, compression, plan.format_version, chosen)


def gib(nbytes: int) -> str:
    """Bytes as people read them: GiB from one GiB on, else MiB."""
    return f"{nbytes / 2**30:.2f} GiB" if abs(nbytes) >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


@dataclass(frozen=True, slots=True)
class Move:
    """One run of bytes of a shard and where it goes.

    Attributes:
        form: the tensor.
        first: its first element in this run, in row-major order; of a tensor that is stored as it is, its first byte.
        elements: how many; or bytes.
        offset: where they start in the shard, bytes; of a tensor with strides, where they would without.
        nbytes: their length, bytes.
    """

    layer: str
    form: StoredForm
    first: int
    elements: int
    offset: int
    nbytes: int

    @property
    def begin(self) -> int:
        """Bytes of the tensor, in row-major order, before this run."""
        return self.offset - self.form.source.offset


def moves(plan: SplitPlan, shard: str, layers: Iterable[str]) -> Iterator[Move]:
    """The runs of a shard that go to `layers`, in the shard's own order, each at most `CHUNK_BYTES` long.

    A run that is quantised is a whole number of blocks, unless it ends its tensor. A tensor without elements yields
    one empty run, so that its constants are written all the same.
    """
    wanted = set(layers)
    return moves_of(
        (layer, form)
        for layer in plan.layer_map.shard_to_layers.get(shard, ())
        if layer in wanted
        for form in plan.layouts[layer].forms
        if form.source.file == shard
    )


def moves_of(forms: Iterable[tuple[str, StoredForm]]) -> Iterator[Move]:
    """The runs of some tensors of one file, each given with its layer; see `moves`."""
    for layer, form in sorted(forms, key=lambda item: item[1].source.offset):
        spec = form.source
        if form.scheme is None:  # plain bytes: elements do not matter, and may be smaller than a byte
            for at in range(0, max(spec.nbytes, 1), CHUNK_BYTES):
                length = min(CHUNK_BYTES, spec.nbytes - at)
                yield Move(layer, form, at, length, spec.offset + at, length)
            continue
        width, block = DTYPES[spec.dtype].bits // 8, BLOCKS[form.scheme]
        step = CHUNK_BYTES // width // block * block
        for first in range(0, spec.elements, step):
            count = min(step, spec.elements - first)
            yield Move(layer, form, first, count, spec.offset + first * width, count * width)
