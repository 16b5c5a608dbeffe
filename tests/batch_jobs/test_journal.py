"""Answers that are durable: whatever ends a run, the next one lacks what is missing and nothing else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.batch_jobs.items import BatchAnswer
from rabbitllm.batch_jobs.journal import DONE_SUFFIX, check_output, errors_of_finished, opened
from rabbitllm.errors import InUseError, ResultsError
from rabbitllm.storage import durable, leases
from rabbitllm.storage.durable import Step
from rabbitllm.storage.folder_lock import NO_LOCKS
from tests.support.dying import dying_at
from tests.support.failing_disk import FAULTS, Fault, room_for

LINES = 7
QUICK = ("the disk is full", "a sync fails", "the disk is gone")
HEAD: dict[str, Any] = {"input": "1234", "model": "m", "stop": ["x"]}


def answer(index: int) -> BatchAnswer:
    return BatchAnswer(index, f"k{index}", {"id": f"k{index}", "text": f"ü{index}" * 10}, is_error=index == 3)


EXPECTED = "".join(
    json.dumps(answer(index).line, ensure_ascii=False, separators=(",", ":")) + "\n" for index in range(7)
)


def make(out: Path, added: list[int], *, overwrite: bool = False) -> None:
    """Answer all that is missing, in an order of its own, and note what was added."""
    with opened(out, LINES, HEAD, overwrite=overwrite) as journal:
        missing = sorted(journal.missing(), key=lambda index: index * 5 % LINES)
        for group in (missing[:1], missing[1:4], missing[4:]):
            if group:
                journal.add([answer(index) for index in group])
                added += group
        journal.write_output(out)


def failing_make(out: Path, observer: Callable[[Step], None], added: list[int]) -> None:
    with durable.observe_steps(observer):
        make(out, added)


def error_of(call: Callable[[], object]) -> ResultsError | InUseError | None:
    try:
        call()
    except (ResultsError, InUseError) as error:
        return error
    return None


JOURNAL = "out.jsonl.journal"


def other_files(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path != out)


def test_answers_added_together_are_durable_after_one_sync(tmp_path: Path) -> None:
    steps: list[Step] = []
    with opened(tmp_path / "out", LINES, HEAD) as journal, durable.observe_steps(steps.append):
        journal.add([answer(index) for index in (4, 2, 0)])
        assert [step.kind for step in steps] == ["write", "sync"]
    with opened(tmp_path / "out", LINES, HEAD) as journal:
        assert list(journal.missing()) == [1, 3, 5, 6]
        assert (journal.done, journal.resumed, journal.errors) == (3, 3, 0)


def test_resumes_after_a_crash_at_any_step(tmp_path: Path) -> None:
    """Nothing that was added is made twice, and the output is the same to the byte."""
    step_index = 0
    while True:
        out = tmp_path / str(step_index) / "out.jsonl"
        added: list[int] = []
        with dying_at(step_index) as death:
            make(out, added)
        if death.step is None:
            break
        if out.exists():
            assert out.read_text() == EXPECTED  # whole or not at all
        if not out.exists() or JOURNAL in other_files(out):
            again: list[int] = []
            make(out, again)
            assert not set(again) & set(added)
        assert out.read_text() == EXPECTED
        assert other_files(out) == ["out.jsonl.done"]
        assert errors_of_finished(out, HEAD) is not None
        step_index += 1
    assert step_index > 15


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=name, marks=() if name in QUICK else pytest.mark.long) for name, fault in FAULTS.items()],
)
def test_disk_fault_is_reported_and_answers_are_kept(tmp_path: Path, fault: Fault) -> None:
    for i in range(40):
        out = tmp_path / str(i) / "out.jsonl"
        added: list[int] = []
        error = error_of(lambda out=out, i=i, added=added: failing_make(out, fault.observer(i), added))  # type: ignore[misc]
        if error is None:
            break
        assert "run the same command again" in error.remedy.lower()
        again: list[int] = []
        if not out.exists() or JOURNAL in other_files(out):  # else only its last sync failed
            make(out, again)
        assert not set(again) & set(added)
        assert out.read_text() == EXPECTED
    else:
        raise AssertionError("it failed for ever")


def test_disk_full_within_an_answer(tmp_path: Path) -> None:
    for room in range(0, 1200, 37):
        out = tmp_path / str(room) / "out.jsonl"
        with room_for(room):
            error = error_of(lambda out=out: make(out, []))  # type: ignore[misc]
        assert error is None or "disk is full" in str(error)
        if error is not None:
            make(out, [])
        assert out.read_text() == EXPECTED
        assert other_files(out) == ["out.jsonl.done"]


def test_truncated_or_corrupted_line_is_ignored(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out, LINES, HEAD) as journal:
        journal.add([answer(0), answer(1), answer(2)])
        path = journal.path
    raw = path.read_bytes()
    spoilt = raw.replace("ü1".encode(), b"\0\0\0", 1)
    for content, missing in ((raw[:-5], [2, 3, 4, 5, 6]), (spoilt, [1, 3, 4, 5, 6]), (raw + b"\0" * 50, [3, 4, 5, 6])):
        path.write_bytes(content)
        with opened(out, LINES, HEAD) as journal:
            assert list(journal.missing()) == missing
            journal.add([answer(index) for index in missing])
            journal.write_output(out)
        assert out.read_text() == EXPECTED
        out.unlink()


def test_a_start_without_an_answer_writes_nothing(tmp_path: Path) -> None:
    """But it syncs: what an earlier process wrote may not be on the disk yet."""
    out = tmp_path / "out.jsonl"
    steps: list[Step] = []
    with opened(out, LINES, HEAD) as journal:
        path, raw = journal.path, journal.path.read_bytes()
    with durable.observe_steps(steps.append), opened(out, LINES, HEAD):
        pass
    assert path.read_bytes() == raw
    assert [step.kind for step in steps if step.path == path] == ["sync"]


def test_overwrite_is_needed_to_replace_an_output(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(ResultsError, match=r"out\.jsonl already exists"):
        make(out, [])
    assert other_files(out) == []
    added: list[int] = []
    make(out, added, overwrite=True)
    assert (out.read_text(), len(added)) == (EXPECTED, LINES)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "suffix", [".part", ".done", ".done.part", ".journal", ".journal.part", ".journal.lock", ".part with a journal"]
)
def test_files_of_others_beside_the_output_are_refused(tmp_path: Path, suffix: str, overwrite: bool) -> None:
    out = tmp_path / "out.jsonl"
    if suffix.endswith("with a journal"):
        with opened(out, LINES, HEAD) as journal:
            journal.add([answer(0)])
    path = tmp_path / f"out.jsonl{suffix.partition(' ')[0]}"
    path.write_text('{"mine": 1}\n')
    with pytest.raises((ResultsError, InUseError), match=r"of rabbitllm batch|not a lock of RabbitLLM"):
        make(out, [], overwrite=overwrite)
    assert path.read_text() == '{"mine": 1}\n'


def test_an_unfinished_output_without_a_journal_is_of_others(tmp_path: Path) -> None:
    part = tmp_path / "out.jsonl.part"
    part.write_text('{"id": 1, "prompt": "mine"}\n')
    with pytest.raises(ResultsError, match="is not a file of rabbitllm batch"):
        make(tmp_path / "out.jsonl", [])
    assert part.exists()


@pytest.mark.parametrize("suffix", ["", ".part", ".done", ".journal", ".done.part", ".journal.part", ".journal.lock"])
def test_an_output_that_would_replace_the_input_is_refused(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"out.jsonl{suffix}"
    source.write_text("")
    with pytest.raises(ResultsError, match="the input"):
        check_output(tmp_path / "out.jsonl", str(source))
    check_output(tmp_path / "other.jsonl", str(source))


def test_an_output_that_is_a_file_of_the_model_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shard = model / "model.safetensors"
    shard.write_bytes(b"weights")
    (tmp_path / "link").symlink_to(shard)
    os.link(shard, tmp_path / "hard link")
    for out in (shard, tmp_path / "link", tmp_path / "hard link"):
        with pytest.raises(ResultsError, match="is a file in the folder of the model"):
            check_output(out, "-", [model])
    make(model / "answers.jsonl", [])
    check_output(model / "answers.jsonl", "-", [model])


def test_other_weights_of_the_same_name_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        with opened(out, LINES, HEAD) as journal:
            journal.check_weights("abcd")
            journal.add([answer(journal.done)])
    with opened(out, LINES, HEAD) as journal, pytest.raises(ResultsError, match="other weights of the same name"):
        journal.check_weights("ef01")
    with opened(out, LINES, HEAD) as journal:
        assert journal.done == 2
        journal.check_weights("abcd")
        journal.add([answer(index) for index in journal.missing()])
        journal.write_output(out)
    assert out.read_text() == EXPECTED


@pytest.mark.parametrize(("typed", "parsed"), [("auto", None), ("torch.float32", "float32"), ("float16", "float16")])
def test_recorded_dtype_spellings_are_equal(tmp_path: Path, typed: str, parsed: str | None) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out, LINES, {**HEAD, "dtype": parsed}) as journal:
        journal.add([answer(0)])
    path = tmp_path / JOURNAL
    path.write_text(path.read_text().replace(f'"dtype":{json.dumps(parsed)}', f'"dtype":{json.dumps(typed)}', 1))
    assert json.dumps(typed) in path.read_text()
    with opened(out, LINES, {**HEAD, "dtype": parsed}) as journal:
        assert journal.done == 1
    with pytest.raises(ResultsError, match="dtype was"), opened(out, LINES, {**HEAD, "dtype": "bfloat16"}):
        pass
    with opened(out, LINES, {**HEAD, "dtype": parsed}) as journal:
        journal.add([answer(index) for index in journal.missing()])
        journal.write_output(out)
    path = tmp_path / f"out.jsonl{DONE_SUFFIX}"
    path.write_text(path.read_text().replace(f'"dtype":{json.dumps(parsed)}', f'"dtype":{json.dumps(typed)}', 1))
    assert json.dumps(typed) in path.read_text()
    assert errors_of_finished(out, {**HEAD, "dtype": parsed}) is not None
    assert errors_of_finished(out, {**HEAD, "dtype": "bfloat16"}) is None


def test_a_finished_output_of_a_version_with_fewer_options(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    make(out, [])
    assert errors_of_finished(out, {**HEAD, "new option": None}) == 1
    assert errors_of_finished(out, {**HEAD, "new option": 5}) is None


def test_old_output_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    with opened(out, LINES, HEAD, overwrite=True) as journal:
        journal.add([answer(0)])
    assert out.read_text() == "old"
    added: list[int] = []
    make(out, added, overwrite=True)  # the same command goes on
    assert (out.read_text(), len(added)) == (EXPECTED, LINES - 1)


def test_another_journal_is_refused_with_its_differences(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out, LINES, HEAD) as journal:
        journal.add([answer(0)])
    other_head = {**HEAD, "model": "n", "temperature": 1}
    with (
        pytest.raises(ResultsError, match='model was "m", now "n"; temperature was null, now 1'),
        opened(out, 7, other_head),
    ):
        pass
    with opened(out, LINES, HEAD) as journal:
        assert journal.done == 1
    with opened(out, LINES, other_head, overwrite=True) as journal:
        assert journal.done == 0
    journal.path.write_text('{"journal": 99, "head": {}}\n')
    with pytest.raises(ResultsError, match="of version 99"), opened(out, LINES, HEAD):
        pass
    journal.path.write_text("what?\n")
    with pytest.raises(ResultsError, match="not a journal of rabbitllm batch"), opened(out, LINES, HEAD):
        pass
    assert journal.path.read_text() == "what?\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there an open file keeps others off")
def test_second_process_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    code = f"""
from pathlib import Path
from rabbitllm.batch_jobs.journal import opened
with opened(Path({str(out)!r}), {LINES}, {HEAD!r}):
    pass
