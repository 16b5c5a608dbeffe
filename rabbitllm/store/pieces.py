"""Tensors that a checkpoint cuts into pieces: what becomes of each piece, and how the whole comes of them.

Pieces that lie one after the other in the whole, each a whole number of blocks, go straight to their places in the
layer file. Those that are cut along a later dimension alternate there, row by row; written in place, they would touch
every page of the file once for each piece. They go one after the other into a scratch file in the same folder: in their
final form where no block holds elements of two pieces, and as they are where one does. When all are there, the whole is
read from the scratch file at strides, in row-major order, like any strided tensor. Pure: opens nothing, and knows no
models.
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
"""Where the pieces of a tensor begin in a scratch file: multiples of this."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor and its pieces.

    Attributes:
        whole: what the layer file's header says of it.
        pieces: in their order. At a compression they have payload and scales only: what does not depend on the weights
            is the whole's.
        straight: of pieces that lie one after the other in the whole: stored part -> the part of the whole that it lies
            in, and how many bytes into that. Empty where they take turns, and wait in the scratch file.
    """

    whole: StoredForm
    pieces: tuple[StoredForm, ...]
    straight: Mapping[str, tuple[str, int]]


def join(specs: Iterable[TensorSpec], compression: str | None) -> Joined:
    """How the pieces of one tensor become the whole.

    Raises:
        InvalidIndexError: they are not the whole, in equal parts and of one dtype.
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
    """Refuse pieces that leave something out, overlap, or do not belong together."""
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
    """Where the parts of pieces lie in a scratch file: part -> its first byte; and the file's length, bytes."""
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
    """What a scratch file holds of a tensor when all of its pieces are there: the whole, or each of its parts.

    Args:
        joined: one whose pieces go into it.
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
    """A part of the whole, of which each row is a run of each piece in turn."""
    first = joined.pieces[0]
    offset = places[first.parts[number].name]
    rows = math.prod(first.source.shape[: _piece(first.source).dim])
    run = math.prod(part.shape) // (rows * len(joined.pieces)) if rows else 0
    view = (rows, len(joined.pieces), run)
    return TensorSpec(part.name, part.dtype, part.shape, file, offset, part.nbytes, (run, rows * run, 1), view)
