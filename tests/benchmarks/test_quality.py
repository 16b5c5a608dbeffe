"""Loss against bytes: others' weights are measured as ours are."""

from __future__ import annotations

import copy
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
from rabbitllm.demo.tasks import held_out
from rabbitllm.evaluation.compare import compare, compare_logits, summarize
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
    quantized = copy.deepcopy(subject.plain)
    for weight in quantized.parameters():
        if weight.dim() > 1:
            codes, state = functional.quantize_4bit(weight.detach(), blocksize=64, quant_type="nf4")
            # made in the checkpoint's dtype
            weight.data = functional.dequantize_4bit(codes, state).bfloat16().float()
    theirs = subject.summary(quantized)
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    options = {"dtype": "float32"}
    found = compare(load(split(folder, "4bit"), **options), load(split(folder), **options), subject.texts)
    assert theirs.divergence.mean == pytest.approx(found.divergence.mean, rel=1e-3)
    assert theirs.divergence.mean > 0


def test_only_inputs_of_the_head_are_kept_and_only_wished_rows_computed(tmp_path: Path) -> None:
    """The summary has the bits of one over logits of all positions; nothing is written next to the checkpoint."""
    text, before = tmp_path / "text.txt", sorted(DEMO_MODEL.iterdir())
    text.write_text(" ".join(problem.prompt for problem in held_out(60)))
    extent = quality.Extent(tokens=300, budgets=(0.36, 0.41), only=["auto 36", "none", "NF4, "])
    subject = quality.Subject("bundled", DEMO_MODEL, text, extent)
    positions, vocabulary = sum(map(len, subject.targets)), subject.plain.config.vocab_size
    kept = [tensor for value in vars(subject).values() if isinstance(value, list) for tensor in value]
    nbytes = sum(tensor.nbytes for tensor in kept if isinstance(tensor, torch.Tensor))
    assert nbytes <= positions * (4 * subject.plain.config.hidden_size + 8) < positions * 4 * vocabulary

    other = copy.deepcopy(subject.plain)
    for weight in other.parameters():
        weight.data *= 1.01
    windows = [torch.tensor([[*text.context, *text.continuation[:-1]]]) for text in subject.texts]
    with torch.inference_mode():
        logits = [[model(input_ids=ids).logits[0] for ids in windows] for model in (subject.plain, other)]
    expected = summarize([compare_logits(*three) for three in zip(*logits, subject.targets, strict=True)])
    assert subject.summary(other) == expected
    assert expected.positions == positions == 300
    assert expected.divergence.mean > 0

    assert [row.name for row in quality.ours(subject, tmp_path)] == ["none", "36.0%"]
    assert [row.name for row in quality.of_bitsandbytes(subject)] == ["NF4, double"]
    assert sorted(DEMO_MODEL.iterdir()) == before


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
