"""What stays in memory is asked for before the first pass gets there."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from rabbitllm.engine import read_ahead
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.read_ahead import PIECE_BYTES, ReadAhead
from rabbitllm.engine.span_reader import FileSpan
from rabbitllm.storage.files import PositionalFile
from tests.engine.test_span_reader import Folder, _cached_pages
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import INPUT, load, run, split, tiers


def dropped(path: Path) -> Path:
    os.sync()
    with PositionalFile(path) as file:
        file.drop_cache(0, file.size())
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="mincore, posix_fadvise")
def test_files_come_into_the_page_cache(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(os.urandom(2 * PIECE_BYTES + 4096))
        dropped(path)
    before = sum(map(_cached_pages, paths))
    spans = {path.name: [FileSpan(path.name, 0, path.stat().st_size, 0)] for path in paths}
    for thread in ReadAhead(spans, Folder(tmp_path)).threads:
        thread.join(60)
    deadline = time.monotonic() + 60
    while sum(map(_cached_pages, paths)) < 2 * (2 * PIECE_BYTES // 4096 + 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(map(_cached_pages, paths)) == 2 * (2 * PIECE_BYTES // 4096 + 1) > before


def test_files_that_are_gone_are_ignored(tmp_path: Path) -> None:
    (thread,) = ReadAhead({"unit": [FileSpan("none", 0, 10, 0)]}, Folder(tmp_path)).threads
    thread.join(60)
    assert not thread.is_alive()


def test_what_is_streamed_and_the_embedding_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = read_ahead._ask
    monkeypatch.setattr(
        read_ahead, "_ask", lambda spans, store: (asked.extend(span.file for span in spans), ask(spans, store))
    )
    directory = split(build_checkpoint(tmp_path / "model", "llama"))
    whole = load(directory)
    layers = [f"model.layers.{number}" for number in range(3)]
    assert [name.removesuffix(".safetensors") for name in asked] == [*layers, "model.norm", "lm_head"]
    asked.clear()
    some = load(directory, sum(placed.stored for placed in whole.placement.units) // 2)
    kept = [unit for unit, tier in tiers(some).items() if tier is Tier.RESIDENT and unit != "model.embed_tokens"]
    assert [name.removesuffix(".safetensors") for name in asked] == kept
    assert run(some, INPUT).logits is not None
