"""The picture of the README, and the script that records it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

import rabbitllm.demo
from rabbitllm.cli.main import app
from tools.terminal_picture import Screen, draw, record, typed

ROOT = Path(__file__).parent.parent
DEMO = Path(rabbitllm.demo.__file__).parent / "model"
[PICTURE] = re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", (ROOT / "README.md").read_text(encoding="utf-8"))


def lines_of(picture: Path) -> list[str]:
    """What a picture shows: the pieces of text at one height are a line."""
    lines: dict[str, str] = {}
    for text in ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text"):
        lines[text.attrib["y"]] = lines.get(text.attrib["y"], "") + (text.text or "")
    return [line.replace("\N{NO-BREAK SPACE}", " ").strip() for line in lines.values()]


def test_the_picture_shows_commands_that_exist_and_refers_to_nothing_else() -> None:
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    shown = [shlex.split(line[2:]) for line in lines_of(ROOT / PICTURE) if line.startswith("$ ")]
    assert [words[:2] for words in shown] == [["rabbitllm", "pull"], ["rabbitllm", "run"]]
    for _, name, *rest in shown:
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in rest if word.startswith("-")} <= options
    text = (ROOT / PICTURE).read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"\s]+", text)) == {"http://www.w3.org/2000/svg"}


def test_a_screen_follows_what_a_live_display_writes() -> None:
    screen = Screen()
    screen.feed(b"\x1b[?25l\x1b[1;32mone\x1b[0m 10 %\ntwo\nthree")
    assert screen.text().plain == "one 10 %\ntwo\nthree"
    screen.feed(b"\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2Kdone")
    assert screen.text().plain == "done"
    screen.feed(b"\rnone\x1b[0K\nleft\r\x1b[J\xc2\xb7")
    assert screen.text().plain == "none\n·"
    assert [str(span.style) for span in screen.text().spans] == []


def test_colours_are_kept(tmp_path: Path) -> None:
    screen = Screen()
    screen.feed(b"\x1b[32mgreen\x1b[0m plain")
    draw([typed("rabbitllm", "ls"), screen.text()], tmp_path / "picture.svg")
    assert lines_of(tmp_path / "picture.svg") == ["$ rabbitllm ls", "green plain", ""]
    assert "#56d364" in (tmp_path / "picture.svg").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_session_is_recorded(tmp_path: Path) -> None:
    parts = [part.plain for part in record(DEMO, "org/demo", ["--compression", "4bit"], 50, 0.5, tmp_path)]
    assert parts[0] == "$ rabbitllm pull org/demo --compression 4bit"
    assert re.search(r"splitting .* \d+ %", parts[1])
    assert "org/demo, 4bit, is ready" in parts[3]
    assert parts[5].startswith("$ rabbitllm run org/demo")
