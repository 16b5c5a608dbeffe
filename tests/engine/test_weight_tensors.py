"""Absent weights, and weights that are multiplied from their codes, as tensors of torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.autograd import forward_ad

from rabbitllm.engine import units
from rabbitllm.engine.experts import ExpertStack
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.weight_tensors import AbsentWeight, QuantizedWeight, WeightView
from rabbitllm.errors import AbsentWeightError, ReadOnlyWeightError
from rabbitllm.quant import _vectors, products
from rabbitllm.quant.products import Matrix
from rabbitllm.quant.turned import TurnedMatrix, product
from tests.quant.test_products import assert_product, error, matrix, meant
from tests.support.builders import FAMILIES, build_checkpoint, reference_logits
from tests.support.fresh_process import in_a_fresh_process
from tests.support.integer_products import is_of_bytes, tolerated
from tests.support.rounding import assert_greedy
from tests.support.tiny_models import ALL, INPUT, dequantized, load, plain_model, run, split, tiers

SHAPE = torch.Size((3, 4))


class Refused(Exception):
    """Raised by a read of the weight."""


def refuse() -> torch.Tensor:
    raise Refused


def absent(read: Callable[[], torch.Tensor] = refuse, dtype: torch.dtype = torch.bfloat16, **more: Any) -> AbsentWeight:
    return AbsentWeight(read, SHAPE, dtype, torch.device("cpu"), **more)


def add_in_place(weight: Any) -> None:
    weight.data += 1


def set_an_item(weight: Any) -> None:
    weight[0] = 1


def set_data(weight: Any) -> None:
    weight.data = torch.ones(tuple(weight.shape))


def optimized(weight: Any, **how: bool) -> None:
    trained = nn.Parameter(weight)
    trained.grad = torch.ones(tuple(weight.shape), dtype=weight.dtype)
    torch.optim.SGD([trained], **how).step()


with_vectors = pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used here")
WRITES: list[Callable[[Any], Any]] = [
    add_in_place,
    set_an_item,
    set_data,
    lambda weight: weight.detach().mul_(2),
    lambda weight: weight.copy_(torch.zeros(tuple(weight.shape))),
    lambda weight: weight.data.fill_(0),
    lambda weight: torch.add(torch.ones(()), 1.0, out=weight),
    lambda weight: torch._foreach_mul_([weight], 2.0),
    lambda weight: optimized(weight, foreach=True),
    lambda weight: optimized(weight, fused=True),
]


def add_to_the_transposed(weight: Any) -> None:
    turned = weight.T if weight.dim() == 2 else weight.mT
    turned += 1


def set_in_an_item(weight: Any) -> None:
    weight[0][1] = 5


def set_data_of_an_item(weight: Any) -> None:
    weight[0].data = torch.ones(tuple(weight.shape[1:]))


VIEW_WRITES: list[Callable[[Any], Any]] = [
    add_to_the_transposed,
    set_in_an_item,
    set_data_of_an_item,
    lambda weight: weight[0].fill_(1),
    lambda weight: weight.data[0].zero_(),
    lambda weight: weight.detach()[1:].detach().zero_(),
    lambda weight: weight.view(-1).add_(1),
    lambda weight: weight.view(torch.uint8).zero_(),
    lambda weight: weight.split(2)[0].copy_(weight[:2]),
    lambda weight: weight.unbind()[0].zero_(),
    lambda weight: list(weight)[1].flatten()[2:].index_fill_(0, torch.tensor([0]), 1),
    lambda weight: nn.init.zeros_(weight[0]),
    lambda weight: nn.functional.relu(weight[0], inplace=True),
    lambda weight: torch.add(weight, 1.0, out=weight.view(weight.shape)),
    lambda weight: torch._foreach_mul_([weight[0]], 2.0),
    lambda weight: optimized(weight[0], foreach=True),
]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", VIEW_WRITES)
def test_writing_to_a_view_of_an_absent_weight_is_refused(write: Callable[[Any], Any], mode: Any) -> None:
    weight = absent(lambda: torch.ones(SHAPE, dtype=torch.bfloat16))
    with mode(), pytest.raises(ReadOnlyWeightError, match="read from the disk when its layer computes"):
        write(weight)


def test_arrays_of_a_weight_are_read_only() -> None:
    weight = absent(lambda: torch.ones(SHAPE), torch.float32, is_parameter=False)
    for array in (weight.numpy(), weight[0].numpy(), np.asarray(weight.T)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2
    np.asarray(weight, dtype=np.float64)[0] = 2  # a copy


def test_a_copy_of_a_view_can_be_written_to() -> None:
    weight = absent(lambda: torch.ones(SHAPE), torch.float32)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for copied in (
                weight[0].clone(),
                copy.deepcopy(weight.detach()[0]),
                weight.T.contiguous(),
                weight[0].half(),
                weight[torch.tensor([0, 2])],
                weight[0] * 1,
                torch.load(saved(weight.detach()[0]), weights_only=True),
            ):
                assert type(copied.zero_()) is torch.Tensor
            assert repr(weight.detach()[0]) == repr(torch.ones(4))
            assert f"{weight[0, 0]:.1f}" == "1.0"
            assert bool((weight == 1).all())


def test_products_of_views_have_gradients() -> None:
    plain = nn.Parameter(torch.arange(12.0).view(SHAPE))
    weight = absent(lambda: plain, torch.float32)
    for each in (plain, weight):
        x = torch.ones(2, 3, requires_grad=True)
        (
            nn.functional.linear(x, each.T) + x @ each[:] + nn.functional.linear(x[:, :2], each[:2].T)
        ).square().sum().backward()
    assert torch.equal(plain.grad, weight.grad)


@pytest.mark.parametrize("write", WRITES)
def test_writing_to_an_absent_weight_is_refused(write: Callable[[Any], Any]) -> None:
    with torch.no_grad(), pytest.raises(ReadOnlyWeightError, match="read from the disk when its layer computes"):
        write(absent())


@pytest.mark.parametrize("write", [*WRITES, *VIEW_WRITES])
@pytest.mark.parametrize(
    ("family", "compression", "budget", "name", "weight_type"),
    [
        pytest.param("llama", "4bit", ALL, "model.layers.1.mlp.up_proj.weight", QuantizedWeight, marks=with_vectors),
        ("qwen3_moe", None, 0, "model.layers.1.mlp.experts.down_proj", ExpertStack),
    ],
)
def test_writing_to_a_coded_weight_is_refused(
    tmp_path: Path,
    family: str,
    compression: str | None,
    budget: int,
    name: str,
    weight_type: type,
    write: Callable[[Any], Any],
) -> None:
    files = split(build_checkpoint(tmp_path, family), compression)
    weight = load(files, budget, exact=False).get_parameter(name)
    assert isinstance(weight, weight_type)
    with torch.no_grad(), pytest.raises(ReadOnlyWeightError, match=r"(only|by) (its|their) codes"):
        write(weight)


def test_absent_weight_is_a_parameter_without_memory() -> None:
    weight = absent()
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device) == (SHAPE, torch.bfloat16, torch.device("cpu"))
    assert weight.requires_grad
    assert not weight.requires_grad_(False).requires_grad
    assert not absent(dtype=torch.uint8).requires_grad
    assert not isinstance(absent(is_parameter=False), nn.Parameter)
    with pytest.raises(Refused):
        weight.untyped_storage()


WITHOUT_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda w: (
        w.shape,
        w.size(),
        w.size(0),
        w.dim(),
        w.ndim,
        w.numel(),
        len(w),
        w.stride(),
        w.is_contiguous(),
    ),
    "dtype": lambda w: (w.dtype, w.is_floating_point(), w.is_complex(), w.element_size(), w.itemsize, w.nbytes),
    "device": lambda w: (
        w.device,
        w.is_cuda,
        w.is_cpu,
        w.is_meta,
        w.get_device(),
        w.layout,
        w.is_sparse,
        w.is_pinned(),
    ),
    "gradient": lambda w: (w.requires_grad, w.grad, w.is_leaf, w.grad_fn, w.requires_grad_(False).requires_grad),
    "functions": lambda w: (torch.is_floating_point(w), torch.numel(w), torch.is_tensor(w), torch.result_type(w, 1.5)),
    "kind": lambda w: (w.type(), torch.is_complex(w), w.is_shared(), w.is_inference(), w.is_quantized),
    "another's": lambda w: (
        torch.ones(2, 2).to(w).dtype,
        torch.ones(2).type_as(w).dtype,
        torch.ones(4).expand_as(w).shape,
    ),
    "new": lambda w: (
        w.new_zeros(2).tolist(),
        w.new_ones(1).dtype,
        w.new_empty((2, 3)).shape,
        w.new_tensor([1, 2]).tolist(),
    ),
    "like": lambda w: (
        torch.zeros_like(w).tolist(),
        torch.empty_like(w).shape,
        torch.ones_like(w, dtype=torch.int8).tolist(),
    ),
    "like, elsewhere": lambda w: (torch.rand_like(w).device, torch.empty_like(w, device="meta").device),
}


@pytest.mark.parametrize("asked", sorted(WITHOUT_VALUES))
def test_operations_without_values_equal_those_of_a_plain_weight(asked: str) -> None:
    plain = nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16))
    assert WITHOUT_VALUES[asked](absent()) == WITHOUT_VALUES[asked](plain)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.to("cpu"),
        lambda w: w.to(torch.bfloat16),
        lambda w: w.to(device="cpu", dtype=torch.bfloat16),
        lambda w: w.to(torch.ones(1, dtype=torch.bfloat16)),
        lambda w: w.bfloat16(),
        lambda w: w.cpu(),
        lambda w: w.contiguous(),
        lambda w: w.share_memory_(),
        lambda w: w.requires_grad_(),
    ],
)
def test_change_without_effect_returns_the_weight(change: Callable[[Any], Any]) -> None:
    weight = absent()
    assert change(weight) is weight


def test_alias_is_absent_too() -> None:
    for other in (absent().data, absent().detach(), nn.Parameter(absent())):
        assert type(other) is AbsentWeight
        with pytest.raises(Refused):
            other.sum()
    assert not absent().detach().requires_grad
    assert isinstance(nn.Parameter(absent()), nn.Parameter)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a sum": lambda w: w.float().sum(),
    "a product": lambda w: nn.functional.linear(torch.ones(2, 4), w.float()),
    "an operator": lambda w: w + 1,
    "another's operator": lambda w: torch.ones(SHAPE) * w,
    "in a list": lambda w: torch.cat([torch.ones(SHAPE, dtype=w.dtype), w]),
    "by name": lambda w: torch.add(input=torch.ones(SHAPE), other=w),
    "an item": lambda w: w[0],
    "turned": lambda w: w.T,
    "another dtype": lambda w: w.to(torch.float32),
    "a copy": lambda w: w.to(torch.bfloat16, copy=True),
    "a clone": lambda w: w.clone(),
    "copied": lambda w: torch.zeros(SHAPE).copy_(w),
    "new of it": lambda w: torch.ones(1).new_tensor(w.detach()),
    "rows": lambda w: nn.functional.embedding(torch.tensor([0, 2]), w),
    "a list": lambda w: w.tolist(),
    "an array": lambda w: w.detach().float().numpy(),
    "numpy": lambda w: np.asarray(w.detach().float()),
    "an address": lambda w: w.data_ptr(),
    "a number": lambda w: w[0, 0].item(),
    "a truth": lambda w: bool(w.any()),
    "rows one by one": lambda w: list(w),
    "compared": lambda w: torch.equal(w, w),
    "a view": lambda w: w.view(-1),
    "a product of a view": lambda w: torch.ones(2, 3, dtype=w.dtype) @ w.view(SHAPE),
    "a view's address": lambda w: w[1].data_ptr(),
    "inside another function": lambda w: torch.einsum("ij,kj->ik", w, w),
    "dlpack": lambda w: torch.from_dlpack(w.detach().float()),
}


@pytest.mark.parametrize("asked", sorted(READS))
def test_operations_with_values_read_the_weight(asked: str) -> None:
    plain = torch.arange(12.0, dtype=torch.bfloat16).view(SHAPE)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(Refused):
            READS[asked](absent())
    with torch.no_grad():
        expected, actual = READS[asked](plain), READS[asked](absent(read=lambda: nn.Parameter(plain)))
    if "address" in asked:
        assert actual == expected
        return
    assert type(actual) is type(expected) or isinstance(actual, WeightView)
    assert np.array_equal(np.asarray(_plain(actual)), np.asarray(_plain(expected)))


def test_a_detached_weight_is_an_array_where_gradients_are_computed() -> None:
    plain = torch.arange(12.0).view(SHAPE)
    weight = absent(lambda: nn.Parameter(plain), torch.float32)
    assert np.array_equal(np.asarray(weight.detach()), plain)
    with pytest.raises(RuntimeError, match="requires grad"):
        np.asarray(weight)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return value.detach().float().numpy() if isinstance(value, torch.Tensor) else value


def test_operations_below_torch_function_read_the_weight() -> None:
    """A product of something quantized with it, and autograd's own functions, do not."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> None:
            return None

    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    other, plain = torch.ones(SHAPE).as_subclass(Other), torch.full(SHAPE, 3.0)
    for compute in (lambda w: Doubled.apply(w), lambda w: other + w):
        with torch.no_grad(), pytest.raises(Refused):
            compute(absent(dtype=torch.float32))
        with torch.no_grad():
            actual = compute(absent(dtype=torch.float32, read=lambda: plain))
        assert torch.equal(actual.as_subclass(torch.Tensor), compute(plain).as_subclass(torch.Tensor))


