"""Every command that a document shows is started, as it stands there but for the substitutions listed below.

So are the examples of each command's help.

A command is each line of a ```bash block, each line of a ```text block behind a prompt (`$ `, or with the name of a
host `first$ `), and inline code that begins like one (`STARTS`). Inline code with `…` is the text of a message. Inline
code of `rabbitllm` that lacks an argument which the command needs (`rabbitllm verify --repair`) names a part of the
command: that part must exist. Benchmarks run at their smallest size, those too that no page names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import rabbitllm.demo
from benchmarks.catalogue import CATALOGUE, GROUPS, module_of
from benchmarks.lib.process import can_limit_memory
from benchmarks.lib.server_process import free_port
from rabbitllm.cli.main import app
from tests.conftest import PROCESSOR_SECONDS
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.pages import examples_of
from tests.support.picture_models import build as build_with_pictures
from tests.support.picture_models import picture
from tests.support.ray_cluster import local_cluster
from tests.support.terminals import at_a_terminal
from tests.support.tiny_models import split

ROOT = Path(__file__).parent.parent
DEMO = Path(rabbitllm.demo.__file__).parent / "model"
BENCHMARKS = {
    name: (ROOT / f"{module_of(name).replace('.', '/')}.py").read_text(encoding="utf-8") for name in CATALOGUE
}
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for folder, pattern in ((ROOT, "*.md"), *((ROOT / name, "**/*.md") for name in ("docs", "tests", "benchmarks")))
    for page in sorted(folder.glob(pattern))
}
LIMIT_SECONDS = 600

STARTS = re.compile(r"(?:sudo )?(?:(?:echo|printf|cat) [^|]*\| )?(?:rabbitllm|python -m|make) \S")
PROMPT = re.compile(r"^ *\w*\$ (?P<command>.*)$", re.MULTILINE)
ELSEWHERE = {
    r"pip install .*": "test_pip_install_gives_the_command installs; here extras are compared with pyproject.toml",
    r"python -m tests\.support\.pages .*": "tests/test_walkthrough.py starts it, on a copy of the page",
    r"python -m tools\.reference.*": "it writes pages; tests/test_reference.py compares them",
    r"python -m tools\.size --update": "it writes budgets of this tree; tests/test_size.py does in another",
}
"""Patterns of what is not started here, and why."""
SUBSTITUTIONS: Sequence[tuple[str, str, str]] = (
    (r"^sudo ", "", "it is for control groups; where none can be made those benchmarks are skipped"),
    (r"^make (?=[\w-]+(?: \w+=\S+)*$)", "make -n -C {root} ", "it runs this very test, or what has its own"),
    (r"^(python -m benchmarks (?!list).*)$", r"\1 --smallest", "the figures of a page take minutes to hours"),
    (r"(tools\.supported_models)$", r"\1 qwen2", "examining all types takes an hour, and writes the table"),
    (r"(tests\.frozen\.make) MODULE$", r"\1 test_public_names --into made", "golden data are not written here"),
    (r"(--install-completion)$", r"\1 && true", "it looks for the shell among its parents"),
    (r"\bMODEL\b", "my-checkpoint", "placeholder"),
    (r"\bFOLDER\b", "my-checkpoint", "placeholder"),
    (r"\bFILE\b", "consolidated.00.pth", "placeholder"),
    (r"\bIN\b", "my-checkpoint", "placeholder"),
    (r"\bDIR\b", "made", "placeholder"),
    (r"\bINPUT\b", "questions.jsonl", "placeholder"),
    (r"\bOUTPUT\b", "answers.jsonl", "placeholder"),
    (r"\bTYPE\b", "qwen2", "placeholder"),
    (r" /shared/", " shared/", "no folder is shared by hosts"),
    (r"~/\.lmstudio/\S+\.gguf", "my-checkpoint", "LM Studio is not installed"),
    (r"(?<=--ray )auto", "{ray}", "the cluster is one of this test"),
    (r"192\.168\.1\.5:29500", "{address}", "there are no other hosts"),
    (r"^((?:RABBITLLM_API_KEY=KEY )?rabbitllm serve .*)$", r"\1 --port {port}", "port 8000 may be in use"),
    (r"^(rabbitllm rm (?!.*--yes).*)$", r"\1 --yes", "there is no terminal to ask"),
)
"""Pattern, replacement, reason."""
NEEDS_SPLIT = ("show", "verify", "rm", "ls")
"""Subcommands that are about a split that was made before."""
FILE = "consolidated.00.pth"
MODEL_FOLDERS = ("my-checkpoint", "rabbitllm/demo/model", "shared/Llama-70B")
ON_A_TERMINAL = {
    "rabbitllm batch my-checkpoint questions.jsonl -o answers.jsonl",
    "rabbitllm chat rabbitllm/demo/model --compression auto --dir layers",
}
"""Whose output a page shows as a terminal has it."""
LABEL = re.compile(r'[^\s…]| "\w+":')


@dataclass(frozen=True)
class Shown:
    """A command, the page that it is first shown on, whether in a block, and what that block says it prints."""

    text: str
    page: str
    is_block: bool = True
    output: str = ""


def tidy(line: str) -> str:
    """Without a comment, in one line."""
    return " ".join(re.sub(r"(^|\s)#.*", "", line.replace("\\\n", " ")).split())


def shown_in(page: str, text: str) -> Iterator[Shown]:
    """What a page shows, parts of commands included."""
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "bash":
            yield from (Shown(line, page) for line in map(tidy, re.split(r"(?<!\\)\n", code)) if line)
        elif language == "text":
            _, *found = PROMPT.split(code)
            for command, output in zip(found[::2], found[1::2], strict=True):
                yield Shown(tidy(command), page, output=output)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([^`]+)`", prose):
        line = " ".join(code.replace("\\|", "|").split())
        if STARTS.match(line) and "…" not in line:
            yield Shown(line, page, is_block=False)


def words_of(line: str) -> list[str]:
    """What stands behind `rabbitllm` or `python -m rabbitllm`, without pipes; empty where that is not called."""
    found = re.search(r"(?:^|\| )(?:python -m )?rabbitllm (?P<words>.*?)(?: [|<].*)?$", line)
    return shlex.split(found["words"]) if found else []


def is_part(shown: Shown) -> bool:
    """Whether it is inline code that only names a part of a command of `rabbitllm`."""
    words = words_of(shown.text)
    if shown.is_block or not words or words[0] not in COMMANDS:
        return False
    needed = [one for one in COMMANDS[words[0]].params if one.required]
    flags = {name for one in COMMANDS[words[0]].params if getattr(one, "is_flag", False) for name in one.opts}
    operands = options = 0
    rest = iter(words[1:])
    for word in rest:
        options += any(word in one.opts for one in needed)
        if not word.startswith("-"):
            operands += 1
        elif word not in flags and next(rest, None) is None:
            return True
    arguments = sum(one.param_type_name == "argument" for one in needed)
    return operands < arguments or options < len(needed) - arguments


COMMANDS: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
ALL = [shown for page, text in PAGES.items() for shown in shown_in(page, text)]
ALL += [
    Shown(example, f"rabbitllm {name} --help") for name, command in COMMANDS.items() for example in examples_of(command)
]
PARTS = {shown.text: shown for shown in ALL if is_part(shown)}
WHOLE = {shown.text: shown for shown in sorted(ALL, key=lambda one: len(one.output)) if shown.text not in PARTS}
WHOLE |= {
    f"python -m benchmarks {name}": Shown(f"python -m benchmarks {name}", "benchmarks/catalogue.py")
    for name in BENCHMARKS
    if not any(f"-m benchmarks {name} " in f"{text} " for text in WHOLE)
}
STARTED = {
    text: shown for text, shown in WHOLE.items() if not any(re.fullmatch(pattern, text) for pattern in ELSEWHERE)
}
OF_BENCHMARKS = sorted(text for text in STARTED if re.search(r"-m benchmarks (?!list)", text))
OTHERS = sorted(STARTED.keys() - set(OF_BENCHMARKS))
TYPED = re.compile(r"^(?:>>>|\.\.\.) (.*)$", re.MULTILINE)
"""What a page shows as typed into a command."""
SESSIONS = sorted(text for text, shown in STARTED.items() if TYPED.search(shown.output))
ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Scene:
    """A folder with everything that commands name, and the names of programs that find this interpreter."""

    def __init__(self, home: Path, tmp: Path) -> None:
        self.work, self.tmp, self._bin = home / "work", tmp, home / "bin"
        for folder in (self.work, self._bin):
            folder.mkdir()
        for name, module in (("rabbitllm", "-P -m rabbitllm "), ("python", "")):
            (self._bin / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module}"$@"\n')
            (self._bin / name).chmod(0o755)
        (self.work / "chapter.txt").write_text(PAGES["CONTRIBUTING.md"], encoding="utf-8")
        (self.work / "report.txt").write_text("Sort from low to high: 31 5 77 2\n")
        (self.work / "question.txt").write_text("What is 12 + 7?\n")
        for name in ("questions.jsonl", "in.jsonl"):
            (self.work / name).write_text('{"prompt": "What is 12 + 7?", "max_new_tokens": 4}\n' * 3)
        picture().save(self.work / "photo.jpg")
        names = ("tok_embeddings", "norm", "output", *(f"layers.{n}.attention.wq" for n in range(6)))
        torch.save({f"{name}.weight": torch.ones(8, 8) for name in names}, self.work / FILE)
        self.values = {"root": str(ROOT), "port": str(free_port()), "address": f"127.0.0.1:{free_port()}"}

    def with_models(self, command: str, output: str, hub: Path) -> None:
        """Make those that a command or its output names, and split them for commands that are about splits."""
        for folder in MODEL_FOLDERS:
            if folder in command + output:
                shutil.copytree(DEMO, self.work / folder)
        for repository in re.findall(r"\b[A-Z]\w+/[\w.-]+", command):
            if "-VL-" in repository:
                build_with_pictures(hub / repository, "qwen3_vl")
            else:
                shutil.copytree(DEMO, hub / repository, dirs_exist_ok=True)
        if "--to gguf" in command:
            for file in (*self.work.glob("*/tokenizer.json"), *hub.glob("*/*/tokenizer.json")):
                cut_as_gpt2(file)
        if words_of(command)[:1] and words_of(command)[0] in NEEDS_SPLIT and "my-checkpoint" in command + output:
            split(self.work / "my-checkpoint", "4bit")

    def begin(self, command: str) -> subprocess.Popen[str]:
        """Start a line of a shell; `rabbitllm chat` is given a question, and others nothing."""
        return subprocess.Popen(
            ["bash", "-c", command],
            stdin=(self.work / ("question.txt" if command.startswith("rabbitllm chat") else os.devnull)).open(),
            cwd=self.work,
            env=self.environment(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def environment(self, command: str) -> dict[str, str]:
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "TMPDIR": str(self.tmp), "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        own |= {"HOME": str(self.work)} if "--install-completion" in command else {}  # its profile is changed
        return {**os.environ, **own}


def cut_as_gpt2(file: Path) -> None:
    """Give a tokenizer a pre-tokenizer that llama.cpp has; it has none like that of the bundled model."""
    known = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), "pre_tokenizer": known}))


@pytest.fixture
def scene(tmp_path: Path, hub_environment: HubEnvironment) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="docs-") as tmp:  # a socket has to fit into 108 characters
        yield Scene(tmp_path, Path(tmp))


def substituted(
    text: str, values: dict[str, str], substitutions: Sequence[tuple[str, str, str]] = SUBSTITUTIONS
) -> str:
    """A command as it can be started here."""
    for pattern, replacement, _ in substitutions:
        text = re.sub(pattern, replacement.replace("{root}", values["root"]), text)
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def partner_of(command: str) -> str | None:
    """What the other host runs meanwhile."""
    if found := re.match(r"rabbitllm worker (\S+) --join (\S+)", command):
        return f'rabbitllm run {found[1]} "What is a rabbit?" --workers 1 --address {found[2]}'
    if found := re.match(r"rabbitllm run (\S+) .*--workers 1 --address (\S+)", command):
        return f"rabbitllm worker {found[1]} --join {found[2]}"
    return None


def finished(process: subprocess.Popen[str]) -> str:
    """What it said until it ended, which must be well."""
    try:
        said, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    assert "Traceback" not in said, said
    return said


def ask(port: str, server: subprocess.Popen[str]) -> None:
    """One request to a server, as soon as it answers; then an interrupt."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "What is 12 + 7?"}], "max_tokens": 2}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer KEY"},
    )
    until = time.monotonic() + LIMIT_SECONDS
    while server.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 2
            break
        except urllib.error.URLError:
            time.sleep(0.1)
    server.send_signal(signal.SIGINT)


