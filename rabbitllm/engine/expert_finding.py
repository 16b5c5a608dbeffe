"""Finds the stored tensors of the experts of a model, from names and shapes alone.

A module's experts can be streamed individually if each of its parameters is made of one stored tensor for each expert,
or of slices of one stored tensor for all experts, by operations that do not mix experts. All other experts are streamed
with their layer. Reads no weights.

Families outside transformers' registry of experts kernels are streamed with their layer. Their forwards:
`longcat_flash` and `step3p7` index (experts, ...) by the experts that are hit; `dbrx` views (experts x rows, ...)
first; `jetmoe` loops over all experts, also in attention; in `switch_transformers` and `nllb_moe` each expert is a
module; those of `doge` are rows of embeddings. Llama 4 is in `forwards.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from rabbitllm.base.rounding import round_up
from rabbitllm.checkpoints.config import picked_by
from rabbitllm.engine.expert_source import Block, ExpertPart, ExpertSource, Leaf, Nesting, packed_by
from rabbitllm.engine.published import BY_MATRIX
from rabbitllm.engine.span_reader import BLOCK
from rabbitllm.engine.units import Packs, Place, Unit
from rabbitllm.engine.weights import Recipe, WeightMap
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size
from rabbitllm.quant.schemes import NESTED_BLOCK, SCALE_BYTES, SCHEMES, STORED, Quantized
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT
from rabbitllm.store.layer_store import StoredTensor, WeightFiles

_EXPERT = re.compile(r"\.(\d+)(?=\.)")
_WITHIN_AN_EXPERT = {"MergeModulelist": 0, "Concatenate": 1, "Interleave": 1, "Chunk": 1}
"""transformers' conversions that do not mix experts -> the least `dim` for which that holds."""
_USUAL = 8
"""Experts that a token uses, if the config does not say."""
_STACKING = frozenset({"MergeModulelist", "Concatenate"})
"""Conversions that only stack rows."""


def expert_sources(
    model: PreTrainedModel, units: Iterable[Unit], weights: WeightMap, store: WeightFiles, packs: Packs | None
) -> list[ExpertSource]:
    """The modules whose experts can be streamed individually, in the order of a pass.

    These are the modules that transformers computes through its registry of experts kernels, and all of whose weights
    are made of one stored tensor for each expert, or of slices of one, by operations that do not mix experts.
    """
    found = []
    for unit in units:
        if not unit.is_layer:
            continue
        by_target = {place.target: place for place in unit.places}
        for path, module in unit.module.named_modules():
            if is_routed(module):
                name = ".".join(part for part in (unit.name, path) if part)
                leaves = _leaves(name, module, by_target, weights, store)
                if leaves:
                    experts: int = module.num_experts
                    used = min(_used(model, module), experts)
                    source = ExpertSource(name, unit.name, module, experts, used, leaves, _lay_out(leaves))
                    found.append(packed_by(source, packs))
    return found


def without_experts(unit: Unit, sources: Iterable[ExpertSource]) -> Unit:
    """A unit without the parameters that are streamed by expert."""
    own = (source for source in sources if source.unit == unit.name)
    apart = {leaf.place.target for source in own for leaf in source.leaves.values()}
    return replace(unit, places=tuple(place for place in unit.places if place.target not in apart))


def is_routed(module: nn.Module) -> bool:
    """Whether a module computes by expert: through transformers' registry of experts kernels, or in the same way."""
    return all(hasattr(module, mark) for mark in ("is_transposed", "has_gate", "num_experts"))


def _leaves(
    name: str, module: nn.Module, by_target: Mapping[str, Place], weights: WeightMap, store: WeightFiles
) -> dict[str, Leaf]:
    """The parameters of shape (experts, ...) of a routed module; none if experts of one cannot be made individually."""
    leaves: dict[str, Leaf] = {}
    for key, parameter in module._parameters.items():
        if parameter is None or parameter.dim() < 3:
            continue
        place = by_target.get(f"{name}.{key}")
        leaf = _leaf(place, module.num_experts, weights, store.tensors) if place is not None else None  # type: ignore[arg-type]
        if leaf is None:
            return {}
        leaves[key] = leaf
    return leaves


def _used(model: PreTrainedModel, module: nn.Module) -> int:
    """How many experts a token uses, by the config."""
    for config in (getattr(module, "config", None), model.config.get_text_config(decoder=True)):
        if found := picked_by(config):
            return found
    return _USUAL


def _leaf(place: Place, experts: int, weights: WeightMap, tensors: Mapping[str, StoredTensor]) -> Leaf | None:
    recipe = weights.recipes.get(place.target)
    if recipe is None or place.shape[0] != experts:
        return None
    by_pattern: dict[str, list[str]] = {}
    for pattern, name in recipe.sources:
        by_pattern.setdefault(pattern, []).append(name)
    blocks = []
    for pattern, names in by_pattern.items():
        block = _block(pattern, [tensors[name] for name in names], experts)
        if block is None:
            return None
        blocks.append(block)
    stacks = _stacks(recipe, place, blocks)
    if stacks is None or len({block.sliced for block in blocks}) > 1:
        return None
    return Leaf(place, recipe, tuple(blocks), stacks)


