"""Bits by budget: what is chosen keeps the limits to the byte, and gains with each byte."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from bitsandbytes import functional
from safetensors import safe_open

import rabbitllm.demo
from rabbitllm.base.options import SplitOptions
from rabbitllm.errors import NotEnoughSpaceException
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.quant.compression import COMPRESSIONS, DOUBLE, NESTED_BLOCK, NF4_BLOCK, code_values, quantize_blocks
from rabbitllm.splitter.bit_allocation import (
    ERRORS,
    FITTED_ERRORS,
    WORTH_LESS_BITS,
    allocation_of,
    groups,
    role_of,
    with_choice,
)
from rabbitllm.splitter.disk_budget import DiskBudget, candidates, shortage
from rabbitllm.splitter.plan import SplitPlan, recompressed
from rabbitllm.store.manifest import BitAllocation
from tests.support.plans import MIB, all_freed, plan_of, resident_bytes, shard_of

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
    least = int(refused.value.remedy.removeprefix("max_disk=").partition(" ")[0])
    made = choose(tmp_path, max_disk=least)
    assert made.chosen is not None
    assert set(made.chosen.schemes) == {spec.name for group in groups(made.tensors) for spec in group.tensors}
    assert made.output_bytes <= least
    with pytest.raises(NotEnoughSpaceException, match=f"max_disk={least} is the least that would do"):
        choose(tmp_path, max_disk=least - 1)


def test_the_free_disk_is_a_limit_where_nothing_is_said(tmp_path: Path, free: list[int]) -> None:
    plan = model_of()
    free[0] = at(plan, "8bit") + MIB
    made = choose(tmp_path, plan=plan)
    assert made.chosen is not None
    assert at(plan, "4bit") < made.output_bytes <= free[0]
    assert set(made.chosen.schemes.values()) >= {"8bit"}
    free[0] = 1000
    with pytest.raises(NotEnoughSpaceException, match=r"Free .* there, or name another place"):
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
