"""Embeddings read by rows: the bits of the whole matrix, and one row for each distinct token."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rabbitllm.engine import _embedding_rows, placement
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.weight_tensors import AbsentWeight
from rabbitllm.errors import IncompleteSplitError, ReadOnlyWeightError
from rabbitllm.store import checksums
from rabbitllm.store.layer_store import LayerStore
from tests.support import quantized
from tests.support.builders import build_checkpoint, reference_logits
from tests.support.fake_gpu import FakeGpu
from tests.support.hybrid_families import HYBRIDS
from tests.support.mappings import flags_of
from tests.support.tiny_models import INPUT, NEW_TOKENS, assert_same, dequantized, load, run, split, tiers


def by_rows(folder: Path, **options: Any) -> Any:
    """A model whose input embedding is read by rows."""
    model = load(folder, 0, **options)
    assert Tier.ROWS in tiers(model).values()
    return model


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_packed_rows_equal_the_dequantized_matrix(tmp_path: Path, family: str) -> None:
    folder = build_checkpoint(tmp_path / "model", family, tied=True)
    directory = split(folder, "4bit")
    whole = load(directory).get_input_embeddings()
    rows = by_rows(directory).get_input_embeddings()
    for ids in (
        INPUT,
        torch.tensor([[5]]),
        torch.tensor([[7, 7, 7], [0, 7, 271]]),
        torch.empty((1, 0), dtype=torch.long),
    ):
        assert torch.equal(rows(ids), whole(ids))
        assert torch.equal(rows(**{"input_ids" if family == "gemma3" else "input": ids}), whole(ids))


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


@pytest.mark.parametrize("compression", ["4bit", "8bit", "4bit-double"])
@pytest.mark.parametrize("width", [32, 96, 160])
def test_rows_that_begin_inside_blocks(tmp_path: Path, compression: str, width: int) -> None:
    """All blocks that a row may span are dequantized; the last block of the table is partial."""
    folder = build_checkpoint(tmp_path / "model", "llama", hidden_size=width, vocab_size=271)
    directory = split(folder, compression)
    whole, rows = load(directory).get_input_embeddings(), by_rows(directory).get_input_embeddings()
    for ids in (INPUT, torch.arange(271), torch.tensor([[270]]), torch.empty((1, 0), dtype=torch.long)):
        assert torch.equal(rows(ids), whole(ids))


def test_rows_of_another_dtype(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.float32)
    model = by_rows(split(folder), dtype="bfloat16")
    assert_same(run(model), reference_logits(folder, INPUT, torch.bfloat16))


def test_each_distinct_token_reads_one_row(tmp_path: Path) -> None:
    model = by_rows(split(build_checkpoint(tmp_path / "model", "llama"), "4bit"))
    model.get_input_embeddings()(torch.tensor([[9, 9, 4], [4, 9, 200]]))
    assert model.streamer.tables["model.embed_tokens"].rows_read == 3
    model.get_input_embeddings()(torch.tensor([[9]]))
    assert model.streamer.tables["model.embed_tokens"].rows_read == 4


def test_reads_of_a_lookup_are_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table of two tensors: the pages of all rows, and the blocks that are compared, before anything waits."""
    model = load(split(build_with_table(tmp_path / "model", "qwen4_exp")), 0)
    table, look_up = model.get_submodule(TABLES["qwen4_exp"]), model.streamer.tables[TABLES["qwen4_exp"]]
    events: list[tuple[str, list[tuple[int, int]]]] = []

    def record(name: str, home: Any, attribute: str) -> None:
        ordinary = getattr(home, attribute)

        def recorded(*args: Any) -> Any:
            runs = [*args[1]] if name == "begin" else []
            events.append((name, runs))
            return ordinary(args[0], runs) if name == "begin" else ordinary(*args)

        monkeypatch.setattr(home, attribute, recorded)

    record("begin", _embedding_rows, "begin_to_read")
    record("begin", checksums, "begin_to_read")
    record("sum", checksums, "_crc_of_mapped")
    record("rows", look_up, "_rows")
    last = table.num_embeddings - 1
    for ids, kinds in (([0, 1, last], ["sum", "rows"]), ([0, 1, last], ["rows"])):
        events.clear()
        table(torch.tensor([ids]))
        names = [name for name, _ in events]
        for kind in kinds:
            assert names.count(kind) >= 2
        assert [*dict.fromkeys(names)] == (["begin", "sum", "rows"] if "sum" in kinds else ["begin", "rows"])
        read = [run for name, runs in events for run in runs if name == "begin"]
        assert sum(end - begin for begin, end in read) < table.weight.nbytes
    assert len(read) == 2  # rows 0 and 1 are in one page


