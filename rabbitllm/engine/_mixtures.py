"""A mixture's router, its choice, the chosen experts and a shared one by one call of compiled code for one token.

It has the bits of the model's class, which is tried when a model is loaded, and experts that are equally probable are
chosen in torch's order. The call leaves a token to the class where the last bits of torch's exponentials count: if a
weight lies that near the middle of two numbers of the dtype, for example; and if experts were not used before, or their
checksums not compared. Where experts come and go, it asks Python for them: for those in memory, and behind their
products for those that were read meanwhile. What comes after the chosen experts of a token that is left to the class,
or of several, is one call if an expert is shared, also where the router is of another kind.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rabbitllm.base.programs import Place, Program, Programs
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._expert_pool import PooledExperts
from rabbitllm.engine._first_use import only_checks
from rabbitllm.engine._fusing import (
    Watch,
    class_result,
    form_in,
    fuse,
    is_result,
    notes_on,
    own_facts,
    places_of,
    trial_of,
)
from rabbitllm.engine._gates import MULTIPLE, OneCall, add_shared, call_of, is_one_call, names_in, sigmoids
from rabbitllm.engine._routed import KeptExperts, facts_of_stacks, is_bias, kept_experts
from rabbitllm.engine._siblings import dtype_of, has_hooks, is_plain
from rabbitllm.engine.forwards import has_row_product
from rabbitllm.engine.transformers_api import function_tables, keeps_outputs
from rabbitllm.engine.turns import takes_turns
from rabbitllm.quant.joint import RoutedProduct

_SHARED = "gate", "experts", "shared_expert", "shared_expert_gate"
_PARTS = ("gate", "experts"), ("router", "experts"), _SHARED
"""Names of the parts of mixtures, among them those whose shared expert has a gate."""
_HEAD = 5
"""Words before those of a chosen matrix."""


class _Routing(NamedTuple):
    """What a mixture's router makes of its logits.

    Attributes:
        kinds: what mixture and router are of; see `_kinds`.
        used: experts of a token; 0 if the router is left to its class.
        is_normed: whether their weights add up to 1.
        is_alone: whether the mixture returns its result alone, not with the router's weights.
        dtype: of logits and weights.
    """

    kinds: object
    used: int
    is_normed: bool
    is_alone: bool = True
    dtype: torch.dtype = torch.bfloat16

    def choice(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen experts and their weights, both (tokens, used), for (tokens, experts), as torch computes them."""
        weights, index = torch.topk(torch.softmax(logits, -1, torch.float32), self.used)
        if self.is_normed:
            weights /= weights.sum(-1, keepdim=True)
        return index, weights.to(logits.dtype)

    def add_to(self, program: Program, *places: int | Place) -> None:
        """Add the choice to a program; for the places, after which comes the number of experts, see
        `_layer_kernels.choose`."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        lost = 16 if self.dtype is torch.bfloat16 else 13
        program.add(_layer_kernels.choose, [*places, self.used, int(self.is_normed), lost])


def fuse_mixtures(model: nn.Module) -> int:
    """Let mixtures of a router and experts compute one token by one call; see the module.

    A shared expert with a gate may be among these if `fuse_gates` has replaced it.

    Returns:
        How many these are.
    """
    return fuse(model, _computed, _form_of, _trial)


def _form_of(module: Any) -> object:
    is_known = bool(_names_in(module)) and (not _has_shared(module) or is_one_call(module.shared_expert))
    return _kinds(module) if is_known and not (module._parameters or module._buffers) else None


def _names_in(module: nn.Module) -> tuple[str, ...]:
    """The names of the parts of a module that may be a mixture; none if it is not."""
    return next((names for names in _PARTS if module._modules.keys() == {*names}), ())


def _router_in(module: nn.Module) -> Any:
    return module._modules[_names_in(module)[0]]


def _trial(module: Any, kinds: object) -> _Routing | None:
    """What a mixture's router makes of its logits; None if nothing of it is one call."""
    dtype = dtype_of(_router_in(module)._parameters.get("weight"))
    if _has_shared(module) and not _has_shared_bits(module, dtype):
        return None
    alone = _Routing(kinds, 0, False, dtype=dtype) if _has_shared(module) else None
    return _routing_of(module, kinds, dtype) or alone


