"""Attention of one token, and the layer around it, by two calls of compiled code, before and after its KV cache grows.

The first multiplies queries, keys and values, adds biases, normalizes and rotates, with the bits of the model's own
class. The second attends over what the cache returns, and multiplies the result; attention rounds its result alone,
where torch also rounds the weights of tokens. A layer's first norm is part of the first call, and its sums, other norms
and MLP of the second. What a class computes is tried when a model is loaded. Anything else, a mask or a hook for
example, is left to the class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rabbitllm.base.dict_changes import remembered
from rabbitllm.base.programs import Place, Program
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._fusing import (
    Facts,
    Forward,
    class_result,
    forward_in,
    fuse,
    is_result,
    kind_of,
    trial_of,
    unchanged,
)
from rabbitllm.engine._gates import ActKind, OneCall, act_of, is_one_call, mlp_weights, names_in, sigmoids
from rabbitllm.engine._mixtures import MixtureCall, mixture_call
from rabbitllm.engine._norms import NormForm, norm_form, with_weight
from rabbitllm.engine._rotary import rotating_forward
from rabbitllm.engine._siblings import fused_weight, has_hooks, is_plain, plain_weights
from rabbitllm.engine.kv_room import updated
from rabbitllm.engine.row_attention import CACHED, add_attention, cached
from rabbitllm.engine.transformers_api import attends_by_sdpa, keeps_outputs, sdpa_tables
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant.joint import JointProduct
from rabbitllm.quant.plain import PlainMatrix

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("qkv_proj", "o_proj")
"""Names of the Linears of attentions."""
_NORMS = ("q_norm", "k_norm")
CACHES = ("cache", "past_key_values")
"""The argument with the KV cache; "cache" since transformers 5.24."""
_READ = *CACHES, "hidden_states", "position_embeddings", "attention_mask"
_ARGUMENTS = frozenset({"position_ids", "use_cache", "output_router_logits", *_READ})
_AROUND = (
    ("input_layernorm", "post_attention_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
"""Names of a layer's norms: before its attention and its MLP, or also after them."""
_ORDINARY = (torch.Tensor, nn.Parameter)
_MULTIPLE = 32
"""Width of heads in steps."""
_TOLERANCE = 1 / 128
"""Maximum error of attention relative to the norm: two roundings to bfloat16, and another order of sums."""
_PAST = 37
"""Tokens in the cache of a trial."""