def labels(text: str) -> list[str]:
    """What lines of a page begin with, as far as no figure and no width matters."""
    found = [re.split(r"  |: |\d", line.strip())[0].strip() for line in text.splitlines() if LABEL.match(line)]
    return [label for label in found if label]


def started(shown: Shown, scene: Scene, hub: Path) -> str:
    """Run a command to its end; what it printed."""
    command = substituted(shown.text, scene.values)
    scene.with_models(command, shown.output, hub)
    partner = partner_of(command)
    other = None if partner is None else scene.begin(partner)
    process = scene.begin(command)
    if " serve " in f" {command} " and "rabbitllm serve" in command:
        ask(scene.values["port"], process)
    said = finished(process)
    if other is not None:
        finished(other)
    return said


@pytest.mark.parametrize("text", OTHERS, ids=OTHERS)
@pytest.mark.long
def test_command(text: str, scene: Scene, local_hub: LocalHub, tmp_path: Path) -> None:
    shown = STARTED[text]
    if "--ray" in text:
        pytest.importorskip("ray")
        with local_cluster() as address:
            scene.values["ray"] = address
            started(shown, scene, tmp_path / "hub")
        return
    said = started(shown, scene, tmp_path / "hub")
    if text not in ON_A_TERMINAL:
        assert [label for label in labels(shown.output) if not re.search(rf"(?<!\S){re.escape(label)}", said)] == [], (
            said
        )