def test_a_large_table_is_dequantized_by_rows_though_all_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no memory, and the model is used as one whose weights are all in memory: a backward pass is allowed."""
    directory = split(build_checkpoint(tmp_path / "model", "llama", tied=True), "4bit")
    whole = load(directory, exact=False)  # its head is multiplied from the codes
    nbytes = whole.get_input_embeddings().weight.nbytes
    monkeypatch.setattr(placement, "LARGE_TABLE", nbytes // 2)
    before = _storages()
    model = load(directory, exact=False)
    assert sum(_storages().values()) - sum(before.values()) < nbytes // 2
    assert tiers(model)["model.embed_tokens"] is Tier.ROWS
    assert tiers(load(directory))["model.embed_tokens"] is Tier.RESIDENT  # the head needs the matrix too
    assert model.placement.is_resident
    assert_same(run(model), run(whole))
    model.enable_input_require_grads()
    model(input_ids=INPUT, labels=INPUT).loss.backward()


@pytest.mark.skipif(sys.platform != "linux", reason="smaps is Linux's")
@pytest.mark.parametrize("tied", [True, False])
def test_only_a_table_that_no_head_multiplies_is_read_at_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """Linux takes pages that are read at random for unused, and evicts them first: a head needs all of its own."""
    directory = split(build_checkpoint(tmp_path / "model", "llama", tied=tied, vocab_size=4096), "4bit")
    monkeypatch.setattr(placement, "LARGE_TABLE", 1)
    model = load(directory, exact=False)
    assert tiers(model)["model.embed_tokens"] is Tier.ROWS
    for thread in [each for each in threading.enumerate() if each.name == "read-ahead"]:
        thread.join(600)
    (part, *_) = LayerStore(directory).tensors["model.embed_tokens.weight"].parts
    middle = memoryview(model.streamer._store.mapped(part.file).bytes_of(part))[part.nbytes // 2 :]
    assert ("rr" in flags_of(np.frombuffer(middle, np.uint8).ctypes.data)) != tied


def test_a_large_table_is_used_as_any_weight_where_all_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama"), "4bit")
    whole = load(directory)
    monkeypatch.setattr(placement, "LARGE_TABLE", 1)
    model = load(directory)
    assert tiers(model)["model.embed_tokens"] is Tier.ROWS
    expected, embedding = whole.get_input_embeddings().weight, model.get_input_embeddings()
    assert torch.equal(embedding.weight[5], expected[5])
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"] * 1, expected)
    copied = copy.deepcopy(embedding)  # as peft makes one to train it
    assert type(copied.weight) is nn.Parameter
    copied(INPUT).sum().backward()
    with torch.no_grad():
        copied.weight -= copied.weight.grad
    assert not torch.equal(copied.weight, expected)
    assert torch.equal(embedding.weight[5], expected[5])
    gradients = list[torch.Tensor]()
    for each in (whole, model):
        weight = each.get_input_embeddings().weight.requires_grad_(True)
        each.get_input_embeddings()(torch.tensor([[5, 9, 5]])).square().sum().backward()
        gradients.append(weight.grad)
        torch.manual_seed(0)
        each.resize_token_embeddings(280)
    assert torch.equal(*gradients)
    assert gradients[0].any()
    assert_same(run(model), run(whole))
    assert model.get_input_embeddings().weight.shape == (280, 64)


def test_a_large_table_is_trained_as_its_refusal_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "LARGE_TABLE", 1)
    model = load(split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)), dtype="float32")
    module = model.get_input_embeddings()

    def trained() -> torch.Tensor:
        optimizer = torch.optim.SGD(model.get_input_embeddings().parameters(), lr=0.1)
        loss: torch.Tensor = model(input_ids=INPUT, labels=INPUT).loss
        loss.backward()
        optimizer.step()
        return loss

    for write in (trained, lambda: module.weight[5].detach().zero_(), module.weight.data.zero_):
        with pytest.raises(ReadOnlyWeightError, match=r"nn\.Parameter\(module\.weight\.clone\(\)\)"):
            write()
    module.weight = nn.Parameter(module.weight.clone())
    assert trained() > trained()


def _storages() -> dict[int, int]:
    """Address -> bytes of all memory of tensors that is no mapped file."""
    gc.collect()
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    files = [tuple(int(end, 16) for end in line[0].split("-")) for line in ranges if len(line) > 5 and "/" in line[5]]
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return {place: size for place, size in found.items() if not any(first <= place < end for first, end in files)}


@pytest.mark.parametrize("ids", [torch.tensor([5.9]), torch.tensor([[5.2, 9.9]]), torch.tensor([True])])
def test_ids_that_are_no_whole_numbers_are_refused(tmp_path: Path, ids: torch.Tensor) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama"), "4bit")
    for model in (load(directory), by_rows(directory)):
        with model.streamer.passing(), pytest.raises(RuntimeError, match="indices"):
            model.get_input_embeddings()(ids)


def test_rows_are_not_renormalized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes to a table whose rows have a maximum norm."""
    directory = split(build_checkpoint(tmp_path / "model", "llama"), "4bit")
    monkeypatch.setattr(placement, "LARGE_TABLE", 1)
    weight = load(directory).get_input_embeddings().weight
    with pytest.raises(ReadOnlyWeightError):
        nn.functional.embedding(INPUT, weight, max_norm=0.1)


