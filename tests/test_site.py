"""The site of the documents: it builds without a broken link, and each page has its place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def entries(found: Any) -> Iterator[str]:
    for entry in found:
        inner = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from entries(inner) if isinstance(inner, list) else [inner]


def test_each_page_is_in_the_navigation() -> None:
    found = list(entries(CONFIG["nav"]))
    assert len(set(found)) == len(found)
    assert set(PAGES) <= set(found)


@pytest.mark.long
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """A link or an anchor that leads nowhere is an error. The search works from the disk."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        assert (tmp_path / "site" / page.replace("README.md", "index.html").replace(".md", ".html")).exists()
    text = (tmp_path / "site" / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "splitted_model" in text
    assert "fonts.googleapis.com" not in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
