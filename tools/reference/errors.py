"""docs/reference/errors.md, from the error classes: what each means, and its section "What to do"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe

from rabbitllm import errors
from tools.reference.markdown import one_line, paragraphs
from tools.reference.source import module, sections

WHAT_TO_DO = "What to do"
BEGIN = """\
# Errors

Each error that RabbitLLM raises on purpose is a `RabbitLLMError`. `str(error)` shows the problem (what was found, what
was expected) and, on a separate line, what to do. `error.problem` and `error.remedy` hold the two parts. Classes in
parentheses are Python's own; `except` with them catches the error too. On the command line an `OptionError` ends with
exit code 2, any other with 1. [messages.toml](messages.toml) lists single messages,
[Troubleshooting](../TROUBLESHOOTING.md) the most common problems.

```python
from rabbitllm import AutoModel, RabbitLLMError

try:
    AutoModel.from_pretrained("my-checkpoint", compression="5bit")
except RabbitLLMError as error:
    print(type(error).__name__, error.problem, error.remedy, sep="\\n")
```
"""


def page() -> str:
    """The page."""
    documented = module("rabbitllm.errors")
    tree = list(_below(errors.RabbitLLMError))
    lines = [BEGIN, "```text", *(f"{'  ' * depth}{_named(cls)}" for depth, cls in tree), "```"]
    for _, cls in tree:
        lines += ["", f"## {cls.__name__}", "", *_described(documented[cls.__name__])]
    return "\n".join(lines) + "\n"


def _below(cls: type[Any], depth: int = 0) -> Iterator[tuple[int, type[Any]]]:
    """The classes in the order of the source, each with its depth."""
    yield depth, cls
    for subclass in cls.__subclasses__():
        if subclass.__module__ == errors.__name__:
            yield from _below(subclass, depth + 1)


def _named(cls: type[Any]) -> str:
    others = [base.__name__ for base in cls.__bases__ if base.__module__ == "builtins" and base is not Exception]
    return f"{cls.__name__} ({', '.join(others)})" if others else cls.__name__


def _described(owner: griffe.Object) -> Iterator[str]:
    for section in sections(owner):
        if section.kind is griffe.DocstringSectionKind.text:
            yield "\n\n".join(paragraphs(section.value))
        elif section.kind is griffe.DocstringSectionKind.parameters:
            for item in section.value:
                yield ""
                yield f"`{item.name}`: {one_line(item.description)}"
        elif section.kind is griffe.DocstringSectionKind.admonition and section.title == WHAT_TO_DO:
            yield ""
            yield f"**{WHAT_TO_DO}:** {one_line(section.value.description)}"
