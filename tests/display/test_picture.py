"""The picture of a pass: what is in it, in every format."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.display.picture import draw, spent_by_layer
from rabbitllm.errors import OptionError
from rabbitllm.telemetry.passes import Pass, PassInput
from rabbitllm.telemetry.profiler import COMPUTE, DEQUANTIZE, READ, READ_WAIT
from rabbitllm.telemetry.trace import Event, Trace
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import INPUT, load, split

MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF-"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    model: Any = load(split(build_checkpoint(tmp_path_factory.mktemp("model"), "llama")), 0, profiling=True)
    with torch.inference_mode(), model.profiler.trace() as found:
        model.generate(INPUT, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    made: Trace = found
    return made


@pytest.mark.parametrize("ending", list(MAGIC))
def test_formats(trace: Trace, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"time.{ending}"
    draw(trace, path, "a model", "its figures")
    assert path.read_bytes().startswith(MAGIC[ending])


def test_the_picture_names_lanes_layers_and_stages(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text
    path = tmp_path / "time.svg"
    draw(trace, path, "a model", "its figures")
    words = {"".join(element.itertext()).strip() for element in ElementTree.parse(path).iter() if element.text}
    assert {"disk", "caller", "wait for weights", COMPUTE} <= words
    assert {"embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "lm_head"} <= words
    assert {"a model", "its figures"} <= words


def test_a_layer_has_the_reading_that_brought_it() -> None:
    """That of the first one was done while the pass before ended; what is read for the next pass is not counted."""
    one = Pass(2, 10.0, 2.0, PassInput(1, 1, 5, 1), None, {})
    events = [
        Event(8.0, 0.5, "reader", "a", READ, 1),
        Event(9.5, 0.75, "reader", "a", READ, 1),
        Event(10.0, 0.25, "main", "a", READ_WAIT, 0),
        Event(10.25, 0.25, "main", "a", COMPUTE, 0),
        Event(10.5, 0.5, "reader", "b", READ, 1),
        Event(10.75, 0.25, "main", "b", DEQUANTIZE, 0),
        Event(11.0, 0.5, "main", "b", COMPUTE, 0),
        Event(11.25, 0.5, "reader", "a", READ, 1),
        Event(12.5, 0.5, "main", "a", COMPUTE, 0),
    ]
    assert spent_by_layer(one, events) == {
        "a": {READ_WAIT: 0.25, COMPUTE: 0.25, READ: 0.75},
        "b": {DEQUANTIZE: 0.25, COMPUTE: 0.5, READ: 0.5},
    }


def test_only_whole_passes_are_drawn(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no whole pass"):
        draw(Trace(), tmp_path / "time.png")
    short = Trace(most_events=1)
    for start in (1.0, 2.0):
        short.add(Event(start, 0.5, "main", "a", COMPUTE, 0))
    short.add_pass(Pass(1, 0.9, 2.0, PassInput(1, 1, 5, 1), None, {}), "main")
    with pytest.raises(OptionError, match="no whole pass"):
        draw(short, tmp_path / "time.png")
