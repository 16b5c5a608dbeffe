"""One target, fuzzed in a process of its own by atheris: `python -m fuzz.one TARGET SECONDS FOLDER`.

Only `rabbitllm` is instrumented. An exception that is no RabbitLLMError is a crash; one input may take `HANG_SECONDS`
of this process's own time, and all of it `MEMORY_BYTES` more memory than when it began. What was found is kept as files
in FOLDER/findings, one for each place in the code; the figures are in FOLDER/tally.json, at most a second old.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from types import FrameType

import atheris

with atheris.instrument_imports(include=["rabbitllm"]):
    from fuzz.targets import TARGETS, Target, seeds_of
    from rabbitllm.errors import RabbitLLMError

HANG_SECONDS = 5.0
MEMORY_BYTES = 1 << 30
MAX_INPUT_BYTES = 16 << 10
STRUCTURED = 0.8
"""The share of inputs that is changed in keeping with the format; atheris changes the others."""
AFRESH = 0.3
"""The share that is made of a sound seed: in what atheris keeps, nearly all is refused early."""


class HangError(BaseException):
    """Raised from the timer inside a reader; no reader can swallow it as an Exception."""


@dataclass(slots=True)
class Tally:
    """What came of it so far."""

    inputs: int = 0
    refused: int = 0
    believed: int = 0
    crashes: int = 0
    hangs: int = 0


class Fuzzer:
    """Runs inputs through a target and counts."""

    def __init__(self, target: Target, sound: Sequence[bytes], folder: Path, seconds: float) -> None:
        self.tally = Tally()
        self._sound = sound
        self._target = target
        self._folder = folder
        self._until = time.monotonic() + seconds
        self._noted = 0.0

    def one_input(self, data: bytes) -> None:
        """Called by atheris for each input."""
        self._keep_time()
        self.tally.inputs += 1
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_SECONDS)
        try:
            self._target.read(data)
            self.tally.believed += 1
        except RabbitLLMError:
            self.tally.refused += 1
        except HangError as error:
            self.tally.hangs += 1
            self._keep("hang", data, error)
        except BaseException as error:  # whatever it is, it is what is looked for
            self.tally.crashes += 1
            self._keep("crash", data, error)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def mutate(self, data: bytes, longest: int, seed: int) -> bytes:
        """Called by atheris for the next input."""
        random = Random(seed)
        if random.random() >= STRUCTURED:
            changed: bytes = atheris.Mutate(data, longest)
            return changed
        if random.random() < AFRESH:
            data = random.choice(self._sound)
        return self._target.mutate(data, random)[:longest]

    def _keep_time(self) -> None:
        now = time.monotonic()
        if now - self._noted > 1 or now > self._until:
            self._noted = now
            (self._folder / "tally.json").write_text(json.dumps(asdict(self.tally)))
        if now > self._until:
            os._exit(0)  # libFuzzer's loop has no other end

    def _keep(self, kind: str, data: bytes, error: BaseException) -> None:
        """The first input of each place, with the trace beside it."""
        frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-2:]]
        place = "hang" if kind == "hang" else f"{type(error).__name__} {frames}"
        name = f"{kind}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        path = self._folder / "findings" / name
        if not path.exists():
            path.write_bytes(data)
            path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))


def hang(_signal: int, _frame: FrameType | None) -> None:
    raise HangError


def main(name: str, seconds: float, folder: Path) -> None:
    target = TARGETS[name]
    corpus = folder / "corpus"
    for made in (corpus, folder / "findings"):
        made.mkdir(parents=True, exist_ok=True)
    sound = []
    for data in seeds_of(target):
        (corpus / hashlib.sha256(data).hexdigest()[:20]).write_bytes(data)
        with contextlib.suppress(Exception):  # atheris runs every seed again, and then it counts
            target.read(data)
            sound.append(data)
    fuzzer = Fuzzer(target, sound, folder, seconds)
    signal.signal(signal.SIGVTALRM, hang)
    flags = [f"-max_len={MAX_INPUT_BYTES}", f"-timeout={HANG_SECONDS * 12:.0f}", "-print_final_stats=0", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], fuzzer.one_input, custom_mutator=fuzzer.mutate)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
