"""Names the options of the command line in messages, which name arguments in Python's spelling."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from typing import Any

_RENAMED = {"layer_shards_saving_path": "--dir", "sequential_shard_processing": "--sequential", "token": ""}
"""Arguments with another name here; the hub's token is an option of `pull` alone."""
_VALUE = r"=(?P<value>None|True|False|'[^']*'|\{[^{}]*\}|[\w.,]*\w)?"
_ENTRY = re.compile(r"('[^']*'|\w+): ('[^']*'|[\w,]*\w)")
_KEY = r"\[(?P<key>'[^']*'|\d+)\]"
_ARGUMENT = re.compile(rf"(?<![\w/.\\=-])(?P<name>[a-z]+(?:_[a-z]+)*)(?:{_KEY})?(?:{_VALUE})?(?![\w/\\-]|\.\w)")
_SAID_TWICE = re.compile(r"(?P<option>--[a-z-]+)(?:, (?P=option)\b| \((?:rabbitllm [a-z]+ )?(?P=option)\))")


def options_of(command: Any) -> Iterator[str]:
    """The long options of a command and of those below it."""
    for parameter in command.params:
        yield from (name for name in parameter.opts if name.startswith("--"))
    for below in getattr(command, "commands", {}).values():
        yield from options_of(below)


def as_typed(text: str, options: Collection[str], elsewhere: Collection[str] = ()) -> str:
    """A message with each argument that is an option named as a user types it: `compression='8bit'` is
    `--compression 8bit`. A plain word stays: it may be English.

    Args:
        text: the message.
        options: long options of the command.
        elsewhere: those of other commands; for this one they are arguments `in Python`.
    """

    def option(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        is_off = value == "False"
        typed = _RENAMED.get(name, f"--{'no-' if is_off else ''}{name.replace('_', '-')}")
        if (is_off and name in _RENAMED) or ("_" not in name and "=" not in match[0]):
            return match[0]
        if typed not in options:
            return f"{match[0]} in Python" if typed in elsewhere else match[0]
        if value and value[0] == "{":
            return " ".join(f"{typed} {key}={size}".replace("'", "") for key, size in _ENTRY.findall(value))
        word = "none" if value == "None" else (value or "").strip("'")
        word = "=".join(filter(None, [(match["key"] or "").strip("'"), word]))
        return f"{typed} {word}" if match["key"] or value not in (None, "True", "False") else typed

    return _SAID_TWICE.sub(lambda match: match["option"], _ARGUMENT.sub(option, text))


_running = list[frozenset[str]]()
"""Options of the command that runs, and of all."""


def runs(command: Any, root: Any) -> None:
    """Have `typed_here` name the options of this command of the root's."""
    _running[:] = frozenset(options_of(command)), frozenset(options_of(root))


def typed_here(text: str) -> str:
    """A message as the user of the command that runs types it, or as it is where none does; see `as_typed`."""
    return as_typed(text, *_running) if _running else text


class TypedRecord(logging.LogRecord):
    """A record of a log; warnings of this package name options as typed."""

    def getMessage(self) -> str:
        text = super().getMessage()
        return typed_here(text) if self.levelno >= logging.WARNING and self.name.startswith("rabbitllm") else text
