"""The size of the KV cache that the lines need, before the model is loaded."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig

from rabbitllm.batch_jobs.display import Progress, put_end, record
from rabbitllm.batch_jobs.items import BatchAnswer, Defaults, JobLimits
from rabbitllm.batch_jobs.job import BatchJob, expected_dtype, keep, left_of, needed_bytes, work, worthwhile_pass_bytes
from rabbitllm.batch_jobs.journal import opened
from tests.engine.test_fake_gpu import load_on
from tests.support.builders import FAMILIES, build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import split


def test_needed_bytes_cover_the_longest_lines(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    assert needed_bytes(config, [], 8, torch.float32) == 0
    few, many = (needed_bytes(config, [20] * 100, sequences, torch.float32) for sequences in (2, 50))
    assert many - few == 48 * 20 * needed_of_one(config)
    assert needed_bytes(config, [20] * 100, 500, torch.float32) == needed_bytes(config, [20] * 100, 100, torch.float32)
    assert needed_bytes(config, [20], 1, torch.bfloat16) == needed_bytes(config, [20], 1, torch.float32) // 2


def test_worthwhile_pass_grows_with_the_lines(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    single, many = (worthwhile_pass_bytes(config, texts, torch.float32) for texts in (1, 101))
    assert many - single == 100 * 8 * config.vocab_size  # logits, and what they are rounded from
    assert worthwhile_pass_bytes(config, 1, torch.float32) != worthwhile_pass_bytes(config, 1, torch.bfloat16)


@pytest.mark.parametrize(("family", "narrowed"), [("llama", torch.float16), ("gemma3", torch.float32)])
def test_expected_dtype_is_that_of_the_loaded_model(tmp_path: Path, family: str, narrowed: torch.dtype) -> None:
    """Also on a GPU without bfloat16, where some families need more than half of its bytes."""
    directory = split(build_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16))
    config, t4 = AutoConfig.from_pretrained(directory), FakeGpu(0, has_bf16=False)
    for devices, requested, expected in (
        ([t4], None, narrowed),
        ([t4], "float16", torch.float16),
        ([FakeGpu(0)], None, torch.bfloat16),
        ([FakeGpu(0), FakeGpu(1, has_bf16=False)], None, narrowed),
    ):
        assert expected_dtype(config, requested, devices) == expected
        assert load_on(devices, directory, dtype=requested).dtype == expected


def test_cache_shrinks_if_less_memory_is_free_than_predicted() -> None:
    assert left_of(1000, 300, 200) == 300
    assert left_of(400, 300, 200) == 200
    assert left_of(400, 300, 100) == 300
    assert left_of(400, 300, 390) == 200


def test_the_end_tells_tokens_that_took_no_pass(model: Any, tmp_path: Path) -> None:
    """Those that grammars forced; of a job without grammars there are none."""
    body = {"messages": [{"role": "user", "content": "the rabbit"}], "max_tokens": 40}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "abcdef"}}}
    for name, forced in (("forced", 8), ("free", 0)):  # the quotes and the end too, but not the first one
        source, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.out"
        line = {"url": "/v1/chat/completions", "body": body | ({"response_format": form} if forced else {})}
        source.write_text("".join(json.dumps({"custom_id": key, **line}) + "\n" for key in "ab"))
        progress = work(BatchJob(source, out, model, Defaults(), JobLimits(sequences=4)))
        assert record(out, "m", progress)["forced_tokens"] == 2 * forced
        console = Console(file=io.StringIO(), width=200)
        put_end(console, out, progress)
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("(16 forced, without a pass)" in said) == bool(forced)


@pytest.mark.parametrize("calls", [0, 1])
def test_an_error_of_what_is_told_the_progress_ends_a_job(calls: int, tmp_path: Path) -> None:
    """Also of its first call: without a writer no answer would be kept, and nothing would tell it."""
    told = list[Progress]()

    def notify(progress: Progress) -> None:
        if len(told) == calls:
            raise OSError("the terminal is gone")
        told.append(progress)

    with opened(tmp_path / "out", 2, {"model": "m"}) as journal, pytest.raises(OSError, match="the terminal is gone"):
        keep(([BatchAnswer(index, str(index), {}, is_error=False)] for index in range(2)), journal, notify)


def needed_of_one(config: object) -> int:
    """Bytes of the KV cache for a token: layers, K and V (2), KV heads, width of a head, float32 (4 bytes)."""
    llama = FAMILIES["llama"].config(False)
    assert type(config) is type(llama)
    return int(llama.num_hidden_layers * 2 * llama.num_key_value_heads * 16 * 4)
