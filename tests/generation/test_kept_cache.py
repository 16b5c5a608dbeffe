"""How far a cache goes back, and that it then is what it was: real models, every kind of layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rabbitllm.generation.kv_cache import CONTINUING, KeptCache, keeps
from tests.chat.talkers import family_of
from tests.support.builders import WINDOW, build_checkpoint
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import one_thread, plain_model  # noqa: F401  a fixture that applies by itself

IDS = torch.randint(3, 270, (40,), generator=torch.Generator().manual_seed(1)).tolist()
FIRST, SECOND = 20, 30
"""Tokens before a mark, and in all before the cache goes back."""
SHORT = ("llama", "gemma3", "falcon_h1")
NAMES = [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in ("mistral", "gemma4", "qwen3_next", "zaya"))]
"""Every kind of layer; the short run has full attention alone, with sliding windows, and with a state."""


def made(folder: Path, name: str) -> Any:
    if family_of(name).model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("transformers does not know it")
    return plain_model(build_checkpoint(folder, family_of(name), tied=family_of(name).ties[0], tokenizer=False))


@torch.no_grad()
def logits(model: Any, kept: KeptCache, until: int) -> torch.Tensor:
    """Of all tokens that the cache lacks, (tokens, vocabulary)."""
    ids = torch.tensor([IDS[len(kept.ids) : until]])
    found: torch.Tensor = model(ids, past_key_values=kept.cache, use_cache=True).logits[0]
    kept.hold(IDS[:until])
    return found


def filled(model: Any) -> KeptCache:
    kept = KeptCache(model)
    logits(model, kept, FIRST)
    kept.mark(IDS[:FIRST])
    logits(model, kept, SECOND)
    return kept


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_goes_back_to_what_it_was(tmp_path: Path, name: str) -> None:
    model = made(tmp_path, name)
    assert keeps(model)
    whole = model(torch.tensor([IDS])).logits[0].detach()
    cuttable = name == "llama"
    for length in (SECOND + 5, SECOND, SECOND - 1, FIRST + 1, FIRST, FIRST - 1, 1, 0):
        kept = filled(model)
        left = kept.go_back(length)
        assert left == (min(length, SECOND) if cuttable or length >= SECOND else FIRST if length >= FIRST else 0)
        assert kept.ids == IDS[:left]
        torch.testing.assert_close(logits(model, kept, len(IDS)), whole[left:], rtol=0, atol=1e-4)
        again = kept.go_back(FIRST)  # the mark is still good, though what it holds has been used
        assert again == (FIRST if left >= FIRST or cuttable else 0)
        torch.testing.assert_close(logits(model, kept, len(IDS)), whole[again:], rtol=0, atol=1e-4)


def test_a_window_that_has_not_slid_is_cut(tmp_path: Path) -> None:
    model = made(tmp_path, "mistral")
    whole = model(torch.tensor([IDS])).logits[0].detach()
    kept = KeptCache(model)
    logits(model, kept, WINDOW - 1)
    assert kept.go_back(3) == 3
    torch.testing.assert_close(logits(model, kept, len(IDS)), whole[3:], rtol=0, atol=1e-4)
    assert kept.go_back(len(IDS) - 1) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_pass_that_was_broken_off(tmp_path: Path, name: str, layers: int) -> None:
    """After so many layers had taken its tokens, and the others had not."""
    model = made(tmp_path, name)
    whole = model(torch.tensor([IDS])).logits[0].detach()

    def stop(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    kept = filled(model)
    hook = model.get_decoder().layers[layers].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        logits(model, kept, SECOND + 3)
    hook.remove()
    left = kept.recover(SECOND, IDS)
    assert left == (SECOND if name == "llama" else FIRST)
    torch.testing.assert_close(logits(model, kept, len(IDS)), whole[left:], rtol=0, atol=1e-4)


def test_a_first_pass_that_was_broken_off_leaves_nothing(tmp_path: Path) -> None:
    model = made(tmp_path, "llama")
    kept = KeptCache(model)
    logits(model, kept, 5)
    assert kept.recover(0, []) == 0
    assert (kept.ids, kept.nbytes) == ([], 0)


def test_what_it_takes(tmp_path: Path) -> None:
    """KV cache, float32: 3 layers, 2 heads of 16; of windows only so many tokens, and once more for the mark."""
    per_token = 2 * 2 * 16 * 4
    assert filled(made(tmp_path / "a", "llama")).nbytes == 3 * SECOND * per_token
    windows = filled(made(tmp_path / "b", "mistral")).nbytes
    assert windows == pytest.approx(2 * 3 * (WINDOW - 1) * per_token, abs=100)


def test_marks_do_not_grow_in_number(tmp_path: Path) -> None:
    model = made(tmp_path, "mistral")
    kept, sizes = KeptCache(model), []
    for length in range(10, 40, 3):
        logits(model, kept, length)
        kept.mark(IDS[:length])
        sizes.append(kept.nbytes)
    assert len(set(sizes[2:])) == 1


def test_every_type_named_is_tried() -> None:
    """By the long test of `test_session`, which goes through these families."""
    assert {family.model_type for family in HYBRIDS.values()} >= CONTINUING
