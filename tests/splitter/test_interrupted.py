"""Ctrl-C during a split, with a real process and a real SIGINT: how soon it ends, its message, how it is resumed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rabbitllm.splitter import journal
from rabbitllm.splitter.interrupted import command_line, not_resumable, reporting_interrupts
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import GeneratedFile, LocalHub
from tests.support.splitting import Call, contents, interrupted, layer_files, names_in, split

ROOT = Path(__file__).parent.parent.parent
REPO = "acme/tiny"
LARGE = {"layers": 4, "hidden": 768, "vocabulary": 2048}

SCRIPT = """
import sys
from tests.support.splitting import Call
print(Call(sys.argv[1], compression=sys.argv[2] or None, shard_transfer=sys.argv[3]).make())
"""


def used(folder: Path) -> frozenset[str]:
    """The shards that an unfinished split has used up."""
    seen = journal.glance(folder)
    return seen.used if seen is not None else frozenset()


class Interrupted:
    """The result of a process that got a SIGINT: its exit status and its stderr."""

    def __init__(self, command: list[str], ready: Callable[[], bool]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 600
            while not ready():
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            self.stderr = process.communicate(timeout=600)[1]
            self.status = process.returncode
        finally:
            process.kill()
            process.wait()

    def said(self) -> list[str]:
        """Return the two lines about the interrupt, between warnings and Python's traceback."""
        lines = self.stderr.splitlines()
        begin = next((index for index, line in enumerate(lines) if line.startswith("Interrupted")), None)
        assert begin is not None, self.stderr
        return lines[begin : begin + 2]


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """The beginning of a command that runs a script of the user's; its path needs quotes.

    torch imports `tabulate` at exit, if it is installed; a string that is evaluated then, as `namedtuple` does, makes
    Python forget that an interrupt ended the script.
    """
    (tmp_path / "tabulate.py").write_text(
        "import collections\nLine = collections.namedtuple('Line', 'text')\ndef tabulate(*rows, **how): return ''\n"
    )
    path = tmp_path / "my split.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


def resume(command: list[str], environment: dict[str, str] | None = None) -> Path:
    """Make the same call again, to its end, and return the split directory."""
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    done = subprocess.run(command, env=whole, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.mark.long
def test_interrupt_in_the_middle_of_a_split(tmp_path: Path, script: list[str]) -> None:
    tensors = cut(llama_tensors(**LARGE), 8)
    model = write_shards(tmp_path / "model", tensors)
    folder = model / "splitted_model.4bit"
    command = [*script, str(model), "4bit", "auto"]

    def one_used() -> bool:
        return (folder / "split.journal").exists() and len(used(folder)) >= 1

    end = Interrupted(command, one_used)
    assert end.status == -signal.SIGINT, end.stderr
    replayed = journal.replay(folder)
    assert replayed is not None
    assert 1 <= len(replayed.used) < 8
    assert end.said() == [
        f"Interrupted: {len(replayed.used)} of 8 shards are used; the layers are in {folder}.",
        f"To resume: {shlex.join(command)}",
    ]
    assert not [name for name in names_in(folder) if name.startswith(".")]
    assert resume(shlex.split(end.said()[1].partition(": ")[2])) == folder  # as it was printed
    assert contents(folder) == contents(split(write_shards(tmp_path / "quiet" / "model", tensors), compression="4bit"))


class StalledHub:
    """A repository whose second shard stops at a byte until it is released."""

    def __init__(self, hub: LocalHub, model: Path) -> None:
        self.stops_at = 1 << 20
        """Past the header."""
        self.stalled = threading.Event()
        self.flows = threading.Event()
        self._second = sorted(model.glob("*.safetensors"))[1]
        files = {path.name: GeneratedFile.from_bytes(path.read_bytes()) for path in model.iterdir()}
        whole = files[self._second.name]
        files[self._second.name] = GeneratedFile(whole.size, self._read, whole.sha256)
        hub.add_generated(REPO, files)

    def _read(self, offset: int, length: int) -> bytes:
        if offset >= self.stops_at and not self.flows.is_set():
            self.stalled.set()
            self.flows.wait()
        with self._second.open("rb") as stream:
            stream.seek(offset)
            return stream.read(length)


@pytest.fixture
def stalled(tmp_path: Path, local_hub: LocalHub) -> Iterator[StalledHub]:
    model = write_shards(tmp_path / "model", cut(llama_tensors(layers=3, hidden=384, vocabulary=2048), 3))
    hub = StalledHub(local_hub, model)
    yield hub
    hub.flows.set()


@pytest.mark.parametrize("transfer", ["file", "stream"])
def test_interrupt_while_a_shard_is_fetched(
    tmp_path: Path, hub_environment: HubEnvironment, stalled: StalledHub, script: list[str], transfer: str
) -> None:
    command = [*script, REPO, "", transfer]

    def one_used_and_one_stalled() -> bool:
        begun = hub_environment.home.rglob("split.journal")
        return stalled.stalled.is_set() and any(len(used(file.parent)) == 1 for file in begun)

    end = Interrupted(command, one_used_and_one_stalled)
    assert end.status == -signal.SIGINT, end.stderr
    match = re.fullmatch(r"Interrupted: 1 of 3 shards are used; the layers are in (.*)\.", end.said()[0])
    assert match, end.stderr
    stalled.flows.set()
    folder = resume(command)
    assert str(folder) == match[1]
    assert layer_files(folder) == layer_files(split(tmp_path / "model"))


def test_interrupt_while_headers_are_requested(
    hub_environment: HubEnvironment, stalled: StalledHub, script: list[str]
) -> None:
    stalled.stops_at = 0
    end = Interrupted([*script, REPO, "", "file"], stalled.stalled.is_set)
    assert end.status == -signal.SIGINT, end.stderr
    assert end.said()[0].startswith("Interrupted before the first shard was taken;")


STANDARD = """
import sys
from tests.support.splitting import Call
print(Call(sys.argv[1], sequential=False).make())
"""


@pytest.mark.long
def test_interrupt_during_the_download_of_the_standard_route(
    tmp_path: Path, hub_environment: HubEnvironment, stalled: StalledHub
) -> None:
    program = tmp_path / "standard.py"
    program.write_text(STANDARD)
    command = [sys.executable, str(program), REPO]
    end = Interrupted(command, stalled.stalled.is_set)
    assert end.status == -signal.SIGINT, end.stderr
    stalled.flows.set()
    assert layer_files(resume(command)) == layer_files(split(tmp_path / "model"))


# What is said


def test_interrupt_before_the_first_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), reporting_interrupts(tmp_path):
        raise KeyboardInterrupt
    message = capsys.readouterr().err
    assert message.startswith(f"Interrupted before the first shard was taken; nothing was split into {tmp_path} yet.\n")
    assert message.splitlines()[1].startswith(("To resume: ", "The same call resumes"))


