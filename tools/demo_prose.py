"""English training text that exists on every machine: the docstrings of Python's standard library.

Problems alone make a model very confident, and a confident model does not show the cost of a format. Prose has no
single correct next word. One file in twenty is held out, chosen by its name alone. Nothing is imported: the files are
parsed. Another version of Python has somewhat different docstrings, so runs are only repeatable with the same one.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

HELD_OUT_ONE_IN = 20

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def training_prose() -> str:
    """Docstrings of the files that are not held out."""
    return "\n\n".join(text for name, text in _documented() if not _is_held_out(name))


def held_out_prose() -> str:
    """Docstrings of the held-out files."""
    return "\n\n".join(text for name, text in _documented() if _is_held_out(name))


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def _documented() -> Iterator[tuple[str, str]]:
    """Names of files in the standard library, and their docstrings."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _LEFT_OUT.intersection(name.parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
        nodes = [node for node in ast.walk(tree) if isinstance(node, _WITH_DOCSTRING)]
        texts = [text for node in nodes if (text := ast.get_docstring(node))]
        if texts:
            yield name.as_posix(), "\n\n".join(texts)