def test_table_is_unbound_between_calls(tmp_path: Path) -> None:
    model = by_rows(split(build_checkpoint(tmp_path / "model", "llama"), "4bit"))
    embedding = model.get_input_embeddings()
    for _ in range(2):
        assert embedding.weight.shape == (272, 64)
        assert isinstance(embedding.weight, AbsentWeight)
        embedding(INPUT)


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("wrong", [-1, 272, -100])
def test_id_out_of_range_is_an_error_as_in_an_embedding(tmp_path: Path, compression: str | None, wrong: int) -> None:
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
        expected = model(INPUT).logits
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(INPUT)).logits, expected)


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


TABLES = {
    "gemma3n": "model.embed_tokens_per_layer",
    "gemma4": "model.embed_tokens_per_layer",
    "qwen4_exp": "model.layers.0.ple.ple_embedding.ngram_embedding",
    "qwen4_exp-fp8": "model.layers.0.ple.ple_embedding.ngram_embedding",
}
"""Families with a table that is larger than the input embedding.

Those of qwen4_exp are made of two stored tensors, in a layer; in FP8 there is also one scale for the whole table.
"""
CASES = [
    *((None, family) for family in TABLES),
    *(("8bit", family) for family in TABLES if "fp8" not in family),
    *(pytest.param("4bit-double", family, marks=pytest.mark.long) for family in TABLES if "fp8" not in family),
]
"""Compression, family."""


def build_with_table(folder: Path, family: str) -> Path:
    if family == "qwen4_exp-fp8":
        return quantized.build_fp8_table(folder, HYBRIDS["qwen4_exp"], ngram_vocab_size_base=3000)
    settings = {"ngram_vocab_size_base": 3000} if family == "qwen4_exp" else {}
    return build_checkpoint(folder, HYBRIDS[family], **settings)


def expected_of(folder: Path, family: str) -> Any:
    return reference_logits(folder, INPUT, torch.bfloat16 if "fp8" in family else torch.float32)


@pytest.mark.parametrize(("compression", "family"), CASES)
def test_large_table_is_read_by_rows(tmp_path: Path, family: str, compression: str | None) -> None:
    folder = build_with_table(tmp_path / "model", family)
    directory = split(folder, compression)
    resident = load(directory)
    assert tiers(resident)[TABLES[family]] in (Tier.RESIDENT, Tier.PACKED)
    expected = run(resident) if compression else expected_of(folder, family)
    model = load(directory, 0)
    assert tiers(model)[TABLES[family]] is Tier.ROWS
    assert_same(run(model), expected)
    table = model.get_submodule(TABLES[family])
    assert isinstance(table.weight, AbsentWeight)
    looked_up = model.streamer.tables[TABLES[family]].rows_read
    limit = 2 * (INPUT.numel() + NEW_TOKENS) * (4 if "qwen4_exp" in family else 1)  # of the logits and of the tokens
    assert 0 < looked_up <= limit < table.num_embeddings
    assert_same(run(resident), expected)


@pytest.mark.parametrize("family", TABLES)
def test_damaged_row_is_an_error_when_it_is_looked_up(tmp_path: Path, family: str) -> None:
    directory = split(build_with_table(tmp_path / "model", family))
    store = LayerStore(directory)
    name = next(name for name in store.tensors if "ngram_embedding.shard_1" in name or "per_layer.weight" in name)
    stored = store.tensors[name]
    with (directory / stored.parts[0].file).open("r+b") as file:
        file.seek(stored.parts[0].offset)
        file.write(bytes([255] * 8))
    table = load(directory, 0).get_submodule(TABLES[family])
    first = table.num_embeddings // 2 if "qwen4_exp" in family else 0
    with pytest.raises(IncompleteSplitError, match="checksum"):
        table(torch.tensor([[first]]))


def test_damaged_scale_of_a_table_is_an_error(tmp_path: Path) -> None:
    directory = split(build_with_table(tmp_path / "model", "qwen4_exp-fp8"))
    stored = next(t for name, t in LayerStore(directory).tensors.items() if name.endswith("embedding.weight_scale"))
    with (directory / stored.parts[0].file).open("r+b") as file:
        file.seek(stored.parts[0].offset)
        file.write(bytes([1, 1]))
    with pytest.raises(IncompleteSplitError, match="checksum"):
        load(directory, 0)


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen4_exp-fp8"])
def test_table_on_a_gpu(tmp_path: Path, family: str) -> None:
    from rabbitllm.base.options import RunOptions
    from rabbitllm.engine.load import load_model

    folder = build_with_table(tmp_path / "model", family)
    gpu = FakeGpu(0)
    model = load_model(split(folder), RunOptions(max_memory={gpu.name: 0}, show_progress=False), None, [gpu])
    assert tiers(model)[TABLES[family]] is Tier.ROWS
    assert_same(run(model), expected_of(folder, family))


def test_position_embedding_is_not_read_by_rows(tmp_path: Path) -> None:
    """It is smaller than the input embedding, so rows would save little."""
    model = load(split(build_checkpoint(tmp_path / "model", "gpt2")), 0)
    assert tiers(model)["transformer.wpe"] is Tier.STREAMED
