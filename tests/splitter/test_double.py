"""Scales that are quantized themselves: from their scratch files, and in whole splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import bitsandbytes.functional as functional
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rabbitllm import prepare
from rabbitllm.base import progress
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.quant.schemes import SCALE_BYTES
from rabbitllm.splitter import mover
from rabbitllm.splitter.mover import settled_parts
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store.checkpoint_folder import PlainReader
from rabbitllm.store.checksums import crc32_of_file
from rabbitllm.store.layer_file import SCRATCH_SUFFIX
from rabbitllm.store.layer_store import LayerStore, verify
from rabbitllm.store.manifest import read_manifest
from tests.support.builders import SINGLE_NAME, cut, llama_tensors, write_shards
from tests.support.hub_fixtures import HubEnvironment
from tests.support.meta_files import tiny_llama, write_as_transformers, write_meta
from tests.support.plans import plan_of, shard_of
from tests.support.splitting import Call, Counter, layer_files, names_in, occupied, split


def test_truncated_scratch_file(tmp_path: Path) -> None:
    plan = plan_of((shard_of("shard", {"model.layers.0.w": ("BF16", (512, 256))}),), "4bit-double")
    (form,) = plan.layouts["layers.0"].settles
    scales = np.random.default_rng(0).random(form.source.elements, np.float32).tobytes()
    scratch = tmp_path / "scratch"
    scratch.write_bytes(bytes(form.source.offset) + scales)
    runs = list(settled_parts(form, scratch))
    assert {part for part, _, _ in runs} == {0, 1, 2}
    scratch.write_bytes(bytes(form.source.offset) + scales[:-SCALE_BYTES])
    with pytest.raises(IncompleteSplitError, match=r"is truncated within the scales of 'model\.layers\.0\.w'"):
        list(settled_parts(form, scratch))


# 4bit-double by every route: scales wait for the last of them, and the bytes are those of the whole tensor.


DOUBLE = "4bit-double"
REPO = "acme/tiny"
Weights = Mapping[str, torch.Tensor]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Some tensors large enough, some only for 4bit (q, k, v, o of the last layer), some for neither."""
    small = llama_tensors(layers=3, hidden=160, vocabulary=300)
    large = llama_tensors(layers=2, hidden=192, vocabulary=300)
    kept = {name: tensor for name, tensor in small.items() if ".layers.2." in name}
    return {
        **{name: large[name] for name in list(large)[:-2]},
        **kept,
        **{name: large[name] for name in list(large)[-2:]},
    }


