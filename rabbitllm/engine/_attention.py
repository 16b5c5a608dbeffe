"""Attention of one token, and the layer around it, by two calls of compiled code, before and after its KV cache grows.

The first multiplies queries, keys and values, adds biases, normalizes and rotates, with the bits of the model's own
class. The second attends over what the cache returns, and multiplies the result; attention rounds its result alone,
where torch also rounds the weights of tokens, and `eager` scores. Sinks of heads, biases of all Linears and angles of
one half of a head are part of both. A layer's first norm is part of the first call, and its sums, other norms
and MLP of the second. A layer of the gated delta rule (`_delta_layers.py`) has its decays computed between the two.
An attention whose tokens an index chooses (`_indexes.py`) is one call. What a class computes is tried when a model is
loaded. Anything else, a mask or a hook for example, is left to the class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from transformers import DynamicCache

from rabbitllm.base.programs import OWN, STEPS, Place, Program, Programs, Words
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._delta_layers import DeltaForm
from rabbitllm.engine._fusing import Watch, class_result, form_in, fuse, is_result, kind_of, trial_of
from rabbitllm.engine._gates import ActKind, OneCall, is_one_call, mlp_in, names_in, sigmoids
from rabbitllm.engine._indexes import LINEAR, WORDS, IndexedRow, IndexForm
from rabbitllm.engine._indexes import NAME as INDEXER
from rabbitllm.engine._indexes import NORMS as INDEX_NORMS
from rabbitllm.engine._mixtures import MixtureCall, mixture_call
from rabbitllm.engine._norms import NormForm, norm_form, with_weight
from rabbitllm.engine._recurrences import delta_form
from rabbitllm.engine._rotary import rotating_forward
from rabbitllm.engine._siblings import dtype_of, fused_weight, has_hooks, is_plain, plain_weights
from rabbitllm.engine.kv_room import CACHED, NEVER, angles_change_after, cached, updated
from rabbitllm.engine.row_attention import add_attention
from rabbitllm.engine.transformers_api import DynamicIndexedLayer, attends_by, function_tables, keeps_outputs
from rabbitllm.engine.turns import takes_turns
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant.joint import JointProduct

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("qkv_proj", "o_proj")
"""Names of the Linears of attentions."""
_NORMS, _SINKS = ("q_norm", "k_norm"), "sinks"
CACHES = ("cache", "past_key_values")
"""The argument with the KV cache; "cache" since transformers 5.24."""
_READ = *CACHES, "hidden_states", "position_embeddings", "attention_mask"
_ARGUMENTS = frozenset({"position_ids", "use_cache", "output_router_logits", *_READ})
_AROUND = (
    ("input_layernorm", "post_attention_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
"""Names of a layer's norms: before its attention and its MLP, or also after them."""
MIXERS = "self_attn", "linear_attn"
"""Names of a layer's attention, or of the delta rule in its place."""
_ORDINARY = (torch.Tensor, nn.Parameter)
_MULTIPLE = 32
"""Width of heads in steps."""
_PAST = 37
"""Tokens in the cache of a trial."""
_CHOSEN = 2
"""Blocks that are chosen in one."""


class LayerPlaces(NamedTuple):
    """Where a program finds what a layer computes with.

    Attributes:
        x, cos, sin, out: of rows: hidden states, angles, and the results.
        heads: gates, queries, keys and values, in this order; of a delta rule what its first Linears compute.
        normed: the input of an MLP that is not part of it.
        words, done: the arrays of a mixture.
        weights: those in `LayerCalls.tables`.
        cached: the first of the addresses of a call that are those of `cached` of each row, or of a delta rule's.
    """

    x: Place
    cos: Place
    sin: Place
    heads: Place
    out: Place
    normed: Place
    words: Place
    done: Place
    weights: Sequence[Place] = ()
    cached: int = 0
    rows: int = 1


_HEAD = 8
"""How many of them are one place."""