def test_repr_of_an_absent_weight() -> None:
    text = "AbsentWeight((3, 4), torch.bfloat16, cpu, not in memory)"
    assert repr(absent()) == str(absent()) == f"{absent()}" == text


def test_initialising_by_keyword_is_refused() -> None:
    for begin in (nn.init.zeros_, nn.init.ones_, nn.init.normal_):
        with pytest.raises(ReadOnlyWeightError):
            begin(absent(read=lambda: torch.ones(SHAPE)))


def test_copies_and_pickles() -> None:
    weight = absent(marks={"quant_type": "nf4"})
    assert weight.quant_type == "nf4"
    again = copy.deepcopy(weight)
    assert type(again) is AbsentWeight
    assert (again.shape, again.dtype, again.quant_type) == (SHAPE, torch.bfloat16, "nf4")
    assert isinstance(again, nn.Parameter)
    assert again.requires_grad
    for write in (
        lambda: torch.save({"weight": weight.detach()}, io.BytesIO()),
        lambda: pickle.dumps(weight),
    ):
        with pytest.raises(AbsentWeightError, match="save_pretrained"):
            write()
    with pytest.raises(Refused):
        safetensors.torch.save({"weight": weight.detach()})


def set_as_data(weight: Any) -> torch.Tensor:
    other = torch.zeros(tuple(weight.shape))
    other.data = weight
    return other * 1


