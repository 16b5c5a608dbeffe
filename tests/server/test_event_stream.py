"""Server-sent events: framing that every reader takes apart alike, and what becomes of slow and absent readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from rabbitllm.generation.request import Delta, FinishReason, Result, TokenLogprob
from rabbitllm.server._streaming import COMMENT, DONE, EventStream, Inbox, event
from tests.server.serving import PATIENT

VALUES = st.dictionaries(st.text(max_size=6), st.text(max_size=12) | st.integers() | st.none(), max_size=4)


@PATIENT
@given(values=st.lists(VALUES, max_size=6), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_clients_parse_the_same_values(values: list[Any], cuts: list[int]) -> None:
    """In any pieces, for OpenAI's own reader and for one that ends lines wherever Unicode does."""
    written = b"".join(map(event, values)) + COMMENT + DONE
    offsets = sorted({0, len(written), *(min(cut, len(written)) for cut in cuts)})
    parts = [written[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]  # noqa: RUF007
    data = [message.data for message in SSEDecoder().iter_bytes(iter(parts))]
    assert data.pop() == "[DONE]"
    assert [json.loads(message) for message in data] == values
    lines = [line for line in written.decode().splitlines() if line.startswith("data: {")]
    assert [json.loads(line.removeprefix("data: ")) for line in lines] == values


EVENTS = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.booleans()), max_size=30)
END = Result("", (2,), 1, FinishReason.STOP, 0.1, 0.1)


@PATIENT
@given(EVENTS)
def test_waiting_deltas_are_joined(events: list[tuple[int, str, bool]]) -> None:
    """Nothing is lost, doubled or in another order, and of each choice one piece waits at most."""

    async def go() -> None:
        inbox = Inbox()
        texts, tokens = [""] * 3, [0] * 3
        for token, (choice, text, takes) in enumerate(events):
            inbox.put(choice, Delta(text, (TokenLogprob(token),)))
            if takes:
                for source, event in await inbox.take():
                    assert isinstance(event, Delta)
                    texts[source] += event.text
                    tokens[source] += len(event.tokens)
        for choice in range(3):
            inbox.put(choice, END)
        last = await inbox.take()
        assert len([event for _, event in last if isinstance(event, Delta)]) <= 3
        ended: set[int] = set()
        for source, event in last:
            if isinstance(event, Delta):
                assert source not in ended
                texts[source] += event.text
                tokens[source] += len(event.tokens)
            else:
                ended.add(source)
        assert ended == {0, 1, 2}
        assert texts == ["".join(text for choice, text, _ in events if choice == index) for index in range(3)]
        assert tokens == [sum(choice == index for choice, _, _ in events) for index in range(3)]

    asyncio.run(go())


def test_the_inbox_keeps_no_tokens_that_were_not_requested() -> None:
    async def go() -> None:
        inbox = Inbox(keep_tokens=False)
        inbox.put(0, Delta("a", (TokenLogprob(1),)))
        inbox.put(0, Delta("b", (TokenLogprob(2),)))
        assert await inbox.take() == [(0, Delta("ab", ()))]

    asyncio.run(go())


class Reader:
    """What a server has at the other end of a response."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []
        self.stalls = asyncio.Event()
        self.leaves = asyncio.Event()

    async def send(self, message: Any) -> None:
        if self.stalls.is_set():
            await asyncio.Event().wait()
        self.written.append(message)

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.written)


async def streamed(reader: Reader, frames: AsyncIterator[bytes]) -> list[bool]:
    ends: list[bool] = []
    await EventStream(frames, ends.append, 0.1)({"type": "http"}, reader.receive, reader.send)
    return ends


async def frames(count: int, *, ends: bool = True) -> AsyncIterator[bytes]:
    """So many events; what does not end then has signs of life."""
    for index in range(count):
        yield event(index)
    while not ends:
        await asyncio.sleep(0.05)
        yield COMMENT


def test_connected_client_gets_all_frames() -> None:
    async def go() -> None:
        reader = Reader()
        assert await streamed(reader, frames(3)) == [True]
        assert reader.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert dict(reader.written[0]["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert reader.written[-1]["more_body"] is False

    asyncio.run(go())


def test_an_idle_inbox_gives_nothing_and_loses_nothing() -> None:
    async def go() -> None:
        inbox = Inbox()
        assert await inbox.take(0.01) == []
        inbox.put(0, Delta("a", ()))
        assert await inbox.take(30.0) == [(0, Delta("a", ()))]
        asyncio.get_running_loop().call_later(0.02, inbox.put, 0, END)
        assert await inbox.take(0.001) == []
        assert await inbox.take(30.0) == [(0, END)]

    asyncio.run(go())


def test_events_of_many_answers_wake_the_loop_once() -> None:
    async def go() -> None:
        loop = asyncio.get_running_loop()
        inboxes = [Inbox() for _ in range(64)]
        taking = [asyncio.ensure_future(inbox.take()) for inbox in inboxes]
        await asyncio.sleep(0)
        before = len(loop._ready)  # type: ignore[attr-defined]
        for inbox in inboxes:
            inbox.put(0, END)
        assert len(loop._ready) == before + 1  # type: ignore[attr-defined]
        assert await asyncio.gather(*taking) == [[(0, END)]] * 64

    asyncio.run(go())


@pytest.mark.parametrize("how", ["leaves", "stalls"])
def test_disconnected_or_stalled_client_ends_the_stream(how: str) -> None:
    async def go() -> None:
        reader = Reader()
        asyncio.get_running_loop().call_later(0.02, getattr(reader, how).set)
        assert await asyncio.wait_for(streamed(reader, frames(1, ends=False)), 5) == [False]

    asyncio.run(go())
