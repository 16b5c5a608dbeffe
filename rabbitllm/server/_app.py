"""The routes: each reads a request, calls the other modules and writes the response.

The page at `/` sends requests only to the server that it came from: to `/v1/chat/completions`, `/v1/models` and
`/status`. Its files are the same for all users and have no secret, so they need no key.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from importlib import resources
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from rabbitllm.formats.bounded import decode_message
from rabbitllm.generation.request import BatchStats
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server import _messages, _ollama, _responses
from rabbitllm.server._guards import (
    SCOPE_KEY,
    Guard,
    JsonResponse,
    Record,
    RequestLog,
    key_of,
    no_such_path,
    response_of,
    wrong_caller,
    wrong_key,
)
from rabbitllm.server._metrics import CONTENT_TYPE, text_format
from rabbitllm.server._models import Entry, Models
from rabbitllm.server._reranking import NO_SCORES
from rabbitllm.server._service import Service
from rabbitllm.server._streaming import (
    Dialect,
    EventStream,
    Inbox,
    Submission,
    api_error_of,
    frames,
    unless_disconnected,
    whole,
)
from rabbitllm.server.answers import ChatChoices, CompletionChoices, ResponseBuilder
from rabbitllm.server.api_error import (
    CLOSE,
    CLOSING,
    NOT_FOUND,
    TIMED_OUT,
    TOO_LARGE,
    APIError,
    bad,
    bad_options,
)
from rabbitllm.server.embeddings import (
    NO_RECIPE,
    CheckedEmbedding,
    checked_embedding,
    cosines,
    embedding_object,
    rerank_object,
)
from rabbitllm.server.requests import CheckedCall, checked_chat, checked_completion
from rabbitllm.server.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Embedding,
    GenerationBody,
    RerankBody,
    TokenizeBody,
    parsed,
)
from rabbitllm.version import __version__

ChatForm = Callable[[Any, ChatTemplate], dict[str, Any]]
"""From a body in the form of an interface to that of a chat."""
Checked = tuple[Service, ChatBody, CheckedCall]
GONE = 499
"""Status of a request whose client left; it appears only in the log."""
EXPOSED = ("x-request-id", "retry-after")
ALWAYS = ("/health", "/metrics")
"""Paths that are answered even while the server shuts down."""
PAGE = {
    "": ("page.html", "text/html; charset=utf-8"),
    "static/page.css": ("page.css", "text/css; charset=utf-8"),
    "static/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"static/{name}": (name, "text/javascript; charset=utf-8")
        for name in (
            *("page.js", "talk.js", "chats.js", "markdown.js", "maths.js", "highlight.js", "pictures.js"),
            *("status.js", "timing.js", "view.js"),
        )
    },
}
"""Path -> file of the page, and its media type."""
OPEN = frozenset({"/health", *(f"/{path}" for path in PAGE)})
"""Paths that need no API key."""
PAGE_HEADERS = {
    # scripts, styles and pictures only from here, none inline; requests only to here; no frames
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # cached by the browser, but revalidated each time: another version of the package has other files
    "cache-control": "no-cache",
}


def create_app(models: Models) -> ASGIApp:
    """The server as an ASGI application.

    Args:
        models: the models, and everything that answers requests.
    """
    router = Router(routes(models))
    settings = models.settings

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = router  # so that an unknown path is an exception too
        try:
            await router(scope, receive, send)
        finally:
            models.release(scope)

    def refused(scope: Scope) -> APIError | None:
        closed = models.is_closing and scope["path"] not in ALWAYS
        return wrong_key(scope, settings.api_key, OPEN) or (models.closing() if closed else None)

    answered = ExceptionMiddleware(routed, {HTTPException: _answer_error, Exception: _answer_error})
    guarded: ASGIApp = Guard(answered, refused)
    if settings.origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    guarded = Guard(guarded, lambda scope: wrong_caller(scope, settings.hosts, settings.origins))
    return RequestLog(guarded, models.metrics)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == NOT_FOUND:
        error = no_such_path(request.scope["path"])
    if isinstance(error, ClientDisconnect):
        _record(request).gone = True
        return Response(status_code=GONE)
    api_error = api_error_of(error)
    _record(request).error = api_error.code or api_error.message
    return response_of(api_error, request.scope["path"])


def routes(models: Models) -> list[BaseRoute]:
    """All routes: the interface, and the page's files."""
    settings = models.settings

    async def body_of(request: Request) -> Any:
        return await read_json(request, settings.body_bytes, settings.body_seconds)

    async def used(request: Request, name: Any) -> Service:
        """The model that a request names, once it is loaded; it stays until the request is answered."""
        name = name if isinstance(name, str) else None  # anything else is refused with the rest of the body
        if (service := models.at_once(name, request.scope)) is not None:
            return service
        return await unless_disconnected(models.acquire(name, request.scope), request.receive)

    async def listed(_: Request) -> Response:
        return JsonResponse({"object": "list", "data": [await _model(entry) for entry in models.entries]})

    async def model(request: Request) -> Response:
        return JsonResponse(await _model(models.entry(request.path_params["name"])))

    async def checked(request: Request, raw: Any, form: ChatForm | None = None) -> Checked:
        """The chat that a body asks for, in the form of any interface, and the model that it names."""
        if form is None:
            body = parsed(ChatBody, raw)  # a wrong body loads no model
            service = await used(request, body.model)
        else:
            service = await used(request, raw.get("model") if isinstance(raw, dict) else None)
            body = parsed(ChatBody, form(raw, service.template))
        limits, own = service.limits, service.settings
        return service, body, await service.encoded(lambda: checked_chat(body, service.template, limits, own))

    async def answered(
        request: Request,
        service: Service,
        body: ChatBody,
        call: CheckedCall,
        lead: str,
        dialect: Dialect,
        call_lead: str = "call_",
    ) -> Response:
        """The answer to a chat, in the form of any interface."""
        choices = ChatChoices(call, service.texts, service.model, lambda: f"{call_lead}{uuid.uuid4().hex[:24]}")
        kinds = lead, "chat.completion", "chat.completion.chunk"
        return await _generated(request, service, body, call, choices, kinds, dialect)

    async def chat(request: Request) -> Response:
        service, body, call = await checked(request, await body_of(request))
        return await answered(request, service, body, call, "chatcmpl-", Dialect(include_usage=body.include_usage))

    async def messages(request: Request) -> Response:
        service, body, call = await checked(request, await body_of(request), _messages.chat_of)
        dialect = _messages.Messages(body.stops, len(call.requests[0].prompt))
        return await answered(request, service, body, call, "msg_", dialect, "toolu_")

    async def count_tokens(request: Request) -> Response:
        *_, call = await checked(request, await body_of(request), _messages.chat_of)
        return JsonResponse({"input_tokens": len(call.requests[0].prompt)})

    async def responses(request: Request) -> Response:
        raw = await body_of(request)
        service, body, call = await checked(request, raw, _responses.chat_of)
        return await answered(request, service, body, call, "resp_", _responses.Responses(raw))

    async def ollama(request: Request) -> Response:
        raw, entry, kept = _ollama.named(await body_of(request), models)
        if _ollama.only_loads(raw):
            entry.keep_alive = kept
            if entry.keep_alive or entry.service is not None:
                await used(request, raw["model"])
            return JsonResponse(_ollama.loaded(entry))
        service, body, call = await checked(request, raw, _ollama.chat_of)
        entry.keep_alive = kept  # a request that is refused changes nothing
        generates = request.scope["path"] == "/api/generate"
        return await answered(request, service, body, call, "chatcmpl-", _ollama.OllamaLines(generates=generates))

    async def tags(request: Request) -> Response:
        is_all = request.scope["path"] == "/api/tags"
        entries = [entry for entry in models.entries if is_all or entry.service is not None]
        return JsonResponse({"models": [await _ollama.shown(entry) for entry in entries]})

    async def show(request: Request) -> Response:
        return JsonResponse(await _ollama.shown(_ollama.named(await body_of(request), models)[1]))

    async def ollama_embed(request: Request) -> Response:
        begun, (raw, entry, kept) = time.perf_counter(), _ollama.named(await body_of(request), models)
        body = parsed(Embedding, _ollama.embedding_of(raw))
        entry.keep_alive = kept
        service = await used(request, body.model)
        answer = embedding_object(*await embedded(request, service, body), entry.settings.name)
        return JsonResponse(_ollama.embedded(answer, time.perf_counter() - begun))

    async def version(_: Request) -> Response:
        return JsonResponse({"version": __version__})

    async def tokenize(request: Request) -> Response:
        body = parsed(TokenizeBody, await body_of(request))
        if body.messages is not None:
            chat = {"model": body.model, "messages": body.messages, "tools": body.tools}
            service, _, call = await checked(request, chat)
            ids = list(call.requests[0].prompt)
        else:
            service, text, special = await used(request, body.model), body.text, body.adds_special
            with bad_options("content"):
                service.limits.check_letters(len(text), "The text")
            ids = await service.encoded(lambda: service.tokenizer(text, add_special_tokens=special)["input_ids"])
        return JsonResponse({"tokens": ids, "count": len(ids), "max_model_len": service.limits.context})

    async def detokenize(request: Request) -> Response:
        body = parsed(DetokenizeBody, await body_of(request))
        service = await used(request, body.model)
        with bad_options("tokens"):
            service.limits.check_ids(body.tokens or [0], "The list")
        text = await service.encoded(lambda: service.decoded(body.tokens))
        return JsonResponse({"content": text, "prompt": text})

    async def apply_template(request: Request) -> Response:
        service, _, call = await checked(request, await body_of(request))
        return JsonResponse({"prompt": await service.encoded(lambda: service.decoded(call.requests[0].prompt))})

    async def completion(request: Request) -> Response:
        body = parsed(CompletionBody, await body_of(request))
        service = await used(request, body.model)
        limits, own = service.limits, service.settings
        call = await service.encoded(lambda: checked_completion(body, service.tokenizer, limits, own))
        prompts = await unless_disconnected(service.prompt_logprobs(call), request.receive)
        choices = CompletionChoices(call, service.texts, service.model, prompts)
        kinds = "cmpl-", "text_completion", "text_completion"
        dialect = Dialect(include_usage=body.include_usage)
        return await _generated(request, service, body, call, choices, kinds, dialect)

    async def embedded(
        request: Request, service: Service, body: Embedding
    ) -> tuple[CheckedEmbedding, list[list[float]]]:
        if service.embedder is None:
            raise APIError(NOT_FOUND, f"This model has no embeddings: {NO_RECIPE}.", code="no_embeddings")
        embedder = service.embedder
        inputs = await service.encoded(
            lambda: checked_embedding(body, service.tokenizer, service.limits, embedder.width)
        )
        return inputs, await unless_disconnected(embedder.embed(inputs.inputs), request.receive)

    async def embeddings(request: Request) -> Response:
        body = parsed(Embedding, await body_of(request))
        service = await used(request, body.model)
        return JsonResponse(embedding_object(*await embedded(request, service, body), service.settings.name))

    async def rerank(request: Request) -> Response:
        body = parsed(RerankBody, await body_of(request))
        service = await used(request, body.model)
        if (reranker := service.reranker) is not None:
            inputs = await service.encoded(lambda: reranker.inputs(body))
            scores = await unless_disconnected(reranker.scores(inputs), request.receive)
            tokens = sum(len(entry["input_ids"]) for entry in inputs)
        else:
            if service.embedder is None:
                raise APIError(NOT_FOUND, NO_SCORES % type(service.model).__name__, code="no_embeddings")
            texts = parsed(Embedding, {"model": body.model, "input": [body.query, *body.documents]})
            call, vectors = await embedded(request, service, texts)
            scores, tokens = cosines(vectors), sum(map(len, call.inputs))
        return JsonResponse(rerank_object(body, scores, tokens, service.settings.name))

    async def health(request: Request) -> Response:
        state = _health(models, in_full=key_of(request.scope, settings.api_key) is not None)
        return JsonResponse(state, CLOSING if models.has_failed or models.is_closing else 200)

    async def status(request: Request) -> Response:
        name = request.query_params.get("model")
        entry = models.entry(name) if name else models.last_used
        return JsonResponse({**_status(entry), "models": models.states()}, headers={"cache-control": "no-store"})

    async def metrics(_: Request) -> Response:
        stats = {service.settings.name: service.batch.stats for service in models.services}
        families = models.metrics.families(stats, [entry.settings.name for entry in models.entries])
        return Response(text_format(families), media_type=CONTENT_TYPE)

    return [
        Route("/v1/models", listed),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        # vLLM's and Cohere's clients have one each
        *(Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *(Route(path, ollama, methods=["POST"]) for path in ("/api/chat", "/api/generate")),
        *(Route(path, ollama_embed, methods=["POST"]) for path in ("/api/embed", "/api/embeddings")),
        *(Route(path, tags) for path in ("/api/tags", "/api/ps")),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/version", version),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/apply-template", apply_template, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/health", health),
        Route("/status", status),
        Route("/metrics", metrics),
        *(Route(f"/{path}", _page_file(*entry)) for path, entry in PAGE.items()),
    ]


async def _generated(
    request: Request,
    service: Service,
    body: GenerationBody,
    call: CheckedCall,
    choices: ChatChoices | CompletionChoices,
    kinds: tuple[str, str, str],
    dialect: Dialect,
) -> Response:
    """The answer to requests of the batch, whole or as a stream; they are cancelled when the client disconnects.

    Args:
        kinds: how its id begins, and the types of its objects: whole, and of a stream.
    """
    record, (lead, *types), usage = _record(request), kinds, bool(body.stream and body.include_usage)
    about = f"{lead}{record.id}", int(time.time()), service.settings.name
    builder = ResponseBuilder(*about, types[0], types[1], call.candidates, usage, call.max_tokens)
    inbox = Inbox(keep_tokens=call.keeps_tokens, watch=service.metrics.watch())
    owner = key_of(request.scope, service.settings.api_key) or None
    submission = Submission(service.batch, [replace(each, owner=owner) for each in call.requests], inbox)

    def over(stayed: bool) -> None:
        submission.cancel()
        record.gone = not stayed
        record.error = submission.error
        record.finished = submission.ends()

    if not body.stream:
        try:
            work = whole(submission, builder, choices, dialect)
            return JsonResponse(await unless_disconnected(work, request.receive, submission.cancel))
        finally:
            over(True)

    own = service.settings
    written = frames(submission, builder, choices, dialect, own.heartbeat_seconds)
    stream = EventStream(written, over, own.stall_seconds)
    stream.headers["content-type"] = dialect.content_type
    return stream


def _page_file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    body = resources.files("rabbitllm.server").joinpath("static", name).read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**PAGE_HEADERS, "etag": tag}

    async def answer(request: Request) -> Response:
        etags = {etag.strip().removeprefix("W/") for etag in request.headers.get("if-none-match", "").split(",")}
        if etags & {tag, "*"}:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=media_type)

    return answer


