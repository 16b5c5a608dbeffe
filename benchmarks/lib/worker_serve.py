"""Starts one server, for `worker.py`, in the environment of its project. It runs until it is ended by a signal.

What it prints goes to stderr. Imports nothing of this repository.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
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
        return job["loaders"]["offloaded"]({"checkpoint": name.split("@")[0], **job})

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


def tasks(worker: Any, job: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], None]]:
    """What there is to do; `worker` is the module `worker.py`. The server's libraries are imported now."""
    if job["package"] is not None:
        for library in _IMPORTED:
            with contextlib.suppress(ImportError):
                importlib.import_module(library)
    job["loaders"] = worker.LOADERS
    return {"serve": lambda job: SERVERS[job["how"]](job)}
