"""Blocks of ggml that a split makes: the bytes of the encoder for the whole tensor, by every route; presets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rabbitllm
from rabbitllm import prepare
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant.block_encoders import encode
from rabbitllm.quant.gguf_blocks import dequantize
from rabbitllm.quant.schemes import BLOCKS, PRESETS
from rabbitllm.splitter._presets import of_preset
from rabbitllm.store.checkpoint_folder import PlainReader
from rabbitllm.store.layer_store import LayerStore, verify
from rabbitllm.store.manifest import directory_name, read_manifest
from tests.splitter.test_double import made_in_spite_of_interrupts, peaks_of
from tests.support.builders import SINGLE_NAME, cut, llama_tensors, write_shards
from tests.support.gguf_files import write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.meta_files import tiny_llama, write_as_transformers, write_meta
from tests.support.plans import shard_of
from tests.support.splitting import Call, layer_files, split

REPO = "acme/tiny"
FEW = ("q4_k_m", "q8_0")
NAMES = [one if one in FEW else pytest.param(one, marks=pytest.mark.long) for one in (*PRESETS, *BLOCKS)]
Weights = Mapping[str, torch.Tensor]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Rows of 256 and more; of 192, no whole large blocks; of 160, which stay as they are."""
    by_width = {hidden: llama_tensors(layers=9, hidden=hidden, vocabulary=300) for hidden in (256, 192, 160)}
    widths = {".layers.7.": 192, ".layers.8.": 160}
    return {
        name: by_width[next((width for layer, width in widths.items() if layer in name), 256)][name]
        for name in by_width[256]
    }


def type_for(name: str, tensor: torch.Tensor, tensors: Weights, compression: str) -> str | None:
    """The type of blocks by the guide's words."""
    base, more = PRESETS.get(compression, (compression, compression))
    if tensor.dim() < 2 or tensor.numel() < 4096 or tensor.shape[1] % 64:
        return None
    of_more = "head" in name or any(
        f".layers.{i}." in name and ("v_" in name or "down" in name) for i in (0, 3, 6, 7, 8)
    )
    kind = BLOCKS[more if of_more else base]
    if tensor.shape[1] % BLOCK_TYPES[kind].elements:
        return {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}.get(kind, "IQ4_NL")
    return kind


def check(folder: Path, tensors: Weights, compression: str) -> None:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    for name, tensor in tensors.items():
        kind = type_for(name, tensor, tensors, compression)
        if kind is None:
            assert torch.equal(found.pop(name), tensor), name
        else:
            assert torch.equal(found.pop(name), encode(kind, tensor)), (name, kind)
            assert found.pop(f"{name}.gguf.{kind.lower()}").tolist() == [BLOCK_TYPES[kind].number]
    assert not found


@pytest.mark.parametrize("compression", NAMES)
def test_every_route_makes_the_blocks_of_the_whole_tensor(
    tmp_path: Path, tensors: Weights, hub_environment: HubEnvironment, compression: str
) -> None:
    whole = write_shards(tmp_path / "whole", {SINGLE_NAME: dict(tensors)}, index=False)
    folder = split(whole, compression=compression, sequential=False)
    assert folder.name == directory_name(compression)
    check(folder, tensors, compression)
    assert verify(folder).damaged == ()
    expected = layer_files(folder)
    local = write_shards(tmp_path / "model", cut(tensors, 4))
    assert layer_files(split(local, compression=compression)) == expected
    write_shards(tmp_path / "hub" / REPO, cut(tensors, 4))
    for way in ("file", "stream"):
        assert layer_files(split(REPO, tmp_path / way, compression=compression, shard_transfer=way)) == expected


