"""Bits for each tensor: expected losses, the selection of options, and the choice within the budgets."""

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
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant import block_encoders, gguf_blocks
from rabbitllm.quant.quantize import quantize_blocks
from rabbitllm.quant.schemes import BLOCKS, DOUBLE, NESTED_BLOCK, NF4_BLOCK, code_values
from rabbitllm.splitter._presets import role_of
from rabbitllm.splitter.bit_allocation import (
    BLOCKWISE,
    ERRORS,
    FITTED_ERRORS,
    FUSED,
    WORTH_LESS_BITS,
    SchemeGroup,
    SchemeOption,
    allocate,
    allocation_of,
    groups,
    with_choice,
)
from rabbitllm.splitter.disk_budget import DiskBudget, candidates, shortage
from rabbitllm.splitter.plan import SplitPlan, recompressed
from rabbitllm.store.manifest import BitAllocation, read_manifest
from tests.support.builders import build_checkpoint
from tests.support.draws import draws
from tests.support.plans import MIB, all_freed, plan_of, resident_bytes, shard_of
from tests.support.quick_measuring import quick_measuring as quick_measuring
from tests.support.splitting import Call
from tests.support.tiny_models import one_thread as one_thread

BITS = {name: 8 * BLOCK_TYPES[block].nbytes / BLOCK_TYPES[block].elements for name, block in BLOCKS.items()}
HIDDEN, WIDTH, EXPERTS, SHARED = 64, 96, 12, 192


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"model.layers.{name}", "BF16", shape, "f", 0, 2 * torch.Size(shape).numel())


def mlp(name: str, width: int) -> list[TensorSpec]:
    up = [spec(f"{name}.{part}_proj.weight", width, HIDDEN) for part in ("gate", "up")]
    return [*up, spec(f"{name}.down_proj.weight", HIDDEN, width)]


def one_by_one() -> list[TensorSpec]:
    return [tensor for expert in range(EXPERTS) for tensor in mlp(f"0.mlp.experts.{expert}", WIDTH)]


def fused() -> list[TensorSpec]:
    names = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    return [spec(f"0.mlp.experts.{name}", EXPERTS, *shape) for name, shape in names.items()]


def weights(tensors: list[TensorSpec], picked: int | None) -> dict[tuple[str, str], float]:
    def part(group: SchemeGroup) -> str:
        return (
            "shared" if "shared" in group.tensors[0].name else "experts" if "experts" in group.tensors[0].name else ""
        )

    # another layer behind it, so that both are in models of the same depth
    scheme_groups = groups([*tensors, spec("1.self_attn.o_proj.weight", HIDDEN, HIDDEN)], picked)
    return {(part(group), group.role): group.weight for group in scheme_groups}


DENSE = weights(mlp("0.mlp", 512), None)
ROLES = ("gate and up", "down")


@pytest.mark.parametrize("experts", [one_by_one(), fused()], ids=["one by one", "fused"])
def test_experts_and_shared_experts_together_weigh_as_a_dense_layer(experts: list[TensorSpec]) -> None:
    tensors = [*experts, *mlp("0.mlp.shared_expert", SHARED)]
    for picked in (1, 3, EXPERTS):
        weight = weights(tensors, picked)
        for role in ROLES:
            assert weight["experts", role] + weight["shared", role] == pytest.approx(DENSE["", role])
            # as wide as what a token is multiplied with
            assert weight["experts", role] / weight["shared", role] == pytest.approx(picked * WIDTH / SHARED)
    untold = weights(tensors, None)
    for role in ROLES:
        assert untold["experts", role] == untold["shared", role] == DENSE["", role]


@pytest.mark.parametrize("experts", [one_by_one(), fused()], ids=["one by one", "fused"])
@pytest.mark.parametrize("picked", [None, 2])
def test_experts_without_shared_experts_weigh_as_a_dense_layer(experts: list[TensorSpec], picked: int | None) -> None:
    weight = weights(experts, picked)
    for role in ROLES:
        assert weight["experts", role] == pytest.approx(DENSE["", role])
    assert weight["", "attention output"] == DENSE["", "attention output"]


