"""Many tokens for each read of the weights: batches, prompts in chunks, and every KV cache of transformers.

Each result equals that of plain transformers; the loader counts the reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from rabbitllm.engine.placement import SLOTS, Tier
from rabbitllm.telemetry.passes import READ
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import ALL, bytes_when_made, dequantized, load, plain_model, split, tiers

FAMILIES = ["llama", "gemma2"]
"""With full attention, and with layers of sliding windows in turns with it."""
PLACES = ["streamed", "resident", "packed"]
LONG = {"max_position_embeddings": 1024}
TOKENS = 6
ON_GPU = [name for name in ALL_CACHE_IMPLEMENTATIONS if name.startswith("offloaded")]
QUANTIZED = ["quanto", "hqq", "fp8"]


def ids_of(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 250, (batch, length), generator=torch.Generator().manual_seed(length))


def generated(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    arguments = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    tokens: torch.Tensor = model.generate(ids.to(model.device), attention_mask=torch.ones_like(ids), **arguments)
    return tokens


def outcome(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor | str:
    """The tokens, or the message of the error."""
    try:
        return generated(model, ids, **options)
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def assert_same_outcome(actual: torch.Tensor | str, expected: torch.Tensor | str) -> None:
    if isinstance(expected, str):
        assert actual == expected
    else:
        assert isinstance(actual, torch.Tensor), actual
        assert torch.equal(actual, expected)


def loads(model: Any) -> int:
    """The number of reads of units, after the running ones have ended."""
    loader = model.streamer.executors["cpu"].loader
    for _, future in list(loader._prefetcher._pending.values()):
        future.result(30)
    count: int = loader.loads
    return count


def assert_read_once_a_pass(model: Any, passes: int) -> None:
    """Every streamed unit was read once for each pass; the first ones once more, for one that never came."""
    streamed = [unit for unit, tier in tiers(model).items() if tier is Tier.STREAMED]
    assert loads(model) == passes * len(streamed) + SLOTS
    assert len(model.profiler.passes) == passes
    for index, unit in enumerate(streamed):
        read = model.profiler.layers[unit][READ]
        assert read.count == passes + (index < SLOTS)
        assert read.nbytes == read.count * model.placement.of(unit).stored


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("long") / "model", "llama", shards=2, **LONG)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Any:
    return plain_model(checkpoint)


@pytest.fixture
def streamed(checkpoint: Path) -> Any:
    return load(split(checkpoint), 0, profiling=True)


# One reading of the weights for all of a pass


def test_batch_of_32_reads_weights_once_a_token(streamed: Any, plain: Any) -> None:
    ids = ids_of(32, 9)
    assert torch.equal(generated(streamed, ids), generated(plain, ids))
    assert_read_once_a_pass(streamed, TOKENS)
    first, *further = streamed.profiler.passes
    assert (first.tokens, first.made) == (32 * 9, 32)
    assert [p.tokens for p in further] == [32] * (TOKENS - 1)
    assert [p.made for p in further] == [32] * (TOKENS - 2) + [None]


def test_long_prompt_reads_weights_once(streamed: Any, plain: Any) -> None:
    ids = ids_of(1, 700)
    assert torch.equal(generated(streamed, ids), generated(plain, ids))
    assert_read_once_a_pass(streamed, TOKENS)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("implementation", [None, "static"])
def test_prompt_in_chunks_reads_weights_once_a_chunk(
    streamed: Any, plain: Any, implementation: str | None, batch: int
) -> None:
    ids, way = ids_of(batch, 700), {"prefill_chunk_size": 256, "cache_implementation": implementation}
    assert torch.equal(generated(streamed, ids, **way), generated(plain, ids, **way))
    assert_read_once_a_pass(streamed, 3 + TOKENS - 1)
    chunks = streamed.profiler.passes[:3]
    assert [chunk.entry.length for chunk in chunks] == [256, 256, 700 - 512]
    assert {chunk.kind for chunk in chunks} == {"prompt"}
    assert [chunk.made for chunk in chunks] == [0, 0, batch]


@pytest.mark.parametrize("way", [{}, {"prefill_chunk_size": 64}], ids=["whole", "chunks"])
def test_logits_are_computed_for_the_last_position_only(streamed: Any, way: Mapping[str, Any]) -> None:
    """Those of a long prompt would take more memory than anything else."""
    shapes: list[torch.Size] = []
    streamed.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    generated(streamed, ids_of(2, 300), **way)
    assert {shape[:2] for shape in shapes} == {(2, 1)}


# Every KV cache of transformers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str | None], tuple[Path, Any]]:
    """(family, compression) -> its split directory, and the plain model of the same weights."""
    built: dict[tuple[str, str | None], tuple[Path, Any]] = {}
    for family in FAMILIES:
        home = tmp_path_factory.mktemp(family)
        folder = build_checkpoint(home / "model", family, shards=2)
        built[family, None] = split(folder), plain_model(folder)
        plain = dequantized(folder, home / "same", "4bit", torch.float32)
        built[family, "4bit"] = split(folder, "4bit"), plain_model(plain)
    return built


def placed(folders: Mapping[tuple[str, str | None], tuple[Path, Any]], family: str, place: str) -> tuple[Any, Any]:
    """The model with its decoder layers in that place, and the plain one."""
    directory, plain = folders[family, "4bit" if place == "packed" else None]
    budget = {"streamed": 0, "resident": ALL, "packed": bytes_when_made(load(directory)) - 1}[place]
    model = load(directory, budget)
    assert {tiers(model)[f"model.layers.{n}"] for n in range(3)} == {Tier(place)}
    return model, plain


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", [name for name in ALL_CACHE_IMPLEMENTATIONS if name != "quantized"])
def test_caches(folders: Any, family: str, place: str, implementation: str) -> None:
    model, plain = placed(folders, family, place)
    ids, way = ids_of(2, 21), {"cache_implementation": implementation, "max_new_tokens": 12}
    expected = outcome(plain, ids, **way)
    # offloading is from a GPU, and transformers says so where there is none
    assert isinstance(expected, str) == (implementation in ON_GPU and not torch.cuda.is_available())
    assert_same_outcome(outcome(model, ids, **way), expected)


@pytest.mark.parametrize("implementation", [name for name in ALL_CACHE_IMPLEMENTATIONS if name not in ON_GPU])
@pytest.mark.parametrize("budget", [0, ALL])
def test_caches_where_codes_are_multiplied(folders: Any, budget: int, implementation: str) -> None:
    """No plain model multiplies from codes, so the reference is the streamed model with its default cache."""
    model = load(folders["llama", "4bit"][0], budget, exact=False)
    ids, way = ids_of(2, 21), {"cache_implementation": implementation}
    if implementation == "quantized":
        way["cache_config"] = {"backend": "fp8"}
        # coarser keys may choose another token: what has to be the same is that of another turn
        assert torch.equal(generated(model, ids, **way), generated(model, ids, **way))
    else:
        assert torch.equal(generated(model, ids, **way), generated(model, ids))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", QUANTIZED)
def test_quantized_caches(folders: Any, place: str, backend: str) -> None:
    model, plain = placed(folders, "llama", place)
    ids, way = ids_of(2, 150), {"cache_implementation": "quantized", "cache_config": {"backend": backend}}
    expected = outcome(plain, ids, **way)
    if isinstance(expected, str):  # a backend is a package, which may not be installed
        assert expected.startswith("ImportError")
        assert f"pip install {'optimum-quanto' if backend == 'quanto' else backend}" in expected
        assert backend != "fp8"
    assert_same_outcome(outcome(model, ids, **way), expected)


@pytest.mark.parametrize("place", PLACES)
def test_sliding_window_is_kept_over_many_tokens(folders: Any, place: str) -> None:
    model, plain = placed(folders, "gemma2", place)
    ids = ids_of(1, 30)
    assert torch.equal(generated(model, ids, max_new_tokens=40), generated(plain, ids, max_new_tokens=40))


# Several tokens a pass


@pytest.mark.parametrize("way", ["prompt lookup", "a perfect assistant", "another assistant"])
def test_assisted_generation_makes_several_tokens_a_pass(
    streamed: Any, plain: Any, checkpoint: Path, tmp_path: Path, way: str
) -> None:
    ids = ids_of(1, 12).repeat(1, 4)
    expected = generated(plain, ids, max_new_tokens=40)
    options: dict[str, Any] = {"max_new_tokens": 40}
    if way == "prompt lookup":
        ids = expected[:, :-16].repeat(1, 2)  # so that what comes next has been there
        expected = generated(plain, ids, max_new_tokens=40)
        options["prompt_lookup_num_tokens"] = 6
    elif way == "a perfect assistant":
        options["assistant_model"] = load(split(checkpoint), 0)
    else:
        options["assistant_model"] = plain_model(build_checkpoint(tmp_path, "llama", num_hidden_layers=1, **LONG))
    actual = generated(streamed, ids, **options)
    assert torch.equal(actual, expected)
    counts = [p.made for p in streamed.profiler.passes]
    assert counts[-1] is None  # not known before the next pass
    assert 1 <= 40 - sum(count or 0 for count in counts[:-1]) <= streamed.profiler.passes[-1].tokens
    assert_read_once_a_pass(streamed, len(counts))
    assert streamed.profiler.sums["further"].made_per_pass == sum(counts[1:-1]) / (len(counts) - 2)
    if way != "another assistant":
        assert len(counts) < 36
