"""A mixture's router, its choice, the chosen experts and a shared one by one call of compiled code for one token.

It has the bits of the model's class, which is tried when a model is loaded, and experts that are equally probable are
chosen in torch's order. The call leaves a token to the class where the last bits of torch's exponentials count: if a
weight lies that near the middle of two numbers of bfloat16, for example; and if experts were not used before, or their
checksums not compared. What comes after the chosen experts of such a token, or of several, is one call if an expert is
shared, also where the router is of another kind.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from rabbitllm.base.programs import Place, Program, Programs
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._first_use import only_checks
from rabbitllm.engine._fusing import Watch, class_result, form_in, fuse, is_result, own_facts, trial_of
from rabbitllm.engine._gates import MULTIPLE, OneCall, add_shared, call_of, is_one_call, names_in, sigmoids
from rabbitllm.engine._routed import KeptExperts, kept_experts
from rabbitllm.engine._siblings import has_hooks, is_plain
from rabbitllm.engine.forwards import has_row_product
from rabbitllm.engine.transformers_api import function_tables, keeps_outputs
from rabbitllm.quant.joint import RoutedProduct

_PARTS = "gate", "experts"
_SHARED = *_PARTS, "shared_expert", "shared_expert_gate"
"""Names of the parts of mixtures, and of those whose shared expert has a gate."""
_HEAD = 5
"""Words before those of a chosen matrix."""


class _Routing(NamedTuple):
    """What a mixture's router makes of its logits.

    Attributes:
        kinds: what mixture and router are of; see `_kinds`.
        used: experts of a token; 0 if the router is left to its class.
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

    def add_to(self, program: Program, *places: int | Place) -> None:
        """Add the choice to a program; for the places, after which comes the number of experts, see
        `_layer_kernels.choose`."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        program.add(_layer_kernels.choose, [*places, self.used, int(self.is_normed)])


def fuse_mixtures(model: nn.Module) -> int:
    """Let mixtures of a router and experts compute one token by one call; see the module.

    A shared expert with a gate may be among these if `fuse_gates` has replaced it.

    Returns:
        How many these are.
    """
    return fuse(model, _computed, _form_of, _trial)


def _form_of(module: Any) -> object:
    is_known = module._modules.keys() == {*_PARTS} or (_has_shared(module) and is_one_call(module.shared_expert))
    return _kinds(module) if is_known and not (module._parameters or module._buffers) else None


def _trial(module: Any, kinds: object) -> _Routing | None:
    """What a mixture's router makes of its logits; None if nothing of it is one call."""
    if _has_shared(module) and not _has_shared_bits(module):
        return None
    return _routing_of(module, kinds) or (_Routing(kinds, 0, False) if _has_shared(module) else None)


def routing_in(module: nn.Module) -> _Routing | None:
    """The routing of a mixture that `fuse_mixtures` lets compute a token by one call; None if it does not."""
    routing: _Routing | None = form_in(module, _computed)
    return routing if routing is not None and routing.used else None


def routers_in(model: nn.Module) -> Iterator[nn.Module]:
    """The routers of mixtures that `fuse_mixtures` has replaced, and the gates of their shared experts."""
    for mixture in filter(routing_in, model.modules()):
        yield from (part for name, part in mixture.named_children() if name in (_SHARED[0], _SHARED[3]))


def mixture_call(module: Any) -> MixtureCall | None:
    """What `fuse_mixtures` lets a module compute by one call now; None if nothing."""
    if (routing := routing_in(module)) is None or not module._modules.keys() >= {*_PARTS} or keeps_outputs():
        return None
    if (kept := kept_experts(module._modules["experts"])) is None or not kept.stays:
        return None
    call: MixtureCall | None = kept.calls.get(module)
    if call is None or not call.watch.holds():
        shared = call_of(module._modules["shared_expert"]) if _has_shared(module) else None
        if not _is_so(routing, module, kept, shared):
            return None
        call = kept.calls[module] = MixtureCall(routing, module, kept, shared)
    return call


def _has_shared(module: nn.Module) -> bool:
    """Whether a mixture has a shared expert with a gate."""
    return module._modules.keys() == {*_SHARED}


