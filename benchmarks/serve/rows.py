"""The servers of `benchmarks serve`: their files, their command lines, and their requests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import llama
from benchmarks.lib.peers import LLAMA_SERVER, THIS, TRANSFORMERS_SERVE, Environment, make_layer_files


@dataclass(frozen=True)
class Server:
    """A row.

    Attributes:
        environment: of its process.
        package: its Python package; None for a program.
        how: see `worker.serve`.
        options: see `worker.serve`.
        arguments: of its command line.
        bits: of a weight, 16 or 4; rows with as many bits are compared.
        kind: of llama.cpp's file.
        compression: of this project's layer files.
    """

    environment: Environment
    package: str | None
    how: str
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    bits: int = 16
    kind: str | None = None
    compression: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.environment == THIS


_BLOCK_TOKENS = 32
_BATCHING: Mapping[str, Any] = {
    "continuous_batching": True,
    "cb_block_size": _BLOCK_TOKENS,
    "cb_max_batch_tokens": 512,
}
"""Without these sizes its KV cache takes most of the machine's memory, in spite of its group, and it is killed."""
SERVERS: Mapping[str, Server] = {
    "transformers-serve-disk-batching": Server(TRANSFORMERS_SERVE, "transformers", "transformers", _BATCHING),
    "llama-server-bf16": Server(LLAMA_SERVER, None, "program", kind="BF16"),
    "llama-server-q4_0": Server(LLAMA_SERVER, None, "program", bits=4, kind="Q4_0"),
    "rabbitllm-serve": Server(THIS, "rabbitllm", "rabbitllm"),
    "rabbitllm-serve-4bit": Server(THIS, "rabbitllm", "rabbitllm", bits=4, compression="4bit"),
}


@dataclass(frozen=True)
class Workload:
    """The job of all rows.

    Attributes:
        checkpoint: of a Llama, in bfloat16.
        weights: its bytes.
        vocabulary: its number of tokens; token n is the word wn.
        folder: of further files.
        prompt_tokens, new_tokens: of each request.
        rounds: requests of each client, one after the other.
        at_once: numbers of clients, in order.
        limit_seconds: for each number of clients.
    """

    checkpoint: Path
    weights: int
    vocabulary: int
    folder: Path
    prompt_tokens: int
    new_tokens: int
    rounds: int
    at_once: Sequence[int]
    limit_seconds: float

    def prompt(self, number: int) -> list[int]:
        """Token ids of a request's prompt, another for each number."""
        chance = random.Random(number)
        return [chance.randrange(1, self.vocabulary) for _ in range(self.prompt_tokens)]


def prepare_files(row: str, workload: Workload, work: Path) -> None:
    """Make the files of a row's server, unless they exist.

    Raises:
        PeerError: it failed.
    """
    server, place = SERVERS[row], prepared(row, workload)
    if server.environment == LLAMA_SERVER:
        llama.built(work, "llama-server")
    if place.exists() or place == workload.checkpoint:
        return
    if server.is_ours:
        folder, compression = place.parent, server.compression
        make_layer_files(THIS, "rabbitllm", workload.checkpoint, folder, compression, work, f"serve-{row}-files")
        return
    if server.kind is not None:
        llama.write_file(workload.checkpoint, place, server.kind)


def prepared(row: str, workload: Workload) -> Path:
    """The path that a row's server opens: layer files, llama.cpp's file, or the checkpoint."""
    server = SERVERS[row]
    if server.is_ours:
        suffix = "" if server.compression is None else f".{server.compression}"
        return workload.folder / f"layers-{server.compression or 'none'}" / f"splitted_model{suffix}"
    return workload.checkpoint if server.kind is None else workload.folder / f"{server.kind}.gguf"


def job_of(row: str, workload: Workload, work: Path) -> dict[str, Any]:
    """The job of a row's server, for `worker.serve`."""
    server, place = SERVERS[row], prepared(row, workload)
    job: dict[str, Any] = {
        "how": server.how,
        "package": server.package,
        "model": str(place),
        "checkpoint": str(workload.checkpoint),
        "offload_folder": str(workload.folder / "offload"),
        "options": dict(server.options),
        "arguments": list(server.arguments),
    }
    most = max(workload.at_once)
    if "cb_block_size" in server.options:
        blocks = -(-(workload.prompt_tokens + workload.new_tokens) // _BLOCK_TOKENS) + 1
        job["options"]["cb_num_blocks"] = most * blocks
    if server.environment == LLAMA_SERVER:
        context = most * (workload.prompt_tokens + workload.new_tokens + 8)
        job["program"] = str(llama.built(work, "llama-server"))
        job["arguments"] = ["--model", str(place), "--parallel", str(most), "--ctx-size", str(context)]
    return job


def body_of(row: str, workload: Workload, number: int, new_tokens: int) -> dict[str, Any]:
    """The body of a request: greedy, streamed, and of a fixed length."""
    ids = workload.prompt(number)
    body: dict[str, Any] = {"max_tokens": new_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if SERVERS[row].environment == LLAMA_SERVER:  # its file has other words, and one of them ends a text
        return {**body, "prompt": ids, "ignore_eos": True}
    words = " ".join(f"w{i}" for i in ids)
    name = {"model": str(workload.checkpoint)} if SERVERS[row].environment == TRANSFORMERS_SERVE else {}
    return {**body, **name, "prompt": words}
