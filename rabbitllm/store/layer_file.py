"""The layout of a layer's file, from headers alone: the order of its tensors, and the offsets of those cut into pieces.

A safetensors file with RabbitLLM 1.1's name (`<stem>.safetensors`; once complete, with an empty
`<stem>.safetensors.done`). The layout depends only on the layer's tensors and the compression, not on the order in
which shards arrive, so every route produces the same bytes.

The format allows no holes, so alignment comes from the order: first tensors that fill whole 4096-byte blocks, then
multiples of 64 bytes, then the rest. Within each group, an expert's tensors are adjacent, in the order in which they
are fused: matrices first, gate before up, then their scales in the same order. So an expert is one run of bytes, and
gate and up, or their codes, or their scales, are one matrix without a copy.

Pieces that are consecutive in the whole tensor, each a whole number of blocks, are written directly to their offsets
in the layer file. Pieces cut along a later dimension alternate there, row by row; written in place, they would touch
every page of the file once for each piece. They are written one after the other into a scratch file in the same
folder: in their final form if no quantization block spans two pieces, otherwise uncompressed. Once all have arrived,
the whole is read from the scratch file with strides, in row-major order, like any strided tensor.

Pure: opens nothing, and is independent of models.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from rabbitllm.base.grouping import summed
from rabbitllm.base.rounding import round_up
from rabbitllm.checkpoints.index import natural_key
from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.safetensors_file import TensorToWrite, encode_header
from rabbitllm.formats.tensor_spec import TensorPiece, TensorSpec, byte_size
from rabbitllm.quant.schemes import DOUBLE, SCALE_BYTES, STORED, scheme_of
from rabbitllm.storage.files import DIRECT_ALIGNMENT
from rabbitllm.store.stored_form import ScalesForm, StoredForm, arriving, form_in, settling

TENSOR_ALIGNMENT = 64
"""A cache line. Kernels may give other last bits for weights aligned to less than 16 bytes."""
BY_NAME, EXPERTS_TOGETHER = 1, 2
"""Format versions: ordered by size and name alone; experts' tensors adjacent."""
FORMAT_VERSION = EXPERTS_TOGETHER
"""The version of new layer files. All versions can be read, since the header has the offsets; a split that is resumed
or repaired keeps its own."""

_RANKS = _BLOCKS, _LINES, _REST = range(3)
"""Ranks: whole blocks, multiples of 64 bytes, the rest."""
_DATA, _OTHERS, _CONSTANTS = range(3)
"""Groups within each rank: tensors read per expert, tensors outside experts, experts' tables and sizes."""
_EXPERT = re.compile(r"(?P<block>(?:.*?\.)?experts\.(?:expert_)?)(?P<number>[0-9]+)\.(?P<rest>.+)")
_PROJECTIONS = {"gate_proj": 0, "w1": 0, "fc1": 0, "up_proj": 1, "w3": 1, "fc3": 1, "down_proj": 2, "w2": 2, "fc2": 2}
"""The order in which transformers' conversion_mapping.py fuses them; without a gate it fuses nothing."""
_MATRICES = frozenset({"weight", "qweight", "weight_packed"})
_CONSTANT = re.compile(r"(?:^|\.)(?:quant_map|nested_quant_map|4bit\.nested_absmax|code|quant_state\..*|weight_shape)$")
"""Tensors that are not read with an expert: tables and sizes, and the few scales of scales, which stay in memory."""

_Key = tuple[object, ...]


def in_order(parts: Iterable[TensorToWrite], version: int = FORMAT_VERSION) -> list[TensorToWrite]:
    """The stored parts of a layer in the order of its file.

    A part whose size is a multiple of 64 bytes is aligned to 64; a part that fills whole blocks begins on a block,
    unless it belongs to an expert with other parts that do not. Parts of an expert that are not multiples of 64 are
    apart from its others, since they would misalign the next expert.

    Args:
        parts: stored parts of all its tensors, in any order.
        version: the format version of the file.
    """
    if version == BY_NAME:
        return sorted(parts, key=lambda part: (_rank(part.dtype, part.shape), natural_key(part.name)))
    outside: list[list[TensorToWrite]] = [[] for _ in _RANKS]
    experts: dict[tuple[str, str], list[tuple[str, int, TensorToWrite]]] = {}
    for part in parts:
        rank = _rank(part.dtype, part.shape)
        match = _EXPERT.fullmatch(part.name)
        if match is None:
            outside[rank].append(part)
        else:
            block, index, suffix = match.groups()
            experts.setdefault((block, index), []).append((suffix, rank, part))
    runs: list[tuple[_Key, list[TensorToWrite]]] = []
    for rank in _RANKS:
        runs.append(((rank, _OTHERS), sorted(outside[rank], key=lambda part: natural_key(part.name))))
    for (block, index), members in experts.items():
        expert = (_block_key(block), int(index), index)
        for rank, group, positions in _runs(tuple([(suffix, rank) for suffix, rank, _ in members])):
            runs.append(((rank, group, *expert), [members[position][2] for position in positions]))
    runs.sort(key=operator.itemgetter(0))
    return [part for _, run in runs for part in run]


