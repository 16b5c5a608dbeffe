"""A gated MLP in one call has the bits of the model's own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.activations import GELUTanh
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from rabbitllm.engine import _gates
from rabbitllm.engine._gates import fuse_gates
from rabbitllm.engine._mixtures import fuse_mixtures
from rabbitllm.quant import _vectors
from tests.engine.test_siblings import SIZES, assert_same_logits, checkpoint
from tests.support.builders import DELTA, EXPERTS, Family
from tests.support.tiny_models import ALL, load

pytestmark = [pytest.mark.bits, pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used")]


def mlp(kind: Any = LlamaMLP, act: str = "silu", width: int = 128) -> Any:
    config = LlamaConfig(hidden_size=64, intermediate_size=width, hidden_act=act)
    config.hidden_activation = act
    return kind(config).bfloat16()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each MLP that was one call."""
    rows, compute = list[int](), _gates.OneCall.__call__

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor | None:
        if (result := compute(self, x)) is not None:
            rows.append(x.shape[1])
        return result

    monkeypatch.setattr(_gates.OneCall, "__call__", counted)
    return rows


@torch.no_grad()
def test_every_gate() -> None:
    module = mlp()
    fuse_gates(module)
    act = module.act_fn
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for gate in every.view(8, -1):
        for factor in (1, -3.7, 1e-30):
            up = torch.full_like(gate, factor)
            assert torch.equal(_gates.gated(act, gate, up).nan_to_num(7), (act(gate) * up).nan_to_num(7))


@pytest.mark.parametrize("family", ["llama", "phi3"])
@torch.no_grad()
def test_bits_of_the_class_for_any_rows_and_what_is_left_to_it(tmp_path: Path, family: str, calls: list[int]) -> None:
    directory, seeded = checkpoint(tmp_path, family, "q8_0"), torch.get_rng_state()
    fused = load(directory, exact=False).model.layers[0].mlp
    assert torch.equal(torch.get_rng_state(), seeded)

    def assert_same(rows: int = 1, scale: float = 1) -> None:
        x = (torch.randn(1, rows, 256) * scale).bfloat16()
        assert torch.equal(fused(x), type(fused).forward(fused, x))

    for rows in (1, 3, 8, 63, 600):  # the last in several threads
        for scale in (1e-6, 1, 1e4):
            assert_same(rows, scale)
    assert calls == [1] * 3 + [3] * 3 + [8] * 3  # of many rows none
    del calls[:]
    x = torch.randn(1, 1, 256)
    assert torch.equal(fused(x), type(fused).forward(fused, x))  # float32
    with torch.enable_grad():
        assert_same()
    seen = list[torch.Tensor]()
    for part in fused.children():
        hook = part.register_forward_hook(lambda module, args, output: seen.append(output))
        assert_same()
        hook.remove()
    assert len(seen) == 2 * len([*fused.children()])
    down = fused.down_proj
    fused.down_proj = nn.Sequential(down)  # as an adapter wraps it
    assert_same()
    fused.down_proj = down
    setattr(fused, _gates.names_in(fused)[-1], nn.Tanh())
    assert_same()
    assert not calls


def test_a_layer_that_computes_another_gate_by_its_own_number_is_not_replaced() -> None:
    class ShiftedMLP(LlamaMLP):
        shift = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) + self.shift)  # type: ignore[no-any-return]

    layers = nn.ModuleList(mlp(ShiftedMLP) for _ in range(3))
    layers[1].shift = 1.0
    assert fuse_gates(layers) == 2
    assert "forward" not in vars(layers[1])


def test_a_class_that_computes_another_gate_is_not_replaced() -> None:
    class Limited(LlamaMLP):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            gate, up = self.gate_proj(x), self.up_proj(x).clamp(-7, 7)
            return self.down_proj(self.act_fn(gate) * up)

    assert fuse_gates(mlp(Limited)) == 0
    assert fuse_gates(mlp(Gemma3MLP, "gelu_pytorch_tanh")) == fuse_gates(mlp(Phi3MLP)) == 1
    written = mlp(Gemma3MLP, "gelu_pytorch_tanh")
    written.act_fn = GELUTanh(use_gelu_tanh_python=True)  # a method may use all of its object
    assert fuse_gates(written) == 0


@pytest.mark.parametrize("family", ["phi3", "gemma3", "llama", "qwen2", "mistral"])
@pytest.mark.parametrize("budget", [ALL, 0], ids=["resident", "streamed"])
def test_a_model_has_the_same_logits(
    tmp_path: Path, family: str, budget: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, family, "4bit")
    assert_same_logits(directory, budget, "fuse_gates", "MLP", monkeypatch)
    assert calls.count(4) == 2  # of 2 layers; steps are computed with the attention, if its heads are wide enough


