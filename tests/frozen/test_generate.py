"""`generate` of the model that `AutoModel.from_pretrained` returns: the tokens of transformers, in every way it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import transformers

from rabbitllm import AutoModel
from tests.frozen.support.families import FAMILIES, INPUT, build, plain_model
from tests.frozen.support.talking import talker
from tests.support.one_thread import one_thread as one_thread

REPEATING = torch.tensor([[1, 40, 81, 7, 40, 81, 7, 40, 81, 7, 40]])
NEW = 12

WAYS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "temperature": 1.2, "top_p": 0.9},
    "drawn-several": {"do_sample": True, "temperature": 0.7, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "drawn-beams": {"do_sample": True, "num_beams": 2, "temperature": 0.9},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "prompt-lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "in-chunks": {"do_sample": False, "prefill_chunk_size": 4},
    "static-cache": {"do_sample": False, "cache_implementation": "static"},
    "no-cache": {"do_sample": False, "use_cache": False},
}
SHORT = ("greedy", "drawn", "beams", "prompt-lookup", "static-cache")


def load(folder: Path, memory: int | None = 0, **options: Any) -> Any:
    """A model on the CPU with so many bytes for its weights; None for enough."""
    limit = {} if memory is None else {"max_memory": {"cpu": memory}}
    return AutoModel.from_pretrained(folder, device="cpu", exact=True, show_layer_progress=False, **limit, **options)


def generated(model: Any, ids: torch.Tensor = REPEATING, **how: Any) -> Any:
    torch.manual_seed(5)
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=0, **how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talker(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return plain_model(folder)


@pytest.fixture(scope="module", params=[0, pytest.param(None, marks=pytest.mark.long)], ids=["streamed", "resident"])
def model(folder: Path, request: pytest.FixtureRequest) -> Any:
    return load(folder, request.param)


def ways(short: tuple[str, ...] = SHORT) -> list[Any]:
    return [pytest.param(WAYS[way], id=way, marks=() if way in short else pytest.mark.long) for way in WAYS]


@pytest.mark.parametrize("how", ways())
def test_the_tokens_of_transformers(model: Any, plain: Any, how: Mapping[str, Any]) -> None:
    expected = generated(plain, **how)
    assert torch.equal(generated(model, **how), expected)
    assert expected.shape[1] > REPEATING.shape[1] + 4


def test_scores_are_equal_bit_for_bit(model: Any, plain: Any) -> None:
    how = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found, expected = generated(model, **how), generated(plain, **how)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))


def test_a_batch_with_padding_on_the_left(model: Any, plain: Any) -> None:
    ids = torch.tensor([[0, 0, 0, 1, 40, 81], [1, 7, 200, 33, 160, 5]])
    how = {"attention_mask": (ids != 0).long(), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))


@pytest.mark.parametrize("sample", [False, pytest.param(True, marks=pytest.mark.long)], ids=["greedy", "drawn"])
def test_with_an_assistant_model(model: Any, plain: Any, tmp_path: Path, sample: bool) -> None:
    assistant = plain_model(talker(tmp_path / "assistant", num_hidden_layers=1))
    how = {"assistant_model": assistant, "do_sample": sample}
    assert torch.equal(generated(model, **how), generated(plain, **how))


def test_a_streamer_gets_the_text_from_another_thread(model: Any, plain: Any) -> None:
    streamer = transformers.TextIteratorStreamer(model.tokenizer, skip_prompt=True)
    thread = Thread(target=generated, args=(model,), kwargs={"streamer": streamer, "do_sample": False})
    thread.start()
    said = "".join(streamer)
    thread.join()
    expected = generated(plain, do_sample=False)[0, REPEATING.shape[1] :]
    assert said == model.tokenizer.decode(expected, clean_up_tokenization_spaces=False)


def test_a_pipeline(model: Any, plain: Any) -> None:
    def said(one: Any) -> Any:
        chain = transformers.pipeline("text-generation", model=one, tokenizer=model.tokenizer)
        return chain([{"role": "user", "content": "the rain"}], max_new_tokens=5, do_sample=False)

    assert said(model) == said(plain)


def test_a_loop_of_ones_own_with_a_cache_that_is_cut(model: Any, plain: Any) -> None:
    def steps(one: Any) -> list[torch.Tensor]:
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            first = one(REPEATING, past_key_values=cache).logits
            cache.crop(6 - REPEATING.shape[1])
            again = one(REPEATING[:, 6:], past_key_values=cache).logits
        return [first, again]

    assert all(torch.equal(a, b) for a, b in zip(steps(model), steps(plain), strict=True))


GENERATING = [name for name in FAMILIES if name not in ("bert", "llava", "llama-tied-float32")]


@pytest.mark.long
@pytest.mark.parametrize("family", GENERATING)
def test_every_family_draws_and_searches_as_transformers_does(tmp_path: Path, family: str) -> None:
    folder = build(tmp_path / "model", family)
    plain, model = plain_model(folder, family), load(folder)
    for way in ("drawn", "beams"):
        assert torch.equal(generated(model, INPUT, **WAYS[way]), generated(plain, INPUT, **WAYS[way])), way
