"""Rows that generate one token after the other: runners, the workload, and the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import llama
from benchmarks.lib.checkpoint import SCALES
from benchmarks.lib.peers import LLAMA_CPP, Environment, Outcome, make_layer_files, run_worker
from benchmarks.lib.runs import Run, equal_in_turn

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Runner:
    """An implementation with its options.

    Attributes:
        environment: of its process.
        package: its Python package.
        loader: see `worker.py`; for llama.cpp the type of the file.
        options: for its `AutoModel.from_pretrained`.
    """

    environment: Environment
    package: str
    loader: str = "layered"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_compressed(self) -> bool:
        return "compression" in self.options

    @property
    def files_name(self) -> str:
        """Of its layer files or its one file; rows of one environment and compression share layer files."""
        if self.environment == LLAMA_CPP:
            return f"{self.loader}.gguf"
        return f"{self.environment.name}-{self.options.get('compression', 'none')}"


@dataclass(frozen=True)
class CappedCase:
    """A row: a runner, the file or the texts that it gets, and a cap in percent of the weights, or none."""

    runner: str
    share: int | None
    given: str = ""

    @property
    def name(self) -> str:
        cap = "no cap" if self.share is None else f"{self.share} %"
        return ", ".join(part for part in (self.runner, self.given, cap) if part)


def prepare_files(runner: Runner, checkpoint: Path, place: Path, work: Path, label: str) -> None:
    """Make a runner's layer files or its one file at `place`, unless they exist or it loads the checkpoint.

    Raises:
        PeerError: it failed.
    """
    if place.exists():
        return
    if runner.environment == LLAMA_CPP:
        llama.write_file(checkpoint, place, runner.loader)
    elif runner.loader == "layered":
        compression = runner.options.get("compression")
        make_layer_files(runner.environment, runner.package, checkpoint, place, compression, work, label)


@dataclass
class StepsRun(Run):
    """One row of one turn; seconds.

    Attributes:
        load_seconds: of loading the model from existing layer files.
        first_token_seconds: from the call of `generate`.
        token_seconds: median of `step_seconds`, which exclude the first token.
        step_bytes: read from the disk in those steps.
        read_bytes, read_seconds: of a pass of this project that only reads.
        placed: the places of the weights, if the model has them.
    """

    load_seconds: float = 0.0
    first_token_seconds: float = 0.0
    token_seconds: float = 0.0
    step_seconds: Sequence[float] = ()
    step_bytes: Sequence[int] = ()
    tokens: Sequence[int] = ()
    dtype: str = ""
    threads: int = 0
    read_bytes: float = 0
    read_seconds: float = 0.0
    placed: str = ""

    @property
    def headline(self) -> float:
        """Seconds a token."""
        return self.token_seconds


@dataclass(frozen=True)
class Workload:
    """The job of every row: generate after a prompt, from a checkpoint or from files in a folder."""

    checkpoint: Path
    folder: Path
    prompt: Sequence[int]
    tokens: int

    def prepare(self, runner: Runner, work: Path, label: str) -> None:
        """`prepare_files` in this folder."""
        prepare_files(runner, self.checkpoint, self.folder / runner.files_name, work, label)

    def decode(
        self,
        runner: Runner,
        work: Path,
        label: str,
        *,
        checkpoint: Path | None = None,
        place: Path | None = None,
        cap_bytes: int | None = None,
        limit_seconds: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Run one row of one turn; its files are out of the page cache when it begins.

        Args:
            runner: of the row.
            work, label, cap_bytes, limit_seconds: see `run_worker`.
            checkpoint: instead of the workload's.
            place: of the runner's files; by default those of `prepare`.
            options: in addition to the runner's.

        Raises:
            PeerError: it failed.
        """
        files, source = str(place or self.folder / runner.files_name), checkpoint or self.checkpoint
        job = {
            "task": "decode",
            "package": runner.package,
            "loader": runner.loader,
            "kind": runner.loader,
            "path": files,
            "checkpoint": str(source),
            "options": {"layer_shards_saving_path": files, **runner.options, **(options or {})},
            "offload_folder": str(self.folder / "offload"),
            "prompt": list(self.prompt),
            "tokens": self.tokens,
        }
        cold = [source if source.is_dir() else source.parent, self.folder]
        return run_worker(runner.environment, job, work, label, cold, cap_bytes=cap_bytes, limit_seconds=limit_seconds)


def prompt_for(scale: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Token ids of a scale's vocabulary, always the same."""
    return [(i * 37 + 11) % SCALES[scale].vocab_size for i in range(tokens)]


def tokens_equal(runs: Sequence[StepsRun], row: str, reference: str) -> list[bool]:
    """Whether a row's tokens equal another's, for every turn in which both ran."""
    return equal_in_turn(runs, row, reference, lambda run: run.tokens)