@dataclass(frozen=True)
class _AttentionForm:
    """The form of an attention: heads of queries and of keys, their width and how much of it is rotated, the
    norms, the names of its Linears, and whether the first one also computes a gate beside each head of
    queries, whose sigmoid multiplies what was attended to."""

    queries: int
    keys: int
    width: int
    rotated: int
    scaling: float
    norms: tuple[NormForm, ...] = ()
    linears: tuple[str, ...] = _LINEARS[0]
    is_gated: bool = False

    @property
    def gates(self) -> int:
        """Gates, each as wide as a head."""
        return self.queries if self.is_gated else 0

    @property
    def total(self) -> int:
        """Gates, and heads of queries, keys and values, which lie in this order."""
        return self.gates + self.queries + 2 * self.keys

    @property
    def heads(self) -> list[int]:
        """Heads that each Linear computes but the last, which multiplies what was attended to."""
        return [self.total] if len(self.linears) == 2 else [self.gates + self.queries, self.keys, self.keys]

    @functools.cached_property
    def heads_like(self) -> torch.Tensor:
        """A tensor like that of all heads, of one element: `torch.empty` takes twice the time of `torch.empty_like`."""
        return torch.empty((), dtype=torch.bfloat16, device="cpu").expand(1, self.total, 1, self.width)

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
            program.add(_layer_kernels.rotate, [heads, cos, sin, count, self.rotated, self.width, rows])
            heads = heads[0], heads[1] + 2 * rows * count * self.width

    def add_keeping(self, program: Program, heads: Place, first: int, rows: int = 1) -> None:
        """Write the keys and values of rows into caches; from `first` on addresses are those of `cached` of each."""
        from rabbitllm.engine import _layer_kernels

        begin = heads[0], heads[1] + 2 * rows * (self.gates + self.queries) * self.width
        program.add(_layer_kernels.keep, [begin, program.word(first), rows, self.keys, self.width])

    def add_attention(self, program: Program, heads: Place, out: Place, first: int, rows: int = 1) -> None:
        """Attend; from `first` on the addresses of a call are those of `cached` of each row."""
        from rabbitllm.engine import _layer_kernels

        form = self.queries, self.keys, self.width, self.scaling
        add_attention(program, self._queries_in(heads, rows), out, first, rows, form)
        if self.is_gated:
            table = sigmoids()
            assert table is not None
            program.add(_layer_kernels.gate, [table.data_ptr(), heads, out, out, rows * self.queries * self.width])

    def split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a token, each (1, heads, 1, width)."""
        _, keys, values = heads.split_with_sizes((self.gates + self.queries, self.keys, self.keys), 1)
        return keys, values


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """What a cache returns, in bfloat16, and without gaps between the values of a token."""
    return tensor if tensor.dtype is torch.bfloat16 and tensor.stride(3) == 1 else tensor.bfloat16().contiguous()


@dataclass(frozen=True)
class _Around:
    """What a decoder layer computes around its attention: norms (see `_AROUND`), and an MLP, by the kind of its
    activation; None if its module is called."""

    norms: Sequence[NormForm]
    act: ActKind | None


def _facts_of(
    form: _AttentionForm, attention: Any, linears: Iterable[nn.Module], parts: Iterable[tuple[nn.Module, str]]
) -> Facts:
    """Tell whether what is true of modules still is: how the attention's class attends, parts, forwards and numbers,
    no hooks, and the codes of Linears, but for the first one, which keeps what was made of them."""
    tables: list[dict[str, Any]] = [linear._parameters for linear in linears]
    facts = [(table, "bias") for table in tables if table["bias"] is None]
    facts += [(table, "weight") for table in tables[1:] if type(table["weight"]) is QuantizedWeight]
    facts += [(vars(attention), "config"), *((table, "sdpa") for table in sdpa_tables())]
    is_true = functools.partial(_attends_so, attention, form)
    return unchanged(is_true, facts, parts, [vars(attention.config)])


def _attends_so(attention: Any, form: _AttentionForm) -> bool:
    """Whether an attention's class computes what we do."""
    return not attention.training and attention.scaling == form.scaling and attends_by_sdpa(attention.config)


