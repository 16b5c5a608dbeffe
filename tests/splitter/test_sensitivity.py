"""Expected losses of mixtures of experts: a token's part of the experts, and all of the shared ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import rabbitllm
from rabbitllm.checkpoints.config import experts_a_token
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.splitter.bit_allocation import SchemeGroup, groups
from rabbitllm.store.manifest import read_manifest
from tests.support.builders import build_checkpoint
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
