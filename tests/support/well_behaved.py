"""Clients of a server that keep to the rules, and what they count; an answer that is lost or wrong is noted as such.

A request that is refused for the moment (429 or 503, with `Retry-After`) is sent again after that time. While the
server is restarted, there may be no listener, and an answer may end with the event that says so; both mean: again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.questions import Question

PATIENCE = 600.0
"""Seconds; a request that has no answer by then is lost."""
LONGEST_WAIT = 2.0
"""Seconds between two tries, whatever the server says: the test is short."""
SHUTTING_DOWN = "shutting_down"


@dataclass
class Tally:
    """What all clients count.

    Attributes:
        answered: kind of client -> answers that were complete and right.
        refused: status -> how often a request was to be sent again.
        returned: answers that ended with the event of a server that ends, and were asked for again.
        did: what the others did -> how often.
        lost: requests without an answer, and why.
        wrong: answers that are another's, or of no request.
        firsts, betweens: seconds to the first piece of a stream, and between two of them.
    """

    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[int] = field(default_factory=Counter)
    returned: int = 0
    did: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    betweens: list[float] = field(default_factory=list)


@dataclass
class Place:
    """Where clients ask, and how long.

    Attributes:
        url: of the server.
        questions: to choose from.
        until: `time.monotonic` after which no client begins anything.
        tally: that all of them count in.
        is_restarting: whether the server may be away.
    """

    url: str
    questions: Sequence[Question]
    until: float
    tally: Tally = field(default_factory=Tally)
    is_restarting: bool = False

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until


def client_of(seconds: float = 60.0) -> httpx.AsyncClient:
    """One that makes a connection for each request and knows no proxy."""
    return httpx.AsyncClient(timeout=seconds, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


class Again(Exception):
    """To be sent again, after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


def body_of(question: Question, *, chat: bool, stream: bool) -> tuple[str, dict[str, Any]]:
    """Route and body."""
    body: dict[str, Any] = {"temperature": 0, "max_tokens": question.new_tokens, "stream": stream}
    if chat:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": question.text}]}
    return "/v1/completions", {**body, "prompt": question.text}


async def well_behaved(place: Place, chance: random.Random, *, stream: bool) -> None:
    """Asks one question after the other, at the two routes by turns."""
    async with client_of(PATIENCE) as client:
        number = 0
        while place.goes_on:
            number += 1
            question = chance.choice(place.questions)
            route, body = body_of(question, chat=number % 2 == 0, stream=stream)
            await until_answered(place, client, route, body, question)


async def until_answered(
    place: Place, client: httpx.AsyncClient, route: str, body: dict[str, Any], question: Question
) -> None:
    """One question, as often as it is to be sent again."""
    name = f"{'stream' if body['stream'] else 'whole'} {question.text[:20]!r}"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            text = await (_streamed if body["stream"] else _whole)(place, client, route, body)
        except Again as again:
            await asyncio.sleep(min(again.seconds, LONGEST_WAIT))
        except (httpx.HTTPError, ValueError, KeyError) as error:
            place.tally.lost.append(f"{name}: {type(error).__name__} {error}")
            return
        else:
            judge(place.tally, "streamed" if body["stream"] else "whole", question, text)
            return
    place.tally.lost.append(f"{name}: no answer in {PATIENCE:g} s")


def judge(tally: Tally, client: str, question: Question, text: str) -> None:
    """Whether an answer is the question's own."""
    if text == question.answer:
        tally.answered[client] += 1
    else:
        tally.wrong.append(f"{client}: to {question.text!r} came {text!r} for {question.answer!r}")


def _check(place: Place, response: httpx.Response) -> None:
    """
    Raises:
        Again: not now.
        ValueError: not at all.
    """
    if response.status_code in (429, 503):
        place.tally.refused[response.status_code] += 1
        raise Again(float(response.headers["retry-after"]))
    if response.status_code != 200:
        raise ValueError(f"status {response.status_code}")


async def _whole(place: Place, client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> str:
    try:
        response = await client.post(place.url + route, json=body)
    except httpx.ConnectError:
        if place.is_restarting:
            raise Again(0.2) from None
        raise
    _check(place, response)
    return text_of(response.json())


async def _streamed(place: Place, client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> str:
    text, times, is_complete = "", [time.monotonic()], False
    try:
        async with client.stream("POST", place.url + route, json=body) as response:
            _check(place, response)
            async for line in response.aiter_lines():
                is_complete = is_complete or line == "data: [DONE]"
                if line.startswith("data: {"):
                    piece = piece_of(place, json.loads(line.removeprefix("data: ")))
                    text += piece
                    times += [time.monotonic()] if piece else []
    except httpx.ConnectError:
        if place.is_restarting:
            raise Again(0.2) from None
        raise
    if not is_complete:
        raise ValueError(f"the stream ends after {text!r}")
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    place.tally.firsts += waits[:1]
    place.tally.betweens += waits[1:]
    return text


def piece_of(place: Place, event: dict[str, Any]) -> str:
    """The text of an event.

    Raises:
        Again: the server ends.
        ValueError: it is another error.
    """
    if "error" in event:
        if event["error"]["code"] == SHUTTING_DOWN and place.is_restarting:
            place.tally.returned += 1
            raise Again(0.5)
        raise ValueError(f"event {event['error']}")
    return text_of(event)


def text_of(answer: dict[str, Any]) -> str:
    """Of the first choice, at either route."""
    text = ""
    for choice in answer["choices"][:1]:
        text = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
    return text
