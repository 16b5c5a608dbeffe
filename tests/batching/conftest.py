"""A small model of a plain family, split once, and what plain transformers answers with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.batching.batch import Batch, Limits
from rabbitllm.batching.request import Request
from tests.batching.asking import Asked, asked
from tests.support.builders import FAMILIES, build_checkpoint
from tests.support.tiny_models import load, one_thread, plain_model, split

__all__ = ["one_thread"]

DEFAULT = Limits()


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("batching") / "llama", FAMILIES["llama"], dtype=torch.float32)


@pytest.fixture(scope="package")
def split_folder(checkpoint: Path) -> Path:
    return split(checkpoint)


@pytest.fixture(scope="package")
def plain(checkpoint: Path) -> Any:
    return plain_model(checkpoint, dtype=torch.float32).eval()


@pytest.fixture
def open_batch(split_folder: Path) -> Iterator[Callable[..., tuple[Batch, Any]]]:
    """Makes a batch over a model that streams most of itself."""
    opened: list[Batch] = []

    def make(limits: Limits = DEFAULT, folder: Path = split_folder, budget: int = 60_000, **options: Any) -> Any:
        model = load(folder, budget, **{"dtype": "float32", "exact": False, **options})
        opened.append(Batch(model, limits))
        return opened[-1], model

    yield make
    for batch in opened:
        batch.close(0)


@pytest.fixture
def ask() -> Callable[[Batch, Sequence[Request]], list[Asked]]:
    return asked
