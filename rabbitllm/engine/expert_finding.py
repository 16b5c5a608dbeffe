"""Finds the stored tensors of the experts of a model, from names and shapes alone.

A module's experts can be streamed individually if each of its parameters is made of one stored tensor for each expert,
or of slices of one stored tensor for all experts, by operations that do not mix experts. Other experts are streamed
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
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from rabbitllm.base.grouping import grouped
from rabbitllm.base.rounding import round_up
from rabbitllm.checkpoints.config import picked_by
from rabbitllm.engine._published import BY_MATRIX
from rabbitllm.engine._weights import Recipe, WeightMap
from rabbitllm.engine.expert_source import (
    Block,
    CodedBlocks,
    ExpertParameter,
    ExpertPart,
    ExpertSource,
    QuantizedScales,
    Rearranged,
    with_matrices,
)
from rabbitllm.engine.published_codes import (
    CODES,
    DIVISOR,
    FACTOR,
    INTEGER_PARTS,
    SCALES,
    ZEROS,
    IntegerLayout,
    cast_of,
    form_of,
    integer_form,
    integer_layout,
    role_of,
)
from rabbitllm.engine.span_reader import BLOCK, SECTOR
from rabbitllm.engine.units import MatrixChooser, ParameterEntry, Unit
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size
from rabbitllm.quant.coded import CodedForm
from rabbitllm.quant.schemes import NESTED_BLOCK, SCALE_BYTES, SCHEMES, STORED, Quantized
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT
from rabbitllm.store.layer_store import StoredTensor, WeightFiles

_EXPERT = re.compile(r"\.(\d+)(?=\.)")
_WITHIN_AN_EXPERT = {"MergeModulelist": 0, "Concatenate": 1, "Interleave": 1, "Chunk": 1}
"""transformers' conversions that do not mix experts -> the least `dim` for which that holds."""
_PLAIN_ALONE = "Inkling2LoopDequantizeExperts"
"""A conversion that returns the weights unchanged if they have no scales."""
_USUAL = 8
"""Experts that a token uses, if the config does not say."""
_STACKING = frozenset({"MergeModulelist", "Concatenate"})
"""Conversions that only stack rows."""


def expert_sources(
    model: PreTrainedModel,
    units: Iterable[Unit],
    weights: WeightMap,
    store: WeightFiles,
    choose_matrix: MatrixChooser | None,
) -> list[ExpertSource]:
    """The modules whose experts can be streamed individually, in the order of a pass.

    These are modules that transformers computes through its registry of experts kernels. All of their weights are made
    of one stored tensor for each expert, or of slices of one, by operations that do not mix experts.
    """
    sources = []
    for unit in units:
        if not unit.is_layer:
            continue
        by_target = {entry.target: entry for entry in unit.entries}
        for path, module in unit.module.named_modules():
            if is_routed(module):
                name = ".".join(part for part in (unit.name, path) if part)
                leaves = _leaves(name, module, by_target, weights, store, choose_matrix)
                if leaves:
                    experts: int = module.num_experts
                    configs = (getattr(module, "config", None), model.config.get_text_config(decoder=True))
                    used = next(filter(None, map(picked_by, configs)), _USUAL)
                    nbytes = _lay_out(leaves)
                    source = ExpertSource(name, unit.name, module, experts, min(used, experts), leaves, nbytes)
                    sources.append(with_matrices(source, choose_matrix))
    return sources


def without_experts(unit: Unit, sources: Iterable[ExpertSource]) -> Unit:
    """A unit without the parameters that are streamed by expert."""
    streamed = {leaf.entry.target for source in sources if source.unit == unit.name for leaf in source.leaves.values()}
    return replace(unit, entries=tuple(entry for entry in unit.entries if entry.target not in streamed))


def is_routed(module: nn.Module) -> bool:
    """Whether a module computes by expert: through transformers' registry of experts kernels, or in the same way."""
    return all(hasattr(module, mark) for mark in ("is_transposed", "has_gate", "num_experts"))


