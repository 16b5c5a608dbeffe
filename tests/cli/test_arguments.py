"""What the options of the commands that run a model ask for, as the commands hand them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rabbitllm import prepare
from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.options import RunOptions, ShardPolicy, SplitOptions
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.cli.arguments import ModelOptions
from rabbitllm.errors import OptionError
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.splitting import split


def wish(name: object, **options: Any) -> LoadRequest:
    """That of a command with these options, and otherwise without any."""
    return ModelOptions(**options).request(str(name))


def test_every_option_reaches_the_request(tmp_path: Path) -> None:
    assert wish(
        "example/model",
        compression="8bit",
        folder=tmp_path,
        sequential=True,
        max_disk="57GiB",
        device="cpu",
        dtype="float32",
        max_memory=["cpu=24GiB", "0=14GiB"],
        revision="v2",
        verify_source=True,
        trust_remote_code=True,
        no_verify_checksums=True,
        fast_bfloat16=True,
    ) == LoadRequest(
        prepare.ModelSpec("example/model", "8bit", tmp_path, HubAccess("v2")),
        SplitOptions("8bit", ShardPolicy.DELETE_USED, max_disk=57 << 30, verify_source=True),
        RunOptions(
            device="cpu",
            dtype="float32",
            max_memory={"cpu": 24 << 30, "cuda:0": 14 << 30},
            trust_remote_code=True,
            verify_checksums=False,
            fast_bfloat16=True,
        ),
    )


def test_shards_that_are_fetched_are_not_kept_by_default() -> None:
    assert wish("example/model") == LoadRequest(
        prepare.ModelSpec("example/model"),
        SplitOptions(shards=ShardPolicy.DELETE_FETCHED),
        RunOptions(fast_bfloat16=None),  # by the processor
    )


def test_no_split_has_no_split_options() -> None:
    assert wish("example/model", no_split=True).split is None
    with pytest.raises(OptionError, match="compression='4bit' works only while splitting"):
        wish("example/model", no_split=True, compression="4bit")


def test_existing_split_gives_the_compression(tmp_path: Path) -> None:
    checkpoint = write_shards(tmp_path / "model", cut(llama_tensors(layers=1), 2))
    assert wish(checkpoint).spec.compression is None
    split(checkpoint, tmp_path / "splits", compression="4bit", sequential=False)
    assert wish(checkpoint, folder=tmp_path / "splits").spec.compression == "4bit"
    assert wish(checkpoint, folder=tmp_path / "splits", compression="NONE").spec.compression is None
    assert wish(checkpoint, folder=tmp_path / "splits", no_split=True).spec.compression is None


@pytest.mark.parametrize(("word", "dtype"), [("auto", None), ("torch.float16", "float16"), ("bfloat16", "bfloat16")])
def test_a_dtype_is_named_as_in_python(word: str, dtype: str | None) -> None:
    assert wish("example/model", dtype=word).run.dtype == dtype


def test_limit_without_device_is_refused() -> None:
    with pytest.raises(OptionError, match=r"(?s)--max-memory 24GiB names no device.*cpu=24GiB for RAM, 0=24GiB for"):
        wish("example/model", max_memory=["24GiB"])
