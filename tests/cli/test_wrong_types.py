"""No value of a wrong type in a config or a tokenizer's file ends a command in anything but an error of ours.

Copies of the demo's model with one value changed, with and without a split, and the commands in this process.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

import rabbitllm
from rabbitllm.errors import RabbitLLMError
from rabbitllm.server._models import Models
from rabbitllm.server.settings import address_of
from tests.server.serving import in_a_thread
from tests.support.commands import invoke
from tests.support.damaged_checkpoints import ODD, places
from tests.support.quick_measuring import quick_measuring  # noqa: F401  a fixture that applies by itself
from tests.support.tiny_models import one_thread  # noqa: F401  a fixture that applies by itself

FILES = ("config.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
TEXTS = (
    *("[" * 100_000, '{"a":' * 5_000, "1" * 5_000, "", "\0", "null", "{}", '{"a": 1, "a": 2}'),
    *('{"hidden_size": ' + "1" * 5_000 + "}", '{"model_type": 1e999}'),
)
MORE = (10**30, -(2**63), float("nan"), 1e308, "\ud800", "a\0b\x1b[31m", "x" * 5_000, [None], [[1]], [[[[[[1]]]]]])
LOOKS = ("plan", "inspect", "show", "ls", "verify", "pull", "convert", "rm")
CHAT = [{"role": "user", "content": "12+3="}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "model", "max_tokens": 2, "messages": CHAT},
    "/v1/completions": {"model": "model", "max_tokens": 2, "prompt": "12+3="},
    "/v1/embeddings": {"model": "model", "input": "12+3="},
}
GENERATION: dict[str, tuple[Any, ...]] = {
    "eos_token_id": ("x", 2.5, 10**30, ["x"], {"x": 1}),
    "bos_token_id": ("x",),
    "suppress_tokens": ("x", [2.5]),
    "repetition_penalty": ("x", -1, 10**30, []),
    "no_repeat_ngram_size": ("x",),
    "top_k": ([], 2.5),
    "max_length": ("x", 10**30),
    "stop_strings": (1, [None]),
    "bad_words_ids": ("x", [], [[]], [["x"]], [[5000]], [[1, 5000]]),
    "exponential_decay_length_penalty": ("x", [1], ["x", 1.5]),
    "sequence_bias": ("x", [], {"5": 1.0}, [[[1], 1]], [[[], 1.0]], [[[5000], 1.0]], [[[1, 5000], 1.0]]),
    "forced_bos_token_id": (5000,),
    "forced_eos_token_id": (5000, [1, 5000], -9000),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, with its split in the same folder."""
    demo = Path(rabbitllm.__file__).parent / "demo" / "model"
    folder = shutil.copytree(demo, tmp_path_factory.mktemp("sound") / "model")
    outcome("pull", str(folder))
    return folder


@pytest.fixture(autouse=True)
def served_until_all_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers one request of each kind, where else it would wait for a signal."""
    monkeypatch.setattr("rabbitllm.server.server.serve", answered)


def answered(models: Models, listening: socket.socket, grace: float | None, started: Callable[[], None]) -> None:
    """In the place of `serve`: no request may find a failure that is not named."""
    with in_a_thread(models, listening, grace):
        started()
        for path, body in REQUESTS.items():
            answer = httpx.post(address_of(listening) + path, json=body, timeout=600, trust_env=False)
            assert answer.status_code < 500, (path, answer.text)


def outcome(*arguments: str, typed: str | None = None) -> str:
    """What became of a command: an exit code that the page of the command line names, or an error of ours."""
    try:
        result = invoke(*arguments, code=None, typed=typed)
    except RabbitLLMError as error:
        refusal = error
    else:
        assert result.exit_code in (0, 1), result.output
        return f"exit {result.exit_code}"
    assert refusal.problem
    return "refused"


def change(path: Path, random: Random) -> str:
    """Put a value of another type somewhere, or another text in the place of all of it; returns what was done."""
    if random.random() < 0.15:
        text = random.choice(TEXTS)
        path.write_text(text)
        return f"{path.name} = {text[:30]!r}"
    content = json.loads(path.read_text())
    key_path = random.choice([keys for keys in places(content) if len(keys) < 5])
    inside = content
    for key in key_path[:-1]:
        inside = inside[key]
    inside[key_path[-1]] = random.choice((*ODD, *MORE))
    path.write_text(json.dumps(content))
    return f"{path.name}: {key_path} = {str(inside[key_path[-1]])[:30]!r}"


def calls(folder: Path, *, runs: bool) -> Iterator[tuple[str, ...]]:
    for name in LOOKS:
        options = {"pull": ("--dry-run",), "convert": ("-o", str(folder.parent / "converted")), "rm": ("--yes",)}
        yield name, str(folder), *options.get(name, ())
    if runs:  # what `rm` has left
        few = ("--tokens", "16", "--window", "16", "--problems", "0", "--device", "cpu")
        yield "quality", str(folder), "--compression", "8bit", *few
        yield "serve", str(folder), "--port", "0", "--device", "cpu"
        lines = folder.parent / "lines.jsonl"
        lines.write_text('{"prompt": "12+3=", "max_tokens": 2}\n')
        yield "run", str(folder), "12+3=", "--max-new-tokens", "2", "--device", "cpu"
        yield "chat", str(folder), "--max-new-tokens", "2", "--device", "cpu"
        yield "batch", str(folder), str(lines), "-o", str(folder.parent / "answers.jsonl"), "--device", "cpu"


@pytest.mark.parametrize(
    ("first", "count", "runs"),
    [
        (0, 2, False),
        (100, 1, True),
        *(pytest.param(1_000 + 50 * part, 50, True, marks=pytest.mark.long) for part in range(3)),
    ],
)
def test_every_command_survives_wrong_types(sound: Path, tmp_path: Path, first: int, count: int, *, runs: bool) -> None:
    outcomes = set()
    for seed in range(first, first + count):
        random = Random(seed)
        folder = shutil.copytree(sound, tmp_path / str(seed) / "model")
        (split,) = folder.glob("splitted_model*")
        changed_part = random.choice(("the split's", "the checkpoint's", "the checkpoint's, alone"))
        change_made = change((split if changed_part == "the split's" else folder) / random.choice(FILES), random)
        if changed_part == "the checkpoint's, alone":
            shutil.rmtree(split)
        for call in calls(folder, runs=runs):
            try:
                outcomes.add(outcome(*call, typed="hello\n/exit\n" if call[0] == "chat" else None))
            except Exception as error:
                raise AssertionError(f"{call[0]} after {changed_part} {change_made} (seed {seed})") from error
        shutil.rmtree(folder.parent)
    assert "exit 0" in outcomes  # or nothing was tried
    assert count < 10 or "refused" in outcomes


@contextlib.contextmanager
def changed(path: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Other values in a file while the context is open."""
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | settings))
    try:
        yield
    finally:
        path.write_text(before)


