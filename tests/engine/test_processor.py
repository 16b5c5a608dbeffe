"""`model.processor`, and `generate` with what it makes of pictures and sounds: equal to plain transformers."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rabbitllm
from rabbitllm.errors import MissingPackageError, ProcessorError
from rabbitllm.formats.media_file import read_sound
from rabbitllm.models.convert import convert
from tests.support.builders import FAMILIES as PLAIN_FAMILIES
from tests.support.builders import build_checkpoint
from tests.support.hub_fixtures import HubEnvironment
from tests.support.one_thread import one_thread as one_thread
from tests.support.picture_models import (
    FAMILIES,
    HAS_TORCHVISION,
    RATE,
    build,
    cases,
    picture,
    plain_with_media,
    sound,
)
from tests.support.tiny_models import load, split

DRAWN = ("qwen2_5_vl", "gemma3")
"""Families that the short run looks at: positions of pictures, and masks of pictures."""


def given(processor: Any, modality: str, pictures: int = 2) -> Any:
    """Inputs of a conversation, as its processor makes them."""
    if modality == "audio":
        parts = [{"type": "audio", "audio": read_sound(sound(), "a sound", RATE)}]
    else:
        parts = [{"type": "image", "image": picture(seed, (90 - 20 * seed, 70))} for seed in range(pictures)]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    return inputs.to(torch.float32)


@pytest.mark.bits
@pytest.mark.parametrize("name", cases(short=DRAWN))
def test_answers_about_pictures_equal_transformers(name: str, tmp_path: Path, one_thread: None) -> None:
    family = FAMILIES[name]
    folder = build(tmp_path / name, name)
    plain = plain_with_media(folder, name)
    expected_inputs = given(transformers.AutoProcessor.from_pretrained(folder), family.kind) if HAS_TORCHVISION else {}
    split_folder = split(folder)
    for path in folder.glob("*.json"):  # a split needs nothing of the checkpoint
        path.unlink()
    for budget in (0, 1 << 34):
        model = load(split_folder, budget)
        assert bool(model.placement.streamed_bytes) == (budget == 0)
        towers = [placed.unit for placed in model.placement.units if "vision" in placed.unit or "visual" in placed.unit]
        assert len(towers) > 2 or family.kind == "audio"
        assert (
            type(model.processor).__name__
            == json.loads((split_folder / "processor_config.json").read_text())["processor_class"]
        )
        inputs = given(model.processor, family.kind)
        assert any(inputs[key].is_floating_point() for key in inputs)
        for key in expected_inputs:  # without torchvision, transformers makes few processors
            assert torch.equal(inputs[key], expected_inputs[key])
        with torch.inference_mode():
            assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
        options = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(**inputs, **options), plain.generate(**inputs, **options))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pictures") / "qwen", "qwen2_vl")


def local(folder: Path, tmp_path: Path) -> Path:
    return split(folder)


def from_the_hub(folder: Path, tmp_path: Path) -> Path:
    return _of_the_hub(folder, tmp_path, shard_transfer="file")


def streamed_from_the_hub(folder: Path, tmp_path: Path) -> Path:
    return _of_the_hub(folder, tmp_path, shard_transfer="stream")


def _of_the_hub(folder: Path, tmp_path: Path, **options: Any) -> Path:
    shutil.copytree(folder, tmp_path / "hub" / "org" / "eyes")
    model = rabbitllm.AutoModel.from_pretrained(
        "org/eyes",
        device="cpu",
        sequential_shard_processing=True,
        min_free_disk=0,
        show_layer_progress=False,
        **options,
    )
    return Path(model.name_or_path)


def converted(folder: Path, tmp_path: Path) -> Path:
    convert(split(folder), tmp_path / "converted")
    return tmp_path / "converted"


def saved(folder: Path, tmp_path: Path) -> Path:
    load(split(folder)).save_pretrained(tmp_path / "saved", tokenizer=True)
    return tmp_path / "saved"


ROUTES = [
    *(local, streamed_from_the_hub, saved),
    *(pytest.param(route, marks=pytest.mark.long) for route in (from_the_hub, converted)),
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_every_route_has_the_files_of_the_processor(
    route: Any, checkpoint: Path, hub_environment: HubEnvironment, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "original")
    directory = route(folder, tmp_path)
    for name in FAMILIES["qwen2_vl"].files:
        assert (directory / name).read_bytes() == (checkpoint / name).read_bytes()
    assert "PLACE" not in (directory / "chat_template.jinja").read_text()
    assert "<|image_pad|>" in (directory / "chat_template.jinja").read_text()


def test_text_model_has_no_processor(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "llama", PLAIN_FAMILIES["llama"], dtype=torch.float32)
    assert load(split(folder)).processor is None


def test_missing_processor_file_is_named(checkpoint: Path, tmp_path: Path) -> None:
    directory = split(shutil.copytree(checkpoint, tmp_path / "copy"))
    (directory / "preprocessor_config.json").unlink()
    model = load(directory)
    with pytest.raises(ProcessorError, match=r"lacks preprocessor_config\.json"):
        model.processor  # noqa: B018  it is read at its first use
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2).shape == (1, 5)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("preprocessor_config.json", "{"),
        ("preprocessor_config.json", '{"image_processor_type": "Nothing"}'),
        ("processor_config.json", "[]"),
        ("processor_config.json", '{"processor_class": 5}'),
    ],
)
def test_malformed_files_are_rabbitllm_errors(name: str, content: str, checkpoint: Path, tmp_path: Path) -> None:
    directory = split(shutil.copytree(checkpoint, tmp_path / "copy"))
    (directory / name).write_text(content)
    with pytest.raises(rabbitllm.RabbitLLMError):
        load(directory).processor  # noqa: B018


@pytest.mark.skipif(HAS_TORCHVISION, reason="torchvision is installed")
@pytest.mark.parametrize("name", ["llama4", "mistral3"])
def test_missing_torchvision_is_named(name: str, tmp_path: Path) -> None:
    model = load(split(build(tmp_path / name, name)))
    with pytest.raises(MissingPackageError, match="torchvision"):
        model.processor  # noqa: B018


def test_processor_is_read_once_and_may_be_replaced(checkpoint: Path, tmp_path: Path) -> None:
    model = load(split(shutil.copytree(checkpoint, tmp_path / "copy")))
    assert model.processor is model.processor
    model.processor = None
    assert model.processor is None
    assert "Qwen2VLProcessor" not in io.StringIO(str(model)).getvalue()
