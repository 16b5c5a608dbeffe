"""Few files use private parts of transformers, so that a new version of it changes few files."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import rabbitllm
from rabbitllm.engine import _published_conversions

PACKAGE = Path(rabbitllm.__file__).parent
ALLOWED = {
    "checkpoints/transformers_gguf.py",
    "engine/_published_conversions.py",
    "engine/streamed_model.py",  # overrides three methods of `generate`
    "engine/transformers_api.py",
    "generation/transformers_api.py",
}


def private_attributes() -> frozenset[str]:
    """Private names of models, configs, caches and conversions that are not torch's."""
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        model = LlamaForCausalLM(config)
    owners = (model, config, model.generation_config, transformers.DynamicCache, _published_conversions.QuickFp8)
    names = {name for owner in (*owners, *model.modules()) for name in dir(owner)} | {"_is_hf_initialized"}
    return frozenset(name for name in names - set(dir(nn.Linear(1, 1))) if name[0] == "_" and name[:2] != "__")


def private_parts(code: str, attributes: frozenset[str]) -> Iterator[str]:
    """Imports that `transformers` itself does not export, and private attributes of objects other than `self`."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.ImportFrom(module="transformers"):
                names = {alias.name for alias in node.names} - {"logging"}
                yield from (f"transformers.{name}" for name in names if inspect.ismodule(getattr(transformers, name)))
            case ast.ImportFrom(module=str(module)) if module.startswith("transformers."):
                yield module
            case ast.Import():
                yield from (alias.name for alias in node.names if alias.name.startswith("transformers."))
            case ast.Attribute(value=owner, attr=name) if name in attributes:
                if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                    yield ast.unparse(node)
            case ast.Call(func=ast.Name("getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(str(name)), *_]):
                if name in attributes:
                    yield ast.unparse(node)


@pytest.mark.parametrize(
    "code",
    [
        "from transformers.cache_utils import DynamicLayer",
        "from transformers import cache_utils",
        "import transformers.cache_utils",
        "model._no_split_modules",
        "super()._valid_auto_compile_criteria(1)",
        "tensor._is_hf_initialized = True",
        "getattr(config, '_attn_implementation', None)",
    ],
)
def test_a_private_part_is_recognised(code: str) -> None:
    assert len(list(private_parts(code, private_attributes()))) == 1


@pytest.mark.parametrize(
    "code",
    ["from transformers import DynamicLayer, logging", "import transformers", "model.config", "self._sample", "a._own"],
)
def test_other_parts_are_public(code: str) -> None:
    assert not list(private_parts(code, private_attributes()))


def test_few_files_use_private_parts() -> None:
    attributes = private_attributes()
    uses = {
        path.relative_to(PACKAGE).as_posix(): parts
        for path in PACKAGE.rglob("*.py")
        if (parts := list(private_parts(path.read_text(encoding="utf-8"), attributes)))
    }
    assert len(ALLOWED) <= 5
    assert {path: uses[path] for path in uses.keys() - ALLOWED} == {}
    assert uses.keys() == ALLOWED
