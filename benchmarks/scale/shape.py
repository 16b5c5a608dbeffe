"""Bytes that a pass of a published model reads, copies and multiplies with on a machine of which only rates are known.

Sizes are from the package's short list of models, places from the engine's placement, and a pass's work from the code
of `rabbitllm plan`. No weights are read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.scale.facts import Host
from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import CpuDevice, Device
from rabbitllm.engine.experts import expert_costs
from rabbitllm.engine.load_plan import LoadPlan, make_load_plan, unit_costs
from rabbitllm.engine.placement import SLOTS, Budget, ExpertCost, UnitCost, place
from rabbitllm.engine.units import MatrixChooser
from rabbitllm.estimate.cost_model import Product, RoutedWork, UnitWork, routed_work, work_of
from rabbitllm.estimate.machine import Machine
from rabbitllm.estimate.outline import Outline, outline_of, published
from rabbitllm.estimate.predict import stretched
from rabbitllm.generation.kv_cache import CacheCost, cost_by_config
from rabbitllm.quant.coded import CodedForm
from rabbitllm.quant.products import FusedMatrix, can_multiply
from rabbitllm.quant.schemes import Quantized
from rabbitllm.splitter.plan import PlannedFiles

DENSE, MIXTURE = "Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen3-Coder-Next"
MODELS = (DENSE, MIXTURE)
COMPRESSIONS = (None, "8bit", "4bit")
TWO_BYTES = 2
"""Of a weight in a product."""


class PaperGpu(CpuDevice):
    """A GPU with a name and a kind only, for placement."""

    shares_host_memory = False

    def __init__(self, index: int) -> None:
        super().__init__()
        self.name = f"cuda:{index}"


@dataclass(frozen=True)
class Shape:
    """A model at one compression, without a machine.

    Attributes:
        name: of the repository.
        compression: None, "8bit" or "4bit".
        config: as published.
        outline: its tensors.
        cache: bytes of a sequence's KV cache and states.
    """

    name: str
    compression: str | None
    config: Mapping[str, Any]
    outline: Outline
    cache: CacheCost

    @property
    def output_bytes(self) -> int:
        """Bytes of its layer files."""
        return self.outline.output_bytes(self.compression)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.outline.layers)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a token's hidden state between layers."""
        return TWO_BYTES * int(self.config["hidden_size"])


@dataclass(frozen=True)
class Unit:
    """A placed unit's work in a pass; bytes.

    Attributes:
        device: on which it computes.
        is_layer: whether it is a decoder layer.
        read, copied: in each pass, from the disk and to the device.
        stored, made: its matrices as stored, and in 16 bits.
        experts: its modules of experts.
    """

    device: str
    is_layer: bool
    read: int
    copied: int
    stored: int
    made: int
    experts: tuple[RoutedWork, ...]


@functools.cache
def shape_of(name: str, compression: str | None) -> Shape:
    """A model of the package's short list."""
    model = next(model for model in published() if model.repository == name)
    return shape_of_outline(name, compression, model.outline)


