"""The split: both routes, every source, and what is on the disk before, during and after."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file

from rabbitllm.base import progress
from rabbitllm.base.options import BIG_LAYER_BYTES
from rabbitllm.checkpoints import fetch
from rabbitllm.errors import (
    CorruptShardError,
    DiskFullError,
    HubError,
    IncompleteSplitError,
    InvalidIndexError,
    MissingShardError,
    NotEnoughSpaceException,
    SplitMismatchError,
)
from rabbitllm.splitter import split as split_module
from rabbitllm.splitter.disk_budget import ShardTransfer
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.telemetry.passes import FETCH, QUANTIZE, READ, SHARD_WAIT, WRITE
from tests.support.builders import (
    INDEX_NAME,
    SINGLE_NAME,
    build_checkpoint,
    cut,
    llama_tensors,
    read_tensors,
    write_shards,
)
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import Faults, LocalHub
from tests.support.peak import Peak
from tests.support.plans import uses_of
from tests.support.splitting import (
    Call,
    Counter,
    contents,
    failing,
    interrupted,
    layer_files,
    names_in,
    occupied,
    split,
)

REPO = "acme/tiny"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
COMPRESSIONS = [None, "4bit", "8bit"]

Weights = Mapping[str, torch.Tensor]
LayerFiles = Callable[[str | None], dict[str, bytes]]
"""Layer files at a compression."""


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return llama_tensors()


@pytest.fixture
def model(tmp_path: Path, tensors: Weights) -> Path:
    """A checkpoint of three shards in a folder."""
    return write_shards(tmp_path / "model", cut(tensors, 3))


@pytest.fixture
def repository(tmp_path: Path, tensors: Weights, hub_environment: HubEnvironment) -> Path:
    """The same checkpoint on a hub."""
    return write_shards(tmp_path / "hub" / REPO, cut(tensors, 3))


@pytest.fixture
def expected(tmp_path: Path, tensors: Weights) -> LayerFiles:
    """The layer files that a single file of all tensors gives by the standard route, at a compression."""

    def made(compression: str | None = None) -> dict[str, bytes]:
        whole = write_shards(tmp_path / "whole" / str(compression), {SINGLE_NAME: tensors}, index=False)
        return layer_files(split(whole, compression=compression, sequential=False))

    return made


def check_plain(folder: Path, tensors: Weights) -> None:
    """Any safetensors reader finds every tensor as it was."""
    stored: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    assert all(stored[name].dtype == tensor.dtype for name, tensor in tensors.items())


# The same bytes by every route


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("hub", [False, True], ids=["local", "hub"])
def test_every_route_makes_the_same_bytes(
    model: Path,
    repository: Path,
    expected: LayerFiles,
    compression: str | None,
    sequential: bool,
    hub: bool,
) -> None:
    folder = split(REPO if hub else model, compression=compression, sequential=sequential)
    assert layer_files(folder) == expected(compression)
    assert LayerStore(folder).compression == compression


def test_names_of_files(model: Path) -> None:
    stems = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(3)), "model.norm", "lm_head"]
    expected = [f"{stem}.safetensors{suffix}" for stem in stems for suffix in ("", ".done")]
    assert names_in(split(model)) == sorted([*expected, "config.json", "split.json"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8], ids=str)
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = llama_tensors(layers=1, dtype=dtype)
    folder = split(write_shards(tmp_path / "model", cut(tensors, 2)))
    check_plain(folder, tensors)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tensors_without_elements_and_scalars(tmp_path: Path, compression: str | None) -> None:
    tensors = llama_tensors(layers=1) | {
        "model.layers.0.empty": torch.zeros(0, 5),
        "model.layers.0.scalar": torch.tensor(3.5),
        "model.layers.0.flags": torch.tensor([True, False, True]),
        "model.only_empty": torch.zeros(3, 0, dtype=torch.bfloat16),
    }
    folder = split(write_shards(tmp_path / "model", cut(tensors, 3)), compression=compression)
    store = LayerStore(folder)
    for name in ("model.layers.0.empty", "model.layers.0.scalar", "model.layers.0.flags", "model.only_empty"):
        (spec,) = store.tensors[name].parts
        assert torch.equal(store.mapped(spec.file).tensor(spec), tensors[name])


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tensors_larger_than_a_chunk_and_than_a_batch(
    tmp_path: Path, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = llama_tensors(layers=2, hidden=256, vocabulary=1003, dtype=torch.float32)
    source = cut(tensors, 2)
    expected = layer_files(split(write_shards(tmp_path / "a", source), compression=compression))
    monkeypatch.setattr("rabbitllm.splitter.plan.CHUNK_BYTES", 24_576)
    assert layer_files(split(write_shards(tmp_path / "b", source), compression=compression)) == expected


def test_real_checkpoint_of_transformers(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen3_moe", shards=5, dtype=torch.bfloat16)
    tensors = read_tensors(folder)
    split_folder = split(folder)
    check_plain(split_folder, tensors)
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(
        names_in(split_folder)
    )
    assert names_in(folder, "*.safetensors") == []


# Shapes of checkpoints that RabbitLLM 1.1.0 gets wrong


def three_shards_for_a_layer(tensors: Weights) -> dict[str, dict[str, torch.Tensor]]:
    """Each layer's attention, MLP and norms are in different shards."""
    parts: dict[str, dict[str, torch.Tensor]] = {shard: {} for shard in SHARDS}
    for name, tensor in tensors.items():
        parts[SHARDS[0 if "self_attn" in name else 1 if "mlp" in name else 2]][name] = tensor
    return parts


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_layer_that_spans_three_shards(
    tmp_path: Path, tensors: Weights, compression: str | None, expected: LayerFiles
) -> None:
    source = write_shards(tmp_path / "spread", three_shards_for_a_layer(tensors))
    events: list[progress.Event] = []
    with progress.listening(events.append):
        folder = split(source, compression=compression)
    assert layer_files(folder) == expected(compression)
    last = next(i for i, e in enumerate(events) if isinstance(e, progress.ShardStarted) and e.shard == SHARDS[2])
    finished = [i for i, e in enumerate(events) if isinstance(e, progress.LayerDone) and e.layer.startswith("layers.")]
    assert len(finished) == 3
    assert min(finished) > last  # no layer is finished before its third shard


