"""Text files in the place of others: pointers of git-lfs in a clone, and byte-order marks; every reader names them."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from rabbitllm import AutoModel, lazy_load
from rabbitllm.errors import RabbitLLMError
from tests.support.builders import FAMILIES, build_checkpoint, reshard
from tests.support.gguf_files import write_gguf
from tests.support.splitting import contents

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 4991\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_checkpoint(tmp_path, FAMILIES["llama"], tied=False)
    reshard(tmp_path, lambda name: int("layers" in name))
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["shard", "model.safetensors.index.json", "config.json", "tokenizer.json", "tokenizer_config.json", "m.gguf"],
)
def test_pointer_is_recognised_by_each_reader(folder: Path, name: str) -> None:
    if name.endswith(".gguf"):
        path = write_gguf(folder / name)
        for file in folder.iterdir():
            if file != path:
                file.unlink()
    path = sorted(folder.glob("*-of-*.safetensors"))[0] if name == "shard" else folder / name
    path.write_bytes(POINTER)
    before = contents(folder)
    with pytest.raises(RabbitLLMError, match="is a git-lfs pointer, not the file itself") as refused:
        AutoModel.from_pretrained(path if name.endswith(".gguf") else folder, sequential_shard_processing=True)
    assert path.name in refused.value.problem
    assert "git lfs pull" in refused.value.remedy
    assert "Finished layers" not in refused.value.remedy
    assert {name: data for name, data in contents(folder).items() if name in before} == before


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "m.gguf"])
def test_pointer_is_not_loaded_lazily(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(RabbitLLMError, match=f"{name} is a git-lfs pointer"):
            lazy_load(path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_byte_order_mark_is_named(folder: Path, name: str) -> None:
    """Windows' editors write one."""
    (folder / name).write_bytes(codecs.BOM_UTF8 + (folder / name).read_bytes())
    with pytest.raises(RabbitLLMError, match=f"{name} begins with a byte-order mark") as refused:
        AutoModel.from_pretrained(folder)
    assert refused.value.remedy == "Save it as UTF-8 without that mark."