def shape_of_layers(name: str, compression: str | None, config: Mapping[str, Any], layer: Mapping[str, Any]) -> Shape:
    """A model with equal layers, from the shapes of a layer's tensors."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    tensors = {f"model.layers.0.{inner}": shape for inner, shape in layer.items()}
    tensors |= {"model.embed_tokens.weight": [vocabulary, hidden], "lm_head.weight": [vocabulary, hidden]}
    entry = {"config": config, "sample": {"num_hidden_layers": 1}, "layers": "0" * config["num_hidden_layers"]}
    return shape_of_outline(
        name, compression, outline_of({**entry, "tensors": {**tensors, "model.norm.weight": [hidden]}})
    )


def shape_of_outline(name: str, compression: str | None, outline: Outline) -> Shape:
    """A model with the cache of its config."""
    return Shape(name, compression, outline.config, outline, cache_of(outline.config))


def cache_of(config: Mapping[str, Any]) -> CacheCost:
    """Bytes of a sequence, as the server counts, with states for layers of linear attention."""
    every = int(config.get("full_attention_interval", 1))
    layers = int(config["num_hidden_layers"])
    keyed = layers // every
    cost = cost_by_config(SimpleNamespace(**{**config, "num_hidden_layers": keyed}), torch.float16)
    if every == 1:
        return cost
    keys, values = (config[f"linear_num_{part}_heads"] * config[f"linear_{part}_head_dim"] for part in ("key", "value"))
    state = 4 * config["linear_num_value_heads"] * config["linear_key_head_dim"] * config["linear_value_head_dim"]
    window = TWO_BYTES * (2 * keys + values) * config["linear_conv_kernel_dim"]
    return dataclasses.replace(cost, fixed=(layers - keyed) * (state + window))


@dataclass(frozen=True)
class Drawn:
    """A model prepared for GPUs or for the processor, to be placed with any limits."""

    shape: Shape
    make_load_plan: LoadPlan
    costs: tuple[UnitCost, ...]
    experts: tuple[ExpertCost, ...]

    @property
    def buffers(self) -> int:
        """The least bytes with which a device can stream all of it."""
        largest = max(cost.stored for cost in self.costs if not cost.by_rows)
        return SLOTS * largest + max((cost.transit * cost.slot for cost in self.experts), default=0)

    def units(self, room: int, count: int, host: int) -> tuple[Unit, ...]:
        """Its work with `room` bytes for weights on each of `count` GPUs, and `host` bytes in memory."""
        names = [f"cuda:{index}" for index in range(count)] or ["cpu"]
        budgets = [Budget(name, room, is_host=not count) for name in names]
        placement = place(self.costs, budgets, host_bytes=host, experts=self.experts)
        placed = dataclasses.replace(self.make_load_plan, placement=placement)
        routed: dict[str, list[RoutedWork]] = {}
        for experts in routed_work(placed):
            routed.setdefault(experts.source.unit, []).append(experts)
        stored = {cost.name: cost.stored for cost in self.costs}
        return tuple(_unit(work, stored[work.unit], tuple(routed.get(work.unit, ()))) for work in work_of(placed))


def _unit(work: UnitWork, stored: int, experts: tuple[RoutedWork, ...]) -> Unit:
    in_16_bits = sum(_in_two_bytes(product) for product in work.products if product.share == 1.0)
    is_layer = work.modules > 0
    return Unit(work.device, is_layer, work.streamed, work.uploaded, stored if in_16_bits else 0, in_16_bits, experts)


def _in_two_bytes(product: Product) -> int:
    """Bytes of a product's matrix in 16 bits, whatever its form."""
    rows, columns = product.shape
    return product.nbytes if hasattr(torch, product.form) else TWO_BYTES * rows * columns


def draw(shape: Shape, on_gpu: bool) -> Drawn:
    """Prepare a model for an unknown GPU, or for the processor, whose products use codes."""
    device: Device = PaperGpu(0) if on_gpu else CpuDevice()
    options = RunOptions(dtype="bfloat16", max_memory={device.name: 0}, show_progress=False, exact=on_gpu)
    machine = Machine([device], options)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "config.json").write_text(json.dumps(shape.outline.sample))
        store = PlannedFiles(shape.outline.plans[shape.compression], home)
        sample = make_load_plan(store, options, home, [device])
    drawn = stretched(sample, shape.outline.layers, machine)
    choosers: dict[str, MatrixChooser] = {device.name: _fused} if on_gpu else {}
    costs = unit_costs(drawn.model, drawn.sources, drawn.experts, choosers)
    return Drawn(shape, drawn, tuple(costs), tuple(expert_costs(drawn.experts)))


def _fused(form: Quantized | CodedForm, dtype: torch.dtype) -> type[FusedMatrix] | None:
    """The products of an unknown GPU: from codes wherever bitsandbytes has a kernel."""
    return FusedMatrix if isinstance(form, Quantized) and can_multiply(form) else None


@functools.cache
def drawn_for(name: str, compression: str | None) -> Drawn:
    """A model of the short list, for GPUs."""
    return draw(shape_of(name, compression), on_gpu=True)


def fits_disk(shape: Shape, host: Host) -> bool:
    """Whether the layer files of a model fit on a machine's disk."""
    return shape.output_bytes <= host.disk_room.value
