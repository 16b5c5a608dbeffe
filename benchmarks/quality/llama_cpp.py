"""llama.cpp's own tools: its quantizer, and what its server finds likely to come next, which proves its file.

Which type a matrix gets is the quantizer's choice: another than the preset is named after where it deems a matrix
sensitive, and where rows are no multiple of a type's block.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import llama_server
from benchmarks.lib.idle_process import PeerError
from benchmarks.lib.peers import LLAMA_SERVER
from benchmarks.lib.server_process import served
from benchmarks.lib.worker_llama_cpp import write_gguf

_ARGUMENTS = ("--parallel", "1", "--threads", "2", "--flash-attn", "off", "--cache-type-k", "f32")
_SECONDS = 60.0
PLAIN = "BF16"
PRESETS = ("Q4_0", "Q4_K_M", "Q8_0")


def tool(work: Path) -> Path:
    """`llama-quantize`, built unless an earlier run did.

    Raises:
        PeerError: it cannot be built here.
    """
    return llama_server.built(work, "llama-quantize")


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


def next_tokens(path: Path, contexts: Sequence[Sequence[int]], vocabulary: int, work: Path) -> torch.Tensor:
    """Logarithms of the probabilities of all tokens behind each context: float32 (contexts, vocabulary).

    Args:
        path: of the file.
        contexts: ids of tokens.
        vocabulary: tokens of the model.
        work: for environments and logs.

    Raises:
        PeerError: the program cannot be built, failed, or left a token out.
    """
    room = str(max(map(len, contexts)) + 16)
    job = {"how": "program", "package": None, "program": str(llama_server.program(work))}
    arguments = ["--model", str(path), "--ctx-size", room, *_ARGUMENTS]
    with served(LLAMA_SERVER, {**job, "arguments": arguments}, work, "llama-logits", []) as server:
        found = torch.full((len(contexts), vocabulary), -torch.inf)
        # what is drawn does not matter, but of the end of a text, or of half a character, nothing would be told
        drawn = [[vocabulary - 1, 1e6]]
        for number, ids in enumerate(contexts):
            body: dict[str, Any] = {"prompt": list(ids), "n_predict": 1, "n_probs": vocabulary, "cache_prompt": False}
            body["logit_bias"] = drawn
            request = urllib.request.Request(
                f"{server.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_SECONDS) as answer:
                (said,) = json.load(answer)["completion_probabilities"]
            for one in said["top_logprobs"]:
                found[number, one["id"]] = one["logprob"]
    if not torch.isfinite(found).all():
        raise PeerError("llama-server did not give every token's probability")
    return found
