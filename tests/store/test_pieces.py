"""Where the pieces of a tensor go, and that the whole can be read of them: at every place, once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.checkpoints.naming import LayerName
from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.tensor_spec import DTYPES, TensorPiece, TensorSpec, byte_size
from rabbitllm.store.layer_file import Joined, LayerLayout, join, lay_out

LAYER = LayerName("layers.0", "model.layers.0")


def cut(shape: tuple[int, ...], ranks: int, dim: int, dtype: str = "BF16") -> list[TensorSpec]:
    """A tensor in so many pieces along a dimension, each alone in its shard."""
    size = shape[dim] // ranks
    own = (*shape[:dim], size, *shape[dim + 1 :])
    return [
        TensorSpec(
            f"w#{rank}", dtype, own, f"r{rank}", 100, byte_size(dtype, own), piece=TensorPiece("w", shape, dim, at)
        )
        for rank, at in enumerate(range(0, shape[dim], size))
    ]


def laid_out(joined: Joined) -> LayerLayout:
    return lay_out(LAYER, [], [joined])


@pytest.mark.parametrize(
    ("shape", "ranks", "dim", "compression", "straight", "scheme"),
    [
        ((64, 128), 2, 0, None, True, None),
        ((64, 128), 2, 1, None, False, None),
        ((64, 128), 2, 0, "4bit", True, "4bit"),
        ((64, 128), 2, 1, "4bit", False, "4bit"),
        ((64, 128), 4, 1, "4bit", False, None),  # rows of 32: two pieces in a block of 64
        ((64, 128), 4, 0, "8bit", True, "8bit"),
        ((64, 128), 8, 0, "8bit", False, None),  # pieces of 1024: two in a block of 2048
        ((64, 4096), 2, 1, "8bit", False, "8bit"),
        ((64, 128), 2, 1, "8bit", False, None),
        ((8, 128), 2, 1, "8bit", False, None),  # too small to be compressed
        ((256,), 4, 0, "4bit", True, None),
    ],
)
def test_where_pieces_go(
    shape: tuple[int, ...], ranks: int, dim: int, compression: str | None, straight: bool, scheme: str | None
) -> None:
    joined = join(reversed(cut(shape, ranks, dim)), compression)
    assert bool(joined.straight) == straight
    assert {form.scheme for form in joined.pieces} == {scheme}
    assert [form.source.name for form in joined.pieces] == [f"w#{rank}" for rank in range(ranks)]
    layout = laid_out(joined)
    assert layout.tensors == ("w",)
    assert bool(layout.scratch_bytes) == (not straight)
    assert sum(layout.shard_bytes.values()) == sum(part.nbytes for form in joined.pieces for part in form.parts)


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_layer_file_is_that_of_a_whole_tensor(dim: int, compression: str | None) -> None:
    specs = cut((64, 128), 2, dim)
    joined = join(specs, compression)
    layout, plain = laid_out(joined), lay_out(LAYER, [joined.whole])
    assert (layout.header, layout.size) == (plain.header, plain.size)
    assert plain.places.items() <= layout.places.items()


def written(layout: LayerLayout, joined: Joined) -> Iterator[tuple[int, int]]:
    """The runs (offset, length) of the layer file that pieces, joins and constants fill."""
    for form in joined.pieces:
        for part in form.parts:
            if part.name in layout.places:
                yield layout.places[part.name], part.nbytes
    for form in layout.joins:
        for part in form.parts:
            yield layout.places[part.name], part.nbytes
    for form in layout.fixed:
        for part in form.parts[2:]:
            yield layout.places[part.name], part.nbytes


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 200),
    ranks=st.sampled_from([2, 3, 4, 8]),
    dim=st.sampled_from([0, 1]),
    compression=st.sampled_from([None, "4bit", "8bit"]),
    dtype=st.sampled_from(["BF16", "F32"]),
)
@settings(max_examples=200, deadline=None)
def test_every_byte_of_the_layer_file_is_filled_once(
    rows: int, columns: int, ranks: int, dim: int, compression: str | None, dtype: str
) -> None:
    shape = (rows * ranks, columns) if dim == 0 else (rows, columns * ranks)
    joined = join(cut(shape, ranks, dim, dtype), compression)
    layout = laid_out(joined)
    at = layout.header_bytes
    for offset, nbytes in sorted(run for run in written(layout, joined) if run[1]):
        assert offset == at
        at += nbytes
    assert at == layout.size
    ends = [(place, place + part.nbytes) for form in joined.pieces for part in form.parts
            if (place := layout.scratch_places.get(part.name)) is not None]  # fmt: skip
    assert all(end <= begin for (_, end), (begin, _) in zip(sorted(ends), sorted(ends)[1:], strict=False))
    assert max((end for _, end in ends), default=0) == layout.scratch_bytes


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), ranks=st.sampled_from([2, 3, 8]), dim=st.sampled_from([0, 1]))
@settings(max_examples=100, deadline=None)
def test_the_whole_is_read_of_its_pieces(rows: int, columns: int, ranks: int, dim: int) -> None:
    """By torch's own strides, over memory that has the pieces where the scratch file has them."""
    shape = (rows * ranks, columns) if dim == 0 else (rows, columns * ranks)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    joined = dataclasses.replace(join(cut(shape, ranks, dim, "F32"), None), straight={})  # rows too, for the sake of it
    layout = laid_out(joined)
    memory = torch.full((-(-layout.scratch_bytes // 4),), -1.0)
    for form, piece in zip(joined.pieces, whole.chunk(ranks, dim), strict=True):
        at = layout.scratch_places[form.parts[0].name] // 4
        memory[at : at + piece.numel()] = piece.flatten()
    (form,) = layout.joins
    spec = form.source
    assert spec.strides is not None
    read = torch.as_strided(memory, spec.sizes, spec.strides, spec.offset // (DTYPES[spec.dtype].bits // 8))
    assert torch.equal(read.reshape(shape), whole)


def changed(specs: list[TensorSpec], number: int, **changes: object) -> list[TensorSpec]:
    return [s._replace(**changes) if at == number else s for at, s in enumerate(specs)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (cut((64, 64), 4, 0)[1:], "the one that begins at 0 is missing: found 16 in r1"),
        (cut((64, 64), 4, 0)[:3], "which end at 48; expected 64"),
        ([*cut((64, 64), 4, 0), *cut((64, 64), 4, 0)[:1]], "the one that begins at 16 is missing"),
        (changed(cut((64, 64), 4, 1), 2, dtype="F16"), "r0 has BF16 .* r2 has F16"),
        (changed(cut((64, 64), 4, 1), 2, shape=(64, 8)), r"r2 has BF16 \(64, 8\); expected equal parts of \(64, 64\)"),
        (changed(cut((64, 64), 4, 1), 1, piece=TensorPiece("w", (64, 32), 1, 16)), "do not belong together"),
        (changed(cut((64, 64), 4, 1), 1, piece=TensorPiece("w", (64, 64), 0, 16)), "do not belong together"),
    ],
    ids=range(7),
)
def test_pieces_that_are_no_whole(specs: list[TensorSpec], says: str) -> None:
    with pytest.raises(InvalidIndexError, match=says) as refused:
        join(specs, None)
    assert "Fetch the shards again" in refused.value.remedy