@pytest.mark.parametrize("text", SESSIONS, ids=SESSIONS)
@pytest.mark.long
def test_session(text: str, scene: Scene, tmp_path: Path) -> None:
    """What a page shows as typed is typed at a terminal; what came is what the page shows, to the letter."""
    expected = STARTED[text].output.strip()
    scene.with_models(text, expected, tmp_path / "hub")
    came = ""
    line = f"cd {scene.work} && {text}"
    with at_a_terminal(["bash", "-c", line], LIMIT_SECONDS, scene.environment(text)) as terminal:
        for typed in TYPED.findall(expected):
            came += terminal.until(r"(?:>>>|\.\.\.) ")
            terminal.send(f"{typed}\r")
            came += terminal.until(re.escape(typed))
    assert ESCAPES.sub("", came).replace("\r\n", "\n")[-len(expected) :] == expected


@pytest.mark.parametrize("text", OF_BENCHMARKS, ids=OF_BENCHMARKS)
@pytest.mark.long
def test_benchmark(text: str, scene: Scene, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """The processor time of its processes is said at the end of the test run, and never fails a test."""
    name = re.findall(r"-m benchmarks (\S+)", text)[0]
    if GROUPS in CATALOGUE[name].needs and not can_limit_memory():
        pytest.skip("no control group with a memory limit can be made")
    before = os.times()
    said = started(STARTED[text], scene, tmp_path / "hub")
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    record_property(PROCESSOR_SECONDS, round(spent, 1))
    assert "the figures mean nothing" in said
    assert [*scene.tmp.glob("rabbitllm-benchmark-*")] == []


@pytest.mark.parametrize("text", sorted(PARTS))
def test_a_part_of_a_command_exists(text: str) -> None:
    name, *rest = words_of(text)
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts + parameter.secondary_opts}
    assert {word for word in rest if word.startswith("-")} <= options


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if f"-m benchmarks {name} " in BENCHMARKS[name]])
def test_options_that_a_benchmark_names_exist(name: str) -> None:
    docstring, code = BENCHMARKS[name].split('"""', 2)[1:]
    shared = (ROOT / "benchmarks" / "lib" / "command_line.py").read_text(encoding="utf-8")
    taken = set(re.findall(r'"(--[\w-]+)"', code + shared))
    synopsis = docstring.partition(f"-m benchmarks {name} ")[2].partition("\n\n")[0]
    assert set(re.findall(r"--[a-z][\w-]+", synopsis)) <= taken


