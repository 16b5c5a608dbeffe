"""Units: modules whose weights are bound and unbound together, and the conversion of stored bytes to their parameters.

A unit is a decoder layer (the outermost layer of a stack), or any other module that owns parameters itself: the
embedding, the norm, the head. torch's own attention is bound whole. A table of which a pass uses some rows is a unit,
also inside a layer. Binding writes into the module's parameter table, which takes less than a microsecond for each
tensor; public APIs are 50 to 200 times slower.

All this is decided once, when the model is built. A pass only reads the bytes and makes the parameters.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from rabbitllm.engine import _published
from rabbitllm.engine._siblings import LastCall, Sibling, is_installed
from rabbitllm.engine._weights import Recipe, WeightMap
from rabbitllm.engine.published_codes import CodedRecipe, linear_recipe
from rabbitllm.engine.span_reader import BLOCK, FileSpan
from rabbitllm.engine.weight_tensors import AbsentWeight, Multiply, QuantizedWeight, StoredMatrix, read_only
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, torch_dtype
from rabbitllm.quant.coded import CodedForm, CodedMatrix
from rabbitllm.quant.products import FusedMatrix, Matrix
from rabbitllm.quant.quantize import dequantize, dequantizing_bytes, operands
from rabbitllm.quant.schemes import STORED, PartRole, Quantized
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT
from rabbitllm.store.layer_store import StoredTensor, WeightFiles
from rabbitllm.store.tensor_values import arranged


@dataclass(frozen=True)
class ParameterEntry:
    """One entry of a module's table of parameters or persistent buffers.

    Attributes:
        table: the module's `_parameters` or `_buffers`.
        leaf: the key in it.
        target: the full name in the model.
        shape, dtype: of the tensor.
        is_linear_weight: whether it is only used by `torch.nn.functional.linear`.
        marks: attributes that a quantizer sets on its own type of parameter, and peft reads.
        sibling: multiplies a Linear's weight, together with others that have the same input.
    """

    table: MutableMapping[str, Any]
    leaf: str
    target: str
    shape: torch.Size
    dtype: torch.dtype
    is_linear_weight: bool = False
    marks: Mapping[str, object] = field(default_factory=dict)
    sibling: Sibling | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def bind(self, tensor: torch.Tensor) -> None:
        """Set the entry to a tensor; see `bindable`."""
        self.set(self.bindable(tensor))

    def set(self, bindable: torch.Tensor) -> None:
        """Set the entry to a placeholder, or to a result of `bindable`."""
        self.table[self.leaf] = bindable

    def check_absent(self) -> None:
        """
        Raises:
            ReadOnlyWeightError: another weight was set in place of the placeholder; binding would lose it.
        """
        absent = self.table.get(self.leaf)
        if not isinstance(absent, AbsentWeight) or absent.target not in (None, self.target):
            raise read_only(f"{self.target} was replaced, but is read from the disk when its layer computes")

    def bindable(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as it is bound: as a parameter if the table is one of parameters.

        It requires a gradient, like a parameter of an ordinary model: else torch.matmul folds its operands differently,
        which changes the rounding. A tensor that is a parameter already is of a quantizer's type, with its scales as
        attributes.
        """
        if isinstance(tensor, nn.Parameter) or not isinstance(self.table[self.leaf], nn.Parameter):
            return tensor
        needs = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        return nn.Parameter(tensor, requires_grad=needs)

    def placeholder(
        self,
        device: torch.device,
        read: Callable[[ParameterEntry], torch.Tensor],
        look_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
        by_pieces: Multiply | None = None,
    ) -> AbsentWeight:
        """A placeholder with the weight's device, dtype and shape, without memory and values.

        Args:
            device: the device of the weight.
            read: returns the weight, in the form of `bindable`; called when its values are read.
            look_up: of a table: distinct rising ids -> their rows.
            by_pieces: of a matrix that is read in pieces: multiplies with it.
        """
        is_parameter, form = isinstance(self.table[self.leaf], nn.Parameter), (self.shape, self.dtype, device)
        weight = AbsentWeight(lambda: read(self), *form, is_parameter=is_parameter, marks=self.marks)
        weight.look_up, weight.by_pieces, weight.target = look_up, by_pieces, self.target
        return weight


