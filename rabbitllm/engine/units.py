"""Units: the modules whose weights are bound and unbound together, and how their stored bytes become parameters.

A unit is a decoder layer (the outermost layer of a stack), or any other module that owns parameters itself: the
embedding, the norm, the head; torch's own attention is one unit as a whole. A table that only some of whose rows are
used is a unit of its own, also inside a layer. Binding writes into the module's own
parameter table, which takes less than a microsecond for each tensor; every public way takes 50 to 200 times longer.

All this is decided once, when the model is built; a pass only reads the bytes and makes the parameters.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rabbitllm.engine.span_reader import BLOCK, FileSpan
from rabbitllm.engine.weight_tensors import AbsentWeight, QuantizedWeight, StoredMatrix
from rabbitllm.engine.weights import Recipe, WeightMap
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, torch_dtype
from rabbitllm.quant.quantize import dequantize, expanded_bytes, operands
from rabbitllm.quant.schemes import Quantized
from rabbitllm.quant.stored_blocks import arranged
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT
from rabbitllm.store.layer_store import StoredTensor, WeightFiles


@dataclass(frozen=True)
class Place:
    """One entry of a module's table of parameters or persistent buffers.

    Attributes:
        table: the module's `_parameters` or `_buffers`.
        leaf: the key in it.
        target: the full name in the model.
        shape, dtype: of the tensor.
        is_linear_weight: whether it is only used by `torch.nn.functional.linear`.
        marks: attributes that a quantizer sets on its own type of parameter, and peft reads.
    """

    table: MutableMapping[str, Any]
    leaf: str
    target: str
    shape: torch.Size
    dtype: torch.dtype
    is_linear_weight: bool = False
    marks: Mapping[str, object] = field(default_factory=dict)

    def bind(self, tensor: torch.Tensor) -> None:
        """Set the entry to a tensor or a placeholder; see `bindable`."""
        self.table[self.leaf] = self.bindable(tensor)

    def bindable(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as it is bound: as a parameter if the table is one of parameters.

        It requires a gradient, as a parameter of an ordinary model does, because torch.matmul folds its operands
        differently if one does, which changes the rounding. A tensor that is a parameter already is of a quantizer's
        own type, with its scales as attributes.
        """
        if isinstance(tensor, nn.Parameter) or not self._is_parameter:
            return tensor
        needs = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        return nn.Parameter(tensor, requires_grad=needs)

    def placeholder(
        self,
        device: torch.device,
        bring: Callable[[Place], torch.Tensor],
        look_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> AbsentWeight:
        """A placeholder of the weight's device, dtype and shape, without memory and values.

        Args:
            device: the device of the weight.
            bring: called for the weight, in the form of `bindable`, when its values are read.
            look_up: of a table: distinct rising ids -> their rows.
        """
        made = AbsentWeight(lambda: bring(self), self.shape, self.dtype, device, is_parameter=self._is_parameter)
        made.__dict__.update(self.marks)
        made.look_up = look_up
        return made

    @property
    def _is_parameter(self) -> bool:
        return isinstance(self.table[self.leaf], nn.Parameter)


@dataclass(frozen=True)
class Unit:
    """A module whose weights are bound and unbound together.

    Attributes:
        name: its path in the model.
        module: the module.
        places: its parameters and persistent buffers, nested ones included for a layer and for torch's attention.
        is_layer: whether it is a layer of a stack.
        holds_units: whether other units are inside it; its own weights then stay bound.
    """

    name: str
    module: nn.Module
    places: tuple[Place, ...]
    is_layer: bool
    holds_units: bool


def find_units(model: PreTrainedModel) -> list[Unit]:
    """The units of a model, in the order of its modules, which is nearly always the order of a pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    kinds = set(model._no_split_modules or ())
    apart = {id(table) for table in find_tables(model)}
    units: list[Unit] = []
    lists: set[str] = set()
    inside = ""
    for name, module in model.named_modules():  # a module comes directly before the modules in it
        if inside and name.startswith(inside):
            continue
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            lists.add(name)
        # the outermost modules in a list that transformers treats as layers
        is_known = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in kinds
        is_layer = is_known and name.rpartition(".")[0] in lists
        # torch's own attention reads its output matrix, and uses another kernel if that is not a plain tensor
        is_whole = is_layer or isinstance(module, nn.MultiheadAttention)
        inside = f"{name}." if is_whole else ""
        places = tuple(_places(module, name, recurse=is_whole, but=apart - {id(module)}))
        if places:
            holds = not is_whole and any(True for child in module.children() if _owns_weights(child))
            units.append(Unit(name, module, places, is_layer, holds))
        if is_whole:
            for within, table in module.named_modules():
                if id(table) in apart and table is not module:
                    path = f"{name}.{within}"
                    units.append(Unit(path, table, tuple(_places(table, path, recurse=False)), False, False))
    return units


def find_tables(model: PreTrainedModel) -> list[nn.Module]:
    """Modules of whose weight a pass uses a few rows: the input embedding, and larger embeddings.

    These are per-layer embeddings (Gemma 3n and 4) and n-gram tables (Qwen4-Exp). Smaller ones, such as positions, are
    not worth it.
    """
    first = input_embedding(model)
    if not isinstance(first, nn.Embedding):
        return [first] if first is not None else []
    least = first.weight.numel()
    found: list[nn.Module] = [first]
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not first and module.weight.numel() > least:
            found.append(module)
    return found


def input_embedding(model: PreTrainedModel) -> nn.Module | None:
    """The module that turns token ids into vectors; None if the model names none (some models for pictures)."""
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return found


def _owns_weights(module: nn.Module) -> bool:
    return any(True for _ in _places(module, "", recurse=True))


def _places(module: nn.Module, path: str, *, recurse: bool, but: Container[int] = ()) -> Iterator[Place]:
    """The places of a module, and with `recurse` of those in it, except modules of these ids."""
    owners = module.named_modules() if recurse else [("", module)]
    for inner, owner in owners:
        if id(owner) in but:
            continue
        prefix = ".".join(part for part in (path, inner) if part)
        tables: tuple[MutableMapping[str, Any], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for leaf, tensor in table.items():
                if tensor is not None and leaf not in owner._non_persistent_buffers_set:
                    yield _place(owner, table, leaf, prefix, tensor)


def _place(owner: nn.Module, table: MutableMapping[str, Any], leaf: str, prefix: str, tensor: torch.Tensor) -> Place:
    multiplied = leaf == "weight" and type(owner).forward is nn.Linear.forward
    marks = {key: value for key, value in vars(tensor).items() if isinstance(value, bool | int | str)}
    return Place(table, leaf, f"{prefix}.{leaf}" if prefix else leaf, tensor.shape, tensor.dtype, multiplied, marks)


PartReader = Callable[[TensorSpec], torch.Tensor]
"""A stored part -> its tensor, on the device where the unit is made."""

_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})
"""Dtypes of plain values; tensors of any other dtype hold codes."""

Memo = MutableMapping[str, dict[str, torch.Tensor]]
"""Recipe key -> target -> tensor, of recipes whose tensors stay bound."""


Packs = Callable[[Quantized, torch.dtype], type[StoredMatrix] | None]
"""Quantized form, dtype of the inputs -> the type that multiplies from codes, or None to dequantize the matrix."""


@dataclass(frozen=True)
class UnitJob:
    """A recipe and the parameters of the unit that it makes.

    Attributes:
        recipe: makes the parameters.
        places: (target of the recipe, parameter).
        packed: parameters that get the recipe's one stored tensor in quantized form, as a matrix of this type.
    """

    recipe: Recipe
    places: tuple[tuple[str, Place], ...]
    packed: tuple[tuple[type[StoredMatrix], Place], ...] = ()


@dataclass(frozen=True)
class UnitSource:
    """A unit and the stored bytes of its parameters, as decided when the model is built.

    Attributes:
        unit: the module and its parameters.
        jobs: make the parameters.
        stored: the tensors that they need, by name.
        spans: the runs of bytes to read into one buffer, in file order.
        buffer_bytes: length of that buffer.
        ready_bytes: of the parameters when ready to use.
        is_view: whether the parameters are views of the stored bytes: nothing is compressed, cast or fused.
    """

    unit: Unit
    jobs: tuple[UnitJob, ...]
    stored: Mapping[str, StoredTensor]
    spans: tuple[FileSpan, ...]
    buffer_bytes: int
    ready_bytes: int
    is_view: bool

    @property
    def dequantizes(self) -> bool:
        """Whether some of its tensors are codes: compressed here, or published so."""
        return any(
            tensor.quantized is not None or any(part.dtype not in _PLAIN for part in tensor.parts)
            for tensor in self.stored.values()
        )

    @property
    def places(self) -> Iterator[Place]:
        """Its parameters, as entries of modules' tables."""
        for job in self.jobs:
            yield from (place for _, place in job.places)
            yield from (place for _, place in job.packed)

    def bytes_of(self, job: UnitJob) -> tuple[int, int]:
        """Bytes of a job's tensors: stored, and ready to use."""
        names = [name for _, name in job.recipe.sources]
        stored = sum(self.stored[name].nbytes for name in names)
        made = 0 if job.recipe.wraps else sum(place.shape.numel() * place.dtype.itemsize for _, place in job.places)
        return stored, made + (stored if job.packed or job.recipe.wraps else 0)

    def of_jobs(self, jobs: Iterable[UnitJob]) -> UnitSource:
        """The part of it that some of its jobs make."""
        return _of_jobs(self.unit, tuple(jobs), self.stored)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its tensors on disk."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales that are dequantized before codes are multiplied."""
        packed = {job.recipe.sources[0][1] for job in self.jobs if job.packed}
        return sum(expanded_bytes(form) for name in packed if (form := self.stored[name].quantized) is not None)

    def make(
        self,
        model: PreTrainedModel,
        part: PartReader,
        memo: Memo | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """Make the parameters and bind them."""
        for place, tensor in self.made(model, part, memo, apart=apart):
            place.bind(tensor)

    def made(
        self,
        model: PreTrainedModel,
        part: PartReader,
        memo: Memo | None = None,
        *,
        apart: bool = False,
        only: str | None = None,
    ) -> Iterator[tuple[Place, torch.Tensor]]:
        """Make the parameters: the table entry and the tensor of each.

        Args:
            model: the skeleton, for conversions.
            part: provides the stored parts.
            memo: recipe key -> its tensors; filled, and used by tied units that stay bound.
            apart: copy tensors that would be views of stored parts, so that these can be freed.
            only: the only target to make; None for all.
        """
        for job in self.jobs:
            for kind, place in job.packed:
                if only in (None, place.target):
                    yield place, self._packed(kind, job.recipe, part)
            wanted = [(target, place) for target, place in job.places if only in (None, place.target)]
            if not wanted:
                continue
            made = memo.get(job.recipe.key) if memo is not None else None
            if made is None:
                made = job.recipe.make(model, lambda name, dtype: self._checkpoint_tensor(name, dtype, part, apart))
                if memo is not None:
                    memo[job.recipe.key] = made
            for target, place in wanted:
                yield place, made[target]

    def _packed(self, kind: type[StoredMatrix], recipe: Recipe, part: PartReader) -> QuantizedWeight:
        stored = self.stored[recipe.sources[0][1]]
        assert stored.quantized is not None
        assert recipe.dtype is not None
        return QuantizedWeight(kind(*operands(stored.quantized, stored.parts, part)), recipe.dtype)

    def _checkpoint_tensor(self, name: str, dtype: torch.dtype | None, part: PartReader, apart: bool) -> torch.Tensor:
        tensor = self.stored[name]
        if tensor.quantized is not None:
            assert dtype is not None
            return dequantize(*operands(tensor.quantized, tensor.parts, part), dtype)
        plain = part(tensor.parts[0])
        wanted = dtype if dtype is not None and plain.is_floating_point() else plain.dtype
        return plain.to(wanted, copy=apart)

    def part_of(self, buffer: torch.Tensor) -> PartReader:
        """A reader of parts that are views of a buffer that `read` filled (or a device copy of it)."""
        begins = [(span.file, span.offset) for span in self.spans]

        def read(spec: TensorSpec) -> torch.Tensor:
            span = self.spans[bisect.bisect_right(begins, (spec.file, spec.offset)) - 1]
            begin = span.at + spec.offset - span.offset
            return typed(buffer[begin : begin + spec.extent], spec)

        return read


def typed(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Bytes as in the file, uint8 (extent,), as a tensor of the spec's dtype and shape.

    They are copied if they are rearranged, or not aligned to 64 bytes: kernels round differently on weights that are
    aligned to less than 16 bytes. Codes on a CPU are read byte by byte, and need no copy.
    """
    dtype = torch_dtype(spec.dtype)
    is_code = spec.dtype == "U8" and flat.device.type == "cpu"
    if flat.data_ptr() % TENSOR_ALIGNMENT and not is_code:
        flat = flat.clone()
    if not spec.is_one_run:
        return arranged(flat, spec)
    shape = spec.shape if DTYPES[spec.dtype].bits >= 8 else (*spec.shape[:-1], spec.shape[-1] // 2)
    return flat.view(dtype).view(shape)


def mapped_part(store: WeightFiles) -> PartReader:
    """A reader of parts that are views of the mapped layer files."""

    def read(spec: TensorSpec) -> torch.Tensor:
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        return typed(torch.frombuffer(store.mapped(spec.file).bytes_of(spec), dtype=torch.uint8), spec)

    return read


def source_of(unit: Unit, weights: WeightMap, store: WeightFiles, packs: Packs | None = None) -> UnitSource:
    """The source of a unit."""
    by_key: dict[str, tuple[Recipe, list[tuple[str, Place]], list[tuple[type[StoredMatrix], Place]]]] = {}
    for place in unit.places:
        recipe = weights.recipe(place.target)
        if recipe is None:
            continue  # absent, which the model allows: it has its initial value
        made_as = place.target if place.target in recipe.targets else weights.ties[place.target]
        _, made, packed = by_key.setdefault(recipe.key, (recipe, [], []))
        kind = _kind(place, recipe, store.tensors, packs) if packs is not None else None
        if kind is not None:
            packed.append((kind, place))
        else:
            made.append((made_as, place))
    jobs = tuple(UnitJob(recipe, tuple(made), tuple(packed)) for recipe, made, packed in by_key.values())
    return _of_jobs(unit, jobs, store.tensors)


def _of_jobs(unit: Unit, jobs: tuple[UnitJob, ...], tensors: Mapping[str, StoredTensor]) -> UnitSource:
    stored = {name: tensors[name] for job in jobs for _, name in job.recipe.sources}
    spans = _spans(stored)
    size = spans[-1].end if spans else 0
    is_view = all(_is_view(job.recipe, stored) for job in jobs if job.places)
    source = UnitSource(unit, jobs, stored, spans, size, 0, is_view)
    ready = sum(source.bytes_of(job)[1] for job in jobs)
    return replace(source, ready_bytes=ready + source.scale_bytes)


def _kind(place: Place, recipe: Recipe, tensors: Mapping[str, StoredTensor], packs: Packs) -> type[StoredMatrix] | None:
    form = tensors[recipe.sources[0][1]].quantized
    if not place.is_linear_weight or recipe.converter is not None or form is None or recipe.dtype is None:
        return None
    return packs(form.codes, recipe.dtype)


def _is_view(recipe: Recipe, stored: Mapping[str, StoredTensor]) -> bool:
    if recipe.converter is not None:
        return recipe.wraps
    tensor = stored[recipe.sources[0][1]]
    if tensor.quantized is not None or not tensor.parts[0].is_one_run:
        return False
    dtype = torch_dtype(tensor.parts[0].dtype)
    return dtype == recipe.dtype or not dtype.is_floating_point


def _spans(stored: Mapping[str, StoredTensor]) -> tuple[FileSpan, ...]:
    """Runs of contiguous parts, in file order, in one buffer, where each run has blocks of its own.

    If several begin at one offset, as weights that share a storage do, the longest comes last.
    """
    parts = sorted((part.file, part.offset, part.extent) for tensor in stored.values() for part in tensor.parts)
    spans: list[FileSpan] = []
    end = 0
    for file, run in itertools.groupby(((f, o, n) for f, o, n in parts if n), key=operator.itemgetter(0)):
        runs: list[list[int]] = []
        for _, offset, nbytes in run:
            if runs and sum(runs[-1]) == offset:
                runs[-1][1] += nbytes
            else:
                runs.append([offset, nbytes])
        for offset, nbytes in runs:
            spans.append(FileSpan(file, offset, nbytes, end + offset % BLOCK))
            end = spans[-1].end
    return tuple(spans)
