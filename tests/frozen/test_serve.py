"""`rabbitllm serve` over HTTP: each answer is the one that a request gets alone, whatever runs at the same time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.frozen.support.commands import PATIENCE, Server
from tests.frozen.support.families import build
from tests.frozen.support.talking import Reference, talker
from tests.support.one_thread import one_thread as one_thread

pytestmark = pytest.mark.long
CLOSE = 1e-3
"""How far float32 likelihoods of texts that share a pass may be from those of texts alone."""
WORDS = ["the", "rabbit", "and", "the", "hare", "in", "the", "rain", "or", "another", "one"]
PROMPTS = [" ".join((WORDS * 4)[number : number + 3 + 4 * (number % 6)]) for number in range(10)]
CPU = ("--device", "cpu")


class Client:
    """Asks one server."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
            answer = client.post(self.server.url + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: Any, new: int, **how: Any) -> dict[str, Any]:
        """The first choice of a completion; greedy unless a temperature is given."""
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0, **how}
        found: dict[str, Any] = self.post("/v1/completions", body)["choices"][0]
        return found

    def at_once(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The first choices of completions that are asked for at the same time."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            found = pool.map(lambda body: self.post("/v1/completions", body)["choices"][0], bodies)
            return list(found)

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream."""
        with (
            httpx.Client(timeout=PATIENCE, trust_env=False) as client,
            client.stream("POST", self.server.url + path, json={**body, "stream": True}) as answer,
        ):
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def until(self, metric: str, least: float) -> dict[str, float]:
        """Wait until a number of `/metrics` is at least this; all of them then."""
        limit = time.monotonic() + PATIENCE
        while (found := self.server.metrics())[metric] < least:
            assert time.monotonic() < limit, found
            time.sleep(0.02)
        return found

    def idle(self) -> dict[str, float]:
        """Wait until no request has a place; the metrics then."""
        limit = time.monotonic() + PATIENCE
        while (found := self.server.metrics())["rabbitllm_running"] + found["rabbitllm_waiting"]:
            assert time.monotonic() < limit, found
            time.sleep(0.02)
        return found


def serving(folder: Path, *options: str) -> Iterator[Client]:
    server = Server(folder, folder.parent / "log", *CPU, "--max-memory", "cpu=0", *options)
    try:
        server.wait()
        yield Client(server)
        assert server.end() == 0
        assert "Traceback" not in server.log.read_text()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talker(tmp_path_factory.mktemp("serve") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    yield from serving(folder, "--chunk", "16")


def bodies() -> list[dict[str, Any]]:
    """Requests of all lengths, some of them drawn."""
    found: list[dict[str, Any]] = []
    for number, prompt in enumerate(PROMPTS):
        how = {"temperature": 1.0, "seed": number} if number % 3 == 1 else {"temperature": 0}
        found.append({"prompt": prompt, "max_tokens": 8 + 5 * number, **how})
    return found


def expected(reference: Reference, body: Mapping[str, Any]) -> str:
    """The text that transformers gives one request."""
    how = {"seed": body["seed"], "temperature": body["temperature"]} if body["temperature"] else {}
    return reference.text(reference.tokens(reference.ids(body["prompt"]), body["max_tokens"], **how))


def test_many_at_once_have_the_answers_of_each_alone(client: Client, reference: Reference) -> None:
    found = client.at_once(bodies())
    assert [one["text"] for one in found] == [expected(reference, body) for body in bodies()]


def test_a_chat(client: Client, reference: Reference) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the rain"}]
    tokens = reference.tokens(reference.chat_ids(talk), 10)
    body = {"messages": talk, "max_tokens": 10, "temperature": 0}
    found = client.post("/v1/chat/completions", body)
    message = found["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", reference.text(tokens))
    assert found["usage"]["completion_tokens"] == len(tokens)
    assert found["usage"]["prompt_tokens"] == len(reference.chat_ids(talk))
    chunks = client.stream("/v1/chat/completions", body)
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert said == reference.text(tokens)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.1, "top_p": 0.9, "seed": 3}], ids=["greedy", "drawn"])
def test_a_stream_is_the_whole_answer(client: Client, how: Mapping[str, Any]) -> None:
    whole = client.complete(PROMPTS[1], 40, **how)
    chunks = client.stream("/v1/completions", {"prompt": PROMPTS[1], "max_tokens": 40, "temperature": 0, **how})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == whole["text"]
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
    assert [end for end in ends if end] == [whole["finish_reason"]]


def test_seeds(client: Client, reference: Reference) -> None:
    """Choice i of a request draws with seed + i; the same request has the same answer."""
    body = {"prompt": PROMPTS[2], "max_tokens": 12, "temperature": 0.9, "seed": 20, "n": 3}
    choices = client.post("/v1/completions", body)["choices"]
    for number, choice in enumerate(sorted(choices, key=lambda one: int(one["index"]))):
        one = {**body, "seed": 20 + number}
        assert choice["text"] == expected(reference, one)
    assert [one["text"] for one in client.post("/v1/completions", body)["choices"]] == [one["text"] for one in choices]


def test_stops(client: Client, reference: Reference) -> None:
    whole = expected(reference, {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0})
    stop = whole[6:8]
    found = client.complete(PROMPTS[0], 24, stop=[stop, "never said"])
    assert (found["text"], found["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_log_probabilities(client: Client, reference: Reference) -> None:
    talk = [{"role": "user", "content": "the hare"}]
    ids = reference.chat_ids(talk)
    tokens = reference.tokens(ids, 8)
    body = {"messages": talk, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 4}
    found = client.post("/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    with torch.inference_mode():
        logits = reference.model(torch.tensor([ids + tokens])).logits[0].double()
    said = torch.log_softmax(logits, -1)[len(ids) - 1 : -1]
    assert len(found) == len(tokens)
    for place, token, one in zip(said, tokens, found, strict=True):
        assert one["logprob"] == pytest.approx(float(place[token]), abs=CLOSE)
        best = place.topk(4).values.tolist()
        assert [other["logprob"] for other in one["top_logprobs"]] == pytest.approx(best, abs=CLOSE)
        assert bytes(one["top_logprobs"][0]["bytes"]) == bytes(one["bytes"])


def test_one_that_leaves_while_its_prompt_is_computed(client: Client, reference: Reference) -> None:
    """It gives its place back, and the others' answers are what they were."""
    before = client.idle()
    long = {"prompt": "the hare in the rain " * 150, "max_tokens": 400, "temperature": 0}
    others: list[Any] = []
    asked = bodies()[:4]
    thread = threading.Thread(target=lambda: others.extend(client.at_once(asked)))
    with (
        httpx.Client(timeout=PATIENCE, trust_env=False) as leaving,
        leaving.stream("POST", f"{client.server.url}/v1/completions", json={**long, "stream": True}),
    ):
        client.until("rabbitllm_running", 1)
        thread.start()
        time.sleep(0.05)
    thread.join()
    assert [one["text"] for one in others] == [expected(reference, body) for body in asked]
    after = client.idle()
    assert left(after) == left(before) + 1
    assert client.complete(PROMPTS[3], 9)["text"] == expected(
        reference, {"prompt": PROMPTS[3], "max_tokens": 9, "temperature": 0}
    )


def left(metrics: Mapping[str, float]) -> float:
    """Clients that left before their answer was complete."""
    return sum(value for name, value in metrics.items() if name.startswith("rabbitllm_clients_left_total"))


def test_little_memory_for_keys_and_values(folder: Path, reference: Reference) -> None:
    """Requests make way for each other, and go on with what they had."""
    asked = [{"prompt": prompt, "max_tokens": 150 + 10 * n, "temperature": 0} for n, prompt in enumerate(PROMPTS[:6])]
    asked[2] |= {"temperature": 1.0, "seed": 5}
    for served in serving(folder, "--cache-memory", "200000", "--aside", "1GiB", "--exact"):
        found = served.at_once(asked)
        metrics = served.idle()
    assert [one["text"] for one in found] == [expected(reference, body) for body in asked]
    assert metrics["rabbitllm_preempted_total"] > 0
    assert metrics["rabbitllm_resumed_total"] > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_exact_in_bfloat16(tmp_path: Path, family: str) -> None:
    """To the bit as if each request were alone: the tokens of transformers, and the same likelihoods as alone."""
    folder = build(tmp_path / "model", family)
    reference = Reference(folder)
    asked = [{**body, "max_tokens": 12, "logprobs": 3} for body in bodies()]
    for served in serving(folder, "--exact"):
        together = served.at_once(asked)
        alone = [served.post("/v1/completions", body)["choices"][0] for body in asked]
    assert together == alone
    assert [one["text"] for one in together] == [expected(reference, body) for body in asked]
