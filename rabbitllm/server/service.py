"""A served model: split if necessary, loaded with room for requests, and everything that the routes need of it.

Needs no HTTP packages, since offline jobs leave room for requests in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.options import RunOptions, expand
from rabbitllm.checkpoints.index import GGUF_SUFFIX, is_gguf
from rabbitllm.engine.devices import default_budget, resolve_devices
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.memory import left_to_requests
from rabbitllm.generation.request import (
    BatchStats,
    Limits,
    Request,
    check_generates,
    context_of,
    end_tokens,
    tokenizer_of,
)
from rabbitllm.models.pull import load, pulled
from rabbitllm.server.answers import Spelling
from rabbitllm.server.api_error import NOT_FOUND, APIError
from rabbitllm.server.embeddings import Embedder, PoolingRecipe, recipe_in
from rabbitllm.server.metrics import Metrics
from rabbitllm.server.settings import ModelLimits, Settings
from rabbitllm.server.templates import Template
from rabbitllm.store.locations import meant

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model.

    Attributes:
        model: a model from `AutoModel.from_pretrained`.
        split: whether the split existed already, and its folder; None without a split.
        recipe: how embeddings are computed; None where the checkpoint does not say.
    """

    model: StreamedModel
    split: tuple[bool, Path] | None
    recipe: PoolingRecipe | None


def loaded(request: LoadRequest, console: Console, cache_bytes: int | None = None) -> ServedModel:
    """Load the model, and split it first if necessary.

    Args:
        request: the model, its split and its run.
        console: receives the progress messages.
        cache_bytes: limit of the KV cache; None for the default.

    Raises:
        RabbitLLMError: see `pull` and `AutoModel.from_pretrained`.
    """
    found = pulled(request)
    run = replace(request.run, max_memory=with_room(request.run, cache_bytes))
    model = load(replace(request, run=run), found, console)
    if found is None:
        return ServedModel(model, None, recipe_in(expand(meant(request.spec.name))))
    places = (found.entry.folder, found.config_folder, found.shards_at)
    recipes = (recipe_in(place) for place in places if place is not None)
    return ServedModel(model, (found.before, found.entry.folder), next(filter(None, recipes), None))


def with_room(run: RunOptions, cache_bytes: int | None, pass_bytes: int = 0) -> Mapping[str, int] | None:
    """The memory limit of the weights, which leaves room for requests: the caller's own limit, else a reduced default.

    On GPUs a margin is always left, so the limit is lower only where the size of the KV cache is given.

    Args:
        run: options for running the model.
        cache_bytes: see `loaded`; divided equally among several GPUs, as layers are.
        pass_bytes: see `left_to_requests`.
    """
    if run.max_memory is not None:
        return run.max_memory
    devices = resolve_devices(run.device, None)
    on_host = all(device.shares_host_memory for device in devices)
    if cache_bytes is None and not on_host:
        return None
    share = None if cache_bytes is None else cache_bytes // len(devices)
    left = {
        one.name: left_to_requests(one.free_bytes(), share, pass_bytes) if on_host or share is None else share
        for one in devices
    }
    return {one.name: max(default_budget(one) - left[one.name], 0) for one in devices}


def served_name(name: str) -> str:
    """The model name in requests: the id of a repository, or the last part of the path of a folder or a GGUF file.

    Args:
        name: the name as the user wrote it.
    """
    if is_gguf(name):
        return expand(name).name.removesuffix(GGUF_SUFFIX)
    found = meant(name)
    path = expand(found)
    if not path.is_dir():
        return found
    path = path.resolve()
    while path.name.startswith("splitted_model") and path.parent.name:
        path = path.parent
    return path.name or "model"


_Result = TypeVar("_Result")


class EmbeddingsOnly:
    """Stands in for the batch of a model that generates no text: every request is refused.

    Args:
        model: a model from `AutoModel.from_pretrained`.
    """

    error = None
    facts = BatchStats()

    def __init__(self, model: StreamedModel) -> None:
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


def batch_of(model: StreamedModel, limits: Limits) -> Batch | EmbeddingsOnly:
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
        self, model: StreamedModel, batch: Batch | EmbeddingsOnly, settings: Settings, embedder: Embedder | None = None
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
        self.tokenizer = tokenizer_of(model)
        self.template = Template(self.tokenizer, model)
        self.spelling = Spelling(self.tokenizer)
        # the first call may change a tokenizer's settings, which must not happen while another thread decodes
        self.tokenizer("a")
        self._encoder = ThreadPoolExecutor(1, "rabbitllm-tokenizer")

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
        """Use the tokenizer in its thread, so that a long prompt does not block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)


def _limits_of(model: StreamedModel) -> ModelLimits:
    """The limits of a model; sampling defaults as the model recommends, else as OpenAI's interface has them."""
    temperature, top_p = 1.0, None
    if model.can_generate() and (recommended := model.generation_config).do_sample:
        temperature = recommended.temperature if recommended.temperature is not None else 1.0
        top_p = recommended.top_p if recommended.top_p is not None and recommended.top_p < 1 else None
    return ModelLimits(context_of(model), model.get_input_embeddings().num_embeddings, float(temperature), top_p)