def _leaves(
    name: str,
    module: nn.Module,
    by_target: Mapping[str, ParameterEntry],
    weights: WeightMap,
    store: WeightFiles,
    choose_matrix: MatrixChooser | None,
) -> dict[str, ExpertParameter]:
    """The parameters of shape (experts, ...) of a routed module; none if those of one cannot be made individually."""
    leaves: dict[str, ExpertParameter] = {}
    for key, parameter in module._parameters.items():
        if parameter is None or parameter.dim() < 3:
            continue
        entry = by_target.get(f"{name}.{key}")
        leaf = _leaf(entry, module.num_experts, weights, store.tensors) if entry is not None else None  # type: ignore[arg-type]
        if leaf is None:
            return {}
        leaves[key] = leaf
    if choose_matrix is None:
        return leaves
    coded = {key: _from_codes(leaf, choose_matrix) for key, leaf in leaves.items()}
    if any(leaf.rearranged for leaf in coded.values()):  # all are, or none
        coded = {key: _from_codes(leaf, choose_matrix, rearranged=True) for key, leaf in leaves.items()}
        return coded if all(leaf.rearranged for leaf in coded.values()) else leaves
    return coded


def _from_codes(leaf: ExpertParameter, choose_matrix: MatrixChooser, *, rearranged: bool = False) -> ExpertParameter:
    """A leaf; multiplied from its published codes if `choose_matrix` returns a type for them."""
    coded = _coded(leaf, rearranged)
    matrix_type = choose_matrix(coded.form, leaf.entry.dtype) if coded is not None else None
    return leaf if matrix_type is None else replace(leaf, matrix_type=matrix_type, coded=coded)


def _coded(leaf: ExpertParameter, rearranged: bool) -> CodedBlocks | None:
    """The blocks as codes and scales of one matrix, `rearranged` also where they need not be; None if there is
    something else, or another order of rows."""
    operations: Sequence[Any] = getattr(leaf.recipe.converter, "operations", ())
    if not operations or any(type(op).__name__ not in _STACKING or op.dim > 1 for op in operations[1:]):
        return None
    first, path = operations[0], leaf.entry.target.rpartition(".")[0]
    if (layout := integer_layout(first)) is not None:
        return _rearranged(leaf, layout)
    is_turned = type(first).__name__ == "QuickMxfp4"
    rows, columns = leaf.shape[::-1] if is_turned else leaf.shape
    forms, matrices, cast, power = list[CodedForm | None](), list[tuple[int, ...]](), None, 1
    for projection, indices in _by_projection(leaf.blocks).items():
        if len(indices) > 3 or indices.keys() - {FACTOR, DIVISOR, ZEROS} != {CODES, SCALES}:
            return None
        pair, power = (indices[CODES], indices[SCALES]), -1 if DIVISOR in indices else 1
        others = [index for role, index in indices.items() if role not in (CODES, SCALES)]
        codes, scales, *more = ((part.dtype, part.shape) for part in (leaf.blocks[i].payload for i in (*pair, *others)))
        zeros = more[0] if ZEROS in indices else None
        if zeros is None and any(leaf.blocks[index].payload.nbytes != 4 for index in others):  # a factor: one float32
            return None
        matrices.append((*pair, *others))
        module = f"{path}.0.{projection.rpartition('.')[2]}"
        cast = cast_of(first, scales[0], leaf.entry.dtype, is_expert=True)
        forms.append(form_of(first, module, codes, scales, (codes[1][0], columns), zeros))
    if not forms or forms[0] is None or sum(form.shape[0] for form in forms if form is not None) != rows:
        return None
    whole = replace(forms[0], shape=(rows, columns))
    if any(form is None or form.scheme != whole.scheme for form in forms) or len({*map(len, matrices)}) > 1:
        return None
    # one grid of scales for all: each matrix but the last has whole blocks
    step = whole.block[0] if len(forms) > 1 else 1
    if step and any(form is not None and form.shape[0] % step for form in forms[:-1]):
        return None
    if rearranged or cast is not None or len(matrices[0]) > 2 or not step:
        if not whole.has_zeros:
            whole = replace(whole, scales="F32", block=(whole.block[0] or 1, whole.block[1]))
        how = Rearranged(None, tuple(matrices), *_parts_of(whole), power, cast)
        return None if is_turned else CodedBlocks(whole, (), (), False, how)
    of_codes, of_scales = zip(*matrices, strict=True)
    return CodedBlocks(whole, of_codes, of_scales, is_turned)