@dataclass(frozen=True)
class Unit:
    """A module whose weights are bound and unbound together.

    Attributes:
        name: its path in the model.
        module: the module.
        entries: its parameters and persistent buffers, nested ones included for a layer and for torch's attention.
        is_layer: whether it is a layer of a stack.
        holds_units: whether other units are inside it; its own weights then stay bound.
    """

    name: str
    module: nn.Module
    entries: tuple[ParameterEntry, ...]
    is_layer: bool
    holds_units: bool


def find_units(model: PreTrainedModel) -> list[Unit]:
    """The units of a model, in the order of its modules, which is nearly always the order of a pass."""
    from transformers import GradientCheckpointingLayer

    from rabbitllm.engine.transformers_api import layer_class_names

    kinds = layer_class_names(model)
    apart = {id(table) for table in find_tables(model)}
    units: list[Unit] = []
    lists: set[str] = set()
    inside, last_call = "", LastCall()
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
        entries = tuple(_entries(module, name, last_call, recurse=is_whole, but=apart - {id(module)}))
        if entries:
            inner = (next(_entries(child, "", last_call, recurse=True), None) for child in module.children())
            units.append(Unit(name, module, entries, is_layer, not is_whole and any(inner)))
        if is_whole:
            for within, table in module.named_modules():
                if id(table) in apart and table is not module:
                    path = f"{name}.{within}"
                    units.append(
                        Unit(path, table, tuple(_entries(table, path, last_call, recurse=False)), False, False)
                    )
    return units


def find_tables(model: PreTrainedModel) -> list[nn.Module]:
    """Modules of whose weight a pass uses a few rows: the input embedding, and larger embeddings.

    The larger ones are per-layer embeddings (Gemma 3n and 4) and n-gram tables (Qwen4-Exp).
    """
    first = input_embedding(model)
    if not isinstance(first, nn.Embedding):
        return [first] if first is not None else []
    size = first.weight.numel()
    return [first, *(m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.numel() > size)]


def input_embedding(model: PreTrainedModel) -> nn.Module | None:
    """The module that embeds token ids; None if the model names none (some models for pictures)."""
    try:
        embedding: nn.Module | None = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return embedding


def _entries(
    module: nn.Module, path: str, last_call: LastCall, *, recurse: bool, but: Container[int] = ()
) -> Iterator[ParameterEntry]:
    """The entries of a module, and with `recurse` of those in it, except modules of these ids."""
    owners = module.named_modules() if recurse else [("", module)]
    for inner, owner in owners:
        if id(owner) in but:
            continue
        prefix = ".".join(part for part in (path, inner) if part)
        tables: tuple[MutableMapping[str, Any], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for leaf, tensor in table.items():
                if tensor is None or leaf in owner._non_persistent_buffers_set:
                    continue
                target = f"{prefix}.{leaf}" if prefix else leaf
                multiplied = leaf == "weight" and _is_linear(owner)
                marks = {key: value for key, value in vars(tensor).items() if isinstance(value, bool | int | str)}
                sibling = Sibling(owner, last_call) if multiplied else None
                yield ParameterEntry(table, leaf, target, tensor.shape, tensor.dtype, multiplied, marks, sibling)


def _is_linear(module: nn.Module) -> bool:
    """Whether a module uses its weight in `torch.nn.functional.linear` alone."""
    forward = vars(module).get("forward")
    activated = getattr(forward, "func", None) is _published.linear_with_activations
    is_known = forward is None or activated or is_installed(module)
    return is_known and type(module).forward is nn.Linear.forward


PartReader = Callable[[TensorSpec], torch.Tensor]
"""A stored part -> its tensor, on the device where the unit is made."""

GPU_ALIGNMENT = 16
"""Alignment below which kernels of a GPU round differently."""
_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})
"""Dtypes of values; tensors of other dtypes have codes."""