def reference_parts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What bitsandbytes makes of a tensor in one piece, under the names in a layer file."""
    doubled = tensor.numel() >= 32768
    if tensor.dim() < 2 or tensor.numel() < 4096:
        return {name: tensor}
    codes, state = functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4", compress_statistics=doubled)
    return {name: codes, **{f"{name}.4bit.{key}": value for key, value in state.as_dict(packed=True).items()}}


def check(folder: Path, tensors: Weights) -> None:
    """Every part in every layer file equals that of bitsandbytes; blanks may follow a state."""
    tensors_found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors_found |= load_file(path)
    expected = {key: part for name, tensor in tensors.items() for key, part in reference_parts(name, tensor).items()}
    assert tensors_found.keys() == expected.keys()
    for key, part in expected.items():
        if "quant_state" in key:
            assert bytes(tensors_found[key].numpy()).rstrip() == bytes(part.numpy())
        else:
            assert torch.equal(tensors_found[key], part), key
    assert not names_in(folder, f"*{SCRATCH_SUFFIX}")


@pytest.mark.parametrize("shards", [1, 3, 7])
def test_bytes_equal_those_of_the_whole_tensor(tmp_path: Path, tensors: Weights, shards: int) -> None:
    folder = split(write_shards(tmp_path / "model", cut(tensors, shards)), compression=DOUBLE)
    assert folder.name == "splitted_model.4bit-double"
    check(folder, tensors)
    store = LayerStore(folder)
    assert store.compression == DOUBLE
    kinds = {tensor.quantized.scheme if tensor.quantized else None for tensor in store.tensors.values()}
    assert kinds == {DOUBLE, "4bit", None}


@pytest.mark.parametrize(
    ("hub", "where"), [(False, {}), (True, {"shard_transfer": "file"}), (True, {"shard_transfer": "stream"})]
)
@pytest.mark.parametrize("sequential", [True, False])
def test_every_route_makes_the_same_bytes(
    tmp_path: Path,
    tensors: Weights,
    hub_environment: HubEnvironment,
    hub: bool,
    where: dict[str, str],
    sequential: bool,
) -> None:
    whole = write_shards(tmp_path / "whole", {SINGLE_NAME: dict(tensors)}, index=False)
    expected = layer_files(split(whole, compression=DOUBLE, sequential=False))
    source = write_shards(tmp_path / "hub" / REPO if hub else tmp_path / "model", cut(tensors, 4))
    more = where if sequential else {}
    folder = split(REPO if hub else source, compression=DOUBLE, sequential=sequential, **more)
    assert layer_files(folder) == expected


def test_runs_of_a_few_blocks_in_many_threads(
    tmp_path: Path, tensors: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rabbitllm.splitter.plan.CHUNK_BYTES", 4096)
    check(split(write_shards(tmp_path / "model", cut(tensors, 3)), compression=DOUBLE), tensors)


def test_more_scales_than_one_read(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(2100, 4096, generator=chance).bfloat16()}  # 134,400 scales
    check(split(write_shards(tmp_path / "model", {SINGLE_NAME: tensors}, index=False), compression=DOUBLE), tensors)


def test_checksums_are_those_of_the_files(tmp_path: Path, tensors: Weights) -> None:
    """They are combined from the sums of the written runs."""
    folder = split(write_shards(tmp_path / "model", cut(tensors, 3)), compression=DOUBLE)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert {record.file: record.crc32 for record in manifest.layers} == {
        path.name: crc32_of_file(path) for path in folder.glob("*.safetensors")
    }
    assert verify(folder).damaged == ()


def test_damage_is_noticed(tmp_path: Path, tensors: Weights) -> None:
    folder = split(write_shards(tmp_path / "model", cut(tensors, 3)), compression=DOUBLE)
    store = LayerStore(folder)
    stored = store.tensors["model.embed_tokens.weight"]
    offset = stored.parts[3].offset
    path = folder / stored.parts[3].file
    del store
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    assert [damage.layer for damage in verify(folder).damaged] == ["embed_tokens"]


def test_scales_are_summed_only_when_a_layer_is_complete(
    tmp_path: Path, tensors: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, seen = mover.Mover.settle, []

    def noted(self: mover.Mover, targets: object) -> None:
        target_list = list(targets)  # type: ignore[call-overload]
        seen.extend(form.source.name for target, _ in target_list for form in target.layout.settles)
        settle(self, target_list)

    monkeypatch.setattr(mover.Mover, "settle", noted)
    split(write_shards(tmp_path / "model", cut(tensors, 5)), compression=DOUBLE)
    doubled = [f"{name}.4bit.absmax" for name, tensor in tensors.items() if tensor.numel() >= 32768]
    assert sorted(seen) == sorted(doubled)


def test_scratch_file_is_durable_before_its_shard_is_deleted(tmp_path: Path, tensors: Weights) -> None:
    steps: list[Step] = []
    with observe_steps(steps.append):
        split(write_shards(tmp_path / "model", cut(tensors, 5)), compression=DOUBLE)
    scratch = [(index, step) for index, step in enumerate(steps) if step.path.name.endswith(SCRATCH_SUFFIX)]
    assert {"create", "write", "sync", "unlink"} <= {step.kind for _, step in scratch}
    for index, step in enumerate(steps):
        if step.kind == "unlink" and step.path.name.startswith("model-0000"):
            begun = {s.path for s in steps[:index] if s.kind == "write" and s.path.name.endswith(SCRATCH_SUFFIX)}
            removed = {s.path for s in steps[:index] if s.kind == "unlink"}
            synced = {s.path for s in steps[:index] if s.kind == "sync"}
            assert begun - removed <= synced


def peaks_of(source: Path, make: Callable[[], Path]) -> tuple[int, int, Path]:
    """The peak of the disk that a split in its source's folder adds, the peak that it announced, and the split."""
    before, peak_bytes, planned = occupied(source), [0], []

    def look(index: int, step: Step) -> None:
        peak_bytes[0] = max(peak_bytes[0], occupied(source) - before)

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.SplitStarted):
            planned.append(event.peak_bytes)

    with observe_steps(Counter(look)), progress.listening(listen):
        folder = make()
    (peak,) = planned
    return peak_bytes[0], peak, folder


def made_in_spite_of_interrupts(call: Call, deaths: range) -> Path:
    """Interrupt the call at each of these steps in turn; return what the last, complete call made."""
    for death in deaths:

        def stop(index: int, step: Step, death: int = death) -> None:
            if index == death:
                raise KeyboardInterrupt

        try:
            with observe_steps(Counter(stop)):
                return call.make()
        except KeyboardInterrupt:
            continue
    raise AssertionError(f"more than {deaths[-1]} steps are left of it")