@pytest.mark.parametrize("pattern", ["model-{:05d}-of-00120.safetensors", "model-{}-of-120.safetensors"])
def test_120_shards(tmp_path: Path, pattern: str) -> None:
    tensors = llama_tensors(layers=14, hidden=16)
    shards = {pattern.format(n): part for n, part in enumerate(cut(tensors, 120).values(), 1)}
    assert len(shards) == 120
    source = write_shards(tmp_path / "model", shards)
    events: list[progress.Event] = []
    with progress.listening(events.append):
        folder = split(source)
    check_plain(folder, tensors)
    assert [event.shard for event in events if isinstance(event, progress.ShardStarted)] == list(shards)
    assert names_in(source, "*.safetensors") == []


@pytest.mark.parametrize("sequential", [True, False])
def test_tied_embeddings_without_a_head(tmp_path: Path, tensors: Weights, sequential: bool) -> None:
    tied = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    folder = split(write_shards(tmp_path / "model", cut(tied, 3)), sequential=sequential)
    check_plain(folder, tied)
    assert not (folder / "lm_head.safetensors").exists()


@pytest.mark.parametrize("sequential", [True, False])
def test_missing_shard_is_fetched(
    model: Path,
    repository: Path,
    local_hub: LocalHub,
    sequential: bool,
    expected: LayerFiles,
) -> None:
    (model / SHARDS[1]).unlink()
    folder = split(model, sequential=sequential, repo_id=REPO)
    assert layer_files(folder) == expected(None)
    assert local_hub.downloads(SHARDS[0]) == local_hub.downloads(SHARDS[2]) == 0
    assert local_hub.body_bytes(SHARDS[1]) > 0
    assert names_in(model, "*.safetensors") == ([] if sequential else [SHARDS[0], SHARDS[2]])
    assert not (folder / ".staging").exists()


def test_fetching_a_missing_shard_leaves_the_hub_cache_unchanged(
    model: Path, repository: Path, expected: LayerFiles
) -> None:
    """Shards that the folder has are not taken from the cache, so they are not freed there either."""
    (model / SHARDS[1]).unlink()
    snapshot = Path(snapshot_download(REPO))
    folder = split(model, repo_id=REPO, delete_original=True)
    assert layer_files(folder) == expected(None)
    assert names_in(snapshot, "*.safetensors") == [SHARDS[0], SHARDS[2]]
    assert names_in(model) == ["config.json", "splitted_model"]


# The table of four


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("delete", [True, False])
def test_files_left_in_a_folder(
    model: Path, tensors: Weights, sequential: bool, delete: bool, expected: LayerFiles
) -> None:
    (model / "README.md").write_text("not ours")
    (model / "tokenizer.json").write_text("{}")
    before = contents(model)
    present_when_whole: list[str] = []

    def look(index: int, step: Step) -> None:
        if step.kind == "rename" and step.target is not None and step.target.name == "split.json":
            present_when_whole.extend(names_in(model, "*.safetensors"))

    with observe_steps(Counter(look)):
        folder = split(model, sequential=sequential, delete_original=delete)
    assert layer_files(folder) == expected(None)
    shards = [] if sequential or delete else SHARDS
    index = [] if delete else [INDEX_NAME]
    assert names_in(model) == sorted(["README.md", "config.json", "splitted_model", "tokenizer.json", *index, *shards])
    assert present_when_whole == ([] if sequential else SHARDS)  # the standard route deletes nothing before it is whole
    assert all((model / name).read_bytes() == before[name] for name in ("README.md", "config.json", "tokenizer.json"))
    assert (folder / "tokenizer.json").read_text() == "{}"
    check_plain(folder, tensors)


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("delete", [True, False])
def test_files_left_of_a_repository(
    repository: Path,
    hub_environment: HubEnvironment,
    sequential: bool,
    delete: bool,
    expected: LayerFiles,
) -> None:
    (repository / "tokenizer.json").write_text("{}")
    folder = split(REPO, sequential=sequential, delete_original=delete)
    assert layer_files(folder) == expected(None)
    assert folder.is_relative_to(hub_environment.home / "rabbitllm")
    links = sorted(path.name for path in hub_environment.cache.rglob("*") if path.is_symlink())
    small = ["config.json", INDEX_NAME, "tokenizer.json"]
    assert links == ([] if delete else sorted(small if sequential else [*small, *SHARDS]))
    blobs = occupied(*(path for path in hub_environment.cache.rglob("blobs")))
    weights = sum((repository / shard).stat().st_size for shard in SHARDS)
    assert (blobs > weights) == (not sequential and not delete)
    assert {"config.json", "tokenizer.json", "split.json"} <= set(names_in(folder))
    assert Call(str(folder)).find().finished  # alone


