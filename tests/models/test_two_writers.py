"""Two calls on one output or one split at once: the second is refused, and what the first one writes is its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rabbitllm import AutoModel
from rabbitllm.errors import InUseError
from rabbitllm.models.convert import convert
from rabbitllm.splitter.lock import locked_without_waiting
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


def during(write: Callable[[Path, Path], None], model: Path, target: Path, second: Callable[[], None]) -> None:
    """Let `write` write a model into a folder, and make a second call when it stands before its first weights."""
    begun, goes_on = threading.Event(), threading.Event()

    def pause(step: Step) -> None:
        if step.kind == "write" and step.offset and step.path.is_relative_to(target) and not begun.is_set():
            begun.set()
            goes_on.wait()

    with ThreadPoolExecutor() as pool, observe_steps(pause):
        first = pool.submit(write, model, target)
        begun.wait()
        try:
            second()
        finally:
            goes_on.set()
            first.result()


@pytest.mark.parametrize("write", [to_gguf, joined, saved])
def test_second_writer_is_refused(write: Callable[[Path, Path], None], models: list[Path], tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    write(models[0], alone)

    def write_second() -> None:
        with pytest.raises(InUseError, match="Another process is writing"):
            write(models[1], together)

    during(write, models[0], together, write_second)
    assert contents(together) == contents(alone)


@pytest.mark.parametrize("write", [to_gguf, joined])
def test_split_is_kept_while_it_is_converted(
    write: Callable[[Path, Path], None], models: list[Path], tmp_path: Path
) -> None:
    folder, target = split(models[0], sequential=True), tmp_path / "target"
    target.mkdir()

    def remove() -> None:
        with pytest.raises(InUseError, match="would replace or remove its layer files"), locked_without_waiting(folder):
            pass

    during(write, models[0], target, remove)
