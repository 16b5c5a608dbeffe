"""`rabbitllm.batch` as a program calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import rabbitllm
from rabbitllm.batch_jobs.display import Progress
from rabbitllm.errors import InputError, OptionError, ResultsError
from tests.batch_jobs.test_answers import alone
from tests.support.builders import build_checkpoint
from tests.support.splitting import contents

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "the rabbit", "max_tokens": 4},
    {"id": "b", "context": "the", "choices": [" hare", " rabbit"]},
    {"id": "c"},
    {"id": "d", "question": "the hare and", "prompt": "not this"},
]


def test_answers_keep_the_order_of_the_input(model: Any, plain: Any) -> None:
    answers = rabbitllm.batch(model, RECORDS, max_new_tokens=6, sequences=2)
    assert isinstance(answers, list)
    assert [answer["id"] for answer in answers] == ["a", "b", "c", "d"]
    ids = tuple(model.tokenizer("the rabbit")["input_ids"])
    assert answers[0]["text"] == alone(plain, model.tokenizer, ids, 4)
    assert answers[1]["choice"] in (0, 1)
    assert "none of them" in answers[2]["error"]["message"]
    assert answers[3]["new_tokens"] <= 6


def test_lines_are_greedy_whatever_the_model_recommends(
    model: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recommended = GenerationConfig(do_sample=True, temperature=9.0, pad_token_id=0)
    monkeypatch.setattr(model, "generation_config", recommended)
    body = {"prompt": "the rabbit", "max_tokens": 12}
    call = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    answers: Any = rabbitllm.batch(model, [body, call, body | {"top_k": 1}, body | {"min_p": 1}])
    ids = tuple(model.tokenizer("the rabbit")["input_ids"])
    expected = alone(plain, model.tokenizer, ids, 12)
    assert answers[1]["response"]["body"]["choices"][0]["text"] == expected
    assert [answers[n]["text"] for n in (0, 2, 3)] == [expected] * 3
    hot: Any = rabbitllm.batch(model, [body | {"top_k": 50, "repetition_penalty": 1.5, "seed": 1}])
    assert hot[0]["text"] != expected
    assert hot == rabbitllm.batch(model, [body], top_k=50, repetition_penalty=1.5, seed=1)
    for only in ({"top_k": 1}, {"min_p": 1}):
        cold: Any = rabbitllm.batch(model, [body], temperature=9, **only)
        assert cold[0]["text"] == expected


def test_existing_output_is_not_overwritten(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    report = rabbitllm.batch(model, iter(RECORDS), out, max_new_tokens=3)
    assert isinstance(report, Progress)
    assert (report.lines, report.done, report.errors, report.resumed) == (4, 4, 1, 0)
    first = [json.loads(line) for line in out.read_text().splitlines()]
    again = rabbitllm.batch(model, RECORDS, out, max_new_tokens=3)
    assert isinstance(again, Progress)
    assert (again.done, again.errors, again.resumed, again.new_tokens) == (4, 1, 4, 0)
    others: list[Any] = [{"max_new_tokens": 2}, {"max_new_tokens": 3, "exact": True}]  # in 16 bits it changes answers
    for other in others:
        with pytest.raises(ResultsError, match="already exists"):
            rabbitllm.batch(model, RECORDS, out, **other)
    with out.open("a") as file:
        file.write("changed\n")
    with pytest.raises(ResultsError, match="already exists"):
        rabbitllm.batch(model, RECORDS, out, max_new_tokens=3)
    rabbitllm.batch(model, RECORDS, str(out), max_new_tokens=3, overwrite=True)
    assert [json.loads(line) for line in out.read_text().splitlines()] == first


def test_output_that_is_a_folder_or_the_input_is_refused(tmp_path: Path) -> None:
    """Told before the answers are computed, and nothing is replaced."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "the rabbit"}\n')
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    for out, message in (("", "not a file"), (tmp_path, "not a file"), (link, "the input"), (source, "the input")):
        with pytest.raises(ResultsError, match=message):
            rabbitllm.batch("there-is-no-such-model", source, out, overwrite=True)
    assert source.read_text() == '{"prompt": "the rabbit"}\n'
    assert sorted(tmp_path.iterdir()) == [source, link]


