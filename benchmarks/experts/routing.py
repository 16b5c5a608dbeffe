"""Texts and routers whose expert use is like that of a model that was trained. Draws numbers; knows no model.

A router's logits are the sum of parts, each normally distributed over the experts: what is always there (popular
experts), the topic of the text, a theme that lasts for tens of tokens, the moment, which lasts for a few, and the word
(drawn by Zipf's law). Every part is a block of a vector that a token carries, its meaning, and a router is a random
matrix: so the same parts give other experts in each layer. The strengths were fitted to what was published of a model
with 512 experts of which each token uses 10; tests/support/expert_use.py has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

WORDS = 4000
DIMENSIONS: Mapping[str, int] = {"always": 1, "topic": 64, "theme": 64, "moment": 96, "word": 128}
"""Of each part's block in a meaning."""


@dataclass(frozen=True)
class Habits:
    """How strong each part of a router's logits is (standard deviation), and for how many tokens two of them last.

    Attributes:
        noise: what else comes in, which nothing in the meaning explains (in a model: the context).
    """

    always: float = 0.35
    topic: float = 0.35
    theme: float = 0.6
    moment: float = 1.5
    word: float = 0.7
    noise: float = 0.0
    theme_tokens: float = 20.0
    moment_tokens: float = 2.0


FLAT = Habits()
SKEWED = Habits(always=0.8, topic=1.0, theme=0.8, moment=1.5, word=0.7)


def meanings(habits: Habits, topic: int, tokens: int, seed: int) -> Floats:
    """[tokens, dimensions] of a text of one topic. Each block has a mean square of its strength's square in all.

    Args:
        habits: strengths.
        topic: which.
        tokens: how long.
        seed: of the text; topics and words have the same meaning for every seed.
    """
    random = np.random.default_rng((1, topic, seed))
    frequency = 1 / np.arange(1, WORDS + 1)
    words = random.choice(WORDS, tokens, p=frequency / frequency.sum())
    blocks = {
        "always": np.ones((tokens, 1)),
        "topic": np.broadcast_to(_fixed("topic", topic), (tokens, DIMENSIONS["topic"])),
        "theme": _drifting(random, tokens, DIMENSIONS["theme"], habits.theme_tokens),
        "moment": _drifting(random, tokens, DIMENSIONS["moment"], habits.moment_tokens),
        "word": np.stack([_fixed("word", int(word)) for word in words]),
    }
    strengths = {name: getattr(habits, name) for name in DIMENSIONS}
    scaled = [block * strengths[name] / np.sqrt(DIMENSIONS[name]) for name, block in blocks.items()]
    return np.concatenate(scaled, axis=1).astype(np.float32)


def router(layer: int, experts: int) -> Floats:
    """[experts, dimensions]: what a layer's router multiplies meanings by."""
    random = np.random.default_rng((2, layer, experts))
    return random.standard_normal((experts, sum(DIMENSIONS.values())), np.float32)


def _fixed(part: str, which: int) -> npt.NDArray[np.float64]:
    """A topic's or a word's vector."""
    number = list(DIMENSIONS).index(part)
    return np.random.default_rng((4, number, which)).standard_normal(DIMENSIONS[part])


def _drifting(random: np.random.Generator, tokens: int, dimensions: int, lasting: float) -> npt.NDArray[np.float64]:
    """Vectors of unit variance, those `lasting` tokens apart correlated by 1/e."""
    kept = np.exp(-1 / lasting)
    drawn = random.standard_normal((tokens, dimensions))
    found = np.empty_like(drawn)
    now = random.standard_normal(dimensions)
    for token in range(tokens):
        now = kept * now + np.sqrt(1 - kept * kept) * drawn[token]
        found[token] = now
    return found
