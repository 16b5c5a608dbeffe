"""A head that is larger than a layer is read and multiplied in pieces: its bits are those of the whole matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.engine.placement import Tier
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.telemetry.passes import READ
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import load, one_thread, plain_model, split, tiers  # noqa: F401

VOCABULARY = 4097
"""One more than a multiple of the rows of a piece: torch multiplies one row of a matrix in another order than many."""


def folder_of(path: Path, family: str = "llama", **options: Any) -> Path:
    return build_checkpoint(path, family, vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, **options)


def ids_of(rows: int) -> torch.Tensor:
    return torch.arange(7, 7 + 13 * rows, 13)[None] % VOCABULARY


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "tied", "dtype", "compression"),
    [
        ("llama", False, torch.float32, None),
        ("qwen3", True, torch.bfloat16, None),
        ("gemma3", True, torch.float32, None),
        ("llama", False, torch.bfloat16, "q8_0"),
    ],
)
def test_a_head_in_pieces(tmp_path: Path, family: str, tied: bool, dtype: torch.dtype, compression: str | None) -> None:
    folder = folder_of(tmp_path / "model", family, tied=tied, dtype=dtype)
    directory = split(folder, compression)
    model, resident = load(directory, 0, exact=False, profiling=True), load(directory, exact=False)
    whole = load(directory, 0)
    assert tiers(model)["lm_head"] is tiers(whole)["lm_head"] is Tier.STREAMED
    head, layer = (model.placement.of(unit).stored for unit in ("lm_head", "model.layers.0"))
    assert head > 2 * layer
    assert model._internals.held_bytes < whole._internals.held_bytes - 2 * (head - layer) + 8192
    for rows in (1, 5, 40):
        assert torch.equal(model(ids_of(rows)).logits, resident(ids_of(rows)).logits)
    model.profiler.clear()
    model(ids_of(1))
    assert 0 <= model.profiler.layers["lm_head"][READ].nbytes - head < 16  # each piece says its scheme
    if compression is None:
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(plain_model(tmp_path / "saved").lm_head.weight, plain_model(folder).lm_head.weight)


@torch.no_grad()
def test_an_interrupted_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(split(folder_of(tmp_path / "model")), 0, exact=False)
    expected, loader = model(ids_of(2)).logits, model.streamer.executors["cpu"].loader
    take, before = loader.take, loader.loads

    def interrupted(name: str) -> Any:
        if name == "lm_head[2]":
            raise KeyboardInterrupt
        return take(name)

    with monkeypatch.context() as patch:
        patch.setattr(loader, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(ids_of(2))
    assert loader.loads > before
    assert torch.equal(model(ids_of(2)).logits, expected)


@torch.no_grad()
def test_a_damaged_piece_is_found(tmp_path: Path) -> None:
    directory = split(folder_of(tmp_path / "model"))
    file = directory / "lm_head.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    model = load(directory, 0, exact=False)
    with pytest.raises(IncompleteSplitError, match="lm_head"):
        model(ids_of(2))
