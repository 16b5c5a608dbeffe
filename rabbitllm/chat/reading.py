"""Messages from lines: one a line, or several lines between triple quotes. Knows no terminal."""

from __future__ import annotations

from collections.abc import Callable

from rabbitllm.chat.commands import QUOTES

PROMPT = ">>> "
CONTINUATION = "... "


def read_message(read_line: Callable[[str], str]) -> str:
    """The next message or command, without white space around it; an empty one for an empty line.

    Quotes stand at the beginning of the first line, and at the end of the last, which may be the same. Input that ends
    before them ends the message.

    Args:
        read_line: a prompt -> a line without its end.

    Raises:
        EOFError: there is no further line.
    """
    line = read_line(PROMPT).rstrip()
    if not line.startswith(QUOTES):
        return line
    lines = []
    line = line[len(QUOTES) :]
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        try:
            line = read_line(CONTINUATION)
        except EOFError:
            return "\n".join(lines).strip()
    lines.append(line.rstrip().removesuffix(QUOTES))
    return "\n".join(lines).strip()