class LayerCalls:
    """What an attention, or the layer around it, computes for some matrices; the weight of its queries keeps it.

    Args:
        matrices: of queries, keys, values and output; and of the MLP's gate, up and down.
        biased: for those of queries, keys and values, whether there is a bias.

    Attributes:
        facts: tell whether it still is what the modules compute, as `is_current` does.
        tables: the parameters of biases and norms, in the order of the calls' addresses, and their names.
        sizes: how many values each of these has.
        before: how many of these are the first call's.
        plain: those of the matrices that are plain, and the parameters with their weights.
        calls_mlp: whether the second call ends before a layer's MLP, with the sum so far and its norm.
    """

    def __init__(
        self,
        form: _AttentionForm,
        matrices: Sequence[Any],
        biased: Sequence[bool],
        around: _Around | None,
        facts: Facts,
        tables: Sequence[tuple[dict[str, Any], str]],
        plain: Sequence[tuple[dict[str, Any], PlainMatrix]],
    ) -> None:
        self.form, self.biased, self.tables, self.facts, self.plain = form, biased, tables, facts, plain
        self.is_current = remembered(*facts)
        self._around = around
        self.before = sum(biased) + len(form.norms) + (around is not None)
        count = len(biased)
        first, last = JointProduct.of(matrices[:count], biased), JointProduct.of(matrices[count : count + 1], [False])
        self.columns = matrices[0].form.shape[1]
        self.sizes = [form.width * heads for heads, wide in zip(form.heads, biased, strict=True) if wide]
        self.sizes += [form.width] * len(form.norms) + [self.columns] * (len(around.norms) if around is not None else 0)
        is_square = matrices[count].form.shape[0] == self.columns
        self._products = (first, last) if is_square and first is not None and last is not None else None
        self.calls_mlp = around is not None and around.act is None
        if around is not None and around.act is not None:
            self._mlp = OneCall(around.act, matrices[count + 1 :])
            self._products = self._products if self._mlp.is_for(1) else None
        self._programs = dict[int, tuple[Program, Program, MixtureCall | None]]()

    def programs(self, mixture: MixtureCall | None) -> tuple[Program, Program, MixtureCall | None] | None:
        """The two programs, of which the second one computes a mixture, too; None if matrices are not multiplied as
        integers."""
        if self._products is None:
            return None
        kept = self._programs.get(torch.get_num_threads())
        return kept if kept is not None and kept[2] is mixture else self._build(*self._products, mixture)

    def _build(
        self, first: JointProduct, last: JointProduct, mixture: MixtureCall | None
    ) -> tuple[Program, Program, MixtureCall | None]:
        from rabbitllm.engine import _layer_kernels

        at_x = 2 + CACHED  # after those of queries, keys and values, and of the result
        arguments = at_x + (0 if self._around is None else len(self._around.norms)) + self.calls_mlp
        before, after = Program(4 + self.before), Program(arguments + 3 * (mixture is not None))
        x, cos, sin, heads = (before.address(index) for index in range(4))
        self._add_before(first, before, x, (cos, sin), heads, 4)
        summed = after.address(1)
        normed, result, *arrays = (after.address(arguments - 1 + index) for index in range(4))
        self._add_after(last, after, after.address(at_x), after.address(0), summed, 2, at_x + 1, normed)
        if mixture is not None:
            of_mlp = after.room(2 * self.columns)
            mixture.add_to(after, normed, of_mlp, arrays)
            after.add(_layer_kernels.add, [summed, of_mlp, result, self.columns])
        both = self._programs[torch.get_num_threads()] = before, after, mixture
        return both

    def has_plain(self) -> bool:
        """Whether the plain matrices are those of the weights, and no bias was taken away."""
        biases = self.tables[: sum(self.biased)]
        return all(table.get(name) is not None for table, name in biases) and all(
            matrix.is_of(table.get("weight")) for table, matrix in self.plain
        )

    def can_add(self, rows: int = 1) -> bool:
        """Whether `add_to` adds a whole layer for rows, or all before its MLP if it calls that."""
        if self._products is None or self._around is None:
            return False
        is_apart = rows == 1 or len(self.form.linears) > len(_LINEARS[1])  # one Linear leaves heads of a row together
        most = min(product.max_inputs for product in self._products)
        return is_apart and rows <= most and (rows == 1 if self.calls_mlp else self._mlp.is_for(rows))

    def add_to(
        self,
        program: Program,
        x: Place,
        angles: tuple[Place, Place],
        out: Place,
        cached: int,
        first: int,
        normed: Place,
        rows: int,
    ) -> None:
        """Add a layer, which writes keys and values into caches, to a program.

        Args:
            cached: the first address of `cached` of each row; the row is among those tokens.
            first: that of the weights in `tables`.
            normed: the place of the input of a layer's MLP that it calls.
        """
        assert self._products is not None
        heads = program.room(2 * rows * self.form.total * self.form.width)
        self._add_before(self._products[0], program, x, angles, heads, first, rows)
        self.form.add_keeping(program, heads, cached, rows)
        self._add_after(self._products[1], program, x, heads, out, cached, first + self.before, normed, rows)

    def _add_before(
        self,
        product: JointProduct,
        program: Program,
        x: Place,
        angles: tuple[Place, Place],
        heads: Place,
        first: int,
        rows: int = 1,
    ) -> None:
        count, source = self.before - (self._around is not None), x
        others = [program.address(first + index) for index in range(count)]
        if self._around is not None:
            source = program.room(2 * rows * self.columns)
            self._around.norms[0].add_to(program, self.columns, x, program.address(first + count), source, rows)
        self._add_heads(product, program, source, heads, others, rows)
        self.form.add_rotation(program, heads, *angles, others, rows)

    def _add_after(
        self,
        last: JointProduct,
        program: Program,
        x: Place,
        heads: Place,
        out: Place,
        cached: int,
        first: int,
        normed: Place,
        rows: int = 1,
    ) -> None:
        from rabbitllm.engine import _layer_kernels

        form, around, columns = self.form, self._around, self.columns
        count = rows * columns
        attended = program.room(2 * rows * form.width * form.queries)
        product = out if around is None else program.room(2 * count)
        form.add_attention(program, heads, attended, cached, rows)
        last.add_to(program, rows, torch.bfloat16, attended, [product])
        if around is not None:
            norms = around.norms
            summed, of_mlp = out if self.calls_mlp else program.room(2 * count), program.room(2 * count)
            normed = normed if self.calls_mlp else product
            is_double = len(norms) == len(_AROUND[1])
            if is_double:
                norms[1].add_to(program, columns, product, program.address(first), product, rows)
            program.add(_layer_kernels.add, [x, product, summed, count])
            norms[1 + is_double].add_to(program, columns, summed, program.address(first + is_double), normed, rows)
            if not self.calls_mlp:
                self._mlp.add_to(program, rows, product, of_mlp)
                if is_double:
                    norms[3].add_to(program, columns, of_mlp, program.address(first + 2), of_mlp, rows)
                program.add(_layer_kernels.add, [summed, of_mlp, out, count])

    def _add_heads(
        self, product: JointProduct, program: Program, x: Place, heads: Place, biases: list[Place], rows: int
    ) -> None:
        """Queries, keys and values of rows at a place, with their biases, which are taken from a list."""
        from rabbitllm.engine import _layer_kernels

        nbytes, begin, results, sums = 2 * rows * self.form.width, 0, list[Place](), list[tuple[Place, Place, int]]()
        for count, is_biased in zip(self.form.heads, self.biased, strict=True):
            place = heads[0], heads[1] + nbytes * begin
            results.append(program.room(2 * nbytes * count) if is_biased else place)
            sums += [(results[-1], place, count * self.form.width)] if is_biased else []
            begin += count
        product.add_to(program, rows, torch.bfloat16, x, results)
        for source, place, count in sums:
            program.add(_layer_kernels.add_bias, [source, biases.pop(0), place, count, rows])


