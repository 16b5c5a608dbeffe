"""Files of torch.save are split on every route of safetensors files, into the same bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download

import rabbitllm
from rabbitllm import prepare
from rabbitllm.base import progress
from rabbitllm.checkpoints import hub as hub_module
from rabbitllm.errors import (
    CheckpointError,
    CorruptShardError,
    NotEnoughSpaceException,
    OptionError,
    UnreadableFormatError,
    UnsafePathError,
    UnsafePickleError,
)
from rabbitllm.formats.shard_header import read_shard_header
from rabbitllm.splitter import journal
from rabbitllm.splitter.disk_budget import ShardTransfer
from rabbitllm.storage.durable import observe_steps
from rabbitllm.store.layer_store import verify
from rabbitllm.store.manifest import read_manifest
from tests.attacks import pickles
from tests.support.builders import (
    INDEX_NAME,
    SINGLE_NAME,
    TORCH_INDEX_NAME,
    TORCH_SINGLE_NAME,
    cut,
    laid_out_oddly,
    llama_tensors,
    plain_torch_files,
    torch_files,
    write_shards,
    write_torch,
)
from tests.support.crashes import KILLED, CrashServer
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import Faults, LocalHub
from tests.support.peak import Peak
from tests.support.plans import uses_of
from tests.support.quick_measuring import quick_measuring  # noqa: F401  a fixture that applies by itself
from tests.support.scenes import sample
from tests.support.splitting import Call, contents, interrupted, layer_files, names_in, split, steps_of
from tests.support.torch_files import archive, pack

REPO = "acme/tiny"
SHARDS = [f"pytorch_model-0000{number}-of-00003.bin" for number in (1, 2, 3)]
COMPRESSIONS = [None, "4bit", "8bit"]

Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    weights = llama_tensors()
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}


@pytest.fixture(scope="module")
def expected(tensors: Weights, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, dict[str, bytes]]:
    """The layer files that the same weights give as safetensors, by compression."""
    root = tmp_path_factory.mktemp("safetensors")
    folders = {c: write_shards(root / str(c), {SINGLE_NAME: tensors}, index=False) for c in COMPRESSIONS}
    return {c: layer_files(split(folder, compression=c, sequential=False)) for c, folder in folders.items()}


def tied(tensors: Weights) -> dict[str, torch.Tensor]:
    """All layouts; the output head shares the embedding's storage."""
    odd = laid_out_oddly(tensors)
    return odd | {"lm_head.weight": odd["model.embed_tokens.weight"]}


def write_single(
    folder: Path, tensors: Weights, name: str = TORCH_SINGLE_NAME, protocol: int = 2, *, legacy: bool = False
) -> Path:
    """One file, with its state dict in a wrapper; of one with other values: `test_left_out.py`."""
    return write_torch(folder, {name: {"state_dict": tied(tensors)}}, protocol=protocol, legacy=legacy)


def write_sharded(folder: Path, tensors: Weights) -> Path:
    return write_torch(folder, torch_files(cut(tensors, 3)), index=True)


def write_plain(folder: Path, tensors: Weights, *, legacy: bool = False) -> Path:
    """Shards of tensors with separate storages, which can be streamed."""
    return write_torch(folder, plain_torch_files(cut(tensors, 3)), index=True, legacy=legacy)


def write_old_single(folder: Path, tensors: Weights) -> Path:
    """As `write_single`, in the format from before torch 1.6."""
    return write_single(folder, tensors, legacy=True)


def write_old_plain(folder: Path, tensors: Weights) -> Path:
    """As `write_plain`, in the format from before torch 1.6."""
    return write_plain(folder, tensors, legacy=True)


