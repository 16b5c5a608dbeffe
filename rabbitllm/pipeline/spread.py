"""Loads this process's part of a model, and waits until all processes have theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rabbitllm.base.options import Hosts, StreamOptions
from rabbitllm.errors import HostsError
from rabbitllm.pipeline.driver import Driver
from rabbitllm.pipeline.frames import Frame, Word
from rabbitllm.pipeline.rendezvous import Link
from rabbitllm.pipeline.share import Sharing
from rabbitllm.pipeline.worker import Worker


def load_spread(hosts: Hosts, options: StreamOptions, load: Callable[[Sharing], Any]) -> Any:
    """Load a model that is spread over hosts.

    Args:
        hosts: address, number and role of the processes.
        options: how the model is run in this process.
        load: loads the part that the given `Sharing` chooses.

    Returns:
        In the first process the model, with its `hosts`; in the others a `Worker`.

    Raises:
        HostsError: the hosts cannot compute this model together.
        RabbitLLMError: as `load_model` does; it is reported to the other processes.
    """
    sharing = Sharing(hosts, options)
    try:
        model = load(sharing)
    except BaseException as error:
        if sharing.has_met:
            with contextlib.suppress(HostsError):
                _agree(sharing.link, f"{sharing.link.names[sharing.link.rank]} could not load its part: {error}")
        raise
    failed = _agree(sharing.link, None)
    if failed is not None:
        raise HostsError(f"Not every host has its part: {failed}", "Start all of them again when that is mended.")
    if sharing.link.rank:
        return Worker(model, sharing.stack, sharing.spans, sharing.link)
    model.hosts = Driver(model, sharing.stack, sharing.spans, sharing.link)
    return model


def _agree(link: Link, trouble: str | None) -> str | None:
    """Report whether this process is ready; returns the reason if any process is not, else None."""
    if link.rank:
        link.send(0, Frame(Word.READY, content=trouble))
        told = link.receive(0).content
        return None if told is None else str(told)
    troubles = [trouble, *(link.receive(rank).content for rank in range(1, link.ranks))]
    first = next((str(one) for one in troubles if one is not None), None)
    for rank in range(1, link.ranks):
        link.send(rank, Frame(Word.BEGIN, content=first))
    return first
