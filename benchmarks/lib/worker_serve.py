"""Starts one server, in the environment of its project, once it is told to. Imports nothing of this repository.

    python -P worker_serve.py '{"how": "transformers", "model": "folder", "port": 8000, ...}'

The protocol is the worker's: `{"ready": {package: version}}` on stdout once the libraries are imported, then a line on
stdin starts the server, which runs until it is ended by a signal; `{"error": "..."}` if it cannot run. What it prints
goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IMPORTED = ("uvicorn", "fastapi", "openai", "transformers.cli.serve")
"""In addition to what every worker imports, so that a server's modules are there before its memory is bounded."""


def rabbitllm(job: dict[str, Any]) -> None:
    """The command `rabbitllm serve`."""
    from rabbitllm.cli.main import main

    sys.argv = ["rabbitllm", "serve", job["model"], "--port", str(job["port"]), *job["arguments"]]
    main()


def transformers(job: dict[str, Any]) -> None:
    """The command `transformers serve`, which has no option for where the weights are: all of the model is mapped."""
    from transformers.cli.serve import Serve

    Serve(force_model=job["model"], port=job["port"], host="127.0.0.1", **job["options"])


def transformers_disk(job: dict[str, Any]) -> None:
    """The same, its loading of a model replaced by one with every decoder layer offloaded to disk by accelerate."""
    from transformers.cli.serving.model_manager import ModelManager

    def load(manager: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return _worker()["LOADERS"]["offloaded"]({"checkpoint": name.split("@")[0], **job})

    ModelManager._load_model = load
    transformers(job)


def program(job: dict[str, Any]) -> None:
    """A program that is no Python, in the place of this process."""
    os.dup2(2, 1)
    os.execv(job["program"], [job["program"], *job["arguments"], "--port", str(job["port"])])


SERVERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "rabbitllm": rabbitllm,
    "transformers": transformers,
    "transformers-disk": transformers_disk,
    "program": program,
}


def _worker() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).with_name("worker.py")))


def main() -> None:
    """Take the cores that are meant for it, import, wait, serve."""
    answers = os.fdopen(os.dup(1), "w")

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        job = json.loads(sys.argv[1])
        os.sched_setaffinity(0, job["cores"])
        os.dup2(2, 1)
        versions: dict[str, str] = {}
        if job["package"] is not None:
            versions = _worker()["import_libraries"](job["package"])
            for library in _IMPORTED:
                with contextlib.suppress(ImportError):
                    importlib.import_module(library)
        answer({"ready": versions})
        if sys.stdin.readline():
            SERVERS[job["how"]](job)
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
