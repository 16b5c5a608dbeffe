"""What `rabbitllm serve` says when it is ready: where, with what, and a line to try."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import harmless, put, put_fact, size
from rabbitllm.engine.tier_picture import places
from rabbitllm.generation.request import BatchStats
from rabbitllm.server.service import Service


def put_greeting(
    console: Console, service: Service, address: str, split: tuple[bool, Path] | None, *, is_local: bool
) -> None:
    """Print it.

    Args:
        console: where to.
        service: that answers.
        address: where.
        split: whether the split was there already, and where it is; None without one.
        is_local: whether only this machine reaches it.
    """
    settings, facts = service.settings, service.batch.facts
    put(console, Text(f"{harmless(settings.name)} at {address}", "bold green"))
    if split is not None:
        before, folder = split
        put_fact(console, "split", f"{'was there already' if before else 'made'}, in {harmless(str(folder))}")
    put_fact(console, "weights", _weights(service.streamed))
    put_fact(console, "requests", _requests(facts))
    put_fact(console, "embeddings", "yes" if service.embedder is not None else "none: the checkpoint has none")
    put_fact(console, "API key", "needed" if settings.api_key else "none")
    put_fact(console, "try", _curl(service, address))
    if not is_local and not settings.api_key:
        warning = (
            "Everyone who reaches this machine can use the model: --api-key, or --host 127.0.0.1, keeps others out."
        )
        put(console, Text(warning, "bold yellow"))


def _weights(model: Any) -> str:
    """`in RAM: 0.35 GiB; disk, read for each pass: 3.20 GiB`."""
    parts = []
    for place, words in places(model.placement).items():
        for word, nbytes in words.items():
            where = f" of {place}" if place.startswith("cuda") else ""
            parts.append(f"{word}{where}: {size(nbytes)}")
    return "; ".join(parts) or "none"


def _requests(facts: BatchStats) -> str:
    room = size(facts.cache_limit_bytes)
    aside = f", and {size(facts.aside_limit_bytes)} aside" if facts.aside_limit_bytes else ""
    return f"{facts.most_running} in a pass, {facts.most_waiting} more wait; the KV cache takes at most {room}{aside}"


def _curl(service: Service, address: str) -> str:
    """A line to paste."""
    body: dict[str, Any] = {"max_tokens": 64}
    if service.template.is_there:
        what, body["messages"] = "chat/completions", [{"role": "user", "content": "What is a rabbit?"}]
    else:
        what, body["prompt"] = "completions", "A rabbit is"
    key = ' -H "authorization: Bearer $RABBITLLM_API_KEY"' if service.settings.api_key else ""
    return f"curl {address}/v1/{what}{key} -d {shlex.quote(json.dumps(body))}"
