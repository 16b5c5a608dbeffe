"""The models of `split.kaggle`: configs as published, and the names and shapes of their tensors."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.lib.published import Config, Model, Tensor


def _published(name: str) -> Config:
    config: Config = json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
    return config


def qwen2(config: Config) -> Iterator[Tensor]:
    """Qwen2 and Qwen2.5, in the order of the model's modules."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = hidden // config["num_attention_heads"]
    outputs = {"q": hidden, "k": config["num_key_value_heads"] * head, "v": config["num_key_value_heads"] * head}
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for which, size in outputs.items():
            yield Tensor(f"{layer}.self_attn.{which}_proj.weight", (size, hidden))
            yield Tensor(f"{layer}.self_attn.{which}_proj.bias", (size,))
        yield Tensor(f"{layer}.self_attn.o_proj.weight", (hidden, hidden))
        yield Tensor(f"{layer}.mlp.gate_proj.weight", (inner, hidden))
        yield Tensor(f"{layer}.mlp.up_proj.weight", (inner, hidden))
        yield Tensor(f"{layer}.mlp.down_proj.weight", (hidden, inner))
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
    yield Tensor("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (vocabulary, hidden))


QWEN2_5_72B = _published("qwen2.5-72b")
"""https://huggingface.co/Qwen/Qwen2.5-72B/blob/main/config.json"""
TINY_QWEN2: Config = {
    **QWEN2_5_72B,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def qwen3_next(config: Config) -> Iterator[Tensor]:
    """Names and shapes as transformers' `Qwen3NextForCausalLM` saves them.

    Their order is derived: with the experts last in each layer, the first shard (3,999,619,288 bytes), all shards
    (159,358,031,480) and the index (6,759,619) have their published sizes. Another tensor may still be in another
    shard: the digest of the index differs from the published one.
    """
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        full = (number + 1) % config["full_attention_interval"] == 0
        yield from _full_attention(layer, config) if full else _linear_attention(layer, config)
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.mlp.gate.weight", (config["num_experts"], hidden), plain=True)
        yield Tensor(f"{layer}.mlp.shared_expert_gate.weight", (1, hidden), plain=True)
        yield from _expert(f"{layer}.mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
        for expert in range(config["num_experts"]):
            yield from _expert(f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    yield Tensor("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (vocabulary, hidden))


def qwen3_moe(config: Config) -> Iterator[Tensor]:
    """Names and shapes as transformers' `Qwen3MoeForCausalLM` saves them."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield from _full_attention(layer, config, 1)
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.mlp.gate.weight", (config["num_experts"], hidden), plain=True)
        for expert in range(config["num_experts"]):
            yield from _expert(f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    yield Tensor("model.norm.weight", (hidden,))
    yield Tensor("lm_head.weight", (vocabulary, hidden))


def gpt_oss(config: Config) -> Iterator[Tensor]:
    """Names and shapes as published: experts in MXFP4, all else bfloat16."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    experts, head = config["num_local_experts"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def linear(name: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield Tensor(f"{name}.weight", (rows, columns), plain=True)
        yield Tensor(f"{name}.bias", (rows,))

    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden), plain=True)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for which, rows in {"q": queries, "k": keys, "v": keys}.items():
            yield from linear(f"{layer}.self_attn.{which}_proj", rows, hidden)
        yield from linear(f"{layer}.self_attn.o_proj", hidden, queries)
        yield Tensor(f"{layer}.self_attn.sinks", (config["num_attention_heads"],))
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
        yield from linear(f"{layer}.mlp.router", experts, hidden)
        for which, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            part = f"{layer}.mlp.experts.{which}_proj"
            yield Tensor(f"{part}_blocks", (experts, rows, columns // 32, 16), plain=True, dtype="U8")
            yield Tensor(f"{part}_scales", (experts, rows, columns // 32), plain=True, dtype="U8")
            yield Tensor(f"{part}_bias", (experts, rows), plain=True)
    yield Tensor("model.norm.weight", (hidden,))
    yield Tensor("lm_head.weight", (vocabulary, hidden), plain=True)


def qwen4_exp(config: Config) -> Iterator[Tensor]:
    """Names and shapes as transformers' `Qwen4ExpForCausalLM` saves them."""
    hidden, vocabulary, streams = config["hidden_size"], config["vocab_size"], config["hc_count"]
    wide, embedded = streams * hidden, config["ple_embed_dim"]

    def mixer(name: str, outputs: int) -> Iterator[Tensor]:
        yield Tensor(f"{name}.hc_norm.weight", (wide,))
        yield Tensor(f"{name}.input_mix_weight_down.weight", (config["hc_lowrank"], wide))
        yield Tensor(f"{name}.input_mix_weight_up.weight", (wide, config["hc_lowrank"]))
        if outputs:
            yield Tensor(f"{name}.block_inject_weight.weight", (outputs, wide))

    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        if (number + 1) % config["full_attention_interval"]:
            yield from _linear_attention(layer, config, joined=False)
        else:
            index, heads = f"{layer}.self_attn.indexer", config["indexer_n_heads"] + config["indexer_kv_heads"]
            yield from _full_attention(layer, config)
            yield Tensor(f"{index}.index_qk_proj.weight", (heads * config["indexer_head_dim"], hidden))
            yield Tensor(f"{index}.q_layernorm.weight", (config["indexer_head_dim"],))
            yield Tensor(f"{index}.k_layernorm.weight", (config["indexer_head_dim"],))
        if number + 1 in config["ple_layer_ids"]:
            yield from _ngrams(f"{layer}.ple.ple_embedding", config)
            yield Tensor(f"{layer}.ple.key_proj.weight", (wide, embedded))
            yield Tensor(f"{layer}.ple.value_proj.weight", (hidden, embedded))
            yield from (Tensor(f"{layer}.ple.norm_{which}.weight", (wide,)) for which in ("key", "query", "conv"))
            yield Tensor(f"{layer}.ple.conv1d.weight", (wide, 1, config["ple_conv_kernel_size"]), plain=True)
        yield from mixer(f"{layer}.attn_hyper_connection", streams)
        yield from mixer(f"{layer}.mlp_hyper_connection", streams)
        yield Tensor(f"{layer}.mlp.gate.weight", (config["num_experts"], hidden), plain=True)
        yield Tensor(f"{layer}.mlp.shared_expert_gate.weight", (1, hidden), plain=True)
        yield from _expert(f"{layer}.mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
        for expert in range(config["num_experts"]):
            yield from _expert(f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    yield from mixer("model.hyper_connection_mixer", 0)
    yield Tensor("lm_head.weight", (vocabulary, hidden))


def _ngrams(name: str, config: Config) -> Iterator[Tensor]:
    """A table of hashed n-grams in parts, and how they are hashed."""
    sizes = ngram_sizes(config)
    rows, parts = sum(sizes), config["split_ngram_parts"]
    rows += -rows % config["make_ngram_vocab_size_divisible_by"]
    each = -(-rows // parts)
    for part, first in enumerate(range(0, rows, each)):
        shape = min(each, rows - first), config["ple_embed_dim"] // len(sizes)
        yield Tensor(f"{name}.ngram_embedding.shard_{part}.weight", shape)
    yield Tensor(f"{name}.layer_multipliers", (config["ngram_size"],), dtype="I64")
    yield Tensor(f"{name}.ngram_heads_vocab_sizes", (len(sizes),), dtype="I64")
    yield Tensor(f"{name}.ngram_heads_offsets", (len(sizes),), dtype="I64")


def ngram_sizes(config: Config) -> list[int]:
    """Rows of each head of the table: prime numbers from `ngram_vocab_size_base` on."""
    primes = (
        number
        for number in itertools.count(config["ngram_vocab_size_base"])
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
    )
    return list(itertools.islice(primes, (config["ngram_size"] - 1) * config["heads_per_ngram"]))


def _full_attention(layer: str, config: Config, parts: int = 2) -> Iterator[Tensor]:
    """Grouped queries; of two parts, `q_proj` also has a gate for every element of the output."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for which, rows in {"q": parts * queries, "k": keys, "v": keys}.items():
        yield Tensor(f"{layer}.self_attn.{which}_proj.weight", (rows, hidden))
    yield Tensor(f"{layer}.self_attn.o_proj.weight", (hidden, queries))
    yield Tensor(f"{layer}.self_attn.q_norm.weight", (head,))
    yield Tensor(f"{layer}.self_attn.k_norm.weight", (head,))


def _linear_attention(layer: str, config: Config, *, joined: bool = True) -> Iterator[Tensor]:
    """A gated delta net; `in_proj_qkvz` makes queries, keys, values and output gate, `in_proj_ba` beta and decay."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    part, mixed = f"{layer}.linear_attn", 2 * keys + values
    yield Tensor(f"{part}.dt_bias", (heads,))
    yield Tensor(f"{part}.A_log", (heads,))
    yield Tensor(f"{part}.conv1d.weight", (mixed, 1, config["linear_conv_kernel_dim"]), plain=True)
    inputs = (
        {"qkvz": mixed + values, "ba": 2 * heads} if joined else {"qkv": mixed, "z": values, "b": heads, "a": heads}
    )
    yield from (Tensor(f"{part}.in_proj_{which}.weight", (rows, hidden)) for which, rows in inputs.items())
    yield Tensor(f"{part}.norm.weight", (config["linear_value_head_dim"],))
    yield Tensor(f"{part}.out_proj.weight", (hidden, values))


def _expert(name: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.gate_proj.weight", (inner, hidden))
    yield Tensor(f"{name}.up_proj.weight", (inner, hidden))
    yield Tensor(f"{name}.down_proj.weight", (hidden, inner))


QWEN3_CODER_NEXT = _published("qwen3-coder-next")
"""https://huggingface.co/Qwen/Qwen3-Coder-Next/blob/main/config.json, byte for byte once it is encoded."""
QWEN3_30B_A3B = _published("qwen3-30b-a3b")
"""https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json"""
GPT_OSS_20B = _published("gpt-oss-20b")
"""https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json"""
QWEN3_8_FLASH_NEXT = _published("qwen3.8-flash-next")
"""The text model of https://huggingface.co/Qwen/Qwen3.8-Flash-Next/blob/main/config.json"""
TINY_QWEN3_NEXT: Config = {
    **QWEN3_CODER_NEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": 32,
    "hidden_size": 128,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 1000,
}

SHARD_BYTES = 4 * 1000**3
"""Of both published checkpoints."""

MODELS: Mapping[str, Model] = {
    "qwen2.5-72b": Model(
        "Qwen2.5-72B",
        "generated/Qwen2.5-72B",
        QWEN2_5_72B,
        {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643, "max_new_tokens": 2048},
        qwen2,
        shard_bytes=SHARD_BYTES,
        max_disk=45 << 30,
    ),
    "coder-next": Model(
        "Qwen3-Coder-Next",
        "generated/Qwen3-Coder-Next",
        QWEN3_CODER_NEXT,
        _published("qwen3-coder-next-generation"),
        qwen3_next,
        shard_bytes=SHARD_BYTES,
        max_disk=48 << 30,  # its layer files are 4 GB larger; the next shard can be fetched within this, too
    ),
    "tiny": Model(
        "a tiny model",
        "generated/tiny",
        TINY_QWEN2,
        {"do_sample": False},
        qwen2,
        shard_bytes=1_200_000,
        max_disk=5 << 20,
    ),
    "tiny-moe": Model(
        "a tiny model of experts",
        "generated/tiny-moe",
        TINY_QWEN3_NEXT,
        {"do_sample": False},
        qwen3_next,
        shard_bytes=1_200_000,
        max_disk=5 << 20,
    ),
}
"""The tiny ones are for trials; their figures mean nothing."""