def test_undeletable_original_is_reported(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_only = OSError(errno.EROFS, "Read-only file system")
    with failing(read_only, lambda n, step: step.path.name in SHARDS, kinds=("unlink",)):
        split(model, sequential=False, delete_original=True)
    assert names_in(model, "*.safetensors") == SHARDS
    assert [record.message for record in caplog.records] == [
        f"3 shards of {model} cannot be deleted: their folder is read-only."
    ]


def test_delete_original_of_an_earlier_call(model: Path) -> None:
    folder = split(model, sequential=False)
    assert names_in(model, "*.safetensors") == SHARDS
    before = contents(folder)
    assert split(model, sequential=False, delete_original=True) == folder
    assert names_in(model) == ["config.json", "splitted_model"]
    assert contents(folder) == before


def test_original_of_a_damaged_split_is_kept(model: Path) -> None:
    folder = split(model, sequential=False)
    (folder / "lm_head.safetensors").write_bytes(b"short")
    with pytest.raises(IncompleteSplitError, match=r"lm_head.safetensors has 5 bytes"):
        split(model, sequential=False, delete_original=True)
    assert names_in(model, "*.safetensors") == SHARDS


# Where the layer files go


@pytest.mark.parametrize("hub", [False, True], ids=["local", "hub"])
def test_saving_path(model: Path, repository: Path, tmp_path: Path, hub: bool, expected: LayerFiles) -> None:
    folder = split(REPO if hub else model, tmp_path / "some" / "where", compression="4bit")
    assert folder == tmp_path / "some" / "where" / "splitted_model.4bit"
    assert layer_files(folder) == expected("4bit")
    assert not (model / "splitted_model.4bit").exists()


def test_only_sidecars_are_copied(model: Path) -> None:
    sidecars = {"tokenizer.json": "t", "chat_template.jinja": "c", "tokenizer.model": "m", "LICENSE": "l"}
    sidecars["additional_chat_templates/tool.jinja"] = "a"
    sidecars |= {"1_Pooling/config.json": "p", "1_LogitScore/config.json": "s"}
    for name, text in (sidecars | {"README.md": "r", "optimizer.bin": "o"}).items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(text)
    folder = split(model)
    copied = {name: data.decode() for name, data in contents(folder).items() if ".safetensors" not in name}
    manifest = copied.pop("split.json")
    assert copied == sidecars | {"config.json": (model / "config.json").read_text()}
    assert json.loads(manifest)["source"]["name"] == "model"


# Shards are deleted as soon as they are used, and not before


def test_used_shard_is_deleted_before_the_next_is_read(model: Path) -> None:
    shards_left: list[tuple[str, list[str]]] = []

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardStarted | progress.ShardDone):
            shards_left.append((type(event).__name__, names_in(model, "*.safetensors")))

    with progress.listening(listen):
        split(model)
    assert shards_left == [
        (event_name, SHARDS[begin:])
        for done in range(3)
        for event_name, begin in (("ShardStarted", done), ("ShardDone", done + 1))
    ]


def test_order_of_steps_around_a_deletion(model: Path) -> None:
    steps: list[Step] = []
    with observe_steps(steps.append):
        folder = split(model)
    for shard in SHARDS:
        deletion = next(i for i, step in enumerate(steps) if step.kind == "unlink" and step.path == model / shard)
        earlier = steps[:deletion]
        kinds = [step.kind for step in earlier]
        declared = max(
            i for i, step in enumerate(earlier) if step.path.name == "split.journal" and step.kind == "write"
        )
        assert json.loads(bytes(earlier[declared].data))["used"] == shard
        assert (kinds[declared + 1], earlier[declared + 1].path.name) == ("sync", "split.journal")
        assert deletion == declared + 2
        assert (kinds[declared - 1], earlier[declared - 1].path) == ("sync_folder", folder)
        last_write: dict[Path, int] = {}
        for index, step in enumerate(earlier[:declared]):
            if step.kind == "write":
                last_write[step.path] = index
        for path, index in last_write.items():
            if path.suffix == ".part":  # every byte of every layer file was synced after it was written
                assert any(s.kind == "sync" and s.path == path for s in earlier[index:declared]), path
    renames = [step for step in steps if step.kind == "rename" and step.target is not None]
    assert renames[-1].target == folder / "split.json"
    assert [step.kind for step in steps[-2:]] == ["sync_folder", "unlink"]
    assert steps[-1].path == folder / "split.journal"


