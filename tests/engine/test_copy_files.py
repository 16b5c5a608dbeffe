"""Copies for `draft="self"` on the disk: of the same bits as those made in memory, whole or absent, never mistaken."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.engine.placement import Tier
from rabbitllm.errors import OptionError, SplitError
from rabbitllm.models.library import look
from rabbitllm.models.remove import plan_removal, remove
from rabbitllm.quant import block_encoders
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store.layer_store import verify
from tests.generation.test_rewind import IDS, checkpoint
from tests.support.commands import invoke
from tests.support.tiny_models import load, one_thread, split, tiers  # noqa: F401

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}


def files_in(directory: Path) -> dict[str, bytes]:
    """The files of copies."""
    return {path.name: path.read_bytes() for path in (directory / "copies").glob("*")}


def least(directory: Path, **options: Any) -> int:
    """The least memory, in tenths of all weights, with which it is loaded with copies."""
    whole = load(directory, **options).get_memory_footprint()
    for tenth in range(4, 10):
        try:
            load(directory, whole * tenth // 10, self_draft=True, **options)
        except OptionError:
            continue
        return whole * tenth // 10
    pytest.fail("No limit of memory leaves room for copies, and streams something.")


@torch.no_grad()
def drafted(model: Any) -> torch.Tensor:
    """The logits of the model as its own draft."""
    with model.streamer.drafting():
        logits: torch.Tensor = model(IDS).logits
    return logits


@contextmanager
def encoding_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a copy was made")

    with monkeypatch.context() as patched:
        patched.setattr(block_encoders, "encode", refuse)
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, torch.Tensor]:
    directory = split(checkpoint(tmp_path_factory.mktemp("original") / "model", "llama", **WIDE))
    room = least(directory)
    expected = drafted(load(directory, room, self_draft=True))
    shutil.rmtree(directory / "copies")
    return directory, room, expected


@pytest.fixture
def llama(original: tuple[Path, int, torch.Tensor], tmp_path: Path) -> tuple[Path, int, torch.Tensor]:
    """A split, the memory for copies, and the logits of the draft by copies made in memory; it has no files yet."""
    directory, room, expected = original
    return shutil.copytree(directory.parent, tmp_path / "model") / directory.name, room, expected


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mixtral", "gpt_oss", "gemma3"])
def test_later_starts_read_what_the_first_one_made(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(checkpoint(tmp_path / "model", name))
    room = least(directory)
    shutil.rmtree(directory / "copies")
    first = load(directory, room, self_draft=True)
    made = files_in(directory)
    copied = {unit for unit, tier in tiers(first).items() if tier in (Tier.STREAMED, Tier.ROUTED)}
    assert {file.rsplit(".", 4)[0] for file in made} == copied
    assert sum(map(len, made.values())) >= first.placement.copies.nbytes
    with encoding_nothing(monkeypatch):
        later = load(directory, room, self_draft=True)
    assert torch.equal(drafted(later), drafted(first))
    assert files_in(directory) == made


def test_copies_in_memory_have_the_same_bits(
    llama: tuple[Path, int, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing can be written, or the disk is full, they are made as before, and one message says so."""
    directory, room, expected = llama

    def failing(kind: str, error: int) -> Callable[[Step], None]:
        def fail(step: Step) -> None:
            if step.kind == kind and "copies" in str(step.path):
                raise OSError(error, "injected")

        return fail

    for kind, error in (("make_folder", errno.EROFS), ("write", errno.ENOSPC), ("rename", errno.EIO)):
        caplog.clear()
        with observe_steps(failing(kind, error)):
            model = load(directory, room, self_draft=True)
        assert torch.equal(drafted(model), expected)
        assert not files_in(directory)
        assert [r.message for r in caplog.records if "in memory alone" in r.message and "injected" in r.message]
        assert len([r for r in caplog.records if "in memory alone" in r.message]) == 1


