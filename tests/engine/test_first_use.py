"""Mapped weights are prefetched before the first pass; a flipped bit is an error before a result is returned."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import random
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rabbitllm.base.options import RunOptions
from rabbitllm.engine import _first_use
from rabbitllm.engine._first_use import PIECE_BYTES, ReadAhead
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.span_reader import FileSpan
from rabbitllm.errors import HostsError, IncompleteSplitError
from rabbitllm.generation.scoring import ScoredText, score
from rabbitllm.lazy.load import lazy_load
from rabbitllm.models.convert import convert
from rabbitllm.storage.files import HUGE_PAGE, PositionalFile
from rabbitllm.store import checksums
from rabbitllm.store.layer_store import LayerStore
from tests.engine.test_span_reader import Folder, _cached_pages
from tests.generation.together import prompts, together
from tests.support.builders import build_checkpoint
from tests.support.commands import invoke
from tests.support.fake_gpu import FakeGpu
from tests.support.spread_models import spread
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself
from tests.support.tiny_models import ALL, INPUT, budget_that_keeps, load, run, split, tiers


def dropped(path: Path) -> Path:
    os.sync()
    with PositionalFile(path) as file:
        file.drop_cache(0, file.size())
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="mincore, posix_fadvise")
def test_files_are_prefetched_into_the_page_cache(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(os.urandom(2 * PIECE_BYTES + 4096))
        dropped(path)
    before = sum(map(_cached_pages, paths))
    spans = {path.name: [FileSpan(path.name, 0, path.stat().st_size, 0)] for path in paths}
    ahead = ReadAhead(spans, Folder(tmp_path))
    for thread in ahead.threads:
        thread.join(600)
    deadline = time.monotonic() + 600
    while sum(map(_cached_pages, paths)) < 2 * (2 * PIECE_BYTES // 4096 + 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(map(_cached_pages, paths)) == 2 * (2 * PIECE_BYTES // 4096 + 1) > before


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages, smaps")
@pytest.mark.parametrize("is_of_experts", [False, True])
def test_layer_files_are_cached_in_huge_pages(tmp_path: Path, is_of_experts: bool) -> None:
    size = 4 * HUGE_PAGE + 4096
    able, path = (tmp_path / name for name in ("able", "layer"))
    for file in (able, path):
        file.write_bytes(os.urandom(size))
        dropped(file)
    with able.open("rb") as control, mmap.mmap(control.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ) as pages:
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
            pages.madvise(22)  # MADV_POPULATE_READ
        except OSError:
            pytest.skip("this system has no huge pages, or no such advice")
        if not _in_huge_pages(able):
            pytest.skip("this file system's cache has no huge pages")
    with path.open("rb") as file:
        assert file.read(4096)  # as headers are
    span = FileSpan(path.name, 4096, size - 4096, 0)
    units, experts = ({}, [span]) if is_of_experts else ({"unit": [span]}, [])
    ahead = ReadAhead(units, Folder(tmp_path), experts=experts)
    for thread in ahead.threads:
        thread.join(600)
    with PositionalFile(path) as file:
        pages = file.map_privately()
    assert pages.tobytes() == path.read_bytes()
    assert _in_huge_pages(path) >= 2 * HUGE_PAGE


def _in_huge_pages(path: Path) -> int:
    """Bytes of a mapped file."""
    mapping, total = "", 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        mapping = line if "-" in line.split()[0] else mapping
        if line.startswith("FilePmdMapped") and mapping.endswith(str(path)):
            total += 1024 * int(line.split()[1])
    return total


def test_missing_files_are_ignored(tmp_path: Path) -> None:
    ahead = ReadAhead({"unit": [FileSpan("none", 0, 10, 0)]}, Folder(tmp_path))
    (thread,) = ahead.threads
    thread.join(600)
    assert not thread.is_alive()


def test_no_more_units_are_read_of_what_was_dropped(tmp_path: Path) -> None:
    asked, begun, dropped_it = list[str](), threading.Event(), threading.Event()

    class Slow(Folder):
        def path(self, file: str) -> Path:
            asked.append(file)
            begun.set()
            dropped_it.wait(600)
            return super().path(file)

    ahead = ReadAhead({name: [FileSpan(name, 0, 10, 0)] for name in "abc"}, Slow(tmp_path))
    (thread,) = ahead.threads
    begun.wait(600)
    del ahead
    dropped_it.set()
    thread.join(600)
    assert asked == ["a"]


def test_streamed_units_and_the_embedding_are_not_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = _first_use._prefetch

    def note(units: Any, *more: Any) -> None:
        asked.extend(span.file for spans in units.values() for span in spans)
        ask(units, *more)

    monkeypatch.setattr(_first_use, "_prefetch", note)
    directory = split(build_checkpoint(tmp_path / "model", "llama"))
    whole = load(directory)
    layers = [f"model.layers.{index}" for index in range(3)]
    assert [name.removesuffix(".safetensors") for name in asked] == [*layers, "model.norm", "lm_head"]
    asked.clear()
    half = load(directory, sum(placed.stored for placed in whole.placement.units) // 2)
    kept = [unit for unit, tier in tiers(half).items() if tier is Tier.RESIDENT and unit != "model.embed_tokens"]
    assert [name.removesuffix(".safetensors") for name in asked] == kept
    assert run(half, INPUT).logits is not None


def test_experts_are_read_behind_the_units_if_all_are_resident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert once, until the model is dropped."""
    asked, ask = list[Any](), _first_use._prefetch
    monkeypatch.setattr(_first_use, "_prefetch", lambda *more: asked.append(more) or ask(*more))
    directory = split(build_checkpoint(tmp_path / "model", "qwen3_moe", **MANY))
    model = load(directory)
    ((*_, spans, _, stop),) = asked
    assert [span.file for span in spans] == [f"model.layers.{index}.safetensors" for index in range(3)]
    for span, layer in zip(spans, model.model.layers, strict=True):
        assert sum(value.nbytes for value in layer.mlp.experts.parameters()) <= span.nbytes
        assert span.offset + span.nbytes <= (directory / span.file).stat().st_size
    assert not stop.is_set()
    del model, layer
    gc.collect()
    assert stop.is_set()
    half = load(directory, budget_that_keeps(directory, 0.5))
    assert half.placement.pools
    assert asked[-1][-3] == []
    copied = load(directory, dtype="bfloat16")  # memory has room for the copies, but perhaps not for the files too
    assert {placed.tier for placed in copied.placement.experts} == {Tier.RESIDENT}
    assert asked[-1][-3] == []


