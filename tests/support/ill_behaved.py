"""Clients that a server has to bear: they hang up, read slowly, fall silent, send garbage, or ask for too much.

Each does its thing over and over, and counts it by what came of it. What a server may do about each is asserted: a
wrong status, or an answer with anything of a traceback in it, is noted among the lost.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time

from tests.support.questions import Question
from tests.support.well_behaved import Place, body_of, client_of, judge, text_of

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset."""
_ENORMOUS = 64 << 20
_GARBAGE: tuple[bytes, ...] = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe\x00",
    b'{"prompt": 5}',
    b'{"prompt": "w1", "max_tokens": -2}',
    b'{"prompt": "w1", "max_tokens": 1.5}',
    b'{"prompt": "w1", "model": "../../etc/passwd"}',
    b'{"prompt": [99999999]}',
    b'{"prompt": ""}',
    b'{"prompt": "w1", "temperature": NaN}',
    b'{"messages": "w1"}',
    b"[" * 50_000,
    b'{"prompt": "' + b"w1 " * 5_000 + b'"}',
)
_NOT_HTTP: tuple[bytes, ...] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    b"GET /v1/nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
    bytes(range(256)) * 16,
)


def _request(question: Question, *, stream: bool = True, version: str = "1.1", **more: object) -> bytes:
    route, body = body_of(question, chat=False, stream=stream)
    text = json.dumps({**body, **more}).encode()
    head = f"POST {route} HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


