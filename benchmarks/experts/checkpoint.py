"""A checkpoint of Qwen3's mixtures that uses its experts like a trained model and continues its texts from memory.

Most weights are random. Each token of the vocabulary is a place in one of several texts. Its embedding is its meaning
(`routing.meanings`), from which the routers choose, and its identity, by which the head finds the next token. So greedy
generation continues the text of the prompt in every program, at 4bit too; the first token follows the last. The layers
add little to the embedding: the context, by which routers choose other experts than by the word alone.

It is written tensor by tensor, with one of them in memory; or not at all, since a hub can send it (`MoeWeights`).
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.experts import routing
from benchmarks.experts.routing import Floats, Habits
from benchmarks.lib import models, published
from benchmarks.lib.checkpoint import made_once
from benchmarks.lib.generated import SCALE, Content, bfloat16_bits, write_around
from benchmarks.lib.published import Config, Model, Placed, Shard, Tensor

FORMAT = 2
TEXTS = 16
"""Of one length; each half has other habits."""
HABITS: dict[str, Habits] = {"flat": routing.FLAT, "skewed": routing.SKEWED}
MEANING_SHARE = 0.6
"""Of an embedding's squared length."""
HEAD_DIVISOR = 64.0
"""Of identities in the head: the next token's logit is about 6, and all others' about 0."""
WRITERS = {"linear_attn.out_proj": 0.5, "self_attn.o_proj": 0.5, "down_proj": 2.0, "conv1d": 16.0}
"""Standard deviations of the matrices whose output is added to the embedding, in `SCALE`."""


@dataclass(frozen=True)
class MoeScale:
    """The differences from the published config."""

    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_experts: int
    num_experts_per_tok: int
    num_attention_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    vocab_size: int
    shard_bytes: int
    kind: str = "qwen3-next"
    writing: float = 1.0
    """Times `WRITERS`: more layers add no more to the embedding."""

    @property
    def text_tokens(self) -> int:
        """Tokens of each text."""
        return self.vocab_size // TEXTS

    @property
    def experts(self) -> int:
        """Experts of all layers."""
        return self.num_hidden_layers * self.num_experts

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return 3 * self.hidden_size * self.moe_intermediate_size * published.ELEMENT_BYTES


SCALES = {
    "full": MoeScale(1024, 256, 8, 512, 10, 8, 128, 8, 16, 128, 128, 16384, 1000**3),
    "medium": MoeScale(512, 128, 8, 128, 8, 4, 64, 4, 8, 64, 64, 4096, 100_000_000),
    "tiny": MoeScale(512, 32, 4, 32, 4, 4, 32, 2, 4, 32, 32, 512, 4_000_000),
}
"""By name; "full" has 6.6 GB, "medium" 0.4, "tiny" 16 MB. A token uses 2 % of the experts of "full", as published."""
SHAPES = {
    "coder-next": MoeScale(2048, 512, 4, 512, 10, 16, 256, 16, 32, 128, 128, 16384, 1000**3),
    "30b-a3b": MoeScale(2048, 768, 6, 128, 8, 32, 128, 0, 0, 0, 0, 16384, 1000**3, "qwen3-moe"),
    "gpt-oss-20b": MoeScale(2880, 2880, 14, 32, 4, 64, 64, 0, 0, 0, 0, 16384, 1000**3, "gpt-oss"),
    "flash-next": MoeScale(2560, 640, 2, 512, 10, 24, 256, 16, 48, 128, 128, 16384, 1000**3, "qwen4-exp"),
}
"""Published sizes, with 4 of 48 layers (three with linear attention): 13 GB; 6 of 48, 14 of 24 in MXFP4: 7 GB each; 2
of 48 (the first with n-grams, 0.5 GB of them): 11 GB."""
SCALES |= {
    f"{name}-{scale}": shapes if scale == "full" else replace(SCALES[scale], kind=shapes.kind)
    for name, shapes in SHAPES.items()
    for scale in ("full", "medium", "tiny")
}
KINDS: dict[str, tuple[Config, Callable[[Config], Iterator[Tensor]]]] = {
    "qwen3-next": (models.QWEN3_CODER_NEXT, models.qwen3_next),
    "qwen3-moe": (models.QWEN3_30B_A3B, models.qwen3_moe),
    "gpt-oss": (models.GPT_OSS_20B, models.gpt_oss),
    "qwen4-exp": (models.QWEN3_8_FLASH_NEXT, models.qwen4_exp),
}
"""The published config, and the tensors of one."""
WHOLE = "whole"
"""In place of "full": with all words of the published model, and all layers, or as many as `_LAYERS` says."""
_LAYERS = {"flash-next": 24}
"""Layers of whole shapes that would not fit a disk of 60 GB: all 48 take 73."""


