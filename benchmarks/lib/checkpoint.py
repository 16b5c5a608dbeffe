"""Makes checkpoints with random weights, the same on every machine, and compares the tensors of two folders."""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Scale:
    """The shape of an untied model in bfloat16, and the size of its shards."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    shard_bytes: int

    @property
    def layer_files(self) -> int:
        """Embedding, decoder layers, norm and head."""
        return self.num_hidden_layers + 3


SCALES = {
    "full": Scale(2048, 5632, 13, 16, 4, 32000, 280_000_000),
    "medium": Scale(1024, 2816, 12, 16, 4, 8000, 80_000_000),
    "tiny": Scale(256, 512, 4, 8, 2, 1000, 1_200_000),
}
"""By name; "full" has 1.43 GB in 6 shards, "medium" 0.3 GB."""
Settings = Mapping[str, int | bool]
MIXTURE: Settings = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
"""Of a Qwen3MoeConfig, in addition to a scale; "full" has 0.85 billion weights."""
EVEN_SCALES: Mapping[str, tuple[Scale, Settings]] = {
    name: (scale, {"moe_intermediate_size": scale.intermediate_size, "head_dim": head} | experts)
    for name, scale, head, experts in (
        ("full", Scale(1024, 512, 8, 8, 2, 8192, 400_000_000), 128, {"num_experts": 64, "num_experts_per_tok": 4}),
        ("medium", Scale(512, 256, 6, 8, 2, 2048, 40_000_000), 64, {"num_experts": 32, "num_experts_per_tok": 4}),
        ("tiny", Scale(256, 128, 3, 4, 2, 512, 1_200_000), 64, {"num_experts": 8, "num_experts_per_tok": 2}),
    )
}
"""Of mixtures that use their experts evenly; "full" has 1.7 GB, and a token uses 0.18 of them."""
SEED = 0
_LONGEST_HEADER = 100 << 20


def made_once(folder: Path, recipe: Any, write: Callable[[Path], None]) -> Path:
    """A checkpoint's folder; written unless an earlier run finished it by the same recipe.

    A file next to the folder, written last, holds the recipe and the SHA-256 of each shard.

    Args:
        folder: of the checkpoint.
        recipe: JSON that decides the content.
        write: fills the empty folder.
    """
    stamp, recipe = folder.with_name(folder.name + ".json"), json.loads(json.dumps(recipe))
    if stamp.exists() and folder.is_dir() and json.loads(stamp.read_text())["recipe"] == recipe:
        return folder
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write(folder)
    digests = {}
    for shard in shards(folder):
        with shard.open("rb") as file:
            digests[shard.name] = hashlib.file_digest(file, "sha256").hexdigest()
    stamp.write_text(json.dumps({"recipe": recipe, "sha256": digests}, indent=1) + "\n")
    return folder


def make_checkpoint(
    work: Path, scale_name: str, config_class: str = "Qwen2Config", settings: Settings | None = None
) -> Path:
    """The folder of a checkpoint of transformers' class.

    It has no end-of-sequence token, so that every generation has the asked length, and a tokenizer with one word for
    each token, which some peers load.
    """
    suffix = "" if config_class == "Qwen2Config" else f"-{config_class.removesuffix('Config').lower()}"
    scale, settings = SCALES[scale_name], settings or {}
    recipe = {"shape": asdict(scale), "seed": SEED, **settings}
    folder = work / f"checkpoint-{scale_name}{suffix}"
    return made_once(folder, recipe, lambda empty: _write_model(empty, scale, config_class, settings))


def make_even_checkpoint(work: Path, scale_name: str) -> Path:
    """The folder of a Qwen3 mixture that uses all its experts evenly, as the predictions of a plan assume.

    The head finds for each token the next one of the vocabulary, by the embedding of that token, which the layers do
    not outweigh. So greedy generation counts up and repeats nothing; embeddings and routers are random, so each token
    is routed independently in every layer.
    """
    scale, settings = EVEN_SCALES[scale_name]
    recipe = {"shape": asdict(scale), "seed": SEED, **settings, "counts": True}
    folder = work / f"checkpoint-{scale_name}-even"
    return made_once(folder, recipe, lambda empty: _write_model(empty, scale, "Qwen3MoeConfig", settings, counts=True))


def even_prompt(scale_name: str, tokens: int) -> list[int]:
    """Tokens from which counting up reaches neither the end of the vocabulary nor one of them."""
    vocabulary = EVEN_SCALES[scale_name][0].vocab_size
    return [vocabulary // 2 + (i * 37) % (vocabulary // 4) for i in range(tokens - 1)] + [0]


def _write_model(folder: Path, scale: Scale, config_class: str, settings: Settings, *, counts: bool = False) -> None:
    import torch
    import transformers

    transformers_: Any = transformers
    shape = {name: value for name, value in asdict(scale).items() if name != "shard_bytes"}
    config = getattr(transformers_, config_class)(
        **shape, **settings, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(SEED)
    model = transformers_.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if counts:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.model.embed_tokens.weight.normal_().roll(1, dims=0) / 32)
    model.generation_config = transformers_.GenerationConfig(do_sample=False)
    model.save_pretrained(folder, max_shard_size=scale.shard_bytes)
    write_tokenizer(folder, scale.vocab_size)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One word for each token: w0, w1, ..."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0")
    wrapped = tokenizers.Tokenizer(words)
    wrapped.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=wrapped, unk_token="w0")
    tokenizer.save_pretrained(folder)


def shards(folder: Path) -> list[Path]:
    """The safetensors files directly in a folder."""
    return sorted(folder.glob("*.safetensors"))


def weight_bytes(folder: Path) -> int:
    """Of all of them."""
    return sum(path.stat().st_size for path in shards(folder))


def same_tensors(first: Path, second: Path) -> bool:
    """Whether the safetensors files of two folders hold the same tensors, bit for bit, in whichever files."""
    return _tensors(first) == _tensors(second)


def _tensors(folder: Path) -> dict[str, tuple[str, list[int], memoryview]]:
    """Name -> dtype, shape and bytes (views of mapped files)."""
    tensors = {}
    for path in shards(folder):
        with path.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(view[:8], "little")
        if not 8 < start <= min(len(view), _LONGEST_HEADER):
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(bytes(view[8:start]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = (entry["dtype"], entry["shape"], view[start + begin : start + end])
    return tensors
