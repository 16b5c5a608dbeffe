"""Sizes of a split at any choice of bits, without its plan: choosing tries many choices, and plans only the final one.

Two layers are alike if their tensors have the same dtypes and shapes, and the same names except for the layer's number,
which must have as many digits. Alike layers with the same bits have files of the same size: a header contains the
names, and tensors are ordered by the part of the name behind the number. So one layer of each kind is laid out at each
combination of bits that is tried, by the plan's own code; only the bytes from each shard are counted per layer. Pure;
free disk is not considered here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rabbitllm.base.collection import uncollected
from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.compression import DOUBLE, NF4_BLOCK, SCALE_BYTES, scheme_of
from rabbitllm.splitter.layer_map import LayerMap
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, layout_at
from rabbitllm.splitter.sensitivity import SchemeGroup
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT

_NUMBER = re.compile("[0-9]")


@dataclass(frozen=True, slots=True)
class EstimatedFile:
    """Sizes of a layer file, as in `LayerLayout`; `joins` are those of an alike layer."""

    header_bytes: int
    size: int
    shard_bytes: Mapping[str, int]
    scratch_bytes: int
    joined_bytes: int
    joins: Sequence[object]


@dataclass(frozen=True, slots=True)
class BitChoice:
    """The sizes of a split at one choice of bits.

    Attributes:
        schemes: the scheme of each group.
        shards, layer_map: as in the plan.
        layouts: layer id -> sizes of its file.
        scales_made: bytes of the scales that are made from quantized ones when the model is used.
    """

    schemes: tuple[str | None, ...]
    shards: tuple[PlannedShard, ...]
    layer_map: LayerMap
    layouts: Mapping[str, EstimatedFile]
    scales_made: int

    @property
    def output_bytes(self) -> int:
        """Bytes of all layer files."""
        return sum(sizes.size for sizes in self.layouts.values())


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, prepared for choosing.

    Attributes:
        name: its id and stem.
        specs: its tensors, ordered by name: for a layer that spans two shards the plan's order differs.
        places: the index of each of them in the plan's order.
        groups: the groups of its tensors, as numbers, in order of appearance.
        kind: equal for alike layers.
    """

    name: LayerName
    specs: Sequence[TensorSpec]
    places: Sequence[int]
    groups: tuple[int, ...]
    kind: int


@dataclass(frozen=True, slots=True)
class _Alike:
    """The sizes that layers of one kind share at the same bits; tensors are numbered as in `_Layer.specs`.

    Attributes:
        sizes: of one of them, with a scratch file that is padded behind the last scales, too.
        given: number of a tensor and bytes that come from its shard.
        filling: number of a tensor -> padding behind its scales in the scratch file, bytes.
    """

    sizes: EstimatedFile
    given: Sequence[tuple[int, int]]
    filling: Mapping[int, int]

    def of(self, layer: _Layer) -> EstimatedFile:
        """Return the sizes of a layer of the kind."""
        shard_bytes: dict[str, int] = {}
        for number, nbytes in self.given:
            shard = layer.specs[number].file
            shard_bytes[shard] = shard_bytes.get(shard, 0) + nbytes
        scratch = self.sizes.scratch_bytes - _behind_last(self.filling, layer)
        return dataclasses.replace(self.sizes, shard_bytes=shard_bytes, scratch_bytes=scratch)


def _behind_last(filling: Mapping[int, int], layer: _Layer) -> int:
    return filling[max(filling, key=layer.places.__getitem__)] if filling else 0


