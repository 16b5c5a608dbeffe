"""A server from a wish to its end: the model split and loaded, a batch around it, requests answered."""

from __future__ import annotations

import contextlib
import socket
import sys

from rich.console import Console

from rabbitllm.generation.limits import Limits
from rabbitllm.models.pull.make import Wish
from rabbitllm.server.address import address_of, is_local
from rabbitllm.server.embeddings import Embedder
from rabbitllm.server.greeting import put_greeting
from rabbitllm.server.loading import loaded
from rabbitllm.server.server import serve
from rabbitllm.server.service import batch_of, service_for
from rabbitllm.server.settings import Settings


def serve_wish(
    wish: Wish,
    limits: Limits,
    settings: Settings,
    listening: socket.socket,
    console: Console,
    *,
    grace: float | None,
    split: bool,
    dtype: str | None,
) -> bool:
    """Serve a model until a signal says otherwise.

    Args:
        wish: what, and how; see `Wish`.
        limits: of the batch.
        settings: how requests are treated.
        listening: from `address.bound`.
        console: where the person at the terminal is told what goes on.
        grace: seconds; see `server.Server`.
        split, dtype: see `loading.loaded`.

    Returns:
        Whether it was forced to end: then the batch's thread may still be in a pass, which cannot be interrupted.

    Raises:
        RabbitLLMError: as `loading.loaded` and `server.serve` do.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what is printed while loading is no result
        found = loaded(wish, console, split=split, dtype=dtype, cache_bytes=limits.cache_bytes)

    from transformers import logging

    logging.set_verbosity_error()  # which of its kernels a model lacks is nothing to read amid requests
    batch = batch_of(found.model, limits)
    embedder = Embedder(found.model, found.recipe) if found.recipe is not None else None
    service = service_for(found.model, batch, settings, embedder)

    def started() -> None:
        put_greeting(console, service, address_of(listening), found.split, is_local=is_local(listening))

    return serve(service, listening, grace, started)