@dataclass(frozen=True)
class _AttentionForm:
    """The form of an attention: heads of queries and of keys, their width and how much of it is rotated, the
    norms, the names of its Linears, whether the first one also computes a gate beside each head of
    queries, whose sigmoid multiplies what was attended to, whether each head of queries has a sink, the score of
    attending to no token, whether angles are those of one half of what is rotated, the index that chooses
    tokens, and the dtype of all."""

    queries: int
    keys: int
    width: int
    rotated: int
    scaling: float
    norms: tuple[NormForm, ...] = ()
    linears: tuple[str, ...] = _LINEARS[0]
    is_gated: bool = False
    has_sinks: bool = False
    is_halved: bool = False
    index: IndexForm | None = None
    dtype: torch.dtype = torch.bfloat16
    is_recurrent = False

    @property
    def words(self) -> int:
        """Addresses of a row: those of its KV cache, and of its index and its angles."""
        return CACHED if self.index is None else CACHED + WORDS + 2

    @property
    def angles(self) -> int:
        """Angles of a token."""
        return self.rotated // (1 + self.is_halved)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of those that a module has besides its parts."""
        return (_SINKS,) if self.has_sinks else ()

    def attends(self, module: Any) -> bool:
        """Whether a module attends by the function that is meant; `sdpa` knows no sinks."""
        return attends_by(module.config, "eager" if self.has_sinks else "sdpa")

    @property
    def gates(self) -> int:
        """Gates, each as wide as a head."""
        return self.queries if self.is_gated else 0

    @property
    def total(self) -> int:
        """Gates, and heads of queries, keys and values, which lie in this order."""
        return self.gates + self.queries + 2 * self.keys

    @property
    def outputs(self) -> list[int]:
        """Values that each Linear computes but the last, which multiplies what was attended to."""
        heads = [self.total] if len(self.linears) == 2 else [self.gates + self.queries, self.keys, self.keys]
        return [self.width * count for count in heads] + ([] if self.index is None else [self.index.outputs])

    @functools.cached_property
    def heads_like(self) -> torch.Tensor:
        """A tensor like that of all heads, of one element: `torch.empty` takes twice the time of `torch.empty_like`."""
        return torch.empty((), dtype=self.dtype, device="cpu").expand(1, self.total, 1, self.width)

    def is_of(self, module: Any) -> bool:
        """Whether a module still has it, and its class computes what we do."""
        is_so = not module.training and module.scaling == self.scaling and self.attends(module)
        return is_so and _form_of(module) == replace(self, is_halved=False)

    @staticmethod
    def own_parts(module: Any) -> list[nn.Module]:
        """Its norms, and then those of its index."""
        index = module._modules.get(INDEXER)
        norms = [norm for name in _NORMS if (norm := module._modules.get(name)) is not None]
        return norms if index is None else [*norms, *(index._modules[name] for name in INDEX_NORMS)]

    def between(self, module: Any, cache: Any, heads: torch.Tensor) -> tuple[Sequence[Any], Sequence[int]]:
        """All keys and values, after those of a token are in its cache, and the addresses of a row."""
        pair = [_plain(each, self.dtype) for each in updated(cache, *self.split(heads), module.layer_idx)]
        return pair, cached(*pair)

    def add_first(self, program: Program, at: LayerPlaces, own: Sequence[Place]) -> None:
        """Add what follows the first Linears to a program."""
        self.add_rotation(program, at.heads, at.cos, at.sin, own, at.rows)
        if self.index is not None:
            weight = own[len(self.norms)]
            self.index.add_first(program, self._behind(at.heads), (at.cos, at.sin), weight, (self.rotated, self.angles))

    def add_last(self, program: Program, at: LayerPlaces, own: Sequence[Place], out: Place) -> None:
        """Add what comes before the last Linear."""
        runs: Place | int = 0
        if self.index is not None:
            words = [program.address(at.cached + place) for place in (2, *range(CACHED, CACHED + WORDS))]
            sizes, weight = (self.rotated, self.angles), own[len(self.norms) + 1]
            runs = self.index.add_runs(program, self._behind(at.heads), words, weight, sizes)
        self.add_attention(program, at.heads, out, at.cached, at.rows, own[-1] if self.has_sinks else 0, runs)

    def _behind(self, heads: Place) -> Place:
        """What is behind all heads of one row: the queries and the key of its index."""
        return heads[0], heads[1] + 2 * self.total * self.width

    def _queries_in(self, heads: Place, rows: int) -> Place:
        return heads[0], heads[1] + 2 * rows * self.gates * self.width

    def add_rotation(
        self, program: Program, heads: Place, cos: Place, sin: Place, weights: Sequence[Place], rows: int = 1
    ) -> None:
        """Part gates and queries at a place, and normalize and rotate the queries and keys, of rows."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        if self.is_gated:
            program.add(_layer_kernels.part, [heads, rows * self.queries, self.width])
        begin = heads = self._queries_in(heads, rows)
        for count, norm, weight in zip((self.queries, self.keys), self.norms, weights, strict=False):
            norm.add_to(program, self.width, begin, weight, begin, rows * count)
            begin = begin[0], begin[1] + 2 * rows * count * self.width
        for count in (self.queries + self.keys,) if rows == 1 else (self.queries, self.keys):
            sizes = count, self.rotated, self.width, rows, self.angles, self.angles
            program.add(_layer_kernels.rotate, [heads, cos, sin, *sizes])
            heads = heads[0], heads[1] + 2 * rows * count * self.width

    def add_between(self, program: Program, at: LayerPlaces) -> None:
        """Write the keys and values of rows into caches."""
        from rabbitllm.engine import _layer_kernels

        begin = at.heads[0], at.heads[1] + 2 * at.rows * (self.gates + self.queries) * self.width
        program.add(_layer_kernels.keep, [begin, program.word(at.cached), at.rows, self.keys, self.width])

    def add_attention(
        self,
        program: Program,
        heads: Place,
        out: Place,
        first: int,
        rows: int = 1,
        sinks: Place | int = 0,
        runs: Place | int = 0,
    ) -> None:
        """Attend; from `first` on the addresses of a call are those of `cached` of each row."""
        from rabbitllm.engine import _layer_kernels

        form = self.queries, self.keys, self.width, self.scaling
        add_attention(program, self._queries_in(heads, rows), out, first, rows, form, sinks, runs)
        if self.is_gated:
            table = sigmoids()
            assert table is not None
            program.add(_layer_kernels.gate, [table.data_ptr(), heads, out, out, rows * self.queries * self.width])

    def split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a token, each (1, heads, 1, width)."""
        _, keys, values = heads.split_with_sizes((self.gates + self.queries, self.keys, self.keys), 1)
        return keys, values


