"""Decoder layers with several streams of hidden states (hyper connections), for one token by one call or two.

Before its attention and its mixture such a layer mixes its streams, and adds to each what they return, times a number
of each stream. With the gated delta rule as its attention a layer is one call, which asks Python for decays; so is one
whose attention has an index. Another attention is its class's, between two calls. Up to attention the bits are those of
the model's own classes, which are tried when it is loaded. Anything else, several tokens, a hook or a mask for example,
is left to these.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rabbitllm.base.programs import OWN, STEPS, Place, Program, Programs
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._attention import MIXERS, LayerCalls, LayerPlaces, are_rows, form_of_mixer, mixer_calls, mixer_in
from rabbitllm.engine._delta_layers import DeltaForm
from rabbitllm.engine._fusing import Watch, class_result, form_in, fuse, is_result, kind_of, trial_of
from rabbitllm.engine._gates import MULTIPLE, every_half, sigmoids
from rabbitllm.engine._indexes import IndexedRow
from rabbitllm.engine._mixtures import MixtureCall, mixture_call
from rabbitllm.engine._norms import NormForm, norm_form, with_weight
from rabbitllm.engine._siblings import fused_weight, is_plain, plain_weights
from rabbitllm.engine.transformers_api import keeps_outputs
from rabbitllm.engine.turns import takes_turns
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant.joint import JointProduct

_NORM, _DOWN, _UP, _INJECT = "hc_norm", "input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"
_MIXES = "attn_hyper_connection", "mlp_hyper_connection"
_NGRAMS = "ple"
"""Names of the parts of a layer."""
_MASK, _CACHE, _TOKENS = "conv_mask", "cache", "ple_input_ids"
_READ = {"position_embeddings", "attention_mask", "position_ids", "use_cache", "output_router_logits"}
_KNOWN = frozenset({_CACHE, _TOKENS, *_READ})
"""Arguments of a layer with which its delta rule is known to compute; others are left to the class unless they are
None."""
_HEAD = 7
"""Addresses of a call before those of weights."""


class _MixForm(NamedTuple):
    """How streams of some width are mixed: the width within, the norm, and whether there are numbers by which the
    result is added to each."""

    streams: int
    width: int
    rank: int
    norm: NormForm
    injects: bool

    @classmethod
    def of(cls, module: Any) -> _MixForm | None:
        """The form that a module may have; None if it has another."""
        parts, (streams, width) = module._modules, (vars(module).get(name) for name in ("hc_count", "hidden_size"))
        names = {_NORM, _DOWN, _UP}
        if parts.keys() not in (names, {*names, _INJECT}) or module._parameters or module._buffers:
            return None
        if not isinstance(streams, int) or not isinstance(width, int) or streams <= 0 or sigmoids() is None:
            return None
        norm, total, rank = norm_form(parts[_NORM]), streams * width, getattr(parts[_DOWN], "out_features", 0)
        shapes = [(total, rank), (rank, total), (total, streams)]
        linears = [parts[name] for name in (_DOWN, _UP, _INJECT) if name in parts]
        if any(not isinstance(each, nn.Linear) or each.bias is not None for each in linears):
            return None
        if [(each.in_features, each.out_features) for each in linears] != shapes[: len(linears)]:
            return None
        # a quotient by a power of two is exact
        is_fit = norm is not None and norm.groups == streams and streams & (streams - 1) == 0
        is_fit = is_fit and parts[_NORM].weight.shape == (total,) and rank % MULTIPLE == 0 and rank > 0
        return cls(streams, width, rank, norm, _INJECT in parts) if is_fit else None  # type: ignore[arg-type]

    @property
    def total(self) -> int:
        """Values of all streams."""
        return self.streams * self.width

    def add_first(self, program: Program, x: Place, weight: Place, normed: Place) -> None:
        """Add the norm of streams to a program."""
        self.norm.add_to(program, self.total, x, weight, normed)

    def add_second(self, program: Program, down: Place, out: Place) -> None:
        """Add what comes before the product with the second matrix."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        ones, table = _same(self.rank, 1.0), _tables(self.streams)[0]
        program.add(_layer_kernels.gate, [table.data_ptr(), down, ones.data_ptr(), out, self.rank])

    def add_last(self, program: Program, up: Place, normed: Place, out: Place) -> None:
        """Add the mean of streams, each value by its gate."""
        from rabbitllm.engine import _layer_kernels

        table, shares, order = sigmoids(), _same(self.streams, 1 / self.streams), _order(self.streams)
        assert table is not None
        program.add(_layer_kernels.gate, [table.data_ptr(), up, normed, up, self.total])
        sizes = 1, self.streams, self.width, 0
        program.add(_layer_kernels.combine, [up, shares.data_ptr(), order.data_ptr(), out, *sizes])

    def inject(self, program: Program, terms: Place, gates: Place, x: Place, out: Place) -> None:
        """Add a row to each stream, times the number of that."""
        from rabbitllm.engine import _layer_kernels

        table = _tables(self.streams)[1].data_ptr()
        for stream in range(self.streams):
            gate, begin = (gates[0], gates[1] + 2 * stream), 2 * stream * self.width
            places = terms, gate, (x[0], x[1] + begin), (out[0], out[1] + begin)
            program.add(_layer_kernels.add_gated, [table, *places, 1, self.width])

    def numbers(self, gates: torch.Tensor) -> torch.Tensor:
        """What `inject` multiplies by."""
        return _tables(self.streams)[1][gates.view(torch.int16).int() & 0xFFFF]


