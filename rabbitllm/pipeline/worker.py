"""A worker's side: computes its span of layers, pass after pass, until the first process ends.

It calls the model's own layers with the arguments that the first process's forward passed to their stand-ins, and holds
the KV caches of these layers. It runs no other part of the model, and no code that it receives.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from rabbitllm.errors import HostGoneError
from rabbitllm.pipeline.arguments import unpack
from rabbitllm.pipeline.caches import MirroredCaches
from rabbitllm.pipeline.frames import Frame, Word
from rabbitllm.pipeline.rendezvous import Link
from rabbitllm.pipeline.spans import Span
from rabbitllm.pipeline.stack import Stack

logger = logging.getLogger(__name__)


class Worker:
    """Computes a span of a model's layers.

    Args:
        model: the model, with this process's part of the weights.
        stack: its layers.
        spans: span of each process.
        link: connection to the other processes.

    Attributes:
        model: see above.
        span: span of this process.
        names: names of the processes.
        passes: number of passes computed so far.
        caches: KV caches that the first process still uses.
    """

    def __init__(self, model: Any, stack: Stack, spans: tuple[Span, ...], link: Link) -> None:
        self.model = model
        self.span = spans[link.rank]
        self.names = tuple(link.names)
        self.passes = 0
        self._stack = stack
        self._link = link
        self._next = (link.rank + 1) % link.ranks
        positions = [index for number in range(self.span.begin, self.span.end) for index in stack.cached[number]]
        self.caches = MirroredCaches(positions)

    def work(self) -> None:
        """Compute until the first process ends.

        Raises:
            HostGoneError: a process ended unexpectedly, or does not answer.
        """
        with torch.no_grad():
            while (frame := self._link.receive(0)).word is not Word.STOP:
                self.caches.follow(frame.content["events"])
                if frame.word is Word.PASS:
                    self._take_part(frame)

    def _take_part(self, frame: Frame) -> None:
        try:
            came = self._hidden(frame.number)
        except HostGoneError as error:
            self._fail(frame.number, error, gone=True)
            raise
        if came.word is Word.FAILED:
            self._link.send(self._next, came)
            return
        try:
            answer = Frame(Word.HIDDEN, frame.number, None, (self._compute(frame, came.tensors[0]),))
        except Exception as error:
            logger.warning("A pass failed on this host: %s", error, exc_info=True)
            self._fail(frame.number, error, gone=False)
            return
        self.passes += 1
        self._link.send(self._next, answer)

    def _hidden(self, number: int) -> Frame:
        """The frame with the hidden states of this pass; frames left from an aborted pass are skipped."""
        while (came := self._link.receive(self._link.rank - 1)).number != number:
            pass
        return came

    def _compute(self, frame: Frame, hidden: torch.Tensor) -> torch.Tensor:
        device = self.model.device
        tensors = [tensor.to(device) for tensor in frame.tensors]
        hidden = hidden.to(device)
        for cache, lengths in frame.content["lengths"]:
            self.caches.align(cache, lengths)
        with self.model.streamer.passing():
            for number in range(self.span.begin, self.span.end):
                args, kwargs = frame.content["calls"][str(number)]
                there = [unpack(value, tensors, self.caches) for value in args]
                named = {name: unpack(value, tensors, self.caches) for name, value in kwargs.items()}
                output = self._stack.units[number].module(hidden, *there, **named)
                hidden = output[0] if isinstance(output, tuple) else output
        return hidden

    def _fail(self, number: int, error: BaseException, *, gone: bool) -> None:
        problem, remedy = getattr(error, "problem", f"{type(error).__name__}: {error}"), getattr(error, "remedy", "")
        told = problem if gone else f"{self.names[self._link.rank]} could not compute its layers: {problem}"
        self._link.send(self._next, Frame(Word.FAILED, number, {"problem": told, "remedy": remedy, "gone": gone}))