_Form: TypeAlias = _AttentionForm | DeltaForm


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cache returns, in a dtype, and without gaps between the values of a token."""
    return tensor if tensor.dtype is dtype and tensor.stride(3) == 1 else tensor.to(dtype).contiguous()


class LayerCalls:
    """What an attention, or the layer around it, computes for some matrices; the weight of its queries keeps it.

    Args:
        matrices: of queries, keys, values and output; and of the MLP's gate, up and down.
        linears: the parameters of the Linears of queries, keys, values and output.
        own: the parameters of the form's own parts and of its module, and their names.
        norms: those of a layer's norms, in the order of computation.
        around: of a layer its norms, see `_AROUND`.
        act: the kind of the activation of its MLP; None if there is none, or its module is called.

    Attributes:
        watch: whether it still is what the modules compute.
        tables: the parameters of biases and norms, in the order of the calls' addresses, and their names.
        sizes: how many values each of these has.
        before: how many of these are the first call's.
        calls_mlp: whether the second call ends before a layer's MLP, with the sum so far and its norm.
        alone: programs of `add_alone`.
    """

    def __init__(
        self,
        form: _Form,
        matrices: Sequence[Any],
        linears: Sequence[dict[str, Any]],
        own: Sequence[tuple[dict[str, Any], str]],
        norms: Sequence[dict[str, Any]],
        around: Sequence[NormForm],
        act: ActKind | None,
        watch: Watch,
    ) -> None:
        self.form, self.watch, self._around, self.columns = form, watch, around, matrices[0].form.shape[1]
        *self._biased, self._adds_last = [table["bias"] is not None for table in linears]
        biases = [(table, "bias") for table in linears if table["bias"] is not None]
        of_last = biases[sum(self._biased) :]
        self.tables = [*biases[: sum(self._biased)], *own, *((table, "weight") for table in norms), *of_last]
        self.before = sum(self._biased) + len(own) + bool(around)
        self.sizes = [count for count, wide in zip(form.outputs, self._biased, strict=True) if wide]
        self.sizes += [table[name].numel() for table, name in own]
        self.sizes += [self.columns] * (len(around) + self._adds_last)
        (*first, last), of_mlp = matrices[: len(linears)], matrices[len(linears) :]
        self._attended = last.form.shape[1]
        products = JointProduct.of(first, self._biased), JointProduct.of([last], [self._adds_last])
        self._mlp = None if act is None else OneCall(act, of_mlp)
        self.calls_mlp = bool(around) and self._mlp is None
        is_fit = last.form.shape[0] == self.columns and (self._mlp is None or self._mlp.is_for(1))
        is_fit = is_fit and (act is None or act[0] is form.dtype)
        self._products = [each for each in products if each is not None and each.is_for(form.dtype) and is_fit]
        self._programs = dict[int, tuple[Program, Program, MixtureCall | None]]()
        self.alone = Programs()

    def programs(self, mixture: MixtureCall | None) -> tuple[Program, Program, MixtureCall | None] | None:
        """The two programs, of which the second one computes a mixture, too; None if matrices are not multiplied as
        integers. Their addresses are those of `LayerPlaces`."""
        if len(self._products) < len(_LINEARS):
            return None
        kept = self._programs.get(threads := torch.get_num_threads())
        if kept is None or kept[2] is not mixture:
            count = _HEAD + len(self.tables)

            def add(program: Program, *places: Place) -> None:
                at = LayerPlaces._make([*places[:_HEAD], places[_HEAD:count], count, 1])
                self._add_before(program, at) if len(places) == count else self._add_after(program, at, mixture)

            first, last = (Program.of(add, words, dtype=self.form.dtype) for words in (count, count + self.form.words))
            kept = self._programs[threads] = first, last, mixture
        return kept

    def can_add(self, rows: int = 1) -> bool:
        """Whether `add_to` adds a whole layer for rows, or all before its MLP if it calls that, or what has none."""
        if len(self._products) < len(_LINEARS):
            return False
        # one Linear leaves heads of a row together
        is_apart = rows == 1 or not (self.form.is_recurrent or len(self.form.linears) == len(_LINEARS[1]))
        most = min(product.max_inputs for product in self._products)
        return is_apart and rows <= most and (rows == 1 if self._mlp is None else self._mlp.is_for(rows))

    def add_to(self, program: Program, at: LayerPlaces, mixture: MixtureCall | None, number: int) -> None:
        """Add a layer, which writes keys and values into caches, to a program; if its mixture is left to its class, the
        program ends, and `done` is a number."""
        if not self.form.is_recurrent:
            at = at._replace(heads=program.room(2 * at.rows * sum(self.form.outputs)))
        self._add_before(program, at)
        self.form.add_between(program, at)
        self._add_after(program, at, mixture, number)

    def indexed_row(self, module: Any, angles: Any, mask: Any, cache: Any) -> IndexedRow | None:
        """A row of an attention with an index, with the angles of all tokens; None if it is left to the class."""
        weights: list[Any] = [table.get(name) for table, name in self.tables]
        if type(angles) is not tuple or len(angles) != 2 or not all(isinstance(each, torch.Tensor) for each in angles):
            return None
        count = angles[0].shape[1:2].numel() * self.form.angles
        if not (are_rows(angles, [count] * 2) and are_rows(weights, self.sizes) and hides_nothing(mask)):
            return None
        return IndexedRow.of(self.form, module, cache, angles)

    def add_alone(self, program: Program, x: Place, out: Place, *others: Any) -> None:
        """Add an attention with an index, for places of weights and the words of a row."""
        count = len(self.tables)
        places = x, *others[-2:], x, out, out, x, x, others[:count], 2 + count, 1
        self.add_to(program, LayerPlaces._make(places), None, 0)

    def _add_before(self, program: Program, at: LayerPlaces) -> None:
        """Queries, keys and values, with their biases, norms and rotation."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        rows, source, others = at.rows, at.x, [*at.weights[: self.before]]
        if self._around:
            source = program.room(2 * rows * self.columns)
            self._around[0].add_to(program, self.columns, at.x, others.pop(), source, rows)
        place, results, sums = at.heads, list[Place](), list[Words]()
        for count, is_biased in zip(self.form.outputs, self._biased, strict=True):
            nbytes = 2 * rows * count
            results.append(program.room(2 * nbytes) if is_biased else place)
            if is_biased:
                sums.append([results[-1], others.pop(0), place, count, rows])
            place = place[0], place[1] + nbytes
        self._products[0].add_to(program, rows, self.form.dtype, source, results)
        for words in sums:
            program.add(_layer_kernels.add_bias, words)
        self.form.add_first(program, at, others)

    def _add_after(self, program: Program, at: LayerPlaces, mixture: MixtureCall | None, number: int = -1) -> None:
        """Attention and, in a layer, what comes after it."""
        from rabbitllm.engine import _layer_kernels

        rows, columns = at.rows, self.columns
        attended = program.room(2 * rows * self._attended)
        product = program.room(2 * rows * columns) if self._around else at.out
        own = at.weights[sum(self._biased) : self.before - bool(self._around)]
        self.form.add_last(program, at, own, attended)
        sums = program.room(4 * rows * columns) if self._adds_last else product
        self._products[1].add_to(program, rows, self.form.dtype, attended, [sums])
        if self._adds_last:
            program.add(_layer_kernels.add_bias, [sums, at.weights[-1], product, columns, rows])
        of_norms = at.weights[self.before : len(at.weights) - self._adds_last]
        norms = list(zip(self._around[1:], of_norms, strict=True))
        is_double = len(self._around) == len(_AROUND[1])

        def add_norm(x: Place, out: Place) -> None:
            norm, weight = norms.pop(0)
            norm.add_to(program, columns, x, weight, out, rows)

        if not self._around:
            return
        if is_double:
            add_norm(product, product)
        program.add(_layer_kernels.add, [at.x, product, at.out, rows * columns])
        add_norm(at.out, at.normed if self.calls_mlp else product)
        of_mlp = program.room(2 * rows * columns)
        if self._mlp is not None:
            self._mlp.add_to(program, product, of_mlp, rows)
            if is_double:
                add_norm(of_mlp, of_mlp)
        elif mixture is not None:
            mixture.add_to(program, at.normed, of_mlp, at.words, at.done)
            program.add(_layer_kernels.stop, [at.done, number, (OWN, 8 * STEPS)])
        else:
            return
        program.add(_layer_kernels.add, [at.out, of_mlp, at.out, rows * columns])