def _whole(name: str, shapes: MoeScale) -> MoeScale:
    config = KINDS[shapes.kind][0]
    layers = _LAYERS[name] if name in _LAYERS else config["num_hidden_layers"]
    writing = math.sqrt(shapes.num_hidden_layers / layers)
    return replace(shapes, num_hidden_layers=layers, vocab_size=config["vocab_size"], writing=writing)


SCALES |= {f"{name}-{WHOLE}": _whole(name, shapes) for name, shapes in SHAPES.items()}
ONE_ADDED = ("qwen3-next", "qwen4-exp")
"""Kinds whose norms add one to their weights; some of their layers have linear attention."""


def config_of(scale: MoeScale) -> Config:
    """The config.json of a scale, without tokens at which generation would end."""
    chosen = {name: value for name, value in asdict(scale).items() if name not in ("shard_bytes", "kind", "writing")}
    whole, layers = KINDS[scale.kind][0], scale.num_hidden_layers
    if scale.kind in ONE_ADDED:
        chosen["full_attention_interval"] = min(4, layers)
    if scale.kind == "qwen4-exp":  # its n-grams begin again after an end token, which no measured text has
        chosen |= {"ple_layer_ids": [1], "ple_embed_dim": scale.hidden_size, "split_ngram_parts": 4}
        chosen |= {"ngram_vocab_size_base": 6 * scale.vocab_size}
    if scale.kind == "gpt-oss":
        chosen |= {"num_local_experts": scale.num_experts, "intermediate_size": scale.moe_intermediate_size}
        chosen |= {"layer_types": whole["layer_types"][:layers], "pad_token_id": None}
        chosen["num_key_value_heads"] = min(whole["num_key_value_heads"], scale.num_attention_heads)
    return {
        **whole,
        **{name: value for name, value in chosen.items() if name in whole},
        "shared_expert_intermediate_size": scale.moe_intermediate_size,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": scale.vocab_size - 1 if scale.kind == "qwen4-exp" else None,
    }


def model_of(scale_name: str) -> Model:
    """The model of a scale, in the form that `published.checkpoint` takes."""
    scale = SCALES[scale_name]
    return Model(
        f"{scale.kind}, {scale_name}",
        f"generated/moe-{scale_name}",
        config_of(scale),
        {"do_sample": False},
        KINDS[scale.kind][1],
        shard_bytes=scale.shard_bytes,
        max_disk=0,
    )


def touched_bytes(scale_name: str) -> int:
    """Bytes at 4bit that a token needs: all but tables by rows and the experts that it does not use."""
    scale, total = SCALES[scale_name], 0.0
    for tensor in KINDS[scale.kind][1](config_of(scale)):
        if "embed" not in tensor.name:
            share = scale.num_experts_per_tok / scale.num_experts if ".experts." in tensor.name else 1
            total += share * tensor.nbytes_4bit
    return round(total)