def test_fused_gate_and_up_weigh_as_two_matrices() -> None:
    fused = weights(
        [spec("0.mlp.gate_up_proj.weight", 1024, HIDDEN), spec("0.mlp.down_proj.weight", HIDDEN, 512)], None
    )
    assert fused == DENSE


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
def test_experts_a_token_of_configs(config: dict[str, object], expected: int | None) -> None:
    assert experts_a_token(config) == expected


def test_experts_a_token_are_used_in_the_choice_and_in_the_plan(tmp_path: Path) -> None:
    """The more experts a token uses, the smaller is the shared expert's part of the loss."""
    shared_bits: list[float] = []
    for picked in (1, 4):
        folder = build_checkpoint(tmp_path / str(picked), "deepseek_v3", dtype=torch.bfloat16)
        config = json.loads((folder / "config.json").read_text())
        assert config["n_shared_experts"]
        (folder / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": picked}))
        allowed = int(sum(path.stat().st_size for path in folder.glob("*.safetensors")) * 0.87)
        estimate = rabbitllm.plan(folder, compression="auto", max_disk=allowed, device="cpu", min_free_disk=0)
        (mixture,) = [outlook.mixture for outlook in estimate.outlooks if outlook.compression == "auto"]
        assert mixture is not None
        split_folder = Call(str(folder), compression="auto", sequential=False, max_disk=allowed).make()
        finished_estimate = rabbitllm.plan(folder, compression="auto", max_disk=allowed, device="cpu", min_free_disk=0)
        (finished,) = [outlook for outlook in finished_estimate.outlooks if outlook.compression == "auto"]
        assert finished.finished
        assert finished.mixture is not None
        assert (finished.mixture.shares, finished.mixture.loss) == (mixture.shares, mixture.loss)
        manifest = read_manifest(split_folder)
        assert manifest is not None
        assert manifest.chosen is not None
        used = [*manifest.chosen.schemes.values()]
        shares = {share.scheme: 0 for share in mixture.shares}
        for share in mixture.shares:
            shares[share.scheme] += share.tensors
        assert {scheme: used.count(scheme) for scheme in set(used)} == {s: n for s, n in shares.items() if s}
        schemes = manifest.chosen.schemes.items()
        shared_bits.append(sum(BITS[scheme] for name, scheme in schemes if "shared" in name))
    assert shared_bits[0] > shared_bits[1] > 0


# Bytes shared out among items: within the budget, never worse with more, as good as every combination tried.


OFFERS = st.builds(SchemeOption, st.integers(0, 30), st.integers(0, 40).map(float))
ITEMS = st.lists(st.lists(OFFERS, min_size=1, max_size=4), max_size=5)
BUDGETS = st.integers(0, 160)


def taken(items: list[list[SchemeOption]], budget: int) -> list[SchemeOption] | None:
    indices = allocate(items, budget)
    return None if indices is None else [offers[index] for offers, index in zip(items, indices, strict=True)]


def loss(offers: list[SchemeOption]) -> float:
    return sum(offer.loss for offer in offers)


def nbytes(offers: list[SchemeOption]) -> int:
    return sum(offer.nbytes for offer in offers)


def best(items: list[list[SchemeOption]], budget: int) -> float | None:
    """The least loss of all combinations that fit."""
    fitting = [loss([*options]) for options in itertools.product(*items) if nbytes([*options]) <= budget]
    return min(fitting, default=None)


@given(ITEMS, BUDGETS)
@settings(max_examples=draws(300), deadline=None)
def test_allocation_fits_and_is_refused_only_if_no_option_fits(items: list[list[SchemeOption]], budget: int) -> None:
    selected = taken(items, budget)
    if selected is None:
        assert best(items, budget) is None
    else:
        assert nbytes(selected) <= budget


@given(ITEMS, BUDGETS, BUDGETS)
@settings(max_examples=draws(500), deadline=None)
@pytest.mark.long
def test_larger_budget_is_never_worse(items: list[list[SchemeOption]], first: int, second: int) -> None:
    less, more = taken(items, min(first, second)), taken(items, max(first, second))
    if less is not None:
        assert more is not None
        assert loss(more) <= loss(less)


@given(ITEMS, BUDGETS)
@settings(max_examples=draws(300), deadline=None)
def test_used_bytes_are_used_best(items: list[list[SchemeOption]], budget: int) -> None:
    """If no step was skipped, no selection with as many bytes loses less."""
    selected = taken(items, budget)
    if selected is None:
        return
    at_most = taken(items, nbytes(selected))
    assert at_most is not None
    assert loss(at_most) == loss(selected)
    dearest = max((max(o.loss for o in offers) - min(o.loss for o in offers) for offers in items), default=0)
    least = best(items, budget)
    assert least is not None
    assert least <= loss(selected) <= least + dearest


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(0, 24))
@settings(max_examples=draws(300), deadline=None)
def test_exact_for_steps_of_equal_size(losses: list[list[int]], budget: int) -> None:
    """Steps of one byte, each gaining no more than the one before: the order of gain is optimal."""
    items = []
    for gains in losses:
        loss_left, offers = float(sum(gains)), [SchemeOption(0, float(sum(gains)))]
        for index, gain in enumerate(sorted(gains, reverse=True)):
            loss_left -= gain
            offers.append(SchemeOption(index + 1, loss_left))
        items.append(offers)
    selected = taken(items, budget)
    assert selected is not None
    assert loss(selected) == best(items, budget)


