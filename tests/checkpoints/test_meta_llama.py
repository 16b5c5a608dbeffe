"""What params.json and the tensors of Meta's files say, and where they contradict each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rabbitllm.checkpoints._meta_llama import LlamaVocabulary, Shapes, config_of, parse_params
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.checkpoints.meta_checkpoint import ranks_of
from rabbitllm.errors import CheckpointError, InvalidIndexError, MissingShardError, UnreadableFormatError
from tests.support.meta_files import (
    RANK,
    params_of,
    ranks_of_model,
    tiktoken_file,
    tiny_llama,
    write_as_transformers,
    write_meta,
)

PUBLISHED: dict[str, tuple[dict[str, Any], Shapes, dict[str, Any]]] = {
    "Llama 1 7B": (
        {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-06, "vocab_size": -1},
        Shapes(32_000, 11_008, 1, "F16", tied=False),
        {"max_position_embeddings": 2048, "rope_theta": 10_000.0, "num_key_value_heads": 32, "eos_token_id": 2},
    ),
    "Llama 2 7B": (
        {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": -1},
        Shapes(32_000, 11_008, 1, "BF16", tied=False),
        {"max_position_embeddings": 4096, "rope_theta": 10_000.0, "bos_token_id": 1},
    ),
    "Llama 2 70B": (
        {
            "dim": 8192,
            "multiple_of": 4096,
            "ffn_dim_multiplier": 1.3,
            "n_heads": 64,
            "n_kv_heads": 8,
            "n_layers": 80,
            "norm_eps": 1e-05,
            "vocab_size": -1,
        },
        Shapes(32_000, 28_672, 1, "BF16", tied=False),
        {"max_position_embeddings": 4096, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "Code Llama 34B": (
        {
            "dim": 8192,
            "multiple_of": 256,
            "ffn_dim_multiplier": 1.0,
            "n_heads": 64,
            "n_kv_heads": 8,
            "n_layers": 48,
            "norm_eps": 1e-05,
            "rope_theta": 1_000_000,
        },
        Shapes(32_000, 22_016, 1, "BF16", tied=False),
        {"max_position_embeddings": 16_384, "rope_theta": 1e6},
    ),
    "Llama 3 8B": (
        {
            "dim": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "n_kv_heads": 8,
            "vocab_size": 128_256,
            "multiple_of": 1024,
            "ffn_dim_multiplier": 1.3,
            "norm_eps": 1e-05,
            "rope_theta": 500_000.0,
        },
        Shapes(128_256, 14_336, 0, "BF16", tied=False),
        {"max_position_embeddings": 8192, "rope_theta": 5e5, "bos_token_id": 128_000, "eos_token_id": 128_001},
    ),
    "Llama 3.1 70B": (
        {
            "dim": 8192,
            "ffn_dim_multiplier": 1.3,
            "multiple_of": 4096,
            "n_heads": 64,
            "n_kv_heads": 8,
            "n_layers": 80,
            "norm_eps": 1e-05,
            "rope_theta": 500_000.0,
            "use_scaled_rope": True,
            "vocab_size": 128_256,
        },
        Shapes(128_256, 28_672, 0, "BF16", tied=False),
        {"max_position_embeddings": 131_072, "tie_word_embeddings": False},
    ),
    "Llama 3.2 1B": (
        {
            "dim": 2048,
            "ffn_dim_multiplier": 1.5,
            "multiple_of": 256,
            "n_heads": 32,
            "n_kv_heads": 8,
            "n_layers": 16,
            "norm_eps": 1e-05,
            "rope_theta": 500_000.0,
            "use_scaled_rope": True,
            "vocab_size": 128_256,
        },
        Shapes(128_256, 8192, 0, "BF16", tied=True),
        {"max_position_embeddings": 131_072, "tie_word_embeddings": True, "head_dim": 64},
    ),
}
"""params.json as published, what the tensors say, and some of what the model's config for transformers says."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    content, shapes, expected = PUBLISHED[name]
    params = parse_params(content, "params.json")
    assert params.intermediate == shapes.intermediate
    config = config_of(params, shapes, None)
    assert expected.items() <= config.items()
    factor = {"Llama 3.1 70B": 8.0, "Llama 3.2 1B": 32.0}.get(name)
    assert config.get("rope_scaling", {}).get("factor") == factor
    assert parse_params({"model": content}, "params.json") == params
    llama: Any = transformers.LlamaConfig(**config)
    assert llama.rope_parameters["rope_theta"] == config["rope_theta"]
    assert llama.rope_parameters["rope_type"] == ("llama3" if factor else "default")


