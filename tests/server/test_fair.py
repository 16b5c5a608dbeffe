"""A burst over HTTP: who waits for whom, counted in passes; priorities, keys, and a full queue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rabbitllm.generation._scheduler import MANY_TOKENS, TOKENS_EACH, ScheduledPass, Scheduler, TokenBudget
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.request import Event, Limits, Request
from tests.generation.submitting import prompt
from tests.server.serving import NAME, PATIENCE, Running, running

COMPLETION = "/v1/completions"
CHUNK = 16


@pytest.fixture(autouse=True)
def each_token_takes_as_long_as_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the clock decides nothing."""
    monkeypatch.setattr(TokenBudget, "after", lambda self, tokens, seconds: TokenBudget(1.0, 1.0))


class Burst:
    """Requests that are sent while no pass starts, and the pass of the first token of each, by its prompt's length."""

    def __init__(self, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(served.batch, Batch)
        self.served, self.batch = served, served.batch
        self.first: dict[int, int] = {}
        self.rows: list[int] = []
        self.answers: dict[int, httpx.Response] = {}
        schedule, submit = Scheduler.schedule, self.batch.submit

        def counted(scheduler: Scheduler) -> ScheduledPass:
            scheduled = schedule(scheduler)
            self.rows.append(scheduled.num_tokens)
            return scheduled

        def watched(request: Request, notify: Callable[[Event], None]) -> Any:
            def note(event: Event) -> None:
                self.first.setdefault(len(request.prompt), len(self.rows))
                notify(event)

            return submit(request, note)

        monkeypatch.setattr(Scheduler, "schedule", counted)
        monkeypatch.setattr(self.batch, "submit", watched)

    @contextlib.contextmanager
    def sent(self, *bodies: dict[str, Any]) -> Iterator[None]:
        """Send requests in this order before the next pass, and wait for their answers at the end."""
        threads = []
        with self.batch.paused():
            for body in bodies:
                threads.append(threading.Thread(target=self._send, args=(body,), daemon=True))
                before = self.batch.stats.waiting
                threads[-1].start()
                until(lambda before=before: self.batch.stats.waiting == before + 1)
            yield
        for thread in threads:
            thread.join(PATIENCE)

    def _send(self, body: dict[str, Any]) -> None:
        key = body.pop("key", self.served.key)
        with self.served.http as client:
            headers = {"authorization": f"Bearer {key}"}
            self.answers[len(body["prompt"])] = client.post(COMPLETION, json=body, headers=headers)

    def order(self, lengths: Sequence[int]) -> list[int]:
        return sorted(lengths, key=self.first.__getitem__)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def body(tokens: int, new: int, **fields: Any) -> dict[str, Any]:
    """Its prompt's length is its name."""
    return {"prompt": list(prompt(tokens, tokens)), "max_tokens": new, "ignore_eos": True, "temperature": 0, **fields}


def test_short_chats_begin_while_a_long_prompt_is_read(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(split_folder, limits=Limits(chunk=CHUNK, draft="none")) as served:
        served.post(COMPLETION, body(4, 1))  # after which passes count as measured
        burst = Burst(served, monkeypatch)
        with burst.sent(body(200, 2), *(body(tokens, 2, stream=True) for tokens in (5, 6, 7))):
            pass
        assert all(answer.status_code == 200 for answer in burst.answers.values())
        assert max(burst.first[tokens] for tokens in (5, 6, 7)) <= 4
        assert 200 // CHUNK <= burst.first[200] <= 2 * 200 // CHUNK


def test_a_long_prompt_does_not_stop_those_that_decode(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rabbitllm.generation._scheduler.TIMES", 1)  # as the prompt is short
    with running(split_folder, limits=Limits(chunk=120, draft="none")) as served:
        served.post(COMPLETION, body(4, 1))
        burst = Burst(served, monkeypatch)
        with burst.sent(body(5, 20, stream=True), body(240, 1)):
            pass
        assert burst.rows[0] == 120
        assert burst.first[5] == 1
        beside = burst.rows[1 : burst.first[240]]
        assert len(beside) == 3
        assert max(beside) == MANY_TOKENS + TOKENS_EACH + 1
        assert burst.answers[240].json()["usage"]["completion_tokens"] == 1


def test_priorities(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(split_folder, limits=Limits(running=1)) as served:
        burst = Burst(served, monkeypatch)
        requests = [
            body(10, 1, priority=5),
            body(11, 1),
            body(12, 1, priority=-1),
            body(13, 1),
            body(14, 1, priority=5),
        ]
        with burst.sent(*requests):
            pass
        assert burst.order(range(10, 15)) == [12, 11, 13, 10, 14]
        for priority in ("high", "2", 1.5, True):
            refused = served.post(COMPLETION, body(10, 1, priority=priority))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert served.post(COMPLETION, body(10, 1, priority=2.0)).status_code == 200
        chat = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "priority": 2}
        assert served.post("/v1/messages", chat).status_code == 200
        assert served.post("/v1/responses", {"input": "a", "priority": 2, "max_output_tokens": 1}).status_code == 200


def test_keys_have_turns_and_limits(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(running=4, running_of_key=1, waiting_of_key=2)
    with running(split_folder, limits=limits, api_key="first, second") as served:
        served.key = "first"
        burst = Burst(served, monkeypatch)
        with burst.sent(*(body(tokens, 4) for tokens in (10, 11, 12)), body(20, 4, key="second")):
            full = served.post(COMPLETION, body(13, 1))
            anthropic = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
            with served.http as client:
                other = client.post("/v1/messages", json=anthropic)
            with pytest.raises(openai.RateLimitError):
                served.openai().completions.create(model=NAME, prompt="a")
        error = full.json()["error"]
        assert full.status_code == other.status_code == 429
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert error["message"].startswith("The request queue of this API key is full (3 waiting). Try again in ")
        assert min(int(answer.headers["retry-after"]) for answer in (full, other)) >= 1
        assert other.json()["type"] == "error"
        assert other.json()["error"]["type"] == "rate_limit_error"
        assert burst.first[10] == burst.first[20] < burst.first[11] < burst.first[12]
        served.key = "third"
        assert served.post(COMPLETION, body(4, 1)).status_code == 401
