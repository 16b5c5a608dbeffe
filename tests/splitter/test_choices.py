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
from rabbitllm.splitter.bit_allocation import BitChoices, SchemeGroup, groups, with_choice
from rabbitllm.splitter.disk_budget import BitChoice, DiskBudget, ShardTransfer
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, layout_at, make_plan, recompressed
from rabbitllm.store.layer_file import BY_NAME, FORMAT_VERSION, LayerLayout
from rabbitllm.store.manifest import AUTO, BitAllocation
from tests.support.plans import SOURCE, all_freed, peak_of, resident_bytes, shard_of

Usage = namedtuple("Usage", "total used free")
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def dense(layers: int = 12) -> Tensors:
    """A Llama's, with matrices of which some are too small for 4bit-double, and odd numbers of scales."""
    made: Tensors = {"model.embed_tokens.weight": ("BF16", (515, 64))}
    for n in range(layers):
        lead = f"model.layers.{n}."
        made[lead + "input_layernorm.weight"] = ("BF16", (64,))
        made |= {f"{lead}self_attn.{p}_proj.weight": ("BF16", (64, 64)) for p in "qkvo"}
        made |= {f"{lead}mlp.{p}_proj.weight": ("BF16", (517, 64)) for p in ("gate", "up")}
        made[lead + "mlp.down_proj.weight"] = ("BF16", (64, 517 + 64 * (n == 3)))
    return {**made, "model.norm.weight": ("F32", (64,)), "lm_head.weight": ("BF16", (515, 64))}


def experts(layers: int = 11) -> Tensors:
    """A mixture's: layers of two kinds in turns, five experts, one that all tokens use."""
    made: Tensors = {"model.embed_tokens.weight": ("BF16", (600, 64))}
    for n in range(layers):
        lead = f"model.layers.{n}."
        attention = ["self_attn.q_proj", "self_attn.o_proj"] if n % 2 else ["linear_attn.in_proj_qkvz"]
        made |= {f"{lead}{name}.weight": ("BF16", (96, 64)) for name in attention}
        made[lead + "mlp.gate.weight"] = ("BF16", (5, 64))
        for expert in [*(f"experts.{number}" for number in range(5)), "shared_expert"]:
            made |= {f"{lead}mlp.{expert}.{part}_proj.weight": ("BF16", (520, 64)) for part in ("gate", "up")}
            made[f"{lead}mlp.{expert}.down_proj.weight"] = ("BF16", (64, 520))
    return {**made, "lm_head.weight": ("BF16", (600, 64))}


def gpt2(layers: int = 3) -> Tensors:
    made: Tensors = {"transformer.wte.weight": ("F32", (700, 64)), "transformer.wpe.weight": ("F32", (128, 64))}
    for n in range(layers):
        lead = f"transformer.h.{n}."
        made |= {lead + "attn.c_attn.weight": ("F32", (64, 192)), lead + "attn.c_attn.bias": ("F32", (192,))}
        made |= {lead + "mlp.c_fc.weight": ("F32", (64, 256)), lead + "mlp.c_proj.weight": ("F32", (256, 64))}
    return made


def shards_of(tensors: Tensors, count: int = 3, staged: bool = False) -> tuple[PlannedShard, ...]:
    """Cut anywhere, in an order of names in which numbers are text, so that layers go over two of them."""
    names = sorted(tensors)
    step = -(-len(names) // count)
    runs = [names[at : at + step] for at in range(0, len(names), step)]
    return tuple(shard_of(f"shard-{n}", {name: tensors[name] for name in run}, staged) for n, run in enumerate(runs))


def plan_at(shards: tuple[PlannedShard, ...], family: str, version: int = FORMAT_VERSION) -> SplitPlan:
    names = [spec.name for shard in shards for spec in shard.tensors]
    return make_plan(SOURCE, shards, assign_layers(names, family), AUTO, version)


def in_pieces(ranks: int = 2) -> tuple[PlannedShard, ...]:
    """Cut along either dimension, into whole blocks and others, as ranks have them; norms are whole."""
    cuts = {"q_proj": (512, 128, 0), "o_proj": (256, 512, 1), "up_proj": (300, 130, 0), "down_proj": (64, 1040, 1)}
    shards = []
    for rank in range(ranks):
        specs, at = [], 0
        for n, (part, (rows, columns, dim)) in itertools.product(range(3), cuts.items()):
            name, whole = f"model.layers.{n}.{part}.weight", (rows, columns)
            own = (rows // ranks, columns) if dim == 0 else (rows, columns // ranks)
            piece = TensorPiece(name, whole, dim, rank * own[dim])
            specs.append(TensorSpec(f"{name}:{rank}", "BF16", own, f"rank-{rank}", at, 2 * math.prod(own), piece=piece))
            at += specs[-1].nbytes
        if rank == 0:
            norms = {f"model.layers.{n}.norm.weight": ("BF16", (128, 300)) for n in range(3)}
            specs += [spec._replace(file="rank-0", offset=at) for spec in shard_of("rank-0", norms).tensors]
        shards.append(PlannedShard(f"rank-{rank}", at, "sampled:0", tuple(specs), staged=False))
    return tuple(shards)


def plan(kind: str) -> SplitPlan:
    made: dict[str, Callable[[], SplitPlan]] = {
        "dense": lambda: plan_at(shards_of(dense()), "llama"),
        "dense, an earlier format": lambda: plan_at(shards_of(dense()), "llama", BY_NAME),
        "experts": lambda: plan_at(shards_of(experts(), 5), "qwen3_next"),
        "experts, fetched": lambda: plan_at(shards_of(experts(2), 4, staged=True), "qwen3_next"),
        "gpt2": lambda: plan_at(shards_of(gpt2()), "gpt2"),
        "pieces": lambda: plan_at(in_pieces(), "llama"),
    }
    return made[kind]()


KINDS = ["dense", "dense, an earlier format", "experts", "experts, fetched", "gpt2", "pieces"]
QUICK = KINDS[3:]
"""With few tensors."""


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**15, 0, 10**15))