BLOCK = 4096
FLIPS = 12
"""In each case."""
MANY = {"num_experts": 24, "num_experts_per_tok": 3}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a tiny layer file have many of them."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(checksums, "OWN_BLOCK_BYTES", BLOCK)


def on_gpu(folder: Path, budget: int, host: int, **options: Any) -> Any:
    gpu = FakeGpu(0)
    limits = {gpu.name: budget, "cpu": host}
    return load_model(folder, RunOptions(max_memory=limits, show_progress=False, **options), None, [gpu])


def half_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 2


Load = Callable[..., Any]
"""Options -> a model."""
PLACES: dict[str, Callable[[Path], Load]] = {
    "resident": lambda folder: partial(load, folder, ALL),
    "half": lambda folder: partial(load, folder, half_of(folder)),
    "streamed": lambda folder: partial(load, folder, 0),
    "routed": lambda folder: partial(load, folder, budget_that_keeps(folder, 0.25)),
    "by codes": lambda folder: partial(load, folder, ALL, exact=False),
    "gpu": lambda folder: partial(on_gpu, folder, ALL, 0),
    "gpu, page-locked": lambda folder: partial(on_gpu, folder, 0, ALL),
    "gpu, streamed": lambda folder: partial(on_gpu, folder, 0, 0),
}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "tied": ("llama", {"tied": True}),
    "experts": ("qwen3_moe", MANY),
    "fused experts": ("gpt_oss", {}),
}


@dataclass(frozen=True)
class Flip:
    """A bit of a layer file."""

    path: Path
    at: int
    what: str

    def __enter__(self) -> Flip:
        self._turn()
        return self

    def __exit__(self, *exception: object) -> None:
        self._turn()

    def _turn(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.at)
            byte = file.read(1)[0]
            file.seek(self.at)
            file.write(bytes([byte ^ 0x40]))