def routing_in(module: nn.Module) -> _Routing | None:
    """The routing of a mixture that `fuse_mixtures` lets compute a token by one call; None if it does not."""
    routing: _Routing | None = form_in(module, _computed)
    return routing if routing is not None and routing.used else None


def routers_in(model: nn.Module) -> Iterator[nn.Module]:
    """The routers of mixtures that `fuse_mixtures` has replaced, and the gates of their shared experts."""
    for mixture in filter(routing_in, model.modules()):
        yield from (part for name, part in mixture.named_children() if name not in _SHARED[1:3])


def mixture_call(module: Any) -> MixtureCall | None:
    """What `fuse_mixtures` lets a module compute by one call now; None if nothing."""
    if (routing := routing_in(module)) is None or not _names_in(module):
        return None
    kept = None if keeps_outputs() or takes_turns() else kept_experts(module._modules["experts"])
    if kept is None or kept.form.dtype is not routing.dtype:
        return None
    if not kept.products or not (kept.stays or (kept.pooled is not None and kept.pooled.is_ready)):
        return None
    notes = notes_on(module)
    call: MixtureCall | None = notes.get("mixture")
    if call is None or not call.is_of(kept) or not call.watch.holds():
        shared = call_of(module._modules["shared_expert"]) if _has_shared(module) else None
        if not _is_so(routing, module, kept, shared):
            return None
        call = notes["mixture"] = MixtureCall(routing, module, kept, shared)
    return call


def _words_of(operands: Sequence[tuple[int, ...] | None], more: int, addresses: Sequence[int]) -> array[int]:
    """The words of matrices that are all chosen, see `joint_kernels.ROUTED_WORDS`, zeros for one that is not there;
    more zeros; and addresses."""
    size = max(len(each) for each in operands if each)
    heads = [(1, 0, 0, 1, 0, *each) if each else (0,) * (_HEAD + size) for each in operands]
    words = array("q", [*itertools.chain(*heads), *[0] * more, *addresses])
    for begin in range(0, len(heads) * (_HEAD + size), _HEAD + size):
        words[begin + 1] = words.buffer_info()[0] + 8 * (begin + _HEAD)
    return words


def _has_shared(module: nn.Module) -> bool:
    """Whether a mixture has a shared expert with a gate."""
    return module._modules.keys() == {*_SHARED}