def run_with_generation_settings(sound: Path, settings: dict[str, Any]) -> str:
    (split,) = sound.glob("splitted_model*")
    with changed(split / "generation_config.json", settings):
        return outcome("run", str(split), "12+3=", "--max-new-tokens", "2", "--device", "cpu")


@pytest.mark.parametrize("name", GENERATION)
def test_invalid_generation_settings_are_refused(sound: Path, name: str) -> None:
    for value in GENERATION[name]:
        assert run_with_generation_settings(sound, {name: value}) == "refused", value


def test_a_penalty_for_an_end_beyond_the_vocabulary_is_refused(sound: Path) -> None:
    settings = {"exponential_decay_length_penalty": [0, 1.5], "eos_token_id": 5000}
    assert run_with_generation_settings(sound, settings) == "refused"


@pytest.mark.parametrize("settings", [{"num_beams": 4}, {"stop_strings": ["7"]}, {"max_length": 4096.0, "top_k": 0}])
def test_odd_generation_settings_are_accepted(sound: Path, settings: dict[str, Any]) -> None:
    assert run_with_generation_settings(sound, settings) == "exit 0"


@pytest.mark.parametrize(
    "settings",
    [{"padding_side": "x"}, {"model_max_length": []}, {"model_max_length": "x"}, {"unk_token": ""}],
    ids=lambda settings: " ".join(settings),
)
def test_unusable_tokenizer_is_refused(sound: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    (split,) = sound.glob("splitted_model*")
    lines, few = tmp_path / "lines.jsonl", ("--device", "cpu")
    lines.write_text('{"prompt": "12+3=", "max_tokens": 2}\n')
    with changed(split / "tokenizer_config.json", settings):
        assert outcome("run", str(split), "12+3=", *few) == "refused"
        assert outcome("chat", str(split), *few, typed="12+3=\n/exit\n") == "refused"
        assert outcome("batch", str(split), str(lines), "-o", str(tmp_path / "out.jsonl"), *few) == "refused"


@pytest.mark.parametrize(
    "settings",
    [
        {"padding_side": "x"},
        {"truncation_side": 3},
        {"model_max_length": []},
        {"unk_token": ""},
        {"chat_template": 5},
        {"chat_template": [{"name": "a", "template": 5}]},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_unusable_tokenizer_is_refused_before_a_split(sound: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = shutil.copytree(sound, tmp_path / "model", ignore=shutil.ignore_patterns("splitted_model*", "*.jinja"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    assert outcome("pull", str(folder)) == "refused"
    assert not [*folder.glob("splitted_model*/*.safetensors")]


def test_unprintable_characters_are_escaped(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "model", ignore=shutil.ignore_patterns("splitted_model*"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "padding_side": "\ud800"}))
    assert "\\ud800" in invoke("pull", folder, "--dry-run", code=1).output
