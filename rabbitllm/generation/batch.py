"""Continuous batching: a thread that owns the model, and takes sequences through it as the scheduler says.

`submit` may be called from any thread. Callbacks run in the batch's thread, so they must not block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from rabbitllm.base.forks import DaemonThread, ForkGuard
from rabbitllm.base.openmp import rest
from rabbitllm.base.terminal import size
from rabbitllm.errors import OptionError
from rabbitllm.generation._recommended import check_options
from rabbitllm.generation._scheduler import Scheduler
from rabbitllm.generation._sequence import Sequence
from rabbitllm.generation.kv_cache import layer_configs
from rabbitllm.generation.memory import CacheMemory
from rabbitllm.generation.request import (
    BatchStats,
    Event,
    FinishReason,
    Limits,
    ModelLimits,
    Request,
    check_generates,
    end_tokens,
)

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

__all__ = ["Batch", "Limits"]

logger = logging.getLogger(__name__)

_DEFAULT = Limits()


def check_runs(model: Any) -> None:
    """Refuse a model, loaded or not, whose requests cannot be answered together.

    Raises:
        OptionError: see `Batch`; memory is not looked at.
    """
    check_generates(model)
    if model.config.is_encoder_decoder:
        raise OptionError("The model has an encoder; requests need a decoder-only model.", "Use a causal model.")
    layers = layer_configs(model.config.get_text_config(decoder=True))
    if any(getattr(layer, "hidden_size", None) is None for layer in layers):
        raise OptionError(
            f"A {type(model).__name__} has no single decoder whose sizes tell the memory of a request.",
            "Call model.generate.",
        )
    end_tokens(model)  # refuses a model without a tokenizer
    check_options(model)


class Batch:
    """Answers requests on one model, all in the same passes.

    Args:
        model: as `AutoModel.from_pretrained` returns it. Until the batch is closed, other threads may call it only
            for whole passes, which alternate with those of the batch.
        limits: see `Limits`.

    Attributes:
        error: the error that ended the batch's thread early; None otherwise.

    Raises:
        OptionError: the model is not a causal language model or has no tokenizer, its generation config demands what
            cannot be had, or no memory is left.
    """

    def __init__(self, model: StreamedModel, limits: Limits = _DEFAULT) -> None:
        check_runs(model)
        self.error: BaseException | None = None
        self._model = model
        self._limits = limits
        self._scheduler = Scheduler(model, limits)
        self._waited_before = model.streamer.waited()
        self._home = ForkGuard()
        rest()  # this thread has loaded the model
        self._thread = DaemonThread(self._work, "rabbitllm-batch")
        self._thread.start()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def submit(self, request: Request, notify: Callable[[Event], None]) -> Sequence:
        """Append a request to the queue.

        Args:
            request: the request.
            notify: called with each event, in the batch's thread; an exception from it cancels the request. If no
                token is to be generated, it is called here.

        Returns:
            The sequence, whose `cancel` may be called.

        Raises:
            BusyError: the request queue is full.
            ClosedError: the batch accepts no more requests.
            BatchError: its thread has failed.
            OptionError: the request can never be answered; see `check_answerable`.
            ForkedError: this process was forked from the one that made the batch.
        """
        self._home.refuse("The batch", "Submit requests in that process, or make a batch in this one.")
        check_answerable(request, self._model, self._scheduler.caches.memory)
        sequence = Sequence(self._model, request, notify, self._scheduler.wake)
        if request.max_new_tokens:
            self._scheduler.submit(sequence)
        else:
            sequence.finish(FinishReason.LENGTH)
        return sequence

    def paused(self) -> AbstractContextManager[None]:
        """Start no pass while the context is open: requests submitted in it share a pass."""
        return self._scheduler.paused()

    def close(self, seconds: float | None = None) -> None:
        """Accept no more requests, finish the running and waiting ones, and end the thread; blocks until done.

        Args:
            seconds: time after which unfinished requests are cancelled; None for no limit, 0 for at once.
        """
        self._scheduler.close(seconds)
        self._thread.join()

    @property
    def stats(self) -> BatchStats:
        """Totals so far and the current state."""
        disk, copies = self._model.streamer.waited()
        disk_before, copies_before = self._waited_before
        scheduler, caches = self._scheduler, self._scheduler.caches
        with scheduler.still():
            return replace(
                scheduler.totals,
                ended=dict(scheduler.totals.ended),
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                most_running=self._limits.running,
                most_waiting=self._limits.waiting,
                cache_bytes=caches.nbytes(),
                cache_limit_bytes=caches.memory.limit,
                disk_seconds=disk - disk_before,
                copy_seconds=copies - copies_before,
                streamed_bytes=scheduler.totals.passes * self._model.placement.streamed_bytes,
                aside_bytes=caches.swap.nbytes,
                aside_limit_bytes=caches.swap.limit,
                file_bytes=caches.file.buffers.nbytes,
                file_read_bytes=caches.file.buffers.read,
                prompt_limit_bytes=self._limits.prompt_bytes,
            )

    def _work(self) -> None:
        # coroutines leave their own no_grad in another order than they entered it, which would enable gradients again
        torch.set_grad_enabled(False)
        try:
            while self._scheduler.wait():
                self._scheduler.step()
        except BaseException as error:
            logger.exception("the batch has failed")
            self.error = error
        finally:
            self._scheduler.end(self.error or FinishReason.CANCELLED)


def check_answerable(request: Request, model: StreamedModel, memory: CacheMemory) -> None:
    """Check that a request can be answered at all.

    Raises:
        OptionError: the prompt is empty or the number of new tokens negative; the request is longer than the model's
            context; the prompt has a token that is not in the vocabulary; or its KV cache needs more memory than
            there is.
    """
    if request.max_new_tokens < 0:
        raise OptionError(f"The number of tokens to generate is {request.max_new_tokens}.", "Use 0 or more.")
    limits = ModelLimits.of(model)
    limits.check_ids(request.prompt)
    limits.new_tokens(len(request.prompt), request.max_new_tokens)
    needed = memory.bytes_for(len(request.prompt) + 1)
    if needed > memory.limit:
        raise OptionError(
            f"The prompt's KV cache needs {size(needed)}; {size(memory.limit)} are available.",
            "Shorten the prompt, or raise the server's --cache-memory.",
        )
