"""Starts the generated hub as a process, says where it is and what it has sent, and ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib.peers import REPOSITORY
from benchmarks.lib.published import Checkpoint
from benchmarks.split.counters import Counters, Sent
from benchmarks.split.models import MODELS

_COUNTERS_NAME = "kaggle-72b-sent"
_QUIET_SECONDS = 5
_UNSET = ("PYTHONHOME", "HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE")


class HubProcess:
    """The running hub: a context manager, ready when it is entered.

    Attributes:
        url, commit: of the repository `made.model.repository`.
        digests: how many bytes had to be hashed for it, in what time.
    """

    def __init__(self, made: Checkpoint, scale: float, work: Path, rate: float | None = None) -> None:
        name = next(name for name, model in MODELS.items() if model is made.model)
        self._command = [sys.executable, "-m", "benchmarks.split.hub", "--model", name, "--scale", repr(scale)]
        self._command += ["--work-dir", str(work), "--counters", str(work / _COUNTERS_NAME)]
        self._command += ["--rate", repr(rate)] if rate is not None else []
        self._work = work
        self.url = self.commit = ""
        self.digests: Mapping[str, Any] = {}

    def __enter__(self) -> HubProcess:
        self._process = subprocess.Popen(
            self._command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"The hub ended with exit status {self._process.wait()} before it was ready.")
        ready = json.loads(line)
        self.url, self.commit, self.digests = ready["url"], ready["commit"], ready["digests"]
        self._counters = Counters(self._work / _COUNTERS_NAME)
        return self

    def __exit__(self, *exception: object) -> None:
        self._counters.__exit__()
        self._process.communicate("")
        (self._work / _COUNTERS_NAME).unlink(missing_ok=True)

    def sent(self) -> Sent:
        """Since it was started."""
        return self._counters.read()

    def quiet(self) -> Sent:
        """The same, once no shard is being sent any more: a client that was killed leaves answers behind."""
        limit = time.monotonic() + _QUIET_SECONDS
        while self.sent().open and time.monotonic() < limit:
            time.sleep(0.001)
        return self.sent()

    def cpu_seconds(self) -> float:
        """Of all its threads, since it was started."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def variables(self, home: Path) -> dict[str, str]:
        """The environment of a process whose hub this is, with `home` as its Hugging Face home."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _UNSET and not name.lower().endswith("_proxy")
        }
        return kept | {
            "PYTHONPATH": str(REPOSITORY),
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "RABBITLLM_HOME": str(home / "rabbitllm"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
