"""The life of a server, from its model's name to its end: split and load the model, make a batch, answer requests."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.terminal import harmless, put, put_fact, size
from rabbitllm.engine.tier_picture import places
from rabbitllm.generation.request import BatchStats, Limits
from rabbitllm.server.embeddings import Embedder
from rabbitllm.server.loading import loaded
from rabbitllm.server.server import serve
from rabbitllm.server.service import Service, batch_of
from rabbitllm.server.settings import Settings, address_of, is_local

# The greeting of `rabbitllm serve`: the address, the model, and a command to try.


def put_greeting(
    console: Console, service: Service, address: str, split: tuple[bool, Path] | None, *, is_local: bool
) -> None:
    """Print the greeting.

    Args:
        console: receives the greeting.
        service: the served model.
        address: URL of the server.
        split: whether the split existed already, and its folder; None without a split.
        is_local: whether only this machine reaches the server.
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
    """A command to paste."""
    body: dict[str, Any] = {"max_tokens": 64}
    if service.template.is_there:
        what, body["messages"] = "chat/completions", [{"role": "user", "content": "What is a rabbit?"}]
    else:
        what, body["prompt"] = "completions", "A rabbit is"
    key = ' -H "authorization: Bearer $RABBITLLM_API_KEY"' if service.settings.api_key else ""
    return f"curl {address}/v1/{what}{key} -d {shlex.quote(json.dumps(body))}"


def serve_model(
    request: LoadRequest,
    limits: Limits,
    settings: Settings,
    listening: socket.socket,
    console: Console,
    grace: float | None,
) -> bool:
    """Serve a model until a signal arrives.

    Args:
        request: the model, its split and its run.
        limits: limits of the batch.
        settings: how requests are treated.
        listening: the socket of `settings.bound`.
        console: receives the progress messages.
        grace: seconds; see `server.Server`.

    Returns:
        Whether the end was forced: then the batch's thread may still be in a pass, which cannot be interrupted.

    Raises:
        RabbitLLMError: see `loading.loaded` and `server.serve`.
    """
    with contextlib.redirect_stdout(sys.stderr):  # output while loading is not part of the result
        found = loaded(request, console, limits.cache_bytes)

    from transformers import logging

    logging.set_verbosity_error()  # no warnings about missing kernels amid requests
    batch = batch_of(found.model, limits)
    embedder = Embedder(found.model, found.recipe) if found.recipe is not None else None
    service = Service(found.model, batch, settings, embedder)

    def started() -> None:
        put_greeting(console, service, address_of(listening), found.split, is_local=is_local(listening))

    return serve(service, listening, grace, started)
