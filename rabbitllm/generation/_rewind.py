"""A model and a KV cache of it that can go back: it computes tokens that may be wrong, and drops them if they are.

Attention drops them by cutting. States sum up all tokens, so a copy of them is made before the pass and put back after
it. Then the cache lacks the correct tokens of that pass too; they are the first rows of the next one, which reads the
weights anyway.

Where every layer keeps every token, the tokens of a pass may also be a tree (SpecInfer, arXiv:2305.09781): each attends
to the text and to its ancestors, and the rows of one path are kept.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from rabbitllm.base.contexts import assigned
from rabbitllm.engine.kv_room import is_window, keeps_every_token
from rabbitllm.engine.transformers_api import DummyLayer, attention_of
from rabbitllm.generation.kv_cache import (
    BY_ROWS,
    Beside,
    Saved,
    cache_argument,
    cache_layers,
    can_be_cropped,
    drop_last,
    is_nothing,
    layers_of,
    restore,
    saved,
)
from rabbitllm.generation.transformers_api import has_dynamic_cache

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

_RECURRENT = ("Mixer", "RecurrentBlock")
"""Ends of the names of classes that have the recurrence of the models in `BY_ROWS`."""
MAX_CARRIED = 16
"""The most tokens that states lack after wrong drafts; then a pass without a draft computes them."""
_AHEAD = 64
"""So many tokens further than needed the arguments of passes are continued at once."""
_INDEX = "Indexer"
"""End of the names of classes that choose tokens. Of equal scores they choose others among more tokens."""


@dataclass(frozen=True)
class _Traits:
    """What is the same for all sequences of a model.

    Attributes:
        config: of its text model.
        is_own: whether its first pass makes its cache, of a kind of its own.
        argument: name of the cache among its arguments.
        takes: names of all of them.
        by_row: modules that compute one token after the other. References, since modules hold their model.
        parts: those, and all in them.
    """

    config: Any
    is_own: bool
    argument: str
    takes: Collection[str]
    by_row: Sequence[ref[Any]]
    parts: Sequence[ref[Any]]

    @staticmethod
    def of(model: StreamedModel) -> _Traits:
        """The traits of a model, whose modules are looked through once."""
        if model not in _traits:
            config = model.config.get_text_config(decoder=True)
            by_rows = (_INDEX, *_RECURRENT) if config.model_type in BY_ROWS else _INDEX
            by_row = [module for module in model.modules() if type(module).__name__.endswith(by_rows)]
            parts = [ref(module) for part in by_row for module in part.modules()]
            takes = inspect.signature(model.forward).parameters
            _traits[model] = _Traits(
                config, not has_dynamic_cache(model), cache_argument(model), tuple(takes), [*map(ref, by_row)], parts
            )
        return _traits[model]


_traits = WeakKeyDictionary[Any, _Traits]()


class Rewindable:
    """A causal model and the KV cache of one sequence.

    Args:
        model: a model for which `can_go_back` holds.
        cache: its KV cache; None for an empty one.
        tokens: number of tokens in the cache.
        has_begun: whether `generate` has computed a pass of these tokens.
        arguments: further arguments of every pass: `attention_mask` and `position_ids`, (…, tokens), of the first
            tokens; later ones follow them.

    Attributes:
        cache: see above.
        tokens: number of tokens in the cache.
        device: of the tokens.
    """

    def __init__(
        self, model: StreamedModel, cache: Any = None, tokens: int = 0, has_begun: bool = False, **arguments: Any
    ) -> None:
        self.tokens = tokens
        self.device = model.device
        self._model = model
        self._traits = traits = _Traits.of(model)
        self.cache = DynamicCache(config=traits.config) if cache is None and not traits.is_own else cache
        self._arguments = arguments
        self._is_first = not has_begun
        if "position_ids" in traits.takes and not arguments:
            arguments["position_ids"] = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self._is_cropped = not traits.is_own and all(map(can_be_cropped, self.cache.layers))
        for module in (each() for each in traits.by_row):
            if module is not None and not isinstance(module.forward, _RowByRow):
                module.forward = _RowByRow(module.forward)
        self._mark: tuple[int, Saved, list[tuple[dict[str, Any], dict[str, Any]]]] | None = None

    @property
    def keeps_every_token(self) -> bool:
        """Whether the cache goes back at no cost, however long the pass was."""
        return self._is_cropped and all(keeps_every_token(layer) or is_nothing(layer) for layer in self.cache.layers)

    @classmethod
    def after(cls, earlier: Beside | None, model: StreamedModel, tokens: int) -> Rewindable:
        """Go on with what a model as a draft has kept of the first `tokens`; from the beginning if it has nothing."""
        if earlier is None or earlier.of() is not model or not earlier.can_be_cut(tokens):
            return cls(model)
        if earlier.tokens > tokens:
            restore(earlier.cache, {}, tokens)
        return cls(model, earlier.cache, min(earlier.tokens, tokens), has_begun=True)

    @property
    def beside(self) -> Beside:
        """What is kept of the sequence for a later answer."""
        return Beside(ref(self._model), self.cache, self.tokens)

    def logits(self, ids: torch.Tensor, count: int, parents: Sequence[int] = ()) -> torch.Tensor:
        """Compute the tokens that the cache lacks; for the arguments see `output`.

        Returns:
            Logits of the last `count` tokens, float32 of shape (count, vocabulary).
        """
        logits: torch.Tensor = self.output(ids, count, parents).logits[0, -count:]
        return logits.to(dtype=torch.float32, device=ids.device)

    def output(self, ids: torch.Tensor, count: int, parents: Sequence[int] = ()) -> Any:
        """Compute the tokens that the cache lacks, and return the model's output.

        Args:
            ids: all tokens of the sequence, int64 of shape (1, tokens).
            count: number of tokens whose logits are wanted.
            parents: the last tokens are a tree: for each its parent, an index into them; -1 for the token before them.
                Only for a model for which `takes_trees` holds.
        """
        rows, is_first, self._is_first = ids.shape[1] - self.tokens, self._is_first, False
        length = ids.shape[1]
        for name, tensor in self._arguments.items():
            if tensor.shape[-1] < length:
                self._arguments[name] = _continued(name, tensor, length + _AHEAD)
        arguments: dict[str, Any] = {name: tensor[..., :length] for name, tensor in self._arguments.items()}
        arguments[self._traits.argument] = self.cache
        inputs = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=rows, is_first_iteration=is_first, use_cache=True, **arguments
        )
        if "logits_to_keep" in self._traits.takes:
            inputs["logits_to_keep"] = count  # some models set another number
        if any(parent != index - 1 for index, parent in enumerate(parents)):
            inputs |= self._as_tree(ids, parents, arguments)
        with assigned(_BY_ROWS, not is_first):
            output = self._model(**inputs, return_dict=True)
        self.cache = output.get(self._traits.argument, self.cache)
        if self._traits.is_own and is_first:
            for index, layer in enumerate(layers_of(self.cache)):
                if not layer.is_initialized:
                    self.cache.layers[index] = DummyLayer()  # masks would be as long as it, without tokens before
        self.tokens = ids.shape[1]
        return output

    def _as_tree(self, ids: torch.Tensor, parents: Sequence[int], arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The mask and the positions of a pass whose last tokens are a tree.

        Returns:
            `attention_mask`, added to scores, of shape (1, 1, rows, tokens); `position_ids`, (1, rows).
        """
        total, rows, count = ids.shape[1], ids.shape[1] - self.tokens, len(parents)
        text = total - count
        ancestors = torch.eye(count, dtype=torch.bool)
        for index, parent in enumerate(parents):
            if parent >= 0:
                ancestors[index] |= ancestors[parent]
        attends = torch.ones(rows, total, dtype=torch.bool).tril_(self.tokens)
        in_tree = min(rows, count)
        attends[rows - in_tree :, text:] = ancestors[count - in_tree :]
        attends[rows - in_tree :, :text] = True
        positions = arguments.get("position_ids")
        position = torch.arange(total)[None] if positions is None else positions.cpu().clone()
        position[..., text:] = position[..., text - 1 : text] + ancestors.sum(dim=1)
        if (kept := arguments.get("attention_mask")) is not None:
            attends &= kept.cpu().bool()
        dtype = self._model.dtype
        mask = torch.zeros(1, 1, rows, total, dtype=dtype).masked_fill_(~attends, torch.finfo(dtype).min)
        return {"attention_mask": mask.to(ids.device), "position_ids": position[..., self.tokens :].to(ids.device)}

    def mark(self) -> None:
        """Remember the cache as it is. Tokens after it may be dropped."""
        if self._is_cropped:
            self.cache.activate_past_recording()  # of windows
            self._mark = self.tokens, {}, []
        else:
            states = [vars(part) for each in self._traits.parts if (part := each()) is not None]
            kept = [(held, {name: value for name, value in held.items() if torch.is_tensor(value)}) for held in states]
            self._mark = self.tokens, saved(self.cache), kept

    def settle(self, tokens: int, path: Sequence[int] = (), leaves: int = 0) -> None:
        """Drop the tokens after the first `tokens`, and forget the mark; if any are dropped, states go back to it.

        Args:
            tokens: number of tokens to keep.
            path: of a tree of the last `leaves` tokens the indices of those to keep, in ascending order.
        """
        if self._mark is None:
            return
        length, attributes, kept = self._mark
        text = self.tokens - leaves
        if list(path) != list(range(len(path))):
            rows = torch.tensor(path) + text
            for layer in self.cache.layers:
                for tensor in (layer.keys, layer.values):
                    tensor[:, :, text : text + len(rows)] = tensor[:, :, rows.to(tensor.device)]
        dropped = max(self.tokens - tokens, 0)
        if self._is_cropped:
            drop_last(self.cache, dropped)
            self.tokens -= dropped
        elif dropped:
            restore(self.cache, attributes, length)
            for held, values in kept:
                held.update(values)
            self.tokens = length
        self.release()

    def release(self) -> None:
        """Forget the mark."""
        self._mark = None
        for layer in filter(is_window, layers_of(self.cache)):
            layer.record_past = False


