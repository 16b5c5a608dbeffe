"""The work of a pass with each unit of a model: the bytes it reads, multiplies with and makes. Measures nothing.

Taken from the load plan that the model itself is loaded by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rabbitllm.checkpoints.config import picked_by
from rabbitllm.engine.load_plan import LoadPlan
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.units import Place, UnitSource
from rabbitllm.estimate.bitsandbytes_products import form_of
from rabbitllm.quant.compression import expanded_bytes

HOOKED = (Tier.PACKED, Tier.PINNED, Tier.STREAMED)
"""Tiers whose parameters are bound for each pass."""
_COPIED = (Tier.PINNED, Tier.STREAMED)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix, or several equal ones, that a pass multiplies with.

    Attributes:
        form: form it is multiplied from: "4bit" and "8bit" are codes, "bitsandbytes …" those of a checkpoint that is
            published in that form, anything else is a torch dtype's name.
        shape: (rows, columns).
        nbytes: in that form; of all of them.
        share: of the bytes that one token needs: below 1 for experts, of which a router picks a few.
    """

    form: str
    shape: tuple[int, int]
    nbytes: int
    share: float = 1.0

    def touched(self, tokens: int) -> float:
        """Return the expected bytes that this many tokens need, each routed independently."""
        return self.nbytes * (1 - (1 - self.share) ** tokens)


@dataclass(frozen=True, slots=True)
class UnitWork:
    """The work of a pass with one unit.

    Attributes:
        unit: its path in the model.
        device: the device that computes it.
        streamed: bytes that are read for each pass; 0 if it is resident.
        uploaded: bytes that are copied to its device for each pass.
        products: the matrices it multiplies with.
        hooked: whether its parameters are bound, and made if necessary, for each pass.
        modules: number of modules inside it, itself included; 0 outside of decoder layers.
        once: whether it is part of an encoder, which only the first token needs.
        kind: equal for units that take the same time.
    """

    unit: str
    device: str
    streamed: int
    uploaded: int
    products: tuple[Product, ...]
    hooked: bool
    modules: int
    once: bool
    kind: tuple[Any, ...]


def work_of(drawn: LoadPlan) -> tuple[UnitWork, ...]:
    """Return the work of a pass, unit by unit, in its order."""
    picked, encoder = picked_by(drawn.model.config.get_text_config()), _encoder_path(drawn.model)
    hosts = {budget.device for budget in drawn.placement.budgets if budget.is_host}
    found = []
    for placed in drawn.placement.units:
        source = drawn.sources[placed.unit]
        streamed = placed.stored if placed.tier is Tier.STREAMED else 0
        uploaded = placed.stored if placed.device not in hosts and placed.tier in _COPIED else 0
        hooked = placed.tier in HOOKED
        modules = sum(1 for _ in source.unit.module.modules()) if source.unit.is_layer else 0
        products = tuple(_products(source, picked))
        kind = (placed.device, products, hooked, modules, len(tuple(source.places)), source.stored_bytes)
        once = encoder is not None and (placed.unit + ".").startswith(encoder)
        found.append(UnitWork(placed.unit, placed.device, streamed, uploaded, products, hooked, modules, once, kind))
    return tuple(found)


def shapes(work: Iterable[UnitWork], form: str) -> Mapping[tuple[int, int], int]:
    """Return the shapes of the matrices in a form, and the bytes that one token needs of each, the most first."""
    found: Counter[tuple[int, int]] = Counter()
    for unit in work:
        for product in unit.products:
            if product.form == form:
                found[product.shape] += round(product.touched(1))
    return dict(found.most_common())


def forms(work: Iterable[UnitWork]) -> frozenset[str]:
    """Return all forms that matrices are multiplied from."""
    return frozenset(product.form for unit in work for product in unit.products)


def _encoder_path(model: Any) -> str | None:
    """Return the path of the encoder, with a trailing dot; None if there is none."""
    if not model.config.is_encoder_decoder:
        return None
    encoder = model.get_encoder()
    return next((f"{name}." for name, module in model.named_modules() if module is encoder and name), None)


def _products(source: UnitSource, picked: int | None) -> Iterable[Product]:
    if isinstance(source.unit.module, nn.Embedding):
        return  # one row per token
    for job in source.jobs:
        for _, place in job.packed:
            stored = source.stored[job.recipe.sources[0][1]]
            assert stored.quantized is not None
            nbytes = stored.nbytes + expanded_bytes(stored.quantized)
            yield Product(stored.quantized.codes.scheme, _matrix(place), nbytes)
        for _, place in job.places:
            if job.recipe.wraps and (form := form_of(_owner(source, place))) is not None:
                yield Product(form, _matrix(place), sum(source.stored[name].nbytes for _, name in job.recipe.sources))
            elif len(place.shape) >= 2:
                nbytes = place.shape.numel() * place.dtype.itemsize
                yield Product(str(place.dtype).removeprefix("torch."), _matrix(place), nbytes, _share(place, picked))


def _owner(source: UnitSource, place: Place) -> nn.Module:
    """Return the module that holds a `Place`."""
    inside = place.target.rpartition(".")[0].removeprefix(source.unit.name)
    return source.unit.module.get_submodule(inside.removeprefix("."))


def _matrix(place: Place) -> tuple[int, int]:
    return place.shape[-2], place.shape[-1]


def _share(place: Place, picked: int | None) -> float:
    """Return the share of experts, in one tensor of three dimensions, that a router picks; 1 for other tensors."""
    experts = place.shape[0] if len(place.shape) == 3 else 0
    return picked / experts if picked is not None and picked < experts else 1.0