TensorsByRecipe = MutableMapping[str, dict[str, torch.Tensor]]
"""Recipe key -> target -> tensor, of recipes whose tensors stay bound."""

MatrixChooser = Callable[[Quantized | CodedForm, torch.dtype], type[StoredMatrix] | None]
"""Quantized form, dtype of the inputs -> class of the quantized product, or None to dequantize the matrix."""


FromCodes: TypeAlias = type[Matrix] | type[FusedMatrix] | CodedRecipe
"""The class of the product of a recipe's only stored tensor, or the parts of a published matrix."""


@dataclass(frozen=True)
class UnitJob:
    """A recipe and the parameters of the unit that it makes.

    Attributes:
        recipe: makes the parameters.
        entries: (target of the recipe, parameter).
        quantized: (how, parameter) of those that are multiplied from their codes.
        coded_bytes: of the codes and scales that are rearranged for these.
        is_view: whether the parameters in `entries` are views of the stored bytes.
        stored_bytes, ready_bytes: of its tensors: stored, and ready to use.
    """

    recipe: Recipe
    entries: tuple[tuple[str, ParameterEntry], ...]
    quantized: tuple[tuple[FromCodes, ParameterEntry], ...]
    coded_bytes: int
    is_view: bool
    stored_bytes: int
    ready_bytes: int


