"""The experts of a few tokens by one call of compiled code, with the bits of the model's own class.

transformers sorts the tokens by expert, and computes a dozen operations of torch around two grouped products. Here a
call multiplies the rows of the chosen experts that are in memory, by gate and up, then by down, and adds the results
with their weights. While some are read, those that are there are multiplied. No other expert is touched.

What a class computes is tried when a model is loaded, and the order in which torch adds, for each shape. Anything else,
a hook or many tokens for example, is left to the class.
"""

from __future__ import annotations

import functools
from array import array
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from rabbitllm.engine._fusing import fuse, kind_of, trial_of
from rabbitllm.engine._gates import MULTIPLE, add_gate, gated, has_every_gate, is_by_class, is_tabled
from rabbitllm.engine._siblings import is_plain
from rabbitllm.engine.experts import ExpertStack
from rabbitllm.engine.transformers_api import experts_implementation_of
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant.joint import Place, Program, RoutedProduct, Words
from rabbitllm.quant.products import MAX_GROUPED

_PARAMETERS = frozenset({"gate_up_proj", "down_proj"})
_WEIGHTS = torch.bfloat16, torch.float32
_GRAIN = 1 << 15
"""Elements for which torch computes in a further thread (GRAIN_SIZE)."""


def fuse_experts(model: nn.Module) -> int:
    """Let modules of experts whose bits are reproduced compute few tokens by one call.

    It is used while their matrices are multiplied as integers, without gradients, and no hook sees what is within.

    Returns:
        How many these are.
    """

    def key_of(module: nn.Module) -> object:
        parameters, parts = module._parameters, module._modules
        if parameters.keys() != _PARAMETERS or parts.keys() != {"act_fn"} or module._buffers:
            return None
        has_stacks = all(isinstance(stack, ExpertStack) for stack in parameters.values())
        return (kind_of(module), type(parts["act_fn"])) if has_stacks and is_by_class(parts["act_fn"]) else None

    return fuse(model, key_of, lambda module, _: _forward if _has_bits(module) else None)


class _Expert(NamedTuple):
    """What a call needs of an expert; the weight of its gate keeps it.

    Attributes:
        matrices: of gate and up, and of down.
        products: with them.
        words: of both.
        address: of the words.
        most: rows of input up to which this is the fastest method.
    """

    matrices: tuple[Any, Any]
    products: tuple[RoutedProduct, RoutedProduct]
    words: array[int]
    address: int
    most: int

    @classmethod
    def of(cls, gate_up: Any, down: Any) -> _Expert | None:
        """An expert by its weights; None if they are not multiplied as integers."""
        if type(gate_up) is not QuantizedWeight or type(down) is not QuantizedWeight:
            return None
        matrices, kept = (gate_up.matrix, down.matrix), gate_up.calls
        if kept is not None and kept.matrices[0] is matrices[0] and kept.matrices[1] is matrices[1]:
            return kept  # type: ignore[no-any-return]
        first, second = RoutedProduct.of(matrices[0]), RoutedProduct.of(matrices[1])
        if first is None or second is None:
            return None
        words, most = array("q", [*first[1], *second[1]]), min(first[0].max_inputs, second[0].max_inputs)
        expert = gate_up.calls = cls(matrices, (first[0], second[0]), words, words.buffer_info()[0], most)
        return expert


class _ExpertSums(NamedTuple):
    """Sums of experts' results: the tokens, the experts of each, their width, and whether weights are float32."""

    tokens: int
    used: int
    width: int
    is_wide: bool

    def add_to(self, program: Program, products: Place, weights: Place, places: Place, out: Place) -> None:
        """Add them to a program."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        words: Words = [products, weights, places, out, self.tokens, self.used, self.width, int(self.is_wide)]
        program.add(_layer_kernels.combine, words)

    def __call__(self, products: torch.Tensor, weights: torch.Tensor, places: array[int]) -> torch.Tensor:
        """They themselves, (tokens, width), for rows in some order, and the number of each expert's row in it."""
        out = torch.empty(self.tokens, self.width, dtype=torch.bfloat16)
        _sums(self)(products.data_ptr(), weights.data_ptr(), places.buffer_info()[0], out.data_ptr())
        return out


