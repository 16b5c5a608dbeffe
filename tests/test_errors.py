"""Faults of the system at the public entry points: each is an error of ours, with what to do, and its cause."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rabbitllm
from rabbitllm.errors import (
    DiskFullError,
    NotEnoughMemoryError,
    RabbitLLMError,
    StorageError,
    system_errors_by_name,
)
from rabbitllm.models.convert import convert
from rabbitllm.storage import durable
from tests.support.builders import build_checkpoint

ENTRIES: dict[str, Callable[[Path, Path], Any]] = {
    "from_pretrained": lambda model, at: rabbitllm.AutoModel.from_pretrained(
        model, device="cpu", layer_shards_saving_path=at
    ),
    "split_and_save_layers": lambda model, at: rabbitllm.split_and_save_layers(model, at),
    "convert": lambda model, at: convert(model, at),
}
"""Calls that write a model into a folder."""


def refused(call: Callable[[], Any]) -> RabbitLLMError:
    with pytest.raises(RabbitLLMError) as caught:
        call()
    assert caught.value.remedy
    return caught.value


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "llama", shards=2)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("target", ["file", "dangling link", "below a file", "loop"])
def test_a_target_that_can_be_no_folder(model: Path, tmp_path: Path, entry: str, target: str) -> None:
    at = tmp_path / "target"
    if target == "dangling link":
        at.symlink_to(tmp_path / "nowhere" / "at all")
    elif target == "loop":
        at.symlink_to(at)
    else:
        at.write_text("mine")
    before = sorted(path.name for path in model.iterdir())
    error = refused(lambda: ENTRIES[entry](model, at / "deeper" if target == "below a file" else at))
    assert str(at) in str(error)
    assert sorted(path.name for path in model.iterdir()) == before


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE, errno.EFBIG]
)
def test_a_disk_that_fails_at_any_step(model: Path, tmp_path: Path, entry: str, number: int) -> None:
    before = {path: path.read_bytes() for path in model.iterdir()}
    for at in (0, 3, 9):
        steps = iter(range(1 << 20))

        def fail(step: durable.Step, steps: Any = steps, at: int = at) -> None:
            if next(steps) >= at and step.kind in ("create", "write", "make_folder", "sync"):
                raise OSError(number, os.strerror(number), str(step.path))

        with durable.observe_steps(fail):
            error = refused(lambda at=at: ENTRIES[entry](model, tmp_path / f"target{at}"))  # type: ignore[misc]
        full = number in (errno.ENOSPC, errno.EDQUOT)
        assert isinstance(error, DiskFullError if full else (StorageError, RabbitLLMError))
        assert isinstance(error.__cause__, OSError)
        assert error.__cause__.errno == number
        assert isinstance(error, DiskFullError) or error.errno == number  # type: ignore[attr-defined]
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("place", [(), ("/a/layer",)], ids=["unknown file", "known file"])
def test_a_full_disk_says_what_was_prepared_and_that_the_call_goes_on(place: tuple[str, ...]) -> None:
    with pytest.raises(DiskFullError) as caught, system_errors_by_name(), system_errors_by_name("org/model"):
        raise OSError(errno.ENOSPC, "No space", *place)
    why = "/a/layer: No space" if place else "No space"
    assert caught.value.problem.startswith(f"The disk ran full while org/model was prepared ({why}). The split ")
    assert caught.value.remedy.endswith("make the same call again: it resumes.")


def test_what_is_no_fault_of_the_system_stays_what_it_is() -> None:
    gone = BrokenPipeError(errno.EPIPE, "x")
    for error in (TypeError("x"), KeyboardInterrupt(), RuntimeError("x"), gone, OSError("x")):
        with pytest.raises(type(error)) as caught, system_errors_by_name():
            raise error
        assert caught.value is error
    ours = StorageError("x", "y")
    with pytest.raises(StorageError) as kept, system_errors_by_name():
        raise ours
    assert kept.value is ours


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't start new thread")],
    ids=repr,
)
def test_memory_that_the_system_does_not_give(error: Exception) -> None:
    with (
        pytest.raises(NotEnoughMemoryError, match="not enough memory for this call") as caught,
        system_errors_by_name(),
    ):
        raise error
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, MemoryError)


LIMITED = """
import resource, sys
import rabbitllm
def load(name):
    rabbitllm.AutoModel.from_pretrained(name, device="cpu", show_layer_progress=False, max_memory={"cpu": "4GiB"})
load(sys.argv[2])  # so that every library is there
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20),) * 2)
try:
    load(sys.argv[1])
except rabbitllm.errors.RabbitLLMError as error:
    assert isinstance(error, MemoryError), repr(error)
    print(error)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_limit_of_the_address_space(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    command = [sys.executable, "-c", LIMITED, str(model), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "not enough memory" in done.stdout


NO_ROOM = """
import resource
from rabbitllm.base.forks import DaemonThread, THREAD_BYTES, Workers
from rabbitllm.checkpoints.fetch import side_by_side
def limit(room):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
pool = Workers(1, "pool")
limit(8 * THREAD_BYTES)
assert Workers(1, "one").submit(lambda: 5).result() == 5
limit(THREAD_BYTES // 2)
for start in (
    lambda: Workers(1, "another"),
    lambda: pool.submit(lambda: 5),
    lambda: DaemonThread(print, "one", 5).start(),
    lambda: side_by_side(print, [5], 1),
):
    try:
        start()
    except MemoryError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_that_has_no_room_is_not_waited_for() -> None:
    """Python's own start of a thread never returns where the thread cannot allocate its state."""
    done = subprocess.run([sys.executable, "-c", NO_ROOM], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("can't start new thread\n" * 4, "")


def test_the_command_says_it_in_one_message(model: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    command = [sys.executable, "-m", "rabbitllm", "convert", str(model), "--output", str(tmp_path / "target" / "x")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert "What to do: " in done.stderr