@dataclass(frozen=True)
class UnitSource:
    """A unit and the stored bytes of its parameters, as decided when the model is built.

    Attributes:
        unit: the module and its parameters.
        jobs: make the parameters.
        stored: the tensors that they need, by name.
        spans: the runs of bytes to read into one buffer, in file order.
        is_view: whether the parameters are views of the stored bytes: nothing is compressed, cast, fused or rearranged.
        ready_bytes: of the parameters when ready to use.
        scale_bytes: of the scales that are dequantized before codes are multiplied.
        scratch_bytes: what each use takes besides the stored bytes: parameters made for it, and the work of one of
            them.
        pieces: runs of its rows, if it is streamed and multiplied in these, one after another; see `_pieces.py`.
    """

    unit: Unit
    jobs: tuple[UnitJob, ...]
    stored: Mapping[str, StoredTensor]
    spans: tuple[FileSpan, ...]
    is_view: bool
    ready_bytes: int
    scale_bytes: int
    scratch_bytes: int
    pieces: tuple[UnitSource, ...] = ()

    @property
    def buffer_bytes(self) -> int:
        """Length of the buffer that `spans` are read into."""
        return self.spans[-1].end if self.spans else 0

    @property
    def reads(self) -> dict[str, UnitSource]:
        """What is read into one buffer each, by name: itself, or its pieces."""
        return {f"{self.unit.name}[{i}]": piece for i, piece in enumerate(self.pieces)} or {self.unit.name: self}

    @property
    def slot_bytes(self) -> int:
        """Bytes of a buffer that it is streamed through."""
        return max(source.buffer_bytes for source in self.reads.values())

    @property
    def dequantizes(self) -> bool:
        """Whether some of its tensors are codes: compressed here, or published quantized."""
        return any(
            tensor.quantized is not None or any(part.dtype not in _PLAIN for part in tensor.parts)
            for tensor in self.stored.values()
        )

    @property
    def entries(self) -> Iterator[ParameterEntry]:
        """Its parameters, as entries of modules' tables."""
        for job in self.jobs:
            yield from (entry for _, entry in (*job.entries, *job.quantized))

    @property
    def stored_bytes(self) -> int:
        """Bytes of its tensors on disk."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    def are_views(self, device: torch.device) -> bool:
        """Whether its parameters only refer to the bytes of a buffer on a device, whichever bytes these are.

        Then they can be bound again once the buffer is filled again.
        """
        is_made = any(job.recipe.converter is not None or (job.entries and not job.is_view) for job in self.jobs)
        return not (is_made or self.scale_bytes) and all(
            part.is_one_run and _is_aligned(part, self._position(part), device)
            for part in itertools.chain(*map(_operands, self.stored.values()))
            if part.nbytes
        )

    def bind(self, model: PreTrainedModel, part: PartReader) -> list[tuple[ParameterEntry, torch.Tensor]]:
        """Make the parameters, bind them, and return them as they are bound; see `ParameterEntry.set`."""
        bound = []
        for entry, tensor in self.parameters(model, part):
            bindable = entry.bindable(tensor)
            entry.set(bindable)
            bound.append((entry, bindable))
        return bound

    def parameters(
        self,
        model: PreTrainedModel,
        part: PartReader,
        memo: TensorsByRecipe | None = None,
        *,
        copies: bool = False,
        only: str | None = None,
    ) -> Iterator[tuple[ParameterEntry, torch.Tensor]]:
        """Make the parameters: the table entry and the tensor of each.

        Args:
            model: the skeleton, for conversions.
            part: provides the stored parts.
            memo: recipe key -> its tensors; filled, and used by tied units that stay bound.
            copies: copy tensors that would be views of stored parts, so that these can be freed.
            only: the only target to make; None for all.
        """

        def read(name: str, dtype: torch.dtype | None) -> torch.Tensor:
            tensor = self.stored[name]
            if tensor.quantized is not None:
                assert dtype is not None
                return dequantize(*operands(tensor.quantized, tensor.parts, part), dtype)
            plain = part(tensor.parts[0])
            return plain.to(dtype if dtype is not None and plain.is_floating_point() else plain.dtype, copy=copies)

        for job in self.jobs:
            for form, entry in job.quantized:
                if only in (None, entry.target):
                    yield entry, self._quantized(form, job.recipe, entry, part)
            entries = [(target, entry) for target, entry in job.entries if only in (None, entry.target)]
            if not entries:
                continue
            tensors = memo.get(job.recipe.key) if memo is not None else None
            if tensors is None:
                tensors = job.recipe.make(model, read)
                if memo is not None:
                    memo[job.recipe.key] = tensors
            for target, entry in entries:
                yield entry, tensors[target]

    def _quantized(self, form: FromCodes, recipe: Recipe, entry: ParameterEntry, part: PartReader) -> QuantizedWeight:
        if isinstance(form, CodedRecipe):
            matrix = form.matrix(lambda name: part(self.stored[name].parts[0]), entry.target)
            return QuantizedWeight(matrix, entry.dtype, entry.sibling)
        stored = self.stored[recipe.sources[0][1]]
        assert stored.quantized is not None
        assert recipe.dtype is not None
        return QuantizedWeight(form.of(stored.quantized, stored.parts, part), recipe.dtype, entry.sibling)

    def part_of(self, buffer: torch.Tensor) -> PartReader:
        """A reader of parts as views of a buffer that was filled with `spans`, or of a copy of it on a device."""

        def read(spec: TensorSpec) -> torch.Tensor:
            if not spec.nbytes:  # it is in no span
                return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=buffer.device)
            begin = self._position(spec)
            return typed(buffer[begin : begin + spec.extent], spec)

        return read

    def _position(self, spec: TensorSpec) -> int:
        """The first byte of a stored part in a buffer that `spans` are read into."""
        index = bisect.bisect_right(self.spans, (spec.file, spec.offset), key=lambda span: (span.file, span.offset))
        span = self.spans[index - 1]
        return span.at + spec.offset - span.offset


def _operands(tensor: StoredTensor) -> Iterator[TensorSpec]:
    """The stored parts that products take; the others say what a tensor is, and are read when a model is loaded."""
    if tensor.quantized is None:
        yield from tensor.parts
        return
    for part, (*_, role) in zip(tensor.parts, STORED[tensor.quantized.scheme].parts, strict=False):  # GGUF has no kind
        if role not in (PartRole.STATE, PartRole.KIND):
            yield part


_form_of = operator.attrgetter("shape", "dtype", "requires_grad")


class BufferViews:
    """Binds a unit that is read into one of a few buffers; what only refers to a buffer is made once for each."""

    def __init__(self, source: UnitSource, model: PreTrainedModel, device: torch.device) -> None:
        self._source, self._model, self._are_views = source, model, source.are_views(device)
        self._kept: dict[int, tuple[list[tuple[ParameterEntry, torch.Tensor]], list[object]]] = {}  # by address

    def bind(self, buffer: torch.Tensor) -> None:
        """Bind the unit whose bytes are in a buffer."""
        bound, forms = self._kept.get(buffer.data_ptr(), ([], []))
        # a program may have given one other `data`, or an attribute that says what it did to the values
        if bound and _forms(bound) == forms:
            for entry, tensor in bound:
                entry.set(tensor)
            return
        bound = self._source.bind(self._model, self._source.part_of(buffer))
        if self._are_views:
            self._kept[buffer.data_ptr()] = bound, _forms(bound)


def _forms(bound: Iterable[tuple[ParameterEntry, torch.Tensor]]) -> list[object]:
    """What a change of a plain tensor changes; quantized ones refuse to be changed."""
    plain, own = [tensor for _, tensor in bound if not isinstance(tensor, QuantizedWeight)], torch.Tensor
    places = map(own.data_ptr, plain), map(own.stride, plain), map(_form_of, plain)
    return [*itertools.chain(*places, map(len, map(vars, plain)))]


def typed(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Bytes as in the file, uint8 (extent,), as a tensor of the spec's dtype and shape.

    They are copied if they have to be rearranged, or are not aligned: on a CPU to 64 bytes, as torch allocates, on a
    GPU to 16, as GGUF files are; kernels round differently below that. Codes on a CPU are read by bytes and need none.
    """
    dtype = torch_dtype(spec.dtype)
    if not _is_aligned(spec, flat.data_ptr(), flat.device):
        flat = flat.clone()
    if not spec.is_one_run:
        return arranged(flat, spec)
    shape = spec.shape if DTYPES[spec.dtype].bits >= 8 else (*spec.shape[:-1], spec.shape[-1] // 2)
    values = flat if flat.dtype is dtype else flat.view(dtype)
    return values if values.shape == shape else values.view(shape)


def _is_aligned(spec: TensorSpec, address: int, device: torch.device) -> bool:
    on_cpu = device.type == "cpu"
    return not address % (TENSOR_ALIGNMENT if on_cpu else GPU_ALIGNMENT) or (on_cpu and spec.dtype == "U8")


def mapped_part(store: WeightFiles) -> PartReader:
    """A reader of parts as views of the mapped files."""

    def read(spec: TensorSpec) -> torch.Tensor:
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="cpu")
        return typed(torch.frombuffer(store.mapped(spec.file).bytes_of(spec), dtype=torch.uint8), spec)

    return read


