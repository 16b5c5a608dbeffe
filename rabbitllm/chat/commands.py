"""Parses the commands of a chat."""

from __future__ import annotations

from dataclasses import dataclass

from rabbitllm.errors import ChatError

COMMANDS: dict[str, tuple[str, str]] = {
    "/system": ("[TEXT]", "set the system prompt; without a text show it, with - remove it"),
    "/save": ("FILE", "write the conversation as JSON"),
    "/load": ("FILE", "go on with a saved conversation instead of this one"),
    "/drop": ("[N]", "forget the oldest exchange, or the N oldest"),
    "/reset": ("", "forget everything but the system prompt"),
    "/stats": ("", "tokens, times, passes and bytes, of the last answer and of all"),
    "/help": ("", "this list"),
    "/exit": ("", "leave; Ctrl-D does it too"),
}
"""Command -> its argument, in brackets if optional, and its help text."""
QUOTES = '"""'
"""Mark at the beginning and end of a message of several lines."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its argument; an empty one if there is none."""

    name: str
    argument: str


def command_of(line: str) -> Command | None:
    """The command on a line; None if the line is a message for the model.

    Raises:
        ChatError: an unknown command, a missing argument, or an unexpected one.
    """
    if not line.startswith("/"):
        return None
    name, _, rest = line.partition(" ")
    argument = rest.strip()
    if name not in COMMANDS:
        raise ChatError(
            f"There is no command {name[:40]!r}.", "/help lists them; a message may begin with a space, then a slash."
        )
    takes = COMMANDS[name][0]
    if argument and not takes:
        raise ChatError(f"{name} takes nothing more.", f"Type {name} alone.")
    if not argument and takes and not takes.startswith("["):
        raise ChatError(f"{name} needs the name of a file.", f"For example {name} talk.json.")
    return Command(name, argument)


def count_of(argument: str) -> int:
    """The number in the argument of /drop; 1 by default.

    Raises:
        ChatError: the argument is no number, or below 1.
    """
    if not argument:
        return 1
    if not (argument.isascii() and argument.isdigit()) or int(argument[:9]) < 1:
        raise ChatError(f"/drop takes a number of exchanges, not {argument[:40]!r}.", "For example /drop 3.")
    return int(argument[:9])
