"""The runs of bytes that are moved from a shard to layer files, and their order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rabbitllm.formats.tensor_spec import DTYPES
from rabbitllm.quant.schemes import SCHEMES, StoredForm
from rabbitllm.splitter.plan import SplitPlan

CHUNK_BYTES = 4 << 20
"""Source bytes that are read, quantized and written at a time by one thread."""


@dataclass(frozen=True, slots=True)
class Move:
    """One run of bytes of a shard and its target.

    Attributes:
        form: the tensor.
        first: index of its first element in this run, in row-major order; of a tensor that is stored unchanged, of its
            first byte.
        elements: number of elements; or bytes.
        offset: offset of the run in the shard, bytes; of a tensor with strides, the offset it would have without.
        nbytes: its length, bytes.
    """

    layer: str
    form: StoredForm
    first: int
    elements: int
    offset: int
    nbytes: int

    @property
    def begin(self) -> int:
        """The offset of this run in the tensor, in row-major order, bytes."""
        return self.offset - self.form.source.offset


def moves(plan: SplitPlan, shard: str, layers: Iterable[str]) -> Iterator[Move]:
    """Yield the runs of a shard for `layers`, in the shard's own order, each at most `CHUNK_BYTES` long.

    A run that is quantized is a whole number of blocks, unless it ends its tensor. A tensor without elements yields one
    empty run, so that its constants are still written.
    """
    wanted = set(layers)
    return moves_of(
        (layer, form)
        for layer in plan.layer_map.shard_to_layers.get(shard, ())
        if layer in wanted
        for form in plan.layouts[layer].forms
        if form.source.file == shard
    )


def moves_of(forms: Iterable[tuple[str, StoredForm]]) -> Iterator[Move]:
    """Yield the runs of some tensors of one file, each given with its layer; see `moves`."""
    for layer, form in sorted(forms, key=lambda item: item[1].source.offset):
        spec = form.source
        if form.scheme is None:  # plain bytes: elements do not matter, and may be smaller than a byte
            for at in range(0, max(spec.nbytes, 1), CHUNK_BYTES):
                length = min(CHUNK_BYTES, spec.nbytes - at)
                yield Move(layer, form, at, length, spec.offset + at, length)
            continue
        width, block = DTYPES[spec.dtype].bits // 8, SCHEMES[form.scheme].block
        step = CHUNK_BYTES // width // block * block
        for first in range(0, spec.elements, step):
            count = min(step, spec.elements - first)
            yield Move(layer, form, first, count, spec.offset + first * width, count * width)
