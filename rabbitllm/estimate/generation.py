"""What generating will take, as records: where the weights will be, and how long a token. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from rabbitllm.engine.placement import Placement
from rabbitllm.splitter.split_estimate import SplitEstimate

PROMPT_TOKENS = 16
"""Of the prompt whose answer's first token is estimated."""


@dataclass(frozen=True, slots=True)
class TierContent:
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
class Experts:
    """What is known of the experts that compute on one device, of all layers together; bytes as they are stored.

    Attributes:
        device: which.
        tier: as in `engine.placement.Tier`: "by routing" if they are streamed, else all are resident.
        count: how many there are.
        used: of them by a token.
        stored_bytes: of all.
        used_bytes: of those that a token uses.
        kept_bytes: of those that are kept on the device.
        host_bytes: of those that are kept in pinned host memory.
        read_bytes: what a token reads, if all experts were used alike.
        copied_bytes: what a token copies from host memory, if they were.
    """

    device: str
    tier: str
    count: int
    used: int
    stored_bytes: int
    used_bytes: int
    kept_bytes: int
    host_bytes: int
    read_bytes: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class GenerationEstimate:
    """Generating at one compression.

    Of a mixture of experts a token reads what it does not find in memory. Which it finds is in the text; bytes and
    times are those of a model that uses all its experts alike, which finds the fewest.

    Attributes:
        compression: None, "8bit", "4bit" or "4bit-double".
        obstacle: why nothing can be told of the model; None if it can.
        refused: whether that is because loading would refuse it.
        placed: where its units will be, as `model.placement` will say, without such experts.
        stays_bytes: stored bytes that stay in memory or on a device, experts included.
        read_bytes: what each token reads, from the disk or, where it fits there, out of the page cache.
        from_the_disk: whether it is the disk, on every token.
        token_seconds: a token after the first; None where a rate could not be measured.
        first_token_seconds: the first one, with a prompt of `PROMPT_TOKENS` and nothing of the model in the page cache.
        speeds: what both rest on.
        copied_bytes: what each token copies from host memory to devices.
        experts: those that are brought in by themselves, by device.
        found_token_seconds: a token after the first all of whose experts are where they compute; that of any token
            where there are none that come and go.
        placement: where each unit will be.
        too_little_memory: what a pass takes at least and what this process may take, where that is less: loading it
            here would be refused; None where it is enough.
    """

    compression: str | None
    obstacle: str | None = None
    placed: tuple[TierContent, ...] = ()
    stays_bytes: int = 0
    read_bytes: int = 0
    from_the_disk: bool = False
    token_seconds: float | None = None
    first_token_seconds: float | None = None
    speeds: tuple[Speed, ...] = ()
    copied_bytes: int = 0
    experts: tuple[Experts, ...] = ()
    found_token_seconds: float | None = None
    placement: Placement | None = None
    refused: bool = False
    too_little_memory: str | None = None


@dataclass(frozen=True, slots=True)
class Plan(SplitEstimate):
    """All that can be told before a split, and of generating after it.

    Attributes:
        devices: where it would compute.
        prompt_tokens: of the prompt before the first token.
        generations: by compression, as the outlooks are.
    """

    devices: tuple[str, ...] = ()
    prompt_tokens: int = PROMPT_TOKENS
    generations: tuple[GenerationEstimate, ...] = ()
