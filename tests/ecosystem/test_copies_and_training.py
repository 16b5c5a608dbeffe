"""What other libraries do with a model: copy it, pickle it, place it, train it."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from ray import cloudpickle
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from rabbitllm.errors import AbsentWeightError, CopyError
from rabbitllm.quant import bfloat_products
from tests.support.builders import FAMILIES, build_checkpoint
from tests.support.integer_products import tolerated
from tests.support.one_tiny_model import checkpoint, plain, split_folder
from tests.support.tiny_models import ALL, INPUT, dequantized, load, split

__all__ = ["checkpoint", "plain", "split_folder"]

STREAMED = 60_000
CPU = torch.device("cpu")


@pytest.fixture(params=["streamed", "resident", "4bit"])
def model(request: pytest.FixtureRequest, checkpoint: Path) -> Any:
    folder = split(checkpoint, "4bit" if request.param == "4bit" else None)
    return load(folder, STREAMED if request.param == "streamed" else ALL, dtype="float32")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(INPUT).logits
    return found


@pytest.mark.parametrize(
    "keep",
    [
        copy.copy,
        lambda model: model.share_memory(),
        torch.nn.DataParallel,
        lambda model: accelerate.Accelerator(cpu=True).prepare(model),
        lambda model: accelerate.dispatch_model(model, {"": "cpu"}),
        lambda model: torch.compile(model, backend="eager"),
    ],
    ids=["copy", "share_memory", "DataParallel", "prepare", "dispatch_model", "compile"],
)
def test_what_keeps_the_weights_where_they_are_works(model: Any, keep: Callable[[Any], Any]) -> None:
    expected = logits(model)
    kept = keep(model)
    for _ in range(2):
        torch.testing.assert_close(logits(kept), expected, rtol=0, atol=0)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("take", "done"),
    [
        (copy.deepcopy, "copied (copy.deepcopy)"),
        (pickle.dumps, "pickled"),
        (lambda model: torch.save(model, io.BytesIO()), "pickled"),
        (cloudpickle.dumps, "pickled"),  # as ray.put does
        (lambda model: model._replicate_for_data_parallel(), "replicated"),
    ],
    ids=["deepcopy", "pickle", "torch.save", "ray.put", "DataParallel"],
)
def test_what_would_take_the_weights_elsewhere_is_refused(model: Any, take: Callable[[Any], Any], done: str) -> None:
    expected = logits(model)
    with pytest.raises(CopyError, match=re.escape(f"A model of rabbitllm cannot be {done}")):
        take(model)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "place",
    [
        lambda model, folder: accelerate.cpu_offload(model, execution_device=CPU),
        lambda model, folder: accelerate.disk_offload(model, folder, execution_device=CPU),
        lambda model, folder: accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True),
    ],
    ids=["cpu_offload", "disk_offload", "dispatch_model"],
)
def test_accelerate_places_ordinary_weights_only(model: Any, place: Callable[..., Any], tmp_path: Path) -> None:
    expected = logits(model)
    if all(type(weight) is torch.nn.Parameter for weight in model.parameters()):
        model = place(model, tmp_path)
    else:
        # disk_offload reads the weights before it asks the model
        with pytest.raises(
            (CopyError, AbsentWeightError), match=r"accelerate cannot place this model|is not in memory: "
        ):
            place(model, tmp_path)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


def with_lora(model: Any) -> Any:
    torch.manual_seed(0)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=names, init_lora_weights=False)).train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model(input_ids=INPUT, labels=INPUT).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def train(model: Any, folder: Path) -> None:
    data = [{"input_ids": INPUT[0], "labels": INPUT[0]}] * 2
    options = TrainingArguments(str(folder), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    Trainer(model, options, train_dataset=data).train()


def test_a_streamed_model_says_that_it_cannot_be_trained(split_folder: Path, tmp_path: Path, plain: Any) -> None:
    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(AbsentWeightError, match="This model is streamed and cannot be trained"):
            call()

    model = load(split_folder, STREAMED, dtype="float32")
    loss = model(INPUT, labels=INPUT).loss
    assert loss.item() == plain(INPUT, labels=INPUT).loss.item()
    refused(loss.backward)
    refused(model(input_ids=INPUT, labels=INPUT).loss.backward)
    refused(lambda: model.forward(INPUT, labels=INPUT).loss.backward())
    assert not model(INPUT).logits.requires_grad  # as it was: many call it without no_grad, and take the numbers
    wanted = model.get_input_embeddings()(INPUT).detach().requires_grad_()  # a soft prompt, an attribution
    refused(lambda: model(inputs_embeds=wanted).logits.sum().backward())
    refused(lambda: (model.forward(inputs_embeds=wanted)[0].sum() + wanted.sum()).backward())
    model.train()
    refused(lambda: model(INPUT).logits.sum().backward())
    refused(lambda: model(INPUT, return_dict=False)[0].sum().backward())
    refused(lambda: train(model, tmp_path))
    refused(lambda: gradients(with_lora(load(split_folder, STREAMED, dtype="float32"))))
    with torch.no_grad():
        assert not model(INPUT, labels=INPUT).loss.requires_grad
    with torch.inference_mode():
        assert not model(INPUT, labels=INPUT).loss.requires_grad


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_adapters_of_a_model_in_memory_have_the_gradients_of_transformers(
    tmp_path: Path, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where products go through kernels that have no backward pass of their own."""

    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        folder = build_checkpoint(tmp_path / name, FAMILIES["llama"], dtype=dtype)
        stored = split(folder, compression)
        meant = folder if compression is None else dequantized(folder, tmp_path / f"{name} meant", compression, dtype)
        expected = gradients(with_lora(AutoModelForCausalLM.from_pretrained(meant, dtype=dtype)))
        found = gradients(with_lora(load(stored, dtype=name)))
        assert found.keys() == expected.keys()
        for weight, gradient in expected.items():
            torch.testing.assert_close(found[weight], gradient, rtol=0, atol=0)
        monkeypatch.setattr(bfloat_products, "max_rows", lambda: bfloat_products.ALL_ROWS)
        quick = gradients(with_lora(load(stored, dtype=name, exact=False, fast_bfloat16=dtype == torch.bfloat16)))
        # codes are multiplied as integers: twice, as the gradients depend on the logits and on each layer's input
        rounded = 1e-4 if compression is None else 2 * tolerated(compression)
        for weight, gradient in expected.items():
            off = (quick[weight].float() - gradient.float()).norm() / gradient.float().norm()
            assert off < (rounded if dtype == torch.float32 else 0.1)


def test_trainer_trains_a_model_in_memory_and_leaves_its_files(split_folder: Path, tmp_path: Path) -> None:
    model = load(split_folder, dtype="float32")
    before = logits(model)
    train(model, tmp_path)
    assert not torch.equal(logits(model), before)
    torch.testing.assert_close(logits(load(split_folder, dtype="float32")), before, rtol=0, atol=0)
