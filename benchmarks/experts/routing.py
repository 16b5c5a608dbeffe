"""Random texts and routers that use experts like a trained model.

A router's logits are the sum of parts, each normally distributed over the experts: a constant (popular experts), the
topic of the text, a theme of tens of tokens, a moment of a few tokens, and the word (by Zipf's law). Every part is a
block of a token's vector, its meaning, and a router is a random matrix, so each layer chooses other experts. The
strengths were fitted to published figures of a model with 512 experts of which each token uses 10
(tests/support/expert_use.py).
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
    """Standard deviations of the parts of a router's logits, and the tokens that two of them last.

    Attributes:
        noise: a part that the meaning does not explain (in a model: the context).
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
    """[tokens, dimensions] of a text; the squares of each block add up to the square of its strength, on average.

    Args:
        habits: strengths.
        topic: its number.
        tokens: length of the text.
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
    """[experts, dimensions]: the matrix of a layer's router."""
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
    vectors = np.empty_like(drawn)
    now = random.standard_normal(dimensions)
    for token in range(tokens):
        now = kept * now + np.sqrt(1 - kept * kept) * drawn[token]
        vectors[token] = now
    return vectors
