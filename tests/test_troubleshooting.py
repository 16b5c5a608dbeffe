"""The messages of the package, docs/reference/messages.toml, and docs/TROUBLESHOOTING.md, kept in step.

A message is the constant text of an error or a warning in the code, with "…" for whatever is put in. A pattern fits a
message that contains its text, "…" standing for anything. messages.toml has patterns for every message. The page has
the problems that people meet most: each heading of the third level has the patterns in backquotes, or a symptom.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rabbitllm
from rabbitllm import errors

PACKAGE = Path(rabbitllm.__file__).parent
DOCS = PACKAGE.parent / "docs"
PAGE = (DOCS / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
TABLE = tomllib.loads((DOCS / "reference" / "messages.toml").read_text(encoding="utf-8"))["messages"]
ERRORS = {
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.RabbitLLMError)
}
HOLE = "…"
LEAST_LETTERS = 7
"""Of the constant text of a pattern; less would fit anything."""
MOST_MESSAGES = 6
"""That one pattern fits; a pattern of more would be found in anything."""


@dataclass(frozen=True)
class Message:
    """What the code says, and where; `error` is the name of the class, empty for a warning."""

    text: str
    error: str
    where: str


@dataclass(frozen=True)
class Entry:
    """An entry of the table, or a section of the page: patterns, and what it says."""

    patterns: tuple[str, ...]
    advice: str


def text_of(node: ast.expr, around: ast.AST) -> list[str] | None:
    """The texts that an expression can be, with holes; None if there is no constant text in it."""
    match node:
        case ast.Constant(value=str(text)):
            return [re.sub(r"%[-+#0-9.]*[a-z]", HOLE, text)]
        case ast.JoinedStr(values=values):
            return ["".join(part.value if isinstance(part, ast.Constant) else HOLE for part in values)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            firsts, seconds = text_of(left, around) or [HOLE], text_of(right, around) or [HOLE]
            return [first + second for first in firsts for second in seconds]
        case ast.IfExp(body=body, orelse=orelse):
            return [*(text_of(body, around) or [HOLE]), *(text_of(orelse, around) or [HOLE])]
        case ast.Name(id=name):
            return values_of(name, around)
    return None


def values_of(name: str, around: ast.AST) -> list[str] | None:
    """The texts that a variable is given in a function."""
    found: list[str] = []
    for node in assignments(around):
        if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            found += text_of(node.value, around) or []
    return found or None


@functools.cache
def assignments(around: ast.AST) -> list[ast.Assign]:
    return [node for node in ast.walk(around) if isinstance(node, ast.Assign)]


def passes_on(node: ast.expr) -> bool:
    """Whether an expression hands on the message of another error, which is looked at where it is raised."""
    return any(isinstance(part, ast.Attribute) and part.attr == "problem" for part in ast.walk(node))


def spoken(call: ast.Call) -> str | None:
    """The name of an error that is made, "" for a warning that is given, None for any other call."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ERRORS and call.args:
        return name
    if name == WARNING:
        return ""
    is_log = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
    return "" if is_log and name == "warning" and call.func.value.id == "logger" else None  # type: ignore[attr-defined]


MAKERS = ("missing_package",)
WARNING = "warn_once"
"""A function that logs its second argument."""
SPEAKS = re.compile(rf"\b(?:{'|'.join((*ERRORS, *MAKERS, WARNING, 'warning'))})\b")
"""What a file contains that has a message; to parse the others takes a second."""


def missing(call: ast.Call, around: ast.AST) -> list[str] | None:
    """The messages of a call of `errors.missing_package`."""
    if getattr(call.func, "id", "") not in MAKERS:
        return None
    uses, packages = (text_of(arg, around) or [HOLE] for arg in call.args[:2])
    return [f"{use} the package {package}, which is not installed." for use in uses for package in packages]


