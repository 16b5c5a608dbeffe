"""The layer files that a split would make, as the engine sees files: every tensor and its place, and no bytes.

So that what a model will take can be told by the code that later loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rabbitllm.base.collection import uncollected
from rabbitllm.formats.safetensors_file import MappedFile
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, byte_size
from rabbitllm.quant.compression import DOUBLE, Quantized, StoredForm, form_in
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.layer_file import LayerLayout
from rabbitllm.store.layer_store import StoredTensor


class PlannedFiles:
    """What `LayerStore` will find when a plan is carried out.

    Attributes:
        folder: where the split directory will be.
        tensors: checkpoint name -> where it will lie.
        checks: none; there is nothing to read.
    """

    is_split = False
    checks: LayerChecks | None = None

    @uncollected()
    def __init__(self, plan: SplitPlan, folder: Path) -> None:
        self.folder = folder
        self.label = plan.source.name
        self.tensors: dict[str, StoredTensor] = {}
        for layout in plan.layouts.values():
            file = layout.file_name
            for form in _whole(layout, plan):
                self.tensors[form.source.name] = _planned(form, layout, file)

    def mapped(self, file: str) -> MappedFile:
        """There is none.

        Raises:
            FileNotFoundError: always.
        """
        raise FileNotFoundError(f"{self.path(file)} is only planned")

    def path(self, file: str) -> Path:
        """Where a file will be."""
        return self.folder / file


def _whole(layout: LayerLayout, plan: SplitPlan) -> Iterator[StoredForm]:
    """The tensors of a layer as its file holds them; those that are cut into pieces once."""
    cut: set[str] = set()
    for form in layout.forms:
        if form.source.piece is None:
            yield form_in(form.source, form.scheme)
        elif form.source.piece.of not in cut:
            cut.add(form.source.piece.of)
            yield plan.stored_form(form.source.whole)


def _planned(form: StoredForm, layout: LayerLayout, file: str) -> StoredTensor:
    places = layout.places
    parts = tuple(
        [
            TensorSpec(part.name, part.dtype, part.shape, file, places[part.name], byte_size(part.dtype, part.shape))
            for part in form.parts
        ]
    )
    if form.scheme is None:
        return StoredTensor(form.source.name, parts, None)
    dtype = None if form.scheme == "8bit" else DTYPES[form.source.dtype].torch_name  # which does not store it
    mean = 0.0 if form.scheme == DOUBLE else None  # of scales that are not there yet
    return StoredTensor(form.source.name, parts, Quantized(form.scheme, form.source.shape, dtype, mean))