def test_equal_items_are_selected_in_their_order() -> None:
    items = [[SchemeOption(0, 5.0), SchemeOption(10, 1.0)]] * 4
    assert allocate(items, 25) == (1, 1, 0, 0)


def test_option_above_the_hull_is_not_selected() -> None:
    """The middle option costs 8 bytes for a gain of 1; the step past it gains more per byte."""
    item = [SchemeOption(0, 10.0), SchemeOption(8, 9.0), SchemeOption(10, 0.0)]
    assert allocate([item, item], 18) == (2, 0)
    assert allocate([item, item], 20) == (2, 2)


def test_step_that_does_not_fit_is_skipped() -> None:
    large, small = [SchemeOption(0, 100.0), SchemeOption(50, 0.0)], [SchemeOption(0, 1.0), SchemeOption(5, 0.0)]
    assert allocate([large, small], 20) == (0, 1)
    assert allocate([large], 49) == (0,)
    assert allocate([[SchemeOption(3, 0.0)]], 2) is None
    assert allocate([], 0) == ()


def test_largest_item_leaves_room_if_the_others_gain_more() -> None:
    """The step with the highest gain per byte, of the largest item, would leave half of the budget."""
    large = [SchemeOption(0, 100.0), SchemeOption(60, 39.4)]
    small = [SchemeOption(0, 14.0), SchemeOption(14, 0.0)]
    assert allocate([large, *[small] * 10], 70) == (0, *[1] * 5, *[0] * 5)


# Bits by budget: what is chosen keeps the limits to the byte, and gains with each byte.


Usage = namedtuple("Usage", "total used free")
FREE = 10**15
DEMO_MODEL = Path(rabbitllm.demo.__file__).parent / "model"


def model_of(layers: int = 4, staged: bool = False) -> SplitPlan:
    """One shard for each layer, with matrices of the usual roles."""
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
    """The free disk that the choice sees, bytes; a test may change it."""
    amount = [FREE]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2 * FREE, 0, amount[0]))
    return amount


def choose(
    folder: Path, *, deletes: bool = False, plan: SplitPlan | None = None, for_gpu: bool = False, **options: int
) -> SplitPlan:
    plan = plan or model_of()
    disk_budget = DiskBudget(folder, all_freed(plan, deletes))
    wishes = SplitOptions("auto", min_free=0, for_gpu=for_gpu, **options)  # type: ignore[arg-type]
    return with_choice(plan, disk_budget, wishes)


PALETTES = {False: BLOCKWISE, True: FUSED}


def expected_loss(plan: SplitPlan, *, fitted: bool = False) -> float:
    summary = allocation_of(plan, fitted=fitted)
    assert summary is not None
    return summary.loss


