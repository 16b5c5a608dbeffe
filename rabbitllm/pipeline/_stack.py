"""Finds the layers of a model that can be on other hosts, and plans which process gets which.

Layers can be on other hosts if only hidden states go from one layer to the next. That depends on the family's forward.
So it is run with stand-ins for the layers, without weights: each must be called once, in order, with the very tensor
that the one before it returned, and its other arguments must not depend on the results of the layers before it.

A token goes through all processes in turn, so its time does not depend on the number of layers in each process, as long
as all of them are resident. So the plan minimizes first the streamed bytes, then the fullest process's share of memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rabbitllm.base.grouping import grouped
from rabbitllm.engine import skeleton
from rabbitllm.engine.placement import SLOTS
from rabbitllm.engine.units import Unit, UnitSource
from rabbitllm.errors import HostsError
from rabbitllm.pipeline._caches import recipe_of
from rabbitllm.pipeline._frames import Packer

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

FORMS = (None, 0, 1, 2)
"""The outputs that a layer may have: hidden states (None), or a tuple of them and this number of other values."""
NAME = "hidden_states"


@dataclass(frozen=True)
class Stack:
    """The layers that are spread.

    Attributes:
        units: the layers, in the order of a pass.
        cached: indices of each layer in a KV cache.
        form: form of each layer's output, see `FORMS`; the other values are not used.
    """

    units: tuple[Unit, ...]
    cached: tuple[tuple[int, ...], ...]
    form: int | None


def output_of(form: int | None, hidden: torch.Tensor, value: Any = None) -> Any:
    """The output of a layer in one of `FORMS`, with these hidden states and others of this value."""
    return hidden if form is None else (hidden, *[value] * form)


@dataclass
class _Trial:
    """The records of one trial run."""

    calls: list[Any]
    tensors: list[list[torch.Tensor]]
    flowing: torch.Tensor | None = None


_GIVEN = torch.ones((1, 4), dtype=torch.long)
"""Input ids of the trial run."""


class _Done(BaseException):
    """Raised at the head, to end the trial run."""


def find_stack(model: StreamedModel, sources: Mapping[str, UnitSource]) -> Stack:
    """The largest stack of layers of a model, if it can be spread.

    Args:
        model: the skeleton, on the meta device; afterwards its weights are placeholders on the host.
        sources: source of each of its units.

    Raises:
        HostsError: it cannot be spread; names the model type and the reason.
    """
    layers = [source for source in sources.values() if source.unit.is_layer]
    stacks = grouped((layer.unit.name.rpartition(".")[0], layer) for layer in layers)
    if model.config.is_encoder_decoder or not stacks:
        raise _refusal(model, "it has an encoder" if stacks else "it has no layers that are called one after the other")
    largest = max(stacks.values(), key=lambda layers: sum(source.stored_bytes for source in layers))
    units = tuple(source.unit for source in largest)
    skeleton.materialise_buffers(model, lambda path: torch.device("cpu"))
    for source in sources.values():
        for entry in source.entries:
            element = torch.full((), float("nan") if entry.dtype.is_floating_point else 0).to(entry.dtype)
            entry.bind(element.expand(entry.shape))  # which takes no memory
    form = _form_of(model, [unit.module for unit in units])
    return Stack(units, tuple(_cached(unit.module, index) for index, unit in enumerate(units)), form)


def hidden_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Separate the hidden states from the other arguments of a layer's call."""
    if args:
        return args[0], args[1:], dict(kwargs)
    arguments = dict(kwargs)
    return arguments.pop(NAME, None), (), arguments


def _refusal(model: StreamedModel, why: str) -> HostsError:
    return HostsError(
        f"A model of type {model.config.model_type} cannot be spread over hosts: {why}.", "Run it on one host."
    )


def _cached(layer: nn.Module, layer_index: int) -> tuple[int, ...]:
    """The indices in a KV cache that a layer writes to, according to its attention and mixer modules."""
    inner = {getattr(module, "layer_idx", None) for module in layer.modules() if module is not layer}
    indices = inner - {None} or {getattr(layer, "layer_idx", None)}  # LongCat's layers have two attentions each
    # Zamba2's shared blocks have -1 for none
    return tuple(sorted(index for index in indices if isinstance(index, int) and index >= 0)) or (layer_index,)


def _form_of(model: StreamedModel, layers: Sequence[nn.Module]) -> int | None:
    """The form in which layers return hidden states."""
    why = ""
    for form in FORMS:
        try:
            first = _trial_run(model, layers, form, 0.0, None)
            second = _trial_run(model, layers, form, 1.0, torch.ones(1))
        except HostsError as error:
            raise _refusal(model, error.problem.rstrip(".")) from None
        except _NotAStack as error:
            why = why or str(error)
            continue
        if first.calls != second.calls or not _same(first.tensors, second.tensors):
            raise _refusal(model, "more than hidden states goes from layer to layer")
        return form
    raise _refusal(model, why)


