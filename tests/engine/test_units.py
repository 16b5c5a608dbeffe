"""The units of a model, and weights that are bound to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.engine import skeleton
from rabbitllm.engine.units import ParameterEntry, Unit, UnitSource, find_units, typed
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.store.layer_file import TENSOR_ALIGNMENT
from tests.support.builders import FAMILIES


def build(folder: Path, family: str, **settings: object) -> Any:
    config = FAMILIES[family].config(FAMILIES[family].ties[0], **settings)
    if FAMILIES[family].encoder_decoder:
        config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(folder)
    config = skeleton.read_config(folder)
    return skeleton.build_skeleton(folder, config, torch.float32, None)


def unit_of(model: Any, name: str) -> Unit:
    return next(unit for unit in find_units(model) if unit.name == name)


def test_units_of_a_decoder(tmp_path: Path) -> None:
    units = find_units(build(tmp_path, "llama"))
    assert [(unit.name, unit.is_layer, unit.holds_units) for unit in units] == [
        ("model.embed_tokens", False, False),
        ("model.layers.0", True, False),
        ("model.layers.1", True, False),
        ("model.layers.2", True, False),
        ("model.norm", False, False),
        ("lm_head", False, False),
    ]
    assert len(units[1].entries) == 9


def test_both_stacks_of_an_encoder_decoder_are_layers(tmp_path: Path) -> None:
    layers = [unit.name for unit in find_units(build(tmp_path, "t5")) if unit.is_layer]
    assert layers == [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_in_exactly_one_unit(tmp_path: Path, family: str) -> None:
    model = build(tmp_path, family)
    targets = [entry.target for unit in find_units(model) for entry in unit.entries]
    assert len(targets) == len(set(targets))
    # of a module that is used in several entries only the first name is a unit's
    owners = {id(module): name for name, module in reversed(list(model.named_modules()))}
    expected = set()
    for name in model.state_dict():
        path, _, leaf = name.rpartition(".")
        expected.add(f"{owners[id(model.get_submodule(path))]}.{leaf}")
    assert set(targets) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_in_order(tmp_path: Path, family: str) -> None:
    model = build(tmp_path, family)
    numbers = [
        int(unit.name.rpartition(".")[2])
        for unit in find_units(model)
        if unit.is_layer and not unit.name.startswith("decoder.block")
    ]
    assert numbers == list(range(model.config.get_text_config().num_hidden_layers))


def test_module_around_units_holds_them() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(3, 3)

    class Model(nn.Module):
        _no_split_modules = ()

        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()
            self.head = nn.Linear(3, 3)

    model: Any = Model()
    assert [(unit.name, unit.holds_units, [entry.leaf for entry in unit.entries]) for unit in find_units(model)] == [
        ("scaled", True, ["scale"]),
        ("scaled.inner", False, ["weight", "bias"]),
        ("head", False, ["weight", "bias"]),
    ]


def test_layers_by_no_split_modules(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    class Model(nn.Module):
        _no_split_modules = ("Block", "Linear")

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({"a": Block(), "b": Block()})
            self.head = nn.Linear(2, 2)

    model: Any = Model()
    assert [(unit.name, unit.is_layer) for unit in find_units(model)] == [
        ("blocks.a", True),
        ("blocks.b", True),
        ("head", False),
    ]


def test_persistent_buffers_belong_to_units_and_others_do_not(tmp_path: Path) -> None:
    model = build(tmp_path, "deepseek_v3")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    entries = {entry.target: entry for unit in find_units(model) for entry in unit.entries}
    assert entries[bias].dtype == torch.float32
    assert not any("inv_freq" in target for target in entries)
    value = torch.arange(4.0)
    entries[bias].bind(value)
    bound = model.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias
    assert bound is value
    assert not isinstance(bound, nn.Parameter)


def test_bound_tensor_is_the_parameter(tmp_path: Path) -> None:
    model = build(tmp_path, "llama")
    (entry,) = unit_of(model, "model.norm").entries
    value = torch.full((64,), 2.0)
    entry.bind(value)
    assert isinstance(model.model.norm.weight, nn.Parameter)
    assert model.model.norm.weight.data_ptr() == value.data_ptr()
    assert model.model.norm.weight.requires_grad
    assert dict(model.named_parameters())["model.norm.weight"] is model.model.norm.weight


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float8_e4m3fn])
def test_integers_are_bound_without_a_gradient(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build(tmp_path, "llama")
    (entry,) = unit_of(model, "model.norm").entries
    entry.bind(torch.zeros(64).to(dtype))
    assert model.model.norm.weight.dtype == dtype
    assert not model.model.norm.weight.requires_grad


def test_placeholder_has_the_form_of_its_weight_and_reads_it(tmp_path: Path) -> None:
    model = build(tmp_path, "llama")
    device = torch.device("cpu")
    asked = []

    def read(entry: ParameterEntry) -> torch.Tensor:
        asked.append(entry.target)
        return entry.bindable(torch.ones(entry.shape))

    for entry in unit_of(model, "model.layers.0").entries:
        entry.bind(entry.placeholder(device, read))
    up = model.model.layers[0].mlp.up_proj
    assert (up.weight.shape, up.weight.dtype, up.weight.device) == ((128, 64), torch.float32, device)
    assert up.weight.requires_grad
    assert dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"] is up.weight
    assert not asked
    assert torch.equal(up(torch.ones(1, 64)), torch.full((1, 128), 64.0))
    assert asked == ["model.layers.0.mlp.up_proj.weight"]


def test_placeholder_of_a_buffer_is_no_parameter() -> None:
    module = nn.Module()
    module.register_buffer("steps", torch.tensor([3, 4]))

    class Model(nn.Module):
        _no_split_modules = ()

        def __init__(self) -> None:
            super().__init__()
            self.counter = module

    model: Any = Model()
    (entry,) = find_units(model)[0].entries
    entry.bind(entry.placeholder(torch.device("cpu"), lambda entry: torch.tensor([5, 6])))
    assert not isinstance(module.steps, nn.Parameter)
    assert module.steps.shape == (2,)
    assert module.steps.tolist() == [5, 6]


def test_attention_that_reads_its_output_matrix_is_one_unit() -> None:
    """torch hands `out_proj.weight` to a function, and another one where it finds that it is no plain tensor."""

    class Model(nn.Module):
        _no_split_modules = ()

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)
            self.head = nn.Linear(4, 4)

    model: Any = Model()
    first, second = find_units(model)
    assert (first.name, first.is_layer, first.holds_units, second.name) == ("attention", False, False, "head")
    assert sorted(entry.target for entry in first.entries) == [
        "attention.in_proj_bias",
        "attention.in_proj_weight",
        "attention.out_proj.bias",
        "attention.out_proj.weight",
    ]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_empty_tensor_is_in_no_buffer(shape: tuple[int, ...]) -> None:
    unit = Unit("adapter", nn.Linear(4, 3), (), False, False)
    read = UnitSource(unit, (), {}, (), False, 0, 0, 0).part_of(torch.empty(0, dtype=torch.uint8))
    tensor = read(TensorSpec("adapter.weight", "BF16", shape, "adapter.safetensors", 4096, 0))
    assert (tensor.shape, tensor.dtype) == (torch.Size(shape), torch.bfloat16)


@pytest.mark.parametrize("lead", [0, 2, 16, 32, TENSOR_ALIGNMENT])
def test_weights_that_kernels_read_are_aligned(lead: int) -> None:
    """Kernels round differently below the alignment of torch's own memory, so such bytes are copied."""
    room = torch.arange(512, dtype=torch.int16).view(torch.uint8)
    begin = -room.data_ptr() % TENSOR_ALIGNMENT + lead
    flat = room[begin : begin + 256]
    weight = typed(flat, TensorSpec("weight", "BF16", (8, 16), "a.safetensors", 4096, 256))
    assert weight.data_ptr() % TENSOR_ALIGNMENT == 0
    assert (weight.data_ptr() == flat.data_ptr()) == (lead % TENSOR_ALIGNMENT == 0)
    assert torch.equal(weight.view(-1).view(torch.uint8), flat)
    codes = typed(flat, TensorSpec("weight", "U8", (256,), "a.safetensors", 4096, 256))
    assert codes.data_ptr() == flat.data_ptr()  # codes are read by bytes
