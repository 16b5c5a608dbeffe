"""The peers: an environment of its own for each, made when first needed, and a process that works in it."""

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
from benchmarks.lib.control_group import control_group
from benchmarks.lib.idle_process import REPOSITORY, Cap, PeerError, idle_process, run_tool
from benchmarks.lib.measure import Sampler
from benchmarks.lib.worker import split

WORKER = Path(__file__).resolve().with_name("worker.py")
RUN_LIMIT_SECONDS = 1800
_NOT_INSTALLED = "cannot be installed"
LEAST_ROOM_BYTES = 128 << 20
"""More than the idle process, whatever the share: with less, a tiny model cannot compute."""

_COMMON = ("torch==2.13.0", "accelerate==1.15.0", "safetensors==0.8.0", "bitsandbytes==0.50.2", "numpy==2.4.6")
"""As in constraints.txt, so that all rows compute with the same libraries."""


@dataclass(frozen=True)
class Environment:
    """What pip installs for a peer.

    Attributes:
        name: of the folder.
        requirements: pinned; what they need in turn is up to pip.
        without_dependencies: installed after those, whatever they declare.
        built_here: of `requirements`, names of those that are compiled from their source package.
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
# RabbitLLM 1.1.0 declares torch<2.6; it runs with 2.13, which makes the comparison one of like with like. What else it
# declares is installed but for transformers-stream-generator, which it does not import.
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
# what it declares in addition to these (flash-attn, flash-linear-attention, kvikio) needs CUDA; it runs without
OLLM = Environment(
    "ollm-1.0.3", (*_COMMON, "transformers==4.57.3", "requests==2.32.5", "peft==0.18.0"), ("ollm==1.0.3",)
)
LLAMA_CPP = Environment(
    "llama-cpp-python-0.3.36",
    ("llama-cpp-python==0.3.36", "numpy==2.4.6"),
    built_here=("llama-cpp-python",),
)
"""Compiled for this processor, with the compiler that is here: the published wheels are for any."""
LLAMA_SERVER = Environment("llama-server-0.3.36", ("cmake>=3.28", "ninja"))
"""What builds llama.cpp's own server (`lib/llama_server.py`)."""


def interpreter(environment: Environment, work: Path) -> Path:
    """Python of an environment, which is made, or made again if its pins have changed.

    Which build of torch comes is up to pip's own configuration.

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
    """Make the environments of rows before anything is measured; return the rows without one, and why."""
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
    """Bytes for a process in addition to what it takes idle: a share of the weights in percent; None for no limit."""
    return None if share is None else max(weights * share // 100, LEAST_ROOM_BYTES)


@dataclass(frozen=True)
class Outcome:
    """What a worker answered, what was sampled meanwhile, and the versions it ran with."""

    answer: Mapping[str, Any]
    sampler: Sampler
    versions: Mapping[str, str]


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
) -> Outcome:
    """Start a worker, wait until it is idle, drop files from the page cache, let it work while it is sampled.

    Args:
        environment: what it runs in.
        job: see `lib/worker.py`.
        work: holds environments and logs.
        label: names the log.
        cold: folders whose files are to be in no cache when it begins.
        watched: folders whose disk use is sampled.
        cap_bytes: what its memory may grow by from when it is idle; None for no limit.
        limit_seconds: when it is stopped; by default after `RUN_LIMIT_SECONDS`.

    Raises:
        PeerError: it failed, died, or took too long.
    """
    python = interpreter(environment, work)
    # at the smallest size the machine may have other things to do
    seconds = RUN_LIMIT_SECONDS if limit_seconds is None or SMALLEST in os.environ else limit_seconds
    with contextlib.ExitStack() as held:
        cap = None
        if cap_bytes is not None:
            cap = Cap(held.enter_context(control_group(f"rabbitllm-benchmark-{os.getpid()}")), cap_bytes)
        idle = held.enter_context(
            idle_process(
                python,
                WORKER,
                job,
                work,
                label,
                cold,
                variables=variables(environment, work),
                cap=cap,
                stop_seconds=seconds,
            )
        )
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
    """Split a checkpoint with one of the packages that do so, into a folder that is made.

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
        shutil.rmtree(folder)  # another row of these layer files is not to take them for made
        raise


def variables(environment: Environment, work: Path) -> dict[str, str]:
    """Of a process in an environment."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf-home"), "TOKENIZERS_PARALLELISM": "false"}
    if environment == THIS:
        variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return variables
