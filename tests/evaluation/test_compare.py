"""The comparison of two models equals one by transformers' logits of the same weights; each weight is read once."""

from __future__ import annotations

import errno
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import Tier
from rabbitllm.errors import OptionError, QualityError
from rabbitllm.evaluation import compare as module
from rabbitllm.evaluation.compare import Positions, Summary, compare, compare_logits, summarize
from rabbitllm.generation.scoring import Room, ScoredText
from rabbitllm.storage.durable import NamelessFile
from tests.support.builders import FAMILIES, VOCABULARY_SIZE, build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.tiny_models import dequantized, load, one_thread, plain_model, split  # noqa: F401  a fixture

STREAMED = 60_000
"""Bytes with which most of a tiny model streams."""
FEW = Room(tokens=40)
"""Several micro-batches."""


def texts(count: int = 6, vocabulary: int = VOCABULARY_SIZE) -> list[ScoredText]:
    """Of several lengths; those with an even number begin with the same twenty tokens."""
    generator = torch.Generator().manual_seed(3)

    def tokens(some: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (some,), generator=generator).tolist())

    shared = tokens(20)
    return [
        ScoredText(index, (*shared, 5) if index % 2 == 0 else tokens(1 + index), tokens(3 + 4 * index))
        for index in range(count)
    ]


def directly(reference: Any, model: Any, scored: Sequence[ScoredText]) -> Summary:
    """With all logits of plain models."""
    parts = []
    for text in scored:
        ids = torch.tensor([[*text.context, *text.continuation]])
        with torch.no_grad():
            true, actual = (m(ids).logits[0, len(text.context) - 1 : -1] for m in (reference, model))
        parts.append(compare_logits(true, actual, torch.tensor(text.continuation)))
    return summarize(parts)


def assert_near(actual: Summary, expected: Summary) -> None:
    """But for what rounds on the way, in another order."""
    assert actual.positions == expected.positions
    assert actual.agreement == expected.agreement
    for name in ("mean", "median", "percentile", "largest"):
        value, reference = getattr(actual.divergence, name), getattr(expected.divergence, name)
        assert value == pytest.approx(reference, rel=1e-3, abs=1e-7), name
    assert actual.perplexity == pytest.approx(expected.perplexity, rel=1e-5)
    assert actual.reference_perplexity == pytest.approx(expected.reference_perplexity, rel=1e-5)