def flips(folder: Path, count: int, case: str) -> list[Flip]:
    """`count` flips in different kinds of bytes: headers, and parts of tensors by their names without numbers."""
    chance = random.Random(case)
    kinds: dict[str, list[Flip]] = {}
    store = LayerStore(folder)
    for path in sorted(folder.glob("*.safetensors")):
        header = store.mapped(path.name).header
        kinds.setdefault("header", []).append(Flip(path, chance.randrange(header.data_start), "header"))
        for part in header.tensors:
            part_name = ".".join(piece for piece in part.name.split(".") if not piece.isdigit())
            offset = part.offset + chance.choice([0, part.nbytes - 1, chance.randrange(part.nbytes)])
            kinds.setdefault(part_name, []).append(Flip(path, offset, part.name))
    return [chance.choice(kinds[part_name]) for part_name in chance.sample(sorted(kinds), min(count, len(kinds)))]


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(INPUT.to(model.device)).logits.cpu()


def outcome(make: Callable[[], Any]) -> Any:
    """The logits, or the error."""
    try:
        return logits(make())
    except Exception as error:
        return error


CASES = [
    *((kind, compression, "resident") for kind in KINDS for compression in (None, "4bit")),
    *((kind, None, place) for kind in ("dense", "tied") for place in ("half", "streamed")),
    *(("dense", compression, place) for compression in ("8bit", "4bit-double") for place in ("by codes", "streamed")),
    *(("experts", compression, "routed") for compression in (None, "4bit", "8bit", "4bit-double")),
    *(("experts", compression, "by codes") for compression in ("4bit", "4bit-double")),
    *(("fused experts", compression, "routed") for compression in (None, "4bit")),
    *(("dense", compression, place) for compression in (None, "4bit") for place in PLACES if place.startswith("gpu")),
    *(("experts", None, place) for place in PLACES if place.startswith("gpu")),
]


@pytest.mark.parametrize(("model_name", "compression", "place"), CASES)
def test_flipped_bit_is_an_error_or_unused(
    tmp_path: Path, model_name: str, compression: str | None, place: str
) -> None:
    family, settings = KINDS[model_name]
    checkpoint = build_checkpoint(tmp_path / "model", family, shards=2, dtype=torch.bfloat16, **settings)
    folder = split(checkpoint, compression)
    load_so = PLACES[place](folder)
    sound = logits(load_so())
    for flip in flips(folder, FLIPS, f"{model_name} {compression} {place}"):
        with flip:
            without = outcome(partial(load_so, verify_checksums=False))
            answer = outcome(load_so)
        if isinstance(answer, IncompleteSplitError):
            assert flip.path.name in answer.problem, flip
            assert f"rabbitllm verify {folder} --repair" in answer.remedy
            continue
        assert not isinstance(answer, Exception), flip
        assert torch.equal(answer, sound), flip  # it was in a row, or an expert, that nothing asked for
        assert torch.equal(without, sound), flip
        assert model_name != "dense" or flip.what.startswith("model.embed_tokens.weight"), flip
    assert torch.equal(logits(load_so()), sound)


def flip_in(folder: Path, name: str, part: int = 0, offset: int = 1) -> Flip:
    """A high bit of a stored part of a tensor, by default of its first value."""
    spec = LayerStore(folder).tensors[name].parts[part]
    return Flip(folder / spec.file, spec.offset + offset, name)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return split(build_checkpoint(tmp_path / "model", "llama", shards=2, dtype=torch.bfloat16))


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("budget", [ALL, 0])
def test_damage_is_an_error_only_with_the_option(dense: Path, budget: int) -> None:
    sound = logits(load(dense, budget))
    with flip_in(dense, DOWN):
        assert not torch.equal(logits(load(dense, budget, verify_checksums=False)), sound)
        with pytest.raises(IncompleteSplitError, match=r"model.layers.1.safetensors is damaged: .*down_proj"):
            logits(load(dense, budget))


@pytest.mark.parametrize("budget", [ALL, 0])
def test_every_call_of_a_damaged_model_is_an_error(dense: Path, budget: int) -> None:
    with flip_in(dense, DOWN):
        model = load(dense, budget)
        for _ in range(2):
            with pytest.raises(IncompleteSplitError, match="is damaged"):
                model.generate(INPUT, max_new_tokens=1)
        with pytest.raises(IncompleteSplitError, match="is damaged"):
            model.model.layers[1](torch.zeros(1, 1, 64, dtype=torch.bfloat16))


