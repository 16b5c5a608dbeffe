"""Placeholders that do not match the pictures and sounds of a prompt: an explained error, or a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.errors import MediaError
from tests.engine.test_processor import given
from tests.support.builders import build_checkpoint
from tests.support.picture_models import FAMILIES, build, cases
from tests.support.tiny_models import INPUT, load, split

CALLS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "forward": lambda model, inputs: model(**inputs),
    "generate": lambda model, inputs: model.generate(**inputs, max_new_tokens=2, do_sample=False),
}
NAMES = {"image": "pictures", "audio": "sounds"}


@pytest.fixture(
    scope="module",
    params=cases(("qwen2_5_vl", "llava", "gemma3", "llama4", "mistral3", "qwen2_audio"), short=("qwen2_5_vl",)),
)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, str, int]:
    """A model, inputs for it, their kind, and the id of their placeholder."""
    name: str = request.param
    modality = FAMILIES[name].kind
    model = load(split(build(tmp_path_factory.mktemp("placeholders") / name, name)), 0)
    token = getattr(model.config, f"{modality}_token_id", None) or getattr(model.config, f"{modality}_token_index")
    return model, given(model.processor, modality), modality, token


def cut(inputs: Mapping[str, torch.Tensor], position: int) -> dict[str, torch.Tensor]:
    """The inputs without the token at one place."""
    ids = inputs["input_ids"]
    kept = torch.arange(ids.shape[1]) != position
    return {name: value[:, kept] if value.shape[:2] == ids.shape else value for name, value in inputs.items()}


@pytest.mark.parametrize("call", CALLS)
def test_missing_placeholder(asked: tuple[Any, Any, str, int], call: str) -> None:
    model, inputs, modality, token = asked
    places = (inputs["input_ids"][0] == token).nonzero().flatten()
    fewer = cut(inputs, int(places[0]))
    with pytest.raises(MediaError) as refused:
        CALLS[call](model, fewer)
    problem = f"The prompt has {len(places) - 1} placeholders for {NAMES[modality]}, which need {len(places)}."
    assert refused.value.problem == problem
    assert "model.processor" in refused.value.remedy
    CALLS[call](model, inputs)


def test_placeholders_without_media(asked: tuple[Any, Any, str, int], caplog: pytest.LogCaptureFixture) -> None:
    """The words of a text may happen to be a placeholder, so it is answered."""
    model, inputs, modality, token = asked
    ids = inputs["input_ids"]
    count = int((ids == token).sum())
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        CALLS["generate"](model, {"input_ids": ids, "attention_mask": inputs["attention_mask"]})
        CALLS["generate"](model, inputs)
        CALLS["generate"](model, {"input_ids": ids[:, ids[0] != token]})
    messages = [record.message for record in caplog.records if "placeholders" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith(f"The prompt has {count} placeholders for {NAMES[modality]}, and none were passed")


def test_text_model_has_no_placeholders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(split(build_checkpoint(tmp_path / "model", "llama")), 0)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        CALLS["generate"](model, {"input_ids": INPUT})
    assert "placeholders" not in caplog.text
    with pytest.raises(ValueError, match="exactly one of") as raised:
        model()
    assert not isinstance(raised.value, MediaError)
