"""Binds the experts of a model: as ordinary tensors, as stacks over the mapped files, or from a pool.

`placement.py` chooses among these. For a model a stack is a parameter of shape (experts, ...) and the ordinary dtype,
so transformers' own experts kernels compute with it. The operations of these kernels are done expert by expert:
indexing by one index or several, and products of groups of rows with their experts. For any other operation all experts
are copied into one tensor, which is freed after it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from rabbitllm.base.forks import Workers
from rabbitllm.engine._expert_pool import ExpertPool, PooledExperts, staging_slots, transit_slots
from rabbitllm.engine._first_use import check_experts_before
from rabbitllm.engine.devices import Device
from rabbitllm.engine.expert_source import ExpertParameter, ExpertPart, ExpertSource, with_tables
from rabbitllm.engine.placement import ExpertCost, Placement, Tier
from rabbitllm.engine.prefetch import HostBuffers
from rabbitllm.engine.span_reader import FileSpan, ReadMode, SpanReader
from rabbitllm.engine.weight_tensors import QuantizedWeight, WeightStandIn, WeightView, view_of
from rabbitllm.errors import AbsentWeightError
from rabbitllm.quant.products import GroupedProduct, KernelMatrix
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT
from rabbitllm.store.layer_store import WeightFiles
from rabbitllm.telemetry.profiler import Profiler


class ExpertProvider(Protocol):
    """Provides the weights of experts.

    Attributes:
        valid: the number of weights that are valid at a time, the last ones that were requested.
        is_on_device: whether they are in the memory of a device, not in that of the host.
        is_in_place: whether one takes no other memory than that of tensors or files that all are in.
    """

    valid: int
    is_on_device: bool
    is_in_place: bool

    def stays(self, leaf: str) -> bool:
        """Whether the weights of a leaf, once provided, stay in memory."""

    def each(self, leaf: str, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        """The weights of these experts in this order; each is valid until `valid` others are requested."""

    def order(self, experts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Indices into `experts`: of those that are in memory until the end of the pass; of those that will be, and of
        those that are read leaf by leaf, for one use, in the order in which they are read."""

    def batches(self, experts: Sequence[int]) -> Iterator[Sequence[int]]:
        """These distinct experts, some at a time, first those that are in memory: all leaves of some can be had until
        the next are asked for."""

    def numbers(self, index: torch.Tensor) -> list[int]:
        """The values of an integer tensor in memory order."""

    def ends(self, ends: torch.Tensor, rows: int) -> list[int]:
        """The same of the ends of each expert's group of rows, which tell what the pass uses."""