# a head that caps logits, one that shares the embedding's weights, and streamed experts
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gemma2", True), ("qwen3_moe", False)])
def test_equals_transformers(tmp_path: Path, family: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [
        build_checkpoint(tmp_path / f"{seed}", FAMILIES[family], dtype=torch.float32, tied=tied, seed=seed)
        for seed in (0, 1)
    ]
    monkeypatch.setattr(module, "LOGITS_BYTES", 17 * 4 * VOCABULARY_SIZE)  # slices that end within a text
    plain = [plain_model(folder, dtype=torch.float32).eval() for folder in folders]
    reference, model = (load(split(folder), STREAMED) for folder in folders)
    summary = compare(model, reference, texts(), FEW)
    assert_near(summary, directly(*plain, texts()))
    assert summary.divergence.mean > 0.01


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_compressed_model_equals_rounded_weights(tmp_path: Path, compression: str) -> None:
    """The same numbers as with bitsandbytes' own dequantized weights."""
    folder = build_checkpoint(tmp_path / "model", FAMILIES["llama"], dtype=torch.float32)
    rounded = dequantized(folder, tmp_path / "rounded", compression, torch.float32)
    expected = directly(*(plain_model(path, dtype=torch.float32).eval() for path in (folder, rounded)), texts())
    summary = compare(load(split(folder, compression)), load(split(folder), STREAMED), texts(), FEW)
    assert_near(summary, expected)
    assert summary.divergence.mean > 0


def test_model_has_no_divergence_from_itself(tmp_path: Path) -> None:
    """Exactly, whether or not its weights stay in memory."""
    folder = split(build_checkpoint(tmp_path / "model", FAMILIES["llama"]))
    summary = compare(load(folder, STREAMED), load(folder), texts(), FEW)
    assert (summary.divergence.largest, summary.agreement) == (0, 1)
    assert summary.perplexity == summary.reference_perplexity


def test_each_model_takes_one_pass(tmp_path: Path) -> None:
    folder = split(build_checkpoint(tmp_path / "model", FAMILIES["llama"]))
    models = [load(folder, 0), load(folder, 0)]
    brought: Counter[tuple[int, str]] = Counter()
    for index, model in enumerate(models):
        for placed in model.placement.units:
            if placed.tier is Tier.STREAMED:
                unit = model.get_submodule(placed.unit)
                unit.register_forward_pre_hook(lambda *args, key=(index, placed.unit): brought.update([key]))
    compare(*models, texts(), FEW)
    heads = {key for key in brought if "lm_head" in key[1]}
    assert len(heads) == 2
    assert len(brought) > 6
    assert {count for key, count in brought.items() if key not in heads} == {1}


@pytest.mark.parametrize("count", [1, 2])
def test_gpus(tmp_path: Path, count: int) -> None:
    """Streamed through GPUs, the numbers are those of a model in memory."""
    folders = [build_checkpoint(tmp_path / f"{seed}", FAMILIES["llama"], seed=seed) for seed in (0, 1)]
    plain = [plain_model(folder, dtype=torch.float32).eval() for folder in folders]
    gpus = [FakeGpu(index) for index in range(count)]
    limits: dict[str, int] = {gpu.name: 40_000 for gpu in gpus} | {"cpu": 0}
    options = RunOptions(max_memory=limits, show_progress=False, dtype="float32", exact=True)
    with watched(), torch.no_grad():
        model = load_model(split(folders[1]), options, None, gpus)
        before = sum(gpu.uploads for gpu in gpus)
        summary = compare(model, load(split(folders[0])), texts(), FEW)
        uploads = sum(gpu.uploads for gpu in gpus) - before
    assert_near(summary, directly(*plain, texts()))
    assert 0 < uploads <= 2 * len(model.placement.units)


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    small, large = (
        load(split(build_checkpoint(tmp_path / name, FAMILIES["llama"], vocab_size=size)))
        for name, size in (("small", VOCABULARY_SIZE), ("large", VOCABULARY_SIZE + 2))
    )
    with pytest.raises(QualityError, match=f"vocabularies differ in size: {VOCABULARY_SIZE} and {VOCABULARY_SIZE + 2}"):
        compare(large, small, texts())


def test_no_positions_and_bad_texts_are_refused(tmp_path: Path) -> None:
    model = load(split(build_checkpoint(tmp_path / "model", FAMILIES["llama"])))
    with pytest.raises(QualityError, match="no token to predict"):
        compare(model, model, [])
    with pytest.raises(OptionError, match="index 1 has 400 tokens"):
        compare(model, model, [ScoredText(0, (3,), (4,)), ScoredText(1, (3,), (4,) * 400)])


def test_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(split(build_checkpoint(tmp_path / "model", FAMILIES["llama"])))

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(NamelessFile, "write_at", full)
    with pytest.raises(OSError, match="No space left"):
        compare(model, model, texts())


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def targets(count: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(9))


def test_divergence_computed_by_hand() -> None:
    """Of a half each against a quarter and three quarters: ln 2 / 2 + ln (2/3) / 2."""
    reference = torch.tensor([[0.5, 0.5]]).log()
    compared = torch.tensor([[0.25, 0.75]]).log()
    actual = compare_logits(reference, compared, torch.tensor([0]))
    assert actual.divergence.item() == pytest.approx(math.log(2) / 2 + math.log(2 / 3) / 2, abs=1e-7)
    assert actual.loss.item() == pytest.approx(math.log(4), abs=1e-7)
    assert actual.reference_loss.item() == pytest.approx(math.log(2), abs=1e-7)


def test_divergence_equals_torch() -> None:
    reference, compared, follows = logits(40, 30), logits(40, 30, seed=1), targets(40, 30)
    measures = compare_logits(reference, compared, follows)
    true, actual = (torch.log_softmax(tensor.double(), -1) for tensor in (reference, compared))
    expected = torch.nn.functional.kl_div(actual, true, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(measures.divergence, expected)
    losses = torch.nn.functional.cross_entropy(compared.double(), follows, reduction="none")
    torch.testing.assert_close(measures.loss, losses)
    summary = summarize([measures])
    assert summary.agreement == (reference.argmax(-1) == compared.argmax(-1)).double().mean().item()
    assert 0 < summary.agreement < 1
    assert summary.perplexity == pytest.approx(losses.mean().exp().item())


def test_divergence_is_zero_from_itself_and_never_negative() -> None:
    """Also where a model forbids tokens, whose logits are -inf."""
    same = logits(20, 50)
    same[:, 7] = -math.inf
    follows = torch.zeros(20, dtype=torch.long)
    assert compare_logits(same, same.clone(), follows).divergence.tolist() == [0.0] * 20
    assert summarize([compare_logits(same, same, follows)]).agreement == 1
    near = same * (1 + 1e-7)
    assert (compare_logits(same, near, follows).divergence >= 0).all()


def test_small_divergences_are_not_lost_in_rounding() -> None:
    """Of logits that differ by d in one of two tokens it is d²/8 but for higher powers; float32 would give noise."""
    d = 1e-5
    reference, compared = (torch.tensor([[3.0, 3.0 + difference]], dtype=torch.float64) for difference in (0, d))
    actual = compare_logits(reference, compared, torch.tensor([0]))
    assert actual.divergence.item() == pytest.approx(d * d / 8, rel=1e-3)


def positions(*divergences: float) -> Positions:
    count = len(divergences)
    zeros = torch.zeros(count, dtype=torch.float64)
    return Positions(torch.tensor(divergences, dtype=torch.float64), zeros, zeros, torch.ones(count).bool())


def test_summary_of_all_positions() -> None:
    summary = summarize([positions(*range(1, 100)), positions(1000)])
    assert summary.positions == 100
    assert summary.divergence.mean == pytest.approx((99 * 100 / 2 + 1000) / 100)
    assert (summary.divergence.median, summary.divergence.percentile, summary.divergence.largest) == (50, 99, 1000)
    values = torch.tensor([*range(1, 100), 1000.0])
    assert summary.divergence.error == pytest.approx((values.std() / 10).item())
    assert (summary.perplexity, summary.reference_perplexity) == (1, 1)


def test_summary_of_one_position() -> None:
    d = summarize([positions(0.25)]).divergence
    assert (d.mean, d.error, d.median, d.percentile, d.largest) == (0.25, 0, 0.25, 0.25, 0.25)


def test_uniform_perplexity_is_the_vocabulary_size() -> None:
    summary = summarize([compare_logits(torch.zeros(9, 32), torch.zeros(9, 32), targets(9, 32))])
    assert summary.perplexity == pytest.approx(32)
