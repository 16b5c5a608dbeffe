"""A model spread over hosts, each of which is a thread of this process with its own model, store and connections.

Threads talk over the same sockets that processes do, and cost no second start of torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rabbitllm.base.options import Hosts, RunOptions
from rabbitllm.engine.load import load_model
from rabbitllm.pipeline._driver import Worker
from rabbitllm.pipeline.spread import load_spread
from tests.support.one_thread import THREADS
from tests.support.tiny_models import ALL

HERE = "127.0.0.1:0"


def load_part(folder: Path, hosts: Hosts, budget: int = ALL, **options: Any) -> Any:
    """What `AutoModel.from_pretrained` gives a process, computing exactly on the CPU."""
    settings = {"device": "cpu", "max_memory": {"cpu": budget}, "show_progress": False, "exact": True, **options}
    chosen = RunOptions(**settings)

    return load_spread(hosts, chosen, lambda share: load_model(folder, chosen, share=share))


class Crew:
    """Workers in threads.

    Attributes:
        workers: those that began, in the order of their ranks.
        errors: what ended others.
    """

    def __init__(self, folders: Sequence[Path], hosts: Hosts, budgets: Sequence[int], **options: Any) -> None:
        self.workers: list[Worker] = []
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._given = folders, hosts, budgets, options

    def come(self, address: str) -> None:
        """Begin, at the address where the first one waits."""
        folders, hosts, budgets, options = self._given
        for rank, (folder, budget) in enumerate(zip(folders, budgets, strict=True), 1):
            own = replace(hosts, address=address, workers=0, rank=rank, announce=None)
            thread = threading.Thread(target=self._work, args=(folder, own, budget, options), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self, folder: Path, hosts: Hosts, budget: int, options: Any) -> None:
        torch.set_num_threads(THREADS)
        try:
            worker = load_part(folder, hosts, budget, **options)
            self.workers.append(worker)
            worker.work()
        except BaseException as error:
            self.errors.append(error)

    def join(self) -> None:
        """Wait until all have ended."""
        for thread in self._threads:
            thread.join(600)
            assert not thread.is_alive()


@contextmanager
def spread(
    folder: Path,
    budgets: Sequence[int] = (ALL, ALL),
    *,
    others: Sequence[Path] = (),
    of_workers: Mapping[str, Any] = MappingProxyType({}),
    timeout: float = 600.0,
    patience: float = 600.0,
    **options: Any,
) -> Iterator[tuple[Any, Crew]]:
    """A model, and those that compute it with this thread; they end with the context.

    Args:
        folder: the split directory.
        budgets: bytes for weights, of each.
        others: the workers' own split directories, if they are not the same.
        of_workers: the workers' own options.
        timeout, patience: see `Hosts`.
        **options: of `RunOptions`.
    """
    hosts = Hosts(HERE, len(budgets) - 1, timeout=timeout, patience=patience)
    crew = Crew(others or [folder] * (len(budgets) - 1), hosts, budgets[1:], **{**options, **of_workers})
    model = None
    try:
        model = load_part(folder, replace(hosts, announce=crew.come), budgets[0], **options)
        while len(crew.workers) + len(crew.errors) < len(budgets) - 1:
            time.sleep(0.01)
        yield model, crew
    finally:
        if model is not None:
            model.hosts.close()
        crew.join()
