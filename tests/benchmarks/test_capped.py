"""The benchmark under a memory cap: groups that hold, limits as they are said, and what is compared with what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.decode import capped
from benchmarks.lib import report, worker
from benchmarks.lib.generation import CappedCase, StepsRun
from benchmarks.lib.measure import drop_cached
from benchmarks.lib.process import ControlGroup, can_limit_memory, control_group
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself

MOUNT = Path("/sys/fs/cgroup")


needs_groups = pytest.mark.skipif(not can_limit_memory(), reason="no control group with a memory limit can be made")


@needs_groups
def test_a_process_that_takes_more_than_its_group_may_is_killed() -> None:
    code = "import sys; print('idle', flush=True); sys.stdin.readline(); x = bytearray(int(sys.argv[1])); print(len(x))"
    with control_group(f"rabbitllm-test-{os.getpid()}") as group:
        ends = {}
        for nbytes in (20 << 20, 200 << 20):
            command = [*group.entering(), sys.executable, "-c", code, str(nbytes)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "idle\n"
            limit = group.limit_to_idle_and(100 << 20)
            assert 100 << 20 < limit < 200 << 20
            process.communicate("go\n", timeout=600)
            ends[nbytes] = process.returncode
            (group.folder / group.limit_file).write_text(str(1 << 40))
    assert ends == {20 << 20: 0, 200 << 20: -signal.SIGKILL}
    assert not group.folder.exists()


def test_both_versions_of_control_groups_are_told_apart(tmp_path: Path) -> None:
    with control_group("mine", tmp_path) as second:
        assert (second.folder, second.limit_file) == (tmp_path / "mine", "memory.max")
    (tmp_path / "memory").mkdir()
    with control_group("mine", tmp_path) as first:
        assert (first.folder, first.limit_file) == (tmp_path / "memory" / "mine", "memory.limit_in_bytes")


def test_the_limit_is_what_is_used_and_the_rest(tmp_path: Path) -> None:
    group = ControlGroup(tmp_path, "limit", "usage", ("reclaim", "0"))
    (tmp_path / "usage").write_text("1000\n")
    assert group.limit_to_idle_and(500) == 1500
    assert (tmp_path / "limit").read_text() == "1500"


def test_where_no_group_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="memory cannot be limited"), control_group("mine", tmp_path / "nothing"):
        pass


def test_what_is_compared_with_what() -> None:
    def run(name: str, turn: int, seconds: float, read: float = 0.0) -> StepsRun:
        made = StepsRun(name, turn)
        made.token_seconds, made.read_seconds, made.tokens = seconds, read, [1, 2]
        return made

    ours = CappedCase("rabbitllm-2", 50)
    runs = [
        run(ours.name, 0, 0.6, 0.5),
        run(CappedCase("rabbitllm-2", None).name, 0, 0.1),
        run(ours.name, 1, 0.6, 0.2),
        run(CappedCase("rabbitllm-2", None).name, 1, 0.4),
        run(ours.name, 2, 0.6, 0.2),  # of a turn without the other
    ]
    assert capped.of_the_limit(runs, ours) == pytest.approx([1.2, 1.5])
    assert capped.of_the_limit(runs, CappedCase("transformers", 50)) == []
    assert capped.our_case(CappedCase("llama.cpp-q4_0", 25)) == CappedCase("rabbitllm-2-4bit", 25)
    assert capped.our_case(CappedCase("llama.cpp-bf16", 25)) == CappedCase("rabbitllm-2", 25)


def test_bytes_that_this_process_reads_are_counted(tmp_path: Path) -> None:
    if "tmpfs" in subprocess.run(["df", "--output=fstype", tmp_path], capture_output=True, text=True).stdout:
        pytest.skip("what is in a tmpfs comes from no disk")
    (tmp_path / "file").write_bytes(os.urandom(4 << 20))
    drop_cached(tmp_path)
    before = worker.bytes_read()
    (tmp_path / "file").read_bytes()
    assert worker.bytes_read() - before >= 4 << 20


def test_bars_are_drawn_for_what_ran_and_what_failed() -> None:
    runs = [StepsRun("rabbitllm-2, 50 %", 0), StepsRun("transformers, 50 %", 0, error="died")]
    runs[0].token_seconds = 0.25
    rows = {one.row: (50, one.row.partition(",")[0], "rabbit" in one.row) for one in runs}
    found = report.bars_by_cap("title", runs, rows)
    assert found["groups"] == {
        "idle process + 50 % of the weights": [
            {"name": "rabbitllm-2", "figures": [0.25] * 3, "ours": True},
            {"name": "transformers", "figures": None, "ours": False},
        ]
    }


@pytest.mark.long
@needs_groups
def test_this_project_under_a_cap_at_tiny_scale(tmp_path: Path) -> None:
    rows = ["rabbitllm-2", "rabbitllm-2-4bit"]
    given = ["--scale", "tiny", "--turns", "1", "--tokens", "4", "--shares", "50", "--work-dir", str(tmp_path)]
    assert capped.main([*given, "--results", str(tmp_path / "r"), "--only", *rows]) == 0
    text = (tmp_path / "r.md").read_text()
    assert all(f"| {row}, {cap} | 1/1 |" in text for row in rows for cap in ("no cap", "50 %"))
    assert not (tmp_path / "capped-run").exists()
