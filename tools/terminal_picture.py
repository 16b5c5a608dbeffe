"""Record the picture of the README: a terminal that pulls a model and runs it, as an SVG file.

    python -m tools.terminal_picture CHECKPOINT --name NAME --home DIR --out docs/pictures/pull_and_run.svg

A hub on this machine serves the folder CHECKPOINT as the repository NAME. Both commands run in a pseudo-terminal. The
picture shows the lines that they printed: the progress about half-way (`--at`), then the screen at the end.
`--seconds-per-mib` makes the hub as slow as a network.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tests.support.local_hub import LocalHub

WIDTH = 92
PROMPT = "What is the capital of France?"
DONE = re.compile(r"(\d+) %")
_TOKEN = re.compile(rb"\x1b\[([?\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)|\x1b")
_THEME = TerminalTheme(
    (22, 27, 34),
    (214, 222, 230),
    [
        *((72, 79, 88), (255, 123, 114), (86, 211, 100), (227, 179, 65)),
        *((121, 192, 255), (210, 168, 255), (86, 212, 221), (177, 186, 196)),
    ],
)
_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>A terminal: rabbitllm pull, and rabbitllm run</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; white-space: pre; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


@dataclass
class Screen:
    """The lines of a terminal: knows what rich's live displays write, which go up, erase lines and change colours."""

    lines: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: str = ""

    def feed(self, data: bytes) -> None:
        """Apply output; a sequence must not be cut off at its end."""
        for match in _TOKEN.finditer(data):
            argument, letter, control, text = match.groups()
            if control is not None:
                self.column = 0
                self.row += control == b"\n"
            elif text is not None:
                self._write(text.decode("utf-8", "replace"))
            elif letter == b"m":
                self.style = "" if argument in (b"", b"0") else f"{self.style}\x1b[{argument.decode()}m"
            elif letter == b"A":
                self.row -= int(argument or 1)
            elif letter in (b"J", b"K"):
                self.lines[self.row] = [] if argument == b"2" else self.lines[self.row][: self.column]
                if letter == b"J":
                    del self.lines[self.row + 1 :]
            while self.row >= len(self.lines):
                self.lines.append([])

    def _write(self, text: str) -> None:
        line = self.lines[self.row]
        line.extend([(" ", "")] * (self.column - len(line)))
        line[self.column : self.column + len(text)] = [(character, self.style) for character in text]
        self.column += len(text)

    def text(self) -> Text:
        """Return what the screen shows, with its colours."""
        shown = ("".join(f"{style}{character}\x1b[0m" for character, style in line) for line in self.lines)
        text = Text.from_ansi("\n".join(shown).rstrip())
        text.rstrip()
        return text


def screens(command: list[str], environment: dict[str, str]) -> Iterator[Screen]:
    """Run a command in a terminal; yield its screen after each piece of output."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    screen, rest = Screen(), b""
    while True:
        try:
            data = os.read(parent, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            break
        if not data:
            break
        # whole lines and sequences only
        data = rest + data
        end = max(data.rfind(b"\x1b"), data.rfind(b"\n") + 1)
        screen.feed(data[:end])
        rest = data[end:]
        yield screen
    screen.feed(rest)
    os.close(parent)
    if process.wait():
        raise SystemExit(f"exit code {process.returncode}:\n{screen.text().plain}")
    yield screen


def record(
    checkpoint: Path, name: str, options: list[str], share: int, seconds_per_mib: float, home: Path
) -> list[Text]:
    """Return the parts of the picture: commands, and what they printed."""
    with tempfile.TemporaryDirectory() as folder:
        hub = Path(folder, "hub")
        shutil.copytree(checkpoint, hub / name)
        with LocalHub(hub) as served:
            served.faults.delay_per_mib = seconds_per_mib
            environment = {
                **os.environ,
                "HF_HOME": str(Path(folder, "home")),
                "HF_ENDPOINT": served.url,
                "RABBITLLM_HOME": str(home),
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1",
                "TERM": "xterm-256color",
                "COLORTERM": "truecolor",
                "COLUMNS": str(WIDTH),
                "CUDA_VISIBLE_DEVICES": "",
            }
            half_way, nearest = Text(), 101
            pull = ["rabbitllm", "pull", name, *options]
            for screen in screens([sys.executable, "-P", "-m", *pull], environment):
                if match := DONE.search(screen.text().plain):
                    distance = abs(int(match[1]) - share)
                    if distance <= nearest:
                        half_way, nearest = screen.text(), distance
            left = screen.text()
            run = ["rabbitllm", "run", name, PROMPT, "--max-new-tokens", "80"]
            *_, answered = screens([sys.executable, "-P", "-m", *run], environment)
    return [
        typed(*pull),
        half_way,
        Text(),
        left,
        Text(),
        typed("rabbitllm", "run", name, f'"{PROMPT}"'),
        answered.text(),
    ]


def typed(*words: str) -> Text:
    """Return a command behind a prompt."""
    return Text.assemble(("$ ", Style(color="green", bold=True)), (" ".join(words), Style(bold=True)))


def draw(parts: list[Text], out: Path) -> None:
    """Write the picture."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH + 4, file=nowhere, force_terminal=True, color_system="truecolor")
        for part in parts:
            console.print(Padding(part, (0, 2)), overflow="fold")
        console.print()
        out.write_text(
            console.export_svg(title="", theme=_THEME, code_format=_FORMAT, unique_id="terminal"), encoding="utf-8"
        )


def main() -> None:
    """Read the arguments, record, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compression", default="8bit")
    parser.add_argument("--max-disk", default="150MB")
    parser.add_argument("--at", type=int, default=60, help="percent of the split that the progress shows")
    parser.add_argument("--seconds-per-mib", type=float, default=0.03)
    parser.add_argument(
        "--home", type=Path, required=True, help="an empty folder for the layer files; its name is shown"
    )
    parsed = parser.parse_args()
    options = ["--compression", parsed.compression, "--max-disk", parsed.max_disk]
    draw(record(parsed.checkpoint, parsed.name, options, parsed.at, parsed.seconds_per_mib, parsed.home), parsed.out)


if __name__ == "__main__":
    main()