def _rearranged(leaf: ExpertParameter, layout: IntegerLayout) -> CodedBlocks | None:
    """The blocks as one matrix of rearranged integers; None if there is something else."""
    (rows, columns), forms, matrices = leaf.shape, list[CodedForm | None](), list[tuple[int, ...]]()
    for indices in _by_projection(leaf.blocks).values():
        payloads = {role: leaf.blocks[index].payload for role, index in indices.items()}
        forms.append(integer_form({r: (part.dtype, part.shape) for r, part in payloads.items()}, layout, columns))
        matrices.append(tuple(indices[role] for role in INTEGER_PARTS if role in indices))
    if not forms or forms[0] is None or sum(form.shape[0] for form in forms if form is not None) != rows:
        return None
    if any(form is None or form.scheme != forms[0].scheme for form in forms):
        return None
    whole = replace(forms[0], shape=(rows, columns))
    order = _unstored("I64", (columns,)) if layout.in_any_order and len(matrices[0]) == len(INTEGER_PARTS) else None
    return CodedBlocks(whole, (), (), False, Rearranged(layout, tuple(matrices), *_parts_of(whole), order=order))


def _parts_of(form: CodedForm) -> tuple[ExpertPart, ExpertPart]:
    """The codes and the scales of a matrix that is in no file."""
    return _unstored("U8", (form.shape[0], form.row_bytes)), _unstored(form.scales, form.grid)


def _unstored(dtype: str, shape: tuple[int, ...]) -> ExpertPart:
    return ExpertPart(dtype, shape, byte_size(dtype, shape), 0, (), np.empty(0, np.int64))


def _by_projection(blocks: Sequence[Block]) -> dict[str, dict[str, int]]:
    """Projection -> the index of each part of its matrix, by role; empty if a block is something else."""
    roles: dict[str, dict[str, int]] = {}
    for index, block in enumerate(blocks):
        role, projection = role_of(block.pattern)
        if role is None or block.form is not None:
            return {}
        roles.setdefault(projection, {})[role] = index
    return roles


def _leaf(
    entry: ParameterEntry, experts: int, weights: WeightMap, tensors: Mapping[str, StoredTensor]
) -> ExpertParameter | None:
    recipe = weights.recipes.get(entry.target)
    if recipe is None or entry.shape[0] != experts:
        return None
    blocks = []
    for pattern, names in grouped(recipe.sources).items():
        block = _block(pattern, [tensors[name] for name in names], experts)
        if block is None:
            return None
        blocks.append(block)
    stacks = _stacks(recipe, entry, blocks)
    if stacks is None or len({block.sliced for block in blocks}) > 1:
        return None
    return ExpertParameter(entry, recipe, tuple(blocks), stacks)


def _stacks(recipe: Recipe, entry: ParameterEntry, blocks: Sequence[Block]) -> bool | None:
    """Whether the parameter is the stacked rows of the blocks; None if experts cannot be made individually."""
    if recipe.converter is None:
        return True
    only_rows = True
    for operation in recipe.converter.operations:
        name = type(operation).__name__
        if name == "Transpose":
            dims = (operation.dim0, operation.dim1)
            is_stacked = operation.check_dims and blocks[0].shape == tuple(entry.shape[1:])
            if min(dims) < 1 and not is_stacked:
                return None
            only_rows = only_rows and is_stacked
        elif name in _WITHIN_AN_EXPERT:
            if operation.dim < _WITHIN_AN_EXPERT[name] or (name == "MergeModulelist" and operation.dim):
                return None
            rows = name in _STACKING and operation.dim <= 1
            only_rows = only_rows and rows
        elif name in BY_MATRIX:
            only_rows = False
        elif name != _PLAIN_ALONE or len(blocks) > 1:
            return None
    if not only_rows:
        return False
    rows = sum(block.shape[0] for block in blocks)
    return (rows, *blocks[0].shape[1:]) == tuple(entry.shape[1:])