MEMORY: dict[str, Callable[[Any], Any]] = {
    "a capsule": lambda w: torch.from_dlpack(torch.utils.dlpack.to_dlpack(w)) + 1,  # type: ignore[attr-defined]
    "data": set_as_data,
    "a storage": lambda w: torch.empty(0).set_(w.untyped_storage(), 0, w.shape) + 1,
    "a tensor's storage": lambda w: torch.empty(0).set_(w) + 1,
    "an exchange": lambda w: torch.utils.swap_tensors(w, nn.Parameter(torch.ones(w.shape))),
}


def _take_memory() -> None:
    values = torch.ones(SHAPE)
    with torch.no_grad():
        for weight_of in (weight, lambda: absent(lambda: values, torch.float32, is_parameter=False)):
            for name, take in MEMORY.items():
                if name == "a storage" and weight_of is not weight:
                    assert torch.equal(take(weight_of()), values + 1)
                    continue
                with pytest.raises((RuntimeError, NotImplementedError), match=r"data pointer|storage|backend|weakref"):
                    take(weight_of())
            shared = weight_of()
            assert torch.equal(shared.share_memory_() * 1, weight_of() * 1)


@with_vectors
def test_no_use_of_its_memory_ends_the_process() -> None:
    in_a_fresh_process(_take_memory)


