"""Bits for each tensor: expected losses, the selection of offers, and the choice within the budgets."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from bitsandbytes import functional
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import rabbitllm
import rabbitllm.demo
from rabbitllm.base.options import SplitOptions
from rabbitllm.checkpoints.config import experts_a_token
from rabbitllm.errors import NotEnoughSpaceException
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.quantize import quantize_blocks
from rabbitllm.quant.schemes import COMPRESSIONS, DOUBLE, NESTED_BLOCK, NF4_BLOCK, code_values
from rabbitllm.splitter.bit_allocation import (
    ERRORS,
    FITTED_ERRORS,
    WORTH_LESS_BITS,
    Offer,
    SchemeGroup,
    allocate,
    allocation_of,
    groups,
    role_of,
    with_choice,
)
from rabbitllm.splitter.disk_budget import DiskBudget, candidates, shortage
from rabbitllm.splitter.plan import SplitPlan, recompressed
from rabbitllm.store.manifest import BitAllocation, read_manifest
from tests.support.builders import build_checkpoint
from tests.support.plans import MIB, all_freed, plan_of, resident_bytes, shard_of
from tests.support.quick_measuring import quick_measuring as quick_measuring
from tests.support.splitting import Call
from tests.support.tiny_models import one_thread as one_thread

HIDDEN, WIDTH, EXPERTS, SHARED = 64, 96, 12, 192


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"model.layers.{name}", "BF16", shape, "f", 0, 2 * torch.Size(shape).numel())


def mlp(name: str, width: int) -> list[TensorSpec]:
    up = [spec(f"{name}.{part}_proj.weight", width, HIDDEN) for part in ("gate", "up")]
    return [*up, spec(f"{name}.down_proj.weight", HIDDEN, width)]


def one_by_one() -> list[TensorSpec]:
    return [tensor for number in range(EXPERTS) for tensor in mlp(f"0.mlp.experts.{number}", WIDTH)]


def fused() -> list[TensorSpec]:
    names = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    return [spec(f"0.mlp.experts.{name}", EXPERTS, *shape) for name, shape in names.items()]


def weights(tensors: list[TensorSpec], picked: int | None) -> dict[tuple[str, str], float]:
    def part(group: SchemeGroup) -> str:
        return (
            "shared" if "shared" in group.tensors[0].name else "experts" if "experts" in group.tensors[0].name else ""
        )

    # another layer behind it, so that both are in models of the same depth
    found = groups([*tensors, spec("1.self_attn.o_proj.weight", HIDDEN, HIDDEN)], picked)
    return {(part(group), group.role): group.weight for group in found}


DENSE = weights(mlp("0.mlp", 512), None)
ROLES = ("gate and up", "down")


@pytest.mark.parametrize("experts", [one_by_one(), fused()], ids=["one by one", "fused"])
def test_experts_and_shared_ones_together_weigh_what_a_dense_layer_does(experts: list[TensorSpec]) -> None:
    tensors = [*experts, *mlp("0.mlp.shared_expert", SHARED)]
    for picked in (1, 3, EXPERTS):
        found = weights(tensors, picked)
        for role in ROLES:
            assert found["experts", role] + found["shared", role] == pytest.approx(DENSE["", role])
            # as wide as what a token is multiplied with
            assert found["experts", role] / found["shared", role] == pytest.approx(picked * WIDTH / SHARED)
    untold = weights(tensors, None)
    for role in ROLES:
        assert untold["experts", role] == untold["shared", role] == DENSE["", role]


@pytest.mark.parametrize("experts", [one_by_one(), fused()], ids=["one by one", "fused"])
@pytest.mark.parametrize("picked", [None, 2])
def test_without_shared_ones_experts_weigh_what_a_dense_layer_does(
    experts: list[TensorSpec], picked: int | None
) -> None:
    found = weights(experts, picked)
    for role in ROLES:
        assert found["experts", role] == pytest.approx(DENSE["", role])
    assert found["", "attention output"] == DENSE["", "attention output"]


def test_gate_and_up_in_one_matrix_weigh_what_both_do() -> None:
    both = weights([spec("0.mlp.gate_up_proj.weight", 1024, HIDDEN), spec("0.mlp.down_proj.weight", HIDDEN, 512)], None)
    assert both == DENSE


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_experts_per_tok": 8}, 8),
        ({"num_experts_per_tok": 8, "text_config": {"num_experts_per_tok": 2}}, 2),
        ({"moe_topk": 4, "text_config": None}, 4),
        ({"num_experts_per_tok": None}, None),
        ({"num_experts_per_tok": [8]}, None),
        ({"num_experts_per_tok": True}, None),
        ({"num_experts_per_tok": 0}, None),
        ({}, None),
    ],
)
def test_what_configs_say(config: dict[str, object], expected: int | None) -> None:
    assert experts_a_token(config) == expected


def test_what_the_config_says_is_in_the_choice_and_in_the_plan(tmp_path: Path) -> None:
    """The more experts a token uses, the less of what is lost is the shared one's."""
    shared_at_8bit: list[int] = []
    for picked in (1, 4):
        folder = build_checkpoint(tmp_path / str(picked), "deepseek_v3", dtype=torch.bfloat16)
        config = json.loads((folder / "config.json").read_text())
        assert config["n_shared_experts"]
        (folder / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": picked}))
        allowed = int(sum(path.stat().st_size for path in folder.glob("*.safetensors")) * 0.72)
        told = rabbitllm.plan(folder, compression="auto", max_disk=allowed, device="cpu", min_free_disk=0)
        (mixture,) = [one.mixture for one in told.outlooks if one.compression == "auto"]
        assert mixture is not None
        made = Call(str(folder), compression="auto", sequential=False, max_disk=allowed).make()
        again = rabbitllm.plan(folder, compression="auto", max_disk=allowed, device="cpu", min_free_disk=0)
        (finished,) = [one for one in again.outlooks if one.compression == "auto"]
        assert finished.finished
        assert finished.mixture is not None
        assert (finished.mixture.shares, finished.mixture.loss) == (mixture.shares, mixture.loss)
        manifest = read_manifest(made)
        assert manifest is not None
        assert manifest.chosen is not None
        used = [*manifest.chosen.schemes.values()]
        shares = {share.scheme: 0 for share in mixture.shares}
        for share in mixture.shares:
            shares[share.scheme] += share.tensors
        assert {scheme: used.count(scheme) for scheme in set(used)} == {s: n for s, n in shares.items() if s}
        schemes = manifest.chosen.schemes.items()
        shared_at_8bit.append(sum(scheme == "8bit" and "shared" in name for name, scheme in schemes))
    assert shared_at_8bit[0] > shared_at_8bit[1] > 0


# Bytes shared out among items: within the budget, never worse with more, as good as every combination tried.


OFFERS = st.builds(Offer, st.integers(0, 30), st.integers(0, 40).map(float))
ITEMS = st.lists(st.lists(OFFERS, min_size=1, max_size=4), max_size=5)
BUDGETS = st.integers(0, 160)


def taken(items: list[list[Offer]], budget: int) -> list[Offer] | None:
    found = allocate(items, budget)
    return None if found is None else [offers[number] for offers, number in zip(items, found, strict=True)]


def loss(offers: list[Offer]) -> float:
    return sum(offer.loss for offer in offers)


def nbytes(offers: list[Offer]) -> int:
    return sum(offer.nbytes for offer in offers)


def best(items: list[list[Offer]], budget: int) -> float | None:
    """The least loss of all combinations that fit."""
    fitting = [loss([*one]) for one in itertools.product(*items) if nbytes([*one]) <= budget]
    return min(fitting, default=None)


@given(ITEMS, BUDGETS)
@settings(max_examples=300, deadline=None)
def test_never_over_budget_and_refused_only_where_nothing_fits(items: list[list[Offer]], budget: int) -> None:
    found = taken(items, budget)
    if found is None:
        assert best(items, budget) is None
    else:
        assert nbytes(found) <= budget


@given(ITEMS, BUDGETS, BUDGETS)
@settings(max_examples=500, deadline=None)
@pytest.mark.long
def test_more_bytes_are_never_worse(items: list[list[Offer]], one: int, other: int) -> None:
    less, more = taken(items, min(one, other)), taken(items, max(one, other))
    if less is not None:
        assert more is not None
        assert loss(more) <= loss(less)


@given(ITEMS, BUDGETS)
@settings(max_examples=300, deadline=None)
def test_what_is_used_up_could_not_be_used_better(items: list[list[Offer]], budget: int) -> None:
    """Where no step was passed over, nothing with as many bytes loses less."""
    found = taken(items, budget)
    if found is None:
        return
    at_most = taken(items, nbytes(found))
    assert at_most is not None
    assert loss(at_most) == loss(found)
    dearest = max((max(o.loss for o in offers) - min(o.loss for o in offers) for offers in items), default=0)
    least = best(items, budget)
    assert least is not None
    assert least <= loss(found) <= least + dearest


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(0, 24))
@settings(max_examples=300, deadline=None)
def test_exact_where_each_step_takes_the_same(losses: list[list[int]], budget: int) -> None:
    """Steps of one byte, each gaining no more than the one before: then the order of gain is the best there is."""
    items = []
    for gains in losses:
        at, offers = float(sum(gains)), [Offer(0, float(sum(gains)))]
        for number, gain in enumerate(sorted(gains, reverse=True)):
            at -= gain
            offers.append(Offer(number + 1, at))
        items.append(offers)
    found = taken(items, budget)
    assert found is not None
    assert loss(found) == best(items, budget)


