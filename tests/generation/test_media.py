"""Requests with pictures in shared passes: each gets the tokens that it gets alone, and no picture is mixed up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.errors import BusyError, MediaError
from rabbitllm.generation import _scheduler
from rabbitllm.generation.batch import Batch, Limits
from rabbitllm.generation.media import MAX_FILES, MediaFile, media_of_url
from rabbitllm.generation.request import Prompt, Request
from rabbitllm.generation.template import ChatTemplate
from tests.generation.submitting import Submitted, answered, answered_together, begin
from tests.support.picture_models import FAMILIES, build, cases, encoded, picture, sound
from tests.support.tiny_models import load, one_thread, split

__all__ = ["one_thread"]

NEW = 6
DRAWN = ("qwen2_5_vl", "gemma3")


def prompt(model: Any, kind: str, *seeds: int, text: str = "What is this?") -> Prompt:
    """One with so many pictures or sounds before its text."""
    data = [sound(seed) if kind == "audio" else encoded(picture(seed)) for seed in seeds]
    parts = [{"type": kind, "file": MediaFile(kind, content, "a file")} for content in data]  # type: ignore[arg-type]

    return ChatTemplate(model).prompt([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])


def request(media_prompt: Prompt, tokens: int = NEW) -> Request:
    return Request(media_prompt.ids, tokens, media=media_prompt.media)


def by_itself(model: Any, task: Request) -> list[int]:
    """What `generate` makes of the same tensors."""
    ids = torch.tensor([task.prompt])
    more: dict[str, Any] = task.media.arguments(len(task.prompt), ids.device) if task.media is not None else {}
    more |= {"max_new_tokens": task.max_new_tokens, "eos_token_id": model.tokenizer.eos_token_id, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **more)
    tokens: list[int] = output[0, len(task.prompt) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    by_name: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in by_name:
            by_name[name] = split(build(tmp_path_factory.mktemp("media") / name, name))
        return by_name[name]

    return of


@pytest.mark.bits
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", cases(short=DRAWN))
def test_each_request_gets_its_tokens_alone(
    name: str, exact: bool, folders: Callable[[str], Path], one_thread: None
) -> None:
    """Pictures of the same size have the same ids, so only the tensors differ."""
    kind = FAMILIES[name].kind
    model = load(folders(name), 0, exact=exact)
    requests = [request(prompt(model, kind, seed)) for seed in (0, 1, 0)]
    assert requests[0].prompt == requests[1].prompt == requests[2].prompt
    text = tuple(range(5, 40))
    requests += [Request(text, NEW), request(prompt(model, kind, 2, 3, text="And these two?")), Request(text[:20], NEW)]
    expected = [by_itself(model, task) for task in requests]
    assert expected[0] == expected[2] != expected[1]
    with Batch(model, Limits(exact=exact)) as batch:
        assert [answer.tokens for answer in answered_together(batch, requests)] == expected
        again = [begin_and_wait(batch, task) for task in (requests[1], requests[0])]  # now with caches of the others
        assert [answer.tokens for answer in again] == [expected[1], expected[0]]
        assert [answer.finished.kept_tokens for answer in again] == [0, 0]
        later = [begin(batch, requests[0])]
        while not later[0].chosen:
            later[0].over.wait(0.01)
        later += [begin(batch, task) for task in requests[1:5]]  # while another one decodes
        assert [answer.wait().tokens for answer in later] == expected[:5]
    assert by_itself(model, requests[1]) == expected[1]


def begin_and_wait(batch: Batch, task: Request) -> Submitted:
    return answered(batch, [task])[0]


def test_a_text_of_the_same_ids_has_its_own_cache(folders: Callable[[str], Path], one_thread: None) -> None:
    model = load(folders("qwen2_5_vl"), 0)
    pictured = request(prompt(model, "image", 0))
    text = dataclasses.replace(pictured, media=None)
    expected = [by_itself(model, pictured), by_itself(model, text)]
    assert expected[0] != expected[1]
    with Batch(model) as batch:
        answers = [begin_and_wait(batch, task) for task in (text, pictured, text)]
    assert [answer.tokens for answer in answers] == [expected[1], expected[0], expected[1]]
    assert [answer.finished.kept_tokens for answer in answers] == [0, 0, len(text.prompt) - 1]


@pytest.mark.long
def test_a_preempted_request_restarts_with_its_pictures(folders: Callable[[str], Path], one_thread: None) -> None:
    model = load(folders("qwen2_5_vl"), 0)
    requests = [request(prompt(model, "image", seed), 90) for seed in (0, 2)]
    expected = [by_itself(model, task) for task in requests]
    with Batch(model, Limits(cache_bytes=160_000)) as batch:
        answers = answered_together(batch, requests)
        assert [answer.tokens for answer in answers] == expected
        assert batch.stats.preempted > 0


def test_waiting_pictures_have_a_limit(
    folders: Callable[[str], Path], one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folders("qwen2_5_vl"), 0)
    pictured = request(prompt(model, "image", 0))
    assert pictured.media is not None
    monkeypatch.setattr(_scheduler, "MEDIA_BYTES", pictured.media.nbytes + 10)
    with Batch(model) as batch:
        with batch.paused():
            first = begin(batch, pictured)
            same = begin(batch, pictured)  # another answer to the same prompt
            with pytest.raises(BusyError, match="pictures"):
                begin(batch, request(prompt(model, "image", 1)))
        assert first.wait().tokens == same.wait().tokens
        assert len(begin(batch, request(prompt(model, "image", 1))).wait().finished.tokens) == NEW


def test_invalid_prompts_are_refused(folders: Callable[[str], Path]) -> None:
    model = load(folders("gemma3"))
    with pytest.raises(MediaError, match="marks pictures"):
        prompt(model, "image", 0, text="a <start_of_image> b")
    with pytest.raises(MediaError, match="takes no sounds"):
        prompt(model, "audio", 0)
    with pytest.raises(MediaError, match=f"at most {MAX_FILES}"):
        prompt(model, "image", *[0] * (MAX_FILES + 1))


PNG = "data:image/png;base64,"
URLS = {
    "http": ("http://127.0.0.1:1/a.png", "is a web URL"),
    "https": ("https://example.org/a.png", "is a web URL"),
    "a path": ("/etc/hostname", "is not a data: URL"),
    "no folder": ("file:///etc/hostname", "no folder is allowed"),
    "not base64": (f"{PNG}@@@@", "not valid base64"),
    "text": ("data:image/svg+xml,<svg/>", "without base64"),
    "no body": ("data:image/png;base64", "without base64"),
    "another type": ("data:text/html;base64,AAAA", "has the type text/html"),
    "too long": (PNG + "A" * ((64 << 20) * 4 // 3 + 100), "at most"),
}


@pytest.mark.parametrize("name", URLS)
def test_refused_urls(name: str) -> None:
    url, why = URLS[name]
    with pytest.raises(MediaError, match=why):
        media_of_url("image", url, None, "a part")


def test_only_files_of_the_folder_are_read(tmp_path: Path) -> None:
    inside = tmp_path / "allowed"
    inside.mkdir()
    (inside / "a b.png").write_bytes(b"1")
    (tmp_path / "secret.png").write_bytes(b"2")
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    assert media_of_url("image", f"file://{inside}/a%20b.png", inside, "a part").data == b"1"
    for path in ("../secret.png", "%2e%2e/secret.png", "link.png", "a\0b"):
        with pytest.raises(MediaError):
            media_of_url("image", f"file://{inside}/{path}", inside, "a part")
    with pytest.raises(MediaError, match="outside"):
        media_of_url("image", f"file://host{inside}/a%20b.png", inside, "a part")
    with pytest.raises(MediaError, match="a part cannot be used: it is not a regular file") as caught:
        media_of_url("image", f"file://{inside}", inside, "a part")
    assert str(tmp_path) not in str(caught.value)
