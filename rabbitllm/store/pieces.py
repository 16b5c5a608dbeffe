"""Tensors that a checkpoint cuts into pieces: where each piece is written, and how they are joined.

Pieces that are consecutive in the whole tensor, each a whole number of blocks, are written directly to their offsets
in the layer file. Pieces cut along a later dimension alternate there, row by row; written in place, they would touch
every page of the file once for each piece. They are written one after the other into a scratch file in the same
folder: in their final form if no quantization block spans two pieces, otherwise uncompressed. Once all have arrived,
the whole is read from the scratch file with strides, in row-major order, like any strided tensor. Pure: opens
nothing, and is independent of models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.tensor_spec import TensorPiece, TensorSpec
from rabbitllm.quant.compression import BLOCKS, SCALE_BYTES, StoredForm, arriving, form_in, scheme_of

SCRATCH_ALIGNMENT = 4096
"""Alignment of the pieces of a tensor in a scratch file."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor and its pieces.

    Attributes:
        whole: its entry in the layer file's header.
        pieces: in order. If compressed, they have only payload and scales: parts that do not depend on the weights
            belong to the whole.
        straight: of consecutive pieces: stored part -> the part of the whole that contains it, and its byte offset
            there. Empty if they alternate and are collected in the scratch file.
    """

    whole: StoredForm
    pieces: tuple[StoredForm, ...]
    straight: Mapping[str, tuple[str, int]]


def join(specs: Iterable[TensorSpec], compression: str | None) -> Joined:
    """The way in which the pieces of one tensor become the whole.

    Raises:
        InvalidIndexError: they are not the whole tensor in equal parts of one dtype.
    """
    pieces = sorted(specs, key=_begin)
    _check(pieces)
    first = pieces[0]
    whole = form_in(first.whole, scheme_of(first.whole, compression))
    made = arriving(whole)
    block = BLOCKS[whole.scheme] if whole.scheme else 1
    run = math.prod(first.shape[_piece(first).dim :])  # elements of a piece that follow each other in the whole
    forms = tuple(_form(spec, whole.scheme if run % block == 0 else None) for spec in pieces)
    straight: dict[str, tuple[str, int]] = {}
    if _piece(first).dim == 0 and run % block == 0:
        for form in forms:
            before = _piece(form.source).begin * math.prod(form.source.shape[1:])
            payload, *scales = form.parts
            straight[payload.name] = made.parts[0].name, before * payload.nbytes // max(run, 1)
            if scales:
                straight[scales[0].name] = made.parts[1].name, before // block * SCALE_BYTES
    return Joined(whole, forms, straight)


def _piece(spec: TensorSpec) -> TensorPiece:
    assert spec.piece is not None
    return spec.piece


def _begin(spec: TensorSpec) -> int:
    return _piece(spec).begin


def _form(spec: TensorSpec, scheme: str | None) -> StoredForm:
    form = arriving(form_in(spec, scheme))
    return dataclasses.replace(form, parts=form.parts[:2])


def _check(pieces: Sequence[TensorSpec]) -> None:
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
                "Fetch the shards again: they are of different models.",
            )
        if piece.begin != end:
            raise InvalidIndexError(
                f"{first.of!r} is cut into pieces, and the one that begins at {end} is missing: found "
                f"{', '.join(f'{_begin(one)} in {one.file}' for one in pieces)}.",
                "Fetch the shards again: some are of another model.",
            )
        end += size
    if end != first.shape[first.dim]:
        raise InvalidIndexError(
            f"{first.of!r} is cut into pieces, which end at {end}; expected {first.shape[first.dim]}.",
            "Fetch the shards again: some are missing or of another model.",
        )


def scratch_places(joined: Iterable[Joined]) -> tuple[dict[str, int], int]:
    """The layout of pieces in a scratch file: part -> its offset; and the file's size in bytes."""
    places: dict[str, int] = {}
    at = 0
    for one in joined:
        for parts in zip(*(form.parts for form in one.pieces), strict=True):
            at = -(-at // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
            for part in parts:
                places[part.name] = at
                at += part.nbytes
    return places, at


def forms_in_scratch(joined: Joined, file: str, places: Mapping[str, int]) -> Iterator[StoredForm]:
    """The forms of a tensor in a complete scratch file: the whole, or each of its parts.

    Args:
        joined: a tensor whose pieces are in it.
        file: the scratch file's name.
        places: see `scratch_places`.
    """
    first, made = joined.pieces[0], arriving(joined.whole)
    if first.scheme != made.scheme:
        whole = made.source
        yield dataclasses.replace(
            made, source=_taking_turns(TensorToWrite(whole.name, whole.dtype, whole.shape), joined, file, places, 0)
        )
        return
    for number in range(len(first.parts)):
        part = made.parts[number]
        yield StoredForm(_taking_turns(part, joined, file, places, number), None, (part,))


def _taking_turns(part: TensorToWrite, joined: Joined, file: str, places: Mapping[str, int], number: int) -> TensorSpec:
    """A part of the whole, each row of which is a run of each piece in turn."""
    first = joined.pieces[0]
    offset = places[first.parts[number].name]
    rows = math.prod(first.source.shape[: _piece(first.source).dim])
    run = math.prod(part.shape) // (rows * len(joined.pieces)) if rows else 0
    view = (rows, len(joined.pieces), run)
    return TensorSpec(part.name, part.dtype, part.shape, file, offset, part.nbytes, (run, rows * run, 1), view)