SHARED: dict[str, Any] = {**EXPERTS, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each mixture whose shared expert was one call with what is around it."""
    rows, compute = list[int](), _gates.OneCall.shared

    def counted(self: Any, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return compute(self, x, *more)

    monkeypatch.setattr(_gates.OneCall, "shared", counted)
    return rows


@pytest.mark.parametrize(
    ("family", "settings", "budget"),
    [
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, ALL),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, 0),
        (Family("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2}), {"norm_topk_prob": True}, ALL),
        (Family("qwen3_5_moe_text", DELTA), {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, ALL),
    ],
)
def test_a_mixture_with_a_gated_shared_expert_has_the_same_logits(
    tmp_path: Path,
    family: str | Family,
    settings: dict[str, Any],
    budget: int,
    shared: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = checkpoint(tmp_path, family, "q8_0", **{**SHARED, **settings})
    monkeypatch.setattr("rabbitllm.engine._mixtures._routing_of", lambda *given: None)  # its class chooses
    assert_same_logits(directory, budget, "fuse_mixtures", "SparseMoeBlock", monkeypatch)
    assert shared == [4] * 2 + [1] * 2 * 4


@torch.no_grad()
def test_a_gated_shared_expert_for_any_rows_routing_and_gates(tmp_path: Path, shared: list[int]) -> None:
    """Tokens of which one has a gate that is not a number, experts that are tied, and one that is chosen twice."""
    kinds = {"layer_types": ["linear_attention"] * 2}
    mixture: Any = load(checkpoint(tmp_path, "qwen3_next", "4bit", **SHARED, **kinds), exact=False).model.layers[0].mlp

    def assert_same(x: torch.Tensor) -> torch.Tensor:
        got, expected = mixture(x), type(mixture).forward(mixture, x)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
        return got  # type: ignore[no-any-return]

    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 5, 16):
            assert_same(torch.randn(1, rows, SIZES["hidden_size"]).bfloat16() * 3)
    torch.set_num_threads(before)
    assert shared == [1, 2, 5, 16] * 2
    assert_same(torch.randn(1, 40, 256).bfloat16())
    assert_same(torch.randn(3, 2, 256).bfloat16())
    assert_same(torch.randn(1, 1, 256).bfloat16().expand(1, 2, 256))  # not contiguous
    x = torch.randn(1, 3, 256).bfloat16()
    with torch.enable_grad():
        assert_same(x)
    del shared[:]
    hook = mixture.shared_expert_gate.register_forward_hook(
        lambda module, args, output: output.masked_fill(torch.tensor([[False], [True], [False]]), torch.nan)
    )
    assert assert_same(x).isnan().all(-1).tolist() == [[False, True, False]]
    hook.remove()
    mixture.gate.weight = nn.Parameter(torch.zeros_like(mixture.gate.weight))  # all experts are tied
    assert_same(x)
    twice = torch.tensor([[1, 1]] * 3)
    hook = mixture.gate.register_forward_hook(lambda module, args, output: (*output[:2], twice))
    assert_same(x)
    hook.remove()
    assert shared == [3] * 3
    seen = list[torch.Tensor]()
    hook = mixture.shared_expert.register_forward_hook(lambda module, args, output: seen.append(output))
    assert_same(x)
    hook.remove()
    assert shared == [3] * 3
    assert len(seen) == 2


@torch.no_grad()
def test_a_mixture_that_adds_otherwise_is_not_replaced(tmp_path: Path) -> None:
    kinds = {"layer_types": ["linear_attention"] * 2}
    mixture: Any = load(checkpoint(tmp_path, "qwen3_next", "4bit", **SHARED, **kinds), exact=False).model.layers[0].mlp

    class Twice(type(mixture)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 2  # type: ignore[no-any-return]

    class Other(type(mixture)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states.flip(-1)).flip(-1)  # type: ignore[no-any-return]

    del mixture.forward
    for kind, count in ((type(mixture), 1), (Twice, 0), (Other, 0)):
        mixture.__class__ = kind
        assert fuse_mixtures(mixture) == count
        vars(mixture).pop("forward", None)


@torch.no_grad()
def test_dropout_in_training_is_the_class_s(tmp_path: Path) -> None:
    """Of an MLP whose class drops some of its results while it is trained."""
    model = load(checkpoint(tmp_path, Family("seed_oss", {"head_dim": 64}), "q8_0", residual_dropout=0.5), exact=False)
    mlp, x = model.model.layers[0].mlp, torch.randn(1, 3, 256).bfloat16()
    mlp(x)
    mlp.train()
    results = list[torch.Tensor]()
    for forward in (mlp, lambda value: type(mlp).forward(mlp, value)):
        torch.manual_seed(0)
        results.append(forward(x))
    assert torch.equal(*results)
    assert 0.3 < float((results[0] == 0).float().mean()) < 0.7
