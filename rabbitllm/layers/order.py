"""In which order a layer file holds its tensors, from their names and sizes alone.

The format allows no holes, so alignment comes from the order: what fills whole 4096-byte blocks first, then multiples
of 64 bytes, then the rest. Within each, an expert's tensors lie together, in the order in which they are fused:
matrices first, gate before up, then their scales in the same order. So an expert is one run of bytes, and gate and up,
or their codes, or their scales, are one matrix without a copy. Pure, and the same whatever order the tensors come in.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from rabbitllm.checkpoints.index import natural_key
from rabbitllm.durable import DIRECT_ALIGNMENT
from rabbitllm.formats.safetensors_file import Placed

TENSOR_ALIGNMENT = 64
"""A kernel may give other last bits on weights aligned to less than 16 bytes; 64 is a cache line."""
BY_NAME, EXPERTS_TOGETHER = 1, 2
"""Format versions: tensors by size and name alone; those of an expert together."""
FORMAT_VERSION = EXPERTS_TOGETHER
"""Of the layer files that are made now. Those of every version are read, since a header says where its tensors lie; a
split that was begun or is repaired keeps its own."""

_BLOCKS, _LINES, _REST = range(3)
"""Ranks: whole blocks, multiples of 64 bytes, the rest."""
_EXPERT = re.compile(r"(?P<block>(?:.*?\.)?experts)\.(?:expert_)?(?P<number>[0-9]+)\.(?P<rest>.+)")
_PROJECTIONS = {"gate_proj": 0, "w1": 0, "fc1": 0, "up_proj": 1, "w3": 1, "fc3": 1, "down_proj": 2, "w2": 2, "fc2": 2}
"""The order in which transformers' conversion_mapping.py fuses them; where there is no gate, it fuses nothing."""
_MATRICES = frozenset({"weight", "qweight", "weight_packed"})
_CONSTANT = re.compile(r"(?:^|\.)(?:quant_map|nested_quant_map|code|quant_state\..*|weight_shape)$")
"""Tables and sizes that do not depend on the weights: an expert is read without them."""

_Key = tuple[object, ...]


class _Expert(NamedTuple):
    """Which expert a part is of."""

    block: str
    number: str

    @property
    def key(self) -> _Key:
        return _block_key(self.block), int(self.number), self.number


def in_order(parts: Iterable[Placed], version: int = FORMAT_VERSION) -> list[Placed]:
    """The stored parts of a layer in the order in which its file holds them.

    What is a multiple of 64 bytes long begins at one; what fills whole blocks begins on a block, unless it is of an
    expert some of whose parts do not. Parts of an expert that are no multiple of 64 are not with the others of it,
    since the next expert would not be aligned then.

    Args:
        parts: of all of its tensors, in any order.
        version: the format version of the file.
    """
    if version == BY_NAME:
        return sorted(parts, key=lambda part: (_rank(part.nbytes), natural_key(part.name)))
    found = [(part, _rank(part.nbytes), *_within_expert(part.name)) for part in parts]
    ranks: dict[_Expert, int] = {}
    for _, rank, expert, place in found:
        if expert is not None and place is not None and rank > ranks.get(expert, _BLOCKS) and rank != _REST:
            ranks[expert] = rank
    keys: dict[str, _Key] = {}
    for part, rank, expert, place in found:
        if expert is None:
            keys[part.name] = (rank, 1, natural_key(part.name))
        elif place is None:
            keys[part.name] = (rank, 2, *expert.key, natural_key(part.name))
        else:
            together = rank if rank == _REST else ranks.get(expert, _BLOCKS)
            keys[part.name] = (together, 0, *expert.key, place, part.name)
    return sorted((part for part, *_ in found), key=lambda part: keys[part.name])


def _rank(nbytes: int) -> int:
    if nbytes % DIRECT_ALIGNMENT == 0:
        return _BLOCKS
    return _LINES if nbytes % TENSOR_ALIGNMENT == 0 else _REST


def _within_expert(name: str) -> tuple[_Expert | None, _Key | None]:
    """The expert that a part is of, if it is of one; and its place in that expert, unless it is a constant."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None, None
    return _Expert(match["block"], match["number"]), _place(match["rest"])


@functools.lru_cache(maxsize=1024)
def _place(rest: str) -> _Key | None:
    """Where in an expert a part lies, by what its name has after the expert's number; experts have the same ones."""
    projection, _, leaf = rest.partition(".")
    if _CONSTANT.search(leaf):
        return None
    turn = (_PROJECTIONS.get(projection, len(_PROJECTIONS)), natural_key(projection))
    return leaf not in _MATRICES, natural_key(leaf), turn


@functools.lru_cache(maxsize=1024)
def _block_key(block: str) -> _Key:
    return natural_key(block)
