"""Hooks that compare mapped bytes with their checksums before a result computed from them is returned.

Bytes that are read into a buffer are compared as they are read (`span_reader.py`). Mapped bytes are read by the
computation itself; so the module that uses them first gets a hook, which is removed when all of them were compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import nn

from rabbitllm.base.forks import Workers
from rabbitllm.engine.embedding_rows import check_rows
from rabbitllm.engine.expert_pool import routed
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.store.checksums import LayerChecks
from rabbitllm.store.layer_store import StoredTensor


def wait_before(module: nn.Module, compared: Callable[[], None]) -> None:
    """Call `compared`, which raises if a unit's bytes are damaged, before its module computes for the first time."""

    def before(module: nn.Module, args: Any) -> None:
        compared()
        handle.remove()

    handle = module.register_forward_pre_hook(before)


def check_rows_before(embedding: nn.Module, stored: StoredTensor, checks: LayerChecks) -> None:
    """Compare the rows that an embedding looks up, before each lookup."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        ids = args[0] if args else next(iter(kwargs.values()))  # the name of a forward's first argument differs
        named = isinstance(ids, torch.Tensor) and not ids.is_floating_point()
        check_rows(stored, torch.unique(ids.cpu()) if named else torch.arange(stored.shape[0]), checks)
        if all(checks.is_done(part.file) for part in stored.parts):
            handle.remove()

    handle = embedding.register_forward_pre_hook(before, with_kwargs=True)


def check_experts_before(source: ExpertSource, checks: LayerChecks, thread: Workers) -> None:
    """Compare the experts that a mapped module uses, while it computes with them.

    Args:
        source: the module.
        checks: the checksums of its files, by block.
        thread: computes the checksums.
    """
    left, pending = set(range(source.experts)), list[Future[set[int]]]()

    def compare(experts: set[int]) -> set[int]:
        ranges: dict[str, list[tuple[int, int]]] = {}
        for span in (span for expert in sorted(experts) for span in source.spans(expert)):
            ranges.setdefault(span.file, []).append((span.offset, span.nbytes))
        for file, some in ranges.items():
            checks.stored(file, some)
        return experts

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        wait(pending)  # left by an interrupted pass
        pending.clear()
        found = routed(args, kwargs, source.experts)
        chosen = left.copy() if found is None else left.intersection(found[0].tolist())
        if chosen:
            pending.append(thread.submit(compare, chosen))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        while pending:
            left.difference_update(pending.pop().result())
        if not left:
            for handle in handles:
                handle.remove()

    handles = [
        source.module.register_forward_pre_hook(before, with_kwargs=True),
        source.module.register_forward_hook(after),
    ]
