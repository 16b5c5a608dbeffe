"""What is known of a source before a split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import rabbitllm
from tests.support.builders import SINGLE_NAME, build_checkpoint, read_tensors


@pytest.mark.parametrize(
    ("names", "settings", "layers"),
    [
        (("mtp.norm.weight", "mtp.layers.0.proj.weight"), {}, "mtp, mtp.layers.0"),
        (("model.layers.2.enorm.weight",), {"num_nextn_predict_layers": 1}, "layers.2"),
    ],
)
def test_layers_for_multi_token_prediction_are_named(
    tmp_path: Path, names: tuple[str, ...], settings: dict[str, int], layers: str
) -> None:
    folder = build_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    options = {"device": "cpu", "bandwidth": "1GB"}
    assert not rabbitllm.plan(folder, **options).warnings
    tensors = read_tensors(folder) | {name: torch.ones(64) for name in names}
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    (warning,) = rabbitllm.plan(folder, **options).warnings
    assert warning.startswith(f"{layers} (")
    assert warning.endswith(", multi-token prediction) is used by --draft mtp only")