def test_an_address_of_what_is_read_again_is_refused() -> None:
    weight = absent(lambda: torch.ones(SHAPE), torch.float32, is_parameter=False)
    weight.is_at_hand = True
    for use in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage, lambda w: safetensors.torch.save({"w": w})):
        with pytest.raises(AbsentWeightError, match="weight \\* 1"):
            use(weight)


@with_vectors
def test_a_trace_has_the_product_of_other_inputs() -> None:
    module, x = nn.Linear(128, 32, bias=False), torch.randn(2, 128)
    module._parameters["weight"] = nn.Parameter(weight(), requires_grad=False)
    traced = torch.jit.trace(module, (x,), check_trace=False)
    torch.testing.assert_close(traced(x * 2), x * 2 @ module.weight.T)


WIDE = {"hidden_size": 128, "intermediate_size": 192}


WIDE = {"hidden_size": 128, "intermediate_size": 192}


def weight(scheme: str = "4bit", rows: int = 32, columns: int = 128) -> QuantizedWeight:
    return QuantizedWeight(Matrix(*matrix(scheme, rows, columns, dtype=torch.float32)), torch.float32)


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
@with_vectors
def test_linear_uses_a_quantized_weight(scheme: str) -> None:
    quantized = weight(scheme)
    module = nn.Linear(128, 32)
    module._parameters["weight"] = nn.Parameter(quantized, requires_grad=False)
    assert isinstance(module.weight, nn.Parameter)
    assert (module.weight.shape, module.weight.dtype, module.weight.device.type) == ((32, 128), torch.float32, "cpu")
    assert sum(parameter.numel() for parameter in module.parameters()) == 32 * 128 + 32
    x = torch.randn(2, 5, 128)
    with torch.no_grad():
        for y in (module(x), nn.functional.linear(input=x, weight=module.weight, bias=module.bias)):
            assert_product(y, x, quantized.matrix, module.bias)
    assert "QuantizedWeight((32, 128), torch.float32, stored at " + scheme in repr(module.weight)


