"""Heads for multi-token prediction (MTP): what a checkpoint has behind a model's last layer to predict further tokens.

A head is a layer of the model's own class between norms: norms of the next token's embedding and of the last hidden
state, a projection of both, the layer, a norm. Embedding, output layer and rotary embedding are the model's. The class
is transformers' `MtpModel`; it also computes the heads of families for which transformers drops them, whose tensors
have the same form. While heads are used, all of them is in memory, and the model's output layer too.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rabbitllm.base.options import RunOptions
from rabbitllm.base.terminal import error_line, listed, size
from rabbitllm.checkpoints.config import UNBUILT_HEADS
from rabbitllm.checkpoints.naming import head_of
from rabbitllm.engine import _published, skeleton
from rabbitllm.engine._streamer import Streamer
from rabbitllm.engine._weights import KeyRenaming, map_weights, unexpected
from rabbitllm.engine.devices import Device, budget_of
from rabbitllm.engine.load_plan import LoadPlan, held_bytes, plan_with
from rabbitllm.engine.placement import READY, Tier
from rabbitllm.engine.streamed_model import StreamedModel
from rabbitllm.engine.transformers_api import (
    WeightRenaming,
    conversions_of,
    has_heads,
    heads_cache,
    logits_of_heads,
    share_with_heads,
)
from rabbitllm.errors import OptionError, RabbitLLMError
from rabbitllm.formats.tensor_spec import torch_dtype
from rabbitllm.store.layer_store import StoredTensor, WeightFiles

IN_MEMORY = (*READY, Tier.PACKED, Tier.ROWS)
_LEAVE_OUT = "Leave --draft mtp out, or use another draft."
_RAISE = "Raise max_memory, use a stronger compression, or leave --draft mtp out."


class Heads:
    """The heads of a loaded model.

    Args:
        model: the model.
        heads: transformers' own model of the heads, with its weights.
        streamer: of the heads.
        device: where they compute.
        nbytes: memory that they take.
    """

    def __init__(self, model: StreamedModel, heads: Any, streamer: Streamer, device: torch.device, nbytes: int) -> None:
        self.nbytes = nbytes
        self.device = device
        self._model = model
        self._heads = heads
        self._streamer = streamer
        share_with_heads(heads, model)

    @property
    def count(self) -> int:
        """The number of heads that the checkpoint has."""
        return len(self._heads.layers)

    @property
    def module(self) -> Any:
        """Transformers' model of them."""
        return self._heads

    @property
    def config(self) -> Any:
        """The config of the heads, each of which is a layer."""
        return self._heads.config

    def empty_cache(self) -> Any:
        """An empty KV cache of one sequence, which can be cropped."""
        return heads_cache(self._heads)

    @torch.no_grad()
    def __call__(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        head: int = 0,
        ends: Sequence[int] = (-1,),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict the token after the last one.

        Args:
            ids: tokens, int64 of shape (1, tokens).
            hidden: of the token before each: the model's last hidden state, after its last norm, or what a head
                returned; (1, tokens, width).
            positions: of the tokens, int64 of shape (1, tokens).
            cache: of the tokens before these; they are appended.
            head: number of the head.
            ends: the tokens whose logits are wanted.

        Returns:
            The head's hidden states, (1, tokens, width), and logits after `ends`, float32 of shape (ends, vocabulary).
        """
        model = self._model
        embedding = model.get_input_embeddings()
        norm = getattr(embedding, "embed_norm", None)  # of Inkling, whose heads do without
        bare = contextlib.nullcontext() if norm is None else norm.register_forward_hook(lambda module, args, _: args[0])
        with model.streamer.passing(), bare:
            embedded = embedding(ids.to(self.device)).to(self.device)
        with self._streamer.passing():
            hidden = self._heads.forward_layer(
                head, hidden.to(self.device), positions.to(self.device), cache, inputs_embeds=embedded
            )
        with model.streamer.passing():
            logits = logits_of_heads(self._heads, hidden[:, list(ends)])[0]
        return hidden, logits.to(dtype=torch.float32, device=ids.device)


@dataclass(frozen=True)
class HeadsPlan:
    """Heads as decided before any of their weights is read.

    Attributes:
        plan: as for a model of their own.
        device: where they compute.
        nbytes: memory that they take.
    """

    plan: LoadPlan
    device: Device
    nbytes: int


def plan_heads(
    plan: LoadPlan, store: WeightFiles, home: Path, options: RunOptions, devices: Sequence[Device]
) -> tuple[HeadsPlan, LoadPlan]:
    """Plan the heads of a model, and place the model in the memory that they leave.

    Args:
        plan: of the model.
        store: its files.
        home: the folder of its config.
        options: of the run.
        devices: to compute on.

    Raises:
        OptionError: the checkpoint has no heads, or heads of another form; or they do not fit in memory.
    """
    if any(unit.tier is Tier.ELSEWHERE for unit in plan.placement.units):
        raise OptionError("Heads for multi-token prediction need all layers in one process.", _LEAVE_OUT)
    device = next(device for device in devices if device.name == plan.placement.home)
    planned = _plan_alone(plan, store, home, options, device)
    nbytes = held_bytes(planned.placement, planned.sources, planned.experts)
    room = budget_of(device, options)
    placed = (*planned.placement.units, *planned.placement.experts)
    if nbytes > room or any(unit.tier not in IN_MEMORY for unit in placed):
        needed = sum(unit.stored for unit in placed)
        raise OptionError(
            f"The heads for multi-token prediction take {size(needed)} of memory; {size(room)} may be used on "
            f"{device.name}.",
            _RAISE,
        )
    plan = placed_beside(plan, {device.name: nbytes}, devices, options)
    output = plan.model.get_output_embeddings()
    for unit in plan.placement.units:
        if plan.sources[unit.unit].unit.module is output and unit.tier not in IN_MEMORY:
            raise OptionError(
                f"Heads for multi-token prediction need the output layer ({size(unit.stored)}) in memory, which is "
                f"{unit.tier.value}; {size(room - nbytes)} may be used besides the heads.",
                _RAISE,
            )
    return HeadsPlan(planned, device, nbytes), plan


def placed_beside(plan: LoadPlan, taken: Mapping[str, int], devices: Sequence[Device], options: RunOptions) -> LoadPlan:
    """The plan, placed in the memory that something else leaves; `taken` has its bytes by device."""
    budgets = {device.name: max(budget_of(device, options) - taken.get(device.name, 0), 0) for device in devices}
    return plan.placed(devices, options, budgets)


def _plan_alone(plan: LoadPlan, store: WeightFiles, home: Path, options: RunOptions, device: Device) -> LoadPlan:
    model = plan.model
    numbers = {
        name: head_of(name, model.config.get_text_config(decoder=True).num_hidden_layers) for name in store.tensors
    }
    count = max((number + 1 for number in numbers.values() if number is not None), default=0)
    if why := UNBUILT_HEADS.get(model.config.get_text_config(decoder=True).model_type):
        raise OptionError(f"Heads for multi-token prediction of {store.label} cannot be built: {why}.", _LEAVE_OUT)
    if not count or not has_heads():
        why = "transformers 5.24 or later is needed" if count else "no tensors mtp.*, or layers behind the model's last"
        raise OptionError(f"{store.label} has no usable heads for multi-token prediction: {why}.", _LEAVE_OUT)
    files = copy.copy(store)
    files.tensors = {name: tensor for name, tensor in store.tensors.items() if numbers[name] is not None}
    problem, cause = "", None
    config = skeleton.read_config(home, options.trust_remote_code)  # not with the settings as the model has them
    quantizer = _published.quantizer_for(home, config, [device])
    try:
        heads = skeleton.build_heads(
            model, count, model.dtype, quantizer, lambda heads: _plain_linears(heads, files.tensors)
        )
        weights = map_weights(heads, files.tensors, store.label, quantizer, casts=plan.weights.casts)
        if unknown := unexpected(heads, weights):
            problem = f"{listed(unknown, 3)} are not part of it."
    except Exception as error:  # configs of families without such heads make transformers raise any error
        problem, cause = (error.problem if isinstance(error, RabbitLLMError) else error_line(error)), error
    if problem:
        raise OptionError(
            f"The heads for multi-token prediction of {store.label} have a form that is not supported: {problem}",
            _LEAVE_OUT,
        ) from cause
    planned = plan_with(heads, weights, files, options, [device])
    return replace(planned, quantizer=quantizer, is_narrowed=plan.is_narrowed)


def _plain_linears(heads: Any, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Paths of linear layers whose weights a quantized checkpoint has in plain form."""
    renamings = [entry for entry in conversions_of(heads, None) if isinstance(entry, WeightRenaming)]
    renamed = KeyRenaming(renamings, [], heads.base_model_prefix, heads.state_dict())
    targets = {renamed(name)[0]: tensor for name, tensor in stored.items()}
    for path, module in heads.named_modules():
        tensor = targets.get(f"{path}.weight")
        if isinstance(module, nn.Linear) and tensor is not None and tensor.quantized is None:
            dtype = torch_dtype(tensor.parts[0].dtype)
            if dtype.is_floating_point and dtype.itemsize > 1:
                yield path
