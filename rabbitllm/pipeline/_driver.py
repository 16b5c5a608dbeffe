"""The two sides of a pass: the first process runs the model's own forward, the workers compute spans of its layers.

In the first process, a stand-in for each layer of another host records the arguments of its call. The last one sends
these to the workers, and the hidden states to the first worker. The hidden states go from worker to worker and back to
the first process, where the model's forward continues with them. So everything except those layers is computed there by
the model's own code: masks, positions, norm, head, and `generate`. A separate thread sends and receives, and
completes a pass even if the caller is interrupted, so that the workers' caches never miss a part of it. Between passes
it sends heartbeats to the workers.

A worker calls the model's own layers with these arguments, pass after pass, and holds the KV caches of these layers. It
runs no other part of the model, and no code that it receives.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import Cache

from rabbitllm.base.forks import DaemonThread, ForkGuard, fulfil
from rabbitllm.errors import HostGoneError, HostsError
from rabbitllm.pipeline._caches import CacheRecorder, MirroredCaches, lengths_of, stand_in
from rabbitllm.pipeline._frames import Frame, FrameType, Packer, unpack
from rabbitllm.pipeline._rendezvous import Link
from rabbitllm.pipeline._stack import Span, Stack, hidden_of, output_of

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)
T = TypeVar("T")


HEARTBEAT_SECONDS = 2.0
"""Heartbeat interval, which bounds the time until a worker or this process notices that the other ended."""
_FROM_ALL_LAYERS = ("output_hidden_states", "output_attentions", "output_router_logits")


class _DriverPass:
    """The records of the stand-ins in one pass."""

    def __init__(self, recorder: CacheRecorder, hidden: torch.Tensor) -> None:
        self.packer = Packer(recorder.number_of)
        self.hidden = hidden
        self.flowing = hidden
        self.calls: dict[int, Any] = {}
        self.lengths: list[Any] = []


class Driver:
    """Runs a model with layers on other hosts; the workers end when the model is garbage collected.

    Args:
        model: the model, with this process's part of the weights.
        stack: its layers.
        spans: span of each process; the first is this one's.
        link: connection to the other processes.

    Attributes:
        spans: see above.
        names: names of the processes.
    """

    def __init__(self, model: StreamedModel, stack: Stack, spans: tuple[Span, ...], link: Link) -> None:
        self._stack = stack
        self.spans = spans
        self.names = tuple(link.names)
        self._first = spans[0].end
        away = [index for cached in stack.cached[self._first :] for index in cached]
        self._recorder = CacheRecorder(away)
        self._pass: _DriverPass | None = None
        self._channel = _HostChannel(spans, link, self._recorder)
        for position, unit in enumerate(stack.units):
            if position >= self._first:
                unit.module.forward = partial(self._stand_in, position)
        model.register_forward_pre_hook(_refuse_outputs_of_layers, with_kwargs=True)
        weakref.finalize(model, self._channel.close)  # not a method of this object, which refers to the model

    def close(self) -> None:
        """End the workers; further calls do nothing."""
        self._channel.close()

    def _stand_in(self, index: int, /, *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer on another host."""
        return output_of(self._stack.form, self._call(index, args, kwargs))

    def _call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        hidden, positional, named = hidden_of(args, kwargs)
        named.pop("tokenizer", None)  # `generate` passes its own down to the layers, none of which reads it
        if index == self._first:
            self._pass = _DriverPass(self._recorder, hidden)
        records = self._pass
        if records is None or hidden is not records.flowing:
            raise HostsError(
                "The model changes hidden states between two layers that are on other hosts.", "Run it on one host."
            )
        records.calls[index] = records.packer.call(positional, named)
        self._stand_in_caches(index, records, (*positional, *named.values()))
        if index < len(self._stack.units) - 1:
            records.flowing = hidden.new_full((), float("nan")).expand(hidden.shape)
            return records.flowing
        self._pass = None
        return self._channel.run(records).to(records.hidden.device)

    def _stand_in_caches(self, layer_index: int, records: _DriverPass, arguments: tuple[Any, ...]) -> None:
        batch, tokens = records.hidden.shape[-3], records.hidden.shape[-2]
        for cache in (value for value in arguments if isinstance(value, Cache)):
            indices = self._stack.cached[layer_index]
            records.lengths.append([self._recorder.number_of(cache), lengths_of(cache, indices)])
            for index in indices:
                stand_in(cache, index, batch, tokens, records.hidden.device)


