"""Records of a generation estimate: placement of the weights, and time per token. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from rabbitllm.engine.placement import Placement
from rabbitllm.splitter.split_estimate import SplitEstimate

PROMPT_TOKENS = 16
"""Length of the prompt whose answer's first token is estimated."""


@dataclass(frozen=True, slots=True)
class TierContent:
    """The content of one tier: `tier` as in `engine.placement.Tier`, units and the bytes they are stored in."""

    device: str
    tier: str
    units: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Speed:
    """A rate that was measured on this machine: its description, and bytes per second."""

    what: str
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts that compute on one device, of all layers together; bytes as stored.

    Attributes:
        device: the device.
        tier: as in `engine.placement.Tier`: "by routing" if they are streamed, else all are resident.
        count: number of experts.
        used: number of them that a token uses.
        stored_bytes: of all.
        used_bytes: of those that a token uses.
        kept_bytes: of those that are kept on the device.
        host_bytes: of those that are kept in pinned host memory.
        read_bytes: bytes that a token reads, if all experts are used equally.
        copied_bytes: bytes that a token copies from host memory, in the same case.
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
    """The generation estimate at one compression.

    In a mixture of experts a token reads the experts that are not in memory. Which ones those are depends on the text;
    bytes and times are for a model that uses all its experts equally, which finds the fewest in memory.

    Attributes:
        compression: None, "8bit", "4bit", "4bit-double" or "auto".
        obstacle: why there is no estimate for the model; None if there is one.
        refused: whether that is because loading would refuse it.
        placed: placement of its units, as in `model.placement`, without experts that are streamed individually.
        stays_bytes: stored bytes that are resident in memory or on a device, experts included.
        read_bytes: bytes that each token reads, from the disk or, if they fit there, from the page cache.
        from_the_disk: whether they come from the disk, on every token.
        token_seconds: a token after the first; None if a rate could not be measured.
        first_token_seconds: the first one, with a prompt of `PROMPT_TOKENS` and nothing of the model in the page cache.
        speeds: the rates that both are based on.
        copied_bytes: bytes that each token copies from host memory to devices.
        experts: experts with a placement of their own, by device.
        found_token_seconds: a token after the first all of whose experts are where they compute; that of any token
            if no experts are streamed.
        placement: of each unit.
        too_little_memory: the memory that a pass needs and that this process may take, if that is less: loading it
            here would be refused; None if it is enough.
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
    """The complete estimate of a split, and of generation after it.

    Attributes:
        devices: devices that would compute.
        prompt_tokens: length of the prompt before the first token.
        generations: by compression, as the outlooks are.
    """

    devices: tuple[str, ...] = ()
    prompt_tokens: int = PROMPT_TOKENS
    generations: tuple[GenerationEstimate, ...] = ()
