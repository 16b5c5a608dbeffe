"""The scale model asked for what was measured here, compared with the committed figures. Reads benchmarks/results.

The rates that it is given were measured in other runs than those it is compared with, but for one row, which says so.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import checkpoint, even_experts
from benchmarks.scale.facts import EPYC, XEON, Figure, Host
from benchmarks.scale.pace import Pass, pass_over
from benchmarks.scale.shape import DENSE, Drawn, draw, shape_of, shape_of_layers
from rabbitllm.engine.devices import CpuDevice, default_budget
from rabbitllm.estimate.cost_model import Strain

RESULTS = Path(__file__).resolve().parent.parent / "results"
CONTEXT = 24
"""Tokens of a prompt and what was made of it, about, where a single sequence was measured."""
PAGE_CACHE = Figure(11.2e9, "reading out of the page cache, predict-full-1")
IN_TURN = Strain(2.0, 2.0)
"""A copy out of the page cache reads and writes 22 GB/s of memory, as much as products can have, so that neither hides
behind the other."""
PLANNED_MEMORY = 19.7e9
"""Of the 72B's 40.9 GB, what stayed in 24 GB of RAM (docs/PERFORMANCE.md)."""


class _Free(CpuDevice):
    """A processor with so many bytes of memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes

    def free_bytes(self) -> int:
        return self._nbytes


def _budget_of(nbytes: int, drawn: Drawn) -> int:
    """What the engine takes for weights of so many free bytes."""
    return default_budget(_Free(nbytes))


@dataclass(frozen=True)
class Check:
    """A row: what was run, where the figure is, and the two of them, seconds a token.

    Attributes:
        what: in words.
        source: file of benchmarks/results, or page of docs.
        predicted, measured: seconds.
        read: bytes that a token reads from the disk, as predicted.
        measured_read: as measured; None where it was not.
        own: whether a rate comes of this very row.
    """

    what: str
    source: str
    predicted: float
    measured: float
    read: float
    measured_read: float | None = None
    own: bool = False

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@functools.cache
def checks() -> tuple[Check, ...]:
    """All of them."""
    cached = dataclasses.replace(EPYC, disk=PAGE_CACHE, strain=IN_TURN)
    weights = _small(None).shape.outline.checkpoint_bytes
    whole, half = (lambda drawn: 1 << 40), (lambda drawn: drawn.shape.output_bytes // 2)
    nothing: Callable[[Drawn], int] = lambda drawn: 0  # noqa: E731
    return (
        _of_file("fits, bfloat16 (its rate is from here)", "capped-full", "rabbitllm-2, no cap", EPYC, whole, own=True),
        _of_file("fits, bfloat16, another run", "decode-full", "rabbitllm-2", EPYC, whole),
        _of_file("fits, 4bit", "decode-compressed", "rabbitllm-2-4bit", EPYC, whole, "4bit"),
        _of_file("half stays, page cache", "predict-full-1", "none half", cached, half),
        _of_file("nothing stays, page cache", "decode-full", "rabbitllm-2-streamed", cached, nothing),
        _of_file("half stays, 4bit, page cache", "predict-full-1", "4bit half", cached, half, "4bit"),
        _of_file(
            "nothing stays, 4bit, page cache", "decode-compressed", "rabbitllm-2-4bit-streamed", cached, nothing, "4bit"
        ),
        *(
            _of_file(
                f"a cap of {share} % of the weights, disk",
                "capped-full",
                f"rabbitllm-2, {share} %",
                EPYC,
                functools.partial(_budget_of, weights * share // 100),
            )
            for share in (25, 50, 75)
        ),
        _large(),
        *(_experts(row, share) for row, share in (("none all", 1.0), ("none half", 0.5), ("none nothing", 0.0))),
        *(_served(clients, rate) for clients, rate in SERVED.items()),
        *_over_processes(),
    )


def _runs(file: str, row: str) -> list[Mapping[str, Any]]:
    found = json.loads((RESULTS / f"{file}.json").read_text())["runs"]
    return [run for run in found if run["row"] == row and run["error"] is None]


def _of_file(
    what: str,
    file: str,
    row: str,
    host: Host,
    room: Callable[[Drawn], int],
    compression: str | None = None,
    own: bool = False,
) -> Check:
    drawn = _small(compression)
    found, read = _token(drawn, host, room(drawn))
    runs = _runs(file, row)
    measured = statistics.median(run["token_seconds"] for run in runs)
    steps = [statistics.median(run["step_bytes"]) for run in runs if run.get("step_bytes")]
    return Check(what, file, found.seconds, measured, read, statistics.median(steps) if steps else None, own)


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


@functools.cache
def _even() -> Drawn:
    scale = asdict(even_experts.SCALES["full"])
    config = {**scale, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
    config |= {"tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    layer = {**_attention(config), "mlp.gate.weight": [experts, hidden]}
    layer |= {f"self_attn.{which}_norm.weight": [config["head_dim"]] for which in "qk"}
    layer |= {f"mlp.experts.{{{experts}}}.{which}_proj.weight": [inner, hidden] for which in ("gate", "up")}
    layer[f"mlp.experts.{{{experts}}}.down_proj.weight"] = [hidden, inner]
    return draw(shape_of_layers("even experts", None, config, layer), on_gpu=False)


def _large() -> Check:
    """Qwen2.5-72B's shapes at 4bit."""
    drawn = draw(shape_of(DENSE, "4bit"), on_gpu=False)
    found, read = _token(drawn, EPYC, int(PLANNED_MEMORY) + drawn.buffers)
    forward = json.loads((RESULTS / "kaggle-72b-stream.json").read_text())["forward"]
    measured = statistics.median(forward["further_seconds"])
    each = forward["further_read"] / len(forward["further_seconds"])
    return Check("72B at 4bit on 24 GB of RAM, disk", "kaggle-72b-stream", found.seconds, measured, read, each)