def test_a_full_disk_is_seen_before_the_first_byte(
    llama: tuple[Path, int, torch.Tensor], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, room, expected = llama
    usage = shutil.disk_usage(directory)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    assert torch.equal(drafted(load(directory, room, self_draft=True)), expected)
    assert not files_in(directory)
    assert "Keeping the copies for draft='self' needs" in caplog.text


@pytest.mark.parametrize("stride", [40, pytest.param(17, marks=pytest.mark.long)])
def test_a_crash_at_any_step_leaves_whole_files(llama: tuple[Path, int, torch.Tensor], stride: int) -> None:
    directory, room, expected = llama
    load(directory, room, self_draft=True)
    whole = files_in(directory)
    steps = 0
    while True:
        shutil.rmtree(directory / "copies")
        left = steps

        def crash(step: Step) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

        try:
            with observe_steps(crash):
                load(directory, room, self_draft=True)
            break
        except KeyboardInterrupt:
            steps += 1 if steps < 5 else stride
        left_over = files_in(directory)
        assert {name: content for name, content in left_over.items() if name in whole}.items() <= whole.items()
        assert {name.removesuffix(".part") for name in left_over} <= whole.keys()
        assert torch.equal(drafted(load(directory, room, self_draft=True)), expected)
        assert files_in(directory) == whole
    assert steps > 20


def test_less_memory_adds_what_is_missing(tmp_path: Path) -> None:
    directory = split(checkpoint(tmp_path / "model", "llama", **WIDE))
    whole = load(directory).get_memory_footprint()
    before: dict[str, bytes] = {}
    more = 0
    for budget in range(whole * 9 // 10, whole * 4 // 10, -whole // 25):
        try:
            load(directory, budget, self_draft=True)
        except OptionError:
            break
        files = files_in(directory)
        assert before.items() <= files.items()
        more += len(files) > len(before) > 0
        before = files
    assert more >= 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: b"\0" + content[1:],
        lambda content: content[:4500] + bytes([content[4500] ^ 1]) + content[4501:],
        lambda content: b"",
    ],
)
def test_a_damaged_file_is_made_again(
    llama: tuple[Path, int, torch.Tensor], damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    directory, room, expected = llama
    load(directory, room, self_draft=True)
    made = files_in(directory)
    path = directory / "copies" / sorted(made)[0]
    path.write_bytes(damage(path.read_bytes()))
    caplog.clear()
    assert torch.equal(drafted(load(directory, room, self_draft=True)), expected)
    assert f"{path} is damaged" in caplog.text
    assert files_in(directory) == made


def test_copies_of_other_weights_are_replaced(llama: tuple[Path, int, torch.Tensor], tmp_path: Path) -> None:
    directory, room, expected = llama
    load(directory, room, self_draft=True)
    other = split(checkpoint(tmp_path / "other", "llama", seed=5, **WIDE))
    shutil.copytree(directory / "copies", other / "copies")
    stale = files_in(other)
    logits = drafted(load(other, room, self_draft=True))
    assert not torch.equal(logits, expected)
    assert not stale.keys() & files_in(other).keys()
    assert len(files_in(other)) == len(stale)
    shutil.rmtree(other / "copies")
    assert torch.equal(drafted(load(other, room, self_draft=True)), logits)
    least(directory, dtype="float64")  # loads it, with copies of other values
    assert not stale.keys() & files_in(directory).keys()


def test_two_starts_at_once_make_each_copy_once(llama: tuple[Path, int, torch.Tensor]) -> None:
    directory, room, expected = llama
    logits: list[torch.Tensor] = []
    renamed: list[Path] = []

    def note(step: Step) -> None:
        if step.kind == "rename" and step.path.parent.name == "copies":
            renamed.append(step.path)

    def start() -> None:
        logits.append(drafted(load(directory, room, self_draft=True)))

    threads = [threading.Thread(target=start) for _ in range(2)]
    with observe_steps(note):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(one, expected) for one in logits)
    assert len(logits) == 2
    assert len(renamed) == len(set(renamed)) == len(files_in(directory))


def test_a_split_with_copies_is_a_split(llama: tuple[Path, int, torch.Tensor], tmp_path: Path) -> None:
    """They count in its size, and go with it; nothing takes them for layers."""
    directory, room, _ = llama
    model, entry, checked = load(directory), look(directory), verify(directory)
    load(directory, room, self_draft=True)
    assert files_in(directory)
    with_copies = look(directory)
    assert entry is not None
    assert with_copies is not None
    assert with_copies.layers == entry.layers
    assert with_copies.nbytes >= entry.nbytes + sum(map(len, files_in(directory).values()))
    assert verify(directory) == checked
    assert load(directory).placement == model.placement
    invoke("convert", directory, "-o", tmp_path / "plain")
    assert not (tmp_path / "plain" / "copies").exists()
    foreign = directory / "copies" / "notes.safetensors"
    foreign.write_bytes(b"mine")
    with pytest.raises(SplitError, match=r"did not write: copies/notes\.safetensors"):
        plan_removal(directory)
    foreign.unlink()
    model = None
    (directory / "copies" / (min(files_in(directory)) + ".part")).write_bytes(b"a crash left it")
    remove(plan_removal(directory))
    assert not directory.exists()


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rabbitllm")
