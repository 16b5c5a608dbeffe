"""What was found out about a machine, as records. Pure data; a field is None where it could not be found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rabbitllm.engine.free_memory import GroupLimit, ProcessLimit
from rabbitllm.estimate.generation import GenerationEstimate, Speed
from rabbitllm.storage.folders import Folder, Host


@dataclass(frozen=True, slots=True)
class Memory:
    """The machine's memory, bytes.

    Attributes:
        total: of the machine.
        free: of the machine, what can be had without swapping.
        usable: what this process may still take, control groups and its own limits included.
        groups: those with a limit, innermost first.
        limits: of the process itself.
    """

    total: int
    free: int
    usable: int
    groups: tuple[GroupLimit, ...] = ()
    limits: tuple[ProcessLimit, ...] = ()


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor.

    Attributes:
        name: as it calls itself.
        cores: that the machine has.
        usable: that this process may use at a time; a control group may allow a part of one.
        instructions: those that matter here -> whether it has them; empty where it does not say.
    """

    name: str
    cores: int
    usable: float
    instructions: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, bytes; `bf16` is whether it computes in bfloat16 itself, else models compute in float16 there."""

    device: str
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    bf16: bool


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of the machine.

    Attributes:
        found: the GPUs that torch can use.
        driver: whether NVIDIA's driver is there.
        torch: torch's version, with what it was built for; None where torch was not asked.
    """

    found: tuple[Gpu, ...]
    driver: bool
    torch: str | None


@dataclass(frozen=True, slots=True)
class Hub:
    """The hub.

    Attributes:
        endpoint: its address.
        offline: whether `HF_HUB_OFFLINE` forbids asking it; then nothing was asked.
        reachable: whether it answered.
        seconds: until it did.
        token: whether there is one.
        problem: why it did not.
    """

    endpoint: str
    offline: bool
    reachable: bool | None
    seconds: float | None
    token: bool
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Package:
    """A package that is used.

    Attributes:
        name: as it is installed.
        found: its version; None where it is not there.
        wanted: the versions that do, as pip writes them; "" for any.
        fits: whether the version found is one of these.
        brings: what it is for.
        essential: whether nothing works without it.
        optional: whether `pip install rabbitllm` leaves it out.
        problem: why it cannot be loaded, if that was tried.
    """

    name: str
    found: str | None
    wanted: str
    fits: bool
    brings: str
    essential: bool
    optional: bool
    problem: str | None = None

    @property
    def sound(self) -> bool:
        """Whether it can be used, as far as that is known."""
        return self.found is not None and self.fits and self.problem is None


@dataclass(frozen=True, slots=True)
class Need:
    """What one route takes of the disk.

    Attributes:
        route: a key of `splitter.split_estimate.ROUTES`.
        disk_bytes: by which the disks are fuller at the most.
        missing_bytes: what there is too little; 0 where it fits.
    """

    route: str
    disk_bytes: int
    missing_bytes: int

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return not self.missing_bytes


@dataclass(frozen=True, slots=True)
class AtCompression:
    """A model at one compression.

    Attributes:
        compression: None, "8bit", "4bit" or "4bit-double".
        output_bytes: of its layer files.
        needs: the routes, the one to prefer first.
        generation: where its weights would be and how long a token; None where nothing was measured.
        problem: why nothing can be told of generating.
    """

    compression: str | None
    output_bytes: int
    needs: tuple[Need, ...]
    generation: GenerationEstimate | None = None
    problem: str | None = None

    @property
    def route(self) -> str | None:
        """The first route that fits; None if none does."""
        return next((need.route for need in self.needs if need.fits), None)

    @property
    def token_seconds(self) -> float | None:
        """See `GenerationEstimate`."""
        return self.generation.token_seconds if self.generation is not None else None


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """A model of the short list on this machine.

    Attributes:
        repository: on the hub.
        parameters: how many it has.
        checkpoint_bytes: of its shards.
        at: by compression, from the largest output to the smallest.
        quantized: how it is published quantized; None for plain weights.
    """

    repository: str
    parameters: int
    checkpoint_bytes: int
    at: tuple[AtCompression, ...]
    quantized: str | None = None

    @property
    def name(self) -> str:
        """Without its organisation."""
        return self.repository.rpartition("/")[2]

    @property
    def best(self) -> AtCompression | None:
        """Of the compressions that fit the disk the one with the quickest token, or with the least layer files where no
        time is known."""
        fitting = [one for one in self.at if one.route is not None]
        timed = [one for one in fitting if one.token_seconds is not None]
        if timed:
            return min(timed, key=lambda one: one.token_seconds or 0.0)
        return min(fitting, key=lambda one: one.output_bytes, default=None)


@dataclass(frozen=True, slots=True)
class Failure:
    """A probe that found nothing out: of what, and why."""

    what: str
    problem: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Something to do.

    Attributes:
        essential: whether no model can be run without it.
        text: what is wrong or could be better, and what to do.
        command: to type; None where there is none.
    """

    essential: bool
    text: str
    command: str | None = None


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """All that the probes found out."""

    memory: Memory | None = None
    processor: Processor | None = None
    gpus: Gpus | None = None
    folders: tuple[Folder, ...] = ()
    host: Host | None = None
    hub: Hub | None = None
    packages: tuple[Package, ...] = ()
    rates: tuple[Speed, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What `rabbitllm doctor` says.

    Attributes:
        version: of this package.
        machine: what it has.
        models: of the short list.
        devices: where they would compute.
        advice: the essential first.
        failures: of probes.
        seconds: that all of it took.
    """

    version: str
    machine: MachineInfo
    models: tuple[ModelEstimate, ...]
    devices: tuple[str, ...]
    advice: tuple[Advice, ...]
    failures: tuple[Failure, ...]
    seconds: float

    @property
    def can_run(self) -> bool:
        """Whether models can be run."""
        return not any(advice.essential for advice in self.advice)
