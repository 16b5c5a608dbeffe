"""A mixture's router, its choice, the chosen experts and a shared one by one call of compiled code for one token.

It has the bits of the model's class, which is tried when a model is loaded, and experts that are equally probable are
chosen in torch's order. The call leaves a token to the class where the last bits of torch's exponentials count: if a
weight lies that near the middle of two numbers of bfloat16, for example; and if experts were not used before, or their
checksums not compared.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rabbitllm.base.dict_changes import remembered
from rabbitllm.base.programs import Place, Program
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._first_use import only_checks
from rabbitllm.engine._fusing import (
    Forward,
    class_result,
    forward_in,
    fuse,
    is_result,
    own_facts,
    trial_of,
    unchanged,
)
from rabbitllm.engine._gates import (
    SHARED,
    OneCall,
    add_shared,
    call_of,
    has_shared_bits,
    is_one_call,
    names_in,
    shared_forward,
)
from rabbitllm.engine._routed import KeptExperts, kept_experts
from rabbitllm.engine._siblings import has_hooks, is_plain
from rabbitllm.engine.forwards import has_row_product
from rabbitllm.engine.transformers_api import keeps_outputs
from rabbitllm.quant import plain

_PARTS = "gate", "experts"
_ROUTERS = SHARED[0], SHARED[3]
_HEAD = 5
"""Words before those of a chosen matrix."""


class _Routing(NamedTuple):
    """What a mixture's router makes of its logits.

    Attributes:
        kinds: what mixture and router are of; see `_kinds`.
        used: experts of a token.
        is_normed: whether their weights add up to 1.
    """

    kinds: object
    used: int
    is_normed: bool

    def choice(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen experts and their weights, both (tokens, used), for (tokens, experts), as torch computes them."""
        weights, index = torch.topk(torch.softmax(logits, -1, torch.float32), self.used)
        if self.is_normed:
            weights /= weights.sum(-1, keepdim=True)
        return index, weights.bfloat16()

    def add_to(self, program: Program, experts: int, *places: int | Place) -> None:
        """Add the choice among so many to a program; for the places see `_layer_kernels.choose`."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        program.add(_layer_kernels.choose, [*places, experts, self.used, int(self.is_normed)])


def fuse_mixtures(model: nn.Module) -> int:
    """Let mixtures of a router and experts compute one token by one call; see the module.

    A shared expert with a gate may be among these if `fuse_gates` has replaced it.

    Returns:
        How many these are.
    """

    def key_of(module: Any) -> object:
        is_known = module._modules.keys() == {*_PARTS} or (_has_shared(module) and is_one_call(module.shared_expert))
        return _kinds(module) if is_known and not (module._parameters or module._buffers) else None

    def forward_of(module: nn.Module, key: object) -> Forward:
        routing = _routing_of(module, key)
        if routing is None or (_has_shared(module) and not has_shared_bits(module)):
            return None
        return functools.partial(_forward, routing)

    return fuse(model, key_of, forward_of)


def routers_in(model: nn.Module) -> Iterator[nn.Module]:
    """The routers of mixtures that `fuse_mixtures` has replaced, and the gates of their shared experts."""
    for mixture in filter(is_mixture, model.modules()):
        yield from (part for name, part in mixture.named_children() if name in _ROUTERS)


def mixture_call(module: Any) -> MixtureCall | None:
    """What `fuse_mixtures` lets a module compute by one call now; None if nothing."""
    if not is_mixture(module) or not module._modules.keys() >= {*_PARTS} or keeps_outputs():
        return None
    routing = forward_in(module).args[0]
    kept = kept_experts(module._modules["experts"])
    if kept is None:
        return None
    call: MixtureCall | None = kept.calls.get(module)
    if call is None or not (call.is_current() and call.has_plain()):
        shared = call_of(module._modules["shared_expert"]) if _has_shared(module) else None
        if not _is_so(routing, module, kept, shared):
            return None
        call = kept.calls[module] = MixtureCall(routing, module, kept, shared)
    return call if call.has_classes() else None


def _has_shared(module: nn.Module) -> bool:
    """Whether a mixture has a shared expert with a gate."""
    return module._modules.keys() == {*SHARED}


def is_mixture(module: nn.Module) -> bool:
    """Whether `fuse_mixtures` set its forward."""
    return getattr(forward_in(module), "func", None) is _forward


class MixtureCall:
    """What a mixture computes by one call; what is kept of its experts keeps it.

    Attributes:
        facts: tell whether it still is what the modules compute, as `is_current` does.
    """

    def __init__(self, routing: _Routing, module: Any, kept: KeptExperts, shared: OneCall | None) -> None:
        gate, experts = (module._modules[name] for name in _PARTS)
        self._routing, self._kept, self._module, self._shared = routing, kept, module, shared
        self._classes = [(type(part), type(part).forward) for part in (module, gate)]
        of_shared = [] if shared is None else zip(names_in(module.shared_expert), shared.matrices, strict=False)
        linears = [(module.shared_expert._modules[name]._parameters, matrix) for name, matrix in of_shared]
        self._plain = [(table, matrix) for table, matrix in linears if type(matrix) is plain.PlainMatrix]
        routers = [gate] if shared is None else [gate, module.shared_expert_gate]
        self._routers, self._words = [router._parameters for router in routers], array("q")
        self._places = list[Any]()
        self._products = [routed[0] for each in routers if (routed := plain.routed(each.weight)) is not None]
        self._programs, self._fits = dict[int, Program](), dict[int, bool]()

        is_true = functools.partial(_is_so, routing, module, kept, shared)
        facts = [(module._modules, "experts"), *own_facts(experts)]
        parts = [(module, "gate"), *((experts, name) for name in experts._modules)]
        others = [vars(module), vars(experts.config), experts._forward_hooks, experts._forward_pre_hooks]
        if shared is not None:
            of_shared = module.shared_expert._modules
            parts += [(module, name) for name in SHARED[2:]] + [(module.shared_expert, name) for name in of_shared]
            others += [part._parameters for part in (*of_shared.values(), module.shared_expert_gate)]
        self.facts = unchanged(is_true, facts, parts, others)
        self.is_current = remembered(*self.facts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The result for a row of input; None if it is left to the class."""
        if (arrays := self.arrays(x)) is None:
            return None
        if (program := self._programs.get(threads := torch.get_num_threads())) is None:
            program = Program(4)
            at_x, at_out, *others = (program.address(index) for index in range(4))
            self.add_to(program, at_x, at_out, others)
            self._programs[threads] = program
        out = torch.empty_like(x)
        program(x.data_ptr(), out.data_ptr(), *[each.buffer_info()[0] for each in arrays])
        return out if arrays[1][0] else self.by_class(x)

    def is_kept(self) -> bool:
        """Whether the experts are those of the call, whose facts do not tell of their parameters' data."""
        return kept_experts(self._module._modules["experts"]) is self._kept and self.has_plain() and self.has_classes()

    def has_plain(self) -> bool:
        """Whether the shared expert's plain matrices are those of its weights, of which no fact tells either."""
        return all(matrix.is_of(table.get("weight")) for table, matrix in self._plain)

    def has_classes(self) -> bool:
        """Whether the classes of mixture and router still compute as they did when the call was made."""
        return all(kind.forward is forward for kind, forward in self._classes)

    def arrays(self, x: torch.Tensor) -> tuple[array[int], array[int]] | None:
        """What a call for a row of input is given, which stays until its end: the router's words, and what becomes 1
        if it computes the result. None if there is no call for it."""
        weights: Any = [table.get("weight") for table in self._routers]
        if any(each is None for each in weights) or len(weights) > len(self._products):
            return None
        product, *others = self._products
        if x.shape != (1, 1, product.shape[1]) or any(each.shape != (1, product.shape[1]) for each in others):
            return None
        # all of them change with its `data`
        places = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in weights]
        if places != self._places:
            routed = [plain.routed(each) for each in weights]
            if any(each is None or each[0] != own for each, own in zip(routed, self._products, strict=True)):
                return None
            # see `joint_kernels.ROUTED_WORDS`
            words = array("q", [word for each in routed if each for word in (1, 0, 0, 1, 0, *each[1])])
            for begin in range(0, len(words), len(words) // len(routed)):
                words[begin + 1] = words.buffer_info()[0] + 8 * (begin + _HEAD)
            self._words, self._places = words, places
        if (fits := self._fits.get(threads := torch.get_num_threads())) is None:
            if not self._kept.experts:
                return None
            fits = self._fits[threads] = self._kept.fits(product.shape, self._routing.used, threads)
        return (self._words, array("q", [0])) if fits else None

    def add_to(self, program: Program, x: Place, out: Place, arrays: Sequence[Place]) -> None:
        """Add it to a program: for a row at a place, with its `arrays` at others."""
        (product, *_), used, (words, done) = self._products, self._routing.used, arrays
        experts = product.shape[0]
        logits, chosen, weights = map(program.room, (2 * experts, 8 * (1 + 4 * used), 2 * used))
        product.add_to(program, 1, x, words, logits, 0, 0)
        self._routing.add_to(program, experts, logits, self._kept.place_of_words, chosen, weights, done)
        self._kept.add_to(program, used, x, chosen, weights, out)
        if self._shared is not None:
            columns, of_gate = product.shape[1], program.room(2)
            result, nbytes = program.room(2 * columns), 8 * len(self._words) // len(self._products)
            self._products[1].add_to(program, 1, x, (words[0], words[1] + nbytes), of_gate, 0, 0)
            self._shared.add_to(program, 1, x, result)
            add_shared(program, [result, of_gate, out, out], 1, columns)

    def by_class(self, x: torch.Tensor) -> torch.Tensor:
        """The result by the class, after which more experts are known."""
        result: torch.Tensor = _by_class(self._module, x)
        self._kept.note()
        return result


def _forward(routing: _Routing, module: Any, *args: Any, **named: Any) -> Any:
    if len(args) == 1 and not named and is_plain(args[0]) and (call := mixture_call(module)) is not None:
        result = call(args[0])
        if result is not None:
            return result
    return _by_class(module, *args, **named)


def _by_class(module: Any, *args: Any, **named: Any) -> Any:
    forward = shared_forward if _has_shared(module) else type(module).forward
    return forward(module, *args, **named)


def _is_so(routing: _Routing, module: Any, kept: KeptExperts, shared: OneCall | None) -> bool:
    """Whether modules compute what a call does, with our routers' products, and nothing sees what is within."""
    names = SHARED if _has_shared(module) else _PARTS
    gate, experts, *others = (module._modules[name] for name in names)
    if not has_row_product(gate) or any(map(has_hooks, (gate, *experts._modules.values(), *others))):
        return False
    if others:
        of_shared, gate = others
        is_one = shared is not None and call_of(of_shared) is shared and shared.is_for(1)
        if not is_one or not has_row_product(gate) or gate._parameters.get("bias") is not None:
            return False
    if has_hooks(experts) and (kept.unchecked is None or not only_checks(experts)):
        return False
    return kept.is_of(experts) and routing.kinds == _kinds(module)


def _kinds(mixture: Any) -> object:
    """Equal for mixtures that compute alike, with the same experts: the classes of them and their routers, and their
    own numbers and texts, but whether they are in training, which neither asks."""
    values = (vars(part).items() for part in (mixture, mixture.gate))
    numbers = [sorted((n, v) for n, v in own if isinstance(v, int | float | str) and n != "training") for own in values]
    return type(mixture), type(mixture.gate), len(mixture._modules), *itertools.chain.from_iterable(numbers)


@torch.no_grad()
def _routing_of(module: Any, kinds: object) -> _Routing | None:
    """What the class of a router computes, if that of its mixture hands it to the experts and returns their results."""
    router, random, seen = module.gate, RandomTensors(), list[Any]()
    used, weight = vars(router).get("top_k"), router._parameters.get("weight")
    own = {*router._parameters} == {"weight"} and not (router._buffers or router._modules)
    if not own or not isinstance(used, int) or not 0 < used < len(weight):
        return None
    routings = [_Routing(kinds, used, is_normed) for is_normed in (True, False)]

    def experts(value: torch.Tensor, *choice: torch.Tensor) -> torch.Tensor:
        seen.append(choice)
        return value.flip(-1)

    like = trial_of(router, _parameters={"weight": nn.Parameter(random.normal(*weight.shape))})
    parts = {"gate": functools.partial(type(router).forward, like), "experts": experts}
    if _has_shared(module):  # which adds nothing here
        parts |= {"shared_expert": torch.zeros_like, "shared_expert_gate": lambda value: value[..., :1]}
    for scale in (0.01, 0.03, 0.1, 0.3):
        x = random.normal(1, 1, weight.shape[1]) * scale
        logits = nn.functional.linear(x[0], like.weight)
        result = class_result(trial_of(module, _modules=parts), x)
        if not is_result(x.flip(-1), result) or len(seen[-1]) != 2:
            return None
        routings = [each for each in routings if all(map(is_result, each.choice(logits), seen[-1]))]
    return routings[0] if routings and _chooses_alike(routings[0], len(weight)) else None


def _chooses_alike(routing: _Routing, experts: int) -> bool:
    """Whether a call chooses the experts of torch, also among many that are equally probable, and their weights."""
    random, known, compared = RandomTensors(), torch.arange(1, experts + 1, device="cpu"), 0
    for turn in range(32):
        # many are equal, or few; none of those is near 0, where a call leaves the choice to torch
        equal = (2 * random.integers(-16, 17, 1, experts, dtype=torch.int8) + 1).bfloat16() / 8
        logits = equal if turn % 2 else 2 * random.normal(1, experts)
        program, done = Program(5), torch.empty(1, dtype=torch.int64, device="cpu")
        chosen = torch.empty(1 + 4 * routing.used, dtype=torch.int64, device="cpu")
        weights = torch.empty(1, routing.used, dtype=torch.bfloat16, device="cpu")
        routing.add_to(program, experts, *(program.address(index) for index in range(5)))
        program(*(tensor.data_ptr() for tensor in (logits, known, chosen, weights, done)))
        index, expected = routing.choice(logits)
        if done and not (torch.equal(chosen[4::4][None], index) and torch.equal(weights, expected)):
            return False
        compared += int(done)
    return compared > 0
