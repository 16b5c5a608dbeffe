"""The results that are kept: one form, pages and pictures made of the JSON, and documents that name what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))


def held(name: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_results_have_one_form(name: str) -> None:
    found = held(name)
    assert {"title", "date", "machine", "versions", "notes", "rows", "more", "runs", "picture"} <= found.keys()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
    assert {"cpu", "cores", "ram_gib"} <= found["machine"].keys()
    cells = [cell for row in found["rows"] for cell in row.values()]
    for cell in cells:
        assert isinstance(cell, str) or cell["low"] <= cell["median"] <= cell["high"], cell
    assert report.page(found) == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_there_is_nothing_else() -> None:
    pictures = {name for name in NAMES if held(name)["picture"]}
    pictures |= {f"{name}-{one}" for name in NAMES for one in held(name).get("pictures", {})}
    assert {path.stem for path in RESULTS.glob("*.svg")} == pictures
    assert {path.stem for path in RESULTS.glob("*.md")} == set(NAMES)


def test_results_that_documents_name_are_there() -> None:
    pages = [ROOT / "docs" / "PERFORMANCE.md", ROOT / "README.md", *(ROOT / "docs" / "guides").glob("*.md")]
    linked = {name for page in pages for name in re.findall(r"results/([\w-]+)\.(?:md|svg)", page.read_text("utf-8"))}
    assert linked
    assert linked <= {path.stem for path in RESULTS.iterdir()}
