"""Forwards that replace a model's: Llama 4's experts, bfloat16 products, and what float16 needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rabbitllm.base.programs import HALVES
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._fusing import (
    ROUNDING,
    WithFunctions,
    by_function,
    form_in,
    is_result,
    is_transformed,
    replace,
    result_of,
    with_globals,
)
from rabbitllm.engine._routed import stack_in
from rabbitllm.engine._siblings import LastCall, Sibling, is_installed, multiplies_plain, row_product
from rabbitllm.engine.experts import ExpertStack
from rabbitllm.engine.transformers_api import group_keys_if, kept_in_float32
from rabbitllm.quant import bfloat_products, turned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rabbitllm.engine.expert_source import ExpertSource
    from rabbitllm.engine.units import UnitSource

_repeating: set[torch.device] = set()


def repeat_keys_on(device: torch.device) -> None:
    """Make transformers' `sdpa` repeat keys and values for all query heads on a device, instead of `enable_gqa`.

    For GPUs before compute capability 8.0. They have no flash attention, and torch's memory-efficient attention does
    not support grouped keys. With `enable_gqa` torch makes the whole attention matrix: about 2.6 GB for 64 heads and
    2,048 tokens (transformers issue 48633, pytorch issue 191085).
    """
    if not _repeating:
        group_keys_if(lambda key: key.device not in _repeating)
    _repeating.add(device)


LARGEST_HALF = torch.finfo(torch.float16).max


def keep_finite(layers: Iterable[nn.Module]) -> None:
    """Clamp the hidden states that decoder layers return, and those that their norms get, to the range of float16.

    For a model that was trained in bfloat16: hidden states of Qwen2.5-72B are beyond float16 (exllamav2 issue 627), and
    a norm turns an infinite value into NaN.
    """

    def clamp(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
            return value.clamp(-LARGEST_HALF, LARGEST_HALF)
        return (clamp(value[0]), *value[1:]) if type(value) is tuple and value else value

    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: clamp(output))
        for module in layer.modules():
            if "Norm" in type(module).__name__:
                module.register_forward_pre_hook(lambda module, args: clamp(args))


def widen_inputs(model: PreTrainedModel) -> None:
    """Let linear layers that transformers keeps in float32 at float16 take float16, and return it.

    The forwards of most models convert what these get; that of DeepSeek-V4 does not, and torch refuses the product.
    """

    def linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        wide = x.dtype == torch.float16 and module.weight.dtype == torch.float32
        return nn.Linear.forward(module, x.float()).half() if wide else nn.Linear.forward(module, x)

    for name, module in model.named_modules():
        is_kept = any(part in name for part in kept_in_float32(model))
        if is_kept and type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = MethodType(linear, module)  # type: ignore[method-assign]


def route_llama4(model: nn.Module) -> None:
    """Make every `Llama4TextMoe` of a model compute with routed experts only, with the same result bit for bit.

    transformers' registry of expert kernels does not support Llama 4. Its own forward (`Llama4TextMoe`,
    modeling_llama4.py) multiplies every token by every expert; for an expert that a token is not routed to, the token
    is scaled by zero, and the product is zero. Here only experts with a token are used, each with all tokens as there,
    since the number of rows of a product changes its rounding. Its experts get the attributes and the arguments of a
    module in the registry.
    """
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.get_submodule("language_model").register_forward_hook(_with_image_outputs)
    for moe in model.modules():
        layer: Any = moe
        if type(moe).__name__ != "Llama4TextMoe" or layer.top_k > 2:  # published models use one
            continue
        experts = layer.experts
        experts.config, experts.has_gate, experts.is_transposed = layer.shared_expert.config, True, True
        experts.is_grouped = False
        experts.forward = partial(experts_forward, experts)
        layer.forward = partial(moe_forward, layer)


def _with_image_outputs(module: nn.Module, args: Any, output: Any) -> None:
    """In transformers 5.24.0 the forward around the text model reads a field that the text model's output lacks."""
    if not isinstance(output, tuple) and not hasattr(output, "image_outputs"):
        output.image_outputs = None