class MixtureCall:
    """What a mixture computes by one call.

    Attributes:
        watch: whether it still is what the modules compute.
        places: of the weights that the last `follows` read.
    """

    def __init__(self, routing: _Routing, module: Any, kept: KeptExperts, shared: OneCall | None) -> None:
        gate, experts = _router_in(module), module.experts
        self._routing, self._kept, self._module, self._shared = routing, kept, module, shared
        routers = [gate] if shared is None else [gate, module.shared_expert_gate]
        self._routers, self._words = [router._parameters for router in routers], array("q")
        self.places, self._operands = list[Any](), list[tuple[int, ...]]()
        self._has_bias, self._addresses = "bias" in gate._parameters, list[int]()
        self._biases: list[Any] = [(gate._parameters, "bias", gate.weight.shape[:1])] if self._has_bias else []
        self._biases += [(experts._parameters, *bias) for bias in kept.biases.items()]
        self._known = array("q", [1]) * len(gate.weight)
        routed = (RoutedProduct.of(router.weight, routing.dtype) for router in routers)
        self._products = [each[0] for each in routed if each is not None]
        self._programs, self._fits = Programs(), dict[int, bool]()

        parts = [(module, _names_in(module)[0]), *((experts, name) for name in experts._modules)]
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
        facts = [(module._modules, "experts"), *own_facts(experts), *(of_stacks := facts_of_stacks(experts))]
        # no dict tells of other `data` of a parameter
        always = [] if of_stacks else [lambda: kept_experts(experts) is kept]
        self.watch = Watch(is_true, parts, facts=facts, others=others, matrices=matrices, always=always)

    def __call__(self, x: torch.Tensor) -> Any:
        """What the mixture returns for a row of input; None if it is left to the class."""
        if (arrays := self.arrays(x)) is None:
            return None
        out, weights = torch.empty_like(x), x.new_empty(1, self._routing.used)
        addresses = x.data_ptr(), out.data_ptr(), *[each.buffer_info()[0] for each in arrays], weights.data_ptr()
        program = self._programs.of(self.add_to, len(addresses), dtype=self._routing.dtype)
        program(*addresses, asked=self.asked(*arrays))
        if self._routing.is_alone:
            return out if arrays[1][0] else self.by_class(x)
        if not arrays[1][0]:
            self._kept.note(self._module._modules["experts"])
            return None
        return out, weights

    def is_of(self, kept: KeptExperts) -> bool:
        """Whether it is that of such experts."""
        return self._kept is kept

    def weights(self) -> list[tuple[dict[str, Any], str]]:
        """The tables of parameters and the names of weights and biases that `follows` reads, which may be replaced."""
        return [*((table, "weight") for table in self._routers), *((table, name) for table, name, _ in self._biases)]

    def follows(self, width: int) -> bool:
        """Whether there is a call for a row of so many values; then it reads the weights that are there now."""
        weights: list[Any] = [table.get(name) for table, name in self.weights()]
        if any(each is None for each in weights) or len(self._routers) > len(self._products):
            return False
        product, *others = self._products
        if width != product.shape[1] or any(each.shape != (1, width) for each in others):
            return False
        if (places := places_of(weights)) != self.places:
            routed = [RoutedProduct.of(each, self._routing.dtype) for each in weights[: len(self._routers)]]
            if any(each is None or each[0] != own for each, own in zip(routed, self._products, strict=True)):
                return False
            biases = weights[len(self._routers) :]
            dtype = self._routing.dtype
            if not all(is_bias(bias, shape, dtype) for bias, (*_, shape) in zip(biases, self._biases, strict=True)):
                return False
            # see `joint_kernels.ROUTED_WORDS`
            self._operands = [each[1] for each in routed if each]
            self._addresses, self.places = [bias.data_ptr() for bias in biases], places
            self._words = _words_of([*self._operands, None], 4 * self._entries, self._addresses)
        return True

    def arrays(self, x: torch.Tensor, *, is_followed: bool = False) -> tuple[array[int], array[int]] | None:
        """What a call for a row of input is given, which stays until its end: the router's words, and what becomes 1
        if it computes the result. None if there is no call for it; `is_followed`: the weights are those of the last
        `follows`."""
        if x.shape[:-1] != (1, 1) or not (is_followed or self.follows(x.shape[-1])):
            return None
        product, *_ = self._products
        if (fits := self._fits.get(threads := torch.get_num_threads())) is None:
            fits = self._fits[threads] = self._kept.fits(product.shape, self._routing.used, threads)
        if not fits or self._kept.pooled is None:
            return (self._words, array("q", [0])) if fits else None
        operands, addresses = None, self._addresses
        if (router := self._kept.pooled.next_router) is not None:
            weight, bias = router
            following, dtype = RoutedProduct.of(weight, self._routing.dtype), self._routing.dtype
            has_bias = bias is not None and is_bias(bias, weight.shape[:1], dtype)
            if following is not None and following[0] == product and has_bias == self._has_bias:
                operands = following[1]
                addresses = [*addresses, bias.data_ptr()] if bias is not None else addresses
        return _words_of([*self._operands, operands], 4 * self._entries, addresses), array("q", [0])

    def asked(self, words: array[int], done: array[int]) -> Iterator[None] | None:
        """What a call with such `arrays` asks Python: that experts are read, and where they are; None if nothing."""
        return None if self._kept.pooled is None else self._reading(self._kept.pooled, words, done)

    def _reading(self, pooled: PooledExperts, words: array[int], done: array[int]) -> Iterator[None]:
        """Begin to read the chosen experts, and enter those that are in memory, then the others; the token is left to
        its class if torch is to choose, or they are read leaf by leaf."""
        following, choice, ahead, *entered, _ = self._blocks()
        numbers, experts = words[choice + 4 : choice + self._entries : 4].tolist(), self._module._modules["experts"]
        is_begun = bool(done[0]) and pooled.begin(numbers)
        surest = words[ahead + 4 : ahead + self._entries : 4].tolist() if words[following] and words[ahead] else []
        is_ahead = is_begun and pooled.read_ahead(surest, is_reading=True)
        ranks = [*range(len(numbers))] if is_begun else []
        there = [rank for rank in ranks if pooled.is_there(numbers[rank])]
        # weights that are not coded keep neither words nor what they were made of
        kept = [self._kept.enter(experts, words, entered[0], numbers, there) if is_begun else None]
        done[0] = kept[0] is not None
        yield
        if done[0]:
            others = [rank for rank in ranks if rank not in there]
            kept.append(self._kept.enter(experts, words, entered[1], numbers, others))
            done[0] = kept[1] is not None
            if not is_ahead:
                pooled.read_ahead(surest, is_reading=False)
        yield

    @property
    def _entries(self) -> int:
        """Words of chosen experts."""
        return 1 + 4 * self._routing.used

    def _blocks(self) -> list[int]:
        """Where among the words of a call those begin of the next router, of the choice, of that router's choice, of
        the experts that are entered, for the first time and for the second, which all are for experts that come and go,
        and the addresses of biases, the next router's last."""
        size = _HEAD + len(self._operands[0])
        begin = size * len(self._routers)
        return [begin, *(begin + size + number * self._entries for number in range(5))]

    def add_to(
        self, program: Program, x: Place, out: Place, words: Place, done: Place, weights: Place | None = None
    ) -> None:
        """Add it to a program: for a row at a place, with its `arrays` at others; the weights are left at the last."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        (product, *_), used = self._products, self._routing.used
        experts, columns = product.shape
        logits, chosen, own = map(program.room, (2 * experts, 8 * self._entries, 2 * used))
        weights = weights or own
        following, choice, ahead, *of_pool, biases = ((words[0], words[1] + 8 * begin) for begin in self._blocks())
        known, entered = self._kept.place_of_words, [chosen]
        sums = program.room(4 * experts)

        def add_router(words: Place, bias: Place, logits: Place) -> None:
            product.add_to(program, 1, x, words, sums if self._has_bias else logits, 0, 0, is_wide=self._has_bias)
            if self._has_bias:
                program.add(_layer_kernels.add_biases, [words, bias, sums, logits, experts])

        last_bias = biases[0], biases[1] + 8 * len(self._biases)
        add_router(words, biases, logits)
        biases = biases[0], biases[1] + 8 * self._has_bias
        if self._kept.pooled is not None:
            known, chosen, entered = self._known.buffer_info()[0], choice, of_pool
            others, unused = program.room(2 * experts), [program.room(2 * used), program.room(8)]
            add_router(following, last_bias, others)
            self._routing.add_to(program, others, known, ahead, *unused, experts)
        self._routing.add_to(program, logits, known, chosen, weights, done, experts)
        self._kept.add_to(program, used, x, entered, weights, out, biases)
        if self._shared is not None:
            of_gate, result = program.room(2), program.room(2 * columns)
            self._products[1].add_to(program, 1, x, (words[0], following[1] // 2), of_gate, 0, 0)
            self._shared.add_to(program, x, result, 1)
            add_shared(program, result, of_gate, out, out, 1, columns)

    def by_class(self, x: torch.Tensor) -> torch.Tensor:
        """The result by the class, after which more experts are known."""
        result: Any = _after_experts(self._module, x)
        result = type(self._module).forward(self._module, x) if result is None else result
        self._kept.note(self._module._modules["experts"])
        return result if self._routing.is_alone else result[0]  # type: ignore[no-any-return]


def _computed(routing: _Routing, module: Any, *args: Any, **named: Any) -> Any:
    if len(args) != 1 or named or not is_plain(args[0], routing.dtype):
        return None
    if (call := mixture_call(module)) is not None and (result := call(args[0])) is not None:
        return result
    return _after_experts(module, args[0])


def _after_experts(module: Any, rows: torch.Tensor) -> torch.Tensor | None:
    """The result for rows if a shared expert and the sum of both kinds are one call; None if that is left to the
    class."""
    x = rows.view(-1, rows.shape[-1])
    if not _has_shared(module):
        return None
    router, experts, shared, gate = (module._modules[name] for name in _SHARED)
    call = None if has_hooks(shared) else call_of(shared)
    if call is None or not call.is_for(len(x), x):
        return None
    _, weights, index = router(x)
    others, gates = experts(x, index, weights), gate(x)
    if is_plain(others, x.dtype) and is_plain(gates, x.dtype):
        return call.shared(x, gates, others).view(rows.shape)
    return (others + torch.sigmoid(gates) * shared(x)).view(rows.shape)  # type: ignore[no-any-return]


def _is_so(routing: _Routing, module: Any, kept: KeptExperts, shared: OneCall | None) -> bool:
    """Whether modules compute what a call does, with our routers' products, and nothing sees what is within."""
    gate, experts, *others = (module._modules[name] for name in _names_in(module))
    if not has_row_product(gate) or any(map(has_hooks, (gate, *experts._modules.values(), *others))):
        return False
    if others:
        of_shared, gate = others
        is_one = shared is not None and call_of(of_shared) is shared and shared.is_for(1)
        if not is_one or not has_row_product(gate) or gate._parameters.get("bias") is not None:
            return False
    is_ours = kept.unchecked is not None and only_checks(experts)
    if has_hooks(experts) and not (is_ours if kept.pooled is None else kept.pooled.has_only_hooks(experts)):
        return False
    return kept.is_of(experts) and routing.kinds == _kinds(module)


