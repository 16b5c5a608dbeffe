"""The scale model asked for what was measured here, compared with the committed figures. Reads benchmarks/results.

The rates that it is given were measured in other runs than those it is compared with. More rows are in
benchmarks/NOTES.md.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import checkpoint
from benchmarks.scale.facts import EPYC, Figure, Host
from benchmarks.scale.pace import Pass, pass_over
from benchmarks.scale.shape import DENSE, Drawn, draw, shape_of, shape_of_layers
from rabbitllm.engine.devices import CpuDevice, default_budget

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WHOLE = 1 << 40
CONTEXT = 24
"""Tokens of a prompt and what was made of it, about, where a single sequence was measured."""
PAGE_CACHE = Figure(11.2e9, "reading out of the page cache, predict-full-1")
PLANNED_MEMORY = 19.7e9
"""Of the 72B's 40.9 GB, what stayed in 24 GB of RAM (docs/PERFORMANCE.md)."""


class _Free(CpuDevice):
    """A processor with so many bytes of memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes

    def free_bytes(self) -> int:
        return self._nbytes


@dataclass(frozen=True)
class Check:
    """A row: what was run, where the figure is, and the two of them, seconds a token.

    Attributes:
        what: in words.
        source: file of benchmarks/results, or page of docs.
        predicted, measured: seconds.
        read: bytes that a token reads from the disk, as predicted.
        measured_read: as measured; None where it was not.
    """

    what: str
    source: str
    predicted: float
    measured: float
    read: float
    measured_read: float | None = None

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def checks() -> tuple[Check, ...]:
    """All of them."""
    cached = dataclasses.replace(EPYC, disk=PAGE_CACHE, reads_in_turn=True)
    half_of_weights = default_budget(_Free(_small(None).shape.outline.checkpoint_bytes // 2))
    return (
        _of_file("fits, bfloat16", "decode-full", "rabbitllm-2", EPYC, WHOLE),
        _of_file("fits, 4bit", "decode-compressed", "rabbitllm-2-4bit", EPYC, WHOLE, "4bit"),
        _of_file("nothing stays, page cache", "decode-full", "rabbitllm-2-streamed", cached, 0),
        _of_file("a cap of 50 % of the weights, disk", "capped-full", "rabbitllm-2, 50 %", EPYC, half_of_weights),
        _large(),
    )


def _runs(file: str, row: str) -> list[Mapping[str, Any]]:
    found = json.loads((RESULTS / f"{file}.json").read_text())["runs"]
    return [run for run in found if run["row"] == row and run["error"] is None]


def _of_file(what: str, file: str, row: str, host: Host, room: int, compression: str | None = None) -> Check:
    found, read = _token(_small(compression), host, room)
    runs = _runs(file, row)
    measured = statistics.median(run["token_seconds"] for run in runs)
    steps = [statistics.median(run["step_bytes"]) for run in runs if run.get("step_bytes")]
    return Check(what, file, found.seconds, measured, read, statistics.median(steps) if steps else None)


def _token(drawn: Drawn, host: Host, room: int, sequences: int = 1) -> tuple[Pass, float]:
    """A step of some sequences, and the bytes that it reads."""
    units = drawn.units(room, 0, 0)
    found = pass_over(units, drawn.shape, host, sequences, 1, CONTEXT)
    return found, found.parts["disk"] * host.disk.value


@functools.cache
def _small(compression: str | None) -> Drawn:
    """The checkpoint of 1.43 GB that most benchmarks measure."""
    scale = asdict(checkpoint.SCALES["full"])
    config = {**scale, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}
    config["tie_word_embeddings"] = False
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    layer = {**_attention(config), "mlp.gate_proj.weight": [inner, hidden], "mlp.up_proj.weight": [inner, hidden]}
    layer |= {f"self_attn.{which}_proj.bias": layer[f"self_attn.{which}_proj.weight"][:1] for which in "qkv"}
    layer["mlp.down_proj.weight"] = [hidden, inner]
    return draw(shape_of_layers("1.43 GB", compression, config, layer), on_gpu=False)


def _attention(config: dict[str, Any]) -> dict[str, list[int]]:
    """The shapes of a layer's attention and norms."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    keys = config["num_key_value_heads"] * head
    found = {f"self_attn.{which}_proj.weight": [keys, hidden] for which in "kv"}
    found |= {"self_attn.q_proj.weight": [heads * head, hidden], "self_attn.o_proj.weight": [hidden, heads * head]}
    return found | {f"{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}


def _large() -> Check:
    """Qwen2.5-72B's shapes at 4bit."""
    drawn = draw(shape_of(DENSE, "4bit"), on_gpu=False)
    found, read = _token(drawn, EPYC, int(PLANNED_MEMORY) + drawn.buffers)
    forward = json.loads((RESULTS / "kaggle-72b-stream.json").read_text())["forward"]
    measured = statistics.median(forward["further_seconds"])
    each = forward["further_read"] / len(forward["further_seconds"])
    return Check("72B at 4bit on 24 GB of RAM, disk", "kaggle-72b-stream", found.seconds, measured, read, each)
