"""What a terminal shows after some output: as much of one as progress needs, and nothing that it does not know.

Lines, wrapping at the right edge as xterm does it (a full line wraps when the next character comes), scrolling, cursor
up, left and right, erasing to the end of a line or of the screen, and styles, which are dropped. Anything else is an
error.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
import time

_PIECES = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)|(\x1b)")


class Screen:
    """A screen of some columns and rows; ``lines`` has what scrolled off too."""

    def __init__(self, columns: int, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[str] = [""]
        self.row = self.column = 0

    def feed(self, output: str) -> Screen:
        """Act upon what a program wrote; a line feed is one as a terminal driver passes it on."""
        for code, command, control, text, stray in _PIECES.findall(output):
            if stray:
                raise AssertionError(f"an escape sequence that this screen does not know, in {output!r}")
            if text:
                for character in text:
                    self._put(character)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.column = 0
                self._down()
            else:
                self._act(command, int(code.split(";")[0] or 0) if command != "m" else 0)
        return self

    @property
    def shown(self) -> list[str]:
        """Every line with anything on it, from the top of what was ever shown."""
        lines = [line.rstrip() for line in self.lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def _act(self, command: str, count: int) -> None:
        if command == "A":
            assert self.row - max(count, 1) >= max(0, len(self.lines) - self.rows), "above the screen's top"
            self.row -= max(count, 1)
        elif command == "C":
            self.column = min(self.column + max(count, 1), self.columns - 1)
        elif command == "D":
            self.column = max(min(self.column, self.columns - 1) - max(count, 1), 0)
        elif command in "JK":
            assert count == 0
            self.lines[self.row] = self.lines[self.row][: self.column]
            if command == "J":
                del self.lines[self.row + 1 :]
        else:
            assert command == "m", f"ESC [ {command}"

    def _put(self, character: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")


class TerminalStream(io.StringIO):
    """A stream that says it is a terminal; how large it is, COLUMNS and LINES of the environment say."""

    def isatty(self) -> bool:
        return True

    def screen(self, columns: int) -> list[str]:
        """What a person sees of it."""
        return Screen(columns).feed(self.getvalue()).shown


def run_on_terminal(command: list[str], columns: int, environment: dict[str, str], seconds: float = 60) -> str:
    """Run a program whose stdout and stderr are one terminal, and return everything it wrote there."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    program = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    output = b""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            piece = os.read(leader, 1 << 16)
        except OSError:  # Linux says so when the last one has closed it
            break
        if not piece:
            break
        output += piece
    else:
        program.kill()
    os.close(leader)
    assert program.wait() == 0, output.decode()
    return output.decode()