def fuse_attention(model: nn.Module) -> int:
    """Let attentions compute a decode step of one sequence by two calls; see the module.

    Returns:
        How many these are.
    """

    def key_of(module: nn.Module) -> tuple[object, _AttentionForm] | None:
        if module._parameters or module._buffers or (form := _form_of(module)) is None:
            return None
        return kind_of(module), form

    # layers have kinds of their own, and few classes
    rotating: Callable[..., Forward] = functools.cache(functools.partial(rotating_forward, prompts=True))

    def forward_of(module: nn.Module, key: tuple[object, _AttentionForm]) -> Forward:
        return functools.partial(_forward, key[1], rotating(type(module))) if _is_alike(module, key[1]) else None

    return fuse(model, key_of, forward_of)


def fuse_layers(model: nn.Module) -> int:
    """Let decoder layers of norms, an attention and an MLP compute a decode step by two calls.

    Those are meant that `fuse_norms`, `fuse_attention` and `fuse_gates` have replaced.

    Returns:
        How many these are.
    """

    def key_of(module: nn.Module) -> object:
        parts: Any = module._modules
        names = _norms_in(module) if not (module._parameters or module._buffers) else ()
        return kind_of(module) if names and all(norm_form(parts[name]) for name in names) else None

    return fuse(model, key_of, lambda module, _: _layer_forward if _is_around(module) else None)


def _norms_in(layer: nn.Module) -> tuple[str, ...]:
    """The names of the norms of a module that may be a layer; none if it is not."""
    parts = {name for name, part in layer._modules.items() if type(part) is not nn.Dropout}
    return next((names for names in _AROUND if parts == {"self_attn", "mlp", *names}), ())


def _layer_forward(layer: Any, *args: Any, **named: Any) -> Any:
    form = _form_in(layer)
    if form is not None and len(args) == 1 and not keeps_outputs():
        result = _called(form, layer._modules["self_attn"], {"hidden_states": args[0], **named}, layer)
        if result is not None:
            return result
    return type(layer).forward(layer, *args, **named)


def is_whole_layer(module: Any) -> bool:
    """Whether `fuse_layers` set its forward, and `fuse_gates` that of its MLP."""
    return forward_in(module) is _layer_forward and is_one_call(module.mlp)


