"""Linears with the same input are one product, and their results are those of separate products."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.engine._siblings import MAX_UNUSED, Sibling
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant.joint import JointProduct
from tests.support.builders import Family, build_checkpoint
from tests.support.kernel_rows import plain_products as plain_products
from tests.support.tiny_models import ALL, load, split

pytestmark = pytest.mark.usefixtures("plain_products")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 320}
PROMPT = torch.tensor([[1, 40, 81, 7]])


@contextmanager
def counted() -> Iterator[list[int]]:
    """Of how many matrices each joint product was."""
    sizes, call = list[int](), JointProduct.__call__

    def recorded(self: JointProduct, x: torch.Tensor, rows: int) -> list[torch.Tensor]:
        sizes.append(len(self.matrices))
        return call(self, x, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JointProduct, "__call__", recorded)
        yield sizes


@contextmanager
def separately() -> Iterator[None]:
    """Every Linear computes its own product."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sibling, "linear", lambda self, x, own, bias: own.matrix.linear(x, bias))
        yield


@torch.no_grad()
def logits(model: Any, steps: int = 4) -> torch.Tensor:
    """Of a prompt and of steps that come one after the other."""
    output = model(PROMPT, use_cache=True)
    seen = [output.logits]
    for _ in range(steps):
        token = output.logits[:, -1:].argmax(-1)
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
        seen.append(output.logits)
    return torch.cat(seen, 1)


def checkpoint(tmp_path: Path, family: str | Family, compression: str | None, **settings: Any) -> Path:
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
    folder = build_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16, **{**SIZES, **kinds, **settings})
    return split(folder, compression)