def fuse_attention(model: nn.Module) -> int:
    """Let attentions compute a decode step of one sequence by two calls; see the module.

    Returns:
        How many these are.
    """
    # layers have kinds of their own, and few classes
    rotating: Callable[..., Any] = functools.cache(functools.partial(rotating_forward, prompts=True))

    def trial(module: nn.Module, form: _AttentionForm) -> object:
        forms = form, replace(form, is_halved=True)
        right = next((each for each in forms if _is_alike(module, each)), None)
        return right and (right, rotating(type(module)))

    return fuse(model, _forward, _form_of, trial)


def fuse_layers(model: nn.Module) -> int:
    """Let decoder layers of norms, an attention and an MLP compute a decode step by two calls.

    Those are meant that `fuse_norms`, `fuse_attention` and `fuse_gates` have replaced.

    Returns:
        How many these are.
    """

    def form_of(module: nn.Module) -> object:
        names = _norms_in(module) if not (module._parameters or module._buffers) else ()
        return kind_of(module) if names and all(norm_form(getattr(module, name)) for name in names) else None

    return fuse(model, _layer_forward, form_of, lambda layer, _: _is_around(layer, _norms_in(layer)))


def _norms_in(layer: nn.Module) -> tuple[str, ...]:
    """The names of the norms of a module that may be a layer; none if it is not."""
    parts = {name for name, part in layer._modules.items() if type(part) is not nn.Dropout}
    return next((names for names in _AROUND if any(parts == {name, "mlp", *names} for name in MIXERS)), ())