def test_the_tokenizer_decides_between_generations() -> None:
    content, shapes, _ = PUBLISHED["Llama 2 7B"]
    config = config_of(parse_params(content, "x"), shapes, LlamaVocabulary(True, 600, 300, (301, 309)))
    assert (config["rope_theta"], config["max_position_embeddings"]) == (5e5, 8192)
    assert (config["bos_token_id"], config["eos_token_id"]) == (300, [301, 309])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("embedding_dim", [0, 1])
def test_derived_config_is_that_of_the_model(tmp_path: Path, ranks: int, embedding_dim: int) -> None:
    model = tiny_llama(kv_heads=4)
    derived = LocalCheckpoint(write_meta(tmp_path, model, ranks, embedding_dim)).derived()
    assert set(derived) == {"config.json", "generation_config.json"}
    actual = transformers.LlamaConfig(**json.loads(derived["config.json"])).to_dict()
    expected = model.config.to_dict()
    for key in ("dtype", "torch_dtype", "architectures", "initializer_range", "transformers_version"):
        actual.pop(key, None), expected.pop(key, None)
    assert actual == expected


def test_existing_files_are_not_derived(tmp_path: Path) -> None:
    source = write_meta(tmp_path, tiny_llama(vocabulary=640), tokenizer=tiktoken_file())
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert set(LocalCheckpoint(source).derived()) == set(names)
    (source / "tokenizer_config.json").write_text("{}")
    assert set(LocalCheckpoint(source).derived()) == set(names[:2])
    (source / "config.json").write_text('{"some": "statistics"}')
    assert set(LocalCheckpoint(source).derived()) == set(names[:2])
    (source / "config.json").write_text('{"model_type": "llama"}')
    assert set(LocalCheckpoint(source).derived()) == {"generation_config.json"}
    write_as_transformers(source, tiny_llama())
    assert LocalCheckpoint(source).derived() == {}


# Contradictions


def refused(folder: Path, error: type[CheckpointError], says: str) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(error, match=says) as info:
        LocalCheckpoint(folder).derived()
    assert info.value.remedy
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (
            {"dim": 128},
            InvalidIndexError,
            r"wq\.weight' of shape \(64, 64\); params.json says \(128, 128\)",
        ),
        ({"n_layers": 3}, InvalidIndexError, r"has no tensor 'layers\.2\.attention\.wq\.weight'"),
        (
            {"n_layers": 1},
            UnreadableFormatError,
            r"has a tensor 'layers\.1\..*', which a Llama of 1 layers does not have",
        ),
        (
            {"n_kv_heads": 2},
            InvalidIndexError,
            r"attention\.wk\.weight' of shape \(64, 64\); .* \(16, 64\)",
        ),
        ({"multiple_of": 100}, InvalidIndexError, r"feed-forward layers of 128 rows .* say 100"),
        ({"vocab_size": 300}, InvalidIndexError, r"a vocabulary of 320 over 1 ranks; params\.json says 300"),
        ({"n_heads": 5}, InvalidIndexError, "dim 64 is not an even number of rows for each of 5 heads"),
        ({"n_heads": 64}, InvalidIndexError, "dim 64 is not an even number of rows for each of 64 heads"),
        ({"n_kv_heads": 3}, InvalidIndexError, "n_heads 8 is not a multiple of n_kv_heads 3"),
        ({"n_layers": None}, InvalidIndexError, "has no 'n_layers'"),
        ({"norm_eps": None}, InvalidIndexError, "has no 'norm_eps'"),
        ({"n_layers": 10**9}, InvalidIndexError, "n_layers is 1000000000, expected 1 to 4,096"),
        ({"n_layers": -1}, InvalidIndexError, "has n_layers -1; expected a positive number"),
        ({"dim": -1}, InvalidIndexError, "has dim -1; expected a positive number"),
        ({"dim": "64"}, InvalidIndexError, "has dim '64'; expected a positive number"),
        ({"dim": True}, InvalidIndexError, "has dim True; expected a positive number"),
        ({"n_heads": 0}, InvalidIndexError, "has n_heads 0; expected a positive number"),
        ({"norm_eps": float("nan")}, InvalidIndexError, "has norm_eps nan"),
        ({"rope_theta": float("inf")}, InvalidIndexError, "has rope_theta inf"),
        ({"use_scaled_rope": 1}, InvalidIndexError, "has use_scaled_rope 1; expected true or false"),
        ({"moe_args": {"num_experts": 16}}, UnreadableFormatError, "'moe_args', which belongs to a mixture of experts"),
        ({"vision_chunk_size": 448}, UnreadableFormatError, "belongs to a model that sees images"),
        ({"quantization_args": {"scheme": "int4"}}, UnreadableFormatError, "belongs to quantized weights"),
        ({"lora_args": {"rank": 16}}, UnreadableFormatError, "belongs to quantized weights"),
        ({"sliding_window": 4096}, UnreadableFormatError, "'sliding_window', which belongs to another model"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_parameters_that_contradict(
    tmp_path: Path, changes: dict[str, Any], error: type[CheckpointError], says: str
) -> None:
    refused(write_meta(tmp_path, tiny_llama(), **changes), error, says)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"dim": 64, "dim": 32}', "\x00"])