def test_read_only_source_is_split_in_place_and_kept(
    model: Path,
    hub_environment: HubEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: LayerFiles,
) -> None:
    before = contents(model)
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != model and allowed(path, mode))
    read_only = OSError(errno.EROFS, "Read-only file system")
    events: list[progress.Event] = []
    with failing(read_only, lambda n, step: step.path.parent == model), progress.listening(events.append):
        folder = split(model, delete_original=True)
    assert folder.is_relative_to(hub_environment.home / "rabbitllm" / "local")
    assert layer_files(folder) == expected(None)
    assert contents(model) == before
    disposals = [event.disposal for event in events if isinstance(event, progress.ShardDone)]
    assert disposals == ["kept: the source is read-only"] * 3
    messages = [record.message for record in caplog.records if "read-only" in record.message]
    once = f"Used shards of {model} cannot be deleted: their folder is read-only."
    summary = f"3 shards of {model} cannot be deleted: their folder is read-only."
    assert messages == [once, summary]
    caplog.clear()
    assert split(model, delete_original=True) == folder
    assert [record.message for record in caplog.records] == [summary]


@pytest.mark.parametrize("how", ["repository", "snapshot"])
@pytest.mark.parametrize("sequential", [True, False])
def test_read_only_hub_cache_is_unchanged(
    repository: Path,
    tmp_path: Path,
    how: str,
    sequential: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: LayerFiles,
) -> None:
    snapshot = Path(snapshot_download(REPO))
    cache = snapshot.parent.parent.parent
    before = contents(cache)
    allowed = os.access

    def refuse(change: Callable[..., None], path: str | Path, *others: str | Path, **options: int) -> None:
        if Path(path).is_relative_to(cache):
            raise OSError(errno.EROFS, "Read-only file system")
        change(path, *others, **options)

    for name in ("unlink", "remove", "rename", "replace"):
        monkeypatch.setattr(os, name, functools.partial(refuse, getattr(os, name)))
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(cache) and allowed(path, mode))
    source = REPO if how == "repository" else snapshot
    folder = split(source, tmp_path / "splits", sequential=sequential, delete_original=True)
    assert layer_files(folder) == expected(None)
    assert contents(cache) == before
    messages = [record.message for record in caplog.records if "cannot be deleted" in record.message]
    assert len(messages) == (2 if sequential else 1)


# Time


@pytest.mark.parametrize("compression", [None, "8bit"])
def test_profile_of_each_layer(tmp_path: Path, tensors: Weights, compression: str | None) -> None:
    source = write_shards(tmp_path / "model", three_shards_for_a_layer(tensors))

    def dawdle(event: progress.Event) -> None:
        if isinstance(event, progress.ShardStarted):
            time.sleep(0.05)

    with progress.listening(dawdle):
        _, profiler = Call(str(source), compression=compression, profiling=True).make_with_profile()
    layers = ["embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "lm_head"]
    assert set(profiler.layers) == set(layers)
    for layer in layers:
        stages = profiler.layers[layer]
        stem = layer if layer == "lm_head" else f"model.{layer}"
        nbytes = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(stem))
        assert stages[READ].nbytes == nbytes
        assert stages[WRITE].seconds > 0
        assert (QUANTIZE in stages) == (compression is not None and layer != "norm")
        assert (SHARD_WAIT in stages) == layer.startswith("layers.")  # the others are in the third shard alone
    waits = [profiler.layers[layer][SHARD_WAIT] for layer in layers if layer.startswith("layers.")]
    assert all(wait.count == 1 and wait.seconds > 0.09 for wait in waits)  # until the third shard began, twice 0.05 s
    report = profiler.report()
    by_layer = dict(re.findall(r"^(layers\.\d|embed_tokens|norm|lm_head) +(\d\.\d{3})$", report, re.MULTILINE))
    assert by_layer == {layer: f"{profiler.layers[layer][SHARD_WAIT].seconds:.3f}" for layer in layers[1:4]}
    assert report.startswith(f"Split of {source}, by stage")
    assert all(stage in report for stage in (READ, WRITE, SHARD_WAIT, "BOTTLENECK"))


@pytest.mark.parametrize("transfer", ["file", "stream"])
def test_profile_of_fetched_shards(repository: Path, hub_environment: HubEnvironment, transfer: str) -> None:
    _, profiler = Call(REPO, shard_transfer=transfer, profiling=True).make_with_profile()
    shards = names_in(repository, "*.safetensors")
    assert {shard for shard, stages in profiler.layers.items() if FETCH in stages} == set(shards)
    assert all(set(profiler.layers[shard]) == {FETCH} for shard in shards)


def test_profile_is_empty_by_default(model: Path) -> None:
    _, profiler = Call(str(model)).make_with_profile()
    assert profiler.layers == {}


# Warnings


