"""The prefix cache on disk: the same answers after a restart, whatever happened to the files meanwhile."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.errors import OptionError
from rabbitllm.generation._prompt_cache import BLOCK_TOKENS, file_pieces, read_value
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.kv_cache import keeps
from rabbitllm.generation.request import BatchStats, Limits, Request
from rabbitllm.storage import durable
from rabbitllm.storage.durable import PART_SUFFIX, Step, observe_steps
from tests.generation.submitting import Submitted, answered, begin, prompt
from tests.support.builders import FAMILIES, Family, build_checkpoint
from tests.support.dying import Death
from tests.support.fresh_process import in_a_fresh_process
from tests.support.hybrid_families import HYBRIDS
from tests.support.small_disk import small_disk
from tests.support.tiny_models import load, split

MODELS: dict[str, Family] = {**FAMILIES, **HYBRIDS}
SHOWN = ("llama", "gemma3", "qwen3_next", "falcon_h1")
"""Layers that keep every token, windows, states, and layers with both keys and a state."""
SYSTEM = prompt(3 * BLOCK_TOKENS, 1)
"""Whole chunks: memory keeps any number of tokens, and a prefix that ends in a chunk leaves other rows to compute."""
LIMIT = 1 << 30
PLAIN = Limits(chunk=BLOCK_TOKENS, draft="none")
"""In its chunks a prompt is computed in the same parts, whether it was stored or not: with the same bits."""


def limits(folder: Path, limit: int = LIMIT, **options: Any) -> Limits:
    return replace(PLAIN, prompt_bytes=limit, prompt_folder=folder, **options)


def asked(seeds: Sequence[int], system: Sequence[int] = SYSTEM) -> list[Request]:
    """Requests with one system prompt and different questions."""
    return [Request((*system, *prompt(20, seed)), 6, top_logprobs=3) for seed in seeds]


@pytest.fixture
def ask(split_folder: Path) -> Iterator[Callable[..., tuple[list[Submitted], BatchStats]]]:
    """Answers requests one after the other by a new server, and closes it."""

    def ask(
        limits: Limits, requests: Sequence[Request], folder: Path = split_folder
    ) -> tuple[list[Submitted], BatchStats]:
        batch = Batch(load(folder, 60_000, dtype="float32", exact=False), limits)
        answers = [answered(batch, [request])[0] for request in requests]
        batch.close()
        return answers, batch.stats

    return ask


Ask = Callable[..., tuple[list[Submitted], BatchStats]]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same(answers: Sequence[Submitted], expected: Sequence[Submitted]) -> None:
    """The same tokens, with the same bits of their probabilities."""
    assert [answer.chosen for answer in answers] == [answer.chosen for answer in expected]


@pytest.mark.bits
@pytest.mark.parametrize(
    "family", [*SHOWN, *(pytest.param(name, marks=pytest.mark.long) for name in MODELS if name not in SHOWN)]
)
def test_answers_after_a_restart_have_the_bits_of_computed_ones(tmp_path: Path, ask: Ask, family: str) -> None:
    if MODELS[family].encoder_decoder:
        pytest.skip("requests need a causal model")
    folder = split(build_checkpoint(tmp_path / family, MODELS[family], dtype=torch.float32))
    model = load(folder, dtype="float32", exact=False)
    if not keeps(model):
        with pytest.raises(OptionError, match="do not go on with further tokens"):
            Batch(model, limits(tmp_path / "prompts"))
        return
    requests = asked([5, 6, 7])
    expected = [ask(PLAIN, [request], folder)[0][0] for request in requests]
    before, stats = ask(limits(tmp_path / "prompts"), requests[:2], folder)
    assert stats.prompt_written_bytes == stats.prompt_bytes == sum(map(len, files(tmp_path / "prompts").values()))
    after, stats = ask(limits(tmp_path / "prompts"), requests[2:], folder)
    assert_same([*before, *after], expected)
    assert (stats.prompt_hits, stats.prompt_saved_tokens, stats.kept_tokens) == (1, 3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    assert stats.prompt_read_bytes > 0


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path, ask: Ask) -> None:
    """From states at the end of the answer, too, which is within a block."""
    folder = split(build_checkpoint(tmp_path / "model", FAMILIES["qwen3_next"], dtype=torch.float32))
    (first,), _ = ask(limits(tmp_path / "prompts"), asked([5]), folder)
    said = (*first.request.prompt, *first.tokens)
    (second,), stats = ask(limits(tmp_path / "prompts"), [Request((*said, *prompt(9, 2)), 6)], folder)
    assert stats.prompt_saved_tokens == len(said) - 1 == second.finished.kept_tokens
    assert second.tokens == ask(Limits(), [second.request], folder)[0][0].tokens


@pytest.mark.parametrize("place", [0, 9, 13, 200, -1])
def test_a_damaged_file_is_computed_again(
    tmp_path: Path, ask: Ask, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    before, _ = ask(limits(tmp_path), asked([5]))
    stored = files(tmp_path)
    for path in tmp_path.rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[place] ^= 4
        path.write_bytes(data[: None if place % 2 else -8])
    after, stats = ask(limits(tmp_path), asked([5]))
    assert_same(after, before)
    assert stats.prompt_hits == 0
    assert [record.levelname for record in caplog.records if "is damaged" in record.message] == ["WARNING"]
    again, stats = ask(limits(tmp_path), asked([5]))
    assert_same(again, before)
    assert stats.prompt_hits <= 1
    assert {name: len(data) for name, data in files(tmp_path).items()}.keys() == stored.keys()


def asked_hybrid(tmp_path: Path, ask: Ask, family: str) -> tuple[Path, Any]:
    """A split of a family with states, whose cache is in `whole`, and what it answers."""
    folder = split(build_checkpoint(tmp_path / "model", MODELS[family], dtype=torch.float32))
    expected = ask(PLAIN, asked([5]), folder)[0]
    ask(limits(tmp_path / "whole"), asked([5]), folder)
    return folder, expected


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_torn_files_of_hybrids_are_computed_again(tmp_path: Path, ask: Ask, family: str) -> None:
    """Cut, or with blocks of zeros as after a power cut, or with a bit that has turned; some or all of the files."""
    folder, expected = asked_hybrid(tmp_path, ask, family)
    drawn, hits = random.Random(2), 0
    for number in range(12):
        torn = tmp_path / f"torn{number}"
        shutil.copytree(tmp_path / "whole", torn)
        paths = sorted(path for path in torn.rglob("*") if path.is_file())
        assert any(path.suffix == ".state" for path in paths)
        for path in drawn.sample(paths, drawn.randint(1, len(paths)) if number else 0):  # the first are whole
            data = bytearray(path.read_bytes())
            place = drawn.randrange(len(data))
            if number % 3 == 0:
                data = data[:place]
            elif number % 3 == 1:
                data[place : place + 4096] = bytes(len(data[place : place + 4096]))
            else:
                data[place] ^= 1 << drawn.randrange(8)
            path.write_bytes(data)
        answers, stats = ask(limits(torn), asked([5]), folder)
        assert_same(answers, expected)
        hits += stats.prompt_hits
        assert_same(ask(limits(torn), asked([5]), folder)[0], expected)
    assert 0 < hits < 12


@pytest.mark.parametrize("kind", ["FIFO", "folder", "another block"])
def test_what_is_not_the_named_block_stops_no_answer(tmp_path: Path, ask: Ask, kind: str) -> None:
    before, _ = ask(limits(tmp_path), asked([5]))
    first, second, _ = sorted(tmp_path.rglob("*.kv"), key=lambda path: int(path.name.partition("-")[0]))
    other = second.read_bytes()
    first.unlink()
    {"FIFO": os.mkfifo, "folder": os.mkdir, "another block": lambda path: path.write_bytes(other)}[kind](first)
    opened = len(os.listdir("/proc/self/fd"))
    after, stats = ask(limits(tmp_path), asked([5]))
    assert_same(after, before)
    assert stats.prompt_hits == 0
    assert len(os.listdir("/proc/self/fd")) <= opened


def test_files_that_leave_while_they_are_counted(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server makes room while this one starts."""
    ask(limits(tmp_path), asked([5]))
    stored = files(tmp_path)
    (tmp_path / ("0" * 32)).mkdir()

    def listed(folder: Path, names: Callable[[Any], list[str]] = os.listdir) -> list[str]:
        listing = names(folder)
        durable.remove_empty_folder(tmp_path / ("0" * 32))
        durable.remove_scratch(Path(folder) / next(iter(stored)))
        return listing

    monkeypatch.setattr(os, "listdir", listed)
    _, stats = ask(limits(tmp_path), [Request(prompt(20, 1), 1)])
    assert stats.prompt_bytes == sum(map(len, list(stored.values())[1:]))