class MixtureCall:
    """What a mixture computes by one call; what is kept of its experts keeps it.

    Attributes:
        watch: whether it still is what the modules compute.
    """

    def __init__(self, routing: _Routing, module: Any, kept: KeptExperts, shared: OneCall | None) -> None:
        gate, experts = (module._modules[name] for name in _PARTS)
        self._routing, self._kept, self._module, self._shared = routing, kept, module, shared
        routers = [gate] if shared is None else [gate, module.shared_expert_gate]
        self._routers, self._words = [router._parameters for router in routers], array("q")
        self._places = list[Any]()
        self._products = [routed[0] for each in routers if (routed := RoutedProduct.of(each.weight)) is not None]
        self._programs, self._fits = Programs(), dict[int, bool]()

        parts = [(module, "gate"), *((experts, name) for name in experts._modules)]
        others = [vars(module), vars(experts.config), experts._forward_hooks, experts._forward_pre_hooks]
        others += function_tables()
        matrices = list[tuple[dict[str, Any], Any]]()
        if shared is not None:
            linears = [module.shared_expert._modules[name]._parameters for name in names_in(module.shared_expert)]
            parts += [(module, name) for name in _SHARED[2:]]
            parts += [(module.shared_expert, name) for name in names_in(module.shared_expert)]
            others += [*linears, module.shared_expert_gate._parameters]
            matrices = list(zip(linears, shared.matrices, strict=False))
        is_true = functools.partial(_is_so, routing, module, kept, shared)
        facts = [(module._modules, "experts"), *own_facts(experts)]
        self.watch = Watch(is_true, parts, facts=facts, others=others, matrices=matrices)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The result for a row of input; None if it is left to the class."""
        if (arrays := self.arrays(x)) is None:
            return None
        out = torch.empty_like(x)
        addresses = x.data_ptr(), out.data_ptr(), *[each.buffer_info()[0] for each in arrays]
        self._programs.of(self.add_to, len(addresses))(*addresses)
        return out if arrays[1][0] else self.by_class(x)

    def is_kept(self) -> bool:
        """Whether the experts are those of the call, whose watch does not tell of their parameters' data."""
        return kept_experts(self._module._modules["experts"]) is self._kept

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
            routed = [RoutedProduct.of(each) for each in weights]
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

    def add_to(self, program: Program, x: Place, out: Place, words: Place, done: Place) -> None:
        """Add it to a program: for a row at a place, with its `arrays` at others."""
        (product, *_), used = self._products, self._routing.used
        experts, columns = product.shape
        logits, chosen, weights = map(program.room, (2 * experts, 8 * (1 + 4 * used), 2 * used))
        product.add_to(program, 1, x, words, logits, 0, 0)
        self._routing.add_to(program, logits, self._kept.place_of_words, chosen, weights, done, experts)
        self._kept.add_to(program, used, x, chosen, weights, out)
        if self._shared is not None:
            of_gate, result, nbytes = program.room(2), program.room(2 * columns), 4 * len(self._words)
            self._products[1].add_to(program, 1, x, (words[0], words[1] + nbytes), of_gate, 0, 0)
            self._shared.add_to(program, x, result, 1)
            add_shared(program, result, of_gate, out, out, 1, columns)

    def by_class(self, x: torch.Tensor) -> torch.Tensor:
        """The result by the class, after which more experts are known."""
        result = _after_experts(self._module, x)
        result = type(self._module).forward(self._module, x) if result is None else result
        self._kept.note()
        return result


class _RouterCall:
    """What a router and its choice compute by one call, where experts come and go; what is kept of these keeps it.

    Attributes:
        watch: whether it still is what the modules compute.
    """

    def __init__(self, routing: _Routing, module: Any) -> None:
        gate = module._modules["gate"]
        self._routing, self._parameters, self._known = routing, gate._parameters, array("q")
        self._programs = Programs()
        self.watch = Watch(
            lambda: has_row_product(gate) and not has_hooks(gate) and routing.kinds == _kinds(module),
            [(module, "gate")],
            others=[vars(module), vars(gate)],
        )

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The chosen experts of a row (1, hidden) and their weights, both (1, used); None if torch is to choose."""
        weight = self._parameters.get("weight")
        routed = None if weight is None else RoutedProduct.of(weight)
        if routed is None or x.shape != (1, routed[0].shape[1]):
            return None
        product, count, used = routed[0], routed[0].shape[0], self._routing.used
        if len(self._known) != count:
            self._known = array("q", [1]) * count
        words = array("q", [1, 0, 0, 1, 0, *routed[1]])  # see `joint_kernels.ROUTED_WORDS`
        words[1] = words.buffer_info()[0] + 8 * _HEAD
        chosen, done = array("q", bytes(8 * (1 + 4 * used))), array("q", [0])
        weights = torch.empty(1, used, dtype=torch.bfloat16, device="cpu")
        places = [each.buffer_info()[0] for each in (words, self._known, chosen, done)]
        self._programs.of(self._add, 6, product)(x.data_ptr(), weights.data_ptr(), *places)
        return (torch.tensor([chosen[4::4].tolist()], device="cpu"), weights) if done[0] else None

    def _add(self, program: Program, x: Place, weights: Place, *others: Any) -> None:
        words, known, chosen, done, product = others
        logits = program.room(2 * product.shape[0])
        product.add_to(program, 1, x, words, logits, 0, 0)
        self._routing.add_to(program, logits, known, chosen, weights, done, product.shape[0])


def _computed(routing: _Routing, module: Any, *args: Any, **named: Any) -> torch.Tensor | None:
    if len(args) != 1 or named or not is_plain(args[0]):
        return None
    if (call := mixture_call(module)) is not None and (result := call(args[0])) is not None:
        return result
    return _after_experts(module, args[0], None if call is not None else _choice(routing, module, args[0]))


def _choice(routing: _Routing, module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The experts of a row and their weights; None if they are left to the class."""
    if not routing.used or x.shape[:-1] != (1, 1) or not module._modules.keys() >= {*_PARTS} or keeps_outputs():
        return None
    if (kept := kept_experts(module._modules["experts"])) is None or kept.stays:
        return None
    call: _RouterCall | None = kept.calls.get(module)
    if call is None or not call.watch.holds():
        call = _RouterCall(routing, module)
        if not call.watch.are_true():
            return None
        kept.calls[module] = call
    return call(x[0])


