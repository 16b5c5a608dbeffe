"""The self-check of a newer transformers: passed by the installed one, and refused if a part has changed."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicLayer, core_model_loading

from rabbitllm import AutoModel
from rabbitllm.engine import transformers_api, transformers_check
from rabbitllm.errors import MissingPackageError
from tests.support.builders import build_checkpoint
from tests.support.forked import in_a_fork

NEWER = "5.99.0"


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed transformers, with the number of a version that is not tested."""
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: NEWER if name == "transformers" else version(name))
    monkeypatch.setattr(transformers_check, "_is_checked", False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", shards=1)


def test_newer_version_is_checked_with_one_warning(
    newer: None, checkpoint: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    for _ in range(2):
        AutoModel.from_pretrained(checkpoint, split=False, show_layer_progress=False)
    assert torch.rand(1) == expected  # the check has its own random numbers
    warnings = [record.getMessage() for record in caplog.records if "newer than the tested" in record.getMessage()]
    assert len(warnings) == 1
    assert NEWER in warnings[0]
    assert "Writing model shards" not in capfd.readouterr().err


def test_tested_version_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transformers_check, "_is_checked", False)
    monkeypatch.setattr(transformers_check, "newer_than_tested", lambda: False)
    monkeypatch.setattr(transformers_check, "_try", lambda: pytest.fail("it was checked"))
    AutoModel.from_pretrained(checkpoint, split=False, show_layer_progress=False)
    assert "newer than the tested" not in caplog.text


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        ("rename_source_key", lambda source, rules: (source, None), "takes 2 positional arguments"),
        ("initialize_rest", lambda model: None, "other logits"),
        ("DynamicSlidingWindowLayer", DynamicLayer, "layers of the types DynamicLayer, DynamicSlidingWindowLayer"),
    ],
)
def test_changed_part_is_refused_at_each_load(
    newer: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, part: str, changed: Any, message: str
) -> None:
    monkeypatch.setattr(transformers_api, part, changed)
    for _ in range(2):
        with pytest.raises(MissingPackageError, match=message) as refused:
            AutoModel.from_pretrained(checkpoint, split=False, show_layer_progress=False)
        assert refused.value.remedy.startswith("Install a tested version: pip install")


def test_missing_part_is_named(checkpoint: Path) -> None:
    def load_without_it() -> str:
        """The error of a process that has not imported the package yet."""
        del core_model_loading.rename_source_key
        for name in [name for name in sys.modules if name.partition(".")[0] == "rabbitllm"]:
            del sys.modules[name]
        from rabbitllm import AutoModel
        from rabbitllm.errors import MissingPackageError

        try:
            AutoModel.from_pretrained(checkpoint, split=False)
        except MissingPackageError as error:
            return error.problem
        return "none"

    problem = in_a_fork(load_without_it)
    assert "has changed a part that RabbitLLM uses: cannot import name 'rename_source_key'" in problem
