"""What lines mean: commands, messages, messages of several lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rabbitllm.chat.loop import COMMANDS, Command, command_of, count_of, read_message
from rabbitllm.errors import ChatError


def test_parsed_commands() -> None:
    assert command_of("/save  my talk.json ") == Command("/save", "my talk.json")
    assert command_of("/stats") == Command("/stats", "")
    assert command_of("hello /stats") is None
    assert command_of(" /stats") is None
    for name, (argument, _) in COMMANDS.items():
        assert command_of(f"{name} x" if argument else name) is not None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sav x", "There is no command '/sav'"),
        ("/", "There is no command '/'"),
        ("/save", "needs a file name"),
        ("/load  ", "needs a file name"),
        ("/image", "Type /image FILE"),
        ("/reset all", "takes no argument"),
    ],
)
def test_unknown_commands_are_refused(line: str, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        command_of(line)


def test_numbers_to_drop() -> None:
    assert [count_of(""), count_of("1"), count_of("12")] == [1, 1, 12]
    for wrong in ("0", "-1", "two", "²", "1.5"):
        with pytest.raises(ChatError, match="takes a number of exchanges"):
            count_of(wrong)


def reader(*lines: str) -> Callable[[str], str]:
    """Lines one after the other, then the end."""
    remaining = list(lines)

    def read(prompt: str) -> str:
        if not remaining:
            raise EOFError
        return remaining.pop(0)

    return read


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello "], "hello"),
        (["", "later"], ""),
        (['"""one', "", '  two"""'], "one\n\n  two"),
        (['"""', "one", '"""', "next"], "one"),
        (['"""all in one"""'], "all in one"),
        (['"""one', "the end is missing"], "one\nthe end is missing"),
        (['say """hello"""'], 'say """hello"""'),
        (['""""""'], ""),
    ],
)
def test_messages_of_one_or_several_lines(lines: list[str], message: str) -> None:
    assert read_message(reader(*lines)) == message


def test_end_of_input() -> None:
    with pytest.raises(EOFError):
        read_message(reader())
