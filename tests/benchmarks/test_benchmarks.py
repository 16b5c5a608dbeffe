"""The measuring tools against processes, folders and files whose figures are known."""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.decode import decode, predict
from benchmarks.lib import command_line, generation, peers, pictures, report, runs
from benchmarks.lib.checkpoint import SCALES, make_checkpoint, same_tensors, shards
from benchmarks.lib.measure import (
    BLOCK_BYTES,
    DiskWatch,
    Sampler,
    Spread,
    copy_files,
    drop_cached,
    fresh_copy,
    fresh_folder,
    memory_of,
    spread,
)
from benchmarks.split import split
from tests.support.builders import build_checkpoint
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc")

MIB = 1 << 20

Talk = Callable[[str], str]


@pytest.fixture
def talk() -> Iterator[tuple[int, Talk]]:
    """A Python process, by its number, and a function that has it carry out one line and waits until that is done."""
    loop = "import sys, mmap, os\nfor line in sys.stdin: exec(line); print('done', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given, said = process.stdin, process.stdout

        def carry_out(line: str) -> str:
            given.write(line + "\n")
            given.flush()
            return said.readline()

        carry_out("pass")  # the interpreter has started
        yield process.pid, carry_out
        process.kill()


def write(path: Path, nbytes: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(os.urandom(nbytes))
        os.fsync(file.fileno())
    return path


def wait_for_samples(sampler: Sampler, more: int = 3) -> None:
    wanted = sampler.samples + more
    limit = time.monotonic() + 600
    while sampler.samples < wanted and time.monotonic() < limit:
        time.sleep(0.005)


def test_the_peak_of_a_process_that_allocates_and_frees(talk: tuple[int, Talk]) -> None:
    pid, carry_out = talk
    with Sampler([], pid) as sampler:
        carry_out("held = bytearray(os.urandom(1)) * (50 << 20)")
        wait_for_samples(sampler)
        carry_out("del held")
        wait_for_samples(sampler)
    now = memory_of(pid)
    assert 50 * MIB <= sampler.anonymous_peak - sampler.anonymous_idle < 52 * MIB
    assert now is not None
    assert now.anonymous < sampler.anonymous_idle + 2 * MIB


def test_shared_anonymous_memory_counts_and_mapped_files_do_not(talk: tuple[int, Talk], tmp_path: Path) -> None:
    pid, carry_out = talk
    path = write(tmp_path / "file", 30 * MIB)
    with Sampler([], pid) as sampler:
        carry_out("shared = mmap.mmap(-1, 20 << 20); shared.write(bytes([1]) * (20 << 20))")
        wait_for_samples(sampler)
        carry_out(f"mapped = mmap.mmap(os.open({str(path)!r}, os.O_RDONLY), 0, access=mmap.ACCESS_READ)")
        carry_out("sum(mapped[::4096])")
        wait_for_samples(sampler)
    assert 20 * MIB <= sampler.anonymous_peak - sampler.anonymous_idle < 50 * MIB
    assert sampler.file_peak >= 30 * MIB


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert memory_of(process.pid) is None


def test_the_peak_of_a_folder_that_grows_and_shrinks(tmp_path: Path) -> None:
    write(tmp_path / "there before", MIB)
    with Sampler([tmp_path]) as sampler:
        grown = write(tmp_path / "below" / "grown", 3 * MIB)
        wait_for_samples(sampler)
        grown.unlink()
        write(tmp_path / "stays", 2 * MIB)
        wait_for_samples(sampler)
    assert sampler.disk_start == MIB
    assert sampler.disk_peak - sampler.disk_start == 3 * MIB
    assert sampler.disk_end - sampler.disk_start == 2 * MIB
    assert sampler.samples > 6
    assert sampler.longest_gap > 0


def test_hard_links_count_once_and_links_and_holes_nothing(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", 2 * MIB)
    inside = write(tmp_path / "watched" / "file", MIB)
    other = tmp_path / "also watched"
    other.mkdir()
    os.link(inside, other / "the same")
    (other / "symbolic").symlink_to(outside)
    os.truncate(write(other / "hole", 0), 100 * MIB)
    assert DiskWatch([inside.parent, other]).allocated() == MIB


def test_what_a_file_allocates_counts_and_not_its_length(tmp_path: Path) -> None:
    path = write(tmp_path / "short", 1)
    assert DiskWatch([tmp_path]).allocated() == path.stat().st_blocks * BLOCK_BYTES >= BLOCK_BYTES


@pytest.mark.parametrize(
    "hold",
    ["held = os.open({!r}, os.O_RDONLY)", "f = open({!r}); held = mmap.mmap(f.fileno(), 0, prot=1); f.close()"],
    ids=["open", "mapped"],
)
def test_an_unlinked_file_counts_until_the_process_lets_go(hold: str, talk: tuple[int, Talk], tmp_path: Path) -> None:
    pid, carry_out = talk
    path = write(tmp_path / "file", MIB)
    watch = DiskWatch([tmp_path], pid)
    carry_out(hold.format(str(path)))
    assert watch.allocated() == MIB
    path.unlink()
    assert watch.allocated() == MIB
    assert watch.allocated() == MIB
    carry_out("os.close(held) if isinstance(held, int) else held.close()")
    assert watch.allocated() == 0


def resident_pages(path: Path) -> int:
    """How many pages of a file are in the page cache, by mincore."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        states = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        result = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), states
        )
        del start
        assert result == 0, os.strerror(ctypes.get_errno())
        return sum(state & 1 for state in states)


def test_dropped_files_are_not_in_the_page_cache(tmp_path: Path) -> None:
    if "tmpfs" in subprocess.run(["df", "--output=fstype", tmp_path], capture_output=True, text=True).stdout:
        pytest.skip("a tmpfs is nothing but page cache")
    path = write(tmp_path / "folder" / "file", 8 * MIB)
    assert resident_pages(path) == 8 * MIB // mmap.PAGESIZE
    drop_cached(tmp_path)
    assert resident_pages(path) == 0


def test_a_fresh_copy_replaces_the_one_before(tmp_path: Path) -> None:
    source = write(tmp_path / "source" / "file", MIB).parent
    stale = write(tmp_path / "run" / "copy" / "stale", 1)
    fresh_copy(source, stale.parent)
    assert {path.name for path in stale.parent.iterdir()} == {"file"}
    assert (stale.parent / "file").read_bytes() == (source / "file").read_bytes()


def test_a_cp_that_fails_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"cp .*failed .*GNU coreutils"):
        copy_files(tmp_path / "nothing", tmp_path / "copy")


def test_medians_and_extremes() -> None:
    assert spread([3.0, 1.0, 2.5]) == Spread(2.5, 1.0, 3.0)
    assert spread([]) is None
    assert report.shown(Spread(2.5e6, 1e6, 3e6), 1, 1e6) == "2.5 (1.0-3.0)"
    assert report.shown(None) == "-"


def test_tables() -> None:
    table = report.Table(("row", "x"), [("long name", "1"), ("a|b", "100")])
    assert table.text() == "row          x\n---------  ---\nlong name    1\na|b        100"
    assert table.markdown() == "| row | x |\n| --- | ---: |\n| long name | 1 |\n| a\\|b | 100 |"


def test_goals() -> None:
    assert report.reach("x", 1.2, 1.3, at_most=True) == "x: 1.2 (at most 1.3): reached"
    assert report.reach("x", 9.9, 10, at_most=False) == "x: 9.9 (at least 10): NOT reached"
    assert report.reach("x", None, 10, at_most=False) == "x: not measured (at least 10)"
    assert [report.verdict(checks) for checks in ([], [True, True], [True, False])] == ["-", "yes", "NO"]


def test_turns_begin_with_another_row_each() -> None:
    assert list(runs.in_turns(["a", "b"], 2)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]


def test_ratios_are_taken_within_a_turn() -> None:
    seconds = {("cp", 0): 1.0, ("fast", 0): 2.0, ("cp", 1): 10.0, ("fast", 1): 10.0, ("fast", 2): 99.0}
    made = [split.SplitRun(row, turn, seconds=value, sync_seconds=value) for (row, turn), value in seconds.items()]
    made.append(split.SplitRun("cp", 2, error="broken"))
    assert runs.ratios(made, "fast", "cp") == Spread(1.5, 1.0, 2.0)


def test_tokens_are_compared_with_transformers_in_the_same_turn() -> None:
    made = [
        generation.StepsRun(decode.REFERENCE, 0, tokens=[1, 2]),
        generation.StepsRun("other", 0, tokens=[1, 2]),
        generation.StepsRun(decode.REFERENCE, 1, tokens=[1, 3]),
        generation.StepsRun("other", 1, tokens=[1, 2]),
        generation.StepsRun("other", 2, tokens=[1, 2]),
    ]
    assert generation.tokens_equal(made, "other", decode.REFERENCE) == [True, False]


def test_a_peer_that_fails_is_reported_and_the_rest_goes_on() -> None:
    def measure(run: split.SplitRun) -> None:
        if run.row == "broken":
            raise peers.PeerError("no luck")
        run.seconds = 1.0

    made = runs.run_all(["cp", "broken", "absent"], 2, split.SplitRun, measure, {"absent": "cannot be installed"})
    assert [run.row for run in made if run.error is None] == ["cp", "cp"]
    assert runs.failures(made) == ["absent failed: cannot be installed", "broken failed: no luck"]
    cells = {line[0]: line[1] for line in split.tabulate(made, ["cp", "broken", "absent"], 2).rows}
    assert cells == {"cp": "2/2", "broken": "0/2", "absent": "0/2"}


def test_a_row_that_lacks_its_files_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried, measured = [], []

    def files(runner: str) -> None:
        tried.append(runner)
        if runner == "broken":
            raise peers.PeerError("no room")

    monkeypatch.setattr(runs, "prepare", lambda environments, work: {"absent": "cannot be installed"})
    cases = [generation.CappedCase(runner, share) for runner in ("fine", "broken", "absent") for share in (None, 50)]
    options = argparse.Namespace(turns=1, work_dir=tmp_path)
    made = runs.carry_out(
        options,
        cases,
        generation.StepsRun,
        lambda run, case: measured.append((run.row, case)),
        dict.fromkeys(("fine", "broken", "absent"), peers.THIS),
        tmp_path / "run",
        files,
    )
    assert tried == ["fine", "broken"]
    assert not (tmp_path / "run").exists()
    assert measured == [(case.name, case) for case in cases[:2]]
    assert {run.row: run.error for run in made} == {
        "fine, no cap": None,
        "fine, 50 %": None,
        "broken, no cap": "its files: no room",
        "broken, 50 %": "its files: no room",
        "absent, no cap": "cannot be installed",
        "absent, 50 %": "cannot be installed",
    }


def test_layer_files_that_failed_are_not_taken_for_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub_worker(monkeypatch, tmp_path, "print('full', file=sys.stderr); os._exit(1)")
    with pytest.raises(peers.PeerError, match="last said: full"):
        peers.make_layer_files(peers.THIS, "rabbitllm", tmp_path, tmp_path / "layers", None, tmp_path, "stub")
    assert not (tmp_path / "layers").exists()


def test_at_the_smallest_size_layer_files_need_no_other_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub_worker(monkeypatch, tmp_path, "os._exit(1)")
    monkeypatch.setenv(command_line.SMALLEST, "1")
    model = build_checkpoint(tmp_path / "model", "llama")
    peers.make_layer_files(peers.THIS, "rabbitllm", model, tmp_path / "layers", None, tmp_path, "stub")
    assert (tmp_path / "layers" / "splitted_model" / "split.json").exists()


def test_layer_files_are_made_once_and_for_layered_rows_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub_worker(
        monkeypatch,
        tmp_path,
        "print('{\"ready\": {}}', flush=True)\n"
        "sys.stdin.readline()\n"
        f"open({str(tmp_path / 'made')!r}, 'a').write('.')\n"
        "print('{}', flush=True)\n",
    )
    layered = generation.Runner(peers.THIS, "rabbitllm")
    for runner in (generation.Runner(peers.THIS, "transformers", "in memory"), layered, layered):
        generation.prepare_files(runner, tmp_path, tmp_path / "layers", tmp_path, "stub")
    assert (tmp_path / "made").read_text() == "."
    assert (tmp_path / "layers").is_dir()


def test_bars_are_sorted_within_their_groups() -> None:
    def row(group: str, name: str, *values: float) -> tuple[str, str, Spread | None, bool]:
        return group, name, spread(values), False

    drawn = [row("two", "slow", 3.0), row("one", "alone", 2.0), row("two", "failed"), row("two", "quick", 1.0)]
    found = pictures.bars("title", "s", drawn)["groups"]
    assert {group: [bar["name"] for bar in bars] for group, bars in found.items()} == {
        "two": ["quick", "slow", "failed"],
        "one": ["alone"],
    }


PICTURES = {
    "bars": pictures.bars("title", "s", [("all", "ours", Spread(1.0, 0.5, 2.0), True), ("all", "x", None, False)]),
    "lines": pictures.lines("title", "at once", "s", {"ours": ({1: 1.0, 4: 4.0}, True), "other": ({1: 1.1}, False)}),
    "points": pictures.points("title", "MB", "nats", {"RabbitLLM": [("4bit", 14.5, 1e-2), ("8bit", 27, 1e-4)]}),
    "panels": pictures.panels("title", {"one": ("machines", [("T4", {1: 1.0, 10: 9.0}, False), ("T4", {}, True)])}),
    "areas": pictures.areas("title", {"a": [1, 2], "b": [0, 1]}, [0.0, 1.0], {"limit": 3.0}, [0.5]),
}


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.long
def test_pictures_are_drawn_from_the_json(kind: str, tmp_path: Path) -> None:
    table = report.Table(("row", "s"), [("one", report.shown(Spread(2.0, 1.0, 3.0)))])
    report.write(tmp_path / "r", "title", table, ["note"], picture=PICTURES[kind], more={"More": table})
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["rows"] == [{"row": "one", "s": {"text": "2.00 (1.00-3.00)", "median": 2.0, "low": 1.0, "high": 3.0}}]
    assert report.page(found) == (tmp_path / "r.md").read_text()
    assert "| one | 2.00 (1.00-3.00) |" in report.page(found)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
    assert {"cpu", "cores", "instruction_sets", "ram_gib"} <= found["machine"].keys()
    assert {"python", "torch", "transformers"} <= found["versions_here"].keys()
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")
    (tmp_path / "r.svg").unlink()
    assert pictures.redraw(tmp_path / "r.json") == [tmp_path / "r.svg"]
    assert (tmp_path / "r.svg").exists()
    pictures.draw(PICTURES[kind], tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_for_the_time_of_a_run(tmp_path: Path) -> None:
    left = write(tmp_path / "left" / "file", 10)

    def fail() -> None:
        with fresh_folder(left.parent) as folder:
            assert list(folder.iterdir()) == []
            write(folder / "own", 10)
            raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"):
        fail()
    assert not left.parent.exists()


def test_peers_get_the_libraries_that_this_project_is_tested_with() -> None:
    ours = set((peers.REPOSITORY / "constraints.txt").read_text().split())
    assert set(peers.TRANSFORMERS.requirements) <= ours
    for environment in (peers.AIRLLM, peers.RABBITLLM_1):
        assert set(peers._COMMON) <= set(environment.requirements)


def stub_worker(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    path = folder / "stub.py"
    path.write_text("import os, sys, time\n" + code)
    monkeypatch.setattr(peers, "WORKER", path)


def test_a_worker_is_sampled_from_go_to_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub_worker(
        monkeypatch,
        tmp_path,
        "idle = bytearray(20 << 20)\n"
        'print(\'{"ready": {"stub": "1"}}\', flush=True)\n'
        "sys.stdin.readline()\n"
        "busy = bytearray(b'x') * (30 << 20)\n"
        "time.sleep(0.2); print('{\"seconds\": 1}', flush=True)\n",
    )
    outcome = peers.run_worker(peers.THIS, {}, tmp_path, "stub", [])
    assert outcome.answer == {"seconds": 1}
    assert outcome.versions == {"stub": "1"}
    added = outcome.sampler.anonymous_peak - outcome.sampler.anonymous_idle
    assert 30 * MIB <= added < 32 * MIB


def test_a_worker_that_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub_worker(monkeypatch, tmp_path, f"print('last words in {tmp_path}', file=sys.stderr); os._exit(3)")
    with pytest.raises(peers.PeerError, match="died with exit status 3; last said: last words in <work>"):
        peers.run_worker(peers.THIS, {}, tmp_path, "stub", [])


def test_a_worker_that_takes_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub_worker(monkeypatch, tmp_path, "time.sleep(600)")
    monkeypatch.setattr(peers, "RUN_LIMIT_SECONDS", 0.3)
    with pytest.raises(peers.PeerError, match=r"killed: memory, or more than 0\.3 s"):
        peers.run_worker(peers.THIS, {}, tmp_path, "stub", [])


@pytest.mark.long
def test_the_real_worker_says_what_went_wrong(tmp_path: Path) -> None:
    job = {"task": "split", "package": "no_such_package"}
    with pytest.raises(peers.PeerError, match="ModuleNotFoundError: No module named 'no_such_package'"):
        peers.run_worker(peers.THIS, job, tmp_path, "absent", [])


def test_a_checkpoint_is_the_same_each_time(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "one", "tiny")
    second = make_checkpoint(tmp_path / "other", "tiny")
    stamp = json.loads((tmp_path / "one" / "checkpoint-tiny.json").read_text())
    assert stamp == json.loads((tmp_path / "other" / "checkpoint-tiny.json").read_text())
    sizes = [shard.stat().st_size for shard in shards(first)]
    assert len(sizes) > 3
    assert max(sizes) < SCALES["tiny"].shard_bytes + 64 * 1024
    assert same_tensors(first, second)
    before = [shard.stat().st_mtime_ns for shard in shards(first)]
    assert [shard.stat().st_mtime_ns for shard in shards(make_checkpoint(tmp_path / "one", "tiny"))] == before
    with shards(second)[-1].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert not same_tensors(first, second)
    shards(second)[0].unlink()
    assert not same_tensors(first, second)


def test_an_unfinished_checkpoint_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-tiny").mkdir()
    left = write(tmp_path / "checkpoint-tiny" / "model-00001-of-00009.safetensors", 10)
    folder = make_checkpoint(tmp_path, "tiny")
    assert not left.exists()
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def settle(*arguments: str) -> argparse.Namespace:
        options = command_line.parser(None, 1, ["row"]).parse_args(["--work-dir", str(tmp_path / "w"), *arguments])
        command_line.settle(options, "name")
        return options

    assert settle("--scale", "tiny").results == tmp_path / "w" / "results" / "name-tiny"
    assert settle().results.parts[-3:] == ("benchmarks", "results", "name-full")
    with pytest.raises(SystemExit, match="--turns must be at least 1"):
        settle("--turns", "0")
    with pytest.raises(SystemExit, match="--tokens must be at least 2"):
        decode.main(["--tokens", "1", "--scale", "tiny", "--work-dir", str(tmp_path / "w")])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(SystemExit, match=r"10\.0 GB must be free for --work-dir; 1\.0 GB are"):
        settle()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SystemExit, match="need Linux"):
        settle()


@pytest.mark.long
def test_an_environment_that_pip_cannot_make(tmp_path: Path) -> None:
    broken = peers.Environment("broken", (str(tmp_path / "no-such-file.whl"),))
    unusable = peers.prepare({"one": broken, "other": broken, "mine": peers.THIS}, tmp_path)
    assert set(unusable) == {"one", "other"}
    assert unusable["one"].startswith("cannot be installed: ERROR: ")


@pytest.mark.long
def test_this_project_end_to_end_at_tiny_scale(tmp_path: Path) -> None:
    folders = ["--scale", "tiny", "--turns", "1", "--work-dir", str(tmp_path / "w")]
    rows = [row for row, splitter in split.SPLITTERS.items() if splitter.environment == peers.THIS]
    assert split.main([*folders, "--results", str(tmp_path / "r" / "split"), "--only", *rows]) == 0
    found = {run["row"]: run for run in json.loads((tmp_path / "r" / "split.json").read_text())["runs"]}
    assert set(found) == {"cp", *rows}
    checkpoint = tmp_path / "w" / "checkpoint-tiny"
    total = sum(shard.stat().st_size for shard in shards(checkpoint))
    largest = max(shard.stat().st_size for shard in shards(checkpoint))
    files = SCALES["tiny"].layer_files
    assert found["cp"]["disk_added_peak"] >= total
    for row in rows:
        run, splitter = found[row], split.SPLITTERS[row]
        assert run["layer_files"] == files
        assert run["same_tensors"] is (None if splitter.compressed else True)
        assert run["shards_left"] == (0 if splitter.sequential else len(shards(checkpoint)))
        assert run["seconds"] > 0
        assert run["anonymous_peak"] > run["anonymous_idle"] > 0
    assert found["rabbitllm-2"]["disk_added_peak"] >= total
    assert found["rabbitllm-2-sequential"]["disk_added_peak"] <= largest + split.BYTES_A_LAYER_FILE * files

    rows = [row for row, runner in decode.RUNNERS.items() if runner.environment == peers.THIS]
    assert decode.main([*folders, "--results", str(tmp_path / "r" / "decode"), "--only", *rows, "--tokens", "4"]) == 0
    report_ = json.loads((tmp_path / "r" / "decode.json").read_text())
    found = {run["row"]: run for run in report_["runs"]}
    assert set(found) == set(rows)
    assert all((len(run["tokens"]), len(run["step_seconds"])) == (4, 3) for run in found.values())
    resident, streamed = found["rabbitllm-2"], found["rabbitllm-2-streamed"]
    assert resident["tokens"] == streamed["tokens"]
    assert resident["placed"] == "0 MB streamed"
    assert streamed["placed"] != resident["placed"]
    assert str(tmp_path) not in json.dumps(report_)
    assert {path.name for path in (tmp_path / "w").iterdir()} == {
        "checkpoint-tiny",
        "checkpoint-tiny.json",
        "logs",
    }


@pytest.mark.parametrize(
    ("predicted", "measured", "close"), [(1.0, 1.0, True), (0.76, 1.0, True), (0.74, 1.0, False), (1.26, 1.0, False)]
)
def test_what_is_foretold_is_judged_by_what_is_measured(predicted: float, measured: float, close: bool) -> None:
    row = "4bit half"
    run = predict.PredictRun(row, 0, predicted_token_seconds=predicted, token_seconds=measured)
    assert (run.is_close, run.headline) == (close, predicted)
    table = predict.tabulate([run], [row], 1)
    assert table.rows[0][5] == f"{int(close)} of 1"
    assert any(note.endswith(": reached") for note in predict.notes_on([run])) == close
