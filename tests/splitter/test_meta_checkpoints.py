"""Llama as Meta publishes it is split on every route of safetensors files, into the same bytes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rabbitllm
from rabbitllm import prepare
from rabbitllm.base import progress
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import (
    CorruptShardError,
    HubError,
    InvalidIndexError,
    MissingShardError,
    NotEnoughSpaceException,
    OptionError,
    SplitMismatchError,
)
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.splitter import journal
from rabbitllm.splitter.disk_budget import ShardTransfer
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store.layer_store import verify
from rabbitllm.store.manifest import read_manifest
from tests.support.crashes import KILLED, CrashServer
from tests.support.dying import dying_at
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import Faults, LocalHub
from tests.support.meta_files import (
    RANK,
    params_of,
    ranks_of_model,
    tiktoken_file,
    tiny_llama,
    write_as_transformers,
    write_meta,
)
from tests.support.peak import Peak
from tests.support.plans import uses_of
from tests.support.power_cut import Recorder
from tests.support.quick_measuring import quick_measuring  # noqa: F401  a fixture that applies by itself
from tests.support.scenes import sample
from tests.support.splitting import Call, contents, layer_files, names_in, split, steps_of

REPO = "acme/tiny"
COMPRESSIONS = [None, "4bit", "8bit"]
CUTS = [(1, 0), (2, 1), (4, 0), (4, 1), (8, 1)]
"""Ranks, and the dimension along which they cut the embedding."""

Expected = Mapping[str | None, Any]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(intermediate=256)


@pytest.fixture(scope="module")
def transformers_split(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """The split directories that the same weights give as transformers saves them, by compression."""
    root = tmp_path_factory.mktemp("transformers")
    folders = {c: write_as_transformers(root / str(c), model) for c in COMPRESSIONS}
    return {c: split(folder, compression=c) for c, folder in folders.items()}


@pytest.fixture(scope="module")
def expected(transformers_split: Mapping[str | None, Path]) -> Expected:
    return {c: layer_files(folder) for c, folder in transformers_split.items()}


def interrupted(call: Call, used: int = 1) -> Path:
    """Make the call, interrupt it after this many used ranks, and return the split directory."""

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardStarted) and event.number == used + 1:
            raise KeyboardInterrupt

    with progress.listening(listen), pytest.raises(KeyboardInterrupt):
        call.make()
    return call.find().split_folder


def records(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return the manifest's records of layers, without their shards."""
    manifest = read_manifest(folder)
    assert manifest is not None
    return {r.id: (r.stem, r.file, r.size, frozenset(r.tensors), r.crc32) for r in manifest.layers}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(("ranks", "embedding_dim"), CUTS)
@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "standard"])
def test_any_number_of_ranks_makes_the_bytes_of_safetensors(
    tmp_path: Path,
    model: Any,
    expected: Expected,
    transformers_split: Mapping[str | None, Path],
    ranks: int,
    embedding_dim: int,
    compression: str | None,
    sequential: bool,
) -> None:
    source = write_meta(tmp_path, model, ranks, embedding_dim)
    folder = split(source, compression=compression, sequential=sequential)
    assert layer_files(folder) == expected[compression]
    assert records(folder) == records(transformers_split[compression])
    assert not verify(folder).damaged
    assert names_in(source, "*.pth") == ([] if sequential else [RANK.format(rank) for rank in range(ranks)])
    assert names_in(folder, "*.pieces") == names_in(folder, "*.part") == []


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(tmp_path: Path, kv_heads: int, compression: str | None) -> None:
    llama = tiny_llama(kv_heads=kv_heads, heads=4, hidden=96, intermediate=160, vocabulary=330)
    plain = split(write_as_transformers(tmp_path / "hf", llama), compression=compression)
    for ranks in {1, min(kv_heads, 2)}:
        source = write_meta(tmp_path / str(ranks), llama, ranks, 1)
        assert layer_files(split(source, compression=compression)) == layer_files(plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    llama = tiny_llama(dtype=dtype, seed=3)
    plain = split(write_as_transformers(tmp_path / "hf", llama), compression="4bit")
    assert layer_files(split(write_meta(tmp_path / "m", llama, 2), compression="4bit")) == layer_files(plain)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tensors_larger_than_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None, ranks: int
) -> None:
    llama = tiny_llama(hidden=256, intermediate=704, vocabulary=1001 * 2, layers=1, kv_heads=4)
    plain = split(write_as_transformers(tmp_path / "hf", llama), compression=compression)
    monkeypatch.setattr("rabbitllm.splitter.plan.CHUNK_BYTES", 24_576)
    assert layer_files(split(write_meta(tmp_path / "m", llama, ranks, 1), compression=compression)) == layer_files(
        plain
    )