def at(plan: SplitPlan, compression: str | None) -> int:
    return recompressed(plan, compression).output_bytes


def compressible(plan: SplitPlan) -> list[str]:
    return [spec.name for group in groups(plan.tensors) for spec in group.tensors]


@pytest.mark.parametrize("for_gpu", PALETTES)
@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_choice_fits_by_the_disk_budget(tmp_path: Path, staged: bool, deletes: bool, for_gpu: bool) -> None:
    plan, palette = model_of(staged=staged), PALETTES[for_gpu]
    smallest, largest = at(plan, palette.compressions[-1]), at(plan, None)
    before, above = float("inf"), False
    halves = dict.fromkeys(compressible(plan), palette.half)
    at_8bit = expected_loss(recompressed(plan, "auto", BitAllocation(halves)))
    for step in range(1, 12):
        allowed = smallest + (largest - smallest) * step // 10
        chosen_plan = choose(tmp_path, deletes=deletes, plan=plan, for_gpu=for_gpu, max_disk=allowed)
        options = SplitOptions("auto", max_disk=allowed, min_free=0)
        ways = candidates(chosen_plan, "auto")
        assert any(
            shortage(chosen_plan, DiskBudget(tmp_path, all_freed(plan, deletes)), options, way) is None for way in ways
        )
        assert chosen_plan.chosen is not None
        assert {*chosen_plan.chosen.schemes.values()} <= {*palette.compressions}
        above = above or {*chosen_plan.chosen.schemes.values()} <= {palette.half}
        if above:  # 8bit fits for all
            assert expected_loss(chosen_plan) <= min(at_8bit, before / WORTH_LESS_BITS)
        else:
            assert expected_loss(chosen_plan) <= before
        before = expected_loss(chosen_plan)
    assert above
    assert before == 0


def test_least_budget_fits_and_a_byte_less_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughSpaceException) as refused:
        choose(tmp_path, max_disk=1000)
    assert refused.value.remedy is not None
    least = int(refused.value.remedy.removeprefix("Set max_disk to ").partition(",")[0])
    chosen_plan = choose(tmp_path, max_disk=least)
    assert chosen_plan.chosen is not None
    assert set(chosen_plan.chosen.schemes) == {
        spec.name for group in groups(chosen_plan.tensors) for spec in group.tensors
    }
    assert chosen_plan.output_bytes <= least
    with pytest.raises(NotEnoughSpaceException, match=f"Set max_disk to {least},"):
        choose(tmp_path, max_disk=least - 1)


def test_free_disk_is_the_default_limit(tmp_path: Path, free: list[int]) -> None:
    plan = model_of()
    free[0] = at(plan, "q8_0") + MIB
    chosen_plan = choose(tmp_path, plan=plan)
    assert chosen_plan.chosen is not None
    assert at(plan, "q4_k") < chosen_plan.output_bytes <= free[0]
    assert set(chosen_plan.chosen.schemes.values()) >= {"q8_0"}
    free[0] = 1000
    with pytest.raises(NotEnoughSpaceException, match=r"Free .* there, or use a folder on another disk"):
        choose(tmp_path, plan=plan)


@pytest.mark.parametrize("for_gpu", PALETTES)
def test_choice_is_resident_if_that_is_possible_with_4_bits(tmp_path: Path, for_gpu: bool) -> None:
    plan = model_of()
    bare = recompressed(plan, None)
    compressions = PALETTES[for_gpu].compressions
    enough = compressions[: max(map(compressions.index, PALETTES[for_gpu].quarter)) + 1]
    for memory in (resident_bytes(recompressed(plan, c), bare) for c in enough):
        for more in (0, 1, 100_000):
            chosen_plan = choose(tmp_path, plan=plan, for_gpu=for_gpu, memory=memory + more, max_disk=FREE)
            assert resident_bytes(chosen_plan, bare) <= memory + more
            assert chosen_plan.chosen is not None
            assert chosen_plan.chosen.memory == memory + more
    room = resident_bytes(bare, bare)
    given = choose(tmp_path, plan=plan, for_gpu=for_gpu, memory=room, memory_is_given=True)
    assert expected_loss(given) == 0
    measured = choose(tmp_path, plan=plan, for_gpu=for_gpu, memory=room).chosen
    assert measured is not None
    assert {*measured.schemes.values()} == (set() if for_gpu else {"q8_0"})
    if not for_gpu:
        too_few = resident_bytes(recompressed(plan, "q3_k"), bare)
        streamed = choose(tmp_path, plan=plan, memory=too_few)
        assert streamed.chosen is not None
        assert set(streamed.chosen.schemes.values()) == {"q8_0"}


