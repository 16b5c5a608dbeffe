"""A Hugging Face hub with one repository, whose weights are made while they are sent; a process of its own.

    python -m benchmarks.split.hub --model qwen2.5-72b --scale 0.05 --work-dir FOLDER

The server is that of the tests (`tests/support/local_hub.py`). It prints its address as a line of JSON once the digests
are known, and the bytes sent so far (`Sent`) for each line on stdin; it ends at the end of stdin. `HubProcess` starts
and ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib.generated import Content, Weights, digests, write_around
from benchmarks.lib.models import MODELS
from benchmarks.lib.process import REPOSITORY
from benchmarks.lib.published import Checkpoint, Shard, checkpoint
from tests.support.local_hub import GeneratedFile, LocalHub, Request

DIGESTS_NAME = "kaggle-72b-digests.json"
WORDS = 64
"""Of the tokenizer; loading a model needs one."""


@dataclass(frozen=True)
class Sent:
    """Bytes of shards.

    Attributes:
        sent: to clients that fetch a shard to its end.
        again: of those, bytes that had been sent before.
        probed: in ranges that end before their file, for headers.
        open: answers under way, not bytes.
    """

    sent: int = 0
    again: int = 0
    probed: int = 0
    open: int = 0

    @property
    def new(self) -> int:
        """Sent for the first time."""
        return self.sent - self.again


def files_of(source: Checkpoint, content: Weights, shard_digests: Mapping[str, str]) -> dict[str, GeneratedFile]:
    """All files of the repository."""

    def shard_file(shard: Shard) -> GeneratedFile:
        def read(offset: int, length: int) -> bytes | memoryview:
            pieces = [*content.of_file(shard, offset, offset + length)]
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

        return GeneratedFile(shard.size, read, shard_digests[shard.name])

    with tempfile.TemporaryDirectory() as around:
        write_around(Path(around), source, WORDS)
        files = {path.name: GeneratedFile.from_bytes(path.read_bytes()) for path in Path(around).iterdir()}
    return files | {shard.name: shard_file(shard) for shard in source.shards}


class GeneratedHub(LocalHub):
    """The server, in this process.

    Attributes:
        sent: so far.

    Args:
        made: the checkpoint to serve.
        content: its weights.
        shard_digests: SHA-256 of each shard.
        rate: bytes a second of each connection, as over a network; None for no limit.
    """

    def __init__(
        self, source: Checkpoint, content: Weights, shard_digests: Mapping[str, str], rate: float | None = None
    ) -> None:
        super().__init__(Path(os.devnull))
        self.repository, self.sent = source.model.repository, Sent()
        self.add_generated(self.repository, files_of(source, content, shard_digests))
        self.faults.delay_per_mib = (1 << 20) / rate if rate else 0.0
        self._sizes = {shard.name: shard.size for shard in source.shards}
        self._at: dict[int, tuple[str, int, bool]] = {}  # of answers under way: file, offset, whether it is a probe
        self._reached: dict[str, int] = {}
        self._counting = threading.Lock()

    def record(self, request: Request) -> int:
        """Note a request; a range that ends before its file is a probe of a header, not part of the transfer."""
        key = super().record(request)
        if request.method == "GET" and request.file in self._sizes and request.status in (200, 206):
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.range or "")
            size = self._sizes[request.file]
            with self._counting:
                is_probe = bool(match and match[2] and int(match[2]) < size - 1)
                self._at[key] = request.file, int(match[1]) if match else 0, is_probe
                self._add(open=1)
        return key

    def record_bytes(self, key: int, count: int) -> None:
        """Note bytes of an answer."""
        super().record_bytes(key, count)
        with self._counting:
            if key not in self._at:
                return
            file, start, is_probe = self._at[key]
            self._at[key] = file, start + count, is_probe
            if is_probe:
                self._add(probed=count)
                return
            reached = self._reached.get(file, 0)
            self._add(sent=count, again=max(min(start + count, reached) - start, 0))
            self._reached[file] = max(reached, start + count)

    def body_ended(self, key: int) -> None:
        """Note the end of an answer."""
        with self._counting:
            if self._at.pop(key, None):
                self._add(open=-1)

    def _add(self, **counts: int) -> None:
        self.sent = replace(self.sent, **{name: getattr(self.sent, name) + count for name, count in counts.items()})


_QUIET_SECONDS = 5
_UNSET = ("PYTHONHOME", "HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE")


class HubProcess:
    """The hub in a process: a context manager.

    Attributes:
        url, commit: of the repository `made.model.repository`.
        digests: bytes hashed for it, and the seconds and threads.
    """

    def __init__(self, source: Checkpoint, scale: float, work: Path, rate: float | None = None) -> None:
        name = next(name for name, model in MODELS.items() if model is source.model)
        self._command = [sys.executable, "-m", "benchmarks.split.hub", "--model", name, "--scale", repr(scale)]
        self._command += ["--work-dir", str(work)]
        self._command += ["--rate", repr(rate)] if rate is not None else []
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
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate("")

    def sent(self) -> Sent:
        """Bytes of shards that the hub has sent since its start."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Sent(**json.loads(self._process.stdout.readline()))

    def quiet(self) -> Sent:
        """The same, once no answers are under way: a killed client leaves some."""
        limit = time.monotonic() + _QUIET_SECONDS
        while self.sent().open and time.monotonic() < limit:
            time.sleep(0.001)
        return self.sent()

    def cpu_seconds(self) -> float:
        """Processor seconds of all threads of the hub, since its start."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def variables(self, home: Path) -> dict[str, str]:
        """`client_variables` of this hub."""
        return client_variables(self.url, home)


def client_variables(url: str, home: Path) -> dict[str, str]:
    """The environment of a process that uses a hub, with `home` as its Hugging Face home."""
    kept = {
        name: value for name, value in os.environ.items() if name not in _UNSET and not name.lower().endswith("_proxy")
    }
    return kept | {
        "PYTHONPATH": str(REPOSITORY),
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "RABBITLLM_HOME": str(home / "rabbitllm"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="qwen2.5-72b")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times the model's layers")
    parser.add_argument("--work-dir", type=Path, required=True, help="for the digests")
    parser.add_argument("--rate", type=float, help="MB/s of each connection (default: as fast as it goes)")
    options = parser.parse_args(arguments)
    source, content = checkpoint(MODELS[options.model], options.scale), Content()
    shard_digests = digests(source, content, options.work_dir / DIGESTS_NAME)
    rate = options.rate * 1e6 if options.rate else None
    hub = GeneratedHub(source, content, shard_digests.of, rate)
    with hub:
        took = {key: value for key, value in asdict(shard_digests).items() if key != "of"}
        print(json.dumps({"url": hub.url, "commit": hub.commit(source.model.repository), "digests": took}), flush=True)
        for _ in sys.stdin:
            print(json.dumps(asdict(hub.sent)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