_BY_ROWS: ContextVar[bool] = ContextVar("_BY_ROWS", default=False)
"""Whether recurrences compute one token after the other; each coroutine has its own."""


class _RowByRow:
    """The forward of a recurrence, for one token after the other if `_BY_ROWS`. All else computes them at once."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _each_row(self._forward, *args, **kwargs) if _BY_ROWS.get() else self._forward(*args, **kwargs)


def _each_row(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module for each token; its output, or the first of several, is (…, tokens, width)."""
    call = inspect.signature(forward).bind(*args, **kwargs)
    rows = next(value.shape[1] for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))

    def of(name: str, value: Any, row: int) -> Any:
        if isinstance(value, tuple):
            return tuple(of(name, item, row) for item in value)
        if isinstance(value, dict):
            return {name: of(name, item, row) for name, item in value.items()}
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return value
        if "mask" in name and value.dim() > 2:  # (…, tokens, all tokens)
            return value[..., row : row + 1, : value.shape[-1] - rows + row + 1]
        if name == "position_embeddings" and value.shape[1] > rows:  # of all tokens
            return value[:, : value.shape[1] - rows + row + 1]
        return value[:, row : row + 1] if value.shape[1] == rows else value

    outputs = []
    for row in range(rows):
        arguments = {name: of(name, value, row) for name, value in call.arguments.items()}
        of_row = inspect.BoundArguments(call.signature, arguments)
        outputs.append(forward(*of_row.args, **of_row.kwargs))
    if isinstance(outputs[0], tuple):
        return (torch.cat([output[0] for output in outputs], dim=1), *outputs[-1][1:])
    # with fewer tokens than are chosen, all are
    return torch.cat([pad(output, (0, outputs[-1].shape[-1] - output.shape[-1])) for output in outputs], dim=-2)


def _continued(name: str, tensor: torch.Tensor, length: int) -> torch.Tensor:
    """The `attention_mask` or `position_ids` of the first tokens, extended to a number of tokens."""
    more = torch.arange(1, length - tensor.shape[-1] + 1, device=tensor.device) * (name == "position_ids")
    return torch.cat((tensor, (tensor[..., -1:] + more).to(tensor.dtype)), dim=-1)


def takes_trees(model: StreamedModel) -> bool:
    """Whether the tokens of a pass can be a tree: a mask and the positions say all of what a token attends to."""
    decoder = model.get_decoder() or model
    config = model.config.get_text_config(decoder=True)
    return bool(
        all(map(keeps_every_token, cache_layers(model)))
        and getattr(model, "hosts", None) is None
        and getattr(config, "rope_parameters", None)
        and attention_of(config) in ("sdpa", "eager")
        and "position_ids" in inspect.signature(model.forward).parameters
        and hasattr(sys.modules[type(decoder).__module__], "create_causal_mask")
    )