def test_files_have_the_odd_layouts(tmp_path: Path, tensors: Weights) -> None:
    """Strides, shared storages, and views with an offset."""
    header = read_shard_header(write_single(tmp_path, tensors) / TORCH_SINGLE_NAME)
    assert sum(tensor.strides is not None for tensor in header.tensors) >= 6
    places = [tensor.offset for tensor in header.tensors]
    assert len(set(places)) < len(places)
    assert {tensor.name for tensor in header.tensors} == set(tensors)
    assert [tensor.offset for tensor in header.tensors] == sorted(places)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "standard"])
@pytest.mark.parametrize("hub", [False, True], ids=["local", "hub"])
@pytest.mark.parametrize("write", [write_single, write_sharded, write_old_single, write_old_plain])
def test_every_route_makes_the_bytes_of_safetensors(
    tmp_path: Path,
    hub_environment: HubEnvironment,
    tensors: Weights,
    expected: dict[str | None, dict[str, bytes]],
    write: Any,
    hub: bool,
    sequential: bool,
    compression: str | None,
) -> None:
    source = write(tmp_path / ("hub" if hub else "x") / REPO, tensors)
    folder = split(REPO if hub else source, compression=compression, sequential=sequential)
    assert layer_files(folder) == expected[compression]
    kept = names_in(hub_environment.cache, "**/*.bin") if hub else names_in(source, "*.bin")
    assert bool(kept) == (not sequential)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 3")
