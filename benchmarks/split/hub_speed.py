"""How fast the local hub is for a client that does nothing with the bytes, and through rabbitllm's own fetching.

    python -m benchmarks.split.hub_speed '{"repository": "...", "nbytes": 2000000000}'

Its environment names the hub (`HF_ENDPOINT`). One JSON object on stdout: for each way of reading MB/s, and the seconds
of a core that this process spent on a GB.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rabbitllm.checkpoints.hub import HubAccess, HubRepository, open_repository

RECEIVED_AT_ONCE = 1 << 20


def main() -> None:
    """Read the largest shard, or so much of it, in each way."""
    job = json.loads(sys.argv[1])
    repository = open_repository(job["repository"], HubAccess(), Path())
    name = max((file for file in repository.files.values() if file.sha256), key=lambda file: file.size).name
    most = min(job["nbytes"], repository.files[name].size)
    ways = {"socket": _from_socket(repository, name), "fetch.stream": repository.stream(name)}
    print(json.dumps({"nbytes": most, **{way: _timed(chunks, most) for way, chunks in ways.items()}}))


def _from_socket(repository: HubRepository, name: str) -> Iterator[memoryview]:
    """http.client, into one buffer."""
    from huggingface_hub import hf_hub_url

    url = urlsplit(hf_hub_url(repository.repo_id, name, revision=repository.commit))
    connection = http.client.HTTPConnection(url.netloc)
    connection.request("GET", url.path)
    response = connection.getresponse()
    buffer = memoryview(bytearray(RECEIVED_AT_ONCE))
    while count := response.readinto(buffer):
        yield buffer[:count]


def _timed(chunks: Iterator[Any], most: int) -> dict[str, float]:
    left = most - len(next(chunks))  # connected, and what is imported at first use is
    begun, used, got = time.perf_counter(), time.process_time(), 0
    while got < left:
        got += len(next(chunks))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - used
    return {"mb_per_second": got / seconds / 1e6, "core_seconds_per_gb": cpu / got * 1e9 if got else 0.0}


if __name__ == "__main__":
    main()
