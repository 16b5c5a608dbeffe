"""A served model: split if necessary, loaded with room for requests, and everything that the routes need of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from rabbitllm import prepare
from rabbitllm.auto_model import LoadRequest, Prepared, prepare_model, prepare_with_draft
from rabbitllm.base.openmp import rest
from rabbitllm.base.terminal import harmless, put_fact
from rabbitllm.engine.free_memory import PROMISES, Promise
from rabbitllm.engine.heads import plan_heads
from rabbitllm.engine.load_plan import LoadPlanner
from rabbitllm.errors import RabbitLLMError, system_errors_by_name
from rabbitllm.generation.batch import Batch, check_runs
from rabbitllm.generation.draft import check_goes_back
from rabbitllm.generation.kv_cache import why_not_kept
from rabbitllm.generation.memory import cache_share, weight_limits
from rabbitllm.generation.request import (
    BatchStats,
    Limits,
    ModelLimits,
    Request,
    TokenLogprob,
    check_generates,
    options_of,
    recommended_sampling,
    tokenizer_of,
)
from rabbitllm.generation.scoring.score import token_logprobs
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server._metrics import Metrics
from rabbitllm.server._reranking import RankingRecipe, Reranker, ranking_recipe
from rabbitllm.server._tools import is_known
from rabbitllm.server.answers import TokenTexts
from rabbitllm.server.embeddings import Embedder, recipe_in, to_its_end
from rabbitllm.server.requests import CheckedCall
from rabbitllm.server.settings import Settings
from rabbitllm.splitter.plan import PlannedFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rabbitllm.engine.streamed_model import StreamedModel


WRITE_SECONDS = 2.0
"""Time in which a model that leaves still writes its prompts to disk."""
_Result = TypeVar("_Result")


class EmbeddingsOnly:
    """The batch of a model that generates no text: every request is refused.

    Args:
        model: a model from `AutoModel.from_pretrained`.
    """

    error = None
    stats = BatchStats()

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        rest()  # this thread has loaded it

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


@system_errors_by_name()
def skeleton_of(prepared: Prepared) -> PreTrainedModel:
    """A model without weights, with its tokenizer; of a split or a download that is not made yet, as planned.

    Raises:
        RabbitLLMError: as `Prepared.load`, as far as headers and small files tell it.
    """
    run, planner = prepared.request.run, prepared.planner
    devices = prepared.devices or prepare.devices_of(run)
    with contextlib.ExitStack() as held:
        if planner is not None and isinstance(planner.store, PlannedFiles):
            store, home = planner.store, held.enter_context(prepare.config_folder(prepared.source))
        else:
            store, home, *_ = held.enter_context(prepared.opened(run))
            planner = LoadPlanner(run, devices, home)
            planner(store)
        plan = planner.take(store, home, run)
        if run.heads:
            plan_heads(plan, store, home, run, devices)
        plan.model.tokenizer = planner.tokenizer(home)
        return plan.model


class Service:
    """A served model, with everything that the routes need of it.

    Args:
        model: a model from `AutoModel.from_pretrained`.
        batch: runs the requests.
        settings: limits and defaults of requests.
        embedder: None where the model has no embeddings.
        metrics: those of the server; None for its own.
        ranking: None where the model scores no documents.

    Attributes:
        model: see above.
        limits: bounds that requests are checked against.
        settings: see above, with the sampling that the model recommends.
        sampling_words: how tokens are chosen if a request does not say.
        reranker: see `ranking`.
        split: whether the split existed already, and its folder; None without a split.
    """

    def __init__(
        self,
        model: StreamedModel,
        batch: Batch | EmbeddingsOnly,
        settings: Settings,
        embedder: Embedder | None = None,
        metrics: Metrics | None = None,
        ranking: RankingRecipe | None = None,
    ) -> None:
        self.model = model
        self.batch = batch
        recommended = recommended_sampling(model)
        sampling = settings.sampling.over(recommended)
        self.settings = replace(settings, sampling=sampling, of_the_model=options_of(model))
        self.sampling_words = sampling.words(recommended)
        self.embedder = embedder
        self.limits = ModelLimits.of(model, settings.context)
        self.metrics = metrics or Metrics()
        self.split: tuple[bool, Path] | None = None
        self.tokenizer = tokenizer_of(model)
        self.template = ChatTemplate(model)
        self.template.thinking(settings.thinking)  # refused now, not with each request
        self.reranker = Reranker(model, self.template, ranking) if ranking is not None else None
        self.texts = TokenTexts(self.tokenizer)
        # the first call may change a tokenizer's settings, which must not happen while another thread decodes
        self.tokenizer("a")
        self._encoder = ThreadPoolExecutor(1, "rabbitllm-tokenizer")
        self._lock = asyncio.Lock()  # of passes for log probabilities of prompts
        self._promise: Promise | None = None

    @classmethod
    def load(
        cls,
        request: LoadRequest,
        draft: Any,
        limits: Limits,
        settings: Settings,
        console: Console,
        metrics: Metrics | None = None,
        models: int = 1,
        beside: Sequence[Service] = (),
    ) -> Service | None:
        """Load a model, split first if necessary, and begin its batch.

        Args:
            request: the model, its split and its run.
            draft: its draft, or the request for one.
            limits: limits of the batch, without the draft.
            settings, metrics: see `Service`.
            console: receives the progress messages.
            models: how many models the server has, loaded or not.
            beside: those that stay loaded: limits of the user are for all of them together.

        Returns:
            The service; None if not all weights would stay in memory beside the others.

        Raises:
            RabbitLLMError: see `AutoModel.from_pretrained` and `Batch`.
        """
        if models > 1 and limits.cache_bytes is None:
            limits = replace(limits, cache_bytes=cache_share(request.run, models))
        prepared, draft = prepare_with_draft(request, draft, console)
        request = prepared.request
        memory = weight_limits(request.run, limits.cache_bytes)
        if memory is not None and request.run.max_memory is not None:
            taken = {name: sum(other.model.placement.bytes_on(name) for other in beside) for name in memory}
            memory = {name: max(limit - taken[name], 0) for name, limit in memory.items()}
        run = replace(request.run, max_memory=memory)
        if beside and not prepared.placement(run).stays:
            return None
        model = prepared.load(run, console)
        if models > 1 and limits.prompt_bytes and (reason := why_not_kept(model)):  # the option is for the others
            put_fact(console, "prompts", f"of {harmless(settings.name)} are not kept on disk: {reason}")
            limits = replace(limits, prompt_bytes=0)
        batch = batch_of(model, replace(limits, draft=draft))
        folders = [
            path for path in (prepared.folder, prepared.config_folder, prepared.source.local) if path is not None
        ]
        recipe = next(filter(None, map(recipe_in, folders)), None)
        embedder = Embedder(model, recipe) if recipe is not None else None
        ranking = next(filter(None, (ranking_recipe(folder, model) for folder in folders)), None)
        try:
            service = cls(model, batch, settings, embedder, metrics, ranking)
        except BaseException:
            batch.close(0)
            raise
        service.split = None if prepared.folder is None else (prepared.source.finished, prepared.folder)
        if models > 1:
            service._promise = Promise(model.placement.host_bytes, service._unspent)
            PROMISES.add(service._promise)
            service.put_tools(console, f"of {harmless(settings.name)} ")
        return service

    @classmethod
    def check(cls, request: LoadRequest, draft: Any, settings: Settings) -> None:
        """Check a model that is loaded later: what headers and small files tell. Nothing is split, fetched or loaded.

        Raises:
            RabbitLLMError: as `load`; it names the model.
        """
        try:
            prepared = prepare_model(replace(request, run=request.run.drafted(draft)), only_look=True)
            model: Any = skeleton_of(prepared)
            if model.can_generate():
                check_runs(model)
            if draft not in (None, "auto"):
                check_goes_back(model)
            ChatTemplate(model).thinking(settings.thinking)
        except RabbitLLMError as error:
            raise type(error)(f"{harmless(settings.name)}: {error.problem}", error.remedy) from error

    def put_tools(self, console: Console, whose: str = "") -> None:
        """Say so if the template takes tools, and shows calls in a form that is not read; `whose` calls they are."""
        template = self.template
        added = template.tokenizer.get_added_vocab()
        if template.reads("tools", with_tools=True) and not is_known(template.sources[1], added):
            problem = "stay text: the chat template shows them in a form that is not known here"
            put_fact(console, "tools", f"calls {whose}{problem}")

    def close(self) -> None:
        """End the batch, and free what the model has; the caller keeps no reference to the service."""
        self.batch.close(WRITE_SECONDS)
        self._encoder.shutdown()
        if self._promise is not None:
            PROMISES.discard(self._promise)

    def _unspent(self) -> dict[str, int]:
        """Device -> bytes that KV caches may still take there."""
        stats, devices = self.batch.stats, list(self.model.streamer.executors)
        return dict.fromkeys(devices, max(stats.cache_limit_bytes - stats.cache_bytes, 0) // len(devices))

    def decoded(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    async def prompt_logprobs(self, call: CheckedCall) -> dict[tuple[int, ...], list[TokenLogprob]]:
        """Prompt -> the log probabilities of its tokens, for the prompts of a call that need them."""
        scored = dict[tuple[int, ...], list[TokenLogprob]]()
        for ids in dict.fromkeys(call.scored):
            async with self._lock:
                scored[ids] = await to_its_end(token_logprobs, self.model, ids, call.top_logprobs or 0)
        return scored

    async def encoded(self, work: Callable[[], _Result]) -> _Result:
        """Use the tokenizer in its thread, so that a long prompt does not block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