@functools.cache
def _same(count: int, value: float) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.bfloat16, device="cpu")


@functools.cache
def _order(count: int) -> torch.Tensor:
    return torch.arange(count, device="cpu")


@functools.cache
def _tables(streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For every number of bfloat16 what the first product becomes, and the number of a stream."""
    every = every_half() / streams
    return nn.functional.silu(every), 2 * torch.sigmoid(every)


class _MixCall:
    """How a module mixes streams; the weight of its first matrix keeps it.

    Attributes:
        watch: whether it still is what the module computes.
        norm: the parameters of its norm.
    """

    def __init__(self, form: _MixForm, products: Sequence[JointProduct], norm: dict[str, Any], watch: Watch) -> None:
        self.form, self.norm, self.watch, self._products, self._programs = form, norm, watch, products, Programs()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The mean of a token's streams, and the gates of what is added to them; None if it is not computed so."""
        form, weight = self.form, self.norm.get("weight")
        if x.shape != (1, 1, form.total) or not are_rows([weight], [form.total]):
            return None
        out, gates = x.new_empty(1, 1, form.width), x.new_empty(1, 1, form.streams)
        tensors: Any = x, weight, out, gates
        self._programs.of(self.add_to, 4)(*[tensor.data_ptr() for tensor in tensors])
        return out, gates

    def add_to(self, program: Program, x: Place, weight: Place, out: Place, gates: Place) -> None:
        """Add it to a program."""
        form, (first, second) = self.form, self._products
        normed, down, within, up = (program.room(2 * n) for n in (form.total, form.rank, form.rank, form.total))
        form.add_first(program, x, weight, normed)
        first.add_to(program, 1, torch.bfloat16, normed, [down, gates][: len(first.matrices)])
        form.add_second(program, down, within)
        second.add_to(program, 1, torch.bfloat16, within, [up])
        form.add_last(program, up, normed, out)


def fuse_streams(model: nn.Module) -> int:
    """Let layers with several streams compute a token by one call or two, and modules that mix these by one.

    Attentions and mixtures are those that others have replaced.

    Returns:
        How many modules these are.
    """
    mixes = fuse(model, _mixed, _MixForm.of, _mixes_alike)
    return mixes + fuse(model, _layer_forward, _layer_form, _is_layer)


def _mixed(form: _MixForm, module: Any, *args: Any, **named: Any) -> Any:
    call = _mix_call(module) if len(args) == 1 and not named and is_plain(args[0]) else None
    if call is None or (result := call(args[0])) is None:
        return None
    out, gates = result
    return (out, args[0], form.numbers(gates)) if form.injects else out


def _mix_call(module: Any) -> _MixCall | None:
    """How a module mixes streams by one call now; None if it does not."""
    form, parts = form_in(module, _mixed), module._modules
    linears = [parts[name] for name in (_DOWN, _INJECT, _UP) if name in parts]
    if form is None or len(linears) < len(parts) - 1 or (weights := plain_weights(*linears)) is None:
        return None
    call: _MixCall | None = (weights[0].calls or {}).get(module)
    if call is not None and call.watch.holds():
        return call
    tables, matrices = [linear._parameters for linear in linears], [weight.matrix for weight in weights]
    first, second = (JointProduct.of(some, [False] * len(some)) for some in (matrices[:-1], matrices[-1:]))
    watch = Watch(
        lambda: _MixForm.of(module) == form,
        [(module, name) for name in parts],
        # the first one's keeps what is made here
        facts=[(table, "weight") for table in tables[1:] if type(table["weight"]) is QuantizedWeight],
        others=[vars(module)],
        matrices=zip(tables, matrices, strict=True),
    )
    if first is None or second is None or not watch.are_true():
        return None
    call = _MixCall(form, [first, second], parts[_NORM]._parameters, watch)
    weights[0].calls = {**(weights[0].calls or {}), module: call}
    return call


class _StreamCalls:
    """What a layer computes by calls; the weight of its first matrix keeps it.

    Attributes:
        watch: whether it still is what its modules compute.
    """

    def __init__(self, mixes: Sequence[_MixCall], mixer: LayerCalls | None, watch: Watch) -> None:
        self.watch, self._mixes, self._mixer = watch, mixes, mixer
        tables, sizes = ([], []) if mixer is None else (mixer.tables, mixer.sizes)
        self._tables = [*tables, *((mix.norm, "weight") for mix in mixes)]
        self._sizes = [*sizes, *(mix.form.total for mix in mixes)]
        self._programs = Programs()
        self._mixture: MixtureCall | None = None

    def row_of(self, layer: Any, x: torch.Tensor, named: dict[str, Any]) -> Any:
        """What a layer's token is computed with besides its weights: the states of a delta rule, an `IndexedRow`, or
        nothing, for a class's own attention; None if it is not computed so."""
        is_step = x.shape == (1, 1, self._mixes[0].form.total) and named.get(_CACHE) is not None
        if not is_step or not are_rows([table.get(name) for table, name in self._tables], self._sizes):
            return None
        if (calls := self._mixer) is None:
            return ()
        if not named.keys() <= _KNOWN and any(named[name] is not None for name in named.keys() - _KNOWN):
            return None
        mixer, form, cache = mixer_in(layer), calls.form, named[_CACHE]
        if isinstance(form, DeltaForm):
            return form.states(mixer, cache)
        return calls.indexed_row(mixer, named.get("position_embeddings"), named.get("attention_mask"), cache)

    def __call__(self, layer: Any, x: torch.Tensor, row: Any, named: dict[str, Any]) -> torch.Tensor:
        """The streams of a token after a layer, by what `row_of` returned."""
        form, mixer, cache = self._mixes[0].form, mixer_in(layer), named[_CACHE]
        weights: list[Any] = [table[name] for table, name in self._tables]
        gates, out, normed = x.new_empty(2 * form.streams), torch.empty_like(x), x.new_empty(1, 1, form.width)
        states, asked = list[torch.Tensor](), list[Iterator[Any]]()
        if self._mixer is not None and self._mixer.form.is_recurrent:
            of_rule: Any = self._mixer.form
            first, decays = torch.empty_like(of_rule.heads_like), x.new_empty(of_rule.heads, dtype=torch.float32)
            states, asked = [*row, decays], [of_rule.decide([mixer], first, decays)]
        elif self._mixer is not None:
            first = x  # heads are in scratch memory
        else:
            mixed, gates[: form.streams] = self._mixes[0](x)  # type: ignore[misc]
            others = {name: value for name, value in named.items() if name not in (_MASK, _TOKENS)}
            first, *_ = result = mixer(mixed, **others)
            if not is_plain(first) or first.shape != normed.shape:
                return _by_class(layer, x, named, **{MIXERS[0]: lambda *args, **named: result})
        mixture = mixture_call(layer.mlp)
        arrays = None if mixture is None else mixture.arrays(normed)
        if arrays is None:
            mixture, arrays = None, (array("q", [0]), array("q", [0]))
        if self._mixture is not mixture:
            self._programs, self._mixture = Programs(), mixture
        if mixture is not None and (of_experts := mixture.asked(*arrays)) is not None:
            asked.append(of_experts)
        addresses = [tensor.data_ptr() for tensor in (x, first, gates, out, normed)]
        addresses += [each.buffer_info()[0] for each in arrays]
        addresses += [tensor.data_ptr() for tensor in (*weights, *states)]
        addresses += row.words if isinstance(row, IndexedRow) else ()
        self._programs.of(self._add, len(addresses), mixture)(
            *addresses, asked=itertools.chain(*asked) if asked else None
        )
        if states:
            cache.update_recurrent_state(states[1], mixer.layer_idx)
        elif isinstance(row, IndexedRow):
            row.grow()
        if arrays[1][0] <= 0:
            of_mlp = layer.mlp(normed) if mixture is None else mixture.by_class(normed)
            numbers = form.numbers(gates[form.streams :])
            out = out + (of_mlp.unsqueeze(-2) * numbers.unsqueeze(-1)).flatten(-2)
        return out

    def _add(self, program: Program, x: Place, first: Place, gates: Place, out: Place, *others: Any) -> None:
        """Add all to a program, or what comes after an attention, without a mixture that is left to its class."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        (of_mixer, of_mlp), form, count = self._mixes, self._mixes[0].form, len(self._tables)
        normed, words, done, *weights, mixture = others
        angles = (x, x) if self._mixer is None or self._mixer.form.is_recurrent else weights[-2:]
        second, row = (gates[0], gates[1] + 2 * form.streams), program.room(2 * form.width)
        if self._mixer is not None:
            mixed, heads, first = row, first, program.room(2 * form.width)
            of_mixer.add_to(program, x, weights[count - 2], mixed, gates)
            places = mixed, *angles, heads, first, mixed, words, done, weights[: count - 2], _HEAD + count, 1
            self._mixer.add_to(program, LayerPlaces._make(places), None, 0)
        form.inject(program, first, gates, x, out)
        of_mlp.add_to(program, out, weights[count - 1], normed, second)
        if mixture is not None:
            mixture.add_to(program, normed, row, words, done)
            program.add(_layer_kernels.stop, [done, -1, (OWN, 8 * STEPS)])
            form.inject(program, row, second, out, out)


def _by_class(layer: Any, x: torch.Tensor, named: dict[str, Any], **parts: Any) -> torch.Tensor:
    """What a layer's class makes of streams to which its n-grams are added, with other parts."""
    like = trial_of(layer, ple=None, _modules={**layer._modules, **parts})
    return type(layer).forward(like, x, **named)  # type: ignore[no-any-return]


def _layer_forward(form: object, layer: Any, *args: Any, **named: Any) -> torch.Tensor | None:
    calls = _stream_calls(layer) if len(args) == 1 and is_plain(args[0]) and not keeps_outputs() else None
    if calls is None or (row := calls.row_of(layer, args[0], named)) is None:
        return None
    x = args[0]
    if (of_ngrams := getattr(layer, _NGRAMS, None)) is not None:
        x = x + of_ngrams(x, named.get(_TOKENS), named[_CACHE], conv_mask=named.get(_MASK))
    return calls(layer, x, row, named) if is_plain(x) else _by_class(layer, x, named)


def _stream_calls(layer: Any) -> _StreamCalls | None:
    """What a layer computes by calls now; None if it is its class's."""
    parts, first = layer._modules, layer.attn_hyper_connection._modules.get(_DOWN)
    weight = None if first is None or takes_turns() else fused_weight(first)
    kept: _StreamCalls | None = None if weight is None else (weight.calls or {}).get(layer)
    if weight is None or (kept is not None and kept.watch.holds()):
        return kept
    form = form_in(layer, _layer_forward)
    if form is None or _layer_form(layer) != form:
        return None
    mixer, mixes = mixer_in(layer), [mix for name in _MIXES if (mix := _mix_call(parts[name])) is not None]
    of_rule = form_of_mixer(layer)
    if of_rule is not None and not of_rule.is_recurrent and of_rule.index is None:
        of_rule = None  # other attentions are their class's
    of_mixer = None if of_rule is None else mixer_calls(of_rule, mixer)
    if len(mixes) < len(_MIXES) or (of_mixer is None and (of_rule is not None or MIXERS[1] in parts)):
        return None
    tables = [parts[_MIXES[1]]._modules[_DOWN]._parameters]
    tables += [] if of_rule is None else [mixer._modules[of_rule.linears[0]]._parameters]
    watch = Watch(
        lambda: _layer_form(layer) == form and (of_rule is None or form_of_mixer(layer) is of_rule),
        [(layer, name) for name in parts],
        facts=[(table, "weight") for table in tables if type(table["weight"]) is QuantizedWeight],
        others=[vars(layer), vars(mixer)],
        within=[call.watch for call in (*mixes, of_mixer) if call is not None],
    )
    if not watch.are_true():
        return None
    kept = _StreamCalls(mixes, of_mixer, watch)
    weight.calls = {**(weight.calls or {}), layer: kept}
    return kept


def _layer_form(layer: Any) -> object:
    """What says which parts a module that may be a layer has, and its numbers; None if it is none."""
    parts = layer._modules
    mixers = [name for name in MIXERS if name in parts]
    if parts.keys() - {_NGRAMS} != {*mixers, *_MIXES, "mlp"} or len(mixers) > 1 or layer._parameters or layer._buffers:
        return None
    forms: list[_MixForm | None] = [form_in(parts[name], _mixed) for name in _MIXES]
    if forms[0] is None or forms[0] != forms[1] or not forms[0].injects:
        return None
    return kind_of(layer), *parts, forms[0]


def _mixes_alike(module: Any, form: _MixForm) -> bool:
    """Whether a module's class mixes streams so, with other products and another norm's weight."""
    random = RandomTensors()
    weight = random.positive(form.total)

    def run(add: Callable[..., None], *tensors: torch.Tensor) -> None:
        Program.of(add, len(tensors))(*[tensor.data_ptr() for tensor in tensors])

    for scale in (1, 8):
        x = random.normal(1, 1, form.total) * scale
        rows = {_DOWN: form.rank, _UP: form.total, _INJECT: form.streams}
        answers = {name: random.normal(1, 1, count) * scale for name, count in rows.items()}
        inputs = dict[str, torch.Tensor]()

        def part(x: torch.Tensor, name: str, inputs: Any = inputs, answers: Any = answers) -> torch.Tensor:
            inputs[name] = x
            return answers[name].clone()  # type: ignore[no-any-return]

        parts = {name: functools.partial(part, name=name) for name in answers if name in module._modules}
        result = class_result(trial_of(module, _modules={**parts, _NORM: with_weight(module.hc_norm, weight)}), x)
        normed, within, mean = torch.empty_like(x), torch.empty_like(answers[_DOWN]), x[..., : form.width].clone()
        run(form.add_first, x, weight, normed)
        run(form.add_second, answers[_DOWN], within)
        run(form.add_last, answers[_UP], normed, mean)
        own = {_DOWN: normed, _UP: within, _INJECT: normed}
        if inputs.keys() != parts.keys() or not all(is_result(own[name], value) for name, value in inputs.items()):
            return False
        numbers = form.numbers(answers[_INJECT])
        outputs, expected = result if type(result) is tuple else (result,), (mean, x, numbers)
        if len(outputs) != len(expected[: 1 + 2 * form.injects]) or not all(map(is_result, expected, outputs)):
            return False
    return True


def _is_layer(layer: Any, form: Any) -> bool:
    """Whether a layer's class adds to its streams what its attention and its mixture make of their mixes, and calls its
    parts so."""
    random, of_mix = RandomTensors(), form[-1]
    x, expected = (random.normal(1, 1, of_mix.total) for _ in range(2))
    mixes, rows = ([random.normal(1, 1, of_mix.width) for _ in _MIXES] for _ in range(2))
    gates = [random.normal(1, 1, of_mix.streams) * 4 for _ in _MIXES]
    arguments = {name: object() for name in ("position_embeddings", "attention_mask", _MASK, _CACHE, _TOKENS, "other")}
    mask, cache, tokens = (arguments[name] for name in (_MASK, _CACHE, _TOKENS))
    of_attention = {name: value for name, value in arguments.items() if name not in (_MASK, _TOKENS)}
    of_rule = {"attention_mask": mask, _CACHE: cache, "other": arguments["other"]}

    def mixing(number: int) -> Callable[..., Any]:
        return lambda value: (mixes[number], value, of_mix.numbers(gates[number]))

    def attention(x: Any, position_embeddings: Any, **named: Any) -> Any:
        named["position_embeddings"] = position_embeddings
        return (rows[0], None) if x is mixes[0] and named == of_attention else None

    parts: dict[str, Callable[..., Any]] = {
        **{name: mixing(number) for number, name in enumerate(_MIXES)},
        MIXERS[0]: attention,
        MIXERS[1]: lambda x, **named: rows[0] if x is mixes[0] and named == of_rule else None,
        "mlp": lambda x: rows[1] if x is mixes[1] else None,
        _NGRAMS: lambda x, *more, conv_mask: x.flip(-1) if (*more, conv_mask) == (tokens, cache, mask) else None,
    }
    like = trial_of(layer, _modules={name: parts[name] for name in layer._modules})
    result = class_result(like, x, **arguments)
    if _NGRAMS in layer._modules:
        x = x + x.flip(-1)
    for row, gate in zip(rows, gates, strict=True):
        Program.of(of_mix.inject, 4)(*[tensor.data_ptr() for tensor in (row, gate, x, expected)])
        x = expected
    return is_result(expected, result)
