"""The size of a choice of bits is computed without its plan, equal to the plan's to the byte; so the same is chosen."""

from __future__ import annotations

import itertools
import math
import operator
import random
import re
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.base.options import SplitOptions
from rabbitllm.checkpoints.naming import LayerName, LayerNaming, assign_layers
from rabbitllm.errors import NotEnoughSpaceException
from rabbitllm.formats.tensor_spec import TensorPiece, TensorSpec
from rabbitllm.quant.schemes import COMPRESSIONS, DOUBLE
from rabbitllm.splitter import bit_allocation
from rabbitllm.splitter.bit_allocation import BLOCKWISE, FUSED, BitChoices, SchemeGroup, groups, with_choice
from rabbitllm.splitter.disk_budget import BitChoice, DiskBudget, ShardTransfer
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, lay_out_layer, make_plan, recompressed
from rabbitllm.store.layer_file import BY_NAME, FORMAT_VERSION, LayerLayout
from rabbitllm.store.manifest import AUTO, BitAllocation
from tests.support.plans import SOURCE, all_freed, peak_of, resident_bytes, shard_of

Usage = namedtuple("Usage", "total used free")
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def dense(layers: int = 12) -> Tensors:
    """Tensors of a Llama; some matrices are too small for 4bit-double, and numbers of scales are odd."""
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (515, 64))}
    for n in range(layers):
        lead = f"model.layers.{n}."
        tensors[lead + "input_layernorm.weight"] = ("BF16", (64,))
        tensors |= {f"{lead}self_attn.{p}_proj.weight": ("BF16", (64, 64)) for p in "qkvo"}
        tensors |= {f"{lead}mlp.{p}_proj.weight": ("BF16", (517, 64)) for p in ("gate", "up")}
        tensors[lead + "mlp.down_proj.weight"] = ("BF16", (64, 517 + 64 * (n == 3)))
    return {**tensors, "model.norm.weight": ("F32", (64,)), "lm_head.weight": ("BF16", (515, 64))}


def experts(layers: int = 11) -> Tensors:
    """Tensors of a mixture of experts: alternating layers of two kinds, five experts, and a shared one."""
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (600, 64))}
    for n in range(layers):
        lead = f"model.layers.{n}."
        attention = ["self_attn.q_proj", "self_attn.o_proj"] if n % 2 else ["linear_attn.in_proj_qkvz"]
        tensors |= {f"{lead}{name}.weight": ("BF16", (96, 64)) for name in attention}
        tensors[lead + "mlp.gate.weight"] = ("BF16", (5, 64))
        for expert in [*(f"experts.{index}" for index in range(5)), "shared_expert"]:
            tensors |= {f"{lead}mlp.{expert}.{part}_proj.weight": ("BF16", (520, 64)) for part in ("gate", "up")}
            tensors[f"{lead}mlp.{expert}.down_proj.weight"] = ("BF16", (64, 520))
    return {**tensors, "lm_head.weight": ("BF16", (600, 64))}


def gpt2(layers: int = 3) -> Tensors:
    tensors: Tensors = {"transformer.wte.weight": ("F32", (700, 64)), "transformer.wpe.weight": ("F32", (128, 64))}
    for n in range(layers):
        lead = f"transformer.h.{n}."
        tensors |= {lead + "attn.c_attn.weight": ("F32", (64, 192)), lead + "attn.c_attn.bias": ("F32", (192,))}
        tensors |= {lead + "mlp.c_fc.weight": ("F32", (64, 256)), lead + "mlp.c_proj.weight": ("F32", (256, 64))}
    return tensors