def _form_in(layer: nn.Module) -> _AttentionForm | None:
    """The form of the attention in a layer; None if `fuse_attention` did not replace it."""
    fused = forward_in(layer._modules["self_attn"])  # type: ignore[arg-type]
    return fused.args[0] if getattr(fused, "func", None) is _forward else None


def layer_calls(layer: nn.Module) -> LayerCalls | None:
    """What a decoder layer without hooks computes by two calls now; None if it is no such layer."""
    if forward_in(layer) is not _layer_forward or (form := _form_in(layer)) is None:
        return None
    return _current(form, layer._modules["self_attn"], layer)


@torch.no_grad()
def _is_around(layer: Any) -> bool:
    """Whether a layer's class adds its attention of the first norm, and its MLP of the next one, or norms of these."""
    random, width = RandomTensors(), 64
    x = random.normal(1, 1, width)
    parts: dict[str, Any] = {name: nn.Identity() for name in layer._modules}  # of dropouts, which do nothing
    parts["mlp"] = lambda value: value.flip(-1)
    parts["self_attn"] = lambda hidden_states, **named: (hidden_states.roll(1, -1), None)
    names = _norms_in(layer)
    for name in names:
        parts[name] = with_weight(layer._modules[name], random.positive(width))
    like = trial_of(layer, _modules=parts, training=False)
    of_attention = parts[names[0]](x).roll(1, -1)
    summed = x + (parts[names[1]](of_attention) if len(names) == 4 else of_attention)
    of_mlp = parts[names[len(names) // 2]](summed).flip(-1)
    result = summed + (parts[names[3]](of_mlp) if len(names) == 4 else of_mlp)
    named = dict.fromkeys(("attention_mask", "position_embeddings", "position_ids"))
    return is_result(result, class_result(like, x, **named))


def _form_of(module: Any) -> _AttentionForm | None:
    """The form of a module that may be one; None if it has another."""
    parts = module._modules
    names = next((names for names in _LINEARS if parts.keys() in ({*names}, {*names, *_NORMS})), ())
    width, scaling, index = (vars(module).get(name) for name in ("head_dim", "scaling", "layer_idx"))
    linears = [part for name in names if isinstance(part := parts[name], nn.Linear)]
    if not isinstance(width, int) or not isinstance(index, int) or not isinstance(scaling, float) or width % _MULTIPLE:
        return None
    if not names or len(linears) < len(names):
        return None
    *sizes, queries = (*(linear.out_features for linear in linears[:-1]), linears[-1].in_features)
    is_gated = len(sizes) == len(_LINEARS[0]) - 1 and sizes[0] == 2 * queries
    keys = (sum(sizes) - queries * (1 + is_gated)) // 2
    norms = [norm for name in _NORMS if (norm := parts.get(name)) is not None]
    of_norms = tuple(own for norm in norms if (own := norm_form(norm)) is not None and norm.weight.shape == (width,))
    if keys <= 0 or queries % keys or keys % width or len(of_norms) < len(norms):
        return None
    if is_gated and sigmoids() is None:
        return None
    share = (getattr(module.config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    numbers = queries // width, keys // width, width, int(width * share), scaling
    form = _AttentionForm(*numbers, of_norms, names, is_gated)
    return form if [width * heads for heads in form.heads] == sizes else None


def _forward(form: _AttentionForm, rotating: Forward, module: Any, *args: Any, **named: Any) -> Any:
    if not args and (result := _called(form, module, named)) is not None:
        return result, None
    return (rotating or type(module).forward)(module, *args, **named)


def _called(form: _AttentionForm, module: Any, named: dict[str, Any], layer: Any = None) -> torch.Tensor | None:
    """`_step` for the arguments of an attention or of its layer."""
    return None if (values := values_of(named)) is None else _step(form, module, *values, layer)


def values_of(named: dict[str, Any]) -> tuple[Any, Any, Any, Any] | None:
    """Hidden states, angles, mask and KV cache among such arguments; None without a cache, or with unknown ones."""
    first, second, x, angles, mask = map(named.get, _READ)
    if (cache := second if first is None else first) is None or not named.keys() <= _ARGUMENTS:
        return None
    return x, angles, mask, cache


def _step(
    form: _AttentionForm, module: Any, x: Any, angles: Any, mask: Any, cache: Any, layer: Any = None
) -> torch.Tensor | None:
    """The result of an attention or, if it is given, of the layer around it; None if that is left to the class."""
    if not is_step(form, x, angles, mask) or (calls := _current(form, module, layer)) is None:
        return None
    weights = [table.get(name) for table, name in calls.tables]
    mixture = mixture_call(layer.mlp) if calls.calls_mlp else None
    arrays = None if mixture is None else mixture.arrays(x)
    programs = calls.programs(mixture if arrays is not None else None)
    if programs is None or x.shape[-1] != calls.columns or not are_rows(weights, calls.sizes):
        return None
    others, after = weights[: calls.before], [x, *weights[calls.before :]] if layer is not None else []
    after += [normed := torch.empty_like(x)] if calls.calls_mlp else []
    after += [result := torch.empty_like(x)] if arrays is not None else []
    heads, out = torch.empty_like(form.heads_like), torch.empty_like(x)
    programs[0](*[tensor.data_ptr() for tensor in (x, *angles, heads, *others)])
    keys, values = map(_plain, updated(cache, *form.split(heads), module.layer_idx))
    addresses = [tensor.data_ptr() for tensor in after]
    if arrays is not None:
        addresses += [each.buffer_info()[0] for each in arrays]
    programs[1](heads.data_ptr(), out.data_ptr(), *cached(keys, values), *addresses)
    if not calls.calls_mlp:
        return out
    if mixture is None or arrays is None:
        of_mlp = layer.mlp(normed)
        return out + (of_mlp[0] if type(of_mlp) is tuple else of_mlp)  # type: ignore[no-any-return]
    return result if arrays[1][0] else out + mixture.by_class(normed)


def is_step(form: _AttentionForm, x: Any, angles: Any, mask: Any, rows: int = 1) -> bool:
    """Whether so many rows are given, and a mask that hides nothing."""
    has_rows = is_plain(x) and x.shape[:-1] == (1, rows)
    if not has_rows or type(angles) is not tuple or len(angles) != 2 or not are_rows(angles, [rows * form.rotated] * 2):
        return False
    # a window's mask hides nothing either: what left the window is no longer in the cache
    return mask is None or (isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and bool(mask.all()))


def _current(form: _AttentionForm, module: Any, layer: Any) -> LayerCalls | None:
    """What an attention or the layer around it computes by two calls now; None if nothing."""
    first = module._modules[form.linears[0]]
    weight = fused_weight(first) if isinstance(first, nn.Module) else None
    kept = (None if weight is None else weight.calls) or {}
    calls: LayerCalls | None = kept.get(module if layer is None else layer)
    is_current = calls is not None and calls.is_current() and calls.has_plain()
    return calls if is_current else _prepared(form, module, layer)


def _prepared(form: _AttentionForm, module: Any, layer: Any) -> LayerCalls | None:
    """The same, made now."""
    parts = module._modules
    linears = [parts[name] for name in form.linears]
    firsts = [linear._parameters for linear in linears[:-1]]
    weights = plain_weights(*linears, with_bias=True)
    norms = [norm for name in _NORMS if (norm := parts.get(name)) is not None]
    if weights is None or linears[-1]._parameters["bias"] is not None or _form_of(module) != form:
        return None
    if not _attends_so(module, form):
        return None
    facts, around = [(module, name) for name in parts], None
    if layer is not None:
        of_mlp, is_fused = mlp_weights(layer.mlp), is_one_call(layer.mlp)
        outer = [layer._modules[name] for name in _norms_in(layer)]
        dropouts = [part for part in layer._modules.values() if type(part) is nn.Dropout]
        if not outer or any(map(has_hooks, [module, layer.mlp, *dropouts])):
            return None
        if of_mlp is None and (is_fused or len(outer) > len(_AROUND[0])):
            return None
        if any(dropout.training for dropout in dropouts):
            return None
        forms = [own for norm in outer if (own := norm_form(norm)) is not None]
        if len(forms) < len(outer):
            return None
        around = _Around(forms, act_of(layer.mlp) if of_mlp else None)
        norms += outer
        facts += [(layer, name) for name in layer._modules]
        if of_mlp:
            weights += of_mlp
            linears += [layer.mlp._modules[name] for name in names_in(layer.mlp)[:-1]]
            facts += [(layer.mlp, name) for name in layer.mlp._modules]
    if any(map(has_hooks, norms)):
        return None
    tables = [(table, "bias") for table in firsts if table["bias"] is not None]
    tables += [(norm._parameters, "weight") for norm in norms]
    biased = [table["bias"] is not None for table in firsts]
    matrices = [weight.matrix for weight in weights]
    facts_of_all = _facts_of(form, module, linears, facts)
    plain = [(linear._parameters, m) for linear, m in zip(linears, matrices, strict=True) if type(m) is PlainMatrix]
    calls = LayerCalls(form, matrices, biased, around, facts_of_all, tables, plain)
    # by whose they are: a weight may be that of several layers
    weights[0].calls = {**(weights[0].calls or {}), module if layer is None else layer: calls}
    return calls


def are_rows(tensors: Iterable[Any], sizes: Iterable[int]) -> bool:
    """Whether tensors have so many values of bfloat16 that are plainly in memory."""
    for tensor, size in zip(tensors, sizes, strict=True):
        if type(tensor) not in _ORDINARY or tensor.dtype is not torch.bfloat16 or not tensor.is_cpu:
            return False
        if not tensor.is_contiguous() or tensor.numel() != size:
            return False
    return True


class _Past:
    """A cache with the keys and values of some tokens, which notes those that are added."""

    def __init__(self, form: _AttentionForm, random: RandomTensors) -> None:
        self._past = [random.normal(1, form.keys, _PAST, form.width) for _ in range(2)]
        self.added: tuple[torch.Tensor, ...] = ()

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        self.added = keys, values
        return tuple(torch.cat(pair, 2) for pair in zip(self._past, self.added, strict=True))


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the error relative to that of what was expected."""
    return float((result.float() - expected.float()).norm() / expected.float().norm())


@torch.no_grad()
def _is_alike(module: Any, form: _AttentionForm) -> bool:
    """Whether a module's class has the same keys and values, and nearly the same attention, with other products."""
    parameters = inspect.signature(type(module).forward).parameters
    name_of_cache = next((name for name in CACHES if name in parameters), "")
    if not attends_by_sdpa(module.config) or not name_of_cache:
        return False
    random = RandomTensors()
    x, past = torch.zeros(1, 1, form.width, dtype=torch.bfloat16, device="cpu"), _Past(form, random)
    cos, sin = (random.normal(1, 1, form.rotated) for _ in range(2))
    weights = [random.positive(form.width) for _ in form.norms]
    parts: dict[str, Any] = {"o_proj": lambda value: value}
    for name, weight in zip(_NORMS, weights, strict=False):
        parts[name] = with_weight(module._modules[name], weight)
    like = trial_of(module, _modules=parts, training=False)
    for scale in (1, 4):
        heads = random.normal(1, form.total, 1, form.width) * scale
        for name, part in zip(form.linears, torch.split(heads, form.heads, 1), strict=False):
            row = part.reshape(1, 1, -1).clone()
            parts[name] = lambda value, row=row: row if value is x else value
        named = {"hidden_states": x, "position_embeddings": (cos, sin), "attention_mask": None, name_of_cache: past}
        result = class_result(like, **named)
        if type(result) is not tuple:
            return False
        expected, added = result[0], past.added
        before, after = Program(3 + len(weights)), Program(9)
        place, of_cos, of_sin, *others = (before.address(index) for index in range(3 + len(weights)))
        form.add_rotation(before, place, of_cos, of_sin, others)
        before(*[tensor.data_ptr() for tensor in (heads, cos, sin, *weights)])
        if not all(map(torch.equal, added, form.split(heads))):
            return False
        form.add_attention(after, after.address(0), after.address(1), 2)
        out = torch.empty(1, 1, form.queries * form.width, dtype=torch.bfloat16, device="cpu")
        keys, values = past.update(*form.split(heads))
        after(heads.data_ptr(), out.data_ptr(), *cached(keys, values))
        if not (out.shape == expected.shape and relative_error(out, expected) < _TOLERANCE):
            return False
    return True