def mixer_in(layer: nn.Module) -> Any:
    """The attention of a layer, or its delta rule."""
    own, parts = MIXERS[0], layer._modules
    return parts[own if own in parts else MIXERS[1]]


def _layer_forward(form: object, layer: Any, *args: Any, **named: Any) -> torch.Tensor | None:
    of_attention = form_of_mixer(layer)
    if of_attention is None or len(args) != 1 or keeps_outputs():
        return None
    return _called(of_attention, mixer_in(layer), {"hidden_states": args[0], **named}, layer)


def is_whole_layer(module: Any) -> bool:
    """Whether `fuse_layers` set its forward, and others those of its parts."""
    is_layer = form_in(module, _layer_forward) is not None and form_of_mixer(module) is not None
    return is_layer and is_one_call(module.mlp)


def form_of_mixer(layer: nn.Module) -> _Form | None:
    """The form of a layer's attention or delta rule; None if neither `fuse_attention` nor another replaced it."""
    forms = form_in(mixer := mixer_in(layer), _forward)
    return delta_form(mixer) if forms is None else forms[0]


def layer_calls(layer: nn.Module) -> LayerCalls | None:
    """What a decoder layer without hooks computes by two calls now; None if it is no such layer."""
    if form_in(layer, _layer_forward) is None or (form := form_of_mixer(layer)) is None:
        return None
    return _current(form, mixer_in(layer), layer)


def mixer_calls(form: _Form, module: Any) -> LayerCalls | None:
    """What a delta rule or an attention with an index, without hooks, computes by one call now; None if nothing."""
    calls = _current(form, module, None)
    return calls if calls is not None and calls.can_add() else None


