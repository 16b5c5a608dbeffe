"""The benchmark of servers: what clients note, figures of it, rows compared with each other."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import clients as serve_clients
from benchmarks.lib.measure import percentile
from benchmarks.lib.server_process import Answer, Level, asked
from benchmarks.serve import serve
from benchmarks.serve.report import ServeRun, against_ours, figures, notes_on, of_linear, picture, tabulate
from benchmarks.serve.rows import SERVERS, Workload, body_of, prepared
from tests.benchmarks.test_capped import needs_groups


def answer(sent: float, *pieces: float, new_tokens: int | None = None, error: str | None = None) -> Answer:
    return Answer(sent, pieces, new_tokens, "", 200, error)


def test_percentiles_are_values_that_were_there() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 95) == 3.0
    assert [percentile(range(1, 101), percent) for percent in (1, 50, 95, 100)] == [1, 50, 95, 100]
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    assert percentile([1.0, math.inf], 95) == math.inf


def test_a_level_in_figures() -> None:
    level = Level(
        2,
        (
            answer(0.0, 1.0, 1.5, 2.5, new_tokens=4),  # two tokens came as one piece
            answer(0.5, 2.0, error="cut short"),
            answer(2.5, error="cut short"),
        ),
        4.0,
    )
    assert (level.whole, level.tokens_a_second) == (1, 5 / 4)
    assert level.firsts == [1.0, 1.5, math.inf]
    assert level.betweens == [0.5, 1.0]
    found = figures(level, 100, 1.0)
    assert (found["sent"], found["whole"], found["tokens"]) == (3, 1, 5)
    assert (found["first_p50"], found["first_p95"]) == (1.5, None)  # one in three got none
    assert (found["between_p50"], found["between_p95"], found["errors"]) == (0.5, 1.0, [])


def run(row: str, rates: dict[int, float], turn: int = 0) -> ServeRun:
    made = ServeRun(row, turn, limit_bytes=1 << 20, share=50)
    for at_once, rate in rates.items():
        answers = (answer(0.0, 1.0, 2.0, new_tokens=2),)
        made.levels.append(figures(Level(at_once, answers, 2.0), 4_000_000, 1.0) | {"tokens_a_second": rate})
    return made


def test_rows_compared_with_each_other() -> None:
    runs = [
        run("rabbitllm-serve", {1: 1.0, 4: 3.6, 16: 8.0}),
        run("llama-server-bf16", {1: 2.0, 4: 1.8}),
        run("llama-server-q4_0", {1: 2.0}),
    ]
    assert [of_linear(runs[0], number) for number in (4, 16, 64)] == [0.9, 0.5, None]
    assert [against_ours(runs, runs[1], number) for number in (1, 4, 16)] == [2.0, 0.5, None]
    assert against_ours(runs, runs[2], 1) is None  # there is none of ours at 4 bits
    rows = [one.row for one in runs]
    table = tabulate(runs, rows, [1, 4])
    assert table.rows[0][:6] == ("rabbitllm-serve", "1", "1/1", "1.00", "1.00", "1.00")
    assert table.rows[3][:6] == ("llama-server-bf16", "4", "1/1", "1.80", "0.23", "0.50")
    assert table.rows[5][2:] == ("-", *["-"] * 10)
    notes = notes_on(runs, rows, [1, 4, 16], 60)
    assert "rabbitllm-serve, 4 at once, of linear: 0.9 (at least 0.8): reached" in notes
    assert "rabbitllm-serve, 16 at once, of linear: 0.5 (at least 0.8): NOT reached" in notes
    assert "llama-server-bf16, 1 at once, tokens/s beside ours: 2 (at most 1): NOT reached" in notes
    assert [line["name"] for line in picture("title", runs, rows)["lines"]] == rows


def workload(folder: Path) -> Workload:
    return Workload(folder / "checkpoint", 1 << 30, 1000, folder / "run", 32, 24, 2, [1, 4], 60)


def test_no_two_prompts_begin_alike(tmp_path: Path) -> None:
    made = workload(tmp_path)
    prompts = [made.prompt(number) for level in (10_000, 20_000, 30_000) for number in range(level, level + 128)]
    assert all(len(prompt) == 32 and min(prompt) > 0 and max(prompt) < 1000 for prompt in prompts)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == len(prompts)


def test_what_each_server_is_given(tmp_path: Path) -> None:
    made = workload(tmp_path)
    bodies = {row: body_of(row, made, 3, 5) for row in SERVERS}
    ids = bodies["llama-server-bf16"]["prompt"]
    assert {row: body["max_tokens"] for row, body in bodies.items()} == dict.fromkeys(SERVERS, 5)
    assert bodies["rabbitllm-serve"]["prompt"] == " ".join(f"w{i}" for i in ids)
    assert bodies["transformers-serve-disk-batching"]["model"] == str(tmp_path / "checkpoint")
    assert prepared("transformers-serve-disk-batching", made) == tmp_path / "checkpoint"
    assert prepared("rabbitllm-serve-4bit", made) == tmp_path / "run" / "layers-4bit" / "splitted_model.4bit"


USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
EVENTS = [
    {"choices": [{"text": "w1"}]},
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": " w2"}}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}},
    },
]


@pytest.fixture
def scripted() -> Iterator[str]:
    """A server that streams these events to requests for `good`, breaks off after one for `broken`, and refuses all
    others; its URL. One that asks for `never` waits for ever."""
    ready = threading.Event()
    found: dict[str, Any] = {}

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        wanted = json.loads(await reader.readexactly(length))["prompt"]
        if wanted == "refused":
            writer.write(b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nbusy")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            lines = [f"data: {json.dumps(event)}\n\n" for event in EVENTS] + [": a comment\n\n", "data: [DONE]\n\n"]
            for line in lines if wanted == "good" else lines[:1]:
                writer.write(f"{len(line):x}\r\n{line}\r\n".encode())
                await writer.drain()
            if wanted == "never":
                await asyncio.sleep(600)
            if wanted == "good":
                writer.write(b"0\r\n\r\n")
        writer.close()

    async def serve_until_told() -> None:
        found["end"] = asyncio.Event()
        found["loop"] = asyncio.get_running_loop()
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        found["port"] = server.sockets[0].getsockname()[1]
        ready.set()
        await found["end"].wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve_until_told()))
    thread.start()
    ready.wait()
    yield f"http://127.0.0.1:{found['port']}/v1/completions"
    found["loop"].call_soon_threadsafe(found["end"].set)
    thread.join()


def test_clients_note_what_comes(scripted: str) -> None:
    level = asked(scripted, [{"prompt": "good"}, {"prompt": "broken"}, {"prompt": "refused"}], 2, 30)
    good, broken, refused = sorted(level.answers, key=lambda one: ["w1 w2", "w1", ""].index(one.text))
    assert (good.is_whole, good.new_tokens) == (True, 2)
    assert len(good.pieces) == 2
    assert good.sent < good.pieces[0] <= good.pieces[1] <= level.seconds
    assert not broken.is_whole
    assert broken.error is not None
    assert "RemoteProtocolError" in broken.error
    assert (refused.status, refused.error, refused.tokens) == (429, "busy", 0)


def test_clients_hang_up_when_the_time_is_over(scripted: str) -> None:
    level = asked(scripted, [{"prompt": "never"}, {"prompt": "good"}], 1, 3)
    assert [(one.error, one.text) for one in level.answers] == [("cut short", "w1")]
    assert 3 <= level.seconds < 300


def test_an_error_in_a_stream_is_one() -> None:
    with pytest.raises(ValueError, match="over"):
        serve_clients.take_in({"error": {"message": "over"}}, {}, 0.0)


@pytest.mark.long
@needs_groups
def test_this_project_at_tiny_scale(tmp_path: Path) -> None:
    rows = ["rabbitllm-serve", "rabbitllm-serve-4bit"]
    given = ["--scale", "tiny", "--tokens", "4", "--at-once", "1", "3", "--work-dir", str(tmp_path), "--only", *rows]
    assert serve.main([*given, "--results", str(tmp_path / "r")]) == 0
    text = (tmp_path / "r.md").read_text()
    assert all(f"| {row} | {number} | {2 * number}/{2 * number} |" in text for row in rows for number in (1, 3))
    assert (tmp_path / "r.svg").exists()
    assert not (tmp_path / "serve-run").exists()
    assert os.path.exists(tmp_path / "r.json")
