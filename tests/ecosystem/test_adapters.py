"""LoRA adapters loaded with peft: the same logits as on plain transformers' model, wherever the weights are."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

from rabbitllm.errors import RabbitLLMError, ReadOnlyWeightError
from tests.support.builders import build_checkpoint, read_tensors
from tests.support.quantized import build_bitsandbytes, build_fp8
from tests.support.tiny_models import ALL, INPUT, dequantized, load, plain_model, split

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "v_proj"]


def adapter(checkpoint: Path, folder: Path, targets: Any = ATTENTION, *, seed: int = 0, **settings: Any) -> Path:
    """An adapter with random weights, as `PeftModel.save_pretrained` writes it."""
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    torch.manual_seed(seed)
    peft.get_peft_model(plain_model(checkpoint), config).save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(INPUT).logits
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("source"), "llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def lora(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter(source, tmp_path_factory.mktemp("lora"), [*ATTENTION, "gate_proj", "down_proj", "lm_head"])


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("family", "compression", "budget"),
    [
        ("llama", None, 0),
        ("llama", "4bit", 0),
        ("llama", "8bit", ALL),
        ("qwen3_moe", None, 0),
        pytest.param("llama", None, ALL, marks=LONG),
        pytest.param("llama", "4bit", ALL, marks=LONG),
        pytest.param("llama", "8bit", 0, marks=LONG),
        pytest.param("qwen3_moe", None, ALL, marks=LONG),
        pytest.param("qwen3_moe", "4bit", 0, marks=LONG),
        pytest.param("qwen3_moe", "8bit", ALL, marks=LONG),
    ],
)
def test_an_adapter_gives_the_logits_of_the_plain_model(
    tmp_path: Path, family: str, compression: str | None, budget: int
) -> None:
    source = build_checkpoint(tmp_path / "source", family, dtype=torch.bfloat16)
    folder = adapter(source, tmp_path / "adapter")
    meant = source if compression is None else dequantized(source, tmp_path / "meant", compression, torch.bfloat16)
    wanted = logits(peft.PeftModel.from_pretrained(plain_model(meant), folder))
    model = load(split(source, compression), budget)
    without = logits(model)
    adapted = peft.PeftModel.from_pretrained(model, folder)
    assert torch.equal(logits(adapted), wanted)
    assert not torch.equal(wanted, without)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), without)
    assert adapted.device == model.device
    assert torch.equal(logits(adapted.unload()), without)


@pytest.mark.parametrize("budget", [ALL, 0])
def test_every_way_of_loading_one(source: Path, tmp_path: Path, budget: int) -> None:
    folder = adapter(source, tmp_path / "adapter", [*ATTENTION, "down_proj"])
    generated, plain, model = [], plain_model(source), load(split(source), budget)
    for who in (plain, model):
        who.load_adapter(str(folder))
        generated.append(who.generate(INPUT, max_new_tokens=8, do_sample=False))
    assert torch.equal(*generated)
    assert torch.equal(logits(model), logits(plain))
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:  # transformers 5.24 asks for a release of peft that does not exist yet
        pytest.skip(str(error))
    model.save_pretrained(tmp_path / "again")  # the adapter alone, as transformers does
    assert {path.name for path in (tmp_path / "again").glob("*.safetensors")} == {"adapter_model.safetensors"}
    saved, first = read_tensors(tmp_path / "again"), read_tensors(folder)
    assert saved.keys() == first.keys()
    assert all(torch.equal(saved[name].float(), first[name].to(torch.bfloat16).float()) for name in first)


def test_several_adapters_and_weight_decomposition(source: Path, tmp_path: Path) -> None:
    folders = [
        adapter(source, tmp_path / "first"),
        adapter(source, tmp_path / "second", ["o_proj", "up_proj"], seed=1, use_dora=True),
    ]
    found = []
    for who in (plain_model(source), load(split(source), 0)):
        adapted = peft.PeftModel.from_pretrained(who, folders[0], adapter_name="first")
        adapted.load_adapter(folders[1], adapter_name="second")
        first = logits(adapted)
        adapted.set_adapter("second")
        found.append(torch.stack([first, logits(adapted)]))
    assert torch.equal(*found)
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.parametrize("budget", [ALL, 0])
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build_fp8, marks=LONG),
        functools.partial(build_bitsandbytes, bits=4),
        pytest.param(functools.partial(build_bitsandbytes, bits=8), marks=LONG),
    ],
    ids=["fp8", "4bit", "8bit"],
)
def test_on_published_quantized_weights(tmp_path: Path, build: Any, budget: int) -> None:
    source = build(tmp_path / "source", family="llama")
    folder = adapter(build_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16), tmp_path / "adapter")
    wanted = logits(peft.PeftModel.from_pretrained(plain_model(source), folder))
    assert torch.equal(logits(peft.PeftModel.from_pretrained(load(split(source), budget), folder)), wanted)


def test_a_model_larger_than_memory_is_not_placed_again(source: Path, tmp_path: Path) -> None:
    """Of a model that it takes for accelerate's, peft puts on the disk what does not fit these bytes, or refuses."""
    folder = adapter(source, tmp_path / "adapter")
    model = load(split(source), 0)
    adapted = peft.PeftModel.from_pretrained(model, folder, max_memory={"cpu": 100_000})
    assert torch.equal(logits(adapted), logits(peft.PeftModel.from_pretrained(plain_model(source), folder)))
    assert not any(hasattr(module, "_hf_hook") for module in adapted.modules())


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize(
    ("compression", "budget", "exact"), [(None, 0, True), ("4bit", ALL, False), ("8bit", ALL, False), ("4bit", 0, True)]
)
def test_merging_is_refused_where_it_would_be_lost(
    source: Path, tmp_path: Path, compression: str | None, budget: int, exact: bool, safe: bool
) -> None:
    folder = adapter(source, tmp_path / "adapter")
    adapted = peft.PeftModel.from_pretrained(load(split(source, compression), budget, exact=exact), folder)
    before = logits(adapted)
    with pytest.raises(ReadOnlyWeightError, match="Leave an adapter unmerged"):
        adapted.merge_and_unload(safe_merge=safe)
    with pytest.raises(ReadOnlyWeightError):
        adapted.merge_adapter(safe_merge=safe)
    assert torch.equal(logits(adapted), before)


