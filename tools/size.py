"""Counts the pure code of each room, and compares it with tools/size_budget.toml.

    python -m tools.size              a table; exits with 1 where a room and its budget do not match
    python -m tools.size --update     lowers budgets to today's counts, never raises one

Pure code is what is no blank line, comment, docstring, import or `__all__`.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rabbitllm"
BUDGETS = Path(__file__).with_name("size_budget.toml")
SLACK = 40
"""Lines that a room may be below its budget."""
_LAYOUT = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The tool; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.size", description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="lower budgets to today's counts")
    sizes = room_sizes(PACKAGE)
    budgets = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    if parser.parse_args(arguments).update:
        budgets = {room: min(budget, sizes[room]) for room, budget in budgets.items() if room in sizes}
        lines = [f"{room} = {budget}\n" for room, budget in sorted(budgets.items())]
        BUDGETS.write_text("".join(lines), encoding="utf-8")
    for room in sorted({*sizes, *budgets}):
        print(f"{room:18}{sizes[room]:8,}{budgets.get(room, 0):8,}")
    print(f"{'total':18}{sizes.total():8,}{sum(budgets.values()):8,}")
    mismatches = compare(sizes, budgets)
    print(*mismatches, sep="\n", file=sys.stderr, end="\n" if mismatches else "")
    return 1 if mismatches else 0


def compare(sizes: Mapping[str, int], budgets: Mapping[str, int]) -> list[str]:
    """What does not match, a sentence for each room."""
    mismatches = []
    for room in sorted({*sizes, *budgets}):
        size, budget = sizes.get(room, 0), budgets.get(room, 0)
        if size > budget:
            mismatches.append(
                f"{room} has {size:,} lines of code, and a budget of {budget:,}. Make it smaller, or raise its budget "
                f"in tools/{BUDGETS.name} in the same commit, whose message says what the lines buy."
            )
        elif size < budget - SLACK or room not in sizes:
            mismatches.append(
                f"{room} has {size:,} lines of code, and a budget of {budget:,}. Lower the budget: "
                "python -m tools.size --update"
            )
    return mismatches


def room_sizes(package: Path) -> Counter[str]:
    """Lines of pure code by room: a folder with all that is in it, or a module."""
    sizes: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        room = file.relative_to(package).parts[0].removesuffix(".py")
        sizes[room] += code_lines(file.read_text(encoding="utf-8"))
    return sizes


def code_lines(source: str) -> int:
    """Lines of pure code in a module."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())) | ast.Import() | ast.ImportFrom() | ast.Assign([ast.Name("__all__")]):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(bool(source.splitlines()[line - 1].strip()) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
