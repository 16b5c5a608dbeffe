"""Every command that writes, killed at every step on the disk: the same command finishes, to the same bytes.

One table of commands. What each finds on the disk is made once, and copied for each kill. A kill is a SIGKILL of a
process of its own: from itself right before a step, or from another process some time after it. The same command then
has to end with the exit code of success, and leave the files and folders of a run that was not killed, no other ones.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.frozen import seam
from tests.frozen.support import checkpoints
from tests.support.crashes import KILLED, CrashServer, Ended
from tests.support.gguf_files import write_gguf
from tests.support.local_hub import LocalHub

REPO = "acme/tiny"
SMALL = {**checkpoints.LLAMA, "num_hidden_layers": 1}
"""Config of the checkpoints; of few layers, since each step of each layer is killed."""
SPLIT = "model/splitted_model"
FOUR = ("--compression", "4bit")
CPU = ("--device", "cpu", "--dtype", "float32")
OF_THE_HUB = (".locks/", "/trees/", "hub/CACHEDIR.TAG", ".incomplete")
"""What huggingface_hub keeps to itself; it gives each download a name of its own, and leaves what a kill cut short."""
LEFT_OVER = re.compile(r"\.(part|pieces|staging|saving|converting|journal|lock|lease|progress)\b|^tmp/.")
DELAYS = 2
"""A kill that is not right before a step comes up to so many steps later."""
DELAYED_EVERY = 4
"""One step in so many has such a kill too."""


class Stage:
    """A folder with what commands find, and the process that makes and kills them."""

    def __init__(self, server: CrashServer, hub: LocalHub, served: Path) -> None:
        self.server, self.hub = server, hub
        checkpoints.write(served / REPO, SMALL, shards=2)

    def call(self, folder: Path, how: Mapping[str, Any]) -> dict[str, Any]:
        (folder / "tmp").mkdir(exist_ok=True)
        where = {"folder": str(folder), "temporary": str(folder / "tmp")}
        return {**where, **how, "hub_url": self.hub.url, "hub_home": str(folder / "home")}

    def make(self, folder: Path, *words: str) -> None:
        """Make a command that is not killed."""
        assert self.server.ask(seam.MAKE, self.call(folder, {"command": words})).status == 0, words


def a_checkpoint(stage: Stage, folder: Path) -> None:
    checkpoints.write(folder / "model", SMALL, shards=2)


def a_repository(stage: Stage, folder: Path) -> None:
    """Nothing is there yet but on the hub."""


def a_split(stage: Stage, folder: Path) -> None:
    """A finished split without its original."""
    a_checkpoint(stage, folder)
    stage.make(folder, "pull", "model", "--sequential")


def a_4bit_split(stage: Stage, folder: Path) -> None:
    a_checkpoint(stage, folder)
    stage.make(folder, "pull", "model", "--sequential", *FOUR)


def a_split_with_its_original(stage: Stage, folder: Path) -> None:
    a_checkpoint(stage, folder)
    stage.make(folder, "pull", "model", *FOUR)


def a_damaged_split(stage: Stage, folder: Path) -> None:
    a_checkpoint(stage, folder)
    stage.make(folder, "pull", "model", "--dir", "out")
    spoil(folder / "out" / "splitted_model" / "model.layers.0.safetensors")


def a_damaged_split_of_a_repository(stage: Stage, folder: Path) -> None:
    stage.make(folder, "pull", REPO, "--dir", "out")
    spoil(folder / "out" / "splitted_model" / "model.layers.0.safetensors")


def a_split_of_a_repository(stage: Stage, folder: Path) -> None:
    stage.make(folder, "pull", REPO, *FOUR)


def a_cached_repository(stage: Stage, folder: Path) -> None:
    stage.make(folder, "pull", REPO, "--keep-shards", "--dir", "other")


def a_gguf_file(stage: Stage, folder: Path) -> None:
    write_gguf(folder / "model.gguf")


def prompts(stage: Stage, folder: Path) -> None:
    a_split(stage, folder)
    lines = [{"id": f"line {number}", "prompt": f"the rabbit {number} and"} for number in range(4)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def requests(stage: Stage, folder: Path) -> None:
    """Lines of OpenAI's batch format."""
    a_split(stage, folder)
    bodies = [{"messages": [{"role": "user", "content": f"the rabbit {number}"}], "model": "m"} for number in range(3)]
    whole = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [{"custom_id": f"line {number}", **whole, "body": body} for number, body in enumerate(bodies)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def spoil(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-8] ^= 1
    file.write_bytes(raw)


@dataclass(frozen=True)
class Command:
    """A row of the table.

    Attributes:
        before: makes what the command finds.
        words: its arguments; or of `save_pretrained` the model and the target.
        save: whether it is `save_pretrained`.
        stdin: what it is told.
        done_code: its exit code where all is done already, but for a lock or an empty folder.
    """

    before: Callable[[Stage, Path], None]
    words: tuple[str, ...]
    save: bool = False
    stdin: str = ""
    done_code: int = 0

    @property
    def call(self) -> dict[str, Any]:
        return {"save" if self.save else "command": self.words, "stdin": self.stdin}


def of(before: Callable[[Stage, Path], None], *words: str, **more: Any) -> Command:
    return Command(before, words, **more)


BATCH = ("batch", "model", "in.jsonl", "-o", "out.jsonl", *CPU, "--max-new-tokens", "2", "--sequences", "1")
TO_GGUF = ("-o", "new.gguf", "--to", "gguf")
REPAIR = ("verify", "out/splitted_model", "--repair")
COMMANDS: Mapping[str, Command] = {
    "pull": of(a_checkpoint, "pull", "model"),
    "pull --sequential": of(a_checkpoint, "pull", "model", "--sequential"),
    "pull --sequential, 4bit-double": of(a_checkpoint, "pull", "model", "--sequential", "--compression", "4bit-double"),
    "pull --delete-original, 8bit": of(a_checkpoint, "pull", "model", "--delete-original", "--compression", "8bit"),
    "pull, a repository": of(a_repository, "pull", REPO, *FOUR),
    "pull --keep-shards": of(a_repository, "pull", REPO, "--keep-shards", *FOUR),
    "pull --shard-transfer stream": of(a_repository, "pull", REPO, "--sequential", "--shard-transfer", "stream"),
    "pull --sequential, cached shards": of(a_cached_repository, "pull", REPO, "--sequential", *FOUR),
    "pull, GGUF": of(a_gguf_file, "pull", "model.gguf"),
    "run, which splits": of(a_checkpoint, "run", "model", "the rabbit", "--max-new-tokens", "2", *CPU, *FOUR),
    "chat, /save": of(a_split, "chat", "model", *CPU, "--max-new-tokens", "2", stdin="the rabbit\n/save talk.json\n"),
    "verify --repair --original": of(a_damaged_split, *REPAIR, "--original", "model"),
    "verify --repair, a repository": of(a_damaged_split_of_a_repository, *REPAIR),
    "convert": of(a_checkpoint, "convert", "model", "-o", "new"),
    "convert --sequential": of(a_checkpoint, "convert", "model", "-o", "new", "--sequential"),
    "convert, GGUF": of(a_gguf_file, "convert", "model.gguf", "-o", "new", "--outtype", "bf16"),
    "convert, a repository": of(a_repository, "convert", REPO, "-o", "new"),
    "convert, a split": of(a_split, "convert", "model", "-o", "new"),
    "convert, a 4bit split": of(a_4bit_split, "convert", "model", "-o", "new"),
    "convert to GGUF": of(a_checkpoint, "convert", "model", *TO_GGUF),
    "convert to GGUF, a split": of(a_split, "convert", "model", *TO_GGUF, "--outtype", "q8_0"),
    "convert to GGUF, GGUF": of(a_gguf_file, "convert", "model.gguf", *TO_GGUF, "--outtype", "f16"),
    "convert to GGUF, a repository": of(a_repository, "convert", REPO, *TO_GGUF),
    "save_pretrained": of(a_checkpoint, "model", "new", save=True),
    "batch": of(prompts, *BATCH),
    "batch, OpenAI's format": of(requests, *BATCH),
    "rm": of(a_split_with_its_original, "rm", "model", "--yes", done_code=1),
    "rm, a repository": of(a_split_of_a_repository, "rm", REPO, "--yes", done_code=1),
}


def state(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes, and every folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix() + "/" * path.is_dir()
        if not any(part in name for part in OF_THE_HUB):
            found[name] = None if path.is_dir() else content(path)
    return found


def content(file: Path) -> bytes:
    """The bytes of a file, without numbers of requests and times, which OpenAI's format has in each answer."""
    raw = file.read_bytes()
    if file.name == "out.jsonl":
        return re.sub(rb'[0-9a-f]{24}|"created":\d+', b"", raw)
    if file.name == "out.jsonl.done":
        record = json.loads(raw)
        assert record["crc32"] == zlib.crc32(file.with_name("out.jsonl").read_bytes())
        return json.dumps({**record, "crc32": 0}).encode()
    return raw


@dataclass
class Row:
    """What came of the kills of a command, at its steps and some time behind them."""

    steps: int
    kills: int = 0
    delayed: int = 0
    problems: list[str] = field(default_factory=list)


class Sweep:
    """One command, its undisturbed run, and kills of it."""

    def __init__(self, stage: Stage, name: str, root: Path) -> None:
        self._stage, self._name, self._command = stage, name, COMMANDS[name]
        self._template, self._folder = root / "template", root / "work"
        self._template.mkdir(parents=True)
        self._command.before(stage, self._template)
        self._fresh()
        ended = self._run()
        assert ended.status == 0, name
        self._expected = state(self._folder)
        assert not [path for path in self._expected if LEFT_OVER.search(path)], name
        self._step_seconds = ended.seconds / ended.steps
        self.row = Row(ended.steps)

    def _fresh(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._template, self._folder)

    def _run(self, at: int | None = None, delay: float | None = None) -> Ended:
        return self._stage.server.ask(seam.MAKE, self._stage.call(self._folder, self._command.call), at, delay)

    def kill(self, at: int) -> None:
        """Kill it right before a step, and make it again; threads of `batch` may take a step or two less this time."""
        self._fresh()
        ended = self._run(at)
        if ended.status == KILLED:
            self._finish(f"step {at}")
        else:
            assert (ended.status, self._wrong()) == (0, []), (self._name, at)

    def kill_behind(self, at: int, chance: random.Random) -> None:
        """Kill it some time behind a step, and make it again; it may have ended before."""
        self._fresh()
        delay = chance.uniform(0, DELAYS * self._step_seconds)
        if self._run(at, delay).status == KILLED:
            self.row.delayed += 1
            self._finish(f"{1e3 * delay:.1f} ms behind step {at}")

    def _finish(self, moment: str) -> None:
        was_done = all(name.endswith("/") or "/.lock" in name for name in self._wrong())
        again = self._run()
        wrong, codes = self._wrong(), (0, self._command.done_code if was_done else 0)
        self.row.kills += 1
        if again.status not in codes or wrong:
            self.row.problems.append(
                f"{self._name}, killed {moment}: exit code {again.status}, other files {wrong[:8]}"
            )

    def _wrong(self) -> list[str]:
        found, expected = state(self._folder), self._expected
        return sorted(name for name in {*found, *expected} if found.get(name, b"-") != expected.get(name, b"-"))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, crash_server: CrashServer) -> Iterator[Stage]:
    served = tmp_path_factory.mktemp("hub")
    with LocalHub(served) as hub:
        yield Stage(crash_server, hub, served)


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_some_steps(stage: Stage, tmp_path: Path, name: str) -> None:
    sweep = Sweep(stage, name, tmp_path)
    last = sweep.row.steps - 1
    for at in (last // 2, last - 1, last):
        sweep.kill(at)
    sweep.kill_behind(last // 3, random.Random(name))
    assert sweep.row.problems == []
    assert sweep.row.kills > 1


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_every_step(stage: Stage, tmp_path: Path, name: str) -> None:
    """Kill a command once at each step, and once some time behind each of a share of them; about 40 seconds each."""
    sweep, chance = Sweep(stage, name, tmp_path), random.Random(name)
    for at in range(sweep.row.steps):
        sweep.kill(at)
    for at in range(chance.randrange(DELAYED_EVERY), sweep.row.steps, DELAYED_EVERY):
        sweep.kill_behind(at, chance)
    assert sweep.row.problems == []
    assert sweep.row.kills - sweep.row.delayed > 0.9 * sweep.row.steps
