"""Two calls that write one output at once: the second is refused, and what the first one writes is its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rabbitllm import AutoModel
from rabbitllm.errors import InUseError
from rabbitllm.models.convert import convert
from rabbitllm.storage.durable import Step, observe_steps
from tests.frozen.support import checkpoints
from tests.support.splitting import contents, split

CONFIG = {**checkpoints.LLAMA, "num_hidden_layers": 1}


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Two of the same shapes and other weights."""
    return [checkpoints.write(tmp_path / name, CONFIG, 2, seed) for name, seed in (("first", 1), ("second", 5))]


def to_gguf(model: Path, target: Path) -> None:
    convert(model, target / "new.gguf", to="gguf")


def joined(model: Path, target: Path) -> None:
    split(model)
    convert(model / "splitted_model", target / "new")


def saved(model: Path, target: Path) -> None:
    AutoModel.from_pretrained(model, device="cpu", split=False).save_pretrained(target / "new")


@pytest.mark.parametrize("write", [to_gguf, joined, saved])
def test_second_writer_is_refused(write: Callable[[Path, Path], None], models: list[Path], tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    write(models[0], alone)
    begun, refused = threading.Event(), threading.Event()

    def pause(step: Step) -> None:
        is_weights = step.kind == "write" and step.offset and step.path.is_relative_to(together)
        if is_weights and not begun.is_set():
            begun.set()
            refused.wait()

    with ThreadPoolExecutor() as pool, observe_steps(pause):
        first = pool.submit(write, models[0], together)
        begun.wait()
        try:
            with pytest.raises(InUseError, match="Another process is writing"):
                write(models[1], together)
        finally:
            refused.set()
            first.result()
    assert contents(together) == contents(alone)
