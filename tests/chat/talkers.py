"""Tiny models to talk with: a tokenizer whose texts and ids say the same, and a model that says what it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import decoders, models

from tests.support.builders import FAMILIES, SINGLE_NAME, VOCABULARY_SIZE, Family, build_checkpoint, read_tensors
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import load, split

SPECIAL = ("<pad>", "<bos>", "<eos>")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETFUL = TEMPLATE.replace(
    "{{ message.content }}", "{{ message.content[3:] if message.role == 'assistant' else message.content }}"
)
"""Like those of models that think aloud: of earlier answers only the end is kept."""
STREAMED = 0
"""Bytes for weights."""


def characters(template: str | None = TEMPLATE) -> Any:
    """A tokenizer that makes one token of every character, so that generated ids and their text are the same."""
    alphabet = [*map(chr, range(32, 127)), "\n"]
    alphabet += [chr(0x100 + i) for i in range(VOCABULARY_SIZE - len(SPECIAL) - len(alphabet))]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    fast: Any = transformers.PreTrainedTokenizerFast
    pad, bos, eos = SPECIAL
    wrapped = fast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, model_max_length=4096)
    wrapped.chat_template = template
    return wrapped


def family_of(name: str) -> Family:
    """Of the ordinary ones, or of those with caches of another kind."""
    return FAMILIES[name] if name in FAMILIES else HYBRIDS[name]


def talker_folder(folder: Path, name: str, template: str | None = TEMPLATE, **settings: Any) -> Path:
    """A random checkpoint of a family that speaks characters."""
    chosen = family_of(name)
    build_checkpoint(
        folder, chosen, tied=chosen.ties[0], tokenizer=False, **{"max_position_embeddings": 1024, **settings}
    )
    characters(template).save_pretrained(folder)
    return folder


def talker(folder: Path, budget: int = STREAMED) -> Any:
    """It, split and loaded with a profiler; it never says a special token, which its text would not show."""
    model = load(split(folder), budget, profiling=True)
    model.tokenizer = characters(model.tokenizer.chat_template)  # of some families transformers makes another kind
    model.generation_config.suppress_tokens = list(range(len(SPECIAL)))
    return model


def parrot_folder(folder: Path, says: Mapping[str, str], template: str | None = TEMPLATE) -> Path:
    """A model that after each of these characters says the other: its layers add nothing to the embeddings."""
    talker_folder(folder, "llama", template)
    tensors = read_tensors(folder)
    tokenizer = characters()
    heads = torch.zeros_like(tensors["lm_head.weight"])
    embeddings = torch.zeros_like(tensors["model.embed_tokens.weight"])
    for index, (before, after) in enumerate(says.items()):
        first, second = (tokenizer.convert_tokens_to_ids(character) for character in (before, after))
        embeddings[first, index] = 1.0
        heads[second, index] = 1.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors |= {"lm_head.weight": heads, "model.embed_tokens.weight": embeddings}
    tensors["model.norm.weight"].fill_(1.0)
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    return folder
