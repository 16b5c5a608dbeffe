"""Two processes on one checkpoint or one split: the second names the first, waits or stops, and changes no file."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rabbitllm import AutoModel, prepare
from rabbitllm.base.options import ShardPolicy, SplitOptions
from rabbitllm.cli import exit_codes
from rabbitllm.errors import IncompleteSplitError, InUseError, SplitMismatchError
from rabbitllm.models.pull import Pulled, pull
from rabbitllm.store.layer_store import verify
from rabbitllm.store.manifest import read_manifest
from tests.support.builders import SINGLE_NAME, build_checkpoint, llama_tensors, write_shards
from tests.support.commands import invoke
from tests.support.hub_fixtures import HubEnvironment
from tests.support.load_requests import asked
from tests.support.pausing import Paused
from tests.support.splitting import Call, contents, layer_files, names_in

REPO = "acme/hare"
INPUT = torch.tensor([[1, 5, 9, 33]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "hare", "llama", shards=4)


def refused(make: Callable[[], object], pid: int, *untouched: Path) -> str:
    """Return the message of a call that stops because of another process, and changes no file."""
    before = [contents(folder) for folder in untouched]
    with pytest.raises(InUseError, match=rf"by process {pid} on ") as error:
        make()
    assert [contents(folder) for folder in untouched] == before
    return str(error.value)


# Two splits of one source


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_second_split_during_a_split_that_deletes(
    folder: Path, tmp_path: Path, sequential: bool, compression: str | None
) -> None:
    second = Call(str(folder), str(tmp_path / "second"), compression, sequential=sequential)
    first = Call(str(folder), str(tmp_path / "first"), sequential=True)
    with Paused("split", source=str(folder), saving_path=str(tmp_path / "first")) as other:
        message = refused(second.make, other.pid, folder)
        assert f"{folder} is being split by process {other.pid}" in message
        assert "which deletes its shards" in message
        assert "which runs since" in message
        assert names_in(tmp_path / "second") == []
        other.is_killed()
    split_folder = first.make()  # what was begun is finished by the same call
    assert (split_folder / "split.json").exists()
    assert names_in(folder, "*-of-*.safetensors") == []


def test_split_that_deletes_during_one_that_reads(folder: Path, tmp_path: Path) -> None:
    second = Call(str(folder), str(tmp_path / "second"), sequential=True)
    with Paused("split", source=str(folder), saving_path=str(tmp_path / "first"), sequential=False) as other:
        message = refused(second.make, other.pid, folder)
        assert "this call would delete its shards" in message
        third = Call(str(folder), str(tmp_path / "third"), "4bit", sequential=False)
        assert (third.make() / "split.json").exists()  # readers do not exclude each other
        refused(
            Call(str(folder), str(tmp_path / "third"), "4bit", sequential=False, delete_original=True).make,
            other.pid,
            folder,
        )
        other.goes_on()
    assert layer_files(second.make()) == layer_files(tmp_path / "first" / "splitted_model")


def test_second_split_of_a_deleted_single_file(tmp_path: Path) -> None:
    """By then only the first process knows the checkpoint."""
    folder = write_shards(tmp_path / "model", {SINGLE_NAME: llama_tensors()}, index=False)
    with Paused("split", source=str(folder), saving_path=str(tmp_path / "first")) as other:
        assert not (folder / SINGLE_NAME).exists()
        refused(Call(str(folder), str(tmp_path / "second")).make, other.pid, folder)


def test_same_call_waits_and_finds_the_finished_split(folder: Path) -> None:
    folders: list[Path] = []
    with Paused("split", source=str(folder)) as other:
        thread = threading.Thread(target=lambda: folders.append(Call(str(folder)).make()))
        thread.start()
        time.sleep(1)
        assert folders == []
        other.goes_on()
        thread.join(600)
    assert folders == [folder / "splitted_model"]


def test_a_pull_that_waited_says_that_the_split_was_complete(folder: Path) -> None:
    pulls: list[Pulled] = []
    with Paused("split", source=str(folder)) as other:
        thread = threading.Thread(target=lambda: pulls.append(pull(asked(folder, device="cpu"))))
        thread.start()
        time.sleep(1)
        assert pulls == []
        other.goes_on()
        thread.join(600)
    assert [pulled.before for pulled in pulls] == [True]


def test_cached_shards_that_a_split_deletes(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    """A split of a repository locks its snapshot only if it uses shards in the hub cache."""
    build_checkpoint(tmp_path / "hub" / REPO, "llama", shards=4)
    begun = Call(REPO, str(tmp_path / "begun"), sequential=True)
    begun.find()
    snapshot = next(hub_environment.cache.glob("models--*/snapshots/*"))
    with (
        prepare.lock_source(begun.find(), SplitOptions(shards=ShardPolicy.DELETE_USED)),
        prepare.lock_source(begun.find(), SplitOptions(shards=ShardPolicy.DELETE_USED)),
    ):
        pass
    kept = Call(REPO, str(tmp_path / "kept"), sequential=False).make()
    with prepare.lock_source(begun.find(), SplitOptions()), pytest.raises(InUseError, match=str(snapshot)):
        begun.make()
    assert len(names_in(snapshot, "*-of-*.safetensors")) == 4
    assert layer_files(begun.make()) == layer_files(kept)
    assert names_in(snapshot, "*-of-*.safetensors") == []


# Readers of shards and a split


def test_reader_of_shards_during_a_split_that_deletes_them(folder: Path, tmp_path: Path) -> None:
    with Paused("split", source=str(folder), saving_path=str(tmp_path / "first")) as other:
        message = refused(lambda: AutoModel.from_pretrained(folder, split=False, device="cpu"), other.pid, folder)
        assert f"{folder} is being split by process {other.pid}" in message


@pytest.mark.long
def test_a_split_that_would_delete_shards_in_use(folder: Path, tmp_path: Path) -> None:
    call = Call(str(folder), str(tmp_path / "out"), "4bit")
    with Paused("load", name=folder, split=False) as other:
        message = refused(call.make, other.pid, folder)
        assert f"{folder} is in use by process {other.pid}" in message
        assert names_in(tmp_path / "out") == []
        standard = Call(str(folder), str(tmp_path / "standard"), "4bit", sequential=False)
        assert (standard.make() / "split.json").exists()
        other.goes_on()
    call.make()
    assert names_in(folder, "*-of-*.safetensors") == []


def test_shards_in_use_are_kept_by_a_split_in_a_folder_that_cannot_be_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(str(folder), str(tmp_path / "out"), sequential=False)
    made = call.make()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != made and allowed(path, mode))
    deleting = dataclasses.replace(call, delete_original=True)
    before = names_in(folder, "*-of-*.safetensors")
    with prepare.lock_source(call.find(), SplitOptions()), pytest.raises(InUseError):
        deleting.make()
    assert names_in(folder, "*-of-*.safetensors") == before != []
    deleting.make()
    assert names_in(folder, "*-of-*.safetensors") == []


def test_model_locks_its_shards_while_it_exists(folder: Path) -> None:
    model = AutoModel.from_pretrained(folder, split=False, device="cpu", max_memory={"cpu": 0})
    expected = model(INPUT).logits
    with pytest.raises(InUseError, match=rf"by this process \({os.getpid()}\)"):
        Call(str(folder)).make()
    assert torch.equal(model(INPUT).logits, expected)
    alive = weakref.ref(model)
    del model
    for _ in range(6000):  # a thread may be reading for it still
        gc.collect()
        if alive() is None:
            break
        time.sleep(0.1)
    reloaded = AutoModel.from_pretrained(folder, device="cpu", sequential_shard_processing=True)
    assert torch.equal(reloaded(INPUT).logits, expected)
    assert names_in(folder, "*-of-*.safetensors") == []


def test_failed_load_holds_no_lock(folder: Path) -> None:
    damaged = folder / names_in(folder, "*-of-*.safetensors")[1]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Exception, match="truncated") as error:
        AutoModel.from_pretrained(folder, split=False, device="cpu")
    del error
    damaged.write_bytes(whole)
    gc.collect()
    Call(str(folder)).make()


# A split that is repaired, or removed


@pytest.fixture
def damaged(folder: Path) -> Path:
    """A split with one damaged layer; its original is still there."""
    split_folder = Call(str(folder), str(folder.parent / "out"), sequential=False).make()
    layer = next(path for path in sorted(split_folder.glob("*.safetensors")) if "layers.1" in path.name)
    raw = bytearray(layer.read_bytes())
    raw[-8] ^= 1
    layer.write_bytes(raw)
    return split_folder


@pytest.mark.parametrize("moment", ["goes", "begins"])
@pytest.mark.parametrize("named", ["split directory", "original"])
def test_load_waits_for_a_repair(
    folder: Path, damaged: Path, moment: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logits: list[torch.Tensor] = []
    problems: list[BaseException] = []

    def load() -> None:
        try:
            if named == "original":
                model = AutoModel.from_pretrained(folder, layer_shards_saving_path=damaged.parent, device="cpu")
            else:
                model = AutoModel.from_pretrained(damaged, device="cpu")
            logits.append(model(INPUT).logits)
        except BaseException as error:
            problems.append(error)

    with Paused("repair", folder=damaged, original=folder, moments=[moment]) as other:
        thread = threading.Thread(target=load)
        thread.start()
        deadline = time.monotonic() + 600
        output = ""
        while "; waiting." not in output:
            assert time.monotonic() < deadline
            assert not problems, problems
            output += capsys.readouterr().err
            time.sleep(0.05)
        assert f"{damaged} is in use by process {other.pid} on " in output
        assert not logits
        other.goes_on()
        thread.join(600)
    assert not problems, problems
    plain = AutoModel.from_pretrained(folder, split=False, device="cpu")
    assert torch.equal(logits[0], plain(INPUT).logits)


def test_killed_repair_is_reported(folder: Path, damaged: Path) -> None:
    with Paused("repair", folder=damaged, original=folder) as other:
        other.is_killed()
    with pytest.raises(
        IncompleteSplitError, match=f"The repair of {damaged} was interrupted, and no process is working on it"
    ) as error:
        AutoModel.from_pretrained(damaged, device="cpu")
    assert error.value.remedy == f"Finish it: rabbitllm verify {damaged} --repair --original {folder}"
    AutoModel.from_pretrained(folder, layer_shards_saving_path=damaged.parent, device="cpu")
    assert not verify(damaged).damaged


@pytest.mark.parametrize("moments", [("begins", "goes"), ("goes", "ends")])
def test_a_repair_that_waited_finishes_that_of_a_killed_process(
    folder: Path, damaged: Path, moments: tuple[str, str]
) -> None:
    """The split has a manifest as it begins to wait, and none by then, so that the journal is all that tells of it; or
    has none, and one by then.
    """
    whole = contents(Call(str(folder), str(folder.parent / "whole"), sequential=False).make())
    words = [sys.executable, "-m", "rabbitllm", "verify", str(damaged), "--repair", "--original", str(folder)]
    with (
        Paused("repair", folder=damaged, original=folder, moments=moments) as other,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as second,
    ):
        assert second.stderr is not None
        assert f"{damaged} is in use by process {other.pid} on " in second.stderr.readline()
        other.goes_to_the_next()
        assert (damaged / "split.json").exists() == (moments[1] == "ends")
        other.is_killed()
        told = second.communicate(timeout=600)
    assert second.returncode == 0, told
    assert contents(damaged) == whole


def test_a_repair_is_refused_that_was_asked_of_another_state(folder: Path, damaged: Path) -> None:
    """A repair of more layers was killed meanwhile: its journal stays, with which it is finished."""
    whole = Call(str(folder), str(folder.parent / "whole"), sequential=False).make()
    manifest, layers = read_manifest(damaged), {damage.layer for damage in verify(damaged).damaged}
    assert manifest is not None
    (damaged / "model.layers.0.safetensors").unlink()
    with Paused("repair", folder=damaged, original=folder) as other:
        other.is_killed()
    before = contents(damaged)
    with pytest.raises(SplitMismatchError, match="has changed since it was checked"):
        prepare.repair_split(damaged, manifest, layers, folder)
    assert {name: before[name] for name in contents(damaged)} == contents(damaged)
    invoke("verify", str(damaged), "--repair", "--original", str(folder))
    assert contents(damaged) == contents(whole)


@pytest.mark.long
def test_repair_is_refused_while_a_model_is_loaded(folder: Path, damaged: Path) -> None:
    manifest = read_manifest(damaged)
    assert manifest is not None
    layers = {damage.layer for damage in verify(damaged).damaged}
    with Paused("load", name=damaged) as other:
        message = refused(lambda: prepare.repair_split(damaged, manifest, layers, folder), other.pid, damaged, folder)
        assert "this call would replace or remove its layer files" in message
        other.goes_on()
    prepare.repair_split(damaged, manifest, layers, folder)
    assert not verify(damaged).damaged


@pytest.mark.long
def test_removing_a_split_whose_model_is_loaded(folder: Path) -> None:
    split_folder = Call(str(folder), sequential=False).make()
    before = contents(folder)
    words = ["rm", str(folder), "--yes"]
    with Paused("load", name=folder) as other:
        ended = subprocess.run([sys.executable, "-m", "rabbitllm", *words], capture_output=True, text=True, check=False)
        assert ended.returncode == exit_codes.ERROR
        assert f"error: {split_folder} is in use by process {other.pid} on " in ended.stderr
        assert contents(folder) == before
        other.goes_on()
    invoke(*words)
    assert not split_folder.exists()


def test_model_locks_its_split_while_it_exists(folder: Path) -> None:
    split_folder = Call(str(folder), sequential=False).make()
    model = AutoModel.from_pretrained(folder, device="cpu")
    second = AutoModel.from_pretrained(split_folder, device="cpu")
    words = ["rm", str(split_folder), "--yes"]
    with pytest.raises(InUseError):
        invoke(*words)
    del model
    gc.collect()
    with pytest.raises(InUseError):
        invoke(*words)
    del second
    gc.collect()
    invoke(*words)


@pytest.mark.long
def test_reading_leaves_no_files(folder: Path) -> None:
    Call(str(folder), sequential=False).make()
    before = contents(folder)
    with Paused("load", name=folder) as other:
        assert contents(folder) == before
        other.is_killed()
    assert contents(folder) == before
    shutil.rmtree(folder)
