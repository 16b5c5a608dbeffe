"""Clients of one server, all in this process; each sends its next request once the last one is answered.

    python -P -m benchmarks.lib.clients < job.json

The job: `url` of a streaming route in OpenAI's form, `bodies` of the requests, the number of clients `at_once`, the
`seconds` after which they disconnect, and the `cores` to run on. The output is one JSON object: `answers` (see
`server_process.Answer`) and `seconds`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

_END = "[DONE]"


def _note(sent: float) -> dict[str, Any]:
    return {"sent": sent, "pieces": [], "text": "", "status": None, "error": "cut short", "new_tokens": None}


def take_in(event: dict[str, Any], noted: dict[str, Any], now: float) -> None:
    """One event of a stream."""
    if event.get("error"):
        raise ValueError(json.dumps(event["error"])[:200])
    for choice in event.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if text:
            noted["text"] += text
            noted["pieces"].append(now)
    if usage := event.get("usage"):
        noted["new_tokens"] = usage.get("completion_tokens")


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], noted: dict[str, Any], start: float) -> None:
    """One request, to its end."""
    try:
        async with client.stream("POST", url, json=body) as response:
            noted["status"] = response.status_code
            if response.status_code != 200:
                noted["error"] = (await response.aread()).decode(errors="replace")[:200]
                return
            async for line in response.aiter_lines():
                name, _, data = line.partition(":")
                if name == "data" and data.strip() != _END:
                    take_in(json.loads(data), noted, time.perf_counter() - start)
            noted["error"] = None
    except (httpx.HTTPError, ValueError) as error:
        noted["error"] = f"{type(error).__name__}: {error}"


async def one_client(
    client: httpx.AsyncClient, url: str, bodies: Iterator[dict[str, Any]], answers: list[dict[str, Any]], start: float
) -> None:
    """Send the next body after each answer."""
    for body in bodies:
        noted = _note(time.perf_counter() - start)
        answers.append(noted)
        await ask(client, url, body, noted, start)


async def level(url: str, bodies: list[dict[str, Any]], at_once: int, seconds: float) -> dict[str, Any]:
    """Send all bodies, until the last answer or the time limit."""
    answers: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        start, following = time.perf_counter(), iter(bodies)
        clients = [asyncio.create_task(one_client(client, url, following, answers, start)) for _ in range(at_once)]
        _, pending = await asyncio.wait(clients, timeout=seconds)
        took = time.perf_counter() - start
        for task in pending:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    if not pending:
        took = max((moment for noted in answers for moment in noted["pieces"]), default=took)
    return {"answers": answers, "seconds": took}


def main() -> None:
    """Read the job, run it, write the answers."""
    job = json.load(sys.stdin)
    os.sched_setaffinity(0, job["cores"])
    outcome = asyncio.run(level(job["url"], job["bodies"], job["at_once"], job["seconds"]))
    json.dump(outcome, sys.stdout)


if __name__ == "__main__":
    main()
