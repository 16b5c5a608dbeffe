"""`rabbitllm.quality`: perplexity, divergence and agreement are those that plain transformers' logits have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import rabbitllm
from rabbitllm import AutoModel
from tests.frozen.support.command_line import rabbitllm as call
from tests.frozen.support.families import dequantized
from tests.frozen.support.talking import Reference, talker
from tests.support.one_thread import one_thread as one_thread

WINDOW, TOKENS = 32, 128
TEXT = "the rabbit and the hare in the rain, or another one in the red barn. " * 12
CLOSE = 1e-5


def log_probabilities(reference: Reference) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions, vocabulary) in float64, and the tokens that follow: windows that begin with the first token."""
    ids = reference.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    said, targets = [], []
    room = WINDOW - 1
    for begin in range(0, TOKENS, room):
        part = ids[begin : min(begin + room, TOKENS)]
        with torch.inference_mode():
            logits = reference.model(torch.tensor([[1, *part]])).logits[0, :-1]
        said.append(torch.log_softmax(logits.double(), -1))
        targets.append(torch.tensor(part))
    return torch.cat(said), torch.cat(targets)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = talker(tmp_path_factory.mktemp("quality") / "model")
    (made.parent / "text.txt").write_text(TEXT)
    return made


@pytest.mark.parametrize("compression", ["4bit", pytest.param("8bit", marks=pytest.mark.long)])
def test_against_the_uncompressed_model(folder: Path, tmp_path: Path, compression: str) -> None:
    own, targets = log_probabilities(Reference(dequantized(folder, tmp_path / "plain", compression)))
    true, _ = log_probabilities(Reference(folder))
    how: dict[str, Any] = {"text": folder.parent / "text.txt", "tokens": TOKENS, "window": WINDOW, "device": "cpu"}
    summary = rabbitllm.quality(folder, compression=compression, exact=True, max_memory={"cpu": 0}, **how).summary

    def perplexity(said: torch.Tensor) -> float:
        return math.exp(-float(said.gather(1, targets[:, None]).mean()))

    divergence = (true.exp() * (true - own)).sum(-1)
    assert summary.positions == len(targets) == TOKENS
    assert math.isclose(summary.perplexity, perplexity(own), rel_tol=CLOSE)
    assert math.isclose(summary.reference_perplexity, perplexity(true), rel_tol=CLOSE)
    assert math.isclose(summary.divergence.mean, float(divergence.mean()), rel_tol=1e-3)
    assert math.isclose(summary.divergence.largest, float(divergence.max()), rel_tol=1e-3)
    assert summary.agreement == float((own.argmax(-1) == true.argmax(-1)).double().mean())


@pytest.mark.long
def test_loaded_models_and_the_command(folder: Path) -> None:
    packed = AutoModel.from_pretrained(folder, compression="8bit", device="cpu")
    whole = AutoModel.from_pretrained(folder, device="cpu")
    text = folder.parent / "text.txt"
    found = rabbitllm.quality(packed, whole, text=text, tokens=64, window=WINDOW)
    how = ("--compression", "8bit", "--device", "cpu", "--text", text, "--tokens", 64, "--window", WINDOW)
    said = call("quality", folder, *how, "--json").json
    assert found.as_json()["divergence"] == said["divergence"]
    same = rabbitllm.quality(whole, whole, text=text, tokens=64, window=WINDOW).summary
    assert (same.divergence.largest, same.agreement) == (0, 1)
