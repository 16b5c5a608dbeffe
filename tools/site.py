"""Hooks of mkdocs: pages from outside docs/, and links to what the site does not hold.

The documents are written for readers of the repository: a link may lead to any file of it. On the site a link to a page
or a picture outside docs/ leads to a copy; of a link to a source file its text remains.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/NOTES.md")
"""Pages outside docs/, on the site at the same path."""
PICTURES = frozenset({".svg", ".png"})
_LINK = re.compile(r"(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as GitHub makes them."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """With pages and pictures from outside."""
    linked = set()
    for path in (*(ROOT / "docs").rglob("*.md"), *(ROOT / page for page in PAGES)):
        folder = path.parent.relative_to(ROOT).as_posix()
        for match in _LINK.finditer(path.read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(folder, match["target"]))
            if not target.startswith("docs/") and Path(target).suffix in PICTURES and (ROOT / target).is_file():
                linked.add(target)
    for name in sorted(linked.union(PAGES)):
        files.append(File.generated(config, name, content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """With links that lead somewhere on the site."""
    here = page.file.src_uri
    inside = "" if here in PAGES else "docs"
    folder = posixpath.dirname(posixpath.join(inside, here))

    def adapted(match: re.Match[str]) -> str:
        target = match["target"]
        if not target or ":" in target:
            return match[0]
        place = posixpath.normpath(posixpath.join(folder, target))
        name = "index.md" if place == "README.md" else place.removeprefix("docs/")
        if files.get_file_from_path(name) is None:
            return match["text"] if not place.startswith("docs/") and (ROOT / place).exists() else match[0]
        to = posixpath.relpath(name, posixpath.dirname(here) or ".")
        anchor = "" if name == "index.md" else match["anchor"] or ""
        return f"{match['mark']}[{match['text']}]({to}{anchor})"

    parts = _CODE.split(markdown)
    return "".join(part if number % 2 else _LINK.sub(adapted, part) for number, part in enumerate(parts))