@functools.lru_cache(maxsize=1024)
def _runs(members: tuple[tuple[str, int], ...]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """The runs of adjacent parts of an expert; cached, since the experts of a layer are alike.

    Args:
        members: the rest of each part's name after the expert's number, and its own rank.

    Returns:
        Rank, group, and the member indices in order, for each run.
    """
    data = [rank for suffix, rank in members if _sort_key(suffix)[0] == _DATA and rank != _REST]
    runs: dict[tuple[int, int], list[tuple[_Key, int]]] = {}
    for index, (suffix, rank) in enumerate(members):
        group, *position = _sort_key(suffix)
        run_rank = max(data) if group == _DATA and rank != _REST else rank
        runs.setdefault((run_rank, group), []).append(((*position, suffix), index))
    return tuple((*key, tuple(index for _, index in sorted(run))) for key, run in runs.items())


@functools.lru_cache(maxsize=1024)
def _rank(dtype: str, shape: tuple[int, ...]) -> int:
    nbytes = byte_size(dtype, shape)
    if nbytes % DIRECT_ALIGNMENT == 0:
        return _BLOCKS
    return _LINES if nbytes % TENSOR_ALIGNMENT == 0 else _REST


@functools.lru_cache(maxsize=1024)
def _sort_key(suffix: str) -> tuple[int, bool, _Key, _Key]:
    """The sort key of a part within an expert, by the rest of its name after the expert's number."""
    projection, _, leaf = suffix.partition(".")
    order = (_PROJECTIONS.get(projection, len(_PROJECTIONS)), natural_key(projection))
    return _CONSTANTS if _CONSTANT.search(leaf) else _DATA, leaf not in _MATRICES, natural_key(leaf), order


_block_key = functools.lru_cache(maxsize=1024)(natural_key)


SCRATCH_ALIGNMENT = 4096
"""Alignment of the pieces of a tensor in a scratch file."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor and its pieces.

    Attributes:
        whole: its entry in the layer file's header.
        pieces: in order. If compressed, they have only payload and scales: parts that do not depend on the weights
            belong to the whole.
        direct: of consecutive pieces: stored part -> the part of the whole that contains it, and its byte offset
            there. Empty if they alternate and are collected in the scratch file.
    """

    whole: StoredForm
    pieces: tuple[StoredForm, ...]
    direct: Mapping[str, tuple[str, int]]


def join(specs: Iterable[TensorSpec], compression: str | None) -> Joined:
    """Lay out the pieces of one tensor, and the whole.

    Raises:
        InvalidIndexError: they are not the whole tensor in equal parts of one dtype.
    """
    pieces = sorted(specs, key=_begin)
    _check_pieces(pieces)
    first = pieces[0]
    whole = form_in(first.whole, scheme_of(first.whole, compression))
    target = arriving(whole)
    block = STORED[whole.scheme].block if whole.scheme else 1
    run = math.prod(first.shape[_piece(first).dim :])  # elements of a piece that follow each other in the whole
    scheme = whole.scheme if run % block == 0 else None
    has_scales = scheme is not None and not STORED[scheme].block_bytes
    arrived = (arriving(form_in(spec, scheme)) for spec in pieces)
    forms = tuple(dataclasses.replace(form, parts=form.parts[: 1 + has_scales]) for form in arrived)
    direct: dict[str, tuple[str, int]] = {}
    if _piece(first).dim == 0 and run % block == 0:
        for form in forms:
            before = _piece(form.source).begin * math.prod(form.source.shape[1:])
            payload, *scales = form.parts
            direct[payload.name] = target.parts[0].name, before * payload.nbytes // max(run, 1)
            if scales:
                direct[scales[0].name] = target.parts[1].name, before // block * SCALE_BYTES
    return Joined(whole, forms, direct)


def _piece(spec: TensorSpec) -> TensorPiece:
    assert spec.piece is not None
    return spec.piece


def _begin(spec: TensorSpec) -> int:
    return _piece(spec).begin


def _check_pieces(pieces: Sequence[TensorSpec]) -> None:
    """Refuse pieces that leave gaps, overlap, or do not belong together."""
    first = _piece(pieces[0])
    end = 0
    for spec in pieces:
        piece, size = _piece(spec), spec.shape[first.dim]
        expected = (*first.shape[: first.dim], pieces[0].shape[first.dim], *first.shape[first.dim + 1 :])
        if (piece.shape, piece.dim, spec.dtype, spec.shape) != (first.shape, first.dim, pieces[0].dtype, expected):
            raise InvalidIndexError(
                f"The pieces of {first.of!r} do not belong together: {pieces[0].file} has {pieces[0].dtype} "
                f"{pieces[0].shape}, {spec.file} has {spec.dtype} {spec.shape}; expected equal parts of {first.shape}.",
                "Download the shards again: they belong to different models.",
            )
        if piece.begin != end:
            raise InvalidIndexError(
                f"The piece of {first.of!r} that starts at {end} is missing: found "
                f"{', '.join(f'{_begin(part)} in {part.file}' for part in pieces)}.",
                "Download the shards again: some belong to another model.",
            )
        end += size
    if end != first.shape[first.dim]:
        raise InvalidIndexError(
            f"The pieces of {first.of!r} end at {end}; expected {first.shape[first.dim]}.",
            "Download the shards again: some are missing or belong to another model.",
        )


def scratch_layout(joined: Iterable[Joined]) -> tuple[dict[str, int], int]:
    """The layout of pieces in a scratch file: part -> its offset; and the file's size in bytes."""
    offsets: dict[str, int] = {}
    offset = 0
    for tensor in joined:
        for parts in zip(*(form.parts for form in tensor.pieces), strict=True):
            offset = round_up(offset, SCRATCH_ALIGNMENT)
            for part in parts:
                offsets[part.name] = offset
                offset += part.nbytes
    return offsets, offset


def forms_in_scratch(joined: Joined, file: str, offsets: Mapping[str, int]) -> Iterator[StoredForm]:
    """The forms of a tensor in a complete scratch file: the whole, or each of its parts.

    Args:
        joined: a tensor whose pieces are in it.
        file: the scratch file's name.
        offsets: see `scratch_layout`.
    """
    first, target = joined.pieces[0], arriving(joined.whole)
    if first.scheme != target.scheme:
        whole = target.source
        yield dataclasses.replace(
            target, source=_interleaved(TensorToWrite(whole.name, whole.dtype, whole.shape), joined, file, offsets, 0)
        )
        return
    for index in range(len(first.parts)):
        part = target.parts[index]
        yield StoredForm(_interleaved(part, joined, file, offsets, index), None, (part,))


def _interleaved(part: TensorToWrite, joined: Joined, file: str, offsets: Mapping[str, int], index: int) -> TensorSpec:
    """A part of the whole, each row of which is a run of each piece in turn."""
    first = joined.pieces[0]
    offset = offsets[first.parts[index].name]
    rows = math.prod(first.source.shape[: _piece(first.source).dim])
    run = math.prod(part.shape) // (rows * len(joined.pieces)) if rows else 0
    view = (rows, len(joined.pieces), run)
    return TensorSpec(part.name, part.dtype, part.shape, file, offset, part.nbytes, (run, rows * run, 1), view)


LAYER_SUFFIX = ".safetensors"
COPIES_NAME = "copies"
"""Name of the folder in a split directory with copies at fewer bits, which a model drafts with."""
COPY_FILE = re.compile(r".+\.[0-9a-f]{32}\.[0-9a-f]{8}\.safetensors(\.part)?")
"""Names of the files in it."""
DONE_SUFFIX = ".done"
SCRATCH_SUFFIX = ".pieces"
"""Suffix of the scratch file of an unfinished layer file: it holds pieces of tensors until all of them have arrived,
and scales until they are quantized themselves."""
MAX_STEM = 180
"""Limit of a stem. File systems allow names of 255 bytes, and suffixes are appended."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The layout of a layer file to be written.

    Attributes:
        layer: its id and stem.
        forms: its tensors as they arrive from shards (`stored_form.arriving`), and the pieces of cut tensors.
        parts: stored parts in the order of the file.
        header_bytes: length of the header, a multiple of 4096, and so the offset of the data.
        offsets: stored key -> absolute offset in bytes; also of a piece that is written directly into the file.
        size: bytes of the whole file.
        shard_bytes: shard -> bytes of its tensors in the file, or in the scratch file.
        scratch_offsets: stored key of pieces and scales in the scratch file -> their offset there in bytes.
        scratch_bytes: size of the scratch file; 0 for none.
        joins: forms read from the scratch file once all pieces have arrived.
        fixed: tensors whose constants come with no form.
        settles: quantization of the scales in the scratch file, once all of them have arrived and pieces are joined.
    """

    layer: LayerName
    forms: tuple[StoredForm, ...]
    parts: tuple[TensorToWrite, ...]
    header_bytes: int
    offsets: Mapping[str, int]
    size: int
    shard_bytes: Mapping[str, int]
    scratch_offsets: Mapping[str, int] = field(default_factory=dict)
    scratch_bytes: int = 0
    joins: tuple[StoredForm, ...] = ()
    fixed: tuple[StoredForm, ...] = ()
    settles: tuple[ScalesForm, ...] = ()

    @property
    def header(self) -> bytes:
        """The file's header; a megabyte for a layer with hundreds of experts, so it is made on demand."""
        return encode_header(self.parts)[0]

    @property
    def file_name(self) -> str:
        """The layer file's final name."""
        return layer_file_name(self.layer.stem)

    @property
    def scratch_name(self) -> str:
        """The scratch file's name."""
        return self.file_name + SCRATCH_SUFFIX

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors' names; each cut tensor once."""
        sources = (form.source for form in self.forms)
        return tuple(dict.fromkeys(s.name if s.piece is None else s.piece.of for s in sources))

    @property
    def all_forms(self) -> tuple[StoredForm | ScalesForm, ...]:
        """Its forms, as they arrive and as they are read from the scratch file."""
        return *self.forms, *self.joins, *self.settles

    @property
    def joined_bytes(self) -> int:
        """Bytes written to the file, and to scales in the scratch file, once all pieces have arrived."""
        parts = (form.parts for forms in (self.joins, self.settles) for form in forms)
        return sum(part.nbytes for tensor_parts in parts for part in tensor_parts)


def lay_out(
    layer: LayerName, forms: Iterable[StoredForm], joined: Sequence[Joined] = (), version: int = FORMAT_VERSION
) -> LayerLayout:
    """Fix the offset of every tensor of a layer.

    Args:
        layer: its id and stem.
        forms: its tensors that are whole in their shards.
        joined: its tensors that are cut into pieces; the file is the same.
        version: of the format, which determines the order.

    Raises:
        InvalidIndexError: a tensor has the name of a part of another one's stored form.
    """
    whole = tuple(forms)
    incoming = (*map(arriving, whole), *(piece for tensor in joined for piece in tensor.pieces))
    ordered = in_order(
        (part for form in (*whole, *(tensor.whole for tensor in joined)) for part in form.parts), version
    )
    header, begins = encode_header(ordered)
    offsets = {part.name: offset for part, offset in zip(ordered, begins, strict=True)}
    if len(offsets) < len(ordered):
        double = next(name for name, count in Counter(part.name for part in ordered).items() if count > 1)
        raise InvalidIndexError(
            f"Two tensors of layer {layer.id} would be stored as {double!r}: its weights seem to be quantized already.",
            "Remove compression.",
        )
    end = begins[-1] + ordered[-1].nbytes if ordered else len(header)
    shard_bytes = summed((form.source.file, form.nbytes) for form in incoming)
    layout = LayerLayout(layer, incoming, tuple(ordered), len(header), offsets, end, shard_bytes)
    doubled = [form for form in (*whole, *(tensor.whole for tensor in joined)) if form.scheme == DOUBLE]
    return _with_scratch(layout, joined, doubled) if joined or doubled else layout


def _with_scratch(layout: LayerLayout, joined: Sequence[Joined], doubled: Iterable[StoredForm]) -> LayerLayout:
    waiting = [tensor for tensor in joined if not tensor.direct]
    in_scratch, nbytes = scratch_layout(waiting)
    settles = []
    for form in doubled:
        scales = arriving(form).parts[1]
        in_scratch[scales.name] = round_up(nbytes, TENSOR_ALIGNMENT)
        settles.append(settling(form, layout.scratch_name, in_scratch[scales.name]))
        nbytes = in_scratch[scales.name] + scales.nbytes
    offsets = dict(layout.offsets)
    for part, (within, begin) in (item for tensor in joined for item in tensor.direct.items()):
        target_offsets = in_scratch if within in in_scratch else offsets
        target_offsets[part] = target_offsets[within] + begin
    return dataclasses.replace(
        layout,
        offsets=offsets,
        scratch_offsets=in_scratch,
        scratch_bytes=nbytes,
        joins=tuple(form for tensor in waiting for form in forms_in_scratch(tensor, layout.scratch_name, in_scratch)),
        fixed=tuple(tensor.whole for tensor in joined if tensor.pieces[0].scheme is not None),
        settles=tuple(settles),
    )


def layer_file_name(stem: str) -> str:
    """The file name of a layer. A tensor name is not a path: every character that is not plain is percent-encoded."""
    safe = quote(stem, safe="")
    if safe.startswith("."):
        safe = "%2E" + safe[1:]
    if len(safe) > MAX_STEM:
        safe = f"{safe[: MAX_STEM - 20]}-{hashlib.sha256(stem.encode()).hexdigest()[:16]}"
    return safe + LAYER_SUFFIX
