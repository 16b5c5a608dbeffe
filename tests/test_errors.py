"""Faults of the system at the public entry points: each is an error of ours, with what to do, and its cause."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.support.builders import build_checkpoint, cut, llama_tensors, write_shards
from tests.support.fresh_process import python
from tests.support.splitting import contents

ENTRIES: dict[str, Callable[[Path, Path], Any]] = {
    "from_pretrained": lambda model, target: rabbitllm.AutoModel.from_pretrained(
        model, device="cpu", layer_shards_saving_path=target
    ),
    "split_and_save_layers": lambda model, target: rabbitllm.split_and_save_layers(model, target),
    "convert": lambda model, target: convert(model, target),
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
def test_target_that_cannot_be_a_folder(model: Path, tmp_path: Path, entry: str, target: str) -> None:
    blocked = tmp_path / "target"
    if target == "dangling link":
        blocked.symlink_to(tmp_path / "nowhere" / "at all")
    elif target == "loop":
        blocked.symlink_to(blocked)
    else:
        blocked.write_text("mine")
    before = sorted(path.name for path in model.iterdir())
    error = refused(lambda: ENTRIES[entry](model, blocked / "deeper" if target == "below a file" else blocked))
    assert str(blocked) in str(error)
    assert sorted(path.name for path in model.iterdir()) == before


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "code",
    [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE, errno.EFBIG, errno.EOPNOTSUPP],
)
def test_failing_disk(model: Path, tmp_path: Path, entry: str, code: int) -> None:
    before = {path: path.read_bytes() for path in model.iterdir()}
    for first in (0, 3, 9):
        steps = iter(range(1 << 20))

        def fail(step: durable.Step, steps: Any = steps, first: int = first) -> None:
            if next(steps) >= first and step.kind in ("create", "write", "make_folder", "sync"):
                raise OSError(code, os.strerror(code), str(step.path))

        with durable.observe_steps(fail):
            error = refused(lambda first=first: ENTRIES[entry](model, tmp_path / f"target{first}"))  # type: ignore[misc]
        full = code in (errno.ENOSPC, errno.EDQUOT)
        assert isinstance(error, DiskFullError if full else (StorageError, RabbitLLMError))
        assert isinstance(error.__cause__, OSError)
        assert error.__cause__.errno == code
        assert isinstance(error, DiskFullError) or error.errno == code  # type: ignore[attr-defined]
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("place", [(), ("/a/layer",)], ids=["unknown file", "known file"])
def test_full_disk_names_the_folder_and_the_remedy(place: tuple[str, ...]) -> None:
    with pytest.raises(DiskFullError) as caught, system_errors_by_name(), system_errors_by_name("org/model"):
        raise OSError(errno.ENOSPC, "No space", *place)
    why = "/a/layer: No space" if place else "No space"
    assert caught.value.problem.startswith(f"The disk ran full while org/model was prepared ({why}). The split ")
    assert caught.value.remedy.endswith("make the same call again: it resumes.")


@pytest.mark.skipif(os.name == "nt", reason="limits of POSIX")
def test_a_limit_of_file_sizes_is_noticed_before_a_shard_is_deleted(tmp_path: Path) -> None:
    """The largest layer is that of the last shard."""
    tensors = {**llama_tensors(), "lm_head.weight": torch.ones(16_000, 64)}
    model = write_shards(tmp_path / "model", cut(tensors, 4))
    before = contents(model)
    code = f"""
import resource
from tests.support.splitting import split
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, 1 << 21))
split({str(model)!r}, sequential=True)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    named = re.escape(str(model / "splitted_model" / ".staging" / "lm_head.safetensors"))
    assert re.search(rf"{named}\.part cannot be used: File too large\.", run.stderr)
    assert contents(model) == before
    assert not (model / "splitted_model").exists()


def test_other_errors_are_not_translated() -> None:
    gone = BrokenPipeError(errno.EPIPE, "x")
    for error in (TypeError("x"), KeyboardInterrupt(), RuntimeError("x"), gone, OSError("x")):
        with pytest.raises(type(error)) as caught, system_errors_by_name():
            raise error
        assert caught.value is error
    ours = StorageError("x", "y")
    with pytest.raises(StorageError) as translated, system_errors_by_name():
        raise ours
    assert translated.value is ours


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't start new thread")],
    ids=repr,
)
def test_refused_memory(error: Exception) -> None:
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
def test_address_space_limit(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "other")
    result = python(LIMITED, model, copy, timeout=600)
    assert "not enough memory" in result.stdout


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
def test_thread_without_address_space_is_refused() -> None:
    """Python's own start of a thread never returns where the thread cannot allocate its state."""
    result = subprocess.run([sys.executable, "-c", NO_ROOM], capture_output=True, text=True, timeout=600)
    assert (result.stdout, result.stderr) == ("can't start new thread\n" * 4, "")


def test_command_prints_one_message(model: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    command = [sys.executable, "-m", "rabbitllm", "convert", str(model), "--output", str(tmp_path / "target" / "x")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    assert "What to do: " in result.stderr
