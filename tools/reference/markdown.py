"""Tables and paragraphs of Markdown, from docstrings."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence


def one_line(text: str) -> str:
    """A paragraph in one line."""
    return " ".join(text.split())


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring, each in one line; indented blocks become blocks of code."""
    blocks = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if all(line.startswith("    ") for line in part.splitlines()):
            code = "\n".join(line[4:] for line in part.splitlines())
            blocks.append(f"```text\n{code}\n```")
        else:
            blocks.append(sentence(one_line(part)))
    return blocks


def sentence(text: str) -> str:
    """With a capital letter, unless it begins with a name or a word in quotation marks."""
    return text[:1].upper() + text[1:]


def cell(text: str) -> str:
    """As a cell of a table. Markdown's readers differ on a bar in code, so such code is HTML."""
    code = re.compile(r"`([^`]*[|][^`]*)`")
    text = code.sub(lambda match: f"<code>{html.escape(match[1], quote=False)}</code>", one_line(text))
    return text.replace("|", "&#124;")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table, without columns that are empty in each row."""
    rows = [[cell(value) for value in row] for row in rows]
    kept = [column for column in range(len(head)) if column == 0 or any(row[column] for row in rows)]
    lines = [
        [head[column] for column in kept],
        ["---"] * len(kept),
        *([row[column] for column in kept] for row in rows),
    ]
    return ["| " + " | ".join(line) + " |" for line in lines]
