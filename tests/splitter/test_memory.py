"""Memory that a split takes over an idle process: fixed buffers, whatever the tensor, the layer and the shard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rabbitllm.formats.safetensors_file import Placed, encode_header

MOST = 200_000_000
ROOT = Path(__file__).parent.parent.parent

SPLIT_AND_WATCH = """
import sys, threading
import bitsandbytes.functional, torch
from rabbitllm.splitter import split as _
from tests.support.splitting import Call

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

source, saving_path, compression = sys.argv[1:]
idle, most, over = anonymous(), 0, threading.Event()

def watch():
    global most
    while not over.wait(0.01):
        most = max(most, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
Call(source, saving_path, None if compression == "none" else compression, sequential=False).make()
over.set()
watcher.join()
print(most - idle)
"""


def embedding(folder: Path, rows: int) -> Path:
    """A checkpoint of one shard and one bf16 tensor of so many rows of 4096; its zeros take no disk."""
    folder.mkdir()
    header, (offset,) = encode_header([Placed("model.embed_tokens.weight", "BF16", (rows, 4096))])
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(offset + rows * 4096 * 2)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def over_idle(source: Path, saving_path: Path, compression: str | None) -> int:
    command = [sys.executable, "-c", SPLIT_AND_WATCH, str(source), str(saving_path), compression or "none"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(ran.stdout.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("compression", [None, "8bit"])
def test_memory_for_a_tensor_larger_than_the_bound(tmp_path: Path, compression: str | None) -> None:
    source = embedding(tmp_path / "model", 60_000)
    assert (source / "model.safetensors").stat().st_size > 2 * MOST
    assert over_idle(source, tmp_path / "out", compression) < MOST


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("compression", [None, "8bit", "4bit"])
def test_memory_for_a_tensor_of_2_5_gb(tmp_path: Path, compression: str | None) -> None:
    source = embedding(tmp_path / "model", 305_176)
    assert (source / "model.safetensors").stat().st_size > 2_500_000_000
    assert over_idle(source, tmp_path / "out", compression) < MOST
    for path in (tmp_path / "out").rglob("*.safetensors"):
        path.unlink()