def test_bytes_are_compared_that_are_not_read_ahead(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass waits for the comparison without end, and that for what is read."""

    def refuse(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(PositionalFile, "read_in_huge_pages", refuse)
    store = LayerStore(dense, verify_checksums=True)
    down = store.tensors[DOWN].parts[0]
    with flip_in(dense, DOWN):
        ahead = ReadAhead({"unit": [FileSpan(down.file, down.offset, down.nbytes, 0)]}, store, store.checks)
        ahead.threads[0].join(600)
        with pytest.raises(IncompleteSplitError, match="is damaged"):
            ahead._checked["unit"].result(240)


def test_damage_is_an_error_of_a_layer_without_its_model(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out of the comparison of what is still used."""
    begin, compare = threading.Event(), _first_use._compare

    def late(*more: Any) -> None:
        begin.wait()
        compare(*more)

    monkeypatch.setattr(_first_use, "_compare", late)
    with flip_in(dense, DOWN):
        model = load(dense)
        owner, layer = weakref.ref(model), model.model.layers[1]
        del model
        gc.collect()
        begin.set()
        assert owner() is None
        with pytest.raises(IncompleteSplitError, match=r"is damaged: .*down_proj"):
            layer(torch.zeros(1, 1, 64, dtype=torch.bfloat16))


def test_hooks_are_removed_after_the_comparison(dense: Path) -> None:
    model = load(dense)
    logits(model)
    assert not any(module._forward_pre_hooks for module in (*model.model.layers, model.model.norm, model.lm_head))
    unchecked = load(dense, verify_checksums=False)
    assert not any(module._forward_pre_hooks for module in (unchecked.model.embed_tokens, *unchecked.model.layers))


def test_second_load_compares_no_bytes(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for budget in (ALL, 0):
        logits(load(dense, budget))
    read: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(checksums._FileChecks, "_crc", lambda self, begin, *more, **options: read.append(begin) or 0)
        logits(load(dense))
    assert read == []
    with flip_in(dense, DOWN), pytest.raises(IncompleteSplitError, match=r"is damaged: .*down_proj"):
        logits(load(dense))  # the file is another one now


def test_weights_changed_in_memory_are_not_damage(dense: Path) -> None:
    """An adapter may be merged before the first pass; what is compared is the file."""
    model = load(dense, verify_checksums=False)
    changed = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        changed.zero_()
    expected = logits(model)
    model = load(dense)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("budget", [ALL, 0])
def test_rows_of_an_embedding(tmp_path: Path, compression: str | None, budget: int) -> None:
    checkpoint = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    folder = split(checkpoint, compression)
    with flip_in(folder, "model.embed_tokens.weight"):  # row 0
        model = load(folder, budget)
        ids = torch.tensor([[200, 201, 250]])
        with torch.inference_mode():
            if compression is None or budget == 0:
                model(ids)
            with pytest.raises(IncompleteSplitError, match=r"embed_tokens.safetensors is damaged: .*embed_tokens"):
                model(torch.tensor([[200, 0]]))


def test_resident_experts_are_compared_behind_the_units(tmp_path: Path) -> None:
    """Then each computes without its hooks, also those that were not used."""
    folder = split(build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **MANY))
    model, checks = load(folder), LayerStore(folder).checks
    assert checks is not None
    layers = [f"model.layers.{index}.safetensors" for index in range(3)]
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join(600)
    assert all(map(checks.is_done, layers))
    experts = [layer.mlp.experts for layer in model.model.layers]
    assert all(each._forward_hooks and each._forward_pre_hooks for each in experts)
    logits(model)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in experts)


@pytest.mark.skipif(sys.platform != "linux", reason="pagemap")
@pytest.mark.parametrize("is_of_experts", [False, True])
def test_pages_are_in_the_tables_of_the_process(tmp_path: Path, is_of_experts: bool) -> None:
    path = tmp_path / "layer"
    path.write_bytes(os.urandom(HUGE_PAGE + 3 * 4096))
    span = FileSpan(path.name, 4096, HUGE_PAGE + 4096, 0)
    store, units, experts = Folder(tmp_path), *(({}, [span]) if is_of_experts else ({"unit": [span]}, []))
    memory = store.mapped(path.name).whole()
    assert not any(_in_tables(memory))
    store.mapped = lambda name: SimpleNamespace(whole=lambda: memory)  # type: ignore[assignment, method-assign]
    ahead = ReadAhead(units, store, experts=experts)
    for thread in ahead.threads:
        thread.join(600)
    pages = _in_tables(memory)
    assert all(pages[1:-1])


