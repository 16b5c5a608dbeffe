"""Loss against bytes: others' weights are measured as ours are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from bitsandbytes import functional

import rabbitllm.demo
from benchmarks.lib import llama
from benchmarks.quality import quality
from benchmarks.quality.llama_cpp import types
from rabbitllm import AutoModel
from rabbitllm.evaluation.compare import compare
from rabbitllm.formats.gguf import read_gguf
from tests.support.tiny_models import load, one_thread, split  # noqa: F401  a fixture

DEMO_MODEL = Path(rabbitllm.demo.__file__).parent / "model"


@pytest.fixture
def subject() -> quality.Subject:
    return quality.Subject("bundled", DEMO_MODEL, None, quality.Extent(problems=8))


def test_weights_of_others_are_measured_as_ours_are(subject: quality.Subject, tmp_path: Path) -> None:
    """bitsandbytes' own 4bit weights, put into a plain model, and RabbitLLM's, streamed."""
    assert subject.summary(subject.plain).divergence.largest == 0
    (ids, token), *_ = subject.middles()
    assert tuple(ids + [token]) == (subject.texts[0].context + subject.texts[0].continuation)[: len(ids) + 1]
    assert torch.equal(subject.at_middles(subject.plain)[0], subject.plain(torch.tensor([ids])).logits[0, -1])
    for weight in subject.plain.parameters():
        if weight.dim() > 1:
            codes, state = functional.quantize_4bit(weight.detach(), blocksize=64, quant_type="nf4")
            # made in the checkpoint's dtype
            weight.data = functional.dequantize_4bit(codes, state).bfloat16().float()
    theirs = subject.summary(subject.plain)
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    options = {"dtype": "float32"}
    found = compare(load(split(folder, "4bit"), **options), load(split(folder), **options), subject.texts)
    assert theirs.divergence.mean == pytest.approx(found.divergence.mean, rel=1e-3)
    assert theirs.divergence.mean > 0


@pytest.mark.parametrize("kind", ["BF16", "Q4_0"])
def test_a_file_for_llama_cpp_of_a_model_whose_tokenizer_it_lacks(
    subject: quality.Subject, tmp_path: Path, kind: str
) -> None:
    path = llama.write_file(DEMO_MODEL, tmp_path / f"{kind}.gguf", kind)
    model = AutoModel.from_pretrained(path, device="cpu", dtype="float32", layer_shards_saving_path=tmp_path / "out")
    found = subject.summary(model).divergence
    assert (found.largest == 0) if kind == "BF16" else (0 < found.mean < 1)
    tensors = read_gguf(path).header.tensors
    assert types(tensors).startswith(f"{kind}: ")
    assert "norm" not in types(tensors)
    other = tensors[-1]._replace(name="blk.9.ffn_down.weight", shape=(2, 2), dtype="F16", blocks=None)
    assert types([*tensors, other]).endswith(": ffn_down")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name, "out"]
