"""docs/reference/rabbitllm-1.1.md says of every argument and name what the code does."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import re
from pathlib import Path

import pytest

import rabbitllm
from rabbitllm import AutoModel
from rabbitllm.auto_model import WITHOUT_EFFECT
from tests.support.builders import build_checkpoint

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "rabbitllm-1.1.md").read_text(encoding="utf-8")
PARAMETERS = [
    parameter
    for parameter in inspect.signature(AutoModel.from_pretrained).parameters.values()
    if parameter.kind is not parameter.VAR_KEYWORD
][1:]
SURFACE = json.loads((Path(__file__).parent / "golden" / "rabbitllm-1.1.0-surface.json").read_text())
"""Public names, signatures and attributes of RabbitLLM 1.1.0, made by `tools/surface_of_rabbitllm_1_1.py`."""


def rows(heading: str) -> list[list[str]]:
    """The rows of the table that begins with such a heading, cell by cell."""
    table = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def named_after(text: str) -> list[str]:
    """The names in backquotes from the end of `text` to the end of the paragraph."""
    return re.findall(r"`(\w+)`", PAGE.partition(text)[2].strip().split("\n\n")[0])


AS_BEFORE = named_after("describes all:")
OTHERWISE = {cells[0].strip("`"): cells[1] for cells in rows("| argument | here |")}
REFUSED = re.findall(r"`(\w+)`", PAGE.partition("So are AirLLM's")[2].partition(":")[0])
NEW = named_after("Only here:")


def test_every_argument_of_rabbitllm_1_1_is_there_in_its_order() -> None:
    constructor = SURFACE["classes"]["RabbitLLMBaseModel"]["methods"]["__init__"]
    positional = [parameter for parameter in PARAMETERS if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    ours = [[parameter.name, repr(parameter.default).replace('"', "'")] for parameter in positional]
    assert ours[0] == ["device", "None"]  # the first GPU, else the CPU: what "cuda:0" was without a GPU too
    assert ours[1:] == constructor[2:]
    assert sorted([*AS_BEFORE, *OTHERWISE]) == sorted(name for name, _ in ours)


def test_the_names_of_the_page_are_found() -> None:
    assert REFUSED == ["install_hooks", "load_resident"]
    assert "dtype" in AS_BEFORE
    assert "max_disk" in NEW


def test_every_public_name_of_rabbitllm_1_1_is_there() -> None:
    assert set(SURFACE["names"]) <= set(rabbitllm.__all__)
    for name, arguments in SURFACE["functions"].items():
        parameters = list(inspect.signature(getattr(rabbitllm, name)).parameters.values())
        ours = [[p.name, None if p.default is p.empty else repr(p.default)] for p in parameters]
        assert ours[: len(arguments)] == arguments


def test_every_method_and_attribute_of_rabbitllm_1_1_works_or_is_in_the_table(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    model = AutoModel.from_pretrained(folder, "cpu", None, 512, None, show_layer_progress=False)
    assert model.config._attn_implementation
    assert model.config.name_or_path == str(folder / "splitted_model")
    named = set(re.findall(r"`(\w+)`", " ".join(cells[0] for cells in rows("| there | here |\n| --- | --- |\n| `run"))))
    had = set()
    for described in SURFACE["classes"].values():
        had |= {*described["methods"], *described["attributes"]}
    had -= {"__init__", "get_module_class", "from_pretrained"}  # of AutoModel, tested by themselves
    assert had - {name for name in had if hasattr(model, name)} == named
    assert AutoModel.from_pretrained.__self__ is AutoModel
    assert "AutoModel.get_module_class" in PAGE


def test_every_argument_here_is_named_once() -> None:
    assert sorted([*AS_BEFORE, *OTHERWISE, *NEW]) == sorted(parameter.name for parameter in PARAMETERS)


def test_what_is_said_to_have_no_effect_has_none() -> None:
    assert {name for name, here in OTHERWISE.items() if here.startswith("accepted without effect")} == {*WITHOUT_EFFECT}


def test_a_value_without_effect_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build_checkpoint(tmp_path / "m", "qwen2")
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        AutoModel.from_pretrained(folder, device="cpu", split=False, max_seq_len=1024)
    assert "max_seq_len has no effect" in caplog.text


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_said_to_be_refused_is(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        AutoModel.from_pretrained("nowhere", **{name: True})


def test_every_name_here_is_public_and_every_public_name_is_here() -> None:
    named = set(re.findall(r"`rabbitllm\.(\w+)`", PAGE))
    assert named == {*rabbitllm.__all__} - {"__version__"}
    for name in named:
        assert getattr(importlib.import_module("rabbitllm"), name)