def _in_tables(memory: memoryview) -> list[bool]:
    """Of each page whether an access is no fault (Documentation/admin-guide/mm/pagemap.rst)."""
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    first, last = address // mmap.PAGESIZE, -(-(address + len(memory)) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as table:
        entries = array("Q", os.pread(table.fileno(), 8 * (last - first), 8 * first))
    return [bool(entry >> 63) for entry in entries]


def test_unused_experts_are_not_compared(tmp_path: Path) -> None:
    folder = split(build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **MANY))
    model = load(folder)
    assert not model.placement.pools
    used: set[int] = set()
    experts = model.model.layers[1].mlp.experts
    handle = experts.register_forward_pre_hook(lambda module, args: used.update(args[1].flatten().tolist()))
    sound = logits(model)
    handle.remove()
    unused = next(expert for expert in range(24) if not {expert - 1, expert, expert + 1} & used)
    for expert, damaged in ((unused, False), (min(used), True)):
        with flip_in(folder, f"model.layers.1.mlp.experts.{expert}.up_proj.weight"):
            if damaged:
                with pytest.raises(IncompleteSplitError, match=rf"experts.{expert}.up_proj"):
                    logits(load(folder))
            else:
                assert torch.equal(logits(load(folder)), sound)


def without_blocks(folder: Path) -> Path:
    """The manifest as an earlier version wrote it."""
    path = folder / "split.json"
    content = json.loads(path.read_text())
    for layer in content["layers"]:
        del layer["blocks"]
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("place", ["resident", "half", "streamed", "by codes", "gpu", "gpu, page-locked"])
def test_split_of_an_earlier_version(tmp_path: Path, compression: str | None, place: str) -> None:
    """Files are compared whole; rows of the embedding are not."""
    checkpoint = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    folder = without_blocks(split(checkpoint, compression))
    load_so = PLACES[place](folder)
    sound = logits(load_so())
    for name in (DOWN, "model.norm.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight"):
        with flip_in(folder, name), pytest.raises(IncompleteSplitError, match=r"safetensors is damaged: its checksum"):
            logits(load_so())
    rows = compression is None or place in ("half", "streamed", "gpu", "gpu, page-locked")
    with flip_in(folder, "model.embed_tokens.weight"):
        answer = outcome(load_so)
    assert isinstance(answer, IncompleteSplitError) or (rows and torch.equal(answer, sound))


def test_split_is_repaired_and_loaded_in_the_same_process(dense: Path, tmp_path: Path) -> None:
    sound = logits(load(dense))
    flip_in(dense, DOWN).__enter__()
    with pytest.raises(IncompleteSplitError) as caught:
        logits(load(dense))
    assert f"verify {dense} --repair" in caught.value.remedy
    command = ["verify", str(dense), "--repair", "--original", str(tmp_path / "model")]
    invoke(*command)
    assert torch.equal(logits(load(dense)), sound)


@pytest.mark.parametrize("budget", [ALL, 0])
def test_shared_passes(dense: Path, budget: int) -> None:
    with flip_in(dense, DOWN), pytest.raises(IncompleteSplitError, match="is damaged"):
        together(load(dense, budget), prompts())


@pytest.mark.parametrize("budget", [ALL, 0])
def test_scoring(dense: Path, budget: int) -> None:
    texts = [ScoredText(0, (5, 6, 7), (8, 9)), ScoredText(1, (5, 6), (1,))]
    with flip_in(dense, DOWN), pytest.raises(IncompleteSplitError, match="is damaged"):
        list(score(load(dense, budget), texts))


def test_layers_on_another_host(dense: Path) -> None:
    budget = half_of(dense)
    with flip_in(dense, "model.layers.2.mlp.down_proj.weight"), spread(dense, (budget, budget)) as (model, crew):
        assert crew.workers[0].span.end == 3
        with pytest.raises(
            HostsError, match=r"could not compute its layers: .*layers.2.safetensors is damaged"
        ) as caught:
            logits(model)
    assert f"rabbitllm verify {dense} --repair" in caught.value.remedy


@pytest.mark.parametrize("budget", [ALL, 0])
def test_saving_a_damaged_model(dense: Path, tmp_path: Path, budget: int) -> None:
    model = load(dense, budget)
    with flip_in(dense, DOWN), pytest.raises(IncompleteSplitError, match="is damaged"):
        load(dense, 0).save_pretrained(tmp_path / "copy")
    assert not list((tmp_path / "copy").glob("*.json"))
    model.save_pretrained(tmp_path / "sound")


