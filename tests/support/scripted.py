"""A model that says what it is told to: each token is followed by one that a table names.

Its layers add nothing, its embeddings are random, and its head gives each token's successor the embedding of the token;
so it is streamed, batched and drawn from like any other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.builders import SINGLE_NAME, VOCABULARY_SIZE, build_checkpoint

HIDDEN = 128


def scripted_checkpoint(
    folder: Path, lines: Sequence[Sequence[str]], template: str, special: Sequence[str] = ()
) -> Path:
    """Write it.

    Args:
        folder: for it.
        lines: tokens that follow each other; the end comes after those that nothing follows in any line.
        template: of its chats.
        special: those of the tokens that are special.
    """
    tokens = list(dict.fromkeys(token for line in lines for token in line))
    build_checkpoint(folder, "llama", hidden_size=HIDDEN, head_dim=32, vocab_size=VOCABULARY_SIZE + len(tokens))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([token for token in tokens if token not in special])
    tokenizer.add_tokens([token for token in tokens if token in special], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    weights = load_file(folder / SINGLE_NAME)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    embeddings = torch.randn(weights["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(0))
    head = torch.zeros_like(embeddings)
    follows = dict.fromkeys(tokens, "<eos>") | dict(pair for line in lines for pair in pairwise(line))
    for token, following in follows.items():
        head[ids.get(following, 2)] += embeddings[ids[token]]
    weights |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    save_file(weights, folder / SINGLE_NAME, metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    return folder