def _after_experts(
    module: Any, rows: torch.Tensor, choice: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor | None:
    """The result for rows, with these experts and weights if they are known, if a shared expert and the sum of both
    kinds are one call; None if that is left to the class."""
    x = rows.view(-1, rows.shape[-1])
    if not _has_shared(module):
        return None if choice is None else module._modules["experts"](x, *choice).view(rows.shape)
    router, experts, shared, gate = (module._modules[name] for name in _SHARED)
    call = None if has_hooks(shared) else call_of(shared)
    if call is None or not call.is_for(len(x)):
        return None
    if choice is None:
        _, weights, index = router(x)
    else:
        index, weights = choice
    others, gates = experts(x, index, weights), gate(x)
    if is_plain(others) and is_plain(gates):
        return call.shared(x, gates, others).view(rows.shape)
    return (others + torch.sigmoid(gates) * shared(x)).view(rows.shape)  # type: ignore[no-any-return]


def _is_so(routing: _Routing, module: Any, kept: KeptExperts, shared: OneCall | None) -> bool:
    """Whether modules compute what a call does, with our routers' products, and nothing sees what is within."""
    names = _SHARED if _has_shared(module) else _PARTS
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


def _has_shared_bits(module: Any) -> bool:
    """Whether a mixture's class adds `others + sigmoid(gates) * terms`, and calls its parts so."""
    random, width, rows = RandomTensors(), MULTIPLE, 3
    x, others, result = (random.normal(rows, width) for _ in range(3))
    gates, routing = random.normal(rows, 1) * 4, (object(), object(), object())

    def part(answer: Any, *expected: object) -> Callable[..., Any]:
        """What returns an answer, but None for another input than x, or for others after it than expected."""
        return lambda value, *more: answer if torch.equal(value, x) and more == expected else None

    answers = part(routing), part(others, *reversed(routing[1:])), part(result), part(gates)
    expected = class_result(trial_of(module, _modules=dict(zip(_SHARED, answers, strict=True))), x[None])
    if sigmoids() is None:
        return False
    out = torch.empty_like(x)
    Program.of(add_shared, 4, rows, width)(*(tensor.data_ptr() for tensor in (result, gates, others, out)))
    return is_result(out[None], expected)


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
    program = Program.of(routing.add_to, 5, experts)
    for turn in range(32):
        # many are equal, or few; none of those is near 0, where a call leaves the choice to torch
        equal = (2 * random.integers(-16, 17, 1, experts, dtype=torch.int8) + 1).bfloat16() / 8
        logits = equal if turn % 2 else 2 * random.normal(1, experts)
        done, chosen = (torch.empty(n, dtype=torch.int64, device="cpu") for n in (1, 1 + 4 * routing.used))
        weights = torch.empty(1, routing.used, dtype=torch.bfloat16, device="cpu")
        program(*(tensor.data_ptr() for tensor in (logits, known, chosen, weights, done)))
        index, expected = routing.choice(logits)
        if done and not (torch.equal(chosen[4::4][None], index) and torch.equal(weights, expected)):
            return False
        compared += int(done)
    return compared > 0
