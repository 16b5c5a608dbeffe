"""llama.cpp's own quantizer: a checkpoint as its file in bfloat16, and what `llama-quantize` makes of that.

Which type a matrix gets is the tool's choice: another than the preset is named after where it deems a matrix sensitive,
and where rows are no multiple of a type's block.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.lib.idle_process import PeerError
from benchmarks.lib.llama_server import built
from benchmarks.lib.worker_llama_cpp import write_gguf

PLAIN = "BF16"
PRESETS = ("Q4_0", "Q4_K_M", "Q8_0")


def tool(work: Path) -> Path:
    """`llama-quantize`, built unless an earlier run did.

    Raises:
        PeerError: it cannot be built here.
    """
    return built(work, "llama-quantize")


def plain_file(checkpoint: Path, path: Path) -> Path:
    """A checkpoint in bfloat16 as llama.cpp's file, matrices bit for bit; norms become float32."""
    write_gguf({"checkpoint": str(checkpoint), "path": str(path), "kind": PLAIN})
    return path


def quantized(program: Path, plain: Path, path: Path, preset: str) -> Path:
    """What the tool makes of a file, on one thread.

    Raises:
        PeerError: it failed.
    """
    command = [str(program), str(plain), str(path), preset, "1"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        lines = (made.stderr or made.stdout).strip().splitlines()
        raise PeerError(f"llama-quantize failed: {lines[-1] if lines else f'exit status {made.returncode}'}")
    return path