def _record(request: Request) -> Record:
    record: Record = request.scope[SCOPE_KEY]
    return record


async def _model(entry: Entry) -> dict[str, Any]:
    """A model as OpenAI lists it, plus the context length and what prompts may hold, as other servers report them; null
    until they are known."""
    service = entry.service
    kinds = None if service is None else ["text", *await service.encoded(service.template.media_kinds)]
    return {
        "id": entry.settings.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "rabbitllm",
        "max_model_len": entry.context,
        "loaded": entry.service is not None,
        "input_modalities": kinds,
    }


_LIMITS_OF_HEALTH = ("most_running", "most_waiting", "cache_limit_bytes")
"""Null while no model is loaded: they are sums over the loaded ones."""
_OF_HEALTH = ("running", "waiting", "cache_bytes", *_LIMITS_OF_HEALTH)


def _health(models: Models, *, in_full: bool) -> dict[str, Any]:
    status = "failed" if models.has_failed else "shutting down" if models.is_closing else "ok"
    if not in_full:
        return {"status": status}
    all_stats = [service.batch.stats for service in models.services]
    numbers = {name: sum(getattr(stats, name) for stats in all_stats) for name in _OF_HEALTH}
    numbers["waiting"] += sum(len(entry.waiters) for entry in models.entries)
    return {
        "status": status,
        "model": models.settings.name,
        **numbers,
        **({} if all_stats else dict.fromkeys(_LIMITS_OF_HEALTH)),
        "embeddings": any(service.embedder is not None for service in models.services),
    }


