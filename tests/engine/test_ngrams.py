"""What a token's n-grams add to a layer by one call has the bits of the class, which does all else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rabbitllm.engine import _ngrams
from rabbitllm.engine._ngrams import fuse_ngrams
from tests.engine.test_siblings import PROMPT, checkpoint
from tests.engine.test_streams import SETTINGS, Change, doubled, hooked, other_weight
from tests.support.hybrid_families import HYBRIDS
from tests.support.kernel_rows import plain_products as plain_products
from tests.support.tiny_models import ALL, load

qwen4_exp = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("plain_products")]
END = 2
TEXT = [5, END, 7, 8, END, END, 9, 10, 11, 12]
"""Tokens, with end tokens at every distance that an n-gram may have to one."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a module whether it was not left to its class."""
    done, compute = list[bool](), _ngrams._computed

    def counted(*args: Any, **named: Any) -> torch.Tensor | None:
        result = compute(*args, **named)
        done.append(result is not None)
        return result

    monkeypatch.setattr(_ngrams, "_computed", counted)
    return done


@torch.no_grad()
def steps(model: Any, cache: DynamicCache, tokens: list[int], **named: Any) -> list[torch.Tensor]:
    return [model(torch.tensor([[token]]), cache=cache, **named).logits for token in tokens]


def results(model: Any) -> list[torch.Tensor]:
    """Logits of a prompt and of steps, and the states of n-grams."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = [model(PROMPT, cache=cache).logits, *steps(model, cache, TEXT)]
    return [*logits, *cache.layers[0].conv_states.values()]


def without(monkeypatch: pytest.MonkeyPatch, directory: Path, budget: int = ALL) -> Any:
    """A model whose n-grams are computed by their class."""
    with monkeypatch.context() as patch:
        patch.setattr("rabbitllm.engine.fusions.fuse_ngrams", lambda model: 0)
        return load(directory, budget, exact=False, fast_bfloat16=True)


@pytest.mark.parametrize("tokens", [2, 4])
@pytest.mark.parametrize(("compression", "budget"), [("4bit", ALL), ("4bit", 0), (None, ALL)])
def test_a_token_has_the_bits_of_the_class(
    tmp_path: Path, tokens: int, compression: str | None, budget: int, calls: list[bool], monkeypatch: Any
) -> None:
    sizes = {"ngram_size": tokens, "eos_token_id": END, "ngram_vocab_size_base": 3000, "ple_embed_dim": 192}
    directory = checkpoint(tmp_path, HYBRIDS["qwen4_exp"], compression, **SETTINGS, **sizes)
    model, by_class = load(directory, budget, exact=False, fast_bfloat16=True), without(monkeypatch, directory, budget)
    assert all(calls)  # of the trial
    del calls[:]
    expected = results(by_class)
    assert not calls
    assert all(map(torch.equal, results(model), expected))
    assert calls == [False, *[True] * len(TEXT)]  # the prompt is left to the class
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    with torch.inference_mode():
        assert all(map(torch.equal, results(model), expected))
    torch.set_num_threads(threads)
    assert calls.count(True) == 2 * len(TEXT)


CHANGES: dict[str, Change] = {
    **{f"hook on {name}": hooked("ple", name) for name in ("ple_embedding", "conv1d", "norm_query", "key_proj")},
    "hook on the table": hooked("ple", "ple_embedding", "ngram_embedding"),
    **{f"weight of {name}": other_weight("ple", name) for name in ("conv1d", "norm_conv", "value_proj")},
    "end token": lambda patch, layer: patch.setattr(layer.ple.ple_embedding, "eos_token_id", 9),
    "remainders": lambda patch, layer: patch.setitem(
        layer.ple.ple_embedding._buffers, "ngram_heads_vocab_sizes", layer.ple.ple_embedding.ngram_heads_vocab_sizes - 9
    ),
    "epsilon": lambda patch, layer: patch.setattr(layer.ple.norm_conv, "eps", 1.0),
    "own forward": lambda patch, layer: patch.setattr(layer.ple.ple_embedding, "forward", lambda *args: ROWS),
    "class of tables": lambda patch, layer: patch.setattr(
        type(layer.ple.ple_embedding), "forward", lambda self, *args: ROWS
    ),
}
ROWS = torch.ones(1, 1, 64, dtype=torch.bfloat16)


def test_a_change_between_two_steps_is_noticed(
    tmp_path: Path, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, HYBRIDS["qwen4_exp"], "4bit", **SETTINGS)
    models = [load(directory, exact=False, fast_bfloat16=True), without(monkeypatch, directory)]
    caches = [DynamicCache(config=model.config) for model in models]

    def both(token: int) -> list[torch.Tensor]:
        return [steps(model, cache, [token])[0] for model, cache in zip(models, caches, strict=True)]

    both(1)
    assert torch.equal(*both(3))
    for token, (name, change) in enumerate(CHANGES.items(), 4):
        before = both(token)[0]
        with monkeypatch.context() as patch:
            for model in models[: 1 if name.startswith("class") else 2]:
                change(patch, model.model.layers[0])
            changed = both(token)
            assert torch.equal(*changed), name
            assert not torch.equal(changed[0], before), name
        del calls[:]
        assert torch.equal(*both(token)), name
        assert any(calls), name


def test_a_class_that_does_otherwise_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(checkpoint(tmp_path, HYBRIDS["qwen4_exp"], "4bit", **SETTINGS), exact=False)
    layer = model.model.layers[0].ple
    vars(layer).pop("forward")
    own, rows = type(layer).forward, type(layer.ple_embedding)
    others = [
        (type(layer), "forward", lambda self, *args, **named: doubled(self, args, own(self, *args, **named))),
        (rows, "_shift_right_ignore_eos", lambda self, tokens, shift: tokens.roll(shift)),
    ]
    for other in others:
        with monkeypatch.context() as patch:
            patch.setattr(*other)
            assert fuse_ngrams(layer) == 0
    assert fuse_ngrams(layer) == 1
