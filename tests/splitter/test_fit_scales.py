"""Splits with fitted scales: only scales and codes differ, and a split never has both kinds of scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rabbitllm import prepare
from rabbitllm.base.options import ShardPolicy, SplitOptions
from rabbitllm.errors import SplitMismatchError
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store.checkpoint_folder import PlainReader
from rabbitllm.store.layer_store import LayerStore, verify
from rabbitllm.store.manifest import is_fitted, read_manifest
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.splitting import Call, Counter, interrupted, layer_files


def split(source: Path, compression: str, *, fit: bool, sequential: bool = True) -> Path:
    source_found = prepare.find(prepare.ModelSpec(str(source), compression))
    prepare.ensure_split(
        source_found,
        SplitOptions(compression, ShardPolicy.of(sequential=sequential, delete_original=False), fit_scales=fit),
    )
    return source_found.split_folder


def model(folder: Path) -> Path:
    return write_shards(folder, cut(llama_tensors(layers=2, hidden=192, vocabulary=200), 3))


def error(folder: Path) -> float:
    """Return the squared error of all compressed tensors, relative to the weights."""
    tensors = llama_tensors(layers=2, hidden=192, vocabulary=200)
    wrong = right = 0.0
    with PlainReader(store := LayerStore(folder)) as reader:
        for name, stored in store.tensors.items():
            if stored.quantized is not None:
                tensor = reader.read(stored, torch.float32)
                wrong += float((tensor - tensors[name].float()).square().sum())
                right += float(tensors[name].float().square().sum())
    return wrong / right


@pytest.mark.parametrize("compression", ["4bit", "4bit-double"])
def test_fitted_scales_have_equal_size_and_less_error(tmp_path: Path, compression: str) -> None:
    plain = split(model(tmp_path / "plain"), compression, fit=False)
    fitted = split(model(tmp_path / "fitted"), compression, fit=True)
    sizes = [{name: len(data) for name, data in layer_files(folder).items()} for folder in (plain, fitted)]
    assert sizes[0] == sizes[1]
    assert error(fitted) < 0.9 * error(plain)
    assert verify(fitted).damaged == ()
    manifest = read_manifest(fitted)
    assert manifest is not None
    assert is_fitted(manifest.quantizer)
    other = split(model(tmp_path / "standard"), compression, fit=True, sequential=False)
    assert layer_files(other) == layer_files(fitted)


def test_unfinished_split_keeps_its_scales(tmp_path: Path) -> None:
    """The options of the later call are ignored: a layer must not have both kinds of scales."""
    expected = layer_files(split(model(tmp_path / "quiet"), "4bit", fit=True))
    source = model(tmp_path / "model")

    def stop(index: int, step: Step) -> None:
        if step.kind == "unlink" and step.path.suffix == ".safetensors":
            raise KeyboardInterrupt

    with observe_steps(Counter(stop)), pytest.raises(KeyboardInterrupt):
        split(source, "4bit", fit=True)
    assert layer_files(split(source, "4bit", fit=False)) == expected


def test_split_with_other_scales_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    begun = interrupted(Call(str(source), compression="4bit", sequential=False), 2)
    for _ in range(2):  # the unfinished split, then the finished one
        with pytest.raises(SplitMismatchError, match="with the scales of bitsandbytes; requested was fit_scales=True"):
            split(source, "4bit", fit=True, sequential=False)
        folder = split(source, "4bit", fit=False, sequential=False)
        assert folder == begun
    fitted = split(model(tmp_path / "other"), "4bit", fit=True, sequential=False)
    assert split(tmp_path / "other", "4bit", fit=False, sequential=False) == fitted != folder


def test_repair_makes_fitted_scales_again(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    folder = split(source, "4bit-double", fit=True, sequential=False)
    before = layer_files(folder)
    path = folder / "lm_head.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    manifest = read_manifest(folder)
    assert manifest is not None
    prepare.repair_split(folder, manifest, {"lm_head"}, source)
    assert layer_files(folder) == before
