"""Models out of GGUF files: the bits and tokens of transformers, which reads the same file whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rabbitllm
from rabbitllm.errors import IncompleteCheckpointError, UnknownArchitectureError
from tests.support.gguf_files import FAMILIES, VOCABULARY, write_gguf

IDS = torch.arange(3, 40)[None] % VOCABULARY
NARROW = ("qwen3moe",)
"""Transformers does not read the width of an expert from the metadata."""
TEXTS = ("hello rabbits", "  two spaces\n\nand lines", "<s>x</s>y", "\u00e9t\u00e9 12345 \U0001f407", "a  b   c\tq")


def plain(file: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, **more)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.bits
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_and_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", family)
    model = rabbitllm.AutoModel.from_pretrained(file, device="cpu")
    own_sizes = {"config": model.config} if family in NARROW else {}
    theirs = plain(file, **own_sizes)
    assert torch.equal(logits(model), logits(theirs))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        assert model.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert model.tokenizer.chat_template == tokenizer.chat_template
    assert model.generation_config.eos_token_id == 2


@pytest.mark.bits
@pytest.mark.parametrize(("types", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_a_file_without_blocks_keeps_its_dtype(types: str, dtype: torch.dtype, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "gemma3", types=types)
    model = rabbitllm.AutoModel.from_pretrained(file, device="cpu")
    assert model.dtype is dtype
    assert torch.equal(logits(model), logits(plain(file, dtype)))


def test_an_architecture_that_transformers_lacks_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", changed=lambda writer: setattr(writer, "arch", "llama"))
    data = file.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0zebra")
    file.write_bytes(data)
    with pytest.raises(UnknownArchitectureError, match=r"cannot read the architecture 'zebra' of model\.gguf"):
        rabbitllm.AutoModel.from_pretrained(file, device="cpu", sequential_shard_processing=True)
    assert file.read_bytes() == data


def test_shapes_that_do_not_fit_the_model_are_refused_before_deletion(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "qwen3", changed=with_eight_heads)
    size = file.stat().st_size
    with pytest.raises(IncompleteCheckpointError, match=r"self_attn\.[qo]_proj\.weight has shape"):
        rabbitllm.AutoModel.from_pretrained(file, device="cpu", sequential_shard_processing=True)
    assert file.stat().st_size == size


def with_eight_heads(writer: Any) -> None:
    writer.kv_data[0]["qwen3.attention.head_count"].value = 8
