"""The layout of a layer's file, from headers alone.

A safetensors file with RabbitLLM 1.1's name (`<stem>.safetensors`; once complete, with an empty
`<stem>.safetensors.done`). The layout depends only on the layer's tensors and the compression, not on the order in
which shards arrive, so every route produces the same bytes. Pure: opens nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.safetensors_file import TensorToWrite, encode_header
from rabbitllm.quant.compression import DOUBLE, Settling, StoredForm, arriving, settling
from rabbitllm.store.order import FORMAT_VERSION, TENSOR_ALIGNMENT, in_order
from rabbitllm.store.pieces import Joined, forms_in_scratch, scratch_places

LAYER_SUFFIX = ".safetensors"
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
        forms: its tensors as they arrive from shards (`compression.arriving`), and the pieces of cut tensors.
        parts: stored parts in the order of the file.
        header_bytes: length of the header, a multiple of 4096, and so the offset of the data.
        places: stored key -> absolute offset in bytes; also of a piece that is written directly into the file.
        size: bytes of the whole file.
        shard_bytes: shard -> bytes of its tensors in the file, or in the scratch file.
        scratch_places: stored key of pieces and scales in the scratch file -> their offset there in bytes.
        scratch_bytes: size of the scratch file; 0 for none.
        joins: forms read from the scratch file once all pieces have arrived.
        fixed: tensors whose constants come with no form.
        settles: quantization of the scales in the scratch file, once all of them have arrived and pieces are joined.
    """

    layer: LayerName
    forms: tuple[StoredForm, ...]
    parts: tuple[TensorToWrite, ...]
    header_bytes: int
    places: Mapping[str, int]
    size: int
    shard_bytes: Mapping[str, int]
    scratch_places: Mapping[str, int] = field(default_factory=dict)
    scratch_bytes: int = 0
    joins: tuple[StoredForm, ...] = ()
    fixed: tuple[StoredForm, ...] = ()
    settles: tuple[Settling, ...] = ()

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
    def joined_bytes(self) -> int:
        """Bytes written to the file, and to scales in the scratch file, once all pieces have arrived."""
        parts = (form.parts for forms in (self.joins, self.settles) for form in forms)
        return sum(part.nbytes for one in parts for part in one)


def lay_out(
    layer: LayerName, forms: Iterable[StoredForm], joined: Sequence[Joined] = (), version: int = FORMAT_VERSION
) -> LayerLayout:
    """Fix the offset of every tensor of a layer.

    Args:
        layer: its id and stem.
        forms: its tensors that are whole in their shards.
        joined: its tensors that are cut into pieces; the file is the same.
        version: of the format, which determines the order, see `order.py`.

    Raises:
        InvalidIndexError: a tensor has the name of a part of another one's stored form.
    """
    whole = tuple(forms)
    coming = (*map(arriving, whole), *(piece for one in joined for piece in one.pieces))
    ordered = in_order((part for form in (*whole, *(one.whole for one in joined)) for part in form.parts), version)
    header, offsets = encode_header(ordered)
    places = {part.name: offset for part, offset in zip(ordered, offsets, strict=True)}
    if len(places) < len(ordered):
        twice = next(name for name, times in Counter(part.name for part in ordered).items() if times > 1)
        raise InvalidIndexError(
            f"Two tensors of layer {layer.id} would be stored as {twice!r}: its weights seem to be compressed already.",
            "Leave compression out.",
        )
    end = offsets[-1] + ordered[-1].nbytes if ordered else len(header)
    shard_bytes: dict[str, int] = {}
    for form in coming:
        shard_bytes[form.source.file] = shard_bytes.get(form.source.file, 0) + form.nbytes
    layout = LayerLayout(layer, coming, tuple(ordered), len(header), places, end, shard_bytes)
    doubled = [form for form in (*whole, *(one.whole for one in joined)) if form.scheme == DOUBLE]
    return _with_scratch(layout, joined, doubled) if joined or doubled else layout


def _with_scratch(layout: LayerLayout, joined: Sequence[Joined], doubled: Iterable[StoredForm]) -> LayerLayout:
    waiting = [one for one in joined if not one.straight]
    in_scratch, nbytes = scratch_places(waiting)
    settles = []
    for form in doubled:
        scales = arriving(form).parts[1]
        in_scratch[scales.name] = -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        settles.append(settling(form, layout.scratch_name, in_scratch[scales.name]))
        nbytes = in_scratch[scales.name] + scales.nbytes
    places = dict(layout.places)
    for part, (within, at) in ((part, place) for one in joined for part, place in one.straight.items()):
        found = in_scratch if within in in_scratch else places
        found[part] = found[within] + at
    return dataclasses.replace(
        layout,
        places=places,
        scratch_places=in_scratch,
        scratch_bytes=nbytes,
        joins=tuple(form for one in waiting for form in forms_in_scratch(one, layout.scratch_name, in_scratch)),
        fixed=tuple(one.whole for one in joined if one.pieces[0].scheme is not None),
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
