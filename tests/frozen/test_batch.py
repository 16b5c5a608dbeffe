"""`rabbitllm.batch` and the command: each line has the answer that transformers gives it alone, and a run goes on."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rabbitllm
from tests.frozen.support.command_line import rabbitllm as call
from tests.frozen.support.commands import PATIENCE, begin
from tests.frozen.support.families import build
from tests.frozen.support.talking import Reference, talker
from tests.support.one_thread import one_thread as one_thread

CLOSE = 1e-4
"""How far float32 likelihoods may be from those of texts that are computed alone."""
CPU = ("--device", "cpu")
WORDS = ["the", "rabbit", "and", "the", "hare", "in", "the", "rain", "or", "another", "one"]
PROMPTS = [" ".join((WORDS * 3)[number : number + 2 + 3 * (number % 5)]) for number in range(9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talker(tmp_path_factory.mktemp("batch") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def answers(model: Any, lines: Sequence[Mapping[str, Any]], **options: Any) -> list[dict[str, Any]]:
    settings = {} if not isinstance(model, Path) else {"device": "cpu", "max_memory": {"cpu": 0}}
    return [dict(one) for one in rabbitllm.batch(model, lines, **settings, **options)]


def test_text(folder: Path, reference: Reference) -> None:
    """Of prompts, conversations and token ids, in the order of the input."""
    talk = [{"role": "user", "content": "the rain"}]
    lines: list[dict[str, Any]] = [
        *({"prompt": prompt, "max_tokens": 3 + 2 * number} for number, prompt in enumerate(PROMPTS)),
        {"id": "talk", "messages": talk, "max_tokens": 8},
        {"id": "ids", "tokens": [1, 40, 81], "max_tokens": 8},
    ]
    wanted = [
        *((reference.ids(prompt), 3 + 2 * number) for number, prompt in enumerate(PROMPTS)),
        (reference.chat_ids(talk), 8),
        ([1, 40, 81], 8),
    ]
    found = answers(folder, lines, sequences=4)
    for line, (ids, new) in zip(found, wanted, strict=True):
        tokens = reference.tokens(ids, new)
        assert (line["text"], line["new_tokens"]) == (reference.text(tokens), len(tokens))
        assert line["prompt_tokens"] == len(ids)
        assert line["finish"] == ("stop" if tokens[-1] == 2 else "length")
    assert [line["id"] for line in found][-2:] == ["talk", "ids"]


def test_drawn_text(folder: Path, reference: Reference) -> None:
    """A line's seed is that of `torch.manual_seed`; several answers have seeds one after the other."""
    lines = [
        {"prompt": PROMPTS[0], "temperature": 1.1, "seed": 5, "max_tokens": 12},
        {"prompt": PROMPTS[1], "temperature": 0.8, "top_p": 0.9, "seed": 6, "max_tokens": 12},
        {"prompt": PROMPTS[2], "temperature": 1.0, "seed": 40, "n": 3, "max_tokens": 12},
    ]
    first, second, third = answers(folder, lines)
    how = [({"temperature": 1.1}, 5), ({"temperature": 0.8, "top_p": 0.9}, 6)]
    for line, prompt, (drawn, seed) in zip((first, second), PROMPTS, how, strict=False):
        tokens = reference.tokens(reference.ids(prompt), 12, seed=seed, **drawn)
        assert line["text"] == reference.text(tokens)
    for number, one in enumerate(third["answers"]):
        tokens = reference.tokens(reference.ids(PROMPTS[2]), 12, seed=40 + number, temperature=1.0)
        assert one["text"] == reference.text(tokens)


def test_a_seed_for_all_is_each_lines_own(folder: Path, reference: Reference) -> None:
    found = answers(folder, [{"prompt": prompt} for prompt in PROMPTS[:4]], temperature=1.0, seed=9, max_new_tokens=8)
    for number, line in enumerate(found):
        tokens = reference.tokens(reference.ids(PROMPTS[number]), 8, seed=9 + number, temperature=1.0)
        assert line["text"] == reference.text(tokens)


def test_stops(folder: Path, reference: Reference) -> None:
    """The text ends before the first stop."""
    whole = reference.text(reference.tokens(reference.ids(PROMPTS[0]), 16))
    stop = whole[5:7]
    (line,) = answers(folder, [{"prompt": PROMPTS[0], "max_tokens": 16, "stop": [stop]}])
    assert (line["text"], line["finish"]) == (whole[: whole.index(stop)], "stop")


def likelihood(reference: Reference, context: str, behind: str) -> tuple[float, bool, int]:
    """Sum of the logarithms, whether each token is the likeliest, and how many there are."""
    before = reference.ids(context)
    whole = reference.ids(context + behind)
    with torch.inference_mode():
        said = torch.log_softmax(reference.model(torch.tensor([whole])).logits[0].double(), -1)[len(before) - 1 : -1]
    target = torch.tensor(whole[len(before) :])
    chosen = said.gather(1, target[:, None])
    return float(chosen.sum()), bool((said.argmax(-1) == target).all()), len(target)