def test_large_layer_gives_a_warning(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert BIG_LAYER_BYTES == 10_000_000_000
    monkeypatch.setattr(split_module, "BIG_LAYER_BYTES", 50_000)
    split(model)
    assert [re.sub(r"[\d,]+ bytes", "# bytes", record.message) for record in caplog.records] == [
        f"Layer layers.{n} has # bytes; streaming it needs that much memory at once." for n in range(3)
    ]


def test_leftovers_are_finished_and_reported(
    model: Path, caplog: pytest.LogCaptureFixture, expected: LayerFiles
) -> None:
    with failing(OSError("stop"), lambda n, s: s.path.name == "split.json.part"), pytest.raises(OSError, match="stop"):
        split(model)
    folder = model / "splitted_model"
    assert names_in(model, "*.safetensors") == []
    for name in ("lm_head.safetensors", "model.layers.1.safetensors"):
        os.replace(folder / name, folder / f"{name}.part")
        (folder / f"{name}.done").unlink()
    (folder / "model.norm.safetensors.done").unlink()
    assert split(model) == folder
    assert layer_files(folder) == expected(None)
    assert sorted(record.message for record in caplog.records) == [
        "Layer layers.1 of an earlier run was unfinished; it is finished now.",
        "Layer lm_head of an earlier run was unfinished; it is finished now.",
    ]
    assert not (folder / "split.journal").exists()


# Damage


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("damage", ["truncated", "header", "empty"])
def test_damaged_shard_is_detected_before_the_first_change(model: Path, index: int, damage: str) -> None:
    raw = (model / SHARDS[index]).read_bytes()
    (model / SHARDS[index]).write_bytes(
        {"truncated": raw[:-1], "header": raw[:8] + b"x" + raw[9:], "empty": b""}[damage]
    )
    before = contents(model)
    with pytest.raises(CorruptShardError) as refused:
        split(model)
    assert SHARDS[index] in refused.value.problem
    assert "Put an undamaged copy at that path" in refused.value.remedy
    assert contents(model) == before


@pytest.mark.parametrize("when", ["between shards", "while it is read"])
def test_shard_truncated_during_the_split(model: Path, when: str, expected: LayerFiles) -> None:
    sound = (model / SHARDS[1]).read_bytes()

    def cut_short(index: int, step: Step) -> None:
        first_is_gone = not (model / SHARDS[0]).exists()
        if first_is_gone and (step.kind == "write" if when == "while it is read" else step.kind == "create"):
            os.truncate(model / SHARDS[1], 20_000)

    def listen(event: progress.Event) -> None:
        if when == "between shards" and isinstance(event, progress.ShardDone) and event.number == 1:
            os.truncate(model / SHARDS[1], 20_000)

    with observe_steps(Counter(cut_short)), progress.listening(listen), pytest.raises(CorruptShardError) as refused:
        split(model)
    messages = {
        "between shards": "it is truncated: 20,000 bytes found",
        "while it is read": "ends at byte 20,000; by its header",
    }
    assert messages[when] in refused.value.problem
    assert str(model / SHARDS[1]) in refused.value.problem
    assert f"Finished layers are kept in {model / 'splitted_model'}" in refused.value.remedy
    assert "For a local checkpoint put an undamaged copy at that path" in refused.value.remedy
    assert names_in(model, "*.safetensors") == SHARDS[1:]
    (model / SHARDS[1]).write_bytes(sound)
    with pytest.raises(SplitMismatchError, match=rf"{SHARDS[1]} has changed since the split") as doubted:
        split(model)  # only its time tells that it is sound
    seconds, nanoseconds = re.findall(r"touch -d @(\d+)\.(\d{9}) ", doubted.value.remedy)[0]
    os.utime(model / SHARDS[1], ns=(0, int(seconds) * 10**9 + int(nanoseconds)))
    assert layer_files(split(model)) == expected(None)


def test_unreadable_shard(model: Path, monkeypatch: pytest.MonkeyPatch, expected: LayerFiles) -> None:
    read, opened = os.preadv, os.path.realpath

    def broken(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if opened(f"/proc/self/fd/{descriptor}").endswith(SHARDS[1]) and offset > 30_000:
            raise OSError(errno.EIO, "Input/output error")
        return read(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(
            CorruptShardError, match=rf"{SHARDS[1]} cannot be read at byte .*Input/output error"
        ) as failed:
            split(model)
    assert "Finished layers are kept" in failed.value.remedy
    assert names_in(model, "*.safetensors") == SHARDS[1:]
    assert layer_files(split(model)) == expected(None)


def test_shard_replaced_during_the_split(model: Path, tensors: Weights) -> None:
    other = write_shards(
        model.parent / "other", {SHARDS[1]: {"model.layers.1.self_attn.q_proj.weight": torch.zeros(2)}}, index=False
    )

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone) and event.number == 1:
            os.replace(other / SHARDS[1], model / SHARDS[1])

    with (
        progress.listening(listen),
        pytest.raises(CorruptShardError, match="differs from the planned file"),
    ):
        split(model)
    assert names_in(model, "*.safetensors") == SHARDS[1:]


def test_missing_shard_is_detected_before_the_first_change(model: Path) -> None:
    for shard in SHARDS[1:]:
        (model / shard).unlink()
    before = contents(model)
    with pytest.raises(MissingShardError, match=f"lacks 2 of the shards in its index: {SHARDS[1]}, {SHARDS[2]}") as bad:
        split(model)
    assert "Nothing was changed." in str(bad.value)
    assert contents(model) == before


def test_compressed_checkpoint_is_refused(tmp_path: Path) -> None:
    tensors = llama_tensors(layers=1)
    tensors["model.layers.0.mlp.up_proj.weight.8bit.absmax"] = torch.zeros(4)
    source = write_shards(tmp_path / "model", cut(tensors, 2))
    before = contents(source)
    with pytest.raises(InvalidIndexError, match="its weights seem to be quantized already"):
        split(source, compression="8bit")
    assert contents(source) == before


# Another model's split


def another(tmp_path: Path, name: str = "another") -> Path:
    return write_shards(tmp_path / name, cut(llama_tensors(seed=7), 3))


def test_unfinished_split_of_another_folder(model: Path, tmp_path: Path) -> None:
    other, saving_path = another(tmp_path), tmp_path / "splits"
    interrupted(Call(str(other), str(saving_path)))
    before = contents(tmp_path)
    with pytest.raises(
        SplitMismatchError, match="holds an unfinished split of another; requested was model: its shard"
    ) as bad:
        split(model, saving_path)
    assert "another folder (--dir, layer_shards_saving_path)" in str(bad.value)
    assert contents(tmp_path) == before
    assert split(other, saving_path)


@pytest.mark.parametrize(("sequential", "delete"), [(True, False), (False, True)])
@pytest.mark.parametrize("alike", [True, False], ids=["shards of the same names", "of other names"])
def test_split_without_its_last_step_refuses_another_folder(
    model: Path, tmp_path: Path, sequential: bool, delete: bool, alike: bool
) -> None:
    """Every shard of the first is used up; those of the second were never read."""
    other, saving_path = another(tmp_path), tmp_path / "splits"
    interrupted(Call(str(other), str(saving_path), sequential=sequential, delete_original=delete), shards=3)
    if not alike:
        model = write_shards(tmp_path / "one file", {"model.safetensors": llama_tensors()}, index=False)
    before = contents(tmp_path)
    with pytest.raises(SplitMismatchError, match="holds an unfinished split of another; requested was") as bad:
        split(model, saving_path, sequential=sequential, delete_original=delete)
    assert ("its shard" in bad.value.problem) == alike
    assert contents(tmp_path) == before
    assert split(other, saving_path, sequential=sequential, delete_original=delete)


def test_finished_split_of_a_folder_that_was_renamed_before(model: Path, tmp_path: Path) -> None:
    """No shard is left, and the split lies elsewhere: its record has the name by which it was accepted."""
    interrupted(Call(str(model), str(tmp_path / "out")))
    call = Call(str(model.rename(tmp_path / "renamed")), str(tmp_path / "out"))
    assert call.make() == call.make()
    assert not any((tmp_path / "renamed").glob("*.safetensors"))


@pytest.mark.parametrize("finished", [True, False])
def test_split_in_a_renamed_folder(
    model: Path, tmp_path: Path, expected: LayerFiles, finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of the two paths is relative."""
    call = Call(str(model), str(model / "splits"))
    call.make() if finished else interrupted(call, shards=3)
    model.rename(tmp_path / "renamed")
    monkeypatch.chdir(tmp_path)
    assert layer_files(split("renamed", tmp_path / "renamed" / "splits")) == expected(None)


def test_unfinished_split_outside_of_a_renamed_folder(model: Path, tmp_path: Path, expected: LayerFiles) -> None:
    """No shard is left: nothing shows that it is the same model."""
    interrupted(Call(str(model), str(tmp_path / "splits")), shards=3)
    model.rename(tmp_path / "renamed")
    with pytest.raises(SplitMismatchError, match="no shard is left to compare") as refused:
        split(tmp_path / "renamed", tmp_path / "splits")
    assert f"name its folder {model.name!r} again" in refused.value.remedy
    (tmp_path / "renamed").rename(model)
    assert layer_files(split(model, tmp_path / "splits")) == expected(None)


def test_unfinished_split_of_a_folder_refuses_a_repository(
    model: Path, repository: Path, tmp_path: Path, local_hub: LocalHub
) -> None:
    other, saving_path = another(tmp_path), tmp_path / "splits"
    interrupted(Call(str(other), str(saving_path)))
    with pytest.raises(SplitMismatchError, match="it was made from a folder, not from a repository on the hub"):
        split(REPO, saving_path)
    assert split(other, saving_path)


def test_unfinished_split_of_another_commit(repository: Path, tmp_path: Path, local_hub: LocalHub) -> None:
    saving_path = tmp_path / "splits"
    interrupted(Call(REPO, str(saving_path)))
    local_hub.add_revision(REPO, "main", another(tmp_path))
    with pytest.raises(SplitMismatchError, match=r"another source named acme/tiny: its commit is \w+, not \w+"):
        split(REPO, saving_path)


# Going on


def test_interrupted_call_is_resumed_and_reports_it(model: Path, expected: LayerFiles) -> None:
    interrupted(Call(str(model), compression="4bit"), shards=2)
    assert names_in(model, "*.safetensors") == SHARDS[2:]
    events: list[progress.Event] = []
    with progress.listening(events.append):
        folder = split(model, compression="4bit")
    (started,) = [event for event in events if isinstance(event, progress.SplitStarted)]
    assert (started.shards, started.resumed) == ((SHARDS[2],), 2)
    assert layer_files(folder) == expected("4bit")


@pytest.mark.parametrize("left", [None, 0, 5_000])
def test_missing_or_cut_begun_layer_is_refused(model: Path, tmp_path: Path, tensors: Weights, left: int | None) -> None:
    source = write_shards(tmp_path / "spread", three_shards_for_a_layer(tensors))
    interrupted(Call(str(source)), shards=2)
    part = source / "splitted_model" / "model.layers.1.safetensors.part"
    kept = part.read_bytes()
    part.unlink()
    if left is not None:
        part.write_bytes(kept[:left])
    before = contents(source)
    with pytest.raises(IncompleteSplitError) as refused:
        split(source)
    assert f"{part.with_suffix('')} is missing or cut" in refused.value.problem
    assert f"it held tensors of {SHARDS[0]}, {SHARDS[1]}, which earlier runs have used" in refused.value.problem
    assert contents(source) == before
    part.write_bytes(kept)
    check_plain(split(source), tensors)


@pytest.mark.parametrize("left", [None, 5_000])
def test_missing_or_cut_begun_layer_is_made_again_where_its_shards_are(
    tmp_path: Path, tensors: Weights, left: int | None
) -> None:
    source = write_shards(tmp_path / "spread", three_shards_for_a_layer(tensors))
    shards = {source / name: (source / name).read_bytes() for name in SHARDS[:2]}
    interrupted(Call(str(source)), shards=2)
    part = source / "splitted_model" / "model.layers.1.safetensors.part"
    part.unlink()
    if left is not None:
        part.write_bytes(bytes(left))
    for path, content in shards.items():
        path.write_bytes(content)
    interrupted(Call(str(source)))
    check_plain(split(source), tensors)
    assert names_in(source, "*.safetensors") == []


def test_standard_route_finishes_a_sequential_split(
    repository: Path, hub_environment: HubEnvironment, expected: LayerFiles
) -> None:
    interrupted(Call(REPO), shards=1)
    (staging,) = hub_environment.home.rglob(".staging")
    (staging / f"{SHARDS[1]}.part").write_bytes((repository / SHARDS[1]).read_bytes()[:5000])
    folder = split(REPO, sequential=False)
    assert layer_files(folder) == expected(None)
    assert not staging.exists()
    assert len([path for path in hub_environment.cache.rglob("*.safetensors") if path.exists()]) == 3  # kept


def test_sequential_route_finishes_a_standard_split(
    repository: Path, hub_environment: HubEnvironment, expected: LayerFiles
) -> None:
    interrupted(Call(REPO, sequential=False), shards=1)
    folder = split(REPO)
    assert layer_files(folder) == expected(None)
    assert list(hub_environment.cache.rglob("*.safetensors")) == []


def test_failed_fetch_is_resumed_by_the_same_call(
    repository: Path,
    local_hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
    expected: LayerFiles,
) -> None:
    monkeypatch.setattr(fetch, "_pause", lambda failures: 0.0)

    def go_bad(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone) and event.number == 1:
            local_hub.faults = Faults(status=503, status_times=-1)

    with progress.listening(go_bad), pytest.raises(HubError, match="HTTP 503"):
        split(REPO)
    local_hub.faults = Faults()
    local_hub.forget_requests()
    folder = split(REPO)
    assert layer_files(folder) == expected(None)
    assert local_hub.downloads(SHARDS[0]) == 0  # neither its body nor its header is asked for again


def test_finished_split_is_not_changed(model: Path, repository: Path, local_hub: LocalHub) -> None:
    for source in (str(model), REPO):
        folder = split(source)
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        local_hub.forget_requests()
        steps: list[Step] = []
        with observe_steps(steps.append):
            assert split(source) == folder
        assert steps == []
        assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
        assert local_hub.body_bytes() == 0
        assert len(local_hub.requests) == (1 if source == REPO else 0)


# A full disk, and one that fails; see also test_failing_disk.py


@pytest.mark.parametrize("kind", ["rename", "unlink"])
def test_failing_disk_leaves_a_resumable_state(
    tmp_path: Path, tensors: Weights, kind: str, expected: LayerFiles
) -> None:
    source = cut(tensors, 3)
    counter = Counter(kinds=(kind,))
    with observe_steps(counter):
        split(write_shards(tmp_path / "count", source))
    files = expected(None)
    for failed in range(0, counter.count, max(counter.count // 5, 1)):
        model = write_shards(tmp_path / str(failed) / "model", source)
        broken = OSError(errno.EIO, "Input/output error")
        with (
            failing(broken, lambda index, step, failing_step=failed: index == failing_step, (kind,)),  # type: ignore[misc]
            pytest.raises(OSError, match="Input/output error"),
        ):
            split(model)
        folder = split(model)
        assert layer_files(folder) == files
        assert names_in(folder, "*.part") == names_in(folder, "*.journal") == []


def test_split_stops_before_other_processes_fill_the_disk(
    model: Path, monkeypatch: pytest.MonkeyPatch, expected: LayerFiles
) -> None:
    usage = shutil.disk_usage(model)
    free, looks = [10**12], threading.Semaphore(0)

    def asked(path: Path) -> object:
        if free[0] < 10**9:
            looks.release()
        return usage._replace(free=free[0])

    monkeypatch.setattr(shutil, "disk_usage", asked)

    def fill(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone):
            free[0] = 10**9 - 1
            for _ in range(2):  # with the second look the watch has seen what came of the first one
                assert looks.acquire(timeout=600)

    with progress.listening(fill), pytest.raises(DiskFullError, match=r"Only 1000.00 MB were free") as stopped:
        split(model)
    assert "Free disk space or lower min_free_disk" in stopped.value.remedy
    assert names_in(model, "*.safetensors") == list(SHARDS[1:])
    with pytest.raises(NotEnoughSpaceException):  # nor does it begin again
        split(model)
    free[0] = 10**12
    assert layer_files(split(model)) == expected(None)


def test_peaks_are_reported_at_the_end(model: Path) -> None:
    events: list[progress.Event] = []
    with progress.listening(events.append):
        folder = split(model)
    done = events[-1]
    assert isinstance(done, progress.SplitDone)
    assert done.peak_disk_bytes >= occupied(folder) > 0
    assert 0 <= done.peak_memory_bytes < 200_000_000


# The most disk it takes


LARGE = {"layers": 5, "hidden": 384, "vocabulary": 2048}
BOOKKEEPING = 64 * 1024
"""Bytes on the disk that are no weights: journal, manifest, config and folders."""


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("way", [None, *ShardTransfer], ids=["local", *(way.name for way in ShardTransfer)])
def test_peak_of_the_disk(
    tmp_path: Path, hub_environment: HubEnvironment, compression: str | None, way: ShardTransfer | None
) -> None:
    where = tmp_path / ("hub" if way else "x") / REPO
    source = write_shards(where, cut(llama_tensors(**LARGE), 6))
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    call = Call(REPO if way else str(source), compression=compression)
    if way:  # the budget alone decides how shards arrive
        call = dataclasses.replace(call, max_disk=uses_of(call)[way].created)
    folder = call.find().split_folder
    peak = Peak(folder) if way else Peak(source)
    assert peak.during(call) == folder
    output = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    layers = len(list(folder.glob("*.safetensors")))
    assert largest > 20 * layers * 4096
    staged = {
        None: largest - output,
        ShardTransfer.FILE_AHEAD: 2 * largest,
        ShardTransfer.FILE: largest,
        ShardTransfer.STREAM: 0,
    }
    assert peak.most <= output + staged[way] + layers * 64 * 1024
    assert peak.most <= peak.predicted
    if way is not ShardTransfer.FILE_AHEAD:  # where the next shard comes while the last one is used, and may come late
        assert peak.most >= peak.predicted - layers * 16384 - BOOKKEEPING  # no more is asked for than is needed
    fetched_ahead = largest if way is ShardTransfer.FILE_AHEAD else 0
    assert peak.told <= output + fetched_ahead + BOOKKEEPING + layers * 8192


def test_standard_route_needs_the_whole_output(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(**LARGE), 6))
    peak = Peak(source)
    folder = peak.during(Call(str(source), sequential=False))
    output = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert output <= peak.most <= peak.predicted + BOOKKEEPING


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize(("transfer", "way"), [("file", ShardTransfer.FILE), ("stream", ShardTransfer.STREAM)])
def test_max_disk_of_the_named_need_is_enough(
    repository: Path, hub_environment: HubEnvironment, compression: str | None, transfer: str, way: ShardTransfer
) -> None:
    call = Call(REPO, compression=compression, shard_transfer=transfer)
    needed = uses_of(call)[way].created
    folder = call.find().split_folder
    with pytest.raises(NotEnoughSpaceException, match=f"is allowed by max_disk={needed - 1:,}"):
        dataclasses.replace(call, max_disk=needed - 1).make()
    assert not folder.exists() or names_in(folder) == []
    peak = Peak(folder)
    assert peak.during(dataclasses.replace(call, max_disk=needed)) == folder
    assert peak.most <= needed


def test_interrupted_split_needs_no_more_disk(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    source = write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(**LARGE), 6))
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    call = Call(REPO, compression="8bit")
    call = dataclasses.replace(call, max_disk=uses_of(call)[ShardTransfer.FILE].created)
    peak = Peak(hub_environment.home)
    interrupted(call, shards=3)
    folder = peak.during(call)
    output = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert peak.most <= output + largest + BOOKKEEPING + 8 * 8192
    assert peak.predicted < output + largest  # what is there already is not asked for again
