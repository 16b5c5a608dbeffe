"""What a server's memory comes back to after loads of many clients, compared with what its prefix cache holds.

A Llama with random weights, all of it streamed, behind `rabbitllm serve` in a process of its own; so many clients at
once send requests with prompts of their own, ten times over. One request goes before, since the buffers that layers are
read into take memory when they are first used. After each load, when nothing runs and free memory has
been given back (`server/server.py`), the anonymous memory of the process is compared with that before the first
load, less what the cache of beginnings holds then.

    python -m benchmarks.serve_memory [--loads 10] [--clients 64] [--scale medium]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import command_line
from benchmarks.checkpoint import SCALES, make_checkpoint
from benchmarks.serve_clients import level
from benchmarks.server_process import free_port

SETTLE_SECONDS = 25.0
"""After a load: free memory is given back every ten seconds."""
MIB = 1 << 20


@dataclass(frozen=True)
class Reading:
    """Bytes of the server's process: anonymous memory, and what of it its caches hold."""

    anonymous: int
    cached: int

    @property
    def without_cache(self) -> int:
        """What is not cache."""
        return self.anonymous - self.cached


def anonymous_bytes(process: int) -> int:
    """Of a process, from the kernel."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise ValueError("smaps_rollup has no line for anonymous memory")


def read(process: int, url: str) -> Reading:
    """When nothing runs any more."""
    while True:
        status = httpx.get(f"{url}/status", trust_env=False, timeout=600).json()
        if not status["running"] and not status["waiting"]:
            return Reading(anonymous_bytes(process), status["cache_bytes"])
        time.sleep(0.2)


def bodies(load: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests of one load; no two of a run begin alike."""
    vocabulary, found = SCALES[options.scale].vocab_size, []
    for number in range(options.clients * options.rounds):
        chance = random.Random(load * 1_000_000 + number)
        prompt = [chance.randrange(1, vocabulary) for _ in range(options.prompt_tokens)]
        body = {"prompt": prompt, "max_tokens": options.tokens, "temperature": 0, "stream": True}
        found.append({**body, "stream_options": {"include_usage": True}})
    return found


def row(name: str, reading: Reading, first: Reading) -> str:
    """One line of the table, in MiB."""
    more = reading.without_cache - first.without_cache
    return f"| {name} | {reading.anonymous / MIB:.0f} | {reading.cached / MIB:.0f} | {more / MIB:+.0f} |"


def loads(process: int, url: str, options: argparse.Namespace) -> list[Reading]:
    """Readings before the first load and after each."""
    asyncio.run(level(f"{url}/v1/completions", bodies(-1, options)[:1], 1, options.seconds))
    time.sleep(options.settle)
    found = [read(process, url)]
    print("| after load | anonymous, MiB | cache, MiB | beside the cache, above the start |")
    print("| --- | --- | --- | --- |\n" + row("start", found[0], found[0]), flush=True)
    for number in range(options.loads):
        sent = bodies(number, options)
        answers = asyncio.run(level(f"{url}/v1/completions", sent, options.clients, options.seconds))["answers"]
        failed = [answer["error"] for answer in answers if answer["error"]]
        if failed:
            raise SystemExit(f"{len(failed)} of {len(sent)} requests failed: {failed[0]}")
        read(process, url)
        time.sleep(options.settle)
        found.append(read(process, url))
        print(row(str(number + 1), found[-1], found[0]), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--loads", type=int, default=10)
    made.add_argument("--clients", type=int, default=64)
    made.add_argument("--rounds", type=int, default=1, help="requests of each client in a load")
    made.add_argument("--prompt-tokens", type=int, default=64)
    made.add_argument("--tokens", type=int, default=16)
    made.add_argument("--cache-memory", default="32MiB")
    made.add_argument("--scale", choices=list(SCALES), default="medium")
    made.add_argument("--settle", type=float, default=SETTLE_SECONDS)
    made.add_argument("--seconds", type=float, default=600.0, help="for a load, at most")
    made.add_argument("--work-dir", type=Path, default=Path(__file__).resolve().parent / "work")
    made.add_argument("--port", type=int, help="default: one that is free")
    smallest = {"loads": 1, "clients": 2, "prompt_tokens": 8, "tokens": 2, "settle": 0.0}
    options = command_line.parsed(made, arguments, **smallest)
    model, port = make_checkpoint(options.work_dir, options.scale, "LlamaConfig"), options.port or free_port()
    command = [sys.executable, "-m", "rabbitllm", "serve", str(model), "--port", str(port), "--device", "cpu"]
    command += ["--max-memory", "cpu=0", "--cache-memory", options.cache_memory]
    url = f"http://127.0.0.1:{port}"
    log = options.work_dir / "serve-memory.log"
    with log.open("wb") as said, subprocess.Popen(command, stdout=said, stderr=said, env=dict(os.environ)) as server:
        try:
            while server.poll() is None and not _answers(url):
                time.sleep(0.2)
            loads(server.pid, url, options)
        finally:
            server.terminate()
    return 0


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    sys.exit(main())