def _status(entry: Entry) -> dict[str, Any]:
    """The state of a model as numbers for the page: the batch's statistics, and the placement of the weights.

    All sums only grow while it is loaded, so that two readings give the difference between them. Contains no path of
    this machine.

    Returns:
        The fields of `rabbitllm.generation.request.BatchStats` (seconds, bytes and counts since the server began;
        limits are None while the model is not loaded);
        `model`; `sampling`: the options of requests that set none, and `words`; and `placement` with, in bytes, the
        reads from disk per pass (`streamed_bytes`), the copies to devices per pass (`uploaded_bytes`), and the
        distribution of the weights: `places`, place -> words -> bytes.
    """
    if (service := entry.service) is None:
        nowhere = {"streamed_bytes": 0, "uploaded_bytes": 0, "places": {}}
        unknown = {**entry.settings.sampling.in_use(), "words": ""}
        stats: dict[str, Any] = asdict(BatchStats())
        stats |= dict.fromkeys(name for name in stats if "most_" in name or "_limit_" in name)
        return {"model": entry.settings.name, **stats, "sampling": unknown, "placement": nowhere}
    placement, sampling = service.model.placement, service.settings.sampling
    return {
        "model": service.settings.name,
        **asdict(service.batch.stats),
        "sampling": {**sampling.in_use(), "words": service.sampling_words},
        "placement": {
            "streamed_bytes": placement.streamed_bytes,
            "uploaded_bytes": placement.uploaded_bytes,
            "places": placement.bytes_by_device,
        },
    }


async def read_json(request: Request, max_bytes: int, seconds: float) -> Any:
    """The body, decoded. The bytes received count, not the length in a header; so a chunked body is limited too.

    Args:
        request: the request to read.
        max_bytes: limit of the body's size.
        seconds: time limit for reading the body.

    Raises:
        APIError: the body is too long, too slow, or invalid JSON.
        ClientDisconnect: the client has disconnected.
    """
    too_large = APIError(
        TOO_LARGE, f"The request body has more than {max_bytes:,} bytes.", code="body_too_large", headers=CLOSE
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                raw += part
                if len(raw) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise APIError(
            TIMED_OUT, f"The request body did not arrive within {seconds:g} s.", code="body_timeout", headers=CLOSE
        ) from None
    try:
        return decode_message(bytes(raw))
    except ValueError as error:
        raise bad(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
