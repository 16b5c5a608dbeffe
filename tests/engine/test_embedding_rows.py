"""An embedding by rows: the bits of the whole matrix, and no more rows than there are distinct tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.engine.placement import Tier
from rabbitllm.engine.weight_tensors import AbsentWeight
from tests.support.builders import build_checkpoint, reference_logits
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import INPUT, assert_same, dequantized, load, run, split, tiers


def by_rows(folder: Path, **options: Any) -> Any:
    """A model whose input embedding is brought in by rows."""
    model = load(folder, 0, **options)
    assert Tier.ROWS in tiers(model).values()
    return model


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_packed_rows_are_those_of_the_dequantized_matrix(tmp_path: Path, family: str) -> None:
    folder = build_checkpoint(tmp_path / "model", family, tied=True)
    directory = split(folder, "4bit")
    whole = load(directory).get_input_embeddings()
    some = by_rows(directory).get_input_embeddings()
    for ids in (
        INPUT,
        torch.tensor([[5]]),
        torch.tensor([[7, 7, 7], [0, 7, 271]]),
        torch.empty((1, 0), dtype=torch.long),
    ):
        assert torch.equal(some(ids), whole(ids))
        assert torch.equal(some(**{"input_ids" if family == "gemma3" else "input": ids}), whole(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_rows_of_whole_blocks(tmp_path: Path, compression: str, dtype: torch.dtype) -> None:
    """A row of 2048 is one block at 8bit and 32 at 4bit."""
    folder = build_checkpoint(
        tmp_path / "model",
        "llama",
        dtype=dtype,
        hidden_size=2048,
        intermediate_size=64,
        num_hidden_layers=1,
        head_dim=8,
    )
    model = by_rows(split(folder, compression))
    plain = dequantized(folder, tmp_path / "reference", compression, dtype)
    assert_same(run(model), reference_logits(plain, INPUT, dtype))


def test_rows_of_half_a_block_are_not_taken_one_by_one(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", hidden_size=96)
    assert Tier.ROWS not in tiers(load(split(folder, "4bit"), 0)).values()
    assert Tier.ROWS not in tiers(load(split(folder, "8bit"), 0)).values()


def test_rows_of_another_dtype(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.float32)
    model = by_rows(split(folder), dtype="bfloat16")
    assert_same(run(model), reference_logits(folder, INPUT, torch.bfloat16))


def test_each_distinct_token_costs_one_row(tmp_path: Path) -> None:
    model = by_rows(split(build_checkpoint(tmp_path / "model", "llama"), "4bit"))
    model.get_input_embeddings()(torch.tensor([[9, 9, 4], [4, 9, 200]]))
    assert model.streamer.embedding_rows.rows_brought == 3
    model.get_input_embeddings()(torch.tensor([[9]]))
    assert model.streamer.embedding_rows.rows_brought == 4


def test_between_calls_nothing_is_bound(tmp_path: Path) -> None:
    model = by_rows(split(build_checkpoint(tmp_path / "model", "llama"), "4bit"))
    embedding = model.get_input_embeddings()
    for _ in range(2):
        assert embedding.weight.shape == (272, 64)
        assert isinstance(embedding.weight, AbsentWeight)
        embedding(INPUT)


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("wrong", [-1, 272, -100])
def test_an_id_that_does_not_exist_is_an_error_as_in_an_embedding(
    tmp_path: Path, compression: str | None, wrong: int
) -> None:
    folder = split(build_checkpoint(tmp_path / "model", "llama"), compression)
    ids = torch.tensor([[3, wrong]])
    with pytest.raises(IndexError, match="index out of range"):
        load(folder).get_input_embeddings()(ids)
    model = by_rows(folder, dtype="bfloat16")
    with pytest.raises(IndexError, match="index out of range"):
        model.get_input_embeddings()(ids)
    assert model(INPUT).logits.isfinite().all()


def test_embeddings_given_by_the_caller(tmp_path: Path) -> None:
    model = by_rows(split(build_checkpoint(tmp_path / "model", "llama"), "4bit"))
    with torch.inference_mode():
        wanted = model(INPUT).logits
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(INPUT)).logits, wanted)


def test_on_a_gpu_only_the_rows_are_copied(tmp_path: Path) -> None:
    from rabbitllm.base.options import RunOptions
    from rabbitllm.engine.load import load_model

    folder = build_checkpoint(tmp_path / "model", "llama")
    gpu = FakeGpu(0)
    options = RunOptions(max_memory={gpu.name: 0}, show_progress=False)
    model = load_model(split(folder), options, None, [gpu])
    assert tiers(model)["model.embed_tokens"] is Tier.ROWS
    before = gpu.uploaded_bytes
    with torch.inference_mode():
        model.get_input_embeddings()(INPUT)
    assert gpu.uploaded_bytes == before
    assert_same(run(model), reference_logits(folder, INPUT, torch.float32))