USES: dict[str, Callable[[Any], Any]] = {
    "read": lambda tensor: tensor.read(),
    "copied": lambda tensor: torch.empty(tensor.shape, dtype=torch.bfloat16).copy_(tensor),
    "a row": lambda tensor: tensor[0],
    "computed": lambda tensor: tensor * 2,
    "a parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("use", USES)
def test_lazy_tensors(dense: Path, use: str, mapped: bool) -> None:
    with flip_in(dense, DOWN):
        for path in (dense, dense / "model.layers.1.safetensors"):
            with lazy_load(path, mapped=mapped) as weights:
                with pytest.raises(IncompleteSplitError, match=r"is damaged: .*down_proj"):
                    USES[use](weights[DOWN])
                weights["model.layers.1.mlp.up_proj.weight"].read()
            with lazy_load(path, mapped=mapped, verify_checksums=False) as weights:
                USES[use](weights[DOWN])


def test_modified_lazy_tensors_are_not_damage(dense: Path) -> None:
    with lazy_load(dense) as weights:
        norm = weights["model.layers.1.input_layernorm.weight"]
        norm.zero_()  # in the block of other small tensors
        assert weights["model.layers.1.post_attention_layernorm.weight"].read().numel() == 64
        assert not norm.any()


def every_tensor(weights: Any) -> None:
    for tensor in weights.values():
        tensor.read()


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "convert": lambda folder, out: convert(folder, out / "new"),
    "convert to GGUF": lambda folder, out: convert(folder, out / "new.gguf", to="gguf"),
    "save": lambda folder, out: load(folder, ALL).save_pretrained(out / "new"),
    "save what is streamed": lambda folder, out: load(folder, 0).save_pretrained(out / "new"),
    "state_dict": lambda folder, out: load(folder, ALL).state_dict(),
    "lazy_load": lambda folder, out: every_tensor(lazy_load(folder)),
    "lazy_load, read": lambda folder, out: every_tensor(lazy_load(folder, mapped=False)),
    "lazy_load of a file": lambda folder, out: [every_tensor(lazy_load(p)) for p in folder.glob("*.safetensors")],
}
CODES = ["convert", "convert to GGUF", "save", "save what is streamed", "lazy_load of a file"]


@pytest.mark.parametrize(
    ("reader", "compression"),
    [*((name, None) for name in READERS), *((name, scheme) for name in CODES for scheme in ("8bit", "4bit"))],
)
def test_every_reader_of_a_whole_split(tmp_path: Path, reader: str, compression: str | None) -> None:
    """Each kind of byte, also the header; nothing is left that looks complete, and the repaired split can be read."""
    checkpoint = build_checkpoint(tmp_path / "model", "llama", shards=2, dtype=torch.bfloat16)
    folder, out = split(checkpoint, compression), tmp_path / "out"
    out.mkdir()
    for flip in flips(folder, 100, reader):
        with flip, pytest.raises(IncompleteSplitError) as caught:
            READERS[reader](folder, out)
        assert flip.path.name in caught.value.problem, flip
        assert f"rabbitllm verify {folder} --repair" in caught.value.remedy, flip
        names = [path.name for path in out.rglob("*") if path.is_file()]
        assert set(names) <= {"new.gguf.part", "new.gguf.progress"}, flip
    READERS[reader](folder, out)


def test_command_line(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints no answer, but does with `--no-verify-checksums`."""
    command = ["run", str(dense), "what", "--raw", "--max-new-tokens", "2", "--device", "cpu"]
    with flip_in(dense, DOWN):
        with pytest.raises(IncompleteSplitError):
            invoke(*command)
        assert not capsys.readouterr().out
        invoke(*command, "--no-verify-checksums")


@pytest.mark.parametrize("compression", ["4bit", "4bit-double"])
@pytest.mark.parametrize("name", [DOWN, "model.layers.1.mlp.experts.3.down_proj.weight"])
def test_reads_of_a_load(tmp_path: Path, compression: str, name: str) -> None:
    """The state that says how codes are to be read, at its end, where it may be blank."""
    family, settings = KINDS["experts" if "experts" in name else "dense"]
    folder = split(build_checkpoint(tmp_path / "model", family, **settings), compression)
    state = LayerStore(folder).tensors[name].parts[-1]
    with (
        flip_in(folder, name, -1, state.nbytes - 1),
        pytest.raises(IncompleteSplitError, match=r"is damaged: the checksum of"),
    ):
        load(folder)