class Planned(BitChoices):
    """The slow and plain way: a whole plan for each choice."""

    def __init__(self, bare: SplitPlan, found: Sequence[SchemeGroup]) -> None:
        super().__init__(bare, found)
        self.bare = bare

    def at(self, schemes: Sequence[str | None]) -> BitChoice:
        made = recompressed(self.bare, AUTO, BitAllocation(self.schemes_of(schemes)))
        room = max(layout.size for layout in self.bare.layouts.values())
        scales = resident_bytes(made, self.bare) - made.output_bytes - room
        return BitChoice(tuple(schemes), made.shards, made.layer_map, made.layouts, scales)


def mixtures(count: int, groups_of_it: int) -> Iterator[list[str | None]]:
    draw = random.Random(0)
    yield from ([scheme] * groups_of_it for scheme in COMPRESSIONS)
    yield from (draw.choices(COMPRESSIONS, k=groups_of_it) for _ in range(count))


@pytest.mark.parametrize("kind", KINDS)
def test_every_size_is_the_plan_s(kind: str) -> None:
    bare = plan(kind)
    found = groups(bare.tensors, 2)
    quick, slow = BitChoices(bare, found), Planned(bare, found)
    sizes = set()
    for schemes in mixtures(12, len(found)):
        own, expected = quick.at(schemes), slow.at(schemes)
        assert (own.output_bytes, own.scales_made) == (expected.output_bytes, expected.scales_made)
        for layer, layout in expected.layouts.items():
            assert dict(own.layouts[layer].shard_bytes) == dict(layout.shard_bytes)
            of = operator.attrgetter("header_bytes", "size", "scratch_bytes", "joined_bytes")
            assert of(own.layouts[layer]) == of(layout)
            assert len(own.layouts[layer].joins) == len(layout.joins)
        for way, deletes in itertools.product(ShardTransfer, (False, True)):
            use = peak_of(own, shard_transfer=way, freed=all_freed(bare, deletes))
            assert use == peak_of(expected, shard_transfer=way, freed=all_freed(bare, deletes))
        sizes.add(own.output_bytes)
    assert len(sizes) > len(COMPRESSIONS)


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
)
def test_what_is_chosen_is_what_plans_would_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    start = plan(kind)
    bare = recompressed(start, None)
    least, most = (recompressed(start, scheme).output_bytes for scheme in (DOUBLE, None))
    budgets = [least + (most - least) * step // 16 for step in ((1, 5, 12) if kind in QUICK else (1, 3, 5, 8, 12))]
    said: list[dict[str, int | bool]] = [{"max_disk": budget} for budget in budgets]
    said += [{"max_disk": budget, "fit_scales": True} for budget in budgets]
    said += [{"memory": budget + max(layout.size for layout in bare.layouts.values())} for budget in budgets]
    chosen = set()
    for wishes, deletes in itertools.product(said, (False, True)):
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


def test_layers_that_are_alike_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers of as many digits, of the same kind, wherever shards are cut."""
    bare = plan("experts")
    quick = BitChoices(bare, groups(bare.tensors, 2))
    laid_out: list[str] = []

    def counted(name: LayerName, *arguments: Any) -> LayerLayout:
        laid_out.append(name.id)
        return layout_at(name, *arguments)

    monkeypatch.setattr(bit_allocation, "layout_at", counted)
    schemes = ["4bit"] * len(groups(bare.tensors, 2))
    quick.at(schemes)
    assert sorted(laid_out) == ["embed_tokens", "layers.0", "layers.1", "layers.10", "lm_head"]
    quick.at(["8bit", *schemes[1:]])
    assert len(laid_out) == 6


def test_a_number_that_goes_on_behind_the_layer_s_name_makes_no_layer_like_another() -> None:
    """`l1` and `l2`, with tensors `0.w` and `05.w`: which comes first depends on the digit before."""
    naming = LayerNaming((re.compile(r"(?P<id>l\d)"),))
    tensors: Tensors = {f"l{n}{rest}.w": ("BF16", (64, 65)) for n in range(4) for rest in ("0", "05", "6")}
    shards = (shard_of("one", tensors),)
    bare = make_plan(SOURCE, shards, assign_layers(list(tensors), None, naming), AUTO)
    found = groups(bare.tensors)
    for schemes in mixtures(8, len(found)):
        assert BitChoices(bare, found).at(schemes).output_bytes == Planned(bare, found).at(schemes).output_bytes
