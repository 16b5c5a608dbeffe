"""Loss against bytes: others' weights are measured as ours are, and llama.cpp's choice of types is its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from bitsandbytes import functional

import rabbitllm.demo
from benchmarks import quality
from benchmarks.llama_quantise import type_of
from benchmarks.scatter import Point, draw
from rabbitllm.comparison.compare import compare
from tests.support.tiny_models import load, one_thread, split  # noqa: F401  a fixture

DEMO_MODEL = Path(rabbitllm.demo.__file__).parent / "model"


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> quality.Subject:
    monkeypatch.setattr(quality, "PROBLEMS", 8)
    return quality.Subject("bundled", DEMO_MODEL, None)


def test_which_types_llama_cpp_takes() -> None:
    """By the rule in its source, worked out by hand for 8 layers and for 32."""

    def more(layers: int, leaf: str) -> list[int]:
        named = [type_of("Q4_K_M", f"model.layers.{n}.{leaf}.weight", 512, layers) for n in range(layers)]
        assert set(named) == {"Q4_K", "Q6_K"}
        return [number for number, kind in enumerate(named) if kind == "Q6_K"]

    assert more(8, "self_attn.v_proj") == more(8, "mlp.down_proj") == [0, 3, 6, 7]
    assert len(more(32, "mlp.down_proj")) == 16
    assert type_of("Q4_K_M", "model.layers.0.mlp.up_proj.weight", 512, 8) == "Q4_K"
    assert type_of("Q4_K_M", "model.embed_tokens.weight", 512, 8) == "Q4_K"
    assert {type_of(preset, "lm_head.weight", 512, 8) for preset in ("Q4_0", "Q4_K_M")} == {"Q6_K"}
    assert type_of("Q8_0", "lm_head.weight", 512, 8) == "Q8_0"
    # rows that are no whole blocks
    assert type_of("Q4_K_M", "model.layers.1.mlp.up_proj.weight", 192, 8) == "Q5_0"
    assert type_of("Q4_0", "lm_head.weight", 192, 8) == "Q8_0"
    assert type_of("Q4_0", "model.layers.0.mlp.up_proj.weight", 192, 8) == "Q4_0"


def test_weights_of_others_are_measured_as_ours_are(subject: quality.Subject, tmp_path: Path) -> None:
    """bitsandbytes' own 4bit weights, put into a plain model, and RabbitLLM's, streamed."""
    same, nbytes = subject.with_weights(lambda name, weight: (weight, 2 * weight.numel()))
    assert (same.divergence.largest, nbytes) == (0, subject.nbytes)

    def rounded(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        if weight.dim() < 2:
            return weight, 0
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        return functional.dequantize_4bit(codes, state).bfloat16().float(), 0  # made in the checkpoint's dtype

    theirs, _ = subject.with_weights(rounded)
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    options = {"dtype": "float32"}
    found = compare(load(split(folder, "4bit"), **options), load(split(folder), **options), subject.texts)
    assert theirs.divergence.mean == pytest.approx(found.divergence.mean, rel=1e-3)
    assert theirs.divergence.mean > 0


def test_the_picture(tmp_path: Path) -> None:
    made = (("4bit", "RabbitLLM", 14.5, 1e-2), ("8bit", "RabbitLLM", 27, 1e-4), ("Q4_0", "llama.cpp", 15, 2e-2))
    points = [Point(*one) for one in made]
    draw(tmp_path / "loss.svg", "Loss", "MB", "nats", points, joined="RabbitLLM")
    written = (tmp_path / "loss.svg").read_text(encoding="utf-8")
    assert "svg" in written[:600]
