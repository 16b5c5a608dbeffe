"""The order of tensors in a layer file, from their names and sizes alone.

The format allows no holes, so alignment comes from the order: first tensors that fill whole 4096-byte blocks, then
multiples of 64 bytes, then the rest. Within each group, an expert's tensors are adjacent, in the order in which they
are fused: matrices first, gate before up, then their scales in the same order. So an expert is one run of bytes, and
gate and up, or their codes, or their scales, are one matrix without a copy. Pure, and independent of the input order.
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
"""Kernels may give other last bits for weights aligned to less than 16 bytes; 64 is a cache line."""
BY_NAME, EXPERTS_TOGETHER = 1, 2
"""Format versions: ordered by size and name alone; experts' tensors adjacent."""
FORMAT_VERSION = EXPERTS_TOGETHER
"""The version of new layer files. All versions can be read, since the header has the offsets; a split that is resumed
or repaired keeps its own."""

_RANKS = _BLOCKS, _LINES, _REST = range(3)
"""Ranks: whole blocks, multiples of 64 bytes, the rest."""
_DATA, _OTHERS, _CONSTANTS = range(3)
"""Groups within each rank: tensors read per expert, tensors outside experts, experts' tables and sizes."""
_EXPERT = re.compile(r"(?P<block>(?:.*?\.)?experts\.(?:expert_)?)(?P<number>[0-9]+)\.(?P<rest>.+)")
_PROJECTIONS = {"gate_proj": 0, "w1": 0, "fc1": 0, "up_proj": 1, "w3": 1, "fc3": 1, "down_proj": 2, "w2": 2, "fc2": 2}
"""The order in which transformers' conversion_mapping.py fuses them; without a gate it fuses nothing."""
_MATRICES = frozenset({"weight", "qweight", "weight_packed"})
_CONSTANT = re.compile(r"(?:^|\.)(?:quant_map|nested_quant_map|4bit\.nested_absmax|code|quant_state\..*|weight_shape)$")
"""Tensors that are not read with an expert: tables and sizes, and the few scales of scales, which stay in memory."""

_Key = tuple[object, ...]


def in_order(parts: Iterable[TensorToWrite], version: int = FORMAT_VERSION) -> list[TensorToWrite]:
    """The stored parts of a layer in the order of its file.

    A part whose size is a multiple of 64 bytes is aligned to 64; a part that fills whole blocks begins on a block,
    unless it belongs to an expert with other parts that do not. Parts of an expert that are not multiples of 64 are
    apart from its others, since they would misalign the next expert.

    Args:
        parts: stored parts of all its tensors, in any order.
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
    """The runs of adjacent parts of an expert; cached, since the experts of a layer are alike.

    Args:
        members: the rest of each part's name after the expert's number, and its own rank.

    Returns:
        Rank, group, and the member indices in order, for each run.
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
    """The sort key of a part within an expert, by the rest of its name after the expert's number."""
    projection, _, leaf = rest.partition(".")
    turn = (_PROJECTIONS.get(projection, len(_PROJECTIONS)), natural_key(projection))
    return _CONSTANTS if _CONSTANT.search(leaf) else _DATA, leaf not in _MATRICES, natural_key(leaf), turn


@functools.lru_cache(maxsize=1024)
def _block_key(block: str) -> _Key:
    return natural_key(block)