def test_other_weights_dtypes_and_settings_share_nothing(tmp_path: Path, split_folder: Path) -> None:
    other = split(build_checkpoint(tmp_path / "other", FAMILIES["llama"], dtype=torch.float32, seed=7))
    same = tmp_path / "moved"
    same.symlink_to(split_folder)
    keys = []
    for folder, options in (
        *((split_folder, {}), (same, {}), (other, {})),
        *((split_folder, {"dtype": "bfloat16"}), (split_folder, {"exact": True})),
    ):
        settings: dict[str, Any] = {"dtype": "float32", "exact": False, **options}
        batch = Batch(load(folder, 60_000, **settings), limits(tmp_path / f"prompts{len(keys)}"))
        batch.close()
        keys.append({path.name for path in (tmp_path / f"prompts{len(keys)}").iterdir()})
    assert keys[0] == keys[1]
    assert len({name for names in keys for name in names}) == 4


def test_nothing_is_written_while_a_request_runs(tmp_path: Path, split_folder: Path) -> None:
    batch = Batch(load(split_folder, 60_000, dtype="float32", exact=False), limits(tmp_path))
    seen: list[int] = []

    def observe(step: Step) -> None:
        if threading.current_thread().name == "rabbitllm-prompt-cache":
            seen.append(batch.stats.running)

    with observe_steps(observe):
        long = begin(batch, Request(prompt(20, 3), 200))
        answered(batch, asked([5, 6]))
        assert long.handle is not None
        assert not seen or long.over.is_set()
        long.wait()
        batch.close()
    assert seen
    assert not any(seen)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("at", [0, 1, 2, 3, 8, 12, 13, 14, 15, 26, 27])
