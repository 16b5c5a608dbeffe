"""Damaged layers are made again from the shards that they need, and from no others."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rabbitllm import prepare
from rabbitllm.checkpoints import fetch
from rabbitllm.cli.main import app
from rabbitllm.errors import HubError, IncompleteSplitError, OptionError, SplitMismatchError
from rabbitllm.storage.durable import Step
from rabbitllm.store.layer_store import verify
from rabbitllm.store.manifest import Manifest, read_manifest
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.dying import Death
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import Faults, LocalHub
from tests.support.splitting import Counter, contents, names_in, split
from tests.support.ticks import observe_ticks

REPO = "acme/tiny"
LAYER = "model.layers.1.safetensors"


@pytest.fixture
def made(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> Path:
    write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(layers=6, vocabulary=512), 6))
    return split(REPO, compression="4bit")


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def spoil(folder: Path, *files: str) -> None:
    for file in files:
        raw = bytearray((folder / file).read_bytes())
        raw[len(raw) // 2] ^= 4
        (folder / file).write_bytes(raw)


def repair(folder: Path, original: Path | None = None) -> None:
    damaged = {damage.layer for damage in verify(folder).damaged}
    assert damaged
    prepare.repair_split(folder, manifest_of(folder), damaged, original)


def test_only_the_shards_that_are_needed_are_fetched(made: Path, local_hub: LocalHub, tmp_path: Path) -> None:
    whole = contents(made)
    needed = next(record.shards for record in manifest_of(made).layers if record.file == LAYER)
    assert 1 <= len(needed) < 6
    spoil(made, LAYER)
    local_hub.forget_requests()
    repair(made)
    assert contents(made) == whole
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "hub" / REPO).glob("*.safetensors")}
    twice = {name for name, size in sizes.items() if local_hub.downloads(name) > 1}  # once for its header
    assert twice == set(needed)


@pytest.mark.parametrize("kept", range(7))
def test_shards_that_the_user_has_in_the_hub_cache_stay(
    kept: int, tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    """A repair deletes what it fetches itself; whichever shards the user has had before are the user's."""
    shards = write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(layers=6, vocabulary=512), 6))
    made = split(REPO, compression="4bit", sequential=False)
    whole = contents(made)
    snapshot = next((hub_environment.cache / "models--acme--tiny" / "snapshots").iterdir())
    for name in names_in(shards, "*.safetensors")[kept:]:
        (snapshot / name).resolve().unlink()
        (snapshot / name).unlink()
    before = contents(snapshot)
    assert len(names_in(snapshot, "*.safetensors")) == kept
    spoil(made, LAYER)
    repair(made)
    assert contents(made) == whole
    assert contents(snapshot) == before


def test_missing_layers_come_back(made: Path) -> None:
    whole = contents(made)
    for file in (LAYER, "lm_head.safetensors", f"{LAYER}.done"):
        (made / file).unlink()
    repair(made)
    assert contents(made) == whole