@with_vectors
def test_products_from_the_left_are_those_of_torch() -> None:
    turned = TurnedMatrix(*matrix("4bit", 128, 192))
    quantized = QuantizedWeight(turned, torch.bfloat16)
    plain, x = quantized.whole(), torch.randn(3, 128).bfloat16()
    expected, by_codes = x @ plain, turned.times(x)
    assert torch.equal(x @ quantized, by_codes)
    for inputs in (x[:, :64], torch.cat([x, x], 1)):
        for multiply in (torch.matmul, product):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                multiply(inputs, quantized if multiply is torch.matmul else plain)
    assert torch.equal(torch.matmul(x, other=quantized), expected)
    assert torch.equal(torch.mm(input=x, mat2=quantized), expected)
    assert torch.equal(torch.func.vmap(lambda row: row @ quantized)(x[None])[0], expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x) @ quantized  # type: ignore[no-untyped-call]
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, expected)  # type: ignore[no-untyped-call]


@with_vectors
def test_other_operations_get_the_matrix() -> None:
    quantized = weight()
    plain = quantized.whole()
    assert torch.equal(quantized + 1, plain + 1)
    assert torch.equal(quantized[3:5], plain[3:5])
    assert torch.equal(torch.cat([quantized, plain]), torch.cat([plain, plain]))
    assert torch.equal(quantized.T @ quantized, plain.T @ plain)
    assert torch.equal(quantized.to(torch.float64), plain.double())
    assert torch.equal(nn.functional.linear(quantized, plain), nn.functional.linear(plain, plain))
    for copied in (copy.deepcopy(quantized), quantized.clone(), quantized.detach()):
        assert isinstance(copied, QuantizedWeight)
        assert torch.equal(copied * 1, plain)