def source_of(
    unit: Unit, weights: WeightMap, store: WeightFiles, choose_matrix: MatrixChooser | None = None
) -> UnitSource:
    """The source of a unit; see `multiplied` for `choose_matrix`."""
    by_key: dict[str, tuple[Recipe, list[tuple[str, ParameterEntry]]]] = {}
    for entry in unit.entries:
        if (made := weights.recipe(entry.target)) is not None:
            recipe, target = made
            by_key.setdefault(recipe.key, (recipe, []))[1].append((target, entry))
        # else the checkpoint lacks it and the model allows that: it has its initial value
    return of_jobs(unit, (_job(*made, (), store.tensors, choose_matrix) for made in by_key.values()), store.tensors)


def multiplied(source: UnitSource, choose_matrix: MatrixChooser) -> UnitSource:
    """A source; its matrices are multiplied in quantized form if `choose_matrix` returns a type for them."""
    jobs = (_job(job.recipe, job.entries, job.quantized, source.stored, choose_matrix) for job in source.jobs)
    return of_jobs(source.unit, jobs, source.stored)


def _job(
    recipe: Recipe,
    entries: Iterable[tuple[str, ParameterEntry]],
    quantized: tuple[tuple[FromCodes, ParameterEntry], ...],
    tensors: Mapping[str, StoredTensor],
    choose_matrix: MatrixChooser | None,
) -> UnitJob:
    """The job of a recipe; of `entries`, those that `choose_matrix` has a type for are multiplied from their codes."""
    dequantized = []
    for target, entry in entries:
        form = None if choose_matrix is None else _from_codes(entry, recipe, tensors, choose_matrix)
        if form is None:
            dequantized.append((target, entry))
        else:
            quantized = (*quantized, (form, entry))
    stored_bytes = sum(tensors[name].nbytes for _, name in recipe.sources)
    ready_bytes = 0 if recipe.wraps else sum(entry.nbytes for _, entry in dequantized)
    coded_bytes = sum(how.made_bytes for how, _ in quantized if isinstance(how, CodedRecipe))
    ready_bytes += coded_bytes or (stored_bytes if quantized or recipe.wraps else 0)
    is_view = recipe.wraps
    if recipe.converter is None:
        tensor = tensors[recipe.sources[0][1]]
        dtype = torch_dtype(tensor.parts[0].dtype)
        is_as_stored = tensor.quantized is None and tensor.parts[0].is_one_run
        is_view = is_as_stored and (dtype == recipe.dtype or not dtype.is_floating_point)
    return UnitJob(recipe, tuple(dequantized), quantized, coded_bytes, is_view, stored_bytes, ready_bytes)


