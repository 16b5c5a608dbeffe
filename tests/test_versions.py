"""The versions of transformers that are called tested are those that `make test` and `make test-lowest` run."""

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
    assert tuple(version.rpartition(".")[0] for version in versions) == TRANSFORMERS
    assert all(version in allowed.specifier for version in versions)
    assert str(allowed.specifier) == f">={TRANSFORMERS[0]}"  # a newer one is checked when it is used
    assert versions[0] == f"{TRANSFORMERS[0]}.0"
