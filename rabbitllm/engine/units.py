"""Units: the modules whose weights are bound and unbound together, and the table entries of their parameters.

A unit is a decoder layer (the outermost layer of a stack), or any other module that owns parameters itself: the
embedding, the norm, the head; torch's own attention is one unit as a whole. Binding writes into the module's own
parameter table, which takes less than a microsecond for each tensor; every public way takes 50 to 200 times longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rabbitllm.engine.unwritable import AbsentWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    def placeholder(self, device: torch.device, bring: Callable[[Place], torch.Tensor]) -> AbsentWeight:
        """A placeholder of the weight's device, dtype and shape, without memory and values.

        Args:
            device: the device of the weight.
            bring: called for the weight, in the form of `bindable`, when its values are read.
        """
        is_parameter, marks = self._is_parameter, self.marks
        return AbsentWeight(lambda: bring(self), self.shape, self.dtype, device, is_parameter=is_parameter, marks=marks)

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
    layers = set(_layer_paths(model))
    # torch's own attention reads its output matrix, and uses another kernel if that is not a plain tensor
    reading = {name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    whole = layers | reading
    units = []
    for name, module in model.named_modules():
        if any(name.startswith(path + ".") for path in whole):
            continue
        places = tuple(_places(module, name, recurse=name in whole))
        if places:
            holds = name not in whole and any(True for child in module.children() if _owns_weights(child))
            units.append(Unit(name, module, places, name in layers, holds))
    return units


def input_embedding(model: PreTrainedModel) -> nn.Module | None:
    """The module that turns token ids into vectors; None if the model names none (some models for pictures)."""
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return found


def _layer_paths(model: PreTrainedModel) -> Iterator[str]:
    """Paths of the outermost modules in a list that transformers treats as layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    whole = set(model._no_split_modules or ())
    found: list[str] = []
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if not parent or any(name.startswith(path + ".") for path in found):
            continue
        listed = isinstance(model.get_submodule(parent), (nn.ModuleList, nn.ModuleDict))
        if listed and (isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in whole):
            found.append(name)
    yield from found


def _owns_weights(module: nn.Module) -> bool:
    return any(True for _ in _places(module, "", recurse=True))


def _places(module: nn.Module, path: str, *, recurse: bool) -> Iterator[Place]:
    owners = module.named_modules() if recurse else [("", module)]
    for inner, owner in owners:
        prefix = ".".join(part for part in (path, inner) if part)
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                yield _place(owner, owner._parameters, leaf, prefix, parameter)
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and leaf not in owner._non_persistent_buffers_set:
                yield _place(owner, owner._buffers, leaf, prefix, buffer)


def _place(owner: nn.Module, table: MutableMapping[str, Any], leaf: str, prefix: str, tensor: torch.Tensor) -> Place:
    multiplied = leaf == "weight" and type(owner).forward is nn.Linear.forward
    marks = {key: value for key, value in vars(tensor).items() if isinstance(value, bool | int | str)}
    return Place(table, leaf, f"{prefix}.{leaf}" if prefix else leaf, tensor.shape, tensor.dtype, multiplied, marks)
