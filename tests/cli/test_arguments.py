"""What the options of the commands that run a model ask for, as the commands hand them on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.cli.arguments import wish_to_run
from rabbitllm.errors import OptionError
from rabbitllm.models.pull import Wish
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.splitting import split


def wish(name: object, **given: object) -> Wish:
    """That of a command with these options, and otherwise without any."""
    nothing = {"compression": None, "folder": None, "sequential": False, "max_disk": None, "device": None}
    return wish_to_run(str(name), **{**nothing, "max_memory": None, **given})  # type: ignore[arg-type]


def test_every_option_arrives(tmp_path: Path) -> None:
    assert wish(
        "example/model",
        compression="8bit",
        folder=tmp_path,
        sequential=True,
        max_disk="57GiB",
        device="cpu",
        max_memory=["cpu=24GiB", "0=14GiB"],
        revision="v2",
        trust_remote_code=True,
    ) == Wish(
        name="example/model",
        compression="8bit",
        folder=tmp_path,
        sequential=True,
        access=HubAccess("v2"),
        max_disk="57GiB",
        device="cpu",
        max_memory={"cpu": "24GiB", 0: "14GiB"},
        trust_remote_code=True,
    )


def test_the_split_that_is_here_says_how_it_is_compressed(tmp_path: Path) -> None:
    checkpoint = write_shards(tmp_path / "model", cut(llama_tensors(layers=1), 2))
    assert wish(checkpoint).compression is None
    split(checkpoint, tmp_path / "splits", compression="4bit", sequential=False)
    assert wish(checkpoint, folder=tmp_path / "splits").compression == "4bit"
    assert wish(checkpoint, folder=tmp_path / "splits", compression="NONE").compression is None
    assert wish(checkpoint, folder=tmp_path / "splits", no_split=True).compression is None


def test_a_limit_of_no_device_is_refused() -> None:
    with pytest.raises(OptionError, match="--max-memory 24GiB names no device"):
        wish("example/model", max_memory=["24GiB"])