@functools.lru_cache(1024)
def _sums(sums: _ExpertSums) -> Program:
    program = Program(4)
    products, weights, places, out = (program.address(index) for index in range(4))
    sums.add_to(program, products, weights, places, out)
    return program


@functools.lru_cache(1024)
def _program(
    products: tuple[RoutedProduct, RoutedProduct],
    act: Any,
    rows: int,
    sums: _ExpertSums,
    is_whole: bool,
    has_one_input: bool,
    threads: int,
) -> Program:
    """The results of experts for some rows, all with one input and another expert, or not; of all, `sums` of them.

    A call is given the addresses of inputs, of the chosen experts, of the numbers of rows' inputs, and of the results;
    and of weights and places.
    """
    first, second = products
    program, width = Program(6), first.shape[0] // 2
    x, chosen, sources, out, weights, places = (program.address(index) for index in range(6))
    both, product = program.room(4 * rows * width), program.room(2 * rows * width)
    first.add_to(program, rows, x, chosen, both, -1 if has_one_input else sources, 0)
    for row in range(rows):
        gate, result = both[1] + 4 * row * width, product[1] + 2 * row * width
        add_gate(program, act, (both[0], gate), (both[0], gate + 2 * width), (product[0], result), width)
    results = program.room(2 * rows * sums.width) if is_whole else out
    second.add_to(program, rows, product, chosen, results, 0, 1)
    if is_whole:
        sums.add_to(program, results, weights, places, out)
    return program


def _forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    result = None
    if is_plain(hidden_states) and hidden_states.dim() == 2:
        result = _computed(module, hidden_states, top_k_index, top_k_weights)
    if result is not None:
        return result
    return type(module).forward(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]