def _kinds(mixture: Any) -> object:
    """Equal for mixtures that compute alike, with the same experts: the classes of them and their routers, the dtype of
    these, and their own numbers and texts, but whether they are in training, which neither asks."""
    router = _router_in(mixture)
    values = (vars(part).items() for part in (mixture, router))
    numbers = [sorted((n, v) for n, v in own if isinstance(v, int | float | str) and n != "training") for own in values]
    classes = type(mixture), type(router), dtype_of(router._parameters.get("weight"))
    return *classes, *mixture._modules, *router._parameters, *itertools.chain.from_iterable(numbers)


def _has_shared_bits(module: Any, dtype: torch.dtype) -> bool:
    """Whether a mixture's class adds `others + sigmoid(gates) * terms`, and calls its parts so."""
    random, width, rows = RandomTensors(), MULTIPLE, 3
    x, others, result = (random.normal(rows, width, dtype=dtype) for _ in range(3))
    gates, routing = random.normal(rows, 1, dtype=dtype) * 4, (object(), object(), object())

    def part(answer: Any, *expected: object) -> Callable[..., Any]:
        """What returns an answer, but None for another input than x, or for others after it than expected."""
        return lambda value, *more: answer if torch.equal(value, x) and more == expected else None

    answers = part(routing), part(others, *reversed(routing[1:])), part(result), part(gates)
    expected = class_result(trial_of(module, _modules=dict(zip(_SHARED, answers, strict=True))), x[None])
    if sigmoids(dtype) is None:
        return False
    out = torch.empty_like(x)
    Program.of(add_shared, 4, rows, width, dtype=dtype)(*(tensor.data_ptr() for tensor in (result, gates, others, out)))
    return is_result(out[None], expected)