class ExpertStack(WeightStandIn):
    """A stack of matrices (experts, N, K), or transposed (experts, K, N).

    Args:
        supply: provides the experts.
        leaf: the name of the parameter.
        shape, dtype, device: of the parameter that it stands for, before the transposition.
        transposed: whether the last two dimensions are exchanged.
        is_coded: whether the matrices are multiplied from codes.

    Attributes:
        kept: what is kept of it between calls; see `_routed`.
        product: computes one with a matrix of floats.
    """

    supply: ExpertProvider
    leaf: str
    transposed: bool
    is_coded: bool
    kept: Any = None
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mm
    _whole_shape: torch.Size
    _why = "experts are read from the disk, or by their codes"

    @staticmethod
    def __new__(
        cls,
        supply: ExpertProvider,
        leaf: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        transposed: bool = False,
        is_coded: bool = False,
    ) -> ExpertStack:
        seen = torch.Size((*shape[:-2], shape[-1], shape[-2])) if transposed else shape
        stack: ExpertStack = cls._without_storage(seen, dtype=dtype, device=device)
        stack.supply, stack.leaf, stack.transposed, stack._whole_shape = supply, leaf, transposed, shape
        stack.is_coded = is_coded
        return stack

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ExpertStack({tuple(self.shape)}, {self.dtype}, by expert)"

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertStack:
        return self.again()  # experts are read-only and need no copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AbsentWeightError(
            "The experts of a layer are not in memory as one tensor; torch.save cannot pickle them.",
            "model.save_pretrained(folder) writes the whole model.",
        )

    def again(self, transposed: bool = False, product: Any = None) -> ExpertStack:
        """Another object for the same stack; `transposed`: with the last two dimensions exchanged."""
        form = self.dtype, self.device, self.transposed != transposed, self.is_coded
        other = ExpertStack(self.supply, self.leaf, self._whole_shape, *form)
        other.product = product or self.product
        return other

    def whole(self) -> torch.Tensor:
        """Copies of all experts' matrices."""
        return self.copied(range(self.shape[0]))

    def each(self, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        """These experts' matrices, in this order; see `ExpertProvider.each`."""
        for weight in self.supply.each(self.leaf, experts):
            yield weight.transpose(-2, -1) if self.transposed else weight

    def copied(self, experts: Sequence[int]) -> torch.Tensor:
        """Copies of these experts' matrices, (len(experts), ...)."""
        copies = torch.empty((len(experts), *self.shape[1:]), dtype=self.dtype, device=self.device)
        distinct = sorted(set(experts))
        rows = {expert: [position for position, other in enumerate(experts) if other == expert] for expert in distinct}
        for expert, weight in zip(distinct, self.each(distinct), strict=True):
            for position in rows[expert]:
                copies[position].copy_(weight.whole() if isinstance(weight, QuantizedWeight) else weight)
        return copies

    def grouped_mm(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`rows[begin:end] @ self[expert]` for each expert; the groups are contiguous.

        Each product is torch's own `mm`, whose result on a CPU equals that of torch's grouped product bit for bit
        (asserted).

        Args:
            rows: (S, K).
            ends: of the groups, integers (experts,), as for `torch.nn.functional.grouped_mm`.

        Returns:
            (S, N).
        """
        groups, begin = [], 0
        for expert, end in enumerate(self.supply.ends(ends, len(rows))):
            if end > begin:
                groups.append((expert, begin, end))
            begin = max(begin, end)
        if not groups:
            return rows.new_zeros(len(rows), self.shape[-1])
        filled, pending, others = self.supply.order([expert for expert, *_ in groups])
        chosen = [groups[index] for index in (*filled, *pending, *others)]
        weights = self.supply.each(self.leaf, [expert for expert, *_ in chosen])
        first, spans = next(weights), [(begin, end) for _, begin, end in chosen]
        product: Any = self._grouped(rows, first, len(groups))
        if product is not None:
            candidates = (getattr(weight, "matrix", None) for weight in chain([first], weights))
            matrices = (matrix for matrix in candidates if isinstance(matrix, KernelMatrix))
            batch = list(islice(matrices, len(filled) or self.supply.valid))
            while batch:
                product.multiply(batch, spans[: len(batch)])
                spans = spans[len(batch) :]
                batch = list(islice(matrices, self.supply.valid))
            result: torch.Tensor = product.result()
            return result
        out = rows.new_zeros(len(rows), self.shape[-1])  # rows of no group stay zero
        for (begin, end), weight in zip(spans, chain([first], weights), strict=True):
            out[begin:end] = self._product(rows[begin:end], weight)
        return out

    def multiplied(self, rows: torch.Tensor, experts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The products of groups of rows of these sizes with these experts, of which there are as many as are valid."""
        weights, ends = [*self.supply.each(self.leaf, experts)], [*accumulate(sizes)]
        spans = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        product = self._grouped(rows, weights[0], len(experts))
        if product is not None:
            product.multiply([weight.matrix for weight in weights], spans)  # type: ignore[attr-defined]
            return product.result()
        out = rows.new_empty(len(rows), self.shape[-1])
        for (begin, end), weight in zip(spans, weights, strict=True):
            out[begin:end] = self._product(rows[begin:end], weight)
        return out

    def by_row(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """`rows[s] @ self[index[s]]` for each row, by a product for each expert; rows need no gradient.

        Args:
            rows: (S, K).
            index: experts, integers (S,).

        Returns:
            (S, N).
        """
        experts, order = np.asarray(self.supply.numbers(index)), None
        chosen, sizes = np.unique(experts, return_counts=True)
        if len(chosen) < len(experts):  # rows of an expert follow each other
            order = index.argsort(stable=True)
            rows = rows[order]
        else:  # one row each, in their order
            chosen = experts
        begins = np.cumsum([0, *sizes]).tolist()
        filled, pending, others = self.supply.order(chosen.tolist())
        turns = [*filled, *pending, *others]
        products: list[Any] = [None] * len(turns)
        for turn, weight in zip(turns, self.supply.each(self.leaf, chosen[turns].tolist()), strict=True):
            products[turn] = self._product(rows[begins[turn] : begins[turn + 1]], weight)
        out = torch.cat(products)
        return out if order is None else torch.empty_like(out).index_copy_(0, order, out)

    def _grouped(self, rows: torch.Tensor, weight: torch.Tensor, groups: int) -> GroupedProduct | None:
        """A grouped product for weights like this one; None if they are multiplied one by one."""
        needs_gradient = torch.is_grad_enabled() and rows.requires_grad
        if not self.transposed or not isinstance(weight, QuantizedWeight) or needs_gradient:
            return None
        return weight.matrix.grouped(rows, groups)

    def _product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.transposed and isinstance(weight, QuantizedWeight):
            return torch.nn.functional.linear(rows, weight)
        if isinstance(weight, QuantizedWeight):
            return torch.mm(rows, weight)
        return self.product(rows, weight.t() if self.transposed else weight)

    @classmethod
    def _operation(cls, func: Any, args: tuple[Any, ...]) -> Any:
        # transformers' own grouped product, which it uses if torch has none for a device
        is_fallback = str(func) == "transformers.grouped_mm_fallback.default"
        return args[1].grouped_mm(args[0], args[2]) if is_fallback else None


class ChosenExperts(WeightStandIn):
    """The matrices of experts in a GPU's pool that an index names, (S, N, K): each is multiplied where it lies.

    transformers copies the matrices of a few tokens' experts, one for each row, and multiplies all copies at once. From
    codes each copy would be dequantized first. For all that is no such product they are made, once: they may be written
    to, as those that torch makes.

    Args:
        stack: the experts, (experts, N, K).
        numbers: integers (S,).
    """

    stack: ExpertStack
    numbers: torch.Tensor
    copies: torch.Tensor | None = None
    _by_memory = WeightView._by_memory

    @staticmethod
    def __new__(cls, stack: ExpertStack, numbers: torch.Tensor) -> ChosenExperts:
        shape = len(numbers), *stack.shape[1:]
        chosen: ChosenExperts = cls._without_storage(shape, dtype=stack.dtype, device=stack.device)
        chosen.stack, chosen.numbers = stack, numbers
        return chosen

    def whole(self) -> torch.Tensor:
        """Copies of the matrices, the same ones each time."""
        if self.copies is None:
            self.copies = self.stack.copied(self.stack.supply.numbers(self.numbers))
        return self.copies

    def again(self) -> torch.Tensor:
        """The copies: what is written to them through one object is seen through the other."""
        return self.whole()


def _bmm(input: Any, mat2: Any, **more: Any) -> torch.Tensor | None:
    """The answer to products of one row with each matrix; None if there are others, or gradients are needed."""
    is_left = isinstance(input, ChosenExperts)
    chosen, rows = (input, mat2) if is_left else (mat2, input)
    if more or chosen.copies is not None or isinstance(rows, WeightStandIn) or rows.dim() != 3:
        return None
    stack, dim = (chosen.stack.again(transposed=True), 2) if is_left else (chosen.stack, 1)
    is_fit = rows.shape[dim] == 1 and rows.shape[3 - dim] == stack.shape[1] and len(rows) == len(chosen.numbers)
    if not is_fit or rows.dtype is not stack.dtype or (torch.is_grad_enabled() and rows.requires_grad):
        return None
    product: torch.Tensor = stack.by_row(rows.squeeze(dim), chosen.numbers)
    return product.unsqueeze(dim)


ChosenExperts._answers = {torch.bmm: _bmm}


def _grouped_mm(input: torch.Tensor, weight: Any, *, offs: torch.Tensor | None = None, **more: Any) -> Any:
    if not isinstance(weight, ExpertStack) or isinstance(input, ExpertStack) or offs is None or input.dim() != 2:
        return None
    return weight.grouped_mm(input, offs)


def _getitem(stack: Any, index: Any) -> Any:
    if not isinstance(stack, ExpertStack):
        return None
    if isinstance(index, torch.Tensor) and not index.is_floating_point() and index.dtype is not torch.bool:
        if index.dim() == 0:
            return _expert_weight(stack, int(index))
        if index.dim() == 1 and len(index) and stack.supply.is_on_device:
            return ChosenExperts(stack, index)
        return stack.copied(stack.supply.numbers(index)).view(*index.shape, *stack.shape[1:])
    return _expert_weight(stack, index) if type(index) is int else None


def _expert_weight(stack: ExpertStack, expert: int) -> torch.Tensor:
    if not -stack.shape[0] <= expert < stack.shape[0]:
        raise IndexError(f"index {expert} is out of bounds for {stack.shape[0]} experts")
    return view_of(stack, next(stack.each([expert % stack.shape[0]])))


def _transpose(stack: Any, first: int, second: int) -> Any:
    return stack.again(transposed=True) if {first % 3, second % 3} == {1, 2} and stack.dim() == 3 else None


ExpertStack._answers = {
    torch.nn.functional.grouped_mm: _grouped_mm,
    torch._grouped_mm: _grouped_mm,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.transpose: _transpose,
    torch.transpose: _transpose,
}


def stack_of(supply: ExpertProvider, name: str, leaf: ExpertParameter, device: torch.device) -> ExpertStack:
    """The stack of a leaf's matrices, which may be stored transposed."""
    shape, is_turned = leaf.entry.shape, leaf.coded is not None and leaf.coded.is_turned
    stored = torch.Size((shape[0], shape[2], shape[1])) if is_turned else shape
    return ExpertStack(supply, name, stored, leaf.entry.dtype, device, is_turned, leaf.matrix_type is not None)


FileBytes = Callable[[str], torch.Tensor]
"""A file's name -> its bytes, mapped, uint8."""


class ResidentExperts:
    """The experts of one module that are in memory: by the name of the leaf and the expert, or views of stacks."""

    valid = sys.maxsize
    is_on_device = False
    is_in_place = True

    def __init__(self, ready: dict[tuple[str, int], torch.Tensor] | None = None, **stacks: torch.Tensor) -> None:
        self._ready, self._stacks = ready or {}, stacks

    def stays(self, leaf: str) -> bool:
        """See `experts.ExpertProvider`."""
        return True

    def each(self, leaf: str, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `experts.ExpertProvider`."""
        for expert in experts:
            yield self._weight(leaf, expert)

    def _weight(self, leaf: str, expert: int) -> torch.Tensor:
        if (weight := self._ready.get((leaf, expert))) is None:
            weight = self._ready[leaf, expert] = self._stacks[leaf][expert]
        return weight

    def order(self, experts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """See `experts.ExpertProvider`."""
        return list(range(len(experts))), [], []

    def batches(self, experts: Sequence[int]) -> Iterator[Sequence[int]]:
        """See `experts.ExpertProvider`."""
        yield experts

    def numbers(self, index: torch.Tensor) -> list[int]:
        """See `experts.ExpertProvider`."""
        return list(index.flatten().tolist())

    def ends(self, ends: torch.Tensor, rows: int) -> list[int]:
        """See `experts.ExpertProvider`."""
        return self.numbers(ends)


class MappedExperts(ResidentExperts):
    """The experts of one module, in mapped files.

    Attributes:
        unchecked: those whose checksums are to be compared yet.
    """

    def __init__(self, model: PreTrainedModel, source: ExpertSource, file_bytes: FileBytes) -> None:
        super().__init__()
        self.unchecked = set[int]()
        self._model = model
        self._source = source
        self._file_bytes = file_bytes
        self.is_in_place = source.is_ready and not source.is_rearranged

    def strided(self, leaf: str) -> torch.Tensor | None:
        """All experts as one strided tensor over the mapped file; None if they are not at equal distances in it, or not
        used in their stored form."""
        chosen, experts = self._source.leaves[leaf], self._source.experts
        first = chosen.parts[0]
        steps = np.unique(np.diff(first.offsets))
        if not chosen.is_view or len(first.files) > 1 or len(self._source.spans(0, leaf)) > 1 or len(steps) != 1:
            return None
        step, itemsize = int(steps[0]), chosen.entry.dtype.itemsize
        begin, end = int(first.offsets[0]), int(first.offsets[-1]) + sum(part.nbytes for part in chosen.parts)
        flat = self._file_bytes(first.file(0))[begin:end]
        if step <= 0 or step % TENSOR_ALIGNMENT or flat.data_ptr() % TENSOR_ALIGNMENT:
            return None
        inner = torch.empty(chosen.shape, device="meta").stride()
        return flat.view(chosen.entry.dtype).as_strided((experts, *chosen.shape), (step // itemsize, *inner))

    def stays(self, leaf: str) -> bool:
        """See `experts.ExpertProvider`."""
        chosen = self._source.leaves[leaf]
        return chosen.is_view or chosen.matrix_type is not None

    def _weight(self, leaf: str, expert: int) -> torch.Tensor:
        chosen = self._source.leaves[leaf]

        def bytes_of(part: ExpertPart) -> torch.Tensor:
            begin = int(part.offsets[expert])
            return self._file_bytes(part.file(expert))[begin : begin + part.nbytes]

        weight = self._ready.get((leaf, expert))
        if weight is None:
            weight = chosen.weight(self._model, chosen.in_memory(bytes_of), expert)
            if self.stays(leaf):
                self._ready[leaf, expert] = weight
        return weight


def expert_costs(sources: Sequence[ExpertSource]) -> list[ExpertCost]:
    """The memory cost of the experts of each module, as input to the placement."""
    return [
        ExpertCost(
            name=source.name,
            unit=source.unit,
            stored=max(source.stored_bytes, source.ready_bytes * source.is_rearranged),
            ready=source.ready_bytes,
            is_ready=source.is_ready,
            experts=source.experts,
            slot=source.nbytes,
            transit=transit_slots([source]) + staging_slots([source]),
        )
        for source in sources
    ]


def ranges_in_place(sources: Sequence[ExpertSource], placement: Placement) -> list[FileSpan]:
    """Runs of layer files with experts that are used there, all of which stay in memory. What is cast, dequantized or
    rearranged is copied, and the plan counts no memory for its files."""
    resident = {placed.unit for placed in placement.experts if placed.tier is Tier.RESIDENT}
    in_place = (source for source in sources if source.is_ready and not source.is_rearranged)
    return [span for source in in_place if source.name in resident for span in source.ranges]


def bind_experts(
    model: PreTrainedModel,
    sources: Sequence[ExpertSource],
    placement: Placement,
    devices: Mapping[str, Device],
    store: WeightFiles,
    profiler: Profiler,
    read_modes: Mapping[str, ReadMode],
) -> dict[str, ExpertPool]:
    """Give every routed module its experts.

    Returns:
        Device name -> its pool, for those that have one.
    """

    @functools.cache
    def file_bytes(file: str) -> torch.Tensor:
        return torch.frombuffer(store.mapped(file).whole(), dtype=torch.uint8)

    where = {placed.unit: devices[placed.device].torch_device for placed in placement.experts}
    sources_by_name = {source.name: with_tables(source, store, where[source.name]) for source in sources}
    pools = {}
    for pool in placement.pools:
        local = [sources_by_name[p.unit] for p in placement.experts if p.device == pool.device]
        device = devices[pool.device]
        host = None if device.shares_host_memory else HostBuffers(device)
        disk = SpanReader(store, read_modes[pool.device], store.checks, is_exact=True)
        pools[pool.device] = live = ExpertPool(model, local, device, pool.slots, disk, profiler, host, pool.host_slots)
        for index, source in enumerate(local):
            pooled = PooledExperts(live, index)
            for name, leaf in source.leaves.items():
                leaf.entry.bind(stack_of(pooled, name, leaf, device.torch_device))
            source.module.register_forward_pre_hook(pooled.before, with_kwargs=True)
            source.module.register_forward_hook(pooled.after, always_call=True)
    checks, thread = store.checks, None
    for placed in (placed for placed in placement.experts if placed.tier is not Tier.ROUTED):
        source = sources_by_name[placed.unit]
        supply = _bind_mapped(model, source, file_bytes, placed.tier is Tier.RESIDENT)
        if checks is not None and all(checks.by_block(span.file) for span in source.spans(0)):
            thread = thread or Workers(1, "checksums")
            check_experts_before(source, checks, thread, supply.unchecked)  # while they are used first
    return pools


def _bind_mapped(model: PreTrainedModel, source: ExpertSource, file_bytes: FileBytes, permanent: bool) -> MappedExperts:
    """Bind experts on the host: as views of the file if possible, else as copies, made once or for each use."""
    supply = MappedExperts(model, source, file_bytes)
    for name, leaf in source.leaves.items():
        whole = supply.strided(name)
        if whole is None:
            stack = stack_of(supply, name, leaf, torch.device("cpu"))
            once = permanent and leaf.matrix_type is None
            whole = stack.copied(range(source.experts)) if once else stack
        leaf.entry.bind(whole)
    return supply
