"""The benchmarks with their subjects, needs and costs. `python -m benchmarks list` prints them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

GROUPS = "control groups (root)"
"""These limit memory, at the smallest size too."""
PEERS = "peers from PyPI (10 GB of disk)"
"""Each in a virtual environment, made when first needed; `--only` leaves peers out."""


class Main(Protocol):
    """The `main` of a benchmark."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run with these arguments; return the exit status."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: its subject, its needs besides Linux and this project, its disk and its number of runs."""

    measures: str
    needs: tuple[str, ...]
    takes: str


CATALOGUE: Mapping[str, Benchmark] = {
    "split": Benchmark(
        "seconds to split a checkpoint, compared with cp; peak disk, peak memory", (PEERS,), "10 GB; 45 runs"
    ),
    "split.quantizers": Benchmark(
        "MB/s of the compiled quantizers and of bitsandbytes, one core", (), "42 runs of a few seconds"
    ),
    "split.kaggle": Benchmark(
        "a split of 150 GB within a Kaggle disk, killed five times: disk, memory, time", (), "51 GB; 10 minutes a mode"
    ),
    "decode": Benchmark("seconds a token, load time and memory on the CPU", (PEERS,), "10 GB; 39 runs"),
    "decode.capped": Benchmark(
        "seconds a token with less memory than the model has", (GROUPS, PEERS), "10 GB; 96 runs of at most 90 s"
    ),
    "decode.gguf": Benchmark(
        "seconds a token from GGUF files, compared with llama.cpp on the same file",
        (GROUPS, PEERS),
        "6 GB; 120 runs of at most 90 s",
    ),
    "decode.instructions": Benchmark(
        "tokens/s with AVX2 and with all instructions, beside llama.cpp with the same bits",
        (),
        "10 GB; 100 runs of two processes",
    ),
    "decode.predict": Benchmark(
        "seconds a token, predicted by `rabbitllm plan` and measured", (), "10 GB; 27 plans and runs"
    ),
    "decode.start": Benchmark(
        "processor time of one token from the command line, compared with a transformers script",
        (),
        "35 runs of some seconds",
    ),
    "decode.drafts": Benchmark(
        "seconds and passes of a token with drafts and without, also with drafts that are always wrong",
        (),
        "a model and its draft; 80 answers of 128 tokens",
    ),
    "decode.tables": Benchmark(
        "bytes read, memory and seconds a token of a model whose table does not fit",
        (),
        "10 GB; 64 passes of one token",
    ),
    "gpu": Benchmark(
        "on one or more GPUs: kernels, copies, races, peaks of memory, and a pass against its limit",
        ("an NVIDIA GPU",),
        "20 GB; 10 minutes; ran on one H100, never on several GPUs",
    ),
    "experts": Benchmark(
        "a mixture of experts with less memory than it has: seconds, bytes and cache hits a token",
        (GROUPS,),
        "26 GB; 42 runs of at most 10 minutes",
    ),
    "serve": Benchmark(
        "tokens/s of a server for 1 to 64 clients with less memory than the model has",
        (GROUPS, PEERS),
        "10 GB; 8 servers, 4 loads of at most 60 s for each",
    ),
    "serve.mixed": Benchmark(
        "time to the first token and between tokens of 64 mixed clients, beside llama.cpp",
        (),
        "a model; 3 runs of two servers",
    ),
    "serve.prompts": Benchmark(
        "seconds to the first token after a restart, with the prompt cache on disk", (), "6 GB; 9 loads of a model"
    ),
    "batch": Benchmark(
        "tokens/s of many prompts at once with less memory than the model has",
        (GROUPS, PEERS),
        "10 GB; 75 runs of at most 30 minutes",
    ),
    "batch.beyond_memory": Benchmark(
        "prompts whose keys and values do not fit in memory: in a file, or waiting", (), "2 GB; 3 runs"
    ),
    "quality": Benchmark(
        "divergence against bytes: this project's compressions, bitsandbytes, llama.cpp",
        ("llama.cpp from PyPI, compiled",),
        "33 formats of each model",
    ),
    "scale": Benchmark("a model of 1 to 1,000 machines, computed from published rates", (), "20 seconds"),
    "scale.pipeline": Benchmark(
        "seconds a token of a model over several processes of one machine", (GROUPS,), "10 GB; 21 runs"
    ),
}
"""By name: SUBJECT.NAME, in benchmarks/SUBJECT/NAME.py; SUBJECT alone is SUBJECT.SUBJECT."""


def module_of(name: str) -> str:
    """The module of a benchmark."""
    subject, _, own = name.partition(".")
    return f"benchmarks.{subject}.{own or subject}"


def main_of(name: str) -> Main:
    """The function that runs a benchmark."""
    return cast(Main, importlib.import_module(module_of(name)).main)


def listed() -> str:
    """The catalogue as text."""
    lines = []
    for name, benchmark in CATALOGUE.items():
        lines.append(f"{name:<20} {benchmark.measures}")
        lines.append(f"{'':<20} needs: {', '.join(benchmark.needs) or 'nothing else'}; takes: {benchmark.takes}")
    return "\n".join(lines)