def test_parameters_that_are_no_json(tmp_path: Path, content: str) -> None:
    source = write_meta(tmp_path, tiny_llama())
    (source / "params.json").write_text(content)
    with pytest.raises(InvalidIndexError, match=r"params\.json"):
        LocalCheckpoint(source)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"vision_model.conv1.weight": torch.ones(2, 2)}, UnreadableFormatError, "has a tensor 'vision_model"),
        (
            {"layers.0.attention.wq.scales": torch.ones(2)},
            UnreadableFormatError,
            "has a tensor 'layers.0.attention",
        ),
        (
            {"layers.0.attention.wo.weight": torch.ones(64, 64).to(torch.int8)},
            UnreadableFormatError,
            "in I8: these weights",
        ),
        ({"layers.0.attention.wo.weight": torch.ones(64, 32)}, InvalidIndexError, r"shape \(64, 32\); .* \(64, 64\)"),
        ({"norm.weight": torch.ones(64, 1)}, InvalidIndexError, r"'norm.weight' of shape \(64, 1\)"),
        ({"layers.1.ffn_norm.weight": None}, InvalidIndexError, r"has no tensor 'layers\.1\.ffn_norm\.weight'"),
        ({"tok_embeddings.weight": None}, InvalidIndexError, "has no tensor 'tok_embeddings.weight'"),
        (
            {"tok_embeddings.weight": torch.ones(64)},
            InvalidIndexError,
            r"of shape \(64,\); params.json says \(any, 64\)",
        ),
        ({"layers.0.feed_forward.w1.weight": torch.tensor(1.0)}, InvalidIndexError, "feed-forward layers of 0 rows"),
        ({"layers.0.attention.wq.weight": torch.tensor(1.0)}, InvalidIndexError, r"wq\.weight' of shape \(\)"),
        ({"layers.01.attention.wq.weight": torch.ones(64, 64)}, UnreadableFormatError, "has a tensor 'layers.01"),
    ],
    ids=range(11),
)
def test_tensors_of_another_model(
    tmp_path: Path, change: dict[str, Any], error: type[CheckpointError], says: str
) -> None:
    source = write_meta(tmp_path, tiny_llama())
    tensors = {**ranks_of_model(tiny_llama())[0], **change}
    torch.save({name: tensor for name, tensor in tensors.items() if tensor is not None}, source / RANK.format(0))
    refused(source, error, says)


def test_heads_that_ranks_cannot_divide(tmp_path: Path) -> None:
    source = write_meta(tmp_path, tiny_llama(kv_heads=4), 4, n_kv_heads=2)
    refused(source, UnreadableFormatError, "one of 4 ranks; 8 attention heads and 2 KV heads cannot")


def test_more_ranks_than_by_the_shapes(tmp_path: Path) -> None:
    source = write_meta(tmp_path, tiny_llama(), 2)
    for ranks in (2, 3):
        (source / RANK.format(ranks)).write_bytes((source / RANK.format(0)).read_bytes())
    refused(source, InvalidIndexError, "is one of 2 ranks by the shape of .*; found 4")


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        (["consolidated.01.pth"], MissingShardError, r"lacks consolidated\.00\.pth; found consolidated\.01\.pth"),
        ([RANK.format(n) for n in (0, 1, 3)], MissingShardError, r"lacks consolidated\.02\.pth"),
        (["consolidated.0.pth", "consolidated.00.pth"], InvalidIndexError, "each number once"),
        (["consolidated.00.pth", "consolidated.9999.pth"], InvalidIndexError, "below 64"),
    ],
)
def test_incomplete_ranks(names: list[str], error: type[CheckpointError], says: str) -> None:
    with pytest.raises(error, match=says):
        ranks_of([*names, "params.json"], "here")


def test_ranks_are_in_numerical_order() -> None:
    names = [RANK.format(rank) for rank in range(16)]
    assert ranks_of([*reversed(names), "tokenizer.model", "consolidated.safetensors"], "here") == tuple(names)
    assert params_of(tiny_llama())["n_heads"] == 8