def _block(pattern: str, stored: Sequence[StoredTensor], experts: int) -> Block | None:
    first = stored[0]
    if not all(tensor.is_one_run for tensor in stored):
        return None
    if len(stored) == 1 and len(first.shape) >= 2 and first.shape[0] == experts and experts > 1:
        return _slices(pattern, first, experts)
    numbers = (_EXPERT.findall(tensor.name) for tensor in stored)
    if [int(digits[-1]) if digits else -1 for digits in numbers] != list(range(experts)):  # the last one in the name
        return None
    if any(_layout_of(tensor) != _layout_of(first) for tensor in stored):
        return None
    payload = _part([tensor.parts[0] for tensor in stored])
    if first.quantized is None or STORED[first.quantized.scheme].block_bytes:
        return Block(pattern, False, first.quantized, payload)
    tables = tuple(tensor.parts[2] for tensor in stored)
    scales, nesting = _part([tensor.parts[1] for tensor in stored]), _nesting(stored, first.parts[1].elements)
    return Block(pattern, False, first.quantized.codes, payload, scales, tables, nesting=nesting)


def _layout_of(stored: StoredTensor) -> tuple[str | None, Quantized | None, str, tuple[int, ...]]:
    """The scheme, form, dtype and shape of a stored tensor, without the mean of its scales."""
    form = stored.quantized
    if form is None:
        return None, None, stored.parts[0].dtype, stored.shape
    return form.scheme, form.codes, stored.parts[0].dtype, stored.shape


def _nesting(stored: Sequence[StoredTensor], blocks: int) -> QuantizedScales | None:
    """The nesting of quantized scales, `blocks` of each expert; None if the scales are not quantized."""
    offsets = [tensor.quantized.offset for tensor in stored if tensor.quantized is not None]
    if None in offsets:
        return None
    dequantized = ExpertPart("F32", (blocks,), blocks * SCALE_BYTES, 0, (), np.empty(0, np.int64))
    where, tables = zip(*(tensor.parts[3:5] for tensor in stored), strict=True)
    return QuantizedScales(dequantized, np.array(offsets, np.float32), where, tables)


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


def _lay_out(leaves: Mapping[str, ExpertParameter]) -> int:
    """Give every part its offset in an expert's memory; return the bytes of that memory.

    The payloads of a leaf that stacks, or is coded, are contiguous, and so are their scales: they form one matrix.
    These runs have the order of the first expert's file, so that one read covers as many as possible. What is
    rearranged is read to other memory of that size.
    """
    end = 0
    for part in [part for leaf in leaves.values() if leaf.rearranged is not None for part in leaf.rearranged.parts]:
        part.at = round_up(end, TENSOR_ALIGNMENT)
        end = part.at + part.nbytes
    runs, rearranged_bytes = list[list[ExpertPart]](), end
    for leaf in leaves.values():
        if leaf.coded is not None and leaf.rearranged is None:
            runs += leaf.coded_parts
        elif leaf.stacks:
            runs.append([block.payload for block in leaf.blocks])
            runs.append([block.scales for block in leaf.blocks if block.scales is not None])
        else:
            runs += [[part] for part in leaf.parts]
    runs = sorted(filter(None, runs), key=lambda run: (run[0].file(0), int(run[0].offsets[0])))
    for leaf in leaves.values():  # made from the bytes that are read, and written after them
        runs.append([block.nesting.dequantized for block in leaf.blocks if block.nesting is not None])
    end = 0
    for run in filter(None, runs):
        end = round_up(end, TENSOR_ALIGNMENT)
        places = {int(offset) % SECTOR for offset in run[0].offsets}
        if len(places) == 1 and not min(places) % TENSOR_ALIGNMENT:  # then they are read to their place
            end += (min(places) - end) % SECTOR
        for part in run:
            part.at = end
            end += part.nbytes
    return round_up(max(end, rearranged_bytes), BLOCK)