def test_every_exception_is_of_a_command_that_is_shown() -> None:
    """One that is not would be missed by the command that has taken its place, in the long run only."""
    values = {"root": "/root"}
    as_started = {text: substituted(text, values) for text in STARTED}
    for number, (pattern, _, reason) in enumerate(SUBSTITUTIONS):
        others = [*SUBSTITUTIONS[:number], *SUBSTITUTIONS[number + 1 :]]
        assert any(substituted(text, values, others) != line for text, line in as_started.items()), (pattern, reason)
    assert [pattern for pattern in ELSEWHERE if not any(re.fullmatch(pattern, text) for text in WHOLE)] == []
    assert [text for text in ON_A_TERMINAL if not (text in STARTED and STARTED[text].output)] == []
    seen = [line + STARTED[text].output for text, line in as_started.items()]
    assert [folder for folder in MODEL_FOLDERS if not any(folder in text for text in seen)] == []


def test_extras_that_are_installed_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = {extra for text in PAGES.values() for extra in re.findall(r"pip install ['\"]\S*\[(\w+)\]", text)}
    assert asked
    assert asked <= set(extras)


def test_what_counts_as_a_command() -> None:
    page = (
        "```bash\nmake demo  # and more\nrabbitllm ls \\\n  .\n```\n\n"
        "```text\nfirst$ rabbitllm show a\na\n$ pip install .\n```\n\n"
        "`rabbitllm verify --repair`, `rabbitllm ls \\| head`, `sudo python -m\nbenchmarks experts`, "
        "`rabbitllm … fails`, `make`\n"
    )
    found = list(shown_in("page", page))
    assert [one.text for one in found] == [
        *("make demo", "rabbitllm ls .", "rabbitllm show a", "pip install ."),
        *("rabbitllm verify --repair", "rabbitllm ls | head", "sudo python -m benchmarks experts"),
    ]
    assert [one.output.strip() for one in found if one.output.strip()] == ["a"]
    assert [one.text for one in found if is_part(one)] == ["rabbitllm verify --repair"]