"""
    root = Path(__file__).parents[2]
    with opened(out, LINES, HEAD):
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert "Another process is writing" in second.stderr
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
    assert other_files(out) == ["out.jsonl.journal"]


@pytest.mark.parametrize("code", NO_LOCKS)
def test_second_process_is_refused_without_locks(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing_flock(code))
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    out, head = tmp_path / "out[1]", {"n": 1}
    with opened(out, 1, head) as journal:
        assert (error := error_of(lambda: opened(out, 1, head).__enter__()))
        assert "Another process is writing" in error.problem
        with opened(tmp_path / "other", 1, head):
            pass
        journal.add([answer(0)])
        (tmp_path / "out[1].journal.lock.lease").unlink()  # the lease is lost
        with pytest.raises(InUseError, match="may be in use by another process now"):
            journal.write_output(out)
    assert not out.exists()
    with opened(out, 1, head) as journal:
        assert journal.done == 1
        journal.write_output(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.journal", "out[1]", "out[1].done"]


def test_lock_of_a_removed_file_is_retaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process removed it when it ended, and a third one may have made a new file by then."""
    flock, lock = fcntl.flock, tmp_path / "out.journal.lock"

    def late(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        lock.unlink()
        if again:
            lock.touch()

    for again in (False, True):
        monkeypatch.setattr(fcntl, "flock", late)
        assert (error := error_of(lambda: opened(tmp_path / "out", 1, {"n": 1}).__enter__()))
        assert "Another process is writing" in error.problem
        assert lock.exists() is again


def test_lock_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing_flock(errno.EIO))
    error = error_of(lambda: opened(tmp_path / "out", 1, {"n": 1}).__enter__())
    assert error is not None
    assert error.problem == f"{tmp_path / 'out.journal'} cannot be written: {os.strerror(errno.EIO)}."


def failing_flock(code: int) -> Callable[[int, int], None]:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    return flock


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        folder = Path("/proc")
    else:
        folder = tmp_path / "closed"
        folder.mkdir(mode=0o500)
    with pytest.raises(ResultsError, match="cannot be written"), opened(folder / "out", LINES, HEAD):
        pass
