"""Records of a machine, and a report as one JSON object; a field is None if it could not be determined."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rabbitllm.base.plain_json import plain
from rabbitllm.engine.free_memory import GroupLimit, ProcessLimit
from rabbitllm.estimate.cost_model import GenerationEstimate, Speed
from rabbitllm.storage.folders import Folder, Host


@dataclass(frozen=True, slots=True)
class Memory:
    """The machine's memory, bytes.

    Attributes:
        total: of the machine.
        free: memory of the machine that is available without swapping.
        usable: memory that this process may still take, within control groups and the limits of the process.
        groups: control groups with a limit, innermost first.
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
        name: as reported by the system.
        cores: number of cores of the machine.
        usable: number of cores that this process may use at a time; a control group may allow a fraction of one.
        instructions: relevant instruction set -> whether it has it; empty if that is not reported.
    """

    name: str
    cores: int
    usable: float
    instructions: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, bytes; `bf16` is whether it has bfloat16 arithmetic, else models compute in float16 there."""

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
        driver: whether NVIDIA's driver is installed.
        torch: torch's version, with its build; None if torch was not loaded.
    """

    found: tuple[Gpu, ...]
    driver: bool
    torch: str | None


@dataclass(frozen=True, slots=True)
class Hub:
    """The state of the hub.

    Attributes:
        endpoint: its address.
        offline: whether `HF_HUB_OFFLINE` forbids requests; then none was sent.
        reachable: whether it answered.
        seconds: time until it answered.
        token: whether a token exists.
        problem: why it did not answer.
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
        found: its version; None if it is not installed.
        wanted: the accepted versions, as pip writes them; "" for any.
        fits: whether the installed version is one of these.
        brings: its use.
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
    """The disk use of one route.

    Attributes:
        route: a key of `estimate.split_estimate.ROUTES`.
        disk_bytes: the largest increase of the use of the disks.
        missing_bytes: the bytes that are lacking; 0 if it fits.
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
        needs: the routes in order of preference.
        generation: its generation estimate; None if nothing was measured.
        problem: why there is no generation estimate.
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
        parameters: number of parameters.
        checkpoint_bytes: of its shards.
        at: by compression, from the largest output to the smallest.
        quantized: quantization of the published weights; None for plain ones.
    """

    repository: str
    parameters: int
    checkpoint_bytes: int
    at: tuple[AtCompression, ...]
    quantized: str | None = None

    @property
    def name(self) -> str:
        """The repository's name without its organisation."""
        return self.repository.rpartition("/")[2]

    @property
    def best(self) -> AtCompression | None:
        """The compression that fits the disk with the fastest token, or the smallest one if no time is known."""
        fitting = [choice for choice in self.at if choice.route is not None]
        timed = [choice for choice in fitting if choice.token_seconds is not None]
        if timed:
            return min(timed, key=lambda choice: choice.token_seconds or 0.0)
        return min(fitting, key=lambda choice: choice.output_bytes, default=None)


@dataclass(frozen=True, slots=True)
class Failure:
    """A probe that failed: its name, and the reason."""

    what: str
    problem: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation.

    Attributes:
        essential: whether no model can be run without it.
        text: the problem, and its remedy.
        command: to type; None if there is none.
    """

    essential: bool
    text: str
    command: str | None = None


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """The results of all probes."""

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
    """The report of `rabbitllm doctor`.

    Attributes:
        version: of this package.
        machine: results of the probes.
        models: of the short list.
        devices: devices that models would compute on.
        advice: the essential first.
        failures: of probes.
        seconds: duration of all probes.
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


# JSON: snake_case keys, sizes in bytes, times in seconds


def as_record(report: Report) -> dict[str, Any]:
    """Convert a report to JSON, with derived values."""
    content: dict[str, Any] = plain(dataclasses.asdict(report))
    content["can_run"] = report.can_run
    for entry, model in zip(content["models"], report.models, strict=True):
        best = model.best
        entry["best"] = None if best is None else {"compression": best.compression, "route": best.route}
        for record, choice in zip(entry["at"], model.at, strict=True):
            record["route"], record["fits"] = choice.route, choice.route is not None
    for entry, package in zip(content["machine"]["packages"], report.machine.packages, strict=True):
        entry["sound"] = package.sound
    return content