def test_runs_of_a_few_blocks_in_many_threads(
    tmp_path: Path, tensors: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rabbitllm.splitter.plan.CHUNK_BYTES", 4096)
    check(split(write_shards(tmp_path / "model", cut(tensors, 3)), compression="q4_k_m"), tensors, "q4_k_m")


@pytest.mark.parametrize("compression", ["Q4_K_M", "Q5_K"])
def test_a_finished_split_is_found_by_its_name_in_any_letters(
    tmp_path: Path, tensors: Weights, compression: str
) -> None:
    options = prepare.split_options(compression)
    assert options.compression == compression.lower()
    plan = rabbitllm.plan(write_shards(tmp_path / "model", cut(tensors, 2)), compression=compression, device="cpu")
    planned = plan.at(compression.lower())
    assert planned is not None
    folder = split(tmp_path / "model", compression=compression.lower(), sequential=False)
    assert planned.output_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert LayerStore(folder).compression == compression.lower()


@pytest.mark.parametrize("shards", [1, 6])
def test_disk_peak_equals_the_plan(tmp_path: Path, tensors: Weights, shards: int) -> None:
    call = Call(str(write_shards(tmp_path / "model", cut(tensors, shards))), compression="q4_k_m")
    measured, peak, _ = peaks_of(tmp_path / "model", call.make)
    assert 0 < measured <= peak
    assert peak <= measured + 400_000


def test_repair_and_an_interrupted_call_make_the_same_bytes(
    tmp_path: Path, tensors: Weights, hub_environment: HubEnvironment
) -> None:
    write_shards(tmp_path / "hub" / REPO, cut(tensors, 4))
    folder = split(REPO, compression="q4_k_m")
    before = layer_files(folder)
    path = folder / "model.layers.1.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.quantizer is not None
    assert manifest.quantizer.startswith("rabbitllm")
    prepare.repair_split(folder, manifest, {damage.layer for damage in verify(folder).damaged})
    assert layer_files(folder) == before
    call = Call(str(write_shards(tmp_path / "model", cut(tensors, 3))), compression="q4_k_m")
    assert layer_files(made_in_spite_of_interrupts(call, range(3, 900, 40))) == before


@pytest.mark.parametrize(("ranks", "hidden"), [(2, 512), (4, 256)])
def test_meta_ranks(tmp_path: Path, ranks: int, hidden: int) -> None:
    """Pieces that are written directly, that alternate, and that wait uncompressed."""
    model = tiny_llama(hidden=hidden, intermediate=2 * hidden, vocabulary=320)
    expected = layer_files(split(write_as_transformers(tmp_path / "hf", model), compression="q4_k_m"))
    source = write_meta(tmp_path / "meta", model, ranks)
    measured, peak, folder = peaks_of(source, lambda: split(source, compression="q4_k_m"))
    assert layer_files(folder) == expected
    assert measured <= peak


def test_blocks_of_that_type_in_a_gguf_file_are_kept(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", "llama", types="Q8_0")
    kept = layer_files(split(source, tmp_path / "kept", sequential=False))
    made = layer_files(split(source, tmp_path / "made", sequential=False, compression="q8_0"))
    assert {name for name in kept if kept[name] != made[name]} == set()


def test_weights_that_are_no_numbers_stay_none(tmp_path: Path, tensors: Weights) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    broken = tensors[name].clone()
    broken[3, 5], broken[4, 256] = torch.nan, 1e30
    folder = split(write_shards(tmp_path / "model", {SINGLE_NAME: {**tensors, name: broken}}), compression="q4_k")
    store = LayerStore(folder)
    with PlainReader(store) as reader:
        values = reader.read(store.tensors[name], torch.float32)
    expected = dequantize("Q4_K", encode("Q4_K", tensors[name]), tuple(broken.shape), torch.float32)
    bad = values.isnan()
    assert bad[3, :256].all()
    assert bad[4, 256:512].all()
    assert bad.sum() == 512
    assert torch.equal(values[~bad], expected[~bad])


def test_presets_follow_llama_cpp() -> None:
    shapes = {
        f"model.layers.{i}.{part}.weight": ("BF16", (256, 256))
        for i in range(32)
        for part in ("self_attn.v_proj", "self_attn.q_proj", "mlp.experts.1.down_proj")
    }
    tied = of_preset("q4_k_m", shard_of("s", {**shapes, "model.embed_tokens.weight": ("BF16", (256, 256))}).tensors)
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    for part in ("self_attn.v_proj", "mlp.experts.1.down_proj"):
        assert [i for i in range(32) if tied[f"model.layers.{i}.{part}.weight"] == "q6_k"] == more
    assert {tied[name] for name in tied if "q_proj" in name} == {"q4_k"}
    assert tied["model.embed_tokens.weight"] == "q6_k"
    ends = {"model.embed_tokens.weight": ("BF16", (256, 256)), "lm_head.weight": ("BF16", (256, 256))}
    both = of_preset("q5_k_m", shard_of("s", ends).tensors)
    assert both == {"model.embed_tokens.weight": "q5_k", "lm_head.weight": "q6_k"}
