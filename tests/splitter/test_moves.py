"""Runs of bytes: every byte once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.formats.tensor_spec import DTYPES, byte_size
from rabbitllm.quant.compression import BLOCKS
from rabbitllm.splitter import plan as moves_module
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, moves
from tests.support.plans import plan_of, shard_of

SHAPES = st.lists(st.integers(0, 90), min_size=0, max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.builds("model.layers.{}.w{}".format, st.integers(0, 3), st.integers(0, 9)),
    st.tuples(st.sampled_from([*DTYPES]), SHAPES).filter(lambda t: DTYPES[t[0]].bits >= 8 or byte_sized(*t)),
    max_size=6,
)


def byte_sized(dtype: str, shape: tuple[int, ...]) -> bool:
    try:
        byte_size(dtype, shape)
    except ValueError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(
    first=TENSORS,
    second=TENSORS,
    compression=st.sampled_from([None, "4bit", "8bit", "4bit-double"]),
    chunk=st.sampled_from([2048 * 4, 3 * 2048 * 4, 4 << 20]),
)
def test_moves_cover_every_byte_exactly_once(
    first: dict[str, tuple[str, tuple[int, ...]]],
    second: dict[str, tuple[str, tuple[int, ...]]],
    compression: str | None,
    chunk: int,
) -> None:
    second = {name: tensor for name, tensor in second.items() if name not in first}
    plan = plan_of((shard_of("a", first), shard_of("b", second)), compression)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves_module, "CHUNK_BYTES", chunk)
        for shard in plan.shards:
            check_moves(plan, shard, chunk)


def check_moves(plan: SplitPlan, shard: PlannedShard, chunk: int) -> None:
    found = list(moves(plan, shard.name, plan.layouts))
    at = 100
    assert all(0 <= move.nbytes <= chunk for move in found)
    for move in (move for move in found if move.nbytes):
        assert move.offset == at  # the shard's own order, without holes and without a byte twice
        at += move.nbytes
    assert at == shard.size
    for tensor in shard.tensors:
        runs = [move for move in found if move.form.source.name == tensor.name]
        assert runs, f"{tensor.name} would have no constants"
        assert runs[0].first == 0
        if runs[0].form.scheme is None:
            assert sum(run.nbytes for run in runs) == tensor.nbytes
            continue
        block = BLOCKS[runs[0].form.scheme]
        assert all(run.elements % block == 0 for run in runs[:-1])
        assert [run.first for run in runs] == [sum(r.elements for r in runs[:n]) for n in range(len(runs))]
        assert sum(run.elements for run in runs) == tensor.elements
    # and what is stored of the plan fills the layer files without holes
    for layout in plan.layouts.values():
        parts = [p for form in (*layout.forms, *layout.settles) for p in form.parts]
        spans = sorted((layout.places[p.name], p.nbytes) for p in parts if p.name in layout.places)
        assert {p.name for p in parts} == layout.places.keys() | layout.scratch_places.keys()
        ends = [len(layout.header), *(begin + length for begin, length in spans)]
        assert [begin for begin, _ in spans] == ends[:-1]
        assert ends[-1] == layout.size


def test_moves_of_some_layers_only() -> None:
    plan = plan_of((shard_of("a", {f"model.layers.{n}.w": ("F32", (8,)) for n in range(4)}),))
    assert [move.layer for move in moves(plan, "a", ["layers.1", "layers.3"])] == ["layers.1", "layers.3"]
    assert list(moves(plan, "a", [])) == []
    assert list(moves(plan, "unknown", plan.layouts)) == []
