"""Pictures in requests: OpenAI's client gets what plain transformers answers, and bad ones get status 400."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from rabbitllm.generation.request import Limits
from tests.server.serving import NAME, Running, running
from tests.support.picture_models import build, encoded, picture, sound
from tests.support.tiny_models import one_thread, split

__all__ = ["one_thread"]

QUESTION = "What is this?"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pictures") / "gemma3", "gemma3")


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("allowed")
    (folder / "photo.png").write_bytes(encoded(picture(1)))
    return folder


@pytest.fixture(scope="module")
def served(checkpoint: Path, allowed: Path) -> Iterator[Running]:
    with running(split(checkpoint), media_folder=allowed) as server:
        yield server


def url_of(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def asked(served: Running, *urls: str, text: str = QUESTION, **options: Any) -> Any:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages: list[Any] = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return served.openai().chat.completions.create(
        model=NAME, messages=messages, max_tokens=5, temperature=0, logprobs=True, **options
    )


def tokens_of(answer: Any) -> list[str]:
    return [entry.token for entry in answer.choices[0].logprobs.content]


def expected(checkpoint: Path, *seeds: int) -> tuple[list[str], int]:
    """The tokens of plain transformers, and those of the prompt."""
    plain = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    parts = [{"type": "image", "image": picture(seed)} for seed in seeds]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    count = inputs["input_ids"].shape[1]
    tokens = plain.generate(**inputs, max_new_tokens=5, do_sample=False)[0, count:]
    return [processor.tokenizer.decode([token]) for token in tokens.tolist()], count


def test_models_tell_what_prompts_may_hold(served: Running) -> None:
    assert served.http.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
    assert "vision" in served.http.get("/api/tags").json()["models"][0]["capabilities"]


def test_answer_equals_transformers(served: Running, checkpoint: Path, one_thread: None) -> None:
    for seeds in ((0,), (1,), (0, 1)):
        answer = asked(served, *(url_of(encoded(picture(seed))) for seed in seeds))
        tokens, count = expected(checkpoint, *seeds)
        assert tokens_of(answer) == tokens
        assert answer.usage.prompt_tokens == count
    assert tokens_of(asked(served, url_of(encoded(picture(0))), n=2)) == expected(checkpoint, 0)[0]


def test_it_is_said_that_pictures_have_no_drafts(
    checkpoint: Path, one_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in the log, and counted in `/status`; requests without pictures have drafts."""
    with running(split(checkpoint), limits=Limits(draft="ngram")) as served:
        assert tokens_of(asked(served, url_of(encoded(picture(0))), n=2)) == expected(checkpoint, 0)[0]
        with served.http as client:
            assert client.get("/status").json()["undrafted"] == 2
            asked(served)
            status = client.get("/status").json()
    assert (status["undrafted"], status["drafts"]["name"]) == (2, "ngram")
    assert caplog.text.count("Requests with pictures and sounds are answered without drafts.") == 1


def test_ollamas_pictures_come_before_the_text(served: Running, one_thread: None) -> None:
    images = [base64.b64encode(encoded(picture(seed))).decode() for seed in (0, 1)]
    options = {"stream": False, "logprobs": True, "options": {"num_predict": 5, "temperature": 0}}
    expected = tokens_of(asked(served, *(url_of(encoded(picture(seed))) for seed in (0, 1))))
    for path, question in (
        ("/api/chat", {"messages": [{"role": "user", "content": QUESTION, "images": images}]}),
        ("/api/generate", {"prompt": QUESTION, "images": images}),
    ):
        answer = served.post(path, {"model": NAME, **options, **question}).json()
        assert [entry["token"] for entry in answer["logprobs"]] == expected


def test_a_file_of_the_allowed_folder(served: Running, checkpoint: Path, allowed: Path, one_thread: None) -> None:
    answer = asked(served, f"file://{allowed}/photo.png")
    assert tokens_of(answer) == expected(checkpoint, 1)[0]


GOOD = encoded(picture())
BAD = {
    "truncated": url_of(GOOD[:-60]),
    "not a picture": url_of(b"GIF89a? no"),
    "another type": url_of(GOOD, "text/plain"),
    "no base64": "data:image/png;base64,%%%",
    "web": "http://127.0.0.1:9/photo.png",
    "outside": "file:///etc/hostname",
    "missing": "file://ALLOWED/none.png",
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_picture_is_a_bad_request(name: str, served: Running, allowed: Path) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(served, BAD[name].replace("ALLOWED", str(allowed)))
    assert caught.value.code == "invalid_media"
    assert str(caught.value.param).startswith("messages")
    assert str(allowed) not in str(caught.value)
    assert "splitted_model" not in str(caught.value)


def test_other_parts_are_refused(served: Running) -> None:
    wav = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound()).decode(), "format": "wav"}}
    image = {"type": "image_url", "image_url": {"url": url_of(GOOD)}}
    for role, part, code in (
        ("user", wav, "unsupported_content"),
        ("user", {"type": "file", "file": {}}, "unsupported_content"),
        ("assistant", image, "unsupported_content"),
        ("user", {"type": "image_url"}, "invalid_media"),
        ("user", {"type": "image_url", "image_url": {"url": url_of(GOOD), "detail": "low"}}, "invalid_media"),
        ("user", {"type": "text", "text": "<start_of_image>"}, None),
    ):
        content = [image, part] if role == "user" else [part]
        response = served.post("/v1/chat/completions", {"messages": [{"role": role, "content": content}]})
        assert response.status_code == 400, response.text
        assert code is None or response.json()["error"]["code"] == code
    assert asked(served, url_of(GOOD)).choices[0].finish_reason  # it still answers


def test_pictures_of_other_interfaces_are_the_same(served: Running) -> None:
    import anthropic  # a second of each process that only collects these tests

    data = base64.b64encode(encoded(picture())).decode()
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    claude = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0)
    message = claude.messages.create(model=NAME, max_tokens=5, messages=[{"role": "user", "content": blocks}])
    url = url_of(encoded(picture()))
    parts: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": QUESTION}]
    response: Any = served.openai().responses.create(
        model=NAME, max_output_tokens=5, input=[{"role": "user", "content": parts}]
    )
    chat = asked(served, url)
    read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert read == response.usage.input_tokens == chat.usage.prompt_tokens
    assert message.content[0].text == response.output_text == chat.choices[0].message.content  # type: ignore[union-attr]
