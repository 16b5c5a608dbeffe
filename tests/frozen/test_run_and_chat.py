"""`rabbitllm run` and `rabbitllm chat`: the tokens of transformers' own `generate`, greedy and from the same seed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frozen.support.command_line import rabbitllm as call
from tests.frozen.support.commands import PATIENCE, at_a_terminal
from tests.frozen.support.talking import Reference, talker
from tests.support.one_thread import one_thread as one_thread

PROMPT = "the rabbit and the hare"
MESSAGES = ("the rain in", "and the other one?", "a hare")
CPU = ("--device", "cpu")
ANSWER = 700
"""Tokens of an answer that is to be interrupted before its end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talker(tmp_path_factory.mktemp("talk") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def run(folder: Path, *arguments: object, stdin: str = "") -> dict[str, Any]:
    found: dict[str, Any] = call("run", folder, *arguments, *CPU, "--json", stdin=stdin).json
    return found


SEEDED = {
    "temperature": ("--temperature", "0.9", "--seed", "7"),
    "top_p": ("--top-p", "0.8", "--seed", "11"),
    "both": ("--temperature", "1.3", "--top-p", "0.95", "--seed", "3"),
}


def keywords(options: tuple[str, ...]) -> dict[str, Any]:
    """Options of the command as `generate` takes them."""
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    seed = int(pairs.pop("--seed"))
    return {"seed": seed, **{name.strip("-").replace("-", "_"): float(value) for name, value in pairs.items()}}


@pytest.mark.parametrize("memory", [(), ("--max-memory", "cpu=0")], ids=["resident", "streamed"])
def test_run_greedy(folder: Path, reference: Reference, memory: tuple[str, ...]) -> None:
    ids = reference.ids(PROMPT)
    tokens = reference.tokens(ids, 12)
    found = run(folder, PROMPT, "--raw", "--max-new-tokens", 12, *memory)
    assert (found["tokens"], found["prompt_tokens"], found["new_tokens"]) == (tokens, len(ids), len(tokens))
    assert (found["text"], found["finish"]) == (reference.text(tokens), "length")
    said = call("run", folder, PROMPT, "--raw", "--max-new-tokens", 12, *memory, *CPU)
    assert said.code == 0
    assert said.out.rstrip("\n") == reference.text(tokens).rstrip("\n")


@pytest.mark.parametrize("options", SEEDED.values(), ids=SEEDED)
def test_run_draws_as_generate_does(folder: Path, reference: Reference, options: tuple[str, ...]) -> None:
    expected = reference.tokens(reference.ids(PROMPT), 20, **keywords(options))
    assert run(folder, PROMPT, "--raw", "--max-new-tokens", 20, *options)["tokens"] == expected


def test_run_through_the_template_and_from_a_pipe(folder: Path, reference: Reference) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    expected = reference.tokens(reference.chat_ids(talk), 6)
    assert run(folder, PROMPT, "--system", "Be brief.", "--max-new-tokens", 6)["tokens"] == expected
    piped = f"the rain\n\n{PROMPT}"
    expected = reference.tokens(reference.ids(piped), 6)
    assert run(folder, PROMPT, "--raw", "--max-new-tokens", 6, stdin="the rain\n")["tokens"] == expected


def test_run_ends_where_the_model_ends_it(folder: Path, reference: Reference, tmp_path: Path) -> None:
    """At a token that the generation config names as an end: the first that is new in the fourth place or later."""
    tokens = reference.tokens(reference.ids(PROMPT), 12)
    place = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    ending = talker(tmp_path / "ending")
    settings = ending / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": [2, tokens[place]]}))
    found = run(ending, PROMPT, "--raw", "--max-new-tokens", 12)
    assert (found["finish"], found["tokens"]) == ("end", tokens[: place + 1])


def conversation(reference: Reference, messages: tuple[str, ...], new: int, **how: Any) -> list[dict[str, str]]:
    """What transformers answers, each time from the whole conversation."""
    talk: list[dict[str, str]] = []
    if (seed := how.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    for message in messages:
        talk.append({"role": "user", "content": message})
        tokens = reference.tokens(reference.chat_ids(talk), new, **how)
        talk.append({"role": "assistant", "content": reference.text(tokens)})
    return talk


def talked(folder: Path, file: Path, lines: str, *options: object) -> list[dict[str, Any]]:
    """The messages that a chat over a pipe leaves in a file."""
    done = call("chat", folder, *CPU, *options, stdin=f"{lines}\n/save {file}\n")
    assert done.code == 0, done.err
    saved = json.loads(file.read_text())
    assert (saved["format"], saved["version"]) == ("rabbitllm chat", 1)
    messages: list[dict[str, Any]] = saved["messages"]
    return messages


@pytest.mark.parametrize(
    "options", [(), SEEDED["both"], pytest.param(SEEDED["temperature"], marks=pytest.mark.long)], ids=str
)
def test_chat(folder: Path, reference: Reference, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Its cache stays between answers, and its seed is set once."""
    how = keywords(options) if options else {}
    expected = conversation(reference, MESSAGES, 10, **how)
    found = talked(folder, tmp_path / "talk.json", "\n".join(MESSAGES), "--max-new-tokens", 10, *options)
    assert found == expected


def test_a_saved_chat_goes_on(folder: Path, reference: Reference, tmp_path: Path) -> None:
    expected = conversation(reference, MESSAGES, 8)
    first = tmp_path / "first.json"
    assert talked(folder, first, "\n".join(MESSAGES[:2]), "--max-new-tokens", 8) == expected[:4]
    lines = f"/load {first}\n{MESSAGES[2]}"
    assert talked(folder, tmp_path / "whole.json", lines, "--max-new-tokens", 8) == expected


@pytest.mark.long
def test_interrupted_and_gone_on_with(tmp_path: Path) -> None:
    """Ctrl-C stops an answer; what came of it stays, and the next answer is the one to that conversation."""
    folder = talker(tmp_path / "endless")
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "suppress_tokens": [0, 1, 2]}))
    reference = Reference(folder)
    file = tmp_path / "talk.json"
    with at_a_terminal("chat", folder, *CPU, "--max-memory", "cpu=0", "--max-new-tokens", ANSWER) as terminal:
        terminal.until(r">>> ")
        for message in MESSAGES[:2]:
            terminal.send(f"{message}\r")
            terminal.until(re.escape(message) + r"\r\n(?s:.*?)[!-~]")
            if message == MESSAGES[0]:
                terminal.send("\x03")
            terminal.until(r">>> ")
        terminal.send(f"/save {file}\r")
        terminal.until(r">>> ")
        terminal.send("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    question, stopped, second, answer = json.loads(file.read_text())["messages"]
    assert stopped.pop("stopped")
    whole = reference.text(reference.tokens(reference.chat_ids([question]), ANSWER))
    assert len(whole) > len(stopped["content"]) > 0
    assert whole.startswith(stopped["content"])
    expected = reference.tokens(reference.chat_ids([question, stopped, second]), ANSWER)
    assert answer == {"role": "assistant", "content": reference.text(expected)}