@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("name", ["model.pt", "weights.pth", "last.ckpt", "any.bin", "model.pkl"])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_single_file_of_any_name(
    tmp_path: Path,
    tensors: Weights,
    expected: dict[str | None, dict[str, bytes]],
    name: str,
    protocol: int,
    legacy: bool,
) -> None:
    source = write_single(tmp_path, tensors, name, protocol, legacy=legacy)
    for other in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "scaler.pt"):
        (source / other).write_bytes(b"none of the model's")
    assert layer_files(split(source)) == expected[None]
    assert len(names_in(source, "*.p*")) + len(names_in(source, "*.bin")) == 5  # what was no weights is still there
    assert not (source / name).exists()


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_strided_tensors_larger_than_a_chunk(
    tmp_path: Path, compression: str | None, legacy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = llama_tensors(layers=2, hidden=256, vocabulary=1003, dtype=torch.float32)
    plain = split(write_shards(tmp_path / "a", cut(tensors, 2)), compression=compression)
    source = write_torch(tmp_path / "b", torch_files(cut(tensors, 2)), index=True, legacy=legacy)
    monkeypatch.setattr("rabbitllm.splitter.plan.CHUNK_BYTES", 24_576)
    assert layer_files(split(source, compression=compression)) == layer_files(plain)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_other_dtypes_and_empty_tensors(tmp_path: Path, legacy: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"model.layers.0.{dtype}".replace(".torch.", ".").replace("torch", "x"): torch.randint(
            0, 2, (48, 10), generator=generator
        ).to(dtype)
        for dtype in (torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.int8)
    }
    tensors |= {"model.layers.1.empty": torch.zeros(0, 3), "model.layers.1.scalar": torch.tensor(2.5)}
    plain = split(write_shards(tmp_path / "a", {SINGLE_NAME: tensors}, index=False))
    transposed = {name: tensor.t().contiguous().t() for name, tensor in tensors.items()}
    odd = write_torch(tmp_path / "b", {TORCH_SINGLE_NAME: transposed}, legacy=legacy)
    assert layer_files(split(odd)) == layer_files(plain)


def test_safetensors_are_preferred(tmp_path: Path, tensors: Weights) -> None:
    source = write_sharded(tmp_path, llama_tensors(seed=5))
    write_shards(source, {SINGLE_NAME: tensors}, index=False)
    before = {name: data for name, data in contents(source).items() if "pytorch_model" in name}
    split(source, delete_original=True)
    assert {name: data for name, data in contents(source).items() if "pytorch_model" in name} == before
    assert not (source / SINGLE_NAME).exists()


# Another form of the weights in the folder of those that are used up


@pytest.mark.parametrize("other", ["sound", "legacy", "hostile"])
def test_other_files_in_the_folder_of_the_shards_are_unchanged(
    tmp_path: Path, tensors: Weights, expected: dict[str | None, dict[str, bytes]], other: str
) -> None:
    """Once the only safetensors file is used up, a torch file is the first one in the folder."""
    source = write_torch(tmp_path, {TORCH_SINGLE_NAME: llama_tensors(seed=5)})
    if other == "legacy":
        torch.save(llama_tensors(seed=5), source / TORCH_SINGLE_NAME, _use_new_zipfile_serialization=False)
    if other == "hostile":
        (source / TORCH_SINGLE_NAME).write_bytes(hostile(tmp_path / "marker"))
    other = (source / TORCH_SINGLE_NAME).read_bytes()
    write_shards(source, {SINGLE_NAME: tensors}, index=False)
    interrupted(Call(str(source), delete_original=True))
    assert names_in(source, "*.safetensors") == []
    folder = split(source, delete_original=True)
    assert layer_files(folder) == expected[None]
    assert split(source, delete_original=True) == folder  # finished, and found to be
    assert (source / TORCH_SINGLE_NAME).read_bytes() == other


def test_used_up_files_and_another_model_elsewhere(tmp_path: Path, tensors: Weights) -> None:
    """A finished split of another folder is not taken for this folder's, whose file has another name."""
    saved = tmp_path / "saved"
    split(write_shards(tmp_path / "one", {SINGLE_NAME: tensors}, index=False), saved)
    other = write_torch(tmp_path / "other", {TORCH_SINGLE_NAME: llama_tensors(seed=5)})
    with pytest.raises(rabbitllm.errors.SplitMismatchError, match="was split from a folder named 'one'"):
        split(other, saved, delete_original=True)
    assert (other / TORCH_SINGLE_NAME).exists()


# Going on


@pytest.mark.parametrize("way", [pytest.param("local", marks=pytest.mark.long), "file", "stream", "legacy stream"])
@pytest.mark.long
def test_killed_at_some_steps(
    tmp_path: Path,
    hub_environment: HubEnvironment,
    crash_server: CrashServer,
    tensors: Weights,
    expected: dict[str | None, dict[str, bytes]],
    way: str,
) -> None:
    write = {"stream": write_plain, "legacy stream": write_old_plain}.get(way, write_sharded)
    hub, transfer = way != "local", way.split()[-1]
    original = write(tmp_path / "hub" / REPO, tensors)
    model = tmp_path / "local" / "model"
    home = (
        {"hub_url": hub_environment.url, "hub_home": str(hub_environment.home), "shard_transfer": transfer}
        if hub
        else {}
    )
    call = Call(REPO if hub else str(model), compression="4bit", **home)  # type: ignore[arg-type]

    def reset() -> None:
        shutil.rmtree(hub_environment.home if hub else model, ignore_errors=True)
        if not hub:
            shutil.copytree(original, model)

    reset()
    steps = steps_of(call)
    for death in sample(steps, 4 if hub else 5):
        reset()
        assert crash_server.run(call, death) == KILLED
        folder = call.make()
        assert layer_files(folder) == expected["4bit"]
        assert names_in(folder, "*.part") == names_in(folder, "*.journal") == []


def test_single_file_of_an_interrupted_call(
    tmp_path: Path, tensors: Weights, expected: dict[str | None, dict[str, bytes]]
) -> None:
    source = write_single(tmp_path, tensors)
    interrupted(Call(str(source)))
    assert names_in(source, "*.bin") == []
    assert layer_files(split(source)) == expected[None]


def test_journal_keeps_strides_and_unstreamable_shards(tmp_path: Path, tensors: Weights) -> None:
    source = write_sharded(tmp_path, tensors)
    folder = interrupted(Call(str(source)))
    replayed = journal.replay(folder)
    assert replayed is not None
    seen = journal.glance(folder)
    assert seen is not None
    assert (seen.shards, seen.used) == (frozenset(SHARDS), frozenset(SHARDS[:1]))
    for shard in replayed.plan.shards[1:]:
        assert set(shard.tensors) == set(read_shard_header(source / shard.name).tensors)
        assert not shard.header_first


@pytest.mark.parametrize("damage", ["moved", "cut off"])
def test_shard_that_changes_during_the_split(tmp_path: Path, tensors: Weights, damage: str) -> None:
    source = write_sharded(tmp_path, tensors)
    other = write_torch(tmp_path / "other", {"x": cut(llama_tensors(seed=5), 3)["model-00002-of-00003.safetensors"]})
    sound, before = (source / SHARDS[1]).read_bytes(), (source / SHARDS[1]).stat()

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone) and event.number == 1:
            (source / SHARDS[1]).write_bytes((other / "x").read_bytes() if damage == "moved" else sound[:-9])

    message = {"moved": "differs from the planned file", "cut off": "does not end with a zip end"}
    with progress.listening(listen), pytest.raises(CorruptShardError, match=message[damage]) as refused:
        split(source)
    assert "Finished layers are kept" in refused.value.remedy
    (source / SHARDS[1]).write_bytes(sound)
    os.utime(source / SHARDS[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert split(source)


def test_repair_from_torch_files(tmp_path: Path, tensors: Weights, expected: dict[str | None, Any]) -> None:
    source = write_sharded(tmp_path, tensors)
    folder = split(source, compression="8bit", sequential=False)
    (folder / "model.layers.1.safetensors").write_bytes(b"damaged")
    damaged = {damage.layer for damage in verify(folder).damaged}
    assert damaged == {"layers.1"}
    manifest = read_manifest(folder)
    assert manifest is not None
    prepare.repair_split(folder, manifest, damaged, source)
    assert layer_files(folder) == expected["8bit"]
    assert not verify(folder).damaged


# Plans


LARGE = {"layers": 4, "hidden": 384, "vocabulary": 1024}
BOOKKEEPING = 64 * 1024


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("way", [None, ShardTransfer.FILE_AHEAD, ShardTransfer.FILE], ids=["local", "ahead", "file"])
def test_disk_peak_equals_the_plan(
    tmp_path: Path, hub_environment: HubEnvironment, compression: str | None, way: ShardTransfer | None
) -> None:
    where = tmp_path / ("hub" if way else "x") / REPO
    source = write_torch(where, torch_files(cut(llama_tensors(**LARGE), 4)), index=True)
    call = Call(REPO if way else str(source), compression=compression)
    if way:
        call = dataclasses.replace(call, max_disk=uses_of(call)[way].created)
    folder = call.find().split_folder
    peak = Peak(folder) if way else Peak(source)
    assert peak.during(call) == folder
    files = len(names_in(folder, "*.safetensors"))
    assert peak.most <= peak.predicted + BOOKKEEPING
    if way is not ShardTransfer.FILE_AHEAD:
        assert peak.most >= peak.predicted - files * 16384 - BOOKKEEPING
    plan = rabbitllm.plan(call.source, compression=compression)
    outlook = plan.at(compression)
    assert outlook is not None
    assert outlook.output_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("index", [True, False], ids=["sharded", "single"])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_planning_fetches_no_weights(
    tmp_path: Path,
    local_hub: LocalHub,
    hub_environment: HubEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    index: bool,
    legacy: bool,
) -> None:
    monkeypatch.setattr("rabbitllm.formats.torch_file.READS", (8 << 10, 12 << 10, 32 << 10))
    monkeypatch.setattr(hub_module, "FIRST_READ_BYTES", 8 << 10)
    monkeypatch.setattr(hub_module, "TAIL_READ_BYTES", 8 << 10)
    files = torch_files(cut(llama_tensors(**LARGE), 3 if index else 1))
    chosen = files if index else {"model.pth": tied(*files.values())}
    served = write_torch(tmp_path / "hub" / REPO, chosen, index=index, legacy=legacy)
    names = names_in(served, "*.bin") + names_in(served, "*.pth")
    plan = uses_of(Call(REPO))
    assert plan[ShardTransfer.FILE].created > 0
    for name in names:
        size = (served / name).stat().st_size
        requests = [request for request in local_hub.requests if request.file == name]
        assert {request.status for request in requests} == {206}
        assert len(requests) <= 4 * (1 if index else 2)  # of a single file once more, for the index that it is
        assert sum(request.bytes_sent for request in requests) <= (1 if index else 2) * (48 << 10) < size // 20


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("transfer", ["stream", "file"])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_plain_tensors_are_streamed(
    tmp_path: Path,
    local_hub: LocalHub,
    hub_environment: HubEnvironment,
    expected: dict[str | None, dict[str, bytes]],
    tensors: Weights,
    compression: str | None,
    shards: int,
    transfer: str,
    legacy: bool,
) -> None:
    files = plain_torch_files(cut(tensors, 3) if shards > 1 else {SINGLE_NAME: tensors})
    served = write_torch(tmp_path / "hub" / REPO, files, index=shards > 1, legacy=legacy)
    staged: list[Path] = []
    with observe_steps(lambda step: staged.extend([step.path] if ".staging/" in str(step.path) else [])):
        folder = split(REPO, compression=compression, shard_transfer=transfer)
    assert layer_files(folder) == expected[compression]
    assert bool(staged) == (transfer == "file")
    for shard in files:  # its directory for the plan, and its body once
        bodies = [r for r in local_hub.requests if r.file == shard and r.bytes_sent == (served / shard).stat().st_size]
        assert len([r for r in bodies if r.range is not None and r.range.endswith(f"-{r.bytes_sent - 1}")]) >= 1


def test_budget_below_one_shard_streams(
    tmp_path: Path, hub_environment: HubEnvironment, tensors: Weights, expected: dict[str | None, dict[str, bytes]]
) -> None:
    write_plain(tmp_path / "hub" / REPO, tensors)
    call = Call(REPO, compression="4bit")
    staged: list[Path] = []
    with observe_steps(lambda step: staged.extend([step.path] if ".staging/" in str(step.path) else [])):
        folder = split(REPO, compression="4bit", max_disk=uses_of(call)[ShardTransfer.STREAM].created)
    assert staged == []
    assert layer_files(folder) == expected["4bit"]


@pytest.mark.parametrize("transfer", ["stream", "file"])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_wrong_offsets_are_detected_at_the_end(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, tensors: Weights, transfer: str, legacy: bool
) -> None:
    """The header has no digest: two tensors of one shape are swapped in the received bytes."""
    names = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight"]
    files = plain_torch_files({SINGLE_NAME: {n: tensors[n] for n in names}})
    served = write_torch(tmp_path / "hub" / REPO, files, legacy=legacy)
    offset = (served / TORCH_SINGLE_NAME).read_bytes().index(b"k_proj")
    local_hub.faults = Faults(
        only=TORCH_SINGLE_NAME, flip_byte=offset, flip_times=2
    )  # for the index made up, and the plan
    with pytest.raises(CorruptShardError, match="differs from the planned file") as refused:
        split(REPO, shard_transfer=transfer)
    assert "delete that folder" in refused.value.remedy
    folder = Call(REPO).find().split_folder
    assert names_in(folder, "*.safetensors") == []


@pytest.mark.parametrize("transfer", ["stream", "file"])
@pytest.mark.parametrize("write", [write_plain, write_old_plain])
def test_plain_tensors_with_a_wrong_byte(
    tmp_path: Path,
    local_hub: LocalHub,
    hub_environment: HubEnvironment,
    tensors: Weights,
    expected: dict[str | None, dict[str, bytes]],
    write: Any,
    transfer: str,
) -> None:
    served = write(tmp_path / "hub" / REPO, tensors)
    header = read_shard_header(served / SHARDS[1])
    local_hub.faults = Faults(only=SHARDS[1], flip_byte=header.tensors[2].offset + 7)
    with pytest.raises(rabbitllm.errors.HubError, match="arrived with sha256"):
        split(REPO, shard_transfer=transfer)
    local_hub.faults = Faults()
    assert layer_files(split(REPO, shard_transfer=transfer)) == expected[None]


def test_refusal_of_streaming_names_the_reason(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, tensors: Weights
) -> None:
    write_sharded(tmp_path / "hub" / REPO, tensors)
    with pytest.raises(OptionError) as refused:
        split(REPO, shard_transfer="stream")
    assert f"{SHARDS[0]} is a torch.save file whose tensors share storage or are strided" in refused.value.problem
    assert "Remove shard_transfer" in refused.value.remedy
    assert not list(hub_environment.home.rglob("split.journal"))
    least = uses_of(Call(REPO))[ShardTransfer.FILE].created
    with pytest.raises(NotEnoughSpaceException) as short:
        split(REPO, max_disk=least - 1)
    assert "stream" not in short.value.remedy


@pytest.mark.parametrize("write", [write_sharded, write_plain])
def test_damaged_bytes_of_an_earlier_run_are_detected(
    tmp_path: Path,
    local_hub: LocalHub,
    hub_environment: HubEnvironment,
    tensors: Weights,
    expected: dict[str | None, dict[str, bytes]],
    write: Any,
) -> None:
    served = write(tmp_path / "hub" / REPO, tensors)
    folder = Call(REPO).find().split_folder
    (folder / ".staging").mkdir(parents=True)
    for shard in SHARDS:
        raw = bytearray((served / shard).read_bytes()[:20_000])
        raw[1000] ^= 1
        (folder / ".staging" / f"{shard}.part").write_bytes(raw)
    assert layer_files(split(REPO)) == expected[None]


def test_wrong_byte_from_the_hub_finishes_no_layer(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, tensors: Weights
) -> None:
    served = write_sharded(tmp_path / "hub" / REPO, tensors)
    local_hub.faults = Faults(only=SHARDS[0], flip_byte=(served / SHARDS[0]).stat().st_size // 2)
    with pytest.raises(rabbitllm.errors.HubError, match="arrived with sha256"):
        split(REPO)
    assert names_in(Call(REPO).find().split_folder, "*.safetensors") == []


def test_cached_snapshot_is_used_in_place(
    tmp_path: Path,
    local_hub: LocalHub,
    hub_environment: HubEnvironment,
    tensors: Weights,
    expected: dict[str | None, dict[str, bytes]],
) -> None:
    write_sharded(tmp_path / "hub" / REPO, tensors)
    snapshot = Path(snapshot_download(REPO))
    local_hub.forget_requests()
    assert layer_files(split(REPO, delete_original=True)) == expected[None]
    assert local_hub.body_bytes(".bin") == 0
    assert not snapshot.exists()


# What is refused


def hostile(marker: Path) -> bytes:
    """A torch zip whose pickle would touch the marker."""
    attack = next(attack for attack in pickles.ATTACKS if attack.live)
    return pack(archive(attack.build(marker)))


@pytest.mark.parametrize("name", [TORCH_SINGLE_NAME, "any.ckpt"])
def test_hostile_pickle_is_refused_before_the_first_change(tmp_path: Path, name: str) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / name).write_bytes(hostile(marker))
    before = contents(tmp_path)
    changed: list[object] = []
    with observe_steps(changed.append), pytest.raises(UnsafePickleError, match=f"^The pickle of {name} is refused"):
        rabbitllm.AutoModel.from_pretrained(folder, device="cpu", sequential_shard_processing=True)
    assert not marker.exists()
    assert contents(tmp_path) == before
    assert changed == []


def test_hostile_pickle_in_one_shard_of_a_repository(
    tmp_path: Path, hub_environment: HubEnvironment, tensors: Weights
) -> None:
    served, marker = write_sharded(tmp_path / "hub" / REPO, tensors), tmp_path / "marker"
    (served / SHARDS[1]).write_bytes(hostile(marker))
    with pytest.raises(UnsafePickleError, match=SHARDS[1]):
        split(REPO)
    assert not marker.exists()
    assert not list(hub_environment.home.rglob("split.journal"))


@pytest.mark.parametrize("name", ["../precious.bin", "/etc/passwd", "a/../../precious.bin", "a\\b"])
@pytest.mark.parametrize("hub", [False, True], ids=["local", "hub"])
def test_index_with_a_path_outside_the_folder(
    tmp_path: Path, hub_environment: HubEnvironment, tensors: Weights, name: str, hub: bool
) -> None:
    source = write_sharded(tmp_path / "hub" / REPO, tensors)
    shutil.copy(source / SHARDS[1], source.parent / "precious.bin")
    index = json.loads((source / TORCH_INDEX_NAME).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (source / TORCH_INDEX_NAME).write_text(json.dumps(index))
    before = contents(tmp_path / "hub")
    with pytest.raises(UnsafePathError, match="expected a plain file name inside the checkpoint's own folder"):
        split(REPO if hub else source)
    assert contents(tmp_path / "hub") == before


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(__file__, "pickle")


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (write_tar, "a torch file in a tar archive, from before torch 0.1.10"),
        (lambda path: path.write_bytes(pickles.pickled({"w": 1})), "is a bare pickle"),
        (
            lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
            "a git-lfs pointer, not the file itself",
        ),
        (lambda path: path.write_bytes(b""), "is empty; safetensors"),
        (lambda path: path.write_bytes(b"<html>"), "of no format known here"),
    ],
    ids=["tar", "pickle", "pointer", "empty", "page"],
)
@pytest.mark.parametrize("hub", [False, True], ids=["local", "hub"])
def test_unsupported_formats(tmp_path: Path, hub_environment: HubEnvironment, write: Any, says: str, hub: bool) -> None:
    source = tmp_path / "hub" / REPO
    source.mkdir(parents=True)
    (source / "config.json").write_text('{"model_type": "llama"}')
    write(source / TORCH_SINGLE_NAME)
    with pytest.raises(UnreadableFormatError, match=says) as refused:
        split(REPO if hub else source)
    assert refused.value.remedy
    assert sorted(contents(source)) == ["config.json", TORCH_SINGLE_NAME]


def test_safetensors_with_the_name_of_a_torch_file(
    tmp_path: Path, tensors: Weights, expected: dict[str | None, dict[str, bytes]]
) -> None:
    """Formats are recognized by their first bytes, in both directions."""
    renamed = write_shards(tmp_path / "one", {SINGLE_NAME: tensors}, index=False)
    (renamed / SINGLE_NAME).rename(renamed / TORCH_SINGLE_NAME)
    named = write_torch(tmp_path / "two", {SINGLE_NAME: tied(tensors)})
    assert layer_files(split(renamed)) == layer_files(split(named)) == expected[None]


def test_index_with_a_tensor_that_a_shard_lacks(tmp_path: Path, tensors: Weights) -> None:
    source = write_sharded(tmp_path, tensors)
    text = (source / TORCH_INDEX_NAME).read_text()
    (source / TORCH_INDEX_NAME).write_text(text.replace('"model.norm.weight"', '"model.norm.bias"'))
    with pytest.raises(CheckpointError, match=r"The index puts 'model\.norm\.bias' into"):
        split(source)
    assert names_in(source, "*.bin") == SHARDS
    assert not (source / INDEX_NAME).exists()
