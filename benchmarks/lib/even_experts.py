"""A checkpoint of Qwen3-MoE's kind that uses all its experts alike: the case for which a plan says seconds a token.

Random weights, but for the head: it finds for each token the next one of the vocabulary, by that token's embedding,
which nothing in the layers outweighs. So greedy generation counts up and never repeats itself, and since embeddings and
routers are drawn at random, each token is routed again in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.checkpoint import SEED, made_once

FORMAT = 1


@dataclass(frozen=True)
class EvenScale:
    """The shape of a model in bfloat16, untied, and how its checkpoint is cut into shards."""

    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_experts: int
    num_experts_per_tok: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    shard_bytes: int


SCALES = {
    "full": EvenScale(1024, 512, 8, 64, 4, 8, 2, 128, 8192, 400_000_000),
    "medium": EvenScale(512, 256, 6, 32, 4, 8, 2, 64, 2048, 40_000_000),
    "tiny": EvenScale(256, 128, 3, 8, 2, 4, 2, 64, 512, 1_200_000),
}
"""By name; "full" has 1.7 GB, of which a token uses 0.18."""


def make_even_checkpoint(work: Path, scale_name: str) -> Path:
    """The checkpoint's folder, made unless an earlier run finished it."""
    scale = SCALES[scale_name]
    recipe = [FORMAT, SEED, asdict(scale)]
    return made_once(work / f"checkpoint-{scale_name}-even", recipe, lambda folder: _write(folder, scale))


def even_prompt(scale_name: str, tokens: int) -> Sequence[int]:
    """Tokens from which counting up does not come to the end of the vocabulary, nor to one of them."""
    vocabulary = SCALES[scale_name].vocab_size
    return [vocabulary // 2 + (i * 37) % (vocabulary // 4) for i in range(tokens - 1)] + [0]


def _write(folder: Path, scale: EvenScale) -> None:
    import torch
    import transformers

    transformers_: Any = transformers
    settings = {name: value for name, value in asdict(scale).items() if name != "shard_bytes"}
    config = transformers_.Qwen3MoeConfig(
        **settings, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(SEED)
    model = transformers_.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        meaning = model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.copy_(meaning.roll(1, dims=0) / 32)
    model.generation_config = transformers_.GenerationConfig(do_sample=False)
    model.save_pretrained(folder, max_shard_size=scale.shard_bytes)