def test_made_scales_count_as_memory(tmp_path: Path) -> None:
    """4bit-double is smaller on the disk, and larger in memory."""
    plan = model_of()
    bare = recompressed(plan, None)
    least = resident_bytes(recompressed(plan, "4bit"), bare)
    double = recompressed(plan, DOUBLE)
    assert double.output_bytes < recompressed(plan, "4bit").output_bytes
    assert resident_bytes(double, bare) > least
    chosen_plan = choose(tmp_path, plan=plan, for_gpu=True, memory=least, max_disk=FREE)
    assert set(chosen_plan.chosen.schemes.values()) == {"4bit"}


@pytest.mark.parametrize("for_gpu", PALETTES)
def test_streamed_models_get_at_most_8_bits_without_max_disk(tmp_path: Path, for_gpu: bool) -> None:
    plan, half = model_of(), PALETTES[for_gpu].half
    streamed = choose(tmp_path, plan=plan, for_gpu=for_gpu, memory=MIB)
    assert streamed.chosen is not None
    assert streamed.chosen.memory is None
    assert set(streamed.chosen.schemes.values()) == {half}
    assert streamed.output_bytes == at(plan, half)
    chosen_plan = choose(tmp_path, plan=plan, for_gpu=for_gpu, memory=MIB, max_disk=FREE)
    assert chosen_plan.chosen is not None
    assert not chosen_plan.chosen.schemes