def test_hub_that_does_not_answer_leaves_all_as_it_was(
    made: Path, local_hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_pause", lambda failures: 0.0)
    spoil(made, LAYER)
    before = contents(made)
    local_hub.faults = Faults(status=503, status_times=-1)
    with pytest.raises(HubError):
        repair(made)
    assert contents(made) == before


def test_another_source_is_refused(made: Path, tmp_path: Path) -> None:
    spoil(made, LAYER)
    before = contents(made)
    other = write_shards(tmp_path / "other", cut(llama_tensors(layers=6, vocabulary=512), 6))
    with pytest.raises(SplitMismatchError, match="cannot be repaired from other: it was made from a repository"):
        repair(made, other)
    assert contents(made) == before


def test_local_split_wants_its_checkpoint_named(tmp_path: Path) -> None:
    model = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    made = split(model, sequential=False)
    whole = contents(made)
    spoil(made, LAYER)
    shards = [path.rename(tmp_path / path.name) for path in sorted(model.glob("*.safetensors"))]
    with pytest.raises(OptionError, match="split from a folder named 'model'"):
        repair(made)
    for path in shards:
        path.rename(model / path.name)
    changed = write_shards(tmp_path / "changed" / "model", cut(llama_tensors(seed=3), 3))
    with pytest.raises(SplitMismatchError, match="has other contents"):
        repair(made, changed)
    spoiled = contents(made)
    for parts in (1, 2):  # the same model even, but no shard to read
        other = write_shards(tmp_path / f"in {parts}", cut(llama_tensors(), parts))
        with pytest.raises(SplitMismatchError, match=r"it has other shards, without model-0000\d-of-00003"):
            repair(made, other)
        assert contents(made) == spoiled
    repair(made, model)
    assert contents(made) == whole
    assert len(names_in(model, "*.safetensors")) == 3


# The command


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_command_on_a_sound_directory(made: Path, local_hub: LocalHub) -> None:
    local_hub.forget_requests()
    code, text = run(str(made))
    assert code == 0
    assert "9 layer files, 4bit, of acme/tiny at " in text
    assert "sound: every checksum, shape and tensor matches" in text
    assert re.search(r"\([\d.,]+ (MiB|bytes) read in [\d.]+ s\)", text)
    assert local_hub.requests == []


def test_command_names_what_is_damaged_and_repairs_it(made: Path) -> None:
    whole = contents(made)
    spoil(made, LAYER)
    code, text = run(str(made))
    assert code == 1
    assert "1 of 9 layer files are damaged" in text
    assert f"  {LAYER}: its checksum is " in text
    shards = len(next(record.shards for record in manifest_of(made).layers if record.file == LAYER))
    assert f"To repair (downloads {shards} of 6 shards again): rabbitllm verify {made} --repair" in text
    code, text = run(str(made), "--repair")
    assert code == 0
    assert text.endswith("repaired: 1 layer file\n")
    assert contents(made) == whole


@pytest.mark.parametrize("kind", ["hub", "around", "elsewhere"])
def test_an_interrupted_repair_is_finished_by_the_same_command(made: Path, tmp_path: Path, kind: str) -> None:
    """From a hub, from the folder around the split, and from an original that is named."""
    words = []
    if kind != "hub":
        model = write_shards(tmp_path / "model", cut(llama_tensors(dtype=torch.float16), 3))
        made = split(model, tmp_path / "out" if kind == "elsewhere" else None, sequential=False)
        words = ["--original", str(model)] if kind == "elsewhere" else []
    whole, command = contents(made), shlex.join(["rabbitllm", "verify", str(made), "--repair", *words])
    for moment in (("create", f"{LAYER}.part"), ("rename", "split.json.part"), ("unlink", "split.journal")):

        def stop(number: int, step: Step, moment: tuple[str, str] = moment) -> None:
            if (step.kind, step.path.name) == moment:
                raise Death

        spoil(made, LAYER)
        with observe_ticks(Counter(stop)), pytest.raises(Death):
            run(str(made), "--repair", *words)
        if not (made / "split.json").exists():
            with pytest.raises(IncompleteSplitError, match=f"The repair of {made} was interrupted") as error:
                run(str(made))
            assert error.value.remedy == f"Finish it: {command}"
            assert command in CliRunner().invoke(app, ["ls", str(made)], env={"COLUMNS": "400"}).stdout
        assert run(str(made), "--repair", *words)[0] == 0
        assert contents(made) == whole, moment


def test_command_in_json(made: Path) -> None:
    code, text = run(str(made), "--json")
    record = json.loads(text)
    assert (code, record["sound"], record["layers"], record["damaged"]) == (0, True, 9, [])
    spoil(made, LAYER)
    code, text = run(str(made), "--json")
    record = json.loads(text)
    assert (code, record["sound"], [d["file"] for d in record["damaged"]]) == (1, False, [LAYER])


def test_command_on_a_local_split_says_what_it_needs(tmp_path: Path) -> None:
    model = write_shards(tmp_path / "model", cut(llama_tensors(dtype=torch.float16), 3))
    made = split(model)
    spoil(made, LAYER)
    code, text = run(str(made))
    assert code == 1
    assert "To repair, if the checkpoint still has model-00002-of-00003.safetensors" in text
    assert "it may hold the only copy" in text
    with pytest.raises(OptionError, match=r"and .* lacks model-00002-of-00003\.safetensors"):
        run(str(made), "--repair")


def test_command_repairs_a_local_split_from_the_folder_around_it(tmp_path: Path) -> None:
    model = write_shards(tmp_path / "model", cut(llama_tensors(dtype=torch.float16), 3))
    made = split(model, sequential=False)
    whole, shards = contents(made), {path: path.read_bytes() for path in model.glob("*.safetensors")}
    spoil(made, LAYER)
    code, text = run(str(made))
    assert code == 1
    assert f"of 3 shards in {model}): rabbitllm verify {made} --repair\n" in text
    code, text = run(str(made), "--repair")
    assert (code, contents(made)) == (0, whole)
    assert {path: path.read_bytes() for path in shards} == shards
    write_shards(model, cut(llama_tensors(seed=5, dtype=torch.float16), 3))  # another model's
    spoil(made, LAYER)
    with pytest.raises(SplitMismatchError):
        run(str(made), "--repair")
