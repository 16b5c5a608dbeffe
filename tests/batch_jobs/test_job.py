"""The size of the KV cache that the lines need, before the model is loaded."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from rabbitllm.batch_jobs.job import left_of, needed_bytes, worthwhile_pass_bytes
from tests.support.builders import FAMILIES


def test_needed_bytes_cover_the_longest_lines(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    assert needed_bytes(config, [], 8) == 0
    few, many = (needed_bytes(config, [20] * 100, sequences, "float32") for sequences in (2, 50))
    assert many - few == 48 * 20 * needed_of_one(config)
    assert needed_bytes(config, [20] * 100, 500, "float32") == needed_bytes(config, [20] * 100, 100, "float32")
    assert needed_bytes(config, [20], 1, "bfloat16") == needed_bytes(config, [20], 1, "float32") // 2


def test_worthwhile_pass_grows_with_the_lines(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    single, many = (worthwhile_pass_bytes(config, texts, "float32") for texts in (1, 101))
    assert many - single == 100 * 8 * config.vocab_size  # logits, and what they are rounded from
    assert worthwhile_pass_bytes(config, 1, "float32") != worthwhile_pass_bytes(config, 1, "bfloat16")


def test_cache_shrinks_if_less_memory_is_free_than_predicted() -> None:
    assert left_of(1000, 300, 200) == 300
    assert left_of(400, 300, 200) == 200
    assert left_of(400, 300, 100) == 300
    assert left_of(400, 300, 390) == 200


def needed_of_one(config: object) -> int:
    """Bytes of the KV cache for a token: layers, K and V (2), KV heads, width of a head, float32 (4 bytes)."""
    llama = FAMILIES["llama"].config(False)
    assert type(config) is type(llama)
    return int(llama.num_hidden_layers * 2 * llama.num_key_value_heads * 16 * 4)
