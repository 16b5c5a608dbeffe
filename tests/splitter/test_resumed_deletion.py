"""A split that was killed and is resumed deletes no shard before the files that the earlier run wrote were compared."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from pathlib import Path

import pytest

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.splitter import journal
from rabbitllm.storage import durable
from rabbitllm.store.layer_store import verify
from rabbitllm.store.manifest import is_finished
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.commands import invoke
from tests.support.crashes import KILLED, CrashServer, Moment
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.splitting import Call, interrupted, layer_files, names_in

DELETING = {
    "--sequential": {"sequential": True},
    "--delete-original": {"sequential": False, "delete_original": True},
    "both": {"sequential": True, "delete_original": True},
}
KEEPING = {"sequential": False, "delete_original": False}


def journaled(shards: int) -> Moment:
    """So many shards are used up, and the next one has not begun."""
    return {"kind": "sync", "name": "split.journal", "number": shards - 1}


def named(shards: int) -> Moment:
    """The layers that the next shard completes have their names, and the journal does not have it yet."""
    return {"kind": "write", "name": "split.journal", "number": shards}


def killed(server: CrashServer, call: Call, moment: Moment) -> Path:
    assert server.ask("tests.support.splitting:make", vars(call), moment).status == KILLED
    folder = call.find().split_folder
    assert not is_finished(folder)
    return folder


def written(folder: Path, file: str) -> int:
    """An offset in the middle of the last data that the journal has of an unfinished layer file."""
    earlier = journal.replay(folder)
    assert earlier is not None
    (layout,) = (layout for layout in earlier.plan.layouts.values() if file.startswith(layout.file_name))
    offsets = layout.scratch_offsets if file == layout.scratch_name else layout.offsets
    parts = [part for form in layout.forms if form.source.name in earlier.checksums for part in form.parts]
    return max(offsets[part.name] + part.nbytes // 2 for part in parts if part.name in offsets)


def spoil(folder: Path, file: str) -> None:
    raw = bytearray((folder / file).read_bytes())
    raw[written(folder, file)] ^= 4
    (folder / file).write_bytes(raw)


def unfinished(folder: Path, suffix: str = durable.PART_SUFFIX) -> str:
    """A layer file that grows, and has data of shards that are used up."""
    earlier = journal.replay(folder)
    assert earlier is not None
    begun = [a.file_name for a in earlier.plan.layouts.values() if not set(a.shard_bytes).isdisjoint(earlier.used)]
    return next(name + suffix for name in begun if (folder / (name + suffix)).exists())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "model", cut(llama_tensors(layers=4), 4))


def expected(tmp_path: Path, compression: str | None) -> dict[str, bytes]:
    copy = write_shards(tmp_path / "copy" / "model", cut(llama_tensors(layers=4), 4))
    return layer_files(Call(str(copy), compression=compression, sequential=False).make())


@pytest.mark.parametrize("option", DELETING)
@pytest.mark.parametrize("kind", ["named", "growing"])
@pytest.mark.parametrize("compression", [None, "4bit", "4bit-double"])
def test_nothing_is_deleted_where_a_file_is_damaged(
    model: Path, tmp_path: Path, crash_server: CrashServer, option: str, kind: str, compression: str | None
) -> None:
    call = Call(str(model), compression=compression, **KEEPING)
    folder = killed(crash_server, call, journaled(2))
    file = "model.embed_tokens.safetensors" if kind == "named" else unfinished(folder)
    spoil(folder, file)
    shards = names_in(model, "*.safetensors")
    assert len(shards) == 4
    deleting = dataclasses.replace(call, **DELETING[option])
    with pytest.raises(IncompleteSplitError) as error:
        deleting.make()
    assert names_in(model, "*.safetensors") == shards
    assert error.value.problem == (
        f"{folder} is damaged: {file} differs from what an earlier run wrote. No shard of {model} was deleted."
    )
    call.make()  # what the remedy says
    (damage,) = verify(folder).damaged
    assert file.startswith(damage.file)
    command = error.value.remedy.partition("repair it: ")[2]
    assert invoke(*shlex.split(command)[1:], code=0)
    deleting.make()
    assert names_in(model, "*.safetensors") == (shards if option == "--sequential" else [])
    assert layer_files(folder) == expected(tmp_path, compression)


@pytest.mark.parametrize("option", DELETING)
@pytest.mark.parametrize("moment", [journaled(2), named(2)], ids=["journaled", "named"])
@pytest.mark.parametrize("compression", [None, "4bit-double"])
def test_a_sound_split_goes_on_and_deletes(
    model: Path, tmp_path: Path, crash_server: CrashServer, option: str, moment: Moment, compression: str | None
) -> None:
    call = Call(str(model), compression=compression, **KEEPING)
    folder = killed(crash_server, call, moment)
    dataclasses.replace(call, **DELETING[option]).make()
    assert names_in(model, "*.safetensors") == []
    assert layer_files(folder) == expected(tmp_path, compression)
    assert not verify(folder).damaged


def test_what_is_left_of_no_shard_does_not_stop_a_sequential_split(model: Path, crash_server: CrashServer) -> None:
    """Its damage is found, as that of any finished file; to stop would save nothing."""
    call = Call(str(model))
    folder = killed(crash_server, call, {"kind": "write", "name": "*.part", "number": 20})
    earlier = journal.replay(folder)
    assert earlier is not None
    assert earlier.used
    assert earlier.used.isdisjoint(names_in(model, "*.safetensors"))
    spoil(folder, "model.embed_tokens.safetensors")
    call.make()
    assert names_in(model, "*.safetensors") == []
    assert [damage.file for damage in verify(folder).damaged] == ["model.embed_tokens.safetensors"]


@pytest.mark.parametrize("sequential", [True, False])
def test_a_layer_whose_last_shard_is_not_recorded_is_written_again(
    model: Path, tmp_path: Path, crash_server: CrashServer, sequential: bool
) -> None:
    """Nothing says which bytes it must have: damage would get the checksum of damaged bytes."""
    call = Call(str(model), sequential=sequential)
    before = killed(crash_server, Call(str(model), str(tmp_path / "before"), sequential=False), journaled(2))
    folder = killed(crash_server, call, named(2))
    new = set(names_in(folder, "*.safetensors")) - set(names_in(before, "*.safetensors"))
    assert new
    for name in new:
        raw = bytearray((folder / name).read_bytes())
        raw[-1] ^= 4
        (folder / name).write_bytes(raw)
    call.make()
    damaged = {damage.file for damage in verify(folder).damaged}
    wanted = expected(tmp_path, None)
    assert {name for name, data in layer_files(folder).items() if data != wanted[name]} == damaged
    assert len(damaged) < len(new)


@pytest.mark.parametrize("option", [KEEPING, *DELETING.values()], ids=["keeping", *DELETING])
@pytest.mark.parametrize("compression", [None, "4bit-double"])
def test_damaged_pieces_are_not_joined(
    tmp_path: Path, crash_server: CrashServer, option: dict[str, bool], compression: str | None
) -> None:
    """The joined file would have the checksum of damaged bytes."""
    model = write_meta(tmp_path / "model", tiny_llama(intermediate=256), ranks=4)
    call = Call(str(model), compression=compression, **KEEPING)
    folder = killed(crash_server, call, journaled(2))
    file = unfinished(folder, ".pieces")
    spoil(folder, file)
    ranks = names_in(model, "*.pth")
    with pytest.raises(IncompleteSplitError, match=rf"{file} differs from what an earlier run wrote") as error:
        dataclasses.replace(call, **option).make()
    assert names_in(model, "*.pth") == ranks
    assert f"delete {folder} and make the same call again" in error.value.remedy


@pytest.mark.parametrize("option", [KEEPING, *DELETING.values()], ids=["keeping", *DELETING])
@pytest.mark.parametrize("kind", ["pieces", "scales", "scales of pieces"])
def test_a_layer_without_its_scratch_file_keeps_its_checksum(
    tmp_path: Path, crash_server: CrashServer, option: dict[str, bool], kind: str
) -> None:
    """It has its name, and its last shard is not recorded as used: nothing could write it once more."""
    if kind == "scales":
        large = llama_tensors(layers=4, hidden=192, vocabulary=200)
        model = write_shards(tmp_path / "model", cut(large, 4))
    else:
        model = write_meta(tmp_path / "model", tiny_llama(intermediate=1024), ranks=2)
    call = Call(str(model), compression=None if kind == "pieces" else "4bit-double", **KEEPING)
    folder = killed(crash_server, call, {"kind": "unlink", "name": "*.pieces", "number": 1})
    earlier = journal.replay(folder)
    assert earlier is not None
    layers = [layout for layout in earlier.plan.layouts.values() if layout.scratch_bytes]
    gone = [a for a in layers if (folder / a.file_name).exists() and not (folder / a.scratch_name).exists()]
    (file,) = (a.file_name for a in gone if not set(a.shard_bytes) <= earlier.used)
    raw = bytearray((folder / file).read_bytes())
    raw[-1] ^= 4
    (folder / file).write_bytes(raw)
    shards = names_in(model, "*0*")
    is_deleting = option != KEEPING
    with pytest.raises(IncompleteSplitError, match=file) if is_deleting else contextlib.nullcontext():
        dataclasses.replace(call, **option).make()
    assert names_in(model, "*0*") == shards
    call.make()
    assert [damage.file for damage in verify(folder).damaged] == [file]
    assert invoke("verify", str(folder), "--repair", code=0)


def test_shards_in_the_hub_cache_stay(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> None:
    write_shards(tmp_path / "hub" / "acme/tiny", cut(llama_tensors(layers=4), 4))
    call = Call("acme/tiny", **KEEPING)
    folder = interrupted(call, 2)
    snapshot = next((hub_environment.cache / "models--acme--tiny" / "snapshots").iterdir())
    shards = names_in(snapshot, "*.safetensors")
    assert len(shards) == 4
    spoil(folder, "model.embed_tokens.safetensors")
    with pytest.raises(IncompleteSplitError) as error:
        dataclasses.replace(call, sequential=True).make()
    assert names_in(snapshot, "*.safetensors") == shards
    assert error.value.remedy.endswith(f" rabbitllm verify {folder} --repair")
    spoil(folder, "model.embed_tokens.safetensors")  # as it was
    dataclasses.replace(call, sequential=True).make()
    assert not snapshot.exists() or names_in(snapshot, "*.safetensors") == []
    assert not verify(folder).damaged
