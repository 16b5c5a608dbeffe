"""The index by which an attention chooses the tokens of a row (Qwen4-Exp), as part of a program.

Each token has a key of the index. A block of tokens has one, too: the mean of its tokens', normalized and rotated by
the angles of the first one. It is computed once and kept with the KV cache. The row attends to the blocks with the
largest scores and to the tokens behind all blocks; to all tokens while there are no more blocks than it may choose.
A step needs the angles of all tokens, which the class computes again each time; here they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.programs import Place, Program
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._fusing import class_result, fuse, is_result, is_transformed, notes_on, result_of, trial_of
from rabbitllm.engine._norms import NormForm, norm_form
from rabbitllm.engine.kv_room import IndexRoom, is_indexed, is_ordinary, room_for, spare

NAME, LINEAR = "indexer", "index_qk_proj"
"""Names of the module, and of its Linear."""
NORMS = "q_layernorm", "k_layernorm"
WORDS = 9
"""Words of a row, behind those of its KV cache; then come the addresses of its angles."""
_SIZES = {"index_n_heads": 1 << 10, "index_head_dim": 1 << 10, "compress_ratio": 64, "block_topk": 1 << 16}
"""Numbers of a module, and the most that they may be here: a trial takes memory by them."""


class IndexForm(NamedTuple):
    """Heads of queries, their width, the tokens of a block, how many blocks are chosen, and the norms."""

    heads: int
    width: int
    ratio: int
    chosen: int
    norms: tuple[NormForm, ...]

    @classmethod
    def of(cls, module: Any) -> IndexForm | None:
        """The form that a module may have; None if it has another."""
        parts, own = module._modules, vars(module)
        sizes = [own.get(name) for name in _SIZES]
        norms = tuple(norm for name in NORMS if name in parts and (norm := norm_form(parts[name])) is not None)
        if parts.keys() != {LINEAR, *NORMS} or module._parameters or module._buffers or len(norms) < len(NORMS):
            return None
        are_fit = all(
            isinstance(size, int) and 0 < size <= _SIZES[name] for name, size in zip(_SIZES, sizes, strict=True)
        )
        if not are_fit or own.get("index_kv_heads") != 1:
            return None
        form, linear = cls._make([*sizes, norms]), parts[LINEAR]
        is_fit = isinstance(linear, nn.Linear) and linear.out_features == form.outputs
        is_fit = is_fit and all(norm.groups == 1 for norm in norms)
        return form if is_fit and all(parts[name].weight.shape == (form.width,) for name in NORMS) else None

    @property
    def outputs(self) -> int:
        """Values of the queries and of the key of a token."""
        return (self.heads + 1) * self.width

    def add_first(self, program: Program, queries: Place, angles: Sequence[Place], weight: Place, sizes: Any) -> None:
        """Add norm and rotation of the queries; `sizes` are how much of a head is rotated, and its angles."""
        from rabbitllm.engine import _layer_kernels  # numba comes with it

        rotated, count = sizes
        self.norms[0].add_to(program, self.width, queries, weight, queries, self.heads)
        program.add(_layer_kernels.rotate, [queries, *angles, self.heads, rotated, self.width, 1, count, count])

    def add_runs(self, program: Program, queries: Place, words: Sequence[Any], weight: Place, sizes: Any) -> Place:
        """Add the choice of tokens, and return where `_layer_kernels.attend` finds them; `words` are how many tokens
        there are, and those of `words`."""
        from rabbitllm.engine import _index_kernels, _layer_kernels

        tokens, kept, first, means, new, cos, sin, keys, scores, blocks = words
        (rotated, count), width, ratio, norm = sizes, self.width, self.ratio, self.norms[1]
        key = queries[0], queries[1] + 2 * self.heads * width
        program.add(_index_kernels.keep_and_pool, [key, kept, first, means, new, ratio, width])
        norm.add_to(program, width, means, weight, means, new)
        program.add(_layer_kernels.rotate, [means, cos, sin, 1, rotated, width, new, count, ratio * count])
        threads = torch.get_num_threads() if torchs_team() is not None else 1
        program.add(_index_kernels.score_blocks, [queries, keys, scores, blocks, self.heads, width], threads)
        runs = program.room(8 * (4 + 2 * self.chosen))
        program.add(_index_kernels.choose_blocks, [scores, runs, blocks, self.chosen, ratio, tokens])
        return runs

    def trial(self, module: Any, chosen: int, linear: Callable[..., Any], norms: Sequence[Callable[..., Any]]) -> Any:
        """A module that chooses so few blocks, with another product and other weights of norms."""
        parts = dict(zip(NORMS, norms, strict=True))
        own = {"_modules": {LINEAR: linear, **parts}, "block_topk": chosen, "token_budget": chosen * self.ratio}
        like = trial_of(module, **own, layer_idx=0)
        vars(like).pop("forward", None)  # a method of the module itself
        return like


class IndexedRow(NamedTuple):
    """A token for whose keys there is room in a layer's KV cache.

    Attributes:
        words: those of `kv_room.cached`, of its index, and the addresses of its angles.
        grow: lets the layer have the token.
    """

    words: Sequence[int]
    grow: Callable[[], None]

    @classmethod
    def of(cls, form: Any, module: Any, cache: Any, angles: Sequence[torch.Tensor]) -> IndexedRow | None:
        """Of a token of an attention of such a form, with the angles of all tokens; None if it is left to the class."""
        number, index = module.layer_idx, form.index
        if not is_ordinary(cache) or "update_indexer" in vars(cache) or number >= len(cache.layers):
            return None
        layer = cache.layers[number]
        own, tokens = getattr(layer, "indexer_keys", None), len(angles[0][0])
        if not is_indexed(layer) or own is None or layer.keys is None or layer.keys.shape[2:3] != (tokens - 1,):
            return None
        if own.shape != (1, tokens - 1, index.width) or own.dtype is not torch.bfloat16 or not own.is_cpu:
            return None
        if "update_indexer" in vars(layer):
            return None
        room = room_for(layer, tokens)
        if room.form != (torch.bfloat16, own.device, 1, form.keys, form.width, form.width):
            return None
        facts = index, getattr(module._modules[NAME]._modules[NORMS[1]], "weight", None)
        of_index = IndexRoom.of(layer, room, index.ratio, facts)
        key, angle, blocks = 2 * index.width, 2 * form.angles, tokens // index.ratio
        blocks, done = blocks if blocks > index.chosen else 0, of_index.done
        new, first = max(blocks - done, 0), done * index.ratio
        starts = [each.data_ptr() for each in angles]

        def grow() -> None:
            room.grow(layer, 1)
            of_index.done += new
            of_index.give(layer, tokens)

        words = [*room.cached(layer, tokens), of_index.keys + (tokens - 1) * key]
        words += [of_index.keys + first * key, of_index.blocks + done * key, new, *(x + first * angle for x in starts)]
        words += [of_index.blocks, of_index.scores, blocks, *(x + (tokens - 1) * angle for x in starts)]
        return cls(words, grow)


class _Angles(NamedTuple):
    """Cosines and sines of positions, and of those that are expected to follow; they do not change.

    Attributes:
        facts: what they depend on besides.
    """

    ids: torch.Tensor
    inverse: torch.Tensor
    facts: tuple[Any, ...]
    both: tuple[torch.Tensor, torch.Tensor]

    def of(self, ids: torch.Tensor, inverse: torch.Tensor, facts: tuple[Any, ...]) -> Any:
        """Those of some positions; None if they are others."""
        count = ids.shape[2]
        is_same = self.facts == facts and torch.equal(self.inverse, inverse)
        is_same = is_same and torch.equal(self.ids[..., :count], ids)
        return tuple(each[:, :count] for each in self.both) if is_same else None


def fuse_angles(model: nn.Module) -> int:
    """Let a model whose attentions have an index keep the angles of all tokens of a sequence.

    Returns:
        How many modules these are.
    """
    if not any(NAME in module._modules for module in model.modules()):
        return 0

    def form_of(module: nn.Module) -> str | None:
        is_fit = type(module).__name__.endswith("RotaryEmbedding") and vars(module).get("rope_type") == "default"
        return "default" if is_fit and module._buffers.get("inv_freq") is not None else None

    return fuse(model, _angles, form_of, _are_kept)


def _angles(form: str, module: Any, *args: Any, **named: Any) -> Any:
    if len(args) != 2 or named or is_transformed() or torch.is_grad_enabled():
        return None
    x, ids = args
    inverse, own = module._buffers.get("inv_freq"), vars(module)
    is_plain = all(type(each) is torch.Tensor and each.is_cpu for each in (x, ids)) and type(inverse) is torch.Tensor
    # all tokens of one sequence, more than there are hidden states of
    if not is_plain or ids.dim() != 3 or ids.shape[1] != 1 or x.dim() != 3 or not 0 < x.shape[1] < ids.shape[2]:
        return None
    facts = own.get("rope_type"), own.get("attention_scaling"), str(own.get("mrope_section")), x.dtype, ids.shape[0]
    notes = notes_on(module)
    kept: _Angles | None = notes.get("angles")
    if facts[0] == form and (kept is None or (both := kept.of(ids, inverse, facts)) is None):
        following = torch.arange(1, spare(ids.shape[2]) + 1, device="cpu")
        more = torch.cat([ids, ids[..., -1:] + following], 2)
        kept = notes["angles"] = _Angles(more, inverse.clone(), facts, type(module).forward(module, x, more))
        both = kept.of(ids, inverse, facts)
    return both if facts[0] == form else None


def _are_kept(module: Any, form: str) -> bool:
    """Whether a module's class computes each token's angles by its position alone."""
    random = RandomTensors()
    x, like = random.normal(1, 1, 8), trial_of(module)
    for count in (2, 3, 40, 300, 41):
        ids = torch.arange(count, device="cpu").expand(3, 1, -1) + (count == 41)
        expected = class_result(like, x, ids)
        both = result_of(_angles, form, like, x, ids)
        if type(expected) is not tuple or both is None or not all(map(is_result, both, expected)):
            return False
    return True
