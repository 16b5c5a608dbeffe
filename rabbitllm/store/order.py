"""In which order a layer file holds its tensors, from their names and sizes alone.

The format allows no holes, so alignment comes from the order: what fills whole 4096-byte blocks first, then multiples
of 64 bytes, then the rest. Within each, an expert's tensors lie together, in the order in which they are fused:
matrices first, gate before up, then their scales in the same order. So an expert is one run of bytes, and gate and up,
or their codes, or their scales, are one matrix without a copy. Pure, and the same whatever order the tensors come in.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable

from rabbitllm.checkpoints.index import natural_key
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.tensor_spec import byte_size
from rabbitllm.storage.page_cache import DIRECT_ALIGNMENT

TENSOR_ALIGNMENT = 64
"""A kernel may give other last bits on weights aligned to less than 16 bytes; 64 is a cache line."""
BY_NAME, EXPERTS_TOGETHER = 1, 2
"""Format versions: tensors by size and name alone; those of an expert together."""
FORMAT_VERSION = EXPERTS_TOGETHER
"""Of the layer files that are made now. Those of every version are read, since a header says where its tensors lie; a
split that was begun or is repaired keeps its own."""

_RANKS = _BLOCKS, _LINES, _REST = range(3)
"""Ranks: whole blocks, multiples of 64 bytes, the rest."""
_DATA, _OTHERS, _CONSTANTS = range(3)
"""Within each rank: what experts are read for, all that is of no expert, tables and sizes of experts."""
_EXPERT = re.compile(r"(?P<block>(?:.*?\.)?experts\.(?:expert_)?)(?P<number>[0-9]+)\.(?P<rest>.+)")
_PROJECTIONS = {"gate_proj": 0, "w1": 0, "fc1": 0, "up_proj": 1, "w3": 1, "fc3": 1, "down_proj": 2, "w2": 2, "fc2": 2}
"""The order in which transformers' conversion_mapping.py fuses them; where there is no gate, it fuses nothing."""
_MATRICES = frozenset({"weight", "qweight", "weight_packed"})
_CONSTANT = re.compile(r"(?:^|\.)(?:quant_map|nested_quant_map|4bit\.nested_absmax|code|quant_state\..*|weight_shape)$")
"""What an expert is read without: tables and sizes, and the few scales that scales have, which are kept in memory."""

_Key = tuple[object, ...]


def in_order(parts: Iterable[TensorToWrite], version: int = FORMAT_VERSION) -> list[TensorToWrite]:
    """The stored parts of a layer in the order in which its file holds them.

    What is a multiple of 64 bytes long begins at one; what fills whole blocks begins on a block, unless it is of an
    expert some of whose parts do not. Parts of an expert that are no multiple of 64 are not with the others of it,
    since the next expert would not be aligned then.

    Args:
        parts: of all of its tensors, in any order.
        version: the format version of the file.
    """
    if version == BY_NAME:
        return sorted(parts, key=lambda part: (_rank(part.dtype, part.shape), natural_key(part.name)))
    others: list[list[TensorToWrite]] = [[] for _ in _RANKS]
    experts: dict[tuple[str, str], list[tuple[str, int, TensorToWrite]]] = {}
    for part in parts:
        rank = _rank(part.dtype, part.shape)
        match = _EXPERT.fullmatch(part.name)
        if match is None:
            others[rank].append(part)
        else:
            block, number, rest = match.groups()
            experts.setdefault((block, number), []).append((rest, rank, part))
    runs: list[tuple[_Key, list[TensorToWrite]]] = []
    for rank in _RANKS:
        runs.append(((rank, _OTHERS), sorted(others[rank], key=_by_name)))
    for (block, number), members in experts.items():
        expert = (_block_key(block), int(number), number)
        for rank, which, turns in _runs(tuple([(rest, rank) for rest, rank, _ in members])):
            runs.append(((rank, which, *expert), [members[turn][2] for turn in turns]))
    runs.sort(key=operator.itemgetter(0))
    return [part for _, run in runs for part in run]


def _by_name(part: TensorToWrite) -> _Key:
    return natural_key(part.name)


@functools.lru_cache(maxsize=1024)
def _runs(members: tuple[tuple[str, int], ...]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """An expert's parts that lie together; experts of a layer are alike, and share what is found for one.

    Args:
        members: what each part's name has after the expert's number, and its rank by itself.

    Returns:
        Rank, kind, and the members in order, for each run.
    """
    data = [rank for rest, rank in members if _place(rest)[0] == _DATA and rank != _REST]
    runs: dict[tuple[int, int], list[tuple[_Key, int]]] = {}
    for turn, (rest, rank) in enumerate(members):
        which, *place = _place(rest)
        own = max(data) if which == _DATA and rank != _REST else rank
        runs.setdefault((own, which), []).append(((*place, rest), turn))
    return tuple((*kind, tuple(turn for _, turn in sorted(run))) for kind, run in runs.items())


@functools.lru_cache(maxsize=1024)
def _rank(dtype: str, shape: tuple[int, ...]) -> int:
    nbytes = byte_size(dtype, shape)
    if nbytes % DIRECT_ALIGNMENT == 0:
        return _BLOCKS
    return _LINES if nbytes % TENSOR_ALIGNMENT == 0 else _REST


@functools.lru_cache(maxsize=1024)
def _place(rest: str) -> tuple[int, bool, _Key, _Key]:
    """Where in an expert a part lies, by what its name has after the expert's number; experts have the same ones."""
    projection, _, leaf = rest.partition(".")
    turn = (_PROJECTIONS.get(projection, len(_PROJECTIONS)), natural_key(projection))
    return _CONSTANTS if _CONSTANT.search(leaf) else _DATA, leaf not in _MATRICES, natural_key(leaf), turn


@functools.lru_cache(maxsize=1024)
def _block_key(block: str) -> _Key:
    return natural_key(block)
