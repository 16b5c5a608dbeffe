"""The bundled model, in a folder of a test's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import rabbitllm

DEMO = Path(rabbitllm.__file__).parent / "demo" / "model"


def demo_model(folder: Path) -> Path:
    """A copy, at a folder that is not there yet."""
    return shutil.copytree(DEMO, folder)


def endless_model(folder: Path) -> Path:
    """A copy without an end: it goes on until it is stopped, or has made as many tokens as were asked for."""
    demo_model(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "suppress_tokens": [0, 1]}))
    return folder
