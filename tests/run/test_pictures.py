"""`rabbitllm run --image` and `--audio`: the answers of plain transformers to the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from rabbitllm.cli.main import app
from rabbitllm.formats.media_file import read_sound
from tests.support.one_thread import one_thread as one_thread
from tests.support.picture_models import FAMILIES, RATE, build, cases, encoded, picture, plain_with_media, sound
from tests.support.tiny_models import load, split

QUESTION = "What is this?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pictures") / "gemma3", "gemma3")


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["run", *map(str, words), "--device", "cpu"])
    return result.exit_code, result.stdout, result.stderr + str(result.exception or "")


@pytest.mark.parametrize("name", cases(("gemma3", "llama4", "mistral3"), short=("gemma3",)))
def test_two_pictures_and_a_system_prompt(name: str, tmp_path: Path, one_thread: None) -> None:
    folder = build(tmp_path / name, name)
    paths = [tmp_path / "a.jpg", tmp_path / "b.png"]
    exif = transformers.image_utils.PIL.Image.Exif()
    exif[0x0112] = 6
    paths[0].write_bytes(encoded(picture(), "JPEG", exif=exif))
    paths[1].write_bytes(encoded(picture(1).convert("RGBA")))
    code, output, errors = run(
        *(folder, QUESTION, "--image", paths[0], "--image", paths[1], "--system", "Be brief."),
        *("--max-new-tokens", "6", "--json"),
    )
    assert code == 0, errors
    plain = plain_with_media(folder, name)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    parts = [{"type": "image", "path": str(path)} for path in paths]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]},
    ]
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    inputs = inputs.to(torch.float32)  # the pictures of Llama 4 come in bfloat16
    expected = plain.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    record = json.loads(output)
    assert record["tokens"] == expected.tolist()
    assert record["prompt_tokens"] == inputs["input_ids"].shape[1]


def test_raw_prompt_has_placeholders(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture()))
    options = ("--image", tmp_path / "a.png", "--raw", "--max-new-tokens", "2", "--json")
    code, output, errors = run(folder, "See <start_of_image>: it is", *options)
    assert (code, json.loads(output)["new_tokens"]) == (0, 2), errors
    code, _, errors = run(folder, "See it is", *options, "--draft", "ngram")
    assert code == 1
    assert "--draft ngram cannot be used with pictures and sounds" in errors
    code, _, errors = run(folder, "See it is", *options)
    assert code == 1
    assert "one placeholder" in errors


def test_a_sound(tmp_path: Path) -> None:
    folder = build(tmp_path / "hears", "qwen2_audio")
    (tmp_path / "a.wav").write_bytes(sound())
    code, output, errors = run(folder, QUESTION, "--audio", tmp_path / "a.wav", "--max-new-tokens", "4", "--json")
    assert code == 0, errors
    model = load(split(folder))
    part = {"type": "audio", "audio": read_sound(sound(), "a", RATE)}
    inputs = model.processor.apply_chat_template(
        [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    expected = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert json.loads(output)["tokens"] == expected.tolist()


def test_invalid_media_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(encoded(picture())[:-80])
    for path, why in ((tmp_path / "none.png", "cannot be read"), (tmp_path, "not a regular file")):
        code, _, errors = run(folder, QUESTION, "--image", path)
        assert code == 1
        assert why in errors
    code, _, errors = run(folder, QUESTION, "--image", tmp_path / "broken.png")
    assert code == 1
    assert "damaged or truncated" in errors
    code, _, errors = run(folder, QUESTION, "--audio", tmp_path / "broken.png")
    assert code == 1
    assert "takes no sounds" in errors
    (tmp_path / "fine.png").write_bytes(encoded(picture()))
    placeholder = f"Is {FAMILIES['gemma3'].place} here?"
    code, _, errors = run(folder, placeholder, "--image", tmp_path / "fine.png")
    assert code == 1
    assert "marks pictures" in errors