async def _connected(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = place.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def kills(place: Place, chance: random.Random) -> None:
    """Resets the connection in the middle of an answer, or even before it."""
    while place.goes_on:
        reader, writer = await _connected(place)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.write(_request(chance.choice(place.questions), stream=chance.random() < 0.7))
        pieces = chance.randrange(0, 6)
        try:
            async with asyncio.timeout(chance.uniform(0.05, 1.5)):
                while pieces > 0 and (line := await reader.readline()):
                    pieces -= line.startswith(b"data:")
        except (TimeoutError, ConnectionError):
            pass
        writer.transport.abort()
        place.tally.did["reset"] += 1


async def leaves(place: Place, chance: random.Random) -> None:
    """Closes the connection properly after the first piece."""
    async with client_of() as client:
        while place.goes_on:
            route, body = body_of(chance.choice(place.questions), chat=True, stream=True)
            async with client.stream("POST", place.url + route, json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        break
            place.tally.did["left" if response.status_code == 200 else f"was told {response.status_code}"] += 1
            await asyncio.sleep(chance.uniform(0, 0.1))


async def reads_slowly(place: Place, chance: random.Random) -> None:
    """Takes a few bytes at a time of an answer that is longer than its window, and still gets all of it."""
    while place.goes_on:
        question = chance.choice(place.questions)
        taking = socket.socket()
        taking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        taking.setblocking(False)
        host, _, port = place.url.removeprefix("http://").partition(":")
        await asyncio.get_running_loop().sock_connect(taking, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=taking, limit=1024)
        writer.write(_request(question, version="1.0", logprobs=5))
        reply = b""
        while part := await reader.read(256):
            reply += part
            await asyncio.sleep(0.02)
        writer.close()
        head, _, rest = reply.partition(b"\r\n\r\n")
        status = int(head.split()[1]) if head else 0
        if status in (429, 503):
            place.tally.refused[status] += 1
            await asyncio.sleep(1)
        elif status != 200 or not rest.rstrip().endswith(b"data: [DONE]"):
            place.tally.lost.append(f"slow reader: {status} {rest[-200:]!r}")
        else:
            events = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith(b"data: {")]
            judge(place.tally, "read slowly", question, "".join(map(text_of, events)))


async def falls_silent(place: Place, chance: random.Random, longest: float) -> None:
    """Says nothing, half a head or half a body, and waits until the server has had enough of it.

    Args:
        place: see there.
        chance: see there.
        longest: seconds after which it is the client that gives up.
    """
    while place.goes_on:
        whole = _request(chance.choice(place.questions))
        part = chance.choice((0, 20, len(whole) - 10))
        reader, writer = await _connected(place)
        writer.write(whole[:part])
        begun = time.monotonic()
        try:
            async with asyncio.timeout(longest):
                answer = await reader.read(-1)
            status = answer.split()[1].decode() if answer else "nothing"
            place.tally.did[f"was silent, and was told {status} and closed"] += 1
            if status not in ("nothing", "400", "408"):
                place.tally.lost.append(f"half-open: told {status} after {time.monotonic() - begun:.0f} s")
        except TimeoutError:
            place.tally.did["was silent"] += 1
        except ConnectionError:
            place.tally.did["was silent, and was closed"] += 1
        writer.transport.abort()


async def sends_garbage(place: Place, chance: random.Random, longest: float) -> None:
    """Bodies that are no request, and bytes that are no HTTP.

    Args:
        place: see there.
        chance: see there.
        longest: seconds that it waits where the server waits for more of what looks like a beginning.
    """
    async with client_of() as client:
        while place.goes_on:
            if chance.random() < 0.3:
                answer = await _told(place, chance.choice(_NOT_HTTP), longest)
                status, text = int(answer.split()[1]) if answer else 0, answer.decode(errors="replace")
            else:
                route = chance.choice(("/v1/completions", "/v1/chat/completions", "/v1/nowhere"))
                response = await client.post(place.url + route, content=chance.choice(_GARBAGE))
                status, text = response.status_code, response.text
            place.tally.did[f"garbage: {status or 'closed'}"] += 1
            if not (status == 0 or 400 <= status < 500) or "Traceback" in text or '.py"' in text:
                place.tally.lost.append(f"garbage: {status} {text[:200]}")
            await asyncio.sleep(chance.uniform(0, 0.2))


async def _told(place: Place, garbage: bytes, longest: float) -> bytes:
    reader, writer = await _connected(place)
    try:
        writer.write(garbage)
        return await asyncio.wait_for(reader.read(-1), longest)
    except (ConnectionError, TimeoutError):
        return b""
    finally:
        writer.transport.abort()


async def sends_too_much(place: Place, chance: random.Random) -> None:
    """A body that never ends, with a length that says so, or in chunks."""
    while place.goes_on:
        is_announced = chance.random() < 0.5
        framing = f"Content-Length: {_ENORMOUS}" if is_announced else "Transfer-Encoding: chunked"
        reader, writer = await _connected(place)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n{framing}\r\n\r\n".encode())
        answered = asyncio.create_task(reader.read(4096))  # now: a reset would throw away what has come
        part = b" " * 65_536
        sent = 0
        try:
            while sent < _ENORMOUS and not answered.done():
                writer.write(part if is_announced else b"10000\r\n" + part + b"\r\n")
                await writer.drain()
                sent += len(part)
                await asyncio.sleep(0)
            answer = await asyncio.wait_for(answered, 60)
        except ConnectionError:
            answer = b""
            answered.cancel()
        writer.transport.abort()
        status = int(answer.split()[1]) if answer else 0
        place.tally.did[f"sent too much: {status or 'closed'}"] += 1
        if status not in (0, 413) or sent >= _ENORMOUS:
            place.tally.lost.append(f"too much: {status} after {sent} bytes")
        await asyncio.sleep(chance.uniform(0.1, 0.5))


async def asks_for_long(place: Place, chance: random.Random, tokens: int) -> None:
    """Answers that may take longer than a request may: then cut off, and what came until then is right."""
    async with client_of() as client:
        while place.goes_on:
            question = chance.choice(place.questions)
            body = {"prompt": question.text, "temperature": 0, "max_tokens": tokens, "stream": True}
            text, error = "", None
            async with client.stream("POST", place.url + "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    place.tally.did[f"asked for long: {response.status_code}"] += 1
                    await asyncio.sleep(1)
                    continue
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        error = event.get("error", {}).get("code", error)
                        text += "" if "error" in event else text_of(event)
            place.tally.did[f"asked for long: {error or 'complete'}"] += 1
            is_right = text.startswith(question.answer) or question.answer.startswith(text)
            if error not in (None, "timeout") or not is_right:
                place.tally.wrong.append(f"long: {error} to {question.text!r} came {text!r} for {question.answer!r}")
