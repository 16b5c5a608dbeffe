"""Modules of the package as griffe reads them, each by itself: nothing is imported."""

from __future__ import annotations

import functools
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]


@functools.cache
def module(name: str) -> griffe.Module:
    """A module by its dotted name."""
    path = ROOT / Path(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return griffe.visit(name, file, file.read_text(encoding="utf-8"), docstring_parser=griffe.Parser.google)


def sections(owner: griffe.Object) -> list[griffe.DocstringSection]:
    """The sections of a docstring."""
    assert owner.docstring is not None, owner.path
    return owner.docstring.parse(
        griffe.Parser.google, warnings=False, returns_multiple_items=False, returns_named_value=False
    )