class BitChoices:
    """All choices of bits for a plan's groups.

    Args:
        bare: the plan at "auto" with all tensors uncompressed.
        found: its groups.
    """

    @uncollected()
    def __init__(self, bare: SplitPlan, found: Sequence[SchemeGroup]) -> None:
        self._bare, self._found = bare, found
        of = {spec.name: number for number, group in enumerate(found) for spec in group.tensors}
        self._kinds: dict[Hashable, int] = {}
        specs = {spec.name: spec for shard in bare.shards for spec in shard.tensors}
        self._layers = [
            self._looked_at(name, [specs[tensor] for tensor in bare.layer_map.layer_to_tensors[layer]], of)
            for layer, name in bare.layer_map.layers.items()
        ]
        self._alike: dict[tuple[int, tuple[str | None, ...]], _Alike] = {}
        self._sizes: dict[tuple[str, tuple[str | None, ...]], EstimatedFile] = {}
        self._scales = [_scales_made(group) for group in found]

    @uncollected()
    def at(self, schemes: Sequence[str | None]) -> BitChoice:
        """Return the sizes of a split with a scheme for each group."""
        sizes = {layer.name.id: self._sizes_at(layer, schemes) for layer in self._layers}
        made = sum(nbytes for scheme, nbytes in zip(schemes, self._scales, strict=True) if scheme == DOUBLE)
        return BitChoice(tuple(schemes), self._bare.shards, self._bare.layer_map, sizes, made)

    def schemes_of(self, schemes: Sequence[str | None], numbers: Sequence[int] | None = None) -> dict[str, str]:
        """Return tensor -> its scheme, for the tensors that are compressed.

        Args:
            schemes: the scheme of each group.
            numbers: numbers of the groups to include; None for all.
        """
        return {
            spec.name: scheme
            for number in (range(len(self._found)) if numbers is None else numbers)
            for spec in self._found[number].tensors
            if (scheme := scheme_of(spec, schemes[number])) is not None
        }

    def _looked_at(self, name: LayerName, specs: Sequence[TensorSpec], of: Mapping[str, int]) -> _Layer:
        groups: dict[int, int] = {}
        alike: list[Hashable] = [_NUMBER.sub("0", name.stem)]
        places: Sequence[int] = range(len(specs))
        if not any(spec.piece for spec in specs):  # offsets of pieces in a scratch file depend on more than the last
            places = sorted(places, key=lambda place: _behind(specs[place].name, name.stem))
        specs = [specs[place] for place in places]
        for spec in specs:
            group = of.get(spec.whole.name)
            local = groups.setdefault(group, len(groups)) if group is not None else None
            alike.append((_behind(spec.name, name.stem), spec.dtype, spec.shape, local))
            if (piece := spec.piece) is not None:
                alike.append((_behind(piece.of, name.stem), piece.shape, piece.dim, piece.begin))
        kind = self._kinds.setdefault(tuple(alike), len(self._kinds))
        return _Layer(name, specs, places, tuple(groups), kind)

    def _sizes_at(self, layer: _Layer, schemes: Sequence[str | None]) -> EstimatedFile:
        own = tuple([schemes[number] for number in layer.groups])
        if (found := self._sizes.get((layer.name.id, own))) is None:
            if (alike := self._alike.get((layer.kind, own))) is None:
                alike = self._alike[layer.kind, own] = self._laid_out(layer, schemes)
            found = self._sizes[layer.name.id, own] = alike.of(layer)
        return found

    def _laid_out(self, layer: _Layer, schemes: Sequence[str | None]) -> _Alike:
        chosen = self.schemes_of(schemes, layer.groups)
        layout = layout_at(layer.name, layer.specs, chosen, self._bare.format_version)
        numbers = {spec.name: number for number, spec in enumerate(layer.specs)}
        given = [(numbers[form.source.name], form.nbytes) for form in layout.forms]
        waiting = [one for one in layout.settles if one.of.name in numbers]  # a tensor in pieces has another name
        filling = {numbers[one.of.name]: -one.source.nbytes % TENSOR_ALIGNMENT for one in waiting}
        scratch = layout.scratch_bytes + _behind_last(filling, layer)
        sizes = EstimatedFile(layout.header_bytes, layout.size, {}, scratch, layout.joined_bytes, layout.joins)
        return _Alike(sizes, given, filling)


def _behind(name: str, stem: str) -> tuple[str, bool]:
    """Return the part of a tensor's name behind its layer's, where the number ends there; else the whole name."""
    rest = name.removeprefix(stem)
    is_behind = rest != name and not _NUMBER.match(rest)
    return (rest, True) if is_behind else (name, False)


def _scales_made(group: SchemeGroup) -> int:
    """Return the bytes of a group's scales that are made when the model is used, if the group is at 4bit-double."""
    doubled = [spec for spec in group.tensors if scheme_of(spec, DOUBLE) == DOUBLE]
    return sum([math.ceil(spec.elements / NF4_BLOCK) * SCALE_BYTES for spec in doubled])