def assert_same_logits(directory: Path, budget: int, fuse: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has the same logits without a function of `engine.fusions`, which with `exact=True` replaces no forward.

    Args:
        fuse: the name of the function.
        kind: part of the names of the classes whose forwards it replaces.
    """
    got = logits(load(directory, budget, exact=False))
    monkeypatch.setattr(f"rabbitllm.engine.fusions.{fuse}", lambda model, **options: 0)
    assert torch.equal(got, logits(load(directory, budget, exact=False)))
    monkeypatch.undo()
    exact = load(directory, budget)
    assert not any("forward" in vars(module) for module in exact.modules() if kind in type(module).__name__)


# qwen2 has biases of queries, keys and values
@pytest.mark.parametrize(
    ("family", "compression", "a_layer"),
    [
        ("llama", "4bit", [3, 1, 2, 1]),
        ("llama", "q4_k_m", [3, 1, 2, 1]),
        ("qwen2", "8bit", [3, 1, 2, 1]),
        ("gemma3", "q8_0", [3, 1, 2, 1]),
        ("qwen3_moe", "4bit", [3, 1]),
        ("llama", "4bit-double", [3, 1, 2, 1]),
        ("qwen2", None, [3, 1, 2, 1]),
        ("qwen3_moe", None, [3, 1]),
    ],
)
@pytest.mark.parametrize("budget", [ALL, 0], ids=["resident", "streamed"])
def test_a_decode_step_has_few_products_and_the_same_bits(
    tmp_path: Path,
    family: str,
    compression: str | None,
    a_layer: list[int],
    budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fuse in ("fuse_attention", "fuse_gates"):  # which make fewer calls
        monkeypatch.setattr(f"rabbitllm.engine.fusions.{fuse}", lambda model, **options: 0)
    model = load(checkpoint(tmp_path, family, compression), budget, exact=False, fast_bfloat16=compression is None)
    with separately():
        expected = logits(model)
    with counted() as sizes:
        assert torch.equal(logits(model), expected)
        logits(model, 1)
        del sizes[:]
        logits(model, 1)
    layers = model.config.num_hidden_layers
    assert sizes[: len(a_layer) * layers] == a_layer * layers  # of the prompt, whose 4 rows are joined too
    assert len(sizes) <= 2 * (len(a_layer) * layers + 1)


@pytest.fixture
def attention(tmp_path: Path) -> Any:
    """One whose queries, keys and values have been found to have one input."""
    model = load(checkpoint(tmp_path, "qwen2", "4bit"), exact=False)
    logits(model, 1)
    return model.model.layers[0].self_attn


def alone(linear: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = linear.weight.matrix.linear(x, linear.bias)
    return result


@torch.no_grad()
def test_values_are_compared_not_tensors(attention: Any) -> None:
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16)
    first = alone(attention.k_proj, x)
    attention.q_proj(x)
    with counted() as sizes:
        assert torch.equal(attention.k_proj(x.clone()), first)  # another tensor with the same values
        assert not sizes
        attention.v_proj(x)
        attention.q_proj(x)
        x.data.mul_(2)  # not even counted as a change
        assert torch.equal(attention.k_proj(x), alone(attention.k_proj, x))
        assert sizes == [3, 1]
    attention.q_proj(x)
    again = attention.k_proj(x), attention.k_proj(x)
    attention.v_proj(x)
    assert torch.equal(*again)
    assert again[0].data_ptr() != again[1].data_ptr()
    attention.q_proj(x)
    assert torch.equal(attention.k_proj(x.float()), alone(attention.k_proj, x.float()))
    turned = x.expand(3, 1, 256)
    assert torch.equal(attention.k_proj(turned), alone(attention.k_proj, turned))


@torch.no_grad()
def test_results_that_are_left_unused_are_no_longer_computed(attention: Any) -> None:
    followers = attention.q_proj.weight.sibling.followers
    assert [sibling.module for sibling in followers] == [attention.k_proj, attention.v_proj]
    for _ in range(MAX_UNUSED + 2):
        x = torch.randn(1, 1, 256, dtype=torch.bfloat16)
        attention.q_proj(x)
        attention.v_proj(x)
        attention.o_proj(torch.randn_like(x))
        attention.q_proj(x)
        attention.k_proj(x)
        attention.v_proj(x)
    assert attention.k_proj.weight.sibling.unused == MAX_UNUSED
    with counted() as sizes:
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(attention, name)
            assert torch.equal(linear(x), alone(linear, x))
    assert sizes == [2, 1]


@torch.no_grad()
def test_hooks_and_replaced_weights(attention: Any) -> None:
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16)
    hook = attention.q_proj.register_forward_hook(lambda module, args, output: args[0].mul_(3))
    tripled = 3 * x
    attention.q_proj(x)
    assert torch.equal(attention.k_proj(x), alone(attention.k_proj, tripled))
    hook.remove()
    bias = attention.k_proj.bias
    attention.q_proj(x)
    attention.k_proj.bias = None
    assert torch.equal(attention.k_proj(x), attention.k_proj.weight.matrix.linear(x, None))
    attention.k_proj.bias = bias
    attention.q_proj(x)
    attention.k_proj.weight = nn.Parameter(torch.eye(128, 256, dtype=torch.bfloat16))
    attention.k_proj.bias = None
    assert torch.equal(attention.k_proj(x), x[..., :128])
    attention.q_proj(x)
    assert torch.equal(attention.v_proj(x), alone(attention.v_proj, x))


def test_a_copy_of_a_linear_has_weights_of_its_own(attention: Any) -> None:
    copied = copy.deepcopy(attention.q_proj)
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16)
    assert isinstance(copied.weight, QuantizedWeight)
    copied.weight = nn.Parameter(torch.zeros(256, 256, dtype=torch.bfloat16))
    copied.bias = None
    assert not copied(x).any()
    assert attention.q_proj(x).any()


def test_weights_can_be_pickled(attention: Any) -> None:
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16)
    expected = attention.q_proj(x)
    attention.k_proj(x)
    file = io.BytesIO()
    torch.save(attention.state_dict(), file)
    file.seek(0)
    weight = torch.load(file, weights_only=False)["q_proj.weight"]
    assert isinstance(weight, QuantizedWeight)
    assert weight.sibling is None
    assert torch.equal(nn.functional.linear(x, weight, attention.q_proj.bias), expected)


@torch.no_grad()
def test_a_function_in_place_of_torchs_is_called(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, x = nn.functional.linear, torch.randn(1, 1, 256, dtype=torch.bfloat16)
    linears = attention.q_proj, attention.o_proj
    expected = [linear(x) * 2 for linear in linears]
    monkeypatch.setattr(nn.functional, "linear", lambda *args: ordinary(*args) * 2)
    assert all(torch.equal(linear(x), doubled) for linear, doubled in zip(linears, expected, strict=True))


@torch.no_grad()
def test_torch_compile_gets_ordinary_linears(attention: Any) -> None:
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16)
    assert torch.equal(torch.compile(attention.q_proj, backend="eager")(x), attention.q_proj(x))


def test_gradients_of_inputs_and_biases(attention: Any) -> None:
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16, requires_grad=True)
    attention.q_proj(x).sum().backward()
    expected = attention.q_proj.weight.whole().sum(0)
    assert x.grad is not None
    assert torch.allclose(x.grad.view(-1), expected, rtol=0.02, atol=0.02)
    assert attention.q_proj.bias.grad is not None
