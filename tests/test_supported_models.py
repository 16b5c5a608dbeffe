"""Every model class that can be built small has the outputs of transformers, or is refused before a shard is deleted.

Also: the tool reports wrong outputs, deleted shards and crashes as such.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rabbitllm.errors import OptionError
from tests.support import tiny_configs
from tests.support.one_thread import one_thread as one_thread
from tools import examined_model, supported_models
from tools.examined_model import DIED, LOST, OK, REFUSED, UNBUILT, WRONG, Case, Row, examine
from tools.supported_models import Found, cases, main, page, row_of

LLAMA = Case("llama", "AutoModelForCausalLM", "LlamaForCausalLM")


OTHERS = ("AutoModelForSequenceClassification", "AutoModelForTokenClassification", "AutoModel")
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
PACKAGES = {"fast_vlm": "timm", "gemma3n": "timm", "perception_lm": "timm", "layoutlmv2": "detectron2"}
"""Types that need a package which is not installed for the tests."""
UNBUILT_TYPES = frozenset(
    {"musicgen", "musicgen_melody"}  # transformers makes their classes from another config
    | {"pi0", "sam3_lite_text"}  # inputs are not known
    | {"voxtral_realtime_text"}  # transformers lists a class that it does not have
)
"""Types of which no class can be built small."""
_ASSISTED = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}
UNBUILT_CLASSES = {
    # it refuses caches of another model's layers
    (5, 23): {f"{name}_assistant.{kind}AssistantForCausalLM" for name, kind in _ASSISTED.items()},
    # it reads a field of an output that is not there
    (5, 24): {"llama4.Llama4ForConditionalGeneration"},
}
"""Version of transformers -> further classes that it cannot run."""


def is_expected_unbuilt(case: Case) -> bool:
    return case.model_type in UNBUILT_TYPES | PACKAGES.keys() or case.key in UNBUILT_CLASSES.get(VERSION, ())


def check(case: Case, folder: Path) -> None:
    row = examine(case, folder)
    assert row.is_sound, row
    assert row.warnings == ()
    assert row.scattered == ()
    if row.result == UNBUILT:
        assert is_expected_unbuilt(case), row
        pytest.skip(row.why)
    assert not is_expected_unbuilt(case) or case.model_type in PACKAGES


@pytest.mark.parametrize("case", [case for case in cases() if case.auto not in OTHERS], ids=lambda case: case.key)
def test_generating_class(tmp_path: Path, case: Case) -> None:
    check(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in cases() if case.auto in OTHERS], ids=lambda case: case.key)
def test_other_class(tmp_path: Path, case: Case) -> None:
    """Classifiers, and models without a head."""
    check(case, tmp_path)


# Results of the tool


@pytest.mark.long
def test_row_of_a_process_of_its_own() -> None:
    row = row_of(LLAMA)
    assert (row.result, row.why, row.inputs, row.blocks, row.files) == (OK, "", ("text",), 3, 6)
    assert (row.scattered, row.warnings) == ((), ())
    assert row.seconds > 0


@pytest.mark.long
def test_process_that_takes_too_long() -> None:
    row = row_of(LLAMA, seconds=0)
    assert (row.result, row.why) == (DIED, "it was not through after 0 s")


@pytest.mark.skipif(os.name != "posix", reason="has no limit of this kind")
def test_process_that_takes_too_much() -> None:
    row = row_of(LLAMA, memory=1 << 20)
    assert row.result in (DIED, UNBUILT)
    assert row.result == DIED or "memory" in row.why


def changed(folder: Path, budget: int) -> Any:
    model = _loaded(folder, budget)
    model.model.norm.weight.data += 1
    return model


def of_another_class(folder: Path, budget: int) -> Any:
    return torch.nn.Linear(1, 1)


def lost(folder: Path, budget: int) -> Any:
    next(folder.glob("*.safetensors")).unlink()
    raise OptionError("it is too late.")


def refused(folder: Path, budget: int) -> Any:
    raise OptionError("it is not known.")


def refused_when_streamed(folder: Path, budget: int) -> Any:
    return _loaded(folder, budget) if budget else refused(folder, budget)


def raw(folder: Path, budget: int) -> Any:
    raise KeyError("config")


def that_cannot_be_called(folder: Path, budget: int) -> Any:
    model = _loaded(folder, budget)
    del model.model.norm
    return model


_loaded = examined_model._loaded


@pytest.mark.parametrize(
    ("loaded", "result", "why"),
    [
        (changed, WRONG, "resident: its results are off by "),
        (of_another_class, WRONG, "resident: it is loaded as Linear"),
        (lost, LOST, "resident: it is too late."),
        (refused, REFUSED, "it is not known."),
        (refused_when_streamed, OK, "only resident: it is not known."),
        (raw, WRONG, "resident: nothing was deleted, and a raw error is raised: KeyError: 'config'"),
        (that_cannot_be_called, WRONG, "resident: it raises AttributeError"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: Callable[[Path, int], Any], result: str, why: str
) -> None:
    monkeypatch.setattr(examined_model, "_loaded", loaded)
    row = examine(LLAMA, tmp_path)
    assert row.result == result
    assert row.why.startswith(why)
    assert row.is_sound == (result in (OK, REFUSED))


def test_what_cannot_be_built_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_configs, "LARGEST", 1000)
    row = examine(LLAMA, tmp_path)
    assert row.result == UNBUILT
    assert row.why.startswith("it has ")


def test_every_class_is_there_once() -> None:
    found = cases()
    assert len({case.key for case in found}) == len(found)
    names = {case.name for case in found}
    assert {"LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification", "T5ForConditionalGeneration"} <= names
    assert {"Qwen2VLForConditionalGeneration", "WhisperForConditionalGeneration", "BertForTokenClassification"} <= names
    assert not {"ViTModel", "ResNetModel"} & names


# The table


def test_rows_are_kept_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def found(case: Case) -> Row:
        tried.append(case.key)
        return Row(case.model_type, case.name, OK, inputs=("text",), blocks=3, files=6)

    monkeypatch.setattr(supported_models, "row_of", found)
    where = ["--found", str(tmp_path / "rows.json"), "--page", str(tmp_path / "page.md")]
    for names in (["LlamaForCausalLM"], ["llama"], ["llama"]):
        monkeypatch.setattr("sys.argv", ["supported_models", *names, *where])
        assert main() == 0
    wanted = [case.key for case in cases() if case.model_type == "llama" or case.name == "LlamaForCausalLM"]
    assert sorted(tried) == sorted(wanted)  # each once
    assert not (tmp_path / "page.md").exists()  # which is of all types
    assert capsys.readouterr().out.endswith("ok: 4\n")
    content = json.loads((tmp_path / "rows.json").read_text())
    (tmp_path / "rows.json").write_text(json.dumps({**content, "transformers": "4.0"}))
    assert Found(tmp_path / "rows.json").rows == {}


def test_a_run_that_finds_something_wrong_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported_models, "row_of", lambda case: Row(case.model_type, case.name, LOST, "why"))
    monkeypatch.setattr("sys.argv", ["supported_models", "LlamaModel", "--found", str(tmp_path / "rows.json")])
    assert main() == 1


def test_page() -> None:
    text = page(
        [
            Row("b", "BModel", REFUSED, "no <such> | model"),
            Row("a", "AForCausalLM", OK, "only resident: why", ("text",)),
            Row("a", "AModel", OK, "", ("text", "image")),
            Row("c", "CModel", OK, "", ("audio",)),
        ]
    )
    assert text.splitlines()[-3:] == [
        "| a | AForCausalLM, AModel | text, image | AForCausalLM: (only resident: why) |",
        "| b | BModel |  | refused before any shard was deleted (no &lt;such> \\| model) |",
        "| c | CModel | audio |  |",
    ]
    assert "- **ok** (3): the outputs are equal." in text


def test_blocks_that_are_scattered_are_seen(tmp_path: Path) -> None:
    files = {
        "a": ["model.layers.0.q.weight", "model.layers.0.mlp.experts.0.w"],
        "b": ["model.layers.1.q.weight", "model.layers.2.q.weight"],
        "c": ["model.layers.3.q.weight"],
        "d": ["model.layers.3.k.weight"],
        "e": ["model.layers.4.q.weight", "model.norm.weight"],
        "f": ["model.embed_tokens.weight", "lm_head.weight"],
    }
    for file, names in files.items():
        save_file({name: torch.zeros(1) for name in names}, tmp_path / f"{file}.safetensors")
    assert examined_model._scattered(tmp_path) == tuple(f"model.layers.{number}" for number in (1, 2, 3, 4))
