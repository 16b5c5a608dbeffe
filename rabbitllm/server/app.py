"""The routes, and nothing else: each reads a request, passes it to the other modules and writes the response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from rabbitllm.generation.request import Request as Wanted
from rabbitllm.server import page, status
from rabbitllm.server.answers import AnswerChoices, Envelope
from rabbitllm.server.api_error import CLOSING, NOT_FOUND, APIError
from rabbitllm.server.bodies import read_json
from rabbitllm.server.chat_answers import ChatChoices
from rabbitllm.server.chat_requests import chat_asked
from rabbitllm.server.completion_answers import CompletionChoices
from rabbitllm.server.completion_requests import completion_asked
from rabbitllm.server.embeddings import embedding_asked, embedding_object
from rabbitllm.server.event_stream import EventStream, left
from rabbitllm.server.guards import ApiKeyGuard, HostGuard, JsonResponse, RequestLog, ShutdownGuard, answer_of, told
from rabbitllm.server.inbox import Inbox
from rabbitllm.server.prometheus import CONTENT_TYPE, written
from rabbitllm.server.record import SCOPE_KEY, Record
from rabbitllm.server.schemas import ChatBody, CompletionBody, Embedding, GenerationBody, parsed
from rabbitllm.server.service import Service
from rabbitllm.server.submission import Submission, frames, whole

GONE = 499
"""Status of a request whose client left; it appears only in the log."""
EXPOSED = ("x-request-id", "retry-after")


def create_app(service: Service) -> ASGIApp:
    """The server as an ASGI application.

    Args:
        service: the model and everything that answers requests.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _answer_error)
    app.include_router(_routes(service))
    settings = service.settings
    app.state.batch, app.state.model, app.state.settings = service.batch, service.streamed, settings
    app.include_router(page.router)
    app.include_router(status.router)
    guarded: ASGIApp = ApiKeyGuard(ShutdownGuard(app, lambda: service.is_closing), settings.api_key)
    if settings.origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    return RequestLog(HostGuard(guarded, settings.hosts, settings.origins), service.metrics)


async def _answer_error(request: Request, error: Exception) -> Response:
    return answer_of(told(error))


class _Answering(APIRoute):
    """A route that answers its exceptions in OpenAI's form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except ClientDisconnect:
                _record(request).gone = True
                return Response(status_code=GONE)
            except Exception as error:
                refusal = told(error)
                _record(request).error = refusal.code or refusal.message
                return answer_of(refusal)

        return answered


def _routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=_Answering)
    settings = service.settings

    async def body_of(request: Request) -> Any:
        return await read_json(request, settings.body_bytes, settings.body_seconds)

    @router.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [_model(service)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_name(name)
        return JsonResponse(_model(service))

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = parsed(ChatBody, await body_of(request))
        service.check_name(body.model)
        asked = await service.encoded(lambda: chat_asked(body, service.template, service.model, settings))
        choices = ChatChoices(asked, service.spelling, service.ends, lambda: f"call_{uuid.uuid4().hex[:24]}")
        envelope = _envelope("chatcmpl-", ("chat.completion", "chat.completion.chunk"), body, request, service)
        inbox = Inbox(
            len(asked.requests),
            keep_tokens=asked.likeliest is not None,
            text_of=choices.text_of,
            watch=service.metrics.watch(),
        )
        return await _generated(request, service, body, asked.requests, choices, envelope, inbox)

    @router.post("/v1/completions")
    async def completion(request: Request) -> Response:
        body = parsed(CompletionBody, await body_of(request))
        service.check_name(body.model)
        asked = await service.encoded(lambda: completion_asked(body, service.tokenizer, service.model, settings))
        choices = CompletionChoices(asked, service.spelling, service.ends)
        envelope = _envelope("cmpl-", ("text_completion", "text_completion"), body, request, service)
        inbox = Inbox(len(asked.requests), keep_tokens=asked.likeliest is not None, watch=service.metrics.watch())
        return await _generated(request, service, body, asked.requests, choices, envelope, inbox)

    @router.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = parsed(Embedding, await body_of(request))
        service.check_name(body.model)
        if service.embedder is None:
            raise APIError(
                NOT_FOUND,
                "This model has no embeddings: its checkpoint says of none how they are made (modules.json).",
                code="no_embeddings",
            )
        embedder = service.embedder
        asked = await service.encoded(
            lambda: embedding_asked(body, service.tokenizer, service.model, settings, embedder)
        )
        work = asyncio.ensure_future(embedder.embed(asked.inputs))
        found = await _unless_gone(request, work, work.cancel)
        return JsonResponse(embedding_object(asked, found, settings.name))

    @router.get("/health")
    async def health() -> Response:
        return JsonResponse(_health(service), 200 if service.is_alive else CLOSING)

    @router.get("/metrics")
    async def metrics() -> Response:
        families = service.metrics.families(service.batch.facts, settings.name)
        return Response(written(families), media_type=CONTENT_TYPE)

    return router


async def _generated(
    request: Request,
    service: Service,
    body: GenerationBody,
    wanted: Sequence[Wanted],
    choices: AnswerChoices,
    envelope: Envelope,
    inbox: Inbox,
) -> Response:
    """The answer to requests of the batch, whole or as a stream; they are cancelled when the client disconnects."""
    record = _record(request)
    submission = Submission(service.batch, wanted, inbox)
    of_a_prompt = body.n or 1

    def over(stayed: bool) -> None:
        submission.cancel()
        record.gone = not stayed
        record.finished = [one for one in submission.finished if one is not None]

    if not body.stream:
        work = asyncio.ensure_future(whole(submission, envelope, choices, of_a_prompt))
        try:
            return JsonResponse(await _unless_gone(request, work, submission.cancel))
        finally:
            over(True)

    async def noted() -> Any:
        async for frame in frames(submission, envelope, choices, of_a_prompt):
            yield frame
        record.error = submission.error

    return EventStream(
        noted(),
        over,
        {},
        heartbeat_seconds=service.settings.heartbeat_seconds,
        stall_seconds=service.settings.stall_seconds,
    )


async def _unless_gone(request: Request, work: asyncio.Future[Any], cancel: Callable[[], object]) -> Any:
    """The result of the work, unless the client disconnects first.

    Raises:
        ClientDisconnect: the client has disconnected.
    """
    leaving = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientDisconnect
    finally:
        cancel()
        leaving.cancel()
        work.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


def _envelope(lead: str, kinds: tuple[str, str], body: GenerationBody, request: Request, service: Service) -> Envelope:
    name = f"{lead}{_record(request).id}"
    return Envelope(name, int(time.time()), service.settings.name, *kinds, bool(body.stream and body.include_usage))


def _record(request: Request) -> Record:
    found: Record = request.scope[SCOPE_KEY]
    return found


def _model(service: Service) -> dict[str, Any]:
    """The model as OpenAI lists it, plus the context length, which other servers report too."""
    return {
        "id": service.settings.name,
        "object": "model",
        "created": service.created,
        "owned_by": "rabbitllm",
        "max_model_len": service.model.context,
    }


def _health(service: Service) -> dict[str, Any]:
    facts = service.batch.facts
    status = "ok" if service.is_alive else "shutting down" if service.is_closing else "failed"
    return {
        "status": status,
        "model": service.settings.name,
        "running": facts.running,
        "waiting": facts.waiting,
        "most_running": facts.most_running,
        "most_waiting": facts.most_waiting,
        "cache_bytes": facts.cache_bytes,
        "cache_limit_bytes": facts.cache_limit_bytes,
        "embeddings": service.embedder is not None,
    }