def test_equal_items_are_served_in_their_order() -> None:
    items = [[Offer(0, 5.0), Offer(10, 1.0)]] * 4
    assert allocate(items, 25) == (1, 1, 0, 0)


def test_an_offer_above_the_hull_is_not_taken() -> None:
    """The middle one costs 8 bytes for a gain of 1; the step past it gains more a byte, and others come first."""
    one = [Offer(0, 10.0), Offer(8, 9.0), Offer(10, 0.0)]
    assert allocate([one, one], 18) == (2, 0)
    assert allocate([one, one], 20) == (2, 2)


def test_a_step_that_does_not_fit_lets_later_ones_pass() -> None:
    large, small = [Offer(0, 100.0), Offer(50, 0.0)], [Offer(0, 1.0), Offer(5, 0.0)]
    assert allocate([large, small], 20) == (0, 1)
    assert allocate([large], 49) == (0,)
    assert allocate([[Offer(3, 0.0)]], 2) is None
    assert allocate([], 0) == ()


# Bits by budget: what is chosen keeps the limits to the byte, and gains with each byte.


Usage = namedtuple("Usage", "total used free")
FREE = 10**15
DEMO_MODEL = Path(rabbitllm.demo.__file__).parent / "model"


def model_of(layers: int = 4, staged: bool = False) -> SplitPlan:
    """Shards of a layer each, with matrices of the usual roles."""
    shards = [shard_of("shard-0", {"model.embed_tokens.weight": ("BF16", (4096, 256))}, staged)]
    for n in range(layers):
        lead = f"model.layers.{n}."
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {lead + "input_layernorm.weight": ("BF16", (256,))}
        tensors |= {f"{lead}self_attn.{p}_proj.weight": ("BF16", (256, 256)) for p in "qo"}
        tensors |= {f"{lead}self_attn.{p}_proj.weight": ("BF16", (64, 256)) for p in "kv"}
        tensors |= {f"{lead}mlp.{p}_proj.weight": ("BF16", (768, 256)) for p in ("gate", "up")}
        tensors[lead + "mlp.down_proj.weight"] = ("BF16", (256, 768))
        shards.append(shard_of(f"shard-{n + 1}", tensors, staged))
    shards.append(shard_of("shard-9", {"lm_head.weight": ("BF16", (4096, 256))}, staged))
    return plan_of(tuple(shards))


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free disk as choosing sees it, in bytes; to be changed by the test."""
    amount = [FREE]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2 * FREE, 0, amount[0]))
    return amount


def choose(folder: Path, *, deletes: bool = False, plan: SplitPlan | None = None, **options: int) -> SplitPlan:
    plan = plan or model_of()
    disk_budget = DiskBudget(folder, all_freed(plan, deletes))
    return with_choice(plan, disk_budget, SplitOptions("auto", min_free=0, **options))  # type: ignore[arg-type]


def expected_loss(plan: SplitPlan, *, fitted: bool = False) -> float:
    found = allocation_of(plan, fitted=fitted)
    assert found is not None
    return found.loss


def at(plan: SplitPlan, compression: str | None) -> int:
    return recompressed(plan, compression).output_bytes


def compressible(plan: SplitPlan) -> list[str]:
    return [spec.name for group in groups(plan.tensors) for spec in group.tensors]


@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_what_is_chosen_fits_by_the_split_s_own_reckoning(tmp_path: Path, staged: bool, deletes: bool) -> None:
    plan = model_of(staged=staged)
    least, most = at(plan, "4bit"), at(plan, None)
    before, above = float("inf"), False
    at_8bit = expected_loss(recompressed(plan, "auto", BitAllocation(dict.fromkeys(compressible(plan), "8bit"))))
    for step in range(1, 12):
        allowed = least + (most - least) * step // 10
        made = choose(tmp_path, deletes=deletes, plan=plan, max_disk=allowed)
        options = SplitOptions("auto", max_disk=allowed, min_free=0)
        ways = candidates(made, "auto")
        assert any(shortage(made, DiskBudget(tmp_path, all_freed(plan, deletes)), options, way) is None for way in ways)
        assert made.chosen is not None
        above = above or not {"4bit", "4bit-double"} & {*made.chosen.schemes.values()}
        if above:  # 8bit fits for all
            assert expected_loss(made) <= min(at_8bit, before / WORTH_LESS_BITS)
        else:
            assert expected_loss(made) <= before
        before = expected_loss(made)
    assert above
    assert before == 0


def test_a_byte_less_than_the_least_is_refused_and_the_least_is_not(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughSpaceException) as refused:
        choose(tmp_path, max_disk=1000)
    assert refused.value.remedy is not None
    least = int(refused.value.remedy.removeprefix("Set max_disk to at least ").rstrip("."))
    made = choose(tmp_path, max_disk=least)
    assert made.chosen is not None
    assert set(made.chosen.schemes) == {spec.name for group in groups(made.tensors) for spec in group.tensors}
    assert made.output_bytes <= least
    with pytest.raises(NotEnoughSpaceException, match=f"Set max_disk to at least {least}\\."):
        choose(tmp_path, max_disk=least - 1)


def test_the_free_disk_is_a_limit_where_nothing_is_said(tmp_path: Path, free: list[int]) -> None:
    plan = model_of()
    free[0] = at(plan, "8bit") + MIB
    made = choose(tmp_path, plan=plan)
    assert made.chosen is not None
    assert at(plan, "4bit") < made.output_bytes <= free[0]
    assert set(made.chosen.schemes.values()) >= {"8bit"}
    free[0] = 1000
    with pytest.raises(NotEnoughSpaceException, match=r"Free .* there, or use a folder on another disk"):
        choose(tmp_path, plan=plan)


def test_all_stays_in_memory_where_that_can_be(tmp_path: Path) -> None:
    plan = model_of()
    bare = recompressed(plan, None)
    for memory in (resident_bytes(recompressed(plan, c), bare) for c in COMPRESSIONS):
        for more in (0, 1, 100_000):
            made = choose(tmp_path, plan=plan, memory=memory + more, max_disk=FREE)
            assert resident_bytes(made, bare) <= memory + more
            assert made.chosen is not None
            assert made.chosen.memory == memory + more
    assert expected_loss(choose(tmp_path, plan=plan, memory=resident_bytes(bare, bare))) == 0


def test_scales_that_are_made_count_as_memory(tmp_path: Path) -> None:
    """4bit-double is the smaller one on the disk, and the larger one in memory."""
    plan = model_of()
    bare = recompressed(plan, None)
    least = resident_bytes(recompressed(plan, "4bit"), bare)
    double = recompressed(plan, DOUBLE)
    assert double.output_bytes < recompressed(plan, "4bit").output_bytes
    assert resident_bytes(double, bare) > least
    made = choose(tmp_path, plan=plan, memory=least, max_disk=FREE)
    assert set(made.chosen.schemes.values()) == {"4bit"}


def test_what_is_streamed_anyway_has_no_more_than_8bit_of_a_disk_that_is_merely_free(tmp_path: Path) -> None:
    plan = model_of()
    streamed = choose(tmp_path, plan=plan, memory=MIB)
    assert streamed.chosen is not None
    assert streamed.chosen.memory is None
    assert set(streamed.chosen.schemes.values()) == {"8bit"}
    assert streamed.output_bytes == at(plan, "8bit")
    said = choose(tmp_path, plan=plan, memory=MIB, max_disk=FREE)
    assert said.chosen is not None
    assert not said.chosen.schemes


def test_fitted_scales_are_expected_to_lose_less_and_change_the_choice(tmp_path: Path) -> None:
    plan = model_of()
    least, at_8bit = at(plan, "4bit"), at(plan, "8bit")
    others = 0
    for allowed in range(least, at_8bit + 1, (at_8bit - least) // 20):
        plain = choose(tmp_path, plan=plan, max_disk=allowed)
        fitted = choose(tmp_path, plan=plan, max_disk=allowed, fit_scales=True)
        assert plain.chosen is not None
        if set(plain.chosen.schemes.values()) != {"8bit"}:
            assert expected_loss(fitted, fitted=True) < expected_loss(plain)
            assert expected_loss(plain, fitted=True) < expected_loss(plain)
        # nothing is chosen that would be worse than what was chosen for other scales, but for safety's sake
        sure = recompressed(plan, "auto", BitAllocation(dict.fromkeys(compressible(plan), "8bit")))
        bound = min(expected_loss(plain, fitted=True), expected_loss(sure) if sure.output_bytes <= allowed else 1)
        assert expected_loss(fitted, fitted=True) * WORTH_LESS_BITS <= bound
        others += fitted.chosen != plain.chosen
    assert others


def test_what_a_mixture_is_compared_with_does_not_depend_on_its_scales(tmp_path: Path) -> None:
    made = choose(tmp_path, max_disk=at(model_of(), "4bit"))
    plain, fitted = allocation_of(made), allocation_of(made, fitted=True)
    assert plain is not None
    assert fitted is not None
    assert (plain.fitted, fitted.fitted) == (False, True)
    assert plain.uniform["4bit"] == 1
    assert fitted.uniform["8bit"] == plain.uniform["8bit"]
    less = {scheme: FITTED_ERRORS[scheme] / ERRORS[scheme] for scheme in ("4bit", DOUBLE)}
    assert fitted.uniform["4bit"] == pytest.approx(less["4bit"])
    # small matrices are at 4bit there
    assert less["4bit"] < fitted.uniform[DOUBLE] / plain.uniform[DOUBLE] <= less[DOUBLE]


@pytest.mark.parametrize("scheme", ["4bit", DOUBLE])
def test_expected_errors_are_those_of_a_trained_matrix(scheme: str) -> None:
    """Within what tensors differ by."""
    with safe_open(DEMO_MODEL / "model-00001-of-00012.safetensors", "pt") as file:
        weights = file.get_tensor("model.embed_tokens.weight")
    values = weights.float().flatten()

    def error(fitted: bool) -> float:
        data = memoryview(weights.flatten().view(torch.uint8).numpy())
        codes, scales = (torch.frombuffer(part, dtype=torch.uint8) for part in quantized(scheme, data, fitted))
        found = scales.view(torch.float32)
        if scheme == DOUBLE:
            packed, state = functional.quantize_blockwise(found - found.mean(), blocksize=NESTED_BLOCK)
            found = functional.dequantize_blockwise(packed, state) + found.mean()
        numbers = torch.stack([codes >> 4, codes & 15], dim=1).flatten().long()
        made = (code_values("4bit")[numbers].view(-1, NF4_BLOCK) * found[:, None]).flatten()
        return float((made - values).square().sum() / values.square().sum())

    assert error(False) == pytest.approx(ERRORS[scheme], rel=0.2)
    assert error(True) / error(False) == pytest.approx(FITTED_ERRORS[scheme] / ERRORS[scheme], abs=0.03)


def quantized(scheme: str, data: memoryview, fitted: bool) -> tuple[memoryview, memoryview]:
    return quantize_blocks(scheme, data, "BF16", "cpu", fitted=fitted)


def test_roles() -> None:
    known = {
        "model.embed_tokens.weight": "embedding",
        "transformer.wte.weight": "embedding",
        "tok_embeddings.weight": "embedding",
        "lm_head.weight": "head",
        "output.weight": "head",
        "model.layers.3.self_attn.q_proj.weight": "query",
        "model.layers.3.self_attn.kv_b_proj.weight": "value",
        "layers.3.attention.wo.weight": "attention output",
        "transformer.h.0.attn.c_attn.weight": "query, key and value",
        "transformer.h.0.attn.c_proj.weight": "attention output",
        "transformer.h.0.mlp.c_proj.weight": "down",
        "model.layers.3.mlp.gate_proj.weight": "gate and up",
        "model.layers.3.mlp.experts.gate_up_proj": "gate and up",
        "model.layers.3.block_sparse_moe.experts.7.w2.weight": "down",
        "backbone.layers.0.mixer.x_matrix.weight": "other",
    }
    assert {name: role_of(name) for name in known} == known


def test_experts_of_a_layer_have_one_scheme_for_what_is_made_one_matrix() -> None:
    parts = [f"{expert}.{part}_proj" for expert in range(12) for part in ("gate", "up", "down")]
    names = [f"model.layers.{layer}.mlp.experts.{part}.weight" for layer in (0, 1) for part in parts]
    found = groups([TensorSpec(name, "BF16", (64, 64), "f", 0, 8192) for name in names])
    assert [(group.role, len(group.tensors)) for group in found] == [("down", 12), ("gate and up", 24)] * 2
    one = groups([TensorSpec(f"model.layers.{n}.mlp.down_proj.weight", "BF16", (64, 64), "f", 0, 8192) for n in (0, 1)])
    assert found[0].weight == one[0].weight


def test_a_tied_embedding_weighs_what_the_head_does_too() -> None:
    embedding = TensorSpec("model.embed_tokens.weight", "BF16", (512, 64), "f", 0, 65536)
    head = embedding._replace(name="lm_head.weight")
    tied, apart = groups([embedding]), groups([embedding, head])
    assert tied[0].weight == pytest.approx(sum(group.weight for group in apart))
