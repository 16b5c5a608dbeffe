"""llama.cpp's own tools: its quantizer, and its server's probabilities of next tokens, which prove a file.

The quantizer may choose another type than the preset's for matrices that it deems sensitive, and for rows that are no
multiple of a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import llama
from benchmarks.lib.process import PeerError, run_tool
from rabbitllm.formats.tensor_spec import TensorSpec

_ARGUMENTS = ("--parallel", "1", "--threads", "2", "--flash-attn", "off", "--cache-type-k", "f32")
_SECONDS = 60.0
PLAIN = "BF16"
PRESETS = ("Q2_K", "Q3_K_M", "IQ4_XS", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")


def tool(work: Path) -> Path:
    """`llama-quantize`, built unless an earlier run did.

    Raises:
        PeerError: it cannot be built here.
    """
    return llama.built(work, "llama-quantize")


def quantized(program: Path, plain: Path, path: Path, preset: str) -> Path:
    """Quantize a file, on one thread, and return the new path.

    Raises:
        PeerError: it failed.
    """
    run_tool([str(program), str(plain), str(path), preset, "1"], "llama-quantize failed")
    return path


@contextlib.contextmanager
def serving(path: Path, room: int, work: Path) -> Iterator[Callable[..., Any]]:
    """llama.cpp's server for a file, as a function that posts a body of JSON to a route and returns the answer.

    Args:
        path: of the file.
        room: tokens of a context.
        work: for environments and logs.

    Raises:
        PeerError: the program cannot be built, or failed.
    """
    arguments = ["--model", str(path), "--ctx-size", str(room), *_ARGUMENTS]
    with llama.serving(llama.built(work, "llama-server"), arguments, work, "llama-logits", seconds=_SECONDS) as ask:
        yield ask


def next_tokens(ask: Callable[..., Any], contexts: Sequence[Sequence[int]], vocabulary: int) -> torch.Tensor:
    """Logarithms of the probabilities of all tokens behind each context: float32 (contexts, vocabulary).

    Args:
        ask: of `serving`.
        contexts: ids of tokens.
        vocabulary: tokens of the model.

    Raises:
        PeerError: the program left a token out.
    """
    logarithms = torch.full((len(contexts), vocabulary), -torch.inf)
    # any drawn token will do, except the end of a text or half a character, for which it returns no probabilities
    drawn = [[vocabulary - 1, 1e6]]
    for number, ids in enumerate(contexts):
        options = {"n_predict": 1, "n_probs": vocabulary, "cache_prompt": False, "logit_bias": drawn}
        (step,) = ask("/completion", prompt=list(ids), **options)["completion_probabilities"]
        for token in step["top_logprobs"]:
            logarithms[number, token["id"]] = token["logprob"]
    if not torch.isfinite(logarithms).all():
        raise PeerError("llama-server did not give every token's probability")
    return logarithms


def types(specs: Sequence[TensorSpec]) -> str:
    """The types of the matrices of a file, as text: "1 Q4_0 and 1 Q6_K: ffn_down", …"""
    counted: dict[str, dict[str, int]] = {}
    for spec in specs:
        if len(spec.shape) > 1:
            role = spec.name.removesuffix(".weight").rpartition(".")[2]
            kinds, name = counted.setdefault(role, {}), spec.dtype if spec.blocks is None else spec.blocks.kind.name
            kinds[name] = kinds.get(name, 0) + 1
    by_mixture: dict[str, list[str]] = {}
    for role, kinds in counted.items():
        said = (
            next(iter(kinds)) if len(kinds) == 1 else " and ".join(f"{n} {name}" for name, n in sorted(kinds.items()))
        )
        by_mixture.setdefault(said, []).append(role)
    return "; ".join(f"{said}: {', '.join(roles)}" for said, roles in by_mixture.items())