@pytest.mark.parametrize("way", ["transposed", "shared"])
def test_ranks_with_strided_tensors(tmp_path: Path, model: Any, expected: Expected, way: str) -> None:
    """Those of Llama 1 share storages; Q and K are then at strides of strides."""
    source = write_meta(tmp_path, model, 2)
    for rank, tensors in enumerate(ranks_of_model(model, 2)):
        if way == "transposed":
            odd = {name: t.t().contiguous().t() if t.ndim == 2 else t for name, t in tensors.items()}
        else:
            del tensors["rope.freqs"]
            whole = torch.cat([t.reshape(-1) for t in tensors.values()])
            parts = whole.split([t.numel() for t in tensors.values()])
            odd = {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}
        torch.save(odd, source / RANK.format(rank))
    assert layer_files(split(source)) == expected[None]


@pytest.mark.parametrize("missing", [True, False], ids=["missing", "shared"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_embeddings(tmp_path: Path, ranks: int, missing: bool) -> None:
    tied = tiny_llama(tie_word_embeddings=True)
    plain = split(write_as_transformers(tmp_path / "hf", tied))
    source = write_meta(tmp_path / "m", tied, ranks, 0)
    if not missing:
        for rank, tensors in enumerate(ranks_of_model(tied, ranks)):
            torch.save(tensors | {"output.weight": tensors["tok_embeddings.weight"]}, source / RANK.format(rank))
    folder = split(source)
    assert layer_files(folder) == layer_files(plain)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


# Repositories


@pytest.mark.parametrize("compression", [None, "8bit"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "standard"])
def test_a_repository(
    tmp_path: Path,
    hub_environment: HubEnvironment,
    model: Any,
    expected: Expected,
    ranks: int,
    compression: str | None,
    sequential: bool,
) -> None:
    write_meta(tmp_path / "hub" / REPO, model, ranks, 1, tokenizer=None)
    folder = split(REPO, compression=compression, sequential=sequential)
    assert layer_files(folder) == expected[compression]
    assert {"config.json", "params.json"} <= {*names_in(folder)}
    assert bool(names_in(hub_environment.cache, "**/*.pth")) == (not sequential)
    assert split(REPO, compression=compression, sequential=sequential) == folder


def test_a_repository_is_not_streamed(tmp_path: Path, hub_environment: HubEnvironment, model: Any) -> None:
    write_meta(tmp_path / "hub" / REPO, model, 2)
    with pytest.raises(OptionError, match="shard_transfer='stream' is not possible"):
        split(REPO, shard_transfer="stream")


def test_wrong_byte_from_the_hub(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, model: Any, expected: Expected
) -> None:
    served = write_meta(tmp_path / "hub" / REPO, model, 2)
    local_hub.faults = Faults(only=RANK.format(1), flip_byte=(served / RANK.format(1)).stat().st_size // 2)
    with pytest.raises(HubError, match="arrived with sha256"):
        split(REPO)
    local_hub.faults = Faults()
    assert layer_files(split(REPO)) == expected[None]


def test_missing_ranks_are_fetched(
    tmp_path: Path, hub_environment: HubEnvironment, model: Any, expected: Expected
) -> None:
    served = write_meta(tmp_path / "hub" / REPO, model, 4)
    source = tmp_path / "local"
    shutil.copytree(served, source)
    (source / RANK.format(1)).unlink()
    (source / RANK.format(3)).unlink()
    assert layer_files(split(source, repo_id=REPO)) == expected[None]


# Going on


@pytest.mark.parametrize("compression", ["4bit", pytest.param("8bit", marks=pytest.mark.long)])
@pytest.mark.long
def test_killed_at_some_steps(
    tmp_path: Path, model: Any, expected: Expected, crash_server: CrashServer, compression: str
) -> None:
    original = write_meta(tmp_path / "original", model, 2, 1)
    folder = tmp_path / "model"
    call = Call(str(folder), compression=compression)
    shutil.copytree(original, folder)
    steps = steps_of(call)
    for death in sample(steps, 5):
        shutil.rmtree(folder)
        shutil.copytree(original, folder)
        assert crash_server.run(call, death) == KILLED
        split_folder = call.make()
        assert layer_files(split_folder) == expected[compression]
        assert (
            names_in(split_folder, "*.part")
            == names_in(split_folder, "*.journal")
            == names_in(split_folder, "*.pieces")
            == []
        )


def count_deaths(tmp_path: Path, call: Call, original: Path, expected: dict[str, bytes], every: int) -> int:
    """Let the call die at every n-th step, each time on a fresh copy, and resume it; return the number of deaths."""
    folder = Path(call.source)
    for deaths, index in enumerate(itertools.count(0, every)):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        with dying_at(index) as died:
            call.make()
        split_folder = call.make()
        assert layer_files(split_folder) == expected, index
        assert not verify(split_folder).damaged
        assert (
            names_in(split_folder, "*.part")
            == names_in(split_folder, "*.journal")
            == names_in(split_folder, "*.pieces")
            == []
        ), index
        if died.step is None:
            return deaths
    raise AssertionError


@pytest.mark.parametrize("compression", [None, "8bit"])
@pytest.mark.long
def test_death_while_pieces_are_joined(tmp_path: Path, model: Any, expected: Expected, compression: str | None) -> None:
    original = write_meta(tmp_path / "original", model, 2, 1)
    call = Call(str(tmp_path / "model"), compression=compression)
    assert count_deaths(tmp_path, call, original, expected[compression], 17) > 5


@pytest.mark.long
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_death_at_every_step(tmp_path: Path, compression: str | None, ranks: int) -> None:
    small = tiny_llama(layers=1, heads=3, kv_heads=3, hidden=96, intermediate=192, vocabulary=288)
    plain = layer_files(split(write_as_transformers(tmp_path / "hf", small), compression=compression))
    original = write_meta(tmp_path / "original", small, ranks, 1)
    call = Call(str(tmp_path / "model"), compression=compression)
    assert count_deaths(tmp_path, call, original, plain, 1) > 40


def test_journal_knows_used_ranks(tmp_path: Path, model: Any, expected: Expected) -> None:
    source = write_meta(tmp_path, model, 4, 1)
    interrupted(Call(str(source), compression="4bit"), used=2)
    assert names_in(source, "*.pth") == [RANK.format(2), RANK.format(3)]
    assert layer_files(split(source, compression="4bit")) == expected["4bit"]


def test_unused_rank_that_is_missing(tmp_path: Path, model: Any) -> None:
    source = write_meta(tmp_path, model, 4, 1)
    interrupted(Call(str(source)))
    (source / RANK.format(2)).unlink()
    with pytest.raises(MissingShardError, match=r"lacks 1 of the shards in its index: consolidated\.02\.pth"):
        split(source)


def test_missing_pieces(tmp_path: Path, model: Any) -> None:
    source = write_meta(tmp_path, model, 2, 1)
    folder = interrupted(Call(str(source)))
    (folder / "model.layers.0.safetensors.pieces").unlink()
    with pytest.raises(rabbitllm.errors.IncompleteSplitError, match=r"layers\.0\.safetensors is missing"):
        split(source)


def test_journal_keeps_views_and_pieces(tmp_path: Path, model: Any) -> None:
    source = write_meta(tmp_path, model, 2, 1)
    folder = interrupted(Call(str(source)))
    replayed = journal.replay(folder)
    assert replayed is not None
    metadata = LocalCheckpoint(source, known_shards=[RANK.format(0), RANK.format(1)]).metadata(RANK.format(1))
    assert metadata is not None
    kept: tuple[TensorSpec, ...] = replayed.plan.shards[1].tensors
    assert set(kept) == set(metadata.header.tensors)
    assert any(tensor.view is not None and tensor.piece is not None for tensor in kept)


def test_rank_of_another_model(tmp_path: Path, model: Any) -> None:
    source = write_meta(tmp_path, model, 2)
    other = write_meta(tmp_path / "other", tiny_llama(intermediate=256, seed=8), 2)
    interrupted(Call(str(source)))
    shutil.copy(other / RANK.format(1), source / RANK.format(1))
    with pytest.raises(SplitMismatchError, match=r"its shard consolidated\.01\.pth has other contents"):
        split(source)


def test_finished_split_is_found_again(tmp_path: Path, model: Any) -> None:
    for sequential in (True, False):
        source = write_meta(tmp_path / str(sequential), model, 2)
        folder = split(source, sequential=sequential)
        before = contents(folder)
        changed: list[Any] = []
        with observe_steps(changed.append):
            assert split(source, sequential=sequential) == folder
        assert contents(folder) == before
        assert changed == []
    (source / RANK.format(0)).unlink()  # one alone is no whole checkpoint, and is compared all the same
    assert split(source, sequential=False) == folder


def test_delete_original(tmp_path: Path, model: Any, expected: Expected) -> None:
    source = write_meta(tmp_path, model, 2, tokenizer=tiktoken_file(0))
    with pytest.raises(InvalidIndexError, match=r"tokenizer\.model has 512 tokens, the weights have 320"):
        split(source, delete_original=True)
    (source / "tokenizer.model").unlink()
    assert layer_files(split(source, sequential=False, delete_original=True)) == expected[None]
    assert names_in(source) == ["params.json", "splitted_model"]


@pytest.mark.parametrize("left", [1, 3])
def test_originals_left_by_a_crash_are_deleted(tmp_path: Path, left: int) -> None:
    """All ranks have all norms; those of a rank are taken to be copies as long as the rank with the others is there."""
    source = write_meta(tmp_path, tiny_llama(), 4)
    call = Call(str(source), sequential=False, delete_original=True)
    deleted = itertools.count()

    def die(step: Step) -> None:
        if step.kind == "unlink" and step.path.suffix == ".pth" and next(deleted) == 4 - left:
            raise KeyboardInterrupt

    with observe_steps(die), pytest.raises(KeyboardInterrupt):
        call.make()
    assert len(names_in(source, "*.pth")) == left
    call.make()
    assert names_in(source, "*.pth") == []


@pytest.mark.parametrize("compression", [None, "8bit"])
def test_repair(tmp_path: Path, model: Any, expected: Expected, compression: str | None) -> None:
    source = write_meta(tmp_path, model, 2, 1)
    folder = split(source, compression=compression, sequential=False)
    (folder / "model.layers.1.safetensors").write_bytes(b"damaged")
    manifest = read_manifest(folder)
    assert manifest is not None
    prepare.repair_split(folder, manifest, {"layers.1"}, source)
    assert layer_files(folder) == expected[compression]
    assert not verify(folder).damaged


def test_rank_that_changes_during_the_split(tmp_path: Path, model: Any) -> None:
    source = write_meta(tmp_path, model, 2)
    other = tmp_path / "other"
    torch.save(dict(reversed(ranks_of_model(model, 2)[1].items())), other)

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone) and event.number == 1:
            (source / RANK.format(1)).write_bytes(other.read_bytes())

    with progress.listening(listen), pytest.raises(CorruptShardError, match="differs from the planned"):
        split(source)


# Plans


LARGE: dict[str, Any] = {"layers": 6, "hidden": 512, "intermediate": 1408, "vocabulary": 2048}
BOOKKEEPING = 64 * 1024


def every_peak() -> Iterator[Any]:
    """By default one compression of a folder, and another of a repository."""
    for hub, at_once in ((False, "4bit"), (True, "8bit")):
        for compression in COMPRESSIONS:
            name = f"{'hub' if hub else 'local'}-{compression}"
            yield pytest.param(hub, compression, id=name, marks=() if compression == at_once else pytest.mark.long)


@pytest.mark.parametrize(("hub", "compression"), [*every_peak()])
def test_disk_peak_equals_the_plan(
    tmp_path: Path, hub_environment: HubEnvironment, compression: str | None, hub: bool
) -> None:
    """At most the planned peak, and less only by rounding: pieces, the largest rank, and one joined layer."""
    source = write_meta(tmp_path / ("hub" if hub else "x") / REPO, tiny_llama(**LARGE), 4, 1)
    call = Call(REPO if hub else str(source), compression=compression)
    if hub:
        call = dataclasses.replace(call, max_disk=uses_of(call)[ShardTransfer.FILE].created)
    folder = call.find().split_folder
    peak = Peak(folder) if hub else Peak(source)
    assert peak.during(call) == folder
    assert peak.most <= peak.predicted + BOOKKEEPING
    assert peak.most >= peak.predicted * 0.8
    plan = rabbitllm.plan(call.source, compression=compression)
    outlook = plan.at(compression)
    assert outlook is not None
    assert outlook.output_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_planned_need_fits_and_less_is_refused(tmp_path: Path) -> None:
    source = write_meta(tmp_path, tiny_llama(**LARGE), 4, 1)
    before = contents(tmp_path)
    foreseen = rabbitllm.plan(source, compression="8bit").at("8bit")
    assert foreseen is not None
    route = next(route for route in foreseen.routes if route.name == "sequential_file")
    with pytest.raises(NotEnoughSpaceException):
        split(source, compression="8bit", max_disk=route.created_bytes - 1)
    assert contents(tmp_path) == before
    assert split(source, compression="8bit", max_disk=route.created_bytes)


def test_plan_of_a_repository_fetches_no_weights(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    served = write_meta(tmp_path / "hub" / REPO, tiny_llama(**LARGE), 4, 1, tokenizer=tiktoken_file())
    plan = rabbitllm.plan(REPO, compression="4bit", bandwidth="12MB")
    assert plan.choice is not None
    assert plan.anatomy is not None
    assert plan.anatomy.tensors == 3 + 9 * LARGE["layers"]
    assert plan.warnings == ()
    assert names_in(hub_environment.cache, "**/*.pth") == []
    assert all((served / RANK.format(rank)).stat().st_size > 256 << 10 for rank in range(4))


# What is refused


def test_missing_ranks_are_named(tmp_path: Path, hub_environment: HubEnvironment, model: Any) -> None:
    source = write_meta(tmp_path / "hub" / REPO, model, 4)
    (source / RANK.format(2)).unlink()
    before = contents(source)
    for named in (str(source), REPO):
        with pytest.raises(MissingShardError, match=r"lacks consolidated\.02\.pth; found consolidated\.00\.pth, "):
            split(named)
    (source / RANK.format(3)).unlink()
    with pytest.raises(MissingShardError, match=r"one of 4 ranks .* found 2: consolidated\.02\.pth, consolid"):
        split(source)
    assert contents(source).keys() == before.keys() - {RANK.format(3)}


def test_ranks_of_two_models(tmp_path: Path, model: Any) -> None:
    source = write_meta(tmp_path, model, 2)
    other = write_meta(tmp_path / "other", tiny_llama(intermediate=256, dtype=torch.float16), 2)
    shutil.copy(other / RANK.format(1), source / RANK.format(1))
    with pytest.raises(InvalidIndexError, match=r"do not belong together: consolidated\.00\.pth has BF16 .* has F16"):
        split(source)
    assert names_in(source, "*.pth") == [RANK.format(0), RANK.format(1)]


def test_safetensors_in_the_same_folder_are_preferred(tmp_path: Path, model: Any, expected: Expected) -> None:
    source = write_meta(tmp_path, tiny_llama(seed=5), 2)
    write_as_transformers(source, model)
    assert layer_files(split(source, delete_original=True)) == expected[None]
    assert names_in(source, "*.pth") == [RANK.format(0), RANK.format(1)]
    assert params_of(model)["dim"] == 64


def test_plan_of_an_interrupted_split(tmp_path: Path, model: Any) -> None:
    source = write_meta(tmp_path, model, 4, 1)
    interrupted(Call(str(source), compression="8bit"), used=2)
    foreseen = rabbitllm.plan(source, compression="8bit").at("8bit")
    assert foreseen is not None
    assert (foreseen.state, foreseen.shards_used, foreseen.shards, foreseen.obstacle) == ("unfinished", 2, 4, None)
    assert foreseen.routes


def test_model_loads_while_half_of_its_ranks_are_used(tmp_path: Path, model: Any) -> None:
    source = write_meta(tmp_path, model, 4, 1)
    (source / "config.json").write_text('{"downloads": 7}')
    interrupted(Call(str(source)), used=2)
    for _ in range(2):
        loaded = rabbitllm.AutoModel.from_pretrained(source, device="cpu", sequential_shard_processing=True)
        assert not loaded.unused_tensors
    assert names_in(source, "*.pth") == []


# A power cut: what was not synced may be gone


def cut_the_power(
    folder: Path, original: Path, call: Call, expected: dict[str, bytes], crash: int | None, cuts: int
) -> int:
    """Record the call, or a crashed call and a second one, and resume from each state that a power cut may leave.

    Returns:
        How many steps the last of the calls took.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    recorder = Recorder(folder)
    if crash is not None:
        with dying_at(crash, recorder):
            call.make()
    begin = len(recorder.steps)
    with observe_steps(recorder):
        call.make()
    for index in sample(len(recorder.steps) + 1 - begin, cuts):
        for kept in ("", "unlink"):  # nothing that is uncertain; or of that only what was deleted
            shutil.rmtree(folder)
            folder.mkdir()
            recorder.rebuild(folder, begin + index, lambda step, kept=kept: step.kind == kept)  # type: ignore[misc]
            split_folder = call.make()
            assert layer_files(split_folder) == expected, (crash, index, kept)
            assert not verify(split_folder).damaged
            assert names_in(split_folder, "*.part") == names_in(split_folder, "*.pieces") == []
    return len(recorder.steps) - begin


@pytest.fixture(scope="module")
def small() -> Any:
    return tiny_llama(layers=1, heads=2, kv_heads=2, hidden=64, intermediate=128, vocabulary=128)


@pytest.mark.parametrize("compression", ["8bit", pytest.param(None, marks=pytest.mark.long)])
def test_power_cut(tmp_path: Path, small: Any, compression: str | None) -> None:
    expected = layer_files(split(write_as_transformers(tmp_path / "hf", small), compression=compression))
    original = write_meta(tmp_path / "original", small, 2, 1)
    call = Call(str(tmp_path / "model"), compression=compression)
    steps = cut_the_power(tmp_path / "model", original, call, expected, None, 16)
    for crash in sample(steps, 4):
        cut_the_power(tmp_path / "model", original, call, expected, crash, 4)


@pytest.mark.long
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_power_cut_at_every_step(tmp_path: Path, small: Any, compression: str | None) -> None:
    expected = layer_files(split(write_as_transformers(tmp_path / "hf", small), compression=compression))
    original = write_meta(tmp_path / "original", small, 2, 1)
    call = Call(str(tmp_path / "model"), compression=compression)
    steps = cut_the_power(tmp_path / "model", original, call, expected, None, 10**6)
    for crash in range(0, steps, 3):
        cut_the_power(tmp_path / "model", original, call, expected, crash, 6)
