"""Submits requests to a batch, and collects their events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rabbitllm.generation._sequence import Sequence as GeneratedSequence
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.request import Delta, Event, Failed, Request, Result, TokenLogprob
from tests.support.builders import VOCABULARY_SIZE

Open = Callable[..., tuple[Batch, Any]]
"""Of the fixture `open_batch`."""
PATIENCE = 600.0
"""Seconds; what takes longer hangs."""


@dataclass
class Submitted:
    """One request, and its events so far."""

    request: Request
    events: list[Event] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    handle: GeneratedSequence | None = None

    def receive(self, event: Event) -> None:
        self.events.append(event)
        if not isinstance(event, Delta):
            self.over.set()

    def wait(self) -> Submitted:
        assert self.over.wait(PATIENCE), "no end came"
        return self

    @property
    def end(self) -> Result | Failed:
        end = self.wait().events[-1]
        assert not isinstance(end, Delta)
        return end

    @property
    def finished(self) -> Result:
        end = self.end
        if isinstance(end, Failed):
            raise end.error
        return end

    @property
    def chosen(self) -> list[TokenLogprob]:
        return [token for event in self.events if isinstance(event, Delta) for token in event.tokens]

    @property
    def tokens(self) -> list[int]:
        return [token.token for token in self.chosen]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random ids."""
    drawn = torch.randint(3, VOCABULARY_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def begin(batch: Batch, request: Request) -> Submitted:
    """Submit one."""
    submitted = Submitted(request)
    submitted.handle = batch.submit(request, submitted.receive)
    return submitted


def answered(batch: Batch, requests: Sequence[Request]) -> list[Submitted]:
    """Submit all, and wait for all."""
    submitted = [begin(batch, request) for request in requests]
    return [answer.wait() for answer in submitted]


def answered_together(batch: Batch, requests: Sequence[Request]) -> list[Submitted]:
    """Submit all before the first pass, and wait for all."""
    with batch.paused():
        submitted = [begin(batch, request) for request in requests]
    return [answer.wait() for answer in submitted]


def alone(model: Any, request: Request) -> list[int]:
    """What plain transformers generates greedily, ended by its end token."""
    prompt = torch.tensor([request.prompt])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens, do_sample=False
    )
    tokens: list[int] = output[0, len(request.prompt) :].tolist()
    return tokens
