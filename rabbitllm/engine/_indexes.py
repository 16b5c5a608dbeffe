"""The index by which an attention chooses the tokens of a row (Qwen4-Exp), as part of a program.

Each token has a key of the index. A block of tokens has one, too: the mean of its tokens', normalized and rotated by
the angles of the first one. It is computed once and kept beside the KV cache. The row attends to the blocks with the
largest scores and to the tokens behind all blocks; to all tokens while there are no more blocks than it may choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.programs import Place, Program
from rabbitllm.engine._fusing import trial_of
from rabbitllm.engine._norms import NormForm, norm_form
from rabbitllm.engine.kv_room import IndexRoom, is_indexed, is_ordinary, room_for

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
