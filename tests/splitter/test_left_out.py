"""Tensors that a split leaves out of a file are named, and the file is kept, unless the user says that they may go."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import rabbitllm
from rabbitllm.base import progress
from rabbitllm.base.options import ShardPolicy, SplitOptions
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.estimate.report import show
from rabbitllm.models.convert import convert
from rabbitllm.splitter.request import SplitRequest, disk_budget_of, plan_split
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store.manifest import JOURNAL_NAME, read_manifest
from tests.support.builders import INDEX_NAME, build_checkpoint, cut, llama_tensors, write_shards
from tests.support.commands import invoke
from tests.support.gguf_files import write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.splitting import Call, interrupted, layer_files, names_in

TORCH_FILE = "pytorch_model.bin"
EXTRA = torch.arange(1000, dtype=torch.float32)
SEQUENTIAL = {"sequential": True}
DELETE = {"sequential": False, "delete_original": True}
BOTH = {"sequential": True, "delete_original": True}
HINT = "To delete it too, use sequential_shard_processing=True and delete_original=True together."


def training_checkpoint(folder: Path) -> Path:
    """A model's state dict with an optimizer's tensors, 8,000 bytes of them."""
    weights = llama_tensors()
    write_shards(folder, {"x.safetensors": weights}, index=False)
    (folder / "x.safetensors").unlink()
    moments = {0: {"exp_avg": EXTRA, "exp_avg_sq": EXTRA * EXTRA}}
    # an optimizer may refer to the weights themselves, which are not lost
    optimizer = {"state": moments, "params": [weights["model.norm.weight"]]}
    torch.save({"state_dict": weights, "optimizer": optimizer, "epoch": 3}, folder / TORCH_FILE)
    return folder


def gguf_with_more(folder: Path) -> Path:
    folder.mkdir()
    write_gguf(folder / "x.gguf", changed=lambda writer: writer.add_tensor("blk.0.extra.weight", EXTRA.numpy()))
    return folder


def tensor_in_two_shards(folder: Path) -> Path:
    """The index takes the norm from the last shard; the first has other values of it."""
    shards = cut(llama_tensors(), 2)
    first, second = shards
    write_shards(folder, {first: {**shards[first], "model.norm.weight": torch.ones(64)}, second: shards[second]})
    return folder


def ranks_with_two_norms(folder: Path) -> Path:
    """Each of Meta's ranks has all norms; the last norm of the second rank has other values."""
    write_meta(folder, tiny_llama(), ranks=2)
    second = torch.load(folder / "consolidated.01.pth", weights_only=True)
    torch.save({**second, "norm.weight": second["norm.weight"] + 1}, folder / "consolidated.01.pth")
    return folder