def of_jobs(unit: Unit, jobs: Iterable[UnitJob], tensors: Mapping[str, StoredTensor]) -> UnitSource:
    """A unit, or the part of it that these jobs make."""
    jobs = tuple(jobs)
    stored = {name: tensors[name] for job in jobs for _, name in job.recipe.sources}
    is_view = all(job.is_view for job in jobs if job.entries) and not any(job.coded_bytes for job in jobs)
    scale_bytes, made, work = 0, sum(job.coded_bytes for job in jobs), [0]
    for job in jobs:
        parts = [stored[name] for _, name in job.recipe.sources]
        if job.quantized and not isinstance(matrix_type := job.quantized[0][0], CodedRecipe):  # quantized by us
            form, dtype = parts[0].quantized, job.recipe.dtype
            assert form is not None
            assert dtype is not None
            scale_bytes += matrix_type.scale_bytes(form)
            work.append(matrix_type.scratch_bytes(form, dtype))
        if job.is_view:  # `typed` copies unaligned tensors on any device, in files that others wrote
            unaligned = (part.nbytes for tensor in parts for part in tensor.parts if part.offset % GPU_ALIGNMENT)
            made += sum(unaligned)
        elif job.entries:
            made += sum(entry.nbytes for _, entry in job.entries)
            forms = (tensor.quantized for tensor in parts)
            work += [dequantizing_bytes(form, job.recipe.dtype) for form in forms if form is not None]
            if (converter := job.recipe.converter) is not None:
                work += [_published.work_bytes(converter, entry.shape.numel()) for _, entry in job.entries]
    scratch = made + max(work) + (0 if is_view else scale_bytes)
    ready = sum(job.ready_bytes for job in jobs) + scale_bytes
    return UnitSource(unit, jobs, stored, _spans(stored), is_view, ready, scale_bytes, scratch)


def _from_codes(
    entry: ParameterEntry, recipe: Recipe, tensors: Mapping[str, StoredTensor], choose_matrix: MatrixChooser
) -> FromCodes | None:
    """How a parameter is multiplied from its codes; None if it is not."""
    if not entry.is_linear_weight:
        return None
    if recipe.converter is not None:
        coded = linear_recipe(recipe, tensors, entry.shape, entry.dtype)
        return coded if coded is not None and choose_matrix(coded.form, entry.dtype) is not None else None
    form = tensors[recipe.sources[0][1]].quantized
    if form is None or recipe.dtype is None:
        return None
    matrix_type = choose_matrix(form, recipe.dtype)
    assert matrix_type is None or not issubclass(matrix_type, CodedMatrix)
    return matrix_type


def _spans(stored: Mapping[str, StoredTensor]) -> tuple[FileSpan, ...]:
    """Runs of contiguous parts, in file order, in one buffer; no two runs share a block of it.

    If several parts begin at one offset, as weights that share a storage do, the longest comes last.
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