def test_likelihoods_and_choices(folder: Path, reference: Reference) -> None:
    choices = [" and", " or another", " in the rain"]
    score, several, choice = answers(
        folder,
        [
            {"context": "the rabbit", "continuation": choices[0]},
            {"context": "the rabbit", "continuation": choices},
            {"context": "the rabbit", "choices": choices},
        ],
    )
    said = [likelihood(reference, "the rabbit", one) for one in choices]
    assert (score["greedy"], score["tokens"]) == said[0][1:]
    assert math.isclose(score["logprob"], said[0][0], abs_tol=CLOSE)
    assert [one["logprob"] for one in several["scores"]] == pytest.approx([one[0] for one in said], abs=CLOSE)
    assert choice["logprobs"] == pytest.approx([one[0] for one in said], abs=CLOSE)
    best = max(range(3), key=lambda number: said[number][0])
    assert choice["choice"] == best
    longest = max(range(3), key=lambda number: said[number][0] / len(choices[number]))
    assert choice["choice_by_length"] == longest


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings(folder: Path, reference: Reference, pooling: str) -> None:
    found = answers(folder, [{"input": PROMPTS[3]}, {"input": PROMPTS[:2]}], pooling=pooling, normalise=True)
    vectors = [found[0]["embedding"], *found[1]["embeddings"]]
    for text, vector in zip((PROMPTS[3], *PROMPTS[:2]), vectors, strict=True):
        with torch.inference_mode():
            hidden = reference.model.model(torch.tensor([reference.ids(text)])).last_hidden_state[0].double()
        pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
        expected = pooled / pooled.norm()
        assert torch.allclose(torch.tensor(vector, dtype=torch.float64), expected, atol=1e-5)


def test_lines_of_openai_and_lines_in_error(folder: Path, reference: Reference) -> None:
    body = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 6, "temperature": 0}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body},
        {"id": "bad", "prompt": PROMPTS[0], "temperature": -1},
        {"id": "long", "prompt": "the " * 5000},
    ]
    good, bad, long = answers(folder, lines)
    expected = reference.text(reference.tokens(reference.ids(PROMPTS[0]), 6))
    assert (good["custom_id"], good["error"], good["response"]["status_code"]) == ("a", None, 200)
    assert good["response"]["body"]["choices"][0]["text"] == expected
    assert (bad["id"], set(bad["error"])) == ("bad", {"code", "message"})
    assert (long["id"], long["error"]["code"]) == ("long", "context_length_exceeded")


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3", "qwen3_next", "falcon_h1"])
def test_exact_answers_in_bfloat16_are_those_of_lines_alone(tmp_path: Path, family: str) -> None:
    folder = build(tmp_path / "model", family)
    reference = Reference(folder)
    found = answers(folder, [{"prompt": one, "max_tokens": 10} for one in PROMPTS], exact=True)
    expected = [reference.text(reference.tokens(reference.ids(one), 10)) for one in PROMPTS]
    assert [one["text"] for one in found] == expected


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of every kind, of which some are drawn."""
    file = tmp_path_factory.mktemp("lines") / "in.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": f"q{number}", "prompt": PROMPTS[number % 9], "max_tokens": 30 + 7 * number % 30} for number in range(30)
    ]
    for line in lines[::3]:
        line |= {"temperature": 1.0, "seed": 5}
    lines.insert(4, {"id": "score", "context": "the rabbit", "continuation": " and"})
    lines.insert(9, {"id": "bad", "prompt": 5})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "times"), [(signal.SIGKILL, (2, 9)), (signal.SIGINT, (3,))], ids=["killed", "interrupted"]
)
def test_the_same_command_goes_on(
    folder: Path, source: Path, tmp_path: Path, how: signal.Signals, times: tuple[int, ...]
) -> None:
    """Stopped when so many lines of the journal are there, it writes the same file in the end."""

    def run(out: Path) -> tuple[object, ...]:
        return ("batch", folder, source, "-o", out, *CPU, "--max-memory", "cpu=0", "--sequences", 3)

    whole = tmp_path / "whole.jsonl"
    record = call(*run(whole), "--json").json
    assert (record["lines"], record["errors"], record["resumed"]) == (32, 1, 0)
    out = tmp_path / "out.jsonl"
    for answered in times:
        process = begin(*run(out))
        journal = out.with_name("out.jsonl.journal")
        limit = time.monotonic() + PATIENCE
        while not (journal.exists() and journal.read_bytes().count(b"\n") > answered):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < limit
            time.sleep(0.01)
        process.send_signal(how)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
        assert not out.exists()
    record = call(*run(out), "--json").json
    assert 0 < record["resumed"] < 32
    assert out.read_bytes() == whole.read_bytes()
    assert not journal.exists()
    again = call(*run(out), "--json").json
    assert (again["lines"], out.read_bytes()) == (32, whole.read_bytes())