def _experts(row: str, share: float) -> Check:
    drawn = _even()
    found, read = _token(drawn, XEON, int(share * drawn.shape.output_bytes) if share < 1 else 1 << 40)
    measured = statistics.median(run["token_seconds"] for run in _runs("predict-experts-full", row))
    words = {1.0: "all", 0.5: "half", 0.0: "nothing"}[share]
    return Check(f"experts used alike, {words} stays", "predict-experts-full", found.seconds, measured, read)


SERVED = {1: 1.35, 16: 14.66}
"""Clients -> tokens a second of all, the row "quiet" of benchmarks/NOTES.md's table: half of the weights, 16 tokens of
prompt and 32 new ones each."""
SERVED_PROMPT, SERVED_NEW = 16, 32


def _served(clients: int, rate: float) -> Check:
    """Of the server, on the machine without instructions for bfloat16."""
    drawn = _small(None)
    slow = dataclasses.replace(
        XEON,
        memory=Figure(9.2e9, "one row with 5632 x 2048 in bfloat16: 2.5 ms, benchmarks/NOTES.md"),
        flops=Figure(24.6e9, "16 rows with 5632 x 2048 in bfloat16: 15 ms, benchmarks/NOTES.md"),
        disk=Figure(1.0e9, "docs/PERFORMANCE.md"),
    )
    units = drawn.units(drawn.shape.output_bytes // 2, 0, 0)
    prompt = pass_over(units, drawn.shape, slow, clients, SERVED_PROMPT, SERVED_PROMPT)
    step = pass_over(units, drawn.shape, slow, clients, 1, SERVED_PROMPT + SERVED_NEW)
    seconds = (prompt.seconds + (SERVED_NEW - 1) * step.seconds) / (clients * SERVED_NEW)
    what = f"served, half of the weights, {clients} at once"
    return Check(what, "benchmarks/NOTES.md", seconds, 1 / rate, step.parts["disk"] * slow.disk.value / clients)


PIPELINE_SHARE = 55
"""Of the weights, in percent: what each process has memory for in results/pipeline."""


def _over_processes() -> Iterator[Check]:
    """Layers over processes of one machine, each resident with its span as far as its memory goes.

    They take turns, each with all cores. That one could read for the next token while another computes is not reckoned.
    """
    drawn = _small(None)
    free = "1 process, no cap"
    (alone,) = _runs("pipeline", free)
    layers = drawn.shape.layers * XEON.layer.value
    looked_up = sum(cost.stored for cost in drawn.costs if cost.by_rows)
    rate = (drawn.shape.output_bytes - looked_up) / (alone["token_seconds"] - layers)
    host = dataclasses.replace(
        XEON,
        memory=Figure(rate, "results/pipeline, one process without a cap"),
        disk=Figure(1.0e9, "docs/PERFORMANCE.md"),
    )
    found, read = _token(drawn, host, 1 << 40)
    what = "layers over processes: one, all stays (its rate is from here)"
    yield Check(what, "pipeline", found.seconds, alone["token_seconds"], read, None, own=True)
    room = default_budget(_Free(drawn.shape.outline.checkpoint_bytes * PIPELINE_SHARE // 100))
    for row in (f"{count}, {PIPELINE_SHARE} %" for count in ("1 process", "2 processes", "3 processes")):
        (run,) = _runs("pipeline", row)
        spans = run["spans"] or [drawn.shape.layers]
        seconds = read = 0.0
        for part in _by_process(drawn, spans):
            found, one = _token(part, host, room)
            seconds, read = seconds + found.seconds, read + one
        what = f"layers over {row.partition(',')[0]}, {PIPELINE_SHARE} % each"
        yield Check(what, "pipeline", seconds, run["token_seconds"], read, run["streamed"])


def _by_process(drawn: Drawn, spans: Sequence[int]) -> Iterator[Drawn]:
    """What each process has: a span of the layers, and the first all else."""
    layers = [cost for cost in drawn.costs if cost.is_layer]
    rest = tuple(cost for cost in drawn.costs if not cost.is_layer)
    begin = 0
    for count in spans:
        own = (*(rest if begin == 0 else ()), *layers[begin : begin + count])
        yield dataclasses.replace(drawn, costs=own)
        begin += count