def moe_forward(moe: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward of a `Llama4TextMoe` whose experts compute by `experts_forward`.

    With finite hidden states and weights the result equals that of transformers' own forward on a CPU bit for bit.
    (There an infinite value becomes NaN in every expert, here in the routed ones.)

    Args:
        moe: the module.
        hidden_states: (..., hidden).

    Returns:
        The output (tokens, hidden), and the router's logits (tokens, experts).
    """
    tokens = hidden_states.reshape(-1, moe.hidden_dim)
    scores, logits = moe.router(tokens)
    chosen = logits.topk(moe.top_k, dim=1).indices
    routed = moe.experts(tokens, chosen, scores.gather(1, chosen))
    out: torch.Tensor = moe.shared_expert(tokens)
    return (out + routed if out.requires_grad else out.add_(routed)), logits


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The sum of the routed experts' outputs for each token.

    At most two experts a token: two terms and any number of zeros have the same sum in any order.

    Args:
        experts: the module, with `gate_up_proj` (experts, hidden, 2 x intermediate), `down_proj` (experts,
            intermediate, hidden), and `is_grouped`: whether results may differ in rounding.
        hidden_states: (tokens, hidden).
        top_k_index, top_k_weights: each token's experts, and the factors that scale its inputs to them, (tokens,
            experts per token).

    Returns:
        (tokens, hidden).
    """
    stacks = experts.gate_up_proj, experts.down_proj
    if experts.is_grouped and not (torch.is_grad_enabled() or is_transformed()):
        known = [stack for each in stacks if (stack := stack_in(each)) is not None]
        if len(known) == len(stacks):
            fast = [stack.again(product=turned.product) for stack in known]
            return _by_groups(experts, fast, hidden_states, top_k_index, top_k_weights)
    if all(isinstance(stack, ExpertStack) and stack.is_coded for stack in stacks):
        return _by_groups(experts, stacks, hidden_states, top_k_index, top_k_weights)
    scores = top_k_weights.new_zeros(len(hidden_states), experts.num_experts).scatter_(1, top_k_index, top_k_weights)
    summed = torch.zeros_like(hidden_states)
    hit = torch.unique(top_k_index)
    at_once = min(torch.get_num_threads(), len(hit))
    for batch in torch.split(hit, at_once) if at_once else ():
        inputs = hidden_states * scores.t()[batch].unsqueeze(-1)
        for product in _multiplied(experts, batch, inputs):
            summed += product
    return summed


def _by_groups(
    experts: Any, stacks: Iterable[Any], x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The same, each expert with its own tokens alone."""
    order = index.flatten().argsort(stable=True)
    tokens = order // index.shape[1]
    ends = torch.bincount(index.flatten(), minlength=experts.num_experts).cumsum(0)
    inputs = x[tokens] * weights.flatten()[order].unsqueeze(-1)
    gate_up, down = stacks
    gate, up = gate_up.grouped_mm(inputs, ends).chunk(2, dim=-1)
    return torch.zeros_like(x).index_add_(0, tokens, down.grouped_mm(up * experts.act_fn(gate), ends))


def group_llama4(model: nn.Module) -> None:
    """Let routed experts of Llama 4 multiply their own tokens alone, by the fastest product of bfloat16 (K, N)."""
    for module in model.modules() if turned.is_faster() else ():
        if "is_grouped" in vars(module):
            module.is_grouped = True  # type: ignore[assignment]


def _multiplied(experts: Any, chosen: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Each expert's product with its own inputs, both (experts, tokens, hidden).

    If a batch has fewer matrices than threads, torch splits each matrix over several threads, and rounds its sums
    differently than in the batch of all experts. So the batch is padded with copies of the last expert.
    """
    batch = min(torch.get_num_threads(), experts.num_experts)
    lacking = batch - len(chosen)
    padded = torch.cat([chosen, chosen[-1:].expand(lacking)])

    def weights(stack: torch.Tensor) -> torch.Tensor:
        if len(chosen) > 1:
            return stack[padded]
        return stack[int(chosen)].expand(batch, -1, -1)  # without a copy

    padded_inputs = torch.cat([inputs, inputs[-1:].expand(lacking, -1, -1)])
    gate, up = torch.bmm(padded_inputs, weights(experts.gate_up_proj)).chunk(2, dim=-1)
    return torch.bmm(up * experts.act_fn(gate), weights(experts.down_proj))[: len(chosen)]


class RowProducts:
    """Uses the fastest bfloat16 product here (`quant/plain.py`) in linear layers and routers, until closed.

    Without `fast_bfloat16=True` a single sequence uses torch's own product, so that its logits equal those of
    transformers bit for bit. Packed batches always use the product here: torch's results depend on the number of rows.

    Args:
        model: the model; its layers may be streamed.
        modules: those that are meant; None for all.
    """

    def __init__(self, model: PreTrainedModel, modules: Iterable[nn.Module] | None = None) -> None:
        self._undo, last_call = list[Callable[[], object]](), LastCall()
        each: list[Any] = [*(model.modules() if modules is None else modules)]
        for module in each if each and load_kernels(model) else ():
            is_free = "forward" not in vars(module)
            module_class: Any = type(module)
            own = module_class.forward
            if own is nn.Linear.forward:
                if is_free or (is_installed(module) and not (multiplies_plain(module) or ROUNDING in vars(module))):
                    self._undo.append(Sibling(module, last_call).install_for_plain())
            elif is_free and (forward := _linear_forward(module_class, own) or _router_forward(own)):
                replace(module, by_function, forward)
                self._undo.append(functools.partial(delattr, module, "forward"))

    def close(self) -> None:
        """Restore the forward of each module."""
        for undo in self._undo:
            undo()
        self._undo = []


def has_plain_matrices(model: nn.Module, sources: Iterable[UnitSource], experts: Iterable[ExpertSource]) -> bool:
    """Whether some matrix that may be multiplied is not kept as codes; tables of embeddings are looked up in."""
    entries = (entry for source in sources for job in source.jobs for _, entry in job.entries)
    tables = {id(module._parameters) for module in model.modules() if isinstance(module, nn.Embedding)}
    is_any = any(len(entry.shape) > 1 and id(entry.table) not in tables for entry in entries)
    return is_any or any(leaf.matrix_type is None for source in experts for leaf in source.leaves.values())


def load_kernels(model: PreTrainedModel) -> bool:
    """Load the kernels that the model's layers will need, or compile them; whether there are any.

    Call it before the first request, and before free memory is measured.
    """
    return model.dtype in HALVES and bfloat_products.max_rows() > 0


_FUNCTIONAL = WithFunctions(nn.functional, {"linear": row_product})


def has_row_product(module: Any) -> bool:
    """Whether `RowProducts` set the forward of a router or Linear."""
    if multiplies_plain(module):
        return is_installed(module)
    forward = form_in(module, by_function)
    return forward is not None and forward is _router_forward(type(module).forward)


@functools.cache
def _linear_forward(linear: Any, tried: Any) -> Callable[..., Any] | None:
    """That of a class of Linears that adds the bias to rounded sums (Falcon's), with `row_product`; None of others."""
    if not issubclass(linear, nn.Linear) or linear.__module__.startswith("bitsandbytes."):  # a trial warns of no codes
        return None
    x, weight, bias = (RandomTensors().normal(*shape) for shape in ((3, 8), (5, 8), (1, 5)))
    for each, expected in ((None, x @ weight.T), (bias[0], x @ weight.T + bias)):
        own = SimpleNamespace(weight=weight, bias=each)
        if not is_result(expected, result_of(tried, own, x)):
            return None

    def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
        result = row_product(input, module.weight)
        return result if module.bias is None else result + module.bias

    return forward


@functools.cache
def _router_forward(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """That of a class of routers, which multiply by their own weight, with `row_product`; None of others."""
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    is_router = code is not None and {"F", "linear", "weight", "topk"} <= {*code.co_names}
    return with_globals(forward, {"F": _FUNCTIONAL}) if is_router and names["F"] is nn.functional else None