@pytest.mark.parametrize("detach", [torch.Tensor.detach, lambda weight: weight.data, nn.Parameter])
def test_weights_are_detached_in_inference_mode(tmp_path: Path, detach: Callable[[torch.Tensor], torch.Tensor]) -> None:
    value = torch.arange(12.0).view(SHAPE)
    model = load(split(build_checkpoint(tmp_path / "model", "qwen3_moe")), 0)
    experts = next(weight for weight in model.parameters() if isinstance(weight, ExpertStack))
    for weight, expected in ((absent(lambda: value, torch.float32), value), (experts, experts * 1)):
        with torch.inference_mode():
            detached = detach(weight)
            assert torch.equal(detached * 1, expected)
            assert torch.equal(detach(detached) * 1, expected)


@with_vectors
@pytest.mark.parametrize("view", [torch.t, lambda weight: weight.expand(2, -1, -1), lambda weight: weight[1]])
@torch.inference_mode()
def test_views_in_inference_mode(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    of = Matrix(*matrix("8bit", 6, 64))
    weight = nn.Parameter(QuantizedWeight(of, torch.bfloat16), requires_grad=False)
    assert torch.equal(view(weight), view(of.dequantized(torch.bfloat16)))


@with_vectors
def test_every_read_gets_the_matrix() -> None:
    quantized = weight(rows=128, columns=128)
    plain = quantized.whole()
    ids, x, projection = torch.tensor([[3, 127, 3]]), torch.randn(5, 2, 128), torch.randn(384, 128)

    def attention(out: torch.Tensor) -> torch.Tensor:
        options = (128, 4, projection, None, None, None, False, 0.0, out, None)
        return nn.functional.multi_head_attention_forward(x, x, x, *options)[0]  # type: ignore[arg-type]

    for read in (
        lambda w: nn.functional.embedding(ids, w),
        attention,
        lambda w: w[torch.tensor([1, 5])],
        lambda w: torch.from_numpy(np.asarray(w)),
        lambda w: torch.from_numpy(w.numpy()),
        lambda w: torch.tensor(w.tolist()),
        lambda w: torch.from_dlpack(w),
        lambda w: w.index_select(0, ids[0]),
        lambda w: torch.zeros(128, 128).copy_(w),
        lambda w: torch.stack(list(w)),
        lambda w: torch.einsum("ij,bj->bi", w, x[0]),
        lambda w: torch.load(saved(w), weights_only=False) * 1,
    ):
        with torch.no_grad():
            assert torch.equal(read(quantized), read(plain))
    for address in (torch.Tensor.data_ptr, torch.Tensor.storage, lambda w: safetensors.torch.save({"w": w})):
        with pytest.raises(AbsentWeightError, match="only its codes"):
            address(quantized)


def saved(tensor: torch.Tensor) -> io.BytesIO:
    into = io.BytesIO()
    torch.save(tensor, into)
    into.seek(0)
    return into


@with_vectors
def test_gradients_of_inputs_and_bias_equal_those_of_the_matrix() -> None:
    quantized = weight()
    x, bias = torch.randn(3, 128, requires_grad=True), torch.randn(32, requires_grad=True)
    nn.functional.linear(x, quantized, bias).square().sum().backward()
    of_x, of_bias = x.grad, bias.grad
    assert of_x is not None
    assert of_bias is not None
    x2, bias2 = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    nn.functional.linear(x2, quantized.whole(), bias2).square().sum().backward()
    # of squares: twice the error of a product
    assert error(of_x, x2.grad.double()) < 2 * tolerated("4bit")
    assert error(of_bias, bias2.grad.double()) < 2 * tolerated("4bit")


DOUBLED = "qwen3_next", "8bit"
"""Norms after a gated delta rule double the error, and that of 8bit is larger: the values of its codes have 13 bits."""


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
@with_vectors
def test_every_family_is_close_to_its_dequantized_model(tmp_path: Path, family: str, compression: str) -> None:
    folder = build_checkpoint(tmp_path / "model", family, tied=FAMILIES[family].ties[0], dtype=torch.float32)
    plain = reference_logits(
        dequantized(folder, tmp_path / "reference", compression, torch.float32), INPUT, torch.float32
    )
    directory, model = split(folder, compression), plain_model(tmp_path / "reference", dtype=torch.float32)
    is_doubled = family == DOUBLED[0] and (compression == DOUBLED[1] or is_of_bytes(compression))
    tolerance = tolerated(compression) * (4 if is_doubled else 1)
    for budget in (ALL, 0):
        result = run(load(directory, budget, exact=False))
        off = (result.logits.double() - plain.logits.double()).norm(dim=-1) / plain.logits.double().norm(dim=-1)
        # of a mixture rounding to 8 bits may send a position to other experts
        is_near = off.median() < tolerance if is_of_bytes(compression) else False
        assert is_near or error(result.logits, plain.logits.double()) < tolerance
        assert_greedy(result.tokens, plain.tokens, model, tolerance * float(plain.logits.norm()))


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
@with_vectors
def test_resident_and_streamed_have_the_same_bits(tmp_path: Path, compression: str) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **WIDE), compression)
    resident, streamed = load(directory, exact=False), load(directory, 0, exact=False)
    assert Tier.STREAMED in tiers(streamed).values()
    expected, actual = run(resident), run(streamed)
    assert torch.equal(expected.logits, actual.logits)
    assert torch.equal(expected.tokens, actual.tokens)


