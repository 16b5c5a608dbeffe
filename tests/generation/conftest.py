"""A small model of a plain family, split once, and what plain transformers answers with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.generation.batch import Batch, Limits
from rabbitllm.generation.request import Request
from tests.generation.submitting import Submitted, answered
from tests.support.one_tiny_model import checkpoint, plain, split_folder
from tests.support.tiny_models import load, one_thread

__all__ = ["checkpoint", "one_thread", "plain", "split_folder"]

DEFAULT = Limits()


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
def ask() -> Callable[[Batch, Sequence[Request]], list[Submitted]]:
    return answered
