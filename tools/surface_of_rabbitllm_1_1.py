"""Print the public surface of RabbitLLM 1.1.0 as JSON, read from its unpacked wheel without importing it.

`python tools/surface_of_rabbitllm_1_1.py FOLDER > tests/golden/rabbitllm-1.1.0-surface.json`
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

Argument = list[str | None]


def arguments(function: ast.FunctionDef) -> list[Argument]:
    """Name and default of each argument, without `self`."""
    args = function.args
    named = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(named) - len(args.defaults)) + [ast.unparse(default) for default in args.defaults]
    pairs: list[Argument] = [[a.arg, d] for a, d in zip(named, defaults, strict=True) if a.arg not in ("self", "cls")]
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        pairs.append([arg.arg, ast.unparse(default) if default is not None else None])
    pairs += [[f"*{args.vararg.arg}", None]] if args.vararg is not None else []
    return pairs + ([[f"**{args.kwarg.arg}", None]] if args.kwarg is not None else [])


def is_public(name: str) -> bool:
    return name == "__init__" or not name.startswith("_")


def is_set_on_self(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "self" and is_public(node.attr)


def described(cls: ast.ClassDef) -> dict[str, Any]:
    """Public methods with their arguments, and public attributes."""
    methods = {m.name: arguments(m) for m in cls.body if isinstance(m, ast.FunctionDef) and is_public(m.name)}
    attributes = {node.attr for node in ast.walk(cls) if is_set_on_self(node) and isinstance(node, ast.Attribute)}
    return {"methods": methods, "attributes": sorted(attributes)}


def surface(package: Path) -> dict[str, Any]:
    """Names that the package exports, and what its functions and classes of these names have."""
    top = ast.parse((package / "__init__.py").read_text()).body
    names = [alias.asname or alias.name for node in top if isinstance(node, ast.ImportFrom) for alias in node.names]
    nodes = [node for path in sorted(package.rglob("*.py")) for node in ast.parse(path.read_text()).body]
    functions = {n.name: arguments(n) for n in nodes if isinstance(n, ast.FunctionDef) and n.name in names}
    classes = {n.name: described(n) for n in nodes if isinstance(n, ast.ClassDef) and n.name in names}
    return {"names": names, "functions": functions, "classes": classes}


if __name__ == "__main__":
    print(json.dumps(surface(Path(sys.argv[1]) / "rabbitllm"), indent=1, sort_keys=True))