def test_fitted_scales_lose_less_and_change_the_choice(tmp_path: Path) -> None:
    plan = model_of()
    least, at_8bit = at(plan, "4bit"), at(plan, "8bit")
    changed = 0
    for allowed in range(least, at_8bit + 1, (at_8bit - least) // 20):
        plain = choose(tmp_path, plan=plan, for_gpu=True, max_disk=allowed)
        fitted = choose(tmp_path, plan=plan, max_disk=allowed, fit_scales=True)
        assert plain.chosen is not None
        if set(plain.chosen.schemes.values()) != {"8bit"}:
            assert expected_loss(fitted, fitted=True) < expected_loss(plain)
            assert expected_loss(plain, fitted=True) < expected_loss(plain)
        # nothing is chosen that would be worse than what was chosen for other scales, but for safety's sake
        sure = recompressed(plan, "auto", BitAllocation(dict.fromkeys(compressible(plan), "8bit")))
        bound = min(expected_loss(plain, fitted=True), expected_loss(sure) if sure.output_bytes <= allowed else 1)
        assert expected_loss(fitted, fitted=True) * WORTH_LESS_BITS <= bound
        changed += fitted.chosen != plain.chosen
    assert changed


def test_reference_loss_does_not_depend_on_fitted_scales(tmp_path: Path) -> None:
    chosen_plan = choose(tmp_path, for_gpu=True, max_disk=at(model_of(), "4bit"))
    plain, fitted = allocation_of(chosen_plan), allocation_of(chosen_plan, fitted=True)
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
    """Within the differences between tensors."""
    with safe_open(DEMO_MODEL / "model-00001-of-00012.safetensors", "pt") as file:
        weights = file.get_tensor("model.embed_tokens.weight")
    values = weights.float().flatten()

    def error(fitted: bool) -> float:
        data = memoryview(weights.flatten().view(torch.uint8).numpy())
        codes, scales = (torch.frombuffer(part, dtype=torch.uint8) for part in quantized(scheme, data, fitted))
        scale_values = scales.view(torch.float32)
        if scheme == DOUBLE:
            packed, state = functional.quantize_blockwise(scale_values - scale_values.mean(), blocksize=NESTED_BLOCK)
            scale_values = functional.dequantize_blockwise(packed, state) + scale_values.mean()
        numbers = torch.stack([codes >> 4, codes & 15], dim=1).flatten().long()
        restored = (code_values("4bit")[numbers].view(-1, NF4_BLOCK) * scale_values[:, None]).flatten()
        return float((restored - values).square().sum() / values.square().sum())

    assert error(False) == pytest.approx(ERRORS[scheme], rel=0.2)
    assert error(True) / error(False) == pytest.approx(FITTED_ERRORS[scheme] / ERRORS[scheme], abs=0.03)


def test_expected_errors_of_blocks_are_those_of_a_trained_matrix() -> None:
    with safe_open(DEMO_MODEL / "model-00001-of-00012.safetensors", "pt") as file:
        values = file.get_tensor("model.embed_tokens.weight").float().view(-1, 256)
    for name in ERRORS.keys() & BLOCK_TYPES.keys():
        restored = gguf_blocks.dequantize(name, block_encoders.encode(name, values), values.shape, torch.float32)
        error = float((restored - values).square().sum() / values.square().sum())
        assert error == pytest.approx(ERRORS[name], rel=0.2), name


def quantized(scheme: str, data: memoryview, fitted: bool) -> tuple[memoryview, memoryview]:
    return quantize_blocks(scheme, data, "BF16", "cpu", fitted=fitted)


def test_roles() -> None:
    roles = {
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
    assert {name: role_of(name) for name in roles} == roles


def test_fused_experts_of_a_layer_have_one_scheme() -> None:
    parts = [f"{expert}.{part}_proj" for expert in range(12) for part in ("gate", "up", "down")]
    names = [f"model.layers.{layer}.mlp.experts.{part}.weight" for layer in (0, 1) for part in parts]
    scheme_groups = groups([TensorSpec(name, "BF16", (64, 64), "f", 0, 8192) for name in names])
    assert [(group.role, len(group.tensors)) for group in scheme_groups] == [("down", 12), ("gate and up", 24)] * 2
    dense_groups = groups(
        [TensorSpec(f"model.layers.{n}.mlp.down_proj.weight", "BF16", (64, 64), "f", 0, 8192) for n in (0, 1)]
    )
    assert scheme_groups[0].weight == dense_groups[0].weight


def test_head_of_its_own_has_more_bits_than_the_layers(tmp_path: Path) -> None:
    """The shapes of Qwen2.5-Coder-1.5B, in which a head of 4.25 bits changes one token in ten."""
    hidden, layers = 1536, 28
    shapes = {"self_attn.q": (hidden, hidden), "self_attn.k": (256, hidden), "self_attn.v": (256, hidden)}
    shapes |= {"self_attn.o": (hidden, hidden), "mlp.gate": (8960, hidden), "mlp.up": (8960, hidden)}
    shapes |= {"mlp.down": (hidden, 8960)}
    ends = {"model.embed_tokens.weight": ("BF16", (151936, hidden)), "lm_head.weight": ("BF16", (151936, hidden))}
    inner = {
        f"model.layers.{n}.{name}_proj.weight": ("BF16", shape) for n in range(layers) for name, shape in shapes.items()
    }
    chosen = choose(tmp_path, plan=plan_of((shard_of("shard-0", {**ends, **inner}),)), max_disk=1_020_200_000).chosen
    assert chosen is not None
    assert chosen.schemes["lm_head.weight"] == "q5_k"
    assert (
        chosen.schemes["model.embed_tokens.weight"] == chosen.schemes["model.layers.9.mlp.up_proj.weight"] == "iq4_xs"
    )


def test_tied_embedding_also_weighs_as_the_head() -> None:
    embedding = TensorSpec("model.embed_tokens.weight", "BF16", (512, 64), "f", 0, 65536)
    head = embedding._replace(name="lm_head.weight")
    tied, apart = groups([embedding]), groups([embedding, head])
    assert tied[0].weight == pytest.approx(sum(group.weight for group in apart))