@pytest.mark.parametrize("shards", [1, 3, 6])
@pytest.mark.parametrize("sequential", [True, False])
def test_disk_peak_equals_the_plan(tmp_path: Path, tensors: Weights, shards: int, sequential: bool) -> None:
    source = write_shards(tmp_path / "model", cut(tensors, shards))
    call = Call(str(source), compression=DOUBLE, sequential=sequential)
    measured, peak, _ = peaks_of(source, call.make)
    assert 0 < measured <= peak
    assert peak <= measured + 400_000  # headers, and blocks that are begun: 4 KiB each


@pytest.mark.parametrize("chunk", [1 << 15, 8 << 20])
def test_dequantized_bits_are_those_of_bitsandbytes(
    tmp_path: Path, tensors: Weights, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """A run of scales at a time."""
    folder = split(write_shards(tmp_path / "model", cut(tensors, 3)), compression=DOUBLE)
    monkeypatch.setattr("rabbitllm.store.checkpoint_folder.CHUNK_BYTES", chunk)
    store = LayerStore(folder)
    with PlainReader(store) as reader:
        for name, stored in store.tensors.items():
            tensor = tensors[name]
            if stored.quantized is not None and stored.quantized.scheme == DOUBLE:
                codes, state = functional.quantize_4bit(tensor, quant_type="nf4", compress_statistics=True)
                state.shape = torch.Size([tensor.numel()])  # its kernel for the CPU begins a block with each row
                tensor = functional.dequantize_4bit(codes, state).view(tensor.shape)
                assert torch.equal(reader.read(stored, torch.bfloat16), tensor), name


def test_repair_makes_the_same_bytes(tmp_path: Path, tensors: Weights, hub_environment: HubEnvironment) -> None:
    write_shards(tmp_path / "hub" / REPO, cut(tensors, 4))
    folder = split(REPO, compression=DOUBLE)
    before = layer_files(folder)
    path = folder / "model.layers.1.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    manifest = read_manifest(folder)
    assert manifest is not None
    prepare.repair_split(folder, manifest, {damage.layer for damage in verify(folder).damaged})
    assert layer_files(folder) == before


def test_interrupted_call_is_resumed(tmp_path: Path, tensors: Weights) -> None:
    """Every call is interrupted one step later than the one before."""
    source = write_shards(tmp_path / "model", cut(tensors, 3))
    undisturbed = write_shards(tmp_path / "quiet", cut(tensors, 3))
    expected = layer_files(split(undisturbed, compression=DOUBLE))
    call = Call(str(source), compression=DOUBLE)

    folder = made_in_spite_of_interrupts(call, range(3, 400, 9))
    assert layer_files(folder) == expected


@pytest.mark.parametrize(
    ("ranks", "hidden", "chunk"),
    [
        (1, 256, None),
        (2, 256, 8192),
        (4, 256, None),
        (2, 208, None),  # a block holds elements of two ranks
    ],
)
def test_meta_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, hidden: int, chunk: int | None
) -> None:
    """Pieces that are written directly, that alternate, and that wait uncompressed."""
    model = tiny_llama(hidden=hidden, intermediate=384, vocabulary=320)
    expected = layer_files(split(write_as_transformers(tmp_path / "hf", model), compression=DOUBLE))
    if chunk is not None:
        monkeypatch.setattr("rabbitllm.splitter.plan.CHUNK_BYTES", chunk)
    source = write_meta(tmp_path / "meta", model, ranks)
    measured, peak, folder = peaks_of(source, lambda: split(source, compression=DOUBLE))
    assert layer_files(folder) == expected
    assert verify(folder).damaged == ()
    assert measured <= peak
    kinds = {t.quantized.scheme for t in LayerStore(folder).tensors.values() if t.quantized}
    assert kinds == {DOUBLE, "4bit"} or kinds == {DOUBLE}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_interrupted_split_of_meta_ranks_is_resumed(tmp_path: Path, ranks: int) -> None:
    model = tiny_llama(hidden=256, intermediate=384, vocabulary=320)
    expected = layer_files(split(write_as_transformers(tmp_path / "hf", model), compression=DOUBLE))
    call = Call(str(write_meta(tmp_path / "meta", model, ranks)), compression=DOUBLE)
    folder = made_in_spite_of_interrupts(call, range(3, 900, 17))
    assert layer_files(folder) == expected
