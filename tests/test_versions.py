"""The versions of transformers that are allowed are those that `make test` and `make test-lowest` run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from rabbitllm.version import TRANSFORMERS

ROOT = Path(__file__).parent.parent


def test_lowest_and_newest_versions_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (allowed,) = [one for one in map(Requirement, project["dependencies"]) if one.name == "transformers"]
    versions = [
        found[0]
        for file in ("Makefile", "constraints.txt")
        if (found := re.findall(r"\btransformers==([\d.]+)", (ROOT / file).read_text(encoding="utf-8")))
    ]
    lowest, newest = versions
    assert tuple(version.rpartition(".")[0] for version in versions) == TRANSFORMERS
    assert all(version in allowed.specifier for version in versions)
    bounds = {bound.operator: bound.version for bound in allowed.specifier}
    assert lowest == f"{bounds['>=']}.0"
    major, minor = map(int, bounds["<"].split("."))
    assert newest.startswith(f"{major}.{minor - 1}.")