class _HostChannel:
    """The channel to the workers, served by a separate thread. Does not refer to the model."""

    def __init__(self, spans: tuple[Span, ...], link: Link, recorder: CacheRecorder) -> None:
        self._spans = spans
        self._link = link
        self._recorder = recorder
        self._number = 0
        self._home = ForkGuard()
        self._passes: queue.SimpleQueue[tuple[_DriverPass, Future[torch.Tensor]] | None] = queue.SimpleQueue()
        self.error: HostGoneError | None = None
        self._thread = DaemonThread(self._work, "rabbitllm-hosts")
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """End the workers; further calls do nothing."""
        atexit.unregister(self.close)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            ended = HostGoneError("The other hosts were told to end.", "Start all processes again.")
            self.error = self.error or ended
            self._passes.put(None)
            self._thread.join(HEARTBEAT_SECONDS * 2)

    def run(self, records: _DriverPass) -> torch.Tensor:
        """The hidden states that the last worker computes.

        Raises:
            HostGoneError: a worker has ended, or all were told to.
            HostsError: a worker could not compute its layers.
        """
        self._home.refuse("A model whose layers are on several hosts", "Call it in that process.")
        if self.error is not None:
            raise HostGoneError(self.error.problem, self.error.remedy)
        future: Future[torch.Tensor] = Future()
        self._passes.put((records, future))
        return future.result()

    def _work(self) -> None:
        while True:
            try:
                job = self._passes.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                if self.error is None:
                    with contextlib.suppress(Exception):  # passes wait for this thread; the next one tells its error
                        self._exchange(self._send_heartbeats)
                continue
            if job is None:
                self._stop()
                return
            records, future = job
            fulfil(future, self._exchange, partial(self._send_pass, records))
            del job, records, future  # the next job may come much later

    def _exchange(self, do: Callable[[], T]) -> T:
        """The result of an exchange with the workers; if one of them has ended, stop all."""
        if self.error is not None:
            raise HostGoneError(self.error.problem, self.error.remedy)
        try:
            return do()
        except HostGoneError as error:
            self.error = error
            logger.debug("the hosts have disconnected", exc_info=True)
            self._stop()
            raise

    def _send_pass(self, records: _DriverPass) -> torch.Tensor:
        """Send a pass through the workers; returns the hidden states from the last one."""
        self._number += 1
        events = self._recorder.take()
        for rank, span in enumerate(self._spans[1:], 1):
            calls = {index: records.calls[index] for index in range(span.begin, span.end)}
            content = {"events": events, "calls": calls, "lengths": records.lengths}
            self._link.send(rank, Frame(FrameType.PASS, self._number, content, tuple(records.packer.tensors)))
        self._link.send(1, Frame(FrameType.HIDDEN, self._number, None, (records.hidden,)))
        answer = self._link.receive(self._link.ranks - 1)
        if answer.type is FrameType.FAILED:
            error_type = HostGoneError if answer.content["gone"] else HostsError
            raise error_type(answer.content["problem"], answer.content["remedy"])
        return answer.tensors[0]

    def _send_heartbeats(self) -> None:
        events = self._recorder.take()
        for rank in range(1, self._link.ranks):
            self._link.send(rank, Frame(FrameType.ALIVE, self._number, {"events": events}))

    def _stop(self) -> None:
        for rank in range(1, self._link.ranks):
            with contextlib.suppress(HostsError):
                self._link.send(rank, Frame(FrameType.STOP, self._number))


def _refuse_outputs_of_layers(model: StreamedModel, args: Any, kwargs: dict[str, Any]) -> None:
    for name in _FROM_ALL_LAYERS:
        requested = kwargs.get(name)
        if requested or (requested is None and getattr(model.config, name, None)):
            raise HostsError(
                f"{name} requests values of layers, and some layers are on other hosts.",
                "Remove it, or run the model on one host.",
            )


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

    def __init__(self, model: StreamedModel, stack: Stack, spans: tuple[Span, ...], link: Link) -> None:
        self.model = model
        self.span = spans[link.rank]
        self.names = tuple(link.names)
        self.passes = 0
        self._stack = stack
        self._link = link
        self._next = (link.rank + 1) % link.ranks
        positions = [index for layer in range(self.span.begin, self.span.end) for index in stack.cached[layer]]
        self.caches = MirroredCaches(positions)

    def work(self) -> None:
        """Compute until the first process ends.

        Raises:
            HostGoneError: a process ended unexpectedly, or does not answer.
        """
        with torch.no_grad():
            while (frame := self._link.receive(0)).type is not FrameType.STOP:
                self.caches.follow(frame.content["events"])
                if frame.type is FrameType.PASS:
                    self._run_pass(frame)

    def _run_pass(self, frame: Frame) -> None:
        try:
            hidden = self._hidden(frame.number)
        except HostGoneError as error:
            self._fail(frame.number, error, gone=True)
            raise
        if hidden.type is FrameType.FAILED:
            self._link.send(self._next, hidden)
            return
        try:
            answer = Frame(FrameType.HIDDEN, frame.number, None, (self._compute(frame, hidden.tensors[0]),))
        except Exception as error:
            logger.warning("A pass failed on this host: %s", error, exc_info=True)
            self._fail(frame.number, error, gone=False)
            return
        self.passes += 1
        self._link.send(self._next, answer)

    def _hidden(self, number: int) -> Frame:
        """The frame with the hidden states of this pass; frames left from an aborted pass are skipped."""
        while (frame := self._link.receive(self._link.rank - 1)).number != number:
            pass
        return frame

    def _compute(self, frame: Frame, hidden: torch.Tensor) -> torch.Tensor:
        device = self.model.device
        tensors = [tensor.to(device) for tensor in frame.tensors]
        hidden = hidden.to(device)
        for cache, lengths in frame.content["lengths"]:
            self.caches.align(cache, lengths)
        with self.model.streamer.passing():
            for index in range(self.span.begin, self.span.end):
                args, kwargs = frame.content["calls"][str(index)]
                positional = [unpack(value, tensors, self.caches) for value in args]
                named = {name: unpack(value, tensors, self.caches) for name, value in kwargs.items()}
                output = self._stack.units[index].module(hidden, *positional, **named)
                hidden = output[0] if isinstance(output, tuple) else output
        return hidden

    def _fail(self, number: int, error: BaseException, *, gone: bool) -> None:
        problem, remedy = getattr(error, "problem", f"{type(error).__name__}: {error}"), getattr(error, "remedy", "")
        why = problem if gone else f"{self.names[self._link.rank]} could not compute its layers: {problem}"
        self._link.send(self._next, Frame(FrameType.FAILED, number, {"problem": why, "remedy": remedy, "gone": gone}))
