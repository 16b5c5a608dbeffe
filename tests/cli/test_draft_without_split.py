"""The draft of a model that is not to be split: a finished split of it is used, as its shards may be gone."""

from __future__ import annotations

from pathlib import Path

from rabbitllm.auto_model import LoadRequest, prepare_model
from rabbitllm.base.options import RunOptions
from rabbitllm.cli.arguments import command_draft
from rabbitllm.prepare import ModelSpec
from tests.support.builders import build_checkpoint
from tests.support.commands import invoke


def test_a_draft_beside_no_split_is_read_from_its_split(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    build_checkpoint(folder, "llama")
    invoke("pull", folder, "--sequential", "--compression", "8bit")
    model = LoadRequest(ModelSpec(str(folder)), None, RunOptions("cpu"))
    assert prepare_model(command_draft(str(folder), model)).folder == folder / "splitted_model.8bit"
