"""The layer files that a split would make, in the form the engine reads: every tensor and its offset, without data.

This lets the code that later loads a model estimate what it will take.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rabbitllm.base.collection import uncollected
from rabbitllm.formats.safetensors_file import MappedFile
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, byte_size
from rabbitllm.quant.schemes import DOUBLE, Quantized, StoredForm, form_in
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.layer_file import LayerLayout
from rabbitllm.store.layer_store import StoredTensor


class PlannedFiles:
    """The files that `LayerStore` will find when a plan is carried out.

    Attributes:
        folder: the future split directory.
        tensors: checkpoint name -> its future file and offsets.
        checks: None, since there is nothing to read.
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
        """Always raise, since no file exists.

        Raises:
            FileNotFoundError: always.
        """
        raise FileNotFoundError(f"{self.path(file)} is only planned")

    def path(self, file: str) -> Path:
        """Return the future path of a file."""
        return self.folder / file


def _whole(layout: LayerLayout, plan: SplitPlan) -> Iterator[StoredForm]:
    """Yield the tensors of a layer as its file holds them; one that is cut into pieces once."""
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
    dtype = None if form.scheme == "8bit" else DTYPES[form.source.dtype].torch_name  # 8bit does not store it
    mean = 0.0 if form.scheme == DOUBLE else None  # the scales do not exist yet
    return StoredTensor(form.source.name, parts, Quantized(form.scheme, form.source.shape, dtype, mean))
