"""The peers: a virtual environment for each, made when first needed, and processes that run jobs in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.command_line import SMALLEST
from benchmarks.lib.measure import Sampler
from benchmarks.lib.process import REPOSITORY, Cap, PeerError, control_group, idle_process, run_tool
from benchmarks.lib.worker import split

WORKER = Path(__file__).resolve().with_name("worker.py")
RUN_LIMIT_SECONDS = 1800
_NOT_INSTALLED = "cannot be installed"
LEAST_ROOM_BYTES = 128 << 20
"""On top of the idle process, at least: with less, a tiny model cannot compute."""

_COMMON = ("torch==2.13.0", "accelerate==1.15.0", "safetensors==0.8.0", "bitsandbytes==0.50.2", "numpy==2.4.6")
"""As in constraints.txt: all rows compute with the same libraries."""


@dataclass(frozen=True)
class Environment:
    """The packages of a peer.

    Attributes:
        name: of the folder.
        requirements: pinned; pip chooses their dependencies.
        without_dependencies: installed after those, without their dependencies.
        built_here: names of requirements that are compiled from their source package.
    """

    name: str
    requirements: tuple[str, ...] = ()
    without_dependencies: tuple[str, ...] = ()
    built_here: tuple[str, ...] = ()


THIS = Environment("this interpreter")
"""This project, as it lies here, in the interpreter that runs the benchmark."""
TRANSFORMERS = Environment("transformers-5.24.0", (*_COMMON, "transformers==5.24.0"))
TRANSFORMERS_SERVE = Environment(
    "transformers-serve-5.24.0",
    (*_COMMON, "transformers==5.24.0", "fastapi==0.165.0", "uvicorn==0.54.0", "openai==3.52.0"),
)
AIRLLM = Environment(
    "airllm-4.0.0",
    (*_COMMON, "transformers==5.24.0", "scipy==1.17.1", "sentencepiece==0.2.3"),
    ("airllm==4.0.0",),
)
# RabbitLLM 1.1.0 declares torch<2.6 but runs with 2.13, the version of all other rows. It never imports its dependency
# transformers-stream-generator.
RABBITLLM_1 = Environment(
    "rabbitllm-1.1.0",
    (
        *_COMMON,
        "transformers==5.2.0",
        "einops==0.8.2",
        "scipy==1.17.1",
        "sentencepiece==0.2.3",
        "tiktoken==0.14.0",
        "psutil==7.2.2",
    ),
    ("rabbitllm==1.1.0",),
)
# its other dependencies (flash-attn, flash-linear-attention, kvikio) need CUDA; it runs without them
OLLM = Environment(
    "ollm-1.0.3", (*_COMMON, "transformers==4.57.3", "requests==2.32.5", "peft==0.18.0"), ("ollm==1.0.3",)
)
LLAMA_CPP = Environment(
    "llama-cpp-python-0.3.36",
    ("llama-cpp-python==0.3.36", "numpy==2.4.6"),
    built_here=("llama-cpp-python",),
)
"""Compiled for this processor: the published wheels are for any."""
LLAMA_SERVER = Environment("llama-server-0.3.36", ("cmake>=3.28", "ninja"))
"""The tools that build llama.cpp's own programs (`lib/llama.py`)."""


def interpreter(environment: Environment, work: Path) -> Path:
    """The interpreter of an environment, which is made again if its pins have changed.

    pip's own configuration decides which build of torch is installed.

    Raises:
        PeerError: pip failed.
    """
    if environment == THIS:
        return Path(sys.executable)
    folder = work / "environments" / environment.name
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps([sys.version, *astuple(environment)])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Making the environment of {environment.name} …", file=sys.stderr, flush=True)
    run_tool([sys.executable, "-m", "venv", "--clear", str(folder)], _NOT_INSTALLED)
    steps = []
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    from_source = [argument for name in environment.built_here for argument in ("--no-binary", name)]
    if environment.requirements:
        steps.append([*install, *from_source, *environment.requirements])
    if environment.without_dependencies:
        steps.append([*install, "--no-deps", *environment.without_dependencies])
    for step in steps:
        run_tool(step, _NOT_INSTALLED)
    stamp.write_text(wanted)
    return python