def test_model_name_is_split_and_loaded(checkpoint: Path, tmp_path: Path, plain: Any, model: Any) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"question": "the rabbit"}\n')
    (answer,) = rabbitllm.batch(  # type: ignore[misc]
        str(checkpoint), path, columns={"prompt": "question"}, max_new_tokens=5, device="cpu", dtype="float32"
    )
    ids = tuple(model.tokenizer("the rabbit")["input_ids"])
    assert answer["text"] == alone(plain, model.tokenizer, ids, 5)
    assert answer["id"] == 1


WRONG_TYPES: list[tuple[str, Any]] = [
    *((name, value) for name in ("max_new_tokens", "sequences", "seed", "top_k") for value in ("5", 1.5, True, [5])),
    *((name, value) for name in ("temperature", "top_p", "min_p", "repetition_penalty") for value in ("1", True, [1])),
    *(("stop", value) for value in (5, [5], [None], b"x", {"a": 5}, None)),
    *(("columns", value) for value in ("prompt", 5, {5: "prompt"}, [("prompt", "question")])),
]


def test_invalid_options_are_refused_before_loading(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for options, error in (
        ({"inputs": []}, InputError),
        ({"inputs": [{"id": 1}, {"id": 1}]}, InputError),
        ({"inputs": tmp_path / "none.jsonl"}, InputError),
        ({"inputs": RECORDS, "temperature": -1}, OptionError),
        ({"inputs": RECORDS, "top_k": 0.5}, OptionError),
        ({"inputs": RECORDS, "min_p": 2}, OptionError),
        ({"inputs": RECORDS, "pooling": "max"}, OptionError),
        ({"inputs": RECORDS, "sequences": 0}, OptionError),
        ({"inputs": RECORDS, "cache_memory": "much"}, OptionError),
        ({"inputs": RECORDS, "max_new_tokens": 0}, OptionError),
        *(({"inputs": RECORDS, name: value}, OptionError) for name, value in WRONG_TYPES),
    ):
        with pytest.raises(error):
            rabbitllm.batch(nowhere, **options)  # type: ignore[arg-type]


def test_an_empty_text_to_stop_at_stops_nothing(model: Any) -> None:
    plain = rabbitllm.batch(model, RECORDS, max_new_tokens=5)
    assert plain == rabbitllm.batch(model, RECORDS, max_new_tokens=5, stop="")
    assert plain == rabbitllm.batch(model, RECORDS, max_new_tokens=5, stop=[""])


def test_samples_depend_on_the_seed_only(model: Any) -> None:
    records = [{"prompt": f"the rabbit {n}"} for n in range(5)]
    first = rabbitllm.batch(model, records, max_new_tokens=5, temperature=1.0, seed=11)
    again = rabbitllm.batch(model, records, max_new_tokens=5, temperature=1.0, seed=11, sequences=2)
    assert first == again
    other_seed = rabbitllm.batch(model, records, max_new_tokens=5, temperature=1.0, seed=12)
    assert first != other_seed


def test_every_field_of_the_files_is_described(model: Any, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "the rabbit", "n": 2, "temperature": 1.0, "max_tokens": 2},
        {"prompt": "the hare", "max_tokens": 2},
        {"context": "the", "continuation": " hare"},
        {"context": "the", "continuation": [" hare", " rabbit"]},
        {"context": "the", "choices": [" hare", " rabbit"]},
        {"input": "the rabbit"},
        {"input": ["the", "rabbit"]},
        {"nothing": 1},
    ]
    out = tmp_path / "out.jsonl"
    rabbitllm.batch(model, lines, out, max_new_tokens=2)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    page = (Path(__file__).parents[2] / "docs/reference/files.md").read_text(encoding="utf-8")
    section = page.partition("## Batch files")[2].partition("\n## ")[0]
    answered = {name for line in answers for name in line} | {name for line in answers[0]["answers"] for name in line}
    done_fields = set(json.loads((tmp_path / "out.jsonl.done").read_text()))
    main = {"text", "finish", "scores", "choice", "embedding", "embeddings", "error", "logprob", "answers", "head"}
    assert main <= answered | done_fields
    assert [name for name in answered | done_fields | set(answers[-1]["error"]) if f"`{name}`" not in section] == []


def test_a_shard_of_the_model_is_never_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_checkpoint(tmp_path / "hare", "llama")
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    before = contents(folder)
    shard = next(folder.glob("*.safetensors"))
    for out in (shard, Path("hare") / shard.name):
        with pytest.raises(ResultsError, match="is a file in the folder of the model"):
            rabbitllm.batch("hare", "in.jsonl", out, overwrite=True)
    assert contents(folder) == before
