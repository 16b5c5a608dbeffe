"""Steps for the tests of `benchmarks.gpu`, which end in every way that a step can; they need no torch."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator

from benchmarks.gpu.child import Place

Row = dict[str, object]


def two_rows(place: Place) -> Iterator[Row]:
    yield {"number": 1}
    yield {"number": 2}


two_rows_again = two_rows


def raises(place: Place) -> Iterator[Row]:
    yield {"number": 1}
    raise ValueError("this went wrong")


def dies(place: Place) -> Iterator[Row]:
    yield {"number": 1}
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def lacks_a_package(place: Place) -> Iterator[Row]:
    yield {"number": 1}
    importlib.import_module("no_such_package")


def is_wrong(place: Place) -> Iterator[Row]:
    yield {"number": 1, "ok": False}


def hangs(place: Place) -> Iterator[Row]:
    yield {"number": 1}
    time.sleep(600)


def hangs_once(place: Place) -> Iterator[Row]:
    mark = place.work / "hanging"
    if mark.exists():
        yield {"number": 2}
    else:
        mark.with_suffix(".new").write_text(str(os.getpid()))
        mark.with_suffix(".new").replace(mark)
        yield from hangs(place)


def counts(place: Place) -> Iterator[Row]:
    with (place.work / "counted").open("a+") as file:
        file.write("x")
        file.seek(0)
        yield {"runs": len(file.read())}