@with_vectors
def test_single_token_dequantizes_no_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is kept is what is stored: the model fits where its dense matrices would not."""
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **WIDE)
    directory = split(folder, "4bit")
    exact = load(directory)
    stored = sum(placed.stored for placed in exact.placement.units)
    embedding = exact.get_input_embeddings().weight.nbytes
    model = load(directory, stored + embedding, exact=False)
    assert model.placement.is_resident

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a matrix was dequantized")

    monkeypatch.setattr(products, "dequantize", refuse)
    monkeypatch.setattr(units, "dequantize", refuse)
    with torch.inference_mode():
        model(INPUT[:, :1])
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert linears
    assert all(isinstance(module._parameters["weight"], QuantizedWeight) for module in linears)


@with_vectors
def test_exact_has_the_bits_of_the_dequantized_model(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **WIDE)
    expected = reference_logits(
        dequantized(folder, tmp_path / "reference", "4bit", torch.bfloat16), INPUT, torch.bfloat16
    )
    exact, default = (run(load(split(folder, "4bit"), exact=exact)) for exact in (True, False))
    assert torch.equal(exact.logits, expected.logits)
    assert not torch.equal(default.logits, expected.logits)


@with_vectors
def test_whole_equals_the_dequantized_matrix() -> None:
    """The reference of these tests agrees with bitsandbytes."""
    parts = matrix("4bit", 16, 128, dtype=torch.float32)
    assert error(weight("4bit", 16, 128).whole(), meant(parts)) < 1e-6