def test_merging_into_a_model_that_is_all_there_is_the_plain_models(source: Path, tmp_path: Path) -> None:
    folder, files = adapter(source, tmp_path / "adapter"), split(source)
    before = {path: path.read_bytes() for path in files.iterdir() if path.is_file()}
    model = load(files)
    merged = [peft.PeftModel.from_pretrained(who, folder).merge_and_unload() for who in (plain_model(source), model)]
    assert torch.equal(logits(merged[1]), logits(merged[0]))
    assert before == {path: path.read_bytes() for path in files.iterdir() if path.is_file()}
    model.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(plain_model(tmp_path / "merged")), logits(merged[0]))


def test_an_adapter_that_brings_weights_of_the_model_is_refused(source: Path, lora: Path) -> None:
    """peft saves the head with an adapter for it."""
    assert "base_model.model.lm_head.base_layer.weight" in read_tensors(lora)
    with pytest.raises(RuntimeError, match="A weight of this model cannot be written to"):
        peft.PeftModel.from_pretrained(load(split(source), 0), lora)


def test_a_model_with_an_adapter_is_saved_without_it_or_not_at_all(source: Path, tmp_path: Path) -> None:
    model = load(split(source), 0)
    adapted = peft.PeftModel.from_pretrained(model, adapter(source, tmp_path / "adapter"))
    with pytest.raises(RabbitLLMError, match=r"q_proj\.base_layer\.weight"):
        model.save_pretrained(tmp_path / "copy")
    adapted.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "adapter_model.safetensors").exists()
    adapted.unload().save_pretrained(tmp_path / "copy")
    saved, stored = read_tensors(tmp_path / "copy"), read_tensors(source)
    assert all(torch.equal(saved[name], stored[name]) for name in stored)
