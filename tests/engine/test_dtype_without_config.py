"""A config without dtype: the model computes in the dtype that transformers takes from the weights, however it is read.

transformers takes the index's, else that of the first floating-point tensor of the first file: by name in a safetensors
file, in the file's own order in a torch file. A split has another order.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rabbitllm.auto_model import AutoModel
from rabbitllm.models.convert import convert
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import (
    INDEX_NAME,
    TORCH_INDEX_NAME,
    TORCH_SINGLE_NAME,
    build_checkpoint,
    cut,
    read_tensors,
    write_shards,
    write_torch,
)
from tests.support.tiny_models import INPUT

BF16, F32 = torch.bfloat16, torch.float32
HEAD, NORM = "lm_head.weight", "model.norm.weight"


def _tensors(folder: Path, dtypes: dict[str, torch.dtype], order: Callable[[str], Any] = str) -> dict[str, Any]:
    tensors = read_tensors(folder)
    return {name: tensors[name].to(dtypes.get(name, dtypes["else"])) for name in sorted(tensors, key=order)}


def _safetensors(dtypes: dict[str, torch.dtype], shards: int) -> Callable[[Path, Path], None]:
    def write(source: Path, folder: Path) -> None:
        parts = cut(_tensors(source, dtypes), shards)
        single = {"model.safetensors": next(iter(parts.values()))}
        write_shards(folder, parts if shards > 1 else single, index=shards > 1)

    return write


def _torch(dtypes: dict[str, torch.dtype], shards: int) -> Callable[[Path, Path], None]:
    def write(source: Path, folder: Path) -> None:
        tensors = _tensors(source, dtypes, lambda name: (name != NORM, name))  # the norm is the first
        files = {f"pytorch_model-{n}.bin": part for n, part in enumerate(cut(tensors, shards).values())}
        write_torch(folder, files if shards > 1 else {TORCH_SINGLE_NAME: tensors}, index=shards > 1)

    return write


def _index_names(dtype: str) -> Callable[[Path, Path], None]:
    def write(source: Path, folder: Path) -> None:
        _safetensors({"else": BF16}, 2)(source, folder)
        content = json.loads((folder / INDEX_NAME).read_text())
        (folder / INDEX_NAME).write_text(json.dumps({**content, "metadata": {"dtype": dtype}}))

    return write


def _unordered_shards(source: Path, folder: Path) -> None:
    """The second file by the index's order is the first by name."""
    tensors = _tensors(source, {HEAD: F32, "else": BF16})
    head = {HEAD: tensors.pop(HEAD)}
    write_shards(folder, {"model-00010-of-00010.safetensors": head, "model-2-of-00010.safetensors": tensors})


KINDS: dict[str, tuple[Callable[[Path, Path], None], torch.dtype]] = {
    "head first by name": (_safetensors({HEAD: F32, "else": BF16}, 1), F32),
    "head in the first shard": (_safetensors({HEAD: F32, "else": BF16}, 3), F32),
    "norm in the last shard": (_safetensors({NORM: F32, "else": BF16}, 3), BF16),
    "first shard by name": (_unordered_shards, F32),
    "torch, norm first": (_torch({NORM: F32, "else": BF16}, 1), F32),
    "torch, norm first, shards": (_torch({NORM: F32, "else": BF16}, 3), F32),
    "torch, head": (_torch({HEAD: F32, "else": BF16}, 1), BF16),
    "index": (_index_names("float32"), F32),
    "all the same": (_safetensors({"else": BF16}, 2), BF16),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("source") / "model", "llama")


def _checkpoint(source: Path, folder: Path, layout: str) -> Path:
    KINDS[layout][0](source, folder)
    for path in source.glob("*.json"):
        if path.name not in (INDEX_NAME, TORCH_INDEX_NAME):
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(INPUT).logits
    return logits


READERS: dict[str, dict[str, Any]] = {
    "split": {},
    "sequential": {"sequential_shard_processing": True},
    "unsplit": {"split": False},
    "8bit": {"compression": "8bit"},
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", KINDS)
def test_dtype_equals_transformers(source: Path, tmp_path: Path, layout: str, reader: str) -> None:
    folder = _checkpoint(source, tmp_path / "model", layout)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected, dtype = _logits(plain), plain.dtype
    assert dtype == KINDS[layout][1]
    for _ in range(2):  # also when the split is there
        model = AutoModel.from_pretrained(folder, device="cpu", **READERS[reader])
        assert model.dtype == dtype
        if reader != "8bit":
            assert torch.equal(_logits(model), expected)


@pytest.mark.parametrize("layout", KINDS)
def test_written_checkpoints_keep_the_dtype(source: Path, tmp_path: Path, layout: str) -> None:
    """A conversion and a saved copy have other files, so transformers would find another first tensor in them."""
    folder = _checkpoint(source, tmp_path / "model", layout)
    convert(folder, tmp_path / "converted")
    model = AutoModel.from_pretrained(folder, device="cpu")
    model.save_pretrained(tmp_path / "saved")
    convert(Path(model.name_or_path), tmp_path / "of the split")
    for name in ("converted", "saved", "of the split"):
        copied: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert copied.dtype == KINDS[layout][1], name
        assert AutoModel.from_pretrained(tmp_path / name, device="cpu").dtype == KINDS[layout][1], name


def test_split_of_an_earlier_version(source: Path, tmp_path: Path) -> None:
    """It has no record of the dtype: the first tensor by name counts that may have been in the first shard."""
    folder = _checkpoint(source, tmp_path / "model", "head in the first shard")
    directory = Path(AutoModel.from_pretrained(folder, device="cpu").name_or_path)
    content = json.loads((directory / "split.json").read_text())
    assert content.pop("dtype") == "float32"
    (directory / "split.json").write_text(json.dumps(content))
    assert LayerStore(directory).dtype == "float32"
    for layer in content["layers"]:
        layer["shards"] = ["model-00002-of-00003.safetensors"] if layer["id"] == "lm_head" else layer["shards"]
    (directory / "split.json").write_text(json.dumps(content))
    assert LayerStore(directory).dtype == "bfloat16"
