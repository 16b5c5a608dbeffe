"""What generating will take, as records: where the weights will be, and how long a token. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from rabbitllm.splitter.forecast import Forecast

PROMPT_TOKENS = 16
"""Of the prompt whose answer's first token is foretold."""


@dataclass(frozen=True, slots=True)
class Held:
    """What is in one place: `tier` as in `engine.placement.Tier`, units and the bytes they are stored in."""

    device: str
    tier: str
    units: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Speed:
    """A rate that was measured on this machine: of what, and bytes a second."""

    what: str
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Generation:
    """Generating at one compression.

    Attributes:
        compression: None, "8bit" or "4bit".
        obstacle: why nothing can be told of the model; None if it can.
        placed: where its units will be, as `model.placement` will say.
        stays_bytes: stored bytes that stay in memory or on a device.
        read_bytes: what each token reads, from the disk or, where it fits there, out of the page cache.
        from_the_disk: whether it is the disk, on every token.
        token_seconds: a token after the first; None where a rate could not be measured.
        first_token_seconds: the first one, with a prompt of `PROMPT_TOKENS` and nothing of the model in the page cache.
        speeds: what both rest on.
        copied_bytes: what each token copies from host memory to devices.
    """

    compression: str | None
    obstacle: str | None = None
    placed: tuple[Held, ...] = ()
    stays_bytes: int = 0
    read_bytes: int = 0
    from_the_disk: bool = False
    token_seconds: float | None = None
    first_token_seconds: float | None = None
    speeds: tuple[Speed, ...] = ()
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan(Forecast):
    """All that can be told before a split, and of generating after it.

    Attributes:
        devices: where it would compute.
        prompt_tokens: of the prompt before the first token.
        generations: by compression, as the outlooks are.
    """

    devices: tuple[str, ...] = ()
    prompt_tokens: int = PROMPT_TOKENS
    generations: tuple[Generation, ...] = ()
