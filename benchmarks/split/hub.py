"""A Hugging Face hub with one repository, whose weights are made while they are sent; a process of its own.

    python -m benchmarks.split.hub --model qwen2.5-72b --scale 0.05 --work-dir FOLDER

The server is that of the tests (`tests/support/local_hub.py`). Once the digests are known it says on stdout, in one
line of JSON, where it is; it ends when its stdin does. What it has sent is counted in a file (`Counters`), so that a
watching process need not ask. `HubProcess` starts and ends it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib.generated import Content, digests
from benchmarks.lib.idle_process import REPOSITORY
from benchmarks.lib.models import MODELS
from benchmarks.lib.published import Checkpoint, Shard, checkpoint
from tests.support.local_hub import GeneratedFile, LocalHub, Request

DIGESTS_NAME, _COUNTERS_NAME = "kaggle-72b-digests.json", "kaggle-72b-sent"
_FORM = struct.Struct("<4q")


@dataclass(frozen=True)
class Sent:
    """Bytes of shards.

    Attributes:
        sent: to a client that fetches a shard to its end.
        again: of those, bytes that had been sent before.
        probed: looked at: ranges that end before their file does, for headers.
        open: no bytes but answers that are under way.
    """

    sent: int = 0
    again: int = 0
    probed: int = 0
    open: int = 0

    @property
    def new(self) -> int:
        """Sent for the first time: how far the whole is."""
        return self.sent - self.again


class Counters:
    """The counters in a file, which one process writes (`new`) and others read. A context manager."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        if new:
            path.write_bytes(bytes(_FORM.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORM.size)

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *exception: object) -> None:
        self._map.close()

    def add(self, *, sent: int = 0, again: int = 0, probed: int = 0, open: int = 0) -> None:
        """Add to them; one thread at a time."""
        old = self.read()
        _FORM.pack_into(self._map, 0, old.sent + sent, old.again + again, old.probed + probed, old.open + open)

    def read(self) -> Sent:
        return Sent(*_FORM.unpack_from(self._map, 0))


def files_of(made: Checkpoint, content: Content, shard_digests: Mapping[str, str]) -> dict[str, GeneratedFile]:
    """Everything in the repository: config, generation config, index, a small tokenizer, and the shards."""
    small: dict[str, Any] = {
        "config.json": made.config,
        "generation_config.json": made.model.generation_config,
        "model.safetensors.index.json": made.index(),
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"},
    }

    def shard_file(shard: Shard) -> GeneratedFile:
        def read(offset: int, length: int) -> bytes | memoryview:
            pieces = [*content.of_file(shard, offset, offset + length)]
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

        return GeneratedFile(shard.size, read, shard_digests[shard.name])

    encoded = {name: (json.dumps(held, indent=2) + "\n").encode() for name, held in small.items()}
    files = {name: GeneratedFile.from_bytes(data) for name, data in encoded.items()}
    return files | {shard.name: shard_file(shard) for shard in made.shards}


def _tokenizer() -> dict[str, Any]:
    """One word a token, for the first few; what a model needs to be loaded."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(64)}, "unk_token": "w0"},
    }


class GeneratedHub(LocalHub):
    """The server, in this process, which counts what it sends of shards.

    Args:
        made: what to serve.
        content: the weights.
        shard_digests: SHA-256 of each shard.
        counters: told of what is sent.
        rate: bytes a second and connection, as if over a network; None for as fast as it goes.
    """

    def __init__(
        self,
        made: Checkpoint,
        content: Content,
        shard_digests: Mapping[str, str],
        counters: Counters,
        rate: float | None = None,
    ) -> None:
        super().__init__(Path(os.devnull))
        self.repository, self.counters = made.model.repository, counters
        self.add_generated(self.repository, files_of(made, content, shard_digests))
        self.faults.delay_per_mib = (1 << 20) / rate if rate else 0.0
        self._sizes = {shard.name: shard.size for shard in made.shards}
        self._at: dict[int, tuple[str, int, bool]] = {}  # of bodies under way: file, offset, whether it is a probe
        self._reached: dict[str, int] = {}
        self._counting = threading.Lock()

    def record(self, request: Request) -> int:
        """Note it; a range that ends before its file is a look at a header, no part of the transfer."""
        key = super().record(request)
        if request.method == "GET" and request.file in self._sizes and request.status in (200, 206):
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.range or "")
            size = self._sizes[request.file]
            with self._counting:
                is_probe = bool(found and found[2] and int(found[2]) < size - 1)
                self._at[key] = request.file, int(found[1]) if found else 0, is_probe
                self.counters.add(open=1)
        return key

    def record_bytes(self, key: int, count: int) -> None:
        """Add to the counters."""
        super().record_bytes(key, count)
        with self._counting:
            if key not in self._at:
                return
            file, start, is_probe = self._at[key]
            self._at[key] = file, start + count, is_probe
            if is_probe:
                self.counters.add(probed=count)
                return
            reached = self._reached.get(file, 0)
            self.counters.add(sent=count, again=max(min(start + count, reached) - start, 0))
            self._reached[file] = max(reached, start + count)

    def body_ended(self, key: int) -> None:
        """It is no longer under way."""
        with self._counting:
            if self._at.pop(key, None):
                self.counters.add(open=-1)


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
        self._command += ["--work-dir", str(work)]
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="qwen2.5-72b")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times the model's layers")
    parser.add_argument("--work-dir", type=Path, required=True, help="for the digests")
    parser.add_argument("--rate", type=float, help="MB/s of each connection (default: as fast as it goes)")
    options = parser.parse_args(arguments)
    made, content = checkpoint(MODELS[options.model], options.scale), Content()
    found = digests(made, content, options.work_dir / DIGESTS_NAME)
    rate = options.rate * 1e6 if options.rate else None
    with (
        Counters(options.work_dir / _COUNTERS_NAME, new=True) as counters,
        GeneratedHub(made, content, found.of, counters, rate) as hub,
    ):
        took = {key: value for key, value in asdict(found).items() if key != "of"}
        print(json.dumps({"url": hub.url, "commit": hub.commit(made.model.repository), "digests": took}), flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
