"""The models of the training script: the bundled one, and a larger one that is not shipped. Trains nothing.

The bundled model answers problems, and is trained with rounded weights at the end, so that it hardly shows the cost
of rounding. The larger one is made to show it: its training is independent of any format, half of its training text
is prose, and its rows are multiples of 256, the blocks of other formats.
"""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 1024


@dataclass(frozen=True)
class Shape:
    """The shape of a Qwen3; every row of a matrix is a whole number of 64-weight blocks."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int


@dataclass(frozen=True)
class TrainingPlan:
    """The hyperparameters of training."""

    steps: int
    minutes: float | None
    seed: int
    batch: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warm_up: float = 0.02
    # From this share of training on every other step uses 4bit weights, so that rounding costs the model little.
    rounded_from: float = 0.7
    # Windows of prose in each batch, and tokens in each of them.
    prose: int = 0
    window: int = 128
    # Whether products are computed in bfloat16, which is slower where the processor has no instructions for it.
    autocast: bool = True


BUNDLED, LARGER = "bundled", "larger"

SHAPES = {
    BUNDLED: Shape(hidden=192, intermediate=512, layers=8, heads=6, key_value_heads=3, head_dim=32),
    LARGER: Shape(hidden=512, intermediate=1536, layers=8, heads=8, key_value_heads=4, head_dim=64),
}


def plan_for(size: str, *, steps: int | None, minutes: float | None, seed: int) -> TrainingPlan:
    """The training plan for a size; `steps` None means 4,000 for the bundled model and 1,000 for the larger one."""
    if size == BUNDLED:
        return TrainingPlan(steps=steps or 4000, minutes=minutes, seed=seed)
    return TrainingPlan(
        steps=steps or 1000,
        minutes=minutes,
        seed=seed,
        batch=24,
        learning_rate=1.5e-3,
        warm_up=0.05,
        rounded_from=1.0,
        prose=6,
        autocast=False,
    )
