"""Runs a notebook's code cells, one after the other, in a fresh process that takes a folder for the whole machine.

    with started(Run("examples/kaggle_70b.ipynb", root, {"MODEL": "org/name"})) as process: ...

The process is what a kernel is to Jupyter: all cells share one namespace, and the working folder is `/kaggle/working`
of that machine. Parameters are set after the cell that is tagged so, as papermill does. It is no Jupyter: magics and
widgets are not known. After each cell it prints a mark, so that it shows how far a run came.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent.parent
_ELSEWHERE = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE", "RABBITLLM_HOME")
"""Where a machine keeps what it fetches; a fresh notebook says nothing about it."""


@dataclass(frozen=True)
class Run:
    """One run of all cells.

    Attributes:
        notebook: its file.
        machine: stands for `/`.
        parameters: name -> value.
        room: bytes that Kaggle is taken to give to splits.
        gpus: how many GPUs the machine has, of those that are none.
        gpu_bytes: of each, free for weights.
        variables: environment of the machine, in addition to this process's own.
    """

    notebook: str
    machine: str
    parameters: Mapping[str, Any]
    room: int
    gpus: int = 0
    gpu_bytes: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)


def read(notebook: Path) -> dict[str, Any]:
    """A notebook's own record."""
    record: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    return record


def code_of(cell: Mapping[str, Any]) -> str:
    return "".join(cell["source"])


def mark(cell: Mapping[str, Any]) -> str:
    """What a run prints when this cell is done."""
    return f"[{cell['id']} is done]"


@contextlib.contextmanager
def started(run: Run) -> Iterator[subprocess.Popen[str]]:
    """The process; whatever becomes of the block, it is gone afterwards."""
    working = Path(run.machine) / "kaggle" / "working"
    variables = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    variables |= {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **run.variables}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.notebook", json.dumps(dataclasses.asdict(run))],
        cwd=working if working.is_dir() else run.machine,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _execute(run: Run) -> None:
    import pytest

    from rabbitllm import notebooks

    patch = pytest.MonkeyPatch()
    patch.setattr(notebooks, "ROOT", Path(run.machine))
    patch.setattr(notebooks, "KAGGLE_BYTES", run.room)
    names: dict[str, Any] = {"__name__": "__main__"}
    settled = False
    with contextlib.ExitStack() as stack:
        for cell in read(Path(run.notebook))["cells"]:
            if cell["cell_type"] != "code":
                continue
            if "HF_HOME" in os.environ and not settled:  # not before: what follows imports huggingface_hub
                settled = True
                stack.enter_context(_small_and_quick(run, patch))
            exec(compile(code_of(cell), f"cell {cell['id']}", "exec"), names)
            if "parameters" in cell["metadata"].get("tags", ()):
                names |= run.parameters
            print(mark(cell), flush=True)


@contextlib.contextmanager
def _small_and_quick(run: Run, patch: Any) -> Iterator[None]:
    """Measurements of milliseconds, and the GPUs."""
    from rabbitllm.engine import devices
    from tests.support.fake_gpu import FakeGpu, watched
    from tests.support.quick_measuring import measure_quickly

    measure_quickly(patch)
    if not run.gpus:
        yield
        return
    gpus = [FakeGpu(number, run.gpu_bytes) for number in range(run.gpus)]

    def resolve(device: str, max_memory: object, pin_memory: bool = True) -> list[FakeGpu]:
        return gpus if device == "auto" else gpus[:1]

    real = devices.resolve_devices
    for module in [module for name, module in sys.modules.items() if name.startswith("rabbitllm")]:
        if getattr(module, "resolve_devices", None) is real:
            patch.setattr(module, "resolve_devices", resolve)
    with watched():
        yield


if __name__ == "__main__":
    _execute(Run(**json.loads(sys.argv[1])))