def _routing_of(module: Any, kinds: object, dtype: torch.dtype) -> _Routing | None:
    """What the class of a router computes, if that of its mixture hands it to the experts and returns their results."""
    router, random, seen = _router_in(module), RandomTensors(), list[Any]()
    used, weight = vars(router).get("top_k"), router._parameters.get("weight")
    is_known = {*router._parameters} in ({"weight"}, {"weight", "bias"}) and not (router._buffers or router._modules)
    if not is_known or None in router._parameters.values() or not isinstance(used, int) or not 0 < used < len(weight):
        return None
    routings = [_Routing(kinds, used, is_normed, dtype=dtype) for is_normed in (True, False)]

    def experts(value: torch.Tensor, *choice: torch.Tensor) -> torch.Tensor:
        seen.append(choice)
        return value.flip(-1)

    shapes = {name: own.shape for name, own in router._parameters.items()}
    parameters = {name: nn.Parameter(random.normal(*shape, dtype=dtype)) for name, shape in shapes.items()}
    like = trial_of(router, _parameters=parameters)
    parts = {_names_in(module)[0]: functools.partial(type(router).forward, like), "experts": experts}
    if _has_shared(module):  # which adds nothing here
        parts |= {"shared_expert": torch.zeros_like, "shared_expert_gate": lambda value: value[..., :1]}
    for scale in (0.01, 0.03, 0.1, 0.3):
        x = random.normal(1, 1, weight.shape[1], dtype=dtype) * scale
        logits = nn.functional.linear(x[0], like.weight, like._parameters.get("bias"))
        result = class_result(trial_of(module, _modules=parts), x)
        is_alone = type(result) is not tuple
        first, *others = (result,) if is_alone else result
        if not is_result(x.flip(-1), first) or len(seen[-1]) != 2 or len(others) > 1:
            return None
        if others and not is_result(seen[-1][1], others[0]):
            return None
        routings = [each._replace(is_alone=is_alone) for each in routings]
        routings = [each for each in routings if all(map(is_result, each.choice(logits), seen[-1]))]
        for own in parameters.values():  # pairs of experts are equally probable from now on
            own[1::2] = own[:-1:2]
    return routings[0] if routings and _chooses_alike(routings[0], len(weight)) else None


def _chooses_alike(routing: _Routing, experts: int) -> bool:
    """Whether a call chooses the experts of torch, also among many that are equally probable, and their weights."""
    random, known, compared = RandomTensors(), torch.arange(1, experts + 1, device="cpu"), 0
    program = Program.of(routing.add_to, 5, experts, dtype=routing.dtype)
    for turn in range(32):
        # many are equal, or few; none of those is near 0, where a call leaves the choice to torch
        equal = (2 * random.integers(-16, 17, 1, experts, dtype=torch.int8) + 1).to(routing.dtype) / 8
        logits = equal if turn % 2 else 2 * random.normal(1, experts, dtype=routing.dtype)
        done, chosen = (torch.empty(n, dtype=torch.int64, device="cpu") for n in (1, 1 + 4 * routing.used))
        weights = torch.empty(1, routing.used, dtype=routing.dtype, device="cpu")
        program(*(tensor.data_ptr() for tensor in (logits, known, chosen, weights, done)))
        index, expected = routing.choice(logits)
        if done and not (torch.equal(chosen[4::4][None], index) and torch.equal(weights, expected)):
            return False
        compared += int(done)
    return compared > 0