def test_a_death_at_any_step_leaves_right_answers(
    tmp_path: Path, ask: Ask, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    before, _ = ask(PLAIN, asked([5]))
    steps: list[Step] = []

    def die(step: Step) -> None:
        steps.append(step)
        if len(steps) > at:
            raise Death

    with contextlib.suppress(Death), observe_steps(die):
        ask(limits(tmp_path), asked([5]))
    assert len(steps) > at
    after, _ = ask(limits(tmp_path), asked([5]))
    assert_same(after, before)
    assert sorted(int(name.split("-")[0]) for name in files(tmp_path)) == [64, 128, 192]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    again, stats = ask(limits(tmp_path), asked([5]))
    assert_same(again, before)
    assert stats.prompt_saved_tokens == 192


def _killed_while_it_writes(folder: Path, prompts: Path) -> None:
    def kill(step: Step) -> None:
        if step.kind == "sync" and prompts in step.path.parents:
            os.kill(os.getpid(), signal.SIGKILL)

    batch = Batch(load(folder, 60_000, dtype="float32", exact=False), limits(prompts))
    with observe_steps(kill):
        answered(batch, asked([5]))
        time.sleep(600)


@pytest.mark.long
def test_kill_9_while_it_writes(tmp_path: Path, ask: Ask, split_folder: Path) -> None:
    with pytest.raises(Exception, match="terminated abruptly"):
        in_a_fresh_process(_killed_while_it_writes, split_folder, tmp_path)
    assert [name.endswith(PART_SUFFIX) for name in files(tmp_path)] == [True]
    expected, _ = ask(PLAIN, asked([5]))
    answers, _ = ask(limits(tmp_path), asked([5]))
    assert_same(answers, expected)
    assert not any(name.endswith(PART_SUFFIX) for name in files(tmp_path))
    assert ask(limits(tmp_path), asked([6]))[1].prompt_saved_tokens == 192


def _answers_until_it_is_killed(folder: Path, prompts: Path, limit: int, seed: int, results: Any) -> None:
    batch = Batch(load(folder, 60_000, dtype="float32", exact=False), limits(prompts, limit))
    drawn = random.Random(seed)
    for number, index in enumerate(drawn.sample(range(VARIANTS), VARIANTS)):
        if number == 1:
            results.send(None)
        (answer,) = answered(batch, [varied(index)])
        results.send((index, answer.chosen))
    time.sleep(600)


VARIANTS = 6


def varied(index: int) -> Request:
    """One of some requests, two with each system prompt; one is longer, by whole chunks: memory keeps any number."""
    system = prompt((2 + index % 2) * BLOCK_TOKENS, index // 2)
    return asked([index], system)[0]


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "falcon_h1"])
def test_kill_9_at_any_moment(tmp_path: Path, ask: Ask, family: str) -> None:
    """Processes on one folder, killed one after the other; each answers from what those before it left there."""
    folder = split(build_checkpoint(tmp_path / "model", MODELS[family], dtype=torch.float32))
    expected = [ask(PLAIN, [varied(index)], folder)[0][0].chosen for index in range(VARIANTS)]
    ask(limits(tmp_path / "whole"), list(map(varied, range(VARIANTS))), folder)
    whole = files(tmp_path / "whole")
    limit = sum(map(len, whole.values())) * 2 // 3  # so that files leave, too
    processes, drawn = multiprocessing.get_context("forkserver"), random.Random(1)
    processes.set_forkserver_preload([__name__])
    unfinished = 0
    for seed in range(30):
        results, sender = processes.Pipe(duplex=False)
        arguments = folder, tmp_path / "prompts", limit, seed, sender
        process = processes.Process(target=_answers_until_it_is_killed, args=arguments)
        process.start()
        sender.close()
        answers = [results.recv()]
        while answers[-1] is not None:
            answers.append(results.recv())
        moment = time.monotonic() + drawn.uniform(0, 0.4)
        while time.monotonic() < moment and not (seed % 2 and any((tmp_path / "prompts").rglob(f"*{PART_SUFFIX}"))):
            time.sleep(0.001)  # every other one is killed while it writes a file, if it does by then
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                answers.append(results.recv())
        for index, chosen in filter(None, answers):
            assert chosen == expected[index], (seed, index)
        left = files(tmp_path / "prompts")
        unfinished += any(name.endswith(PART_SUFFIX) for name in left)
        assert all(whole.get(name, data) == data for name, data in left.items())
    assert unfinished
    answers, stats = ask(limits(tmp_path / "prompts", limit), list(map(varied, range(VARIANTS))), folder)
    assert [answer.chosen for answer in answers] == expected
    assert stats.prompt_hits
    assert not any(name.endswith(PART_SUFFIX) for name in files(tmp_path / "prompts"))


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_a_full_disk_stops_no_hybrid(tmp_path: Path, ask: Ask, family: str) -> None:
    folder, expected = asked_hybrid(tmp_path, ask, family)
    needed = sum(map(len, files(tmp_path / "whole").values()))
    for share in (0.05, 0.3, 0.6, 0.9):
        with small_disk(tmp_path / f"disk{share}", 4 << 20) as disk:
            disk.leave(int(needed * share))
            assert_same(ask(limits(disk.path / "prompts"), asked([5]), folder)[0], expected)
            assert len(files(disk.path / "prompts")) < len(files(tmp_path / "whole"))
            disk.give_back()
            assert_same(ask(limits(disk.path / "prompts"), asked([5]), folder)[0], expected)
            assert files(disk.path / "prompts").keys() == files(tmp_path / "whole").keys()


