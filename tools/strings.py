"""Lists every text of the package that a user can see, from the syntax tree.

    python -m tools.strings [--kind help|error|warning|log|label|text] [--words]

One line a text: file and line, kind, text with `…` for each value that is put in; the remedy of an error follows ` | `.
`--words` prints the number of texts and of words of each kind instead. Kinds:

    help     commands, options, arguments, epilogs
    error    messages and remedies of errors that the package raises
    warning  warnings, by `logging` or `warnings`
    log      other log lines
    label    what a call of a function that prints or draws is given: labels, columns, progress
    text     any other text of two words or more, such as parts of reports and of messages put together in steps
"""

from __future__ import annotations

import argparse
import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "rabbitllm"
KINDS = ("help", "error", "warning", "log", "label", "text")
HOLE = "…"
LOGS = {"debug": "log", "info": "log", "error": "log", "exception": "log", "warning": "warning", "warn": "warning"}
PRINTING = {
    *("print", "put", "put_fact", "put_row", "Text", "Panel", "Table", "add_column", "add_row", "status", "update"),
    *("say", "tell", "show", "confirm", "append", "set_title", "set_xlabel", "set_ylabel", "set_label", "annotate"),
}
_HELP_KEYWORDS = {"help", "epilog", "rich_help_panel", "panel"}
_PROSE = re.compile(r"[a-z]{2,}[,;:.]? +(?:[\w(]|…)|… [a-z]{2,}", re.IGNORECASE)
_NOT_PROSE = re.compile(r"\\[dwsb]|\(\?|^[A-Z_]+ [A-Z_]+$|</|\bdef |\breturn ")
"""Of regular expressions, templates and code."""
_STYLE = re.compile(r"(bold|dim|red|yellow|green|cyan)( \w+)?")


@dataclass(frozen=True)
class Shown:
    """A text that a user can see: path within the package's repository, line, kind, text with holes."""

    path: str
    line: int
    kind: str
    text: str

    @property
    def words(self) -> int:
        """How many words it has, without holes."""
        return len(re.findall(r"[A-Za-z][\w'-]*", self.text))


def text_of(node: ast.expr) -> str | None:
    """The text of an expression, with holes; None for an expression without constant text."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[-+#0-9.]*[a-z]\b", HOLE, text)
        case ast.JoinedStr(values=values):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = text_of(left), text_of(right)
            return None if first is None and second is None else (first or HOLE) + (second or HOLE)
        case ast.IfExp(body=body, orelse=orelse):
            texts = [text for text in (text_of(body), text_of(orelse)) if text]
            return " / ".join(texts) or None
    return None


def error_names(trees: Mapping[str, ast.Module]) -> set[str]:
    """Names of the classes of the package that descend from an exception, and of Python's own exceptions."""
    names = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    names |= {"HTTPException", "BadParameter"}
    classes = [node for tree in trees.values() for node in _classes(tree)]
    for _ in range(5):  # bases may be declared after their subclasses
        for node in classes:
            if any(ast.unparse(base).rpartition(".")[2] in names for base in node.bases):
                names.add(node.name)
    return names


def _classes(block: ast.AST) -> Iterator[ast.ClassDef]:
    """The classes in a module or another block; expressions, which are most nodes, are not looked at."""
    for node in getattr(block, "body", ()):
        if isinstance(node, ast.ClassDef):
            yield node
        yield from _classes(node)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_log(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in ("logger", "logging", "warnings") and _name(call) in LOGS


def _docstrings(nodes: Iterable[ast.AST]) -> set[ast.expr]:
    """Statements that are a string alone: docstrings of modules, classes, functions and constants."""
    return {node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def strings_of(path: str, tree: ast.Module, errors: set[str]) -> Iterator[Shown]:
    """The visible texts of one module, in the order of its lines."""
    shown: list[Shown] = []
    nodes = [*ast.walk(tree)]
    seen: set[ast.AST] = _docstrings(nodes)  # type: ignore[assignment]

    def add(kind: str, node: ast.AST, text: str | None) -> None:
        seen.update(ast.walk(node))
        if text and re.search(r"[A-Za-z]{2}", text):
            plain = "".join(letter if letter.isprintable() else " " for letter in text)
            shown.append(Shown(path, getattr(node, "lineno", 1), kind, " ".join(plain.split())))

    for node in nodes:
        if isinstance(node, ast.Call) and _name(node) in errors:
            texts = [text for text in map(text_of, node.args) if text]
            add("error", node, " | ".join(texts))
        elif isinstance(node, ast.Call) and _is_log(node):
            texts = [text for text in map(text_of, node.args) if text and text != HOLE]
            add(LOGS[_name(node)], node, " ".join(texts))
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg in _HELP_KEYWORDS and (text := text_of(node.value)):
            add("help", node.value, text)
        elif isinstance(node, ast.FunctionDef) and path.startswith("rabbitllm/cli/") and _is_command(node):
            add("help", node.body[0], ast.get_docstring(node))
        elif isinstance(node, ast.Call) and _name(node) in PRINTING and node not in seen:
            for argument in node.args:
                if argument not in seen and (text := text_of(argument)) and re.search(r"[a-z]{2}", text):
                    add("label", argument, "" if _STYLE.fullmatch(text) else text)
    for node in nodes:
        if isinstance(node, ast.expr) and node not in seen and (text := text_of(node)):
            seen.update(ast.walk(node))
            if _PROSE.search(text) and not _NOT_PROSE.search(text):
                add("help" if path == "rabbitllm/cli/exit_codes.py" else "text", node, text)
    return iter(sorted(shown, key=lambda text: text.line))


def _is_command(node: ast.FunctionDef) -> bool:
    return node.name.endswith("_command") or node.name == "demo"


def all_strings() -> list[Shown]:
    """The visible texts of the package, by file and line."""
    trees = {
        path.relative_to(PACKAGE.parent).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    errors = error_names(trees)
    return [text for path, tree in trees.items() for text in strings_of(path, tree, errors)]


def main() -> None:
    """Print them, or count them."""
    parser = argparse.ArgumentParser(prog="python -m tools.strings", description="List the texts that a user can see.")
    parser.add_argument("--kind", choices=KINDS, help="only these")
    parser.add_argument("--words", action="store_true", help="print numbers of texts and words instead")
    wanted = parser.parse_args()
    shown = [text for text in all_strings() if wanted.kind in (None, text.kind)]
    if not wanted.words:
        for text in shown:
            print(f"{text.path}:{text.line} {text.kind}  {text.text}")
        return
    texts = Counter(text.kind for text in shown)
    words: Counter[str] = Counter()
    for text in shown:
        words[text.kind] += text.words
    for kind in filter(texts.__contains__, KINDS):
        print(f"{kind:8} {texts[kind]:6,} texts {words[kind]:8,} words")
    print(f"{'all':8} {sum(texts.values()):6,} texts {sum(words.values()):8,} words")


if __name__ == "__main__":
    main()
