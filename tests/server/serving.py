"""A real server in this process, on a free port, with a tiny model that is mostly streamed; and ways to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from hypothesis import HealthCheck, settings

from rabbitllm.generation.batch import Batch
from rabbitllm.generation.request import Limits
from rabbitllm.server._models import Models
from rabbitllm.server._service import EmbeddingsOnly, Service, batch_of
from rabbitllm.server.embeddings import Embedder
from rabbitllm.server.server import Server
from rabbitllm.server.settings import LOCAL, Settings, address_of, bound
from tests.support.tiny_models import load

NAME = "tiny"
STREAMED = 60_000
"""Bytes for weights, of which the tiny models have several times as much."""
LIMITS = Limits(running=8, waiting=32)
PATIENCE = 600.0
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For properties: how busy the machine is says nothing about them."""


@dataclass
class Running:
    """A server that answers."""

    service: Service
    models: Models
    server: Server
    model: Any
    address: str
    port: int
    batch: Batch | EmbeddingsOnly
    key: str | None = None
    _clients: list[httpx.Client] = field(default_factory=list)

    @property
    def http(self) -> httpx.Client:
        """A client for anything."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=self.address, headers=headers, timeout=PATIENCE, trust_env=False, verify=False)

    def openai(self, **options: Any) -> openai.OpenAI:
        """OpenAI's own client, which does not ask again by itself."""
        settings = {"max_retries": 0, "timeout": PATIENCE, **options}
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=self.key or "none", **settings)

    def socket(self) -> socket.socket:
        """A connection on which anything can be said."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        connection.settimeout(PATIENCE)
        return connection

    def post(self, path: str, body: Any) -> httpx.Response:
        with self.http as client:
            return client.post(path, json=body)


def until(true: Any) -> None:
    limit = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


@contextlib.contextmanager
def in_a_thread(models: Models, listening: socket.socket, grace: float | None = 30.0) -> Iterator[Server]:
    """A server in a thread of its own, for as long as the context lasts."""
    server = Server(models, grace)
    serving = server.serve(sockets=[listening])
    thread = threading.Thread(target=lambda: asyncio.run(serving), name="rabbitllm-serve", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield server
    finally:
        server.end()
        thread.join()


@contextlib.contextmanager
def running(
    split_folder: Path,
    *,
    limits: Limits = LIMITS,
    recipe: Any = None,
    ranking: Any = None,
    budget: int = STREAMED,
    grace: float | None = 5.0,
    send_buffer: int | None = None,
    dtype: str = "float32",
    heads: bool = False,
    **settings: Any,
) -> Iterator[Running]:
    """A server for as long as the context lasts."""
    model = load(split_folder, budget, dtype=dtype, heads=heads)
    batch = batch_of(model, limits)
    chosen = Settings(**{"name": NAME, "hosts": LOCAL, **settings})
    embedder = Embedder(model, recipe) if recipe is not None else None
    service = Service(model, batch, chosen, embedder, ranking=ranking and ranking(split_folder, model))
    models = Models.of(service)
    listening = bound("127.0.0.1", 0)
    if send_buffer is not None:  # connections have it from here
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    try:
        with in_a_thread(models, listening, grace) as server:
            address = address_of(listening)
            yield Running(service, models, server, model, address, listening.getsockname()[1], batch, chosen.api_key)
    finally:
        batch.close(0)
        listening.close()