def shards_of(tensors: Tensors, count: int = 3, staged: bool = False) -> tuple[PlannedShard, ...]:
    """Cut at any tensor, with names in alphabetical order, so that layers span two shards."""
    names = sorted(tensors)
    step = -(-len(names) // count)
    runs = [names[begin : begin + step] for begin in range(0, len(names), step)]
    return tuple(shard_of(f"shard-{n}", {name: tensors[name] for name in run}, staged) for n, run in enumerate(runs))


def plan_at(shards: tuple[PlannedShard, ...], family: str, version: int = FORMAT_VERSION) -> SplitPlan:
    names = [spec.name for shard in shards for spec in shard.tensors]
    return make_plan(SOURCE, shards, assign_layers(names, family), AUTO, version)


def in_pieces(ranks: int = 2) -> tuple[PlannedShard, ...]:
    """Pieces along either dimension, with whole and partial blocks, as in ranks; norms are whole."""
    cuts = {"q_proj": (512, 128, 0), "o_proj": (256, 512, 1), "up_proj": (300, 130, 0), "down_proj": (64, 1040, 1)}
    shards = []
    for rank in range(ranks):
        specs, offset = [], 0
        for n, (part, (rows, columns, dim)) in itertools.product(range(3), cuts.items()):
            name, whole = f"model.layers.{n}.{part}.weight", (rows, columns)
            piece_shape = (rows // ranks, columns) if dim == 0 else (rows, columns // ranks)
            piece = TensorPiece(name, whole, dim, rank * piece_shape[dim])
            specs.append(
                TensorSpec(
                    f"{name}:{rank}",
                    "BF16",
                    piece_shape,
                    f"rank-{rank}",
                    offset,
                    2 * math.prod(piece_shape),
                    piece=piece,
                )
            )
            offset += specs[-1].nbytes
        if rank == 0:
            norms = {f"model.layers.{n}.norm.weight": ("BF16", (128, 300)) for n in range(3)}
            specs += [spec._replace(file="rank-0", offset=offset) for spec in shard_of("rank-0", norms).tensors]
        shards.append(PlannedShard(f"rank-{rank}", offset, "sampled:0", tuple(specs), staged=False))
    return tuple(shards)


def plan(kind: str) -> SplitPlan:
    plans: dict[str, Callable[[], SplitPlan]] = {
        "dense": lambda: plan_at(shards_of(dense()), "llama"),
        "dense, an earlier format": lambda: plan_at(shards_of(dense()), "llama", BY_NAME),
        "experts": lambda: plan_at(shards_of(experts(), 5), "qwen3_next"),
        "experts, fetched": lambda: plan_at(shards_of(experts(2), 4, staged=True), "qwen3_next"),
        "gpt2": lambda: plan_at(shards_of(gpt2()), "gpt2"),
        "pieces": lambda: plan_at(in_pieces(), "llama"),
    }
    return plans[kind]()


KINDS = ["dense", "dense, an earlier format", "experts", "experts, fetched", "gpt2", "pieces"]
QUICK = KINDS[3:]
"""With few tensors."""


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**15, 0, 10**15))


class Planned(BitChoices):
    """The slow reference: a whole plan for each choice."""

    def __init__(self, bare: SplitPlan, scheme_groups: Sequence[SchemeGroup]) -> None:
        super().__init__(bare, scheme_groups)
        self.bare = bare

    def at(self, schemes: Sequence[str | None]) -> BitChoice:
        planned = recompressed(self.bare, AUTO, BitAllocation(self.schemes_of(schemes)))
        room = max(layout.size for layout in self.bare.layouts.values())
        scales = resident_bytes(planned, self.bare) - planned.output_bytes - room
        return BitChoice(tuple(schemes), planned.shards, planned.layer_map, planned.layouts, scales)


def mixtures(count: int, groups_of_it: int) -> Iterator[list[str | None]]:
    draw = random.Random(0)
    for palette in (FUSED, BLOCKWISE):
        yield from ([scheme] * groups_of_it for scheme in palette.compressions)
        yield from (draw.choices(palette.compressions, k=groups_of_it) for _ in range(count))