def _is_around(layer: Any, names: tuple[str, ...]) -> bool:
    """Whether a layer's class adds its attention of the first norm, and its MLP of the next one, or norms of these."""
    random, width = RandomTensors(), 64
    x = random.normal(1, 1, width)
    parts: dict[str, Any] = {name: nn.Identity() for name in layer._modules}  # of dropouts, which do nothing
    parts["mlp"] = lambda value: value.flip(-1)
    parts[MIXERS[0]] = lambda hidden_states, **named: (hidden_states.roll(1, -1), None)
    parts[MIXERS[1]] = lambda hidden_states, **named: hidden_states.roll(1, -1)
    for name in names:
        parts[name] = with_weight(layer._modules[name], random.positive(width))
    like = trial_of(layer, _modules=parts, training=False)
    of_attention = parts[names[0]](x).roll(1, -1)
    summed = x + (parts[names[1]](of_attention) if len(names) == 4 else of_attention)
    of_mlp = parts[names[len(names) // 2]](summed).flip(-1)
    result = summed + (parts[names[3]](of_mlp) if len(names) == 4 else of_mlp)
    named = dict.fromkeys(("attention_mask", "position_embeddings", "position_ids"))
    if is_result(result, class_result(like, x, **named)):
        return True
    parts["mlp"] = lambda value: (value.flip(-1), None)  # of a mixture that also returns its choice
    return is_result(result, class_result(like, x, **named))


def _form_of(module: Any) -> _AttentionForm | None:
    """The form of a module that may be one; None if it has another."""
    parts = {name: part for name, part in module._modules.items() if name != INDEXER}
    index = None if (indexer := module._modules.get(INDEXER)) is None else IndexForm.of(indexer)
    names = next((names for names in _LINEARS if parts.keys() in ({*names}, {*names, *_NORMS})), ())
    width, scaling, number = (vars(module).get(name) for name in ("head_dim", "scaling", "layer_idx"))
    linears = [part for name in names if isinstance(part := parts[name], nn.Linear)]
    if not isinstance(width, int) or not isinstance(number, int) or not isinstance(scaling, float) or width % _MULTIPLE:
        return None
    if not names or len(linears) < len(names) or module._parameters.keys() - {_SINKS} or module._buffers:
        return None
    *sizes, queries = (*(linear.out_features for linear in linears[:-1]), linears[-1].in_features)
    is_gated = len(sizes) == len(_LINEARS[0]) - 1 and sizes[0] == 2 * queries
    keys = (sum(sizes) - queries * (1 + is_gated)) // 2
    norms = [norm for name in _NORMS if (norm := parts.get(name)) is not None]
    of_norms = tuple(own for norm in norms if (own := norm_form(norm)) is not None and norm.weight.shape == (width,))
    if keys <= 0 or queries % keys or keys % width or len(of_norms) < len(norms):
        return None
    sinks = module._parameters.get(_SINKS)
    if (is_gated and sigmoids() is None) or (sinks is not None and sinks.shape != (queries // width,)):
        return None
    rope = getattr(module.config, "rope_parameters", None) or {}
    # keys of blocks are kept, with angles that depend on nothing but a token's position
    if indexer is not None and (index is None or angles_change_after(module.config) < NEVER):
        return None
    share = rope.get("partial_rotary_factor", 1.0)
    numbers = queries // width, keys // width, width, int(width * share), scaling
    dtype = dtype_of(linears[0]._parameters.get("weight"))
    form = _AttentionForm(*numbers, of_norms, names, is_gated, sinks is not None, dtype=dtype)
    if dtype is not torch.bfloat16 and (is_gated or sinks is not None or index is not None):
        return None
    if form.outputs != sizes or index is None:
        return form if form.outputs == sizes else None
    return replace(form, linears=(*names[:-1], f"{INDEXER}.{LINEAR}", names[-1]), index=index)


def _forward(forms: tuple[_AttentionForm, Any], module: Any, *args: Any, **named: Any) -> Any:
    form, rotating = forms
    is_kept = form.has_sinks and keeps_outputs()  # what its tokens' weights are
    own = named
    if len(args) == 2 and form.index is not None:  # a layer with several streams names only others
        own = {**named, **dict(zip(("hidden_states", "position_embeddings"), args, strict=True))}
    if len(own) == len(args) + len(named) and not is_kept and (result := _called(form, module, own)) is not None:
        return result, None
    return None if rotating is None else rotating(module, *args, **named)


def _called(form: _Form, module: Any, named: dict[str, Any], layer: Any = None) -> torch.Tensor | None:
    """`_step` for the arguments of an attention or of its layer."""
    values = None if takes_turns() else values_of(named)
    if values is None or form.index is None:
        return None if values is None else _step(form, module, *values, layer)
    return _indexed_step(form, module, *values) if layer is None else None


def _indexed_step(form: _AttentionForm, module: Any, x: Any, *others: Any) -> torch.Tensor | None:
    """The result of an attention with an index; None if that is left to the class."""
    calls = mixer_calls(form, module) if is_plain(x) and x.shape[:-1] == (1, 1) else None
    row = None if calls is None else calls.indexed_row(module, *others)
    if calls is None or row is None or x.shape[-1] != calls.columns:
        return None
    out, weights = torch.empty_like(x), [table[name] for table, name in calls.tables]
    addresses = [tensor.data_ptr() for tensor in (x, out, *weights)]
    calls.alone.of(calls.add_alone, len(addresses) + form.words)(*addresses, *row.words)
    row.grow()
    return out


def values_of(named: dict[str, Any]) -> tuple[Any, Any, Any, Any] | None:
    """Hidden states, angles, mask and KV cache among such arguments; None without a cache, or with unknown ones."""
    first, second, x, angles, mask = map(named.get, _READ)
    if (cache := second if first is None else first) is None or not named.keys() <= _ARGUMENTS:
        return None
    return x, angles, mask, cache


def _step(
    form: _Form, module: Any, x: Any, angles: Any, mask: Any, cache: Any, layer: Any = None
) -> torch.Tensor | None:
    """The result of an attention or, if it is given, of the layer around it; None if that is left to the class."""
    if not is_step(form, x, angles, mask) or (calls := _current(form, module, layer)) is None:
        return None
    weights: list[Any] = [table.get(name) for table, name in calls.tables]
    mixture = mixture_call(layer.mlp) if calls.calls_mlp else None
    arrays = None if mixture is None else mixture.arrays(x)
    programs = calls.programs(mixture if arrays is not None else None)
    if programs is None or x.shape[-1] != calls.columns or not are_rows(weights, calls.sizes, form.dtype):
        return None
    heads, out = torch.empty_like(form.heads_like), torch.empty_like(x)
    normed = torch.empty_like(x) if calls.calls_mlp else out
    addresses = [tensor.data_ptr() for tensor in (x, *angles, heads, out, normed)]
    addresses += (0, 0) if arrays is None else [each.buffer_info()[0] for each in arrays]
    addresses += [weight.data_ptr() for weight in weights]
    programs[0](*addresses)
    if (between := form.between(module, cache, heads)) is None:
        return None
    asked = None if mixture is None or arrays is None else mixture.asked(*arrays)
    programs[1](*addresses, *between[1], asked=asked)
    if form.is_recurrent:
        cache.update_recurrent_state(between[0][1], module.layer_idx)
    if not calls.calls_mlp or (arrays is not None and arrays[1][0] > 0):
        return out
    if mixture is not None and arrays is not None:
        return out + mixture.by_class(normed)
    of_mlp = layer.mlp(normed)
    return out + (of_mlp[0] if type(of_mlp) is tuple else of_mlp)  # type: ignore[no-any-return]


def is_step(form: _Form, x: Any, angles: Any, mask: Any, rows: int = 1) -> bool:
    """Whether so many rows are given, and a mask that hides nothing."""
    if not is_plain(x, form.dtype) or x.shape[:-1] != (1, rows) or type(angles) is not tuple or len(angles) != 2:
        return False
    if form.angles is not None and not are_rows(angles, [rows * form.angles] * 2, form.dtype):
        return False
    return hides_nothing(mask, is_added=bool(form.parameters))  # as `eager` does


def hides_nothing(mask: Any, *, is_added: bool = False) -> bool:
    """Whether a layer's mask hides no token; a window's may not: what left the window is no longer in the cache. One
    that is added to scores, but not to sinks, has to be 0."""
    if not isinstance(mask, torch.Tensor):
        return mask is None
    return not mask.any() if is_added else mask.dtype is torch.bool and bool(mask.all())


def _current(form: _Form, module: Any, layer: Any) -> LayerCalls | None:
    """What an attention or the layer around it computes by two calls now; None if nothing."""
    first = module._modules[form.linears[0]]
    weight = fused_weight(first) if isinstance(first, nn.Module) else None
    kept = (None if weight is None else weight.calls) or {}
    calls: LayerCalls | None = kept.get(module if layer is None else layer)
    return calls if calls is not None and calls.watch.holds() else _prepared(form, module, layer)


def _prepared(form: _Form, module: Any, layer: Any) -> LayerCalls | None:
    """The same, made now."""
    parts = module._modules
    linears = [module.get_submodule(name) for name in form.linears]
    weights = plain_weights(*linears, with_bias=True)
    norms = form.own_parts(module)
    if weights is None or not form.is_of(module):
        return None
    watched, around, outer, act = [(module, name) for name in parts], list[NormForm](), list[nn.Module](), None
    indexers = [part for name, part in parts.items() if name == INDEXER]
    watched += [(indexer, name) for indexer in indexers for name in indexer._modules]
    if layer is not None:
        of_mlp, outer = mlp_in(layer.mlp), [layer._modules[name] for name in _norms_in(layer)]
        dropouts = [part for part in layer._modules.values() if type(part) is nn.Dropout]
        around = [own for norm in outer if (own := norm_form(norm)) is not None]
        if not outer or len(around) < len(outer) or any(map(has_hooks, [module, layer.mlp, *dropouts])):
            return None
        if of_mlp is None and (is_one_call(layer.mlp) or len(outer) > len(_AROUND[0])):
            return None
        if any(dropout.training for dropout in dropouts) or kind_of(layer) != form_in(layer, _layer_forward):
            return None
        watched += [(layer, name) for name in layer._modules]
        if of_mlp:
            act, names = of_mlp[0], names_in(layer.mlp)
            weights += of_mlp[1]
            linears += [layer.mlp._modules[name] for name in names[:-1]]
            watched += [(layer.mlp, name) for name in names]
    if any(map(has_hooks, [*norms, *outer, *indexers])):
        return None
    tables, matrices = [linear._parameters for linear in linears], [weight.matrix for weight in weights]
    facts: list[tuple[dict[str, Any], str]] = [(table, "bias") for table in tables if table["bias"] is None]
    biased = [table for table in tables if table["bias"] is not None]
    # the first one's keeps what is made here
    facts += [(table, "weight") for table in tables[1:] if type(table["weight"]) is QuantizedWeight]
    watch = Watch(
        lambda: form.is_of(module) and (layer is None or kind_of(layer) == form_in(layer, _layer_forward)),
        watched,
        facts=[*facts, (vars(module), "config"), *((table, "sdpa") for table in function_tables())],
        others=[vars(each) for each in (getattr(module, "config", module), layer, *indexers) if each is not None],
        matrices=zip(tables, matrices, strict=True),
        always=[lambda: all(table.get("bias") is not None for table in biased)] if biased else (),
    )
    of_form = [(norm._parameters, "weight") for norm in norms]
    of_form += [(module._parameters, name) for name in form.parameters]
    firsts, of_layer = tables[: len(form.linears)], [norm._parameters for norm in outer]
    calls = LayerCalls(form, matrices, firsts, of_form, of_layer, around, act, watch)
    # by whose they are: a weight may be that of several layers
    weights[0].calls = {**(weights[0].calls or {}), module if layer is None else layer: calls}
    return calls


def are_rows(tensors: Iterable[Any], sizes: Iterable[int], dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether tensors have so many values of a dtype that are plainly in memory."""
    for tensor, size in zip(tensors, sizes, strict=True):
        if type(tensor) not in _ORDINARY or tensor.dtype is not dtype or not tensor.is_cpu:
            return False
        if not tensor.is_contiguous() or tensor.numel() != size:
            return False
    return True


class _Past:
    """A cache with the keys and values of some tokens, which notes those that are added."""

    def __init__(self, form: _AttentionForm, random: RandomTensors) -> None:
        self._past = [random.normal(1, form.keys, _PAST, form.width, dtype=form.dtype) for _ in range(2)]
        self.added: tuple[torch.Tensor, ...] = ()

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        self.added = keys, values
        return tuple(torch.cat(pair, 2) for pair in zip(self._past, self.added, strict=True))


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the error relative to that of what was expected."""
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def _tolerance(form: _AttentionForm) -> float:
    """Maximum error of attention relative to the norm: two roundings, and another order of sums."""
    return torch.finfo(form.dtype).eps


def _is_alike(module: Any, form: _AttentionForm) -> bool:
    """Whether a module's class has the same keys and values, and nearly the same attention, with other products."""
    parameters = inspect.signature(type(module).forward).parameters
    name_of_cache = next((name for name in CACHES if name in parameters), "")
    if not form.attends(module) or not name_of_cache:
        return False
    if form.index is not None:
        return _chooses_alike(module, form, form.index, name_of_cache)
    random, dtype = RandomTensors(), form.dtype
    x, past = torch.zeros(1, 1, form.width, dtype=dtype, device="cpu"), _Past(form, random)
    cos, sin = (random.normal(1, 1, form.angles, dtype=dtype) for _ in range(2))
    weights = [random.positive(form.width, dtype=dtype) for _ in form.norms]
    sinks = random.normal(form.queries) + 3
    of_none = sinks.data_ptr() if form.has_sinks else 0
    parts: dict[str, Any] = {"o_proj": lambda value: value}
    for name, weight in zip(_NORMS, weights, strict=False):
        parts[name] = with_weight(module._modules[name], weight)
    own = {name: nn.Parameter(sinks) for name in form.parameters}
    like = trial_of(module, _modules=parts, _parameters=own, training=False)
    tolerance = _tolerance(form)
    # scores of `eager` are rounded, too
    for scale in (1, 1) if form.has_sinks else (1, 4):
        heads = random.normal(1, form.total, 1, form.width, dtype=dtype) * scale
        of_linears = torch.split(heads, [count // form.width for count in form.outputs], 1)
        for name, part in zip(form.linears, of_linears, strict=False):
            row = part.reshape(1, 1, -1).clone()
            parts[name] = lambda value, row=row: row if value is x else value
        named = {"hidden_states": x, "position_embeddings": (cos, sin), "attention_mask": None, name_of_cache: past}
        result = class_result(like, **named)
        if type(result) is not tuple:
            return False
        expected, added = result[0], past.added
        before = Program.of(
            lambda to, *at: form.add_rotation(to, at[0], at[1], at[2], at[3:]), 3 + len(weights), dtype=dtype
        )
        before(*[tensor.data_ptr() for tensor in (heads, cos, sin, *weights)])
        if not all(map(torch.equal, added, form.split(heads))):
            return False
        after = Program.of(
            lambda to, x, out, *_: form.add_attention(to, x, out, 2, 1, of_none), 2 + CACHED, dtype=dtype
        )
        out = torch.empty(1, 1, form.queries * form.width, dtype=dtype, device="cpu")
        keys, values = past.update(*form.split(heads))
        after(heads.data_ptr(), out.data_ptr(), *cached(keys, values))
        if not (out.shape == expected.shape and relative_error(out, expected) < tolerance * (1 + form.has_sinks)):
            return False
    return True


def _chooses_alike(module: Any, form: _AttentionForm, index: IndexForm, name_of_cache: str) -> bool:
    """The same of an attention with an index, of tokens that come one after the other, until there are more blocks than
    it may choose."""
    random, tokens, steps = RandomTensors(), _CHOSEN * index.ratio, 2 * index.ratio + 1
    indexer, x = module.get_submodule(INDEXER), torch.zeros(1, 1, form.width, dtype=torch.bfloat16, device="cpu")
    few, rows = replace(form, index=index._replace(chosen=_CHOSEN)), dict[str, torch.Tensor]()
    weights = [random.positive(norm.get_parameter("weight").numel()) for norm in form.own_parts(module)]
    norms = list(map(with_weight, form.own_parts(module), weights))
    parts: dict[str, Any] = {
        name: lambda value, name=name: rows[name].clone() if value is x else value for name in form.linears[:-1]
    }
    of_index = norms[len(form.norms) :]
    own = {INDEXER: index.trial(indexer, _CHOSEN, parts.pop(form.linears[-2]), of_index)}
    own |= {form.linears[-1]: lambda value: value, **dict(zip(_NORMS, norms, strict=False))}
    like = trial_of(module, _modules={**parts, **own}, layer_idx=0, training=False)
    past = [random.normal(1, form.keys, tokens, form.width) for _ in range(2)]
    past.append(random.normal(1, tokens, index.width))
    caches = [DynamicCache(), DynamicCache()]
    for cache in caches:
        cache.layers = [DynamicIndexedLayer()]
        cache.layers[0].update(*past[:2])
        cache.layers[0].update_indexer(past[2])

    def add(program: Program, heads: Place, out: Place, *others: Any) -> None:
        places = heads, *others[-2:], heads, out, out, heads, heads, (), 2 + len(weights), 1
        few.add_first(program, LayerPlaces._make(places), others)
        few.add_between(program, LayerPlaces._make(places))
        few.add_last(program, LayerPlaces._make(places), others, out)

    program = Program.of(add, 2 + len(weights) + few.words)
    every = random.normal(2, tokens + steps, form.angles)
    for count in range(tokens + 1, tokens + steps + 1):
        heads, angles = random.normal(1, 1, sum(form.outputs)), (every[:1, :count], every[1:, :count])
        rows.update(zip(form.linears, torch.split(heads, form.outputs, 2), strict=False))
        mask = torch.ones(1, 1, 1, count, dtype=torch.bool, device="cpu")
        named = {"position_embeddings": angles, "attention_mask": mask, name_of_cache: caches[0]}
        result = class_result(like, hidden_states=x, **named)
        row = IndexedRow.of(few, like, caches[1], angles)
        if type(result) is not tuple or row is None:
            return False
        out = torch.empty(1, 1, form.queries * form.width, dtype=torch.bfloat16, device="cpu")
        program(*[tensor.data_ptr() for tensor in (heads, out, *weights)], *row.words)
        row.grow()
        first, second = ([layer.keys, layer.values, layer.indexer_keys] for cache in caches for layer in cache.layers)
        if result[0].shape != out.shape or not all(map(torch.equal, first, second)):
            return False
        if not relative_error(out, result[0]) < _tolerance(form):
            return False
    return True