def messages() -> Iterator[Message]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if not SPEAKS.search(text := path.read_text(encoding="utf-8")):
            continue
        tree = ast.parse(text)
        nodes = [*ast.walk(tree)]
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            error = spoken(call)
            if error is None and getattr(call.func, "id", "") not in MAKERS:
                continue
            around = next((f for f in reversed(functions) if f.lineno <= call.lineno <= (f.end_lineno or 0)), tree)
            where = f"{path.relative_to(PACKAGE)}:{call.lineno}"
            if getattr(around, "name", "") in (*MAKERS, WARNING):
                continue
            yield from (Message(text, "MissingPackageError", where) for text in missing(call, around) or ())
            if error is None:
                continue
            args = call.args[1:] if getattr(call.func, "id", "") == WARNING else call.args
            form = args[0].value if isinstance(args[0], ast.Constant) else None
            begins_with_another = isinstance(form, str) and form.startswith("%s")
            if any(map(passes_on, args if begins_with_another else args[:1])):
                continue
            bare = form == "%s"
            for text in text_of(args[bare], around) or [HOLE]:
                yield Message(text, error, where)


def sections() -> dict[str, str]:
    """The text of each section of the page, by its heading."""
    return {
        part.partition("\n")[0]: part.partition("\n")[2].strip() for part in re.split(r"^### ", PAGE, flags=re.M)[1:]
    }


def fits(pattern: str, message: Message) -> bool:
    return expression(pattern).search(message.text) is not None


@functools.cache
def expression(pattern: str) -> re.Pattern[str]:
    """Compiled once: `re` remembers fewer than there are."""
    return re.compile(".*".join(re.escape(part) for part in pattern.split(HOLE)), re.DOTALL)


MESSAGES = [*messages()]
ENTRIES = [Entry(tuple(one["texts"]), one["advice"]) for one in TABLE]
SECTIONS = {heading: Entry(tuple(re.findall(r"`([^`]+)`", heading)), text) for heading, text in sections().items()}
MOST_WORDS = 55
"""Of a section: two sentences."""


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.where)
def test_every_message_has_an_entry(message: Message) -> None:
    assert any(fits(pattern, message) for entry in ENTRIES for pattern in entry.patterns), (
        f"{message.error or 'the warning'} {message.text!r} has no entry in docs/reference/messages.toml"
    )


@pytest.mark.parametrize("entry", [*ENTRIES, *SECTIONS.values()], ids=lambda entry: str(entry.patterns)[:50])
def test_every_entry_is_of_a_message(entry: Entry) -> None:
    for pattern in entry.patterns:
        found = {message.text for message in MESSAGES if fits(pattern, message)}
        assert found, f"no error and no warning says {pattern!r}"
        assert len(found) <= MOST_MESSAGES, f"{pattern!r} fits {len(found)} messages"
        assert len(re.sub(r"\W", "", pattern)) >= LEAST_LETTERS, f"{pattern!r} would fit anything"
    assert len(set(entry.patterns)) == len(entry.patterns)
    assert re.search(r"\w{4}.*\.$", entry.advice, re.DOTALL)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_section_of_the_page_is_two_sentences(heading: str) -> None:
    section = SECTIONS[heading]
    assert len(section.advice.split()) <= MOST_WORDS
    kinds = {message.error for message in MESSAGES for pattern in section.patterns if fits(pattern, message)}
    named = set(re.findall(r"`(\w+)`", section.advice)) & ERRORS
    assert named <= kinds


def test_the_page_is_short() -> None:
    assert 40 <= len(SECTIONS) <= 50


def test_every_class_is_explained() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    assert {message.error for message in MESSAGES} - {""} <= set(re.findall(r"^## (\w+)", page, re.MULTILINE))


def test_the_messages_are_all_of_them() -> None:
    """The walk finds as many places as a look at the text does, and texts in each."""
    places = 0
    for path in PACKAGE.rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        places += len(re.findall(rf"\braise (?:{'|'.join(ERRORS)})\(\s*[^)\s]", code))
    assert places <= len({message.where for message in MESSAGES}) + 10  # those that pass on what others say
    assert places > 100
    assert [message for message in MESSAGES if not re.search(r"[a-z]{3}", message.text)] == []


@pytest.mark.parametrize("text", ["a hare is no rabbit", "… is no hare; expected a rabbit.", "…"])
def test_a_message_that_is_new_has_none(text: str) -> None:
    new = Message(text, "OptionError", "nowhere")
    assert not any(fits(pattern, new) for entry in ENTRIES for pattern in entry.patterns)