def test_a_full_disk_stops_no_answer(
    tmp_path: Path, split_folder: Path, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = ask(PLAIN, asked([5, 6]))
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        disk.leave(100_000)
        full, _ = ask(limits(disk.path / "prompts"), asked([5, 6]))
        written = files(disk.path / "prompts")
        assert 0 < len(written) < 3
        warnings = [record for record in caplog.records if "could not be written" in record.message]
        assert len(warnings) == 1
        disk.give_back()
        after, stats = ask(limits(disk.path / "prompts"), asked([5, 6]))
        assert stats.prompt_saved_tokens == 64 * len(written)
        assert len(files(disk.path / "prompts")) == 3
    assert_same([*full, *after], [*expected, *expected])


def test_the_least_recently_used_leave_and_later_blocks_first(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mark_used(path: Path) -> None:
        time.sleep(0.01)  # times of files are not finer on some file systems
        os.utime(path)

    monkeypatch.setattr(durable, "mark_used", mark_used)
    ask(limits(tmp_path), asked([5]))
    (size,) = {len(data) for data in files(tmp_path).values()}
    first = set(files(tmp_path))
    ask(limits(tmp_path, 6 * size), asked([5], prompt(202, 2)))
    second = set(files(tmp_path)) - first
    assert (len(first), len(second)) == (3, 3)
    assert ask(limits(tmp_path, 6 * size), asked([6]))[1].prompt_hits == 1
    (_,), stats = ask(limits(tmp_path, 6 * size), asked([5], prompt(66, 3)))  # a block more
    assert stats.prompt_bytes == 6 * size
    assert first <= set(files(tmp_path))
    assert {int(name.split("-")[0]) for name in second & set(files(tmp_path))} == {64, 128}
    ask(limits(tmp_path, 2 * size), asked([5], prompt(202, 4)))  # of a longer text, the first blocks
    assert sorted(int(name.split("-")[0]) for name in files(tmp_path)) == [64, 128]


def test_two_servers_share_a_folder(tmp_path: Path, split_folder: Path, ask: Ask) -> None:
    expected, _ = ask(PLAIN, asked([5, 6, 7, 8]))
    servers = [Batch(load(split_folder, 60_000, dtype="float32", exact=False), limits(tmp_path)) for _ in range(2)]
    ends = [begin(servers[index % 2], request) for index, request in enumerate(asked([5, 6, 7, 8]))]
    assert [end.wait().tokens for end in ends] == [answer.tokens for answer in expected]
    for server in servers:
        server.close()
    assert len(files(tmp_path)) == 3
    assert sum(server.stats.prompt_written_bytes for server in servers) == sum(map(len, files(tmp_path).values()))


def test_only_the_user_may_read_it(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RABBITLLM_HOME", str(tmp_path))
    before = os.umask(0)
    try:
        ask(Limits(prompt_bytes=LIMIT), asked([5]))
    finally:
        os.umask(before)
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "prompts").rglob("*")}
    assert modes == {True: 0o700, False: 0o600}
    assert stat.S_IMODE((tmp_path / "prompts").stat().st_mode) == 0o700
    (tmp_path / "prompts").chmod(0o777)
    with pytest.raises(OptionError, match="Other users can write into"):
        ask(Limits(prompt_bytes=LIMIT), asked([5]))


def test_it_touches_no_other_file(tmp_path: Path, ask: Ask) -> None:
    others = {"notes.txt": b"1", "64-note.kv": b"2", f"x{PART_SUFFIX}": b"3"}
    folder = tmp_path / ("0" * 32)
    folder.mkdir()
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
        (folder / name).write_bytes(data)
    (folder / ("64-" + "0" * 32 + ".kv")).symlink_to(tmp_path / "notes.txt")
    ask(limits(tmp_path, 1000), asked([5]))
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
    assert {name: (folder / name).read_bytes() for name in others} == others


def test_what_cannot_be_kept_is_refused(tmp_path: Path, checkpoint: Path, split_folder: Path) -> None:
    model = load(split_folder, 60_000, dtype="float32", exact=False)
    with pytest.raises(OptionError, match="exact=True computes each request by itself"):
        limits(tmp_path, exact=True)  # at the start of a server, before any model is loaded
    with pytest.raises(OptionError, match="prompt_bytes=-1"):
        Limits(prompt_bytes=-1)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be made"):
        Batch(model, limits(tmp_path / "file" / "prompts"))


def test_values_of_files(tmp_path: Path) -> None:
    value = {
        (1, "keys"): torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
        "state": [None, True, 1.5, (torch.float16, torch.device("cpu")), torch.zeros(0, 4), torch.tensor(3)],
        2: {0: False},
    }
    (tmp_path / "file").write_bytes(b"".join(file_pieces(value, "file")))
    again = read_value(tmp_path / "file")
    assert torch.equal(again.pop((1, "keys")), value.pop((1, "keys")))
    assert again["state"][4].shape == (0, 4)
    assert torch.equal(again["state"].pop(), torch.tensor(3))
    assert repr(again["state"]) == repr(value["state"][:-1])
    assert again[2] == {0: False}
    with pytest.raises(TypeError, match="a object is neither a tensor nor plain"):
        file_pieces({"x": object()}, "file")
