"""What generates in a row of a benchmark, and the layer files that it loads. Knows no figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.peers import Environment, make_layer_files


@dataclass(frozen=True)
class Runner:
    """A row: what generates, and how.

    Attributes:
        environment: what it runs in.
        package: what is imported there.
        loader: see `lib/worker.py`.
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
    def layers_name(self) -> str:
        """Of the folder with its layer files, which rows of one environment and compression share."""
        return f"{self.environment.name}-{self.options.get('compression', 'none')}"


def ensure_layer_files(runner: Runner, checkpoint: Path, folder: Path, work: Path, label: str) -> None:
    """Make the layer files of a layered row, unless they are there.

    Args:
        runner: nothing is made for one that loads the checkpoint itself.
        checkpoint: to split.
        folder: that they are in, or will be.
        work: see `run_worker`.
        label: names the log.

    Raises:
        PeerError: it failed.
    """
    if runner.loader == "layered" and not folder.exists():
        compression = runner.options.get("compression")
        make_layer_files(runner.environment, runner.package, checkpoint, folder, compression, work, label)
