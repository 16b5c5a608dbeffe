"""Methods of a streamed model, and those that it leaves to transformers' class."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers

from rabbitllm.engine.streamed_model import StreamedModel
from rabbitllm.errors import AbsentWeightError
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import ALL, INPUT, load, plain_model, split


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return load(split(build_checkpoint(tmp_path, "llama")), 0)


def test_model_is_that_of_transformers(model: Any) -> None:
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert isinstance(model, transformers.PreTrainedModel)
    assert isinstance(model, StreamedModel)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert type(model).__module__ == transformers.LlamaForCausalLM.__module__
    assert not model.training
    assert model.can_generate()
    assert transformers.LlamaForCausalLM is not type(model)
    assert not issubclass(transformers.LlamaForCausalLM, StreamedModel)


def test_device_is_where_it_computes(model: Any) -> None:
    assert model.device == torch.device("cpu")
    assert model.hf_device_map == {"": torch.device("cpu")}
    assert model.dtype == torch.float32


@pytest.mark.parametrize("budget", [ALL, 0])
def test_streamed_layers_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """On a GPU `generate` compiles by itself where the cache is static; the settings ask for it on any device."""
    model = load(split(build_checkpoint(tmp_path, "llama")), budget)
    settings = transformers.CompileConfig(backend="eager")
    settings._compile_all_devices = True
    compiled = []

    def compile_nothing(function: Any, **kwargs: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    model.generate(INPUT, max_new_tokens=3, do_sample=False, cache_implementation="static", compile_config=settings)
    assert bool(compiled) == model.placement.is_resident == (budget == ALL)


@pytest.mark.parametrize(
    ("move", "target"),
    [
        (lambda model: model.to("cuda:1"), "cuda:1"),
        (lambda model: model.to(dtype=torch.float16), "torch.float16"),
        (lambda model: model.to("cpu", torch.float64), "cpu, torch.float64"),
        (lambda model: model.cuda(), "cuda"),
        (lambda model: model.cuda(1), "cuda:1"),
        (lambda model: model.cuda(device="cuda:3"), "cuda:3"),
        (lambda model: model.double(), "float64"),
        (lambda model: model.type(torch.float16), "cpu, torch.float16"),
        (lambda model: torch.nn.Sequential(model).half() and model, "cpu, torch.float16"),
        (lambda model: model.half(), "float16"),
        (lambda model: model.bfloat16(), "bfloat16"),
    ],
)
def test_moving_has_no_effect_with_a_warning(
    model: Any, caplog: pytest.LogCaptureFixture, move: Any, target: str
) -> None:
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        assert move(model) is model
    (record,) = caplog.records
    assert f"model.to({target}) has no effect" in record.getMessage()
    assert model.dtype == torch.float32
    assert model(INPUT).logits.isfinite().all()


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.cpu(),
        lambda model: model.to(torch.device("cpu")),
        lambda model: model.to(dtype=None),
    ],
)
def test_moving_to_its_own_device_logs_no_warning(model: Any, caplog: pytest.LogCaptureFixture, move: Any) -> None:
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        assert move(model) is model
    assert not caplog.records


def test_casting_to_its_own_dtype_logs_no_warning(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        assert model.to(torch.float32) is model
        assert model.float() is model
        assert model.to("cpu", torch.float32) is model
        assert model.to("cpu", non_blocking=True) is model
        assert torch.nn.Sequential(model).to("cpu")[0] is model
        assert accelerate.Accelerator(cpu=True).prepare_model(model, evaluation_mode=True) is model
    assert not caplog.records


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("budget", [ALL, 0])
def test_number_of_parameters(tmp_path: Path, budget: int, compression: str | None, tied: bool) -> None:
    source = build_checkpoint(tmp_path, "qwen2", tied=tied)
    model, plain = load(split(source, compression), budget), plain_model(source)
    for options in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
        assert model.num_parameters(**options) == plain.num_parameters(**options)
    model.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == 0
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {name: (t.shape, t.dtype) for name, t in model.state_dict().items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in plain.state_dict().items()
    }


def test_memory_footprint(tmp_path: Path) -> None:
    source = build_checkpoint(tmp_path, "llama", tied=True, num_hidden_layers=8)
    folder, plain = split(source), plain_model(source)
    everything = load(folder)
    assert everything.get_memory_footprint() == plain.get_memory_footprint()
    assert everything.get_memory_footprint(return_buffers=False) == plain.get_memory_footprint(return_buffers=False)
    nothing, half = load(folder, 0), load(folder, plain.get_memory_footprint() // 2)
    layer = next(unit.stored for unit in nothing.placement.units if unit.unit.endswith("layers.0"))
    assert 2 * layer <= nothing.get_memory_footprint() < 3 * layer + plain.lm_head.weight.nbytes
    assert nothing.get_memory_footprint() < half.get_memory_footprint() < plain.get_memory_footprint()
    # exact: dequantized once, and kept so
    assert load(split(source, "4bit")).get_memory_footprint() == plain.get_memory_footprint()
    assert load(split(source, "4bit"), exact=False).get_memory_footprint() < plain.get_memory_footprint() / 2


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_absent_weights_are_not_pickled(tmp_path: Path, compression: str | None) -> None:
    model = load(split(build_checkpoint(tmp_path, "llama"), compression), 0)
    with pytest.raises(AbsentWeightError, match="not in memory"):
        torch.save(model.state_dict(), tmp_path / "weights.pt")


def test_printing_the_profile(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model.print_profile_summary()
    assert capsys.readouterr().out == "Passes, by stage: nothing was recorded (pass profiling_mode=True).\n"


def test_placement_prints(model: Any) -> None:
    assert str(model.placement).splitlines()[0].split() == ["device", "tier", "units", "size"]
