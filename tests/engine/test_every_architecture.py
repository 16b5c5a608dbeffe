"""Every causal language model that transformers has and that can be built small: resident and streamed, bit for bit.

The families of `builders` are those that are promised; this sweep finds the others' surprises. A type that cannot be
built from these settings is skipped, and says why.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rabbitllm.engine.expert_finding import is_routed
from rabbitllm.engine.load_plan import SCALES_IN_PLACE
from rabbitllm.engine.placement import Tier
from rabbitllm.errors import RabbitLLMError
from tests.support.tiny_configs import models
from tests.support.tiny_models import INPUT, load, plain_model, split, tiers

SHORT = ("cohere2", "falcon_h1", "glm4_moe", "gemma3n_text", "longcat_flash", "qwen3_5_moe_text", "zamba2")
"""What `make test` runs: each has something that no family of the builders has."""
_auto: Any = transformers.AutoModelForCausalLM


def build(folder: Path, name: str) -> None:
    """Save a small random model of a type, or skip."""
    errors: list[Exception] = []
    for model in models(_auto, name, errors):
        try:
            with torch.inference_mode():
                assert model(INPUT).logits.isfinite().all()
        except Exception as error:
            errors.append(error)
        else:
            model.save_pretrained(folder)
            try:
                plain_model(folder)
            except Exception as error:  # what transformers cannot load again is no checkpoint
                errors.append(error)
                shutil.rmtree(folder)
                continue
            return
    if name in SHORT:
        raise errors[0]
    pytest.skip(f"{type(errors[0]).__name__}: {str(errors[0])[:200]}")


def passes(model: Any, generates: bool) -> list[torch.Tensor]:
    with torch.inference_mode():
        outputs = [model(INPUT).logits]
        if generates:
            outputs.append(model.generate(INPUT, max_new_tokens=6, do_sample=False))
    return outputs


def possible_passes(plain: Any) -> tuple[list[torch.Tensor], bool]:
    """The outputs of `passes`, and whether the model generates, which not every type does with these settings."""
    try:
        return passes(plain, True), True
    except Exception:
        return passes(plain, False), False


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SHORT else pytest.mark.long)
        for name in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *SHORT})
    ],
)
def test_every_type_has_the_bits_of_transformers(tmp_path: Path, name: str) -> None:
    build(tmp_path / "model", name)
    plain = plain_model(tmp_path / "model")
    expected, generates = possible_passes(plain)
    for compression in (None, "4bit"):
        directory = split(tmp_path / "model", compression)
        resident = load(directory)
        outputs = passes(resident, generates)
        if compression is None:
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        if name in SCALES_IN_PLACE:
            with pytest.raises(RabbitLLMError, match="rescales its weights in place, so all of them must be resident"):
                load(directory, 0)
            continue
        streamed = load(directory, 0)
        assert Tier.STREAMED in tiers(streamed).values()
        routed = {path for path, module in streamed.named_modules() if is_routed(module)}
        assert routed == {placed.unit for placed in streamed.placement.experts}
        assert all(torch.equal(a, b) for a, b in zip(passes(streamed, generates), outputs, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_type_multiplies_codes(tmp_path: Path, name: str) -> None:
    """The default way: parts of layers, prompts and tokens are calls of ours as far as a class's trials agree."""
    build(tmp_path / "model", name)
    directory, errors = split(tmp_path / "model", "4bit"), list[float]()
    exact = load(directory, dtype="bfloat16")
    try:
        expected, generates = possible_passes(exact)
    except RuntimeError as error:
        pytest.skip(f"{name} does not compute in bfloat16: {error}")
    for output, like in zip(passes(load(directory, exact=False, dtype="bfloat16"), generates), expected, strict=True):
        if output.is_floating_point():
            errors.append(float((output.float() - like.float()).norm() / like.float().norm()))
    assert max(errors) < 0.3  # of random weights, whose experts and indices have ties