def prepare(environments: Mapping[str, Environment], work: Path) -> dict[str, str]:
    """Make the environments of rows before anything is measured; return each row without one, and the reason."""
    unusable: dict[str, str] = {}
    errors: dict[Environment, str] = {}
    for row, environment in environments.items():
        if environment not in errors:
            try:
                interpreter(environment, work)
            except PeerError as error:
                errors[environment] = str(error)
        if environment in errors:
            unusable[row] = errors[environment]
    return unusable


def room(weights: int, share: int | None) -> int | None:
    """Bytes for a process on top of its idle use: a share of the weights in percent; None for no limit."""
    return None if share is None else max(weights * share // 100, LEAST_ROOM_BYTES)


@dataclass(frozen=True)
class Outcome:
    """A worker's answer, the samples taken meanwhile, and the versions of its packages."""

    answer: Mapping[str, Any]
    sampler: Sampler
    versions: Mapping[str, str]


def worker_command(environment: Environment, job: Mapping[str, Any], work: Path) -> list[str | Path]:
    """The command line of a worker (`lib/worker.py`).

    Raises:
        PeerError: its environment cannot be made.
    """
    return [interpreter(environment, work), "-P", WORKER, json.dumps(job)]


def run_worker(
    environment: Environment,
    job: Mapping[str, Any],
    work: Path,
    label: str,
    cold: Sequence[Path],
    watched: Sequence[Path] = (),
    *,
    cap_bytes: int | None = None,
    limit_seconds: float | None = None,
    more_variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Start a worker, wait until it is idle, drop files from the page cache, and sample it while it works.

    Args:
        environment: of the worker.
        job: see `lib/worker.py`.
        work: folder of environments and logs.
        label: name of the log.
        cold: folders whose files are out of the page cache when the job begins.
        watched: folders whose disk use is sampled.
        cap_bytes: memory on top of its idle use; None for no limit.
        limit_seconds: after which it is stopped; `RUN_LIMIT_SECONDS` by default, and always at the smallest size, when
            the machine may be busy.
        more_variables: of its environment.

    Raises:
        PeerError: it failed, died, or took too long.
    """
    seconds = RUN_LIMIT_SECONDS if limit_seconds is None or SMALLEST in os.environ else limit_seconds
    of_process = variables(environment, work) | dict(more_variables or {})
    settings: dict[str, Any] = {"variables": of_process, "stop_seconds": seconds, "cap": None}
    command = worker_command(environment, job, work)
    with contextlib.ExitStack() as held:
        if cap_bytes is not None:
            group = held.enter_context(control_group(f"rabbitllm-benchmark-{os.getpid()}"))
            settings["cap"] = Cap(group, cap_bytes)
        idle = held.enter_context(idle_process(command, work, label, cold, **settings))
        sampler = held.enter_context(Sampler(watched, idle.process.pid))
        idle.go()
        answer = idle.message()
    return Outcome(answer, sampler, idle.versions)


def make_layer_files(
    environment: Environment,
    package: str,
    checkpoint: Path,
    folder: Path,
    compression: str | None,
    work: Path,
    label: str,
) -> None:
    """Split a checkpoint with one of the packages, into a new folder.

    Raises:
        PeerError: it failed.
    """
    folder.mkdir()
    options = {"layer_shards_saving_path": str(folder)} | ({"compression": compression} if compression else {})
    job = {"task": "split", "package": package, "checkpoint": str(checkpoint), "options": options}
    try:
        if environment == THIS and SMALLEST in os.environ:
            split(job)
        else:
            run_worker(environment, job, work, label, [checkpoint if checkpoint.is_dir() else checkpoint.parent])
    except BaseException:
        shutil.rmtree(folder)  # so that no other row takes these layer files for finished
        raise


def variables(environment: Environment, work: Path) -> dict[str, str]:
    """The environment variables of a process."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf-home"), "TOKENIZERS_PARALLELISM": "false"}
    if environment == THIS:
        variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return variables