class _NotAStack(Exception):
    """The layers are not called as a stack."""


def _trial_run(model: StreamedModel, layers: Sequence[nn.Module], form: int | None, fill: float, value: Any) -> _Trial:
    trial = _Trial([], [])

    def stand_in(index: int, /, *args: Any, **kwargs: Any) -> Any:
        hidden, positional, named = hidden_of(args, kwargs)
        if index != len(trial.calls):
            raise _NotAStack(f"layer {index} is called when layer {len(trial.calls)} should be")
        if not isinstance(hidden, torch.Tensor) or (index and hidden is not trial.flowing):
            raise _NotAStack("the output of one layer is changed before the next layer")
        if hidden.shape[:2] != _GIVEN.shape:  # stand-ins take the number of cached tokens from it
            raise _NotAStack(f"its layers get {tuple(hidden.shape)} for {_GIVEN.shape[1]} tokens")
        packer = Packer(lambda cache: len(recipe_of(cache)))
        trial.calls.append(packer.call(positional, named))
        trial.tensors.append(packer.tensors)
        trial.flowing = torch.full_like(hidden, fill)
        return output_of(form, trial.flowing, value)

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Done

    head = model.get_output_embeddings()
    for index, layer in enumerate(layers):
        layer.forward = partial(stand_in, index)
    if head is not None:
        head.forward = stop
    try:
        with torch.no_grad():
            model(input_ids=_GIVEN, use_cache=True)
    except _Done:
        pass
    except (HostsError, _NotAStack):
        raise
    except Exception as error:
        if len(trial.calls) == len(layers):
            return trial  # the error is from code after the layers, which has no weights here
        text = str(error).partition("\n")[0]
        raise _NotAStack(f"its forward expects more of a layer ({type(error).__name__}: {text})") from error
    finally:
        for module in (*layers, *([head] if head is not None else [])):
            del module.forward
    if len(trial.calls) < len(layers):
        raise _NotAStack(f"only {len(trial.calls)} of its {len(layers)} layers are called")
    return trial


def _same(first: list[list[torch.Tensor]], second: list[list[torch.Tensor]]) -> bool:
    """Whether two passes gave the layers the same inputs, hidden states excepted; NaN equals NaN."""
    pairs = [(a, b) for xs, ys in zip(first, second, strict=True) for a, b in zip(xs, ys, strict=True)]
    return all(a.shape == b.shape and torch.equal(_numbers(a), _numbers(b)) for a, b in pairs)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor, 7.0) if tensor.is_floating_point() else tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive layers, from `begin` to `end` exclusive."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.begin <= layer < self.end


def plan_spans(layers: Sequence[int], other_bytes: int, budgets: Sequence[int]) -> tuple[Span, ...]:
    """A span for each process, in order, which together cover all layers.

    Args:
        layers: bytes of each layer, in the order of a pass.
        other_bytes: bytes of the other weights (embedding, norm, head); the first process has those, and so may have no
            layer. Every other one has at least one.
        budgets: bytes that weights may take in each process.

    Raises:
        HostsError: there are more workers than layers.
    """
    count, ranks = len(layers), len(budgets)
    if ranks - 1 > count:
        raise HostsError(f"{count} layers cannot be spread over {ranks} processes.", "Start fewer processes.")
    sums = [0]
    for nbytes in layers:
        sums.append(sums[-1] + nbytes)
    # best[end]: the cost of the processes so far if they have the layers before `end`, and the end of each span
    best: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, ())}
    for rank, budget in enumerate(budgets):
        reached: dict[int, tuple[int, float, tuple[int, ...]]] = {}
        for begin, (streamed, fullest, ends) in best.items():
            for end in range(begin + (rank > 0), count + 1):
                load = sums[end] - sums[begin] + (other_bytes if rank == 0 else 0)
                added = _streamed(load, max(layers[begin:end], default=0), budget)
                full = load / budget if budget else math.inf if load else 0.0
                candidate = (streamed + added, max(fullest, full), (*ends, end))
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    ends = best[count][2]
    return tuple(Span(begin, end) for begin, end in zip((0, *ends), ends, strict=False))


def _streamed(load: int, largest: int, budget: int) -> int:
    """Bytes that a process streams in each pass: weights that do not fit next to the streaming buffers."""
    return 0 if load <= budget else min(load, load - budget + SLOTS * largest)