def passage(scale_name: str, habits: str, topic: int, piece: int, tokens: int) -> list[int]:
    """A piece of the text on a topic, `tokens` long; the next piece begins where this one ends."""
    scale = SCALES[scale_name]
    text = list(HABITS).index(habits) * (TEXTS // len(HABITS)) + topic
    start = piece * tokens % max(1, scale.text_tokens - tokens)
    return [text * scale.text_tokens + start + offset for offset in range(tokens)]


def make_moe_checkpoint(work: Path, scale_name: str) -> Path:
    """The checkpoint's folder, made unless an earlier run finished it."""
    return made_once(
        work / f"checkpoint-{scale_name}-moe", _recipe(scale_name), lambda folder: _write(folder, scale_name)
    )


def _recipe(scale_name: str) -> list[Any]:
    """Everything on which the checkpoint's bytes depend."""
    return [FORMAT, asdict(SCALES[scale_name]), WRITERS, [asdict(habits) for habits in HABITS.values()]]


def _write(folder: Path, scale_name: str) -> None:
    model = model_of(scale_name)
    whole = published.checkpoint(model, 1)
    write_around(folder, whole, SCALES[scale_name].vocab_size)
    weights = MoeWeights(scale_name)
    for shard in whole.shards:
        with (folder / shard.name).open("wb") as file:
            for piece in weights.of_file(shard, 0, shard.size):
                file.write(piece)


class MoeWeights:
    """The bytes of every tensor, as `hub.GeneratedHub` sends them."""

    def __init__(self, scale_name: str) -> None:
        self._scale, self._recipe = SCALES[scale_name], _recipe(scale_name)
        self._kept = dict[str, memoryview]()  # a hub sends them in pieces
        self._making = threading.Lock()  # a head is gigabytes while it is made, and a hub has many threads
        self._codes = Content()
        self._codes.block = memoryview(np.random.default_rng(6).bytes(len(self._codes.block)))
        self._factors = {part: factor * self._scale.writing for part, factor in WRITERS.items()}
        self._contents = {factor: Content(SCALE * np.float32(factor)) for factor in {1.0, *self._factors.values()}}
        self._dimensions = sum(routing.DIMENSIONS.values())
        self._meanings, self._identities = self._embeddings()

    def key(self, shard: Shard) -> str:
        """A digest of all that a shard's bytes depend on."""
        return hashlib.sha256(json.dumps([self._recipe, shard.position]).encode() + shard.header).hexdigest()

    def of_file(self, shard: Shard, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of a shard from `start` to `stop`."""
        if start < len(shard.header):
            yield memoryview(shard.header)[start:stop]
        for placed in shard.tensors:
            first, last = placed.offset, placed.offset + placed.tensor.nbytes
            if start < last and first < stop:
                pieces = self._of(placed, shard.position + first - len(shard.header))
                yield from _cut(pieces, max(start - first, 0), min(stop, last) - first)

    def _of(self, placed: Placed, position: int) -> Iterator[memoryview | bytes]:
        """A tensor, piece by piece; `position` is among the bytes of all tensors."""
        tensor = placed.tensor
        if tensor.dtype == "I64":
            sizes = np.array(models.ngram_sizes(config_of(self._scale)), np.int64)
            offsets, odd = (
                np.cumsum(sizes) - sizes,
                np.random.default_rng(8).integers(1 << 40, size=tensor.shape) * 2 + 1,
            )
            yield next(
                each
                for part, each in (("_sizes", sizes), ("_offsets", offsets), ("", odd))
                if tensor.name.endswith(part)
            ).tobytes()
            return
        with self._making:
            if tensor.name not in self._kept and (values := self._values(tensor)) is not None:
                bits = bfloat16_bits(np.ascontiguousarray(values.reshape(tensor.shape), np.float32))
                self._kept[tensor.name] = memoryview(bits.tobytes())
        if tensor.name in self._kept:
            yield self._kept[tensor.name]
            return
        if tensor.dtype == "U8":  # codes of a mean square of 8, and powers of two: half an embedding's size a layer
            is_scale = tensor.name.endswith("_scales")
            exponents = bytes([119 if "down" in tensor.name else 120]) * (tensor.nbytes * is_scale)
            yield from [exponents] if is_scale else self._codes.pieces(position, tensor.nbytes)
            return
        factor = next((factor for part, factor in self._factors.items() if part in tensor.name), 1.0)
        yield from self._contents[factor].pieces(position, tensor.nbytes)

    def _values(self, tensor: Tensor) -> npt.NDArray[np.float32] | None:
        """A tensor that is not simply random; else None."""
        name = tensor.name
        if name == "model.embed_tokens.weight":
            return np.concatenate([self._meanings, self._identities], axis=1)
        if name == "lm_head.weight":  # a token comes after the one before it
            head = np.zeros((self._scale.vocab_size, self._scale.hidden_size), np.float32)
            head[:, self._dimensions :] = np.roll(self._identities, 1, axis=0) / HEAD_DIVISOR
            return head
        if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
            rows = np.zeros(tensor.shape, np.float32)
            rows[:, : self._dimensions] = routing.router(int(name.split(".")[2]), self._scale.num_experts)
            rows /= self._lengthened
            return rows
        if name.endswith("A_log"):
            return np.log(np.linspace(1, 16, tensor.elements, dtype=np.float32))
        if name.endswith(("dt_bias", "linear_attn.norm.weight")):
            return np.ones(tensor.shape, np.float32)
        if name.endswith(("_bias", ".bias", "sinks")):
            return np.zeros(tensor.shape, np.float32)
        if name.endswith("norm.weight"):
            return np.full(tensor.shape, self._scale.kind not in ONE_ADDED, np.float32)
        return None

    def _embeddings(self) -> tuple[Floats, Floats]:
        """Meanings and identities of tokens, together of a mean square of about one."""
        scale = self._scale
        each = TEXTS // len(HABITS)
        texts = [(habits, text) for habits in HABITS.values() for text in range(each)]
        meanings = np.concatenate([routing.meanings(habits, text, scale.text_tokens, 0) for habits, text in texts])
        # equally long meanings, as after a normalisation: no token outweighs another
        wanted = np.sqrt(MEANING_SHARE * scale.hidden_size)
        lengths = np.linalg.norm(meanings, axis=1, keepdims=True)
        self._lengthened = wanted / lengths.mean()
        rest = scale.hidden_size - self._dimensions
        spread = np.sqrt((1 - MEANING_SHARE) * scale.hidden_size / rest)
        identities = np.random.default_rng(5).standard_normal((scale.vocab_size, rest), np.float32) * spread
        return meanings * self._lengthened, identities


def _cut(pieces: Iterable[memoryview | bytes], start: int, stop: int) -> Iterator[memoryview]:
    """The bytes from `start` to `stop` of all pieces."""
    for piece in pieces:
        if stop <= 0:
            return
        if start < len(piece):
            yield memoryview(piece)[max(start, 0) : stop]
        start, stop = start - len(piece), stop - len(piece)