def test_interrupt_after_the_last_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = split(write_shards(tmp_path / "model", cut(llama_tensors(layers=1), 2)))
    with pytest.raises(KeyboardInterrupt), reporting_interrupts(folder):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.startswith(f"Interrupted: the layers in {folder} are complete;")


def test_interrupt_with_a_truncated_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = interrupted(Call(str(write_shards(tmp_path / "model", cut(llama_tensors(), 3)))), shards=2)
    assert capsys.readouterr().err.startswith("Interrupted: 2 of 3 shards are used;")
    with (folder / "split.journal").open("ab") as file:
        file.write(b'{"used":"model-000\n{"us')
    assert len(used(folder)) == 2
    (folder / "split.journal").write_text("not this")
    with pytest.raises(KeyboardInterrupt), reporting_interrupts(folder):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.startswith(f"Interrupted: the finished part is kept in {folder}.\n")


def test_call_that_would_start_again_prints_no_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), not_resumable(), reporting_interrupts(tmp_path):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt), reporting_interrupts(tmp_path):
        raise KeyboardInterrupt
    assert capsys.readouterr().err


def test_errors_print_no_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), reporting_interrupts(tmp_path):
        raise KeyError
    assert capsys.readouterr().err == ""


TELL = "from rabbitllm.splitter.interrupted import command_line; print(command_line())"


def told_by(command: list[str], folder: Path, **environment: str) -> str:
    whole = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=folder, env=whole, capture_output=True, text=True, check=True).stdout.strip()


def test_command_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "my split.py").write_text(TELL)
    command = [sys.executable, "-X", "utf8", "my split.py", "a b", "--c=$d"]
    assert shlex.split(told_by(command, tmp_path)) == command


def test_command_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__main__.py").write_text(TELL)
    command = [sys.executable, "-m", "mine", "x"]
    assert shlex.split(told_by(command, tmp_path)) == command


def test_command_of_an_installed_program(tmp_path: Path) -> None:
    program = tmp_path / "mine"
    program.write_text(f"#!{sys.executable}\n{TELL}\n")
    program.chmod(0o755)
    assert told_by([str(program), "x y"], tmp_path) == f"{program} 'x y'"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert told_by(["sh", "-c", "mine 'x y'"], tmp_path, PATH=path) == "mine 'x y'"


@pytest.mark.parametrize("how", ["-c", "prompt", "stdin"])
def test_no_command_at_a_prompt(tmp_path: Path, how: str) -> None:
    if how == "-c":
        assert told_by([sys.executable, "-c", TELL], tmp_path) == "None"
        return
    flags = ["-i"] if how == "prompt" else []
    done = subprocess.run(
        [sys.executable, *flags, "-"],
        input=TELL,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "None"


def test_no_command_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [__file__])
    assert command_line() is not None
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert command_line() is None


ENDED = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
from rabbitllm.storage import durable
from tests.support.splitting import Call
def end(step):
    if number and step.kind == "unlink" and step.path.name.endswith("-of-00003.safetensors"):
        os.kill(os.getpid(), number)
number = int(sys.argv[2]) if not os.path.exists(sys.argv[3]) else 0
open(sys.argv[3], "w").close()
with durable.observe_steps(end):
    print(Call(sys.argv[1]).make())
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_that_ends_the_process_prints_how_to_resume(tmp_path: Path, signal_number: signal.Signals) -> None:
    model = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    program = tmp_path / "ended.py"
    program.write_text(ENDED)
    command = [sys.executable, str(program), str(model), str(int(signal_number)), str(tmp_path / "begun")]
    whole = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=whole, capture_output=True, text=True)
    assert ended.returncode == -signal_number
    assert "of 3 shards are used; the layers are in " in ended.stderr
    assert f"To resume: {shlex.join(command)}" in ended.stderr
    folder = resume(command)
    assert layer_files(folder) == layer_files(split(write_shards(tmp_path / "again", cut(llama_tensors(), 3))))


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    def own(signal_number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, own), signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    try:
        with reporting_interrupts(tmp_path):
            assert signal.getsignal(signal.SIGTERM) is own
            assert callable(signal.getsignal(signal.SIGHUP))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        thread = threading.Thread(target=lambda: reporting_interrupts(tmp_path).__enter__())
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGHUP, before[1])