KINDS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "training": (training_checkpoint, TORCH_FILE, "optimizer (2 tensors, 8,000 bytes), epoch (no tensor)"),
    "gguf": (gguf_with_more, "x.gguf", "blk.0.extra.weight (1 tensor, 4,000 bytes)"),
    "twice": (
        tensor_in_two_shards,
        "model-00001-of-00002.safetensors",
        "model.norm.weight, which is taken from model-00002-of-00002.safetensors (1 tensor, 256 bytes)",
    ),
    "ranks": (
        ranks_with_two_norms,
        "consolidated.01.pth",
        "model.norm.weight, which is taken from consolidated.00.pth (1 tensor, 128 bytes)",
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(kind: str, tmp_path: Path) -> Path:
    return KINDS[kind][0](tmp_path / "model")


def weights_in(folder: Path) -> list[str]:
    return [name for name in names_in(folder) if name.endswith((".safetensors", ".bin", ".gguf", ".pth"))]


def source_of(model: Path) -> str:
    return str(next(model.glob("*.gguf"), model))


@pytest.mark.parametrize("options", [SEQUENTIAL, DELETE])
def test_file_is_kept_and_its_tensors_are_named_before(
    model: Path, kind: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, file, what = KINDS[kind]
    before, message = (
        (model / file).read_bytes(),
        f"{file} in {model} is kept, since the split leaves out {what}. {HINT}",
    )
    disposals: list[tuple[str, bool]] = []

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone):
            disposals.append((event.disposal, message in caplog.text))

    with progress.listening(listen):
        Call(source_of(model), **options).make()
    assert weights_in(model) == [file]
    assert (model / file).read_bytes() == before
    assert all(was_named for _, was_named in disposals)
    if options is SEQUENTIAL:
        assert "kept: the split leaves tensors of it out" in [disposal for disposal, _ in disposals]


def test_both_options_together_delete_the_file(model: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    _, file, what = KINDS[kind]
    Call(source_of(model), **BOTH).make()
    assert weights_in(model) == []
    assert f"{file} is deleted with what the split leaves out: {what}." in caplog.text


def test_original_of_a_finished_split(model: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    _, file, what = KINDS[kind]
    source = source_of(model)
    folder = Call(source, sequential=False).make()
    whole, everything = layer_files(folder), weights_in(model)
    if kind != "gguf":  # which says it in other words
        assert f"The split leaves out of {file}: {what}." in caplog.text
    assert f"{file} in" not in caplog.text
    assert len(everything) == (2 if kind in ("twice", "ranks") else 1)
    Call(source, **DELETE).make()
    assert weights_in(model) == [file]
    assert f"{file} in {model} is kept, since the split leaves out {what}" in caplog.text
    Call(source, **BOTH).make()
    assert weights_in(model) == []
    assert layer_files(folder) == whole


@pytest.mark.parametrize("by_this_version", [True, False])
def test_killed_call(model: Path, kind: str, by_this_version: bool) -> None:
    """Also with a version that did not record left-out tensors; copies are only recorded."""
    _, file, _ = KINDS[kind]
    if kind in ("twice", "ranks") and not by_this_version:
        pytest.skip("an earlier version deletes it")
    call = Call(source_of(model))

    def die(step: Step) -> None:
        if step.kind == "sync" and step.path.name == JOURNAL_NAME:
            lines = step.path.read_bytes().splitlines()
            if len(lines) > 1:
                raise KeyboardInterrupt

    with observe_steps(die), pytest.raises(KeyboardInterrupt):
        call.make()
    [journal_path] = model.glob(f"splitted_model*/{JOURNAL_NAME}")
    head, *entries = journal_path.read_text().splitlines()
    content = json.loads(head)
    left_out = [shard.pop("left_out", None) for shard in content["shards"]]
    assert sum(tensors is not None for tensors in left_out) == 1
    if not by_this_version:
        journal_path.write_text("\n".join([json.dumps(content), *entries, ""]))
    call.make()
    assert weights_in(model) == [file]


@pytest.mark.parametrize("value", [torch.ones(64), torch.ones(64, dtype=torch.float16), torch.ones(8, 8)])
def test_tensors_that_differ(tmp_path: Path, value: torch.Tensor) -> None:
    weights = {**llama_tensors(), "model.norm.weight": torch.ones(64)}
    first, second = shards = cut(weights, 2)
    put = {first: {**shards[first], "model.norm.weight": value}, second: shards[second]}
    Call(str(write_shards(tmp_path / "model", put))).make()
    is_same = value.dtype == torch.float32 and value.shape == (64,)
    assert weights_in(tmp_path / "model") == ([] if is_same else [first])


def test_equal_copies_are_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = llama_tensors()
    first, second = shards = cut(weights, 2)
    put = {first: {**shards[first], "model.norm.weight": weights["model.norm.weight"]}, second: shards[second]}
    model = write_shards(tmp_path / "model", put)
    Call(str(model)).make()
    assert weights_in(model) == []
    assert caplog.text == ""


def with_copies(folder: Path, *copies: tuple[int, int]) -> Path:
    """Three shards; by pairs, a shard has copies of all that the index takes from another."""
    shards = cut(llama_tensors(), 3)
    names, put = list(shards), {name: dict(tensors) for name, tensors in shards.items()}
    for holder, owner in copies:
        put[names[holder]].update(shards[names[owner]])
    write_shards(folder, put)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("copies", [((2, 0),), ((1, 0), (2, 1)), ((0, 1), (1, 2))])
@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_equal_copies_left_by_a_crash_are_deleted(
    tmp_path: Path, copies: tuple[tuple[int, int], ...], deleted: int
) -> None:
    """Each copy can be compared with its tensor as long as it is there."""
    model = with_copies(tmp_path / "model", *copies)
    call, unlinked = Call(str(model), **DELETE), itertools.count()

    def die(step: Step) -> None:
        if step.kind == "unlink" and step.path.parent == model and next(unlinked) == deleted:
            raise KeyboardInterrupt

    with observe_steps(die), pytest.raises(KeyboardInterrupt):
        call.make()
    assert len(weights_in(model)) == 3 - deleted
    call.make()
    assert weights_in(model) == []


def test_shards_with_copies_of_each_other_are_deleted(tmp_path: Path) -> None:
    model = with_copies(tmp_path / "model", (0, 1), (1, 0), (2, 0))
    Call(str(model), **DELETE).make()
    assert weights_in(model) == []


def test_a_shard_that_is_damaged_after_its_split_is_kept_alone(tmp_path: Path) -> None:
    model = with_copies(tmp_path / "model", (2, 0))
    first, *_ = weights_in(model)

    def damage(step: Step) -> None:
        if step.kind == "unlink" and step.path.name == JOURNAL_NAME:
            (model / first).write_bytes(bytes(100))

    with observe_steps(damage):
        Call(str(model), **DELETE).make()
    assert weights_in(model) == [first]


def test_a_training_checkpoint_without_other_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its hyperparameters are nowhere else either."""
    model = training_checkpoint(tmp_path / "model")
    torch.save({"state_dict": llama_tensors(), "epoch": 3, "optimizer": {"lr": 0.1}}, model / TORCH_FILE)
    Call(str(model)).make()
    assert weights_in(model) == [TORCH_FILE]
    assert "is kept, since the split leaves out epoch (no tensor), optimizer (no tensor)." in caplog.text


def test_texts_in_the_header_of_safetensors_are_recorded(tmp_path: Path) -> None:
    """Layer files have headers of their own; also after a crash, of which the second call knows by the journal."""
    model = write_shards(tmp_path / "model", cut(llama_tensors(), 2))
    first, second = sorted(model.glob("*.safetensors"))
    save_file(load_file(first), first, {"format": "pt", "training_log": "only here"})
    interrupted(Call(str(model)), shards=1)
    assert not first.exists()
    folder = Call(str(model)).make()
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.source_metadata == {first.name: {"training_log": "only here"}}
    assert not second.exists()


def test_metadata_of_a_gguf_file_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model").mkdir()
    write_gguf(tmp_path / "model" / "x.gguf")
    Call(str(tmp_path / "model" / "x.gguf")).make()
    assert "x.gguf is deleted once it is split, and of its metadata the split keeps config, tokenizer" in caplog.text


def test_repository_has_the_tensors(
    tmp_path: Path, hub_environment: HubEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    training_checkpoint(tmp_path / "hub" / "acme" / "trained")
    Call("acme/trained", sequential=False).make()
    [cached] = hub_environment.cache.rglob(TORCH_FILE)
    assert "The split leaves out of" in caplog.text
    Call("acme/trained", saving_path=str(tmp_path / "other")).make()
    assert not cached.exists()
    assert f"{TORCH_FILE} is deleted with what the split leaves out; the repository has it: opt" in caplog.text


# The disk


def test_a_kept_file_counts_as_not_freed(model: Path, kind: str) -> None:
    _, file, _ = KINDS[kind]
    checkpoint = LocalCheckpoint(model, entry="x.gguf" if kind == "gguf" else None)
    freed = {}
    for policy in (ShardPolicy.DELETE_USED, ShardPolicy.DELETE_USED | ShardPolicy.DELETE_REST):
        request = SplitRequest(checkpoint, model / "made", {"model_type": "llama"}, SplitOptions(shards=policy))
        freed[policy] = disk_budget_of(request, plan_split(request)).freed
    kept, deleted = freed.values()
    assert {*deleted} == {*weights_in(model)}
    assert {*kept} == {*deleted} - {file}


# What says it before


@pytest.fixture
def loadable(tmp_path: Path) -> Path:
    folder = build_checkpoint(tmp_path / "hare", "llama", shards=2)
    first, second = names_in(folder, "*-of-*.safetensors")
    from safetensors.torch import load_file, save_file

    norm = next(name for name in load_file(folder / second) if name.endswith("norm.weight"))
    tensor = load_file(folder / second)[norm]
    save_file({**load_file(folder / first), norm: tensor + 1}, folder / first, metadata={"format": "pt"})
    return folder


def test_pull_and_plan_name_left_out_tensors(loadable: Path) -> None:
    first = names_in(loadable, "*-of-*.safetensors")[0]
    words = ["pull", str(loadable), "--dry-run", "--device", "cpu"]
    for more, is_kept in ((["--sequential"], True), (["--sequential", "--delete-original"], False), ([], False)):
        shown = invoke(*words, *more, columns=200)
        assert (f"{first}, since the split leaves out " in " ".join(shown.output.split())) is is_kept
    plan = rabbitllm.plan(loadable, device="cpu", bandwidth="1GB")
    [warning] = plan.warnings
    assert warning.startswith(f"the split leaves out of {first}: ")
    assert warning.endswith("; it is kept where shards are deleted")
    console = Console(record=True, width=200)
    show(plan, console)
    assert warning in console.export_text()


def test_inspect_names_left_out_tensors(tmp_path: Path) -> None:
    model = training_checkpoint(tmp_path / "model")
    words = ["inspect", str(model / TORCH_FILE)]
    shown = invoke(*words, columns=200)
    assert "optimizer (2 tensors, 8,000 bytes), epoch (no tensor): a split keeps the file for it" in shown.output
    record = json.loads(invoke(*words, "--json").output)
    assert (record["left_out"], record["left_out_bytes"]) == (["optimizer", "epoch"], {"optimizer": 8000, "epoch": 0})


def test_conversion_keeps_the_file(tmp_path: Path) -> None:
    source = training_checkpoint(tmp_path / "model") / TORCH_FILE
    (source.parent / "config.json").unlink()
    for index, options in enumerate(({"sequential": True}, {"delete_original": True})):
        convert(source, tmp_path / f"out-{index}", **options)
        assert source.exists()
    convert(source, tmp_path / "out", sequential=True, delete_original=True)
    assert not source.exists()
