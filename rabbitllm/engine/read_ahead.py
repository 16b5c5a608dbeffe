"""Reads resident weights ahead of the first pass, and compares them with their checksums.

Parameters that are views of mapped files are read when they are touched, a few pages at a time, while the processor
waits. A background thread reads them earlier, in the order of a pass and in larger pieces: the first token of a model
that was not in the page cache came in 0.6 of the time. Costs almost nothing if they are in the page cache already.

Other threads follow and compute checksums of the bytes. A unit waits for the comparison of its own bytes before its
first use only.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

from rabbitllm.base.forks import fail_unfinished, in_child
from rabbitllm.base.options import usable_cores
from rabbitllm.engine.span_reader import FileSpan, Paths
from rabbitllm.errors import ForkedError
from rabbitllm.storage.files import PositionalFile
from rabbitllm.store.checksums import GROUP_BYTES, LayerChecks

PIECE_BYTES = 4 << 20


class ReadAhead:
    """Reads in background threads, from the construction of this object until it is freed.

    Args:
        units: runs of bytes of each unit, in the order of a pass.
        store: provides the paths of the files.
        checks: compares the bytes with their checksums; None for no comparison.

    Attributes:
        threads: the background threads.
    """

    def __init__(
        self, units: Mapping[str, Sequence[FileSpan]], store: Paths, checks: LayerChecks | None = None
    ) -> None:
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        spans = [span for runs in units.values() for span in runs]
        work = [threading.Thread(target=_ask, args=(spans, store), name="read-ahead", daemon=True)]
        self._checked: dict[str, Future[None]] = {}
        self._units, self._checks = units, checks
        if checks is not None:
            self._checked = {unit: Future() for unit in units}
            waiting = iter(tuple(units.items()))  # each unit goes to one of the threads
            for _ in range(usable_cores() // 2):
                args = (waiting, checks, self._checked, stop)
                work.append(threading.Thread(target=_check, args=args, name="checksums", daemon=True))
        self.threads = tuple(work)
        in_child(self._fail_unfinished)
        for thread in work:
            thread.start()

    def is_checked(self, unit: str) -> bool:
        """Whether a unit's bytes were compared and are undamaged, or are not compared at all."""
        found = self._checked.get(unit)
        return found is None or (found.done() and found.exception() is None)

    def wait_for(self, unit: str) -> None:
        """Wait until a unit's bytes are compared with their checksums.

        Raises:
            IncompleteSplitError: a checksum differs.
            OSError: the bytes cannot be read.
        """
        if unit not in self._checked:
            return
        try:
            self._checked[unit].result()
        except ForkedError:
            assert self._checks is not None
            _compare(self._units[unit], self._checks, threading.Event())
            self._checked.pop(unit, None)

    def _fail_unfinished(self) -> None:
        fail_unfinished(self._checked.values())


def _ask(spans: Sequence[FileSpan], store: Paths) -> None:
    with contextlib.suppress(OSError):  # the pass raises for missing or unreadable files
        for span in spans:
            end = span.offset + span.nbytes
            with PositionalFile(store.path(span.file)) as file:
                for at in range(span.offset, end, PIECE_BYTES):
                    file.will_need(at, min(PIECE_BYTES, end - at))


def _check(
    waiting: Iterator[tuple[str, Sequence[FileSpan]]],
    checks: LayerChecks,
    told: Mapping[str, Future[None]],
    stop: threading.Event,
) -> None:
    for unit, spans in waiting:
        try:
            _compare(spans, checks, stop)
        except Exception as error:
            told[unit].set_exception(error)
        else:
            told[unit].set_result(None)


def _compare(spans: Sequence[FileSpan], checks: LayerChecks, stop: threading.Event) -> None:
    for span in spans:
        at, end = span.offset, span.offset + span.nbytes
        while at < end and not stop.is_set():
            piece = min(end, (at // GROUP_BYTES + 1) * GROUP_BYTES) - at
            checks.stored(span.file, [(at, piece)])
            at += piece
