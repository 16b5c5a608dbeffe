"""The experts of a few tokens by one call of compiled code, with the bits of the model's class if they are codes.

transformers sorts the tokens by expert, and computes a dozen operations of torch around two grouped products, which on
a CPU go through all experts. Here a call multiplies the rows of the chosen experts that are in memory, by gate and up,
then by down, and adds the results with their weights. While some are read, those that are there are multiplied. No
other expert is touched. Sums of products with matrices of bfloat16 have another order than torch's.

What a class computes is tried when a model is loaded, and the order in which torch adds, for each shape. Anything else,
a hook or many tokens for example, is left to the class; few tokens go through the chosen experts there too. Many tokens
of experts that are read for one use are computed here, too, with torch's sums: each expert is read once, whole, where
the class needs the gates and factors of all before the second matrix of any.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from rabbitllm.base.programs import Place, Program, Programs, Words, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.base.rounding import round_up
from rabbitllm.engine._expert_pool import PooledExperts
from rabbitllm.engine._first_use import unchecked_in
from rabbitllm.engine._fusing import class_result, form_in, fuse, is_result, is_transformed, trial_of
from rabbitllm.engine._gates import (
    MULTIPLE,
    ActKind,
    act_kind,
    add_gates_of_rows,
    every_half,
    gated,
    has_every_gate,
)
from rabbitllm.engine._siblings import dtype_of, has_hooks, is_plain
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.engine.experts import ExpertStack, ResidentExperts
from rabbitllm.engine.transformers_api import groups_experts
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant import turned
from rabbitllm.quant.joint import RoutedProduct
from rabbitllm.quant.products import MAX_GROUPED

_MATRICES, _BIASES = ("gate_up_proj", "down_proj"), ("gate_up_proj_bias", "down_proj_bias")
_OTHERS = 8
"""Experts that are entered with those that a token has used."""
_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32})
_TOKENS, _ROWS = 64, 1024
"""Tokens whose results are added, and rows of a prompt that are multiplied, at a time: tensors of all would take
several times the memory of the results."""
_RUN = 128
"""Rows of several experts that are computed together: what is between their products stays in the cache."""
_GRAIN = 1 << 15
"""Elements for which torch computes in a further thread (GRAIN_SIZE)."""
_resident: Any = WeakTensorKeyDictionary()
"""Parameter with all experts of a module -> where they are, and their stack."""


@dataclass(frozen=True)
class _ExpertsForm:
    """What experts compute between and after their products.

    Attributes:
        act: the kind of their activation; None for pairs of a gate and a factor.
        limited: of pairs, the factor within the sigmoid and the limit of both.
        is_turned: whether matrices are (K, N).
        is_biased: whether sums have biases.
        is_fast: whether any matrix is multiplied by the fastest product, not by torch's.
    """

    act: ActKind | None
    limited: tuple[float, float] = (0.0, 0.0)
    is_turned: bool = False
    is_biased: bool = False
    is_fast: bool = False

    @classmethod
    def of(cls, module: Any) -> _ExpertsForm | None:
        """The form that a module may have; None if it has another."""
        names, parts, own = module._parameters.keys(), module._modules, vars(module)
        if "_is_expert_parallel" not in own:  # transformers' decorator sets it
            return None
        is_biased = names == {*_MATRICES, *_BIASES}
        if (names != {*_MATRICES} and not is_biased) or module._buffers:
            return None
        act, limited = parts.get("act_fn"), (own.get("alpha"), own.get("limit"))
        dtype = dtype_of(module._parameters[_MATRICES[0]])
        if parts.keys() == {"act_fn"} and (kind := act_kind(act, dtype)) is not None:
            return cls(kind, (0.0, 0.0), bool(own.get("is_transposed")), is_biased)
        if not parts and dtype is torch.bfloat16 and all(isinstance(number, int | float) for number in limited):
            return cls(None, tuple(map(float, limited)), bool(own.get("is_transposed")), is_biased)  # type: ignore[arg-type]
        return None

    @property
    def dtype(self) -> torch.dtype:
        """That of inputs and results."""
        return torch.bfloat16 if self.act is None else self.act[0]

    def is_of(self, module: Any) -> bool:
        """Whether a module that had this form when the model was loaded has it still, and no hook sees its gates."""
        if self.act is None:
            return bool((module.alpha, module.limit) == self.limited)
        act = module._modules["act_fn"]
        return act_kind(act, self.dtype) == self.act and not has_hooks(act)

    def add_gates(self, program: Program, both: Place, out: Place, rows: int, width: int) -> None:
        """Add the activation of gates times factors to a program, for rows of both."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        if self.act is None:
            tables = (table.data_ptr() for table in _pair_tables(*self.limited))
            program.add(_layer_kernels.gate_pairs, [*tables, both, out, rows * width])
            return
        add_gates_of_rows(program, self.act, both, out, rows, width)

    def gated(self, act: Any, both: torch.Tensor) -> torch.Tensor:
        """What becomes of rows of gates and factors."""
        if self.act is not None:
            gate, up = (half.contiguous() for half in both.chunk(2, 1))
            return gated(act, gate, up)
        out = both.new_empty(len(both), both.shape[1] // 2)
        Program.of(self.add_gates, 2, *out.shape)(both.data_ptr(), out.data_ptr())
        return out


@functools.cache
def _pair_tables(alpha: float, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What gates and factors become, by the numbers of `_ExpertsForm.limited`."""
    every = every_half()
    gates = every.clamp(max=limit)
    return gates * torch.sigmoid(gates * alpha), every.clamp(-limit, limit) + 1


def fuse_experts(model: nn.Module, *, prompts: bool = False) -> int:
    """Let modules of experts whose activation is reproduced compute few tokens by one call.

    It is used while their matrices are multiplied by their codes, or are bfloat16, or are float16 and `prompts` is
    true, without gradients, and no hook sees what is within.

    Args:
        prompts: also those of prompts by the fastest products of bfloat16, whose results differ in rounding.

    Returns:
        How many these are.
    """

    def form_of(module: Any) -> _ExpertsForm | None:
        form = _ExpertsForm.of(module)
        return form and replace(form, is_fast=prompts)

    return fuse(model, _forward, form_of, _has_bits)


class _Expert(NamedTuple):
    """What a call needs of an expert; the weight of its gate keeps it if that is quantized, `KeptExperts` if it stays.

    Attributes:
        matrices: of gate and up, and of down.
        products: with them.
        words: of both.
        address: of the words.
        most: rows of input up to which this is the fastest method.
    """

    matrices: tuple[Any, Any]
    products: list[RoutedProduct]
    words: array[int]
    address: int
    most: int

    @classmethod
    def of(cls, gate_up: Any, down: Any) -> _Expert | None:
        """An expert by its weights; None if there is no kernel for them."""
        is_coded = type(gate_up) is QuantizedWeight
        if is_coded is not (type(down) is QuantizedWeight):
            return None
        matrices = (gate_up.matrix, down.matrix) if is_coded else (gate_up, down)
        kept: _Expert | None = gate_up.calls if is_coded else None
        if kept is not None and kept.matrices[0] is matrices[0] and kept.matrices[1] is matrices[1]:
            return kept
        first, second = (RoutedProduct.of(matrix, gate_up.dtype) for matrix in matrices)
        if first is None or second is None:
            return None
        words, most = array("q", [*first[1], *second[1]]), min(first[0].max_inputs, second[0].max_inputs)
        expert = cls(matrices, [first[0], second[0]], words, words.buffer_info()[0], most)
        if is_coded:
            gate_up.calls = expert
        return expert


class _ExpertSums(NamedTuple):
    """Sums of experts' results: the tokens, the experts of each, their width, whether weights are float32, and the
    dtype of results."""

    tokens: int
    used: int
    width: int
    is_wide: bool
    dtype: torch.dtype

    def __call__(self, products: torch.Tensor, weights: torch.Tensor, places: array[int]) -> torch.Tensor:
        """They themselves, (tokens, width), for rows in some order, and the number of each expert's row in it."""
        out = torch.empty(self.tokens, self.width, dtype=self.dtype, device="cpu")
        program = prepared(_add_sums, 4, self, dtype=self.dtype)
        program(products.data_ptr(), weights.data_ptr(), places.buffer_info()[0], out.data_ptr())
        return out


def _add_sums(
    program: Program, products: Place, weights: Place, places: int | Place, out: Place, sums: _ExpertSums
) -> None:
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    words: Words = [products, weights, places, out, sums.tokens, sums.used, sums.width, int(sums.is_wide)]
    program.add(_layer_kernels.combine, words)


def _forward(form: _ExpertsForm, module: Any, *args: Any, **named: Any) -> torch.Tensor | None:
    if len(args) != 3 or named or not _multiplies_groups(module, *args[:2]):
        return None
    is_few, is_ours = args[1].numel() <= MAX_GROUPED, form.is_turned or form.is_fast
    stacks = [stack_in(module._parameters.get(name)) for name in _MATRICES]
    if any(stack is None for stack in stacks):  # `in` would compare stacks
        return None
    for compute in (_computed, _by_batches)[not is_few :] if is_plain(args[0], form.dtype) else ():
        if (result := compute(form, module, stacks, *args)) is not None:
            return result
    if not is_few and not (is_ours and args[0].dtype is torch.bfloat16 and turned.is_faster()):
        return None
    if is_ours:
        stacks = [stack.again(product=turned.product) for stack in stacks if stack is not None]
    own = trial_of(module, _parameters={**module._parameters, **dict(zip(_MATRICES, stacks, strict=True))})
    return type(module).forward(own, *args)  # type: ignore[no-any-return]


def _multiplies_groups(module: Any, x: torch.Tensor, index: torch.Tensor) -> bool:
    """Whether a module computes tokens by transformers' grouped products, without gradients, on the CPU."""
    if torch.is_grad_enabled() or is_transformed() or x.dim() != 2 or not x.is_cpu:
        return False
    return _is_grouped(module) and index.numel() > 0


def _is_grouped(module: Any) -> bool:
    """Whether a module computes by transformers' grouped products."""
    return groups_experts(module.config) and not module._is_expert_parallel


def kept_experts(module: Any) -> KeptExperts | None:
    """What is kept of the experts of a module that `fuse_experts` lets compute few tokens; None if nothing is yet."""
    if (form := form_in(module, _forward)) is None:
        return None
    stack, down = (stack_in(module._parameters.get(name)) for name in _MATRICES)
    kept: KeptExperts | None = None if stack is None or down is None else stack.kept
    return kept if kept is not None and kept.down is down and kept.form is form else None


def facts_of_stacks(module: Any) -> list[tuple[dict[str, Any], str]]:
    """What tells, besides the module's own facts, that other experts are kept; none if plain parameters have them."""
    stacks = [module._parameters.get(name) for name in _MATRICES]
    if any(type(stack) is not ExpertStack for stack in stacks):
        return []
    return [*((module._parameters, name) for name in _MATRICES), (vars(stacks[0]), "kept")]


def stack_in(weight: Any) -> ExpertStack | None:
    """The stack of a parameter's experts; None if it is neither one nor a tensor in memory."""
    if type(weight) is ExpertStack:
        return weight
    if type(weight) is not nn.Parameter or weight.dim() != 3 or weight.dtype not in _FLOATS or not weight.is_cpu:
        return None
    place = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype  # all of them change with its `data`
    if (kept := _resident.get(weight)) is not None and kept[0] == place:
        return kept[1]  # type: ignore[no-any-return]
    stack = ExpertStack(ResidentExperts(all=weight.detach()), "all", weight.shape, weight.dtype, weight.device)
    _resident[weight] = place, stack
    return stack


class KeptExperts:
    """What the stack of gates and factors keeps between calls, since each search for it, and a stack's shape or dtype,
    takes as long as a small operation.

    Attributes:
        form: the form that it is for.
        stays: whether all experts stay in memory once they are there.
        pooled: what reads them if they come and go, for a step that is one call; else None.
        experts: those that do.
        biases: names and shapes of biases, if there are any.
        products: of gate and up and of down, with any expert; none before the first one.
        unchecked: those whose checksums are to be compared yet; None if none are.
        place_of_rows: the address of 0, 1, 2, ...
        place_of_words: that of the addresses of all experts' words; 0 for those of which nothing is known yet.
    """

    def __init__(self, form: _ExpertsForm, stack: ExpertStack, down: ExpertStack, module: nn.Module) -> None:
        self.form, self._down, self.unchecked = form, weakref.ref(down), unchecked_in(module)
        self.stays = stack.supply.stays(stack.leaf) and down.supply.stays(down.leaf)
        is_one = type(stack.supply) is PooledExperts and down.supply is stack.supply
        self.pooled: PooledExperts | None = stack.supply if is_one else None  # type: ignore[assignment]
        is_alike = stack.transposed is down.transposed and (form.is_turned or not stack.transposed)
        # those that are plain and float16 have torch's bits otherwise
        is_ours = stack.is_coded or form.dtype is torch.bfloat16 or form.is_fast
        self._is_fit = is_alike and stack.dtype is form.dtype and is_ours
        self._is_plain_turned = form.is_turned and not (stack.transposed or stack.is_coded)
        (self._count, *_), (hidden, width) = stack.shape, down.shape[1:]
        self._hidden, self._width = (width, hidden) if form.is_turned else (hidden, width)
        self.experts, self.biases = dict[int, _Expert](), _biases_in(form, [stack, down])
        self._sums = dict[tuple[Any, ...], _ExpertSums | None]()
        self._programs, self.products = Programs(), list[RoutedProduct]()
        self._rows, self._words = array("q", range(MAX_GROUPED)), array("q", bytes(8 * self._count))
        self.place_of_rows, self.place_of_words = self._rows.buffer_info()[0], self._words.buffer_info()[0]

    @property
    def down(self) -> ExpertStack | None:
        """The other stack that it is for. It may lead to the model, which leads here by `_resident`."""
        return self._down()

    def sums(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, threads: int) -> _ExpertSums | None:
        """How the results of such tensors are added; None if they are left to the class."""
        key = x.shape, index.shape, weights.shape, weights.dtype, threads
        if key not in self._sums:
            tokens, used = index.shape
            is_wide = weights.dtype is torch.float32
            is_fit = x.shape == (tokens, self._hidden) and weights.shape == index.shape
            is_fit = is_fit and (is_wide or weights.dtype is self.form.dtype)
            self._sums[key] = self.sums_of(tokens, used, is_wide, threads) if is_fit else None
        return self._sums[key]

    def sums_of(self, tokens: int, used: int, is_wide: bool, threads: int) -> _ExpertSums | None:
        """How the results of so many tokens are added; None if they are left to the class."""
        sums = _ExpertSums(tokens, used, self._hidden, is_wide, self.form.dtype)
        is_fit = self._is_fit and self._width % MULTIPLE == 0 and _is_even(tokens * used * self._width)
        return sums if is_fit and _adds_alike(sums, threads) else None

    def is_of(self, module: Any) -> bool:
        """Whether a module's few tokens are computed so, by its form and its implementation."""
        return self.form.is_of(module) and _is_grouped(module)

    def note(self, module: nn.Module) -> None:
        """Enter the words of a module's experts that were used, and whose checksums were compared if they have any.

        If they stay in place, some others come with them: the first token that meets one would be left to its class.
        """
        stack = stack_in(module._parameters.get(_MATRICES[0]))
        if stack is not None and self.stays and stack.supply.is_in_place:
            known = self.experts.keys() | (self.unchecked or ())
            others = itertools.islice((n for n in range(self._count) if n not in known), _OTHERS)
            for _ in self.batches(stack, [*others]):
                pass  # it keeps them with those that were used
        for number, expert in [*self.experts.items()]:  # other threads add some
            if number not in (self.unchecked or ()):
                self._words[number] = expert.address

    def fits(self, router: Sequence[int], used: int, threads: int) -> bool:
        """Whether `add_to` adds what the class computes, for the experts of a router of this shape."""
        return router == (self._count, self._hidden) and self.sums_of(1, used, False, threads) is not None

    def add_to(
        self, program: Program, used: int, x: Place, chosen: list[Place], weights: Place, out: Place, biases: Place
    ) -> None:
        """Add the weighted sum of a row's chosen experts to a program; Python is asked before each of
        several places of some of them. At the last place are the addresses of `biases`."""
        sums, rows = _ExpertSums(1, used, self._hidden, False, self.form.dtype), self.place_of_rows
        self._add(program, x, chosen, rows, out, weights, rows, biases, used, sums, True, True)

    def enter(
        self, module: Any, words: array[int], begin: int, numbers: Sequence[int], ranks: Sequence[int]
    ) -> list[_Expert] | None:
        """Enter the experts of a module that have some of these numbers, once they are in memory, as chosen ones, whose
        words begin somewhere; they are to be kept until they are multiplied. None if some have no kernel."""
        stack, down = (module._parameters[name] for name in _MATRICES)
        entered, leaves = list[_Expert](), (stack.leaf, down.leaf)
        assert self.pooled is not None
        for rank in ranks:
            expert = self._expert(self.pooled.weights(leaves, numbers[rank]))
            if expert is None:
                return None
            first = begin + 1 + 4 * len(entered)
            words[first : first + 4] = array("q", [expert.address, rank, 1, numbers[rank]])
            entered.append(expert)
        words[begin] = len(ranks)
        return entered

    def _each(self, stacks: Sequence[Any], numbers: Sequence[int]) -> Iterator[_Expert | None]:
        """What a call needs of each expert, by the stacks' matrices; None for one without a kernel."""
        last, first = ([*stack.supply.each(stack.leaf, numbers)] for stack in reversed(stacks))
        yield from map(self._expert, zip(first, last, strict=True))

    def _expert(self, weights: Sequence[torch.Tensor]) -> _Expert | None:
        return _Expert.of(*(weight.t() for weight in weights) if self._is_plain_turned else weights)

    def _add(self, program: Program, *words: Any) -> None:
        """Add the results of experts for some rows to a program.

        After it come the places of inputs, of the chosen experts (or a list of such places), of the numbers of rows'
        inputs, of the results, of weights and of the numbers of their rows, and of the addresses of biases; how many
        rows there are, their sums, whether they are all of these, and whether each has another expert, and all have one
        input.
        """
        from rabbitllm.engine import _layer_kernels

        x, chosen, sources, out, weights, numbers, biases, rows, sums, is_whole, has_one_input = words
        (first, second), width = self.products, self._width
        both, product = program.room(4 * rows * width), program.room(2 * rows * width)
        results = program.room(2 * rows * sums.width) if is_whole else out
        places = chosen if isinstance(chosen, list) else [chosen]
        for some in places:
            if len(places) > 1:
                program.ask()
            first.add_to(program, rows, x, some, both, -1 if has_one_input else sources, 0)
            if self.biases:
                program.add(_layer_kernels.add_biases, [some, biases, 0, both, 2 * width])
            self.form.add_gates(program, both, product, rows, width)
            second.add_to(program, rows, product, some, results, 0, 1)
            if self.biases:
                program.add(_layer_kernels.add_biases, [some, (biases[0], biases[1] + 8), 0, results, sums.width])
        if is_whole:
            _add_sums(program, results, weights, numbers, out, sums)

    def program(self, rows: int, sums: _ExpertSums, is_whole: bool, has_one_input: bool) -> Program:
        """See `_add`, which gets the addresses of a call."""
        return self._programs.of(self._add, 7, rows, sums, is_whole, has_one_input, dtype=self.form.dtype)

    def run(self, rows: int) -> Program:
        """The program of a run for at least so many rows; what it computes of others is not used."""
        return self.program(
            round_up(rows, _RUN // 4), _ExpertSums(0, 0, self._hidden, False, self.form.dtype), False, False
        )

    def runs(
        self, stacks: Sequence[Any], numbers: Sequence[int], groups: Mapping[int, Sequence[int]]
    ) -> Iterator[list[tuple[int, _Expert]]]:
        """The experts whose groups of rows are few enough for this, a few of them at a time, in their order."""
        if not self._is_fit or self._width % MULTIPLE:
            return
        run, rows = list[tuple[int, _Expert]](), 0
        for number, expert in zip(numbers, self._each(stacks, numbers), strict=True):
            if expert is None or (size := len(groups[number])) > expert.most:
                continue
            self.products = expert.products
            if rows + size > _RUN:
                yield run
                run, rows = [], 0
            run.append((number, expert))
            rows += size
        if run:
            yield run

    def step(self, numbers: Sequence[int], sums: _ExpertSums) -> tuple[list[int], Program] | None:
        """What the program of one token gets for these experts, in this order, and the program; None if not all are
        known."""
        words = [len(numbers)]
        for row, number in enumerate(numbers):
            if (expert := self.experts.get(number)) is None:
                return None
            words += expert.address, row, 1, number
        return words, self.program(len(numbers), sums, True, True)

    def batches(
        self, stack: ExpertStack, left: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Sequence[_Expert | None]]]:
        """Experts that are multiplied together, as they come into memory, and what a call needs of each; None for what
        is left to the class."""
        experts: list[_Expert | None] = [*map(self.experts.get, left)]
        if None not in experts:
            yield left, experts
            return
        down, are_within = self.down, 0 <= left[0] <= left[-1] < self._count
        is_one = down is not None and down.supply is stack.supply
        # what is coded has these bits by `_by_batches`, too, which reads none twice if there are too many rows
        is_unknown = stack.is_coded and not self.products and not self.stays
        if not are_within or down is None or not (self.stays or is_one) or (is_unknown and stack.supply.order(left)[2]):
            yield left, [None]
            return
        for batch in stack.supply.batches(left):
            experts = [*self._each([stack, down], batch)]
            if experts[0] is not None:
                self.products = experts[0].products
            if self.stays:
                for number, expert in zip(batch, experts, strict=True):
                    if expert is not None:
                        self.experts.setdefault(number, expert)  # the address of the first one may be in use
            yield batch, experts


def _kept_of(form: _ExpertsForm, module: Any, stacks: Sequence[Any]) -> KeptExperts:
    """What is kept of stacks, made if that is of others."""
    stack, down = stacks
    kept: KeptExperts | None = stack.kept
    if kept is None or kept.form is not form or kept.down is not down:
        kept = stack.kept = KeptExperts(form, stack, down, module)
    return kept


def _computed(form: _ExpertsForm, module: Any, stacks: Sequence[Any], *args: torch.Tensor) -> torch.Tensor | None:
    """The result of a module; None if it is left to the class."""
    (stack, _), (x, index, weights) = stacks, args
    kept = _kept_of(form, module, stacks)
    threads = torch.get_num_threads()
    sums = kept.sums(x, index, weights, threads)
    if sums is None or not weights.is_contiguous() or not form.is_of(module):
        return None
    if (biases := _biases_of(module, kept.biases, form.dtype)) is None:
        return None
    addresses = array("q", [bias.data_ptr() for bias in biases])
    used, rows = sums.used, sums.tokens * sums.used
    if sums.tokens == 1 and (step := kept.step(index.tolist()[0], sums)) is not None:
        of_experts, out = array("q", step[0]), torch.empty_like(x)
        others = 0, out.data_ptr(), weights.data_ptr(), kept.place_of_rows, addresses.buffer_info()[0]
        step[1](x.data_ptr(), of_experts.buffer_info()[0], *others)
        return out
    groups = dict[int, list[int]]()
    for row, number in enumerate(itertools.chain.from_iterable(index.tolist())):
        groups.setdefault(number, []).append(row)
    # before any is read
    if kept.products and max(map(len, groups.values())) > min(product.max_inputs for product in kept.products):
        return None
    has_one_input = sums.tokens == 1 and len(groups) == rows  # an expert may be chosen twice, as by hashes
    places, out, results, begin = array("q", bytes(8 * rows)), torch.empty_like(x), None, 0
    for numbers, experts in kept.batches(stack, sorted(groups)):
        chosen, sources = [len(numbers)], list[int]()
        for number, expert in zip(numbers, experts, strict=False):
            members = groups[number]
            if expert is None or len(members) > expert.most:
                return None
            chosen += expert.address, len(sources), len(members), number
            for row in members:
                places[row] = begin + len(sources)
                sources.append(row // used)
        is_whole = len(sources) == rows
        if results is None and not is_whole:
            results = x.new_empty(rows, x.shape[1])
        program = kept.program(len(sources), sums, is_whole, has_one_input)
        to = out.data_ptr() if results is None else results.data_ptr() + 2 * x.shape[1] * begin
        arrays = array("q", chosen), array("q", sources), places, addresses
        at_chosen, at_sources, *at_others = (values.buffer_info()[0] for values in arrays)
        program(x.data_ptr(), at_chosen, at_sources, to, weights.data_ptr(), *at_others)
        begin += len(sources)
    return out if results is None else sums(results, weights, places)


def _biases_in(form: _ExpertsForm, stacks: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of biases of all experts of these stacks, if they have any."""
    shapes = [(stack.shape[0], stack.shape[1 + form.is_turned]) for stack in stacks]
    return dict(zip(_BIASES, shapes, strict=True)) if form.is_biased else {}


def _biases_of(module: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> list[Any] | None:
    """The biases of all experts; None if they are others than `is_bias` says."""
    biases: list[Any] = [module._parameters.get(name) for name in shapes]
    return biases if all(is_bias(*each, dtype) for each in zip(biases, shapes.values(), strict=True)) else None


def is_bias(value: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether a parameter has values of a dtype in this shape that are plainly in memory."""
    is_plain = type(value) is nn.Parameter and value.dtype is dtype and value.is_cpu
    return is_plain and value.is_contiguous() and value.shape == shape


def _by_batches(form: _ExpertsForm, module: Any, stacks: Sequence[Any], *args: torch.Tensor) -> torch.Tensor | None:
    """The result of a module whose experts are codes, some at a time: each that comes and goes is read whole, and
    multiplied once it is there. None if it is left to the class, which has the rows of all experts in several tensors,
    and for which each matrix of an expert is read by itself."""
    if not all(stack.is_coded for stack in stacks):
        return None
    (first, last), (x, index, weights) = (stack.again(not form.is_turned) for stack in stacks), args
    (tokens, used), flat = index.shape, index.flatten()
    biases = _biases_of(module, _biases_in(form, stacks), form.dtype)
    if not (first.transposed and last.transposed and form.is_of(module)) or biases is None:
        return None
    if x.shape != (tokens, first.shape[1]) or weights.shape != index.shape:
        return None
    groups = dict[int, list[int]]()
    for row, number in enumerate(flat.tolist()):
        groups.setdefault(number, []).append(row)
    experts = sorted(groups)
    if experts[0] < 0 or experts[-1] >= len(first) or weights.dtype not in (form.dtype, torch.float32):
        return None
    kept, order = _kept_of(form, module, stacks), list[int]()
    addresses = array("q", [bias.data_ptr() for bias in biases])
    results, nbytes = x.new_empty(tokens * used, last.shape[2]), last.shape[2] * x.itemsize
    for batch in first.supply.batches(experts):
        few = set[int]()
        for run in kept.runs(stacks, batch, groups):
            chosen, sources = [len(run)], list[int]()
            for number, expert in run:
                chosen += expert.address, len(sources), len(groups[number]), number
                sources += [row // used for row in groups[number]]
            arrays, to = (array("q", chosen), array("q", sources), addresses), results.data_ptr() + len(order) * nbytes
            at_chosen, at_sources, at_biases = (values.buffer_info()[0] for values in arrays)
            kept.run(len(sources))(x.data_ptr(), at_chosen, at_sources, to, 0, 0, at_biases)
            order += [row for number, _ in run for row in groups[number]]
            few.update(number for number, _ in run)
        for numbers in _few_rows([number for number in batch if number not in few], groups):
            sizes, rows = [len(groups[number]) for number in numbers], [row for each in numbers for row in groups[each]]
            of_batch = torch.tensor(rows, device="cpu")
            both = first.multiplied(x[of_batch // used], numbers, sizes)
            both = both + biases[0][flat[of_batch]] if biases else both
            product = last.multiplied(form.gated(module._modules.get("act_fn"), both), numbers, sizes)
            product = product + biases[1][flat[of_batch]] if biases else product
            results[len(order) : len(order) + len(rows)] = product
            order += rows
    out, places = x.new_empty(tokens, last.shape[2]), torch.empty(tokens * used, dtype=torch.int64, device="cpu")
    places[torch.tensor(order, device="cpu")] = torch.arange(len(order), device="cpu")
    for some in (slice(begin, begin + _TOKENS) for begin in range(0, tokens, _TOKENS)):
        out[some] = (results[places.view(tokens, used)[some]] * weights[some].unsqueeze(-1)).sum(1)
    return out


def has_few_rows(source: ExpertSource) -> bool:
    """Whether prompts are computed so, with some rows in memory at a time besides the results of all."""
    is_coded = all(leaf.matrix_type is not None for leaf in source.leaves.values())
    return is_coded and form_in(source.module, _forward) is not None


def _few_rows(experts: Sequence[int], groups: Mapping[int, Sequence[int]]) -> Iterator[Sequence[int]]:
    """These experts, in their order, as many at a time as have `_ROWS` rows together; one may have more."""
    begin = rows = 0
    for index, expert in enumerate(experts):
        if rows and rows + len(groups[expert]) > _ROWS:
            yield experts[begin:index]
            begin, rows = index, 0
        rows += len(groups[expert])
    if experts:
        yield experts[begin:]


def _is_even(count: int) -> bool:
    """Whether torch computes so many elements, in rows of whole vectors, by whole vectors in each thread."""
    chunks = min(torch.get_num_threads(), -(-count // _GRAIN))
    return -(-count // chunks) % MULTIPLE == 0


@functools.lru_cache(1024)
@torch.no_grad()
def _adds_alike(sums: _ExpertSums, threads: int) -> bool:
    """Whether torch adds in this order: numbers of very different sizes, whose sums are mostly rounding."""
    random, shape = RandomTensors(), (sums.tokens, sums.used, sums.width)
    sizes = 2.0 ** random.integers(-12, 13, *shape, dtype=torch.int8)
    values = (random.normal(*shape) * sizes).to(sums.dtype)
    values[:, -1] = -values[:, :-1].float().sum(1)
    values = values.roll(int(random.integers(0, sums.used)), 1)
    weights = torch.ones(shape[:2], dtype=torch.float32 if sums.is_wide else sums.dtype, device="cpu")
    expected = (values * weights.unsqueeze(-1)).sum(1).to(sums.dtype)
    places = array("q", range(sums.tokens * sums.used))
    return torch.equal(sums(values, weights, places), expected)


def _has_bits(module: Any, form: _ExpertsForm) -> bool:
    """Whether a class has these results, with matrices in memory, and its activation those of its table."""
    act, random, own = module._modules.get("act_fn"), RandomTensors(), form.dtype
    hidden, width, experts = MULTIPLE, 2 * MULTIPLE, 4
    shapes = (experts, 2 * width, hidden), (experts, hidden, width)
    first, last = (random.normal(*shape, dtype=own) / 4 for shape in shapes)
    biases = [random.normal(experts, size, dtype=own) / 4 for size in (2 * width, hidden)] if form.is_biased else []
    stacks = [stack.mT.contiguous() if form.is_turned else stack for stack in (first, last)]
    names = [*_MATRICES, *_BIASES][: 2 + len(biases)]
    parameters = {name: nn.Parameter(value) for name, value in zip(names, [*stacks, *biases], strict=True)}
    like = trial_of(module, _parameters=parameters)
    like.num_experts = experts
    like.config = SimpleNamespace(_experts_implementation="grouped_mm")
    for index, dtype in (([[2, 0]], own), ([[1, 3], [0, 2]], torch.float32)):
        x = random.normal(len(index), hidden, dtype=own)
        weights = random.positive(len(index), 2, least=0, dtype=dtype)
        expected = class_result(like, x, torch.tensor(index, device="cpu"), weights)
        rows = [torch.empty(0, hidden, dtype=own, device="cpu")]
        for token, chosen in enumerate(index):
            for expert in chosen:
                both = x[token : token + 1] @ first[expert].T
                product = form.gated(act, both + biases[0][expert] if biases else both) @ last[expert].T
                rows.append(product + biases[1][expert] if biases else product)
        sums = _ExpertSums(len(index), 2, hidden, dtype is torch.float32, own)
        result = sums(torch.cat(rows), weights, array("q", range(2 * len(index))))
        if not is_result(result, expected):
            return False
    return has_every_gate(act, own) if form.act is not None else _has_every_pair(form, module)


def _has_every_pair(form: _ExpertsForm, module: Any) -> bool:
    """Whether a class gates any pair as the tables do: each number once as a gate and once as a factor."""
    every = every_half()
    every = every[every.isfinite()]
    both = torch.stack([every, every.flip(0)], 1).view(MULTIPLE, -1)
    return torch.equal(form.gated(None, both), module._apply_gate(both))