def _stacks(recipe: Recipe, place: Place, blocks: Sequence[Block]) -> bool | None:
    """Whether the parameter is the stacked rows of the blocks; None if experts cannot be made individually."""
    if recipe.converter is None:
        return True
    only_rows = True
    for operation in recipe.converter.operations:
        kind = type(operation).__name__
        if kind == "Transpose":
            dims = (operation.dim0, operation.dim1)
            same = operation.check_dims and blocks[0].shape == tuple(place.shape[1:])
            if min(dims) < 1 and not same:
                return None
            only_rows = only_rows and same
        elif kind in _WITHIN_AN_EXPERT:
            if operation.dim < _WITHIN_AN_EXPERT[kind] or (kind == "MergeModulelist" and operation.dim):
                return None
            rows = kind in _STACKING and operation.dim <= 1
            only_rows = only_rows and rows
        elif kind in BY_MATRIX:
            only_rows = False
        else:
            return None
    if not only_rows:
        return False
    rows = sum(block.shape[0] for block in blocks)
    return (rows, *blocks[0].shape[1:]) == tuple(place.shape[1:])


def _block(pattern: str, stored: Sequence[StoredTensor], experts: int) -> Block | None:
    first = stored[0]
    if not all(tensor.is_one_run for tensor in stored):
        return None
    if len(stored) == 1 and len(first.shape) >= 2 and first.shape[0] == experts and experts > 1:
        return _slices(pattern, first, experts)
    if len(stored) != experts or [_number(tensor.name) for tensor in stored] != list(range(experts)):
        return None
    alike = _kind_of(first)
    if any(_kind_of(tensor) != alike for tensor in stored):
        return None
    payload = _part([tensor.parts[0] for tensor in stored])
    if first.quantized is None or STORED[first.quantized.scheme].block_bytes:
        return Block(pattern, False, first.quantized, payload)
    tables = tuple(tensor.parts[2] for tensor in stored)
    scales, nesting = _part([tensor.parts[1] for tensor in stored]), _nesting(stored, first.parts[1].elements)
    return Block(pattern, False, first.quantized.codes, payload, scales, tables, nesting=nesting)


def _kind_of(stored: StoredTensor) -> tuple[str | None, Quantized | None, str, tuple[int, ...]]:
    """The scheme, form, dtype and shape of a stored tensor, without the mean of its scales."""
    form = stored.quantized
    if form is None:
        return None, None, stored.parts[0].dtype, stored.shape
    return form.scheme, form.codes, stored.parts[0].dtype, stored.shape


def _nesting(stored: Sequence[StoredTensor], blocks: int) -> Nesting | None:
    """The nesting of quantized scales, `blocks` of each expert; None if the scales are not quantized."""
    offsets = [tensor.quantized.offset for tensor in stored if tensor.quantized is not None]
    if None in offsets:
        return None
    made = ExpertPart("F32", (blocks,), blocks * SCALE_BYTES, 0, (), np.empty(0, np.int64))
    where, tables = zip(*(tensor.parts[3:5] for tensor in stored), strict=True)
    return Nesting(made, np.array(offsets, np.float32), where, tables)


def _slices(pattern: str, stored: StoredTensor, experts: int) -> Block | None:
    shape, payload = stored.shape[1:], stored.parts[0]
    if stored.quantized is None:
        return Block(pattern, True, None, _slice(payload, payload.dtype, shape, experts))
    form = replace(stored.quantized.codes, shape=shape)
    if STORED[form.scheme].block_bytes:
        return Block(pattern, True, form, _slice(payload, "U8", payload.shape[1:], experts))
    block, elements = SCHEMES[form.scheme].block, int(np.prod(shape))
    if elements % block or (form.scheme == "4bit" and elements % 2):
        return None
    nesting = _nesting([stored], elements // block)
    if nesting is not None and elements // block % NESTED_BLOCK:
        return None
    codes = (elements // 2, 1) if form.scheme == "4bit" else shape
    scales = _slice(stored.parts[1], stored.parts[1].dtype, (elements // block,), experts)
    payload_part, tables = _slice(payload, "U8", codes, experts), (stored.parts[2],)
    return Block(pattern, True, form, payload_part, scales, tables, nesting=nesting)


def _slice(whole: TensorSpec, dtype: str, shape: tuple[int, ...], experts: int) -> ExpertPart:
    nbytes = byte_size(dtype, shape)
    offsets = whole.offset + nbytes * np.arange(experts, dtype=np.int64)
    return ExpertPart(dtype, shape, nbytes, 0, (whole.file,), offsets)


def _part(specs: Sequence[TensorSpec]) -> ExpertPart:
    files = tuple(spec.file for spec in specs)
    offsets = np.array([spec.offset for spec in specs], np.int64)
    first = specs[0]
    return ExpertPart(first.dtype, first.shape, first.nbytes, 0, files[:1] if len(set(files)) == 1 else files, offsets)


def _number(name: str) -> int:
    """The index of the expert in a checkpoint's name: the last number in it."""
    found = _EXPERT.findall(name)
    return int(found[-1]) if found else -1


def _lay_out(leaves: Mapping[str, Leaf]) -> int:
    """Give every part its offset in an expert's bytes; return the bytes of an expert.

    The payloads of a leaf whose blocks stack are contiguous, and so are their scales, so that they form one matrix.
    These runs are in the order of the first expert's file, so that one read covers as many as possible.
    """
    runs = []
    for leaf in leaves.values():
        if not leaf.stacks:
            runs += [[part] for part in leaf.parts]
            continue
        runs.append([block.payload for block in leaf.blocks])
        runs.append([block.scales for block in leaf.blocks if block.scales is not None])
    runs = sorted(filter(None, runs), key=lambda run: (run[0].file(0), int(run[0].offsets[0])))
    for leaf in leaves.values():  # made from the bytes that are read, and put after them
        runs.append([block.nesting.made for block in leaf.blocks if block.nesting is not None])
    end = 0
    for run in filter(None, runs):
        end = round_up(end, TENSOR_ALIGNMENT)
        for part in run:
            part.at = end
            end += part.nbytes
    return round_up(end, BLOCK)
