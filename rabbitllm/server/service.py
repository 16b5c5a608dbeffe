"""A served model, and what stands in for its batch if it generates no text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from rabbitllm.generation.batch import Batch
from rabbitllm.generation.request import BatchStats, Limits, Request, check_generates, context_of, end_tokens
from rabbitllm.server.answers import Spelling
from rabbitllm.server.api_error import NOT_FOUND, APIError
from rabbitllm.server.embeddings import Embedder
from rabbitllm.server.metrics import Metrics
from rabbitllm.server.settings import ModelLimits, Settings
from rabbitllm.server.templates import Template

_Result = TypeVar("_Result")


class EmbeddingsOnly:
    """Stands in for the batch of a model that generates no text: every request is refused.

    Args:
        model: a model from `AutoModel.from_pretrained`.
    """

    error = None
    facts = BatchStats()

    def __init__(self, model: Any) -> None:
        self._model = model

    def submit(self, request: Request, notify: Any) -> Any:
        """
        Raises:
            OptionError: always.
        """
        check_generates(self._model)
        raise AssertionError("a model that generates has a batch")

    def close(self, seconds: float | None = None) -> None:
        """Do nothing, since nothing runs."""


def batch_of(model: Any, limits: Limits) -> Batch | EmbeddingsOnly:
    """A batch for a model; one that refuses all requests if the model generates no text."""
    return Batch(model, limits) if model.can_generate() else EmbeddingsOnly(model)


class Service:
    """A served model, with everything that the routes need of it.

    Args:
        model: a model from `AutoModel.from_pretrained`.
        batch: runs the requests.
        settings: how requests are treated.
        embedder: None where the model has no embeddings.

    Attributes:
        streamed: the model.
        model: limits that requests are checked against.
        ends: end-of-text tokens.
        created: seconds since 1970.
        is_closing: whether new requests are refused.
    """

    def __init__(
        self, model: Any, batch: Batch | EmbeddingsOnly, settings: Settings, embedder: Embedder | None = None
    ) -> None:
        self.streamed = model
        self.batch = batch
        self.settings = settings
        self.embedder = embedder
        self.model = _limits_of(model)
        self.ends = frozenset(end_tokens(model))
        self.metrics = Metrics()
        self.created = int(time.time())
        self.is_closing = False
        self.tokenizer = model.tokenizer
        self.template = Template(self.tokenizer)
        self.spelling = Spelling(self.tokenizer)
        # the first call may change a tokenizer's settings, which must not happen while another thread decodes
        self.tokenizer("a")
        self._encoding = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return not self.is_closing and self.batch.error is None

    def check_name(self, model: str | None) -> None:
        """
        Raises:
            APIError: a request names another model.
        """
        if model and model != self.settings.name:
            raise APIError(
                NOT_FOUND,
                f"The model {model[:200]!r} does not exist here; this is {self.settings.name!r}.",
                param="model",
                code="model_not_found",
            )

    async def encoded(self, work: Callable[[], _Result]) -> _Result:
        """Use the tokenizer in another thread, so that a long prompt does not block the event loop."""

        def one_at_a_time() -> _Result:
            with self._encoding:
                return work()

        return await run_in_threadpool(one_at_a_time)


def _limits_of(model: Any) -> ModelLimits:
    """The limits of a model; sampling defaults as the model recommends, else as OpenAI's interface has them."""
    temperature, top_p = 1.0, None
    if model.can_generate() and (recommended := model.generation_config).do_sample:
        temperature = recommended.temperature if recommended.temperature is not None else 1.0
        top_p = recommended.top_p if recommended.top_p is not None and recommended.top_p < 1 else None
    return ModelLimits(context_of(model), model.get_input_embeddings().num_embeddings, float(temperature), top_p)