def _computed(module: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
    """The result of a module; None if it is left to the class."""
    stack, down = (module._parameters[name] for name in ("gate_up_proj", "down_proj"))
    act: nn.Module = module._modules["act_fn"]
    if type(stack) is not ExpertStack or type(down) is not ExpertStack or stack.transposed or down.transposed:
        return None
    if stack.dtype is not x.dtype or weights.dtype not in _WEIGHTS or not weights.is_contiguous():
        return None
    if weights.shape != index.shape or not is_tabled(act) or module._is_expert_parallel:
        return None
    if experts_implementation_of(module.config) != "grouped_mm":
        return None
    tokens, used = index.shape
    rows, width = tokens * used, down.shape[2]
    sums = _ExpertSums(tokens, used, x.shape[1], weights.dtype is torch.float32)
    if rows > MAX_GROUPED or not _is_even(rows * width) or width % MULTIPLE:
        return None
    groups = dict[int, list[int]]()
    for row, expert in enumerate(index.flatten().tolist()):
        groups.setdefault(expert, []).append(row)
    has_one_input = tokens == 1 and len(groups) == rows  # an expert may be chosen twice, as by hashes
    left = sorted(groups)
    if left[0] < 0 or left[-1] >= stack.shape[0] or not _adds_alike(sums, torch.get_num_threads()):
        return None
    places, out, results, begin = array("q", bytes(8 * rows)), torch.empty_like(x), None, 0
    while left:
        filled, pending, others = stack.supply.order(left)
        if others:
            return None
        batch = filled or pending[:1]
        experts = [left[position] for position in batch]
        chosen, sources = array("q", [len(experts)]), array("q")
        kept = list[_Expert]()  # the call is given addresses of their words
        of_down = [*down.supply.each(down.leaf, experts)]
        for expert, gate_up, other in zip(experts, stack.supply.each(stack.leaf, experts), of_down, strict=True):
            words, members = _Expert.of(gate_up, other), groups[expert]
            if words is None or len(members) > words.most:
                return None
            kept.append(words)
            chosen.extend((words.address, len(sources), len(members)))
            for row in members:
                places[row] = begin + len(sources)
                sources.append(row // used)
        is_whole = len(sources) == rows
        if results is None and not is_whole:
            results = x.new_empty(rows, x.shape[1])
        act_class: Any = type(act)
        threads = torch.get_num_threads()
        program = _program(kept[0].products, act_class, len(sources), sums, is_whole, has_one_input, threads)
        to = out.data_ptr() if results is None else results.data_ptr() + 2 * x.shape[1] * begin
        addresses = (values.buffer_info()[0] for values in (chosen, sources))
        program(x.data_ptr(), *addresses, to, weights.data_ptr(), places.buffer_info()[0])
        begin += len(sources)
        left = [expert for expert in left if expert not in experts]
    return out if results is None else sums(results, weights, places)


def _is_even(count: int) -> bool:
    """Whether torch computes so many elements, in rows of whole vectors, by whole vectors in each thread."""
    chunks = min(torch.get_num_threads(), -(-count // _GRAIN))
    return -(-count // chunks) % MULTIPLE == 0


@functools.lru_cache(1024)
@torch.no_grad()
def _adds_alike(sums: _ExpertSums, threads: int) -> bool:
    """Whether torch adds in this order: numbers of very different sizes, whose sums are mostly rounding."""
    generator = torch.Generator().manual_seed(0)
    shape = sums.tokens, sums.used, sums.width
    values = (
        torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-12, 13, shape, generator=generator)
    ).bfloat16()
    values[:, -1] = -values[:, :-1].float().sum(1)
    values = values[:, torch.randperm(sums.used, generator=generator)].contiguous()
    weights = torch.ones(shape[:2], dtype=torch.float32 if sums.is_wide else torch.bfloat16)
    expected = (values * weights.unsqueeze(-1)).sum(1).bfloat16()
    places = array("q", range(sums.tokens * sums.used))
    return torch.equal(sums(values, weights, places), expected)


@torch.no_grad()
def _has_bits(module: Any) -> bool:
    """Whether a class has these results, with matrices in memory, and its activation those of its table."""
    act, generator = module._modules["act_fn"], torch.Generator().manual_seed(0)
    hidden, width, experts = MULTIPLE, 2 * MULTIPLE, 4
    shapes = {"gate_up_proj": (experts, 2 * width, hidden), "down_proj": (experts, hidden, width)}
    stacks = {name: (torch.randn(shape, generator=generator) / 4).bfloat16() for name, shape in shapes.items()}
    like = trial_of(module, _parameters={name: nn.Parameter(stack) for name, stack in stacks.items()})
    like.num_experts = experts
    like.config = SimpleNamespace(_experts_implementation="grouped_mm")
    for index, dtype in (([[2, 0]], torch.bfloat16), ([[1, 3], [0, 2]], torch.float32)):
        x = torch.randn(len(index), hidden, generator=generator).bfloat16()
        weights = torch.rand(len(index), 2, generator=generator).to(dtype)
        try:
            expected = type(module).forward(like, x, torch.tensor(index), weights)
        except (TypeError, AttributeError, RuntimeError, KeyError):  # it has other arguments or parts
            return False
        rows = [torch.empty(0, hidden, dtype=torch.bfloat16)]
        for token, chosen in enumerate(index):
            for expert in chosen:
                gate, up = (x[token : token + 1] @ stacks["gate_up_proj"][expert].T).chunk(2, 1)
                rows.append(gated(act, gate.contiguous(), up.contiguous()) @ stacks["down_proj"][expert].T)
        sums = _ExpertSums(len(index), 2, hidden, dtype is torch.float32)
        result = sums(torch.cat(rows), weights, array("q", range(2 * len(index))))
        if not isinstance(expected, torch.Tensor) or not torch.equal(result, expected):
            return False
    return has_every_gate(act)