@pytest.mark.parametrize("kind", KINDS)
def test_estimated_sizes_are_those_of_plans(kind: str) -> None:
    bare = plan(kind)
    scheme_groups = groups(bare.tensors, 2)
    quick, slow = BitChoices(bare, scheme_groups), Planned(bare, scheme_groups)
    sizes = set()
    for schemes in mixtures(8, len(scheme_groups)):
        estimated, expected = quick.at(schemes), slow.at(schemes)
        assert (estimated.output_bytes, estimated.scales_made) == (expected.output_bytes, expected.scales_made)
        for layer, layout in expected.layouts.items():
            assert dict(estimated.layouts[layer].shard_bytes) == dict(layout.shard_bytes)
            of = operator.attrgetter("header_bytes", "size", "scratch_bytes", "joined_bytes")
            assert of(estimated.layouts[layer]) == of(layout)
            assert len(estimated.layouts[layer].joins) == len(layout.joins)
        for way, deletes in itertools.product(ShardTransfer, (False, True)):
            use = peak_of(estimated, shard_transfer=way, freed=all_freed(bare, deletes))
            assert use == peak_of(expected, shard_transfer=way, freed=all_freed(bare, deletes))
        sizes.add(estimated.output_bytes)
    assert len(sizes) > len(COMPRESSIONS)


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
)
def test_choice_by_estimates_is_the_choice_by_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    start = plan(kind)
    bare = recompressed(start, None)
    smallest, largest = (recompressed(start, scheme).output_bytes for scheme in (DOUBLE, None))
    budgets = [
        smallest + (largest - smallest) * step // 16 for step in ((1, 5, 12) if kind in QUICK else (1, 3, 5, 8, 12))
    ]
    limits: list[dict[str, int | bool]] = [{"max_disk": budget} for budget in budgets]
    limits += [{"max_disk": budget, "for_gpu": True} for budget in budgets]
    limits += [{"max_disk": budget, "fit_scales": True} for budget in budgets]
    limits += [{"memory": budget + max(layout.size for layout in bare.layouts.values())} for budget in budgets]
    chosen = set()
    for wishes, deletes in itertools.product(limits, (False, True)):
        options, disk_budget = SplitOptions(AUTO, min_free=0, **wishes), DiskBudget(tmp_path, all_freed(bare, deletes))  # type: ignore[arg-type]
        with monkeypatch.context() as patched:
            patched.setattr(bit_allocation, "BitChoices", Planned)
            expected = _outcome(start, disk_budget, options)
        assert _outcome(start, disk_budget, options) == expected
        chosen.add(repr(expected))
    assert len(chosen) > len(budgets)


def _outcome(start: SplitPlan, disk_budget: DiskBudget, options: SplitOptions) -> BitAllocation | str | None:
    try:
        return with_choice(start, disk_budget, options, 2).chosen
    except NotEnoughSpaceException as refused:
        return str(refused)


def test_alike_layers_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the same kind, with numbers of as many digits, at any cut into shards."""
    bare = plan("experts")
    quick = BitChoices(bare, groups(bare.tensors, 2))
    laid_out: list[str] = []

    def counted(name: LayerName, *arguments: Any) -> LayerLayout:
        laid_out.append(name.id)
        return lay_out_layer(name, *arguments)

    monkeypatch.setattr(bit_allocation, "lay_out_layer", counted)
    schemes = ["4bit"] * len(groups(bare.tensors, 2))
    quick.at(schemes)
    assert sorted(laid_out) == ["embed_tokens", "layers.0", "layers.1", "layers.10", "lm_head"]
    quick.at(["8bit", *schemes[1:]])
    assert len(laid_out) == 6


def test_digits_behind_the_layer_name_make_layers_differ() -> None:
    """`l1` and `l2`, with tensors `0.w` and `05.w`: which comes first depends on the digit before."""
    naming = LayerNaming((re.compile(r"(?P<id>l\d)"),))
    tensors: Tensors = {f"l{n}{suffix}.w": ("BF16", (64, 65)) for n in range(4) for suffix in ("0", "05", "6")}
    shards = (shard_of("one", tensors),)
    bare = make_plan(SOURCE, shards, assign_layers(list(tensors), None, naming), AUTO)
    scheme_groups = groups(bare.tensors)
    for schemes in mixtures(8, len(scheme_groups)):
        assert (
            BitChoices(bare, scheme_groups).at(schemes).output_bytes
            == Planned(bare, scheme_groups).at(schemes).output_bytes
        )
